//! Images of which only a part is on this host: the process `spillway-streamd serve` that brings their chunks, and what it is
//! told. Owns that process and the place of its cache; which versions are streamed, images know.
//!
//! Invariant: the process outlives the daemon, as disks do that need it. If it dies, or is of another version or order, another one
//! is started and told of all images, and disks connect to that.

mod boot_sets;
mod client;
mod members;
mod peers;

pub use boot_sets::{BootSet, BootSets};
pub use peers::{FleetPeers, PeerOptions, url_of_member};

use crate::error::HostError;
use crate::events::Events;
use crate::images::{CHUNK_BYTES, WholeImages};
use crate::processes::{self, ObservedProcess};
use crate::registries::{JobFiles, Registries, place_of};
use crate::scopes::Scopes;
use crate::store::{ChangeNotice, Objects, RecordKind, StoredRecord};
use client::ControlClient;
use members::MemberList;
use rustix::event::{EventfdFlags, eventfd};
use spillway_api::{
    Catalog, ErrorCode, EventKind, ImageVersion, Name, Residency, StreamCounters, StreamFigures,
};
use spillway_control::Streamed;
use spillway_control::program::check_program;
use spillway_image::digests::hex;
use spillway_registry::job::Work;
use spillway_registry::serve::{
    CacheFigures, ControlReply, ControlRequest, Fill, ImageFigures, PeerMember, PeerOrder, PeerTrust,
    SERVE_VERSION, ServeOrder, USERS,
};
use spillway_registry::{Index, root_of};
use std::fs::{self, File};
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Arc, Mutex, OnceLock};
use std::thread;
use std::time::{Duration, Instant};
use tokio::sync::broadcast::Receiver;
use tokio::sync::broadcast::error::RecvError;

/// Name of the process.
const PROCESS: &str = "streamd";
/// Shortest time after which a second request is sent beside one to a store that has not ended.
const HEDGE: Duration = Duration::from_millis(200);
/// Longest time until the process listens.
const READY: Duration = Duration::from_secs(20);
/// Longest time until the process ends when it is asked to.
const END: Duration = Duration::from_secs(2);
/// Longest time in which the kernel lets go of the files of a worker that has ended, whose ring still has requests.
const LET_GO: Duration = Duration::from_secs(2);
/// Longest time to tell a registry of a boot set.
const TELL: Duration = Duration::from_secs(30);
/// Pauses before another process is started after one that could not be.
const PAUSES: (Duration, Duration) = (Duration::from_millis(100), Duration::from_secs(10));

/// Kinds of records of this module.
pub(crate) const RECORDS: [RecordKind; 1] = boot_sets::RECORDS;

/// A version that is streamed.
#[derive(Clone, Debug)]
pub struct StreamedVersion {
    /// Name and number, for people.
    pub reference: String,
    /// Digest of the image.
    pub digest: String,
    /// Size of the image, in bytes.
    pub size_bytes: u64,
    /// The registry that it came from.
    pub registry: Name,
    /// Which chunks are brought before a disk needs them, as the image and the catalogs ask for.
    pub residency: Residency,
    /// File with the digests of its chunks.
    pub digests: PathBuf,
}

/// Where the process works.
#[derive(Clone, Debug)]
pub struct StreamingSettings {
    /// Folder for its sockets and its log.
    pub folder: PathBuf,
    /// Folder of the cache.
    pub cache: PathBuf,
    /// Most bytes in the cache.
    pub budget_bytes: u64,
    /// Rate at which whole images are brought, in bytes a second.
    pub fill_bytes_per_second: u64,
    /// The other hosts, if there are some.
    pub peers: Option<PeerOrder>,
    /// The program `spillway-streamd`.
    pub program: PathBuf,
}

/// Lists the versions that are streamed.
type ListStreamed = dyn Fn() -> Result<Vec<StreamedVersion>, HostError> + Send + Sync;

/// The process and its cache. A clone is the same.
#[derive(Clone)]
pub struct Streaming(Arc<Inner>);

