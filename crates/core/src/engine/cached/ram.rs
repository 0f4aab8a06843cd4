//! The RAM tier: which slots are in use, by which block, and which block is cold enough to be evicted.
//!
//! Owns no content. Everything here is rebuilt from the block map when a worker attaches.
//! Invariants: a slot is free (backed, punched, stale or fresh), reserved, or owned by exactly one block; no more
//! slots than the limit hold memory, except while the tier shrinks to a lower limit.
//! Why: `docs/design/009-memory-of-the-ram-tier.md`.

mod ahead;
mod memory;

use crate::engine::cached::slots::{SlotSet, UNIT_SLOTS};
use crate::error::DiskError;
use crate::io::{Io, PartId};
use crate::meta::Meta;
use ahead::Ahead;
use spillway_layout::{BLOCK_BYTES, Block, DiskSpec, Slot, bytes_in_words};
use spillway_policy::{ClockHand, HAND_STEPS, MAX_FREQUENCY, Visit};
use std::ops::Range;

/// Bits of a state that hold the frequency.
const FREQUENCY: u8 = MAX_FREQUENCY;
const EVICTING_SHIFT: u32 = 2;
/// State of a slot that is reserved: taken, and without an owner yet.
const RESERVED: u8 = 1;
/// State of a free slot whose content is to be zeroed before it is used.
const DIRTY: u8 = 2;
/// The `data` memory that the owner has for the slots: as much as the limit may ever be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DataMemory {
    /// Its length.
    pub bytes: u64,
    /// The host backs it with huge pages of 2 MiB: whole ones are handed out and released.
    pub huge_pages: bool,
}

impl DataMemory {
    /// Refuses an invalid disk, or one whose RAM limit is larger than the memory.
    pub(crate) fn check(&self, spec: &DiskSpec) -> Result<(), DiskError> {
        spec.check().map_err(DiskError::Spec)?;
        if spec.slots() > self.slots() && spec.mode.has_ram() {
            let (limit, most) = (bytes_in_words(spec.ram_limit_bytes), bytes_in_words(self.bytes));
            return Err(DiskError::Spec(format!("RAM limit {limit} is more than the largest one, {most}")));
        }
        Ok(())
    }

    /// Slots that fit in the memory.
    pub fn slots(&self) -> u32 {
        (self.bytes / BLOCK_BYTES as u64).min(u64::from(u32::MAX / 2)) as u32
    }
}

/// How many slots may be in use.
struct Ceiling {
    limit: u32,
    /// The limit, or more while the tier shrinks to a lower one.
    at: u32,
    /// Above the limit, every other slot that becomes free is for writes. The others, or all, lower the ceiling.
    shares: bool,
    /// The next slot that becomes free is for writes.
    for_writes: bool,
}

pub(crate) struct RamTier {
    ceiling: Ceiling,
    data: DataMemory,
    /// Slots that it has.
    total: u32,
    /// Block + 1 of each slot, 0 for none: zeroed memory, so that an unused tier costs nothing.
    owner: Vec<u32>,
    /// Bits 0..1 frequency; bits 2.. staging buffer + 1 while an eviction of this content is in flight.
    state: Vec<u8>,
    /// Memory is given and released in units of 2 MiB.
    huge: bool,
    /// Free slots that have memory; with huge pages those of units that are partly in use.
    backed: SlotSet,
    /// With huge pages: free units that have memory.
    whole: SlotSet,
    /// Free slots whose memory was released.
    punched: SlotSet,
    /// Slots from here on have never been used by any process. `meta` has this number too.
    fresh: u32,
    /// Slots of this range that are neither owned nor punched are free, and may hold memory of an earlier generation or
    /// process.
    stale: Range<u32>,
    /// How many stale slots there are.
    stale_free: u32,
    used: u32,
    peak: u32,
    evicting: u32,
    /// How many of the backed free slots are to be released to the host.
    give_back: u32,
    hand: ClockHand,
    ahead: Ahead,
    /// The limit was lowered below the number of slots with memory, and still is.
    shrinking: bool,
    /// Owners and states of an earlier generation, freed in steps.
    retired: (Vec<u32>, Vec<u8>),
}

