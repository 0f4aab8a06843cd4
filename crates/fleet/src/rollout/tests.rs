//! Tests of rollouts over hosts: the placer on a store that answers at once, and requests of people. Hosts report what the tests say.

use super::*;
use crate::agent::wanted;
use crate::changes::{create_catalog, delete_catalog, replace_catalog, roll_back_catalog, update_catalog};
use crate::driver::Driver;
use crate::keys::Key;
use crate::sample::{GIB, name};
use crate::transaction::{Outcome, Transaction};
use serde_json::{Value, json};
use spillway_api::{FleetCatalogSpec, FleetCatalogUpdate, RolloutAction};
use std::collections::BTreeSet;

/// A catalog `desk` with machines on each of the hosts.
struct World {
    driver: Driver,
}

fn now() -> jiff::Timestamp {
    "2026-01-02T00:00:00Z".parse().unwrap()
}

impl World {
    fn new(hosts: usize, each: u32, settings: Value) -> World {
        let mut driver = Driver::new();
        (0..hosts).for_each(|n| driver.fleet.host(&format!("h{n}"), "x"));
        driver.fleet.catalog("desk", hosts as u32 * each, settings);
        let history = json!([{ "image": "debian", "version": 1, "since": "2026-01-01T00:00:00Z" }]);
        driver.fleet.set("catalogs/desk", json!({ "history": history }));
        driver.settle();
        let mut world = World { driver };
        world.hosts().iter().for_each(|host| world.well(host));
        assert_eq!(world.driver.settle(), 0);
        world
    }

    fn hosts(&self) -> Vec<String> {
        self.driver.fleet.counts("desk").into_iter().map(|(host, _)| host).collect()
    }

    fn commit(&mut self, change: &Transaction) {
        assert!(matches!(self.driver.fleet.commit(change), Outcome::Applied(_)));
        self.driver.settle();
    }

    fn update(&mut self, version: u32) {
        let update = FleetCatalogUpdate { version, strategy: None, max_failed: 0, deadline_seconds: None };
        let change = update_catalog(self.driver.fleet.view(), &name("desk"), &update, None, now()).unwrap();
        self.commit(&change);
    }

    fn roll_back(&mut self) {
        let change = roll_back_catalog(self.driver.fleet.view(), &name("desk"), None, now()).unwrap();
        self.commit(&change);
    }

    fn ask(&mut self, action: RolloutAction) -> Result<(), String> {
        let asked = change_rollout(self.driver.fleet.view(), &name("desk"), action, now());
        let change = asked.map_err(|e| e.message)?;
        change.iter().for_each(|change| self.commit(change));
        Ok(())
    }

    /// All hosts have the version that is rolled out.
    fn bring(&mut self) {
        let to = self.record().to;
        for host in self.hosts() {
            self.change(
                &host,
                json!({ "next": { "image": to.image, "version": to.version, "is_here": true } }),
            );
        }
        self.driver.settle();
    }

    /// Changes what a host reports.
    fn change(&mut self, host: &str, fields: Value) {
        let mut status = self.driver.fleet.json(&format!("status/{host}"))["catalogs"]["desk"].clone();
        if status.is_null() {
            status = json!({});
        }
        let share = self.driver.fleet.view().share(&name(host), &name("desk"));
        status["generation"] = share.map_or(0, |share| share.value.generation).into();
        status.as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
        self.driver.fleet.report(host, "desk", status);
    }

    /// What a host has reported is what its share says.
    fn well(&mut self, host: &str) {
        let share = self.driver.fleet.view().share(&name(host), &name("desk")).unwrap().value.clone();
        let next = self.driver.fleet.json(&format!("status/{host}"))["catalogs"]["desk"]["next"].clone();
        let count = share.count;
        let status = json!({ "count": count, "ready": count, "updated": count, "version": share.version,
            "image": share.image, "generation": share.generation, "next": next });
        self.driver.fleet.report(host, "desk", status);
    }

    /// All hosts do what their shares say, and are well.
    fn all_well(&mut self) {
        self.hosts().iter().for_each(|host| self.well(host));
        self.driver.settle();
    }

    /// Hosts whose shares have a version.
    fn with(&self, version: u32) -> Vec<String> {
        let has = |host: &String| self.driver.fleet.json(&format!("share/{host}/desk"))["version"] == version;
        self.hosts().into_iter().filter(has).collect()
    }

    fn record(&self) -> RolloutRecord {
        self.driver.fleet.view().rollouts[&name("desk")].value.clone()
    }

    fn state(&self) -> FleetRolloutState {
        self.record().state
    }

    fn why(&self) -> String {
        assert_eq!(self.state(), FleetRolloutState::Halted);
        self.record().why.unwrap()
    }

    /// An update that has reached the hosts of the first wave.
    fn begun(hosts: usize, each: u32, settings: Value) -> (World, String) {
        let mut world = World::new(hosts, each, settings);
        world.update(2);
        world.bring();
        let started = world.with(2);
        assert_eq!((world.state(), started.len()), (FleetRolloutState::Running, 1));
        let first = started[0].clone();
        (world, first)
    }

    fn batch(&self, host: &str) -> Option<u32> {
        self.driver.fleet.view().share(&name(host), &name("desk")).unwrap().value.batch
    }
}

#[test]
fn a_version_reaches_hosts_wave_after_wave() {
    let mut world = World::new(20, 2, json!({}));
    world.update(2);
    assert_eq!((world.with(1).len(), world.state()), (20, FleetRolloutState::Prefetch));
    let generations =
        world.driver.fleet.view().shares.values().map(|shares| shares[&name("desk")].value.generation);
    assert!(generations.into_iter().all(|generation| generation == 2), "settings reach all at once");
    world.bring();
    let mut reached = Vec::new();
    for wave in [1, 2, 10, 20] {
        assert_eq!((world.with(2).len(), world.state()), (wave, FleetRolloutState::Running));
        assert!(reached.iter().all(|host| world.with(2).contains(host)));
        reached = world.with(2);
        assert_eq!(world.driver.after_s(5), 0, "nothing moves before they are done");
        world.all_well();
    }
    assert_eq!(world.state(), FleetRolloutState::Done);
    assert_eq!(world.driver.after_s(5), 0);
    let events = &world.driver.events;
    let told = |text: &str| events.iter().filter(|event| event.contains(text)).count();
    assert_eq!(told("the rollout of debian:2 begins: its hosts bring the version"), 1);
    assert_eq!(told("the rollout of debian:2 goes on with wave"), 4);
    assert_eq!(told("the rollout of debian:2 has reached all hosts"), 1);
}

#[test]
fn the_order_depends_on_version_and_names_alone() {
    let first = |version| {
        let mut world = World::new(12, 1, json!({}));
        world.update(version);
        world.bring();
        world.with(version)
    };
    assert_eq!(first(2), first(2));
    let firsts: BTreeSet<Vec<String>> = (2..8).map(first).collect();
    assert!(firsts.len() > 2, "another version begins elsewhere: {firsts:?}");
}

#[test]
fn waves_that_do_not_reach_all_hosts_are_followed_by_one_that_does() {
    let (mut world, _) = World::begun(5, 1, json!({ "waves": ["1", "1", "2"] }));
    world.all_well();
    assert_eq!(
        (world.with(2).len(), world.record().wave),
        (2, 2),
        "a wave that has no further host is passed"
    );
    world.all_well();
    assert_eq!(world.with(2).len(), 5);
    assert_eq!(
        world.record().waves(&world.driver.fleet.view().catalogs[&name("desk")].value.spec.fleet.waves),
        4
    );
}

#[test]
fn a_host_that_cannot_get_the_version_halts_before_any_machine_was_restarted() {
    let mut world = World::new(4, 2, json!({}));
    world.update(2);
    let next = json!({ "image": "debian", "version": 2, "failed": "the registry has none" });
    world.change("h2", json!({ "next": next }));
    world.driver.settle();
    assert_eq!(world.why(), "host 'h2' cannot get debian:2: the registry has none");
    world.bring();
    world.driver.after_s(700);
    assert_eq!((world.with(1).len(), world.state()), (4, FleetRolloutState::Halted));
    world.ask(RolloutAction::Resume).unwrap();
    assert_eq!(world.with(2).len(), 1);
}

#[test]
fn one_that_brings_nothing_halts_after_the_deadline() {
    let mut world = World::new(4, 2, json!({}));
    world.update(2);
    world.driver.after_s(300);
    let next = json!({ "image": "debian", "version": 2, "is_here": true });
    ["h0", "h1", "h3"].iter().for_each(|host| world.change(host, json!({ "next": next })));
    world.driver.settle();
    assert_eq!(world.driver.after_s(599), 0, "that was progress");
    world.driver.after_s(1);
    assert_eq!(world.why(), "no progress in 600 s: host 'h2' does not have debian:2 yet");
}

#[test]
fn what_a_host_waits_for_to_get_the_version_is_said() {
    let mut world = World::new(4, 2, json!({}));
    world.update(2);
    let next = json!({ "image": "debian", "version": 2, "waits": "the registry is away" });
    world.change("h2", json!({ "next": next }));
    world.driver.after_s(600);
    let why =
        "no progress in 600 s: host 'h0' and 3 more do not have debian:2 yet ('h2': the registry is away)";
    assert_eq!(world.why(), why);
}

