//! Which chunks of a streamed image are in its file: a bit for each, in memory that `spillway-streamd` writes and workers read.
//!
//! Invariant: a bit is set only after its chunk is in the file and was found to be what its digest says, and is never cleared
//! in the same memory. Whoever sees a bit may read the chunk from the file.

#![expect(unsafe_code, reason = "memory that another process writes")]

use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, fcntl_get_seals, fstat, ftruncate, memfd_create};
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::ptr::NonNull;
use std::slice;
use std::sync::atomic::{AtomicU8, Ordering};

/// A map whose file cannot be cut off, so that reading it is never a fault, nor written by those it is given to.
const SEALS: SealFlags =
    SealFlags::SHRINK.union(SealFlags::GROW).union(SealFlags::FUTURE_WRITE).union(SealFlags::SEAL);

/// The bits, as a worker reads them.
#[derive(Debug)]
pub struct Residency {
    bits: Mapping,
    chunks: u64,
}

/// The bits, as their owner sets them.
#[derive(Debug)]
pub struct ResidencyWriter {
    residency: Residency,
    memory: OwnedFd,
}

#[derive(Debug)]
struct Mapping {
    base: NonNull<AtomicU8>,
    len: usize,
}

// SAFETY: it is memory of atomics, which lives as long as this.
unsafe impl Send for Mapping {}
// SAFETY: as above.
unsafe impl Sync for Mapping {}

impl Mapping {
    fn new(memory: BorrowedFd<'_>, len: usize, prot: ProtFlags) -> io::Result<Mapping> {
        // SAFETY: a new mapping at a place of the kernel's choice.
        let base = unsafe { mmap(std::ptr::null_mut(), len, prot, MapFlags::SHARED, memory, 0) }?;
        let base = NonNull::new(base.cast()).ok_or(io::ErrorKind::OutOfMemory)?;
        Ok(Mapping { base, len })
    }

    fn bytes(&self) -> &[AtomicU8] {
        // SAFETY: the mapping has this length, the file under it cannot be cut off, and every access is atomic.
        unsafe { slice::from_raw_parts(self.base.as_ptr(), self.len) }
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: nothing refers to the mapping any more.
        let _ = unsafe { munmap(self.base.as_ptr().cast(), self.len) };
    }
}

/// Length of the memory for so many chunks, in bytes; at least one, since nothing cannot be mapped.
fn len_of(chunks: u64) -> usize {
    (chunks.div_ceil(8) as usize).max(1)
}

impl Residency {
    /// Maps the memory of an image of so many chunks.
    ///
    /// # Errors
    /// It is of another length, or somebody could still cut it off.
    pub fn open(memory: BorrowedFd<'_>, chunks: u64) -> io::Result<Residency> {
        let len = len_of(chunks);
        let is_sealed = fcntl_get_seals(memory).is_ok_and(|seals| seals.contains(SealFlags::SHRINK));
        if !is_sealed || fstat(memory)?.st_size != len as i64 {
            return Err(io::ErrorKind::InvalidData.into());
        }
        Ok(Residency { bits: Mapping::new(memory, len, ProtFlags::READ)?, chunks })
    }

    /// Whether a chunk is in the file.
    #[inline]
    pub fn has(&self, chunk: u64) -> bool {
        // The chunk's bytes were written before its bit.
        chunk < self.chunks
            && self.bits.bytes()[(chunk / 8) as usize].load(Ordering::Acquire) >> (chunk % 8) & 1 != 0
    }
}

impl ResidencyWriter {
    /// Makes the memory for an image of so many chunks, none of which is in the file.
    pub fn new(chunks: u64) -> io::Result<ResidencyWriter> {
        let memory = memfd_create("residency", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
        let len = len_of(chunks);
        ftruncate(&memory, len as u64)?;
        // Mapped before it is sealed: from then on nobody else can write it.
        let bits = Mapping::new(memory.as_fd(), len, ProtFlags::READ | ProtFlags::WRITE)?;
        fcntl_add_seals(&memory, SEALS)?;
        Ok(ResidencyWriter { residency: Residency { bits, chunks }, memory })
    }

    /// The memory, for [`Residency::open`].
    pub fn memory(&self) -> BorrowedFd<'_> {
        self.memory.as_fd()
    }

    /// Whether a chunk is in the file.
    pub fn has(&self, chunk: u64) -> bool {
        self.residency.has(chunk)
    }

    /// A chunk is in the file, and was found to be what its digest says.
    pub fn set(&self, chunk: u64) {
        if chunk < self.residency.chunks {
            self.residency.bits.bytes()[(chunk / 8) as usize].fetch_or(1 << (chunk % 8), Ordering::Release);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_reader_sees_what_the_writer_sets_and_cannot_write() {
        for chunks in [0, 1, 8, 9, 40_960] {
            let writer = ResidencyWriter::new(chunks).unwrap();
            let reader = Residency::open(writer.memory(), chunks).unwrap();
            assert!((0..chunks + 9).all(|chunk| !reader.has(chunk)));
            for chunk in [0, 7, 8, chunks.saturating_sub(1), chunks] {
                writer.set(chunk);
                assert_eq!(reader.has(chunk), chunk < chunks, "{chunk} of {chunks}");
            }
            let memory = writer.memory();
            let write = ProtFlags::READ | ProtFlags::WRITE;
            assert!(Mapping::new(memory, len_of(chunks), write).is_err());
            assert!(rustix::io::write(memory, &[255]).is_err() && ftruncate(memory, 0).is_err());
            assert!(Residency::open(memory, chunks + 16).is_err());
        }
    }

    #[test]
    fn memory_that_could_be_cut_off_is_refused() {
        let memory = memfd_create("t", MemfdFlags::ALLOW_SEALING).unwrap();
        ftruncate(&memory, 1).unwrap();
        assert!(Residency::open(memory.as_fd(), 8).is_err());
    }
}
