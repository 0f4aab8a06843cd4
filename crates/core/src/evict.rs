//! Eviction: cold blocks go from the RAM tier to the overflow log, in parts; and the writing of parts.
//!
//! Invariants: background eviction starts no earlier than at 90% of the RAM limit; a block's entry turns from
//! RAM to overflow only if the block was not written while its copy was under way.

use crate::counters::add;
use crate::disk::Disk;
use crate::entry::{Entry, Place};
use crate::error::Errno;
use crate::health::{RETRY_NS, WRITE_TRIES};
use crate::io::{Event, Io, PartId};
use crate::log::{Doubt, Log, Stream};
use crate::ops::Op;
use crate::part::{PartState, Source, Staged};
use crate::spec::{FullPolicy, Mode};
use crate::units::{BLOCK_BYTES, Block, Location, Slot};

/// Parts of eviction under way at a time, one being written and one being filled, while enough of the reserve is free: with
/// more, beside 16 requests, nothing is faster and reads wait longer.
const WRITE_DEPTH: usize = 2;
/// Steps in which a part is filled: each as long as a few requests take.
const STEPS: u32 = 6;
/// Punches of empty segments under way at a time.
const PUNCHES: u32 = 2;
/// How long no segment must have been filled before empty ones leave the file.
const QUIET_NS: u64 = 500_000_000;
/// First bytes of a summary block.
pub(crate) const SUMMARY_MAGIC: u32 = u32::from_le_bytes(*b"SPLS");
/// Bytes of a summary before its owners: magic, checksum of the rest, segment, count.
pub(crate) const SUMMARY_HEADER: usize = 16;

/// A part of blocks that leave RAM, while they are copied.
pub(crate) struct Leaving {
    part: PartId,
    picked: Vec<(Block, Slot)>,
    /// How many of them have been copied or passed over.
    next: usize,
    /// A write waits for a slot.
    urgent: bool,
}

impl Leaving {
    /// What is picked and still to be copied, with its part.
    pub fn rest(&self) -> impl Iterator<Item = (PartId, Block, Slot)> {
        self.picked[self.next..].iter().map(|&(block, slot)| (self.part, block, slot))
    }
}

impl Disk {
    /// Slots that stay free at rest: a tenth of the tier, at most 64 MiB.
    pub(crate) fn free_target(&self) -> u32 {
        (self.ram.limit() / 10).clamp(1, 16 * 1024)
    }

    /// Parts of eviction that may be under way now. One more when a quarter of the reserve is left, and another when an eighth
    /// is: writers are faster than one write at a time then.
    fn write_depth(&self) -> usize {
        let (free, reserve) = (self.ram.limit().saturating_sub(self.ram.used()), self.free_target());
        WRITE_DEPTH + usize::from(free < reserve / 4) + usize::from(free < reserve / 8)
    }

    /// Moves eviction on by a step. A part is picked at once and copied in steps, so that no request waits for the
    /// copying of all of it.
    pub(crate) fn evict<I: Io>(&mut self, io: &mut I) {
        if self.spec.mode != Mode::RamOverflow {
            return;
        }
        if self.stands_still() || self.health.rests(self.now_ns) {
            if let Some(leaving) = self.leaving.take() {
                self.let_stay(leaving);
            }
            return;
        }
        let mut step = self.spec.shape.part_blocks.div_ceil(STEPS) as usize;
        while let Some(mut leaving) = self.leaving.take().or_else(|| self.pick_leaving()) {
            let n = step.min(leaving.picked.len() - leaving.next);
            self.stage(io, &mut leaving, n);
            step -= n;
            if leaving.next < leaving.picked.len() {
                self.leaving = Some(leaving);
                self.evict_again = true;
                return;
            }
            if self.parts.in_use_by(Stream::Write) >= self.write_depth() {
                // Full, and the one before it is still being written, whose end is a turn.
                self.leaving = Some(leaving);
                return;
            }
            self.picked = leaving.picked;
            if self.flush_part(io, leaving.part) {
                let c = self.counters();
                add(if leaving.urgent { &c.evictions_urgent } else { &c.evictions_background }, 1);
            }
            if self.evict_again {
                return;
            }
        }
    }

