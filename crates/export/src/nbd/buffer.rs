//! Data buffers of requests, the pool that keeps some for the next, and the budget that all pools of a disk
//! share. Never looks at content.
//!
//! Invariant: a buffer is as large as the power of two above its request; all pools of a budget keep at most [`KEPT_BYTES`];
//! a pool that is dropped takes its charges off the budget.

use super::protocol::{PIECE_BYTES, REQUEST_COST_BYTES, SHARED_BYTES, SHARED_BYTES_GATHERED, UNSENT_BYTES};
use std::cell::Cell;
use std::rc::Rc;

/// Memory for one request's data.
pub struct Buffer {
    bytes: Box<[u8]>,
    /// It was taken with others for one long read, and counts against that limit.
    gathered: bool,
}

impl Buffer {
    /// The first `len` bytes.
    #[inline]
    pub fn bytes(&self, len: usize) -> &[u8] {
        &self.bytes[..len]
    }

    /// The first `len` bytes.
    #[inline]
    pub fn bytes_mut(&mut self, len: usize) -> &mut [u8] {
        &mut self.bytes[..len]
    }
}

const SMALLEST: usize = 512;
const LARGEST: usize = PIECE_BYTES as usize;
const CLASSES: usize = (LARGEST / SMALLEST).trailing_zeros() as usize + 1;
/// The most free buffers that a pool keeps, and all pools of a budget together: as much as one connection may have unsent.
/// Memory that was freed costs a page fault for every page when it is used again, which is more than the copy of its data.
const KEPT_BYTES: usize = UNSENT_BYTES + LARGEST;
/// With so many bytes in use and kept nothing more is kept.
const HELD_TOGETHER_BYTES: usize = SHARED_BYTES + SHARED_BYTES_GATHERED + UNSENT_BYTES;

/// The memory that all connections of a disk have for requests and replies. A clone shares the same budget.
#[derive(Clone)]
pub struct Budget(Rc<Shared>);

struct Shared {
    /// The most of `gathered`. One connection may have half of it, and [`UNSENT_BYTES`] beside that.
    most_gathered: usize,
    used: Cell<usize>,
    gathered: Cell<usize>,
    kept: Cell<usize>,
}

impl Budget {
    /// A budget of which nothing is used.
    pub fn new() -> Budget {
        Budget::with_gathered_bytes(SHARED_BYTES_GATHERED)
    }

    /// A budget with another limit for gathered reads; with 0 every long read streams.
    pub fn with_gathered_bytes(most_gathered: usize) -> Budget {
        let (used, gathered, kept) = Default::default();
        Budget(Rc::new(Shared { most_gathered, used, gathered, kept }))
    }

    /// Bytes that unfinished requests and unsent replies hold, without gathered reads.
    pub fn used_bytes(&self) -> usize {
        self.0.used.get()
    }

    /// Bytes that gathered reads hold.
    pub fn gathered_bytes(&self) -> usize {
        self.0.gathered.get()
    }

    /// Bytes of free buffers that are kept for later requests.
    pub fn kept_bytes(&self) -> usize {
        self.0.kept.get()
    }

    fn held_bytes(&self) -> usize {
        self.used_bytes() + self.gathered_bytes() + self.kept_bytes()
    }
}

impl Default for Budget {
    fn default() -> Budget {
        Budget::new()
    }
}

/// Free buffers of one connection by size: 512 bytes, 1 KiB, ... 256 KiB; and its charges on the budget.
pub struct Pool {
    free: [Vec<Buffer>; CLASSES],
    kept: usize,
    charged: usize,
    gathered: usize,
    budget: Budget,
}

impl Pool {
    pub fn new(budget: &Budget) -> Self {
        Pool { free: Default::default(), kept: 0, charged: 0, gathered: 0, budget: budget.clone() }
    }

