//! Eviction: cold blocks go from the RAM tier to the overflow log, in parts.
//!
//! Owns the part that is being filled. Invariants: background eviction starts no earlier than at 90% of the RAM limit; a block's
//! entry turns from RAM to overflow only if the block was not written while its copy was under way.

use crate::engine::cached::tiers::{Append, Tiers};
use crate::engine::part::{Source, Staged, Stream};
use crate::io::{Io, PartId};
use crate::shared::Shared;
use spillway_layout::{BLOCK_BYTES, Block, Location, Slot, add};
use spillway_policy::Reserve;

/// Steps in which a part is filled: each as long as a few requests take.
const STEPS: u32 = 6;

/// A part of blocks that leave RAM, while they are copied.
struct EvictingPart {
    part: PartId,
    picked: Vec<(Block, Slot)>,
    /// How many of them have been copied or passed over.
    next: usize,
    /// A write waits for a slot.
    urgent: bool,
}

#[derive(Default)]
pub(super) struct Eviction {
    /// The part that blocks are copied to.
    leaving: Option<EvictingPart>,
    /// It has gone a step, or its hand too far without a cold block: it goes on in the next turn.
    again: bool,
    /// Spare memory of the list of what leaves.
    picked: Vec<(Block, Slot)>,
}

impl Eviction {
    pub fn begin_turn(&mut self) {
        self.again = false;
    }

    pub fn goes_on(&self) -> bool {
        self.again
    }

    /// What is picked and still to be copied, with its part; for the self-check.
    pub fn picked(&self) -> impl Iterator<Item = (PartId, Block, Slot)> {
        let leaving = self.leaving.iter();
        leaving.flat_map(|l| l.picked[l.next..].iter().map(|&(block, slot)| (l.part, block, slot)))
    }

    /// Moves eviction on by a step. A part is picked at once and copied in steps, so that no request waits for the
    /// copying of all of it.
    pub fn step<I: Io>(&mut self, tiers: &mut Tiers, shared: &mut Shared, io: &mut I) {
        if tiers.stands_still(shared) || shared.overflow_rests() {
            if let Some(leaving) = self.leaving.take() {
                self.abort(tiers, leaving);
            }
            return;
        }
        let reserve = Reserve::of(tiers.ram.limit(), shared.spec.shape.part_blocks);
        let mut step = shared.spec.shape.part_blocks.div_ceil(STEPS) as usize;
        while let Some(mut leaving) = self.leaving.take().or_else(|| self.pick(tiers, shared, &reserve)) {
            let n = step.min(leaving.picked.len() - leaving.next);
            stage(tiers, io, &mut leaving, n);
            step -= n;
            if leaving.next < leaving.picked.len() {
                self.leaving = Some(leaving);
                self.again = true;
                return;
            }
            if tiers.parts.in_use_by(Stream::Write) >= reserve.write_depth(tiers.ram.used()) {
                // Full, and the one before it is still being written, whose end is a turn.
                self.leaving = Some(leaving);
                return;
            }
            self.picked = leaving.picked;
            match tiers.append(shared, io, leaving.part) {
                Append::Begun => {
                    let c = shared.counters();
                    add(if leaving.urgent { &c.evictions_urgent } else { &c.evictions_background }, 1);
                }
                Append::NoSegment => tiers.keep_in_ram(leaving.part),
                Append::Empty => {}
            }
            if self.again {
                return;
            }
        }
    }

    /// Picks cold blocks for a part, if some should leave now and can.
    fn pick(&mut self, tiers: &mut Tiers, shared: &Shared, reserve: &Reserve) -> Option<EvictingPart> {
        let urgent = shared.admission.room_waiters() > 0 && tiers.ram.free() == 0;
        let staying = tiers.ram.used() - tiers.ram.evicting();
        let could_leave = staying - tiers.merging_slots;
        let should = reserve.must_leave(staying) || urgent && tiers.ram.evicting() == 0;
        if could_leave == 0 || !should {
            return None;
        }
        if tiers.parts.in_use_by(Stream::Write) >= reserve.write_depth(tiers.ram.used()) {
            return None;
        }
        let n = reserve.batch().min(tiers.room_to_evict(shared).min(u64::from(u32::MAX)) as u32);
        let n = n.min(tiers.log.ready(Stream::Write, shared.map.meta())) as usize;
        if n == 0 {
            return None;
        }
        let part = tiers.parts.take(Stream::Write)?;
        let mut picked = std::mem::take(&mut self.picked);
        picked.clear();
        tiers.ram.pick_cold(n, part, &mut picked);
        // The hand has gone its steps: it must be called again, or a waiting write would never move.
        self.again |= picked.len() < n && picked.len() < could_leave as usize;
        if picked.is_empty() {
            self.picked = picked;
            tiers.parts.release(part);
            return None;
        }
        tiers.log.arriving += picked.len() as u64;
        Some(EvictingPart { part, picked, next: 0, urgent })
    }

    /// Nothing leaves with this part: its blocks stay in RAM.
    fn abort(&mut self, tiers: &mut Tiers, leaving: EvictingPart) {
        let EvictingPart { part, picked, next, .. } = leaving;
        for &(_, slot) in &picked[next..] {
            tiers.keep_slot(slot, part);
        }
        self.picked = picked;
        tiers.keep_in_ram(part);
    }
}

/// Copies the next `n` picked blocks to their part, but for those that were written or discarded meanwhile.
fn stage<I: Io>(tiers: &mut Tiers, io: &mut I, leaving: &mut EvictingPart, n: usize) {
    let part = leaving.part;
    for i in leaving.next..leaving.next + n {
        // A cold slot's page is far away: the next one's is looked up while this one is copied.
        if let Some(&(_, next)) = leaving.picked.get(i + 1) {
            io.prefetch_slot(next);
        }
        let (block, slot) = leaving.picked[i];
        if !tiers.ram.is_evicting(slot, part) {
            tiers.log.arriving -= 1;
            continue;
        }
        let page = tiers.parts.get(part).staged.len();
        io.slot_to_part(slot, part, page * BLOCK_BYTES);
        let checksum = crc32c::crc32c(&io.part(part)[page * BLOCK_BYTES..][..BLOCK_BYTES]);
        let staged = Staged { block, location: Location(0), checksum, source: Source::Evict(slot) };
        tiers.parts.get(part).staged.push(staged);
    }
    leaving.next += n;
}
