//! The daemon process: its settings, its state folder, its parts, its end. Owns these; knows nothing of what is stored.
//!
//! Invariant: a folder has one daemon; it can be killed at any time, and the next one continues.

use crate::access::audit::{self, Audit};
use crate::access::tls::{Remote, RemoteListener};
use crate::api::{self, ApiParts, ApiState, FigureAnswers, MOST_STREAM_READS, ResponseCounters};
use crate::backup::StateStore;
use crate::catalogs::{Catalogs, HostSettings};
use crate::confined;
use crate::events::{Events, log_line};
use crate::failure::Failure;
#[cfg(test)]
use crate::fleet::door::FleetDoor;
use crate::fleet::door::Identity;
use crate::fleet::{FleetHostSettings, HostParts, OpenFleet};
use crate::guest_users::UserChoice;
use crate::idempotency::Idempotency;
use crate::images::Images;
use crate::machines::{BootLimits, MachineHostConfig, Machines};
use crate::operations::Operations;
use crate::records;
use crate::registries::{Downloads, Registries, SourceRule};
use crate::reports::Reports;
use crate::resources::budget::{Capacity, host_bytes};
use crate::resources::memory::has_swap;
use crate::scopes::Scopes;
use crate::serving;
use crate::state_folder::{DATABASE, StateFolder, machine_folder};
use crate::store::{Objects, ReserveState, SqliteStore, Store};
use crate::stores::Stores;
use crate::streaming::{Streaming, StreamingSettings};
use crate::systemd::ServiceManager;
use crate::work::BoundedWork;
use anyhow::{Context, Result, bail};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use spillway_api::{EventKind, Hypervisor};
use spillway_control::kvm::Accelerator;
use spillway_control::program::check_program;
use spillway_registry::serve::PeerOrder;
use std::future::pending;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;
use tokio::net::UnixListener;
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::task::JoinSet;

/// Interval at which the audit log writes its counts.
const AUDIT_EACH: Duration = Duration::from_secs(5);

/// Machines that boot at the same time, for each processor of the host, and at least.
const BOOTS_FOR_EACH_CPU: u32 = 2;
const LEAST_BOOTS: u32 = 4;
/// The program that does all traffic with registries, beside the one that serves disks.
const STREAMD: &str = "spillway-streamd";
/// URI of the system's libvirt.
pub const LIBVIRT_URI_DEFAULT: &str = "qemu:///system";
/// Interval at which the reserve of the database is checked.
const RESERVE_EACH: Duration = Duration::from_secs(10);