struct Inner {
    settings: StreamingSettings,
    registries: Registries,
    boot_sets: BootSets,
    /// The hosts of the fleet, as far as they are known.
    members: MemberList,
    /// Set when the daemon begins to serve.
    parts: OnceLock<Parts>,
    /// Held while the process is started or replaced.
    starting: Mutex<()>,
    /// Wakes the thread that looks after the process.
    wake: OwnedFd,
}

struct Parts {
    scopes: Scopes,
    list: Box<ListStreamed>,
}

impl Streaming {
    /// Prepares everything; starts nothing.
    pub fn new(
        settings: StreamingSettings,
        registries: Registries,
        objects: Objects,
    ) -> Result<Streaming, HostError> {
        let wake = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
            .map_err(|e| HostError::new(ErrorCode::Exhausted, format!("no eventfd: {e}")))?;
        let (parts, starting) = (OnceLock::new(), Mutex::new(()));
        let boot_sets = BootSets::new(objects);
        let members = MemberList::default();
        Ok(Streaming(Arc::new(Inner { settings, registries, boot_sets, members, parts, starting, wake })))
    }

    /// Of a host without streamed versions, and without the program.
    #[cfg(test)]
    pub fn of_nothing(objects: Objects) -> Streaming {
        let nowhere = Path::new("/nonexistent");
        let [folder, cache, program] =
            ["streamd", "cache", "spillway-streamd"].map(|name| nowhere.join(name));
        let operations = crate::operations::Operations::default();
        let registries = Registries::new(objects.clone(), operations, program.clone());
        let settings = StreamingSettings {
            folder,
            cache,
            budget_bytes: 0,
            fill_bytes_per_second: 0,
            peers: None,
            program,
        };
        Streaming::new(settings, registries, objects).expect("there are descriptors left")
    }

    /// Looks after the process from now on, as long as any version is streamed.
    pub fn begin(
        &self,
        scopes: Scopes,
        events: Events,
        list: impl Fn() -> Result<Vec<StreamedVersion>, HostError> + Send + Sync + 'static,
    ) -> Result<(), HostError> {
        let _unset_before = self.0.parts.set(Parts { scopes, list: Box::new(list) });
        let streaming = self.clone();
        let thread = thread::Builder::new().name("streaming".into());
        thread
            .spawn(move || streaming.look_after(&events))
            .map(drop)
            .map_err(|e| HostError::new(ErrorCode::Exhausted, format!("no thread: {e}")))
    }

    /// How a disk opens an image, and the path of the image's file, for people.
    pub fn opened_at(&self, digest: &str) -> Result<(Streamed, PathBuf), HostError> {
        let root = root_of(digest)
            .ok_or_else(|| HostError::new(ErrorCode::Damaged, format!("{digest} is no digest")))?;
        let Inner { settings, .. } = &*self.0;
        let streamed = Streamed { socket: settings.folder.join(USERS), digest: digest.into() };
        Ok((streamed, settings.cache.join(hex(&root)).join("disk.raw")))
    }

    /// Begins to serve a version, and to bring what its residency asks for. With `dry_run` it is only checked whether there is space
    /// for that.
    pub fn serve(&self, version: &StreamedVersion, dry_run: bool) -> Result<(), HostError> {
        let (client, _) = self.bring_up()?;
        self.name(&client, version, dry_run)
    }

    /// Looks again whenever records change from which residencies follow.
    pub async fn follow(self, mut changes: Receiver<ChangeNotice>) {
        let decides = |key: &String| {
            [Catalog::PREFIX, ImageVersion::PREFIX, WholeImages::PREFIX]
                .iter()
                .any(|kind| key.starts_with(kind))
        };
        loop {
            match changes.recv().await {
                Ok(changed) if !changed.keys.iter().any(decides) => {}
                Ok(_) | Err(RecvError::Lagged(_)) => self.changed(),
                Err(RecvError::Closed) => return,
            }
        }
    }

    /// The recorded boot sets.
    pub fn boot_sets(&self) -> &BootSets {
        &self.0.boot_sets
    }

