//! Whether a store answers, and how fast. Owns its pace, and the one look at a store that goes on while requests to it are unanswered.
//!
//! Invariant: while it is not known to answer, one small request is sent each [`EACH`], however many chunks are waited for.

use super::cache::locked;
use super::pace::Pace;
use super::telling::Telling;
use crate::store::{Credentials, RemoteStore};
use spillway_registry::job::Place;
use spillway_registry::{RegistryError, is_registry};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;
use tokio::sync::watch;
use tokio::time::{sleep, timeout};

/// Interval of looks at a store that does not answer.
const EACH: Duration = Duration::from_millis(400);
/// Longest time of one of them.
const LOOK: Duration = Duration::from_secs(10);

/// Where a store is, and what it is asked with.
#[derive(PartialEq, Eq)]
pub struct StoreAt {
    /// The address.
    pub place: Place,
    /// For signing requests.
    pub credentials: Option<Credentials>,
}

impl StoreAt {
    fn open(&self) -> Result<Arc<RemoteStore>, RegistryError> {
        // What is missing is asked for again by what fetches it.
        RemoteStore::open(&self.place, self.credentials.clone(), Duration::ZERO).map(Arc::new)
    }
}

/// What is known of a store.
pub struct Health {
    /// How often it was found to answer while somebody doubted it.
    answers: watch::Sender<u64>,
    /// Somebody looks at it.
    is_looked_at: AtomicBool,
    pace: Pace,
    store: Mutex<(StoreAt, Arc<RemoteStore>)>,
    /// Its errors.
    errors: Telling,
    /// Its chunks that are missing or damaged.
    wrong: Telling,
}

impl Health {
    /// Of a store of which nothing is known; a second request is never sent beside one before this time.
    pub fn new(at: StoreAt, least_hedge: Duration) -> Result<Arc<Health>, RegistryError> {
        let (answers, is_looked_at) = (watch::Sender::new(0), AtomicBool::new(false));
        let store = at.open()?;
        let (store, pace) = (Mutex::new((at, store)), Pace::new(least_hedge));
        Ok(Arc::new(Health {
            answers,
            is_looked_at,
            pace,
            store,
            errors: Telling::default(),
            wrong: Telling::default(),
        }))
    }

    /// The store.
    pub fn store(&self) -> Arc<RemoteStore> {
        Arc::clone(&locked(&self.store).1)
    }

    /// The image may have another place, or other credentials. Where chunks are waited for, the next look is at this store. One call at
    /// a time.
    pub fn replace(&self, at: StoreAt) -> Result<(), RegistryError> {
        let (is_other, is_same) = {
            let known = &locked(&self.store).0;
            // Credentials that cannot be read for a moment: those that are known may still be good.
            let is_less = known.place == at.place && known.credentials.is_some() && at.credentials.is_none();
            // One that does not answer may be accepted when the certificates are read anew.
            ((*known != at || self.is_doubted()) && !is_less, *known == at)
        };
        if !is_other {
            return Ok(());
        }
        // This reads files, for which nobody waits who asks for the store.
        match at.open() {
            Ok(store) => *locked(&self.store) = (at, store),
            Err(_) if is_same => {}
            Err(e) => return Err(e),
        }
        Ok(())
    }

    /// Tells in the log which chunk is missing or damaged.
    pub fn tell_wrong(&self, error: &RegistryError) {
        self.wrong.tell(error);
    }

    /// Tells in the log why a chunk does not come.
    pub fn tell(&self, error: &RegistryError) {
        self.errors.tell(format_args!("{error}; it is asked again until it answers"));
    }

    /// Whether it is being looked at, since requests are unanswered.
    pub fn is_doubted(&self) -> bool {
        self.is_looked_at.load(Ordering::Acquire)
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
    pub async fn answers_again(self: &Arc<Health>, answers: u64, has_begun: &AtomicBool) {
        let mut seen = self.answers.subscribe();
        loop {
            if !self.is_looked_at.swap(true, Ordering::AcqRel) {
                tokio::spawn(Arc::clone(self).look());
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

    /// Looks at the store until it answers, or nobody waits for it.
    async fn look(self: Arc<Health>) {
        let (told, mut answered) = watch::channel(false);
        while self.answers.receiver_count() > 0 {
            let (store, told) = (self.store(), told.clone());
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
