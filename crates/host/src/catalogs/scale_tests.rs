//! What requests cost among many machines, in steps of the database: counted, so that it is the same on a busy host.

use super::{CatalogChangeTerms, Catalogs, HostSettings};
use crate::error::HostError;
use crate::idempotency::IdempotentRequest;
use crate::images::{self, Images};
use crate::machines::MachineDeleteTerms;
use crate::machines::desired_state::DesiredState;
use crate::resources::budget::NO_LIMITS;
use crate::store::{Objects, SqliteStore};
use crate::stores::Stores;
use serde_json::json;
use spillway_api::{CatalogSpec, CatalogUpdate, Hypervisor, Image, ImageVersion, Name};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

struct Host {
    catalogs: Catalogs,
    objects: Objects,
    steps: Arc<AtomicU64>,
    _dir: tempfile::TempDir,
}

impl Host {
    /// With two versions of an image.
    fn new() -> Host {
        let dir = tempfile::tempdir().unwrap();
        let store = SqliteStore::open(&dir.path().join("db")).unwrap();
        let steps = store.count_steps();
        let objects = Objects::new(Arc::new(store));
        let stores = Stores::open(objects.clone(), &dir.path().join("store")).unwrap();
        let image: Image = serde_json::from_value(json!({ "name": "debian", "published": 1, "tags": {}, "newest": 2, "created": "2026-01-01T00:00:00Z" })).unwrap();
        let version = |number: u32| -> ImageVersion {
            let version = json!({
                "image": "debian", "version": number, "state": "ready", "created": "2026-01-01T00:00:00Z",
                "size_bytes": 1 << 20, "stored_bytes": 0, "digest": null, "store": "default",
                "origin": { "kind": "import", "path": "/nowhere", "format": "raw" },
            });
            serde_json::from_value(version).unwrap()
        };
        objects
            .change(|changes| {
                changes.put("debian", &image);
                for number in [1, 2] {
                    changes.put(&images::key(&image.name, number), &version(number));
                }
                Ok::<_, HostError>(())
            })
            .unwrap();
        let host = HostSettings {
            capacity: NO_LIMITS,
            hypervisor: Hypervisor::None,
            machines: "/machines".into(),
            takes_calls: false,
            fleet: None,
        };
        let images = Images::of_whole(&objects, &stores);
        let catalogs =
            Catalogs::open(objects.clone(), stores, images, host, &mut |line| panic!("{line}")).unwrap();
        Host { catalogs, objects, steps, _dir: dir }
    }

    /// A catalog of so many machines, of each of which something was wanted once.
    fn create(&self, name: &str, count: u32) -> Name {
        let name: Name = name.parse().unwrap();
        let spec = format!(r#"{{"image": "debian", "count": {count}, "naming": "{name}-######"}}"#);
        let spec: CatalogSpec = serde_json::from_str(&spec).unwrap();
        self.catalogs.create(&name, &spec, false, &IdempotentRequest::default()).unwrap();
        for machines in self.catalogs.machines(Some(&name)).unwrap().chunks(256) {
            self.objects
                .change(|changes| {
                    machines
                        .iter()
                        .for_each(|machine| changes.put(machine.name.as_str(), &DesiredState::default()));
                    Ok::<_, HostError>(())
                })
                .unwrap();
        }
        name
    }

    fn steps(&self, request: impl FnOnce()) -> u64 {
        let before = self.steps.load(Ordering::Relaxed);
        request();
        self.steps.load(Ordering::Relaxed) - before
    }
}

#[test]
fn many_machines_cost_others_nothing() {
    let host = Host::new();
    let few = host.create("few", 20);
    let steps = || {
        let updates = host.steps(|| {
            for version in [2, 1, 2, 1] {
                let update = format!(r#"{{"image": "debian:{version}"}}"#);
                let update: CatalogUpdate = serde_json::from_str(&update).unwrap();
                host.catalogs.update(&few, &update, CatalogChangeTerms::default()).unwrap();
            }
        });
        let get = host.steps(|| drop(host.catalogs.get(&few).unwrap()));
        let machine = host.catalogs.machines(Some(&few)).unwrap().pop().unwrap();
        let show = host.steps(|| drop(host.catalogs.machine(&machine.name).unwrap()));
        let terms = MachineDeleteTerms::default();
        let delete = host.steps(|| host.catalogs.delete_machine(&machine, terms, |_| Ok(())).unwrap());
        [updates, get, show, delete]
    };
    // The first of each makes its statements.
    steps();
    let among_few = steps();
    host.create("many", 10_000);
    let among_many = steps();
    // The reserve may be filled up at any change, which is not done step by step.
    let most = among_few.map(|steps| steps + 200);
    assert!(among_many.iter().zip(most).all(|(many, most)| *many <= most), "{among_few:?} {among_many:?}");
}

#[test]
fn deleting_takes_steps_in_proportion() {
    let host = Host::new();
    host.create("warm-up", 10);
    let [few, many] = [1000, 4000].map(|count| {
        let name = host.create("pool", count);
        host.steps(|| host.catalogs.delete(&name, CatalogChangeTerms::default()).unwrap())
    });
    assert!(many > few && many < few * 5, "1,000: {few}, 4,000: {many}");
}
