//! Brings chunks before a disk needs them: those of a boot set as fast as they come, whole images at a limited rate. What is
//! on this host already is copied without this limit. Owns the order and the pace; what disks ask for goes first.
//!
//! Invariant: what was brought is compared as everything else is; of a whole image it is known when all of it is on the medium.

use super::cache::{Brought, Cache, ServedImage, locked};
use futures_util::StreamExt;
use futures_util::stream;
use spillway_registry::serve::Fill;
use std::pin::pin;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};
use tokio::sync::Semaphore;
use tokio::time::{sleep, timeout};

/// Chunks of a boot set, and of a whole image, that are brought at a time.
const BOOT_WIDTH: usize = 16;
const WHOLE_WIDTH: usize = 2;
/// While so many chunks are asked for by disks, none of a whole image is.
const DEMAND: usize = WHOLE_WIDTH + 1;
/// Chunks beside which others are brought, since they do not come from the store.
const MOST_STUCK: usize = 16;
/// Pause before it is looked again whether a chunk is stuck.
const STUCK_LOOK: Duration = Duration::from_secs(1);
/// Pause before it is looked again whether it is time.
const LOOK: Duration = Duration::from_millis(50);
/// Pause before what could not be brought is tried again.
const AGAIN: Duration = Duration::from_secs(60);

/// Brings the chunks, in their order, until all are there.
pub async fn fill(cache: Arc<Cache>, image: Arc<ServedImage>, fill: Fill) {
    // What is brought before would not be kept.
    while !cache.is_counted() {
        sleep(LOOK).await;
    }
    let is_whole = fill == Fill::All;
    let filling = Filling {
        pace: Mutex::new(Pace::new(cache.order().fill_bytes_per_second)),
        places: Semaphore::new(if is_whole { WHOLE_WIDTH } else { BOOT_WIDTH }),
        cache: &cache,
        image: &image,
        is_whole,
    };
    while !filling.bring_all().await {
        sleep(AGAIN).await;
    }
    if is_whole {
        let durable = tokio::task::spawn_blocking(move || image.cached.make_durable()).await;
        if let Ok(Err(e)) = durable {
            eprintln!("spillway-streamd: an image is complete, and cannot be brought to the medium: {e}");
        }
    }
}

/// What is brought of an image.
struct Filling<'a> {
    cache: &'a Arc<Cache>,
    image: &'a Arc<ServedImage>,
    is_whole: bool,
    pace: Mutex<Pace>,
    places: Semaphore,
}

impl Filling<'_> {
    /// False: some could not be brought.
    async fn bring_all(&self) -> bool {
        let chunks = self.image.cached.filled();
        let brought = stream::iter(chunks).map(|chunk| self.bring(chunk));
        let mut brought = pin!(brought.buffer_unordered(self.places.available_permits() + MOST_STUCK));
        let mut all = true;
        while let Some(brought) = brought.next().await {
            all &= matches!(brought, Brought::Resident);
            // There is no space: what follows would not be kept either.
            if matches!(brought, Brought::Passed(_)) {
                return false;
            }
        }
        // What was said to be there may be from a flight that was before all this had to stay.
        all && self.image.cached.filled().into_iter().all(|chunk| self.image.cached.may_have(chunk))
    }

    async fn bring(&self, chunk: usize) -> Brought {
        let place = self.places.acquire().await;
        if self.image.cached.is_resident(chunk) {
            return Brought::Resident;
        }
        // What an earlier process has kept is only compared.
        if self.is_whole && !self.image.cached.may_have(chunk) {
            if self.cache.is_far(self.image, chunk as u32) {
                let wait = locked(&self.pace).next(self.image.cached.index().len_of(chunk));
                sleep(wait).await;
            }
            while self.image.promising_flights() >= DEMAND {
                sleep(LOOK).await;
            }
        }
        let mut bringing = pin!(self.cache.bring(self.image, chunk as u32));
        loop {
            match timeout(STUCK_LOOK, &mut bringing).await {
                Ok(brought) => return brought,
                Err(_) if self.image.is_stuck(chunk as u32) => break,
                Err(_) => {}
            }
        }
        // It may come in days: others do not wait for it.
        drop(place);
        bringing.await
    }
}

/// When the next chunk may be asked for.
struct Pace {
    bytes_per_second: u64,
    due: Instant,
}

impl Pace {
    fn new(bytes_per_second: u64) -> Pace {
        Pace { bytes_per_second: bytes_per_second.max(1), due: Instant::now() }
    }

    /// How long a chunk of this length has to wait.
    fn next(&mut self, len: u64) -> Duration {
        let now = Instant::now();
        let due = self.due.max(now);
        self.due = due + Duration::from_nanos(len.saturating_mul(1_000_000_000) / self.bytes_per_second);
        due - now
    }
}
