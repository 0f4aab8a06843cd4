//! Catalogs and the records of their machines. Owns the number and the names of machines; starts none.
//!
//! Invariant: a machine's record belongs to an existing catalog; work that was interrupted by the daemon's end is
//! completed when it starts.

mod change;
mod hardware;
mod named;
mod naming;
mod records;
#[cfg(test)]
mod scale_tests;
mod spec;
mod streamed;
mod update;

pub use change::{CatalogChangeTerms, ChangedBy};
pub use named::{PlacedLeft, place_machines};
pub(crate) use records::{check_no_removal, whole};
pub use spec::serial_pattern;
pub(crate) use spec::{check as check_spec, check_not_redacted};
pub(crate) use update::{follow, follows, take};

use crate::error::HostError;
use crate::hypervisor::domain;
use crate::idempotency::IdempotentRequest;
use crate::images::Images;
use crate::resources::budget::{Capacity, Need};
use crate::store::{Changes, Objects, RecordKind, Revision, StoredRecord};
use crate::stores::Stores;
use crate::tags::Tag;
use jiff::Timestamp;
use records::Removal;
use spillway_api::{
    Catalog, CatalogSpec, ErrorCode, FleetOwner, HistoryEntry, Hypervisor, Image, ImageRef, ImageVersion,
    Machine, Name, Network, Ready, StoreClass, VersionState,
};
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard};

impl StoredRecord for Catalog {
    const PREFIX: &'static str = "catalogs/";
    const WORD: &'static str = "catalog";

    fn written_by(&mut self, revision: Revision) {
        self.revision = revision.0;
    }
}

impl StoredRecord for Machine {
    const PREFIX: &'static str = "machines/";
    const WORD: &'static str = "machine";
}

/// Kinds of records of this module.
pub(crate) const RECORDS: [RecordKind; 3] =
    [RecordKind::of::<Catalog>(), RecordKind::of::<Machine>(), RecordKind::of::<Removal>()];

/// Properties of the host that settings must fit.
#[derive(Clone)]
pub struct HostSettings {
    /// Its capacity for machines.
    pub capacity: Capacity,
    /// Its hypervisor.
    pub hypervisor: Hypervisor,
    /// Folder in which machines run.
    pub machines: PathBuf,
    /// Whether machines in bridges can phone home.
    pub takes_calls: bool,
    /// Fleet of the host, if it is in one.
    pub fleet: Option<Name>,
}

/// The catalogs of a host. A clone is the same catalogs.
#[derive(Clone)]
pub struct Catalogs {
    objects: Objects,
    stores: Stores,
    images: Images,
    host: HostSettings,
    /// Held while machines are recorded or removed, so that no two catalogs take one name.
    counting: Arc<Mutex<()>>,
}

impl Catalogs {
    /// Opens the recorded catalogs, and makes their machines match their counts. If that fails because a record cannot be
    /// read or there is no space, `complain` is called and the next start tries again.
    pub fn open(
        objects: Objects,
        stores: Stores,
        images: Images,
        host: HostSettings,
        complain: &mut dyn FnMut(&str),
    ) -> Result<Catalogs, HostError> {
        let catalogs = Catalogs { objects, stores, images, host, counting: Arc::default() };
        let counting = catalogs.counting();
        // Complete interrupted removals; those of a catalog that still exists are completed with its count.
        for removal in catalogs.objects.list::<Removal>()? {
            if let Ok(name) = removal.name.parse() {
                let finished = catalogs.finish_removal(&counting, &name);
                finished.unwrap_or_else(|e| complain(&format!("catalog {name} is not removed: {e}")));
            }
        }
        for catalog in catalogs.list()? {
            let counted = catalogs.count(&counting, &catalog);
            counted.unwrap_or_else(|e| complain(&format!("catalog {}: {e}", catalog.name)));
        }
        drop(counting);
        Ok(catalogs)
    }

    /// Returns all catalogs, in the order of their names.
    pub fn list(&self) -> Result<Vec<Catalog>, HostError> {
        Ok(self.objects.list()?.into_iter().map(|catalog| catalog.value).collect())
    }