#[test]
fn machines_that_fail_halt_it_and_it_stays_halted() {
    let (mut world, first) = World::begun(8, 5, json!({}));
    let other = world.with(1)[0].clone();
    world.change(&other, json!({ "failed": 3 }));
    world.driver.settle();
    assert_eq!(world.state(), FleetRolloutState::Running, "that host has the version of before");
    let bad = json!({ "version": 2, "ready": 3, "updated": 0, "failed": 2 });
    world.change(&first, bad);
    world.driver.settle();
    let why = format!("2 machines have failed with debian:2, the first of them on host '{first}'");
    assert_eq!(world.why(), why);
    world.all_well();
    assert_eq!(world.driver.after_s(1000), 0, "whatever hosts report, people decide");
    assert_eq!(world.with(2), std::slice::from_ref(&first));
    // Somebody takes it upon himself.
    world.change(&first, json!({ "version": 2, "ready": 3, "updated": 3, "failed": 2 }));
    world.ask(RolloutAction::Resume).unwrap();
    assert!(world.with(2).len() > 1, "it is done but for those that had failed");
    world.change(&first, json!({ "failed": 3 }));
    world.driver.settle();
    assert!(world.why().starts_with("3 machines have failed"));
}

#[test]
fn so_many_may_fail_as_were_said_and_as_had_failed_before() {
    let mut world = World::new(4, 5, json!({}));
    world
        .hosts()
        .iter()
        .for_each(|host| world.change(host, json!({ "ready": 4, "updated": 4, "failed": 1 })));
    let update = FleetCatalogUpdate { version: 2, strategy: None, max_failed: 1, deadline_seconds: Some(60) };
    let change = update_catalog(world.driver.fleet.view(), &name("desk"), &update, None, now()).unwrap();
    world.commit(&change);
    world.bring();
    let first = world.with(2)[0].clone();
    world.change(&first, json!({ "version": 2, "ready": 3, "updated": 2, "failed": 2 }));
    assert_eq!(world.driver.after_s(59), 0);
    assert_eq!(world.state(), FleetRolloutState::Running, "one had failed before, and one may");
    world.change(&first, json!({ "failed": 3 }));
    world.driver.settle();
    assert!(world.why().starts_with("2 machines have failed"), "{}", world.why());
}

/// Which machines have failed is not known, only how many.
#[test]
fn machines_that_had_failed_before_and_were_ready_since_count() {
    for (ready, halts) in [(5, true), (4, true), (3, false)] {
        let mut world = World::new(4, 5, json!({}));
        world
            .hosts()
            .iter()
            .for_each(|host| world.change(host, json!({ "ready": 3, "updated": 3, "failed": 2 })));
        world.update(2);
        world.bring();
        let first = world.with(2)[0].clone();
        world.change(&first, json!({ "version": 2, "ready": 3, "updated": 0, "failed": 2 }));
        assert_eq!(world.driver.settle(), 0);
        // They are started again, and fail again, or are ready.
        world.change(&first, json!({ "ready": ready, "updated": 2, "failed": 0 }));
        assert_eq!((world.driver.settle(), world.state()), (0, FleetRolloutState::Running));
        world.change(&first, json!({ "ready": 3, "updated": 2, "failed": 2 }));
        world.driver.settle();
        assert_eq!(world.state() == FleetRolloutState::Halted, halts, "{ready}");
        if halts {
            assert!(
                world.why().starts_with(&format!("{} machines have failed", ready - 3)),
                "{}",
                world.why()
            );
        }
    }
}

#[test]
fn what_makes_no_progress_halts_with_the_reason() {
    let (mut world, first) = World::begun(4, 5, json!({}));
    world.driver.after_s(500);
    world.change(&first, json!({ "version": 2, "ready": 4, "updated": 1 }));
    assert_eq!(world.driver.settle(), 0);
    assert_eq!(world.driver.after_s(599), 0);
    world.driver.after_s(1);
    let why = format!("no progress in 600 s: host '{first}' has 1 of 5 machines ready with debian:2");
    assert_eq!(world.why(), why);
    // Going to and fro is no progress.
    world.ask(RolloutAction::Resume).unwrap();
    for updated in [3, 2, 3, 2, 3, 2, 3] {
        world.change(&first, json!({ "updated": updated }));
        world.driver.after_s(100);
    }
    assert!(world.why().starts_with("no progress"));
}

/// Fields of a report: the host has refused a share of this generation and version.
fn refused(why: &str, generation: u64, version: u32) -> Value {
    let version = json!({ "image": "debian", "version": version });
    json!({ "refused": why, "refused_generation": generation, "refused_version": version })
}

/// A rollback has brought a version to all hosts, and one does not have it.
#[test]
fn a_host_that_refuses_the_version_that_it_is_to_have_now_gets_the_next_one() {
    let mut world = World::new(2, 3, json!({ "waves": ["1", "100%"] }));
    let hosts = world.hosts();
    for host in &hosts {
        let has = if *host == hosts[0] { 9 } else { 1 };
        world.change(host, json!({ "version": has }));
    }
    world.change(&hosts[0], refused("it is not there", 1, 1));
    world.update(2);
    world.bring();
    for _ in &hosts {
        let started = world.with(2);
        assert_eq!(world.state(), FleetRolloutState::Running, "what it has refused before halts nothing");
        started.iter().for_each(|host| world.well(host));
        world.driver.settle();
    }
    assert_eq!((world.state(), world.with(2).len()), (FleetRolloutState::Done, 2));
}

#[test]
fn a_host_that_refuses_or_is_lost_halts_it() {
    let (mut world, first) = World::begun(4, 5, json!({}));
    world.change(&first, refused("no space", 2, 2));
    world.driver.after_s(29);
    assert_eq!(world.state(), FleetRolloutState::Running, "it may be what it has reported before");
    world.driver.after_s(1);
    let refuses = format!("host '{first}' refuses debian:2: no space");
    assert_eq!(world.why(), refuses);
    // It was mended, and the host says so with its next report.
    world.ask(RolloutAction::Resume).unwrap();
    world.driver.after_s(10);
    let other = json!({ "image": "other", "version": 2 });
    for (what, before) in [
        ("an earlier share", refused("no space", 1, 2)),
        ("another version", refused("no space", 2, 1)),
        ("another image", json!({ "refused_version": other })),
    ] {
        world.change(&first, before);
        world.driver.after_s(60);
        assert_eq!(world.state(), FleetRolloutState::Running, "{what}");
    }
    let waits = world.driver.status().waits[&name("desk")].clone();
    assert_eq!(waits, format!("host '{first}' refuses its share: no space"));
    world.change(&first, refused("no space", 2, 2));
    world.driver.settle();
    assert_eq!(world.why(), refuses);
    // Daemons that cannot read their share do not say which version they refuse.
    let (mut world, first) = World::begun(4, 5, json!({}));
    world.driver.after_s(30);
    world.change(&first, json!({ "refused": "the share cannot be read" }));
    world.driver.settle();
    assert_eq!(world.why(), format!("host '{first}' refuses debian:2: the share cannot be read"));
    let (mut world, first) = World::begun(5, 2, json!({}));
    world.driver.fleet.end_lease(&first);
    world.driver.after_s(60);
    assert_eq!(world.driver.fleet.count(&first, "desk"), 0, "its machines are placed elsewhere");
    assert_eq!(world.why(), format!("host '{first}' was lost before its machines were ready with debian:2"));
    assert_eq!(world.with(2), [""; 0]);
}

#[test]
fn a_host_that_refuses_something_is_not_the_first_one() {
    for n in 0..4 {
        let mut world = World::new(4, 3, json!({ "waves": ["1", "3", "100%"] }));
        let unwell = world.hosts()[n].clone();
        world.change(&unwell, json!({ "version": 9, "refused": "it is not there", "refused_generation": 1 }));
        world.update(2);
        world.bring();
        for _ in 0..2 {
            assert!(!world.with(2).contains(&unwell), "others are there yet");
            world.with(2).iter().for_each(|host| world.well(host));
            world.driver.settle();
        }
        assert!(world.with(2).contains(&unwell));
    }
}

#[test]
fn a_host_that_was_done_stays_done() {
    let (mut world, first) = World::begun(4, 5, json!({ "waves": ["1", "2", "100%"] }));
    world.well(&first);
    world.driver.settle();
    assert_eq!(world.with(2).len(), 2);
    // Its machines are reset all the time.
    world.change(&first, json!({ "ready": 3, "updated": 3 }));
    let second = world.with(2).into_iter().find(|host| *host != first).unwrap();
    world.well(&second);
    world.driver.settle();
    assert_eq!(world.with(2).len(), 4);
}

#[test]
fn claimed_machines_are_not_waited_for() {
    let (mut world, first) = World::begun(4, 5, json!({}));
    world.change(&first, json!({ "version": 2, "updated": 3, "claimed": 2, "spared": 1 }));
    world.driver.settle();
    assert_eq!(world.with(2).len(), 1);
    world.change(&first, json!({ "spared": 2 }));
    world.driver.settle();
    assert!(world.with(2).len() > 1);
}

