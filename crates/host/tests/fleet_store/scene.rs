//! A cluster with a proxy in front of each member, a store that asks through them, and what it has said.

use spillway_api::Name;
use spillway_fleet::keys::Key;
use spillway_fleet::transaction::{Outcome, Transaction, Write};
use spillway_fleet::view::Update;
use spillway_host::fleet::etcd::{EtcdReach, FleetStore, FleetStoreError, FleetStoreSettings};
use spillway_testkit::etcd::{EtcdCluster, EtcdOptions, EtcdProgram, EtcdProxy, EtcdRecord};
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};
use tokio::sync::mpsc;

/// A test for each version of etcd.
macro_rules! with_both {
    ($($name:ident)*) => {
        $(mod $name {
            use spillway_testkit::etcd::EtcdProgram;

            #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn with_3_4() {
                super::$name(EtcdProgram::Debian34).await;
            }

            #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn with_3_6() {
                super::$name(EtcdProgram::Go36).await;
            }
        })*
    };
}
pub(crate) use with_both;

/// Below what the fleet of the tests is.
pub const PREFIX: &str = "/spillway/site/";

/// A cluster; none, and it is said, where there is no such etcd.
pub fn cluster(members: usize, program: EtcdProgram, options: &EtcdOptions) -> Option<EtcdCluster> {
    if let Err(why) = program.path() {
        spillway_testkit::skip(&format!("no etcd {program:?} here: {why:#}"));
        return None;
    }
    Some(EtcdCluster::start_with(members, program, options).unwrap())
}

/// A cluster, and a proxy in front of each member.
pub struct Scene {
    pub cluster: EtcdCluster,
    pub proxies: Vec<EtcdProxy>,
}

impl Scene {
    pub fn new(members: usize, program: EtcdProgram) -> Option<Scene> {
        let cluster = cluster(members, program, &EtcdOptions::default())?;
        let proxy = |member| EtcdProxy::start(cluster.client_address(member)).unwrap();
        let proxies = (0..members).map(proxy).collect();
        Some(Scene { cluster, proxies })
    }

    /// Settings of a store that asks through the proxies.
    pub fn settings(&self) -> FleetStoreSettings {
        let members: Vec<String> = self.proxies.iter().map(|proxy| proxy.address().to_string()).collect();
        settings(&members.join(","))
    }

    /// The member that a store asks now.
    pub async fn member_of(&self, store: &FleetStore) -> usize {
        let mut health = store.health();
        let reached = health.wait_for(|health| matches!(health.reach, EtcdReach::Reached { .. }));
        let reached = tokio::time::timeout(Duration::from_secs(10), reached).await.unwrap().unwrap();
        let EtcdReach::Reached { member, .. } = &reached.reach else { panic!("it is reached") };
        self.proxies.iter().position(|proxy| proxy.address().to_string() == *member).unwrap()
    }
}

/// Settings of a store of these members, without TLS.
pub fn settings(members: &str) -> FleetStoreSettings {
    let address = format!("etcd://{members}/site").parse().unwrap();
    FleetStoreSettings { address, tls: None, user: None }
}

/// Why a store does nothing.
pub async fn refusal(store: &FleetStore) -> FleetStoreError {
    store.commit(&writing(vec![put("a", "x")])).await.unwrap_err()
}

/// Version of the member that a store has reached.
pub async fn version(store: &FleetStore) -> String {
    let mut health = store.health();
    let reached = health.wait_for(|health| matches!(health.reach, EtcdReach::Reached { .. }));
    let reached = tokio::time::timeout(Duration::from_secs(10), reached).await.unwrap().unwrap();
    reached.last.as_ref().unwrap().version.clone()
}

pub fn name(text: &str) -> Name {
    text.parse().unwrap()
}

/// A transaction that writes without comparisons.
pub fn writing(writes: Vec<Write>) -> Transaction {
    Transaction { comparisons: Vec::new(), writes }
}

pub fn put(host: &str, value: &str) -> Write {
    Write::Put(Key::Status(name(host)), value.into())
}

/// Revision of a transaction that was applied.
pub async fn apply(store: &FleetStore, writes: Vec<Write>) -> i64 {
    match store.commit(&writing(writes)).await {
        Ok(Outcome::Applied(revision)) => revision,
        other => panic!("it was not applied: {other:?}"),
    }
}

/// The same, again until it is: of a write that may be there twice.
pub async fn apply_at_last(store: &FleetStore, writes: Vec<Write>) -> i64 {
    let until = Instant::now() + Duration::from_secs(20);
    loop {
        match store.commit(&writing(writes.clone())).await {
            Ok(Outcome::Applied(revision)) => return revision,
            other => assert!(Instant::now() < until, "it is not applied: {other:?}"),
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

/// What a follower has been told.
#[derive(Default)]
pub struct Told {
    pub revision: i64,
    pub records: BTreeMap<String, EtcdRecord>,
    /// How many lists of all records came.
    pub wholes: usize,
    /// When revisions came, those of lists left out.
    pub moments: Vec<(i64, Instant)>,
    /// How many records each update had.
    pub sizes: Vec<usize>,
    /// What was wrong with updates.
    pub wrong: Vec<String>,
}

impl Told {
    /// Takes updates until they end.
    pub fn by(mut updates: mpsc::Receiver<Update>) -> Arc<Mutex<Told>> {
        let told = Arc::new(Mutex::new(Told::default()));
        let of_task = Arc::clone(&told);
        tokio::spawn(async move {
            while let Some(update) = updates.recv().await {
                of_task.lock().unwrap().take(update);
            }
        });
        told
    }

    fn take(&mut self, update: Update) {
        let read = |entry: spillway_fleet::view::Entry| EtcdRecord {
            value: String::from_utf8(entry.value).unwrap(),
            created: entry.created,
            modified: entry.modified,
        };
        match update {
            Update::Whole(revision, entries) => {
                if revision < self.revision {
                    self.wrong.push(format!("a list of {revision} came after {}", self.revision));
                }
                self.sizes.push(entries.len());
                self.records = entries.into_iter().map(|(key, entry)| (key, read(entry))).collect();
                (self.revision, self.wholes) = (revision, self.wholes + 1);
            }
            Update::Changes(revision, changes) => {
                if revision <= self.revision || changes.is_empty() {
                    self.wrong.push(format!("changes of {revision} came after {}", self.revision));
                }
                self.sizes.push(changes.len());
                for (key, entry) in changes {
                    match entry {
                        Some(entry) => drop(self.records.insert(key, read(entry))),
                        None => drop(self.records.remove(&key)),
                    }
                }
                self.revision = revision;
                self.moments.push((revision, Instant::now()));
            }
        }
    }
}

/// Waits until something holds.
pub async fn until(what: &str, deadline: Duration, mut holds: impl FnMut() -> bool) -> Duration {
    let begun = Instant::now();
    while !holds() {
        assert!(begun.elapsed() < deadline, "not within {deadline:?}: {what}");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    begun.elapsed()
}
