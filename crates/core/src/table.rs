//! The unfinished requests, and which of them must wait for which.
//!
//! A request that completes at once never comes here. Invariant: of two unfinished requests that overlap, not
//! both reads, the later one has moved no byte yet.

use crate::error::Errno;
use crate::request::{Operation, Request};
use spillway_layout::{BLOCK_BYTES, SECTOR_BYTES};

/// Index of an unfinished request in the table.
pub(crate) type Id = u32;

/// What an unfinished request waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Wait {
    /// Its own asynchronous operations.
    Operations,
    /// An earlier request that it overlaps.
    Overlap,
    /// A slot, or space in the overflow.
    Space,
    /// A staging buffer.
    Part,
    /// Its next step: it is long, and other requests get their turn in between.
    Turn,
    /// The end of I/O of a dead process (mode `direct`).
    Drain,
    /// Earlier writes (a flush).
    Writes,
    /// Nothing: it is about to go on.
    Nothing,
}

/// An unfinished request.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Active {
    pub request: Request,
    /// First and last block touched; meaningless for a flush.
    pub first: u32,
    pub last: u32,
    /// Bytes of the request's data that are done or handed to an operation.
    pub at: u32,
    /// Its asynchronous operations in flight.
    pub pending: u32,
    /// All of its data is done or handed to operations.
    pub walked: bool,
    pub wait: Wait,
    pub errno: Option<Errno>,
    /// It was canceled with this errno: it starts no more operations, and waits for no space.
    pub canceled: Option<Errno>,
    pub start_ns: u64,
    /// It has waited for space: a stall is counted once.
    pub stalled: bool,
    /// Bytes that the planes have moved for it.
    pub moved_bytes: u64,
    /// Arrival order.
    pub sequence: u64,
    /// Its place in the table, once it has one.
    pub id: Option<Id>,
}

impl Active {
    pub fn new(request: Request, start_ns: u64, sequence: u64) -> Active {
        let start = request.sector * SECTOR_BYTES;
        let last =
            (start + (u64::from(request.sectors) * SECTOR_BYTES).saturating_sub(1)) / BLOCK_BYTES as u64;
        Active {
            request,
            first: (start / BLOCK_BYTES as u64) as u32,
            last: last as u32,
            at: 0,
            pending: 0,
            walked: false,
            wait: Wait::Operations,
            errno: None,
            canceled: None,
            start_ns,
            stalled: false,
            moved_bytes: 0,
            sequence,
            id: None,
        }
    }

    /// Bytes of the request's range.
    #[inline]
    pub fn len(&self) -> u32 {
        self.request.sectors * SECTOR_BYTES as u32
    }

    pub fn is_read(&self) -> bool {
        self.request.operation == Operation::Read
    }

    pub fn is_flush(&self) -> bool {
        self.request.operation == Operation::Flush
    }

    fn conflicts(&self, other: &Active) -> bool {
        self.first <= other.last
            && other.first <= self.last
            && !(self.is_read() && other.is_read())
            && !self.is_flush()
            && !other.is_flush()
    }
}

const BUCKETS: usize = 1024;
/// Blocks to a bucket of the filter.
const BUCKET_SHIFT: u32 = 5;
/// A request over more buckets than this counts as wide.
const WIDE: u32 = 8;

/// The unfinished requests, by row. The exports limit their number. There are no rows behind the last one in use, so that
/// after many requests at once nobody looks at empty rows.
pub(crate) struct Table {
    rows: Vec<Option<Active>>,
    free: Vec<Id>,
    len: usize,
    /// Unfinished requests by hashed position: says at once that nothing overlaps, the usual case.
    buckets: Box<[u32; BUCKETS]>,
    wide: u32,
}

fn buckets(a: &Active) -> Option<impl Iterator<Item = usize> + use<>> {
    let (first, last) = (a.first >> BUCKET_SHIFT, a.last >> BUCKET_SHIFT);
    let hash = |b: u32| (b.wrapping_mul(0x9E37_79B1) >> 22) as usize;
    (last - first < WIDE).then(move || (first..=last).map(hash))
}

impl Table {
    pub fn new() -> Table {
        let buckets = Box::new([0; BUCKETS]);
        Table { rows: Vec::new(), free: Vec::new(), len: 0, buckets, wide: 0 }
    }

