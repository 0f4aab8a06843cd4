//! All images of the cache, and the chunks that are being brought. Owns the flights: one for each chunk, whoever asks, and one for
//! each chunk that is fetched from the store.
//!
//! Invariant: a flight goes on to its end although who asked first has gone; a chunk's bit is set before those who wait for it
//! are told.

use super::budget::Budget;
use super::by_digest::ByDigest;
use super::fill;
use super::health::{Health, StoreAt};
use super::image::{self, Aside, CachedImage, Kept};
use super::peers::{Came, Peers, Wanted};
use super::seeds::{self, Found, Place};
use super::source::Source;
use super::telling::Telling;
use futures_util::FutureExt;
use futures_util::future::{BoxFuture, Shared};
use spillway_image::digests::{ChunkDigest, named};
use spillway_registry::serve::{CacheFigures, Fill, ServeOrder};
use spillway_registry::{Index, RegistryError};
use std::collections::{HashMap, HashSet};
use std::fs;
use std::io;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};
use tokio::sync::{Semaphore, watch};
use tokio::task::AbortHandle;

/// What a flight brought.
#[derive(Clone)]
pub enum Brought {
    /// The chunk is in the file.
    Resident,
    /// There was no space for it: these are its bytes.
    Passed(Arc<Vec<u8>>),
    /// No source has it, for this reason.
    Damaged(Arc<RegistryError>),
}

type Flight = Shared<BoxFuture<'static, Brought>>;

/// Where a flight may bring a chunk from.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
enum Way {
    /// From other hosts, and from the store.
    Any,
    /// From the store alone: so a request of another host is not passed on, and waits for no other host.
    Store,
}

/// An image with its source.
pub struct ServedImage {
    /// Its files.
    pub cached: CachedImage,
    health: Arc<Health>,
    flights: Mutex<HashMap<(u32, Way), Flight>>,
    /// It is served no longer.
    ended: watch::Sender<bool>,
    /// Requests to its store. Of the image, so that a store that is away holds up no other.
    width: Semaphore,
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
    changes: Mutex<()>,
    /// Everything that is in the folder is counted.
    is_counted: AtomicBool,
    seen: Seen,
    /// What could not be removed of images that are served no longer. Locked while files are removed, before `changes`.
    left: Mutex<Vec<Aside>>,
    /// Faults of the disk that it is on.
    faults: Telling,
    peers: Option<Arc<Peers>>,
}

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

