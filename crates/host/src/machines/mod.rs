//! The machines of a host: what is wanted of them, what they are, and the tasks that bring them there. Owns the folder in
//! which machines run.
//!
//! Invariant: what runs is known before anything is started.

mod act;
mod admission;
pub mod belongings;
mod blocking;
mod claims;
mod closing;
mod commit;
pub mod desired_state;
mod desired_writer;
mod disk;
mod figures;
mod firmware;
mod host;
mod host_start;
pub mod leftovers;
mod neighbours;
mod oversee;
mod placing;
mod ready;
mod reconciler;
mod registry;
mod rolling;
mod rollout;
mod run;
mod shared;
mod short_path;
mod status;
mod tag;
mod tasks;
#[cfg(test)]
mod testing;
mod views;
mod vmm;

use crate::catalogs::Catalogs;
use crate::error::HostError;
use crate::events::Events;
use crate::guest_users::UserRange;
use crate::images::Images;
use crate::resources::budget::{Capacity, Need};
use crate::scopes::Scopes;
use crate::store::{Objects, RecordKind};
use crate::stores::Stores;
use act::MachineActions;
use belongings::Belongings;
use blocking::{blocking, last_words, look};
use claims::Claims;
pub use claims::{ClaimSelector, Claimant};
use closing::HostGate;
use commit::DiskCommits;
use desired_state::DesiredState;
use desired_writer::DesiredStateWriter;
pub use disk::word;
use figures::FigureCollector;
use figures::curves::CurveCollector;
pub use figures::curves::CurvesByMachine;
use host::SpaceWatch;
use host_start::HostStart;
use leftovers::{LeftoverFiles, LeftoverOwner, Leftovers};
use oversee::Overseer;
use registry::MachineRegistry;
use rolling::Rollouts;
use run::MachineFolders;
use shared::MachineServices;
use spillway_api::{Catalog, Hypervisor, Machine, Name, Power};
use status::ObservedMachine;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use tasks::TaskStarter;
use views::{MachineReader, View};

/// What is recorded here.
pub(crate) const RECORDS: [RecordKind; 5] = [
    RecordKind::of::<DesiredState>(),
    RecordKind::of::<Belongings>(),
    RecordKind::of::<LeftoverFiles>(),
    RecordKind::of::<LeftoverOwner>(),
    RecordKind::of::<HostStart>(),
];

/// What a run's record looks like: it is stored too.
#[cfg(test)]
pub(crate) fn run_schema() -> crate::store::RecordSchema {
    crate::store::schema::<run::RunRecord>()
}

/// The machines of a host, by what can be asked of them. A clone is the same.
#[derive(Clone)]
pub struct Machines {
    /// What they are.
    pub reader: MachineReader,
    /// What they are asked to do.
    pub actions: MachineActions,
    /// Whose they are for a while.
    pub claims: Claims,
    /// Whether any may run.
    pub gate: HostGate,
    /// How far rollouts are.
    pub rollouts: Arc<Rollouts>,
    /// Versions of images that are made from their disks.
    pub commits: DiskCommits,
    /// What those have left that are deleted.
    pub leftovers: Arc<Leftovers>,
    /// What they do.
    pub figures: Arc<FigureCollector>,
    /// What other sizes of their RAM tiers would have done.
    pub curves: Arc<CurveCollector>,
    /// How full the stores are.
    pub space: Arc<SpaceWatch>,
}