    /// Picks cold blocks for a part, if some should leave now and can.
    fn pick_leaving(&mut self) -> Option<Leaving> {
        let urgent = !self.room_waiters.is_empty() && self.ram.free() == 0;
        let batch = (self.free_target() / 4).clamp(1, self.spec.shape.part_blocks);
        let high = self.ram.limit() - self.free_target();
        let staying = self.ram.used() - self.ram.evicting();
        let could_leave = staying - self.merging_slots;
        if could_leave == 0 || staying < high + batch && !(urgent && self.ram.evicting() == 0) {
            return None;
        }
        if self.parts.in_use_by(Stream::Write) >= self.write_depth() {
            return None;
        }
        let n = batch.min(self.room_to_evict().min(u64::from(u32::MAX)) as u32);
        let n = n.min(self.log.ready(Stream::Write, &self.meta)) as usize;
        if n == 0 {
            return None;
        }
        let part = self.parts.take(Stream::Write)?;
        let mut picked = std::mem::take(&mut self.picked);
        picked.clear();
        self.ram.pick_cold(n, part, &mut picked);
        // The hand has gone its steps: it must be called again, or a waiting write would never move.
        self.evict_again |= picked.len() < n && picked.len() < could_leave as usize;
        if picked.is_empty() {
            self.picked = picked;
            self.parts.release(part);
            return None;
        }
        self.log.arriving += picked.len() as u64;
        Some(Leaving { part, picked, next: 0, urgent })
    }

    /// Copies the next `n` picked blocks to their part, but for those that were written or discarded meanwhile.
    fn stage<I: Io>(&mut self, io: &mut I, leaving: &mut Leaving, n: usize) {
        let part = leaving.part;
        for i in leaving.next..leaving.next + n {
            // A cold slot's page is far away: the next one's is looked up while this one is copied.
            if let Some(&(_, next)) = leaving.picked.get(i + 1) {
                io.prefetch_slot(next);
            }
            let (block, slot) = leaving.picked[i];
            if !self.ram.is_evicting(slot, part) {
                self.log.arriving -= 1;
                continue;
            }
            let page = self.parts.get(part).staged.len();
            io.slot_to_part(slot, part, page * BLOCK_BYTES);
            let checksum = crc32c::crc32c(&io.part(part)[page * BLOCK_BYTES..][..BLOCK_BYTES]);
            let staged = Staged { block, location: Location(0), checksum, source: Source::Evict(slot) };
            self.parts.get(part).staged.push(staged);
        }
        leaving.next += n;
    }

    /// Nothing leaves with this part: its blocks stay in RAM.
    fn let_stay(&mut self, leaving: Leaving) {
        let Leaving { part, picked, next, .. } = leaving;
        for &(_, slot) in &picked[next..] {
            self.log.arriving -= 1;
            if self.ram.is_evicting(slot, part) {
                self.ram.keep(slot);
            }
        }
        self.picked = picked;
        self.unstage(part);
    }

    /// The same of those that are in the part already.
    fn unstage(&mut self, part: PartId) {
        for staged in std::mem::take(&mut self.parts.get(part).staged) {
            let Source::Evict(slot) = staged.source else { unreachable!("blocks from RAM") };
            self.log.arriving -= 1;
            if self.ram.is_evicting(slot, part) {
                self.ram.keep(slot);
            }
        }
        self.parts.release(part);
    }

    /// Writes what has gathered in mode `overflow`, and parts that had to wait for a segment, oldest first.
    pub(crate) fn flush_parts<I: Io>(&mut self, io: &mut I) {
        if self.spec.mode != Mode::Overflow {
            return;
        }
        if let Some(part) = self.parts.filling(Stream::Write) {
            self.flush_part(io, part);
        }
        while let Some(&part) = self.unflushed.front() {
            if self.health.rests(self.now_ns) {
                return;
            }
            if self.log.ready(Stream::Write, &self.meta) == 0 {
                return;
            }
            self.unflushed.pop_front();
            self.flush_part(io, part);
        }
    }

