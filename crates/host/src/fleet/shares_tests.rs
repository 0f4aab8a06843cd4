//! Tests of the shares of a host, on real records.

use super::*;
use crate::machines::desired_state::{ClaimRecord, DesiredState};
use crate::machines::testing::TestHost;
use crate::operations::Operations;
use crate::resources::budget::NO_LIMITS;
use serde_json::{Value, json};
use spillway_fleet::agent::wanted;
use spillway_fleet::view::{Entry, FleetView, Update};

/// A host, and the records of its fleet.
struct World {
    host: TestHost,
    reconciler: ShareReconciler,
    records: BTreeMap<String, Value>,
}

impl World {
    fn new() -> World {
        let host = TestHost::new(NO_LIMITS);
        let operations = Operations::default();
        let reconciler = ShareReconciler {
            fleet: name("site"),
            catalogs: host.catalogs.clone(),
            machines: MachineShares::of(&host.reader, &host.catalogs),
            images: Images::of_whole(&host.objects, &host.stores),
            registries: Registries::new(host.objects.clone(), operations, "/nowhere".into()),
            pulls: FleetPulls::default(),
            boot_sets: BootSetWaits::default(),
            capacity: NO_LIMITS,
            hypervisor: Hypervisor::None,
            events: Events::open(&host.path("events-of-fleet"), &mut |why| panic!("{why}")),
            cut: ReportCut::default(),
        };
        let meta = json!({ "format": 1, "fleet_id": "f", "created": "2026-01-01T00:00:00Z", "placer": true });
        let host_record = json!({ "host_id": "h", "zone": "z" });
        World {
            host,
            reconciler,
            records: BTreeMap::from([("meta".into(), meta), ("hosts/a".into(), host_record)]),
        }
    }

    fn catalog(&mut self, catalog: &str, generation: u64, settings: Value) {
        let mut spec = json!({ "image": "debian", "count": 100 });
        spec.as_object_mut().unwrap().extend(settings.as_object().unwrap().clone());
        let record = json!({
            "spec": spec, "version": 1, "generation": generation, "history": [], "created": "2026-01-01T00:00:00Z",
        });
        self.records.insert(format!("catalogs/{catalog}"), record);
    }

    fn share(&mut self, catalog: &str, count: u32, version: u32, generation: u64) {
        let share = json!({ "count": count, "version": version, "generation": generation });
        self.records.insert(format!("share/a/{catalog}"), share);
    }

    fn view(&self) -> FleetView {
        let entry = |value: &Value| Entry { value: value.to_string().into_bytes(), created: 1, modified: 1 };
        let entries = self.records.iter().map(|(key, value)| (key.clone(), entry(value)));
        let mut view = FleetView::default();
        view.apply(Update::Whole(1, entries.collect()));
        view
    }

    fn reconcile(&self) -> UnfinishedShares {
        let view = self.view();
        let left = self.reconciler.reconcile(&wanted(&view, "f", &name("a"), "h").unwrap()).unwrap();
        // Once more changes nothing.
        let before = self.catalogs();
        assert_eq!(self.reconciler.reconcile(&wanted(&view, "f", &name("a"), "h").unwrap()).unwrap(), left);
        assert_eq!(self.catalogs(), before);
        left
    }

    fn catalogs(&self) -> Vec<(String, u64, u32, u32, Option<u64>)> {
        let catalogs = self.host.catalogs.list().unwrap();
        let of = |catalog: &Catalog| {
            let generation = catalog.fleet.as_ref().map(|owner| owner.generation);
            let machines = self.host.catalogs.machines(Some(&catalog.name)).unwrap().len();
            assert_eq!(machines, catalog.spec.count as usize);
            (catalog.name.to_string(), catalog.revision, catalog.spec.count, catalog.version, generation)
        };
        catalogs.iter().map(of).collect()
    }

