//! The daemon's life: its folder, its socket, its connections, its end. Owns these; knows nothing of what is kept.
//!
//! Invariant: one daemon has a folder; it can be killed at any instant, and the next one goes on. Connections are
//! bounded in number, in the time that they may keep silent, and in the time that they may leave an answer unread.

use crate::access::Peer;
use crate::access::audit::{self, Audit};
use crate::access::caller::PeerAddress;
use crate::access::connections::{ConnectionLimits, ConnectionSlot, Connections};
use crate::access::paced::{PacedStream, ReaderLimits};
use crate::access::tls::{Remote, RemoteListener};
use crate::api::{self, ApiState, ResponseCounters};
use crate::backup::StateStore;
use crate::catalogs::{Catalogs, HostSettings};
use crate::confined;
use crate::events::{Events, log_line};
use crate::guest_users::UserChoice;
use crate::idempotency::Idempotency;
use crate::images::Images;
use crate::machines::{MachineHostConfig, Machines};
use crate::operations::Operations;
use crate::records;
use crate::resources::budget::{Capacity, host_bytes};
use crate::resources::memory::has_swap;
use crate::scopes::Scopes;
use crate::store::{Objects, ReserveState, SqliteStore, Store};
use crate::stores::Stores;
use crate::systemd::ServiceManager;
use anyhow::{Context, Result, bail};
use axum::{Extension, Router};
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use rustix::fs::{FlockOperation, Mode, flock};
use rustix::io::Errno;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use spillway_api::{EventKind, Hypervisor};
use std::fs::{self, File};
use std::future::pending;
use std::net::SocketAddr;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::UnixListener;
use tokio::signal::unix::{Signal, SignalKind, signal};

/// How long a request's head may take to come: from the connection's start, or from the end of the last answer.
const HEAD: Duration = Duration::from_secs(30);
/// How slowly an answer may be read.
const PACE: ReaderLimits = ReaderLimits { stall: Duration::from_secs(30), bytes_a_second: 16 << 10 };
/// Between two looks at what the audit log has counted.
const AUDIT_EACH: Duration = Duration::from_secs(5);

/// Of what a client sends after its last answer so much is read, for so long.
const MOST_UNREAD_BYTES: usize = 1 << 20;
const UNREAD: Duration = Duration::from_secs(2);
/// Before connections are taken again when there was no descriptor for one.
const OUT_OF_DESCRIPTORS: Duration = Duration::from_millis(100);

/// The folder for what runs.
const RUN: &str = "run";
/// The system's libvirt.
pub const LIBVIRT_URI_DEFAULT: &str = "qemu:///system";
/// A folder that has it is a daemon's.
pub(crate) const LOCK_FILE: &str = "lock";
/// The records.
pub(crate) const DATABASE: &str = "state.db";
/// How often it is looked whether what frees room has room itself.
const RESERVE_EACH: Duration = Duration::from_secs(10);
/// How long the lock and the socket of a daemon that has just ended may stay.
const LOCK: Duration = Duration::from_secs(2);

/// How it is started.
#[derive(Clone, Debug)]
pub struct DaemonSettings {
    /// Where everything is kept.
    pub state: PathBuf,
    /// Where it listens.
    pub socket: PathBuf,
    /// The socket's rights.
    pub socket_mode: u32,
    /// Where it listens besides, for those who have a token.
    pub remote: Option<Remote>,
    /// Who runs machines.
    pub hypervisor: Hypervisor,
    /// The libvirt that does, if it does.
    pub libvirt_uri: String,
    /// The users that machines' QEMUs run as.
    pub guest_users: UserChoice,
    /// The program that serves disks.
    pub program: PathBuf,
    /// Memory that all caches may have together; half of the host's if nothing is said.
    pub ram_budget_bytes: Option<u64>,
    /// Limits of caches may be so many percent of that together.
    pub overcommit_percent: u32,
    /// What of the host's memory machines do not get; a tenth if nothing is said.
    pub memory_reserve_bytes: Option<u64>,
    /// Guests' memory and caches may be so many percent of the rest together.
    pub memory_overcommit_percent: u32,
    /// Guests' processors may be so many percent of the host's together.
    pub vcpu_overcommit_percent: u32,
    /// Caches shrink when less memory than this is available; a twentieth of the host's if nothing is said.
    pub memory_floor_bytes: Option<u64>,
    /// Where changes are written down; in the state folder if nothing is said.
    pub audit: Vec<AuditTo>,
    /// How long that is kept.
    pub audit_keep: Duration,
    /// How much of it is kept.
    pub audit_max_bytes: u64,
    /// How long a claim lasts of which neither it nor its catalog says that; `None`: until it is released.
    pub claim_ttl_seconds: Option<u32>,
}

