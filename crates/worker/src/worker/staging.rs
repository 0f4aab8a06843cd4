//! Staging buffers: the only memory that asynchronous I/O of this process reads from or writes to, so that I/O
//! of a dead worker can harm nobody.
//!
//! One anonymous mapping: the parts (for writes), then large and small read buffers. Untouched pages cost
//! nothing. Invariant: a buffer is with one operation at a time.

use super::error::{Error, ErrorKind};
use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap_anonymous, munmap};
use spillway_core::{BLOCK_BYTES, PARTS, PartId};

/// Bytes of a part: 64 blocks.
pub const PART_BYTES: usize = 64 * BLOCK_BYTES;
/// Bytes of a large read buffer: the longest read, widened to whole blocks at both ends.
const LARGE_BYTES: usize = 256 * 1024 + 2 * BLOCK_BYTES;
const LARGE: usize = 8;
/// Small read buffers are for one block, widened likewise.
const SMALL_BYTES: usize = 2 * BLOCK_BYTES;
const SMALL: usize = 128;

const LARGE_AT: usize = PARTS * PART_BYTES;
const SMALL_AT: usize = LARGE_AT + LARGE * LARGE_BYTES;
const TOTAL: usize = SMALL_AT + SMALL * SMALL_BYTES;

/// A read buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Buffer(u16);

/// All staging memory.
pub struct Staging {
    base: *mut u8,
    free_large: Vec<u16>,
    free_small: Vec<u16>,
}

impl Staging {
    /// Reserves address space; pages come when they are used.
    pub fn new() -> Result<Staging, Error> {
        let (prot, flags) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE | MapFlags::NORESERVE);
        // SAFETY: a new anonymous mapping at an address of the kernel's choice.
        let base = unsafe { mmap_anonymous(std::ptr::null_mut(), TOTAL, prot, flags) }.map_err(|e| {
            Error::new(ErrorKind::Resources, "cannot reserve memory for reads and writes of files")
                .because(e)
                .advice("see that memory and address space are left (free, ulimit -v)")
        })?;
        // A forked child must not share pages that I/O is under way to. Best effort: the worker never forks.
        // SAFETY: advice on our own mapping.
        let _ = unsafe { madvise(base, TOTAL, Advice::LinuxDontFork) };
        Ok(Staging {
            base: base.cast(),
            free_large: (0..LARGE as u16).rev().collect(),
            free_small: (LARGE as u16..(LARGE + SMALL) as u16).rev().collect(),
        })
    }

    /// Takes a buffer that holds `len` bytes.
    pub fn take(&mut self, len: usize) -> Option<Buffer> {
        let small = if len <= SMALL_BYTES { self.free_small.pop() } else { None };
        small.or_else(|| self.free_large.pop()).map(Buffer)
    }

    /// Gives a buffer back.
    pub fn give(&mut self, buffer: Buffer) {
        let list = if usize::from(buffer.0) < LARGE { &mut self.free_large } else { &mut self.free_small };
        list.push(buffer.0);
    }

    fn span(buffer: Buffer) -> (usize, usize) {
        let i = usize::from(buffer.0);
        if i < LARGE {
            (LARGE_AT + i * LARGE_BYTES, LARGE_BYTES)
        } else {
            (SMALL_AT + (i - LARGE) * SMALL_BYTES, SMALL_BYTES)
        }
    }

    /// Address of byte `at` of a buffer, for the kernel; `len` bytes from there lie inside.
    pub fn address(&self, buffer: Buffer, at: usize, len: usize) -> *mut u8 {
        let (start, size) = Staging::span(buffer);
        assert!(at + len <= size, "outside the buffer");
        // SAFETY: inside the mapping.
        unsafe { self.base.add(start + at) }
    }

    /// `len` bytes of a buffer from `at` on, whose I/O has ended. The slice is not bound to the borrow of
    /// `self`, because the core is handed it together with everything else.
    ///
    /// # Safety
    /// The buffer is taken, no I/O to it is under way, and it is not given back while the slice is used.
    pub unsafe fn filled<'a>(&self, buffer: Buffer, at: usize, len: usize) -> &'a [u8] {
        // SAFETY: `address` checked the bounds; the mapping outlives the reactor's turn; the caller promised
        // that nothing writes there.
        unsafe { std::slice::from_raw_parts(self.address(buffer, at, len), len) }
    }

    /// A whole part.
    #[inline]
    pub fn part(&mut self, part: PartId) -> &mut [u8] {
        assert!(usize::from(part.0) < PARTS);
        // SAFETY: inside the mapping; the core touches a part only while no write from it is under way.
        unsafe { std::slice::from_raw_parts_mut(self.base.add(usize::from(part.0) * PART_BYTES), PART_BYTES) }
    }
}

impl Drop for Staging {
    fn drop(&mut self) {
        // SAFETY: our own mapping. The engine was dropped before (field order in `Transfers`).
        let _ = unsafe { munmap(self.base.cast(), TOTAL) };
    }
}
