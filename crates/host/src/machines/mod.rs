//! The machines of a host: their desired and observed states, and the tasks that reconcile them. Owns the folder in which
//! machines run.
//!
//! Invariant: everything that already runs is found before anything is started.

mod act;
mod admission;
pub mod belongings;
mod blocking;
mod boots;
mod claims;
pub mod closed_attempts;
mod closing;
mod commit;
pub mod console;
pub mod desired_state;
mod desired_writer;
mod disk;
mod figures;
mod firmware;
mod fleet_claims;
mod guest_agent;
mod guests;
mod host;
mod host_start;
#[cfg(test)]
pub(crate) mod imagined;
pub mod leftovers;
pub mod names;
mod neighbours;
mod oversee;
mod phone_home;
mod placing;
mod ready;
mod reconciler;
mod registry;
mod rolling;
mod rollout;
mod run;
mod scratch;
mod share;
mod shared;
mod start_order;
mod status;
mod tag;
mod tasks;
#[cfg(test)]
pub(crate) mod testing;
mod turns;
mod views;
mod vmm;

use crate::catalogs::Catalogs;
use crate::error::HostError;
use crate::events::Events;
use crate::guest_users::UserRange;
use crate::images::Images;
use crate::processes::{self, ObservedProcess};
use crate::resources::budget::{Capacity, Need};
use crate::scopes::Scopes;
use crate::store::{Objects, RecordKind};
use crate::stores::Stores;
use act::MachineActions;
pub use act::MachineDeleteTerms;
use belongings::Belongings;
use blocking::{blocking, last_words, look};
pub use boots::BootLimits;
use claims::Claims;
#[cfg(test)]
pub(crate) use claims::made_claim;
pub use claims::{ClaimSelector, Claimant, UNANSWERED, claim_ended, held_claims};
use closed_attempts::ClosedAttempts;
use closing::HostGate;
use commit::DiskCommits;
use console::Consoles;
use desired_state::DesiredState;
use desired_writer::DesiredStateWriter;
pub use disk::word;
use figures::FigureCollector;
use figures::curves::CurveCollector;
pub use figures::curves::CurvesByMachine;
use figures::history::Histories;
pub use figures::history::HistoryOf;
use figures::one_disk::DiskFigures;
pub use fleet_claims::{FleetRequest, FleetRequestTerms};
use guests::Guests;
pub use guests::{FilePlace, GuestCall};
use host::SpaceWatch;
use host_start::HostStart;
use leftovers::{LeftoverFiles, LeftoverOwner, Leftovers};
pub use names::{NameGate, vmm_process};
use oversee::Overseer;
use registry::MachineRegistry;
use rolling::Rollouts;
use run::{MachineFolders, RunRecord};
pub use share::{MachineShares, ShareCounts};
use shared::MachineServices;
use spillway_api::{Catalog, Hypervisor, Machine, Name, Power, Selector};
use spillway_control::kvm::Accelerator;
use start_order::StartOrder;
use status::ObservedMachine;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use tasks::TaskStarter;
use views::{MachineReader, View};
pub use vmm::PROCESS as VMM_PROCESS;

/// Kinds of records of this module.
pub(crate) const RECORDS: [RecordKind; 6] = [
    RecordKind::of::<DesiredState>(),
    RecordKind::of::<ClosedAttempts>(),
    RecordKind::of::<Belongings>(),
    RecordKind::of::<LeftoverFiles>(),
    RecordKind::of::<LeftoverOwner>(),
    RecordKind::of::<HostStart>(),
];

/// Schema of the file `run.json`, which is stored too.
#[cfg(test)]
pub(crate) fn run_schema() -> crate::store::RecordSchema {
    crate::store::schema::<RunRecord>()
}