impl RamTier {
    /// An empty tier: at most `limit` of the slots of `data` may hold memory.
    pub fn new(limit: u32, data: DataMemory) -> RamTier {
        let total = data.slots();
        RamTier {
            ceiling: Ceiling { limit, at: limit, shares: false, for_writes: false },
            data,
            total,
            owner: vec![0; total as usize],
            state: vec![0; total as usize],
            huge: data.huge_pages && total.is_multiple_of(UNIT_SLOTS),
            backed: SlotSet::new(total),
            whole: SlotSet::new(total.div_ceil(UNIT_SLOTS)),
            punched: SlotSet::new(total),
            fresh: 0,
            stale: 0..0,
            stale_free: 0,
            used: 0,
            peak: 0,
            evicting: 0,
            give_back: 0,
            hand: ClockHand::default(),
            ahead: Ahead::default(),
            shrinking: false,
            retired: (Vec::new(), Vec::new()),
        }
    }

    pub fn used(&self) -> u32 {
        self.used
    }

    pub fn peak(&self) -> u32 {
        self.peak
    }

    /// Takes over the peak that an earlier process has counted.
    pub fn remember_peak(&mut self, peak: u64) {
        self.peak = self.peak.max(u32::try_from(peak).unwrap_or(0).min(self.total));
    }

    /// Slots that may be taken now.
    pub fn free(&self) -> u32 {
        self.ceiling.at - self.used
    }

    pub fn limit(&self) -> u32 {
        self.ceiling.limit
    }

    /// The memory that the slots lie in.
    pub fn data(&self) -> DataMemory {
        self.data
    }

    /// Slots that the `data` memory has.
    pub fn total(&self) -> u32 {
        self.total
    }

    pub fn evicting(&self) -> u32 {
        self.evicting
    }

    /// Slots that hold memory, at most.
    fn memory(&self) -> u32 {
        self.used + self.spare() + self.stale_free
    }

    /// Free slots with memory, for the next writes.
    fn spare(&self) -> u32 {
        self.backed.len() + self.whole.len() * UNIT_SLOTS
    }

