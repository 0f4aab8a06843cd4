//! Tests of the shares of a host, on real records.

use super::*;
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
            capacity: NO_LIMITS,
            hypervisor: Hypervisor::None,
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
    assert!(left.refused[&name("desk")].contains("share/a/desk cannot be read"), "{left:?}");
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
        assert_eq!(left.refused[&name("desk")], "the host has a catalog 'desk' of its own");
        assert_eq!(world.catalogs(), before);
        let status = world.reconciler.status(&left).unwrap();
        assert!(
            status.catalogs[&name("desk")].refused.is_some() && status.catalogs[&name("desk")].count == 0
        );
        world.share("desk", 0, 1, 1);
    }
}

#[test]
fn an_image_that_the_host_does_not_have_is_a_reason() {
    let mut world = World::new();
    world.catalog("desk", 1, json!({}));
    world.share("desk", 3, 7, 1);
    let left = world.reconcile();
    assert!(left.refused[&name("desk")].contains("the host has no debian:7"), "{left:?}");
    let image = json!({ "digest": "sha256:1", "registry": "s3", "name": "debian", "size_bytes": 1 });
    world.records.insert("images/debian/1".into(), image);
    world.share("desk", 3, 1, 1);
    let left = world.reconcile();
    assert!(left.refused[&name("desk")].contains("with another digest than the fleet's"), "{left:?}");
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
fn a_report_fits_into_its_record() {
    let mut status = StatusRecord::default();
    for n in 0..40 {
        let of =
            CatalogStatus { refused: Some("é".repeat(MOST_REASON_CHARACTERS)), ..CatalogStatus::default() };
        status.catalogs.insert(name(&format!("catalog-{n}")), of);
    }
    status.images = (0..200).map(|n| (format!("image-{n}:1"), 1000)).collect();
    status.whole = status.images.keys().cloned().collect();
    let status = fitting(status);
    assert!(serde_json::to_vec(&status).unwrap().len() <= MOST_STATUS_BYTES);
    assert_eq!(status.catalogs.len(), 40, "reasons are shortened first, and images go before");
    assert!(status.images.len() < 200 && status.images.keys().eq(&status.whole));
}

#[test]
fn a_report_says_how_much_of_images_the_host_has() {
    let world = World::new();
    world.host.version(2, 1 << 20);
    let images = [("debian", 1), ("debian", 2), ("debian", 7), ("other", 1)];
    let images = images.into_iter().map(|(image, version)| (name(image), version)).collect();
    let status = world.reconciler.with_images(StatusRecord::default(), &images).unwrap();
    // What is not streamed is there as a whole; of others nothing is said.
    let whole = [("debian:1".to_owned(), 1000), ("debian:2".to_owned(), 1000)];
    assert_eq!(status.images, BTreeMap::from(whole));
    assert!(status.images.keys().eq(&status.whole));
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
