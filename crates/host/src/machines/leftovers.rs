//! Files that deleted machines leave in the stores until a client deletes them. Owns their records.
//!
//! Invariant: while a leftover disk is recorded, the version of the image that it is based on cannot be deleted; a file
//! is removed once no process of its machine runs, which the machine's task knows.

use super::belongings::{Belongings, KeptDisk, MachineFiles};
use crate::error::HostError;
use crate::paging::{PageBuilder, PageRequest};
use crate::store::{Changes, Object, Objects, StoredRecord};
use jiff::Timestamp;
use serde::{Deserialize, Serialize};
use spillway_api::{ErrorCode, Leftover, LeftoverDisk, Machine, Name, Page};
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;
use std::sync::Arc;
use utoipa::ToSchema;

/// Sectors, as the kernel counts what a file occupies.
const SECTOR_BYTES: u64 = 512;
/// Number of leftovers that are searched for a similar UUID, for the error message.
const MOST_KNOWN: usize = 256;

/// Index from the UUID of a leftover to its machine's name, so that a lookup does not read all leftovers.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct LeftoverOwner {
    /// Name of the deleted machine.
    machine: Name,
}

impl StoredRecord for LeftoverOwner {
    const PREFIX: &'static str = "leftover-owners/";
    const WORD: &'static str = "leftover";
}

/// Record of the files that a deleted machine has left.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct LeftoverFiles {
    /// The deleted machine.
    machine: Machine,
    #[schema(value_type = String, format = DateTime)]
    deleted: Timestamp,
    #[schema(value_type = Option<String>)]
    data: Option<PathBuf>,
    disk: Option<KeptDisk>,
    /// Whether the files should be removed.
    to_be_removed: bool,
}

impl StoredRecord for LeftoverFiles {
    const PREFIX: &'static str = "leftovers/";
    const WORD: &'static str = "leftover";
}

impl LeftoverFiles {
    /// Returns the name of the machine from a key in the store.
    pub(super) fn machine_of(key: &str) -> Option<&str> {
        Some(key.strip_prefix(Self::PREFIX)?.split_once('/')?.0)
    }

    /// Whether the files should be removed.
    pub fn is_to_be_removed(&self) -> bool {
        self.to_be_removed
    }

    fn files(&self) -> impl Iterator<Item = &PathBuf> {
        self.data.iter().chain(self.disk.as_ref().map(|disk| &disk.path))
    }

    /// Whether no record is needed. A file that is missing may be on a file system that is not mounted.
    fn is_nothing(&self) -> bool {
        self.data.is_none() && self.disk.as_ref().is_none_or(|disk| !disk.made && !disk.path.exists())
    }

    fn describe(self) -> Leftover {
        let allocated = |path| std::fs::metadata(path).map(|file| file.blocks() * SECTOR_BYTES);
        let allocated_bytes = self.files().map(allocated).sum::<Result<u64, _>>().ok();
        let disk =
            self.disk.map(|KeptDisk { path, image, version, .. }| LeftoverDisk { path, image, version });
        let Machine { name, catalog, identity, .. } = self.machine;
        let deleted = self.deleted;
        Leftover {
            uuid: identity.uuid,
            machine: name,
            catalog,
            deleted,
            data_disk: self.data,
            disk,
            allocated_bytes,
        }
    }
}

/// Records the files of a machine that is being deleted: they stay until a client deletes them, or are removed if
/// `with_data` is set.
pub fn record(changes: &mut Changes, machine: &Machine, with_data: bool) -> Result<(), HostError> {
    let name = machine.name.as_str();
    let Some(had) = changes.get::<Belongings>(name)? else { return Ok(()) };
    changes.delete::<Belongings>(name);
    let Belongings { uuid, data, disk, .. } = had.value;
    if uuid == machine.identity.uuid && (data.is_some() || disk.is_some()) {
        let deleted = Timestamp::now();
        let left = LeftoverFiles { machine: machine.clone(), deleted, data, disk, to_be_removed: with_data };
        changes.put(&format!("{name}/{uuid}"), &left);
        changes.put(&uuid, &LeftoverOwner { machine: machine.name.clone() });
    }
    Ok(())
}

