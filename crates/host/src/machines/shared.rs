//! Services of the host that the tasks of machines share. Owns what was probed of QEMU, and the number of disks and VMMs
//! that start at the same time.
//!
//! Invariant: each service guards its own state; a task holds none of their locks while it waits.

use super::MachineHostConfig;
use super::admission::Admission;
use super::belongings::MachineFiles;
use super::blocking::blocking;
use super::disk;
use super::figures::FigureCollector;
use super::host::MemoryWatch;
use super::leftovers::Leftovers;
use super::placing::Placement;
use super::registry::MachineRegistry;
use super::run::{MachineFolders, RunRecord};
use crate::error::HostError;
use crate::events::Events;
use crate::guest_users::GuestUsers;
use crate::hypervisor::libvirt::Libvirt;
use crate::hypervisor::qemu;
use crate::images::Images;
use crate::store::Objects;
use crate::stores::Stores;
use spillway_api::{ErrorCode, Name};
use spillway_control::kvm::{self, Accelerator};
use std::fs::DirBuilder;
use std::io;
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard};
use tokio::sync::{OnceCell, Semaphore};

/// Number of disks or VMMs that start at the same time.
const STARTS: usize = 4;

/// Services of the host that the tasks of machines share.
pub struct MachineServices {
    pub(super) events: Events,
    pub(super) objects: Objects,
    pub(super) stores: Stores,
    pub(super) images: Images,
    pub(super) parts: MachineHostConfig,
    pub(super) folders: MachineFolders,
    pub(super) libvirt: Arc<Libvirt>,
    pub(super) registry: Arc<MachineRegistry>,
    pub(super) admission: Arc<Admission>,
    pub(super) memory: Arc<MemoryWatch>,
    pub(super) files: Arc<MachineFiles>,
    pub(super) leftovers: Arc<Leftovers>,
    pub(super) placement: Placement,
    pub(super) figures: Arc<FigureCollector>,
    pub(super) starts: Semaphore,
    users: Mutex<GuestUsers>,
    accelerator: OnceCell<Accelerator>,
}

impl MachineServices {
    /// Combines these services, without any machine yet.
    pub(super) fn new(
        events: Events,
        objects: Objects,
        stores: Stores,
        images: Images,
        parts: MachineHostConfig,
        figures: Arc<FigureCollector>,
        registry: Arc<MachineRegistry>,
    ) -> MachineServices {
        let folders = MachineFolders::new(parts.folder.clone());
        let files = Arc::new(MachineFiles::new(objects.clone(), stores.clone(), events.clone()));
        MachineServices {
            admission: Arc::new(Admission::new(parts.capacity, Arc::clone(&registry))),
            memory: Arc::new(MemoryWatch::new(
                parts.memory_floor_bytes,
                events.clone(),
                Arc::clone(&registry),
            )),
            leftovers: Arc::new(Leftovers::new(objects.clone(), Arc::clone(&files))),
            placement: Placement::new(stores.clone(), folders.clone()),
            libvirt: Arc::new(Libvirt::new(parts.libvirt_uri.clone())),
            users: Mutex::new(GuestUsers::new(parts.guest_users)),
            starts: Semaphore::new(STARTS),
            accelerator: OnceCell::new_with(parts.accelerator.clone()),
            events,
            objects,
            stores,
            images,
            parts,
            folders,
            registry,
            files,
            figures,
        }
    }

    /// The users that VMMs run as, by machine.
    pub(super) fn users(&self) -> MutexGuard<'_, GuestUsers> {
        self.users.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    /// Records the users of running VMMs. If the record of a run cannot be read, the folder's group is used.
    pub(super) fn note_users(&self, runs: &[(Name, RunRecord)]) -> Result<(), HostError> {
        let mut users = self.users();
        for name in self.folders.names()? {
            if let Ok(found) = std::fs::metadata(self.folders.of(&name).path()) {
                users.note(&name, found.gid());
            }
        }
        runs.iter().for_each(|(name, run)| run.user.into_iter().for_each(|user| users.note(name, user)));
        Ok(())
    }

    /// Returns what a run's disk is made from.
    pub(super) fn source(&self, run: &RunRecord) -> Result<disk::DiskSource, HostError> {
        let image = self.images.disk(&run.image, run.version)?;
        disk::check_servable(run, &image)?;
        let store = self.stores.for_disks(run.spec.overflow_store.as_ref())?;
        self.stores.check(&store)?;
        let overflow = store.path.join("overflow");
        let failed = |e: io::Error| {
            HostError::new(ErrorCode::Internal, format!("{} cannot be made: {e}", overflow.display()))
        };
        DirBuilder::new().recursive(true).mode(0o700).create(&overflow).map_err(failed)?;
        let image_id = disk::image_id(run);
        let digests = match run.spec.verify_reads {
            true => Some(self.images.digests(&run.image, run.version)?),
            false => None,
        };
        Ok(disk::DiskSource { program: self.parts.program.clone(), image, image_id, digests, overflow })
    }

    /// Returns how QEMU runs guests on this host: as the settings say, or as a probe finds once.
    pub(super) async fn accelerator(&self) -> Result<&Accelerator, HostError> {
        let probe = || async {
            let folder = self.parts.folder.clone();
            blocking(move || probe(&folder)).await
        };
        self.accelerator.get_or_try_init(probe).await
    }
}

fn probe(folder: &Path) -> Result<Accelerator, HostError> {
    let internal = |e: io::Error| HostError::new(ErrorCode::Internal, format!("KVM cannot be probed: {e}"));
    // Nobody interrupts the probe.
    let (quiet, _other) = std::os::unix::net::UnixStream::pair().map_err(internal)?;
    let dir = folder.parent().unwrap_or(folder);
    match kvm::probe(qemu::PROGRAM, dir, std::os::fd::AsFd::as_fd(&quiet)) {
        Ok(Some(accelerator)) => Ok(accelerator),
        Ok(None) => Err(internal(io::ErrorKind::Interrupted.into())),
        Err(e) => Err(HostError::new(ErrorCode::Unavailable, e.to_string())),
    }
}
