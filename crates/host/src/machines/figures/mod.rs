//! Figures of all machines, read from their disks' control sockets at the same time. Owns the last answer and its
//! lifetime.
//!
//! Invariant: a disk that does not answer misses only its own figures and delays nobody; concurrent callers get the same
//! answer.

mod accounts;
pub mod curves;
pub mod history;
mod late;
pub mod one_disk;
mod recent;
mod trend;

use super::run::MachineFolders;
use super::views::MachineReader;
use super::{View, blocking, disk};
use crate::catalogs::Catalogs;
use crate::error::HostError;
use crate::images::Images;
use crate::json_lines::JsonLines;
use crate::processes;
use crate::short_path::ShortPath;
use crate::store::Objects;
use crate::stores::Stores;
use accounts::{Accounts, DiskId, DiskReport, MachineAccount};
use jiff::Timestamp;
use late::LateQuery;
use rustix::process::{Pid, getpid};
use serde::de::DeserializeOwned;
use spillway_api::{
    Catalog, CatalogFigures, DiskCounters, DiskLevels, Figure, Figures, Greatest, Machine, MachineCounts,
    MachineFigures, MachineFill, MachineForecast, Name, Phase, PlaneCounters, Power, Selector, StoreFigures,
    StreamFigures,
};
use spillway_control::{Plane, Request, Response, Stats};
use std::collections::{HashMap, HashSet};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;
use tokio::sync::Semaphore;
use tokio::task::JoinSet;
use tokio::time::Instant;

/// Longest wait for all disks together.
const PATIENCE: Duration = Duration::from_millis(700);
/// How long an answer is reused.
const FRESH: Duration = Duration::from_millis(400);
/// Number of disks that are asked at the same time. Each costs two descriptors.
const AT_A_TIME: usize = 128;
/// Longest answer of a disk.
const MAX_ANSWER_BYTES: usize = 64 << 10;

/// Collects the figures of all machines.
pub struct FigureCollector {
    reader: MachineReader,
    catalogs: Catalogs,
    objects: Objects,
    stores: Stores,
    images: Images,
    folders: MachineFolders,
    /// Sums of the disks' counters.
    accounts: Mutex<Accounts>,
    last: tokio::sync::Mutex<Option<(Instant, Arc<Figures>)>>,
    space: LateQuery<Vec<StoreFigures>>,
    stream: LateQuery<Option<StreamFigures>>,
}

impl FigureCollector {
    /// Creates the collector of these machines and stores.
    pub fn new(
        reader: MachineReader,
        catalogs: Catalogs,
        objects: Objects,
        stores: Stores,
        images: Images,
        folders: MachineFolders,
    ) -> FigureCollector {
        let accounts = Accounts::new(processes::begins(getpid()).ok().flatten().unwrap_or(0));
        FigureCollector {
            reader,
            catalogs,
            objects,
            stores,
            images,
            folders,
            accounts: Mutex::new(accounts),
            last: tokio::sync::Mutex::default(),
            space: LateQuery::default(),
            stream: LateQuery::default(),
        }
    }

    /// Returns the figures of all machines, which are at most a moment old.
    pub async fn all(&self) -> Result<Arc<Figures>, HostError> {
        let mut last = self.last.lock().await;
        if let Some((at, figures)) = &*last
            && at.elapsed() < FRESH
        {
            return Ok(Arc::clone(figures));
        }
        let (reader, catalogs) = (self.reader.clone(), self.catalogs.clone());
        let (views, catalogs) =
            blocking(move || Ok((reader.views(&Selector::default())?, catalogs.list()?))).await?;
        let until = Instant::now() + PATIENCE;
        let unresponsive = self.ask_disks(&views, until).await;
        let stores = self.space(until).await;
        let images = self.images.clone();
        let stream = self.stream.answer(until, move || images.stream_figures()).await.flatten();
        let figures = Figures { stores, stream, ..self.sum(&views, &catalogs, &unresponsive) };
        let figures = Arc::new(figures);
        *last = Some((Instant::now(), Arc::clone(&figures)));
        Ok(figures)
    }

