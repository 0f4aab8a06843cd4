//! The write cache's self-check: every invariant that its own state, the map and the operations in flight can show.

use crate::engine::cached::Cached;
use crate::engine::part::{Extent, PartState, Source};
use crate::entry::Place;
use crate::ops::{MergeTo, Op};
use crate::shared::Shared;
use crate::table::Id;
use spillway_layout::{Block, Location, Slot};
use std::collections::HashSet;

impl std::fmt::Debug for Cached {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let log = &self.tiers.log;
        f.debug_struct("Cached")
            .field("parts", &self.tiers.parts)
            .field("unflushed", &self.tiers.unflushed)
            .field("victim", &self.collector.segment())
            .field("live", &log.live())
            .field("arriving", &log.arriving)
            .field("space", &log.space())
            .finish_non_exhaustive()
    }
}

impl Cached {
    /// The checks that cost next to nothing: the limits, and the state of one block.
    pub fn check_step(&self, block: Block, place: Place) {
        let (ram, log) = (&self.tiers.ram, &self.tiers.log);
        ram.check_step();
        assert!(log.file_blocks() <= log.most_file_blocks(), "file over its limit");
        match place {
            Place::Ram(slot) => assert_eq!(ram.owner(slot), Some(block), "owner of {slot:?}"),
            Place::Overflow(location, _) => {
                assert!(log.live_in(log.segment_of(location)) > 0, "{location:?} lives in an empty segment");
            }
            Place::Base | Place::Zero => {}
        }
    }

    /// Panics if an invariant is broken, and names it.
    pub fn check(&self, shared: &Shared, placed: impl Iterator<Item = (Block, Place)>) {
        let tiers = &self.tiers;
        let mut owners = vec![None; tiers.ram.total() as usize];
        let mut live = vec![0u32; tiers.log.segments_used() as usize];
        let mut at = HashSet::new();
        for (block, place) in placed {
            match place {
                Place::Base | Place::Zero => {}
                Place::Ram(Slot(slot)) => {
                    let taken = owners[slot as usize].replace(block);
                    assert_eq!(taken, None, "slot {slot} has two owners");
                }
                Place::Overflow(location, _) => {
                    assert!(at.insert(location), "{location:?} has two owners");
                    live[tiers.log.segment_of(location) as usize] += 1;
                }
            }
        }
        let merging = |op: &&Op| matches!(op, Op::Merge(m) if matches!(m.to, MergeTo::Slot(_)));
        let reserved = shared.ops.iter().filter(merging).count() as u32;
        assert_eq!(tiers.merging_slots, reserved);
        tiers.ram.check(&|slot| owners[slot.0 as usize], reserved);
        if tiers.evicts() {
            self.check_eviction();
        }
        let pins = |segment: u32| self.pins(shared, segment);
        tiers.log.check(&|segment| live[segment as usize], &pins, shared.map.meta());
    }

    /// Reads and writes of a segment that are in flight, and the collector's hold on it.
    fn pins(&self, shared: &Shared, segment: u32) -> u32 {
        let of = |l: Location| u32::from(self.tiers.log.segment_of(l) == segment);
        let reads = shared.ops.iter().map(|op| match op {
            Op::OverflowRead(read) => of(read.location),
            Op::Merge(m) => m.location.map_or(0, of),
            _ => 0,
        });
        let writing = |state, extent: Option<Extent>| {
            state == PartState::Writing && extent.is_some_and(|e| e.segment == segment)
        };
        let writes = self.tiers.parts.iter().filter(|(_, p)| writing(p.state, p.extent)).count() as u32;
        reads.sum::<u32>() + writes + u32::from(self.collector.segment() == Some(segment))
    }

    /// Each block that is being evicted is in one part, once: copied, or picked and still to be copied.
    fn check_eviction(&self) {
        let (ram, log) = (&self.tiers.ram, &self.tiers.log);
        let staged = self.tiers.parts.iter().flat_map(|(id, part)| {
            part.staged.iter().filter_map(move |s| match s.source {
                Source::Evict(slot) => Some((id, s.block, slot)),
                Source::Collect(_) | Source::Write(_) => None,
            })
        });
        let all: Vec<_> = staged.chain(self.eviction.picked()).collect();
        assert_eq!(log.arriving, all.len() as u64, "blocks that will arrive in the log");
        let still: Vec<_> = all.into_iter().filter(|&(part, _, slot)| ram.is_evicting(slot, part)).collect();
        assert_eq!(ram.evicting() as usize, still.len(), "slots being evicted");
        for (_, block, slot) in still {
            assert_eq!(ram.owner(slot), Some(block), "{slot:?} is being evicted");
        }
    }

    /// Slots that the blocks of a new write can take at once: the free ones, without the one that a full log keeps for
    /// writes that replace a block of it.
    pub fn slots_to_take(&self) -> u32 {
        self.tiers.ram.free().saturating_sub(u32::from(self.tiers.log.is_over()))
    }

    /// Blocks of a request that wait for a segment.
    pub fn blocks_without_segment(&self, id: Id) -> usize {
        let unflushed = self.tiers.parts.iter().filter(|(part, _)| self.tiers.unflushed.contains(part));
        let blocks = unflushed.flat_map(|(_, part)| &part.staged);
        blocks.filter(|s| matches!(s.source, Source::Write(of) if of == id)).count()
    }

    /// Panics if a disk without I/O errors is about to sleep although there is space for requests that wait for some.
    pub fn check_rest(&self, shared: &Shared) {
        let tiers = &self.tiers;
        if shared.admission.space_waiters() > 0 {
            if tiers.has_ram {
                assert!(tiers.ram.free() <= u32::from(tiers.log.is_over()), "free slots while writes wait");
            }
            assert_eq!(tiers.first_that_replaces(shared), None, "a write of what is there waits");
            assert!(!tiers.has_log || tiers.log.space() == 0, "space in the log while writes wait");
        }
        assert!(tiers.unflushed.is_empty(), "parts without a segment, and no error");
    }

    pub fn parts(&self) -> &crate::engine::part::Parts {
        &self.tiers.parts
    }
}