    /// A buffer of at least `len` bytes; `len` is at most [`PIECE_BYTES`]. Its content is that of an earlier
    /// request of the same connection.
    pub fn take(&mut self, len: usize) -> Buffer {
        let size = size_for(len);
        self.charge(size);
        self.of_size(size, false)
    }

    /// Buffers for all pieces of a read at once, if there is space for them now. They count only against the limit of
    /// gathered reads.
    pub fn gather(&mut self, len: u32) -> Option<Vec<Buffer>> {
        let ends = (0..len).step_by(LARGEST);
        let sizes = ends.map(|at| size_for((len - at).min(PIECE_BYTES) as usize));
        let bytes: usize = sizes.clone().sum();
        let (most, together) = (self.budget.0.most_gathered, self.budget.gathered_bytes() + bytes);
        // Unsent replies, which are below `UNSENT_BYTES` when a request is taken in, keep no read from being gathered.
        if together > most || self.gathered + bytes > most / 2 + UNSENT_BYTES {
            return None;
        }
        self.gathered += bytes;
        self.budget.0.gathered.set(together);
        Some(sizes.map(|size| self.of_size(size, true)).collect())
    }

    /// Bytes that gathered reads of this connection hold.
    pub fn gathered_bytes(&self) -> usize {
        self.gathered
    }

    fn of_size(&mut self, size: usize, gathered: bool) -> Buffer {
        if let Some(buffer) = self.free[class(size)].pop() {
            self.uncount_kept(size);
            return Buffer { gathered, ..buffer };
        }
        while self.budget.held_bytes() > HELD_TOGETHER_BYTES
            && let Some(spare) = self.free.iter_mut().rev().find_map(Vec::pop)
        {
            self.uncount_kept(spare.bytes.len());
        }
        Buffer { bytes: vec![0; size].into_boxed_slice(), gathered }
    }

    /// Takes a buffer back, and keeps or frees it.
    pub fn give(&mut self, buffer: Buffer) {
        let size = buffer.bytes.len();
        if buffer.gathered {
            self.ungather(size);
        } else {
            self.uncharge(size);
        }
        let together = self.budget.kept_bytes() + size;
        if together <= KEPT_BYTES && self.budget.held_bytes() + size <= HELD_TOGETHER_BYTES {
            self.kept += size;
            self.budget.0.kept.set(together);
            self.free[class(size)].push(buffer);
        }
    }

    /// Whether the budget has space for so many bytes, at most [`PIECE_BYTES`]. A connection without any charge may always
    /// have one piece, so that each of them goes on whatever the others hold.
    pub fn has_space(&self, bytes: usize, disk_full: bool) -> bool {
        // Writes that wait when the disk becomes full must not take all of it: a discard behind them is to be read.
        let most = if disk_full { SHARED_BYTES } else { SHARED_BYTES / 2 };
        self.budget.used_bytes() + bytes <= most || self.charged == 0
    }

    /// Charges a request that begins for what it takes beside its buffer.
    pub fn charge_request(&mut self) {
        self.charge(REQUEST_COST_BYTES);
    }

    /// Takes that charge of a request that has ended back.
    pub fn uncharge_request(&mut self) {
        self.uncharge(REQUEST_COST_BYTES);
    }

    /// Frees all buffers that are kept.
    pub fn clear(&mut self) {
        self.free = Default::default();
        self.uncount_kept(self.kept);
    }

    fn charge(&mut self, bytes: usize) {
        self.charged += bytes;
        self.budget.0.used.set(self.budget.used_bytes() + bytes);
    }

    fn uncharge(&mut self, bytes: usize) {
        self.charged -= bytes;
        self.budget.0.used.set(self.budget.used_bytes() - bytes);
    }

    fn ungather(&mut self, bytes: usize) {
        self.gathered -= bytes;
        self.budget.0.gathered.set(self.budget.gathered_bytes() - bytes);
    }

