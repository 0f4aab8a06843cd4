//! The two tiers of the write cache and the staging buffers between them: what writes, eviction and the collector share.
//!
//! Owns the allocation and the release of a block's space; never decides what is evicted. Invariant: the space of a block's old
//! content is freed with the commit of its new place.

use crate::engine::cached::log::Log;
use crate::engine::cached::ram::{DataMemory, RamTier};
use crate::engine::cached::summary::write_summary;
use crate::engine::part::Stream;
use crate::engine::part::{PartState, Parts, Source, Staged};
use crate::entry::{Entry, Place};
use crate::error::Errno;
use crate::io::{Event, Io, PartId};
use crate::map::BlockMap;
use crate::ops::Op;
use crate::shared::Shared;
use crate::table::{Active, Id, Wait};
use spillway_layout::{BLOCK_BYTES, Block, DiskSpec, Location, Mode, Slot, add};
use std::collections::VecDeque;

pub(super) struct Tiers {
    pub ram: RamTier,
    pub log: Log,
    pub parts: Parts,
    /// Which of the two exist.
    pub has_ram: bool,
    pub has_log: bool,
    /// Parts whose append must wait for a segment.
    pub unflushed: VecDeque<PartId>,
    /// Reserved slots for blocks whose old content is being read.
    pub merging_slots: u32,
}

/// The outcome of appending a part.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Append {
    /// Its write has begun.
    Begun,
    /// Nothing was in it.
    Empty,
    /// There is no segment for it any more: one was closed after a failed write.
    NoSegment,
}

impl Tiers {
    pub fn new(spec: &DiskSpec, data: DataMemory) -> Tiers {
        let (has_ram, has_log) = (spec.mode.has_ram(), spec.mode.has_log());
        let data = if has_ram { data } else { DataMemory { bytes: 0, huge_pages: false } };
        Tiers {
            ram: RamTier::new(spec.slots(), data),
            log: Log::new(spec.shape, spec.segments()),
            parts: Parts::new(),
            has_ram,
            has_log,
            unflushed: VecDeque::new(),
            merging_slots: 0,
        }
    }

    /// Whether blocks are evicted: there are both tiers.
    pub fn evicts(&self) -> bool {
        self.has_ram && self.has_log
    }

    /// The commit: the block's newest content is `entry`'s from here on. The space of its old content is freed.
    #[inline]
    pub fn commit(&mut self, map: &mut BlockMap, block: Block, entry: Entry) {
        let old = map.commit(block, entry);
        self.give_up(map, old, entry == Entry::ZERO);
    }

    /// Frees the space of a block's old content. Returns the bytes freed.
    #[inline]
    pub fn give_up(&mut self, map: &BlockMap, old: Place, to_host: bool) -> u64 {
        match old {
            Place::Base | Place::Zero => return 0,
            Place::Ram(slot) => self.ram.release(slot, to_host),
            Place::Overflow(location, _) => self.log.dead(location, map.meta()),
        }
        BLOCK_BYTES as u64
    }

    /// Counts a read of this place that begins.
    pub fn pin(&mut self, location: Location) {
        let segment = self.log.segment_of(location);
        self.log.pin(segment);
    }

    /// Counts the end of such a read.
    pub fn unpin(&mut self, map: &BlockMap, location: Location) {
        let segment = self.log.segment_of(location);
        self.log.unpin(segment, map.meta());
    }

    /// Checks a block's content, read from the log, against the checksum in its map entry. The entry may
    /// name another location than was read (the collector moved the block meanwhile): content and checksum
    /// are the same there. Or a slot (another read promoted it): that holds what was found right then.
    pub fn verify<I: Io>(map: &BlockMap, io: &mut I, block: Block, content: &[u8]) -> Result<(), Errno> {
        let is_right = match map.place(block) {
            Place::Overflow(_, checksum) => crc32c::crc32c(content) == checksum,
            Place::Ram(slot) => content == io.slot(slot),
            Place::Base | Place::Zero => true,
        };
        if is_right {
            return Ok(());
        }
        add(&map.counters().checksum_mismatches, 1);
        io.event(Event::ChecksumMismatch);
        Err(Errno::IO)
    }

    // Space.

