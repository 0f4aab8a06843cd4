//! Eviction: cold blocks go from the RAM tier to the overflow log, in parts.
//!
//! Owns the part that is being filled. Invariants: background eviction starts no earlier than at 90% of the RAM limit; a block's
//! entry turns from RAM to overflow only if the block was not written while its copy was in flight.

use crate::engine::cached::tiers::{Append, Tiers};
use crate::engine::part::{Source, Staged, Stream};
use crate::io::{Io, PartId};
use crate::shared::Shared;
use spillway_layout::{BLOCK_BYTES, Block, Location, Slot, add};
use spillway_policy::Reserve;

/// Steps in which a part is filled. Each takes as long as a few requests.
const STEPS: u32 = 6;

/// A part with blocks that are being evicted, while they are copied.
struct EvictingPart {
    part: PartId,
    picked: Vec<(Block, Slot)>,
    /// How many of them have been copied or skipped.
    next: usize,
    /// A write waited for a slot when the part was picked.
    urgent: bool,
}

#[derive(Default)]
pub(super) struct Eviction {
    /// The part that blocks are copied to.
    evicting: Option<EvictingPart>,
    /// Set when eviction must continue in the next turn: a step has ended, or the clock hand found too few cold blocks.
    again: bool,
    /// Memory of the list of picked blocks, to be used again.
    picked: Vec<(Block, Slot)>,
}

impl Eviction {
    pub fn begin_turn(&mut self) {
        self.again = false;
    }

    pub fn has_more_work(&self) -> bool {
        self.again
    }

    /// Blocks that are picked and still to be copied, with their part; for the self-check.
    pub fn picked(&self) -> impl Iterator<Item = (PartId, Block, Slot)> {
        let evicting = self.evicting.iter();
        evicting.flat_map(|l| l.picked[l.next..].iter().map(|&(block, slot)| (l.part, block, slot)))
    }

    /// One step of eviction. A part is picked at once and copied in steps, so that no request waits until all of it is
    /// copied.
    pub fn step<I: Io>(&mut self, tiers: &mut Tiers, shared: &mut Shared, io: &mut I) {
        if tiers.stands_still(shared) || shared.overflow_is_backing_off() {
            if let Some(evicting) = self.evicting.take() {
                self.abort(tiers, evicting);
            }
            return;
        }
        let reserve = Reserve::of(tiers.ram.limit(), shared.spec.shape.part_blocks);
        let mut step = shared.spec.shape.part_blocks.div_ceil(STEPS) as usize;
        while let Some(mut evicting) = self.evicting.take().or_else(|| self.pick(tiers, shared, &reserve)) {
            let n = step.min(evicting.picked.len() - evicting.next);
            stage(tiers, io, &mut evicting, n);
            step -= n;
            if evicting.next < evicting.picked.len() {
                self.evicting = Some(evicting);
                self.again = true;
                return;
            }
            if tiers.parts.in_use_by(Stream::Write) >= reserve.write_depth(tiers.ram.used()) {
                // Full, and the one before it is still being written, whose end is a turn.
                self.evicting = Some(evicting);
                return;
            }
            self.picked = evicting.picked;
            match tiers.append(shared, io, evicting.part) {
                Append::Begun => {
                    let c = shared.counters();
                    add(if evicting.urgent { &c.evictions_urgent } else { &c.evictions_background }, 1);
                }
                Append::NoSegment => tiers.keep_in_ram(evicting.part),
                Append::Empty => {}
            }
            if self.again {
                return;
            }
        }
    }

    /// Picks cold blocks for a part, if some should be evicted now and can be.
    fn pick(&mut self, tiers: &mut Tiers, shared: &Shared, reserve: &Reserve) -> Option<EvictingPart> {
        let urgent = shared.admission.space_waiters() > 0 && tiers.ram.free() == 0;
        let staying = tiers.ram.used() - tiers.ram.evicting();
        let evictable = staying - tiers.merging_slots;
        let should = reserve.must_evict(staying) || urgent && tiers.ram.evicting() == 0;
        if evictable == 0 || !should {
            return None;
        }
        if tiers.parts.in_use_by(Stream::Write) >= reserve.write_depth(tiers.ram.used()) {
            return None;
        }
        let n = reserve.batch().min(tiers.space_to_evict(shared).min(u64::from(u32::MAX)) as u32);
        let n = n.min(tiers.log.ready(Stream::Write, shared.map.meta())) as usize;
        if n == 0 {
            return None;
        }
        let part = tiers.parts.take(Stream::Write)?;
        let mut picked = std::mem::take(&mut self.picked);
        picked.clear();
        tiers.ram.pick_cold(n, part, &mut picked);
        // The hand has used up its steps: it must be called again, or a waiting write would never go on.
        self.again |= picked.len() < n && picked.len() < evictable as usize;
        if picked.is_empty() {
            self.picked = picked;
            tiers.parts.release(part);
            return None;
        }
        tiers.log.arriving += picked.len() as u64;
        Some(EvictingPart { part, picked, next: 0, urgent })
    }

    /// Drops this part: its blocks stay in RAM.
    fn abort(&mut self, tiers: &mut Tiers, evicting: EvictingPart) {
        let EvictingPart { part, picked, next, .. } = evicting;
        for &(_, slot) in &picked[next..] {
            tiers.keep_slot(slot, part);
        }
        self.picked = picked;
        tiers.keep_in_ram(part);
    }
}

/// Copies the next `n` picked blocks to their part, without those that were written or discarded meanwhile.
fn stage<I: Io>(tiers: &mut Tiers, io: &mut I, evicting: &mut EvictingPart, n: usize) {
    let part = evicting.part;
    for i in evicting.next..evicting.next + n {
        // A cold slot's page is far away: the next one's is looked up while this one is copied.
        if let Some(&(_, next)) = evicting.picked.get(i + 1) {
            io.prefetch_slot(next);
        }
        let (block, slot) = evicting.picked[i];
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
    evicting.next += n;
}