    /// Takes what a machine read until it was ready, and tells others of the set when it is known well enough.
    pub fn record_boot(
        &self,
        version: &StreamedVersion,
        catalog: &Name,
        chunks: Vec<u32>,
    ) -> Result<(), HostError> {
        let chunks = with_data(version, chunks)?;
        let Some(chunks) = self.0.boot_sets.record(&version.digest, catalog, chunks)? else { return Ok(()) };
        self.changed();
        let registry = self.0.registries.get(&version.registry)?;
        if registry.url.starts_with("http") {
            return Ok(());
        }
        let (digest, catalog) = (version.digest.clone(), catalog.to_string());
        let work = Work::KeepBootSet { digest, catalog, chunks };
        // A registry that cannot be written is no fault.
        let _told = self.0.registries.ask(&registry, work, JobFiles::default(), TELL);
        Ok(())
    }

    /// The list of streamed versions, or the registry of one, has changed.
    pub fn changed(&self) {
        // It is read to the end before each look: it cannot be full.
        let _ = rustix::io::write(&self.0.wake, &1u64.to_ne_bytes());
    }

    /// The hosts of the fleet that exchange chunks are these from now on, this one included.
    pub fn set_members(&self, members: Vec<PeerMember>) {
        let takes = self.0.settings.peers.as_ref().is_some_and(|peers| peers.trust == PeerTrust::Members);
        if takes && self.0.members.replace(members) {
            self.changed();
        }
    }

    /// Serves an image no longer, and removes it from the cache. Refused while a disk uses it. If there is no process, the next one
    /// removes it.
    pub fn forget(&self, digest: &str) -> Result<(), HostError> {
        let Ok(client) = ControlClient::connect(&self.0.settings.folder) else { return Ok(()) };
        let deadline = Instant::now() + LET_GO;
        loop {
            match client.ask(&ControlRequest::Forget { digest: digest.into() }, &[]) {
                Ok(ControlReply::Refused(_)) if Instant::now() < deadline => thread::sleep(LET_GO / 40),
                Ok(ControlReply::Refused(why)) => return Err(HostError::new(ErrorCode::InUse, why)),
                Ok(_) | Err(_) => return Ok(()),
            }
        }
    }

    /// What is in the cache of an image; none if the process is not there.
    pub fn image(&self, digest: &str) -> Option<ImageFigures> {
        let client = ControlClient::connect(&self.0.settings.folder).ok()?;
        match client.ask(&ControlRequest::Image { digest: digest.into() }, &[]) {
            Ok(ControlReply::Image(figures)) => Some(figures),
            _ => None,
        }
    }

    /// Figures of the whole cache; none if the process is not there.
    pub fn figures(&self) -> Option<StreamFigures> {
        let client = ControlClient::connect(&self.0.settings.folder).ok()?;
        match client.ask(&ControlRequest::Figures, &[]) {
            Ok(ControlReply::Figures(figures)) => Some(stream_figures(&figures)),
            _ => None,
        }
    }

    fn list(&self) -> Result<Vec<StreamedVersion>, HostError> {
        self.0.parts.get().map_or(Ok(Vec::new()), |parts| (parts.list)())
    }

    /// Keeps the process alive. Never returns.
    fn look_after(&self, events: &Events) {
        let mut pause = PAUSES.0;
        let mut told = String::new();
        loop {
            let mut count = [0; 8];
            let _ = rustix::io::read(&self.0.wake, &mut count);
            let is_needed = match self.list() {
                Ok(versions) => !versions.is_empty(),
                Err(_) => true,
            };
            // An idle one is left alone: the next import may use it.
            if !is_needed {
                wait_for(&self.0.wake, None);
                continue;
            }
            match self.bring_up().and_then(|(client, _)| self.name_all(&client).map(|why| (client, why))) {
                Ok((client, complaints)) => {
                    pause = PAUSES.0;
                    let complaint = complaints.join("; ");
                    if complaint != told {
                        if !complaint.is_empty() {
                            events.raise(EventKind::Failed, "host", &complaint);
                        }
                        told = complaint;
                    }
                    // What could not be served is tried again.
                    let again = (!told.is_empty()).then(|| Instant::now() + PAUSES.1);
                    if client.is_gone(self.0.wake.as_fd(), again) {
                        let last = processes::last_words(&self.0.settings.folder, PROCESS);
                        let text = format!("spillway-streamd has ended, and is started again: {last}");
                        events.raise(EventKind::Failed, "host", text);
                    }
                }
                Err(e) => {
                    let text = format!("no chunks of streamed images can be brought: {e}");
                    if text != told {
                        events.raise(EventKind::Failed, "host", &text);
                        told = text;
                    }
                    wait_for(&self.0.wake, Some(pause));
                    pause = (pause * 2).min(PAUSES.1);
                }
            }
        }
    }

