//! One tier in miniature: which sampled blocks it holds, and which of them go.
//!
//! The rules are those of `crates/core/src/evict.rs`, `ram.rs` and `promote.rs`; what they say in slots is here as much less
//! as the sample is smaller than the disk, and at least 1. Writes of the overflow end at once. Invariant: a slot is
//! free or holds one block, whose place says so.

use crate::event::BLOCK_BYTES;
use crate::limit::free_blocks;
use crate::stack::Ranks;

/// Blocks of a part at most.
const PART_BLOCKS: u64 = 48;
/// Blocks of a segment of the log but its summary.
const SEGMENT_BLOCKS: u64 = 255;
/// Where a living block is that is in no slot.
const OVERFLOW: u32 = u32::MAX;
/// Where one is that does not live.
const NOWHERE: u32 = u32::MAX - 1;
/// As in core: uses that are counted, reads after which a block comes back, slots to a cell that remembers reads.
const MAX_FREQUENCY: u8 = 3;
const READS: u32 = 3;
const SLOTS_PER_CELL: u64 = 8;
const MIN_CELLS: u64 = 64;
/// Slots that the hand passes for one part.
const HAND_STEPS: u64 = 16 * 1024;

#[derive(Clone, Copy)]
struct Slot {
    /// Index of the block; `OVERFLOW`: none.
    owner: u32,
    frequency: u8,
}

pub(super) struct Tier {
    limit: u32,
    reserve: u32,
    part: u32,
    /// As long as slots were ever used.
    slots: Vec<Slot>,
    /// Free ones among them.
    free: Ranks,
    used: u32,
    hand: usize,
    hand_steps: usize,
    /// Blocks of a segment, and those that the open one has room for: a part ends where it does.
    segment: u32,
    segment_left: u32,
    /// Of each block by its index: its slot.
    places: Vec<u32>,
    /// Cells of blocks that were read of the overflow lately.
    cells: Vec<u32>,
    overflow: u32,
    pub evicted: u64,
    pub overflow_read: u64,
    pub promoted: u64,
    pub peak_overflow: u32,
}

impl Tier {
    pub fn new(limit_bytes: u64, rate: f64) -> Tier {
        let limit = limit_bytes / BLOCK_BYTES;
        let scaled = |n: u64| ((n as f64 * rate).round() as u32).max(1);
        let reserve = free_blocks(limit);
        let cells = 1 << ((limit / SLOTS_PER_CELL).max(MIN_CELLS).ilog2());
        Tier {
            limit: scaled(limit),
            reserve: scaled(reserve),
            part: scaled((reserve / 4).clamp(1, PART_BLOCKS)),
            slots: Vec::new(),
            free: Ranks::new(0),
            used: 0,
            hand: 0,
            hand_steps: scaled(HAND_STEPS) as usize,
            segment: scaled(SEGMENT_BLOCKS),
            segment_left: 0,
            places: Vec::new(),
            cells: vec![0; scaled(cells) as usize],
            overflow: 0,
            evicted: 0,
            overflow_read: 0,
            promoted: 0,
            peak_overflow: 0,
        }
    }

    pub fn bytes(&self) -> usize {
        self.slots.capacity() * size_of::<Slot>()
            + self.free.bytes()
            + (self.places.capacity() + self.cells.capacity()) * 4
    }

    /// A block that lives is read.
    pub fn read(&mut self, block: u32, index: u32) {
        let slot = self.places[index as usize];
        if slot != OVERFLOW {
            return self.touch(slot);
        }
        self.overflow_read += 1;
        if self.limit - self.used > self.reserve.div_ceil(2) && self.reads_enough(block) {
            self.promoted += 1;
            self.overflow -= 1;
            self.take_slot(index);
            self.evict();
        }
    }

