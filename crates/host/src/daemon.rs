//! The daemon process: its state folder, its socket, its connections, its end. Owns these; knows nothing of what is
//! stored.
//!
//! Invariant: a folder has one daemon; it can be killed at any time, and the next one continues. Connections are bounded
//! in number, in the time that they may be idle, and in the time that they may leave a response unread.

use crate::access::Peer;
use crate::access::audit::{self, Audit};
use crate::access::caller::PeerAddress;
use crate::access::connections::{ConnectionLimits, ConnectionSlot, Connections};
use crate::access::flow::{Flow, track};
use crate::access::lingering::LingeringStream;
use crate::access::paced::{PacedStream, ReaderLimits};
use crate::access::tls::{Remote, RemoteListener, speaks_http_2};
use crate::api::{self, ApiState, FigureAnswers, ResponseCounters};
use crate::backup::StateStore;
use crate::catalogs::{Catalogs, HostSettings};
use crate::confined;
use crate::events::{Events, log_line};
use crate::failure::Failure;
use crate::guest_users::UserChoice;
use crate::idempotency::Idempotency;
use crate::images::Images;
use crate::machines::{MachineHostConfig, Machines};
use crate::operations::Operations;
use crate::records;
use crate::registries::{Downloads, Registries, SourceRule};
use crate::reports::Reports;
use crate::resources::budget::{Capacity, host_bytes};
use crate::resources::memory::has_swap;
use crate::scopes::Scopes;
use crate::state_folder::{DATABASE, StateFolder, TAKEOVER_DEADLINE, machine_folder};
use crate::store::{Objects, ReserveState, SqliteStore, Store};
use crate::stores::Stores;
use crate::streaming::{Streaming, StreamingSettings};
use crate::systemd::ServiceManager;
use anyhow::{Context, Result, bail};
use axum::{Extension, Router, middleware};
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use rustix::fs::Mode;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use spillway_api::{EventKind, Hypervisor};
use spillway_control::kvm::Accelerator;
use spillway_control::program::check_program;
use spillway_registry::serve::PeerOrder;
use std::fs;
use std::future::pending;
use std::net::SocketAddr;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpStream, UnixListener};
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio_rustls::server::TlsStream;

/// Longest time until a request's head is complete, from the start of the connection or the end of the last response.
const HEAD: Duration = Duration::from_secs(30);
/// Minimum speed at which a response must be read.
const PACE: ReaderLimits = ReaderLimits { stall: Duration::from_secs(30), bytes_a_second: 16 << 10 };
/// Requests at a time on a connection with HTTP/2, and bytes of the head of each.
const MOST_STREAMS: u32 = 128;
const MOST_HEAD_BYTES: u32 = 8 << 10;
/// Interval at which the audit log writes its counts.
const AUDIT_EACH: Duration = Duration::from_secs(5);

/// Pause before the next connection is accepted after descriptors ran out.
const OUT_OF_DESCRIPTORS: Duration = Duration::from_millis(100);

/// The program that does all traffic with registries, beside the one that serves disks.
const STREAMD: &str = "spillway-streamd";
/// URI of the system's libvirt.
pub const LIBVIRT_URI_DEFAULT: &str = "qemu:///system";
/// Interval at which the reserve of the database is checked.
const RESERVE_EACH: Duration = Duration::from_secs(10);
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
    /// Duration of a claim if neither the claim nor its catalog gives one; `None`: until it is released.
    pub claim_ttl_seconds: Option<u32>,
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
            peers: settings.peers.clone(),
            program: streamd,
        };
        let streaming = Streaming::new(at, registries.clone(), objects.clone())?;
        let images =
            Images::open(objects.clone(), operations.clone(), stores.clone(), streaming.clone(), complain)?;
        let host = HostSettings {
            capacity: settings.capacity(),
            hypervisor: settings.hypervisor,
            machines: machine_folder(state),
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
    fn app(self, parts: MachineHostConfig, audit: Audit, state: &Path) -> Result<ApiState> {
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
        let machines =
            Machines::open(events.clone(), objects, stores.clone(), images.clone(), catalogs.clone(), parts)?;
        Ok(ApiState {
            audit,
            answered: ResponseCounters::default(),
            figure_answers: FigureAnswers::default(),
            catalogs,
            downloads,
            events,
            idempotency,
            images,
            machines,
            operations,
            registries,
            reports: Reports::new(state),
            state: StateStore { folder: state.to_owned(), store },
            stores,
        })
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
        None => listen(&settings)?,
    };
    let audit = Audit::new(settings.audit(state.path())?);
    let app = records.app(parts, audit.clone(), state.path())?;
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

/// Accepts connections on the unix socket.
async fn accept(listener: UnixListener, router: Router) {
    let connections = Connections::new(ConnectionLimits::LOCAL);
    loop {
        let Ok((stream, _)) = listener.accept().await else {
            // Out of descriptors: wait until others are closed.
            tokio::time::sleep(OUT_OF_DESCRIPTORS).await;
            continue;
        };
        let who = stream.peer_cred().ok();
        let source =
            PeerAddress::Local { uid: who.as_ref().map(|who| who.uid()), pid: who.and_then(|who| who.pid()) };
        // All connections of that user are busy: refuse this one.
        let Ok(place) = connections.admit(source) else { continue };
        let peer = Peer { source, known: None, place: Arc::clone(&place) };
        tokio::spawn(until_closed(place, serve(stream, router.clone(), peer)));
    }
}

/// Accepts connections over TCP, if there is a listener.
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
        let peer = Peer { source, known: Some(Arc::clone(&door.known)), place: Arc::clone(&place) };
        let router = router.clone();
        tokio::spawn(until_closed(place, async move {
            match stranger.greet().await {
                Some(stream) if speaks_http_2(&stream) => serve_http_2(stream, router, peer).await,
                Some(stream) => serve(stream, router, peer).await,
                None => {}
            }
        }));
    }
}

