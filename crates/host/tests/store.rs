//! The state store: transactions, watchers, and what is left after a death.
#![allow(clippy::unwrap_used)]

use serde::{Deserialize, Serialize};
use spillway_host::store::{
    Changes, Expect, Objects, Revision, SqliteStore, Store, StoreError, StoredRecord, Transaction,
};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
struct Thing {
    n: u64,
}

impl StoredRecord for Thing {
    const PREFIX: &'static str = "things/";
    const WORD: &'static str = "thing";
}

fn put(key: &str, value: &str) -> (String, Option<Vec<u8>>) {
    (key.into(), Some(value.into()))
}

#[test]
fn a_transaction_happens_whole_or_not_at_all() {
    let dir = tempfile::tempdir().unwrap();
    let store = SqliteStore::open(&dir.path().join("db")).unwrap();
    let first = Transaction {
        expects: vec![("a".into(), Expect::Absent)],
        changes: vec![put("a", "1"), put("b", "2"), put("b", "3")],
    };
    assert_eq!(store.commit(&first).unwrap(), Revision(1));
    let conflict = store.commit(&first);
    assert!(matches!(conflict, Err(StoreError::Conflict(key)) if key == "a"));
    assert_eq!(store.get("b").unwrap().unwrap().value, b"3", "the last of a key counts");
    let second = Transaction {
        expects: vec![
            ("a".into(), Expect::Unchanged(Revision(1))),
            ("b".into(), Expect::Unchanged(Revision(1))),
        ],
        changes: vec![put("b", "4"), ("a".into(), None)],
    };
    assert_eq!(store.commit(&second).unwrap(), Revision(2));
    assert!(matches!(store.commit(&second), Err(StoreError::Conflict(_))));
    assert_eq!((store.get("a").unwrap(), store.get("b").unwrap().unwrap().revision), (None, Revision(2)));
}

#[test]
fn lists_are_of_one_prefix_and_in_order() {
    let dir = tempfile::tempdir().unwrap();
    let store = SqliteStore::open(&dir.path().join("db")).unwrap();
    let keys = ["x/b", "x/a", "x", "x/", "x0", "y/a", "w/z", "x/\u{7f}"];
    let changes = keys.iter().map(|key| put(key, "1")).collect();
    store.commit(&Transaction { expects: vec![], changes }).unwrap();
    let found = |prefix| -> Vec<String> {
        store.list(prefix).unwrap().0.into_iter().map(|entry| entry.key).collect()
    };
    assert_eq!(found("x/"), ["x/", "x/a", "x/b", "x/\u{7f}"]);
    assert_eq!(found("").len(), keys.len());
    assert_eq!(found("z"), [""; 0]);
}