    /// How many slots more than may be in use hold memory. The last huge page may reach beyond that number.
    fn beyond(&self) -> u32 {
        let page = if self.huge { UNIT_SLOTS - 1 } else { 0 };
        self.memory().saturating_sub(self.ceiling.at.saturating_add(page))
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
    pub fn allocate<I: Io>(&mut self, io: &mut I, meta: &Meta) -> Option<Slot> {
        if self.used >= self.ceiling.at {
            return None;
        }
        let slot = match self.backed.pop_first() {
            Some(slot) => slot,
            None => self.take_unbacked(io, meta)?,
        };
        if self.ahead.slots > 0 {
            self.ahead.slots -= 1;
            self.ahead.taken += 1;
        }
        self.give_back = self.give_back.min(self.spare());
        let state = std::mem::replace(&mut self.state[slot as usize], RESERVED);
        if state == DIRTY {
            io.slot(Slot(slot)).fill(0);
        }
        self.used += 1;
        self.peak = self.peak.max(self.used);
        Some(Slot(slot))
    }

    /// Takes free, adjacent slots, reserved as by [`RamTier::allocate`]: at most `most`, at least
    /// `SHORTEST_STRETCH` and not more than may be in use. With memory first, else without: then they are fresh. `None`:
    /// there are not so many in a row.
    pub fn allocate_run<I: Io>(&mut self, io: &mut I, meta: &Meta, most: u32) -> Option<(Slot, u32, bool)> {
        let most = most.min(self.free());
        let backed = self.backed_run(most);
        let (first, n) = backed.or_else(|| self.unbacked_run(most, meta))?;
        for slot in first..first + n {
            self.backed.remove(slot);
            if std::mem::replace(&mut self.state[slot as usize], RESERVED) == DIRTY {
                io.slot(Slot(slot)).fill(0);
            }
        }
        self.ahead.filled |= backed.is_none() || self.ahead.slots > 0;
        self.ahead.slots = self.ahead.slots.saturating_sub(n).min(self.spare());
        self.give_back = self.give_back.min(self.spare());
        self.used += n;
        self.peak = self.peak.max(self.used);
        Some((Slot(first), n, backed.is_none()))
    }

    /// A slot when none is free and backed: one without memory, if the ceiling allows one more slot with memory. Otherwise a
    /// stale one: there are some, as not all slots with memory are in use then.
    fn take_unbacked<I: Io>(&mut self, io: &mut I, meta: &Meta) -> Option<u32> {
        if self.whole.len() == 0 && self.memory() < self.ceiling.at && self.extend(1, meta).is_some() {
            self.ahead.taken += 1;
        }
        if let Some(unit) = self.whole.pop_first() {
            (unit * UNIT_SLOTS..(unit + 1) * UNIT_SLOTS).for_each(|slot| self.backed.insert(slot));
        }
        if let Some(slot) = self.backed.pop_first() {
            return Some(slot);
        }
        // From the far end: the near one is being released.
        while let Some(slot) = self.stale.next_back() {
            if self.is_stale(slot) {
                self.stale_free -= 1;
                io.slot(Slot(slot)).fill(0);
                return Some(slot);
            }
        }
        None
    }

    /// Of a slot in the stale range: whether it is stale.
    fn is_stale(&self, slot: u32) -> bool {
        let i = slot as usize;
        self.owner[i] == 0
            && self.state[i] == 0
            && !self.punched.contains(slot)
            && !self.backed.contains(slot)
            && !self.whole.contains(slot / UNIT_SLOTS)
    }

    /// Records that the slot now holds this block.
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

    /// After the last `adopt`: all slots that were ever used and that nobody owns are stale.
    pub fn finish_adopting(&mut self, meta: &Meta) {
        let unit = if self.huge { UNIT_SLOTS } else { 1 };
        self.fresh = self.fresh.max(meta.slots_used().min(self.total)).next_multiple_of(unit);
        meta.set_slots_used(self.fresh);
        self.stale = 0..self.fresh;
        self.stale_free = self.fresh - self.used;
        self.ceiling.at = self.ceiling.limit.max(self.used);
        self.shrinking = self.is_above_limit() || self.beyond() > 0;
    }

    /// Sets the limit, at most all slots. Blocks beyond it are evicted, and memory beyond it is released, step by step. To be
    /// followed by [`RamTier::lower_ceiling`].
    pub fn set_limit(&mut self, limit: u32) {
        self.ceiling.limit = limit;
        self.ceiling.at = if self.used > limit { self.ceiling.at.max(limit) } else { limit };
        self.shrinking = self.is_above_limit() || self.beyond() > 0;
    }

    /// Whether the tier still shrinks to a lower limit.
    pub fn is_above_limit(&self) -> bool {
        self.ceiling.at > self.ceiling.limit
    }

    /// While the tier shrinks to a lower limit, lets writes have at most this many free slots, and if it `shares`, every other
    /// one that becomes free until the next call. So writes go on, and the limit is reached all the same.
    pub fn lower_ceiling(&mut self, free: u32, shares: bool) {
        self.ceiling.shares = shares;
        self.ceiling.at = self.ceiling.at.min(self.used.saturating_add(free)).max(self.ceiling.limit);
    }

    /// Frees a slot, owned or reserved. With `give_back`, its memory is released to the host soon. So is the memory that
    /// eviction has freed for later writes, once the tier is less than half full.
    #[inline]
    pub fn release(&mut self, slot: Slot, give_back: bool) {
        let i = slot.0 as usize;
        if self.state[i] >> EVICTING_SHIFT != 0 {
            self.evicting -= 1;
        }
        self.owner[i] = 0;
        self.state[i] = 0;
        self.used -= 1;
        if self.ceiling.at > self.ceiling.limit {
            self.ceiling.for_writes = self.ceiling.shares && !give_back && !self.ceiling.for_writes;
            self.ceiling.at -= u32::from(!self.ceiling.for_writes);
        }
        if self.stale.contains(&slot.0) {
            self.stale_free += 1;
            return;
        }
        self.backed.insert(slot.0);
        if self.huge && self.backed.holds_unit(slot.0 / UNIT_SLOTS) {
            let first = slot.0 / UNIT_SLOTS * UNIT_SLOTS;
            (first..first + UNIT_SLOTS).for_each(|slot| self.backed.remove(slot));
            self.whole.insert(slot.0 / UNIT_SLOTS);
        }
        if give_back {
            let all = self.used < self.ceiling.limit / 2;
            self.give_back = if all { self.spare() } else { self.give_back + 1 };
        }
    }

    /// Counts a read of the block.
    #[inline]
    pub fn touch(&mut self, slot: Slot) {
        let state = &mut self.state[slot.0 as usize];
        if *state & FREQUENCY != FREQUENCY {
            *state += 1;
        }
    }

    /// Counts an overwrite in place: an eviction of the earlier content becomes invalid.
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
        let RamTier { hand, owner, state, evicting, fresh, .. } = self;
        hand.advance(*fresh, n, HAND_STEPS, |slot| {
            let (owner, state) = (owner[slot as usize], &mut state[slot as usize]);
            if owner == 0 || *state >> EVICTING_SHIFT != 0 {
                return Visit::Skipped;
            }
            if *state != 0 {
                *state -= 1;
                return Visit::Cooled;
            }
            *state = (part.0 + 1) << EVICTING_SHIFT;
            *evicting += 1;
            out.push((Block(owner - 1), Slot(slot)));
            Visit::Picked
        });
    }