    /// The one catalog: count, version and generation.
    fn desk(&self) -> (u32, u32, Option<u64>) {
        let catalogs = self.catalogs();
        let [(_, _, count, version, generation)] = &catalogs[..] else { panic!("{catalogs:?}") };
        (*count, *version, *generation)
    }
}

fn name(text: &str) -> Name {
    text.parse().unwrap()
}

#[test]
fn a_share_becomes_a_catalog_and_goes_with_it() {
    let mut world = World::new();
    world.host.version(2, 1 << 20);
    world.catalog("desk", 1, json!({}));
    world.share("desk", 3, 1, 1);
    assert_eq!(world.reconcile(), UnfinishedShares::default());
    assert_eq!(world.desk(), (3, 1, Some(1)));
    let machines = world.host.catalogs.machines(None).unwrap();
    assert_eq!(machines[0].name.as_str(), "desk-a-001", "other hosts have other names");
    world.share("desk", 5, 1, 1);
    world.reconcile();
    assert_eq!(world.desk(), (5, 1, Some(1)));
    // Another version and other settings.
    world.catalog("desk", 2, json!({ "grace_seconds": 7 }));
    world.share("desk", 4, 2, 2);
    assert_eq!(world.reconcile(), UnfinishedShares::default());
    assert_eq!(world.desk(), (4, 2, Some(2)));
    let catalog = world.host.catalogs.get(&name("desk")).unwrap();
    assert_eq!(catalog.spec.grace_seconds, 7);
    assert_eq!(catalog.rollout.unwrap().strategy, RolloutStrategy::Batch(2));
    let status = world.reconciler.status(&UnfinishedShares::default()).unwrap();
    let desk = &status.catalogs[&name("desk")];
    assert_eq!((desk.generation, desk.version, desk.count), (2, 2, 4));
    // A share of 0, or none, is the same.
    world.share("desk", 0, 2, 2);
    world.reconcile();
    assert_eq!(world.catalogs(), []);
    world.share("desk", 1, 2, 2);
    world.reconcile();
    world.records.remove("share/a/desk");
    world.records.remove("catalogs/desk");
    world.reconcile();
    assert_eq!(world.catalogs(), []);
}

#[test]
fn what_the_records_do_not_say_stays() {
    let mut world = World::new();
    world.catalog("desk", 1, json!({}));
    world.share("desk", 3, 1, 1);
    world.reconcile();
    world.records.insert("share/a/desk".into(), json!({ "count": "many" }));
    let left = world.reconcile();
    assert!(left.refused[&name("desk")].why.contains("share/a/desk cannot be read"), "{left:?}");
    assert_eq!(world.desk(), (3, 1, Some(1)));
    world.records.remove("meta");
    assert!(wanted(&world.view(), "f", &name("a"), "h").is_none());
}

#[test]
fn what_is_the_hosts_own_is_not_touched() {
    let mut world = World::new();
    world.host.catalog("desk", json!({ "count": 2 }));
    let before = world.catalogs();
    world.catalog("desk", 1, json!({}));
    world.share("desk", 3, 1, 1);
    for _ in 0..2 {
        let left = world.reconcile();
        assert_eq!(left.refused[&name("desk")].why, "the host has a catalog 'desk' of its own");
        assert_eq!(world.catalogs(), before);
        let status = world.reconciler.status(&left).unwrap();
        assert!(
            status.catalogs[&name("desk")].refused.is_some() && status.catalogs[&name("desk")].count == 0
        );
        world.share("desk", 0, 1, 1);
    }
}