    /// Reads a disk's counters for the last time before it ends.
    pub async fn note_last(&self, name: &Name) {
        let recorded = self.objects.get::<Machine>(name.as_str()).ok().flatten();
        let catalog = recorded.map(|machine| machine.value.catalog);
        let Some(catalog) = catalog.or_else(|| self.accounts().catalog(name)) else { return };
        let folder = self.folders.of(name).path().to_owned();
        if let Ok(Ok(report)) = tokio::time::timeout(PATIENCE, ask(folder)).await {
            self.accounts().note(name, &catalog, &report);
        }
    }

    fn accounts(&self) -> MutexGuard<'_, Accounts> {
        self.accounts.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    /// Asks all disks that are served. Returns the machines whose disks have not answered.
    async fn ask_disks(&self, views: &[View], until: Instant) -> HashSet<Name> {
        let gone = views.iter().filter(|view| view.status.run.is_none());
        gone.for_each(|view| self.accounts().remove_disk(&view.machine.name));
        // A disk that starts or ends need not answer.
        let there =
            views.iter().filter(|view| view.status.run.as_ref().is_some_and(|run| run.disk_pid.is_some()));
        let mut unresponsive: HashSet<Name> = there.map(|view| view.machine.name.clone()).collect();
        let served = views.iter().filter(|view| view.status.run.is_some());
        for (view, report) in ask_all(&self.folders, served, until, ask).await {
            unresponsive.remove(&view.machine.name);
            self.accounts().note(&view.machine.name, &view.machine.catalog, &report);
        }
        unresponsive
    }

    /// Returns the space of the stores. A file system that does not answer is not asked again until it does.
    async fn space(&self, until: Instant) -> Vec<StoreFigures> {
        let stores = self.stores.clone();
        let ask = move || {
            let space = |store: spillway_api::StoreFolder| {
                let found = rustix::fs::statvfs(&store.path).ok()?;
                Some(StoreFigures {
                    name: store.name,
                    size_bytes: found.f_blocks * found.f_frsize,
                    free_bytes: found.f_bavail * found.f_frsize,
                })
            };
            stores.list().unwrap_or_default().into_iter().filter_map(space).collect()
        };
        self.space.answer(until, ask).await.unwrap_or_default()
    }

    /// Adds up what the disks have reported.
    fn sum(&self, views: &[View], catalogs: &[Catalog], unresponsive: &HashSet<Name>) -> Figures {
        let mut accounts = self.accounts();
        let machines = views.iter().map(|view| &view.machine.name).collect();
        accounts.keep(&machines, &catalogs.iter().map(|catalog| &catalog.name).collect());
        let sums = |catalog: &Catalog| {
            let account = accounts.catalogs.get(&catalog.name).copied().unwrap_or_default();
            CatalogFigures {
                name: catalog.name.clone(),
                machines: MachineCounts::default(),
                warm: catalog.spec.warm,
                disks: 0,
                unresponsive_disks: 0,
                levels: DiskLevels::default(),
                counters: account.counters,
                spared_bytes: 0,
                fullest: None,
                first_full: None,
            }
        };
        let mut of: HashMap<&Name, CatalogFigures> =
            catalogs.iter().map(|catalog| (&catalog.name, sums(catalog))).collect();
        let mut machines = Vec::new();
        for view in views {
            let Some(sum) = of.get_mut(&view.machine.catalog) else { continue };
            count(&mut sum.machines, view);
            let is_unresponsive = unresponsive.contains(&view.machine.name);
            sum.unresponsive_disks += u64::from(is_unresponsive);
            if let Some(of) = accounts.machines.get(&view.machine.name) {
                let is_served = view.status.run.as_ref().is_some_and(|run| run.disk_pid.is_some());
                sum.disks += u64::from(is_served && !is_unresponsive);
                sum.levels.add(&of.levels);
                note_fullest(sum, &view.machine.name, of);
                // Of a disk that does not answer, a forecast would be that of long ago.
                if !is_unresponsive {
                    note_first_full(sum, &view.machine.name, of);
                }
                machines.push(MachineFigures {
                    name: view.machine.name.clone(),
                    catalog: view.machine.catalog.clone(),
                    phase: view.status.phase,
                    ready: view.status.ready,
                    claimed: view.wanted.claim.is_some(),
                    unresponsive: is_unresponsive,
                    levels: of.levels,
                    counters: of.account.counters,
                    spared_bytes: of.account.spared_bytes(of.levels.ram_used_bytes),
                });
            }
        }
        for (name, sum) in &mut of {
            let account = accounts.catalogs.get(name).copied().unwrap_or_default();
            sum.spared_bytes = account.spared_bytes(sum.levels.ram_used_bytes);
        }
        let catalogs = catalogs.iter().filter_map(|catalog| of.remove(&catalog.name)).collect();
        let (time, since) = (Timestamp::now(), accounts.since);
        Figures { time, since, catalogs, machines, stores: Vec::new(), stream: None }
    }
}