/// They are ready, whatever becomes of the others: they take the version when they are released.
#[test]
fn claimed_machines_leave_room_for_others_under_min_ready() {
    let mut world = World::new(4, 5, json!({ "min_ready": 18, "waves": ["1", "2", "3", "100%"] }));
    world.update(2);
    world.bring();
    for with in 1..=4 {
        assert_eq!(world.with(2).len(), with, "{:?}", world.driver.status().waits);
        for host in world.with(2) {
            let claimed = json!({ "version": 2, "updated": 3, "claimed": 2, "spared": 2 });
            world.change(&host, claimed);
        }
        world.driver.after_s(30);
    }
    assert_eq!(world.state(), FleetRolloutState::Done);
    // One that is not through yet restarts the others.
    let mut world = World::new(4, 5, json!({ "min_ready": 19, "waves": ["2", "100%"] }));
    world.update(2);
    world.bring();
    let first = world.with(2)[0].clone();
    world.change(&first, json!({ "version": 2, "updated": 2, "claimed": 2, "spared": 2 }));
    world.driver.after_s(30);
    assert_eq!(world.with(2), std::slice::from_ref(&first), "one of its machines may be away");
    world.change(&first, json!({ "updated": 3 }));
    world.driver.after_s(30);
    assert_eq!(world.with(2).len(), 2);
}

#[test]
fn who_starts_machines_later_has_only_to_take_the_version() {
    let mut world = World::new(3, 5, json!({}));
    world.driver.fleet.set("catalogs/desk", json!({ "strategy": "next-start" }));
    world.update(2);
    world.bring();
    let first = world.with(2)[0].clone();
    world.change(&first, json!({ "version": 2, "updated": 0 }));
    world.driver.settle();
    assert_eq!(world.with(2).len(), 2);
}

#[test]
fn a_rollback_reaches_the_hosts_that_have_the_version_at_once_and_no_others() {
    let (mut world, first) = World::begun(8, 5, json!({ "min_ready": 38 }));
    world.change(&first, json!({ "version": 2, "ready": 3, "updated": 0, "failed": 2, "claimed": 2 }));
    world.driver.settle();
    world.why();
    let before: Vec<_> = world.hosts().into_iter().filter(|host| *host != first).collect();
    world.roll_back();
    assert_eq!((world.with(1).len(), world.batch(&first)), (8, Some(0)), "min_ready keeps what is ready");
    world.change(&first, json!({ "version": 1, "updated": 3 }));
    world.driver.after_s(31);
    assert_eq!(world.batch(&first), None, "nothing that is ready has another version");
    assert_eq!((world.state(), world.record().from.version), (FleetRolloutState::Running, 2));
    let again = roll_back_catalog(world.driver.fleet.view(), &name("desk"), None, now()).unwrap_err();
    assert!(again.message.contains("on its way back to debian:1 already"), "{again}");
    // What fails on the way back does not stop it.
    world.change(&first, json!({ "version": 1, "failed": 3 }));
    assert_eq!(world.driver.after_s(1000), 0);
    world.all_well();
    assert_eq!(world.state(), FleetRolloutState::Done);
    let shares =
        before.iter().map(|host| world.driver.fleet.view().share(&name(host), &name("desk")).unwrap());
    assert!(shares.into_iter().all(|share| share.value.version == 1 && share.value.batch.is_none()));
}

#[test]
fn a_rollback_of_a_whole_rollout_keeps_min_ready() {
    let (mut world, _) = World::begun(4, 5, json!({ "min_ready": 16, "waves": ["1", "100%"] }));
    while world.state() != FleetRolloutState::Done {
        world.all_well();
    }
    world.roll_back();
    let mut batches: Vec<_> = world.hosts().iter().map(|host| world.batch(host)).collect();
    batches.sort_unstable();
    assert_eq!((world.with(1).len(), batches), (4, vec![None, None, Some(0), Some(0)]));
    while world.state() != FleetRolloutState::Done {
        world.all_well();
    }
    assert_eq!(world.with(1).len(), 4);
    let none = roll_back_catalog(world.driver.fleet.view(), &name("desk"), None, now()).unwrap_err();
    assert!(none.message.contains("no such earlier version"), "{none}");
}

#[test]
fn new_machines_get_what_their_host_has() {
    let (mut world, first) = World::begun(4, 5, json!({}));
    world.driver.fleet.host("h9", "x");
    world.driver.fleet.catalog("desk", 60, json!({}));
    world.driver.settle();
    assert!(world.driver.fleet.count(&first, "desk") > 5 && world.driver.fleet.count("h9", "desk") > 5);
    assert_eq!(world.with(2), [first], "the new host has the version of before");
    assert!(world.with(1).contains(&"h9".to_owned()));
    while world.state() != FleetRolloutState::Done {
        world.bring();
        world.all_well();
    }
    world.driver.fleet.host("h8", "x");
    world.driver.fleet.catalog("desk", 80, json!({}));
    world.driver.settle();
    assert_eq!(world.driver.fleet.json("share/h8/desk")["version"], 2);
}

#[test]
fn pause_resume_and_abort() {
    let (mut world, first) = World::begun(4, 5, json!({}));
    assert_eq!(world.ask(RolloutAction::Resume), Ok(()), "it runs already");
    world.ask(RolloutAction::Pause).unwrap();
    world.ask(RolloutAction::Pause).unwrap();
    world.all_well();
    assert_eq!(world.driver.after_s(1000), 0);
    assert_eq!((world.with(2), world.state()), (vec![first.clone()], FleetRolloutState::Paused));
    world.ask(RolloutAction::Resume).unwrap();
    assert!(world.with(2).len() > 1, "it goes on where it was");
    world.ask(RolloutAction::Abort).unwrap();
    let with = world.with(2);
    world.all_well();
    assert_eq!((world.with(2), world.state()), (with, FleetRolloutState::Aborted));
    assert!(world.ask(RolloutAction::Resume).unwrap_err().contains("was aborted"));
    // The same version once more.
    world.update(2);
    assert_eq!(world.state(), FleetRolloutState::Running, "all hosts have brought it already");
    while world.state() != FleetRolloutState::Done {
        world.all_well();
    }
    assert!(world.ask(RolloutAction::Pause).unwrap_err().contains("has reached all hosts"));
}

#[test]
fn an_update_in_the_middle_knows_what_was_before() {
    let (mut world, first) = World::begun(4, 5, json!({}));
    world.update(3);
    assert_eq!(world.record().from.version, 1);
    assert_eq!((world.with(2), world.with(1).len()), (vec![first], 3));
    world.roll_back();
    assert_eq!(world.with(1).len(), 4);
}

#[test]
fn another_image_comes_in_waves_too() {
    let mut world = World::new(4, 5, json!({}));
    let spec: FleetCatalogSpec = serde_json::from_value(json!({
        "image": "ubuntu:1", "count": 20, "ram_bytes": GIB / 2, "memory_bytes": GIB / 2,
    }))
    .unwrap();
    let change = replace_catalog(world.driver.fleet.view(), &name("desk"), &spec, None, now()).unwrap();
    world.commit(&change.unwrap());
    let images = |world: &World, image: &str| {
        let has = |host: &String| world.driver.fleet.json(&format!("share/{host}/desk"))["image"] == image;
        world.hosts().into_iter().filter(has).collect::<Vec<_>>()
    };
    assert_eq!(images(&world, "debian").len(), 4);
    world.bring();
    let first = images(&world, "ubuntu");
    assert_eq!(first.len(), 1);
    // The number of the version is the same. It is another one all the same.
    assert_eq!(world.driver.after_s(5), 0);
    world.well(&first[0]);
    world.driver.settle();
    assert!(images(&world, "ubuntu").len() > 1);
    world.roll_back();
    assert_eq!(images(&world, "debian").len(), 4);
    assert_eq!(world.driver.fleet.json("catalogs/desk")["spec"]["image"], "debian:1");
}

#[test]
fn settings_without_another_version_begin_nothing() {
    let mut world = World::new(4, 5, json!({}));
    world.driver.fleet.catalog("desk", 24, json!({}));
    world.driver.settle();
    assert!(world.driver.fleet.view().rollouts.is_empty());
    let spec: FleetCatalogSpec = serde_json::from_value(json!({ "image": "debian:1", "count": 1 })).unwrap();
    let made = create_catalog(world.driver.fleet.view(), &name("new"), &spec, now()).unwrap();
    assert_eq!(made.writes.len(), 1);
    world.update(2);
    let gone = delete_catalog(world.driver.fleet.view(), &name("desk")).unwrap();
    world.commit(&gone);
    assert!(world.driver.fleet.view().rollouts.is_empty());
}

#[test]
fn a_version_that_somebody_has_just_written_is_rolled_out_too() {
    let mut world = World::new(4, 5, json!({}));
    world.driver.fleet.set("catalogs/desk", json!({ "version": 2, "generation": 9 }));
    world.driver.fleet.host("h9", "x");
    world.driver.fleet.catalog("desk", 40, json!({}));
    world.driver.settle();
    assert_eq!(world.with(2), [""; 0]);
    assert_eq!((world.record().from.version, world.record().to.version), (1, 2));
    world.bring();
    assert_eq!(world.with(2).len(), 1);
    world.driver.fleet.put("rollouts/desk", "{");
    world.all_well();
    assert_eq!(
        (world.with(2).len(), world.driver.after_s(5)),
        (1, 0),
        "one that cannot be read moves nothing"
    );
}

