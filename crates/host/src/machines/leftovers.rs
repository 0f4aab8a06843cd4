//! What deleted machines have left: the files that they kept, until somebody says that these may go. Owns the records.
//!
//! Invariant: while a disk is named here, the version of the image that it is of cannot be deleted; a file goes when
//! nothing of its machine runs any more, which its machine's task knows.

use super::belongings::{Belongings, KeptDisk};
use super::{Machines, Shared};
use crate::error::HostError;
use crate::paging::{PageBuilder, Part};
use crate::store::{Changes, Kind, Object};
use jiff::Timestamp;
use serde::{Deserialize, Serialize};
use spillway_api::{ErrorCode, LeftDisk, Leftover, Machine, Name, Page};
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;
use utoipa::ToSchema;

/// Sectors, as the kernel counts what a file takes.
const SECTOR_BYTES: u64 = 512;
/// Leftovers among which one is looked for that may be meant by a UUID that none has.
const MOST_KNOWN: usize = 256;

/// What a machine has left that is no more.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct LeftoverFiles {
    /// It was this one.
    machine: Machine,
    #[schema(value_type = String, format = DateTime)]
    deleted: Timestamp,
    #[schema(value_type = Option<String>)]
    data: Option<PathBuf>,
    disk: Option<KeptDisk>,
    /// It is to go.
    doomed: bool,
}

impl Kind for LeftoverFiles {
    const PREFIX: &'static str = "leftovers/";
    const WORD: &'static str = "leftover";
}

impl LeftoverFiles {
    /// The machine that a key in the store is of.
    pub(super) fn machine_of(key: &str) -> Option<&str> {
        Some(key.strip_prefix(Self::PREFIX)?.split_once('/')?.0)
    }

    /// Whether it is to go.
    pub fn is_doomed(&self) -> bool {
        self.doomed
    }

    fn files(&self) -> impl Iterator<Item = &PathBuf> {
        self.data.iter().chain(self.disk.as_ref().map(|disk| &disk.path))
    }

    /// Whether there is nothing that a record is needed for. A file that should be there and is not may be on a file
    /// system that is not mounted.
    fn is_nothing(&self) -> bool {
        self.data.is_none() && self.disk.as_ref().is_none_or(|disk| !disk.made && !disk.path.exists())
    }

    fn describe(self) -> Leftover {
        let allocated = |path| std::fs::metadata(path).map(|file| file.blocks() * SECTOR_BYTES);
        let allocated_bytes = self.files().map(allocated).sum::<Result<u64, _>>().ok();
        let disk = self.disk.map(|KeptDisk { path, image, version, .. }| LeftDisk { path, image, version });
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

/// A machine is no more: what it had is somebody's to delete, or goes.
pub fn leave(changes: &mut Changes, machine: &Machine, with_data: bool) -> Result<(), HostError> {
    let name = machine.name.as_str();
    let Some(had) = changes.get::<Belongings>(name)? else { return Ok(()) };
    changes.delete::<Belongings>(name);
    let Belongings { uuid, data, disk, .. } = had.value;
    if uuid == machine.identity.uuid && (data.is_some() || disk.is_some()) {
        let deleted = Timestamp::now();
        let left = LeftoverFiles { machine: machine.clone(), deleted, data, disk, doomed: with_data };
        changes.put(&format!("{name}/{uuid}"), &left);
    }
    Ok(())
}

/// Refuses if a disk that is left is of that version, or of any of the image.
pub fn none_needs(changes: &mut Changes, image: &Name, version: Option<u32>) -> Result<(), HostError> {
    for left in changes.list_below::<LeftoverFiles>("")? {
        let needs =
            |disk: &&KeptDisk| disk.image == *image && version.is_none_or(|version| disk.version == version);
        if let Some(disk) = left.value.disk.as_ref().filter(needs) {
            let Machine { name, identity, .. } = &left.value.machine;
            let version = disk.version;
            let message = match left.value.doomed {
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

impl Machines {
    /// A part of what deleted machines have left, in the order of their names.
    pub fn leftovers(&self, part: &Part) -> Result<Page<Leftover>, HostError> {
        let mut page = PageBuilder::new(part);
        for left in self.shared.objects.each_after::<LeftoverFiles>(&part.after) {
            let Object { name, value: left, .. } = left?;
            if !left.doomed && !left.is_nothing() && !page.add(&name, left.describe()) {
                break;
            }
        }
        Ok(page.page())
    }

    /// What the machine of this UUID has left goes, as soon as nothing of it runs any more.
    pub fn delete_leftover(&self, uuid: &str) -> Result<(), HostError> {
        self.shared.objects.change(|changes| {
            let mut known = Vec::new();
            let mut found = None;
            for left in self.shared.objects.each_after::<LeftoverFiles>("") {
                let left = left?;
                let its = &left.value.machine.identity.uuid;
                if its == uuid {
                    found = Some(left);
                    break;
                }
                // Enough to say which one may be meant.
                if known.len() < MOST_KNOWN {
                    known.push(its.clone());
                }
            }
            let Some(found) = found else {
                return Err(HostError::not_found(
                    LeftoverFiles::WORD,
                    uuid,
                    known.iter().map(String::as_str),
                ));
            };
            if let Some(left) = changes.get::<LeftoverFiles>(&found.name)? {
                changes.put(&left.name, &LeftoverFiles { doomed: true, ..left.value });
            }
            Ok(())
        })
    }
}

impl Shared {
    /// The names of machines of which something is left that is to go.
    pub(super) fn doomed(&self) -> Result<Vec<Name>, HostError> {
        let left = self.objects.list::<LeftoverFiles>()?.into_iter().filter(|left| left.value.is_doomed());
        Ok(left.map(|left| left.value.machine.name).collect())
    }

    /// Whether what the machine of this name and UUID had is to go.
    pub(super) fn is_doomed(&self, name: &Name, uuid: &str) -> Result<bool, HostError> {
        let left = self.objects.get::<LeftoverFiles>(&format!("{name}/{uuid}"))?;
        Ok(left.is_some_and(|left| left.value.doomed))
    }

    /// Of what machines of this name have left, but for the one of this UUID, that goes which is to. Nothing of them may run.
    pub(super) fn dispose(&self, name: &Name, but: Option<&str>) -> Result<(), HostError> {
        let mut all = self.objects.list_below::<LeftoverFiles>(&format!("{name}/"))?;
        all.retain(|left| but != Some(left.value.machine.identity.uuid.as_str()));
        // What cannot go keeps nothing else.
        all.iter().map(|left| self.dispose_of(left)).fold(Ok(()), Result::and)
    }

    fn dispose_of(&self, left: &Object<LeftoverFiles>) -> Result<(), HostError> {
        if left.value.doomed {
            left.value.files().map(|path| self.remove_kept(path)).fold(Ok(()), Result::and)?;
        } else if !left.value.is_nothing() {
            return Ok(());
        }
        self.objects.change(|changes| {
            changes.delete::<LeftoverFiles>(&left.name);
            Ok(())
        })
    }
}
