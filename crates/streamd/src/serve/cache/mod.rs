//! All images of the cache. Owns which are served, their space, and what of them is to stay.
//!
//! Invariant: nobody who waits for a chunk waits for files of other images to be opened or removed.

mod flights;

pub use flights::Brought;

use super::budget::Budget;
use super::by_digest::ByDigest;
use super::fill;
use super::health::{Health, StoreAt};
use super::image::{self, Aside, CachedImage};
use super::peers::{Peers, Wanted};
use super::source::Stuck;
use super::telling::Telling;
use flights::{Flight, Way};
use spillway_image::digests::{ChunkDigest, named};
use spillway_registry::serve::{CacheFigures, Fill, ServeOrder};
use spillway_registry::{Index, RegistryError};
use std::collections::{HashMap, HashSet};
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};
use tokio::sync::{Semaphore, watch};
use tokio::task::AbortHandle;

/// An image with its source.
pub struct ServedImage {
    /// Its files.
    pub cached: CachedImage,
    health: Arc<Health>,
    flights: Mutex<HashMap<(u32, Way), Flight>>,
    /// It is served no longer.
    ended: watch::Sender<bool>,
    /// Requests to its store. Of the image, so that a store that is away holds up no other.
    width: Arc<Semaphore>,
    stuck: Stuck,
    /// When it was asked for the last time.
    used: Mutex<Instant>,
    /// What brings chunks before a disk needs them.
    filling: Mutex<Option<AbortHandle>>,
    root: ChunkDigest,
    by_digest: ByDigest,
    damaged: Telling,
}

/// The cache.
pub struct Cache {
    order: ServeOrder,
    budget: Budget,
    /// Locked for moments only: what waits for nothing asks for it.
    images: Mutex<HashMap<ChunkDigest, Arc<ServedImage>>>,
    /// Locked while it changes which images are served and what of them is to stay, before `images`. Files are opened meanwhile.
    changes: Mutex<Unserved>,
    /// Everything that is in the folder is counted.
    is_counted: AtomicBool,
    seen: Seen,
    /// What could not be removed of images that are served no longer. Locked while files are removed, before `changes`.
    left: Mutex<Vec<Aside>>,
    /// Faults of the disk that it is on.
    faults: Telling,
    /// What cannot be removed.
    unremoved: Telling,
    /// What is looked for in files.
    looks: Arc<Semaphore>,
    peers: Option<Arc<Peers>>,
}

/// Folders of images that are not served, or that could not be removed, and the bytes that they take.
type Unserved = HashMap<PathBuf, u64>;

/// What has happened, counted.
#[derive(Default)]
struct Seen {
    cache_chunks: AtomicU64,
    cache_bytes: AtomicU64,
    seed_chunks: AtomicU64,
    seed_bytes: AtomicU64,
    store_chunks: AtomicU64,
    store_bytes: AtomicU64,
    received_bytes: AtomicU64,
    passed_chunks: AtomicU64,
    evicted_chunks: AtomicU64,
    wrong_chunks: AtomicU64,
}

fn count(counter: &AtomicU64, n: u64) {
    counter.fetch_add(n, Ordering::Relaxed);
}

/// Chunks that are looked for in files at a time. Each of them may be in memory until it is kept.
const MOST_LOOKS: usize = 16;
/// Requests for an image at a time.
const DEMAND_WIDTH: usize = 64;

/// Locks, whoever ended while holding the lock.
pub fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
}

impl Cache {
    /// The cache in the folder of an order, in which nothing is kept before [`Cache::sweep`].
    pub fn new(order: ServeOrder, peers: Option<Arc<Peers>>) -> Cache {
        let budget = Budget::of_files(order.budget_bytes);
        let (images, is_counted) = (Mutex::default(), AtomicBool::new(false));
        Cache {
            order,
            budget,
            images,
            changes: Mutex::default(),
            is_counted,
            seen: Seen::default(),
            left: Mutex::default(),
            faults: Telling::default(),
            unremoved: Telling::default(),
            looks: Arc::new(Semaphore::new(MOST_LOOKS)),
            peers,
        }
    }

    /// What the process was started with.
    pub fn order(&self) -> &ServeOrder {
        &self.order
    }

    /// The other hosts.
    pub fn peers(&self) -> Option<&Arc<Peers>> {
        self.peers.as_ref()
    }

