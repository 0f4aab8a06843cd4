//! The policy of the RAM tier: which block is evicted, which is promoted, and when.
//!
//! Pure arithmetic, run by the disk on all its blocks and by the advisor on a sample of them: counts of slots and blocks can be
//! scaled. Owns the constants; holds no block. Invariant: decisions on a sample of all blocks are those of the disk, scaled.
//! Why these rules: `docs/design/003-eviction.md`.

/// The most slots that eviction keeps free: 64 MiB.
pub const MOST_KEPT_FREE: u64 = 16 * 1024;

/// Slots that eviction keeps free in a tier of `limit` slots: a tenth, at least 1.
pub fn kept_free(limit: u64) -> u64 {
    (limit / 10).clamp(1, MOST_KEPT_FREE)
}

/// Parts of eviction in flight while enough of the reserve is free: one that is written and one that is filled. More of them,
/// with 16 requests in flight, make nothing faster and let reads wait longer.
const WRITE_DEPTH: usize = 2;

/// The free slots that eviction keeps in a RAM tier, and how many blocks it evicts at a time.
#[derive(Clone, Copy, Debug)]
pub struct Reserve {
    limit: u32,
    kept_free: u32,
    batch: u32,
}

impl Reserve {
    /// For a tier of `limit` slots, from which blocks are evicted in parts of at most `part_blocks`.
    pub fn of(limit: u32, part_blocks: u32) -> Reserve {
        let kept_free = kept_free(limit.into()) as u32;
        Reserve { limit, kept_free, batch: (kept_free / 4).clamp(1, part_blocks) }
    }

    /// The reserve for a sample of this share of the blocks; each number is at least 1.
    #[must_use]
    pub fn scaled(self, share: f64) -> Reserve {
        let scaled = |n: u32| ((f64::from(n) * share).round() as u32).max(1);
        Reserve { limit: scaled(self.limit), kept_free: scaled(self.kept_free), batch: scaled(self.batch) }
    }

    /// Slots of the tier.
    pub fn limit(&self) -> u32 {
        self.limit
    }

    /// Slots that eviction keeps free.
    pub fn kept_free(&self) -> u32 {
        self.kept_free
    }

    /// Blocks that are evicted at a time.
    pub fn batch(&self) -> u32 {
        self.batch
    }

    /// Whether a batch is to be evicted when so many blocks are not being evicted yet: without the batch as many slots are free
    /// as are kept free.
    pub fn must_evict(&self, staying: u32) -> bool {
        staying >= self.limit.saturating_sub(self.kept_free) + self.batch
    }

    /// Whether a block that was read may be promoted when so many slots are free: more than half of those that eviction keeps
    /// free. The others are for writes.
    pub fn may_promote(&self, free: u32) -> bool {
        free > self.kept_free.div_ceil(2)
    }

    /// Parts that may be in flight when so many slots are in use: one more below a quarter of the reserve, and another below an
    /// eighth, as writers are faster than one eviction write at a time then.
    pub fn write_depth(&self, used: u32) -> usize {
        let free = self.limit.saturating_sub(used);
        WRITE_DEPTH + usize::from(free < self.kept_free / 4) + usize::from(free < self.kept_free / 8)
    }
}

/// The most uses of a block that are counted.
pub const MAX_FREQUENCY: u8 = 3;
/// The most slots that the hand visits in one call: well below a millisecond.
pub const HAND_STEPS: u32 = 16 * 1024;

/// The hand of the CLOCK algorithm. A block enters with a frequency of 0 and gains one by each later use. The hand takes one away
/// at each visit, and picks blocks at 0. A block that is used once, as by a scan, is evicted after one turn of the hand; a block
/// that is used again stays.
#[derive(Clone, Copy, Debug, Default)]
pub struct ClockHand(u32);

/// The outcome of the hand's visit to a slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Visit {
    /// The slot has no block that can be evicted.
    Skipped,
    /// The block had been used: its frequency is one less now.
    Cooled,
    /// The block is cold and was picked for eviction.
    Picked,
}