    /// A block is written. `whole`: nothing of its old content is needed.
    pub fn write(&mut self, index: u32, whole: bool) {
        if index as usize >= self.places.len() {
            self.places.resize(index as usize + 1, NOWHERE);
        }
        match self.places[index as usize] {
            NOWHERE => {}
            OVERFLOW => {
                self.overflow_read += u64::from(!whole);
                self.overflow -= 1;
            }
            slot => return self.touch(slot),
        }
        self.take_slot(index);
        self.evict();
    }

    /// A block is given up.
    pub fn remove(&mut self, index: u32) {
        let slot = std::mem::replace(&mut self.places[index as usize], NOWHERE);
        if slot == OVERFLOW {
            self.overflow -= 1;
        } else {
            self.release(slot);
        }
    }

    pub fn reset(&mut self) {
        self.slots.clear();
        self.free = Ranks::new(0);
        (self.used, self.overflow) = (0, 0);
        self.places.clear();
        self.cells.fill(0);
        self.hand = 0;
    }

    fn touch(&mut self, slot: u32) {
        let frequency = &mut self.slots[slot as usize].frequency;
        *frequency = (*frequency + 1).min(MAX_FREQUENCY);
    }

    /// The lowest free slot, as in core.
    fn take_slot(&mut self, index: u32) {
        while self.used >= self.limit {
            self.evict_part();
        }
        let slot = if self.free.len() > 0 {
            let slot = self.free.nth(0);
            self.free.remove(slot);
            slot
        } else {
            self.slots.push(Slot { owner: OVERFLOW, frequency: 0 });
            self.slots.len() as u32 - 1
        };
        self.slots[slot as usize] = Slot { owner: index, frequency: 0 };
        self.places[index as usize] = slot;
        self.used += 1;
    }

    fn release(&mut self, slot: u32) {
        self.slots[slot as usize].owner = OVERFLOW;
        self.free.grow(slot as usize + 1);
        self.free.insert(slot);
        self.used -= 1;
    }

    /// Parts leave until the reserve is free.
    fn evict(&mut self) {
        while self.used >= (self.limit - self.reserve.min(self.limit) + self.part).max(1) {
            self.evict_part();
        }
    }

    /// The hand goes on until it has found a part's cold blocks, or has gone its steps: then fewer leave, or none.
    fn evict_part(&mut self) {
        let most = self.limit as usize;
        while self.slots.len() < most {
            // By then core has made all slots ready: its hand passes them too.
            self.free.grow(most);
            self.free.insert(self.slots.len() as u32);
            self.slots.push(Slot { owner: OVERFLOW, frequency: 0 });
        }
        if self.segment_left == 0 {
            self.segment_left = self.segment;
        }
        let most = self.part.min(self.segment_left);
        let mut picked = 0;
        for _ in 0..self.hand_steps.min(self.slots.len() * (usize::from(MAX_FREQUENCY) + 1)) {
            if picked == most {
                break;
            }
            if self.hand >= self.slots.len() {
                self.hand = 0;
            }
            let i = self.hand;
            self.hand += 1;
            let slot = &mut self.slots[i];
            if slot.owner == OVERFLOW {
                continue;
            }
            if slot.frequency > 0 {
                slot.frequency -= 1;
                continue;
            }
            self.places[slot.owner as usize] = OVERFLOW;
            self.release(i as u32);
            self.evicted += 1;
            self.overflow += 1;
            picked += 1;
        }
        self.segment_left -= picked;
        self.peak_overflow = self.peak_overflow.max(self.overflow);
    }

    /// A block was read of the overflow: whether that was often enough.
    fn reads_enough(&mut self, block: u32) -> bool {
        let hash = block.wrapping_mul(0x9E37_79B1);
        // The upper half of the product says which cell, the lower one which block: with a power of two of cells they are the
        // hash's own bits, as in the core.
        let product = u64::from(hash) * self.cells.len() as u64;
        let (cell, tag) = ((product >> 32) as usize, product as u32);
        let cell = &mut self.cells[cell];
        let reads = if *cell & !0b11 == tag & !0b11 { (*cell & 0b11) + 1 } else { 1 };
        *cell = if reads < READS { tag & !0b11 | reads } else { 0 };
        reads == READS
    }
}
