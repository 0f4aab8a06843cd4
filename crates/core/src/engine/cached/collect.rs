//! The garbage collector: moves live blocks out of the segments with the fewest of them when free segments run short.
//!
//! One victim at a time: read its summary, read its live blocks and only those, check them, append them to
//! the collector's own segment. Invariant: a summary is a hint; a block is moved only if the map names its place in the
//! victim, and the victim is free only when the map names no place in it.

use crate::engine::cached::summary::read_summary;
use crate::engine::cached::tiers::{Append, Tiers};
use crate::engine::part::Stream;
use crate::engine::part::{Source, Staged};
use crate::entry::Place;
use crate::error::Errno;
use crate::health::RETRY_NS;
use crate::io::{Event, Io, PartId};
use crate::map::BlockMap;
use crate::ops::{CollectRead, Op};
use crate::shared::Shared;
use spillway_layout::{BLOCK_BYTES, Block, Counters, Location, add};

/// Adjacent live blocks that one read fetches at most.
const RUN_BLOCKS: usize = 16;

/// The segment that is being emptied.
#[derive(Default)]
struct Victim {
    segment: u32,
    /// The summary is being read.
    reading_summary: bool,
    /// Blocks that lived here when the summary was read, by location.
    blocks: Vec<(Block, Location)>,
    /// How many of them have been read or skipped.
    next: usize,
    /// Reads in flight.
    reads: u32,
    /// The part that is filled by these reads.
    part: Option<PartId>,
    /// Parts being written.
    writes: u32,
}

#[derive(Default)]
pub(super) struct Collector {
    victim: Option<Victim>,
    /// When segments that could not be emptied are tried again.
    again_ns: u64,
}

impl Collector {
    /// Whether a segment is being emptied.
    pub fn is_busy(&self) -> bool {
        self.victim.is_some()
    }

    /// When the collector must be called again even if nothing happens.
    pub fn deadline_ns(&self) -> u64 {
        self.again_ns
    }

    /// The segment that is being emptied, for the self-check.
    pub fn segment(&self) -> Option<u32> {
        self.victim.as_ref().map(|v| v.segment)
    }

    fn victim(&mut self) -> &mut Victim {
        self.victim.as_mut().expect("it is held until its operations have ended")
    }

    /// Begins to empty a segment if that is needed, and continues as far as possible without waiting.
    pub fn step<I: Io>(&mut self, tiers: &mut Tiers, shared: &mut Shared, io: &mut I) {
        if self.victim.is_none() && !self.begin(tiers, shared, io) {
            return;
        }
        self.move_blocks(tiers, shared, io);
    }

    fn begin<I: Io>(&mut self, tiers: &mut Tiers, shared: &mut Shared, io: &mut I) -> bool {
        // Fewer blocks may be live by now, and the file may have shrunk.
        tiers.log.lower_ceiling(shared.map.meta());
        let useful = tiers.log.wants_collection() && tiers.log.can_collect();
        if tiers.stands_still(shared) || shared.overflow_is_backing_off() || !useful {
            return false;
        }
        let Some(segment) = tiers.log.emptiest() else {
            // Some could not be emptied: their reads may succeed later.
            if tiers.log.has_stuck() && shared.now_ns() >= self.again_ns {
                if self.again_ns != 0 {
                    tiers.log.retry_stuck();
                }
                self.again_ns = shared.now_ns() + RETRY_NS;
            }
            return false;
        };
        tiers.log.pin(segment);
        let victim = self.victim.insert(Victim { segment, ..Victim::default() });
        if let Some(owners) = tiers.log.kept_owners.get(&segment) {
            victim.blocks = live_blocks(tiers, shared, segment, owners);
        } else {
            victim.reading_summary = true;
            count_read(shared.counters(), BLOCK_BYTES);
            let op = shared.ops.begin(Op::Summary { segment });
            io.read_overflow(op, tiers.log.summary_location(segment).offset_bytes(), BLOCK_BYTES as u32);
        }
        true
    }

    pub fn summary_done<I: Io>(
        &mut self,
        tiers: &mut Tiers,
        shared: &mut Shared,
        io: &mut I,
        segment: u32,
        bytes: Result<&[u8], Errno>,
    ) {
        let owners = bytes.ok().and_then(|b| read_summary(b, segment, tiers.log.data_blocks() as usize));
        let victim = self.victim();
        victim.reading_summary = false;
        match owners {
            Some(owners) => victim.blocks = live_blocks(tiers, shared, segment, &owners),
            None => io.event(Event::SummaryUnusable),
        }
        self.move_blocks(tiers, shared, io);
    }

