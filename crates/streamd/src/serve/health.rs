//! Whether a store answers, and how fast. Owns the one look at a store that goes on while requests to it are unanswered.
//!
//! Invariant: while it is not known to answer, one small request is sent each [`EACH`], however many chunks are waited for.

use crate::store::RemoteStore;
use spillway_registry::is_registry;
use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;
use tokio::sync::watch;
use tokio::time::{sleep, timeout};

/// Interval of looks at a store that does not answer.
const EACH: Duration = Duration::from_millis(400);
/// Longest time of one of them.
const LOOK: Duration = Duration::from_secs(10);
/// Requests of which the time is remembered.
const REMEMBERED: usize = 64;
/// Hedge before enough requests have ended.
const HEDGE: Duration = Duration::from_secs(1);
/// Requests that are enough.
const ENOUGH: usize = 16;

/// What is known of a store.
pub struct Health {
    /// How often it was found to answer while somebody doubted it.
    answers: watch::Sender<u64>,
    /// Somebody looks at it.
    is_looked_at: AtomicBool,
    took: Mutex<VecDeque<Duration>>,
    /// Shortest time after which a second request is sent beside one.
    least_hedge: Duration,
}

impl Health {
    /// Of a store of which nothing is known.
    pub fn new(least_hedge: Duration) -> Arc<Health> {
        let (answers, is_looked_at) = (watch::Sender::new(0), AtomicBool::new(false));
        Arc::new(Health { answers, is_looked_at, took: Mutex::default(), least_hedge })
    }

    /// A count that rises when the store is found to answer.
    pub fn answers(&self) -> u64 {
        *self.answers.borrow()
    }

    /// A request took so long.
    pub fn took(&self, time: Duration) {
        let mut took = self.took.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        if took.len() == REMEMBERED {
            took.pop_front();
        }
        took.push_back(time);
    }

    /// Time after which a second request is sent beside one: twice of what 19 of 20 take.
    pub fn hedge(&self) -> Duration {
        let took = self.took.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        if took.len() < ENOUGH {
            return HEDGE.max(self.least_hedge);
        }
        let mut sorted: Vec<_> = took.iter().collect();
        sorted.sort_unstable();
        (*sorted[sorted.len() * 19 / 20] * 2).max(self.least_hedge)
    }

    /// Waits until the store is found to answer after it had answered so often, while `has_begun` is not set: then it waits for ever.
    pub async fn answers_again(
        self: &Arc<Health>,
        store: &Arc<RemoteStore>,
        answers: u64,
        has_begun: &AtomicBool,
    ) {
        let mut seen = self.answers.subscribe();
        loop {
            if !self.is_looked_at.swap(true, Ordering::AcqRel) {
                tokio::spawn(Arc::clone(self).look(Arc::clone(store)));
            }
            // It cannot fail: the sender is ours.
            let _ = timeout(LOOK, seen.wait_for(|now| *now > answers)).await;
            if has_begun.load(Ordering::Acquire) {
                return std::future::pending().await;
            }
            if *seen.borrow() > answers {
                return;
            }
        }
    }

    /// Looks at the store until it answers.
    async fn look(self: Arc<Health>, store: Arc<RemoteStore>) {
        let (told, mut answered) = watch::channel(false);
        loop {
            let (store, told) = (Arc::clone(&store), told.clone());
            // A look may be lost, as the requests were: the next one is not held up.
            tokio::spawn(async move {
                if let Ok(Ok(true)) = timeout(LOOK, is_registry(&*store)).await {
                    told.send_replace(true);
                }
            });
            tokio::select! {
                _ = answered.wait_for(|answered| *answered) => break,
                () = sleep(EACH) => {}
            }
        }
        self.is_looked_at.store(false, Ordering::Release);
        self.answers.send_modify(|answers| *answers += 1);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_hedge_follows_what_requests_take() {
        let health = Health::new(Duration::from_millis(200));
        assert_eq!(health.hedge(), HEDGE);
        (0..32).for_each(|_| health.took(Duration::from_millis(20)));
        assert_eq!(health.hedge(), Duration::from_millis(200));
        (0..8).for_each(|_| health.took(Duration::from_millis(300)));
        assert_eq!(health.hedge(), Duration::from_millis(600));
        (0..REMEMBERED).for_each(|_| health.took(Duration::from_millis(110)));
        assert_eq!(health.hedge(), Duration::from_millis(220));
        assert_eq!(Health::new(Duration::from_secs(600)).hedge(), Duration::from_secs(600));
    }
}
