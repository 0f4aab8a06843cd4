//! The chunks that are being brought. Owns the flights: one for each chunk, whoever asks, and one for each chunk that is fetched from
//! the store.
//!
//! Invariants: a flight goes on although who asked first has gone, and ends soon after the last one has; a chunk's bit is set before
//! those who wait for it are told. What flights hold in memory is bounded: the chunks that are copied by a number, those of other hosts and of stores by that
//! of the requests to each, and those that are passed on by what each user may ask.

use super::{Cache, ServedImage, count, locked};
use crate::serve::image::Kept;
use crate::serve::peers::{Came, Sent, Wanted};
use crate::serve::seeds::{self, Found, Place};
use crate::serve::source::Source;
use futures_util::FutureExt;
use futures_util::future::{BoxFuture, Shared};
use hyper::body::Bytes;
use spillway_registry::RegistryError;
use std::io;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};
use tokio::sync::OwnedSemaphorePermit;
use tokio::time::sleep;

/// What a flight brought.
#[derive(Clone)]
pub enum Brought {
    /// The chunk is in the file.
    Resident,
    /// There was no space for it: these are its bytes.
    Passed(Bytes),
    /// No source has it, for this reason.
    Damaged(Arc<RegistryError>),
}

/// A chunk that is being brought.
pub(super) struct Flight {
    brought: Shared<BoxFuture<'static, Brought>>,
    /// How many wait for it. It grows with the flights locked.
    waiting: Arc<AtomicUsize>,
}

/// Somebody who waits for a flight.
struct Waiting(Arc<AtomicUsize>);

impl Waiting {
    fn of(flight: &Flight) -> Waiting {
        flight.waiting.fetch_add(1, Ordering::AcqRel);
        Waiting(Arc::clone(&flight.waiting))
    }
}

impl Drop for Waiting {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::AcqRel);
    }
}

/// Time for which a flight goes on when all who waited for it have gone. Their next connection takes less.
const ALONE: Duration = Duration::from_secs(5);
/// Pause between looks whether somebody waits.
const LOOK: Duration = Duration::from_secs(1);

/// Returns when nobody has waited for a while.
async fn nobody_waits(waiting: &AtomicUsize) {
    let mut seen = Instant::now();
    while seen.elapsed() < ALONE {
        sleep(LOOK).await;
        if waiting.load(Ordering::Acquire) > 0 {
            seen = Instant::now();
        }
    }
}

/// Where a flight may bring a chunk from.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub(super) enum Way {
    /// From other hosts, and from the store.
    Any,
    /// From the store alone: so a request of another host is not passed on, and waits for no other host.
    Store,
}

impl Cache {
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

    async fn flight(self: &Arc<Cache>, image: &Arc<ServedImage>, chunk: u32, way: Way) -> Brought {
        let (brought, _waiting) = {
            let mut flights = locked(&image.flights);
            let flight = flights.entry((chunk, way)).or_insert_with(|| self.begin(image, chunk, way));
            (flight.brought.clone(), Waiting::of(flight))
        };
        brought.await
    }

    fn begin(self: &Arc<Cache>, image: &Arc<ServedImage>, chunk: u32, way: Way) -> Flight {
        let (cache, image, of_fault) = (Arc::clone(self), Arc::clone(image), Arc::clone(image));
        let waiting = Arc::new(AtomicUsize::new(0));
        let of_task = Arc::clone(&waiting);
        let task = tokio::spawn(async move {
            let mut ended = image.ended.subscribe();
            let mut brought = pin!(cache.fly(&image, chunk, way));
            let brought = loop {
                tokio::select! {
                    brought = &mut brought => break brought,
                    _ = ended.wait_for(|ended| *ended) => break damaged("the image is served no longer"),
                    () = nobody_waits(&of_task) => {
                        let mut flights = locked(&image.flights);
                        // Nobody can have come since then: who comes now begins another one.
                        if of_task.load(Ordering::Acquire) == 0 {
                            flights.remove(&(chunk, way));
                            return damaged("nobody waits for it");
                        }
                    }
                }
            };
            locked(&image.flights).remove(&(chunk, way));
            brought
        });
        let ended = task.map(move |ended| {
            ended.unwrap_or_else(|e| {
                locked(&of_fault.flights).remove(&(chunk, way));
                fault(&e)
            })
        });
        Flight { brought: ended.boxed().shared(), waiting }
    }

    async fn fly(self: &Arc<Cache>, image: &Arc<ServedImage>, chunk: u32, way: Way) -> Brought {
        image.touch();
        let Some(wanted) = image.wanted(chunk) else { return damaged("there is no such chunk") };
        let images = self.images();
        // Each step elsewhere wakes a thread, which on an idle host takes longer than the search.
        let found = match image.cached.is_resident(chunk as usize) {
            true => Some(self.found_here(&wanted, way)),
            false if seeds::is_far(image, &images, &wanted) => None,
            false => self.look(image, images, wanted, way).await,
        };
        if let Some(brought) = found {
            return brought;
        }
        if way == Way::Store {
            return self.fly_from_store(image, &wanted).await;
        }
        let from_store = self.flight(image, chunk, Way::Store);
        let Some(peers) = &self.peers else { return from_store.await };
        match peers.fetch(&wanted, from_store).await {
            Came::Peer(Sent { bytes, place }) => self.keep_or_pass(image, chunk, bytes, place).await,
            Came::Store(brought) => brought,
        }
    }

