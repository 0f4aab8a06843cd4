//! What outlives a machine's runs: its SSH host key, its data disk and its kept disk. Owns these records and files, and
//! the seed disk, which is made anew for each run.
//!
//! Invariant: a kept file is named by its machine's UUID and is removed only on request; a record names a file only once
//! the file exists.

use super::{scratch, vmm::FirmwareState};
use crate::error::HostError;
use crate::events::Events;
use crate::seed::{HostKey, Seed, host_key};
use crate::store::{Objects, StoredRecord};
use crate::stores::Stores;
use serde::{Deserialize, Serialize};
use spillway_api::{
    Catalog, CatalogSpec, DiskMode, ErrorCode, EventKind, Machine, Name, Network, StoreClass,
};
use std::fs::{self, DirBuilder, File};
use std::io::{self, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use utoipa::ToSchema;

/// File of the seed disk in a machine's folder.
pub const SEED: &str = "seed.img";
/// Names of folders in a store.
const DATA: &str = "data";
const DISKS: &str = "disks";
/// Extension of kept disks.
const DISK: &str = "disk";

/// Record of what a machine keeps between its runs.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Belongings {
    /// UUID of the machine.
    pub uuid: String,
    /// SSH host key of the guest, created once.
    pub host_key: HostKey,
    /// Path of the data disk, if the machine has one.
    #[schema(value_type = Option<String>)]
    pub data: Option<PathBuf>,
    /// The kept disk, in mode `persistent`.
    pub disk: Option<KeptDisk>,
}

/// Record of a disk of mode `persistent`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct KeptDisk {
    /// Path of the disk's file.
    #[schema(value_type = String)]
    pub path: PathBuf,
    /// Whether the disk has been served, so that its file must exist.
    pub made: bool,
    /// Name of the image that the disk is based on. It never changes.
    pub image: Name,
    /// Version of that image.
    pub version: u32,
    /// The machine's reset counter when this disk was created.
    pub resets: u64,
}

impl KeptDisk {
    /// Whether the next start keeps using this disk, with these settings and this reset counter.
    pub fn stays(&self, spec: &CatalogSpec, resets: u64) -> bool {
        spec.mode() == DiskMode::Persistent && self.image == spec.image.name && self.resets == resets
    }
}

impl StoredRecord for Belongings {
    const PREFIX: &'static str = "belongings/";
    const WORD: &'static str = "machine";
}

/// Manages the files that outlive the runs of machines, and their records.
pub struct MachineFiles {
    objects: Objects,
    stores: Stores,
    events: Events,
}

impl MachineFiles {
    /// Creates the owner of files in these stores.
    pub fn new(objects: Objects, stores: Stores, events: Events) -> MachineFiles {
        MachineFiles { objects, stores, events }
    }

    /// Returns what a machine keeps, as its settings require for its next start. Creates what does not exist yet.
    pub fn belongings(
        &self,
        machine: &Machine,
        catalog: &Catalog,
        resets: u64,
    ) -> Result<Belongings, HostError> {
        let spec = &catalog.spec;
        let name = machine.name.as_str();
        let uuid = &machine.identity.uuid;
        let found = self.objects.get::<Belongings>(name)?.map(|belongings| belongings.value);
        let earlier = found.filter(|belongings| belongings.uuid == *uuid);
        let mut belongings = match earlier.clone() {
            Some(belongings) => belongings,
            None => Belongings { uuid: uuid.clone(), host_key: host_key()?, data: None, disk: None },
        };
        if let Some(disk) = belongings.disk.take_if(|disk| !disk.stays(spec, resets)) {
            self.remove_kept(&disk.path)?;
        }
        if spec.mode() == DiskMode::Persistent && belongings.disk.is_none() {
            let store = self.stores.for_disks(spec.overflow_store.as_ref())?;
            self.stores.check(&store)?;
            let path = store.path.join(DISKS).join(format!("{name}-{uuid}.{DISK}"));
            let folder = path.parent().unwrap_or(&path);
            let made = DirBuilder::new().recursive(true).mode(0o700).create(folder);
            made.map_err(|e| failed(folder, "cannot be made", e))?;
            let (image, version) = (spec.image.name.clone(), catalog.version);
            belongings.disk = Some(KeptDisk { path, made: false, image, version, resets });
        }
        if let Some(disk) = belongings.disk.as_ref().filter(|disk| disk.made && !disk.path.exists()) {
            let message = format!("{} is gone: is its file system mounted?", disk.path.display());
            return Err(HostError::new(ErrorCode::Unavailable, message));
        }
        let mut fresh = None;
        match (&belongings.data, spec.data_disk_bytes) {
            (Some(path), Some(bytes)) => grow(path, bytes)?,
            // The user who removed the data disk from the settings has confirmed that it may be deleted.
            (Some(path), None) => {
                self.remove_kept(path)?;
                belongings.data = None;
            }
            (None, Some(bytes)) => {
                // A machine that was deleted since may have left its data in this file. The record exists as long as the
                // machine does.
                self.check_exists(machine)?;
                let store = self.stores.for_disks(spec.data_disk_store.as_ref())?;
                self.stores.check(&store)?;
                let path = store.path.join(DATA).join(format!("{name}-{uuid}.raw"));
                make(&path, bytes)?;
                fresh = Some(path.clone());
                belongings.data = Some(path);
            }
            (None, None) => {}
        }
        if earlier.as_ref() != Some(&belongings) {
            let recorded = self.objects.change(|changes| {
                if changes.get::<Machine>(name)?.is_none_or(|found| found.value.identity.uuid != *uuid) {
                    return Err(HostError::not_found("machine", name, []));
                }
                changes.put(name, &belongings);
                Ok(())
            });
            if let (Err(e), Some(path)) = (&recorded, fresh)
                && e.code == ErrorCode::NotFound
            {
                // The machine was deleted meanwhile: the new file was never used, and no record names it.
                remove(&path)?;
            }
            recorded?;
        }
        Ok(belongings)
    }