impl ClockHand {
    /// Moves on over the first `slots` slots until `most` blocks are picked or `steps` slots were visited; then fewer are picked,
    /// or none. Calls `visit` for each slot.
    #[inline]
    pub fn advance(&mut self, slots: u32, most: usize, steps: u32, mut visit: impl FnMut(u32) -> Visit) {
        let mut left = steps.min(slots.saturating_mul(u32::from(MAX_FREQUENCY) + 1));
        let mut picked = 0;
        while picked < most && left > 0 {
            left -= 1;
            if self.0 >= slots {
                self.0 = 0;
            }
            let slot = self.0;
            self.0 += 1;
            picked += usize::from(visit(slot) == Visit::Picked);
        }
    }
}

/// Reads after which a block is promoted, if no other block has taken its cell between them.
const READS: u32 = 3;
/// Slots of the tier for each cell. More cells would promote blocks of a uniform load, for nothing.
const SLOTS_PER_CELL: u64 = 8;
const MIN_CELLS: u64 = 64;
/// The bits of a cell that hold the count of reads.
const COUNT: u32 = 0b11;

/// The blocks that were read from the overflow recently: each cell has the last block that was mapped to it, and how often that
/// was read.
#[derive(Clone, Debug)]
pub struct RecentReads {
    /// The bits of the block's hash that do not follow from the cell's index, and the count. 0: no block.
    cells: Vec<u32>,
}

impl RecentReads {
    /// For a tier of `slots` slots, and a sample of this share of the blocks.
    pub fn new(slots: u64, share: f64) -> RecentReads {
        let cells = 1_u64 << (slots / SLOTS_PER_CELL).max(MIN_CELLS).ilog2();
        RecentReads { cells: vec![0; ((cells as f64 * share).round() as usize).max(1)] }
    }

    /// Counts a read of a block. True: it was read often enough to be promoted, and its count starts anew.
    #[inline]
    pub fn count(&mut self, block: u32) -> bool {
        // Odd, so that no two blocks have the same hash.
        let hash = block.wrapping_mul(0x9E37_79B1);
        // The upper half of the product is the cell, the lower one identifies the block: with a power of two of cells they are
        // the hash's own bits.
        let product = u64::from(hash) * self.cells.len() as u64;
        let (cell, tag) = ((product >> 32) as usize, product as u32 & !COUNT);
        let cell = &mut self.cells[cell];
        let reads = if *cell & !COUNT == tag { (*cell & COUNT) + 1 } else { 1 };
        *cell = if reads < READS { tag | reads } else { 0 };
        reads == READS
    }

    /// Memory of the filter, in bytes.
    pub fn bytes(&self) -> usize {
        self.cells.capacity() * size_of::<u32>()
    }

    /// Forgets all reads.
    pub fn clear(&mut self) {
        self.cells.fill(0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_block_counts_until_another_takes_its_cell() {
        let mut recent = RecentReads::new(0, 1.0);
        // Of as many blocks as cells and more, some share one.
        let cell = |b: u32| b.wrapping_mul(0x9E37_79B1) >> 26;
        let (a, b) = (0, (1..).find(|&b| cell(b) == cell(0)).expect("64 cells"));
        assert_eq!([a, a, a, a, a, a].map(|x| recent.count(x)), [false, false, true, false, false, true]);
        assert_eq!([a, a, b, a, a, a].map(|x| recent.count(x)), [false, false, false, false, false, true]);
    }

    #[test]
    fn the_hand_picks_cold_blocks_and_ends() {
        let mut frequency = [0_u8, 2, 0, 1];
        let mut hand = ClockHand::default();
        let mut order = Vec::new();
        hand.advance(4, 4, 100, |slot| match &mut frequency[slot as usize] {
            0 => {
                order.push(slot);
                Visit::Picked
            }
            n => {
                *n -= 1;
                Visit::Cooled
            }
        });
        assert_eq!(order, [0, 2, 0, 2]);
        let mut passed = 0;
        hand.advance(4, 1, 100, |_| {
            passed += 1;
            Visit::Skipped
        });
        assert_eq!(passed, 16, "each slot as often as a block can be warm, and once more");
    }

    #[test]
    fn a_tier_of_one_slot_evicts_its_block() {
        let reserve = Reserve::of(1, 48);
        assert_eq!((reserve.kept_free(), reserve.batch()), (1, 1));
        assert!(reserve.must_evict(1) && !reserve.must_evict(0));
    }
}
