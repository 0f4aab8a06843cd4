//! Where chunks come from: the registry's store. Owns how long is waited, and when it is asked again.
//!
//! Invariant: a store that is away is no error: it is asked until it answers. What it gives is compared with its digest; only
//! what it has wrong several times, or does not have, is given up.

use crate::store::RemoteStore;
use futures_util::future::{Either, select};
use spillway_image::digests::ChunkDigest;
use spillway_registry::{RegistryError, RegistryErrorKind, fetch_frame, open_frame};
use std::pin::pin;
use std::time::Duration;
use tokio::time::{sleep, timeout};

/// Longest time for one request: a store that has not answered whole by then is asked anew.
const ATTEMPT: Duration = Duration::from_secs(30);
/// Shortest and longest pause before a store is asked again that could not answer.
const PAUSES: (Duration, Duration) = (Duration::from_millis(250), Duration::from_secs(5));
/// How often a store may say that it has no such chunk, or give a wrong one, before it is given up.
const MOST_WRONG: u32 = 3;

/// Fetches a chunk. Returns its plain bytes, or why no source has it. A request that takes longer than `hedge` gets a second
/// one beside it.
pub async fn fetch(
    store: &RemoteStore,
    digest: &ChunkDigest,
    len: u64,
    hedge: Duration,
) -> Result<Vec<u8>, RegistryError> {
    let (mut wrong, mut pause) = (0, PAUSES.0);
    loop {
        match attempt(store, digest, len, hedge).await {
            Ok(bytes) => return Ok(bytes),
            Err(e) if e.kind == RegistryErrorKind::Damaged => {
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
async fn attempt(
    store: &RemoteStore,
    digest: &ChunkDigest,
    len: u64,
    hedge: Duration,
) -> Result<Vec<u8>, RegistryError> {
    let once = || async move {
        let late = |_| RegistryError::new(RegistryErrorKind::Unreachable, "the store does not answer");
        timeout(ATTEMPT, fetch_frame(store, digest)).await.map_err(late)?
    };
    let first = pin!(once());
    let second = pin!(async {
        sleep(hedge).await;
        once().await
    });
    let frame = match select(first, second).await {
        // An error before the second was sent is told at once: a pause follows.
        Either::Left((ended, _)) => ended?,
        Either::Right((Ok(frame), _)) => frame,
        Either::Right((Err(_), first)) => first.await?,
    };
    let digest = *digest;
    let opened = tokio::task::spawn_blocking(move || open_frame(&frame, &digest, len)).await;
    opened.map_err(|e| RegistryError::new(RegistryErrorKind::Local, e))?
}
