//! Transactions, and following records with nothing in the way.

use crate::scene::{PREFIX, Scene, Told, apply, name, put, until, with_both, writing};
use spillway_fleet::keys::Key;
use spillway_fleet::transaction::{Comparison, Outcome, Transaction, Write};
use spillway_host::fleet::etcd::{FleetStore, FleetStoreError};
use spillway_testkit::etcd::EtcdProgram;
use std::time::{Duration, Instant};

with_both!(a_transaction_compares all_pages_are_read changes_of_a_revision_stay_together a_write_is_seen_soon a_watch_goes_on_while_nothing_changes
    hosts_that_were_not_seen_are_told_of);

const SOON: Duration = Duration::from_secs(5);

async fn a_transaction_compares(program: EtcdProgram) {
    let Some(scene) = Scene::new(1, program) else { return };
    let store = FleetStore::open(scene.settings());
    let meta = |comparison, value: &str| Transaction {
        comparisons: vec![comparison],
        writes: vec![Write::Put(Key::Meta, value.into()), put("a", value)],
    };
    let created = Comparison::Created(Key::Meta, 0);
    let first = match store.commit(&meta(created.clone(), "1")).await {
        Ok(Outcome::Applied(revision)) => revision,
        other => panic!("{other:?}"),
    };
    assert_eq!(store.commit(&meta(created, "2")).await, Ok(Outcome::Conflict));
    let Ok(Outcome::Applied(second)) = store.commit(&meta(Comparison::Modified(Key::Meta, first), "3")).await
    else {
        panic!("the record is as it was written")
    };
    assert_eq!(store.commit(&meta(Comparison::Modified(Key::Meta, first), "4")).await, Ok(Outcome::Conflict));
    let (_, records) = scene.cluster.records(PREFIX).unwrap();
    assert_eq!(records.keys().collect::<Vec<_>>(), ["meta", "status/a"]);
    let meta_record = &records["meta"];
    assert_eq!((meta_record.value.as_str(), meta_record.created, meta_record.modified), ("3", first, second));
    let delete = writing(vec![Write::Delete(Key::Meta), Write::Delete(Key::Host(name("none")))]);
    assert!(matches!(store.commit(&delete).await, Ok(Outcome::Applied(revision)) if revision > second));
    // More than etcd takes.
    let large = writing(vec![put("a", &"x".repeat(2 << 20))]);
    assert!(matches!(store.commit(&large).await, Err(FleetStoreError::TooLarge(..))));
}

/// Otherwise a claim is repeated that a host has of which nobody has heard yet.
async fn hosts_that_were_not_seen_are_told_of(program: EtcdProgram) {
    let Some(scene) = Scene::new(1, program) else { return };
    let store = FleetStore::open(scene.settings());
    let before = apply(&store, vec![put("a", "report")]).await;
    let mut newest = before;
    for key in [Key::Host(name("a")), Key::Alive(name("a"))] {
        let seen = apply(&store, vec![Write::Put(key.clone(), "x".into())]).await;
        assert_eq!(store.revision_of_all_hosts(seen).await, Ok(seen), "{key}");
        assert_eq!(store.revision_of_all_hosts(seen - 1).await, Ok(seen), "{key}");
        newest = seen;
    }
    // What is written again, or elsewhere, is no host that is new.
    let seen = apply(&store, vec![put("b", "report")]).await;
    apply(&store, vec![Write::Put(Key::Host(name("a")), "y".into()), put("c", "report")]).await;
    assert_eq!(store.revision_of_all_hosts(seen).await, Ok(seen));
    // Not the revision of etcd, which others use, too: the records of the fleet may never get there.
    assert_eq!(store.revision_of_all_hosts(before).await, Ok(newest));
    // An etcd that was restored knows nothing of what came later.
    assert!(matches!(store.revision_of_all_hosts(seen + 100).await, Err(FleetStoreError::Invalid(_))));
}