/// Notes a machine whose write cache is fuller than those before. Of equals, the first stays.
fn note_fullest(sum: &mut CatalogFigures, name: &Name, of: &MachineAccount) {
    let fill = MachineFill {
        name: name.clone(),
        used_bytes: of.levels.used_bytes(),
        limit_bytes: of.levels.limit_bytes(),
    };
    // Without rounding: 99.99% is not full.
    let is_fuller = |than: &MachineFill| {
        u128::from(fill.used_bytes) * u128::from(than.limit_bytes)
            > u128::from(than.used_bytes) * u128::from(fill.limit_bytes)
    };
    if fill.used_bytes > 0 && fill.limit_bytes > 0 && sum.fullest.as_ref().is_none_or(is_fuller) {
        sum.fullest = Some(fill);
    }
}

/// Notes a machine whose write cache will be full sooner than those before.
fn note_first_full(sum: &mut CatalogFigures, name: &Name, of: &MachineAccount) {
    if let Some(seconds) = of.seconds_to_full
        && sum.first_full.as_ref().is_none_or(|first| seconds < first.seconds)
    {
        sum.first_full = Some(MachineForecast { name: name.clone(), seconds });
    }
}

fn count(counts: &mut MachineCounts, view: &View) {
    let phase = match view.status.phase {
        Phase::Stopped => &mut counts.stopped,
        Phase::Waiting => &mut counts.waiting,
        Phase::Placing | Phase::Starting => &mut counts.starting,
        Phase::Running => &mut counts.running,
        Phase::Stopping => &mut counts.stopping,
        Phase::Failed => &mut counts.failed,
    };
    *phase += 1;
    let (ready, claimed) = (view.status.ready, view.wanted.claim.is_some());
    counts.ready += u64::from(ready);
    counts.claimed += u64::from(claimed);
    let is_on = view.wanted.power == Power::On && view.status.settled;
    counts.available += u64::from(ready && is_on && !claimed && !view.wanted.drained);
}

/// Calls `ask` for the disks of these machines at the same time. Returns the answers that arrived before `until`.
async fn ask_all<'a, T: Send + 'static, F: Future<Output = io::Result<T>> + Send + 'static>(
    folders: &MachineFolders,
    views: impl Iterator<Item = &'a View>,
    until: Instant,
    ask: fn(PathBuf) -> F,
) -> Vec<(&'a View, T)> {
    let (views, mut asked): (Vec<&View>, _) = (views.collect(), JoinSet::new());
    let places = Arc::new(Semaphore::new(AT_A_TIME));
    for (i, view) in views.iter().enumerate() {
        let folder = folders.of(&view.machine.name).path().to_owned();
        let places = Arc::clone(&places);
        asked.spawn(async move {
            let _place = places.acquire_owned().await;
            (i, ask(folder).await)
        });
    }
    let mut answers = Vec::new();
    // Requests that have not ended in time are dropped with the set.
    while let Ok(Some(answer)) = tokio::time::timeout_at(until, asked.join_next()).await {
        if let Ok((i, Ok(answer))) = answer {
            answers.push((views[i], answer));
        }
    }
    answers
}