/// The machines of a host, grouped by what clients can ask. A clone refers to the same machines.
#[derive(Clone)]
pub struct Machines {
    /// Lists and describes machines.
    pub reader: MachineReader,
    /// Starts, stops, resets and deletes machines.
    pub actions: MachineActions,
    /// Claims and releases machines.
    pub claims: Claims,
    /// Opens and closes the host for machines.
    pub gate: HostGate,
    /// Progress of rollouts.
    pub rollouts: Arc<Rollouts>,
    /// Commits disks of machines as versions of images.
    pub commits: DiskCommits,
    /// Consoles and screens of machines.
    pub consoles: Arc<Consoles>,
    /// Programs and files in guests.
    pub guests: Arc<Guests>,
    /// Machines of catalogs that a fleet shares among hosts.
    pub shares: MachineShares,
    /// What the fleet lets machines with its names do.
    pub names: Arc<NameGate>,
    /// Files that deleted machines have left.
    pub leftovers: Arc<Leftovers>,
    /// Collects the figures of all machines.
    pub figures: Arc<FigureCollector>,
    /// Asks single disks for more figures than those of all.
    pub disks: Arc<DiskFigures>,
    /// What the figures were.
    pub histories: Arc<Histories>,
    /// Collects the curves that show what other sizes of the RAM tiers would do.
    pub curves: Arc<CurveCollector>,
    /// Watches how full the stores are.
    pub space: Arc<SpaceWatch>,
}

/// Settings of the host that all machines need.
#[derive(Clone, Debug)]
pub struct MachineHostConfig {
    /// Folder in which machines run.
    pub folder: PathBuf,
    /// Path of the program `spillway-worker`.
    pub program: PathBuf,
    /// Hypervisor that runs the machines.
    pub hypervisor: Hypervisor,
    /// How guests run; `None`: decided by a test guest.
    pub accelerator: Option<Accelerator>,
    /// URI of libvirt, if it runs the machines.
    pub libvirt_uri: String,
    /// Budget of the host for machines.
    pub capacity: Capacity,
    /// How many machines boot at the same time.
    pub boots: BootLimits,
    /// Address of this host to which machines in bridges phone home.
    pub phone_home: Option<SocketAddr>,
    /// Caches shrink when less memory than this is available.
    pub memory_floor_bytes: u64,
    /// Duration of a claim if neither the claim nor its catalog gives one; `None`: until it is released.
    pub claim_ttl_seconds: Option<u32>,
    /// Control groups for the processes of machines.
    pub scopes: Scopes,
    /// Range of users that QEMU processes run as; `None`: as the user of the daemon.
    pub guest_users: Option<UserRange>,
}

impl Machines {
    /// Adopts the machines that run, and starts those that should.
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
            images.clone(),
            folders.clone(),
        ));
        let shared = Arc::new(MachineServices::new(
            events.clone(),
            objects.clone(),
            stores.clone(),
            images.clone(),
            parts,
            Arc::clone(&figures),
            registry,
        )?);
        host_start::look(&objects, &folders)?;
        take_over(&shared)?;
        // Subscribe first, so that no later change is missed.
        let changes = objects.watch();
        shared.registry.begin_with(known(&shared)?);
        order_starts(&shared, &reader, &catalogs)?;
        let tasks = TaskStarter::new(Arc::clone(&shared));
        tokio::spawn(tasks.clone().follow(changes));
        tasks.wake_all()?;
        begin_services(&shared);
        let desired = DesiredStateWriter::new(objects.clone());
        let gate = HostGate::new(Arc::clone(&shared), reader.clone(), catalogs.clone(), desired.clone());
        let rollouts = Arc::new(Rollouts::new(catalogs.clone(), desired.clone(), events.clone()));
        let overseer = Overseer::new(
            Arc::clone(&shared),
            reader.clone(),
            catalogs.clone(),
            desired,
            gate.clone(),
            Arc::clone(&rollouts),
        );
        tokio::spawn(overseer.oversee());
        let space = SpaceWatch::watched(stores, events.clone());
        Ok(Machines {
            actions: MachineActions::new(reader.clone(), catalogs.clone(), objects.clone()),
            claims: Claims::new(
                reader.clone(),
                catalogs.clone(),
                objects.clone(),
                events,
                Arc::clone(&space),
                shared.parts.claim_ttl_seconds,
            ),
            guests: Arc::new(Guests::new(reader.clone(), catalogs.clone(), &shared)),
            shares: MachineShares::new(reader.clone(), catalogs.clone()),
            names: Arc::clone(&shared.names),
            commits: DiskCommits::new(reader.clone(), catalogs, objects, images),
            leftovers: Arc::clone(&shared.leftovers),
            curves: Arc::new(CurveCollector::new(reader.clone(), folders.clone())),
            disks: Arc::new(DiskFigures::new(reader.clone(), folders.clone())),
            consoles: Arc::new(Consoles::new(reader.clone(), folders)),
            reader,
            gate,
            rollouts,
            histories: Histories::kept(Arc::clone(&figures)),
            figures,
            space,
        })
    }
}

