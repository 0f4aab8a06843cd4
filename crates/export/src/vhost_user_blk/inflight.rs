//! The table of requests in flight (vhost-user, "Inflight I/O tracking", split virtqueues). Owns the layout of
//! the memory that the front end, or our supervisor, keeps for us over a restart, and the rule of recovery; never
//! answers requests.
//!
//! Invariant: at every instant the table and the used ring together say exactly which heads were taken and not
//! yet given back. The front end shares the memory, so nothing read from it is an index before it was checked.

use super::MAX_QUEUES;
use super::error::Error;
use super::memory::Mapping;
use super::message::Inflight;
use super::ring::MAX_QUEUE_SIZE;
use super::sigbus::Guard;
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create};
use std::os::fd::{AsFd, OwnedFd};
use std::rc::Rc;
use std::sync::atomic::{AtomicU8, AtomicU16, AtomicU64, Ordering};

const VERSION: u16 = 1;
const HEADER_BYTES: usize = 16;
const ENTRY_BYTES: usize = 16;
const REGION_ALIGN: usize = 64;

/// Bytes of the table of one queue.
fn region_bytes(queue_size: u16) -> usize {
    (HEADER_BYTES + ENTRY_BYTES * usize::from(queue_size)).next_multiple_of(REGION_ALIGN)
}

const TABLE: &str = "in-flight table";

/// The bytes that a table needs, if it can be.
fn needed_bytes(what: &Inflight, max_queues: u16) -> Result<u64, Error> {
    let wrong = |reason, found: u16, most: u16| {
        let error = Error::protocol(reason).of(TABLE);
        Err(if found == 0 { error.below(found, 1u16) } else { error.above(found, most) })
    };
    if what.num_queues == 0 || what.num_queues > max_queues {
        return wrong("wrong number of queues", what.num_queues, max_queues);
    }
    if what.queue_size == 0 || what.queue_size > MAX_QUEUE_SIZE {
        return wrong("wrong number of descriptors in a queue", what.queue_size, MAX_QUEUE_SIZE);
    }
    Ok(u64::from(what.num_queues) * region_bytes(what.queue_size) as u64)
}

