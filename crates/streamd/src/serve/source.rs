//! Where chunks come from: the registry's store. Owns how long is waited, and when it is asked again.
//!
//! Invariant: a store that is away is no error: it is asked until it answers, and soon after it does. What it gives is compared
//! with its digest; only what it has wrong several times, or does not have, is given up. An answer that makes progress is not
//! broken off while somebody waits for it.

use super::cache::locked;
use super::health::Health;
use super::peers::Wanted;
use crate::store::RemoteStore;
use futures_util::future::{Either, select};
use spillway_image::digests::ChunkDigest;
use spillway_registry::{
    MOST_FRAME_BYTES, RegistryError, RegistryErrorKind, chunk_key, is_registry, open_frame,
};
use std::collections::HashSet;
use std::pin::pin;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::{sleep, timeout};

/// Time without an answer after which it is found out whether the store is there.
const SILENCE: Duration = Duration::from_secs(1);
/// The same of a store that answers other requests, after which this one is repeated: it doubles each time up to this.
const MOST_SILENCE: Duration = Duration::from_secs(10);
/// Times after which a chunk that is not answered is stuck.
const MOST_SILENT: u32 = 4;
/// Pause before a wrong chunk is asked for again.
const AFTER_WRONG: Duration = Duration::from_millis(250);
/// Pause before a chunk is asked for again of a store that answers and has refused it before, and the longest.
const AFTER_REFUSED: Duration = Duration::from_millis(200);
const MOST_AFTER_REFUSED: Duration = Duration::from_secs(3);
/// How often a store may say that it has no such chunk, or give a wrong one, before it is given up.
const MOST_WRONG: u32 = 3;
/// Pieces of the time after which a store is asked twice. In each of them this process has run: what it missed while others had the
/// processors was not the store's silence.
const PIECES: u32 = 4;
/// Longest time to find out whether a store that lacks a chunk is a registry at all.
const LOOK: Duration = Duration::from_secs(10);

/// Chunks that a store that answers has refused or not sent several times, and that are waited for.
#[derive(Default)]
pub struct Stuck(Mutex<HashSet<u32>>);

/// A chunk that is one of them.
struct IsStuck<'a>(&'a Stuck, u32);

impl Stuck {
    fn note(&self, chunk: u32) -> IsStuck<'_> {
        locked(&self.0).insert(chunk);
        IsStuck(self, chunk)
    }

    /// Whether a chunk is one of them.
    pub fn has(&self, chunk: u32) -> bool {
        locked(&self.0).contains(&chunk)
    }
}

impl Drop for IsStuck<'_> {
    fn drop(&mut self) {
        locked(&self.0.0).remove(&self.1);
    }
}

/// How chunks are fetched.
pub struct Source<'a> {
    /// The store, which may be another one the next time, whether it answers, and how fast.
    pub health: &'a Arc<Health>,
    /// Places of requests to it.
    pub width: &'a Arc<Semaphore>,
    /// Which chunks do not come from it.
    pub stuck: &'a Stuck,
    /// Counts chunks that had another content than their digest says.
    pub wrong: &'a AtomicU64,
}

/// A chunk that has come.
pub struct Fetched {
    /// Its content.
    pub bytes: Vec<u8>,
    /// Bytes that were received for it.
    pub received_bytes: u64,
    /// The place of its request, which is taken until it was kept.
    pub place: OwnedSemaphorePermit,
}

