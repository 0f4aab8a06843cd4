//! The memory of free slots: provided ahead of writes, released to the host in steps. Takes no slot for a block and frees
//! none.
//!
//! Invariant: each step is well below a millisecond.

use super::{DIRTY, RamTier};
use crate::engine::cached::slots::{SHORTEST_STRETCH, SlotSet, UNIT_SLOTS};
use crate::io::Io;
use crate::meta::Meta;
use spillway_layout::Slot;

/// The most slots that one step releases to the host, and the most that it looks at.
const STEP_SLOTS: usize = 256;
/// The most slots that are made ready ahead of writes (32 MiB), and how long after the last such write: guests write their
/// caches back every five seconds.
pub(super) const AHEAD_SLOTS: u32 = 8 * 1024;
const AHEAD_NS: u64 = 10_000_000_000;
/// Time without a taken slot before more slots are prepared. If several disks share the processors, each waits for its
/// client most of the time, and slots that it prepared meanwhile would take processor time from the others.
const PAUSE_NS: u64 = 20_000_000;
/// Slots that one step makes ready while writes come, and while none does: the next write may wait for a step.
const AHEAD_STEP: u32 = 128;
const IDLE_STEP: u32 = 32;

impl RamTier {
    /// Takes up to `most` adjacent free slots without memory, or a unit of them, for ones that have it: the first
    /// use gives it to them. Returns the first, and how many.
    pub(super) fn extend(&mut self, most: u32, meta: &Meta) -> Option<(u32, u32)> {
        let Some(first) = self.punched.first() else {
            let n = if self.huge { UNIT_SLOTS } else { most }.min(self.total - self.fresh);
            let first = self.fresh;
            self.fresh += n;
            meta.set_slots_used(self.fresh);
            self.add_spare(first, n);
            return (n > 0).then_some((first, n));
        };
        let most = match self.huge {
            false => most,
            true if self.punched.holds_unit(first / UNIT_SLOTS) => UNIT_SLOTS,
            // Its huge page has been split.
            true => 1,
        };
        let end = self.fresh.min(first + most);
        let n = (first..end).take_while(|&slot| self.punched.contains(slot)).count() as u32;
        (first..first + n).for_each(|slot| self.punched.remove(slot));
        self.add_spare(first, n);
        Some((first, n))
    }

    /// The lowest free slots that have memory, if enough of them are adjacent.
    pub(super) fn backed_run(&self, most: u32) -> Option<(u32, u32)> {
        let first = self.backed.first()?;
        let n = self.adjacent(&self.backed, first, most);
        (n >= SHORTEST_STRETCH).then_some((first, n))
    }

    /// Adjacent free slots without memory, if there are enough and so many more may hold some; they count as backed
    /// then.
    pub(super) fn unbacked_run(&mut self, most: u32, meta: &Meta) -> Option<(u32, u32)> {
        if self.whole.len() == 0 {
            let most = most.min(self.ceiling.at.saturating_sub(self.memory()));
            let adjacent = match self.punched.first() {
                // Its huge page has been split.
                Some(first) if self.huge && !self.punched.holds_unit(first / UNIT_SLOTS) => 0,
                Some(first) => self.adjacent(&self.punched, first, most),
                None => most.min(self.total - self.fresh),
            };
            if adjacent < SHORTEST_STRETCH {
                return None;
            }
            let (first, n) = self.extend(most, meta)?;
            if self.whole.len() == 0 {
                return (n >= SHORTEST_STRETCH).then_some((first, n));
            }
        }
        let unit = self.whole.pop_first()?;
        let first = unit * UNIT_SLOTS;
        (first..first + UNIT_SLOTS).for_each(|slot| self.backed.insert(slot));
        let n = most.min(UNIT_SLOTS);
        (n >= SHORTEST_STRETCH).then_some((first, n))
    }

    /// How many slots from `first` on are in the set, of at most `most`.
    fn adjacent(&self, set: &SlotSet, first: u32, most: u32) -> u32 {
        let end = self.total.min(first.saturating_add(most));
        (first..end).take_while(|&slot| set.contains(slot)).count() as u32
    }

    /// Records that these free slots have memory.
    fn add_spare(&mut self, first: u32, n: u32) {
        if self.huge && n == UNIT_SLOTS {
            self.whole.insert(first / UNIT_SLOTS);
        } else {
            (first..first + n).for_each(|slot| self.backed.insert(slot));
        }
    }