    /// Serves an image from now on, with this store for what is missing. One that is served goes on with this store. It waits for files.
    pub fn serve(&self, index: Index, at: StoreAt) -> Result<Arc<ServedImage>, String> {
        let root = index.root();
        let mut unserved = locked(&self.changes);
        if let Some(image) = self.image(&root) {
            image.health.replace(at).map_err(|e| e.to_string())?;
            return Ok(image);
        }
        let by_digest = ByDigest::of(&index);
        let least_hedge = Duration::from_millis(self.order.hedge_milliseconds);
        let health = Health::new(at, least_hedge).map_err(|e| e.to_string())?;
        let cached = CachedImage::open(&self.order.cache, index, &self.budget);
        let cached = cached.map_err(|e| format!("the cache: {e}"))?;
        // From now on it is counted by its chunks.
        unserved.remove(cached.folder());
        self.budget.set_others(unserved.values().sum());
        let served = Arc::new(ServedImage {
            cached,
            health,
            ended: watch::Sender::new(false),
            flights: Mutex::default(),
            width: Arc::new(Semaphore::new(DEMAND_WIDTH)),
            stuck: Stuck::default(),
            used: Mutex::new(Instant::now()),
            filling: Mutex::default(),
            root,
            by_digest,
            damaged: Telling::default(),
        });
        locked(&self.images).insert(root, Arc::clone(&served));
        Ok(served)
    }

    /// Sets which chunks of an image are brought before a disk needs them, and begins to bring them. With `dry_run` it is only checked
    /// whether there is space for them.
    ///
    /// # Errors
    /// There is no space for them, beside those of other images. Nothing has changed.
    pub fn fill(
        self: &Arc<Cache>,
        image: &Arc<ServedImage>,
        fill: &Fill,
        dry_run: bool,
    ) -> Result<(), String> {
        let _changes = locked(&self.changes);
        let images = self.images();
        if !images.iter().any(|served| Arc::ptr_eq(served, image)) {
            return Err("it is served no longer: its last version is being deleted".into());
        }
        if image.cached.is_pinned(fill) {
            return Ok(());
        }
        let others = images.iter().filter(|other| !other.is(&image.root));
        let others: u64 = others.map(|other| other.cached.pinned_bytes()).sum();
        let needs = image.cached.bytes_of(fill);
        let most = self.budget.most_bytes();
        if others.saturating_add(needs) > most {
            return Err(format!(
                "its chunks that are to stay take {needs} bytes, those of other images {others}, and the cache of {} has {most} for \
                 chunks: make it larger (spillwayd --stream-cache-size), or choose residency lazy",
                self.order.budget_bytes
            ));
        }
        if dry_run {
            return Ok(());
        }
        image.cached.pin(fill);
        let mut filling = locked(&image.filling);
        if let Some(filling) = filling.take() {
            filling.abort();
        }
        if *fill != Fill::Nothing {
            let (cache, image) = (Arc::clone(self), Arc::clone(image));
            *filling = Some(tokio::spawn(fill::fill(cache, image, fill.clone())).abort_handle());
        }
        Ok(())
    }

    /// An image that is served.
    pub fn image(&self, root: &ChunkDigest) -> Option<Arc<ServedImage>> {
        locked(&self.images).get(root).cloned()
    }

    /// All images that are served.
    pub fn images(&self) -> Vec<Arc<ServedImage>> {
        locked(&self.images).values().cloned().collect()
    }

    /// Serves an image no longer, and removes its files. False: somebody uses it.
    pub fn forget(&self, root: &ChunkDigest) -> io::Result<bool> {
        let mut left = locked(&self.left);
        let aside = {
            let _changes = locked(&self.changes);
            let Some(image) = self.image(root) else { return Ok(true) };
            let Some(aside) = image.cached.set_aside()? else { return Ok(false) };
            if let Some(filling) = locked(&image.filling).take() {
                filling.abort();
            }
            // What waits for a store that is away would wait for nobody.
            image.ended.send_replace(true);
            locked(&self.images).remove(root);
            aside
        };
        // Files of gigabytes take their time.
        let removed = aside.remove(&self.budget);
        if removed.is_err() {
            left.push(aside);
        }
        removed.map(|()| true)
    }