    /// Continues the collection as far as possible without waiting.
    pub fn move_blocks<I: Io>(&mut self, tiers: &mut Tiers, shared: &mut Shared, io: &mut I) {
        let Some(victim) = &mut self.victim else { return };
        if victim.reading_summary || victim.reads > 0 {
            return;
        }
        if let Some(part) = victim.part.take() {
            // All reads of this part have ended.
            match tiers.append(shared, io, part) {
                Append::Begun => victim.writes += 1,
                Append::NoSegment => tiers.parts.release(part),
                Append::Empty => {}
            }
        }
        while victim.blocks.get(victim.next).is_some_and(|&b| !lives_at(&shared.map, b)) {
            victim.next += 1;
        }
        if victim.next < victim.blocks.len() {
            let space = tiers.log.ready(Stream::Collect, shared.map.meta()) as usize;
            if space == 0 {
                // Victims that could not be emptied have used up the segments to move to. Nothing may wait for this one,
                // a reset least of all: it is tried again when a segment is free.
                if victim.writes == 0 {
                    self.release_victim(tiers, shared);
                }
                return;
            }
            let Some(part) = tiers.parts.take(Stream::Collect) else { return };
            victim.part = Some(part);
            victim.read_live(shared, io, part, space);
        } else if victim.writes == 0 {
            if tiers.log.live_in(victim.segment) > 0 {
                tiers.log.set_stuck(victim.segment);
            }
            self.release_victim(tiers, shared);
        }
    }

    /// Releases the segment.
    fn release_victim(&mut self, tiers: &mut Tiers, shared: &Shared) {
        if let Some(victim) = self.victim.take() {
            tiers.log.unpin(victim.segment, shared.map.meta());
        }
    }

    pub fn read_done<I: Io>(
        &mut self,
        tiers: &mut Tiers,
        shared: &mut Shared,
        io: &mut I,
        read: CollectRead,
        bytes: Result<&[u8], Errno>,
    ) {
        let CollectRead { part, first, n } = read;
        let victim = self.victim();
        victim.reads -= 1;
        let map = &shared.map;
        for (content, &(block, location)) in
            bytes.unwrap_or_default().chunks_exact(BLOCK_BYTES).zip(&victim.blocks[first..first + n])
        {
            // Written or discarded meanwhile: nothing to move. Damaged: the block stays, and so does the segment.
            let Place::Overflow(here, checksum) = map.place(block) else { continue };
            if here != location || Tiers::verify(map, io, block, content).is_err() {
                continue;
            }
            let page = tiers.parts.get(part).staged.len();
            io.part(part)[page * BLOCK_BYTES..][..BLOCK_BYTES].copy_from_slice(content);
            let source = Source::Collect(map.entry(block));
            tiers.parts.get(part).staged.push(Staged { block, location, checksum, source });
        }
        self.move_blocks(tiers, shared, io);
    }

    /// Handles the end of the write of a part with moved blocks.
    pub fn part_written<I: Io>(&mut self, tiers: &mut Tiers, shared: &mut Shared, io: &mut I) {
        if let Some(victim) = &mut self.victim {
            victim.writes -= 1;
        }
        self.move_blocks(tiers, shared, io);
    }
}

impl Victim {
    /// Reads the next `space` blocks that are still live here.
    fn read_live<I: Io>(&mut self, shared: &mut Shared, io: &mut I, part: PartId, space: usize) {
        let end = self.blocks.len().min(self.next + space);
        while self.next < end {
            let first = self.next;
            let adjacent = |i: usize| self.blocks[i].1.0 == self.blocks[first].1.0 + (i - first) as u32;
            let most = end.min(first + RUN_BLOCKS);
            let n = (first..most).take_while(|&i| adjacent(i) && lives_at(&shared.map, self.blocks[i]));
            let n = n.count();
            if n == 0 {
                self.next += 1;
                continue;
            }
            self.next += n;
            self.reads += 1;
            count_read(shared.counters(), n * BLOCK_BYTES);
            let op = shared.ops.begin(Op::Collect(CollectRead { part, first, n }));
            io.read_overflow(op, self.blocks[first].1.offset_bytes(), (n * BLOCK_BYTES) as u32);
        }
    }
}

fn count_read(c: &Counters, bytes: usize) {
    c.overflow.read(bytes as u64);
    add(&c.collector_read_bytes, bytes as u64);
}

/// The live blocks of a segment, among the owners that it has had.
fn live_blocks(tiers: &Tiers, shared: &Shared, segment: u32, owners: &[u32]) -> Vec<(Block, Location)> {
    let first = tiers.log.first_location(segment).0;
    let all = (first..).zip(owners).map(|(location, &owner)| (Block(owner), Location(location)));
    all.filter(|&at| at.0.0 < shared.spec.blocks() && lives_at(&shared.map, at)).collect()
}

/// Whether the block is still where the summary says. If not, it was written or discarded meanwhile.
fn lives_at(map: &BlockMap, (block, location): (Block, Location)) -> bool {
    matches!(map.place(block), Place::Overflow(here, _) if here == location)
}