    /// At the end of a turn, a step: the next slots are given memory ahead of need. While small writes take slots that had
    /// none, a few more than they took; a while after the last write that did, as many as may be ahead, while nothing else is to
    /// do (`idle`). Slots that were not used a while after the last such write are released. True: there is more to make ready.
    pub fn populate<I: Io>(&mut self, io: &mut I, meta: &Meta, now_ns: u64, idle: bool) -> bool {
        let taken = std::mem::take(&mut self.ahead.taken);
        if taken > 0 || std::mem::take(&mut self.ahead.filled) {
            self.ahead.taken_ns = now_ns;
            self.ahead.to_fill = true;
        }
        if now_ns >= self.ahead.taken_ns + AHEAD_NS {
            self.give_back = (self.give_back + self.ahead.slots).min(self.spare());
            (self.ahead.slots, self.ahead.to_fill) = (0, false);
        }
        let fills = idle && self.ahead.to_fill && now_ns >= self.ahead.taken_ns + PAUSE_NS;
        let step = match (taken, fills) {
            (0, false) => return false,
            (0, true) => IDLE_STEP,
            _ => taken.saturating_mul(2).min(AHEAD_STEP),
        };
        let unit = if self.huge { UNIT_SLOTS } else { 1 };
        let most = step.min(self.ceiling.limit.saturating_sub(self.memory()));
        let wanted = self.spare() < AHEAD_SLOTS - AHEAD_STEP.max(unit) && (!self.huge || self.spare() < unit);
        let more = if most > 0 && wanted && self.give_back == 0 { self.extend(most, meta) } else { None };
        let Some((first, n)) = more else {
            self.ahead.to_fill &= !fills;
            return false;
        };
        io.populate_slots(Slot(first), n);
        self.ahead.slots += n;
        fills
    }

    /// When [`RamTier::populate`] must be called even if nothing happens.
    pub fn deadline_ns(&self) -> u64 {
        match (self.ahead.to_fill, self.ahead.slots) {
            (true, _) => self.ahead.taken_ns + PAUSE_NS,
            (false, 0) => 0,
            (false, _) => self.ahead.taken_ns + AHEAD_NS,
        }
    }

    /// Releases some memory to the host, in one step. True: there is more to release.
    pub fn give_back<I: Io>(&mut self, io: &mut I, batch: &mut Vec<Slot>) -> bool {
        batch.clear();
        self.retired.0.truncate(self.retired.0.len().saturating_sub(64 * STEP_SLOTS));
        self.retired.0.shrink_to_fit();
        self.retired.1.truncate(self.retired.1.len().saturating_sub(256 * STEP_SLOTS));
        self.retired.1.shrink_to_fit();
        self.collect_stale(batch);
        let wanted = self.give_back.max(self.beyond()).min(self.spare());
        if wanted > 0 && batch.is_empty() {
            self.collect_spare(wanted, batch);
        }
        if !batch.is_empty() {
            io.release_slots(batch);
            for slot in batch {
                self.state[slot.0 as usize] = 0;
                self.punched.insert(slot.0);
            }
        }
        let beyond = self.beyond() > 0;
        self.shrinking &= self.is_above_limit() || beyond;
        let retired = self.retired.0.len() + self.retired.1.len() > 0;
        let spare = if self.huge { self.whole.len() } else { self.backed.len() };
        retired || !self.stale.is_empty() || self.give_back > 0 && spare > 0 || beyond && self.spare() > 0
    }

    /// The next stale slots to be released. With huge pages those of one unit; slots of a unit that is partly in use stay, to
    /// be zeroed before use.
    fn collect_stale(&mut self, batch: &mut Vec<Slot>) {
        let mut looks = 64 * STEP_SLOTS as u32;
        if !self.huge {
            while looks > 0
                && batch.len() < STEP_SLOTS
                && let Some(slot) = self.stale.next()
            {
                looks -= 1;
                if self.is_stale(slot) {
                    batch.push(Slot(slot));
                }
            }
            self.stale_free -= batch.len() as u32;
            return;
        }
        while looks >= UNIT_SLOTS && batch.is_empty() && !self.stale.is_empty() {
            looks -= UNIT_SLOTS;
            let unit =
                self.stale.start / UNIT_SLOTS * UNIT_SLOTS..(self.stale.start / UNIT_SLOTS + 1) * UNIT_SLOTS;
            let part = self.stale.start..unit.end.min(self.stale.end);
            self.stale.start = part.end;
            let is_free = |slot| self.punched.contains(slot) || part.contains(&slot) && self.is_stale(slot);
            let all_free = unit.clone().all(is_free);
            for slot in part.filter(|&slot| self.is_stale(slot)).collect::<Vec<_>>() {
                self.stale_free -= 1;
                if all_free {
                    batch.push(Slot(slot));
                } else {
                    self.state[slot as usize] = DIRTY;
                    self.backed.insert(slot);
                }
            }
        }
    }

    /// The next free slots with memory to be released: the highest, or the highest unit. If the limit was lowered and no unit
    /// is free, huge pages are split.
    fn collect_spare(&mut self, wanted: u32, batch: &mut Vec<Slot>) {
        if let Some(unit) = self.whole.pop_last() {
            batch.extend((unit * UNIT_SLOTS..(unit + 1) * UNIT_SLOTS).map(Slot));
        } else if !self.huge || self.beyond() > 0 {
            let wanted = if self.huge { self.beyond() } else { wanted };
            batch.extend((0..wanted.min(STEP_SLOTS as u32)).map_while(|_| self.backed.pop_last()).map(Slot));
            batch.reverse();
        }
        self.give_back = self.give_back.saturating_sub(batch.len() as u32).min(self.spare());
        self.ahead.slots = self.ahead.slots.min(self.spare());
    }
}