/// The placer passes over a host only if it knows which share was refused.
#[test]
fn a_refusal_says_which_share_it_is_about() {
    let mut world = World::new();
    world.catalog("desk", 4, json!({}));
    world.share("desk", 3, 7, 4);
    let refused = |world: &World| {
        let status = world.reconciler.status(&world.reconcile()).unwrap();
        let of = &status.catalogs[&name("desk")];
        assert!(of.refused.as_ref().unwrap().contains("the host has no debian:7"), "{of:?}");
        assert_eq!(of.refused_version.as_ref().unwrap().to_string(), "debian:7");
        (of.generation, of.refused_generation, of.count)
    };
    assert_eq!(refused(&world), (0, 4, 0), "it was never made");
    world.share("desk", 3, 1, 4);
    world.reconcile();
    world.catalog("desk", 5, json!({}));
    world.share("desk", 4, 7, 5);
    let (_, generation, count) = refused(&world);
    assert_eq!((generation, count), (5, 4));
}

/// A host that only looked at other shares again would keep it.
#[test]
fn a_claimed_machine_is_waited_for_until_it_is_released() {
    let mut world = World::new();
    world.catalog("desk", 1, json!({}));
    world.share("desk", 3, 1, 1);
    world.reconcile();
    let own = machines(&world);
    own.iter().take(2).for_each(|machine| claim(&world, machine, true));
    let waits = |world: &World, left: &str| {
        let unfinished = world.reconcile();
        assert!(unfinished.refused.is_empty(), "it is no refusal: {unfinished:?}");
        assert!(unfinished.waiting[&name("desk")].contains(left), "{unfinished:?}");
        let status = world.reconciler.status(&unfinished).unwrap();
        assert!(!status.catalogs[&name("desk")].refuses(1), "the host is not passed over");
    };
    // The share falls, goes, and its catalog, too.
    world.share("desk", 1, 1, 1);
    waits(&world, "1 machine is to leave");
    world.share("desk", 0, 1, 1);
    waits(&world, "2 machines are to leave");
    world.records.remove("share/a/desk");
    world.records.remove("catalogs/desk");
    waits(&world, "2 machines are to leave");
    assert_eq!(machines(&world), own[..2]);
    own.iter().take(2).for_each(|machine| claim(&world, machine, false));
    assert_eq!(world.reconcile(), UnfinishedShares::default());
    assert_eq!(machines(&world), Vec::<String>::new());
    // A share that rises again waits for nothing.
    world.catalog("desk", 1, json!({}));
    world.share("desk", 2, 1, 1);
    world.reconcile();
    machines(&world).iter().for_each(|machine| claim(&world, machine, true));
    world.share("desk", 1, 1, 1);
    waits(&world, "1 machine is to leave");
    world.share("desk", 2, 1, 1);
    assert_eq!(world.reconcile(), UnfinishedShares::default());
}

/// A machine of the catalog with a name of the fleet.
fn place(world: &mut World, machine: &str, number: u32, is_leaving: bool) {
    let place = json!({ "epoch": 7, "number": number, "on_isolation": "stop", "is_leaving": is_leaving,
        "identity": { "uuid": format!("3e1f0b0e-0000-4000-8000-00000000000{number}"), "mac": "02:00:00:00:00:01" } });
    world.records.insert(format!("place/a/desk/{machine}"), place);
}

/// Claims a machine, or ends its claim.
fn claim(world: &World, machine: &str, is_claimed: bool) {
    let claim = is_claimed.then(|| ClaimRecord::new(None, false, "ann"));
    world.host.put(machine, &DesiredState { claim, ..DesiredState::default() });
}

fn machines(world: &World) -> Vec<String> {
    let machines = world.host.catalogs.machines(None).unwrap();
    machines.iter().map(|machine| machine.name.to_string()).collect()
}

fn is_named_here(world: &World) -> bool {
    is_named(&world.host.catalogs.get(&name("desk")).unwrap())
}

