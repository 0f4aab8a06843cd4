//! The collector: moves the living blocks out of the emptiest segments when free segments run short.
//!
//! One victim at a time: read its summary, read its living blocks and only those, check them, append them to
//! the collector's own segment. Invariant: what a summary says is a hint; a block is moved only if the map
//! says that it lives there, and the victim is free only when the map says that nothing does.

use crate::counters::add;
use crate::disk::Disk;
use crate::entry::Place;
use crate::error::Errno;
use crate::evict::read_summary;
use crate::health::RETRY_NS;
use crate::io::{Event, Io, PartId};
use crate::log::Stream;
use crate::ops::Op;
use crate::part::{Source, Staged};
use crate::units::{BLOCK_BYTES, Block, Location};

/// Adjacent living blocks that one read fetches at most.
const RUN_BLOCKS: usize = 16;

/// The segment that is being emptied.
pub(crate) struct Victim {
    segment: u32,
    /// The summary is being read.
    reading_summary: bool,
    /// Blocks that lived here when the summary was read, by location.
    blocks: Vec<(Block, Location)>,
    /// How many of them were dealt with.
    next: usize,
    /// Reads under way.
    reads: u32,
    /// The part that takes their blocks.
    part: Option<PartId>,
    /// Parts being written.
    writes: u32,
}

impl Disk {
    pub(crate) fn collect<I: Io>(&mut self, io: &mut I) {
        if self.victim.is_none() {
            // Less may live now than did, and the file may have shrunk.
            self.log.lower_ceiling(&self.meta);
            let useful = self.log.wants_collection() && self.log.can_collect();
            if self.stands_still() || self.health.rests(self.now_ns) || !useful {
                return;
            }
            let Some(segment) = self.log.emptiest() else {
                // Some could not be emptied: their reads may succeed later.
                if self.log.has_stuck() && self.now_ns >= self.collect_again_ns {
                    if self.collect_again_ns != 0 {
                        self.log.retry_stuck();
                    }
                    self.collect_again_ns = self.now_ns + RETRY_NS;
                }
                return;
            };
            self.log.pin(segment);
            self.victim = Some(Victim {
                segment,
                reading_summary: false,
                blocks: Vec::new(),
                next: 0,
                reads: 0,
                part: None,
                writes: 0,
            });
            if let Some(owners) = self.log.kept_owners.get(&segment).cloned() {
                self.find_living(segment, &owners);
            } else {
                let location = self.log.summary_location(segment);
                self.victim.as_mut().expect("set above").reading_summary = true;
                self.count_read(BLOCK_BYTES);
                let op = self.ops.begin(Op::Summary { segment });
                io.read_overflow(op, location.offset_bytes(), BLOCK_BYTES as u32);
            }
        }
        self.move_blocks(io);
    }

    fn count_read(&self, bytes: usize) {
        self.counters().overflow.read(bytes as u64);
        add(&self.counters().collector_read_bytes, bytes as u64);
    }

    pub(crate) fn summary_done<I: Io>(&mut self, io: &mut I, segment: u32, bytes: Result<&[u8], Errno>) {
        let owners = bytes.ok().and_then(|b| read_summary(b, segment, self.log.data_blocks() as usize));
        self.victim.as_mut().expect("a summary is read for a victim").reading_summary = false;
        match owners {
            Some(owners) => self.find_living(segment, &owners),
            None => io.event(Event::SummaryUnusable),
        }
        self.move_blocks(io);
    }

    fn find_living(&mut self, segment: u32, owners: &[u32]) {
        let first = self.log.first_location(segment).0;
        let blocks = owners
            .iter()
            .enumerate()
            .map(|(i, &owner)| (Block(owner), Location(first + i as u32)))
            .filter(|&at| at.0.0 < self.spec.blocks() && self.lives_at(at))
            .collect();
        self.victim.as_mut().expect("called for a victim").blocks = blocks;
    }

    /// The block is still where the summary said. Else it was written or discarded meanwhile.
    fn lives_at(&self, (block, location): (Block, Location)) -> bool {
        matches!(self.place(block), Place::Overflow(here, _) if here == location)
    }

