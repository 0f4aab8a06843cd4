//! The machines of a host: what is wanted of them, what they are, and the tasks that bring them there. Owns the folder in
//! which machines run.
//!
//! Invariant: what runs is known before anything is started.

mod act;
pub mod belongings;
mod blocking;
mod closing;
mod commit;
mod curve;
mod disk;
mod figures;
mod firmware;
mod host;
mod host_start;
mod keeper;
pub mod leftovers;
mod neighbours;
mod oversee;
mod placing;
mod ready;
mod rolling;
mod rollout;
mod run;
mod short_path;
mod status;
mod tag;
mod tasks;
mod views;
mod vmm;
pub mod wanted;

use crate::catalogs::Catalogs;
use crate::error::HostError;
use crate::events::Events;
use crate::guest_users::{GuestUsers, UserRange};
use crate::hypervisor::libvirt::Libvirt;
use crate::hypervisor::qemu;
use crate::images::Images;
use crate::resources::budget::{Budget, Capacity, Need};
use crate::resources::memory::Squeeze;
use crate::scopes::Scopes;
use crate::store::{Objects, RecordKind};
use crate::stores::Stores;
pub use act::{Claimant, WhichClaim};
use belongings::Belongings;
use blocking::{blocking, last_words, look};
pub use disk::word;
pub use figures::curves::CurvesOf;
use host::Rooms;
use host_start::HostStart;
use leftovers::LeftoverFiles;
use rolling::Rollouts;
use run::{Folder, Run};
use spillway_api::{ErrorCode, Hypervisor, MachineDetails, Name, StoreDetails};
use spillway_worker::kvm::{self, Accelerator};
use std::collections::HashMap;
use std::fs::DirBuilder;
use std::io;
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;
use tasks::TrackedMachine;
use tokio::sync::{Notify, OnceCell, Semaphore};
use views::View;
use wanted::Wanted;

/// What is recorded here.
pub(crate) const RECORDS: [RecordKind; 4] = [
    RecordKind::of::<Wanted>(),
    RecordKind::of::<Belongings>(),
    RecordKind::of::<LeftoverFiles>(),
    RecordKind::of::<HostStart>(),
];

/// Disks or VMMs that are started at a time.
const STARTS: usize = 4;
/// Private copies that are made at a time: more would only wait for the same disks.
const COPIES: usize = 2;

/// What a run's record looks like: it is stored too.
#[cfg(test)]
pub(crate) fn run_schema() -> crate::store::RecordSchema {
    crate::store::schema::<Run>()
}

/// The machines of a host. A clone is the same.
#[derive(Clone)]
pub struct Machines {
    shared: Arc<Shared>,
    catalogs: Catalogs,
}

/// Where the parts are that machines are made of.
#[derive(Clone, Debug)]
pub struct Parts {
    /// The folder that machines run in.
    pub folder: PathBuf,
    /// The program `spillway`.
    pub program: PathBuf,
    /// Who runs machines.
    pub hypervisor: Hypervisor,
    /// The libvirt that does, if it does (libvirt, uri).
    pub libvirt_uri: String,
    /// What machines may take of the host.
    pub capacity: Capacity,
    /// Caches shrink when less memory than this is available.
    pub memory_floor_bytes: u64,
    /// How long a claim lasts of which neither it nor its catalog says that; `None`: until it is released.
    pub claim_ttl_seconds: Option<u32>,
    /// Where their processes are.
    pub scopes: Scopes,
    /// The users that QEMUs run as which the daemon starts; `None`: as the daemon.
    pub guest_users: Option<UserRange>,
}

struct Shared {
    events: Events,
    objects: Objects,
    stores: Stores,
    images: Images,
    parts: Parts,
    libvirt: Arc<Libvirt>,
    budget: Mutex<Budget>,
    users: Mutex<GuestUsers>,
    squeeze: Mutex<Squeeze>,
    rooms: Mutex<Rooms>,
    /// What is known of each catalog's rollout.
    rollouts: Mutex<Rollouts>,
    /// Held while a store is chosen for a private copy.
    placing: Mutex<()>,
    accelerator: OnceCell<Accelerator>,
    starts: Semaphore,
    copies: Semaphore,
    kept: Mutex<HashMap<Name, TrackedMachine>>,
    /// Something has changed that concerns more than one machine.
    stir: Notify,
    figures: figures::CollectedFigures,
}