    fn order(&self) -> Result<ServeOrder, HostError> {
        let Inner { settings, registries, .. } = &*self.0;
        let mut folders: Vec<_> = registries
            .list()?
            .iter()
            .filter_map(|registry| registry.url.strip_prefix("file://").map(PathBuf::from))
            .collect();
        folders.sort();
        folders.dedup();
        Ok(ServeOrder {
            cache: settings.cache.clone(),
            budget_bytes: settings.budget_bytes,
            hedge_milliseconds: HEDGE.as_millis() as u64,
            fill_bytes_per_second: settings.fill_bytes_per_second,
            folders,
            peers: settings.peers.clone().map(peers::with_time_of_files),
        })
    }

    /// Connects to the process, which is started if it is not there, or replaced if it was started otherwise. The flag says that it
    /// is new.
    fn bring_up(&self) -> Result<(ControlClient, bool), HostError> {
        let _one_at_a_time = self.0.starting.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        let Inner { settings, .. } = &*self.0;
        let order = self.order()?;
        if let ObservedProcess::Alive(process) = processes::look(&settings.folder, PROCESS)? {
            let connected = ControlClient::connect(&settings.folder);
            if let Ok(client) = connected
                && is_ours(&client, &order)
            {
                return Ok((client, false));
            }
            process.end(END)?;
        }
        let client = self.start(&order)?;
        self.0.members.tell(&client)?;
        Ok((client, true))
    }

    fn start(&self, order: &ServeOrder) -> Result<ControlClient, HostError> {
        let Inner { settings, parts, .. } = &*self.0;
        let made = [&settings.folder, &settings.cache].iter().try_for_each(|folder| {
            fs::create_dir_all(folder).map_err(|e| format!("{} cannot be made: {e}", folder.display()))
        });
        made.map_err(|why| HostError::new(ErrorCode::Unavailable, why))?;
        processes::bound_log(&settings.folder, PROCESS);
        let mut command = Command::new(check_program(&settings.program)?);
        let text = serde_json::to_string(order)
            .map_err(|e| HostError::new(ErrorCode::Internal, format!("no order: {e}")))?;
        command.args(["serve", &text]);
        let scopes = parts.get().map_or(&Scopes::None, |parts| &parts.scopes);
        let process =
            processes::start(&settings.folder, PROCESS, scopes.place(&settings.folder, PROCESS, command))?;
        let until = Instant::now() + READY;
        loop {
            // It may be the socket of the last one.
            let failed = match ControlClient::connect(&settings.folder) {
                Ok(client) if is_ours(&client, order) => return Ok(client),
                Ok(_) => HostError::new(ErrorCode::Unavailable, "spillway-streamd is of another version"),
                Err(e) => e,
            };
            if process.ends_within(Duration::from_millis(2)) {
                let last = processes::last_words(&settings.folder, PROCESS);
                return Err(HostError::new(ErrorCode::Unavailable, last));
            }
            if Instant::now() > until {
                process.end(Duration::ZERO)?;
                return Err(failed);
            }
        }
    }

    /// Names all images to the process. Returns which could not be, and why.
    fn name_all(&self, client: &ControlClient) -> Result<Vec<String>, HostError> {
        let (mut versions, mut complaints, mut others) = (self.list()?, Vec::new(), Vec::new());
        self.0.members.tell(client)?;
        // What needs less than before makes space for what needs more.
        versions.sort_by_key(|version| version.residency);
        let mut named = Vec::new();
        for version in versions {
            match self.name(client, &version, false) {
                Ok(()) => named.push(version.digest),
                Err(e) => {
                    complaints.push(format!("{} cannot be streamed: {e}", version.reference));
                    others.push(version.digest);
                }
            }
        }
        // A version that was deleted meanwhile may have been named after it was forgotten.
        let now = self.list()?;
        named.retain(|digest| now.iter().all(|version| version.digest != *digest));
        named.iter().for_each(|digest| _ = self.forget(digest));
        client.order(&ControlRequest::Sweep { others }, &[])?;
        Ok(complaints)
    }