#[test]
fn a_catalog_that_comes_back_with_names_waits_for_claimed_machines_without() {
    let mut world = World::new();
    world.catalog("desk", 1, json!({}));
    world.share("desk", 3, 1, 1);
    world.reconcile();
    let own = machines(&world);
    claim(&world, &own[1], true);
    world.catalog("desk", 1, json!({ "identity": "named", "on_isolation": "stop" }));
    world.share("desk", 1, 1, 1);
    place(&mut world, "desk-001", 1, false);
    let left = world.reconcile();
    assert!(
        left.refused.is_empty() && left.waiting[&name("desk")].contains("somebody has claimed"),
        "{left:?}"
    );
    assert_eq!((machines(&world), is_named_here(&world)), (vec![own[1].clone()], false));
    claim(&world, &own[1], false);
    assert_eq!(world.reconcile(), UnfinishedShares::default());
    assert_eq!((machines(&world), is_named_here(&world)), (vec!["desk-001".to_owned()], true));
}

#[test]
fn a_catalog_that_comes_back_without_names_waits_for_claimed_machines_with() {
    let mut world = World::new();
    world.catalog("desk", 1, json!({ "identity": "named", "on_isolation": "stop" }));
    for number in [1, 2] {
        place(&mut world, &format!("desk-00{number}"), number, false);
    }
    world.reconcile();
    assert_eq!(machines(&world), ["desk-001", "desk-002"]);
    claim(&world, "desk-002", true);
    // It is deleted, and the machines leave. A claimed one stays, whether the catalog comes back or not.
    world.records.remove("catalogs/desk");
    let left = world.reconcile();
    assert!(left.waiting[&name("desk")].contains("desk-002 is claimed"), "{left:?}");
    assert_eq!(machines(&world), ["desk-002"]);
    world.catalog("desk", 1, json!({}));
    world.share("desk", 2, 1, 1);
    let left = world.reconcile();
    assert!(
        left.refused.is_empty() && left.waiting[&name("desk")].contains("desk-002 is claimed"),
        "{left:?}"
    );
    assert_eq!((machines(&world), is_named_here(&world)), (vec!["desk-002".to_owned()], true));
    claim(&world, "desk-002", false);
    assert_eq!(world.reconcile(), UnfinishedShares::default());
    assert_eq!((machines(&world).len(), is_named_here(&world)), (2, false));
    // What the fleet has given to another host does not stay.
    let mut other = World::new();
    other.catalog("desk", 1, json!({ "identity": "named", "on_isolation": "stop" }));
    place(&mut other, "desk-001", 1, false);
    other.reconcile();
    claim(&other, "desk-001", true);
    other.records.remove("place/a/desk/desk-001");
    other.reconcile();
    assert_eq!(machines(&other), Vec::<String>::new());
}

#[test]
fn an_image_that_cannot_be_brought_is_refused_and_one_that_may_come_is_waited_for() {
    for (code, is_refused) in [("damaged", true), ("exhausted", true), ("unavailable", false)] {
        let mut left = UnfinishedShares::default();
        let of = VersionName { image: name("debian"), version: 7 };
        let pulls = FleetPulls::default();
        pulls.begun(&of.image, of.version, 7);
        let error = json!({ "code": code, "type": "about:blank", "title": "t", "status": 507, "detail": "it is broken" });
        let failed = json!({ "id": 7, "what": "pull", "state": { "phase": "failed", "error": error }, "done_bytes": 0, "total_bytes": 0 });
        let checked = || pulls.check(&of.image, of.version, |_| serde_json::from_value(failed.clone()).ok());
        left.note(&name("desk"), checked(), None);
        left.note_version(&name("desk"), &of, checked(), pulls.last_failure(&of.image, of.version));
        assert_eq!(left.refused.contains_key(&name("desk")), is_refused, "{code}");
        assert_eq!(left.waiting.contains_key(&name("desk")), !is_refused, "{code}");
        let next = &left.versions[&name("desk")];
        assert_eq!(next.failed.is_some(), is_refused, "{code}: a rollout that waits for it has failed");
        assert_eq!(next.waits.is_some(), !is_refused, "{code}: what it waits for is said");
        let waits = next.waits.clone();
        if !is_refused {
            pulls.begun(&of.image, of.version, 8);
            let under_way = Err(pulls.under_way(&of.image, of.version));
            left.note_version(&name("desk"), &of, under_way, pulls.last_failure(&of.image, of.version));
            assert_eq!(
                left.versions[&name("desk")].waits,
                waits,
                "in the same words while it is tried again"
            );
        }
    }
}