    /// All images are served that should be, but for `others`, which could not be named: removes the folders of all others, and what is
    /// beyond the budget as far as nobody uses it. From now on chunks are kept. What cannot be removed stays, and is counted.
    pub fn sweep(&self, others: &[ChunkDigest]) -> io::Result<()> {
        let others = others.iter().map(|root| image::folder_of(&self.order.cache, root));
        let mut left = locked(&self.left);
        let (images, removed) = {
            // An image that is named meanwhile waits: its new folder is no stranger's.
            let mut unserved = locked(&self.changes);
            let images = self.images();
            let own: HashSet<_> = images.iter().map(|image| image.cached.folder().to_owned()).collect();
            let others: HashSet<_> = others.filter(|folder| !own.contains(folder)).collect();
            let (mut removed, mut stay) = (Vec::new(), Vec::new());
            for entry in fs::read_dir(&self.order.cache)? {
                let path = entry?.path();
                let is_left = left.iter().any(|aside| aside.folder() == path);
                let is_known = is_left || own.contains(&path) || others.contains(&path);
                if is_known || !image::is_named_as_an_image(&path) || !path.is_dir() {
                    continue;
                }
                match image::set_aside(&path) {
                    Ok(aside) => removed.push(aside),
                    Err(e) => {
                        self.tell_left(&path, &e);
                        stay.push(path);
                    }
                }
            }
            let all = others.iter().chain(&removed).chain(&stay);
            *unserved = all.map(|path| (path.clone(), image::bytes_in(path))).collect();
            self.budget.set_others(unserved.values().sum());
            (images, removed)
        };
        left.retain(|aside| {
            let removed = aside.remove(&self.budget);
            removed.inspect_err(|e| self.tell_left(aside.folder(), e)).is_err()
        });
        for folder in removed {
            match fs::remove_dir_all(&folder) {
                Err(e) if e.kind() != io::ErrorKind::NotFound => self.tell_left(&folder, &e),
                _ => {
                    let mut unserved = locked(&self.changes);
                    unserved.remove(&folder);
                    self.budget.set_others(unserved.values().sum());
                }
            }
        }
        drop(left);
        for image in images {
            while let surplus = self.budget.surplus_bytes()
                && surplus > 0
            {
                match image.cached.shrink(surplus, &self.budget) {
                    Ok(0) => break,
                    Ok(_) => {}
                    Err(e) => {
                        self.tell_left(image.cached.folder(), &e);
                        break;
                    }
                }
            }
        }
        self.is_counted.store(true, Ordering::Release);
        Ok(())
    }

    fn tell_left(&self, folder: &Path, error: &io::Error) {
        let folder = folder.display();
        self.unremoved
            .tell(format_args!("{folder}: chunks cannot be removed from it, and take space: {error}"));
    }

    /// What has happened, and what is in the cache.
    pub fn figures(&self) -> CacheFigures {
        let get = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        let images = self.images();
        CacheFigures {
            used_bytes: self.budget.used_bytes(),
            budget_bytes: self.order.budget_bytes,
            cache_chunks: get(&self.seen.cache_chunks),
            cache_bytes: get(&self.seen.cache_bytes),
            seed_chunks: get(&self.seen.seed_chunks),
            seed_bytes: get(&self.seen.seed_bytes),
            store_chunks: get(&self.seen.store_chunks),
            store_bytes: get(&self.seen.store_bytes),
            received_bytes: get(&self.seen.received_bytes),
            passed_chunks: get(&self.seen.passed_chunks),
            evicted_chunks: get(&self.seen.evicted_chunks),
            wrong_chunks: get(&self.seen.wrong_chunks),
            flights: images.iter().map(|image| image.flights() as u64).sum(),
            ..self.peers.as_ref().map_or_else(CacheFigures::default, |peers| peers.figures())
        }
    }

    /// Whether everything that is in the folder is counted.
    pub fn is_counted(&self) -> bool {
        self.is_counted.load(Ordering::Acquire)
    }
}

impl ServedImage {
    fn in_flight(&self) -> HashSet<u32> {
        locked(&self.flights).keys().map(|(chunk, _)| *chunk).collect()
    }

    /// Chunks that are being brought.
    pub fn flights(&self) -> usize {
        self.in_flight().len()
    }

    /// Those of them that may come soon.
    pub fn promising_flights(&self) -> usize {
        self.in_flight().into_iter().filter(|chunk| !self.is_stuck(*chunk)).count()
    }

    /// Whether a chunk does not come from its store, which answers, and is waited for.
    pub fn is_stuck(&self, chunk: u32) -> bool {
        self.stuck.has(chunk)
    }

    /// Somebody uses it now.
    pub fn touch(&self) {
        *locked(&self.used) = Instant::now();
    }

    /// Digest of the image.
    pub fn name(&self) -> String {
        named(&self.root)
    }

    /// Whether this is its digest.
    pub fn is(&self, root: &ChunkDigest) -> bool {
        self.root == *root
    }

    /// One of its chunks.
    pub fn wanted(&self, chunk: u32) -> Option<Wanted> {
        let index = self.cached.index();
        let digest = *index.digests.get(chunk as usize)?;
        let (chunks, len) = (index.digests.len() as u32, index.len_of(chunk as usize));
        Some(Wanted { root: self.root, chunks, chunk, digest, len })
    }

    /// Whether requests to its store are unanswered.
    pub fn is_store_silent(&self) -> bool {
        self.health.is_doubted()
    }

    /// Its chunks with a digest. They may be very many.
    pub fn find(&self, digest: &ChunkDigest) -> &[u32] {
        self.by_digest.find(self.cached.index(), digest)
    }

    /// Tells in the log why no source has a chunk.
    pub fn tell_damaged(&self, chunk: u32, why: &RegistryError) {
        self.damaged.tell(format_args!("chunk {chunk} of {}: {why}", self.name()));
    }
}