/// Where changes are written down.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum AuditTo {
    /// Standard error, which the journal keeps.
    Journal,
    /// A file, and the older parts of it beside it.
    File(PathBuf),
}

impl DaemonSettings {
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
            bail!("--audit: one file can be, and 'journal'");
        }
        let journal = self.audit.contains(&AuditTo::Journal);
        Ok(audit::AuditSettings { file, journal, keep: self.audit_keep, max_bytes: self.audit_max_bytes })
    }

    /// What machines may take of this host.
    fn capacity(&self) -> Capacity {
        let host_bytes = host_bytes();
        let host_cpus = std::thread::available_parallelism().map_or(1, |cpus| cpus.get() as u32);
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
}

/// The folder of everything that is kept. No other daemon has it while this value lives.
struct StateFolder {
    path: PathBuf,
    _lock: File,
}

impl StateFolder {
    /// Makes it, if need be, and closes it to everybody else.
    fn take(settings: &DaemonSettings) -> Result<StateFolder> {
        let path = std::path::absolute(&settings.state).context("--state")?;
        fs::create_dir_all(&path).with_context(|| format!("{}: cannot be made", path.display()))?;
        is_ours(&path)?;
        raise_descriptors();
        // What is made here is ours alone, unless it is made for others.
        rustix::process::umask(Mode::from_raw_mode(0o077));
        let lock = lock(&path.join(LOCK_FILE))?;
        close(&path, settings.hypervisor).with_context(|| format!("{}: is not ours", path.display()))?;
        Ok(StateFolder { path, _lock: lock })
    }
}

/// What is recorded, and the parts that look after it. No machine is looked at yet.
struct Records {
    store: Arc<SqliteStore>,
    objects: Objects,
    events: Events,
    operations: Operations,
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
        let images = Images::open(objects.clone(), operations.clone(), stores.clone(), complain)?;
        let host = HostSettings {
            capacity: settings.capacity(),
            hypervisor: settings.hypervisor,
            machines: machine_folder(state),
        };
        let catalogs = Catalogs::open(objects.clone(), stores.clone(), host, complain)?;
        Ok(Records { store, objects, events, operations, stores, images, catalogs })
    }

    /// Takes over the machines: what the routes ask.
    fn app(self, parts: MachineHostConfig, audit: Audit, state: &Path) -> Result<ApiState> {
        let Records { store, objects, events, operations, stores, images, catalogs } = self;
        let idempotency = Idempotency::new(objects.clone());
        let machines =
            Machines::open(events.clone(), objects, stores.clone(), images.clone(), catalogs.clone(), parts)?;
        Ok(ApiState {
            audit,
            answered: ResponseCounters::default(),
            catalogs,
            events,
            idempotency,
            images,
            machines,
            operations,
            state: StateStore { folder: state.to_owned(), store },
            stores,
        })
    }
}

/// The folder that machines run in.
fn machine_folder(state: &Path) -> PathBuf {
    state.join(RUN).join("machines")
}

/// Where the parts are that machines are made of.
fn parts(
    settings: &DaemonSettings,
    state: &Path,
    complain: &mut dyn FnMut(&str),
) -> Result<MachineHostConfig> {
    if !settings.program.is_file() {
        let program = settings.program.display();
        complain(&format!(
            "{program} is not there, and no machine can start: say where it is with --spillway"
        ));
    }
    if has_swap() {
        complain(
            "this host swaps: a cache that is swapped out is slower than none; swap off, or keep machines out of it",
        );
    }
    let guest_users = settings.guest_users.settle(settings.hypervisor, complain);
    Ok(MachineHostConfig {
        folder: machine_folder(state),
        program: settings.program.clone(),
        hypervisor: settings.hypervisor,
        capacity: settings.capacity(),
        memory_floor_bytes: settings.memory_floor_bytes.unwrap_or(host_bytes() / 20),
        scopes: Scopes::choose(complain),
        libvirt_uri: settings.libvirt_uri.clone(),
        claim_ttl_seconds: settings.claim_ttl_seconds,
        guest_users: guest_users.map_err(anyhow::Error::msg)?,
    })
}