/// Serves a connection until it ends, or until it is closed for another one.
async fn until_closed(place: Arc<ConnectionSlot>, answering: impl Future<Output = ()>) {
    tokio::select! {
        () = answering => {}
        () = place.closed() => {}
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

/// Serves a connection with HTTP/2 until it ends. Browsers have many requests at a time, and few connections.
async fn serve_http_2(stream: TlsStream<TcpStream>, router: Router, peer: Peer) {
    let flow = Flow::begun();
    let track = middleware::from_fn_with_state(flow.clone(), track);
    let router = router.layer(track).layer(middleware::from_fn(api::complete)).layer(Extension(peer));
    let service = TowerToHyperService::new(router);
    let connection = hyper::server::conn::http2::Builder::new(TokioExecutor::new())
        .timer(TokioTimer::new())
        .max_concurrent_streams(MOST_STREAMS)
        .max_header_list_size(MOST_HEAD_BYTES)
        .keep_alive_interval(HEAD)
        .keep_alive_timeout(HEAD)
        .serve_connection(TokioIo::new(PacedStream::new(stream, PACE)), service);
    tokio::select! {
        _ = connection => {}
        () = flow.is_over() => {}
    }
}

/// Serves a connection with HTTP/1.1 until it ends, or until it has become a WebSocket, which is served by its own task.
async fn serve(stream: impl AsyncRead + AsyncWrite + Send + Unpin + 'static, router: Router, peer: Peer) {
    let service = TowerToHyperService::new(router.layer(Extension(peer)));
    let stream = LingeringStream::new(PacedStream::new(stream, PACE));
    let connection = hyper::server::conn::http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(HEAD)
        .serve_connection(TokioIo::new(stream), service);
    let _ = connection.with_upgrades().await;
}

/// Raises the limit of descriptors: each machine takes some.
fn raise_descriptors() {
    let most = getrlimit(Resource::Nofile).maximum;
    // The limit stays as it is if raising it is not allowed.
    let _ = setrlimit(Resource::Nofile, Rlimit { current: most, maximum: most });
}

/// Creates the socket so that nobody can connect before its permissions are set. Replaces a socket without a listener.
fn listen(settings: &DaemonSettings) -> Result<std::os::unix::net::UnixListener> {
    let path = &settings.socket;
    if let Some(folder) = path.parent() {
        fs::create_dir_all(folder).with_context(|| {
            format!("{}: cannot create the folder of the socket: give another --socket", folder.display())
        })?;
    }
    let until = Instant::now() + TAKEOVER_DEADLINE;
    while std::os::unix::net::UnixStream::connect(path).is_ok() {
        // As with the lock: a process that the last daemon was starting may hold it.
        if Instant::now() > until {
            bail!(Failure::refused(format!(
                "{}: another process listens there: stop it, or give another --socket",
                path.display()
            )));
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    match fs::symlink_metadata(path) {
        Ok(found) if !std::os::unix::fs::FileTypeExt::is_socket(&found.file_type()) => {
            bail!(Failure::usage(format!(
                "{}: exists and is not a socket: remove it, or give another --socket",
                path.display()
            )))
        }
        Ok(_) => fs::remove_file(path).with_context(|| {
            format!("{}: cannot remove the old socket: give another --socket", path.display())
        })?,
        Err(_) => {}
    }
    let before = rustix::process::umask(Mode::from_raw_mode(0o177));
    let listener = std::os::unix::net::UnixListener::bind(path);
    rustix::process::umask(before);
    let listener = listener
        .with_context(|| format!("{}: cannot create the socket: give another --socket", path.display()))?;
    fs::set_permissions(path, fs::Permissions::from_mode(settings.socket_mode))?;
    Ok(listener)
}
