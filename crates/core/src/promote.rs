//! Promotion: a block that is read from the overflow again and again comes back to the RAM tier.
//!
//! Owns the short memory of what was read lately; never reads for promotion's sake, and takes no slot that a write may
//! need soon. Invariant: what is promoted was just read and found right for a request that still holds the block
//! against every write; the content is in the slot before the one store of the entry.

use crate::counters::add;
use crate::disk::Disk;
use crate::entry::{Entry, Place};
use crate::io::Io;
use crate::spec::Mode;
use crate::units::Block;

/// Reads after which a block comes back, if no other block has taken its cell between them.
const READS: u32 = 3;
/// Slots of the tier to a cell. Fewer would promote blocks of a uniform load, for nothing.
const SLOTS_PER_CELL: u32 = 8;
const MIN_CELLS: u32 = 64;
/// Bits of a cell that count.
const COUNT: u32 = 0b11;

/// Which blocks were read from the overflow lately: in each cell the last one that fell there, and how often.
pub(crate) struct RecentReads {
    /// What the cell's index does not say of the block's hash, and the count. 0: none.
    cells: Vec<u32>,
    bits: u32,
}

impl RecentReads {
    /// For a tier of so many slots.
    pub fn new(slots: u32) -> RecentReads {
        let bits = (slots / SLOTS_PER_CELL).max(MIN_CELLS).ilog2();
        RecentReads { cells: vec![0; 1 << bits], bits }
    }

    /// A block was read. True: often enough; it is forgotten.
    fn count(&mut self, block: Block) -> bool {
        // Odd, so that no two blocks have the same hash.
        let hash = block.0.wrapping_mul(0x9E37_79B1);
        let cell = &mut self.cells[(hash >> (u32::BITS - self.bits)) as usize];
        let tag = hash << self.bits;
        let reads = if *cell & !COUNT == tag { (*cell & COUNT) + 1 } else { 1 };
        *cell = if reads < READS { tag | reads } else { 0 };
        reads == READS
    }
}

impl Disk {
    /// A block was read from the overflow, `content`, and found right. Takes a slot only while more than half of those
    /// that eviction keeps free are: the rest is for writes, and eviction replaces what is taken by colder blocks.
    pub(crate) fn promote<I: Io>(&mut self, io: &mut I, block: Block, content: &[u8]) {
        if self.spec.mode != Mode::RamOverflow
            || self.ram.free() <= self.free_target().div_ceil(2)
            || self.wants_room()
            || self.health.rests(self.now_ns)
            // Another read may have brought it back while this one was under way.
            || !matches!(self.place(block), Place::Overflow(..))
            || !self.recent_reads.count(block)
        {
            return;
        }
        let Some(slot) = self.ram.allocate(io, &self.meta) else { return };
        io.slot(slot).copy_from_slice(content);
        self.ram.own(slot, block);
        self.commit(block, Entry::ram(slot));
        add(&self.counters().promoted_blocks, 1);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_block_counts_until_another_takes_its_cell() {
        let mut recent = RecentReads::new(0);
        // Of as many blocks as cells and more, some share one.
        let cell = |b: u32| b.wrapping_mul(0x9E37_79B1) >> 26;
        let (a, b) = (Block(0), (1..).map(Block).find(|b| cell(b.0) == cell(0)).expect("64 cells"));
        assert_eq!([a, a, a, a, a, a].map(|x| recent.count(x)), [false, false, true, false, false, true]);
        assert_eq!([a, a, b, a, a, a].map(|x| recent.count(x)), [false, false, false, false, false, true]);
    }
}