impl Machines {
    /// Takes over what runs, and starts what is to.
    pub fn open(
        events: Events,
        objects: Objects,
        stores: Stores,
        images: Images,
        catalogs: Catalogs,
        parts: Parts,
    ) -> Result<Machines, HostError> {
        let failed = |e: io::Error| {
            HostError::new(ErrorCode::Internal, format!("{} cannot be made: {e}", parts.folder.display()))
        };
        DirBuilder::new().recursive(true).mode(0o700).create(&parts.folder).map_err(failed)?;
        let shared = Arc::new(Shared {
            events,
            objects,
            stores,
            images,
            budget: Mutex::new(Budget::new(parts.capacity)),
            users: Mutex::new(GuestUsers::new(parts.guest_users)),
            squeeze: Mutex::default(),
            rooms: Mutex::default(),
            rollouts: Mutex::default(),
            placing: Mutex::default(),
            libvirt: Arc::new(Libvirt::new(parts.libvirt_uri.clone())),
            parts,
            accelerator: OnceCell::new(),
            starts: Semaphore::new(STARTS),
            copies: Semaphore::new(COPIES),
            kept: Mutex::default(),
            stir: Notify::new(),
            figures: figures::CollectedFigures::default(),
        });
        host_start::look(&shared.objects)?;
        let runs = shared.runs()?;
        // What runs has its memory, before anything else is promised some.
        for (name, run) in runs.iter().filter(|(_, run)| !run.is_of_another_boot()) {
            shared.budget().note(name, run.need());
        }
        shared.note_users(&runs)?;
        // Nobody knows what a run names whose record cannot be read: its machine's name says enough.
        let unread = shared.unread_runs()?;
        let may_be_of_one = |path: &Path| {
            let file = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
            unread
                .iter()
                .any(|name| file.strip_prefix(name.as_str()).is_some_and(|rest| rest.starts_with('-')))
        };
        let scratch = |path: &Path| runs.iter().any(|(_, run)| run.scratch.as_deref() == Some(path));
        shared.sweep(belongings::SCRATCH, |path| scratch(path) || may_be_of_one(path))?;
        let copy =
            |path: &Path| runs.iter().any(|(_, run)| run.copy.as_ref().is_some_and(|copy| copy.path == path));
        shared.sweep(placing::FOLDER, |path| copy(path) || may_be_of_one(path))?;
        // What changes from here on is not missed.
        let changes = shared.objects.watch();
        shared.begin_with(&runs)?;
        tokio::spawn(Arc::clone(&shared).follow(changes));
        shared.poke_all()?;
        if shared.parts.hypervisor != Hypervisor::None {
            // It takes seconds where KVM is there and runs nothing.
            let shared = Arc::clone(&shared);
            tokio::spawn(async move { _ = shared.accelerator().await });
        }
        let machines = Machines { shared, catalogs };
        tokio::spawn(oversee::oversee(machines.clone()));
        tokio::spawn(host::watch_memory(Arc::clone(&machines.shared)));
        tokio::spawn(host::watch_space(Arc::clone(&machines.shared)));
        Ok(machines)
    }

    /// One of them when it is what is wanted of it, or so late.
    pub async fn wait(&self, name: &Name, at_most: Duration) -> Result<MachineDetails, HostError> {
        let until = tokio::time::Instant::now() + at_most;
        loop {
            // What changes after this is not missed.
            let status = self.shared.kept().get(name).map(|kept| kept.status.subscribe());
            let machines = self.clone();
            let asked = name.clone();
            let found = blocking(move || machines.get(&asked)).await?;
            if found.status.settled || tokio::time::Instant::now() >= until {
                return Ok(found);
            }
            let changes = async {
                match status {
                    // An error: it is not remembered any more.
                    Some(mut status) => _ = status.changed().await,
                    None => tokio::time::sleep(Duration::from_millis(5)).await,
                }
            };
            let _ = tokio::time::timeout_at(until, changes).await;
        }
    }