#[test]
fn pages_follow_each_other() {
    let dir = tempfile::tempdir().unwrap();
    let store = SqliteStore::open(&dir.path().join("db")).unwrap();
    let mut changes: Vec<_> =
        (0..7).map(|n| put(&format!("things/{n}"), &format!(r#"{{"n":{n}}}"#))).collect();
    changes.extend([put("thing", "1"), put("things", "1"), put("things0", "1"), put("z", "1")]);
    store.commit(&Transaction { expects: vec![], changes }).unwrap();
    let keys = |after, most| -> Vec<String> {
        store.page("things/", after, most).unwrap().into_iter().map(|entry| entry.key).collect()
    };
    assert_eq!(keys("", 2), ["things/0", "things/1"]);
    assert_eq!(keys("things/1", 2), ["things/2", "things/3"]);
    assert_eq!(keys("things/5", 9), ["things/6"]);
    assert_eq!((keys("things/6", 2), keys("z", 2)), (vec![], vec![]));
    assert_eq!(
        (store.count("things/").unwrap(), store.count("").unwrap(), store.count("x").unwrap()),
        (7, 11, 0)
    );
    let objects = Objects::new(Arc::new(store));
    let each =
        |after| objects.each_after::<Thing>(after).map(|thing| thing.unwrap().value.n).collect::<Vec<_>>();
    assert_eq!((each(""), each("4"), each("6")), ((0..7).collect(), vec![5, 6], vec![]));
}

#[test]
fn what_was_committed_is_there_after_the_end_and_one_daemon_has_it() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("db");
    let store = SqliteStore::open(&path).unwrap();
    store.commit(&Transaction { expects: vec![], changes: vec![put("a", "1")] }).unwrap();
    assert!(matches!(SqliteStore::open(&path), Err(StoreError::Failed(_))));
    drop(store);
    let store = SqliteStore::open(&path).unwrap();
    let (entries, revision) = store.list("").unwrap();
    assert_eq!((entries[0].value.as_slice(), revision), (&b"1"[..], Revision(1)));
}

#[test]
fn watchers_hear_of_every_transaction_in_order() {
    let dir = tempfile::tempdir().unwrap();
    let store = Arc::new(SqliteStore::open(&dir.path().join("db")).unwrap());
    let mut watch = store.watch();
    std::thread::scope(|scope| {
        for thread in 0..4 {
            let store = &store;
            scope.spawn(move || {
                for n in 0..50 {
                    let changes = vec![put(&format!("{thread}/{n}"), "1")];
                    store.commit(&Transaction { expects: vec![], changes }).unwrap();
                }
            });
        }
    });
    for revision in 1..=200 {
        let changed = watch.try_recv().unwrap();
        assert_eq!((changed.revision, changed.keys.len()), (Revision(revision), 1));
    }
    assert!(watch.try_recv().is_err());
}

#[test]
fn changes_are_decided_anew_until_nobody_was_faster() {
    let dir = tempfile::tempdir().unwrap();
    let objects = Objects::new(Arc::new(SqliteStore::open(&dir.path().join("db")).unwrap()));
    let add = |changes: &mut Changes| -> Result<(), StoreError> {
        let n = changes.get::<Thing>("sum")?.map_or(0, |thing| thing.value.n);
        changes.put("sum", &Thing { n: n + 1 });
        Ok(())
    };
    std::thread::scope(|scope| {
        (0..8).for_each(|_| _ = scope.spawn(|| (0..20).for_each(|_| objects.change(add).unwrap())));
    });
    assert_eq!(objects.get::<Thing>("sum").unwrap().unwrap().value, Thing { n: 160 });
}

/// What takes long to decide is done beside somebody who is always faster: at last it has a turn of its own.
#[test]
fn a_slow_decision_gets_its_turn() {
    let dir = tempfile::tempdir().unwrap();
    let objects = Objects::new(Arc::new(SqliteStore::open(&dir.path().join("db")).unwrap()));
    let add = |changes: &mut Changes| -> Result<u64, StoreError> {
        let n = changes.get::<Thing>("hot")?.map_or(0, |thing| thing.value.n) + 1;
        changes.put("hot", &Thing { n });
        Ok(n)
    };
    let ends = AtomicBool::new(false);
    let mut attempts = 0;
    let decided = std::thread::scope(|scope| {
        scope.spawn(|| {
            while !ends.load(Ordering::Relaxed) {
                objects.change(add).unwrap();
            }
        });
        let decided = objects.change(|changes| -> Result<(), StoreError> {
            attempts += 1;
            add(changes)?;
            let seen = objects.get::<Thing>("hot")?.map(|thing| thing.revision);
            // Until somebody was faster, or, later, evidently nobody can be.
            let patience = Duration::from_millis(if attempts == 1 { 20_000 } else { 500 });
            let begun = Instant::now();
            while objects.get::<Thing>("hot")?.map(|thing| thing.revision) == seen
                && begun.elapsed() < patience
            {
                std::thread::yield_now();
            }
            Ok(())
        });
        ends.store(true, Ordering::Relaxed);
        decided
    });
    decided.unwrap();
    assert!(attempts > 1, "nobody was faster: nothing was tested");
}