    /// Carries the collection on as far as it goes.
    pub(crate) fn move_blocks<I: Io>(&mut self, io: &mut I) {
        let Some(victim) = &mut self.victim else { return };
        if victim.reading_summary || victim.reads > 0 {
            return;
        }
        if let Some(part) = victim.part.take() {
            // All reads of this part are in.
            if self.parts.get(part).staged.is_empty() {
                self.parts.release(part);
            } else {
                victim.writes += 1;
                self.flush_part(io, part);
            }
        }
        let mut victim = self.victim.take().expect("still there");
        while victim.blocks.get(victim.next).is_some_and(|&b| !self.lives_at(b)) {
            victim.next += 1;
        }
        let victim = self.victim.insert(victim);
        if victim.next < victim.blocks.len() {
            let room = self.log.ready(Stream::Collect, &self.meta) as usize;
            if room == 0 {
                // Victims that could not be emptied have cost the segments to move to. Nothing may wait for
                // this one, least of all a reset: it is tried again when a segment has come free.
                if victim.writes == 0 {
                    let segment = victim.segment;
                    self.victim = None;
                    self.log.unpin(segment, &self.meta);
                }
                return;
            }
            let Some(part) = self.parts.take(Stream::Collect) else { return };
            victim.part = Some(part);
            self.read_living(io, part, room);
        } else if victim.writes == 0 {
            let segment = victim.segment;
            if self.log.live_in(segment) > 0 {
                self.log.set_stuck(segment);
            }
            self.victim = None;
            self.log.unpin(segment, &self.meta);
        }
    }

    /// Reads the next `room` blocks that still live in the victim.
    fn read_living<I: Io>(&mut self, io: &mut I, part: PartId, room: usize) {
        let mut victim = self.victim.take().expect("called for a victim");
        let end = victim.blocks.len().min(victim.next + room);
        while victim.next < end {
            let first = victim.next;
            let adjacent = |i: usize| victim.blocks[i].1.0 == victim.blocks[first].1.0 + (i - first) as u32;
            let most = end.min(first + RUN_BLOCKS);
            let n = (first..most).take_while(|&i| adjacent(i) && self.lives_at(victim.blocks[i])).count();
            if n == 0 {
                victim.next += 1;
                continue;
            }
            victim.next += n;
            victim.reads += 1;
            self.count_read(n * BLOCK_BYTES);
            let op = self.ops.begin(Op::Collect { part, first, n });
            io.read_overflow(op, victim.blocks[first].1.offset_bytes(), (n * BLOCK_BYTES) as u32);
        }
        self.victim = Some(victim);
    }

    pub(crate) fn collect_read_done<I: Io>(
        &mut self,
        io: &mut I,
        part: PartId,
        first: usize,
        n: usize,
        bytes: Result<&[u8], Errno>,
    ) {
        let mut victim = self.victim.take().expect("a victim's blocks are read");
        victim.reads -= 1;
        if let Ok(bytes) = bytes {
            for (content, &(block, location)) in
                bytes.chunks_exact(BLOCK_BYTES).zip(&victim.blocks[first..first + n])
            {
                // Written or discarded meanwhile: nothing to move. Damaged: it stays, and with it the segment.
                let Place::Overflow(here, checksum) = self.place(block) else { continue };
                if here != location || self.verify(io, block, content).is_err() {
                    continue;
                }
                let page = self.parts.get(part).staged.len();
                io.part(part)[page * BLOCK_BYTES..][..BLOCK_BYTES].copy_from_slice(content);
                let source = Source::Collect(self.meta.entry(block));
                self.parts.get(part).staged.push(Staged { block, location, checksum, source });
            }
        }
        self.victim = Some(victim);
        self.move_blocks(io);
    }

    /// A part of moved blocks is written.
    pub(crate) fn collect_part_done(&mut self) {
        if let Some(victim) = &mut self.victim {
            victim.writes -= 1;
        }
    }

    /// The segment that the collector holds, for the self-check.
    pub(crate) fn victim_segment(&self) -> Option<u32> {
        self.victim.as_ref().map(|v| v.segment)
    }
}
