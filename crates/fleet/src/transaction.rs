//! Transactions on the records of a fleet: comparisons, and what is written if they all hold. Owns their limits.
//!
//! Invariant: a transaction writes each key once, and has at most [`MOST_OPERATIONS`] comparisons and writes each, so that every etcd takes it
//! (its `--max-txn-ops` is 128 by default).

use crate::keys::Key;

/// Most comparisons, and most writes, of a transaction.
pub const MOST_OPERATIONS: usize = 128;

/// A revision of the records. 0 stands for a key that is not there.
pub type Revision = i64;

/// Changes that are made together, or not at all.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Transaction {
    /// What must hold.
    pub comparisons: Vec<Comparison>,
    /// What is written then.
    pub writes: Vec<Write>,
}

/// What must hold for a transaction.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Comparison {
    /// The key was created at this revision; 0: it is not there.
    Created(Key, Revision),
    /// The key was last written at this revision; 0: it is not there.
    Modified(Key, Revision),
}

/// A write of a transaction.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Write {
    /// Writes a record.
    Put(Key, Vec<u8>),
    /// Writes a record that goes when the lease of this host ends.
    PutWithLease(Key, Vec<u8>),
    /// Deletes a record, if it is there.
    Delete(Key),
}

impl Write {
    /// Key of the record.
    pub fn key(&self) -> &Key {
        let (Write::Put(key, _) | Write::PutWithLease(key, _) | Write::Delete(key)) = self;
        key
    }
}

/// How a transaction has ended. If no answer came, neither is known: what the records become tells.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// All was written, at this revision.
    Applied(Revision),
    /// Nothing was written: a comparison did not hold.
    Conflict,
}