/// Reads the figures of a machine's disk.
async fn ask(folder: PathBuf) -> io::Result<DiskReport> {
    let mut lines = connect(&folder).await?;
    let pid = lines.peer_pid().and_then(Pid::from_raw).ok_or_else(|| strange("nobody is there"))?;
    let begun = processes::begins(pid)?.ok_or_else(|| strange("it has ended"))?;
    let stats: Stats = answer(&mut lines, &Request::Stats).await?;
    let disk = DiskId { pid: pid.as_raw_nonzero().get(), begun };
    Ok(DiskReport { disk, counters: counters(&stats), levels: levels(&stats) })
}

async fn connect(folder: &Path) -> io::Result<JsonLines> {
    connect_for(folder, MAX_ANSWER_BYTES).await
}

/// Connects to a machine's disk for answers of at most so many bytes.
async fn connect_for(folder: &Path, most_bytes: usize) -> io::Result<JsonLines> {
    let socket = ShortPath::of(folder, disk::CONTROL).map_err(io::Error::other)?;
    JsonLines::connect(socket.path(), most_bytes).await
}

async fn answer<T: DeserializeOwned>(lines: &mut JsonLines, request: &Request) -> io::Result<T> {
    lines.send(&serde_json::to_value(request)?).await?;
    match lines.next_as().await? {
        Response::Ok(answer) => Ok(answer),
        Response::Error { message, .. } => Err(strange(&message)),
    }
}

fn strange(why: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, why.to_owned())
}

fn counters(s: &Stats) -> DiskCounters {
    let plane = |p: &Plane| PlaneCounters {
        reads: p.reads,
        writes: p.writes,
        read_bytes: p.read_bytes,
        written_bytes: p.written_bytes,
    };
    let base = &s.planes.base;
    DiskCounters {
        guest: plane(&s.planes.guest),
        ram: plane(&s.planes.ram),
        overflow: plane(&s.planes.overflow),
        base: PlaneCounters {
            reads: base.reads,
            writes: base.writes,
            read_bytes: base.read_bytes,
            written_bytes: base.written_bytes,
        },
        zero: plane(&s.planes.zero),
        base_store_reads: base.store_reads,
        base_store_read_bytes: base.store_read_bytes,
        evicted_blocks: s.evictions.blocks,
        stalls: s.stalls.count,
        stall_ns: s.stalls.ns,
        throttled_ns: s.throttled.ns,
        failed_requests: s.failed.requests,
        overflow_write_errors: s.overflow.write_errors,
        overflow_read_errors: s.overflow.read_errors,
        checksum_mismatches: s.checksum_mismatches,
        resets: s.resets,
        worker_restarts: s.restarts,
        read_count: s.latency.read.count,
        read_ns: s.latency.read.sum_ns,
        write_count: s.latency.write.count,
        write_ns: s.latency.write.sum_ns,
        chunks_asked: s.chunks.asked,
        chunks_found: s.chunks.found,
        chunks_found_bytes: s.chunks.found_bytes,
        chunk_waits: s.latency.chunk.count,
        chunk_wait_ns: s.latency.chunk.sum_ns,
        chunk_stalls: s.chunks.stalls,
    }
}

fn levels(s: &Stats) -> DiskLevels {
    DiskLevels {
        ram_used_bytes: s.ram.used_bytes,
        ram_limit_bytes: s.ram.limit_bytes,
        overflow_used_bytes: s.overflow.used_bytes,
        overflow_file_bytes: s.overflow.file_bytes,
        overflow_limit_bytes: s.overflow.limit_bytes,
        map_bytes: s.map.bytes,
        inflight: s.inflight,
        waiting: s.waiting,
        warning: u64::from(s.level > 0),
        critical: u64::from(s.level > 1),
        full: u64::from(s.is_full > 0),
        degraded: u64::from(s.degraded > 0),
        chunks_missing: s.chunks.missing,
        stalled: s.chunks.stalled,
        chunk_wait_p99_ns: Greatest(s.latency.chunk.p99_ns),
    }
}
