//! The disk's self-check: every invariant that its own state can show. For tests, the simulator and fuzzers;
//! it visits every block and slot.

use crate::counters::get;
use crate::disk::Disk;
use crate::entry::Place;
use crate::log::Stream;
use crate::meta::RegionState;
use crate::ops::{MergeTo, Op};
use crate::part::{PartState, Source};
use crate::spec::Mode;
use crate::table::Wait;
use crate::units::{BLOCK_BYTES, Block, Location, Slot};

impl std::fmt::Debug for Disk {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Disk")
            .field("spec", &self.spec)
            .field("unfinished", &self.table.iter().collect::<Vec<_>>())
            .field("operations", &self.ops.iter().filter(|op| !matches!(op, Op::Free)).collect::<Vec<_>>())
            .field("parts", &self.parts.iter().map(|(_, p)| p.state).collect::<Vec<_>>())
            .field("unflushed", &self.unflushed)
            .field("victim", &self.victim_segment())
            .field("live", &self.log.live())
            .field("arriving", &self.log.arriving)
            .field("room", &self.log.room())
            .finish_non_exhaustive()
    }
}

impl Disk {
    /// The part of [`Disk::check`] that costs next to nothing: the limits, and what is known of one block.
    pub fn check_step(&self, block: u32) {
        self.ram.check_step();
        if self.spec.mode.has_log() {
            assert!(self.log.file_blocks() <= self.log.most_file_blocks(), "file over its limit");
        }
        match self.place(Block(block)) {
            Place::Ram(slot) => assert_eq!(self.ram.owner(slot), Some(Block(block)), "owner of {slot:?}"),
            Place::Overflow(location, _) if self.spec.mode.has_log() => {
                assert!(
                    self.log.live_in(self.log.segment_of(location)) > 0,
                    "{location:?} lives in an empty segment"
                );
            }
            _ => {}
        }
    }

    /// Panics with what is wrong, if anything is.
    pub fn check(&self) {
        let mut owners = vec![None; self.ram.total() as usize];
        let mut live = vec![0u32; self.log.segments_used() as usize];
        let mut direct = 0;
        let mut at = std::collections::HashSet::new();
        for block in (0..self.spec.blocks()).map(Block) {
            let place = self.place(block);
            assert!(
                self.persistent.as_ref().is_none_or(|p| p.fits(block, place)),
                "{block:?} is at {place:?}"
            );
            match place {
                Place::Base | Place::Zero => {}
                Place::Ram(Slot(slot)) => {
                    let taken = owners[slot as usize].replace(block);
                    assert_eq!(taken, None, "slot {slot} has two owners");
                }
                Place::Overflow(location, _) => {
                    assert!(at.insert(location), "{location:?} has two owners");
                    if self.spec.mode.writes_in_place() {
                        assert_eq!(location, Location(block.0));
                        direct += 1;
                    } else {
                        live[self.log.segment_of(location) as usize] += 1;
                    }
                }
            }
        }
        assert_eq!(direct, self.direct_blocks);
        let merging = |op: &&Op| matches!(op, Op::Merge(m) if matches!(m.to, MergeTo::Slot(_)));
        let reserved = self.ops.iter().filter(merging).count() as u32;
        assert_eq!(self.merging_slots, reserved);
        self.ram.check(&|slot| owners[slot.0 as usize], reserved);
        let pins = |segment: u32| {
            let of = |l: Location| u32::from(self.log.segment_of(l) == segment);
            let reads: u32 = self
                .ops
                .iter()
                .map(|op| match op {
                    Op::OverflowRead { location, .. } => of(*location),
                    Op::Merge(m) => m.location.map_or(0, of),
                    _ => 0,
                })
                .sum();
            let writes = self.parts_writing(segment);
            reads + writes + u32::from(self.victim_segment() == Some(segment))
        };
        if self.spec.mode == Mode::RamOverflow {
            self.check_eviction();
        }
        if self.spec.mode.has_log() {
            self.log.check(&|segment| live[segment as usize], &pins, &self.meta);
        }
        let mapped = (0..self.meta.regions()).filter(|&r| self.meta.region(r) == RegionState::Mapped).count();
        let pages = mapped + self.word_pages.count();
        assert_eq!(get(&self.counters().map_bytes), (pages * BLOCK_BYTES) as u64, "map bytes");
        if self.table.is_empty() {
            self.check_counters();
        }
    }

