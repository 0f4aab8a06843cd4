//! The overflow log: which segments of the file are free, open, or hold how many live blocks.
//!
//! Owns no content and no map entry. A segment is data blocks followed by one summary block that names the
//! block at each of its positions; the collector reads it, so that no table of owners is kept in memory.
//! Invariants: `live` of a segment is the number of map entries that point into it; a segment is reused or
//! punched only when it has no live block and no read or write of it is in flight; while a write or a punch may be in
//! flight its mark in `meta` is busy, so that the next process to attach knows it.

use crate::engine::cached::segments::{Segment, Segments, Status};
use crate::engine::part::{Extent, Stream};
use crate::meta::Meta;
use spillway_layout::{Location, LogShape, SegmentMark};
use std::collections::{HashMap, VecDeque};

struct Open {
    segment: u32,
    owners: Vec<u32>,
}

/// Why a segment whose write has failed is opened only after others.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Doubt {
    /// Its place on the medium may be bad.
    Spot,
    /// The file system has no space for this segment; it may have space for another that the file holds already.
    Space,
}

/// Free segments that only the collector may open.
pub(super) const COLLECTOR_OWN: u32 = 2;
/// Stuck segments that are tried again at a time.
const RETRIES: u32 = 256;

pub(super) struct Log {
    pub(super) shape: LogShape,
    /// Segments that the file may hold.
    pub(super) total: u32,
    /// The same number while the file shrinks to a lower limit.
    pub(super) ceiling: u32,
    pub(super) segments: Segments,
    /// Free segments that the file holds: the next to be opened at the end, the next to be punched in front.
    pub(super) empty: VecDeque<u32>,
    /// Free segments that have been punched out of the file.
    pub(super) punched: Vec<u32>,
    /// Free segments that the file holds and whose place may be bad. They are opened when no others are free but those that
    /// are reserved for the collector.
    pub(super) doubtful: VecDeque<u32>,
    /// Failures of segments, to be taken into account when they are free again.
    doubted: HashMap<u32, Doubt>,
    pub(super) punching: u32,
    /// Segments that wait for a drain.
    draining: Vec<u32>,
    /// While attaching: a bit for each location that the map has named.
    adopted: Vec<u64>,
    open: [Option<Open>; 2],
    /// Owners of closed segments whose summary is not in the file (found at attach, or its write failed).
    pub kept_owners: HashMap<u32, Vec<u32>>,
    live: u64,
    /// Blocks of appends in flight that will add to `live`.
    pub arriving: u64,
}

