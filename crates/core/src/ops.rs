//! Asynchronous operations: what each was for, and who is told when it ends.
//!
//! Invariant: every operation that was started ends exactly once; a second end is a bug and panics.

use crate::disk::Disk;
use crate::error::Errno;
use crate::health;
use crate::io::{Io, OpId, PartId};
use crate::table::{Active, Id, Wait};
use crate::units::{Block, Location, Slot};

/// Asynchronous operations that one request may have under way.
pub(crate) const MAX_PENDING: u32 = 64;
/// With so many under way for all requests together each may have one that reads: an owner that has buffers for fewer at a
/// time is no slower for it, and they take no more memory than the requests themselves. Writes have parts, of which there are
/// few.
const CROWD: usize = 1024;

/// What an operation was for.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Op {
    Free,
    /// Base content for a guest read.
    BaseRead {
        id: Id,
        at: u32,
    },
    /// Overflow content for a guest read: `len` bytes from byte `skip` of the first block on.
    OverflowRead {
        id: Id,
        at: u32,
        block: Block,
        location: Location,
        skip: u32,
        len: u32,
    },
    /// Old content of a block that is written in part.
    Merge(Merge),
    /// The write of a part of the log.
    PartWrite {
        part: PartId,
    },
    /// A write in place of `n` blocks.
    DirectWrite {
        id: Id,
        part: PartId,
        block: Block,
        n: u32,
    },
    /// Discarded blocks leave the difference file.
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
    /// The mark of a reset is set on the medium, or taken off.
    Mark {
        part: PartId,
        set: bool,
    },
    /// All of the difference file is given back: a reset or the drain waits for it.
    EmptyFile,
    /// The barrier behind what a dead process had begun.
    Drain,
    /// An empty segment leaves the file.
    Punch {
        segment: u32,
    },
    /// The collector reads its victim's summary.
    Summary {
        segment: u32,
    },
    /// The collector reads living blocks, `n` from number `first` of its list on.
    Collect {
        part: PartId,
        first: usize,
        n: usize,
    },
}

/// A block that is written in part, while its old content is on its way.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Merge {
    pub id: Id,
    pub block: Block,
    /// The written bytes within the block.
    pub from: u32,
    pub len: u32,
    /// They are `len` bytes of the request's data from here on, or zeroes.
    pub at: Option<u32>,
    /// Where the old content is read from, if not the base image.
    pub location: Option<Location>,
    /// Where the new content goes.
    pub to: MergeTo,
}

#[derive(Clone, Copy, Debug)]
pub(crate) enum MergeTo {
    Slot(Slot),
    Page(PartId, usize),
}

/// The operations under way. Owns their numbers: each names one operation until it has ended.
pub(crate) struct Operations {
    all: Vec<Op>,
    free: Vec<u32>,
}

impl Operations {
    pub fn new() -> Operations {
        Operations { all: Vec::new(), free: Vec::new() }
    }

    /// The number by which this operation is answered.
    pub fn begin(&mut self, op: Op) -> OpId {
        if let Some(i) = self.free.pop() {
            self.all[i as usize] = op;
            return OpId(i);
        }
        self.all.push(op);
        OpId(self.all.len() as u32 - 1)
    }

    /// What it was for. Panics when it has ended before.
    pub fn end(&mut self, op: OpId) -> Op {
        let taken = std::mem::replace(&mut self.all[op.0 as usize], Op::Free);
        assert!(!matches!(taken, Op::Free), "operation {} was done twice", op.0);
        self.free.push(op.0);
        taken
    }

    #[inline]
    pub fn under_way(&self) -> usize {
        self.all.len() - self.free.len()
    }

    /// All of them, and [`Op::Free`] for numbers that are not in use.
    pub fn iter(&self) -> impl Iterator<Item = &Op> {
        self.all.iter()
    }
}

impl Disk {
    /// Whether a request waits for those that it has begun before it begins one more that reads.
    #[inline]
    pub(crate) fn has_begun_enough(&self, a: &Active) -> bool {
        a.pending > 0 && (a.pending >= MAX_PENDING || self.ops.under_way() >= CROWD)
    }

    /// A read has ended: `bytes` is what was asked for, or why it failed.
    pub fn read_done<I: Io>(&mut self, io: &mut I, op: OpId, bytes: Result<&[u8], Errno>) {
        let op = self.ops.end(op);
        let of_base = matches!(op, Op::BaseRead { .. } | Op::Merge(Merge { location: None, .. }));
        if let (Err(errno), false) = (bytes, of_base) {
            health::read_failed(io, self.meta.counters(), errno);
        }
        match op {
            Op::BaseRead { id, at } => self.base_read_done(io, id, at, bytes),
            Op::OverflowRead { id, at, block, location, skip, len } => {
                self.overflow_read_done(io, id, at, block, skip, len, bytes);
                self.unpin(location);
            }
            Op::Merge(merge) => self.merge_done(io, merge, bytes),
            Op::Summary { segment } => self.summary_done(io, segment, bytes),
            Op::Collect { part, first, n } => self.collect_read_done(io, part, first, n, bytes),
            other => panic!("{other:?} is not a read"),
        }
    }

    /// An operation other than a read has ended.
    pub fn op_done<I: Io>(&mut self, io: &mut I, op: OpId, result: Result<(), Errno>) {
        match self.ops.end(op) {
            Op::PartWrite { part } => self.part_written(io, part, result),
            Op::DirectWrite { id, part, block, n } => self.direct_written(io, id, part, block, n, result),
            // A hole that could not be punched costs room, not correctness: the map already says zero.
            Op::DirectPunch { id, sync: false } => self.operation_done(io, id, Ok(())),
            Op::DirectPunch { id, sync: true } => self.sync_in_place(io, id),
            Op::EmptyFile => self.file_emptied_or_not(),
            Op::Drain => self.drained(io, result),
            Op::Sync { id } => self.operation_done(io, id, result),
            Op::RoundSync => self.round_synced(io, result),
            Op::RoundWrite => self.round_written(io, result),
            Op::Mark { part, set } => self.mark_written(io, part, set, result),
            Op::Punch { segment } => self.punched(segment, result),
            other => panic!("{other:?} is a read"),
        }
    }

    /// One of a request's operations has ended.
    pub(crate) fn operation_done<I: Io>(&mut self, io: &mut I, id: Id, result: Result<(), Errno>) {
        let a = self.table.get_mut(id);
        a.pending -= 1;
        if let Err(errno) = result {
            a.errno.get_or_insert(errno);
            if matches!(a.wait, Wait::Room | Wait::Part | Wait::Turn) {
                self.unpark(id);
            }
        }
        let a = self.table.get_mut(id);
        if a.pending == 0 && (a.walked || a.errno.is_some()) {
            let a = *a;
            self.finish(io, &a);
        } else if !a.walked && a.errno.is_none() && a.wait == Wait::Operations && a.pending <= MAX_PENDING / 2
        {
            a.wait = Wait::Nothing;
            let sequence = a.sequence;
            self.runnable.push_back((id, sequence));
        }
    }
}