#[test]
fn a_drained_host_is_not_waited_for_and_gets_the_version_when_it_is_back() {
    let mut world = World::new(4, 5, json!({ "waves": ["1", "100%"] }));
    // The others have no space for its machines, so that it keeps them.
    let others = ["h1", "h2", "h3"];
    others.iter().for_each(|host| world.driver.fleet.budget(host, 5 * GIB));
    world.driver.fleet.set("hosts/h0", json!({ "is_draining": true }));
    world.driver.settle();
    world.update(2);
    let next = json!({ "image": "debian", "version": 2, "is_here": true });
    others.iter().for_each(|host| world.change(host, json!({ "next": next })));
    world.driver.settle();
    for _ in 0..2 {
        others.iter().for_each(|host| world.well(host));
        world.driver.settle();
    }
    assert_eq!((world.state(), world.with(1)), (FleetRolloutState::Done, vec!["h0".to_owned()]));
    world.driver.fleet.set("hosts/h0", json!({ "is_draining": false }));
    world.driver.settle();
    assert_eq!((world.state(), world.with(1)), (FleetRolloutState::Running, vec!["h0".to_owned()]));
    world.change("h0", json!({ "next": next }));
    world.driver.settle();
    world.all_well();
    assert_eq!((world.state(), world.with(2).len()), (FleetRolloutState::Done, 4));
}

#[test]
fn another_placer_goes_on_where_the_last_one_was() {
    let (mut world, first) = World::begun(4, 5, json!({}));
    world.driver.fleet.placer("p");
    world.driver.settle();
    assert_eq!(world.with(2), std::slice::from_ref(&first));
    world.well(&first);
    world.driver.settle();
    let with = world.with(2);
    assert!(with.len() > 1);
    world.driver.fleet.placer("p");
    world.driver.settle();
    assert_eq!(world.with(2), with);
}

#[test]
fn without_the_placer_nothing_moves() {
    let mut world = World::new(4, 5, json!({}));
    world.driver.fleet.set("meta", json!({ "placer": false }));
    world.update(2);
    world.bring();
    world.driver.after_s(1000);
    assert_eq!((world.with(1).len(), world.state()), (4, FleetRolloutState::Prefetch));
    world.driver.fleet.set("meta", json!({ "placer": true }));
    world.driver.settle();
    assert_eq!(world.with(2).len(), 1);
}

#[test]
fn no_host_is_next_if_min_ready_needs_its_machines() {
    let (mut world, first) = World::begun(4, 5, json!({ "min_ready": 18, "waves": ["100%"] }));
    assert_eq!(world.batch(&first), None, "two at a time leave 18");
    // Its batch is away: that has been counted.
    world.change(&first, json!({ "version": 2, "ready": 3, "updated": 0 }));
    assert_eq!(world.driver.settle(), 0);
    world.well(&first);
    world.driver.settle();
    assert_eq!(world.with(2).len(), 2);
    assert!(world.driver.status().waits[&name("desk")].contains("has not begun"));
}

#[test]
fn a_machine_that_comes_back_is_no_room_for_another_while_some_are_missing() {
    let (mut world, first) = World::begun(4, 5, json!({ "min_ready": 19, "waves": ["100%"] }));
    let other = world.with(1)[0].clone();
    // One was just released, and the first host has perhaps restarted another.
    world.change(&other, json!({ "ready": 4, "updated": 4 }));
    world.driver.settle();
    assert_eq!((world.batch(&first), world.batch(&other)), (Some(0), Some(0)));
    let others = || world.hosts().into_iter().filter(|host| *host != first && *host != other);
    let version = |host: &String| world.driver.fleet.json(&format!("share/{host}/desk"))["version"].clone();
    assert_eq!(version(&other), 2, "what starts anyway starts with the version");
    assert!(others().all(|host| version(&host) == 1));
}

#[test]
fn a_host_that_is_silent_keeps_its_batch() {
    let (mut world, first) = World::begun(4, 5, json!({ "min_ready": 18, "waves": ["1", "100%"] }));
    assert_eq!(world.batch(&first), None);
    // It goes on with its batches, and nobody can tell it that it is to end them.
    world.driver.fleet.end_lease(&first);
    world.driver.after_s(30);
    assert_eq!(world.batch(&first), None);
    // It is back before it counts as lost, and its report is still the one of before.
    world.driver.fleet.begin_lease(&first);
    world.driver.settle();
    assert_eq!((world.batch(&first), world.with(2)), (None, vec![first]));
}

#[test]
fn an_earlier_refusal_of_a_silent_host_halts_nothing() {
    let (mut world, first) = World::begun(4, 5, json!({ "lost_after_seconds": 90 }));
    world.change(&first, refused("no space", 2, 2));
    world.driver.after_s(30);
    assert!(world.why().contains("refuses"));
    world.ask(RolloutAction::Resume).unwrap();
    // It is mended by a reboot.
    world.driver.fleet.end_lease(&first);
    world.driver.after_s(32);
    assert_eq!(world.state(), FleetRolloutState::Running, "{:?}", world.record().why);
    world.driver.fleet.begin_lease(&first);
    world.driver.settle();
    assert!(world.why().contains("refuses"), "it says so still");
}

#[test]
fn a_version_reaches_the_host_whose_machines_fail_although_it_is_not_the_first() {
    for n in 0..4 {
        let mut world = World::new(4, 5, json!({ "min_ready": 18, "waves": ["1", "100%"] }));
        let ill = world.hosts()[n].clone();
        world.change(&ill, json!({ "ready": 2, "updated": 2, "failed": 3 }));
        world.update(2);
        world.bring();
        world.driver.after_s(31);
        assert_eq!((world.with(2), world.batch(&ill)), (vec![ill.clone()], Some(0)));
        world.well(&ill);
        world.driver.after_s(31);
        assert!(world.with(2).len() > 1, "{:?}", world.driver.status().waits);
    }
}

#[test]
fn while_machines_are_missing_only_hosts_that_restart_some_are_held() {
    // Machines that take the version when they are started next are restarted by nobody.
    let mut lazy = World::new(3, 5, json!({ "min_ready": 15 }));
    lazy.driver.fleet.set("catalogs/desk", json!({ "strategy": "next-start" }));
    let host = lazy.hosts()[0].clone();
    lazy.change(&host, json!({ "ready": 3, "updated": 3 }));
    lazy.update(2);
    lazy.bring();
    for _ in 0..3 {
        lazy.with(2).iter().for_each(|host| lazy.change(host, json!({ "version": 2, "updated": 0 })));
        lazy.driver.settle();
    }
    assert_eq!((lazy.state(), lazy.with(2).len()), (FleetRolloutState::Done, 3));
    // Nor are those of a host that is through: one was released there.
    let (mut world, first) = World::begun(4, 5, json!({ "min_ready": 19, "waves": ["1", "100%"] }));
    world.well(&first);
    world.driver.settle();
    let others: Vec<String> = world.with(2).into_iter().filter(|host| *host != first).collect();
    assert_eq!(others.len(), 1, "{others:?}");
    world.change(&first, json!({ "ready": 3, "updated": 3 }));
    world.driver.settle();
    assert_eq!((world.batch(&first), world.batch(&others[0])), (Some(1), Some(0)));
}

#[test]
fn a_batch_is_smaller_if_min_ready_needs_the_rest() {
    let (mut world, first) = World::begun(4, 5, json!({ "min_ready": 19, "waves": ["100%"] }));
    assert_eq!(world.batch(&first), Some(1));
    let wanted = wanted(world.driver.fleet.view(), "x", &name(&first), &format!("id of {first}")).unwrap();
    assert_eq!(wanted.catalogs[&name("desk")].strategy, RolloutStrategy::Batch(1));
    // A claimed machine elsewhere is down: no further one may be restarted.
    let other = world.with(1)[0].clone();
    world.change(&other, json!({ "ready": 4, "updated": 4, "claimed": 1 }));
    world.driver.settle();
    assert_eq!(world.batch(&first), Some(0));
    world.change(&other, json!({ "ready": 5, "updated": 5 }));
    assert_eq!(
        (world.driver.after_s(29), world.batch(&first)),
        (0, Some(0)),
        "it may have restarted one before"
    );
    world.driver.after_s(2);
    assert_eq!(world.batch(&first), Some(1));
    let mut world = World::new(4, 5, json!({ "min_ready": 20 }));
    world.update(2);
    world.bring();
    assert_eq!(world.with(2), [""; 0]);
    world.driver.after_s(600);
    assert!(
        world.why().contains("20 machines are ready, and 20 are to stay so (min_ready)"),
        "{}",
        world.why()
    );
}

#[test]
fn hosts_hear_what_to_bring_and_when_to_stop() {
    let mut world = World::new(4, 5, json!({}));
    let at = |world: &World, host: &str| {
        wanted(world.driver.fleet.view(), "x", &name(host), &format!("id of {host}")).unwrap()
    };
    assert!(at(&world, "h0").versions.is_empty());
    world.update(2);
    for host in world.hosts() {
        assert_eq!(at(&world, &host).versions[&name("desk")].of.to_string(), "debian:2");
        assert_eq!(at(&world, &host).catalogs[&name("desk")].spec.image.to_string(), "debian:1");
    }
    world.bring();
    let first = world.with(2)[0].clone();
    let desk = |world: &World| at(world, &first).catalogs[&name("desk")].clone();
    assert_eq!((desk(&world).spec.image.to_string(), desk(&world).is_held), ("debian:2".into(), false));
    assert!(at(&world, &first).versions.is_empty());
    world.change(&first, json!({ "version": 2, "failed": 1 }));
    world.driver.settle();
    assert!(desk(&world).is_held, "{}", world.why());
    let other = world.with(1)[0].clone();
    assert!(at(&world, &other).versions.is_empty());
    world.ask(RolloutAction::Resume).unwrap();
    assert_eq!((desk(&world).is_held, desk(&world).max_failed), (false, 1));
    world.change(&first, json!({ "failed": 2 }));
    world.driver.settle();
    assert!(desk(&world).is_held, "{}", world.why());
    world.update(3);
    assert!(desk(&world).is_held, "what has halted does not go on because another version is about to come");
}

