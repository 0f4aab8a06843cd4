//! Where chunks come from: the registry's store. Owns how long is waited, and when it is asked again.
//!
//! Invariant: a store that is away is no error: it is asked until it answers. What it gives is compared with its digest; only
//! what it has wrong several times, or does not have, is given up.

use crate::store::RemoteStore;
use futures_util::future::{Either, select};
use spillway_image::digests::ChunkDigest;
use spillway_registry::{RegistryError, RegistryErrorKind, fetch_frame, open_frame};
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;
use tokio::time::{sleep, timeout};

/// Longest time for one request: a store that has not answered whole by then is asked anew.
const ATTEMPT: Duration = Duration::from_secs(30);
/// Shortest and longest pause before a store is asked again that could not answer.
const PAUSES: (Duration, Duration) = (Duration::from_millis(250), Duration::from_secs(5));
/// How often a store may say that it has no such chunk, or give a wrong one, before it is given up.
const MOST_WRONG: u32 = 3;

/// How chunks are fetched.
pub struct Source<'a, S: Fn() -> Arc<RemoteStore>> {
    /// The store, which may be another one the next time.
    pub store: S,
    /// A request that takes longer gets a second one beside it.
    pub hedge: Duration,
    /// Counts chunks that had another content than their digest says.
    pub wrong: &'a AtomicU64,
}

/// A chunk that has come.
pub struct Fetched {
    /// Its content.
    pub bytes: Vec<u8>,
    /// Bytes that were received for it.
    pub received_bytes: u64,
}

impl<S: Fn() -> Arc<RemoteStore>> Source<'_, S> {
    /// Fetches a chunk. Returns it, or why no source has it.
    pub async fn fetch(&self, digest: &ChunkDigest, len: u64) -> Result<Fetched, RegistryError> {
        let (mut wrong, mut pause) = (0, PAUSES.0);
        loop {
            match self.attempt(digest, len).await {
                Ok(fetched) => return Ok(fetched),
                Err(e) if e.kind == RegistryErrorKind::Damaged => {
                    self.wrong.fetch_add(1, Ordering::Relaxed);
                    wrong += 1;
                    if wrong >= MOST_WRONG {
                        return Err(e);
                    }
                }
                Err(_) => {}
            }
            sleep(pause).await;
            pause = (pause * 2).min(PAUSES.1);
        }
    }

    /// Asks once, and once more if that takes long. The first that has an answer wins.
    async fn attempt(&self, digest: &ChunkDigest, len: u64) -> Result<Fetched, RegistryError> {
        let store = (self.store)();
        let once = || async {
            let late = |_| RegistryError::new(RegistryErrorKind::Unreachable, "the store does not answer");
            timeout(ATTEMPT, fetch_frame(&*store, digest)).await.map_err(late)?
        };
        let first = pin!(once());
        let second = pin!(async {
            sleep(self.hedge).await;
            once().await
        });
        let frame = match select(first, second).await {
            // An error before the second was sent is told at once: a pause follows.
            Either::Left((ended, _)) => ended?,
            Either::Right((Ok(frame), _)) => frame,
            Either::Right((Err(_), first)) => first.await?,
        };
        let (digest, received_bytes) = (*digest, frame.len() as u64);
        let opened = tokio::task::spawn_blocking(move || open_frame(&frame, &digest, len)).await;
        let bytes = opened.map_err(|e| RegistryError::new(RegistryErrorKind::Local, e))??;
        Ok(Fetched { bytes, received_bytes })
    }
}
