//! The overflow log: which segments of the file are free, open, or hold how many living blocks.
//!
//! Owns no content and no map entry. A segment is data blocks followed by one summary block that names the
//! block at each of its positions; the collector reads it, so that no table of owners is kept in memory.
//! Invariants: `live` of a segment is the number of map entries that point into it; a segment is reused or
//! punched only when nothing lives in it and no read or write of it is under way.

use crate::meta::{Meta, SegmentMark};
use crate::spec::LogShape;
use crate::units::Location;
use std::cell::Cell;
use std::collections::HashMap;

/// Who appends: each stream has an open segment of its own, so that cold survivors do not mix with newcomers
/// and the collector never waits for room that eviction has taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Stream {
    /// Eviction, and the writes of mode `overflow`.
    Write = 0,
    /// The collector.
    Collect = 1,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Status {
    /// In `empty`, `punched`, or being punched.
    Free,
    Open,
    Closed,
}

#[derive(Clone, Copy, Debug)]
struct Segment {
    live: u32,
    /// Reads and writes under way.
    pins: u32,
    /// The writes among them: blocks are still coming.
    appends: u32,
    status: Status,
    /// The collector could not empty it: left alone until it empties by itself.
    stuck: bool,
}

const FREE: Segment = Segment { live: 0, pins: 0, appends: 0, status: Status::Free, stuck: false };

struct Open {
    segment: u32,
    owners: Vec<u32>,
}

/// Room for `n` blocks in a row.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Extent {
    pub segment: u32,
    pub first: Location,
    /// The extent ends the segment: its summary follows.
    pub seals: bool,
}

/// Empty segments that stay in the file for reuse; more than these are punched out.
const KEEP_EMPTY: usize = 4;
/// Free segments that only the collector may open.
const COLLECTOR_OWN: u32 = 2;
/// Segments' worth of blocks that never live: two open segments, the collector's own, and some to gain from.
const MIN_RESERVE: u32 = 8;

pub(crate) struct Log {
    shape: LogShape,
    total: u32,
    /// The segments used so far; those beyond were never touched.
    segments: Vec<Segment>,
    empty: Vec<u32>,
    punched: Vec<u32>,
    punching: u32,
    open: [Option<Open>; 2],
    /// Owners of closed segments whose summary is not in the file (found at attach, or its write failed).
    pub kept_owners: HashMap<u32, Vec<u32>>,
    /// Segments that the collector could not empty.
    stuck: u32,
    /// Known: no segment is worth collecting. Whatever may change that forgets it.
    packed: Cell<bool>,
    live: u64,
    /// Blocks of appends under way that will add to `live`.
    pub arriving: u64,
}

impl Log {
    pub fn new(shape: LogShape, total: u32) -> Log {
        Log {
            shape,
            total,
            segments: Vec::new(),
            empty: Vec::new(),
            punched: Vec::new(),
            punching: 0,
            open: [None, None],
            kept_owners: HashMap::new(),
            stuck: 0,
            packed: Cell::new(false),
            live: 0,
            arriving: 0,
        }
    }

    /// Data blocks in a segment.
    pub fn data_blocks(&self) -> u32 {
        self.shape.segment_blocks - 1
    }

    pub fn live(&self) -> u64 {
        self.live
    }

    fn reserve(&self) -> u32 {
        MIN_RESERVE.max(self.total / 20)
    }

    /// Blocks that may live here: what the reserve leaves, without which the collector had nothing to gain.
    pub fn capacity(&self) -> u64 {
        u64::from(self.total.saturating_sub(self.reserve())) * u64::from(self.data_blocks())
    }

    /// It holds more than its capacity: one block more, for a write that is to replace another.
    pub fn is_over(&self) -> bool {
        self.live + self.arriving > self.capacity()
    }

    /// Blocks that may still come to live here.
    pub fn room(&self) -> u64 {
        self.room_beyond(0)
    }

    /// The same with some more than the capacity.
    pub fn room_beyond(&self, more: u64) -> u64 {
        (self.capacity() + more).saturating_sub(self.live + self.arriving)
    }

    /// Segments that can be opened.
    fn free_segments(&self) -> u32 {
        self.total - self.segments.len() as u32 + (self.empty.len() + self.punched.len()) as u32
    }

    /// Free segments run short: time to collect. The rest of the reserve stays spread over the segments as dead
    /// blocks: the more of them the emptiest holds, the fewer blocks must move.
    pub fn wants_collection(&self) -> bool {
        self.free_segments() + self.punching < (self.reserve() / 4).max(COLLECTOR_OWN + 2)
    }

    /// Bytes of the file that segments take up, living or not.
    pub fn file_blocks(&self) -> u64 {
        (self.segments.len() - self.punched.len()) as u64 * u64::from(self.shape.segment_blocks)
    }

    pub fn segment_of(&self, location: Location) -> u32 {
        location.0 / self.shape.segment_blocks
    }

    pub fn first_location(&self, segment: u32) -> Location {
        Location(segment * self.shape.segment_blocks)
    }

