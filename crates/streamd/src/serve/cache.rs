//! All images of the cache, and the chunks that are being brought. Owns the flights: one for each chunk, whoever asks.
//!
//! Invariant: a flight goes on to its end although who asked first has gone; a chunk's bit is set before those who wait for it
//! are told.

use super::budget::Budget;
use super::image::{CachedImage, Kept};
use super::source;
use crate::store::RemoteStore;
use futures_util::FutureExt;
use futures_util::future::{BoxFuture, Shared};
use spillway_image::digests::ChunkDigest;
use spillway_registry::{Index, RegistryError};
use std::collections::HashMap;
use std::io;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};
use tokio::sync::Semaphore;

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

/// An image with its source.
pub struct ServedImage {
    /// Its files.
    pub cached: CachedImage,
    store: RemoteStore,
    flights: Mutex<HashMap<u32, Flight>>,
    /// Requests to its store. Of the image, so that a store that is away holds up no other.
    width: Semaphore,
    /// When it was asked for the last time.
    used: Mutex<Instant>,
}

/// The cache.
pub struct Cache {
    folder: PathBuf,
    budget: Budget,
    images: Mutex<HashMap<ChunkDigest, Arc<ServedImage>>>,
    hedge: Duration,
}

/// Requests for an image at a time.
const DEMAND_WIDTH: usize = 64;

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
}

impl Cache {
    /// The cache in a folder, of at most so many bytes. A request to a store that takes longer than `hedge` gets a second one
    /// beside it.
    pub fn new(folder: PathBuf, most_bytes: u64, hedge: Duration) -> Cache {
        Cache { folder, budget: Budget::new(most_bytes), images: Mutex::default(), hedge }
    }

    /// Serves an image from now on, with this store for what is missing.
    pub fn serve(&self, index: Index, store: RemoteStore) -> io::Result<()> {
        let root = index.root();
        let mut images = locked(&self.images);
        if images.contains_key(&root) {
            return Ok(());
        }
        let cached = CachedImage::open(&self.folder, index, &self.budget)?;
        let served = ServedImage {
            cached,
            store,
            flights: Mutex::default(),
            width: Semaphore::new(DEMAND_WIDTH),
            used: Mutex::new(Instant::now()),
        };
        images.insert(root, Arc::new(served));
        Ok(())
    }

    /// An image that is served.
    pub fn image(&self, root: &ChunkDigest) -> Option<Arc<ServedImage>> {
        locked(&self.images).get(root).cloned()
    }

    /// Removes what is beyond the budget, which may have been larger, as far as nobody uses it.
    pub fn shrink_to_budget(&self) -> io::Result<()> {
        let images: Vec<_> = locked(&self.images).values().cloned().collect();
        for image in images {
            let surplus = self.budget.surplus_bytes();
            if surplus > 0 {
                image.cached.shrink(surplus, &self.budget)?;
            }
        }
        Ok(())
    }

    /// Brings a chunk of an image into its file.
    pub async fn bring(self: &Arc<Cache>, image: &Arc<ServedImage>, chunk: u32) -> Brought {
        let flight = {
            let mut flights = locked(&image.flights);
            let begin = || {
                let (cache, image, of_fault) = (Arc::clone(self), Arc::clone(image), Arc::clone(image));
                let task = tokio::spawn(async move {
                    let brought = cache.fly(&image, chunk).await;
                    locked(&image.flights).remove(&chunk);
                    brought
                });
                let ended = task.map(move |ended| {
                    ended.unwrap_or_else(|e| {
                        locked(&of_fault.flights).remove(&chunk);
                        damaged(&format!("a fault of spillway-streamd ({e})"))
                    })
                });
                ended.boxed().shared()
            };
            flights.entry(chunk).or_insert_with(begin).clone()
        };
        flight.await
    }

    async fn fly(self: &Arc<Cache>, image: &Arc<ServedImage>, chunk: u32) -> Brought {
        *locked(&image.used) = Instant::now();
        let Some((digest, len)) = image.chunk(chunk) else { return damaged("there is no such chunk") };
        let here = Arc::clone(image);
        let found = blocking(move || here.cached.verify(chunk as usize)).await;
        if matches!(found, Ok(true)) {
            return Brought::Resident;
        }
        let _turn = image.width.acquire().await;
        let bytes = match source::fetch(&image.store, &digest, len, self.hedge).await {
            Ok(bytes) => Arc::new(bytes),
            Err(e) => return Brought::Damaged(Arc::new(e)),
        };
        let (cache, here, kept) = (Arc::clone(self), Arc::clone(image), Arc::clone(&bytes));
        match blocking(move || cache.keep(&here, chunk as usize, &kept)).await {
            Ok(Kept::Yes) => Brought::Resident,
            // A cache that cannot be written does not keep a guest from its chunk.
            Ok(Kept::NoSpace) | Err(_) => Brought::Passed(bytes),
        }
    }

    /// Keeps a chunk, after space was made for it if necessary.
    fn keep(&self, image: &ServedImage, chunk: usize, bytes: &[u8]) -> io::Result<Kept> {
        loop {
            let kept = image.cached.keep(chunk, bytes, &self.budget)?;
            if kept == Kept::Yes || !self.evict(image, bytes.len() as u64)? {
                return Ok(kept);
            }
        }
    }

    /// Removes chunks of an image that nobody uses, the one first that was used longest ago. False: there is none.
    fn evict(&self, wanted_for: &ServedImage, bytes: u64) -> io::Result<bool> {
        let mut others: Vec<_> = locked(&self.images).values().cloned().collect();
        others.retain(|image| !std::ptr::eq(Arc::as_ptr(image), wanted_for));
        others.sort_by_key(|image| *locked(&image.used));
        for image in others {
            if image.cached.shrink(bytes, &self.budget)? > 0 {
                return Ok(true);
            }
        }
        Ok(false)
    }
}

impl ServedImage {
    /// Digest of the image.
    pub fn name(&self) -> String {
        spillway_registry::Manifest::of(self.cached.index()).digest
    }

    fn chunk(&self, chunk: u32) -> Option<(ChunkDigest, u64)> {
        let index = self.cached.index();
        let digest = index.digests.get(chunk as usize)?;
        Some((*digest, index.len_of(chunk as usize)))
    }
}

fn damaged(why: &str) -> Brought {
    let kind = spillway_registry::RegistryErrorKind::Local;
    Brought::Damaged(Arc::new(RegistryError::new(kind, why)))
}

async fn blocking<T: Send + 'static>(work: impl FnOnce() -> io::Result<T> + Send + 'static) -> io::Result<T> {
    tokio::task::spawn_blocking(work).await.map_err(io::Error::other)?
}