    /// Returns an error if the machine was deleted, or if another machine has its name.
    fn check_exists(&self, machine: &Machine) -> Result<(), HostError> {
        let name = machine.name.as_str();
        match self.objects.get::<Machine>(name)? {
            Some(found) if found.value.identity.uuid == machine.identity.uuid => Ok(()),
            _ => Err(HostError::not_found("machine", name, [])),
        }
    }

    /// Records that a machine's kept disk exists once it is served: its file must exist from then on. Returns whether
    /// that is recorded.
    pub fn record_disk_made(&self, name: &str) -> Result<bool, HostError> {
        let disk = self.objects.get::<Belongings>(name)?.and_then(|found| found.value.disk);
        let Some(served) = disk.filter(|disk| disk.made || disk.path.exists()) else { return Ok(false) };
        self.objects.change(|changes| {
            if let Some(mut found) = changes.get::<Belongings>(name)?
                && let Some(disk) = found.value.disk.as_mut().filter(|disk| **disk == served && !disk.made)
            {
                disk.made = true;
                changes.put(name, &found.value);
            }
            Ok(true)
        })
    }

    /// Returns the path of a machine's scratch disk, if it has one.
    pub fn scratch(&self, machine: &Machine, spec: &CatalogSpec) -> Result<Option<PathBuf>, HostError> {
        if spec.scratch_disk_bytes.is_none() {
            return Ok(None);
        }
        let store = self.stores.list()?.into_iter().find(|store| store.class == StoreClass::Temp);
        let none = "no store is of class temp: add one ('spillway store add')";
        let store = store.ok_or_else(|| HostError::new(ErrorCode::Unavailable, none))?;
        self.stores.check(&store)?;
        Ok(Some(
            store.path.join(scratch::FOLDER).join(format!("{}-{}.raw", machine.name, machine.identity.uuid)),
        ))
    }

    /// Removes a kept file durably, and with a disk what its machine's firmware keeps. Fails if the file cannot be seen, or if it might reappear after a power loss.
    pub fn remove_kept(&self, path: &Path) -> Result<(), HostError> {
        if let Some(store) = self.stores.holding(path)? {
            self.stores.check(&store)?;
        }
        if path.extension().is_some_and(|extension| extension == DISK) {
            FirmwareState::beside(path).remove()?;
        }
        remove(path)?;
        match path.parent().map(File::open) {
            Some(Ok(folder)) => folder.sync_all().map_err(|e| failed(path, "may not be gone for good", e)),
            _ => Ok(()),
        }
    }