/// Refuses if a leftover disk is based on this version, or on any version of the image.
pub fn check_no_leftover_needs(
    changes: &mut Changes,
    image: &Name,
    version: Option<u32>,
) -> Result<(), HostError> {
    for left in changes.list_below::<LeftoverFiles>("")? {
        let needs =
            |disk: &&KeptDisk| disk.image == *image && version.is_none_or(|version| disk.version == version);
        if let Some(disk) = left.value.disk.as_ref().filter(needs) {
            let Machine { name, identity, .. } = &left.value.machine;
            let version = disk.version;
            let message = match left.value.to_be_removed {
                true => format!(
                    "the disk that the deleted machine '{name}' had of {image}:{version} is being removed: try again"
                ),
                false => format!(
                    "the disk that the deleted machine '{name}' has left is of {image}:{version}: delete that first \
                     ('spillway leftover delete {}')",
                    identity.uuid
                ),
            };
            return Err(HostError::new(ErrorCode::InUse, message));
        }
    }
    Ok(())
}

/// Manages the leftovers of deleted machines.
pub struct Leftovers {
    objects: Objects,
    files: Arc<MachineFiles>,
}

impl Leftovers {
    /// Creates the owner of these records and files.
    pub fn new(objects: Objects, files: Arc<MachineFiles>) -> Leftovers {
        Leftovers { objects, files }
    }

    /// Returns a page of the leftovers, in the order of their machines' names.
    pub fn page(&self, part: &PageRequest) -> Result<Page<Leftover>, HostError> {
        let mut page = PageBuilder::new(part);
        for left in self.objects.each_after::<LeftoverFiles>(&part.after) {
            let Object { name, value: left, .. } = left?;
            if !left.to_be_removed && !left.is_nothing() && !page.add(&name, left.describe()) {
                break;
            }
        }
        Ok(page.page())
    }

    /// Marks the leftovers of the machine with this UUID for removal. They are removed once nothing of it runs. With
    /// `dry_run` everything is checked and nothing removed.
    pub fn delete(&self, uuid: &str, dry_run: bool) -> Result<(), HostError> {
        self.objects.change(|changes| {
            let left = match changes.get::<LeftoverOwner>(uuid)? {
                Some(owner) => changes.get::<LeftoverFiles>(&format!("{}/{uuid}", owner.value.machine))?,
                None => None,
            };
            let Some(left) = left else { return Err(self.none(uuid)?) };
            if !dry_run {
                changes.put(&left.name, &LeftoverFiles { to_be_removed: true, ..left.value });
            }
            Ok(())
        })
    }

    /// Error for a UUID without leftovers; suggests a similar one.
    fn none(&self, uuid: &str) -> Result<HostError, HostError> {
        let known = self.objects.each_after::<LeftoverOwner>("").take(MOST_KNOWN);
        let known = known.map(|owner| Ok(owner?.name)).collect::<Result<Vec<_>, HostError>>()?;
        Ok(HostError::not_found(LeftoverFiles::WORD, uuid, known.iter().map(String::as_str)))
    }

    /// Names of the machines with leftovers that are marked for removal.
    pub fn to_be_removed(&self) -> Result<Vec<Name>, HostError> {
        let left =
            self.objects.list::<LeftoverFiles>()?.into_iter().filter(|left| left.value.is_to_be_removed());
        Ok(left.map(|left| left.value.machine.name).collect())
    }

    /// Whether the leftovers of this machine are marked for removal.
    pub fn is_to_be_removed(&self, name: &Name, uuid: &str) -> Result<bool, HostError> {
        let left = self.objects.get::<LeftoverFiles>(&format!("{name}/{uuid}"))?;
        Ok(left.is_some_and(|left| left.value.to_be_removed))
    }

    /// Files that `remove_marked` may look at or remove.
    pub fn files_to_remove(&self, name: &Name, but: Option<&str>) -> Result<Vec<PathBuf>, HostError> {
        let mut all = self.objects.list_below::<LeftoverFiles>(&format!("{name}/"))?;
        all.retain(|left| but != Some(left.value.machine.identity.uuid.as_str()));
        let touched = all.iter().filter(|left| left.value.to_be_removed || left.value.data.is_none());
        Ok(touched.flat_map(|left| left.value.files().cloned()).collect())
    }