impl Source<'_> {
    /// Fetches a chunk. Returns it, or why no source has it.
    pub async fn fetch(&self, wanted: &Wanted) -> Result<Fetched, RegistryError> {
        let (mut wrong, mut refused, mut silent, mut is_stuck) = (0, 0, 0, None);
        loop {
            // Not while it is waited for: a chunk that is refused again and again keeps no other from coming.
            let closed = |e| RegistryError::new(RegistryErrorKind::Local, e);
            let place = Arc::clone(self.width).acquire_owned().await.map_err(closed)?;
            let answers = self.health.answers();
            let store = self.health.store();
            let has_begun = AtomicBool::new(false);
            let attempt = pin!(self.attempt(&store, &wanted.digest, &has_begun));
            let patience = (SILENCE * 2_u32.pow(silent)).min(MOST_SILENCE);
            let silence = pin!(async {
                sleep(patience).await;
                // What others learn of the store tells whether this request was lost.
                self.health.answers_again(answers, &has_begun).await;
            });
            let error = match select(attempt, silence).await {
                Either::Left((Ok(frame), _)) => match opened(frame, wanted, place).await {
                    Ok(fetched) => return Ok(fetched),
                    Err(e) => e,
                },
                Either::Left((Err(e), _)) => {
                    drop(place);
                    e
                }
                Either::Right(_) => {
                    // It answers, and not to this: that may take it longer.
                    silent = (silent + 1).min(MOST_SILENT);
                    if silent == MOST_SILENT {
                        is_stuck.get_or_insert_with(|| self.stuck.note(wanted.chunk));
                    }
                    continue;
                }
            };
            // A folder that is not mounted, or a bucket that is gone, has no chunks either.
            if is_wrong(&error) && is_there(&store).await {
                self.wrong.fetch_add(1, Ordering::Relaxed);
                self.health.tell_wrong(&error);
                wrong += 1;
                if wrong >= MOST_WRONG {
                    return Err(error);
                }
                sleep(AFTER_WRONG).await;
            } else {
                self.health.tell(&error);
                if refused > 0 {
                    is_stuck.get_or_insert_with(|| self.stuck.note(wanted.chunk));
                }
                self.health.answers_again(answers, &AtomicBool::new(false)).await;
                // One that answers, and not with chunks, has too much to do.
                if refused > 0 {
                    sleep((AFTER_REFUSED * refused).min(MOST_AFTER_REFUSED)).await;
                }
                refused += 1;
            }
        }
    }

    /// Asks once, and once more if the first byte does not come for long. The first that has a whole answer wins.
    async fn attempt(
        &self,
        store: &RemoteStore,
        digest: &ChunkDigest,
        has_begun: &AtomicBool,
    ) -> Result<Vec<u8>, RegistryError> {
        let key = chunk_key(digest);
        let once = || async {
            let begun = Instant::now();
            let frame = store.get_noting(&key, MOST_FRAME_BYTES, has_begun).await?;
            self.health.took(begun.elapsed());
            let missing = || RegistryError::new(RegistryErrorKind::Absent, format!("{key} is missing"));
            frame.ok_or_else(missing)
        };
        let first = pin!(once());
        let second = pin!(async {
            let piece = self.health.hedge() / PIECES;
            for _ in 0..PIECES {
                sleep(piece).await;
            }
            // A slow body is not sent faster for being asked for twice.
            if has_begun.load(Ordering::Acquire) {
                return std::future::pending().await;
            }
            once().await
        });
        match select(first, second).await {
            // An error before the second was sent is told at once: a pause follows.
            Either::Left((ended, _)) => ended,
            Either::Right((Ok(frame), _)) => Ok(frame),
            Either::Right((Err(_), first)) => first.await,
        }
    }
}

/// Decompresses a chunk and compares it.
async fn opened(
    frame: Vec<u8>,
    wanted: &Wanted,
    place: OwnedSemaphorePermit,
) -> Result<Fetched, RegistryError> {
    let (digest, len) = (wanted.digest, wanted.len);
    let opened = tokio::task::spawn_blocking(move || {
        let bytes = open_frame(&frame, &digest, len)?;
        Ok(Fetched { bytes, received_bytes: frame.len() as u64, place })
    });
    opened.await.map_err(|e| RegistryError::new(RegistryErrorKind::Local, e))?
}

/// Whether the error is of a chunk that the store has wrong, or does not have.
fn is_wrong(error: &RegistryError) -> bool {
    matches!(error.kind, RegistryErrorKind::Damaged | RegistryErrorKind::Absent)
}

/// Whether the store is there, and is a registry.
async fn is_there(store: &RemoteStore) -> bool {
    matches!(timeout(LOOK, is_registry(store)).await, Ok(Ok(true)))
}