    fn uncount_kept(&mut self, bytes: usize) {
        self.kept -= bytes;
        self.budget.0.kept.set(self.budget.kept_bytes() - bytes);
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        self.clear();
        self.uncharge(self.charged);
        self.ungather(self.gathered);
    }
}

/// The size of a buffer for `len` bytes.
#[inline]
pub fn size_for(len: usize) -> usize {
    len.next_power_of_two().max(SMALLEST)
}

fn class(size: usize) -> usize {
    (size / SMALLEST).trailing_zeros() as usize
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buffers_fit_their_request_and_are_reused() {
        let mut pool = Pool::new(&Budget::new());
        for len in [1, 512, 513, 4096, 4097, 65536, LARGEST - 512, LARGEST] {
            let mut buffer = pool.take(len);
            buffer.bytes_mut(len).fill(7);
            assert_eq!(buffer.bytes.len(), len.next_power_of_two().max(512));
            pool.give(buffer);
            assert_eq!(pool.take(len).bytes(len)[0], 7, "the buffer of {len} comes back");
        }
    }

    #[test]
    fn the_pool_keeps_a_bounded_amount() {
        let mut pool = Pool::new(&Budget::new());
        let out: Vec<_> = (0..10).map(|_| pool.take(LARGEST)).collect();
        out.into_iter().for_each(|buffer| pool.give(buffer));
        assert_eq!(pool.kept, KEPT_BYTES);
        assert_eq!(pool.free[CLASSES - 1].len(), KEPT_BYTES / LARGEST);
        // Buffers of other sizes take the place of those that are kept.
        let small: Vec<_> = (0..HELD_TOGETHER_BYTES / 4096).map(|_| pool.take(4096)).collect();
        assert!(pool.budget.held_bytes() <= HELD_TOGETHER_BYTES + LARGEST, "{}", pool.budget.held_bytes());
        small.into_iter().for_each(|buffer| pool.give(buffer));
        assert_eq!(pool.kept, KEPT_BYTES);
        pool.clear();
        assert_eq!(pool.kept, 0);
    }

    #[test]
    fn pools_share_a_budget() {
        let budget = Budget::new();
        let mut pools: Vec<Pool> = (0..100).map(|_| Pool::new(&budget)).collect();
        let mut out = Vec::new();
        while pools[0].has_space(LARGEST, true) {
            out.push(pools[0].take(LARGEST));
        }
        assert_eq!(budget.used_bytes(), SHARED_BYTES);
        assert!(!pools[0].has_space(512, false));
        // The first piece of each is beyond it.
        assert!(pools[1].has_space(LARGEST, true));
        let first = pools[1].take(LARGEST);
        assert!(!pools[1].has_space(512, true));
        // What is gathered has space of its own.
        let mut gathered = Vec::new();
        let most = SHARED_BYTES_GATHERED / 2 + UNSENT_BYTES;
        for (n, finds) in [(2, most), (3, SHARED_BYTES_GATHERED - most), (4, 0)] {
            while let Some(buffers) = pools[n].gather(PIECE_BYTES / 2 + 512) {
                gathered.extend(buffers);
            }
            assert_eq!(pools[n].gathered_bytes(), finds);
        }
        assert_eq!(budget.gathered_bytes(), SHARED_BYTES_GATHERED);
        assert_eq!(budget.used_bytes(), SHARED_BYTES + LARGEST);
        gathered.drain(..most / LARGEST).for_each(|buffer| pools[2].give(buffer));
        gathered.drain(1..).for_each(|buffer| pools[3].give(buffer));
        assert_eq!(budget.gathered_bytes(), LARGEST);
        pools[1].give(first);
        for (n, buffer) in out.into_iter().enumerate() {
            let given = &mut pools[n % 100];
            given.charge(LARGEST);
            given.give(buffer);
        }
        assert_eq!(budget.kept_bytes(), KEPT_BYTES);
        drop(pools);
        assert_eq!((budget.used_bytes(), budget.gathered_bytes(), budget.kept_bytes()), (0, 0, 0));
    }
}
