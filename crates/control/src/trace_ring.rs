//! The ring in shared memory through which a worker tells what its disk is asked, while somebody records it.
//!
//! The worker writes and never looks at what others could have changed; whoever records maps the ring to read only, keeps
//! up or loses the oldest requests, and knows how many. Nobody waits for anybody.
//!
//! Invariants: entries up to the published number are whole; a few beyond it are being written, over the
//! oldest of those before it.

use rustix::fs::{MemfdFlags, SealFlags};
use rustix::io::Errno;
use rustix::mm::{MapFlags, ProtFlags};
use spillway_advisor::{Event, Operation};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicU64, Ordering, fence};

/// Requests that it holds: half a second of 500,000 a second.
const ENTRIES: u64 = 1 << 18;
/// Those that are written before they are published, at most.
const MARGIN: u64 = 1 << 12;
/// Bytes before the entries.
const HEAD_BYTES: usize = 4096;
const LEN: usize = HEAD_BYTES + ENTRIES as usize * size_of::<Entry>();
/// The operation is above the offset, which has no more bits than this.
const OPERATION_SHIFT: u32 = 56;

/// A request.
#[repr(C)]
struct Entry {
    time_us: AtomicU64,
    /// Where it begins, and what it does.
    at: AtomicU64,
    len_bytes: AtomicU64,
}

/// Why memory cannot be used as a ring.
#[derive(Debug, thiserror::Error)]
pub enum RingError {
    /// It is shorter than a ring.
    #[error("the memory for recorded requests has {found} bytes: at least {LEN} are needed")]
    TooShort {
        /// Its length.
        found: u64,
    },
    /// Its other holders could cut it short, which would end whoever has it mapped.
    #[error("the memory for recorded requests is not sealed against shrinking")]
    NotSealed,
    /// The host does not let it be measured or mapped.
    #[error("the memory for recorded requests cannot be mapped: {0}")]
    Map(#[from] Errno),
}

/// The ring's memory, mapped until the value is dropped.
struct Mapped(*const u8);

// SAFETY: an address that is valid wherever it is used, until `drop`; what is there is atomics.
unsafe impl Send for Mapped {}

impl Mapped {
    fn map(fd: BorrowedFd<'_>, prot: ProtFlags) -> Result<Mapped, RingError> {
        // Sealed first, measured then: it could be shortened in between.
        if !rustix::fs::fcntl_get_seals(fd)?.contains(SealFlags::SHRINK) {
            return Err(RingError::NotSealed);
        }
        let found = rustix::fs::fstat(fd)?.st_size as u64;
        if found < LEN as u64 {
            return Err(RingError::TooShort { found });
        }
        // SAFETY: a new mapping at an address of the kernel's choice.
        let base = unsafe { rustix::mm::mmap(std::ptr::null_mut(), LEN, prot, MapFlags::SHARED, fd, 0) }?;
        Ok(Mapped(base.cast_const().cast()))
    }

    /// How many were published.
    fn published(&self) -> &AtomicU64 {
        // SAFETY: the mapping begins with it, aligned to a page; any bits are a number.
        unsafe { &*self.0.cast() }
    }