/// How long the daemon examines what an earlier one has left of machines before it answers. It goes on afterwards.
const EXAMINATION: Duration = Duration::from_secs(10);
/// Settings of the daemon.
#[derive(Clone, Debug)]
pub struct DaemonSettings {
    /// The state folder.
    pub state: PathBuf,
    /// Path of the socket.
    pub socket: PathBuf,
    /// Permissions of the socket.
    pub socket_mode: u32,
    /// The TCP listener, for clients with a token.
    pub remote: Option<Remote>,
    /// Hypervisor that runs machines.
    pub hypervisor: Hypervisor,
    /// How guests run; `None`: decided by a test guest.
    pub accelerator: Option<Accelerator>,
    /// URI of libvirt, if it runs machines.
    pub libvirt_uri: String,
    /// Users that machines' QEMUs run as.
    pub guest_users: UserChoice,
    /// The program that serves disks.
    pub program: PathBuf,
    /// Memory that the guarantees of all caches may take together; half of the host's by default.
    pub ram_budget_bytes: Option<u64>,
    /// Limits of all caches together, in percent of that.
    pub overcommit_percent: u32,
    /// Memory of the host that machines do not get; a tenth by default.
    pub memory_reserve_bytes: Option<u64>,
    /// Guests' memory and caches together, in percent of the rest.
    pub memory_overcommit_percent: u32,
    /// Guests' processors together, in percent of the host's.
    pub vcpu_overcommit_percent: u32,
    /// Number of machines that boot at the same time, 0: no limit; two for each processor by default, four at least.
    pub boots_at_once: Option<u32>,
    /// How long a machine that is not ready counts as booting.
    pub boot_patience: Duration,
    /// Address of this host to which machines in bridges phone home.
    pub phone_home: Option<SocketAddr>,
    /// Caches shrink when less memory than this is available; a twentieth of the host's by default.
    pub memory_floor_bytes: Option<u64>,
    /// Destinations of the audit log; a file in the state folder by default.
    pub audit: Vec<AuditTo>,
    /// How long the audit log is kept.
    pub audit_keep: Duration,
    /// Largest size of the audit log.
    pub audit_max_bytes: u64,
    /// Folder of the cache of streamed images; one in the state folder by default.
    pub stream_cache: Option<PathBuf>,
    /// Largest size of that cache.
    pub stream_cache_bytes: u64,
    /// Rate at which whole streamed images are brought, in bytes a second.
    pub stream_fill_bytes_per_second: u64,
    /// Hosts to which chunks of streamed images are sent, and from which they come.
    pub peers: Option<PeerOrder>,
    /// Hosts that images may be downloaded from.
    pub import_from: Vec<SourceRule>,
    /// The fleet that the host takes part in.
    pub fleet: Option<FleetHostSettings>,
    /// Duration of a claim if neither the claim nor its catalog gives one; `None`: until it is released.
    pub claim_ttl_seconds: Option<u32>,
}

fn host_cpus() -> u32 {
    std::thread::available_parallelism().map_or(1, |cpus| cpus.get() as u32)
}

/// Destination of the audit log.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum AuditTo {
    /// Standard error, which the journal keeps.
    Journal,
    /// A file, with rotated files beside it.
    File(PathBuf),
}

impl DaemonSettings {
    /// With which hosts chunks of streamed images are exchanged: those of the options, or those of the fleet.
    fn peer_order(&self, state: &Path) -> Result<Option<PeerOrder>> {
        let Some(fleet) = &self.fleet else { return Ok(self.peers.clone()) };
        let [certificate, key] = Identity::files(&std::path::absolute(state)?);
        Ok(fleet.peers.as_ref().map(|peers| peers.order([certificate, key])))
    }

    fn audit(&self, state: &Path) -> Result<audit::AuditSettings> {
        let mut files = self.audit.iter().filter_map(|to| match to {
            AuditTo::File(path) => Some(path),
            AuditTo::Journal => None,
        });
        let file = match (files.next(), self.audit.is_empty()) {
            (Some(path), _) => Some(std::path::absolute(path).context("--audit")?),
            (None, true) => Some(state.join("audit.log")),
            (None, false) => None,
        };
        if files.next().is_some() {
            bail!(Failure::usage("--audit takes one file and 'journal': give each at most once"));
        }
        let journal = self.audit.contains(&AuditTo::Journal);
        Ok(audit::AuditSettings { file, journal, keep: self.audit_keep, max_bytes: self.audit_max_bytes })
    }

    /// Returns the host's budget for machines.
    fn capacity(&self) -> Capacity {
        let host_bytes = host_bytes();
        let host_cpus = host_cpus();
        Capacity {
            ram_bytes: self.ram_budget_bytes.unwrap_or(host_bytes / 2),
            ram_percent: self.overcommit_percent,
            host_bytes,
            reserve_bytes: self.memory_reserve_bytes.unwrap_or(host_bytes / 10),
            memory_percent: self.memory_overcommit_percent,
            host_cpus,
            vcpu_percent: self.vcpu_overcommit_percent,
        }
    }

    /// Returns how many machines boot at the same time.
    fn boots(&self) -> BootLimits {
        let usual = (host_cpus() * BOOTS_FOR_EACH_CPU).max(LEAST_BOOTS);
        let at_once = self.boots_at_once.unwrap_or(usual) as usize;
        BootLimits { at_once, patience: self.boot_patience }
    }
}