/// Serves until it is told to end. What goes on then is broken off, which the next one undoes.
pub async fn run(
    settings: DaemonSettings,
    mut service_manager: ServiceManager,
    ready: impl FnOnce(Option<SocketAddr>),
) -> Result<()> {
    // Before anything that takes time: unheard it would end the daemon, and the service manager takes that for an end in order.
    let hangup = signal(SignalKind::hangup())?;
    let state = StateFolder::take(&settings)?;
    let mut complain = |line: &str| log_line(&format!("warning: {line}"));
    if !confined::is_supported() {
        complain(
            "this kernel has no Landlock: qemu-img and debugfs are kept from sockets, devices and rights, not from files",
        );
    }
    let records = Records::open(&settings, &state.path, &mut complain)?;
    let parts = parts(&settings, &state.path, &mut complain)?;
    // Before there are others who make files: it changes what all of them get.
    let listener = match service_manager.listener(&settings.socket, &mut complain) {
        Some(listener) => listener,
        None => listen(&settings)?,
    };
    let audit = Audit::new(settings.audit(&state.path)?);
    let app = records.app(parts, audit.clone(), &state.path)?;
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
    ready(door.as_ref().and_then(|door| door.address()));
    service_manager.say("READY=1");
    let router = api::router(app);
    tokio::select! {
        () = service_manager.attend(async || machines.reader.summary().await) => {}
        () = accept(listener, router.clone()) => {}
        () = accept_remote(door.clone(), router) => {}
        () = reload(hangup, door, events.clone()) => {}
        () = look_after(audit.clone()) => {}
        _ = terminate.recv() => {}
        _ = interrupt.recv() => {}
    }
    service_manager.say("STOPPING=1");
    events.close();
    audit.end();
    if !is_kept {
        let _ = fs::remove_file(&settings.socket);
    }
    Ok(())
}

/// Keeps room for what frees room. Told once when there is none, and when there is again.
async fn keep_reserve(store: Arc<SqliteStore>, events: Events) {
    let mut before = ReserveState::Whole;
    loop {
        let filled = Arc::clone(&store);
        let Ok(now) = tokio::task::spawn_blocking(move || filled.fill_reserve()).await else { return };
        let text = match now {
            ReserveState::Short => {
                "the state's file system is full: nothing new can be recorded until there is room again"
            }
            ReserveState::Whole => "the state's file system has room again",
        };
        if now != before {
            events.raise(EventKind::Space, "host", text);
        }
        before = now;
        tokio::time::sleep(RESERVE_EACH).await;
    }
}

/// Has the audit log write what it has counted.
async fn look_after(audit: Audit) {
    loop {
        tokio::time::sleep(AUDIT_EACH).await;
        let audit = audit.clone();
        let _ = tokio::task::spawn_blocking(move || audit.tick()).await;
    }
}

/// Lets clients in for as long as it is asked.
async fn accept(listener: UnixListener, router: Router) {
    let connections = Connections::new(ConnectionLimits::LOCAL);
    loop {
        let Ok((stream, _)) = listener.accept().await else {
            // Out of descriptors: others give some back.
            tokio::time::sleep(OUT_OF_DESCRIPTORS).await;
            continue;
        };
        let who = stream.peer_cred().ok();
        let source =
            PeerAddress::Local { uid: who.as_ref().map(|who| who.uid()), pid: who.and_then(|who| who.pid()) };
        // All of that user's connections are being answered: this one goes.
        let Ok(place) = connections.admit(source) else { continue };
        let peer = Peer { source, tokens: None, place: Arc::clone(&place) };
        tokio::spawn(until_closed(place, serve(stream, router.clone(), peer)));
    }
}

/// The same for those who come over TCP; nobody, without a door.
async fn accept_remote(door: Option<Arc<RemoteListener>>, router: Router) {
    let Some(door) = door else { return pending().await };
    let connections = Connections::new(ConnectionLimits::REMOTE);
    loop {
        let Some(stranger) = door.next().await else {
            tokio::time::sleep(OUT_OF_DESCRIPTORS).await;
            continue;
        };
        let source = PeerAddress::Remote(stranger.address.ip());
        let Ok(place) = connections.admit(source) else { continue };
        let peer = Peer { source, tokens: Some(Arc::clone(&door.tokens)), place: Arc::clone(&place) };
        let router = router.clone();
        tokio::spawn(until_closed(place, async move {
            if let Some(stream) = stranger.greet().await {
                serve(stream, router, peer).await;
            }
        }));
    }
}

/// Answers a connection until it ends, or another one needs its place.
async fn until_closed(place: Arc<ConnectionSlot>, answering: impl Future<Output = ()>) {
    tokio::select! {
        () = answering => {}
        () = place.closed() => {}
    }
}

/// Reads again who may come over TCP, and by what they know us, each time that it is asked to (daemon(7): SIGHUP). All else
/// needs another start, which no machine notices.
async fn reload(mut hangup: Signal, door: Option<Arc<RemoteListener>>, events: Events) {
    while hangup.recv().await.is_some() {
        let Some(door) = &door else {
            log_line("SIGHUP: there is nothing to read again without --listen");
            continue;
        };
        match door.reload() {
            Ok(()) => log_line("SIGHUP: the files of --tokens, --tls-cert and --tls-key were read again"),
            // Where those look who have not sent it.
            Err(e) => events.raise(
                EventKind::Failed,
                "host",
                format!("SIGHUP: what was read before holds on, tokens and certificate: {e:#}"),
            ),
        }
    }
    pending().await
}