/// Otherwise all hosts of a fleet at rest list all records every 1.5 s, and each takes its member for one that is silent.
async fn a_watch_goes_on_while_nothing_changes(program: EtcdProgram) {
    let Some(scene) = Scene::new(1, program) else { return };
    let store = FleetStore::open(scene.settings());
    let (first, second) = (put("a", "first"), put("a", "second"));
    let listed = apply(&store, vec![first]).await;
    let told = Told::by(store.follow());
    until("the list", SOON, || told.lock().unwrap().wholes == 1).await;
    // Twice the time in which a watch that is silent is asked, and has to answer.
    let rest = tokio::time::Instant::now() + Duration::from_secs(3);
    while tokio::time::Instant::now() < rest {
        assert_eq!(store.health().borrow().follow_failure, None);
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    let revision = apply(&store, vec![second]).await;
    until("the update", SOON, || told.lock().unwrap().revision >= revision).await;
    let told = told.lock().unwrap();
    assert_eq!((told.wholes, told.moments.len(), &told.wrong[..]), (1, 1, &[][..]), "{listed} comes once");
}

async fn all_pages_are_read(program: EtcdProgram) {
    let Some(scene) = Scene::new(1, program) else { return };
    let store = FleetStore::open(scene.settings());
    // More than a page by number, and then more than a message by size.
    for part in 0..20 {
        let key = |i: usize| put(&format!("h{part}-{i}"), "{}");
        apply(&store, (0..110).map(key).collect()).await;
    }
    for part in 0..16 {
        apply(&store, vec![put(&format!("large-{part}"), &"x".repeat(1_300_000))]).await;
    }
    scene.cluster.put("/spillway/site-2/meta", "another fleet").unwrap();
    scene.cluster.put("/spillway/site", "no record").unwrap();
    let told = Told::by(store.follow());
    until("the first list", SOON, || told.lock().unwrap().wholes > 0).await;
    let (_, records) = scene.cluster.records(PREFIX).unwrap();
    assert_eq!(records.len(), 2_216);
    let told = told.lock().unwrap();
    assert_eq!((told.wholes, told.sizes.as_slice()), (1, &[2_216][..]));
    assert!(told.records == records, "the list is what etcd has");
}

async fn changes_of_a_revision_stay_together(program: EtcdProgram) {
    let Some(scene) = Scene::new(1, program) else { return };
    let store = FleetStore::open(scene.settings());
    let told = Told::by(store.follow());
    until("the first list", SOON, || told.lock().unwrap().wholes > 0).await;
    let writes = |value: &str| (0..128).map(|i| put(&format!("h{i}"), value)).collect();
    let revision = apply(&store, writes(&"x".repeat(8_000))).await;
    until("the update", SOON, || told.lock().unwrap().revision == revision).await;
    assert_eq!(told.lock().unwrap().sizes, [0, 128]);
    // A follower that comes later is told the same.
    let other = Told::by(store.follow());
    until("the list", SOON, || other.lock().unwrap().wholes > 0).await;
    assert!(other.lock().unwrap().records == told.lock().unwrap().records);
    // Deletions, too.
    let delete = (0..128).map(|i| Write::Delete(Key::Status(name(&format!("h{i}"))))).collect();
    apply(&store, delete).await;
    until("the deletion", SOON, || told.lock().unwrap().records.is_empty()).await;
    assert!(told.lock().unwrap().wrong.is_empty());
}

async fn a_write_is_seen_soon(program: EtcdProgram) {
    const WRITES: usize = 300;
    let Some(scene) = Scene::new(3, program) else { return };
    let (writer, reader) = (FleetStore::open(scene.settings()), FleetStore::open(scene.settings()));
    let told = Told::by(reader.follow());
    until("the first list", SOON, || told.lock().unwrap().wholes > 0).await;
    let mut sent = Vec::new();
    for i in 0..WRITES {
        let at = Instant::now();
        sent.push((apply(&writer, vec![put("a", &i.to_string())]).await, at, at.elapsed()));
    }
    let last = sent.last().unwrap().0;
    until("the last update", SOON, || told.lock().unwrap().revision == last).await;
    let told = told.lock().unwrap();
    let seen = |revision| told.moments.iter().find(|(at, _)| *at >= revision).unwrap().1;
    let mut late: Vec<Duration> = sent.iter().map(|(revision, at, _)| seen(*revision) - *at).collect();
    let mut answered: Vec<Duration> = sent.iter().map(|(_, _, took)| *took).collect();
    late.sort();
    answered.sort();
    let of = |all: &[Duration], percent: usize| all[all.len() * percent / 100];
    println!(
        "{program:?}: a write is answered after {:?} (p50), {:?} (p99), and seen after {:?} (p50), {:?} (p99)",
        of(&answered, 50),
        of(&answered, 99),
        of(&late, 50),
        of(&late, 99),
    );
    assert_eq!(told.wholes, 1, "nothing was missed");
    assert!(of(&late, 99) < Duration::from_secs(1), "{late:?}");
}
