//! The state that both engines work with: the block map, the requests, the operations in flight, and the health of the overflow.
//!
//! Owns the steps that both engines have in common. Invariant: nothing here calls an engine or another part.

use crate::admission::{Admission, MAX_PENDING};
use crate::drain::Drain;
use crate::entry::Place;
use crate::error::Errno;
use crate::health::OverflowHealth;
use crate::io::Io;
use crate::map::BlockMap;
use crate::ops::{Merge, MergeTo, Op, Operations};
use crate::table::{Active, Id};
use spillway_layout::{BLOCK_BYTES, Block, Counters, DiskSpec, SECTOR_BYTES, add, set};

const BLOCK: u32 = BLOCK_BYTES as u32;
/// Bytes of one asynchronous read at most. A read of the base image stays within an aligned piece of that size: it needs one
/// chunk of an image, never two.
pub(crate) const RUN_BYTES: u32 = 256 * 1024;
/// The number of operations in flight from which on each request may have only one that reads. An owner has buffers for fewer
/// at a time, so this costs no speed, and the operations take no more memory than the requests. Writes are limited by parts.
const CROWD: usize = 1024;

/// The piece of a request that lies in one block.
#[derive(Clone, Copy)]
pub(crate) struct Piece {
    pub block: Block,
    /// First byte within the block.
    pub from: u32,
    pub len: u32,
    /// It covers all of the block that lies on the disk.
    pub whole: bool,
}

pub(crate) struct Shared {
    pub spec: DiskSpec,
    pub map: BlockMap,
    pub admission: Admission,
    pub ops: Operations,
    pub health: OverflowHealth,
    pub drain: Drain,
    /// A reset waits for the operations in flight.
    pub resetting: bool,
    /// No more requests come.
    pub winding_down: bool,
}

impl Shared {
    #[inline]
    pub fn counters(&self) -> &Counters {
        self.map.counters()
    }

    #[inline]
    pub fn now_ns(&self) -> u64 {
        self.admission.now_ns()
    }

    #[inline]
    pub fn piece(&self, a: &Active) -> Piece {
        let position = a.request.sector * SECTOR_BYTES + u64::from(a.at);
        let block = Block((position / u64::from(BLOCK)) as u32);
        let from = (position % u64::from(BLOCK)) as u32;
        let len = (a.len() - a.at).min(BLOCK - from);
        Piece { block, from, len, whole: from == 0 && (len == BLOCK || len == self.map.block_len(block)) }
    }

    /// Publishes the limits as gauges.
    pub fn publish_limits(&self) {
        let (spec, c) = (&self.spec, self.counters());
        set(&c.ram_limit_bytes, u64::from(spec.slots()) * BLOCK_BYTES as u64);
        set(&c.overflow_limit_bytes, u64::from(spec.segments()) * spec.segment_bytes());
    }

    /// Whether a request waits for the operations that it has begun before it begins one more that reads.
    #[inline]
    pub fn has_begun_enough(&self, a: &Active) -> bool {
        a.pending > 0 && (a.pending >= MAX_PENDING || self.ops.in_flight() >= CROWD)
    }

    /// Whether nothing may be written to the overflow yet, because of errors.
    #[inline]
    pub fn overflow_is_backing_off(&self) -> bool {
        self.health.is_backing_off(self.now_ns())
    }

    pub fn write_failed<I: Io>(&mut self, io: &mut I, errno: Errno) {
        let now_ns = self.now_ns();
        self.health.write_failed(io, self.map.counters(), now_ns, errno);
    }

    pub fn write_succeeded<I: Io>(&mut self, io: &mut I) {
        self.health.write_succeeded(io, self.map.counters());
    }

