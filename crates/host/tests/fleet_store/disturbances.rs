//! What follows the records sees each state, whatever happens to etcd and to the connections: after each of many random disturbances it
//! has what etcd has, within 2 seconds.
//!
//!   SPILLWAY_ETCD_DISTURBANCES   how many for each version of etcd (40)
//!   SPILLWAY_SEED                seed of the choices

use crate::scene::{PREFIX, Scene, Told, put, until, with_both, writing};
use spillway_fleet::keys::Key;
use spillway_fleet::transaction::{Outcome, Write};
use spillway_host::fleet::etcd::{FleetStore, FleetStoreError};
use spillway_testkit::Rng;
use spillway_testkit::etcd::{EtcdProgram, ProxyMode};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

with_both!(a_follower_sees_every_state);

/// How soon a follower has what etcd has.
const SOON: Duration = Duration::from_secs(2);

/// What is the matter with one member, until it is healed.
#[derive(Clone, Copy, Debug)]
enum Trouble {
    Killed(usize),
    Frozen(usize),
    Behind(usize, ProxyMode),
}

struct Course {
    scene: Scene,
    rng: Rng,
    trouble: Option<Trouble>,
    writer: FleetStore,
    reader: FleetStore,
    told: Arc<Mutex<Told>>,
}

async fn a_follower_sees_every_state(program: EtcdProgram) {
    let number = |name: &str| std::env::var(name).ok().map(|text| text.parse().unwrap());
    let (disturbances, seed) =
        (number("SPILLWAY_ETCD_DISTURBANCES").unwrap_or(40), number("SPILLWAY_SEED").unwrap_or(1));
    println!("SPILLWAY_SEED={seed}");
    let Some(scene) = Scene::new(3, program) else { return };
    let (writer, reader) = (FleetStore::open(scene.settings()), FleetStore::open(scene.settings()));
    let told = Told::by(reader.follow());
    let mut course = Course { scene, rng: Rng::new(seed), trouble: None, writer, reader, told };
    let mut slowest = Duration::ZERO;
    let mut took = Vec::new();
    for step in 0..disturbances {
        course.write().await;
        let what = course.disturb().await;
        course.write().await;
        let late = course.compare(&format!("disturbance {step} of seed {seed}: {what}")).await;
        if late > SOON / 2 {
            println!("{late:?} after disturbance {step}: {what}");
        }
        slowest = slowest.max(late);
        took.push(late);
    }
    took.sort();
    let told = course.told.lock().unwrap();
    println!(
        "{program:?}: after {disturbances} disturbances the same within {:?} (p50), {slowest:?} (worst); {} lists, {} updates",
        took[took.len() / 2],
        told.wholes,
        told.sizes.len()
    );
    assert!(told.wrong.is_empty(), "{:?}", told.wrong);
    assert!(told.wholes > 1, "something was disturbed");
    assert!(told.sizes.len() > told.wholes, "some of it came by watches");
}

impl Course {
    /// Writes some records, as well as it goes.
    async fn write(&mut self) {
        for _ in 0..self.rng.below(6) {
            let host = format!("h{}", self.rng.below(40));
            let write = match self.rng.below(4) {
                0 => Write::Delete(Key::Status(host.parse().unwrap())),
                _ => put(&host, &self.rng.next_u64().to_string()),
            };
            match self.writer.commit(&writing(vec![write])).await {
                Ok(Outcome::Applied(_)) => {}
                Err(FleetStoreError::NoMember(_) | FleetStoreError::Unanswered(..)) => {}
                other => panic!("{other:?}"),
            }
        }
    }

    /// Disturbs etcd or the connections. At most one member is in trouble, so that etcd goes on.
    async fn disturb(&mut self) -> String {
        let any = self.rng.below(self.scene.cluster.len() as u64) as usize;
        // More often than not it is the member that matters.
        let asked = if self.rng.below(3) == 0 { any } else { self.scene.member_of(&self.reader).await };
        let choice = self.rng.below(9);
        match choice {
            0 => {
                self.scene.cluster.compact().unwrap();
                return "compaction".into();
            }
            1 => {
                self.scene.proxies.iter().for_each(|proxy| proxy.cut());
                return "all connections cut".into();
            }
            // What the watch has missed meanwhile is compacted away.
            2 => {
                self.heal();
                self.scene.proxies.iter().for_each(|proxy| proxy.set_mode(ProxyMode::Stalls));
                for i in 0..4 {
                    self.scene.cluster.put(&format!("{PREFIX}status/direct-{i}"), &i.to_string()).unwrap();
                }
                self.scene.cluster.compact().unwrap();
                self.scene.proxies.iter().for_each(|proxy| proxy.cut());
                self.scene.proxies.iter().for_each(|proxy| proxy.set_mode(ProxyMode::Passes));
                return "compaction while all connections stall".into();
            }
            3 => {
                self.heal();
                return "healed".into();
            }
            _ => {}
        }
        self.heal();
        let trouble = match choice {
            4 => Trouble::Killed(asked),
            5 => Trouble::Frozen(asked),
            6 => Trouble::Behind(asked, ProxyMode::Stalls),
            7 => Trouble::Behind(asked, ProxyMode::Swallows),
            _ => {
                let leader = self.scene.cluster.leader().unwrap_or(any);
                if self.rng.below(2) == 0 { Trouble::Killed(leader) } else { Trouble::Frozen(leader) }
            }
        };
        match trouble {
            Trouble::Killed(member) => self.scene.cluster.kill(member),
            Trouble::Frozen(member) => self.scene.cluster.freeze(member).unwrap(),
            Trouble::Behind(member, mode) => self.scene.proxies[member].set_mode(mode),
        }
        self.trouble = Some(trouble);
        format!("{trouble:?}")
    }

    fn heal(&mut self) {
        match self.trouble.take() {
            Some(Trouble::Killed(member)) => {
                self.scene.cluster.restart(member).unwrap();
                self.scene.cluster.wait_ready(member).unwrap();
            }
            Some(Trouble::Frozen(member)) => self.scene.cluster.thaw(member).unwrap(),
            Some(Trouble::Behind(member, _)) => self.scene.proxies[member].set_mode(ProxyMode::Passes),
            None => {}
        }
    }

    /// Waits until the follower has what etcd has, and a write that was made meanwhile without the proxies. The time from its answer, for
    /// which etcd may have had to elect a leader.
    async fn compare(&mut self, what: &str) -> Duration {
        let mut truth = None;
        let value = self.rng.next_u64().to_string();
        until(&format!("etcd answers after {what}"), Duration::from_secs(15), || {
            let written = self.scene.cluster.put(&format!("{PREFIX}status/last"), &value);
            truth = written.and_then(|()| self.scene.cluster.records(PREFIX)).ok();
            truth.is_some()
        })
        .await;
        let (_, mut records) = truth.unwrap();
        let (mut begun, mut changed) = (Instant::now(), 0);
        loop {
            if self.told.lock().unwrap().records == records {
                return begun.elapsed();
            }
            if begun.elapsed() > SOON {
                // A write whose answer did not come may have been applied by a member that went on late.
                let now = self.scene.cluster.records(PREFIX).unwrap().1;
                if now == records {
                    let told = self.told.lock().unwrap();
                    panic!(
                        "not the same within {SOON:?} after {what}: at {}, {:?}\n{:?}\n{records:?}",
                        told.revision,
                        self.reader.health().borrow(),
                        told.records
                    );
                }
                changed += 1;
                assert!(changed < 3, "who writes after the disturbance is over ({what})?");
                (records, begun) = (now, Instant::now());
            }
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }
}
