//! The RAM tier: which slots are in use, by which block, and which block is cold enough to leave.
//!
//! Owns no content. Everything here is rebuilt from the block map when a worker attaches.
//! Invariant: a slot is free (backed, punched or fresh), reserved, or owned by exactly one block.
//!
//! The eviction policy is a clock with a two-bit frequency: a block enters at 0 and gains one by each later
//! use, the hand takes one away as it passes and picks what it finds at 0. A block that is touched once, as a
//! scan does, is gone after one turn; a block that is used again stays. Why: `docs/design/003-eviction.md`.

use crate::io::{Io, PartId};
use crate::units::{Block, Slot};

const FREQUENCY: u8 = 0b11;
const EVICTING_SHIFT: u32 = 2;
/// Slots that the hand passes in one call at most: well below a millisecond.
const HAND_STEPS: u32 = 16 * 1024;

pub(crate) struct RamTier {
    limit: u32,
    /// Block + 1 of each slot, 0 for none: zeroed memory, so that an unused tier costs nothing.
    owner: Vec<u32>,
    /// Bits 0..1 frequency; bits 2.. staging buffer + 1 while an eviction of this content is under way.
    state: Vec<u8>,
    /// Free slots whose memory is there.
    backed: Vec<u32>,
    /// Free slots whose memory was given back.
    punched: Vec<u32>,
    /// Slots from here on have never been used.
    fresh: u32,
    used: u32,
    peak: u32,
    evicting: u32,
    /// How many of the backed free slots are to be given back to the host.
    give_back: u32,
    hand: u32,
}

impl RamTier {
    pub fn new(limit: u32) -> RamTier {
        RamTier {
            limit,
            owner: vec![0; limit as usize],
            state: vec![0; limit as usize],
            backed: Vec::new(),
            punched: Vec::new(),
            fresh: 0,
            used: 0,
            peak: 0,
            evicting: 0,
            give_back: 0,
            hand: 0,
        }
    }

    pub fn used(&self) -> u32 {
        self.used
    }

    pub fn peak(&self) -> u32 {
        self.peak
    }

    /// An earlier process has seen this many slots in use.
    pub fn remember_peak(&mut self, peak: u64) {
        self.peak = self.peak.max(u32::try_from(peak).unwrap_or(0).min(self.limit));
    }

    pub fn free(&self) -> u32 {
        self.limit - self.used
    }

    pub fn limit(&self) -> u32 {
        self.limit
    }

    pub fn evicting(&self) -> u32 {
        self.evicting
    }

    /// Asks the processor to fetch what a use of the slot will change.
    #[inline]
    pub fn prefetch(&self, slot: Slot) {
        if let Some(state) = self.state.get(slot.0 as usize) {
            crate::meta::prefetch(state);
        }
    }

    /// The block that a slot holds.
    pub fn owner(&self, slot: Slot) -> Option<Block> {
        self.owner[slot.0 as usize].checked_sub(1).map(Block)
    }

    /// Takes a free slot: reserved, owned by nobody until [`RamTier::own`].
    #[inline]
    pub fn allocate(&mut self) -> Option<Slot> {
        let slot = if let Some(slot) = self.backed.pop() {
            self.give_back = self.give_back.min(self.backed.len() as u32);
            slot
        } else if let Some(slot) = self.punched.pop() {
            slot
        } else if self.fresh < self.limit {
            self.fresh += 1;
            self.fresh - 1
        } else {
            return None;
        };
        self.used += 1;
        self.peak = self.peak.max(self.used);
        Some(Slot(slot))
    }

    /// The slot now holds this block.
    #[inline]
    pub fn own(&mut self, slot: Slot, block: Block) {
        self.owner[slot.0 as usize] = block.0 + 1;
        self.state[slot.0 as usize] = 0;
    }

    /// Takes the slot that the map names for a block, when attaching. False: out of range or taken.
    pub fn adopt(&mut self, slot: Slot, block: Block) -> bool {
        let Some(owner) = self.owner.get_mut(slot.0 as usize) else { return false };
        if *owner != 0 {
            return false;
        }
        *owner = block.0 + 1;
        self.used += 1;
        self.peak = self.peak.max(self.used);
        self.fresh = self.fresh.max(slot.0 + 1);
        true
    }

    /// After the last `adopt`: all slots below the highest one in use that nobody owns are free. Whether
    /// their memory is there is not known, so it counts as there and is given back in the background.
    pub fn finish_adopting(&mut self) {
        for slot in (0..self.fresh).rev() {
            if self.owner[slot as usize] == 0 {
                self.backed.push(slot);
            }
        }
        self.give_back = self.backed.len() as u32;
    }

