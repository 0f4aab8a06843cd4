//! A raw base image in the worker. Owns the file and the reads that cannot block; never waits for the store:
//! what is not in the page cache is the reactor's to read, asynchronously, on the same file.
//!
//! Invariant: a read that is answered has the whole of what the image holds there. A piece is never passed off
//! as the whole.
//!
//! The image ends at [`RawImage::size_bytes`], a multiple of 512 and not always of 4096. An aligned read (the
//! reactor's slow path, O_DIRECT above all) that reaches over the end comes back short: exactly
//! `size_bytes - offset` bytes are the image, the rest is to be taken as zeroes. A read that is shorter than
//! that met a file that has shrunk since it was opened: an I/O error.

use super::aligned::dio_align;
use rustix::io::{Errno, ReadWriteFlags, preadv2};
use std::fs::File;
use std::io::{self, IoSliceMut};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

/// A raw base image.
pub struct RawImage {
    file: File,
    direct: bool,
    in_memory: bool,
    size_bytes: u64,
    dio_align: u32,
}

impl RawImage {
    /// Takes the image that the supervisor opened and measured; `direct` says whether it is open O_DIRECT.
    pub fn new(file: OwnedFd, size_bytes: u64, direct: bool) -> RawImage {
        let dio_align = if direct { dio_align(file.as_fd()) } else { 1 };
        let in_memory = lies_in_memory(file.as_fd());
        RawImage { file: File::from(file), direct, in_memory, size_bytes, dio_align }
    }

    /// Size of the image.
    pub fn size_bytes(&self) -> u64 {
        self.size_bytes
    }

    /// Whether the file is open O_DIRECT: then every read goes to the store and [`Self::read_now`] has nothing.
    pub fn direct(&self) -> bool {
        self.direct
    }

    /// Whether the file system itself is memory (tmpfs): then no read reaches a store.
    pub fn in_memory(&self) -> bool {
        self.in_memory
    }

    /// What offset, length and memory of a read on [`Self::fd`] must be multiples of; 1 without O_DIRECT.
    pub fn dio_align(&self) -> u32 {
        self.dio_align
    }

    /// The file, for asynchronous reads.
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }

    /// Reads what is in the page cache. `None`: it would wait for the store (or cannot tell); read it
    /// asynchronously. `Ok(n)` is `buf.len()`, or less by exactly what lies past the end of the image.
    pub fn read_now(&self, buf: &mut [u8], offset: u64) -> Option<io::Result<usize>> {
        if self.direct {
            return None;
        }
        let wanted = self.within(buf.len(), offset);
        read_resident(self.file.as_fd(), &mut buf[..wanted], offset, self.flags())
    }

    /// tmpfs does not know RWF_NOWAIT, and does not need it: it waits no more than the RAM tier does.
    fn flags(&self) -> ReadWriteFlags {
        if self.in_memory { ReadWriteFlags::empty() } else { ReadWriteFlags::NOWAIT }
    }

    fn within(&self, len: usize, offset: u64) -> usize {
        usize::try_from(self.size_bytes.saturating_sub(offset)).unwrap_or(usize::MAX).min(len)
    }
}

/// Whether a file lies on tmpfs or ramfs.
pub(super) fn lies_in_memory(file: BorrowedFd<'_>) -> bool {
    const TMPFS: i64 = 0x0102_1994;
    const RAMFS: i64 = 0x8584_58f6;
    rustix::fs::fstatfs(file).is_ok_and(|fs| [TMPFS, RAMFS].contains(&(fs.f_type & 0xffff_ffff)))
}

/// Fills `buf` from the page cache, in as many calls as it gives pieces. `None` as soon as a piece is missing.
/// An unexpected end of the file is an I/O error.
fn read_resident(
    file: BorrowedFd<'_>,
    buf: &mut [u8],
    offset: u64,
    flags: ReadWriteFlags,
) -> Option<io::Result<usize>> {
    let mut done = 0;
    while done < buf.len() {
        let at = offset + done as u64;
        match preadv2(file, &mut [IoSliceMut::new(&mut buf[done..])], at, flags) {
            Ok(0) => return Some(Err(Errno::IO.into())),
            Ok(n) => done += n,
            Err(Errno::INTR) => {}
            Err(Errno::AGAIN | Errno::OPNOTSUPP) => return None,
            Err(error) => return Some(Err(error.into())),
        }
    }
    Some(Ok(done))
}
