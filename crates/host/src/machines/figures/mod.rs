//! Figures of all machines, read from the memory in which their disks count. Owns the last answer and its lifetime.
//!
//! Invariant: a disk that does not answer misses only its own figures and delays nobody; concurrent callers get the same
//! answer.

mod accounts;
pub mod curves;
mod disks;
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
use accounts::{Accounts, DiskReport, MachineAccount, Whose};
use disks::DiskReaders;
use jiff::Timestamp;
use late::LateQuery;
use rustix::process::getpid;
use serde::de::DeserializeOwned;
use spillway_api::{
    Catalog, CatalogFigures, DiskLevels, Figure, Figures, Machine, MachineCounts, MachineFigures,
    MachineFill, MachineForecast, Name, Phase, Power, Selector, StoreFigures, StreamFigures,
};
use spillway_control::{Request, Response};
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
/// Number of disks that are asked at the same time. To connect takes two descriptors, of which one stays open for figures.
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
    disks: DiskReaders,
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
            disks: DiskReaders::default(),
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
        let unresponsive = self.read_disks(&views, until).await;
        let stores = self.space(until).await;
        let images = self.images.clone();
        let stream = self.stream.answer(until, move || images.stream_figures()).await.flatten();
        let figures = Figures { stores, stream, ..self.sum(&views, &catalogs, &unresponsive) };
        let figures = Arc::new(figures);
        *last = Some((Instant::now(), Arc::clone(&figures)));
        Ok(figures)
    }

    /// Reads the counters of a machine's disk, which has this process id, for the last time before it ends.
    pub async fn note_last(&self, name: &Name, pid: u32) {
        // A machine of this name may be recorded that is a later one.
        let known = self.accounts().whose(name);
        let recorded = || {
            let machine = self.objects.get::<Machine>(name.as_str()).ok().flatten()?.value;
            Some((machine.catalog, machine.identity.uuid))
        };
        let Some((catalog, uuid)) = known.or_else(recorded) else { return };
        let whose = Whose { catalog: &catalog, uuid: &uuid };
        if self.look(name, whose, || self.disks.look_last(name, pid)) {
            return;
        }
        let folder = self.folders.of(name).path().to_owned();
        if let Ok(Ok(report)) = tokio::time::timeout(PATIENCE, disks::ask_once(folder)).await {
            self.accounts().note(name, whose, &report);
        }
    }

    fn accounts(&self) -> MutexGuard<'_, Accounts> {
        self.accounts.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    /// Notes what a disk counts now. False: it would have to be asked.
    fn look(&self, name: &Name, whose: Whose, look: impl FnOnce() -> Option<DiskReport>) -> bool {
        // Under the lock, so that nobody notes later what was counted earlier.
        let mut accounts = self.accounts();
        let Some(report) = look() else { return false };
        accounts.note(name, whose, &report);
        true
    }

    /// Reads the counters of all disks that are served. Returns the machines whose disks do not answer.
    async fn read_disks(&self, views: &[View], until: Instant) -> HashSet<Name> {
        let gone = views.iter().filter(|view| view.status.run.is_none());
        gone.for_each(|view| self.accounts().remove_disk(&view.machine.name));
        let (unresponsive, answers) = self.disks.keep(&self.folders, views, until).await;
        for (view, report) in answers {
            self.accounts().note(&view.machine.name, Whose::of(&view.machine), &report);
        }
        for view in views.iter().filter(|view| view.status.run.is_some()) {
            let name = &view.machine.name;
            self.look(name, Whose::of(&view.machine), || self.disks.look(name));
        }
        unresponsive
    }

    /// Returns the space of the stores. A file system that does not answer is not asked again until it does.
    async fn space(&self, until: Instant) -> Vec<StoreFigures> {
        let stores = self.stores.clone();
        let ask = move || {
            let space = |store: spillway_api::StoreFolder| {
                // Where it is not mounted, the space is somebody else's.
                stores.check(&store).ok()?;
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
    let places = Arc::new(Semaphore::new(AT_A_TIME));
    let jobs = views.map(|view| {
        let (places, asking) = (Arc::clone(&places), ask(folders.of(&view.machine.name).path().to_owned()));
        (view, async move {
            let _place = places.acquire_owned().await;
            asking.await
        })
    });
    all_of(jobs, until).await
}

/// Does all of these at the same time. Returns, with their keys, the results that were there before `until`.
async fn all_of<K: Copy, T: Send + 'static>(
    jobs: impl Iterator<Item = (K, impl Future<Output = io::Result<T>> + Send + 'static)>,
    until: Instant,
) -> Vec<(K, T)> {
    let (mut keys, mut begun, mut results) = (Vec::new(), JoinSet::new(), Vec::new());
    for (i, (key, job)) in jobs.enumerate() {
        keys.push(key);
        begun.spawn(async move { (i, job.await) });
    }
    // What has not ended in time is dropped with the set.
    while let Ok(Some(ended)) = tokio::time::timeout_at(until, begun.join_next()).await {
        if let Ok((i, Ok(result))) = ended {
            results.push((keys[i], result));
        }
    }
    results
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
