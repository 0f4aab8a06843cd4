//! Services of the host that the tasks of machines share. Owns what was probed of QEMU, and the turns of what
//! starts.
//!
//! Invariant: each service guards its own state; a task holds none of their locks while it waits.

use super::MachineHostConfig;
use super::admission::Admission;
use super::belongings::{Belongings, MachineFiles};
use super::blocking::blocking;
use super::boots::BootQueue;
use super::disk;
use super::figures::FigureCollector;
use super::guests::GuestCalls;
use super::host::MemoryWatch;
use super::leftovers::Leftovers;
use super::names::NameGate;
use super::phone_home::PhoneCalls;
use super::placing::Placement;
use super::registry::MachineRegistry;
use super::run::{MachineFolders, RunRecord};
use super::start_order::StartOrder;
use super::turns::{StoreSet, StoreTurns, Turn};
use crate::error::HostError;
use crate::events::Events;
use crate::guest_users::GuestUsers;
use crate::hypervisor::libvirt::Libvirt;
use crate::hypervisor::qemu;
use crate::images::{self, Images};
use crate::store::Objects;
use crate::stores::Stores;
use spillway_api::{CatalogSpec, DiskMode, ErrorCode, ImageVersion, Name, StoreClass};
use spillway_control::kvm::{self, Accelerator};
use std::fs::DirBuilder;
use std::io;
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;
use tokio::sync::OnceCell;

/// Number of machines with the same stores that start at the same time, or remove what they leave.
const STARTS: usize = 4;
/// How long none of them may end before the others are refused. A start takes less, whatever hangs but a store: a disk may
/// need 60 s until it serves, and 10 s to end if it does not.
const PATIENCE: Duration = Duration::from_secs(120);

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
    pub(super) names: Arc<NameGate>,
    pub(super) admission: Arc<Admission>,
    pub(super) order: StartOrder,
    pub(super) boots: Arc<BootQueue>,
    pub(super) guests: GuestServices,
    pub(super) memory: Arc<MemoryWatch>,
    pub(super) files: Arc<MachineFiles>,
    pub(super) leftovers: Arc<Leftovers>,
    pub(super) placement: Placement,
    pub(super) figures: Arc<FigureCollector>,
    turns: StoreTurns,
    users: Mutex<GuestUsers>,
    accelerator: OnceCell<Accelerator>,
}

