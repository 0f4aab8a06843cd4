//! Which block leaves the RAM tier, which comes back, and when.
//!
//! Pure arithmetic, run by the disk on all its blocks and by the advisor on a sample of them: what counts slots or blocks can be
//! scaled. Owns the constants; holds no block. Invariant: a sample of all blocks decides as the disk does.
//! Why these rules: `docs/design/003-eviction.md`.

/// Most slots that stay free at rest: 64 MiB.
pub const MOST_KEPT_FREE: u64 = 16 * 1024;

/// Slots that stay free at rest in a tier of so many: a tenth.
pub fn kept_free(limit: u64) -> u64 {
    (limit / 10).clamp(1, MOST_KEPT_FREE)
}

/// Parts of eviction under way at a time, one being written and one being filled, while enough of the reserve is free: with
/// more, beside 16 requests, nothing is faster and reads wait longer.
const WRITE_DEPTH: usize = 2;

/// When blocks leave a RAM tier, and how many at a time.
#[derive(Clone, Copy, Debug)]
pub struct Reserve {
    limit: u32,
    kept_free: u32,
    batch: u32,
}

impl Reserve {
    /// Of a tier of so many slots, from which blocks leave in parts of at most so many.
    pub fn of(limit: u32, part_blocks: u32) -> Reserve {
        let kept_free = kept_free(limit.into()) as u32;
        Reserve { limit, kept_free, batch: (kept_free / 4).clamp(1, part_blocks) }
    }

    /// The same for a sample of this share of the blocks; each number is at least 1.
    #[must_use]
    pub fn scaled(self, share: f64) -> Reserve {
        let scaled = |n: u32| ((f64::from(n) * share).round() as u32).max(1);
        Reserve { limit: scaled(self.limit), kept_free: scaled(self.kept_free), batch: scaled(self.batch) }
    }

    /// Slots that there are.
    pub fn limit(&self) -> u32 {
        self.limit
    }

    /// Slots that stay free at rest.
    pub fn kept_free(&self) -> u32 {
        self.kept_free
    }

    /// Blocks that leave at a time.
    pub fn batch(&self) -> u32 {
        self.batch
    }

    /// Whether a batch is to leave when so many blocks stay: with it gone as many slots are free as are to be.
    pub fn must_leave(&self, staying: u32) -> bool {
        staying >= self.limit.saturating_sub(self.kept_free) + self.batch
    }

    /// Whether a block that was read may come back when so many slots are free: more than half of those that eviction keeps
    /// free. The rest is for writes.
    pub fn may_come_back(&self, free: u32) -> bool {
        free > self.kept_free.div_ceil(2)
    }

    /// Parts that may be under way when so many slots are in use. One more when a quarter of the reserve is left, and another
    /// when an eighth is: writers are faster than one write at a time then.
    pub fn write_depth(&self, used: u32) -> usize {
        let free = self.limit.saturating_sub(used);
        WRITE_DEPTH + usize::from(free < self.kept_free / 4) + usize::from(free < self.kept_free / 8)
    }
}

/// Uses of a block that are counted.
pub const MAX_FREQUENCY: u8 = 3;
/// Slots that the hand passes in one call at most: well below a millisecond.
pub const HAND_STEPS: u32 = 16 * 1024;

/// The hand of the clock. A block enters with a frequency of 0 and gains one by each later use; the hand takes one away as it
/// passes and picks what it finds at 0. A block that is touched once, as a scan does, is gone after one turn; a block that is
/// used again stays.
#[derive(Clone, Copy, Debug, Default)]
pub struct Hand(u32);

/// What the hand finds at a slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pass {
    /// Nothing that could leave.
    Nothing,
    /// A block that has been used: it is a use colder now.
    Cooled,
    /// A cold block, which leaves.
    Picked,
}

impl Hand {
    /// Goes on over the first `slots` slots until `most` are picked, or so many `steps` are gone: then fewer are, or none.
    /// `pass` looks at a slot.
    #[inline]
    pub fn go(&mut self, slots: u32, most: usize, steps: u32, mut pass: impl FnMut(u32) -> Pass) {
        let mut left = steps.min(slots.saturating_mul(u32::from(MAX_FREQUENCY) + 1));
        let mut picked = 0;
        while picked < most && left > 0 {
            left -= 1;
            if self.0 >= slots {
                self.0 = 0;
            }
            let slot = self.0;
            self.0 += 1;
            picked += usize::from(pass(slot) == Pass::Picked);
        }
    }
}

/// Reads after which a block comes back, if no other block has taken its cell between them.
const READS: u32 = 3;
/// Slots of the tier to a cell. Fewer would promote blocks of a uniform load, for nothing.
const SLOTS_PER_CELL: u64 = 8;
const MIN_CELLS: u64 = 64;
/// Bits of a cell that count.
const COUNT: u32 = 0b11;

/// Which blocks were read from the overflow lately: in each cell the last one that fell there, and how often.
#[derive(Clone, Debug)]
pub struct RecentReads {
    /// What the cell's index does not say of the block's hash, and the count. 0: none.
    cells: Vec<u32>,
}

impl RecentReads {
    /// For a tier of so many slots, and a sample of this share of the blocks.
    pub fn new(slots: u64, share: f64) -> RecentReads {
        let cells = 1_u64 << (slots / SLOTS_PER_CELL).max(MIN_CELLS).ilog2();
        RecentReads { cells: vec![0; ((cells as f64 * share).round() as usize).max(1)] }
    }

    /// A block was read. True: often enough; it is forgotten.
    #[inline]
    pub fn count(&mut self, block: u32) -> bool {
        // Odd, so that no two blocks have the same hash.
        let hash = block.wrapping_mul(0x9E37_79B1);
        // The upper half of the product says which cell, the lower one which block: with a power of two of cells they are the
        // hash's own bits.
        let product = u64::from(hash) * self.cells.len() as u64;
        let (cell, tag) = ((product >> 32) as usize, product as u32 & !COUNT);
        let cell = &mut self.cells[cell];
        let reads = if *cell & !COUNT == tag { (*cell & COUNT) + 1 } else { 1 };
        *cell = if reads < READS { tag | reads } else { 0 };
        reads == READS
    }

    /// Bytes that it takes.
    pub fn bytes(&self) -> usize {
        self.cells.capacity() * size_of::<u32>()
    }

    /// Forgets all.
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
    fn the_hand_picks_what_is_cold_and_ends() {
        let mut frequency = [0_u8, 2, 0, 1];
        let mut hand = Hand::default();
        let mut order = Vec::new();
        hand.go(4, 4, 100, |slot| match &mut frequency[slot as usize] {
            0 => {
                order.push(slot);
                Pass::Picked
            }
            n => {
                *n -= 1;
                Pass::Cooled
            }
        });
        assert_eq!(order, [0, 2, 0, 2]);
        let mut passed = 0;
        hand.go(4, 1, 100, |_| {
            passed += 1;
            Pass::Nothing
        });
        assert_eq!(passed, 16, "each slot as often as a block can be warm, and once more");
    }

    #[test]
    fn a_tier_of_one_slot_lets_blocks_leave() {
        let reserve = Reserve::of(1, 48);
        assert_eq!((reserve.kept_free(), reserve.batch()), (1, 1));
        assert!(reserve.must_leave(1) && !reserve.must_leave(0));
    }
}
