//! The memory that outlives the worker, mapped: `meta` and the slots of `data`. Owns the mappings and their
//! bounds; never interprets content.
//!
//! Invariant: the supervisor has sealed both files against shrinking, so that no access here can fault.

use rustix::fs::{FallocateFlags, SealFlags, fallocate, fcntl_get_seals, fstat};
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};
use std::os::fd::{AsFd, OwnedFd};

/// A shared mapping of the first bytes of a memfd.
pub struct Shared {
    base: *mut u8,
    len: usize,
    file: OwnedFd,
}

impl Shared {
    /// Maps `len` bytes.
    pub fn map(file: OwnedFd, len: u64, what: &str) -> Result<Shared, String> {
        let said = |e: &dyn std::fmt::Display| format!("cannot map the disk's {what} memory: {e}");
        let have = fstat(&file).map_err(|e| said(&e))?.st_size as u64;
        if have < len {
            return Err(said(&format!("{have} bytes where {len} are needed")));
        }
        let seals = fcntl_get_seals(&file).map_err(|e| said(&e))?;
        if !seals.contains(SealFlags::SHRINK) {
            return Err(said(&"it is not sealed against shrinking"));
        }
        let len = usize::try_from(len).map_err(|e| said(&e))?;
        let (prot, flags) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::SHARED | MapFlags::NORESERVE);
        // SAFETY: a new mapping at an address of the kernel's choice; it aliases nothing of this process.
        let base = unsafe { mmap(std::ptr::null_mut(), len, prot, flags, file.as_fd(), 0) };
        Ok(Shared { base: base.map_err(|e| said(&e))?.cast(), len, file })
    }

    /// Its first byte, aligned to a page.
    pub fn base(&self) -> *mut u8 {
        self.base
    }

    /// `len` bytes from `at` on.
    #[inline]
    pub fn bytes(&mut self, at: usize, len: usize) -> &mut [u8] {
        assert!(at.checked_add(len).is_some_and(|end| end <= self.len), "outside the mapping");
        // SAFETY: inside the mapping (checked), which lives as long as `self`; only this process touches the
        // content, and the borrow of `self` keeps other uses away.
        unsafe { std::slice::from_raw_parts_mut(self.base.add(at), len) }
    }

    /// Asks the processor to fetch the line at `at`, and with it to find the page: that is the larger part.
    #[inline]
    pub fn prefetch(&self, at: usize) {
        if at < self.len {
            // SAFETY: inside the mapping (checked).
            spillway_core::prefetch(unsafe { &*self.base.add(at) });
        }
    }

    /// Gives the memory of a range back to the host; it reads as zeroes afterwards.
    pub fn punch(&self, at: u64, len: u64) {
        let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        // The only failure is one of arguments; then the memory stays, which is no harm.
        let _ = fallocate(&self.file, flags, at, len);
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        // SAFETY: the mapping is ours and nothing borrows from it any more.
        let _ = unsafe { munmap(self.base.cast(), self.len) };
    }
}