/// What a host with names of the fleet is told: image, machines, whether it restarts none, and the version that it brings.
fn told(world: &World, host: &str) -> (String, usize, bool, Option<u32>) {
    let wanted = wanted(world.driver.fleet.view(), "x", &name(host), &format!("id of {host}")).unwrap();
    let desk = &wanted.catalogs[&name("desk")];
    let machines = desk.machines.as_ref().unwrap().len();
    assert_eq!((desk.spec.count as usize, desk.spec.naming.as_deref()), (machines, Some("desk-###")));
    let next = wanted.versions.get(&name("desk")).map(|next| next.of.version);
    (desk.spec.image.to_string(), machines, desk.is_held, next)
}

#[test]
fn machines_with_names_of_the_fleet_get_a_version_in_waves_too() {
    let settings = json!({ "identity": "named", "on_isolation": "stop" });
    let (mut world, first) = World::begun(6, 2, settings.clone());
    let other = world.with(1)[0].clone();
    assert_eq!(told(&world, &first), ("debian:2".into(), 2, false, None));
    assert_eq!(told(&world, &other), ("debian:1".into(), 2, true, Some(2)));
    let shares = world.driver.counts("desk", ["h0", "h1", "h2", "h3", "h4", "h5"]);
    assert_eq!(shares, [2; 6], "and nothing is counted twice");
    // A host that gets its first name meanwhile begins with the version before, as does one whose share is not there yet.
    world.driver.fleet.host("new", "y");
    let mut more = settings;
    more.as_object_mut().unwrap().insert("host_labels".into(), json!({}));
    world.driver.fleet.catalog("desk", 13, more);
    world.driver.settle();
    let host = "new";
    assert_eq!(world.driver.fleet.count(host, "desk"), 1);
    assert_eq!(told(&world, host).0, "debian:1");
    world.driver.fleet.delete(&format!("share/{host}/desk"));
    assert_eq!(told(&world, host).0, "debian:1");
    world.driver.settle();
    world.change(&first, json!({ "version": 2, "ready": 1, "updated": 0, "failed": 1 }));
    world.driver.settle();
    assert!(world.why().contains("1 machines have failed"), "{}", world.why());
    assert_eq!((world.with(2), told(&world, &other).0), (vec![first.clone()], "debian:1".into()));
    world.roll_back();
    assert_eq!((world.with(1).len(), told(&world, &first).0), (7, "debian:1".into()));
}

#[test]
fn a_name_that_cannot_be_read_lowers_no_share_and_hides_no_fault() {
    let settings = json!({ "identity": "named", "on_isolation": "stop", "waves": ["1", "100%"] });
    for fails in [true, false] {
        let (mut world, first) = World::begun(4, 2, settings.clone());
        world.driver.fleet.put("named/desk/desk-001", "{");
        if fails {
            world.change(&first, json!({ "version": 2, "ready": 1, "updated": 0, "failed": 1 }));
            world.driver.settle();
            assert!(world.why().contains("1 machines have failed"), "{}", world.why());
            world.roll_back();
            assert_eq!(world.with(1).len(), 4);
        } else {
            world.driver.after_s(700);
            assert!(world.why().contains("no progress in 600 s"), "{}", world.why());
        }
        assert_eq!(world.driver.counts("desk", ["h0", "h1", "h2", "h3"]), [2; 4]);
    }
}

#[test]
fn names_that_leave_a_host_take_its_share_along() {
    let (mut world, first) =
        World::begun(6, 1, json!({ "identity": "named", "on_isolation": "stop", "waves": ["1", "100%"] }));
    world.driver.fleet.end_lease(&first);
    world.driver.settle();
    world.driver.after_s(100);
    assert_eq!(world.driver.fleet.count(&first, "desk"), 0, "its name is elsewhere");
    assert_eq!(world.why(), format!("host '{first}' was lost before its machines were ready with debian:2"));
    assert_eq!((world.with(1).len(), world.driver.fleet.total("desk")), (5, 6));
    world.driver.fleet.delete("catalogs/desk");
    world.driver.settle();
    assert_eq!(world.driver.fleet.counts("desk"), []);
}

#[test]
fn a_host_that_is_declared_dead_or_removed_before_it_was_done_halts_it() {
    for is_removed in [false, true] {
        let (mut world, first) = World::begun(5, 2, json!({}));
        world.driver.fleet.end_lease(&first);
        let revision = world.driver.fleet.revision();
        if is_removed {
            world.driver.fleet.delete(&format!("hosts/{first}"));
        } else {
            world.driver.fleet.set(&format!("hosts/{first}"), json!({ "dead_epoch": revision }));
        }
        world.driver.settle();
        assert_eq!(world.driver.fleet.count(&first, "desk"), 0, "its machines are placed elsewhere");
        assert_eq!(
            world.why(),
            format!("host '{first}' was lost before its machines were ready with debian:2")
        );
        assert_eq!(world.with(2), [""; 0]);
    }
}

#[test]
fn what_a_lost_host_had_is_known_until_the_rollout_has_halted() {
    let (mut world, first) = World::begun(5, 2, json!({}));
    world.driver.fleet.end_lease(&first);
    let revision = world.driver.fleet.revision();
    world.driver.fleet.set(&format!("hosts/{first}"), json!({ "dead_epoch": revision }));
    // No transaction is applied, and the next placer knows nothing of them.
    for _ in 0..3 {
        let sent = world.driver.step();
        let keys = sent.iter().flat_map(|(_, transaction)| &transaction.writes).map(crate::sample::key_of);
        assert!(keys.into_iter().all(|key| *key == Key::Rollout(name("desk"))), "{sent:?}");
        sent.iter().for_each(|(number, _)| world.driver.placer.ended(*number, None));
        // Something else is new.
        world.driver.fleet.set("hosts/p", json!({}));
    }
    world.driver.fleet.placer("p");
    world.driver.settle();
    assert_eq!(world.state(), FleetRolloutState::Halted);
}

#[test]
fn machines_that_a_lower_count_takes_are_not_counted_as_ready() {
    let (mut world, first) = World::begun(3, 4, json!({ "min_ready": 10, "waves": ["1", "100%"] }));
    world.well(&first);
    world.driver.fleet.catalog("desk", 10, json!({ "min_ready": 10, "waves": ["1", "100%"] }));
    world.driver.settle();
    let batches: Vec<_> = world.hosts().iter().map(|host| world.batch(host)).collect();
    assert!(world.with(2).len() == 1 || batches.iter().all(|batch| *batch == Some(0)), "{batches:?}");
}

#[test]
fn hosts_of_earlier_waves_stay_done_for_another_placer_and_after_a_pause() {
    let (mut world, first) = World::begun(10, 4, json!({ "waves": ["1", "50%", "100%"] }));
    world.all_well();
    assert_eq!(world.with(2).len(), 5, "the second wave");
    // They are reset after each use, so that never all of them are ready at the same time.
    let busy = |world: &mut World| {
        world.change(&first, json!({ "version": 2, "ready": 2, "updated": 2 }));
        let others: Vec<_> = world.with(2).into_iter().filter(|host| *host != first).collect();
        others.iter().for_each(|host| world.well(host));
        world.driver.settle();
    };
    world.driver.fleet.placer("p");
    busy(&mut world);
    assert_eq!(world.with(2).len(), 10, "{:?}", world.record());
    let (mut world, _) = World::begun(10, 4, json!({ "waves": ["1", "50%", "100%"] }));
    world.all_well();
    world.ask(RolloutAction::Pause).unwrap();
    world.ask(RolloutAction::Resume).unwrap();
    world.bring();
    busy(&mut world);
    assert_eq!(world.with(2).len(), 10, "{:?}", world.record());
}

/// Otherwise whoever drains the first host of a version that is bad gives it to the next.
#[test]
fn a_host_that_is_drained_counts_in_its_wave_until_its_machines_are_gone() {
    for fails in [false, true] {
        let (mut world, first) = World::begun(4, 5, json!({ "waves": ["1", "100%"] }));
        // The others have no space for its machines, so that it keeps them.
        for host in world.hosts().iter().filter(|host| **host != first) {
            world.driver.fleet.budget(host, 5 * GIB);
            world.well(host);
        }
        // What it has refused before says nothing of this version.
        world.change(&first, refused("it is not there", 1, 1));
        world.driver.fleet.set(&format!("hosts/{first}"), json!({ "is_draining": true }));
        world.driver.settle();
        assert_eq!((world.record().wave, world.with(2)), (0, vec![first.clone()]));
        if fails {
            world.change(&first, json!({ "image": "debian", "version": 2, "failed": 1 }));
            world.driver.settle();
            assert!(world.why().contains(&first), "{}", world.why());
        } else {
            world.well(&first);
            world.driver.settle();
            assert_eq!((world.record().wave, world.with(2).len()), (1, 4));
        }
    }
}