    fn name(
        &self,
        client: &ControlClient,
        version: &StreamedVersion,
        dry_run: bool,
    ) -> Result<(), HostError> {
        let registry = self.0.registries.get(&version.registry)?;
        let open = |path: &Path| {
            File::open(path).map_err(|e| {
                HostError::new(ErrorCode::Unavailable, format!("{} cannot be read: {e}", path.display()))
            })
        };
        let digests = open(&version.digests)?;
        // Without them what is in the cache is served all the same.
        let credentials = registry.credentials.as_deref().map(open).transpose();
        let (credentials, refused) = match credentials {
            Ok(credentials) => (credentials, Ok(())),
            Err(e) => (None, Err(e)),
        };
        let request = ControlRequest::Serve {
            digest: version.digest.clone(),
            size_bytes: version.size_bytes,
            place: place_of(&registry, None),
            fill: match version.residency {
                Residency::Lazy => Fill::Nothing,
                Residency::Boot => {
                    let mut chunks = self.0.boot_sets.of(&version.digest)?;
                    // A set may come from a registry, which may be anybody's.
                    let count = version.size_bytes.div_ceil(CHUNK_BYTES);
                    chunks.retain(|chunk| u64::from(*chunk) < count);
                    Fill::Chunks(chunks)
                }
                Residency::Full => Fill::All,
            },
            dry_run,
        };
        let fds: Vec<_> = [&digests].into_iter().chain(&credentials).map(AsFd::as_fd).collect();
        client.order(&request, &fds)?;
        refused
    }
}

/// The chunks without those of zeroes, which nobody needs to bring.
fn with_data(version: &StreamedVersion, mut chunks: Vec<u32>) -> Result<Vec<u32>, HostError> {
    let list = fs::read(&version.digests).map_err(|e| {
        HostError::new(ErrorCode::Unavailable, format!("{} cannot be read: {e}", version.digests.display()))
    })?;
    let digests = list.as_chunks().0.to_vec();
    let index = Index { size_bytes: version.size_bytes, chunk_bytes: CHUNK_BYTES, digests };
    chunks.retain(|chunk| (*chunk as usize) < index.digests.len() && !index.is_zero(*chunk as usize));
    Ok(chunks)
}

/// The figures as the API has them.
fn stream_figures(of: &CacheFigures) -> StreamFigures {
    StreamFigures {
        used_bytes: of.used_bytes,
        limit_bytes: of.budget_bytes,
        inflight: of.flights,
        counters: StreamCounters {
            cache_chunks: of.cache_chunks,
            cache_bytes: of.cache_bytes,
            seed_chunks: of.seed_chunks,
            seed_bytes: of.seed_bytes,
            peer_chunks: of.peer_chunks,
            peer_bytes: of.peer_bytes,
            store_chunks: of.store_chunks,
            store_bytes: of.store_bytes,
            received_bytes: of.received_bytes,
            passed_chunks: of.passed_chunks,
            evicted_chunks: of.evicted_chunks,
            wrong_chunks: of.wrong_chunks,
            uploaded_chunks: of.uploaded_chunks,
            uploaded_bytes: of.uploaded_bytes,
            wrong_peers: of.wrong_peers,
            refused_uploads: of.refused_uploads,
        },
    }
}

/// Whether the process was started by this version with this order.
fn is_ours(client: &ControlClient, order: &ServeOrder) -> bool {
    let hello = client.ask(&ControlRequest::Hello, &[]);
    let program = env!("CARGO_PKG_VERSION");
    matches!(hello, Ok(ControlReply::Hello { version: SERVE_VERSION, program: found, order: of }) if of == *order && found == program)
}

fn wait_for(wake: &OwnedFd, time: Option<Duration>) {
    use rustix::event::{PollFd, PollFlags, Timespec, poll};
    let time =
        time.map(|time| Timespec { tv_sec: time.as_secs() as i64, tv_nsec: time.subsec_nanos().into() });
    // Interrupted, it is looked at again.
    let _ = poll(&mut [PollFd::new(wake, PollFlags::IN)], time.as_ref());
}