    /// Whether the slot still holds the content that `part` took from it.
    pub fn is_evicting(&self, slot: Slot, part: PartId) -> bool {
        self.state[slot.0 as usize] >> EVICTING_SHIFT == part.0 + 1
    }

    /// Ends an eviction that failed: the block stays.
    pub fn keep(&mut self, slot: Slot) {
        self.state[slot.0 as usize] = 0;
        self.evicting -= 1;
    }

    /// Forgets every block; all memory is released to the host step by step.
    pub fn reset(&mut self) {
        let old = std::mem::replace(self, RamTier::new(self.ceiling.limit, self.data));
        (self.fresh, self.peak, self.punched) = (old.fresh, old.peak, old.punched);
        (self.stale, self.stale_free) = (0..self.fresh, self.fresh - self.punched.len());
        self.retired = (old.owner, old.state);
        self.shrinking = self.is_above_limit() || self.beyond() > 0;
    }

    /// The part of [`RamTier::check`] that costs next to nothing.
    pub fn check_step(&self) {
        assert!(self.shrinking || !self.is_above_limit() && self.beyond() == 0, "RAM tier over its limit");
        assert!(
            self.ceiling.limit <= self.ceiling.at && self.used <= self.ceiling.at,
            "slots in use beyond the ceiling"
        );
        assert!(self.evicting <= self.used);
    }

    /// Checks this file's invariant against the block map's view of it; for tests.
    pub fn check(&self, owner_of: &dyn Fn(Slot) -> Option<Block>, reserved: u32) {
        let (mut owned, mut evicting, mut stale) = (0, 0, 0);
        for i in 0..self.total {
            let here = self.owner(Slot(i));
            assert_eq!(here, owner_of(Slot(i)), "owner of slot {i}");
            owned += u32::from(here.is_some());
            evicting += u32::from(self.state[i as usize] >> EVICTING_SHIFT != 0);
            let is_stale = self.stale.contains(&i) && self.is_stale(i);
            stale += u32::from(is_stale);
            let whole = self.whole.contains(i / UNIT_SLOTS);
            let sets = [here.is_some(), is_stale, self.backed.contains(i), self.punched.contains(i), whole];
            let n = sets.into_iter().filter(|&in_set| in_set).count();
            assert!(n <= 1 && (n == 0 || i < self.fresh), "slot {i} is several things: {sets:?}");
        }
        assert_eq!(self.used, owned + reserved, "slots in use");
        assert_eq!(self.evicting, evicting, "slots being evicted");
        assert_eq!(self.stale_free, stale, "stale slots");
        let free = self.spare() + self.punched.len() + self.stale_free;
        assert_eq!(free + self.used, self.fresh, "slots ever used");
        assert!(
            self.give_back <= self.spare()
                && self.ahead.slots <= self.spare()
                && self.ahead.slots <= memory::AHEAD_SLOTS
        );
        self.check_step();
    }
}