/// Where the parts are that machines are made of.
#[derive(Clone, Debug)]
pub struct MachineHostConfig {
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

impl Machines {
    /// Takes over what runs, and starts what is to.
    pub fn open(
        events: Events,
        objects: Objects,
        stores: Stores,
        images: Images,
        catalogs: Catalogs,
        parts: MachineHostConfig,
    ) -> Result<Machines, HostError> {
        let folders = MachineFolders::new(parts.folder.clone());
        folders.make()?;
        let registry = Arc::<MachineRegistry>::default();
        let reader = MachineReader::new(objects.clone(), catalogs.clone(), Arc::clone(&registry));
        let figures = Arc::new(FigureCollector::new(
            reader.clone(),
            catalogs.clone(),
            objects.clone(),
            stores.clone(),
            folders.clone(),
        ));
        let shared = MachineServices::new(
            events.clone(),
            objects.clone(),
            stores.clone(),
            images.clone(),
            parts,
            Arc::clone(&figures),
            registry,
        );
        let shared = Arc::new(shared);
        host_start::look(&objects)?;
        take_over(&shared)?;
        // What changes from here on is not missed.
        let changes = objects.watch();
        shared.registry.begin_with(known(&shared)?);
        let tasks = TaskStarter::new(Arc::clone(&shared));
        tokio::spawn(tasks.clone().follow(changes));
        tasks.wake_all()?;
        if shared.parts.hypervisor != Hypervisor::None {
            // It takes seconds where KVM is there and runs nothing.
            let shared = Arc::clone(&shared);
            tokio::spawn(async move { _ = shared.accelerator().await });
        }
        let desired = DesiredStateWriter::new(objects.clone());
        let gate = HostGate::new(Arc::clone(&shared), reader.clone(), catalogs.clone(), desired.clone());
        let rollouts = Arc::new(Rollouts::new(catalogs.clone(), desired.clone(), events.clone()));
        let space = Arc::new(SpaceWatch::new(stores, events.clone()));
        let overseer = Overseer::new(
            Arc::clone(&shared),
            reader.clone(),
            catalogs.clone(),
            desired,
            gate.clone(),
            Arc::clone(&rollouts),
        );
        tokio::spawn(overseer.oversee());
        tokio::spawn(Arc::clone(&shared.memory).watch());
        tokio::spawn(Arc::clone(&space).watch());
        let ttl_seconds = shared.parts.claim_ttl_seconds;
        Ok(Machines {
            actions: MachineActions::new(reader.clone(), catalogs.clone(), objects.clone()),
            claims: Claims::new(
                reader.clone(),
                catalogs.clone(),
                objects.clone(),
                events,
                Arc::clone(&space),
                ttl_seconds,
            ),
            commits: DiskCommits::new(reader.clone(), catalogs, objects, images),
            leftovers: Arc::clone(&shared.leftovers),
            curves: Arc::new(CurveCollector::new(reader.clone(), folders)),
            reader,
            gate,
            rollouts,
            figures,
            space,
        })
    }
}

/// Notes what runs has of the host, and removes files of runs that nothing names any more.
fn take_over(shared: &MachineServices) -> Result<(), HostError> {
    let runs = shared.folders.runs()?;
    // What runs has its memory, before anything else is promised some.
    for (name, run) in runs.iter().filter(|(_, run)| !run.is_of_another_boot()) {
        shared.admission.note(name, run.need());
    }
    shared.note_users(&runs)?;
    // Nobody knows what a run names whose record cannot be read: its machine's name says enough.
    let unreadable = shared.folders.unreadable()?;
    // Nor what it was promised. It has as much as its catalog says by now, until its task knows that nothing of it runs.
    for name in &unreadable {
        need_by_catalog(shared, name)?.into_iter().for_each(|need| shared.admission.note(name, need));
    }
    let may_be_of_one = |path: &Path| {
        let file = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
        unreadable
            .iter()
            .any(|name| file.strip_prefix(name.as_str()).is_some_and(|rest| rest.starts_with('-')))
    };
    let scratch = |path: &Path| runs.iter().any(|(_, run)| run.scratch.as_deref() == Some(path));
    shared.files.sweep(belongings::SCRATCH, |path| scratch(path) || may_be_of_one(path))?;
    let copy =
        |path: &Path| runs.iter().any(|(_, run)| run.copy.as_ref().is_some_and(|copy| copy.path == path));
    shared.files.sweep(placing::FOLDER, |path| copy(path) || may_be_of_one(path))
}

/// What a machine of this name needs by the settings of its catalog, if both can be read.
fn need_by_catalog(shared: &MachineServices, name: &Name) -> Result<Option<Need>, HostError> {
    let Some(machine) = shared.objects.get_readable::<Machine>(name.as_str())? else { return Ok(None) };
    let catalog = shared.objects.get_readable::<Catalog>(machine.value.catalog.as_str())?;
    Ok(catalog.map(|catalog| Need::of(&catalog.value.spec, shared.parts.hypervisor)))
}

/// What is known of machines before they have tasks: those that are off are so as it was wanted. Those that have a folder are to
/// be looked at first, whatever is wanted.
fn known(shared: &MachineServices) -> Result<Vec<(Name, ObservedMachine)>, HostError> {
    let off =
        shared.objects.list::<DesiredState>()?.into_iter().filter(|wanted| wanted.value.power == Power::Off);
    let off =
        off.filter_map(|wanted| Some((wanted.name.parse().ok()?, ObservedMachine::off(wanted.revision))));
    let found = |name: &Name, run| (name.clone(), ObservedMachine::found(run, &shared.folders.of(name)));
    let there = shared.folders.names()?;
    let there = there.iter().map(|name| found(name, None));
    let runs = shared.folders.runs()?;
    let runs = runs.iter().map(|(name, run)| found(name, Some(run)));
    Ok(off.chain(there).chain(runs).collect())
}
