//! The memory that outlives the worker, mapped: `meta` and the slots of `data`. Owns the mappings and their
//! bounds; never interprets content.
//!
//! Invariant: the supervisor has sealed both files against shrinking, so that no access here can fault; but for the live map of
//! mode `persistent`, which lies in a file of the host's.

use super::error::{Error, ErrorKind};
use libc::iovec;
use rustix::fs::{
    FallocateFlags, MemfdFlags, SealFlags, fallocate, fcntl_get_seals, fstat, ftruncate, memfd_create,
};
use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap, mmap_anonymous, munmap};
use spillway_export::Figures;
use std::os::fd::{AsRawFd, OwnedFd};

/// Bytes of a huge page.
const HUGE: usize = 2 << 20;

/// A shared mapping of a memfd.
pub struct Shared {
    base: *mut u8,
    len: usize,
    file: OwnedFd,
}

impl Shared {
    /// Maps all of a file that has at least `need` bytes. Pages that are never accessed take no memory.
    pub fn map(file: OwnedFd, need: u64, object: &'static str) -> Result<Shared, Error> {
        let have = len_of(&file, need).map_err(|e| e.of(object))?;
        let seals = fcntl_get_seals(&file).map_err(|e| cannot_map(e).of(object))?;
        if !seals.contains(SealFlags::SHRINK) {
            return Err(Error::new(ErrorKind::Disk, "it is not sealed against shrinking").of(object));
        }
        Shared::map_range(file, 0, have).map_err(|e| e.of(object))
    }

    /// Maps `need` bytes of a named file, from `at` on. If another program truncates the file, an access raises SIGBUS,
    /// which ends this process and so only the disk of this file.
    pub fn map_file(file: OwnedFd, at: u64, need: u64, object: &'static str) -> Result<Shared, Error> {
        len_of(&file, at.saturating_add(need)).map_err(|e| e.of(object))?;
        Shared::map_range(file, at, need).map_err(|e| e.of(object))
    }

    fn map_range(file: OwnedFd, at: u64, len: u64) -> Result<Shared, Error> {
        let len = usize::try_from(len).map_err(cannot_map)?;
        let base = map_aligned(&file, at, len).map_err(cannot_map)?;
        Ok(Shared { base, len, file })
    }

    /// Asks for huge pages. Whether the host gives any.
    pub fn use_huge_pages(&self) -> bool {
        if !huge_pages_are_given() {
            return false;
        }
        // SAFETY: advice on our own mapping.
        unsafe { madvise(self.base.cast(), self.len, Advice::LinuxHugepage) }.is_ok()
    }

    /// Length of the mapping, in bytes.
    pub fn len_bytes(&self) -> u64 {
        self.len as u64
    }

    /// Address of the first byte, aligned to a page.
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

    /// Asks the host for something ahead of need: that a range has memory, or that what it has is mapped.
    pub fn advise(&self, at: usize, len: usize, advice: Advice) {
        if at.checked_add(len).is_some_and(|end| end <= self.len) {
            // SAFETY: inside our own mapping (checked). What it could not do, the access itself does.
            let _ = unsafe { madvise(self.base.add(at).cast(), len, advice) };
        }
    }

    /// Stores bytes from other memory, which may change meanwhile, at `at`. The kernel copies them, so that a page that
    /// is not allocated needs no page fault and is not zeroed first. Returns how many bytes were copied: fewer than all
    /// if the source is no longer mapped, or the host has no memory.
    ///
    /// # Safety
    /// The kernel checks the memory that `from` names; what may not be copied from it must not be named.
    pub unsafe fn store(&self, at: usize, from: &mut [iovec]) -> usize {
        let mut stored = 0;
        let mut left = &mut from[..];
        while !left.is_empty() {
            let count = left.len().min(libc::UIO_MAXIOV as usize);
            // SAFETY: the file is ours; it is never written beyond the mapping, as the caller stays in it.
            let n = unsafe {
                libc::pwritev(self.file.as_raw_fd(), left.as_ptr(), count as i32, (at + stored) as i64)
            };
            if n <= 0 {
                if n < 0 && std::io::Error::last_os_error().kind() == std::io::ErrorKind::Interrupted {
                    continue;
                }
                break;
            }
            stored += n as usize;
            let mut n = n as usize;
            while let Some(first) = left.first_mut() {
                if n < first.iov_len {
                    first.iov_base = first.iov_base.wrapping_byte_add(n);
                    first.iov_len -= n;
                    break;
                }
                n -= first.iov_len;
                left = &mut left[1..];
            }
        }
        stored
    }

    /// Gives the memory of a range back to the host; it reads as zeroes afterwards.
    pub fn punch(&self, at: u64, len: u64) {
        let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        // The only failure is one of arguments; then the memory stays, which is no harm.
        let _ = fallocate(&self.file, flags, at, len);
    }
}

/// Returns the length of a file, in bytes. Fails if it is below `need`.
fn len_of(file: &OwnedFd, need: u64) -> Result<u64, Error> {
    let found = fstat(file).map_err(cannot_map)?.st_size as u64;
    if found < need {
        let figures = Figures::Below { found, least: need };
        return Err(Error::new(ErrorKind::Disk, "it has too few bytes").figures(figures));
    }
    Ok(found)
}