    /// How many of the `most` bytes from byte `within` of `block` on lie in blocks that `same` accepts.
    #[inline]
    pub fn run_len(
        &self,
        block: Block,
        within: u32,
        most: u32,
        budget: &mut u32,
        same: impl Fn(Place, u32) -> bool,
    ) -> u32 {
        let mut n = most.min(BLOCK - within);
        *budget -= 1;
        let mut i = 1;
        while n < most && *budget > 0 && same(self.map.place(Block(block.0 + i)), i) {
            n = most.min(n + BLOCK);
            i += 1;
            *budget -= 1;
        }
        n
    }

    /// Serves `n` bytes at the request's place that are zeroes.
    pub fn read_zero<I: Io>(&self, io: &mut I, a: &Active, n: u32) -> Result<(), Errno> {
        self.counters().zero.read(u64::from(n));
        io.zero_guest(a.request.token, a.at, n)
    }

    /// Serves bytes at the request's place that the base image has, or that lie behind its end in its last block: at most
    /// `run`. Returns how many.
    pub fn read_base<I: Io>(&mut self, io: &mut I, a: &mut Active, run: u32) -> (u32, Result<(), Errno>) {
        let position = a.request.sector * SECTOR_BYTES + u64::from(a.at);
        let left = self.spec.base_bytes.saturating_sub(position);
        let n = u32::try_from(left).unwrap_or(u32::MAX).min(run);
        if n == 0 {
            return (run, self.read_zero(io, a, run));
        }
        self.counters().base.read(u64::from(n));
        let result = io.base_to_guest(a.request.token, a.at, position, n).unwrap_or_else(|| {
            let id = self.admission.begin_operation(a);
            let op = self.ops.begin(Op::BaseRead { id, at: a.at });
            io.read_base(op, position, n);
            Ok(())
        });
        (n, result)
    }

    pub fn base_read_done<I: Io>(&mut self, io: &mut I, id: Id, at: u32, bytes: Result<&[u8], Errno>) {
        let token = self.admission.token(id);
        let result = bytes.and_then(|bytes| io.copy_to_guest(token, at, bytes));
        self.admission.operation_done(id, result);
    }

    /// Reads the old content, which is at `old`, of a block that is written in part. What lies in a log was pinned before.
    pub fn begin_merge<I: Io>(&mut self, io: &mut I, mut merge: Merge, old: Place) {
        let block = merge.block;
        if let Place::Overflow(location, _) = old {
            merge.location = Some(location);
            self.counters().overflow.read(u64::from(BLOCK));
            add(&self.counters().merges_overflow_bytes, u64::from(BLOCK));
            let op = self.ops.begin(Op::Merge(merge));
            io.read_overflow(op, location.offset_bytes(), BLOCK);
        } else {
            let len = (self.spec.base_bytes - block.offset_bytes()).min(u64::from(BLOCK)) as u32;
            self.counters().base.read(u64::from(len));
            add(&self.counters().merges_base_bytes, u64::from(len));
            let op = self.ops.begin(Op::Merge(merge));
            io.read_base(op, block.offset_bytes(), len);
        }
    }

    /// Puts the old content of a partly written block, which has been read, where the new content will be, and the new bytes
    /// over it.
    pub fn merge_content<I: Io>(&self, io: &mut I, merge: &Merge, bytes: &[u8]) -> Result<(), Errno> {
        let (from, len) = (merge.from as usize, merge.len as usize);
        let content = match merge.to {
            MergeTo::Slot(slot) => io.slot(slot),
            MergeTo::Page(part, page) => &mut io.part(part)[page * BLOCK_BYTES..][..BLOCK_BYTES],
        };
        content[..bytes.len()].copy_from_slice(bytes);
        content[bytes.len()..].fill(0);
        let token = self.admission.token(merge.id);
        match (merge.at, merge.to) {
            (None, _) => content[from..from + len].fill(0),
            (Some(at), MergeTo::Slot(slot)) => _ = io.guest_to_slot(token, at, slot, from, len)?,
            (Some(at), MergeTo::Page(part, page)) => {
                io.guest_to_part(token, at, part, page * BLOCK_BYTES + from, len)?;
            }
        }
        Ok(())
    }
}