    #[inline]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    pub fn len(&self) -> usize {
        self.len
    }

    /// Gives the request a row. Its id stays the same until it is removed.
    pub fn insert(&mut self, a: &mut Active) -> Id {
        let rows = self.rows.len() as Id;
        // Entries of rows that were removed are removed too.
        let free = std::iter::from_fn(|| self.free.pop()).find(|&id| id < rows);
        let id = free.unwrap_or_else(|| {
            self.rows.push(None);
            rows
        });
        a.id = Some(id);
        self.rows[id as usize] = Some(*a);
        self.len += 1;
        self.mark(a, 1);
        id
    }

    /// Takes the request out.
    pub fn remove(&mut self, id: Id) -> Active {
        let a = self.rows[id as usize].take().expect("an id names a row until it is removed");
        self.free.push(id);
        while let Some(None) = self.rows.last() {
            self.rows.pop();
        }
        self.len -= 1;
        self.mark(&a, u32::MAX);
        a
    }

    fn mark(&mut self, a: &Active, delta: u32) {
        if a.is_flush() {
            return;
        }
        match buckets(a) {
            Some(all) => all.for_each(|b| self.buckets[b] = self.buckets[b].wrapping_add(delta)),
            None if delta == 1 => self.wide += 1,
            None => self.wide -= 1,
        }
    }

    pub fn get(&self, id: Id) -> &Active {
        self.rows[id as usize].as_ref().expect("an id names a row until it is removed")
    }

    pub fn get_mut(&mut self, id: Id) -> &mut Active {
        self.rows[id as usize].as_mut().expect("an id names a row until it is removed")
    }

    pub fn iter(&self) -> impl Iterator<Item = (Id, &Active)> {
        self.rows.iter().enumerate().filter_map(|(i, a)| Some((i as Id, a.as_ref()?)))
    }

    pub fn iter_mut(&mut self) -> impl Iterator<Item = (Id, &mut Active)> {
        self.rows.iter_mut().enumerate().filter_map(|(i, a)| Some((i as Id, a.as_mut()?)))
    }

    /// The rows that [`Table::blocker`] visits.
    pub fn rows(&self) -> u32 {
        self.rows.len() as u32
    }

    /// Whether a new request, but a flush, may have to wait for an earlier one. False: it overlaps none.
    #[inline]
    pub fn may_be_blocked(&self, a: &Active) -> bool {
        self.len > 0 && (self.wide > 0 || buckets(a).is_none_or(|mut all| all.any(|b| self.buckets[b] > 0)))
    }

    /// The latest of the earlier unfinished requests that this one must wait for.
    pub fn blocker(&self, a: &Active) -> Option<Id> {
        let earlier = self.iter().filter(|(_, other)| other.sequence < a.sequence && a.conflicts(other));
        earlier.max_by_key(|(_, other)| other.sequence).map(|(id, _)| id)
    }

    /// The number of the earliest write, discard or write-zeroes that is being carried out: later flushes wait.
    /// One that waits for space, or behind another, does not count: a flush must not wait for what may never
    /// come.
    pub fn earliest_writer(&self) -> Option<u64> {
        let writers = self
            .iter()
            .filter(|(_, a)| !a.is_read() && !a.is_flush() && !matches!(a.wait, Wait::Space | Wait::Overlap));
        writers.map(|(_, a)| a.sequence).min()
    }

    pub fn exists(&self, id: Id) -> bool {
        self.rows.get(id as usize).is_some_and(Option::is_some)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::request::Token;

    fn active(sequence: u64, operation: Operation, sector: u64, sectors: u32) -> Active {
        Active::new(Request { token: Token(sequence), operation, sector, sectors }, 0, sequence)
    }

    #[test]
    fn overlap_is_by_block_and_reads_pass_each_other() {
        let mut t = Table::new();
        let write = Operation::Write { fua: false };
        let mut w = active(1, write, 8, 1);
        let id = t.insert(&mut w);
        assert!(t.blocker(&active(2, Operation::Read, 15, 1)).is_some(), "same block, other sector");
        assert!(t.blocker(&active(2, Operation::Read, 16, 8)).is_none());
        assert!(
            t.blocker(&active(2, Operation::Discard, 0, 1 << 22)).is_some(),
            "a wide one sees a narrow one"
        );
        t.remove(id);
        let id = t.insert(&mut active(3, Operation::Read, 0, 1 << 22));
        assert!(t.blocker(&active(4, write, 1 << 21, 1)).is_some(), "a narrow one sees a wide one");
        assert!(t.blocker(&active(4, Operation::Read, 1 << 21, 1)).is_none());
        assert!(t.blocker(&active(2, write, 1 << 21, 1)).is_none(), "only earlier ones count");
        t.remove(id);
        assert!(t.is_empty() && t.buckets.iter().all(|&b| b == 0) && t.wide == 0);
    }
}