    /// Where the summary of a segment lies.
    pub fn summary_location(&self, segment: u32) -> Location {
        Location(segment * self.shape.segment_blocks + self.data_blocks())
    }

    /// How many blocks an append may have now, opening a segment if need be: 0 when none can be opened.
    pub fn ready(&mut self, stream: Stream, meta: &Meta) -> u32 {
        if self.open[stream as usize].is_none() {
            let own = if stream == Stream::Write { COLLECTOR_OWN } else { 0 };
            if self.free_segments() <= own {
                return 0;
            }
            let segment = if let Some(s) = self.empty.pop().or_else(|| self.punched.pop()) {
                s
            } else {
                self.segments.push(FREE);
                self.segments.len() as u32 - 1
            };
            self.segments[segment as usize] = Segment { status: Status::Open, ..FREE };
            meta.set_segment(segment as usize, SegmentMark::Open);
            let owners = Vec::with_capacity(self.data_blocks() as usize);
            self.open[stream as usize] = Some(Open { segment, owners });
        }
        let open = self.open[stream as usize].as_ref().expect("opened above");
        let left = self.data_blocks() - open.owners.len() as u32;
        // The last part of a segment carries the summary too, so it must leave a block for it.
        if left < self.shape.part_blocks { left } else { (self.shape.part_blocks).min(left - 1).max(1) }
    }

    /// Whether eviction and writes could append now.
    pub fn can_write(&self) -> bool {
        self.open[Stream::Write as usize].is_some() || self.free_segments() > COLLECTOR_OWN
    }

    /// Whether the collector could append now.
    pub fn can_collect(&self) -> bool {
        self.open[Stream::Collect as usize].is_some() || self.free_segments() > 0
    }

    /// Makes sure that `n` blocks, as many as some `ready` has allowed, can be appended in a row now.
    pub fn make_ready(&mut self, stream: Stream, n: u32, meta: &Meta) -> bool {
        let ready = self.ready(stream, meta);
        if ready > 0 && ready < n {
            let segment = self.open[stream as usize].as_ref().expect("`ready` opened it").segment;
            self.abandon(stream, segment, meta);
            return self.ready(stream, meta) >= n;
        }
        ready >= n
    }

    /// Appends these blocks to the stream's open segment; `ready` has allowed as many.
    pub fn append(&mut self, stream: Stream, owners: impl ExactSizeIterator<Item = u32>) -> Extent {
        let open = self.open[stream as usize].as_mut().expect("`ready` opened it");
        let segment = open.segment;
        let first = Location(segment * self.shape.segment_blocks + open.owners.len() as u32);
        open.owners.extend(owners);
        let seals = open.owners.len() as u32 == self.shape.segment_blocks - 1;
        self.segments[segment as usize].pins += 1;
        self.segments[segment as usize].appends += 1;
        Extent { segment, first, seals }
    }

    /// Closes the stream's segment, which is at its end, and hands out its owners for the summary.
    pub fn close(&mut self, stream: Stream) -> Vec<u32> {
        let open = self.open[stream as usize].take().expect("an extent that seals has an open segment");
        self.segments[open.segment as usize].status = Status::Closed;
        self.packed.set(false);
        open.owners
    }

    /// The open segment takes no more: its tail was lost to a failed write. Its owners are kept in memory.
    pub fn abandon(&mut self, stream: Stream, segment: u32, meta: &Meta) {
        if self.open[stream as usize].as_ref().is_some_and(|o| o.segment == segment) {
            let owners = self.close(stream);
            self.kept_owners.insert(segment, owners);
            self.free_if_empty(segment, meta);
        }
    }

    /// A map entry now points at `location`.
    pub fn born(&mut self, location: Location) {
        let segment = self.segment_of(location);
        self.segments[segment as usize].live += 1;
        self.live += 1;
    }

    /// A map entry points at `location` no more.
    pub fn dead(&mut self, location: Location, meta: &Meta) {
        let segment = self.segment_of(location);
        self.segments[segment as usize].live -= 1;
        self.live -= 1;
        self.packed.set(false);
        self.free_if_empty(segment, meta);
    }

    /// A read of the segment is under way.
    pub fn pin(&mut self, segment: u32) {
        self.segments[segment as usize].pins += 1;
    }

    /// A read of the segment is done.
    pub fn unpin(&mut self, segment: u32, meta: &Meta) {
        self.segments[segment as usize].pins -= 1;
        self.free_if_empty(segment, meta);
    }

    /// An append of the segment is done.
    pub fn appended(&mut self, segment: u32, meta: &Meta) {
        self.segments[segment as usize].appends -= 1;
        self.packed.set(false);
        self.unpin(segment, meta);
    }

    fn free_if_empty(&mut self, segment: u32, meta: &Meta) {
        let s = &mut self.segments[segment as usize];
        if s.status == Status::Closed && s.live == 0 && s.pins == 0 {
            self.stuck -= u32::from(s.stuck);
            *s = FREE;
            meta.set_segment(segment as usize, SegmentMark::Free);
            self.kept_owners.remove(&segment);
            self.empty.push(segment);
        }
    }