/// The stored records and the parts that manage them, before any machine is examined.
struct Records {
    store: Arc<SqliteStore>,
    objects: Objects,
    events: Events,
    operations: Operations,
    registries: Registries,
    downloads: Downloads,
    streaming: Streaming,
    stores: Stores,
    images: Images,
    catalogs: Catalogs,
}

impl Records {
    fn open(settings: &DaemonSettings, state: &Path, complain: &mut dyn FnMut(&str)) -> Result<Records> {
        let store = Arc::new(SqliteStore::open(&state.join(DATABASE))?);
        let objects = Objects::new(Arc::clone(&store) as Arc<dyn Store>);
        let events = Events::open(&state.join("events"), complain);
        for record in objects.look_at_all(&records::kinds())? {
            let text = format!("the record {} is set aside: {}. {}", record.key, record.why, record.advice());
            events.raise(EventKind::Failed, "host", text);
        }
        let operations = Operations::default();
        let stores = Stores::open(objects.clone(), &state.join("store"))?;
        let streamd = settings.program.with_file_name(STREAMD);
        let registries = Registries::new(objects.clone(), operations.clone(), streamd.clone());
        let downloads = Downloads::new(streamd.clone(), settings.import_from.clone());
        let cache = settings.stream_cache.clone().unwrap_or_else(|| state.join("cache"));
        let at = StreamingSettings {
            folder: state.join("streamd"),
            cache: std::path::absolute(cache).context("--stream-cache")?,
            budget_bytes: settings.stream_cache_bytes,
            fill_bytes_per_second: settings.stream_fill_bytes_per_second,
            peers: settings.peer_order(state)?,
            program: streamd,
        };
        let streaming = Streaming::new(at, registries.clone(), objects.clone())?;
        let images =
            Images::open(objects.clone(), operations.clone(), stores.clone(), streaming.clone(), complain)?;
        let host = HostSettings {
            capacity: settings.capacity(),
            hypervisor: settings.hypervisor,
            machines: machine_folder(state),
            takes_calls: settings.phone_home.is_some(),
            fleet: settings.fleet.as_ref().map(|fleet| fleet.etcd.address.fleet.clone()),
        };
        let catalogs = Catalogs::open(objects.clone(), stores.clone(), images.clone(), host, complain)?;
        Ok(Records {
            store,
            objects,
            events,
            operations,
            registries,
            downloads,
            streaming,
            stores,
            images,
            catalogs,
        })
    }

    /// Adopts the machines. Returns the state of the API's routes.
    fn app(
        self,
        parts: MachineHostConfig,
        audit: Audit,
        fleet: Option<OpenFleet>,
        state: &Path,
    ) -> Result<ApiState> {
        let Records {
            store,
            objects,
            events,
            operations,
            registries,
            downloads,
            streaming,
            stores,
            images,
            catalogs,
        } = self;
        let streamed = images.clone();
        tokio::spawn(streaming.clone().follow(objects.watch()));
        streaming.begin(parts.scopes.clone(), events.clone(), move || streamed.all_streamed())?;
        let idempotency = Idempotency::new(objects.clone());
        let (capacity, hypervisor, scopes) = (parts.capacity, parts.hypervisor, parts.scopes.clone());
        let machines = Machines::open(
            events.clone(),
            objects.clone(),
            stores.clone(),
            images.clone(),
            catalogs.clone(),
            parts,
        )?;
        let door = fleet.as_ref().map(|fleet| Arc::clone(&fleet.door));
        let begin = |fleet: OpenFleet| {
            fleet.begin(HostParts {
                objects,
                events: events.clone(),
                catalogs: catalogs.clone(),
                images: images.clone(),
                registries: registries.clone(),
                streaming,
                machines: machines.shares.clone(),
                capacity,
                hypervisor,
                names: Arc::clone(&machines.names),
                scopes,
            })
        };
        let fleet_service = fleet.map(begin).transpose()?;
        let fleet_claims =
            fleet_service.as_ref().map(|fleet| fleet.claims(machines.clone(), idempotency.clone()));
        Ok(Arc::new(ApiParts {
            audit,
            answered: ResponseCounters::default(),
            figure_answers: FigureAnswers::default(),
            catalogs,
            downloads,
            events,
            fleet: door,
            fleet_claims,
            fleet_service,
            idempotency,
            images,
            machines,
            operations,
            registries,
            reports: Reports::new(state),
            state: StateStore { folder: state.to_owned(), store },
            stores,
            stream_reads: BoundedWork::new(MOST_STREAM_READS),
        }))
    }
}

