//! The asynchronous operations in flight, with what each is for.
//!
//! Invariant: every operation that was started ends exactly once; a second end is a bug and panics.

use crate::io::{OpId, PartId};
use crate::table::Id;
use spillway_layout::{Block, Location, Slot};

/// The purpose of an operation.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Op {
    Free,
    /// A read whose request did not wait for its end ([`Operations::abandon`]).
    Abandoned,
    /// Base content for a guest read.
    BaseRead {
        id: Id,
        at: u32,
    },
    /// Overflow content for a guest read.
    OverflowRead(OverflowRead),
    /// Old content of a block that is written in part.
    Merge(Merge),
    /// The write of a part of the log.
    PartWrite {
        part: PartId,
    },
    /// A write in place.
    DirectWrite(DirectWrite),
    /// A punch of discarded blocks out of the difference file.
    DirectPunch {
        id: Id,
        sync: bool,
    },
    /// FLUSH of the difference file.
    Sync {
        id: Id,
    },
    /// An fdatasync of a round of FLUSH, and a write of pages of the durable map (mode `persistent`).
    RoundSync,
    RoundWrite,
    /// A write that sets the mark of a reset on the medium, or removes it.
    Mark {
        part: PartId,
        set: bool,
    },
    /// The difference file is emptied: a reset or the drain waits for it.
    EmptyFile,
    /// The barrier for I/O of a dead process.
    Drain,
    /// A punch of an empty segment out of the file.
    Punch {
        segment: u32,
    },
    /// The collector reads its victim's summary.
    Summary {
        segment: u32,
    },
    /// The collector reads live blocks.
    Collect(CollectRead),
}

/// A guest read of adjacent blocks of the overflow: `len` bytes from byte `skip` of the first block on, for byte `at` of the
/// request's data.
#[derive(Clone, Copy, Debug)]
pub(crate) struct OverflowRead {
    pub id: Id,
    pub at: u32,
    pub block: Block,
    pub location: Location,
    pub skip: u32,
    pub len: u32,
}

/// A write in place of `n` blocks, from pages of a part.
#[derive(Clone, Copy, Debug)]
pub(crate) struct DirectWrite {
    pub id: Id,
    pub part: PartId,
    pub block: Block,
    pub n: u32,
}

/// A read of `n` of the collector's blocks from number `first` of its list on, for a part.
#[derive(Clone, Copy, Debug)]
pub(crate) struct CollectRead {
    pub part: PartId,
    pub first: usize,
    pub n: usize,
}

/// A block that is written in part, while its old content is being read.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Merge {
    pub id: Id,
    pub block: Block,
    /// The written bytes within the block.
    pub from: u32,
    pub len: u32,
    /// Where these bytes begin in the request's data; `None`: they are zeroes.
    pub at: Option<u32>,
    /// Where the old content is read from, if not the base image.
    pub location: Option<Location>,
    /// Where the new content goes.
    pub to: MergeTo,
}

impl Merge {
    /// Bytes of the request's data that it stores.
    pub fn guest_bytes(&self) -> u32 {
        if self.at.is_some() { self.len } else { 0 }
    }
}

#[derive(Clone, Copy, Debug)]
pub(crate) enum MergeTo {
    Slot(Slot),
    Page(PartId, usize),
}

/// The operations in flight. Owns their numbers: each names one operation until it has ended.
pub(crate) struct Operations {
    all: Vec<Op>,
    free: Vec<u32>,
    /// How many of them are [`Op::Abandoned`].
    abandoned: usize,
}

impl Operations {
    pub fn new() -> Operations {
        Operations { all: Vec::new(), free: Vec::new(), abandoned: 0 }
    }

    /// Registers an operation. Returns the number by which it is answered.
    pub fn begin(&mut self, op: Op) -> OpId {
        if let Some(i) = self.free.pop() {
            self.all[i as usize] = op;
            return OpId(i);
        }
        self.all.push(op);
        OpId(self.all.len() as u32 - 1)
    }

    /// Ends an operation and returns what it was for. Panics if it has ended before.
    pub fn end(&mut self, op: OpId) -> Op {
        let taken = std::mem::replace(&mut self.all[op.0 as usize], Op::Free);
        assert!(!matches!(taken, Op::Free), "operation {} was done twice", op.0);
        self.free.push(op.0);
        self.abandoned -= usize::from(matches!(taken, Op::Abandoned));
        taken
    }

    /// Takes what a read was for from it. Its number stays in use until it has ended.
    pub fn abandon(&mut self, op: OpId) -> Op {
        self.abandoned += 1;
        std::mem::replace(&mut self.all[op.0 as usize], Op::Abandoned)
    }

    /// The number of those that have not ended.
    pub fn abandoned(&self) -> usize {
        self.abandoned
    }

    /// The reads of the base image for requests: whose, and their numbers, those of a request together.
    pub fn base_reads(&self) -> Vec<(Id, OpId)> {
        let of = |op: &Op| match *op {
            Op::BaseRead { id, .. } | Op::Merge(Merge { id, location: None, .. }) => Some(id),
            _ => None,
        };
        let mut reads: Vec<_> = (0..).zip(&self.all).filter_map(|(n, op)| Some((of(op)?, OpId(n)))).collect();
        reads.sort_unstable_by_key(|&(id, op)| (id, op.0));
        reads
    }

    /// The number of those whose end is waited for.
    #[inline]
    pub fn in_flight(&self) -> usize {
        self.all.len() - self.free.len() - self.abandoned
    }

    /// All of them, and [`Op::Free`] for numbers that are not in use.
    pub fn iter(&self) -> impl Iterator<Item = &Op> {
        self.all.iter()
    }
}