    /// The host's stores, and how full they are.
    pub fn stores(&self) -> Result<Vec<StoreDetails>, HostError> {
        self.shared.store_details()
    }
}

impl Shared {
    /// The names of machines that have a folder to run in.
    fn folders(&self) -> Result<Vec<Name>, HostError> {
        let failed = |e: io::Error| {
            HostError::new(
                ErrorCode::Internal,
                format!("{} cannot be read: {e}", self.parts.folder.display()),
            )
        };
        let mut names = Vec::new();
        for entry in std::fs::read_dir(&self.parts.folder).map_err(failed)? {
            let name = entry.map_err(failed)?.file_name();
            names.extend(name.to_str().and_then(|name| name.parse().ok()));
        }
        Ok(names)
    }

    /// What runs, as it is written down. Where that cannot be read the machine's task says so.
    fn runs(&self) -> Result<Vec<(Name, Run)>, HostError> {
        let run = |name| {
            let run = Folder::of(&self.parts.folder, &name).load().ok().flatten();
            run.map(|run| (name, run))
        };
        Ok(self.folders()?.into_iter().filter_map(run).collect())
    }

    /// The names of machines of which something may run, and that cannot be read.
    fn unread_runs(&self) -> Result<Vec<Name>, HostError> {
        let is_unread = |name: &Name| Folder::of(&self.parts.folder, name).load().is_err();
        Ok(self.folders()?.into_iter().filter(is_unread).collect())
    }

    /// Whose VMM runs as which user. Of a run whose record cannot be read the folder's group says so.
    fn note_users(&self, runs: &[(Name, Run)]) -> Result<(), HostError> {
        let mut users = self.users();
        for name in self.folders()? {
            if let Ok(found) = std::fs::metadata(Folder::of(&self.parts.folder, &name).path()) {
                users.note(&name, found.gid());
            }
        }
        runs.iter().for_each(|(name, run)| run.user.into_iter().for_each(|user| users.note(name, user)));
        Ok(())
    }

    fn users(&self) -> MutexGuard<'_, GuestUsers> {
        self.users.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    /// Promises a machine this of the host, or lets it wait.
    fn promise(&self, name: &Name, need: Need) -> Result<(), HostError> {
        let next = self.budget().promise(name, need)?;
        self.wake(&next);
        Ok(())
    }

    /// A machine that waits is promised no more than this of what it had: others may have the rest.
    fn lower(&self, name: &Name, holds: Need) {
        let next = self.budget().lower(name, holds);
        self.wake(&next);
    }

    /// A machine takes nothing of the host any more: others may.
    fn give_back(&self, name: &Name) {
        let next = self.budget().give_back(name);
        self.wake(&next);
    }

    fn budget(&self) -> MutexGuard<'_, Budget> {
        self.budget.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    /// What a run's disk is made from.
    fn source(&self, run: &Run) -> Result<disk::Source, HostError> {
        let image = self.images.disk(&run.image, run.version)?;
        disk::can_be_made(run, &image)?;
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
        Ok(disk::Source { program: self.parts.program.clone(), image, image_id, digests, overflow })
    }

    /// How QEMU runs guests here: found out once.
    async fn accelerator(&self) -> Result<&Accelerator, HostError> {
        let probe = || async {
            let folder = self.parts.folder.clone();
            blocking(move || probe(&folder)).await
        };
        self.accelerator.get_or_try_init(probe).await
    }
}

fn probe(folder: &Path) -> Result<Accelerator, HostError> {
    let internal = |e: io::Error| HostError::new(ErrorCode::Internal, format!("KVM cannot be probed: {e}"));
    // Nobody interrupts it.
    let (quiet, _other) = std::os::unix::net::UnixStream::pair().map_err(internal)?;
    let dir = folder.parent().unwrap_or(folder);
    match kvm::probe(qemu::PROGRAM, dir, std::os::fd::AsFd::as_fd(&quiet)) {
        Ok(Some(accelerator)) => Ok(accelerator),
        Ok(None) => Err(internal(io::ErrorKind::Interrupted.into())),
        Err(e) => Err(HostError::new(ErrorCode::Unavailable, e.message)),
    }
}
