//! What is wanted and what is: an ordered map from keys to JSON, each value with the revision that wrote it.
//!
//! Owns nothing but the contract, which is small enough that etcd can stand in for the embedded store. Invariant:
//! a transaction happens whole or not at all, and its revision is higher than that of every one before it; when
//! `commit` returns, it survives power loss.

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

/// The version of the records: all kinds together, with every field of each. It moves with every change to a type that is
/// stored (`records.rs` has the test that says so). A store that a later version has written is not opened.
pub const RECORDS_VERSION: u32 = 4;

/// Who writes records: kept in the store, so that an older program can say what it cannot read.
#[derive(Clone, Copy, Debug)]
pub struct Writer {
    /// The version of the records that it reads and writes.
    pub records: u32,
    /// The version of the program.
    pub program: &'static str,
}

/// This program.
pub const THIS_WRITER: Writer = Writer { records: RECORDS_VERSION, program: env!("CARGO_PKG_VERSION") };

/// What a copy has.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Summary {
    /// How many records.
    pub records: u64,
    /// The last transaction.
    pub revision: Revision,
    /// The program that wrote the newest of them.
    pub writer: String,
}

/// Counts transactions. 0 is before the first.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Revision(pub u64);

/// A value as it is stored.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StoreEntry {
    /// Where.
    pub key: String,
    /// JSON.
    pub value: Vec<u8>,
    /// The transaction that wrote it.
    pub revision: Revision,
    /// The version of the records that wrote it.
    pub version: u32,
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
    /// A record is not what this program writes: it is set aside, and nothing changes it.
    #[error(
        "the record {key} cannot be read ({why}): it is left as it is, and so is what it is of. {advice}"
    )]
    Unreadable {
        /// Where.
        key: String,
        /// Why.
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
        /// The file.
        path: PathBuf,
        /// The program that wrote it last.
        writer: String,
        /// The version of its records.
        found: i64,
        /// This program.
        program: &'static str,
        /// The version of the records that it reads.
        known: u32,
    },
    /// A later version of this program has made the file with other tables.
    #[error(
        "{path} has tables of version {found}, and this is spillwayd {program}, which knows version {known}: start the version \
         of spillwayd that made it, or restore a backup ('spillwayd restore')"
    )]
    Tables {
        /// The file.
        path: PathBuf,
        /// What the file says.
        found: i64,
        /// This program.
        program: &'static str,
        /// What it knows.
        known: i64,
    },
    /// A file is no copy of a store, or not a whole one.
    #[error("this is not a whole backup of the records: {why}")]
    Copy {
        /// What is wrong with it.
        why: String,
    },
    /// The medium has no room. Room for what frees some is kept in reserve, and this is none of it, or that is used up.
    #[error(
        "the file system of the state has no room for another record: make room there. Machines can be stopped and reset, and \
         images, machines and what they have left ('spillway leftover list') deleted"
    )]
    Full,
    /// The medium.
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

/// Says which keys a transaction has changed or deleted.
#[derive(Clone, Debug)]
pub struct ChangeNotice {
    /// The transaction.
    pub revision: Revision,
    /// In no order.
    pub keys: Arc<[String]>,
}

/// The store. All calls may wait for the disk; none waits for another process.
pub trait Store: Send + Sync {
    /// The newest value.
    fn get(&self, key: &str) -> Result<Option<StoreEntry>, StoreError>;

    /// All whose key begins so, in the order of their keys, as they were at one revision.
    fn list(&self, prefix: &str) -> Result<(Vec<StoreEntry>, Revision), StoreError>;

    /// The first of those whose key begins so and is longer, and comes after another key; `most` of them at most, in the
    /// order of their keys: a page of a list that is too long to be held.
    fn page(&self, prefix: &str, after: &str, most: usize) -> Result<Vec<StoreEntry>, StoreError>;

    /// How many have a key that begins so.
    fn count(&self, prefix: &str) -> Result<u64, StoreError>;

    /// Carries a transaction out if everything is as it expects.
    fn commit(&self, transaction: &Transaction) -> Result<Revision, StoreError>;

    /// Every transaction from now on. Who falls behind is told so by the channel and lists again.
    fn watch(&self) -> broadcast::Receiver<ChangeNotice>;
}