    /// Appends a part's blocks to its stream's segment and starts the write. If there is no segment for them
    /// any more (one was given up after a failed write), requests' blocks wait for one and others stay where they
    /// are. Whether a write has begun.
    pub(crate) fn flush_part<I: Io>(&mut self, io: &mut I, id: PartId) -> bool {
        let part = self.parts.get(id);
        let (stream, n) = (part.stream, part.staged.len() as u32);
        if n == 0 {
            self.parts.release(id);
            return false;
        }
        if !self.log.make_ready(stream, n, &self.meta) {
            if stream == Stream::Collect {
                self.parts.release(id);
                self.collect_part_done();
            } else if self.spec.mode == Mode::RamOverflow {
                self.unstage(id);
            } else {
                part.state = PartState::Writing;
                self.unflushed.push_front(id);
            }
            return false;
        }
        let part = self.parts.get(id);
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
            add(&self.counters().summaries, 1);
        }
        let bytes = (pages * BLOCK_BYTES) as u32;
        self.counters().overflow.write(u64::from(bytes));
        let op = self.ops.begin(Op::PartWrite { part: id });
        io.write_overflow(op, id, 0, extent.first.offset_bytes(), bytes, false);
        true
    }

    /// A part's write has ended: commit those of its blocks that are still what they were.
    pub(crate) fn part_written<I: Io>(&mut self, io: &mut I, id: PartId, result: Result<(), Errno>) {
        let part = self.parts.get(id);
        let staged = std::mem::take(&mut part.staged);
        let extent = part.extent.expect("a part being written has an extent");
        let stream = part.stream;
        match result {
            Ok(()) => {
                self.health.write_succeeded(io, self.meta.counters());
                if extent.seals {
                    self.log.kept_owners.remove(&extent.segment);
                }
            }
            Err(errno) => {
                self.health.write_failed(io, self.meta.counters(), self.now_ns, errno);
                let doubt = if errno == Errno::NO_SPACE { Doubt::Room } else { Doubt::Spot };
                self.log.doubt(extent.segment, doubt);
                self.log.abandon(stream, extent.segment, &self.meta);
                let part = self.parts.get(id);
                part.failures += 1;
                // A request's blocks are tried in other segments; those from RAM stay there, and the collector's
                // where they are. When the file system is full, which may pass, they wait.
                let again = match errno {
                    Errno::NO_SPACE => self.spec.full == FullPolicy::Pause,
                    _ => part.failures < WRITE_TRIES,
                };
                if again && self.spec.mode == Mode::Overflow && stream == Stream::Write {
                    add(&self.counters().lost_blocks, staged.len() as u64);
                    let part = self.parts.get(id);
                    part.staged = staged;
                    part.extent = None;
                    self.unflushed.push_back(id);
                    self.log.appended(extent.segment, &self.meta);
                    self.drop_unflushed(io, |a| a.withdrawn);
                    return;
                }
            }
        }
        let mut lost = 0;
        for s in &staged {
            let old = self.place(s.block);
            let committed = match s.source {
                Source::Evict(slot) => {
                    self.log.arriving -= 1;
                    let current = old == Place::Ram(slot) && self.ram.is_evicting(slot, id);
                    if current && result.is_err() {
                        self.ram.keep(slot);
                    }
                    current && result.is_ok()
                }
                Source::Collect(entry) => {
                    // Of a region that is not mapped no entry is read: that would allocate it.
                    let current = matches!(old, Place::Overflow(..)) && self.meta.entry(s.block) == entry;
                    current && result.is_ok()
                }
                Source::Write(_) => {
                    if !matches!(old, Place::Overflow(..)) {
                        self.log.arriving -= 1;
                    }
                    result.is_ok()
                }
            };
            if !committed {
                lost += 1;
                continue;
            }
            self.log.born(s.location);
            self.commit(s.block, Entry::overflow(s.location, s.checksum));
            let c = self.meta.counters();
            match s.source {
                Source::Evict(_) => add(&c.evictions_blocks, 1),
                Source::Collect(_) => add(&c.collector_moved_blocks, 1),
                Source::Write(_) => add(&c.overflow_guest_blocks, 1),
            }
        }
        add(&self.counters().lost_blocks, lost);
        if !self.overflowed && self.log.live() > 0 {
            self.overflowed = true;
            io.event(Event::FirstOverflow);
        }
        for s in &staged {
            if let Source::Write(request) = s.source {
                self.operation_done(io, request, result);
            }
        }
        self.parts.get(id).staged = staged;
        self.parts.release(id);
        self.log.appended(extent.segment, &self.meta);
        if stream == Stream::Collect {
            self.collect_part_done();
            self.move_blocks(io);
        }
    }

    /// Empty segments beyond a few leave the file once no more are being filled; all of them at once when
    /// nothing lives in it, and what is over a limit that was lowered at once too. A file system may make a punch wait
    /// for the I/O under way, or the other way round.
    pub(crate) fn punch<I: Io>(&mut self, io: &mut I) {
        let all = self.log.live() == 0 && self.log.arriving == 0;
        let over = self.log.must_punch();
        if self.stands_still() || self.no_punching || !(over || self.log.has_to_punch(all)) {
            self.punch_after_ns = 0;
            return;
        }
        if !all && !over && (self.punch_after_ns == 0 || self.parts.in_use() > 0) {
            self.punch_after_ns = self.now_ns + QUIET_NS;
        }
        let more = |log: &Log| if over { log.must_punch() } else { log.has_to_punch(all) };
        while self.punches < PUNCHES && self.now_ns >= self.punch_after_ns && more(&self.log) {
            let segment = self.log.next_to_punch(&self.meta);
            self.punches += 1;
            let op = self.ops.begin(Op::Punch { segment });
            io.punch_overflow(op, self.log.first_location(segment).offset_bytes(), self.spec.segment_bytes());
        }
    }

    /// A segment has left the file, or not.
    pub(crate) fn punched(&mut self, segment: u32, result: Result<(), Errno>) {
        self.punches -= 1;
        self.log.punched(segment, result.is_ok(), &self.meta);
        match result {
            Ok(()) => add(&self.counters().segments_punched, 1),
            // Its blocks are reused all the same.
            Err(Errno::NOT_SUPPORTED) => self.no_punching = true,
            Err(_) => self.punch_after_ns = self.now_ns + RETRY_NS,
        }
    }
}