    /// Iterates over the catalogs after this name, in the order of their names, reading some at a time.
    pub fn list_after(&self, after: &str) -> impl Iterator<Item = Result<Catalog, HostError>> + use<'_> {
        self.objects.each_after::<Catalog>(after).map(|catalog| Ok(catalog?.value))
    }

    /// Returns a catalog.
    pub fn get(&self, name: &Name) -> Result<Catalog, HostError> {
        match self.objects.get::<Catalog>(name.as_str())? {
            Some(catalog) => Ok(catalog.value),
            None => Err(self.none(name)),
        }
    }

    /// Creates a catalog with its machines. With `dry_run` everything is checked and nothing created. The flag is `true`
    /// if an earlier request with the same key has created the catalog.
    pub fn create(
        &self,
        name: &Name,
        spec: &CatalogSpec,
        dry_run: bool,
        key: &IdempotentRequest,
    ) -> Result<(Catalog, bool), HostError> {
        self.create_of(name, spec, None, dry_run, key)
    }

    /// Creates a catalog of the fleet on this host, with its machines.
    pub fn create_for_fleet(
        &self,
        name: &Name,
        spec: &CatalogSpec,
        owner: FleetOwner,
    ) -> Result<(), HostError> {
        self.create_of(name, spec, Some(owner), false, &IdempotentRequest::default()).map(drop)
    }

    fn create_of(
        &self,
        name: &Name,
        spec: &CatalogSpec,
        owner: Option<FleetOwner>,
        dry_run: bool,
        key: &IdempotentRequest,
    ) -> Result<(Catalog, bool), HostError> {
        check_not_redacted(name, spec)?;
        let counting = self.counting();
        if let Some(created) = self.objects.change(|changes| key.made::<Timestamp>(changes))? {
            let catalog = self.get(name)?;
            if catalog.created != created {
                let message =
                    format!("the catalog '{name}' that this key made was deleted, and there is another one");
                return Err(HostError::new(ErrorCode::Conflict, message));
            }
            // The earlier request may have failed to record all machines.
            self.count(&counting, &catalog)?;
            return Ok((catalog, true));
        }
        self.finish_removal(&counting, name)?;
        let mut warnings = self.check(name, spec)?;
        warnings.extend(self.check_capacity(name, spec, None)?);
        self.check_names_free(name, spec)?;
        let catalog = self.objects.change(|changes| {
            if changes.get::<Catalog>(name.as_str())?.is_some() {
                return Err(HostError::new(
                    ErrorCode::Exists,
                    format!("there is a catalog '{name}' already"),
                ));
            }
            let version = self.version(changes, &spec.image)?;
            let since = Timestamp::now();
            let catalog = Catalog {
                name: name.clone(),
                revision: 0,
                spec: spec.clone(),
                version,
                history: vec![HistoryEntry { image: spec.image.name.clone(), version, since }],
                rollout: None,
                fleet: owner.clone(),
                created: since,
                warnings: warnings.clone(),
                effective: None,
            };
            self.check_streamed(changes, &catalog, dry_run)?;
            match dry_run {
                true => changes.forget(),
                false => {
                    changes.put(name.as_str(), &catalog);
                    key.record(changes, &since);
                }
            }
            Ok(catalog)
        });
        let catalog = self.keep_or_undo(catalog, dry_run)?;
        if dry_run {
            return Ok((catalog, false));
        }
        self.count(&counting, &catalog)?;
        Ok((self.get(name)?, false))
    }

    /// Deletes a catalog and its machines, and with `with_data` what they keep.
    pub fn delete(&self, name: &Name, terms: CatalogChangeTerms) -> Result<(), HostError> {
        let counting = self.counting();
        self.objects.change(|changes| {
            self.found(changes, name, terms.expected, terms.by)?;
            self.check_none_claimed(changes, &self.machines(Some(name))?, terms.force)?;
            changes.delete::<Catalog>(name.as_str());
            changes.put(name.as_str(), &Removal { with_data: terms.with_data });
            if terms.dry_run {
                changes.forget();
            }
            Ok::<_, HostError>(())
        })?;
        match terms.dry_run {
            true => Ok(()),
            false => self.finish_removal(&counting, name),
        }
    }

    /// Completes the removal of a deleted catalog.
    fn finish_removal(&self, counting: &MutexGuard<()>, name: &Name) -> Result<(), HostError> {
        let is_removed = self.objects.get::<Removal>(name.as_str())?.is_some()
            && self.objects.get::<Catalog>(name.as_str())?.is_none();
        match is_removed {
            true => self.remove(counting, name, &self.machines(Some(name))?),
            false => Ok(()),
        }
    }

    /// Returns a catalog for a change, if it has the expected tag and is whoever's asks for the change.
    fn found(
        &self,
        changes: &mut Changes,
        name: &Name,
        expected: Option<Tag>,
        by: ChangedBy,
    ) -> Result<Catalog, HostError> {
        let Some(found) = changes.get::<Catalog>(name.as_str())? else { return Err(self.none(name)) };
        Tag::from(found.revision).check(&format!("catalog {name}"), expected)?;
        let owner = found.value.fleet.as_ref().map(|owner| &owner.fleet);
        match (by, owner) {
            (ChangedBy::People, Some(fleet)) if self.host.fleet.as_ref() == Some(fleet) => {
                let message = format!(
                    "catalog {name} belongs to the fleet {fleet}, which decides about it: change it there ('spillway fleet catalog')"
                );
                Err(HostError::new(ErrorCode::Conflict, message))
            }
            (ChangedBy::Fleet { .. }, None) => {
                let message =
                    format!("this host has a catalog '{name}' of its own, which the fleet does not touch");
                Err(HostError::new(ErrorCode::Exists, message))
            }
            _ => Ok(found.value),
        }
    }

    /// Undoes what was begun for a catalog that could not be recorded.
    fn keep_or_undo<T>(&self, recorded: Result<T, HostError>, dry_run: bool) -> Result<T, HostError> {
        if recorded.is_err() && !dry_run {
            self.images.look_at_residencies();
        }
        recorded
    }

    /// Checks whether the settings are possible on this host. Returns warnings.
    fn check(&self, name: &Name, spec: &CatalogSpec) -> Result<Vec<String>, HostError> {
        let warnings = spec::check(name, spec)?;
        self.check_hypervisor(name, spec)?;
        let refuse = |why: String| Err(HostError::invalid(format!("catalog {name}: {why}")));
        for (store, keeps) in [(&spec.overflow_store, spec.keeps_writes()), (&spec.data_disk_store, true)] {
            let Some(store) = store else { continue };
            let class = self.stores.get(store)?.class;
            if keeps && matches!(class, StoreClass::Cache | StoreClass::Temp) {
                return refuse(format!("store {store} is for what can be made again, not for what is kept"));
            }
        }
        let stores = self.stores.list()?;
        let needs = |class| {
            stores.iter().all(|store| store.class != class).then(|| format!("{class:?}").to_lowercase())
        };
        let scratch = spec.scratch_disk_bytes.and_then(|_| needs(StoreClass::Temp));
        let data = spec.data_disk_bytes.filter(|_| spec.data_disk_store.is_none());
        if let Some(class) = scratch.or_else(|| data.and_then(|_| needs(StoreClass::Local))) {
            return refuse(format!(
                "its disks need a store of class {class}: add one with 'spillway store add'"
            ));
        }
        Ok(warnings)
    }

    /// Refuses settings that this host's hypervisor does not support.
    fn check_hypervisor(&self, name: &Name, spec: &CatalogSpec) -> Result<(), HostError> {
        let is_in_bridge = matches!(spec.hardware.network, Network::Bridge(_));
        if spec.ready == Some(Ready::PhoneHome) && is_in_bridge && !self.host.takes_calls {
            return Err(HostError::invalid(format!(
                "catalog {name}: ready: machines in a bridge phone home to an address of this host, and there is none: start spillwayd with \
                 --phone-home ADDRESS:PORT, or take agent, tcp:PORT or serial:REGEX"
            )));
        }
        if spec.hypervisor(self.host.hypervisor) != Hypervisor::Libvirt {
            return Ok(());
        }
        // All names have the same length.
        let machine = spec::naming(name, spec)?.name(1)?;
        domain::check_supported(spec)
            .and_then(|()| domain::fits(&self.host.machines.join(machine.as_str())))
            .map_err(|e| HostError { message: format!("catalog {name}: {}", e.message), ..e })
    }

    /// Refuses settings that can never start on this host, unless they were in use before. Returns a warning if not all
    /// machines can run at the same time.
    fn check_capacity(
        &self,
        name: &Name,
        spec: &CatalogSpec,
        before: Option<&CatalogSpec>,
    ) -> Result<Option<String>, HostError> {
        let HostSettings { capacity, hypervisor, .. } = self.host;
        let need = Need::of(spec, hypervisor);
        if before.is_none_or(|before| Need::of(before, hypervisor) != need) {
            let refused = |e: HostError| HostError::new(e.code, format!("catalog {name}: {}", e.message));
            capacity.fits_alone(need).map_err(refused)?;
        }
        Ok(capacity.fewer(need, spec.count))
    }

    /// Returns the version that an image refers to, which must be ready. The catalog must be written in the same
    /// transaction.
    fn version(&self, changes: &mut Changes, image: &ImageRef) -> Result<u32, HostError> {
        let Some(found) = changes.get::<Image>(image.name.as_str())? else {
            let images = self.objects.list::<Image>()?;
            let names = images.iter().map(|image| image.name.as_str());
            return Err(HostError::not_found(Image::WORD, image.name.as_str(), names));
        };
        let published = || {
            let message = format!("no version of {} is published yet", image.name);
            found.value.published.ok_or_else(|| HostError::new(ErrorCode::Conflict, message))
        };
        let version = image.version.map_or_else(published, |version| Ok(version.get()))?;
        let record = changes.get::<ImageVersion>(&crate::images::key(&image.name, version))?;
        match record.map(|record| record.value) {
            Some(record) if record.state == VersionState::Ready => crate::images::check_size(&record)?,
            Some(_) => {
                let message = format!("{}:{version} is being made or deleted", image.name);
                return Err(HostError::new(ErrorCode::Conflict, message));
            }
            None => {
                let message = format!("there is no version {version} of {}", image.name);
                return Err(HostError::new(ErrorCode::NotFound, message));
            }
        }
        // Write the image unchanged, so that a concurrent change or deletion of a version conflicts with this one.
        changes.put(image.name.as_str(), &found.value);
        Ok(version)
    }

    fn counting(&self) -> MutexGuard<'_, ()> {
        self.counting.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    fn none(&self, name: &Name) -> HostError {
        let catalogs = self.list().unwrap_or_default();
        let names = catalogs.iter().map(|catalog| catalog.name.as_str());
        HostError::not_found(Catalog::WORD, name.as_str(), names)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::images::{ImageChangeTerms, key};
    use crate::machines::testing::{TestHost, spec};
    use crate::resources::budget::NO_LIMITS;
    use crate::store::SqliteStore;
    use crate::store::failing::FailingStore;
    use serde_json::json;
    use std::sync::atomic::{AtomicUsize, Ordering};

    fn of(hypervisor: Hypervisor, machines: &str) -> HostSettings {
        HostSettings {
            capacity: NO_LIMITS,
            hypervisor,
            machines: machines.into(),
            takes_calls: false,
            fleet: None,
        }
    }

    #[test]
    fn what_libvirt_cannot_run_is_refused_when_it_is_asked_for() {
        let dir = tempfile::tempdir().unwrap();
        let objects = Objects::new(Arc::new(SqliteStore::open(&dir.path().join("db")).unwrap()));
        let stores = Stores::open(objects.clone(), &dir.path().join("store")).unwrap();
        let tcp = json!({ "image": "debian", "ready": "tcp:22" });
        let console = json!({ "image": "debian", "ready": "serial:login" });
        let phone = json!({ "image": "debian", "ready": "phone-home" });
        let bridged = json!({ "image": "debian", "ready": "phone-home", "network": { "bridge": "br0" } });
        // "/console.sock" and the machine's name are behind it: 107 bytes.
        let longest = format!("/{}", "x".repeat(84));
        let longer = format!("{longest}x");
        for (hypervisor, spec, folder, why) in [
            (Hypervisor::Libvirt, &tcp, "/machines", Some("ready: tcp with network user")),
            (Hypervisor::Qemu, &tcp, "/machines", None),
            (Hypervisor::Libvirt, &phone, "/machines", Some("ready: phone-home with network user")),
            (Hypervisor::Qemu, &phone, "/machines", None),
            (Hypervisor::Qemu, &bridged, "/machines", Some("start spillwayd with --phone-home")),
            (Hypervisor::Libvirt, &console, longest.as_str(), None),
            (Hypervisor::Libvirt, &console, &longer, Some("108 bytes, and a socket's path has at most 107")),
            (Hypervisor::Qemu, &console, &longer, None),
        ] {
            let host = of(hypervisor, folder);
            let images = Images::of_whole(&objects, &stores);
            let catalogs =
                Catalogs::open(objects.clone(), stores.clone(), images, host, &mut |why| panic!("{why}"));
            let spec = serde_json::from_value(spec.clone()).unwrap();
            let checked = catalogs.unwrap().check(&"desk".parse().unwrap(), &spec);
            match (checked, why) {
                (Err(e), Some(why)) => assert!(e.message.contains(why), "{e}"),
                (Ok(_), None) => {}
                (checked, _) => panic!("{hypervisor:?} {folder} {spec:?}: {checked:?}"),
            }
        }
    }

    /// The daemon ends after the transaction that makes the catalog.
    #[test]
    fn a_key_is_recorded_with_its_catalog() {
        let left = Arc::new(AtomicUsize::new(usize::MAX));
        let of = Arc::clone(&left);
        let host = TestHost::with_store(NO_LIMITS, |store| Arc::new(FailingStore::counted(store, of)));
        let (name, key) = ("desk".parse().unwrap(), IdempotentRequest::new("ci", "catalogs", "1", &()));
        let create = || host.catalogs.create(&name, &spec(json!({ "count": 2 })), false, &key);
        left.store(1, Ordering::Relaxed);
        assert_eq!(create().unwrap_err().code, ErrorCode::Exhausted);
        left.store(usize::MAX, Ordering::Relaxed);
        let (catalog, is_repeated) = create().unwrap();
        assert!(is_repeated && catalog.name == name, "{catalog:?}");
        assert_eq!(host.catalogs.machines(Some(&name)).unwrap().len(), 2, "what was missing is made");
    }

    /// An earlier daemon took images of up to 16 TiB.
    #[test]
    fn a_version_that_no_disk_can_be_made_of_is_taken_by_no_catalog() {
        let dir = tempfile::tempdir().unwrap();
        let objects = Objects::new(Arc::new(SqliteStore::open(&dir.path().join("db")).unwrap()));
        let stores = Stores::open(objects.clone(), &dir.path().join("store")).unwrap();
        let version = |number: u32, size_bytes: u64| -> ImageVersion {
            serde_json::from_value(json!({
                "image": "big", "version": number, "state": "ready", "store": "default", "size_bytes": size_bytes,
                "origin": { "kind": "import", "path": "/x", "format": "raw" }, "stored_bytes": 0,
                "digest": "sha256:0", "created": "2026-01-01T00:00:00Z",
            }))
            .unwrap()
        };
        let image: Image = serde_json::from_value(json!({
            "name": "big", "published": 1, "tags": {}, "newest": 2, "created": "2026-01-01T00:00:00Z",
        }))
        .unwrap();
        objects
            .change(|changes| {
                changes.put("big", &image);
                for (number, size_bytes) in [(1, 1 << 20), (2, 5 << 40)] {
                    let name = image.name.clone();
                    changes.put(&key(&name, number), &version(number, size_bytes));
                }
                Ok::<_, HostError>(())
            })
            .unwrap();
        let mut complain = |why: &str| panic!("{why}");
        let host = of(Hypervisor::Qemu, "/machines");
        let images = Images::of_whole(&objects, &stores);
        let catalogs = Catalogs::open(objects, stores, images.clone(), host, &mut complain).unwrap();
        let spec = |image: &str| serde_json::from_value(json!({ "image": image, "count": 0 })).unwrap();
        let [small, large, name] = ["small", "large", "big"].map(|name| name.parse::<Name>().unwrap());
        let unkeyed = IdempotentRequest::default();
        catalogs.create(&small, &spec("big"), false, &unkeyed).unwrap();
        let too_large = |error: HostError| {
            let says = error.message.contains("big:2 has 5.0 TiB, and the largest disk 4.0 TiB");
            assert!(error.code == ErrorCode::Invalid && says, "{error:?}");
        };
        too_large(catalogs.create(&large, &spec("big:2"), false, &unkeyed).unwrap_err());
        too_large(catalogs.change(&small, &spec("big:2"), CatalogChangeTerms::default()).unwrap_err());
        let update = serde_json::from_value(json!({ "image": "big:2" })).unwrap();
        too_large(catalogs.update(&small, &update, CatalogChangeTerms::default()).unwrap_err());
        too_large(images.publish(&name, 2, ImageChangeTerms::default()).unwrap_err());
        too_large(images.disk(&name, 2).unwrap_err());
        assert_eq!(catalogs.get(&small).unwrap().version, 1);
    }
}