/// What guests ask this host, and what they are asked.
#[derive(Default)]
pub struct GuestServices {
    /// Machines that say that they are ready.
    pub phone: Arc<PhoneCalls>,
    /// Programs and files of clients.
    pub calls: GuestCalls,
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
    ) -> Result<MachineServices, HostError> {
        let folders = MachineFolders::new(parts.folder.clone());
        let files = Arc::new(MachineFiles::new(objects.clone(), stores.clone(), events.clone()));
        Ok(MachineServices {
            admission: Arc::new(Admission::new(parts.capacity, Arc::clone(&registry))),
            order: StartOrder::new(Arc::clone(&registry)),
            boots: Arc::new(BootQueue::new(parts.boots, Arc::clone(&registry))),
            guests: GuestServices::default(),
            memory: Arc::new(MemoryWatch::new(
                parts.memory_floor_bytes,
                events.clone(),
                Arc::clone(&registry),
            )),
            leftovers: Arc::new(Leftovers::new(objects.clone(), Arc::clone(&files))),
            names: Arc::new(NameGate::open(&parts.folder, Arc::clone(&registry))?),
            placement: Placement::new(stores.clone(), folders.clone()),
            libvirt: Arc::new(Libvirt::new(parts.libvirt_uri.clone(), folders.virsh_cache())),
            users: Mutex::new(GuestUsers::new(parts.guest_users)),
            turns: StoreTurns::new(STARTS, PATIENCE),
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
        })
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
        let base = self.images.base(&run.image, run.version)?;
        disk::check_servable(run, &base)?;
        let store = self.stores.for_disks(run.spec.overflow_store.as_ref())?;
        self.stores.check(&store)?;
        let overflow = store.path.join("overflow");
        let failed = |e: io::Error| {
            HostError::new(ErrorCode::Internal, format!("{} cannot be made: {e}", overflow.display()))
        };
        DirBuilder::new().recursive(true).mode(0o700).create(&overflow).map_err(failed)?;
        let image_id = disk::image_id(run);
        // The chunks of a streamed image are compared before they are there.
        let digests = match run.spec.verify_reads && base.streamed.is_none() {
            true => Some(self.images.digests(&run.image, run.version)?),
            false => None,
        };
        let program = self.parts.program.clone();
        Ok(disk::DiskSource { program, base, size_bytes: None, image_id, digests, overflow })
    }

    /// Waits for a turn in the stores that the start of a machine with these settings uses.
    pub(super) async fn turn_to_start(
        self: &Arc<Self>,
        name: &Name,
        spec: &CatalogSpec,
        version: u32,
    ) -> Result<Turn, HostError> {
        let (shared, name, spec) = (Arc::clone(self), name.clone(), spec.clone());
        let stores = blocking(move || shared.stores_of(&name, &spec, version)).await?;
        self.turns.take(&stores).await
    }

    /// Waits for a turn to copy an image's version to this file.
    pub(super) async fn turn_to_copy(
        self: &Arc<Self>,
        image: &Name,
        version: u32,
        to: &Path,
    ) -> Result<Turn, HostError> {
        let (shared, image, to) = (Arc::clone(self), image.clone(), to.to_owned());
        let stores = blocking(move || {
            let mut stores = shared.stores_at(&[to])?;
            stores.extend(shared.image_stores(&image, version)?);
            Ok(stores)
        });
        self.placement.turn(&stores.await?).await
    }

    /// Waits for a turn in the stores that hold these files; `None`: there are no files.
    pub(super) async fn turn_at(self: &Arc<Self>, files: Vec<PathBuf>) -> Result<Option<Turn>, HostError> {
        if files.is_empty() {
            return Ok(None);
        }
        let shared = Arc::clone(self);
        let stores = blocking(move || shared.stores_at(&files)).await?;
        self.turns.take(&stores).await.map(Some)
    }

    /// Returns the stores that the start of a machine with these settings uses. What is wrong with them the start says.
    fn stores_of(&self, name: &Name, spec: &CatalogSpec, version: u32) -> Result<StoreSet, HostError> {
        let all = self.stores.list()?;
        // A copy is placed in any of them, and an earlier one may be in another.
        if spec.mode() == DiskMode::Ephemeral {
            return Ok(all.into_iter().map(|store| store.name).collect());
        }
        let has = self.objects.get::<Belongings>(name.as_str())?.map(|found| found.value);
        let (disk, data) = has.map_or((None, None), |has| (has.disk, has.data));
        let mut stores = self.image_stores(&spec.image.name, version)?;
        if let Some(disk) = &disk {
            stores.extend(self.image_stores(&disk.image, disk.version)?);
        }
        let named =
            [Some(&spec.overflow_store), spec.data_disk_bytes.is_some().then_some(&spec.data_disk_store)];
        let named =
            named.into_iter().flatten().filter_map(|named| self.stores.for_disks(named.as_ref()).ok());
        stores.extend(named.map(|store| store.name));
        if spec.scratch_disk_bytes.is_some() {
            let temp = all.into_iter().find(|store| store.class == StoreClass::Temp);
            stores.extend(temp.map(|store| store.name));
        }
        let files: Vec<PathBuf> = disk.map(|disk| disk.path).into_iter().chain(data).collect();
        stores.extend(self.stores_at(&files)?);
        Ok(stores)
    }

    /// Returns the store of an image's version, if there is one.
    fn image_stores(&self, image: &Name, version: u32) -> Result<StoreSet, HostError> {
        let found = self.objects.get::<ImageVersion>(&images::key(image, version))?;
        Ok(found.map(|found| found.value.store).into_iter().collect())
    }

    /// Returns the stores that hold these files.
    fn stores_at(&self, files: &[PathBuf]) -> Result<StoreSet, HostError> {
        let mut stores = StoreSet::new();
        for file in files {
            stores.extend(self.stores.holding(file)?.map(|store| store.name));
        }
        Ok(stores)
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