    fn found_here(&self, wanted: &Wanted, way: Way) -> Brought {
        if way == Way::Any {
            count(&self.seen.cache_chunks, 1);
            count(&self.seen.cache_bytes, wanted.len);
        }
        Brought::Resident
    }

    /// Looks for a chunk on this host, and copies it if it is elsewhere. None: it is nowhere.
    async fn look(
        self: &Arc<Cache>,
        image: &Arc<ServedImage>,
        images: Vec<Arc<ServedImage>>,
        wanted: Wanted,
        way: Way,
    ) -> Option<Brought> {
        let turn = Arc::clone(&self.looks).acquire_owned().await;
        let (cache, here) = (Arc::clone(self), Arc::clone(image));
        let found = tokio::task::spawn_blocking(move || {
            // Also if nobody waits for this any more.
            let _turn = turn;
            match seeds::look(&here, &images, &wanted) {
                Found::Here => Some(cache.found_here(&wanted, way)),
                Found::Elsewhere(seed) => {
                    count(&cache.seen.seed_chunks, 1);
                    count(&cache.seen.seed_bytes, wanted.len);
                    Some(cache.keep_or_pass_here(&here, wanted.chunk, seed.bytes, Some(&seed.place)))
                }
                Found::Nowhere => None,
            }
        });
        found.await.unwrap_or_else(|e| Some(fault(&e)))
    }

    async fn fly_from_store(self: &Arc<Cache>, image: &Arc<ServedImage>, wanted: &Wanted) -> Brought {
        let source = Source {
            health: &image.health,
            width: &image.width,
            stuck: &image.stuck,
            wrong: &self.seen.wrong_chunks,
        };
        let fetched = match source.fetch(wanted).await {
            Ok(fetched) => fetched,
            Err(e) => return Brought::Damaged(Arc::new(e)),
        };
        count(&self.seen.store_chunks, 1);
        count(&self.seen.store_bytes, wanted.len);
        count(&self.seen.received_bytes, fetched.received_bytes);
        self.keep_or_pass(image, wanted.chunk, fetched.bytes, fetched.place).await
    }

    async fn keep_or_pass(
        self: &Arc<Cache>,
        image: &Arc<ServedImage>,
        chunk: u32,
        bytes: Vec<u8>,
        place: OwnedSemaphorePermit,
    ) -> Brought {
        let (cache, here) = (Arc::clone(self), Arc::clone(image));
        let kept = tokio::task::spawn_blocking(move || {
            // Also if nobody waits for this any more.
            let _place = place;
            cache.keep_or_pass_here(&here, chunk, bytes, None)
        });
        kept.await.unwrap_or_else(|e| fault(&e))
    }

    /// Keeps a chunk, or passes it on if that cannot be done. It waits for files.
    fn keep_or_pass_here(
        &self,
        image: &ServedImage,
        chunk: u32,
        bytes: Vec<u8>,
        copied: Option<&Place>,
    ) -> Brought {
        match self.keep(image, chunk as usize, &bytes, copied) {
            Ok(Kept::Yes) => return Brought::Resident,
            Ok(Kept::NoSpace | Kept::Gone) => {}
            Ok(Kept::DiskFull) => {
                self.faults.tell("the file system of the cache is full: chunks are not kept")
            }
            Err(e) => {
                self.faults.tell(format_args!("the cache cannot be written, and chunks are not kept: {e}"))
            }
        }
        // A cache that cannot be written does not keep a guest from its chunk.
        count(&self.seen.passed_chunks, 1);
        Brought::Passed(Bytes::from(bytes))
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
            if !is_full || !self.evict(image, bytes.len() as u64, copied) {
                return Ok(kept);
            }
        }
    }

    /// Removes chunks of an image that nobody uses: the one that was copied, otherwise those of the image that was used longest ago.
    /// False: there is none.
    fn evict(&self, wanted_for: &ServedImage, bytes: u64, copied: Option<&Place>) -> bool {
        // What was copied is needed least, and the other chunks of its image may be copied next.
        if let Some(Place { image, chunk }) = copied.filter(|place| !place.image.is(&wanted_for.root))
            && self.has_freed(image, image.cached.evict_chunk(*chunk as usize, &self.budget))
        {
            return true;
        }
        let mut others = self.images();
        others.retain(|image| !image.is(&wanted_for.root));
        others.sort_by_cached_key(|image| *locked(&image.used));
        others.iter().any(|image| self.has_freed(image, image.cached.shrink(bytes, &self.budget)))
    }

    /// Counts what was removed of an image. One of which nothing can be removed holds up no other.
    fn has_freed(&self, image: &ServedImage, removed: io::Result<u64>) -> bool {
        match removed {
            Ok(chunks) => {
                count(&self.seen.evicted_chunks, chunks);
                chunks > 0
            }
            Err(e) => {
                self.tell_left(image.cached.folder(), &e);
                false
            }
        }
    }
}

fn damaged(why: &str) -> Brought {
    let kind = spillway_registry::RegistryErrorKind::Local;
    Brought::Damaged(Arc::new(RegistryError::new(kind, why)))
}

/// A thread of this process has ended before it was done.
fn fault(error: &tokio::task::JoinError) -> Brought {
    damaged(&format!("a fault of spillway-streamd ({error})"))
}