#[test]
fn a_share_that_is_being_written_counts_even_if_its_host_is_drained_meanwhile() {
    let mut world = World::new(4, 5, json!({ "waves": ["1", "100%"] }));
    world.update(2);
    for host in world.hosts() {
        world.driver.fleet.budget(&host, 5 * GIB);
        world.change(&host, json!({ "next": { "image": "debian", "version": 2, "is_here": true } }));
    }
    let host_of = |transaction: &Transaction| match crate::sample::key_of(&transaction.writes[0]) {
        Key::Share(host, _) => Some(host.clone()),
        _ => None,
    };
    let open = (0..10).find_map(|_| {
        world.driver.step().into_iter().find_map(|(number, transaction)| {
            if let Some(host) = host_of(&transaction) {
                return Some((transaction, host));
            }
            let outcome = world.driver.fleet.commit(&transaction);
            world.driver.placer.ended(number, Some(outcome));
            None
        })
    });
    let (transaction, first) = open.unwrap();
    world.driver.fleet.set(&format!("hosts/{first}"), json!({ "is_draining": true }));
    assert_eq!((world.driver.settle(), world.with(2).len()), (0, 0));
    assert!(matches!(world.driver.fleet.commit(&transaction), Outcome::Applied(_)));
    world.driver.after_s(10);
    assert_eq!((world.record().wave, world.with(2)), (0, vec![first.to_string()]));
}

/// Names that it gives up run there until they are gone.
#[test]
fn a_host_whose_names_leave_counts_in_its_wave_until_they_are_gone() {
    let settings = json!({ "identity": "named", "on_isolation": "stop", "waves": ["1", "100%"] });
    let (mut world, first) = World::begun(4, 2, settings);
    world.driver.fleet.set(&format!("hosts/{first}"), json!({ "is_draining": true }));
    world.driver.settle();
    assert_eq!(world.driver.fleet.count(&first, "desk"), 2);
    assert_eq!((world.record().wave, world.with(2)), (0, vec![first.clone()]));
    let mut failed = World { driver: world.driver };
    failed.change(&first, json!({ "image": "debian", "version": 2, "failed": 1 }));
    failed.driver.settle();
    assert!(failed.why().contains(&first), "{}", failed.why());
    let places = failed.driver.fleet.view().places[&name(&first)].clone();
    for ((catalog, machine), _) in places {
        failed.driver.fleet.delete(&format!("place/{first}/{catalog}/{machine}"));
    }
    failed.driver.settle();
    assert_eq!(failed.driver.fleet.count(&first, "desk"), 0, "its share goes with them");
}

/// A host that cannot be emptied is waited for only as long as it can be brought to the version.
#[test]
fn a_drained_host_that_refuses_is_silent_or_is_rolled_back_is_not_waited_for() {
    for what in ["refuses", "silent"] {
        let (mut world, first) = World::begun(4, 5, json!({ "waves": ["1", "100%"] }));
        for host in world.hosts() {
            world.driver.fleet.budget(&host, 5 * GIB);
        }
        world.driver.reaches = Some(true);
        world.driver.fleet.set(&format!("hosts/{first}"), json!({ "is_draining": true }));
        match what {
            "refuses" => world.change(&first, json!({ "refused": "no space" })),
            _ => world.driver.fleet.end_lease(&first),
        }
        for _ in 0..4 {
            world.driver.settle();
            world.hosts().iter().filter(|host| **host != first).for_each(|host| world.well(host));
        }
        world.driver.settle();
        assert_eq!((world.state(), world.with(2).len()), (FleetRolloutState::Done, 4), "{what}");
    }
    let (mut world, first) = World::begun(4, 5, json!({}));
    world.hosts().iter().for_each(|host| world.driver.fleet.budget(host, 5 * GIB));
    world.roll_back();
    world.driver.fleet.set(&format!("hosts/{first}"), json!({ "is_draining": true }));
    world.change(&first, json!({ "version": 1, "updated": 3, "failed": 2 }));
    world.driver.settle();
    assert_eq!(
        world.state(),
        FleetRolloutState::Done,
        "its machines fail with the version that all others have"
    );
}

/// What it was told before goes on for a while, and is reported later.
#[test]
fn a_larger_batch_of_the_version_before_counts_until_it_must_be_over() {
    for hosts in 3..10 {
        let mut world =
            World::new(hosts, 4, json!({ "min_ready": 4 * hosts - 3, "waves": ["1", "2", "100%"] }));
        world.driver.fleet.set("catalogs/desk", json!({ "strategy": { "batch": 2 } }));
        world.update(2);
        world.bring();
        let first = world.with(2)[0].clone();
        world.well(&first);
        world.driver.settle();
        let second = world.with(2).into_iter().find(|host| *host != first).unwrap();
        world.change(&second, json!({ "version": 2, "updated": 0 }));
        world.driver.settle();
        assert_eq!((world.with(2).len(), world.batch(&second)), (2, None));
        world.roll_back();
        assert_eq!(world.with(1).len(), hosts);
        for _ in 0..5 {
            assert!(world.batch(&first).is_some_and(|batch| batch < 2), "2 of {second} may be away already");
            world.driver.after_s(5);
        }
        world.driver.after_s(10);
        let batches = [&first, &second].map(|host| world.batch(host).unwrap_or(2));
        assert!(batches.iter().all(|batch| *batch > 0) && batches.iter().sum::<u32>() <= 3, "{batches:?}");
    }
}

/// Another placer, and a rollout that is resumed, know nothing of earlier batches.
#[test]
fn who_knows_nothing_of_earlier_batches_holds_nobody() {
    for hosts in 3..10 {
        let mut world = World::new(hosts, 4, json!({ "min_ready": 4 * hosts - 3, "waves": ["2", "100%"] }));
        world.driver.fleet.set("catalogs/desk", json!({ "strategy": { "batch": 2 } }));
        world.update(2);
        world.bring();
        let begun: Vec<_> = world.with(2).into_iter().map(|host| (world.batch(&host), host)).collect();
        let batches: BTreeSet<_> = begun.iter().map(|(batch, _)| *batch).collect();
        assert_eq!(batches, BTreeSet::from([None, Some(1)]));
        for what in ["another placer", "resumed"] {
            match what {
                "resumed" => {
                    world.ask(RolloutAction::Pause).unwrap();
                    world.ask(RolloutAction::Resume).unwrap();
                }
                _ => _ = world.driver.fleet.placer("p"),
            }
            for _ in 0..8 {
                world.driver.after_s(5);
                begun
                    .iter()
                    .for_each(|(batch, host)| assert_eq!(world.batch(host), *batch, "{what}: {host}"));
            }
        }
    }
}

/// Nor do hosts that may restart nothing yet, of which it is not known since when.
#[test]
fn another_placer_holds_nobody_on_the_way_back() {
    let mut world = World::new(4, 4, json!({ "min_ready": 15, "waves": ["100%"] }));
    world.driver.fleet.set("catalogs/desk", json!({ "strategy": { "batch": 2 } }));
    world.update(2);
    world.bring();
    for _ in 0..20 {
        world.all_well();
        world.driver.after_s(40);
    }
    assert_eq!((world.state(), world.with(2).len()), (FleetRolloutState::Done, 4));
    world.roll_back();
    let batches = |world: &World| world.hosts().iter().map(|host| world.batch(host)).collect::<Vec<_>>();
    let before = batches(&world);
    assert_eq!(before.iter().filter(|batch| **batch == Some(0)).count(), 3, "{before:?}");
    world.driver.fleet.placer("p");
    for _ in 0..8 {
        world.driver.after_s(5);
        assert_eq!(batches(&world), before);
    }
}

/// `min_ready` does not count on its machines.
#[test]
fn a_host_that_may_restart_nothing_may_once_it_is_drained() {
    let (mut world, first) = World::begun(4, 5, json!({ "min_ready": 17, "waves": ["1", "100%"] }));
    let others: Vec<_> = world.hosts().into_iter().filter(|host| *host != first).collect();
    world.hosts().iter().for_each(|host| world.driver.fleet.budget(host, 5 * GIB));
    // Machines of another host are not ready.
    world.change(&others[0], json!({ "ready": 1 }));
    world.driver.settle();
    assert_eq!(world.batch(&first), Some(0));
    world.driver.fleet.set(&format!("hosts/{first}"), json!({ "is_draining": true }));
    world.driver.settle();
    assert_eq!((world.batch(&first), world.with(2)), (None, vec![first]));
}

/// Hosts get the version in another order than that of their names and scores if one of them is silent.
#[test]
fn another_placer_waits_for_the_host_that_got_the_version_last() {
    let waves = json!({ "waves": ["1", "2", "100%"] });
    let (_, best) = World::begun(5, 2, waves.clone());
    let mut world = World::new(5, 2, waves);
    world.driver.reaches = Some(true);
    world.driver.fleet.end_lease(&best);
    world.update(2);
    world.bring();
    let second = world.with(2)[0].clone();
    assert_ne!(second, best);
    world.driver.fleet.begin_lease(&best);
    world.well(&second);
    world.driver.settle();
    assert!(world.with(2).len() == 2 && world.with(2).contains(&best), "{:?}", world.with(2));
    world.driver.fleet.placer("p");
    world.driver.after_s(5);
    assert_eq!((world.record().wave, world.with(2).len()), (1, 2), "nobody has seen its machines ready");
    world.well(&best);
    world.driver.settle();
    assert_eq!(world.with(2).len(), 5);
}

