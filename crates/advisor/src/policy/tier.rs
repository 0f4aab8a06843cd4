//! One tier in miniature: which sampled blocks it holds, and which of them go.
//!
//! The rules are the disk's own (`spillway-policy`), with what they say in slots as much less as the sample is smaller
//! than the disk. Writes of the overflow end at once. Invariant: a slot is free or holds one block, whose place says so.

use crate::event::BLOCK_BYTES;
use crate::stack::Ranks;
use spillway_policy::{ClockHand, HAND_STEPS, MAX_FREQUENCY, RecentReads, Reserve, Visit};

/// Blocks of a part at most.
const PART_BLOCKS: u32 = 48;
/// Blocks of a segment of the log but its summary.
const SEGMENT_BLOCKS: u32 = 255;
/// Place of a live block that is in no slot.
const OVERFLOW: u32 = u32::MAX;
/// Place of a block that is not live.
const NOT_LIVE: u32 = u32::MAX - 1;

#[derive(Clone, Copy)]
struct Slot {
    /// Index of the block; `OVERFLOW`: none.
    owner: u32,
    frequency: u8,
}

pub(super) struct Tier {
    reserve: Reserve,
    /// Slots that were ever used.
    slots: Vec<Slot>,
    /// Free slots.
    free: Ranks,
    used: u32,
    hand: ClockHand,
    /// Memory for the list of the blocks that are evicted, kept between parts.
    picked: Vec<(u32, u32)>,
    hand_steps: u32,
    /// Blocks of a segment, and those that fit into the open one: a part ends where it does.
    segment: u32,
    segment_left: u32,
    /// Of each block by its index: its slot.
    places: Vec<u32>,
    recent_reads: RecentReads,
    overflow: u32,
    pub evicted: u64,
    pub overflow_read: u64,
    pub promoted: u64,
    pub peak_overflow: u32,
}

impl Tier {
    pub fn new(limit_bytes: u64, rate: f64) -> Tier {
        let limit = limit_bytes / BLOCK_BYTES;
        let scaled = |n: u32| ((f64::from(n) * rate).round() as u32).max(1);
        let slots = u32::try_from(limit).unwrap_or(u32::MAX);
        Tier {
            reserve: Reserve::of(slots, PART_BLOCKS).scaled(rate),
            slots: Vec::new(),
            free: Ranks::new(0),
            used: 0,
            hand: ClockHand::default(),
            picked: Vec::new(),
            hand_steps: scaled(HAND_STEPS),
            segment: scaled(SEGMENT_BLOCKS),
            segment_left: 0,
            places: Vec::new(),
            recent_reads: RecentReads::new(limit, rate),
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
            + self.places.capacity() * 4
            + self.recent_reads.bytes()
    }

    /// Counts the read of a live block.
    pub fn read(&mut self, block: u32, index: u32) {
        let slot = self.places[index as usize];
        if slot != OVERFLOW {
            return self.touch(slot);
        }
        self.overflow_read += 1;
        if self.reserve.may_promote(self.reserve.limit() - self.used) && self.recent_reads.count(block) {
            self.promoted += 1;
            self.overflow -= 1;
            self.take_slot(index);
            self.evict();
        }
    }

    /// Counts the write of a block. `whole`: nothing of its old content is needed.
    pub fn write(&mut self, index: u32, whole: bool) {
        if index as usize >= self.places.len() {
            self.places.resize(index as usize + 1, NOT_LIVE);
        }
        match self.places[index as usize] {
            NOT_LIVE => {}
            OVERFLOW => {
                self.overflow_read += u64::from(!whole);
                self.overflow -= 1;
            }
            slot => return self.touch(slot),
        }
        self.take_slot(index);
        self.evict();
    }

    /// Counts that a block is discarded.
    pub fn remove(&mut self, index: u32) {
        let slot = std::mem::replace(&mut self.places[index as usize], NOT_LIVE);
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
        self.recent_reads.clear();
        self.hand = ClockHand::default();
    }

    fn touch(&mut self, slot: u32) {
        let frequency = &mut self.slots[slot as usize].frequency;
        *frequency = (*frequency + 1).min(MAX_FREQUENCY);
    }

    /// Gives a block the lowest free slot, as core does.
    fn take_slot(&mut self, index: u32) {
        while self.used >= self.reserve.limit() {
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

    /// Evicts parts until the reserve is free.
    fn evict(&mut self) {
        while self.reserve.must_evict(self.used) {
            self.evict_part();
        }
    }

    /// Evicts one part: the clock's hand goes on until it has found that many cold blocks, or has gone its steps; then fewer or none are evicted.
    fn evict_part(&mut self) {
        let most = self.reserve.limit() as usize;
        while self.slots.len() < most {
            // By then core has made all slots ready: its hand passes them too.
            self.free.grow(most);
            self.free.insert(self.slots.len() as u32);
            self.slots.push(Slot { owner: OVERFLOW, frequency: 0 });
        }
        if self.segment_left == 0 {
            self.segment_left = self.segment;
        }
        let most = self.reserve.batch().min(self.segment_left);
        let mut picked = std::mem::take(&mut self.picked);
        let slots = &mut self.slots;
        self.hand.advance(slots.len() as u32, most as usize, self.hand_steps, |i| {
            let slot = &mut slots[i as usize];
            match (slot.owner, slot.frequency) {
                (OVERFLOW, _) => Visit::Skipped,
                (owner, 0) => {
                    picked.push((i, owner));
                    // Its owner goes below; the hand must not come by again before.
                    slot.owner = OVERFLOW;
                    Visit::Picked
                }
                _ => {
                    slot.frequency -= 1;
                    Visit::Cooled
                }
            }
        });
        let n = picked.len() as u32;
        for (slot, owner) in picked.drain(..) {
            self.places[owner as usize] = OVERFLOW;
            self.release(slot);
        }
        self.picked = picked;
        self.evicted += u64::from(n);
        self.overflow += n;
        self.segment_left -= n;
        self.peak_overflow = self.peak_overflow.max(self.overflow);
    }
}
