//! A host for tests of machines' tasks: real records, stores, images and catalogs, and no background task.
//!
//! Invariant: nothing happens unless a test asks for it.

use super::desired_state::DesiredState;
use super::figures::FigureCollector;
use super::registry::MachineRegistry;
use super::run::MachineFolders;
use super::shared::MachineServices;
use super::views::MachineReader;
use super::{BootLimits, MachineHostConfig};
use crate::catalogs::{Catalogs, HostSettings};
use crate::error::HostError;
use crate::events::Events;
use crate::idempotency::IdempotentRequest;
use crate::images::{Images, key};
use crate::resources::budget::Capacity;
use crate::scopes::Scopes;
use crate::store::{Objects, SqliteStore, Store};
use crate::stores::Stores;
use serde_json::{Value, json};
use spillway_api::{Catalog, CatalogSpec, Hypervisor, Image, ImageVersion, Name, Power};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

/// A host without a daemon.
pub struct TestHost {
    /// Folder of its image `debian` and its records.
    dir: tempfile::TempDir,
    pub objects: Objects,
    pub stores: Stores,
    pub catalogs: Catalogs,
    pub reader: MachineReader,
    pub shared: Arc<MachineServices>,
}

impl TestHost {
    /// Creates a host with this budget, whose machines' VMMs are started by others.
    pub fn new(capacity: Capacity) -> TestHost {
        TestHost::with_store(capacity, |store| store)
    }

    /// Does the same with a wrapper around the store.
    pub fn with_store(capacity: Capacity, wrap: impl FnOnce(Arc<dyn Store>) -> Arc<dyn Store>) -> TestHost {
        let dir = tempfile::tempdir_in("/var/tmp").unwrap();
        let path = |name: &str| dir.path().join(name);
        let objects = Objects::new(wrap(Arc::new(SqliteStore::open(&path("db")).unwrap())));
        let mut complain = |why: &str| panic!("{why}");
        let events = Events::open(&path("events"), &mut complain);
        let stores = Stores::open(objects.clone(), &path("store")).unwrap();
        let images = Images::of_whole(&objects, &stores);
        let (hypervisor, machines) = (Hypervisor::None, path("machines"));
        let host = HostSettings {
            capacity,
            hypervisor,
            machines: machines.clone(),
            takes_calls: false,
            fleet: None,
        };
        let catalogs =
            Catalogs::open(objects.clone(), stores.clone(), images.clone(), host, &mut complain).unwrap();
        let folders = MachineFolders::new(machines.clone());
        folders.make().unwrap();
        let registry = Arc::<MachineRegistry>::default();
        let reader = MachineReader::new(objects.clone(), catalogs.clone(), Arc::clone(&registry));
        let figures = FigureCollector::new(
            reader.clone(),
            catalogs.clone(),
            objects.clone(),
            stores.clone(),
            images.clone(),
            folders.clone(),
        );
        let parts = MachineHostConfig {
            folder: machines,
            program: PathBuf::from("/nonexistent/spillway"),
            hypervisor,
            accelerator: None,
            libvirt_uri: String::new(),
            capacity,
            boots: BootLimits { at_once: 0, patience: Duration::from_secs(180) },
            memory_floor_bytes: 1 << 30,
            claim_ttl_seconds: None,
            scopes: Scopes::None,
            phone_home: None,
            guest_users: None,
        };
        let shared = MachineServices::new(
            events,
            objects.clone(),
            stores.clone(),
            images,
            parts,
            Arc::new(figures),
            registry,
        )
        .unwrap();
        let host = TestHost { dir, objects, stores, catalogs, reader, shared: Arc::new(shared) };
        let image = json!({
            "name": "debian", "published": 1, "tags": {}, "newest": 1, "created": "2026-01-01T00:00:00Z",
        });
        let image: Image = serde_json::from_value(image).unwrap();
        host.put("debian", &image);
        host.version(1, 1 << 20);
        host
    }

    /// Returns a path in the host's folder.
    pub fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// Stores a record.
    pub fn put<T: crate::store::StoredRecord>(&self, name: &str, value: &T) {
        self.objects
            .change(|changes| {
                changes.put(name, value);
                Ok::<_, HostError>(())
            })
            .unwrap();
    }

    /// Adds a version of the image, filled with its number. Returns its file.
    pub fn version(&self, number: u32, size_bytes: u64) -> PathBuf {
        let version = json!({
            "image": "debian", "version": number, "state": "ready", "store": "default", "size_bytes": size_bytes,
            "origin": { "kind": "import", "path": "/x", "format": "raw" }, "stored_bytes": 0,
            "digest": "sha256:0", "created": "2026-01-01T00:00:00Z",
        });
        let version: ImageVersion = serde_json::from_value(version).unwrap();
        let image: Name = "debian".parse().unwrap();
        self.put(&key(&image, number), &version);
        let path = self.path(&format!("store/images/debian/{number}/disk.raw"));
        if size_bytes <= 1 << 20 {
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(&path, vec![number as u8; size_bytes as usize]).unwrap();
        }
        path
    }

    /// Adds a catalog of that image.
    pub fn catalog(&self, name: &str, settings: Value) -> Catalog {
        let (name, unkeyed) = (name.parse().unwrap(), IdempotentRequest::default());
        self.catalogs.create(&name, &spec(settings), false, &unkeyed).unwrap().0
    }

    /// Sets the desired power of a machine.
    pub fn want(&self, name: &str, power: Power) {
        let is = self.objects.get::<DesiredState>(name).unwrap().map(|is| is.value).unwrap_or_default();
        self.put(name, &DesiredState { power, ..is });
    }
}

/// Parses settings of a catalog.
pub fn spec(settings: Value) -> CatalogSpec {
    let mut spec = json!({ "image": "debian", "count": 2 });
    spec.as_object_mut().unwrap().extend(settings.as_object().unwrap().clone());
    serde_json::from_value(spec).unwrap()
}
