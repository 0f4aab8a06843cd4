//! The segments of the log one by one, and lists of them by how many blocks live in each, so that the emptiest is
//! found at once, however many there are.
//!
//! Owns the state of each segment and its place in a list; never decides what is done with it. Invariant: a
//! segment is in the list of its number of live blocks exactly while the collector may pick it, and in the
//! list of the stuck ones while it is stuck.

/// What a segment is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum Status {
    /// Empty, punched, or being punched.
    Free,
    /// Blocks are appended to it.
    Open,
    Closed,
    /// Closed, and the collector could not empty it: not picked for a while.
    Stuck,
    /// I/O of a dead process may still land in it: it is only read until a drain has ended.
    Draining,
}

#[derive(Clone, Copy, Debug)]
pub(crate) struct Segment {
    /// Map entries that point into it.
    pub live: u16,
    /// Writes in flight.
    pub appends: u8,
    pub status: Status,
    /// Reads and writes in flight, and the collector's hold.
    pub pins: u32,
    next: u32,
    previous: u32,
}

const NONE: u32 = u32::MAX;

impl Segment {
    pub const FREE: Segment =
        Segment { live: 0, appends: 0, status: Status::Free, pins: 0, next: NONE, previous: NONE };

    /// Whether it may be used again.
    pub fn is_spent(&self) -> bool {
        matches!(self.status, Status::Closed | Status::Stuck) && self.live == 0 && self.pins == 0
    }
}

/// The segments used so far; those beyond were never touched.
pub(crate) struct Segments {
    all: Vec<Segment>,
    /// First of each list, by live blocks; the last list is that of the stuck ones.
    heads: Box<[u32]>,
    /// A bit for each list that is not empty.
    filled: Box<[u64]>,
}

impl Segments {
    /// None yet, of so many data blocks each.
    pub fn new(data_blocks: u32) -> Segments {
        let lists = data_blocks as usize + 2;
        Segments {
            all: Vec::new(),
            heads: vec![NONE; lists].into(),
            filled: vec![0; lists.div_ceil(64)].into(),
        }
    }

    pub fn len(&self) -> u32 {
        self.all.len() as u32
    }

    pub fn get(&self, segment: u32) -> &Segment {
        &self.all[segment as usize]
    }

    pub fn iter(&self) -> impl Iterator<Item = (u32, &Segment)> {
        self.all.iter().enumerate().map(|(i, s)| (i as u32, s))
    }

    /// The free segments below this index.
    pub fn grow(&mut self, len: u32) {
        if len > self.len() {
            self.all.resize(len as usize, Segment::FREE);
        }
    }

    fn stuck_list(&self) -> usize {
        self.heads.len() - 1
    }

    fn list_of(&self, s: &Segment) -> Option<usize> {
        match s.status {
            Status::Closed if s.appends == 0 && s.live > 0 => Some(usize::from(s.live)),
            Status::Stuck => Some(self.stuck_list()),
            _ => None,
        }
    }

    /// Changes a segment, and its list with it.
    #[inline]
    pub fn change(&mut self, segment: u32, f: impl FnOnce(&mut Segment)) -> &Segment {
        let s = self.all[segment as usize];
        let before = self.list_of(&s);
        let mut changed = s;
        f(&mut changed);
        let after = self.list_of(&changed);
        self.all[segment as usize] = Segment { next: s.next, previous: s.previous, ..changed };
        if before != after {
            if let Some(list) = before {
                self.unlink(segment, list);
            }
            if let Some(list) = after {
                self.link(segment, list);
            }
        }
        &self.all[segment as usize]
    }

    /// Lists are rings: the one before the first is the last, which has been there longest.
    fn link(&mut self, segment: u32, list: usize) {
        let first = self.heads[list];
        let (next, previous) = match first {
            NONE => (segment, segment),
            first => (first, self.all[first as usize].previous),
        };
        let s = &mut self.all[segment as usize];
        (s.next, s.previous) = (next, previous);
        self.all[previous as usize].next = segment;
        self.all[next as usize].previous = segment;
        self.heads[list] = segment;
        self.filled[list / 64] |= 1 << (list % 64);
    }

    fn unlink(&mut self, segment: u32, list: usize) {
        let Segment { next, previous, .. } = self.all[segment as usize];
        self.all[previous as usize].next = next;
        self.all[next as usize].previous = previous;
        if self.heads[list] == segment {
            self.heads[list] = next;
        }
        if next == segment {
            self.heads[list] = NONE;
            self.filled[list / 64] &= !(1 << (list % 64));
        }
    }

    /// Of the segments that the collector may pick the one with the fewest live blocks; of several the one
    /// that has had as many for longest. `None` when all are full: moving them gains nothing.
    pub fn emptiest(&self) -> Option<u32> {
        let word = self.filled.iter().position(|&word| word != 0)?;
        let list = word * 64 + self.filled[word].trailing_zeros() as usize;
        let data_blocks = self.heads.len() - 2;
        (list < data_blocks).then(|| self.all[self.heads[list] as usize].previous)
    }

    /// The one that has been stuck for longest.
    pub fn a_stuck_one(&self) -> Option<u32> {
        let first = self.heads[self.stuck_list()];
        (first != NONE).then(|| self.all[first as usize].previous)
    }

    /// Checks that each segment is in its list and in no other; for tests.
    pub fn check(&self) {
        let mut listed = 0;
        for (list, &first) in self.heads.iter().enumerate() {
            assert_eq!(first != NONE, self.filled[list / 64] & 1 << (list % 64) != 0, "bit of list {list}");
            let mut at = first;
            while at != NONE {
                let s = self.get(at);
                assert_eq!(self.list_of(s), Some(list), "segment {at}");
                assert_eq!(self.get(s.next).previous, at, "ring of list {list}");
                listed += 1;
                at = if s.next == first { NONE } else { s.next };
            }
        }
        let want = self.all.iter().filter(|s| self.list_of(s).is_some()).count();
        assert_eq!(listed, want, "segments in lists");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Segments with so many live blocks each, of 200.
    fn closed(live: &[u16]) -> Segments {
        let mut segments = Segments::new(200);
        segments.grow(live.len() as u32);
        for (i, &live) in live.iter().enumerate() {
            segments.change(i as u32, |s| (s.status, s.live) = (Status::Closed, live));
        }
        segments
    }

    #[test]
    fn the_emptiest_is_found_and_of_several_the_first() {
        let mut segments = closed(&[200, 130, 130, 199, 0]);
        assert_eq!(segments.emptiest(), Some(1));
        segments.change(3, |s| s.live = 2);
        assert_eq!(segments.emptiest(), Some(3));
        segments.change(3, |s| s.appends = 1);
        assert_eq!(segments.emptiest(), Some(1));
        segments.change(1, |s| s.status = Status::Stuck);
        assert_eq!(segments.emptiest(), Some(2));
        segments.change(2, |s| s.status = Status::Draining);
        assert_eq!(segments.emptiest(), None, "what is left is full");
        assert_eq!(segments.a_stuck_one(), Some(1));
        segments.check();
        segments.change(1, |s| *s = Segment::FREE);
        assert_eq!(segments.a_stuck_one(), None);
        segments.check();
    }
}
