//! A store for tests, some of whose transactions fail as on a full disk, and some of whose reads. Owns no record.

use super::{ChangeNotice, Revision, Store, StoreEntry, StoreError, Transaction};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use tokio::sync::broadcast;

type Condition = Box<dyn Fn(&Transaction) -> bool + Send + Sync>;

type ReadCondition = Box<dyn Fn(&str) -> bool + Send + Sync>;

/// A store that commits only transactions that fulfil its condition, and reads only keys that fulfil another one.
pub struct FailingStore(Arc<dyn Store>, Condition, ReadCondition);

impl FailingStore {
    /// Wraps a store, which commits what fulfils this condition.
    pub fn new(
        store: Arc<dyn Store>,
        commits: impl Fn(&Transaction) -> bool + Send + Sync + 'static,
    ) -> FailingStore {
        FailingStore(store, Box::new(commits), Box::new(|_| true))
    }

    /// The same store, which reads a key only if this holds.
    pub fn reading(self, reads: impl Fn(&str) -> bool + Send + Sync + 'static) -> FailingStore {
        FailingStore(self.0, self.1, Box::new(reads))
    }

    /// Wraps a store that still commits as many transactions as this number says.
    pub fn counted(store: Arc<dyn Store>, left: Arc<AtomicUsize>) -> FailingStore {
        let take = move || left.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |n| n.checked_sub(1));
        FailingStore::new(store, move |_| take().is_ok())
    }
}

impl Store for FailingStore {
    fn get(&self, key: &str) -> Result<Option<StoreEntry>, StoreError> {
        if (self.2)(key) { self.0.get(key) } else { Err(StoreError::Full) }
    }

    fn list(&self, prefix: &str) -> Result<(Vec<StoreEntry>, Revision), StoreError> {
        self.0.list(prefix)
    }

    fn page(&self, prefix: &str, after: &str, most: usize) -> Result<Vec<StoreEntry>, StoreError> {
        self.0.page(prefix, after, most)
    }

    fn count(&self, prefix: &str) -> Result<u64, StoreError> {
        self.0.count(prefix)
    }

    fn commit(&self, transaction: &Transaction) -> Result<Revision, StoreError> {
        if (self.1)(transaction) { self.0.commit(transaction) } else { Err(StoreError::Full) }
    }

    fn watch(&self) -> broadcast::Receiver<ChangeNotice> {
        self.0.watch()
    }
}
