//! The store of desired and observed records: an ordered map from keys to JSON, each value with the revision that wrote
//! it.
//!
//! Owns nothing but the contract, which is small enough that etcd can replace the embedded store. Invariant: a
//! transaction happens completely or not at all, with a higher revision than all before it; when `commit` returns, it
//! survives a power loss.

#[cfg(test)]
pub mod failing;
mod reserve;
mod sqlite;
mod typed;

pub use reserve::ReserveState;
pub use sqlite::SqliteStore;
pub use typed::{
    Changes, Object, ObjectPage, Objects, RecordKind, RecordSchema, StoredRecord, Unreadable, schema,
};

use std::path::PathBuf;
use std::sync::Arc;
use tokio::sync::broadcast;

/// Version of the records: of all kinds and all their fields together. It is raised with every change of a stored type (a
/// test in `records.rs` checks that). A store that a later version has written is not opened.
pub const RECORDS_VERSION: u32 = 12;

/// Program that writes records, which the store remembers so that an older program can say what it cannot read.
#[derive(Clone, Copy, Debug)]
pub struct Writer {
    /// Version of the records that the program reads and writes.
    pub records: u32,
    /// Version of the program.
    pub program: &'static str,
}

/// This program.
pub const THIS_WRITER: Writer = Writer { records: RECORDS_VERSION, program: env!("CARGO_PKG_VERSION") };

/// Summary of a backup.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Summary {
    /// Number of records.
    pub records: u64,
    /// Revision of the last transaction.
    pub revision: Revision,
    /// Program that wrote the newest records.
    pub writer: String,
}

/// Number of a transaction; 0 is before the first.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Revision(pub u64);

/// A stored value.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StoreEntry {
    /// Key of the value.
    pub key: String,
    /// The value as JSON.
    pub value: Vec<u8>,
    /// Transaction that wrote it.
    pub revision: Revision,
    /// Version of the records when it was written.
    pub version: u32,
}

/// Condition of a transaction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Expect {
    /// The key does not exist.
    Absent,
    /// The value exists, and this transaction was the last to write it.
    Unchanged(Revision),
}

/// Changes that happen together if their conditions hold.
#[derive(Clone, Debug, Default)]
pub struct Transaction {
    /// Conditions, which are checked first.
    pub expects: Vec<(String, Expect)>,
    /// New values; `None` deletes. If a key occurs twice the last change counts.
    pub changes: Vec<(String, Option<Vec<u8>>)>,
}

/// Error of the store.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    /// A condition does not hold: read again and decide anew.
    #[error("{0} was changed meanwhile")]
    Conflict(String),
    /// A record cannot be read by this program. It is set aside and never changed.
    #[error(
        "the record {key} cannot be read ({why}): it is left as it is, and so is what it is of. {advice}"
    )]
    Unreadable {
        /// Key of the record.
        key: String,
        /// Reason.
        why: String,
        /// What to do.
        advice: String,
    },
    /// A later version of this program has written the store.
    #[error(
        "the records in {path} were written by spillwayd {writer} (version {found} of the records), and this is spillwayd \
         {program}, which reads them up to version {known}: start spillwayd {writer} or a later one, or restore a backup that \
         spillwayd {program} has made ('spillwayd restore')"
    )]
    Newer {
        /// File of the store.
        path: PathBuf,
        /// Program that wrote it last.
        writer: String,
        /// Version of its records.
        found: i64,
        /// This program.
        program: &'static str,
        /// Newest version of the records that it reads.
        known: u32,
    },
    /// A later version of this program has created the file with other tables.
    #[error(
        "{path} has tables of version {found}, and this is spillwayd {program}, which knows version {known}: start the version \
         of spillwayd that made it, or restore a backup ('spillwayd restore')"
    )]
    Tables {
        /// File of the store.
        path: PathBuf,
        /// Version in the file.
        found: i64,
        /// This program.
        program: &'static str,
        /// Newest version that it knows.
        known: i64,
    },
    /// A file is not a complete copy of a store.
    #[error("this is not a whole backup of the records: {why}")]
    Copy {
        /// What is wrong with it.
        why: String,
    },
    /// The file system is full. A reserve exists for transactions that free space; this is none of them, or the reserve
    /// is used up.
    #[error(
        "the file system of the state has no space for another record: make space there. Machines can be stopped and reset, and \
         images, machines and what they have left ('spillway leftover list') deleted"
    )]
    Full,
    /// The medium has failed.
    #[error("the state store failed: {0}")]
    Failed(rusqlite::Error),
}

impl From<rusqlite::Error> for StoreError {
    fn from(error: rusqlite::Error) -> StoreError {
        match error.sqlite_error_code() {
            Some(rusqlite::ErrorCode::DiskFull) => StoreError::Full,
            _ => StoreError::Failed(error),
        }
    }
}

/// Notice of the keys that a transaction has changed or deleted.
#[derive(Clone, Debug)]
pub struct ChangeNotice {
    /// Revision of the transaction.
    pub revision: Revision,
    /// Keys, unordered.
    pub keys: Arc<[String]>,
}

/// The store. All calls may block on the disk; none waits for another process.
pub trait Store: Send + Sync {
    /// Returns the newest value.
    fn get(&self, key: &str) -> Result<Option<StoreEntry>, StoreError>;

    /// Returns all entries with this key prefix, in the order of their keys, at one revision.
    fn list(&self, prefix: &str) -> Result<(Vec<StoreEntry>, Revision), StoreError>;

    /// Returns at most `most` entries with this key prefix and more, after another key, in the order of their keys: a
    /// page of a list that is too long for memory.
    fn page(&self, prefix: &str, after: &str, most: usize) -> Result<Vec<StoreEntry>, StoreError>;

    /// Counts the keys with this prefix.
    fn count(&self, prefix: &str) -> Result<u64, StoreError>;

    /// Commits a transaction if all its conditions hold.
    fn commit(&self, transaction: &Transaction) -> Result<Revision, StoreError>;

    /// Subscribes to all later transactions. A subscriber that falls behind gets an error from the channel and must list
    /// again.
    fn watch(&self) -> broadcast::Receiver<ChangeNotice>;
}