/// Records what running machines use of the host's budget, and removes files of runs that no record names any more.
fn take_over(shared: &MachineServices) -> Result<(), HostError> {
    let runs = shared.folders.runs()?;
    // Count what runs before anything else is promised.
    for (name, run) in runs.iter().filter(|(_, run)| !run.is_of_another_boot()) {
        shared.admission.note(name, run.need());
    }
    note_boots(shared, &runs)?;
    shared.note_users(&runs)?;
    // The files of a run whose record cannot be read are unknown: keep all that carry its machine's name.
    let unreadable = shared.folders.unreadable()?;
    // Its promise is unknown too. Count what its catalog says until its task knows that nothing of it runs.
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
    shared.files.sweep(scratch::FOLDER, |path| scratch(path) || may_be_of_one(path))?;
    shared.files.sweep(scratch::TEMPLATES, |_| false)?;
    let copy =
        |path: &Path| runs.iter().any(|(_, run)| run.copy.as_ref().is_some_and(|copy| copy.path == path));
    shared.files.sweep(placing::FOLDER, |path| copy(path) || may_be_of_one(path))
}

/// Begins what goes on beside the machines.
fn begin_services(shared: &Arc<MachineServices>) {
    if shared.parts.hypervisor != Hypervisor::None {
        // Probing takes seconds on a host whose KVM runs nothing.
        let shared = Arc::clone(shared);
        tokio::spawn(async move { _ = shared.accelerator().await });
    }
    if let Some(address) = shared.parts.phone_home {
        tokio::spawn(Arc::clone(&shared.guests.phone).listen(address, shared.events.clone()));
    }
    tokio::spawn(Arc::clone(&shared.memory).watch());
}

/// Looks at the order of starts, before the first machine asks for it.
fn order_starts(
    shared: &MachineServices,
    reader: &MachineReader,
    catalogs: &Catalogs,
) -> Result<(), HostError> {
    let catalogs = catalogs.list()?;
    if StartOrder::is_used(&catalogs) {
        let views = views::by_catalog(reader.views(&Selector::default())?);
        shared.order.update(&catalogs, |name| views.get(name).map_or(&[], Vec::as_slice));
    }
    Ok(())
}

/// Counts the machines that boot: an earlier daemon has started their VMMs.
fn note_boots(shared: &MachineServices, runs: &[(Name, RunRecord)]) -> Result<(), HostError> {
    for (name, run) in runs.iter().filter(|(_, run)| !run.ready && !run.is_of_another_boot()) {
        // One that cannot be examined now is counted by its task.
        let vmm = processes::look(shared.folders.of(name).path(), vmm::PROCESS);
        if let (Ok(ObservedProcess::Alive(_)), Some(machine)) =
            (vmm, shared.objects.get_readable::<Machine>(name.as_str())?)
        {
            shared.boots.note(reconciler::boot(&machine.value, run));
        }
    }
    Ok(())
}

/// Returns what a machine needs by the settings of its catalog, if both records can be read.
fn need_by_catalog(shared: &MachineServices, name: &Name) -> Result<Option<Need>, HostError> {
    let Some(machine) = shared.objects.get_readable::<Machine>(name.as_str())? else { return Ok(None) };
    let catalog = shared.objects.get_readable::<Catalog>(machine.value.catalog.as_str())?;
    Ok(catalog.map(|catalog| Need::of(&catalog.value.spec, shared.parts.hypervisor)))
}

/// Returns the observed states before the tasks begin. Machines that should be off and have no folder are off; those with
/// a folder must be examined first.
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