/// Answers a connection until it ends.
async fn serve(stream: impl AsyncRead + AsyncWrite + Unpin, router: Router, peer: Peer) {
    let service = TowerToHyperService::new(router.layer(Extension(peer)));
    let connection = hyper::server::conn::http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(HEAD)
        .serve_connection(TokioIo::new(PacedStream::new(stream, PACE)), service);
    let Ok(parts) = connection.without_shutdown().await else { return };
    let mut stream = parts.io.into_inner();
    // A connection that is closed with something unread loses the answer on its way: what was too much is read first.
    let rest = async {
        stream.shutdown().await?;
        let (mut buffer, mut read) = (vec![0; 16 << 10], 0);
        while read < MOST_UNREAD_BYTES {
            match stream.read(&mut buffer).await? {
                0 => break,
                n => read += n,
            }
        }
        std::io::Result::Ok(())
    };
    let _ = tokio::time::timeout(UNREAD, rest).await;
}

/// Refuses a folder that holds something else: it is about to be closed to everybody.
pub(crate) fn is_ours(state: &Path) -> Result<()> {
    if state.join(LOCK_FILE).exists() {
        return Ok(());
    }
    let entries = fs::read_dir(state).with_context(|| format!("{}: cannot be read", state.display()))?;
    for entry in entries {
        let name = entry?.file_name();
        // A file system has it from its birth.
        if name != "lost+found" {
            bail!(
                "{} holds '{}' and nothing of spillwayd's: give an empty folder, or a new one, as --state",
                state.display(),
                name.display()
            );
        }
    }
    Ok(())
}

/// Each machine takes some descriptors.
fn raise_descriptors() {
    let most = getrlimit(Resource::Nofile).maximum;
    // It stays as it is if that is not allowed.
    let _ = setrlimit(Resource::Nofile, Rlimit { current: most, maximum: most });
}

/// Nobody else has any right to what is kept; the group that libvirt's QEMU was let in as may go through to `run`.
fn close(state: &Path, hypervisor: Hypervisor) -> std::io::Result<()> {
    for entry in fs::read_dir(state)? {
        let entry = entry?;
        let found = entry.metadata()?;
        let rights = found.permissions().mode();
        if entry.file_name() != RUN && !found.is_symlink() && rights & 0o077 != 0 {
            fs::set_permissions(entry.path(), fs::Permissions::from_mode(rights & 0o7700))?;
        }
    }
    let mode = if hypervisor == Hypervisor::Libvirt { 0o710 } else { 0o700 };
    fs::set_permissions(state, fs::Permissions::from_mode(mode))
}

/// Held for as long as the daemon lives.
pub(crate) fn lock(path: &Path) -> Result<File> {
    let file = File::options().create(true).truncate(false).write(true).open(path);
    let file = file.with_context(|| format!("{}: cannot be made", path.display()))?;
    let until = Instant::now() + LOCK;
    loop {
        match flock(&file, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => return Ok(file),
            // A process that the last one was just starting has it until it executes its program.
            Err(Errno::WOULDBLOCK) if Instant::now() < until => std::thread::sleep(Duration::from_millis(5)),
            Err(Errno::WOULDBLOCK) => {
                bail!("{}: another spillwayd has this folder: give another --state", path.display())
            }
            Err(e) => return Err(e).with_context(|| path.display().to_string()),
        }
    }
}

/// Nobody can connect before the rights are right. One that nobody listens on any more is replaced.
fn listen(settings: &DaemonSettings) -> Result<std::os::unix::net::UnixListener> {
    let path = &settings.socket;
    if let Some(folder) = path.parent() {
        fs::create_dir_all(folder).with_context(|| format!("{}: cannot be made", folder.display()))?;
    }
    let until = Instant::now() + LOCK;
    while std::os::unix::net::UnixStream::connect(path).is_ok() {
        // As with the lock: it may be a process that the last one was just starting.
        if Instant::now() > until {
            bail!("{}: somebody listens there: give another --socket", path.display());
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    match fs::symlink_metadata(path) {
        Ok(found) if !std::os::unix::fs::FileTypeExt::is_socket(&found.file_type()) => {
            bail!("{}: is there and no socket: give another --socket", path.display())
        }
        Ok(_) => fs::remove_file(path).with_context(|| format!("{}: cannot be replaced", path.display()))?,
        Err(_) => {}
    }
    let before = rustix::process::umask(Mode::from_raw_mode(0o177));
    let listener = std::os::unix::net::UnixListener::bind(path);
    rustix::process::umask(before);
    let listener = listener.with_context(|| format!("{}: cannot be made", path.display()))?;
    fs::set_permissions(path, fs::Permissions::from_mode(settings.socket_mode))?;
    Ok(listener)
}
