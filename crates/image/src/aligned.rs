//! What O_DIRECT asks of offsets, lengths and memory. Owns the alignment and a buffer that has it; never reads.
//!
//! Invariant: an alignment is a power of two of at least 512.

use rustix::fs::{AtFlags, StatxFlags, statx};
use std::os::fd::{AsFd, BorrowedFd};

/// Taken where the kernel does not say.
const ASSUMED_ALIGN: u32 = 4096;

/// The alignment that O_DIRECT needs on this file, in bytes, for offset, length and memory alike: what statx
/// says (STATX_DIOALIGN, Linux 6.1), else the block device's logical block size, else 4096.
pub fn dio_align(file: BorrowedFd<'_>) -> u32 {
    let said = statx(file, "", AtFlags::EMPTY_PATH, StatxFlags::DIOALIGN)
        .ok()
        .filter(|s| StatxFlags::from_bits_retain(s.stx_mask).contains(StatxFlags::DIOALIGN))
        .map(|s| s.stx_dio_mem_align.max(s.stx_dio_offset_align))
        .filter(|align| *align > 0);
    let align = said.or_else(|| rustix::fs::ioctl_blksszget(file.as_fd()).ok()).unwrap_or(ASSUMED_ALIGN);
    align.max(512).checked_next_power_of_two().unwrap_or(ASSUMED_ALIGN)
}

/// Bytes whose address is a multiple of an alignment.
pub(super) struct AlignedBuf {
    bytes: Vec<u8>,
    start: usize,
    len: usize,
}

impl AlignedBuf {
    /// `len` zeroes at a multiple of `align`, a power of two.
    pub(super) fn new(len: usize, align: usize) -> AlignedBuf {
        let bytes = vec![0; len + align];
        let start = bytes.as_ptr().align_offset(align).min(align);
        AlignedBuf { bytes, start, len }
    }

    pub(super) fn as_mut_slice(&mut self) -> &mut [u8] {
        &mut self.bytes[self.start..self.start + self.len]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_buffer_is_aligned() {
        for align in [512, 4096, 65536] {
            let mut buf = AlignedBuf::new(8192, align);
            assert_eq!(buf.as_mut_slice().len(), 8192);
            assert_eq!(buf.as_mut_slice().as_ptr() as usize % align, 0);
        }
    }

    #[test]
    fn a_file_has_an_alignment() {
        let file = tempfile::tempfile().unwrap();
        let align = dio_align(file.as_fd());
        assert!(align.is_power_of_two() && align >= 512);
    }
}