/// Returns the settings that machines need.
fn parts(
    settings: &DaemonSettings,
    state: &Path,
    complain: &mut dyn FnMut(&str),
) -> Result<MachineHostConfig> {
    if let Err(e) = check_program(&settings.program) {
        complain(&format!("no machine can start: {e}; --worker names the program"));
    }
    if has_swap() {
        complain(
            "this host has swap, and a write cache that is swapped out is slower than none: turn swap off (swapoff)",
        );
    }
    let guest_users = settings.guest_users.settle(settings.hypervisor, complain);
    Ok(MachineHostConfig {
        folder: machine_folder(state),
        program: settings.program.clone(),
        hypervisor: settings.hypervisor,
        accelerator: settings.accelerator.clone(),
        capacity: settings.capacity(),
        boots: settings.boots(),
        phone_home: settings.phone_home,
        memory_floor_bytes: settings.memory_floor_bytes.unwrap_or(host_bytes() / 20),
        scopes: Scopes::choose(complain),
        libvirt_uri: settings.libvirt_uri.clone(),
        claim_ttl_seconds: settings.claim_ttl_seconds,
        guest_users: guest_users.map_err(Failure::usage)?,
    })
}

/// Serves until a signal ends the daemon. Work in progress is interrupted then, and undone by the next start.
pub async fn run(
    settings: DaemonSettings,
    mut service_manager: ServiceManager,
    ready: impl FnOnce(Option<SocketAddr>),
) -> Result<()> {
    // Do this before anything that takes time: without a signal handler SIGHUP would end the daemon, and the service manager
    // would take that for a regular end.
    let hangup = signal(SignalKind::hangup())?;
    let state = StateFolder::take(&settings.state, settings.hypervisor)?;
    raise_descriptors();
    let mut complain = |line: &str| log_line(&format!("warning: {line}"));
    if !confined::is_supported() {
        complain(
            "this kernel has no Landlock: qemu-img and debugfs are kept from sockets, devices and rights, not from files",
        );
    }
    let records = Records::open(&settings, state.path(), &mut complain)?;
    let parts = parts(&settings, state.path(), &mut complain)?;
    // Do this before other threads create files: it changes the umask of all.
    let listener = match service_manager.listener(&settings.socket, &mut complain) {
        Some(listener) => listener,
        None => serving::listen(&settings.socket, settings.socket_mode)?,
    };
    let audit = Audit::new(settings.audit(state.path())?);
    let fleet = match settings.fleet {
        Some(fleet) => Some(OpenFleet::open(fleet, state.path()).await?),
        None => None,
    };
    let fleet_listener = fleet.as_ref().map(|fleet| Arc::clone(&fleet.listener));
    let app = records.app(parts, audit.clone(), fleet, state.path())?;
    let (events, machines) = (app.events.clone(), app.machines.clone());
    tokio::spawn(keep_reserve(Arc::clone(&app.state.store), events.clone()));

    let door = match settings.remote {
        Some(remote) => Some(Arc::new(RemoteListener::open(remote).await?)),
        None => None,
    };
    let is_kept = service_manager.keep(&listener);
    listener.set_nonblocking(true)?;
    let listener = UnixListener::from_std(listener)?;
    let mut terminate = signal(SignalKind::terminate())?;
    let mut interrupt = signal(SignalKind::interrupt())?;
    // Who asks first is told that a machine runs, not that it may start.
    machines.reader.wait_for_examinations(EXAMINATION).await;
    ready(door.as_ref().and_then(|door| door.address()));
    service_manager.say("READY=1");
    let router = api::router(app);
    // As tasks of the runtime's threads, one of which then also serves the connection: this thread would have to wake another for each.
    let mut listeners = JoinSet::new();
    listeners.spawn(serving::accept(listener, router.clone()));
    listeners.spawn(serving::accept_fleet(fleet_listener, router.clone()));
    listeners.spawn(serving::accept_remote(door.clone(), router));
    tokio::select! {
        () = service_manager.attend(async || machines.reader.summary().await) => {}
        _ = listeners.join_next() => {}
        () = reload(hangup, door, events.clone()) => {}
        () = look_after(audit.clone()) => {}
        _ = terminate.recv() => {}
        _ = interrupt.recv() => {}
    }
    service_manager.say("STOPPING=1");
    listeners.shutdown().await;
    events.close();
    audit.end();
    if !is_kept {
        let _ = std::fs::remove_file(&settings.socket);
    }
    Ok(())
}

