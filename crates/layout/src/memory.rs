//! The disk's `meta` memory: header, counters, segment table, directory and block map, in one piece of memory
//! that outlives the process that serves it. Owns where each piece lies and what its words say.
//!
//! Layout (all little-endian, native words):
//!
//! | at | what |
//! | --- | --- |
//! | 0 | header page: magic, layout version, spec, generation, the disk's number |
//! | 4096 | [`Counters`] |
//! | `segments_at` | one byte per overflow segment: free, busy, sealed, empty |
//! | `directories_at` | twice one byte per 2 MiB region: untouched, mapped, zero |
//! | `map_at` | one 8-byte entry per 4 KiB block |
//! | `written_at` | one 8-byte [`Written`] per 2 MiB region |
//!
//! Invariant: an entry may be read only in a region whose directory byte says `mapped`; anything else there
//! is junk. A region's entries are all written before its byte turns to `mapped`. The generation says which of the
//! two directories counts: a reset is one store (`docs/design/008-reset-by-generation.md`).

use crate::counters::Counters;
use crate::generation::generation_of;
use crate::spec::DiskSpec;
use crate::units::REGION_BLOCKS;
use crate::written::Written;
use std::mem::offset_of;
use std::ops::Range;
use std::sync::atomic::AtomicU64;

/// Bytes of the header and of all that is given to the memory at a time.
const PAGE: u64 = 4096;
/// The first word of memory that is a disk's.
pub const MAGIC: u64 = u64::from_le_bytes(*b"SPILLWAY");
/// Version of this layout; a worker refuses memory of another.
pub const LAYOUT_VERSION: u64 = 9;

/// What the directory says of a region.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum RegionState {
    /// Every block is the base image's.
    Untouched = 0,
    /// The map entries tell.
    Mapped = 1,
    /// Every block is zero.
    Zero = 2,
}

/// What the segment table says of a segment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum SegmentMark {
    /// The file does not hold it: it was never written, or has been punched out.
    Free = 0,
    /// A write or a punch of it may be under way, or it has no summary.
    Busy = 1,
    /// Every part of it is written, the summary included.
    Sealed = 2,
    /// Nothing lives in it and nothing is under way, but the file holds it.
    Empty = 3,
}

/// The header page. Every bit pattern is one of it.
#[repr(C)]
#[expect(missing_docs, reason = "those without are fields of the spec, or named as what they hold")]
pub struct Header {
    pub magic: AtomicU64,
    pub layout_version: AtomicU64,
    pub size_bytes: AtomicU64,
    pub base_bytes: AtomicU64,
    pub mode: AtomicU64,
    pub segment_blocks: AtomicU64,
    /// In one word with its check: see [`crate::seal`].
    pub generation: AtomicU64,
    /// The same of the generation that a reset under way is to end: an attach that finds it alive finishes that first.
    pub ending: AtomicU64,
    /// Segments that were ever opened: no mark beyond them was ever set.
    pub segments_used: AtomicU64,
    /// Segments that the file may hold while it shrinks to a lower limit.
    pub ceiling: AtomicU64,
    /// Slots from here on were never used: their memory is not there.
    pub slots_used: AtomicU64,
    /// Which disk this is the memory of.
    pub disk_id: AtomicU64,
    /// In mode `persistent`: not 0 while the mark of a reset may be on the medium.
    pub marked: AtomicU64,
    /// In mode `persistent`: not 0 once the map has all that the file's live map said when the disk was started.
    pub has_states: AtomicU64,
    /// The errno of an fdatasync of which no FLUSH was told; 0: there is none.
    pub unreported: AtomicU64,
}

/// Where each piece lies, from the spec alone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Layout {
    /// Where the table of segments is.
    pub segments_at: u64,
    /// Where the two directories are.
    pub directories_at: u64,
    /// Bytes of one directory.
    pub directory_len: u64,
    /// Where the block map is.
    pub map_at: u64,
    /// Where the words that count what was written are.
    pub written_at: u64,
    len: u64,
    /// Regions of the disk.
    pub regions: usize,
    /// Segments that the table has room for.
    pub segments: usize,
}

impl Layout {
    /// The layout for a disk. The overflow limit does not count, as it may change: the table of segments is laid
    /// out for the largest.
    pub fn of(spec: &DiskSpec) -> Layout {
        let regions = (spec.blocks() as usize).div_ceil(REGION_BLOCKS);
        let segments = spec.most_segments() as usize;
        let segments_at = (PAGE + size_of::<Counters>() as u64).next_multiple_of(PAGE);
        let directories_at = (segments_at + segments as u64).next_multiple_of(PAGE);
        let directory_len = (regions as u64).next_multiple_of(PAGE);
        let map_at = directories_at + 2 * directory_len;
        let written_at = map_at + regions as u64 * PAGE;
        let len = (written_at + (regions * size_of::<Written>()) as u64).next_multiple_of(PAGE);
        Layout { segments_at, directories_at, directory_len, map_at, written_at, len, regions, segments }
    }

    /// Bytes of `meta` memory to provide, zeroed and sparse. A multiple of 4096.
    #[inline]
    pub fn len_bytes(&self) -> u64 {
        self.len
    }

    /// The range of `meta` memory that holds the map.
    #[inline]
    pub fn map_range(&self) -> Range<u64> {
        self.map_at..self.written_at
    }

    /// Of it, the pages of these regions.
    #[inline]
    pub fn map_pages(&self, regions: Range<usize>) -> Range<u64> {
        self.map_at + regions.start as u64 * PAGE..self.map_at + regions.end as u64 * PAGE
    }

    /// The directory of a generation.
    #[inline]
    pub fn directory(&self, generation: u64) -> Range<u64> {
        let at = self.directories_at + (generation & 1) * self.directory_len;
        at..at + self.directory_len
    }

    /// Of what follows the map, the page with the words of these regions: a whole page's worth, or the last ones.
    #[inline]
    pub fn written_page(&self, regions: &Range<usize>) -> Range<u64> {
        let at = self.written_at + (regions.start * size_of::<Written>()) as u64;
        at..at + PAGE
    }

    /// The range that holds one [`Written`] for each region. Most of it is a hole: look with pread(2), which
    /// allocates nothing.
    #[inline]
    pub fn written_range(&self) -> Range<u64> {
        self.written_at..self.written_at + (self.regions * size_of::<Written>()) as u64
    }

    /// Where the generation lies, a word: see [`Layout::generation`].
    pub const GENERATION_AT: u64 = offset_of!(Header, generation) as u64;

    /// The generation that this word says; its check is not looked at.
    #[inline]
    pub fn generation(word: u64) -> u64 {
        generation_of(word)
    }

    /// Where the counters lie.
    pub const COUNTERS_AT: u64 = PAGE;
}