#[test]
fn an_image_that_the_host_does_not_have_is_a_reason() {
    let mut world = World::new();
    world.catalog("desk", 1, json!({}));
    world.share("desk", 3, 7, 1);
    let left = world.reconcile();
    assert!(left.refused[&name("desk")].why.contains("the host has no debian:7"), "{left:?}");
    let image = json!({ "digest": "sha256:1", "registry": "s3", "name": "debian", "size_bytes": 1 });
    world.records.insert("images/debian/1".into(), image);
    world.share("desk", 3, 1, 1);
    let left = world.reconcile();
    assert!(left.refused[&name("desk")].why.contains("with another digest than the fleet's"), "{left:?}");
    assert_eq!(world.catalogs(), []);
}

#[test]
fn the_budget_of_the_fleet_is_what_the_hosts_own_catalogs_leave() {
    let mut world = World::new();
    world.reconciler.capacity = Capacity {
        ram_bytes: 10 << 30,
        ram_percent: 100,
        host_bytes: 20 << 30,
        reserve_bytes: 0,
        memory_percent: 100,
        host_cpus: 2,
        vcpu_percent: 400,
    };
    world.host.catalog("own", json!({ "count": 3, "ram_bytes": 1 << 30, "ram_guarantee_bytes": 1 << 20 }));
    world.catalog("desk", 1, json!({ "ram_bytes": 1 << 30 }));
    world.share("desk", 3, 1, 1);
    world.reconcile();
    let budget = world.reconciler.status(&UnfinishedShares::default()).unwrap().budget;
    assert_eq!((budget.limit_bytes, budget.memory_bytes), (7 << 30, 17 << 30));
    assert_eq!((budget.guarantee_bytes, budget.vcpus), ((10 << 30) - (3 << 20), 8));
}

#[test]
fn a_version_is_brought_before_it_is_rolled_out_and_held_when_the_rollout_halts() {
    let mut world = World::new();
    world.host.version(2, 1 << 20);
    world.catalog("desk", 1, json!({}));
    world.share("desk", 3, 1, 1);
    world.reconcile();
    let rollout = |to: u32, state: &str, tolerated: u32| {
        let version = |version: u32| json!({ "image": "debian", "version": version });
        json!({ "from": version(1), "to": version(to), "generation": 2, "state": state, "tolerated": tolerated,
            "deadline_seconds": 600, "since": "2026-01-01T00:00:00Z", "changed": "2026-01-01T00:00:00Z" })
    };
    let update = |world: &mut World, to: u32| {
        world.catalog("desk", 2, json!({}));
        world.records.get_mut("catalogs/desk").unwrap()["version"] = to.into();
    };
    let next = |world: &World| {
        let left = world.reconcile();
        let status = world.reconciler.status(&left).unwrap();
        (left.is_empty(), status.catalogs[&name("desk")].next.clone().unwrap())
    };
    update(&mut world, 7);
    world.records.insert("rollouts/desk".into(), rollout(7, "prefetch", 0));
    let (is_empty, missing) = next(&world);
    assert!(!is_empty && !missing.is_here && missing.failed.unwrap().contains("the host has no debian:7"));
    assert_eq!(world.desk(), (3, 1, Some(1)), "its machines are not touched");
    update(&mut world, 2);
    world.records.insert("rollouts/desk".into(), rollout(2, "prefetch", 0));
    let (is_empty, there) = next(&world);
    assert!(is_empty && there.is_here && there.of.to_string() == "debian:2");
    world.share("desk", 3, 2, 2);
    world.records.insert("rollouts/desk".into(), rollout(2, "running", 0));
    world.reconcile();
    let local = |world: &World| {
        let rollout = world.host.catalogs.get(&name("desk")).unwrap().rollout.unwrap();
        (rollout.version, rollout.paused, rollout.strategy, rollout.max_failed)
    };
    assert_eq!(local(&world), (2, false, RolloutStrategy::Batch(2), 0));
    world.records.insert("rollouts/desk".into(), rollout(2, "halted", 0));
    world.reconcile();
    assert_eq!(local(&world), (2, true, RolloutStrategy::Batch(2), 0));
    world.records.insert("rollouts/desk".into(), rollout(2, "running", 3));
    world.records.get_mut("share/a/desk").unwrap()["batch"] = 1.into();
    world.reconcile();
    assert_eq!(local(&world), (2, false, RolloutStrategy::Batch(1), 3));
    world.records.get_mut("share/a/desk").unwrap()["batch"] = 0.into();
    world.reconcile();
    assert!(local(&world).1, "not one may be restarted");
}