    fn entry(&self, number: u64) -> &Entry {
        let index = (number % ENTRIES) as usize;
        // SAFETY: below ENTRIES, which the mapping holds; aligned to 8; any bits are numbers.
        unsafe { &*self.0.add(HEAD_BYTES).cast::<Entry>().add(index) }
    }
}

impl Drop for Mapped {
    fn drop(&mut self) {
        // SAFETY: our own mapping, of which no reference is left.
        let _ = unsafe { rustix::mm::munmap(self.0.cast_mut().cast(), LEN) };
    }
}

/// Memory for a ring. What is never written costs nothing.
pub fn create() -> io::Result<OwnedFd> {
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    let memory = rustix::fs::memfd_create("spillway-trace", flags)?;
    rustix::fs::ftruncate(&memory, LEN as u64)?;
    rustix::fs::fcntl_add_seals(&memory, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
    // Who is given an fd to read only, and is of another user, cannot open it again to write.
    rustix::fs::fchmod(&memory, rustix::fs::Mode::RUSR)?;
    Ok(memory)
}

/// The worker's end.
pub struct Writer {
    memory: Mapped,
    next: u64,
    published: u64,
}

impl Writer {
    /// Goes on where a worker before this one has ended.
    pub fn open(memory: &OwnedFd) -> Result<Writer, RingError> {
        let memory = Mapped::map(memory.as_fd(), ProtFlags::READ | ProtFlags::WRITE)?;
        let next = memory.published().load(Ordering::Relaxed);
        Ok(Writer { memory, next, published: next })
    }

    /// Writes a request down. Told of when it is published.
    #[inline]
    pub fn push(&mut self, event: &Event) {
        let entry = self.memory.entry(self.next);
        entry.time_us.store(event.time_us, Ordering::Relaxed);
        let operation = (event.operation as u64) << OPERATION_SHIFT;
        entry.at.store(operation | event.offset_bytes, Ordering::Relaxed);
        entry.len_bytes.store(event.len_bytes, Ordering::Relaxed);
        self.next = self.next.wrapping_add(1);
        if self.next.wrapping_sub(self.published) >= MARGIN {
            self.publish();
        }
    }

    /// Tells of what was written.
    #[inline]
    pub fn publish(&mut self) {
        if self.next != self.published {
            // What was written before is seen with the number, and the number before what is written over next.
            fence(Ordering::Release);
            self.memory.published().store(self.next, Ordering::Relaxed);
            fence(Ordering::Release);
            self.published = self.next;
        }
    }
}

/// The end of whoever records.
pub struct Reader {
    memory: Mapped,
    next: u64,
}

impl Reader {
    /// From the next request on.
    ///
    /// # Errors
    /// It is no such ring, or cannot be mapped.
    pub fn open(memory: impl AsFd) -> Result<Reader, RingError> {
        let memory = Mapped::map(memory.as_fd(), ProtFlags::READ)?;
        let next = memory.published().load(Ordering::Acquire);
        Ok(Reader { memory, next })
    }

    /// Appends what has come since the last time, in its order. Returns how many were lost before these: they came
    /// faster than they were read.
    pub fn read(&mut self, events: &mut Vec<Event>) -> u64 {
        let published = self.memory.published().load(Ordering::Acquire);
        if published < self.next {
            // Only what is not a worker of ours counts backwards.
            self.next = published;
        }
        let oldest = |published: u64| published.saturating_sub(ENTRIES - MARGIN);
        let first = self.next.max(oldest(published));
        let before = events.len();
        for number in first..published {
            let entry = self.memory.entry(number);
            let at = entry.at.load(Ordering::Relaxed);
            let operation = Operation::ALL.get((at >> OPERATION_SHIFT) as usize);
            events.push(Event {
                time_us: entry.time_us.load(Ordering::Relaxed),
                // One that is none was overwritten meanwhile, and goes below.
                operation: operation.copied().unwrap_or(Operation::Flush),
                offset_bytes: at & ((1 << OPERATION_SHIFT) - 1),
                len_bytes: entry.len_bytes.load(Ordering::Relaxed),
            });
        }
        // What was written over while it was read does not count.
        fence(Ordering::Acquire);
        let whole = oldest(self.memory.published().load(Ordering::Relaxed)).clamp(first, published);
        events.drain(before..before + (whole - first) as usize);
        let lost = whole - self.next;
        self.next = published;
        lost
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn event(n: u64) -> Event {
        let operation = Operation::ALL[(n % 4) as usize];
        Event { time_us: n, operation, offset_bytes: n * 512, len_bytes: n + 1 }
    }

    #[test]
    fn requests_come_in_order_and_none_is_lost_in_time() {
        let memory = create().unwrap();
        let mut writer = Writer::open(&memory).unwrap();
        let mut reader = Reader::open(&memory).unwrap();
        let mut events = Vec::new();
        for n in 0..10 {
            writer.push(&event(n));
        }
        assert_eq!((reader.read(&mut events), events.len()), (0, 0), "not published");
        writer.publish();
        assert_eq!(reader.read(&mut events), 0);
        assert_eq!(events, (0..10).map(event).collect::<Vec<_>>());
        // Another worker goes on; a reader that comes later begins there.
        let mut writer = Writer::open(&memory).unwrap();
        let mut later = Reader::open(&memory).unwrap();
        writer.push(&event(10));
        writer.publish();
        events.clear();
        assert_eq!((reader.read(&mut events), events.as_slice()), (0, &[event(10)][..]));
        assert_eq!((later.read(&mut events), events.len()), (0, 2));
    }

    #[test]
    fn who_is_late_knows_what_is_lost() {
        let memory = create().unwrap();
        let mut writer = Writer::open(&memory).unwrap();
        let mut reader = Reader::open(&memory).unwrap();
        let all = 3 * ENTRIES + 7;
        (0..all).for_each(|n| writer.push(&event(n)));
        writer.publish();
        let mut events = Vec::new();
        let lost = reader.read(&mut events);
        assert_eq!(lost + events.len() as u64, all);
        assert_eq!(events.len() as u64, ENTRIES - MARGIN);
        assert_eq!((events[0], *events.last().unwrap()), (event(lost), event(all - 1)));
    }

    #[test]
    fn what_is_read_beside_a_writer_is_whole() {
        let memory = create().unwrap();
        let mut writer = Writer::open(&memory).unwrap();
        let mut reader = Reader::open(&memory).unwrap();
        let all = 20 * ENTRIES;
        let thread = std::thread::spawn(move || {
            for n in 0..all {
                writer.push(&event(n));
                if n % 31 == 0 {
                    writer.publish();
                }
            }
            writer.publish();
        });
        let (mut next, mut read, mut events) = (0, 0, Vec::new());
        while next < all {
            events.clear();
            next += reader.read(&mut events);
            for one in &events {
                assert_eq!(*one, event(next));
                next += 1;
            }
            read += events.len() as u64;
        }
        thread.join().unwrap();
        assert!(read > 0);
    }

    #[test]
    fn other_memory_is_refused() {
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let short = rustix::fs::memfd_create("t", flags).unwrap();
        rustix::fs::fcntl_add_seals(&short, SealFlags::SHRINK).unwrap();
        assert!(matches!(Reader::open(&short), Err(RingError::TooShort { found: 0 })));
        let loose = rustix::fs::memfd_create("t", flags).unwrap();
        rustix::fs::ftruncate(&loose, LEN as u64).unwrap();
        assert!(matches!(Reader::open(&loose), Err(RingError::NotSealed)), "it could be cut");
        // A number that runs away is a number.
        let memory = create().unwrap();
        let mut reader = Reader::open(&memory).unwrap();
        let mut events = Vec::new();
        for published in [u64::MAX, 5, 1 << 60] {
            rustix::io::pwrite(&memory, &published.to_ne_bytes(), 0).unwrap();
            reader.read(&mut events);
            assert!(events.len() as u64 <= 3 * ENTRIES);
        }
    }
}
