//! Committing a machine's disk as a new version of an image. Owns the rules about which machines can be committed; the
//! images make the version.
//!
//! Invariant: the machine is off when the commit begins, and cannot start until it has ended.

use super::belongings::{Belongings, KeptDisk};
use super::desired_state::DesiredState;
use super::views::MachineReader;
use super::{View, disk};
use crate::catalogs::Catalogs;
use crate::error::HostError;
use crate::idempotency::IdempotentRequest;
use crate::images::{Images, check_none_committed};
use crate::store::{Changes, Objects};
use spillway_api::{DiskMode, ErrorCode, ImageCommit, Machine, Name, Operation, Phase, Power};

/// Commits disks of machines as versions of images.
#[derive(Clone)]
pub struct DiskCommits {
    reader: MachineReader,
    catalogs: Catalogs,
    objects: Objects,
    images: Images,
}

impl DiskCommits {
    /// Creates commits from these machines into these images.
    pub fn new(reader: MachineReader, catalogs: Catalogs, objects: Objects, images: Images) -> DiskCommits {
        DiskCommits { reader, catalogs, objects, images }
    }

    /// Begins an operation that makes a new version of an image from a machine's disk. The flag is `true` if an earlier
    /// request with the same key began it; then the operation is as it was at its start.
    pub fn begin(
        &self,
        image: &Name,
        commit: &ImageCommit,
        key: &IdempotentRequest,
    ) -> Result<(Operation, bool), HostError> {
        if let Some(begun) = self.images.begun(key)? {
            return Ok((begun, true));
        }
        let view = self.reader.view(&commit.machine)?;
        view.check_off()?;
        let name = &view.machine.name;
        // Check here for a better message than the lock of the disk gives.
        self.objects.change(|changes| check_none_committed(changes, [name]))?;
        let disk = self.kept_disk(&view)?;
        let may_begin = |changes: &mut Changes| {
            view.check_unchanged(changes)?;
            check_none_committed(changes, [name])?;
            // Write the record unchanged: a client that starts or deletes the machine at the same time gets a conflict
            // and sees the commit.
            changes.put(name.as_str(), &view.machine);
            Ok(())
        };
        self.images.commit(image, commit, (&disk.image, disk.version), &disk.path, key, may_begin)
    }

    /// Returns the disk of the machine's next start, if it outlives stops and has been written.
    fn kept_disk(&self, view: &View) -> Result<KeptDisk, HostError> {
        let name = &view.machine.name;
        let refuse =
            |why: String| HostError::new(ErrorCode::Conflict, format!("{name} cannot be committed: {why}"));
        let catalog = self.catalogs.get(&view.machine.catalog)?;
        let mode = catalog.spec.mode();
        if mode != DiskMode::Persistent {
            return Err(refuse(format!(
                "a disk of mode {} is gone when its machine stops: do the maintenance on a machine of a catalog of its own, \
                 'spillway catalog create NAME --image {} --type dedicated'",
                mode.name(),
                catalog.spec.image.name
            )));
        }
        let found = self.objects.get::<Belongings>(name.as_str())?.map(|found| found.value);
        let disk =
            found.filter(|found| found.uuid == view.machine.identity.uuid).and_then(|found| found.disk);
        let Some(disk) = disk.filter(|disk| disk.made) else {
            return Err(refuse("it was never started, so its disk is its image".into()));
        };
        if !disk.stays(&catalog.spec, view.wanted.resets) {
            return Err(refuse(
                "its next start discards its disk, because a reset or another image was requested".into(),
            ));
        }
        Ok(disk)
    }
}

impl View {
    /// Refuses a machine that should run, or has not stopped yet.
    pub(super) fn check_off(&self) -> Result<(), HostError> {
        let name = &self.machine.name;
        let why = match self.status.phase {
            _ if self.wanted.power == Power::On => {
                format!("{name} is to run: stop it first ('spillway machine stop {name} --wait')")
            }
            Phase::Stopped if self.status.settled => return Ok(()),
            Phase::Stopped => format!("{name} was asked for something just now: try again"),
            phase => format!("{name} is {} still: wait until it has stopped", disk::word(phase)),
        };
        Err(HostError::new(ErrorCode::Conflict, why))
    }

    /// Refuses if the machine was replaced or its desired state has changed. The transaction fails if that changes before
    /// its commit.
    pub(super) fn check_unchanged(&self, changes: &mut Changes) -> Result<(), HostError> {
        let name = &self.machine.name;
        let machine = changes.get::<Machine>(name.as_str())?.map(|machine| machine.value.identity);
        let revision = changes.get::<DesiredState>(name.as_str())?.map(|wanted| wanted.revision);
        if machine.as_ref() == Some(&self.machine.identity) && revision.unwrap_or_default() == self.revision {
            return Ok(());
        }
        let message = format!("{name} was asked for something just now: try again");
        Err(HostError::new(ErrorCode::Conflict, message))
    }
}