    /// Removes the marked leftovers of machines of this name, except the one with UUID `but`. No process of them may run.
    pub fn remove_marked(&self, name: &Name, but: Option<&str>) -> Result<(), HostError> {
        let mut all = self.objects.list_below::<LeftoverFiles>(&format!("{name}/"))?;
        all.retain(|left| but != Some(left.value.machine.identity.uuid.as_str()));
        // One that cannot be removed does not keep the others.
        all.iter().map(|left| self.remove_one(left)).fold(Ok(()), Result::and)
    }

    fn remove_one(&self, left: &Object<LeftoverFiles>) -> Result<(), HostError> {
        if left.value.to_be_removed {
            left.value.files().map(|path| self.files.remove_kept(path)).fold(Ok(()), Result::and)?;
        } else if !left.value.is_nothing() {
            return Ok(());
        }
        self.objects.change(|changes| {
            changes.delete::<LeftoverFiles>(&left.name);
            changes.delete::<LeftoverOwner>(&left.value.machine.identity.uuid);
            Ok(())
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::events::Events;
    use crate::store::SqliteStore;
    use crate::stores::Stores;
    use serde_json::json;
    use std::sync::atomic::Ordering;

    /// Counted in steps of the database, so that it is the same on a busy host.
    #[test]
    fn one_of_many_is_deleted_without_a_look_at_the_others() {
        let dir = tempfile::tempdir().unwrap();
        let store = SqliteStore::open(&dir.path().join("db")).unwrap();
        let steps = store.count_steps();
        let objects = Objects::new(Arc::new(store));
        let stores = Stores::open(objects.clone(), &dir.path().join("store")).unwrap();
        let events = Events::open(&dir.path().join("events"), &mut |why| panic!("{why}"));
        let files = MachineFiles::new(objects.clone(), stores, events);
        let leftovers = Leftovers::new(objects.clone(), Arc::new(files));
        let delete = |number: usize| {
            let before = steps.load(Ordering::Relaxed);
            leftovers.delete(&format!("uuid-{number:05}"), false).unwrap();
            steps.load(Ordering::Relaxed) - before
        };
        let machine = |number: usize| -> Machine {
            let identity = json!({ "uuid": format!("uuid-{number:05}"), "mac": "02:00:00:00:00:01" });
            let machine = json!({
                "name": format!("own-{number:05}"), "catalog": "own", "number": number, "identity": identity,
                "created": Timestamp::now(),
            });
            serde_json::from_value(machine).unwrap()
        };
        let leave_some = |numbers: std::ops::Range<usize>| {
            for number in numbers {
                let machine = machine(number);
                let had = json!({
                    "uuid": machine.identity.uuid, "host_key": { "private": "", "public": "" },
                    "data": "/nowhere/data", "disk": null,
                });
                let had: Belongings = serde_json::from_value(had).unwrap();
                let name = machine.name.as_str();
                let record = |changes: &mut Changes| {
                    changes.put(name, &had);
                    Ok::<_, HostError>(())
                };
                objects.change(record).unwrap();
                objects.change(|changes| super::record(changes, &machine, false)).unwrap();
            }
        };
        leave_some(0..10);
        leftovers.delete("uuid-00001", true).unwrap();
        assert_eq!(leftovers.to_be_removed().unwrap(), [], "a dry run");
        // The first one makes its statements.
        delete(0);
        let among_few = delete(9);
        leave_some(10..600);
        let among_many = delete(599);
        // The reserve may be filled up at any change, which is not done step by step.
        assert!(among_many <= among_few + 200, "{among_few} {among_many}");
        let error = leftovers.delete("uuid-0001x", false).unwrap_err();
        assert!(error.message.contains("do you mean 'uuid-0001"), "{error}");
        // What is gone is not found by its UUID any more.
        leftovers.remove_marked(&"own-00009".parse().unwrap(), None).unwrap();
        assert_eq!(leftovers.delete("uuid-00009", false).unwrap_err().code, ErrorCode::NotFound);
    }
}