    /// The closed segment with the fewest living blocks, if moving them gains anything.
    pub fn emptiest(&self) -> Option<u32> {
        if self.packed.get() {
            return None;
        }
        let found = self.find_emptiest();
        self.packed.set(found.is_none());
        found
    }

    fn find_emptiest(&self) -> Option<u32> {
        let candidates = self.segments.iter().enumerate();
        let (segment, s) = candidates
            .filter(|(_, s)| s.status == Status::Closed && !s.stuck && s.live > 0 && s.appends == 0)
            .min_by_key(|(_, s)| s.live)?;
        (s.live < self.data_blocks()).then_some(segment as u32)
    }

    pub fn live_in(&self, segment: u32) -> u32 {
        self.segments[segment as usize].live
    }

    /// The collector could not empty this segment.
    pub fn set_stuck(&mut self, segment: u32) {
        let s = &mut self.segments[segment as usize];
        self.stuck += u32::from(!s.stuck);
        s.stuck = true;
    }

    pub fn has_stuck(&self) -> bool {
        self.stuck > 0
    }

    /// Stuck segments may be tried again.
    pub fn retry_stuck(&mut self) {
        self.segments.iter_mut().for_each(|s| s.stuck = false);
        self.stuck = 0;
        self.packed.set(false);
    }

    /// Empty segments beyond those that are kept for reuse (`all`: those too).
    pub fn has_to_punch(&self, all: bool) -> bool {
        self.empty.len() > if all { 0 } else { KEEP_EMPTY }
    }

    /// An empty segment, to be punched out.
    pub fn next_to_punch(&mut self) -> u32 {
        self.punching += 1;
        self.empty.swap_remove(0)
    }

    /// A punch is done. One that failed leaves the segment as it was, free and in the file.
    pub fn punched(&mut self, segment: u32, ok: bool) {
        self.punching -= 1;
        if ok { self.punched.push(segment) } else { self.empty.push(segment) }
    }

    /// Takes the location that the map names for a block, when attaching. False: out of range.
    pub fn adopt(&mut self, location: Location, block: u32, meta: &Meta) -> bool {
        let segment = self.segment_of(location);
        let position = location.0 % self.shape.segment_blocks;
        if segment >= self.total || position >= self.data_blocks() {
            return false;
        }
        if self.segments.len() <= segment as usize {
            self.segments.resize(segment as usize + 1, FREE);
        }
        let s = &mut self.segments[segment as usize];
        s.status = Status::Closed;
        s.live += 1;
        self.live += 1;
        if meta.segment(segment as usize) != SegmentMark::Sealed {
            let data_blocks = self.data_blocks() as usize;
            let owners = self.kept_owners.entry(segment).or_insert_with(|| vec![u32::MAX; data_blocks]);
            owners[position as usize] = block;
        }
        true
    }

    /// After the last `adopt`: segments below the highest one in use that hold nothing are empty.
    pub fn finish_adopting(&mut self, meta: &Meta) {
        let mut marked = (self.segments.len()..self.total as usize).rev();
        if let Some(last) = marked.find(|&s| meta.segment(s) != SegmentMark::Free) {
            self.segments.resize(last + 1, FREE);
        }
        for (i, s) in self.segments.iter().enumerate() {
            if s.status == Status::Free {
                meta.set_segment(i, SegmentMark::Free);
                self.empty.push(i as u32);
            }
        }
    }

    /// Forgets every block. No append, read or collection is under way.
    pub fn reset(&mut self) {
        self.open = [None, None];
        self.kept_owners.clear();
        let mut empty = std::mem::take(&mut self.empty);
        for (i, s) in self.segments.iter_mut().enumerate() {
            if s.status != Status::Free {
                *s = FREE;
                empty.push(i as u32);
            }
        }
        self.empty = empty;
        (self.live, self.arriving, self.stuck) = (0, 0, 0);
        self.packed.set(false);
    }

    /// Checks this file's invariants against the block map's view of them; for tests.
    pub fn check(&self, live_of: &dyn Fn(u32) -> u32, pinned: &dyn Fn(u32) -> u32) {
        let mut live = 0;
        for (i, s) in self.segments.iter().enumerate() {
            assert_eq!(s.live, live_of(i as u32), "live blocks of segment {i}");
            assert_eq!(s.pins, pinned(i as u32), "pins of segment {i}");
            assert!(s.status != Status::Free || s.live == 0 && s.pins == 0, "free segment {i} in use");
            assert!(
                s.status != Status::Closed || s.live + s.pins > 0,
                "closed segment {i} is empty, not free"
            );
            live += u64::from(s.live);
        }
        assert_eq!(live, self.live, "live blocks");
        assert_eq!(self.segments.iter().filter(|s| s.stuck).count(), self.stuck as usize, "stuck segments");
        let free = self.segments.iter().filter(|s| s.status == Status::Free).count();
        assert_eq!(free, self.empty.len() + self.punched.len() + self.punching as usize, "free segments");
        assert!(self.segments.len() <= self.total as usize);
    }
}