fn write_summary(page: &mut [u8], segment: u32, owners: &[u32]) {
    page.fill(0);
    page[0..4].copy_from_slice(&SUMMARY_MAGIC.to_le_bytes());
    page[8..12].copy_from_slice(&segment.to_le_bytes());
    page[12..16].copy_from_slice(&(owners.len() as u32).to_le_bytes());
    for (to, owner) in page[SUMMARY_HEADER..].chunks_exact_mut(4).zip(owners) {
        to.copy_from_slice(&owner.to_le_bytes());
    }
    let checksum = crc32c::crc32c(&page[8..]);
    page[4..8].copy_from_slice(&checksum.to_le_bytes());
}

/// The owners that a segment's summary names, if it is that segment's and unharmed.
pub(crate) fn read_summary(page: &[u8], segment: u32, most: usize) -> Option<Vec<u32>> {
    let word = |at: usize| Some(u32::from_le_bytes(page.get(at..at + 4)?.try_into().ok()?));
    let n = word(12)? as usize;
    if word(0)? != SUMMARY_MAGIC || word(8)? != segment || n > most || word(4)? != crc32c::crc32c(&page[8..])
    {
        return None;
    }
    (0..n).map(|i| word(SUMMARY_HEADER + 4 * i)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_summary_is_read_back_and_a_harmed_one_is_not() {
        let mut page = vec![0xAA; BLOCK_BYTES];
        let owners: Vec<u32> = (0..255).map(|i| i * 7).collect();
        write_summary(&mut page, 9, &owners);
        assert_eq!(read_summary(&page, 9, 255).as_deref(), Some(&owners[..]));
        assert_eq!(read_summary(&page, 8, 255), None, "another segment's");
        for bit in [0, 5 * 8, 9 * 8 + 1, 13 * 8, 700 * 8] {
            page[bit / 8] ^= 1 << (bit % 8);
            assert_eq!(read_summary(&page, 9, 255), None, "bit {bit}");
            page[bit / 8] ^= 1 << (bit % 8);
        }
        assert_eq!(read_summary(&page[..100], 9, 255), None, "cut short");
    }
}