fn cannot_map(source: impl std::error::Error + Send + Sync + 'static) -> Error {
    Error::new(ErrorKind::Resources, "it cannot be mapped")
        .because(source)
        .advice("see that memory and address space are left (free, ulimit -v)")
}

/// Maps a file to be shared, at an address that huge pages fit to.
fn map_aligned(file: &OwnedFd, at: u64, len: usize) -> rustix::io::Result<*mut u8> {
    let (prot, flags) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::SHARED | MapFlags::NORESERVE);
    // SAFETY: a new mapping, of no memory, at an address of the kernel's choice.
    let room = unsafe {
        let (none, flags) = (ProtFlags::empty(), MapFlags::PRIVATE | MapFlags::NORESERVE);
        mmap_anonymous(std::ptr::null_mut(), len + HUGE, none, flags)?.cast::<u8>()
    };
    let before = room.align_offset(HUGE);
    let base = room.wrapping_add(before);
    // SAFETY: it replaces a part of the mapping that was just made and that nobody knows of.
    let mapped = unsafe { mmap(base.cast(), len, prot, flags | MapFlags::FIXED, file, at) };
    // SAFETY: the rest of that mapping, in whole pages; all of it, if the file could not be mapped.
    unsafe {
        if mapped.is_err() {
            munmap(room.cast(), len + HUGE)?;
        } else {
            let after = len.next_multiple_of(4096);
            if before > 0 {
                munmap(room.cast(), before)?;
            }
            munmap(base.add(after).cast(), HUGE - before - (after - len))?;
        }
    }
    mapped.map(<*mut _>::cast)
}

/// Whether the host gives huge pages to shared memory that asks for them: found out with one of our own, as no
/// setting says what will happen.
pub fn huge_pages_are_given() -> bool {
    let probe = || -> rustix::io::Result<bool> {
        let file = memfd_create("spillway-probe", MemfdFlags::CLOEXEC)?;
        ftruncate(&file, HUGE as u64)?;
        let base = map_aligned(&file, 0, HUGE)?;
        // SAFETY: advice on the new mapping, one byte written inside it, and its end; nobody else knows it.
        unsafe {
            let advised = madvise(base.cast(), HUGE, Advice::LinuxHugepage);
            if advised.is_ok() {
                base.write_volatile(1);
            }
            munmap(base.cast(), HUGE)?;
            advised?;
        }
        Ok(fstat(&file)?.st_blocks as u64 * 512 >= HUGE as u64)
    };
    probe().unwrap_or(false)
}

impl Drop for Shared {
    fn drop(&mut self) {
        // SAFETY: the mapping is ours and nothing borrows from it any more.
        let _ = unsafe { munmap(self.base.cast(), self.len) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::fs::fcntl_add_seals;

    fn sealed(len: u64) -> OwnedFd {
        let file = memfd_create("test", MemfdFlags::ALLOW_SEALING).unwrap();
        ftruncate(&file, len).unwrap();
        fcntl_add_seals(&file, SealFlags::SHRINK).unwrap();
        file
    }

    #[test]
    fn a_mapping_is_aligned_whole_and_populated_where_asked() {
        for len in [4096, 1 << 21, (5 << 21) + 4096 * 3] {
            let mut shared = Shared::map(sealed(len), 4096, "test").unwrap();
            assert_eq!((shared.base().align_offset(HUGE), shared.len_bytes()), (0, len));
            shared.bytes(len as usize - 4096, 4096).fill(7);
            assert_eq!(fstat(&shared.file).unwrap().st_blocks, 8);
            shared.advise(0, 4096, Advice::LinuxPopulateWrite);
            shared.advise(len as usize, 4096, Advice::LinuxPopulateWrite);
            assert_eq!(fstat(&shared.file).unwrap().st_blocks, if len == 4096 { 8 } else { 16 });
        }
        let error = Shared::map(sealed(4096), 8192, "test").err().unwrap();
        assert_eq!(error.to_string(), "test: it has too few bytes: 4096, at least 8192 is needed");
        assert_eq!(error.kind(), ErrorKind::Disk);
        let unsealed = memfd_create("test", MemfdFlags::ALLOW_SEALING).unwrap();
        assert_eq!(Shared::map(unsealed, 0, "test").err().unwrap().kind(), ErrorKind::Disk);
    }

    /// Whatever the host's switch says: `tests/huge_pages.rs` turns it.
    #[test]
    fn huge_pages_are_used_exactly_where_they_are_said_to_be_given() {
        let mut shared = Shared::map(sealed(4 << 21), 4096, "test").unwrap();
        let pages = if shared.use_huge_pages() { 512 } else { 1 };
        let held_pages = |shared: &Shared| fstat(&shared.file).unwrap().st_blocks / 8;
        println!("{pages} pages at once");
        shared.bytes(1 << 21, 1).fill(1);
        assert_eq!(held_pages(&shared), pages);
        shared.advise(2 << 21, 1 << 21, Advice::LinuxPopulateWrite);
        assert_eq!(held_pages(&shared), pages + 512);
        shared.punch(1 << 21, 1 << 21);
        assert_eq!(held_pages(&shared), 512);
    }
}