/// Chunks of an image with one digest that are looked at, which takes microseconds: a hostile image may have millions, and the search is
/// in the thread that serves everybody.
const MOST_PLACES: usize = 4096;

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
            peers,
        }
    }

    /// What the process was started with.
    pub fn order(&self) -> &ServeOrder {
        &self.order
    }

    /// Serves an image from now on, with this store for what is missing. One that is served goes on with this store. It waits for files.
    pub fn serve(&self, index: Index, at: StoreAt) -> Result<Arc<ServedImage>, String> {
        let root = index.root();
        let _changes = locked(&self.changes);
        if let Some(image) = self.image(&root) {
            image.health.replace(at).map_err(|e| e.to_string())?;
            return Ok(image);
        }
        let by_digest = ByDigest::of(&index);
        let least_hedge = Duration::from_millis(self.order.hedge_milliseconds);
        let health = Health::new(at, least_hedge).map_err(|e| e.to_string())?;
        let cached = CachedImage::open(&self.order.cache, index, &self.budget);
        let served = Arc::new(ServedImage {
            cached: cached.map_err(|e| format!("the cache: {e}"))?,
            health,
            ended: watch::Sender::new(false),
            flights: Mutex::default(),
            width: Semaphore::new(DEMAND_WIDTH),
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

    /// All images are served that should be, but for `others`, which could not be named: removes what else is in the folder, and
    /// what is beyond the budget as far as nobody uses it. From now on chunks are kept.
    pub fn sweep(&self, others: &[ChunkDigest]) -> io::Result<()> {
        let others: HashSet<_> =
            others.iter().map(|root| image::folder_of(&self.order.cache, root)).collect();
        let mut left = locked(&self.left);
        let (images, removed) = {
            // An image that is named meanwhile waits: its new folder is no stranger's.
            let _changes = locked(&self.changes);
            let images = self.images();
            let mut own: HashSet<_> = images.iter().map(|image| image.cached.folder().to_owned()).collect();
            let of_others: u64 = others.difference(&own).map(|folder| image::bytes_in(folder)).sum();
            self.budget.set_others(of_others);
            own.extend(others);
            let mut removed = Vec::new();
            for entry in fs::read_dir(&self.order.cache)? {
                let path = entry?.path();
                if !own.contains(&path) && path.is_dir() {
                    removed.push(image::set_aside(path)?);
                }
            }
            (images, removed)
        };
        while let Some(aside) = left.last() {
            aside.remove(&self.budget)?;
            left.pop();
        }
        for folder in removed {
            match fs::remove_dir_all(folder) {
                Err(e) if e.kind() != io::ErrorKind::NotFound => return Err(e),
                _ => {}
            }
        }
        drop(left);
        for image in images {
            let surplus = self.budget.surplus_bytes();
            if surplus > 0 {
                image.cached.shrink(surplus, &self.budget)?;
            }
        }
        self.is_counted.store(true, Ordering::Release);
        Ok(())
    }

    /// What has happened, and what is in the cache.
    pub fn figures(&self) -> CacheFigures {
        let get = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        let images = locked(&self.images);
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
            flights: images.values().map(|image| image.flights() as u64).sum(),
            ..self.peers.as_ref().map_or_else(CacheFigures::default, |peers| peers.figures())
        }
    }

    /// Whether everything that is in the folder is counted.
    pub fn is_counted(&self) -> bool {
        self.is_counted.load(Ordering::Acquire)
    }

    /// Whether a chunk that is missing has to come from another host or a registry.
    pub fn is_far(&self, image: &ServedImage, chunk: u32) -> bool {
        image.wanted(chunk).is_none_or(|wanted| seeds::is_far(image, &self.images(), &wanted))
    }

    /// Brings a chunk of an image into its file.
    pub async fn bring(self: &Arc<Cache>, image: &Arc<ServedImage>, chunk: u32) -> Brought {
        self.flight(image, chunk, Way::Any).await
    }

    /// The same, from the store alone if it is not there.
    pub async fn bring_from_store(self: &Arc<Cache>, image: &Arc<ServedImage>, chunk: u32) -> Brought {
        self.flight(image, chunk, Way::Store).await
    }

    fn flight(self: &Arc<Cache>, image: &Arc<ServedImage>, chunk: u32, way: Way) -> Flight {
        let begin = || {
            let (cache, image, of_fault) = (Arc::clone(self), Arc::clone(image), Arc::clone(image));
            let task = tokio::spawn(async move {
                let mut ended = image.ended.subscribe();
                let brought = tokio::select! {
                    brought = cache.fly(&image, chunk, way) => brought,
                    _ = ended.wait_for(|ended| *ended) => damaged("the image is served no longer"),
                };
                locked(&image.flights).remove(&(chunk, way));
                brought
            });
            let ended = task.map(move |ended| {
                ended.unwrap_or_else(|e| {
                    locked(&of_fault.flights).remove(&(chunk, way));
                    damaged(&format!("a fault of spillway-streamd ({e})"))
                })
            });
            ended.boxed().shared()
        };
        locked(&image.flights).entry((chunk, way)).or_insert_with(begin).clone()
    }

    async fn fly(self: &Arc<Cache>, image: &Arc<ServedImage>, chunk: u32, way: Way) -> Brought {
        image.touch();
        let Some(wanted) = image.wanted(chunk) else { return damaged("there is no such chunk") };
        let (here, images) = (Arc::clone(image), self.images());
        // Each step elsewhere wakes a thread, which on an idle host takes longer than the search.
        let found = match seeds::is_far(image, &images, &wanted) {
            true => Ok(Found::Nowhere),
            false => blocking(move || Ok(seeds::look(&here, &images, &wanted))).await,
        };
        match found {
            Ok(Found::Here) => {
                if way == Way::Any {
                    count(&self.seen.cache_chunks, 1);
                    count(&self.seen.cache_bytes, wanted.len);
                }
                return Brought::Resident;
            }
            Ok(Found::Elsewhere(seed)) => {
                count(&self.seen.seed_chunks, 1);
                count(&self.seen.seed_bytes, wanted.len);
                return self.keep_or_pass(image, chunk, seed.bytes, Some(seed.place)).await;
            }
            Ok(Found::Nowhere) | Err(_) => {}
        }
        if way == Way::Store {
            return self.fly_from_store(image, &wanted).await;
        }
        let from_store = async { self.flight(image, chunk, Way::Store).await };
        let Some(peers) = &self.peers else { return from_store.await };
        match peers.fetch(&wanted, from_store).await {
            Came::Peer(bytes) => self.keep_or_pass(image, chunk, bytes, None).await,
            Came::Store(brought) => brought,
        }
    }

    async fn fly_from_store(self: &Arc<Cache>, image: &Arc<ServedImage>, wanted: &Wanted) -> Brought {
        let _turn = image.width.acquire().await;
        let source = Source { health: &image.health, wrong: &self.seen.wrong_chunks };
        let fetched = match source.fetch(&wanted.digest, wanted.len).await {
            Ok(fetched) => fetched,
            Err(e) => return Brought::Damaged(Arc::new(e)),
        };
        count(&self.seen.store_chunks, 1);
        count(&self.seen.store_bytes, wanted.len);
        count(&self.seen.received_bytes, fetched.received_bytes);
        self.keep_or_pass(image, wanted.chunk, fetched.bytes, None).await
    }

    async fn keep_or_pass(
        self: &Arc<Cache>,
        image: &Arc<ServedImage>,
        chunk: u32,
        bytes: Vec<u8>,
        copied: Option<Place>,
    ) -> Brought {
        let bytes = Arc::new(bytes);
        let (cache, here, kept) = (Arc::clone(self), Arc::clone(image), Arc::clone(&bytes));
        match blocking(move || cache.keep(&here, chunk as usize, &kept, copied.as_ref())).await {
            Ok(Kept::Yes) => Brought::Resident,
            // A cache that cannot be written does not keep a guest from its chunk.
            other => {
                match other {
                    Ok(Kept::DiskFull) => {
                        self.faults.tell("the file system of the cache is full: chunks are not kept")
                    }
                    Err(e) => self
                        .faults
                        .tell(format_args!("the cache cannot be written, and chunks are not kept: {e}")),
                    Ok(_) => {}
                }
                count(&self.seen.passed_chunks, 1);
                Brought::Passed(bytes)
            }
        }
    }

    /// Keeps a chunk, after space was made for it if necessary. `copied` says where it was copied from, if it was.
    fn keep(
        &self,
        image: &ServedImage,
        chunk: usize,
        bytes: &[u8],
        copied: Option<&Place>,
    ) -> io::Result<Kept> {
        if !self.is_counted() {
            return Ok(Kept::NoSpace);
        }
        loop {
            let kept = image.cached.keep(chunk, bytes, &self.budget)?;
            let is_full = matches!(kept, Kept::NoSpace | Kept::DiskFull);
            if !is_full || !self.evict(image, bytes.len() as u64, copied)? {
                return Ok(kept);
            }
        }
    }

    /// Removes chunks of an image that nobody uses: the one that was copied, otherwise those of the image that was used longest ago.
    /// False: there is none.
    fn evict(&self, wanted_for: &ServedImage, bytes: u64, copied: Option<&Place>) -> io::Result<bool> {
        // What was copied is needed least, and the other chunks of its image may be copied next.
        if let Some(Place { image, chunk }) = copied.filter(|place| !place.image.is(&wanted_for.root)) {
            let freed = image.cached.evict_chunk(*chunk as usize, &self.budget)?;
            if freed > 0 {
                count(&self.seen.evicted_chunks, freed);
                return Ok(true);
            }
        }
        let mut others = self.images();
        others.retain(|image| !image.is(&wanted_for.root));
        others.sort_by_cached_key(|image| *locked(&image.used));
        for image in others {
            let freed = image.cached.shrink(bytes, &self.budget)?;
            if freed > 0 {
                count(&self.seen.evicted_chunks, freed);
                return Ok(true);
            }
        }
        Ok(false)
    }
}

impl ServedImage {
    /// Chunks that are being brought.
    pub fn flights(&self) -> usize {
        let flights = locked(&self.flights);
        let chunks: HashSet<_> = flights.keys().map(|(chunk, _)| chunk).collect();
        chunks.len()
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

    /// Its chunks with a digest: the first of them, if there are very many.
    pub fn find(&self, digest: &ChunkDigest) -> &[u32] {
        let found = self.by_digest.find(self.cached.index(), digest);
        &found[..found.len().min(MOST_PLACES)]
    }

    /// Tells in the log why no source has a chunk.
    pub fn tell_damaged(&self, chunk: u32, why: &RegistryError) {
        self.damaged.tell(format_args!("chunk {chunk} of {}: {why}", self.name()));
    }
}

fn damaged(why: &str) -> Brought {
    let kind = spillway_registry::RegistryErrorKind::Local;
    Brought::Damaged(Arc::new(RegistryError::new(kind, why)))
}

async fn blocking<T: Send + 'static>(work: impl FnOnce() -> io::Result<T> + Send + 'static) -> io::Result<T> {
    tokio::task::spawn_blocking(work).await.map_err(io::Error::other)?
}