#[test]
fn a_host_that_is_back_after_the_rollout_does_not_make_others_new() {
    let mut world = World::new(4, 5, json!({ "waves": ["1", "100%"] }));
    world.hosts().iter().for_each(|host| world.driver.fleet.budget(host, 5 * GIB));
    world.driver.fleet.set("hosts/h0", json!({ "is_draining": true }));
    world.driver.settle();
    world.update(2);
    world.bring();
    for _ in 0..4 {
        world.all_well();
    }
    assert_eq!(world.state(), FleetRolloutState::Done);
    // Its machines are never all ready at the same time, and then it is lost.
    let wave =
        |host: &String| world.driver.fleet.view().share(&name(host), &name("desk")).unwrap().value.wave;
    let other = world.with(2).into_iter().find(|host| wave(host) == 1).unwrap();
    world.change(&other, json!({ "ready": 3, "updated": 3 }));
    world.driver.fleet.set("hosts/h0", json!({ "is_draining": false }));
    world.driver.settle();
    world.driver.fleet.end_lease(&other);
    world.driver.after_s(60);
    assert_eq!(world.state(), FleetRolloutState::Running, "{:?}", world.record());
}

#[test]
fn what_cannot_be_read_of_a_rollout_may_have_stopped_it() {
    let (mut world, first) = World::begun(4, 5, json!({}));
    let is_held = |world: &World, host: &str| {
        let wanted = wanted(world.driver.fleet.view(), "x", &name(host), &format!("id of {host}")).unwrap();
        wanted.catalogs[&name("desk")].is_held
    };
    assert!(!is_held(&world, &first), "it goes on");
    world.driver.fleet.put("rollouts/desk", "{");
    world.driver.fleet.host("new", "y");
    world.driver.fleet.set("catalogs/desk", json!({ "generation": 3 }));
    world.driver.settle();
    assert!(world.hosts().iter().all(|host| is_held(&world, host)), "it may have been paused");
    let more = world.driver.fleet.json("catalogs/desk")["spec"].clone();
    let mut spec = more;
    spec["count"] = 25.into();
    world.driver.fleet.set("catalogs/desk", json!({ "spec": spec }));
    world.driver.settle();
    assert_eq!(world.driver.fleet.count("new", "desk"), 0, "nobody knows with which version");
}

/// Machines that keep data stay on their host, and nobody waits for one that is dead.
#[test]
fn a_dead_host_of_machines_that_keep_data_halts_once_and_is_not_waited_for() {
    let settings = json!({ "type": "dedicated", "ram_bytes": null, "memory_bytes": GIB });
    let (mut world, first) = World::begun(4, 2, settings);
    world.driver.fleet.end_lease(&first);
    let revision = world.driver.fleet.revision();
    world.driver.fleet.set(&format!("hosts/{first}"), json!({ "dead_epoch": revision }));
    world.driver.settle();
    assert!(world.why().contains("was lost"), "{}", world.why());
    let mut world = World::new(4, 2, json!({ "type": "dedicated", "ram_bytes": null, "memory_bytes": GIB }));
    world.driver.fleet.end_lease("h0");
    let revision = world.driver.fleet.revision();
    world.driver.fleet.set("hosts/h0", json!({ "dead_epoch": revision }));
    world.driver.settle();
    world.update(2);
    world.bring();
    for _ in 0..5 {
        let alive: Vec<_> = world.hosts().into_iter().filter(|host| host != "h0").collect();
        alive.iter().for_each(|host| world.well(host));
        world.driver.settle();
    }
    assert_eq!((world.state(), world.with(2).len()), (FleetRolloutState::Done, 3));
}

/// The version before it is the one that people wanted to leave.
#[test]
fn a_rollback_that_was_stopped_goes_the_same_way_when_it_is_asked_for_again() {
    for (action, to) in [
        (RolloutAction::Abort, None),
        (RolloutAction::Abort, Some(1)),
        (RolloutAction::Pause, None),
        (RolloutAction::Pause, Some(1)),
    ] {
        let (mut world, first) = World::begun(4, 5, json!({}));
        let again = |world: &World| roll_back_catalog(world.driver.fleet.view(), &name("desk"), to, now());
        // Nobody has told the hosts yet.
        let change = roll_back_catalog(world.driver.fleet.view(), &name("desk"), None, now()).unwrap();
        assert!(matches!(world.driver.fleet.commit(&change), Outcome::Applied(_)));
        assert!(again(&world).unwrap_err().message.contains("on its way back"));
        world.ask(action).unwrap();
        assert_eq!(world.with(2), std::slice::from_ref(&first));
        let before = world.record();
        let change = again(&world).unwrap();
        world.commit(&change);
        let record = world.record();
        assert_eq!((record.to.version, record.from, record.at_once), (1, before.from, true), "{action:?}");
        assert!(record.generation > before.generation && record.state == FleetRolloutState::Running);
        assert_eq!((world.with(1).len(), world.with(2)), (4, vec![]));
        world.all_well();
        assert_eq!(world.state(), FleetRolloutState::Done);
        let history = &world.driver.fleet.view().catalogs[&name("desk")].value.history;
        assert_eq!(history.iter().map(|entry| entry.version).collect::<Vec<_>>(), [1, 2, 1]);
    }
}

/// Hosts that get machines later are hosts of the rollout: none gets an untried version without having brought it, and beyond the wave.
#[test]
fn a_catalog_without_machines_waits_for_none_that_are_still_claimed() {
    // The shares of hosts stay until their names are given up.
    let settings = json!({ "identity": "named", "on_isolation": "stop" });
    let mut world = World::new(2, 3, settings.clone());
    world.driver.fleet.catalog("desk", 0, settings);
    world.driver.settle();
    for host in world.hosts() {
        world.change(&host, json!({ "claimed": 3 }));
    }
    world.driver.settle();
    assert_eq!(world.hosts().len(), 2);
    world.update(2);
    assert_eq!(world.state(), FleetRolloutState::Done);
}

#[test]
fn a_rollout_without_hosts_waits_for_those_that_get_the_machines() {
    for what in ["drained", "lost", "dead", "another zone", "another zone, nobody has begun"] {
        let mut world = World::new(1, 6, json!({ "zones": ["x", "y"], "waves": ["1", "100%"] }));
        (1..4).for_each(|n| world.driver.fleet.host(&format!("h{n}"), "y"));
        match what {
            "another zone" => {
                let spec: FleetCatalogSpec = serde_json::from_value(json!({ "image": "ubuntu:2", "count": 6,
                    "ram_bytes": GIB / 2, "memory_bytes": GIB / 2, "zones": ["y"], "waves": ["1", "100%"] }))
                .unwrap();
                let view = world.driver.fleet.view();
                let change = replace_catalog(view, &name("desk"), &spec, None, now()).unwrap().unwrap();
                world.commit(&change);
            }
            "another zone, nobody has begun" => {
                let mut spec = world.driver.fleet.json("catalogs/desk")["spec"].clone();
                spec["zones"] = json!(["y"]);
                let fields = json!({ "spec": spec, "version": 2, "generation": 2 });
                world.driver.fleet.set("catalogs/desk", fields);
            }
            _ => world.update(2),
        }
        let epoch = world.driver.fleet.revision();
        match what {
            "drained" => _ = world.driver.fleet.set("hosts/h0", json!({ "is_draining": true })),
            "lost" => world.driver.fleet.end_lease("h0"),
            "dead" => {
                world.driver.fleet.end_lease("h0");
                world.driver.fleet.set("hosts/h0", json!({ "dead_epoch": epoch }));
            }
            _ => {}
        }
        world.driver.settle();
        world.driver.after_s(if what == "lost" { 60 } else { 1 });
        let others = || ["h1", "h2", "h3"].into_iter().map(String::from);
        let has = |world: &World, host: &String| world.driver.fleet.json(&format!("share/{host}/desk"));
        // Nobody waits for a silent host to bring it.
        let state = if what == "lost" { FleetRolloutState::Running } else { FleetRolloutState::Prefetch };
        assert_eq!((world.state(), world.record().to.version), (state, 2), "{what}");
        assert!(others().all(|host| has(&world, &host)["version"] == 1), "{what}: {:?}", world.with(2));
        assert!(others().all(|host| has(&world, &host)["image"] == "debian"), "{what}");
        world.bring();
        assert_eq!((world.with(2).len(), world.record().wave), (1, 0), "{what}");
        while world.state() != FleetRolloutState::Done {
            world.all_well();
        }
        assert!(others().all(|host| has(&world, &host)["version"] == 2), "{what}");
    }
}

#[test]
fn a_wave_is_no_rollout_if_all_other_hosts_are_drained() {
    let (mut world, first) = World::begun(10, 2, json!({ "waves": ["1", "2", "100%"] }));
    world.driver.fleet.budget(&first, 2 * GIB);
    let others: Vec<_> = world.hosts().into_iter().filter(|host| *host != first).collect();
    (0..9).for_each(|n| world.driver.fleet.host(&format!("n{n}"), "x"));
    others.iter().for_each(|host| {
        _ = world.driver.fleet.set(&format!("hosts/{host}"), json!({ "is_draining": true }))
    });
    world.well(&first);
    world.driver.settle();
    assert!(world.driver.fleet.count("n0", "desk") > 0);
    assert_eq!((world.with(2), world.state()), (vec![first], FleetRolloutState::Running));
    world.bring();
    assert_eq!((world.with(2).len(), world.record().wave), (2, 1));
}