impl Log {
    pub fn new(shape: LogShape, total: u32) -> Log {
        Log {
            shape,
            total,
            ceiling: total,
            segments: Segments::new(shape.segment_blocks - 1),
            empty: VecDeque::new(),
            punched: Vec::new(),
            doubtful: VecDeque::new(),
            doubted: HashMap::new(),
            punching: 0,
            draining: Vec::new(),
            adopted: Vec::new(),
            open: [None, None],
            kept_owners: HashMap::new(),
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

    /// How many blocks an append may have now. Opens a segment if needed; 0 if none can be opened.
    pub fn ready(&mut self, stream: Stream, meta: &Meta) -> u32 {
        if self.open[stream as usize].is_none() {
            let own = if stream == Stream::Write { COLLECTOR_OWN } else { 0 };
            if self.free_segments() <= own {
                return 0;
            }
            let segment = self.choose(own, meta);
            self.segments.change(segment, |s| s.status = Status::Open);
            meta.set_segment(segment, SegmentMark::Busy);
            let owners = Vec::with_capacity(self.data_blocks() as usize);
            self.open[stream as usize] = Some(Open { segment, owners });
        }
        let open = self.open[stream as usize].as_ref().expect("opened above");
        let left = self.data_blocks() - open.owners.len() as u32;
        // The last part of a segment carries the summary too, so it must leave a block for it.
        if left < self.shape.part_blocks { left } else { (self.shape.part_blocks).min(left - 1).max(1) }
    }

    /// A free segment to be opened, if more than `spare` are free. So many good ones are kept, as long as there is another.
    fn choose(&mut self, spare: u32, meta: &Meta) -> u32 {
        let good = self.free_segments() - self.doubtful.len() as u32;
        if good <= spare
            && let Some(segment) = self.doubtful.pop_front()
        {
            return segment;
        }
        if let Some(segment) = self.empty.pop_back().or_else(|| self.punched.pop()) {
            return segment;
        }
        self.segments.grow(self.segments.len() + 1);
        meta.set_segments_used(self.segments.len());
        self.segments.len() - 1
    }

    /// Whether eviction and writes could append now.
    pub fn can_write(&self) -> bool {
        self.open[Stream::Write as usize].is_some() || self.free_segments() > COLLECTOR_OWN
    }

    /// Whether the collector could append now.
    pub fn can_collect(&self) -> bool {
        self.open[Stream::Collect as usize].is_some() || self.free_segments() > 0
    }

    /// Ensures that `n` blocks, as many as `ready` has allowed before, can be appended in a row now.
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
        self.segments.change(segment, |s| (s.pins, s.appends) = (s.pins + 1, s.appends + 1));
        Extent { segment, first, seals }
    }

    /// Closes the stream's segment, which is at its end, and hands out its owners for the summary.
    pub fn close(&mut self, stream: Stream) -> Vec<u32> {
        let open = self.open[stream as usize].take().expect("an extent that seals has an open segment");
        self.segments.change(open.segment, |s| s.status = Status::Closed);
        open.owners
    }

    /// A write of the segment has failed: once it is free, others are opened before it.
    pub fn doubt(&mut self, segment: u32, doubt: Doubt) {
        let known = self.doubted.entry(segment).or_insert(doubt);
        if doubt == Doubt::Spot {
            *known = doubt;
        }
    }

    /// Closes the open segment, whose tail was lost to a failed write. Its owners are kept in memory.
    pub fn abandon(&mut self, stream: Stream, segment: u32, meta: &Meta) {
        if self.open[stream as usize].as_ref().is_some_and(|o| o.segment == segment) {
            let owners = self.close(stream);
            self.kept_owners.insert(segment, owners);
            self.free_if_empty(segment, meta);
        }
    }

    /// Counts a map entry that now points at `location`.
    pub fn born(&mut self, location: Location) {
        let segment = self.segment_of(location);
        self.segments.change(segment, |s| s.live += 1);
        self.live += 1;
    }

    /// Takes back the count of a map entry that no longer points at `location`.
    pub fn dead(&mut self, location: Location, meta: &Meta) {
        let segment = self.segment_of(location);
        self.segments.change(segment, |s| s.live -= 1);
        self.live -= 1;
        self.free_if_empty(segment, meta);
    }

    /// Counts a read of the segment that begins.
    pub fn pin(&mut self, segment: u32) {
        self.segments.change(segment, |s| s.pins += 1);
    }

    /// Counts the end of a read of the segment.
    pub fn unpin(&mut self, segment: u32, meta: &Meta) {
        self.segments.change(segment, |s| s.pins -= 1);
        self.free_if_empty(segment, meta);
    }

    /// Counts the end of an append. With the last one of a segment that has its summary, no append of it is in flight, in
    /// whatever order they ended.
    pub fn appended(&mut self, segment: u32, meta: &Meta) {
        let s = self.segments.change(segment, |s| s.appends -= 1);
        if s.appends == 0 && s.status != Status::Open && !self.kept_owners.contains_key(&segment) {
            meta.set_segment(segment, SegmentMark::Sealed);
        }
        self.unpin(segment, meta);
    }

    fn free_if_empty(&mut self, segment: u32, meta: &Meta) {
        if self.segments.get(segment).is_spent() {
            self.segments.change(segment, |s| s.status = Status::Free);
            meta.set_segment(segment, SegmentMark::Empty);
            self.kept_owners.remove(&segment);
            self.put_empty(segment);
        }
    }

    fn put_empty(&mut self, segment: u32) {
        match self.doubted.remove(&segment) {
            Some(Doubt::Spot) => self.doubtful.push_back(segment),
            Some(Doubt::Space) => self.empty.push_front(segment),
            None => self.empty.push_back(segment),
        }
    }

    /// The closed segment with the fewest live blocks, if moving them frees space.
    pub fn emptiest(&self) -> Option<u32> {
        self.segments.emptiest()
    }

    pub fn live_in(&self, segment: u32) -> u32 {
        self.segments.get(segment).live.into()
    }

    /// Marks a segment that the collector could not empty as stuck.
    pub fn set_stuck(&mut self, segment: u32) {
        self.segments.change(segment, |s| s.status = Status::Stuck);
    }

    pub fn has_stuck(&self) -> bool {
        self.segments.a_stuck_one().is_some()
    }

    /// Lets some stuck segments be tried again, those first that have been stuck for longest.
    pub fn retry_stuck(&mut self) {
        for _ in 0..RETRIES {
            let Some(segment) = self.segments.a_stuck_one() else { return };
            self.segments.change(segment, |s| s.status = Status::Closed);
        }
    }

    /// An empty segment, to be punched out. One whose write has failed counts as good after that: the file system may
    /// put it somewhere else.
    pub fn next_to_punch(&mut self, meta: &Meta) -> u32 {
        self.punching += 1;
        let next = self.doubtful.pop_front().map(|segment| (segment, Doubt::Spot));
        let next = next.or_else(|| Some((self.empty.pop_front()?, Doubt::Space)));
        let (segment, doubt) = next.expect("the caller has seen an empty one");
        // If the punch fails, it goes back where it was.
        self.doubted.insert(segment, doubt);
        meta.set_segment(segment, SegmentMark::Busy);
        segment
    }

    /// Handles the end of a punch. After a failed one the segment is as it was, free and in the file.
    pub fn punched(&mut self, segment: u32, ok: bool, meta: &Meta) {
        self.punching -= 1;
        if ok {
            self.doubted.remove(&segment);
            self.punched.push(segment);
            meta.set_segment(segment, SegmentMark::Free);
        } else {
            self.put_empty(segment);
            meta.set_segment(segment, SegmentMark::Empty);
        }
    }

    /// Takes the location that the map names for a block, when attaching. False: out of range or taken.
    pub fn adopt(&mut self, location: Location, block: u32, meta: &Meta) -> bool {
        let segment = self.segment_of(location);
        let position = location.0 % self.shape.segment_blocks;
        if segment >= meta.segments_used() || position >= self.data_blocks() {
            return false;
        }
        let (word, bit) = (location.0 as usize / 64, 1 << (location.0 % 64));
        if word >= self.adopted.len() {
            self.adopted.resize(word + 1, 0);
        }
        if self.adopted[word] & bit != 0 {
            return false;
        }
        self.adopted[word] |= bit;
        self.segments.grow(segment + 1);
        self.segments.change(segment, |s| s.live += 1);
        self.live += 1;
        if meta.segment(segment) != SegmentMark::Sealed {
            let data_blocks = self.data_blocks() as usize;
            let owners = self.kept_owners.entry(segment).or_insert_with(|| vec![u32::MAX; data_blocks]);
            owners[position as usize] = block;
        }
        true
    }

    /// After the last `adopt`: decides the state of each segment. Those that a dead process may still be writing to wait for
    /// a drain.
    pub fn finish_adopting(&mut self, meta: &Meta) {
        self.adopted = Vec::new();
        self.segments.grow(meta.segments_used());
        for segment in 0..self.segments.len() {
            let lives = self.segments.get(segment).live > 0;
            match meta.segment(segment) {
                SegmentMark::Sealed if lives => {
                    self.segments.change(segment, |s| s.status = Status::Closed);
                }
                SegmentMark::Free if !lives => self.punched.push(segment),
                SegmentMark::Sealed | SegmentMark::Empty if !lives => {
                    meta.set_segment(segment, SegmentMark::Empty);
                    self.empty.push_back(segment);
                }
                _ => {
                    meta.set_segment(segment, SegmentMark::Busy);
                    self.segments.change(segment, |s| s.status = Status::Draining);
                    self.draining.push(segment);
                }
            }
        }
        self.adopt_ceiling(meta);
    }

    /// Whether some segments wait for a drain.
    pub fn is_draining(&self) -> bool {
        !self.draining.is_empty()
    }

    /// To be called when no I/O of a dead process can land any more.
    pub fn drained(&mut self, meta: &Meta) {
        for segment in std::mem::take(&mut self.draining) {
            self.segments.change(segment, |s| s.status = Status::Closed);
            self.free_if_empty(segment, meta);
        }
    }

    /// Forgets every block. No append, read, punch or collection may be in flight; segments that wait for a drain go on
    /// waiting.
    pub fn reset(&mut self, meta: &Meta) {
        self.open = [None, None];
        self.kept_owners.clear();
        for segment in 0..self.segments.len() {
            match self.segments.get(segment).status {
                Status::Free => {}
                Status::Draining => _ = self.segments.change(segment, |s| s.live = 0),
                Status::Open | Status::Closed | Status::Stuck => {
                    self.segments.change(segment, |s| *s = Segment::FREE);
                    meta.set_segment(segment, SegmentMark::Empty);
                    self.put_empty(segment);
                }
            }
        }
        (self.live, self.arriving) = (0, 0);
    }

    /// Checks this file's invariants against the block map's view of them; for tests.
    pub fn check(&self, live_of: &dyn Fn(u32) -> u32, pinned: &dyn Fn(u32) -> u32, meta: &Meta) {
        let mut live = 0;
        for (i, s) in self.segments.iter() {
            assert_eq!(u32::from(s.live), live_of(i), "live blocks of segment {i}");
            assert_eq!(s.pins, pinned(i), "pins of segment {i}");
            assert!(s.status != Status::Free || s.live == 0 && s.pins == 0, "free segment {i} in use");
            assert!(!s.is_spent(), "closed segment {i} is empty, not free");
            live += u64::from(s.live);
            let mark = meta.segment(i);
            match s.status {
                Status::Open | Status::Draining => assert_eq!(mark, SegmentMark::Busy, "segment {i}"),
                Status::Closed | Status::Stuck => {
                    let busy = s.appends > 0 || self.kept_owners.contains_key(&i);
                    let want = if busy { SegmentMark::Busy } else { SegmentMark::Sealed };
                    assert_eq!(mark, want, "closed segment {i}");
                }
                Status::Free => {}
            }
        }
        assert_eq!(live, self.live, "live blocks");
        self.segments.check();
        let mut empty = self.empty.iter().chain(&self.doubtful);
        assert!(empty.all(|&s| meta.segment(s) == SegmentMark::Empty), "marks of empty segments");
        let mut punched = self.punched.iter();
        assert!(punched.all(|&s| meta.segment(s) == SegmentMark::Free), "marks of punched segments");
        let count = |status| self.segments.iter().filter(|(_, s)| s.status == status).count();
        let free = self.empties() as usize + self.punched.len() + self.punching as usize;
        assert_eq!(count(Status::Free), free, "free segments");
        assert_eq!(count(Status::Draining), self.draining.len(), "segments that wait for a drain");
        assert_eq!(self.segments.len(), meta.segments_used());
        assert!(self.total <= self.ceiling && self.file_blocks() <= self.most_file_blocks());
    }

    /// The segments used so far.
    pub fn segments_used(&self) -> u32 {
        self.segments.len()
    }
}