    /// What leaves RAM is in one part, once: copied, or picked and still to be copied.
    fn check_eviction(&self) {
        let staged = self.parts.iter().flat_map(|(id, part)| {
            part.staged.iter().filter_map(move |s| match s.source {
                Source::Evict(slot) => Some((id, s.block, slot)),
                Source::Collect(_) | Source::Write(_) => None,
            })
        });
        let all: Vec<_> = staged.chain(self.leaving.iter().flat_map(|leaving| leaving.rest())).collect();
        assert_eq!(self.log.arriving, all.len() as u64, "blocks that will arrive in the log");
        let still: Vec<_> =
            all.into_iter().filter(|&(part, _, slot)| self.ram.is_evicting(slot, part)).collect();
        assert_eq!(self.ram.evicting() as usize, still.len(), "slots being evicted");
        for (_, block, slot) in still {
            assert_eq!(self.ram.owner(slot), Some(block), "{slot:?} is being evicted");
        }
    }

    /// Slots that the blocks of a new write can take at once: the free ones, but for that which a full log keeps for
    /// writes that replace. None while others wait for them.
    pub fn slots_to_take(&self) -> u32 {
        let kept = u32::from(self.log.is_over());
        if self.room_waiters.is_empty() { self.ram.free().saturating_sub(kept) } else { 0 }
    }

    /// Panics unless every unfinished request has something to wait for, of a disk that would sleep. On a
    /// `healthy` one without I/O errors, those that wait for room must find none.
    pub fn check_rest(&self, healthy: bool) {
        for (id, a) in self.table.iter() {
            let staged = self
                .parts
                .iter()
                .filter(|(part, _)| self.unflushed.contains(part))
                .flat_map(|(_, part)| &part.staged)
                .filter(|s| matches!(s.source, Source::Write(of) if of == id))
                .count();
            assert_eq!(a.pending as usize, staged, "operations of {a:?}");
            let waits = match a.wait {
                Wait::Room => self.room_waiters.contains(&id),
                Wait::Overlap => self.table.blocker_among_all(a).is_some(),
                Wait::Part => !self.parts.can_take(Stream::Write),
                Wait::Writes => self.table.earliest_writer().is_some_and(|writer| writer < a.sequence),
                Wait::Drain => self.is_draining(),
                Wait::Operations => a.pending > 0,
                Wait::Turn | Wait::Nothing => false,
            };
            assert!(waits, "nothing will wake {a:?}");
        }
        if healthy && !self.room_waiters.is_empty() {
            if self.spec.mode.has_ram() {
                assert!(self.ram.free() <= u32::from(self.log.is_over()), "free slots while writes wait");
            }
            assert_eq!(self.first_that_replaces(), None, "a write of what is there waits");
            assert!(!self.spec.mode.has_log() || self.log.room() == 0, "room in the log while writes wait");
        }
        assert!(!healthy || self.unflushed.is_empty(), "parts without a segment, and no error");
    }

    fn parts_writing(&self, segment: u32) -> u32 {
        self.parts
            .iter()
            .filter(|(_, p)| p.state == PartState::Writing && p.extent.is_some_and(|e| e.segment == segment))
            .count() as u32
    }

    /// The identities of `counters`. No request is unfinished.
    fn check_counters(&self) {
        let b = self.counters().balance();
        assert_eq!(b.read.0, b.read.1, "bytes read: by the guest, by plane");
        assert_eq!(b.written.0, b.written.1, "bytes written: by the guest, by plane");
        if self.parts.in_use() == 0 {
            assert_eq!(b.file.0, b.file.1, "bytes written to the file: by purpose, in all");
        }
    }
}
