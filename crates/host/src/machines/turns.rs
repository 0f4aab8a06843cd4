//! Turns of work on files in stores, so that little of it runs at the same time. Owns the turns of each set of stores.
//!
//! Invariant: work in other stores has turns of its own. A store whose file system hangs keeps the turns, and the threads,
//! of those that use it, and no others.

use crate::error::HostError;
use spillway_api::{ErrorCode, Name};
use std::collections::{BTreeMap, BTreeSet};
use std::pin::pin;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::timeout;

/// Names of the stores that some work uses.
pub type StoreSet = BTreeSet<Name>;

/// Turns of work in stores.
pub struct StoreTurns {
    at_a_time: usize,
    patience: Duration,
    sets: Mutex<BTreeMap<StoreSet, Arc<SetTurns>>>,
}

/// Turns of the work that uses the same set of stores.
struct SetTurns {
    free: Arc<Semaphore>,
    /// Number of turns that have ended.
    ended: AtomicU64,
}

/// A turn, until it is dropped.
pub struct Turn {
    _permit: OwnedSemaphorePermit,
    of: Arc<SetTurns>,
}

impl Drop for Turn {
    fn drop(&mut self) {
        self.of.ended.fetch_add(1, Ordering::Relaxed);
    }
}

impl StoreTurns {
    /// Creates turns of which each set of stores has this many at a time. If none of them ends for as long as `patience`, those
    /// that wait are refused.
    pub fn new(at_a_time: usize, patience: Duration) -> StoreTurns {
        StoreTurns { at_a_time, patience, sets: Mutex::default() }
    }

    /// Waits for a turn in these stores.
    pub async fn take(&self, stores: &StoreSet) -> Result<Turn, HostError> {
        let of = self.of(stores);
        let mut permit = pin!(Arc::clone(&of.free).acquire_owned());
        loop {
            let ended = of.ended.load(Ordering::Relaxed);
            match timeout(self.patience, &mut permit).await {
                Ok(permit) => {
                    let _permit = permit.expect("nobody closes it");
                    return Ok(Turn { _permit, of });
                }
                Err(_) if of.ended.load(Ordering::Relaxed) == ended => return Err(self.hung(stores)),
                Err(_) => {}
            }
        }
    }

    fn of(&self, stores: &StoreSet) -> Arc<SetTurns> {
        let mut sets = self.sets.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        // Sets that nobody uses any more.
        sets.retain(|_, turns| Arc::strong_count(turns) > 1);
        let turns = sets.entry(stores.clone()).or_insert_with(|| {
            let free = Arc::new(Semaphore::new(self.at_a_time));
            Arc::new(SetTurns { free, ended: AtomicU64::new(0) })
        });
        Arc::clone(turns)
    }

    fn hung(&self, stores: &StoreSet) -> HostError {
        let stores: Vec<&str> = stores.iter().map(Name::as_str).collect();
        let (number, seconds) = (self.at_a_time, self.patience.as_secs());
        let message = match stores[..] {
            [] => format!("{number} others are being started, and none has ended that for {seconds} s"),
            _ => format!(
                "{number} others use the stores {}, and none has ended that for {seconds} s: does a file system hang?",
                stores.join(", ")
            ),
        };
        HostError::new(ErrorCode::Unavailable, message)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn set(names: &[&str]) -> StoreSet {
        names.iter().map(|name| name.parse().unwrap()).collect()
    }

    #[tokio::test]
    async fn those_that_wait_for_a_hung_store_are_refused_and_others_do_not_wait() {
        let turns = StoreTurns::new(2, Duration::from_millis(100));
        let (hung, other) = (set(&["local", "nas"]), set(&["local"]));
        let first = turns.take(&hung).await.unwrap();
        let _second = turns.take(&hung).await.unwrap();
        let refused = turns.take(&hung).await.err().unwrap();
        assert_eq!(refused.code, ErrorCode::Unavailable);
        assert!(refused.message.contains("local, nas"), "{refused}");
        turns.take(&other).await.unwrap();
        drop(first);
        turns.take(&hung).await.unwrap();
        let kept = turns.sets.lock().unwrap();
        assert!(kept.len() == 1 && kept.contains_key(&hung), "sets without a turn are forgotten");
    }

    #[tokio::test]
    async fn while_turns_end_those_that_wait_are_not_refused() {
        let turns = StoreTurns::new(2, Duration::from_secs(2));
        let stores = set(&["local"]);
        let long = turns.take(&stores).await.unwrap();
        // Each waits for all before it, together longer than the patience.
        let wait = async |_| {
            let turn = turns.take(&stores).await.unwrap();
            tokio::time::sleep(Duration::from_secs(1)).await;
            drop(turn);
        };
        tokio::join!(wait(0), wait(1), wait(2), wait(3));
        drop(long);
    }
}