    /// Whether there is space for a write that needs some.
    #[inline]
    pub fn has_space(&self) -> bool {
        if self.has_ram { self.ram.free() > u32::from(self.log.is_over()) } else { self.log.space() > 0 }
    }

    /// Whether a request waits for a slot or for a segment.
    pub fn wants_space(&self, shared: &Shared) -> bool {
        shared.admission.space_waiters() > 0 || !self.unflushed.is_empty()
    }

    /// Whether eviction and collection must start nothing, because a reset or the end waits for I/O in flight.
    pub fn stands_still(&self, shared: &Shared) -> bool {
        shared.resetting || shared.winding_down && !self.wants_space(shared)
    }

    /// A slot for the request's next block, whose old place is `old`. Without one the request waits. No request overtakes those
    /// that wait already, except writes that replace a block of a full log: one slot is reserved for them.
    #[inline]
    pub fn slot_for<I: Io>(
        &mut self,
        shared: &Shared,
        io: &mut I,
        a: &mut Active,
        old: Place,
    ) -> Option<Slot> {
        let replaces = self.log.is_over() && matches!(old, Place::Overflow(..));
        let may = replaces || self.has_space() && shared.admission.may_take_space(a);
        let slot = if may { self.ram.allocate(io, shared.map.meta()) } else { None };
        if slot.is_none() {
            a.wait = Wait::Space;
        }
        slot
    }

    /// Whether the log can take another block of the request, whose old place is `old`. If not, the request waits.
    pub fn log_has_space_for(&self, shared: &Shared, a: &mut Active, old: Place) -> bool {
        let overwrites = matches!(old, Place::Overflow(..));
        let space = overwrites || self.log.space() > 0 && shared.admission.may_take_space(a);
        if !space {
            a.wait = Wait::Space;
        }
        space
    }

    /// Which of the requests that wait for space could go on now: the first, or with a full log the first that replaces one of
    /// its blocks.
    #[inline]
    pub fn next_to_serve(&self, shared: &Shared) -> Option<usize> {
        if shared.admission.space_waiters() == 0 { None } else { self.next_of_waiting(shared) }
    }

    fn next_of_waiting(&self, shared: &Shared) -> Option<usize> {
        let can_take = if self.has_ram {
            self.ram.free() > 0
        } else {
            self.unflushed.is_empty()
                && !shared.overflow_is_backing_off()
                && self.log.can_write()
                && self.parts.can_take(Stream::Write)
        };
        match () {
            () if !can_take => None,
            () if self.has_space() => Some(0),
            () => self.first_that_replaces(shared),
        }
    }

    /// The first waiting write whose next block is in the log.
    pub fn first_that_replaces(&self, shared: &Shared) -> Option<usize> {
        let in_log = |a: &Active| matches!(shared.map.place(shared.piece(a).block), Place::Overflow(..));
        shared.admission.position_of_space_waiter(in_log)
    }

    /// Blocks that eviction may add to the log. A full log takes one more for a write that replaces a block in it: the freed
    /// slot is for such a write only, and with its commit the log holds one block less.
    pub fn space_to_evict(&self, shared: &Shared) -> u64 {
        match self.log.space() {
            0 if self.ram.free() == 0 && self.ram.evicting() == 0 => {
                u64::from(self.first_that_replaces(shared).is_some())
            }
            space => space,
        }
    }

    /// Blocks beyond this limit of slots that eviction still has to pick. Those that are being evicted do not count: they have
    /// their place in the log already.
    pub fn beyond_ram(&self, slots: u32) -> u64 {
        (self.ram.used() - self.ram.evicting()).saturating_sub(slots).into()
    }

    // Parts.

