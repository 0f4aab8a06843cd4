//! What is wanted and what is: an ordered map from keys to JSON, each value with the revision that wrote it.
//!
//! Owns nothing but the contract, which is small enough that etcd can stand in for the embedded store. Invariant:
//! a transaction happens whole or not at all, and its revision is higher than that of every one before it; when
//! `commit` returns, it survives power loss.

mod sqlite;
mod typed;

pub use sqlite::SqliteStore;
pub use typed::{Changes, Kind, Object, Objects};

use std::sync::Arc;
use tokio::sync::broadcast;

/// Counts transactions. 0 is before the first.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Revision(pub u64);

/// A value as it is stored.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Entry {
    /// Where.
    pub key: String,
    /// JSON.
    pub value: Vec<u8>,
    /// The transaction that wrote it.
    pub revision: Revision,
}

/// What must be so for a transaction to happen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Expect {
    /// There is no such key.
    Absent,
    /// The value is there and was written by this transaction: nobody has changed it since.
    Unchanged(Revision),
}

/// Changes that happen together, if what they were decided on still holds.
#[derive(Clone, Debug, Default)]
pub struct Transaction {
    /// Looked at first.
    pub expects: Vec<(String, Expect)>,
    /// A value, or none to delete. Of one key the last counts.
    pub changes: Vec<(String, Option<Vec<u8>>)>,
}

/// Why something of the store could not be had.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    /// Somebody was faster: look again and decide anew.
    #[error("{0} was changed by somebody else meanwhile")]
    Conflict(String),
    /// What is stored is not what this program writes.
    #[error("{key}: what is stored cannot be read: {source}")]
    Damaged {
        /// Where.
        key: String,
        /// Why.
        source: serde_json::Error,
    },
    /// Another version of this program has written it.
    #[error(
        "the state store has layout {found}, and this program knows {known}: start the version that made it"
    )]
    Version {
        /// What the file says.
        found: i64,
        /// What is understood.
        known: i64,
    },
    /// The medium.
    #[error("the state store failed: {0}")]
    Failed(#[from] rusqlite::Error),
}

/// Says which keys a transaction has changed or deleted.
#[derive(Clone, Debug)]
pub struct Changed {
    /// The transaction.
    pub revision: Revision,
    /// In no order.
    pub keys: Arc<[String]>,
}

/// The store. All calls may wait for the disk; none waits for another process.
pub trait Store: Send + Sync {
    /// The newest value.
    fn get(&self, key: &str) -> Result<Option<Entry>, StoreError>;

    /// All whose key begins so, in the order of their keys, as they were at one revision.
    fn list(&self, prefix: &str) -> Result<(Vec<Entry>, Revision), StoreError>;

    /// The first of those whose key begins so and is longer, and comes after another key; `most` of them at most, in the
    /// order of their keys: a page of a list that is too long to be held.
    fn page(&self, prefix: &str, after: &str, most: usize) -> Result<Vec<Entry>, StoreError>;

    /// How many have a key that begins so.
    fn count(&self, prefix: &str) -> Result<u64, StoreError>;

    /// Carries a transaction out if everything is as it expects.
    fn commit(&self, transaction: &Transaction) -> Result<Revision, StoreError>;

    /// Every transaction from now on. Who falls behind is told so by the channel and lists again.
    fn watch(&self) -> broadcast::Receiver<Changed>;
}