    /// Removes the files in `folder` of each store that no run names. Raises an event for what cannot be removed.
    pub fn sweep(&self, folder: &str, is_named: impl Fn(&Path) -> bool) -> Result<(), HostError> {
        for store in self.stores.list()? {
            let Ok(entries) = fs::read_dir(store.path.join(folder)) else { continue };
            let swept = self.stores.check(&store).and_then(|()| {
                let mut unnamed = entries.flatten().map(|entry| entry.path()).filter(|path| !is_named(path));
                unnamed.try_for_each(|path| remove(&path))
            });
            if let Err(e) = swept {
                let text = format!("what machines have left there is not removed: {e}");
                self.events.raise(EventKind::Failed, &format!("store/{}", store.name), text);
            }
        }
        Ok(())
    }
}

/// Writes the seed disk, which tells a guest its identity, and where to phone when it is ready.
pub fn write_seed(
    folder: &Path,
    machine: &Machine,
    spec: &CatalogSpec,
    host_key: &HostKey,
    phone_home: Option<&str>,
) -> Result<(), HostError> {
    let cards = spec.hardware.networks().enumerate().filter(|(_, network)| **network != Network::None);
    let cards: Vec<String> = cards.map(|(card, _)| machine.identity.mac_of_card(card)).collect();
    let seed = Seed {
        name: &machine.name,
        identity: &machine.identity,
        host_key,
        cards: &cards,
        authorized_keys: &spec.authorized_keys,
        user_data: spec.user_data.as_deref(),
        phone_home,
    };
    let path = folder.join(SEED);
    let disk = seed.disk()?;
    let write = || {
        // The file holds a secret key.
        let mut file = File::options().create(true).truncate(true).write(true).mode(0o600).open(&path)?;
        file.write_all(&disk)
    };
    write().map_err(|e| failed(&path, "cannot be written", e))
}

/// Removes a file if it exists.
pub fn remove(path: &Path) -> Result<(), HostError> {
    match fs::remove_file(path) {
        Err(e) if e.kind() != io::ErrorKind::NotFound => Err(failed(path, "cannot be removed", e)),
        _ => Ok(()),
    }
}

/// Creates a sparse file of at least this size, or takes the one that exists: records that were restored from a backup may not
/// name it yet.
pub(super) fn make(path: &Path, bytes: u64) -> Result<(), HostError> {
    let folder = path.parent().unwrap_or(Path::new("/"));
    let make = || {
        DirBuilder::new().recursive(true).mode(0o700).create(folder)?;
        let file = File::options().create(true).truncate(false).write(true).mode(0o600).open(path)?;
        if file.metadata()?.len() < bytes {
            file.set_len(bytes)?;
        }
        file.sync_all()?;
        folder.ancestors().take(2).try_for_each(|folder| File::open(folder)?.sync_all())
    };
    make().map_err(|e| failed(path, "cannot be made", e))
}

/// Grows a file, which must exist, to at least this size.
fn grow(path: &Path, bytes: u64) -> Result<(), HostError> {
    let grow = || {
        let file = File::options().write(true).open(path)?;
        if file.metadata()?.len() < bytes {
            file.set_len(bytes)?;
            file.sync_all()?;
        }
        Ok(())
    };
    grow().map_err(|e| failed(path, "cannot be used", e))
}

pub(super) fn failed(path: &Path, what: &str, error: io::Error) -> HostError {
    let code = match error.kind() {
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => ErrorCode::Exhausted,
        _ => ErrorCode::Internal,
    };
    HostError::new(code, format!("{} {what}: {error}", path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::machines::testing::TestHost;
    use crate::resources::budget::NO_LIMITS;
    use serde_json::json;

    /// The backup was made before the machine's first start, and restored when its guest had written.
    #[test]
    fn a_data_disk_that_restored_records_do_not_know_is_taken_as_it_is() {
        let host = TestHost::new(NO_LIMITS);
        let catalog = host.catalog("desk", json!({ "data_disk_bytes": 1 << 20 }));
        let machine = host.objects.get::<Machine>("desk-001").unwrap().unwrap().value;
        let files = &host.shared.files;
        let before = files.belongings(&machine, &catalog, 0).unwrap().data.unwrap();
        let written = vec![7; 2 << 20];
        fs::write(&before, &written).unwrap();
        host.objects
            .change(|changes| {
                changes.delete::<Belongings>("desk-001");
                Ok::<_, HostError>(())
            })
            .unwrap();
        let after = files.belongings(&machine, &catalog, 0).unwrap().data.unwrap();
        assert_eq!(after, before);
        assert!(fs::read(&after).unwrap() == written, "it has what was written, to its end");
    }
}
