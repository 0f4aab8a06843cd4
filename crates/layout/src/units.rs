//! Units of the disk. Owns the sizes that every other file counts in; never does arithmetic on content.
//!
//! A guest sector is 512 bytes; a block, the unit of the block map, is 4 KiB; a region, the unit of the
//! directory, is 512 blocks (2 MiB), so that the map entries of one region fill one 4 KiB page.

/// Bytes in a guest sector, the smallest unit that a request addresses.
pub const SECTOR_BYTES: u64 = 512;
/// Bytes in a block.
pub const BLOCK_BYTES: usize = 4096;
/// Sectors in a block.
pub const BLOCK_SECTORS: u64 = BLOCK_BYTES as u64 / SECTOR_BYTES;
/// Blocks in a region.
pub const REGION_BLOCKS: usize = 512;
/// Bytes of disk that one region covers: 2 MiB.
pub const REGION_BYTES: u64 = (REGION_BLOCKS * BLOCK_BYTES) as u64;
/// The largest disk: 4 TiB, the reach of the 30-bit location in a map entry.
pub const MAX_DISK_BYTES: u64 = 1 << 42;

/// Index of a 4 KiB block on the disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Block(pub u32);

impl Block {
    /// The region that this block lies in.
    #[inline]
    pub fn region(self) -> usize {
        self.0 as usize / REGION_BLOCKS
    }

    /// Byte offset of the block's first byte on the disk.
    #[inline]
    pub fn offset_bytes(self) -> u64 {
        u64::from(self.0) * BLOCK_BYTES as u64
    }
}

/// Index of a 4 KiB slot of the RAM tier.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Slot(pub u32);

impl Slot {
    /// Byte offset of the slot in the `data` memory.
    #[inline]
    pub fn offset_bytes(self) -> u64 {
        u64::from(self.0) * BLOCK_BYTES as u64
    }
}

/// Index of a 4 KiB block of the overflow file (or, in mode `direct`, of the difference file).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Location(pub u32);

impl Location {
    /// Byte offset of the location in its file.
    #[inline]
    pub fn offset_bytes(self) -> u64 {
        u64::from(self.0) * BLOCK_BYTES as u64
    }
}

/// Bytes in words: `512 B`, `4.0 GiB`.
pub fn bytes_in_words(n: u64) -> String {
    let units = ["KiB", "MiB", "GiB", "TiB", "PiB", "EiB"];
    if n < 1024 {
        return format!("{n} B");
    }
    let power = (63 - n.leading_zeros()) / 10;
    format!("{:.1} {}", n as f64 / (1u64 << (10 * power)) as f64, units[power as usize - 1])
}