/// GET_INFLIGHT_FD: makes a zeroed memfd that can neither grow nor shrink.
pub(super) fn create(wanted: &Inflight, max_queues: u16) -> Result<(Inflight, OwnedFd), Error> {
    let mmap_size = needed_bytes(wanted, max_queues)?;
    let make = || {
        let fd = memfd_create("spillway-inflight", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
        ftruncate(&fd, mmap_size)?;
        fcntl_add_seals(&fd, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
        Ok(fd)
    };
    let fd = make().map_err(|errno| Error::io("its memfd cannot be made", errno).of(TABLE))?;
    Ok((Inflight { mmap_size, mmap_offset: 0, ..*wanted }, fd))
}

/// Memory for a session's own table, for front ends that lend none. Whoever keeps it can have the session go on
/// after the process that served it ([`super::Frontend::resume`]).
///
/// # Errors
/// No or more than 64 queues, or the system's.
pub fn inflight_table(queues: u16) -> std::io::Result<OwnedFd> {
    let (_, fd) = create(&own(queues), MAX_QUEUES).map_err(std::io::Error::other)?;
    Ok(fd)
}

/// The dimensions of a session's own table.
fn own(queues: u16) -> Inflight {
    let mmap_size = u64::from(queues) * region_bytes(MAX_QUEUE_SIZE) as u64;
    Inflight { mmap_size, mmap_offset: 0, num_queues: queues, queue_size: MAX_QUEUE_SIZE }
}

/// The table of all queues, as it is mapped.
pub(super) struct InflightTable {
    mapping: Rc<Mapping>,
    num_queues: u16,
    queue_size: u16,
    /// It is the session's own; the front end has lent none.
    own: bool,
}

impl InflightTable {
    /// SET_INFLIGHT_FD.
    pub(super) fn map(
        what: &Inflight,
        fd: impl AsFd,
        max_queues: u16,
        guard: &Guard,
    ) -> Result<InflightTable, Error> {
        let needed = needed_bytes(what, max_queues)?;
        if what.mmap_size < needed {
            return Err(Error::protocol("it has too few bytes").of(TABLE).below(what.mmap_size, needed));
        }
        let mapping = Mapping::new(fd, what.mmap_offset, needed, guard).map_err(|e| e.of(TABLE))?;
        if !(mapping.start() as usize).is_multiple_of(8) {
            let error = Error::protocol("its offset in the file is not a multiple of 8").of(TABLE);
            return Err(error.found(what.mmap_offset));
        }
        let mapping = Rc::new(mapping);
        Ok(InflightTable { mapping, num_queues: what.num_queues, queue_size: what.queue_size, own: false })
    }

    /// The memory of [`inflight_table`].
    pub(super) fn map_own(fd: impl AsFd, queues: u16, guard: &Guard) -> Result<InflightTable, Error> {
        Ok(InflightTable { own: true, ..InflightTable::map(&own(queues), fd, queues, guard)? })
    }

    /// The part of one queue, if the table has one that is large enough.
    pub(super) fn queue(&self, queue: u16, queue_size: u16) -> Option<InflightQueue> {
        if queue >= self.num_queues || queue_size > self.queue_size {
            return None;
        }
        let base = self.mapping.start().wrapping_add(usize::from(queue) * region_bytes(self.queue_size));
        let _mapping = Rc::clone(&self.mapping);
        Some(InflightQueue { base, size: queue_size, counter: 0, own: self.own, _mapping })
    }
}

/// The part of a table that belongs to one queue.
pub(super) struct InflightQueue {
    base: *mut u8,
    /// Heads are below this.
    size: u16,
    /// The order of the next head that is taken.
    counter: u64,
    /// As in the table.
    own: bool,
    _mapping: Rc<Mapping>,
}

impl InflightQueue {
    /// Whether it is of the session's own table, which the front end knows nothing of.
    pub(super) fn is_own(&self) -> bool {
        self.own
    }

    fn half(&self, at: usize) -> &AtomicU16 {
        // SAFETY: `at` is below 16, inside the region's header; the base is aligned to 8 and mapped by `_mapping`.
        unsafe { &*self.base.add(at).cast::<AtomicU16>() }
    }

    fn version(&self) -> &AtomicU16 {
        self.half(8)
    }

    fn desc_num(&self) -> &AtomicU16 {
        self.half(10)
    }

    fn last_batch_head(&self) -> &AtomicU16 {
        self.half(12)
    }

    fn used_idx(&self) -> &AtomicU16 {
        self.half(14)
    }

    #[inline(always)]
    fn entry(&self, head: u16) -> *mut u8 {
        assert!(head < self.size);
        self.base.wrapping_add(HEADER_BYTES + ENTRY_BYTES * usize::from(head))
    }

    #[inline(always)]
    fn inflight(&self, head: u16) -> &AtomicU8 {
        // SAFETY: the first byte of an entry of this queue's region, mapped by `_mapping`.
        unsafe { &*self.entry(head).cast::<AtomicU8>() }
    }

    #[inline(always)]
    fn next(&self, head: u16) -> &AtomicU16 {
        // SAFETY: bytes 6 and 7 of an entry, as above.
        unsafe { &*self.entry(head).add(6).cast::<AtomicU16>() }
    }

    #[inline(always)]
    fn order(&self, head: u16) -> &AtomicU64 {
        // SAFETY: bytes 8 to 15 of an entry, as above.
        unsafe { &*self.entry(head).add(8).cast::<AtomicU64>() }
    }

    /// "When receiving available buffers from the driver".
    #[inline(always)]
    pub(super) fn take(&mut self, head: u16) {
        self.order(head).store(self.counter, Ordering::Relaxed);
        self.counter = self.counter.wrapping_add(1);
        self.inflight(head).store(1, Ordering::Release);
    }

    /// "When supplying used buffers to the driver", steps 1 to 3, before the used index moves.
    #[inline(always)]
    pub(super) fn link(&self, head: u16) {
        self.next(head).store(self.last_batch_head().load(Ordering::Relaxed), Ordering::Relaxed);
        self.last_batch_head().store(head, Ordering::Release);
    }

    /// The last steps, after the used index has moved.
    #[inline(always)]
    pub(super) fn give_back(&self, batch: &[u16], used_index: u16) {
        for &head in batch {
            // Release: never before the used index, or a crash in between would lose the request.
            self.inflight(head).store(0, Ordering::Release);
        }
        self.used_idx().store(used_index, Ordering::Release);
    }

    /// "When reconnecting": the heads that were taken and not given back, in the order in which they were taken.
    /// `used_index` is the used ring's.
    pub(super) fn recover(&mut self, used_index: u16) -> Vec<u16> {
        if self.version().load(Ordering::Acquire) == 0 {
            self.clear(used_index);
        }
        let completed = self.used_idx().load(Ordering::Relaxed);
        let mut head = self.last_batch_head().load(Ordering::Relaxed);
        for _ in 0..used_index.wrapping_sub(completed).min(self.size) {
            if head >= self.size {
                break;
            }
            self.inflight(head).store(0, Ordering::Relaxed);
            head = self.next(head).load(Ordering::Relaxed);
        }
        self.used_idx().store(used_index, Ordering::Release);

        let taken = (0..self.size).filter(|&head| self.inflight(head).load(Ordering::Relaxed) != 0);
        let mut taken: Vec<(u64, u16)> =
            taken.map(|head| (self.order(head).load(Ordering::Relaxed), head)).collect();
        taken.sort_unstable();
        self.counter = taken.last().map_or(0, |(order, _)| order.wrapping_add(1));
        taken.into_iter().map(|(_, head)| head).collect()
    }

    /// Starts afresh: nothing is in flight.
    pub(super) fn clear(&mut self, used_index: u16) {
        for head in 0..self.size {
            self.inflight(head).store(0, Ordering::Relaxed);
        }
        self.counter = 0;
        self.desc_num().store(self.size, Ordering::Relaxed);
        self.last_batch_head().store(0, Ordering::Relaxed);
        self.used_idx().store(used_index, Ordering::Relaxed);
        self.version().store(VERSION, Ordering::Release);
    }
}