#[test]
fn a_claimed_machine_that_is_to_leave_keeps_no_rollout_from_being_halted() {
    let mut world = World::new();
    world.host.version(2, 1 << 20);
    let settings = json!({ "identity": "named", "on_isolation": "stop" });
    world.catalog("desk", 1, settings.clone());
    world.share("desk", 2, 1, 1);
    place(&mut world, "desk-001", 1, false);
    place(&mut world, "desk-002", 2, false);
    world.reconcile();
    world.catalog("desk", 2, settings);
    world.records.get_mut("catalogs/desk").unwrap()["version"] = 2.into();
    world.share("desk", 2, 2, 2);
    let version = |version: u32| json!({ "image": "debian", "version": version });
    let mut rollout = json!({ "from": version(1), "to": version(2), "generation": 2, "state": "running",
        "deadline_seconds": 600, "since": "2026-01-01T00:00:00Z", "changed": "2026-01-01T00:00:00Z" });
    world.records.insert("rollouts/desk".into(), rollout.clone());
    world.reconcile();
    let is_paused = |world: &World| world.host.catalogs.get(&name("desk")).unwrap().rollout.unwrap().paused;
    assert!(!is_paused(&world));
    claim(&world, "desk-001", true);
    place(&mut world, "desk-001", 1, true);
    world.share("desk", 1, 2, 2);
    rollout["state"] = "halted".into();
    world.records.insert("rollouts/desk".into(), rollout);
    let left = world.reconcile();
    assert!(left.waiting[&name("desk")].contains("desk-001 is claimed"), "{left:?}");
    assert!(is_paused(&world));
}

/// A rollout waits for a host that gives its machines up until those that are left have the version, or are claimed.
#[test]
fn a_host_whose_last_machine_is_claimed_and_leaves_takes_the_version() {
    let mut world = World::new();
    world.host.version(2, 1 << 20);
    let settings = json!({ "identity": "named", "on_isolation": "stop" });
    world.catalog("desk", 1, settings.clone());
    world.share("desk", 1, 1, 1);
    place(&mut world, "desk-001", 1, false);
    world.reconcile();
    claim(&world, "desk-001", true);
    place(&mut world, "desk-001", 1, true);
    world.catalog("desk", 2, settings);
    world.records.get_mut("catalogs/desk").unwrap()["version"] = 2.into();
    world.share("desk", 1, 2, 2);
    let left = world.reconcile();
    assert!(left.waiting[&name("desk")].contains("desk-001 is claimed"), "{left:?}");
    let status = world.reconciler.status(&left).unwrap();
    let of = &status.catalogs[&name("desk")];
    assert_eq!((of.version, of.generation, of.count, of.claimed, of.spared), (2, 2, 1, 1, 1));
    claim(&world, "desk-001", false);
    assert_eq!(world.reconcile(), UnfinishedShares::default());
    assert_eq!(machines(&world), Vec::<String>::new());
}