    /// Frees a slot, owned or reserved. With `give_back`, its memory goes back to the host soon; so does what
    /// eviction had freed for the next writes, once the tier is less than half full and none is needed.
    #[inline]
    pub fn release(&mut self, slot: Slot, give_back: bool) {
        let i = slot.0 as usize;
        if self.state[i] >> EVICTING_SHIFT != 0 {
            self.evicting -= 1;
        }
        self.owner[i] = 0;
        self.state[i] = 0;
        self.used -= 1;
        self.backed.push(slot.0);
        if give_back {
            let all = self.used < self.limit / 2;
            self.give_back = if all { self.backed.len() as u32 } else { self.give_back + 1 };
        }
    }

    /// The block was read.
    #[inline]
    pub fn touch(&mut self, slot: Slot) {
        let state = &mut self.state[slot.0 as usize];
        if *state & FREQUENCY != FREQUENCY {
            *state += 1;
        }
    }

    /// The block was overwritten in place: an eviction of its earlier content is void.
    #[inline]
    pub fn touch_written(&mut self, slot: Slot) {
        let state = &mut self.state[slot.0 as usize];
        if *state >> EVICTING_SHIFT != 0 {
            self.evicting -= 1;
            *state &= FREQUENCY;
        }
        if *state != FREQUENCY {
            *state += 1;
        }
    }

    /// Picks up to `n` cold blocks for `part`; they count as evicting from here on.
    pub fn pick_cold(&mut self, n: usize, part: PartId, out: &mut Vec<(Block, Slot)>) {
        let mut steps = HAND_STEPS.min(self.fresh.saturating_mul(u32::from(FREQUENCY) + 1));
        while out.len() < n && steps > 0 {
            steps -= 1;
            if self.hand >= self.fresh {
                self.hand = 0;
            }
            let i = self.hand as usize;
            self.hand += 1;
            let (owner, state) = (self.owner[i], self.state[i]);
            if owner == 0 || state >> EVICTING_SHIFT != 0 {
                continue;
            }
            if state != 0 {
                self.state[i] = state - 1;
                continue;
            }
            self.state[i] = (part.0 + 1) << EVICTING_SHIFT;
            self.evicting += 1;
            out.push((Block(owner - 1), Slot(i as u32)));
        }
    }

    /// Whether the slot still holds the content that `part` took from it.
    pub fn is_evicting(&self, slot: Slot, part: PartId) -> bool {
        self.state[slot.0 as usize] >> EVICTING_SHIFT == part.0 + 1
    }

    /// The eviction failed: the block stays.
    pub fn keep(&mut self, slot: Slot) {
        self.state[slot.0 as usize] = 0;
        self.evicting -= 1;
    }

    /// Gives some memory back to the host: at most `most` slots. True when there is more to give.
    pub fn give_back<I: Io>(&mut self, io: &mut I, most: usize, batch: &mut Vec<Slot>) -> bool {
        let n = (self.give_back as usize).min(most).min(self.backed.len());
        if n == 0 {
            self.give_back = 0;
            return false;
        }
        batch.clear();
        batch.extend(self.backed.drain(self.backed.len() - n..).map(Slot));
        batch.sort_unstable();
        io.release_slots(batch);
        self.punched.extend(batch.iter().rev().map(|s| s.0));
        self.give_back -= n as u32;
        self.give_back > 0
    }

    /// Forgets every block; all memory goes back to the host soon.
    pub fn reset(&mut self) {
        let fresh = self.fresh as usize;
        let punched = std::mem::take(&mut self.punched);
        self.owner[..fresh].fill(0);
        self.state[..fresh].fill(0);
        let mut is_punched = vec![false; fresh];
        for &slot in &punched {
            is_punched[slot as usize] = true;
        }
        self.backed = (0..self.fresh).rev().filter(|&s| !is_punched[s as usize]).collect();
        self.punched = punched;
        self.give_back = self.backed.len() as u32;
        (self.used, self.evicting, self.hand) = (0, 0, 0);
    }

    /// Checks this file's invariant against the block map's view of it; for tests.
    pub fn check(&self, owner_of: &dyn Fn(Slot) -> Option<Block>, reserved: u32) {
        let mut owned = 0;
        let mut evicting = 0;
        for i in 0..self.limit {
            let here = (self.owner[i as usize] != 0).then(|| Block(self.owner[i as usize] - 1));
            assert_eq!(here, owner_of(Slot(i)), "owner of slot {i}");
            owned += u32::from(here.is_some());
            evicting += u32::from(self.state[i as usize] >> EVICTING_SHIFT != 0);
        }
        assert_eq!(self.used, owned + reserved, "slots in use");
        assert_eq!(self.evicting, evicting, "slots being evicted");
        let mut seen = vec![false; self.limit as usize];
        for &slot in self.backed.iter().chain(&self.punched) {
            assert!(
                slot < self.fresh && !std::mem::replace(&mut seen[slot as usize], true),
                "slot {slot} free twice"
            );
            assert_eq!(self.owner[slot as usize], 0, "free slot {slot} has an owner");
        }
        let free = self.backed.len() as u32 + self.punched.len() as u32 + (self.limit - self.fresh);
        assert_eq!(free, self.limit - self.used, "free slots");
        assert!(self.give_back as usize <= self.backed.len());
    }
}
