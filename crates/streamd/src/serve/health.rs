//! Whether a store answers, and how fast. Owns its pace, and the one look at a store that goes on while requests to it are unanswered.
//!
//! Invariant: while it is not known to answer, one small request is sent each [`EACH`], however many chunks are waited for.

use super::pace::Pace;
use crate::store::RemoteStore;
use spillway_registry::is_registry;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;
use tokio::sync::watch;
use tokio::time::{sleep, timeout};

/// Interval of looks at a store that does not answer.
const EACH: Duration = Duration::from_millis(400);
/// Longest time of one of them.
const LOOK: Duration = Duration::from_secs(10);

/// What is known of a store.
pub struct Health {
    /// How often it was found to answer while somebody doubted it.
    answers: watch::Sender<u64>,
    /// Somebody looks at it.
    is_looked_at: AtomicBool,
    pace: Pace,
}

impl Health {
    /// Of a store of which nothing is known; a second request is never sent beside one before this time.
    pub fn new(least_hedge: Duration) -> Arc<Health> {
        let (answers, is_looked_at) = (watch::Sender::new(0), AtomicBool::new(false));
        Arc::new(Health { answers, is_looked_at, pace: Pace::new(least_hedge) })
    }

    /// A count that rises when the store is found to answer.
    pub fn answers(&self) -> u64 {
        *self.answers.borrow()
    }

    /// A request took so long.
    pub fn took(&self, time: Duration) {
        self.pace.took(time);
    }

    /// Time after which a second request is sent beside one: twice of what 19 of 20 take.
    pub fn hedge(&self) -> Duration {
        self.pace.hedge()
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