/// The parts of a daemon, for tests of its routes: without listeners.
#[cfg(test)]
pub(crate) fn app_of(settings: &DaemonSettings, fleet: Option<Arc<FleetDoor>>) -> Result<ApiState> {
    let state = &settings.state;
    let mut complain = |_: &str| {};
    let records = Records::open(settings, state, &mut complain)?;
    let audit = Audit::new(settings.audit(state)?);
    let app = records.app(parts(settings, state, &mut complain)?, audit, None, state)?;
    Ok(Arc::new(ApiParts { fleet, ..Arc::into_inner(app).context("nobody else has it yet")? }))
}

/// Keeps space in reserve for actions that free space. Raises an event when there is none, and when there is again.
async fn keep_reserve(store: Arc<SqliteStore>, events: Events) {
    let mut before = ReserveState::Whole;
    loop {
        let filled = Arc::clone(&store);
        let Ok(now) = tokio::task::spawn_blocking(move || filled.fill_reserve()).await else { return };
        let text = match now {
            ReserveState::Short => {
                "the file system of the state folder is full: no new records until space is freed there"
            }
            ReserveState::Whole => "the file system of the state folder has space again",
        };
        if now != before {
            events.raise(EventKind::Space, "host", text);
        }
        before = now;
        tokio::time::sleep(RESERVE_EACH).await;
    }
}

/// Writes the counts of the audit log regularly.
async fn look_after(audit: Audit) {
    loop {
        tokio::time::sleep(AUDIT_EACH).await;
        let audit = audit.clone();
        let _ = tokio::task::spawn_blocking(move || audit.tick()).await;
    }
}

/// Reads the tokens and the certificate again at each SIGHUP (daemon(7)). All other settings need a restart, which
/// machines do not notice.
async fn reload(mut hangup: Signal, door: Option<Arc<RemoteListener>>, events: Events) {
    while hangup.recv().await.is_some() {
        let Some(door) = &door else {
            log_line("SIGHUP: there is nothing to reload without --listen");
            continue;
        };
        match door.reload() {
            Ok(()) => log_line("SIGHUP: the files of --tokens, --tls-cert and --tls-key were read again"),
            // Raise an event, for those who did not send the signal.
            Err(e) => events.raise(
                EventKind::Failed,
                "host",
                format!("SIGHUP: the tokens and the certificate stay as they were: {e:#}"),
            ),
        }
    }
    pending().await
}

/// Raises the limit of descriptors: each machine takes some.
fn raise_descriptors() {
    let most = getrlimit(Resource::Nofile).maximum;
    // The limit stays as it is if raising it is not allowed.
    let _ = setrlimit(Resource::Nofile, Rlimit { current: most, maximum: most });
}