    /// Appends a part's blocks to its stream's segment and starts the write. Without a segment the part stays as it is.
    pub fn append<I: Io>(&mut self, shared: &mut Shared, io: &mut I, id: PartId) -> Append {
        let part = self.parts.get(id);
        let (stream, n) = (part.stream, part.staged.len() as u32);
        if n == 0 {
            self.parts.release(id);
            return Append::Empty;
        }
        if !self.log.make_ready(stream, n, shared.map.meta()) {
            return Append::NoSegment;
        }
        let extent = self.log.append(stream, part.staged.iter().map(|s| s.block.0));
        for (i, staged) in part.staged.iter_mut().enumerate() {
            staged.location = Location(extent.first.0 + i as u32);
        }
        part.state = PartState::Writing;
        part.extent = Some(extent);
        let mut pages = part.staged.len();
        if extent.seals {
            let owners = self.log.close(stream);
            let page = &mut io.part(id)[pages * BLOCK_BYTES..][..BLOCK_BYTES];
            write_summary(page, extent.segment, &owners);
            self.log.kept_owners.insert(extent.segment, owners);
            pages += 1;
            add(&shared.counters().summaries, 1);
        }
        let bytes = (pages * BLOCK_BYTES) as u32;
        shared.counters().overflow.write(u64::from(bytes));
        let op = shared.ops.begin(Op::PartWrite { part: id });
        io.write_overflow(op, id, 0, extent.first.offset_bytes(), bytes, false);
        Append::Begun
    }

    /// Commits those blocks of a written part that are still what they were when they were copied to it; with a failed write
    /// none. Returns how many.
    pub fn commit_part(
        &mut self,
        shared: &mut Shared,
        id: PartId,
        staged: &[Staged],
        is_written: bool,
    ) -> usize {
        let mut committed = 0;
        for s in staged {
            let old = shared.map.place(s.block);
            let current = match s.source {
                Source::Evict(slot) => {
                    self.log.arriving -= 1;
                    let current = old == Place::Ram(slot) && self.ram.is_evicting(slot, id);
                    if current && !is_written {
                        self.ram.keep(slot);
                    }
                    current
                }
                // Of a region that is not mapped no entry is read: that would allocate it.
                Source::Collect(entry) => {
                    matches!(old, Place::Overflow(..)) && shared.map.entry(s.block) == entry
                }
                Source::Write(_) => {
                    self.log.arriving -= u64::from(!matches!(old, Place::Overflow(..)));
                    true
                }
            };
            if !current || !is_written {
                continue;
            }
            committed += 1;
            self.log.born(s.location);
            self.commit(&mut shared.map, s.block, Entry::overflow(s.location, s.checksum));
            let c = shared.counters();
            match s.source {
                Source::Evict(_) => add(&c.evictions_blocks, 1),
                Source::Collect(_) => add(&c.collector_moved_blocks, 1),
                Source::Write(_) => add(&c.overflow_guest_blocks, 1),
            }
        }
        committed
    }

    /// Keeps the blocks of a part in the slots that it was to empty.
    pub fn keep_in_ram(&mut self, part: PartId) {
        for staged in std::mem::take(&mut self.parts.get(part).staged) {
            let Source::Evict(slot) = staged.source else { unreachable!("blocks from RAM") };
            self.keep_slot(slot, part);
        }
        self.parts.release(part);
    }

    /// The same for one slot, if it still holds the content that the part has copied.
    pub fn keep_slot(&mut self, slot: Slot, part: PartId) {
        self.log.arriving -= 1;
        if self.ram.is_evicting(slot, part) {
            self.ram.keep(slot);
        }
    }

    /// Adds a request's block to a part; its content is in that page.
    pub fn stage_write<I: Io>(
        &mut self,
        map: &BlockMap,
        io: &mut I,
        id: Id,
        block: Block,
        part: PartId,
        page: usize,
    ) {
        let checksum = crc32c::crc32c(&io.part(part)[page * BLOCK_BYTES..][..BLOCK_BYTES]);
        if !matches!(map.place(block), Place::Overflow(..)) {
            self.log.arriving += 1;
        }
        let staged = Staged { block, location: Location(0), checksum, source: Source::Write(id) };
        self.parts.get(part).staged.push(staged);
    }

    /// Whether the log can get no space now: it is full, backs off after errors, or has neither a free segment nor one to
    /// collect.
    pub fn log_is_full(&self, shared: &Shared) -> bool {
        let space = if self.has_ram { self.space_to_evict(shared) } else { self.log.space() };
        space == 0
            || shared.overflow_is_backing_off()
            || !(self.log.can_write() || self.log.can_collect() && self.log.emptiest().is_some())
    }

    /// The mode, by the tiers that exist.
    pub fn mode(&self) -> Mode {
        match (self.has_ram, self.has_log) {
            (true, true) => Mode::RamOverflow,
            (true, false) => Mode::Ram,
            (false, _) => Mode::Overflow,
        }
    }
}
