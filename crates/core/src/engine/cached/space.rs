//! The space of the log: how many live blocks it may hold, how much of the file it may use, the reserve, and when free
//! segments run short.
//!
//! Owns the arithmetic of the limit; never touches a block. Invariant: the file holds at most
//! `ceiling` segments. That is the limit, but after the limit was lowered it comes down step by step, as the
//! collector empties segments and they are punched out. The limit counts segments in the file, whatever their
//! index.

use crate::engine::cached::log::{COLLECTOR_OWN, Log};
use crate::meta::Meta;

/// Segments whose blocks cannot be used for live blocks: two open segments, the collector's own, and some for collection.
pub(super) const MIN_RESERVE: u32 = 8;
/// More segments than usual that the collector keeps free while the file must shrink.
const TO_PUNCH: u32 = 2;

fn reserve(total: u32) -> u32 {
    MIN_RESERVE.max(total / 20)
}

impl Log {
    /// Live blocks that so many segments may hold: those beyond the reserve, without which collection would free nothing.
    pub fn capacity_of(&self, total: u32) -> u64 {
        u64::from(total.saturating_sub(reserve(total))) * u64::from(self.data_blocks())
    }

    /// Live blocks that the log may hold.
    pub fn capacity(&self) -> u64 {
        self.capacity_of(self.total)
    }

    /// Whether it holds more than its capacity: one block more, for a write that is to replace another.
    pub fn is_over(&self) -> bool {
        self.live() + self.arriving > self.capacity()
    }

    /// Blocks that may still be added.
    pub fn space(&self) -> u64 {
        self.capacity().saturating_sub(self.live() + self.arriving)
    }

    /// Segments in the file.
    pub fn in_file(&self) -> u32 {
        self.segments.len() - self.punched.len() as u32
    }

    /// Blocks of the file that segments take up, live or not.
    pub fn file_blocks(&self) -> u64 {
        u64::from(self.in_file()) * u64::from(self.shape.segment_blocks)
    }

    /// The most blocks that segments may take up for now.
    pub fn most_file_blocks(&self) -> u64 {
        u64::from(self.ceiling) * u64::from(self.shape.segment_blocks)
    }

    /// Free segments that the file holds.
    pub fn empties(&self) -> u32 {
        (self.empty.len() + self.doubtful.len()) as u32
    }

    /// Segments that can be opened.
    pub fn free_segments(&self) -> u32 {
        self.empties() + (self.ceiling - self.in_file())
    }

    /// Free segments below which the collector works.
    fn enough_free(&self) -> u32 {
        (reserve(self.total) / 4).max(COLLECTOR_OWN + 2)
    }

    /// Segments that the file must shrink to: the limit, unless it has more live blocks already when a process attaches.
    fn target(&self) -> u32 {
        let all = self.live() + self.arriving;
        if all <= self.capacity() {
            return self.total;
        }
        let full = all.div_ceil(self.data_blocks().into()) as u32;
        self.total.max(full + MIN_RESERVE.max(full / 19 + 1))
    }

    /// Whether free segments run short, so that collection is needed. The rest of the reserve stays spread over the segments as dead
    /// blocks: the more of them the emptiest holds, the fewer blocks must move.
    pub fn wants_collection(&self) -> bool {
        let more = if self.ceiling > self.target() { TO_PUNCH } else { 0 };
        self.free_segments() + self.punching < self.enough_free() + more
    }

    /// Whether the file must shrink, and there is an empty segment to spare.
    pub fn must_punch(&self) -> bool {
        self.ceiling > self.target() && self.empties() > 0 && self.free_segments() > self.enough_free()
    }

    /// Empty segments beyond those that are kept for reuse (`all`: those too).
    pub fn has_to_punch(&self, all: bool) -> bool {
        const KEEP_EMPTY: u32 = 4;
        self.empties() > if all { 0 } else { KEEP_EMPTY }
    }

    /// Lowers the ceiling to the limit, as far as the file allows.
    pub fn lower_ceiling(&mut self, meta: &Meta) {
        let spare = self.free_segments().saturating_sub(self.enough_free());
        let above = self.ceiling.saturating_sub(self.target());
        let lower = above.min(self.ceiling - self.in_file()).min(spare);
        if lower > 0 {
            self.ceiling -= lower;
            meta.set_ceiling(self.ceiling);
        }
    }

    /// When attaching: takes over the ceiling of the process before, or more if the file holds more.
    pub fn adopt_ceiling(&mut self, meta: &Meta) {
        self.ceiling = self.total.max(meta.ceiling()).max(self.in_file());
        meta.set_ceiling(self.ceiling);
    }

    /// Sets how many segments the file may hold. The live blocks and the reserve must fit in them. A larger number counts at
    /// once, a smaller one as soon as the file has shrunk to it.
    pub fn set_total(&mut self, total: u32, meta: &Meta) {
        self.total = total;
        self.ceiling = self.ceiling.max(total);
        meta.set_ceiling(self.ceiling);
        self.lower_ceiling(meta);
    }
}
