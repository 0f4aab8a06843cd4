//! Memory that the disk's process sees too. Owns the mapping and its fd; never gives out two views of a byte.
//!
//! Invariant: the mapping lives exactly as long as the value.

use anyhow::{Context, Result, ensure};
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};
use std::os::fd::{AsRawFd, OwnedFd, RawFd};

/// A memfd, mapped.
pub(crate) struct SharedMemory {
    at: *mut u8,
    len: usize,
    fd: OwnedFd,
}

// SAFETY: the mapping belongs to the value alone and is reached through `&mut self` only.
unsafe impl Send for SharedMemory {}

impl SharedMemory {
    /// Makes zeroed memory of `len` bytes, which must not be 0.
    pub(crate) fn new(len: usize) -> Result<SharedMemory> {
        let fd = memfd_create("lab-shared", MemfdFlags::CLOEXEC).context("memfd_create")?;
        ftruncate(&fd, len as u64).context("cannot size the request memory")?;
        // SAFETY: a new mapping at an address of the kernel's choice.
        let at = unsafe {
            mmap(std::ptr::null_mut(), len, ProtFlags::READ | ProtFlags::WRITE, MapFlags::SHARED, &fd, 0)
        }
        .context("cannot map the request memory")?;
        Ok(SharedMemory { at: at.cast(), len, fd })
    }

    pub(crate) fn as_ptr(&self) -> *mut u8 {
        self.at
    }

    pub(crate) fn len(&self) -> usize {
        self.len
    }

    pub(crate) fn raw_fd(&self) -> RawFd {
        self.fd.as_raw_fd()
    }

    /// Gives its pages up while everyone still has it mapped. Whoever touches it afterwards faults.
    pub(crate) fn truncate(&self) -> Result<()> {
        ftruncate(&self.fd, 0).context("cannot shrink the request memory")
    }

    /// Writes to its file, past the mapping.
    pub(crate) fn store(&mut self, at: u64, from: &[u8]) -> Result<()> {
        let n = rustix::io::pwrite(&self.fd, from, at).context("cannot write to shared memory")?;
        ensure!(n == from.len(), "only {n} of {} bytes were written to shared memory", from.len());
        Ok(())
    }

    /// A part of it. The caller sees to it that no request in flight uses these bytes.
    pub(crate) fn slice(&mut self, from: usize, len: usize) -> &mut [u8] {
        assert!(from <= self.len && len <= self.len - from);
        // SAFETY: inside the mapping, borrowed from `self`. The disk writes there only for a request in flight.
        unsafe { std::slice::from_raw_parts_mut(self.at.add(from), len) }
    }
}

impl Drop for SharedMemory {
    fn drop(&mut self) {
        // SAFETY: the mapping that `new` made, unmapped once.
        let _ = unsafe { munmap(self.at.cast(), self.len) };
    }
}