/// Nobody can give its machines to others: it is said, and people decide.
#[test]
fn a_rollout_whose_only_host_is_drained_halts_after_the_deadline() {
    let mut world = World::new(1, 2, json!({}));
    world.update(2);
    world.driver.fleet.set("hosts/h0", json!({ "is_draining": true }));
    world.driver.settle();
    assert_eq!((world.driver.after_s(590), world.state()), (0, FleetRolloutState::Prefetch));
    world.driver.after_s(20);
    let why = "no progress in 600 s: no host keeps its machines: host 'h0' is to give them up, is lost, or has a share that cannot be read";
    assert_eq!(world.why(), why);
    world.roll_back();
    assert_eq!((world.state(), world.with(1)), (FleetRolloutState::Done, vec!["h0".to_owned()]));
}

/// Whoever gets them first has not tried the version.
#[test]
fn a_rollout_whose_machines_have_nowhere_to_go_waits_for_hosts() {
    for what in ["dead", "removed", "removed with names", "never there"] {
        let mut settings = json!({ "waves": ["1", "100%"] });
        if what == "removed with names" {
            settings["identity"] = json!("named");
            settings["on_isolation"] = json!("stop");
        }
        let mut world = World::new(usize::from(what != "never there"), 6, settings.clone());
        if what == "never there" {
            world.driver.fleet.catalog("desk", 6, settings);
        }
        world.update(2);
        if what != "never there" {
            let epoch = world.driver.fleet.revision();
            world.driver.fleet.end_lease("h0");
            world.driver.fleet.set("hosts/h0", json!({ "dead_epoch": epoch }));
        }
        if what.starts_with("removed") {
            ["hosts/h0", "status/h0", "share/h0/desk"].iter().for_each(|key| world.driver.fleet.delete(key));
        }
        world.driver.settle();
        assert_eq!(world.driver.fleet.total("desk"), 0, "{what}");
        // However long that takes.
        assert_eq!((world.driver.after_s(700), world.state()), (0, FleetRolloutState::Prefetch), "{what}");
        let waits = world.driver.status().waits[&name("desk")].clone();
        assert_eq!(waits, "its 6 machines are on no host");
        (1..4).for_each(|n| world.driver.fleet.host(&format!("h{n}"), "x"));
        world.driver.settle();
        assert_eq!((world.with(1).len(), world.state()), (3, FleetRolloutState::Prefetch), "{what}");
        world.bring();
        assert_eq!((world.with(2).len(), world.state()), (1, FleetRolloutState::Running), "{what}");
        world.all_well();
        assert_eq!(world.with(2).len(), 3, "{what}");
        world.all_well();
        assert_eq!(world.state(), FleetRolloutState::Done, "{what}");
    }
}

#[test]
fn a_wave_is_no_rollout_if_other_hosts_have_gone_and_nobody_has_space() {
    for what in ["drained", "dead"] {
        let (mut world, first) = World::begun(10, 2, json!({ "waves": ["1", "2", "100%"] }));
        world.driver.fleet.budget(&first, 2 * GIB);
        for host in world.hosts().into_iter().filter(|host| *host != first) {
            let key = format!("hosts/{host}");
            if what == "drained" {
                world.driver.fleet.set(&key, json!({ "is_draining": true }));
            } else {
                let epoch = world.driver.fleet.revision();
                world.driver.fleet.end_lease(&host);
                world.driver.fleet.set(&key, json!({ "dead_epoch": epoch }));
            }
        }
        world.well(&first);
        world.driver.settle();
        world.driver.after_s(60);
        assert_eq!(
            (world.with(2), world.state()),
            (vec![first.clone()], FleetRolloutState::Running),
            "{what}"
        );
        world.driver.fleet.placer("p");
        world.driver.after_s(60);
        assert_eq!(world.state(), FleetRolloutState::Running, "{what}: another placer knows it too");
        let waits = world.driver.status().waits[&name("desk")].clone();
        assert_eq!(waits, "1 of 10 hosts have debian:2, and 18 machines are on no host");
        (0..9).for_each(|n| world.driver.fleet.host(&format!("n{n}"), "x"));
        world.driver.settle();
        assert!(world.driver.fleet.count("n0", "desk") > 0, "{what}");
        assert_eq!((world.with(2), world.state()), (vec![first], FleetRolloutState::Running), "{what}");
        world.bring();
        assert_eq!((world.with(2).len(), world.record().wave), (2, 1), "{what}");
    }
}

/// Somebody has seen that those are all hosts there are.
#[test]
fn a_rollout_on_the_hosts_that_are_left_ends_when_it_is_resumed() {
    let (mut world, first) = World::begun(10, 2, json!({ "waves": ["1", "2", "100%"] }));
    world.driver.fleet.budget(&first, 2 * GIB);
    for host in world.hosts().into_iter().filter(|host| *host != first) {
        world.driver.fleet.set(&format!("hosts/{host}"), json!({ "is_draining": true }));
    }
    world.well(&first);
    world.driver.settle();
    world.driver.after_s(700);
    assert_eq!(
        world.why(),
        "no progress in 600 s: 1 of 10 hosts have debian:2, and 18 machines are on no host"
    );
    world.ask(RolloutAction::Resume).unwrap();
    world.driver.after_s(60);
    assert_eq!((world.state(), world.with(2)), (FleetRolloutState::Done, vec![first]));
}

/// It has more machines than all hosts have space for: that is no reason to wait.
#[test]
fn a_catalog_that_is_too_large_gets_another_version_on_all_its_hosts() {
    for hosts in [1, 2, 3] {
        let mut world = World::new(hosts, 100, json!({ "waves": ["1", "100%"] }));
        assert_eq!(world.driver.status().unplaced[0].machines, hosts as u64 * 36);
        world.update(2);
        world.bring();
        (0..2).for_each(|_| world.all_well());
        assert_eq!((world.with(2).len(), world.state()), (hosts, FleetRolloutState::Done));
    }
}

/// Nothing runs, and what machines had before may be why.
#[test]
fn a_catalog_that_no_host_can_make_gets_another_version_at_once() {
    let mut world = World::new(2, 2, json!({}));
    for host in ["h0", "h1"] {
        world.driver.fleet.report(
            host,
            "desk",
            json!({ "refused": "it is not there", "refused_generation": 1 }),
        );
    }
    world.driver.settle();
    assert_eq!(world.driver.fleet.total("desk"), 0);
    world.update(2);
    assert_eq!(world.state(), FleetRolloutState::Done);
    world.driver.after_s(30);
    assert_eq!(world.with(2).len(), 2);
}

#[test]
fn a_rollout_whose_only_share_cannot_be_read_is_not_done() {
    let mut world = World::new(1, 2, json!({}));
    world.driver.fleet.host("h1", "x");
    let share = world.driver.fleet.json("share/h0/desk");
    world.driver.fleet.put("share/h0/desk", "[]");
    world.update(2);
    assert_eq!((world.state(), world.driver.fleet.count("h1", "desk")), (FleetRolloutState::Prefetch, 0));
    // Whatever is written meanwhile, people hear of it.
    for n in 0..6 {
        assert_eq!(world.state(), FleetRolloutState::Prefetch, "{n}");
        world.driver.after_s(100);
        world.driver.fleet.set("hosts/h1", json!({ "is_cordoned": n % 2 == 0 }));
        world.driver.settle();
    }
    assert!(world.why().starts_with("no progress in 600 s: no host keeps its machines"), "{}", world.why());
    world.driver.fleet.put("share/h0/desk", &share.to_string());
    world.driver.fleet.set("hosts/h1", json!({ "is_cordoned": false }));
    world.ask(RolloutAction::Resume).unwrap();
    world.bring();
    assert_eq!((world.state(), world.with(2)), (FleetRolloutState::Running, vec!["h0".to_owned()]));
}

/// Its record stays for ever, and nobody has its machines.
#[test]
fn a_share_that_cannot_be_read_of_a_removed_host_halts_no_rollout() {
    for settings in [json!({}), json!({ "type": "dedicated", "ram_bytes": null, "memory_bytes": GIB })] {
        let mut world = World::new(1, 2, settings);
        world.update(2);
        let epoch = world.driver.fleet.revision();
        world.driver.fleet.end_lease("h0");
        world.driver.fleet.set("hosts/h0", json!({ "dead_epoch": epoch }));
        world.driver.fleet.put("share/h0/desk", "[]");
        ["hosts/h0", "status/h0"].iter().for_each(|key| world.driver.fleet.delete(key));
        world.driver.settle();
        assert_eq!((world.driver.after_s(700), world.driver.status().unplaced[0].machines), (0, 2));
        assert_eq!(world.state(), FleetRolloutState::Prefetch, "{:?}", world.record());
        world.driver.fleet.host("h1", "x");
        world.driver.settle();
        assert!(world.driver.fleet.count("h1", "desk") > 0);
        world.driver.after_s(20);
        assert_eq!(world.state(), FleetRolloutState::Prefetch, "{:?}", world.record());
    }
}
