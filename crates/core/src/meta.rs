//! The disk's `meta` memory: header, counters, segment table, directory and block map, in one piece of memory
//! that outlives the process that serves it. With `copy` the only `unsafe` code of the core.
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
use crate::crash_points;
use crate::entry::Entry;
use crate::error::DiskError;
use crate::generation;
use crate::spec::DiskSpec;
use crate::units::{Block, REGION_BLOCKS};
use crate::written::Written;
use std::ops::Range;
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};

const PAGE: u64 = 4096;
const MAGIC: u64 = u64::from_le_bytes(*b"SPILLWAY");
/// Version of this layout; a worker refuses memory of another.
pub const LAYOUT_VERSION: u64 = 7;

/// The state of a region in the directory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum RegionState {
    /// Every block is the base image's.
    Untouched = 0,
    /// Its map entries say where each block is.
    Mapped = 1,
    /// Every block is zero.
    Zero = 2,
}

/// The state of a segment in the segment table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum SegmentMark {
    /// The file does not hold it: it was never written, or has been punched out.
    Free = 0,
    /// A write or a punch of it may be in flight, or it has no summary.
    Busy = 1,
    /// Every part of it is written, the summary included.
    Sealed = 2,
    /// It has no live block and no I/O in flight, but the file holds it.
    Empty = 3,
}

#[repr(C)]
struct Header {
    magic: AtomicU64,
    layout_version: AtomicU64,
    size_bytes: AtomicU64,
    base_bytes: AtomicU64,
    mode: AtomicU64,
    segment_blocks: AtomicU64,
    /// In one word with its check: see [`crate::generation`].
    generation: AtomicU64,
    /// The generation that a reset in progress ends, in the same form: if it is still the disk's generation, an attach finishes
    /// the reset first.
    ending: AtomicU64,
    /// Segments that were ever opened: no mark beyond them was ever set.
    segments_used: AtomicU64,
    /// Segments that the file may hold while it shrinks to a lower limit.
    ceiling: AtomicU64,
    /// Slots from here on were never used and have no memory.
    slots_used: AtomicU64,
    /// Which disk this is the memory of.
    disk_id: AtomicU64,
    /// In mode `persistent`: not 0 while the mark of a reset may be on the medium.
    marked: AtomicU64,
    /// In mode `persistent`: not 0 once the map was filled from the file's live map.
    has_states: AtomicU64,
}

/// Stores a word of the header.
#[inline]
#[cfg_attr(feature = "crash-points", track_caller)]
fn put(word: &AtomicU64, value: u64, order: Ordering) {
    crash_points::store();
    word.store(value, order);
}

/// Where each piece lies, from the spec alone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Layout {
    segments_at: u64,
    directories_at: u64,
    /// Of one directory.
    directory_len: u64,
    map_at: u64,
    written_at: u64,
    len: u64,
    regions: usize,
    segments: usize,
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
    pub fn len_bytes(&self) -> u64 {
        self.len
    }

    /// The range of `meta` memory that holds the map.
    pub fn map_range(&self) -> Range<u64> {
        self.map_at..self.written_at
    }

    /// Of it, the pages of these regions.
    pub(crate) fn map_pages(&self, regions: Range<usize>) -> Range<u64> {
        self.map_at + regions.start as u64 * PAGE..self.map_at + regions.end as u64 * PAGE
    }

    /// The directory of a generation.
    fn directory(&self, generation: u64) -> Range<u64> {
        let at = self.directories_at + (generation & 1) * self.directory_len;
        at..at + self.directory_len
    }

    /// Of what follows the map, the page with the words of these regions: a whole page's worth, or the last ones.
    pub(crate) fn written_page(&self, regions: &Range<usize>) -> Range<u64> {
        let at = self.written_at + (regions.start * size_of::<Written>()) as u64;
        at..at + PAGE
    }

    /// The range that holds one [`Written`] for each region. Most of it is a hole: look with pread(2), which
    /// allocates nothing.
    pub fn written_range(&self) -> Range<u64> {
        self.written_at..self.written_at + (self.regions * size_of::<Written>()) as u64
    }

    /// Where the generation lies, a word: see [`Layout::generation`].
    pub const GENERATION_AT: u64 = std::mem::offset_of!(Header, generation) as u64;

    /// The generation that this word says; its check is not looked at.
    pub fn generation(word: u64) -> u64 {
        generation::of(word)
    }

    /// Where the counters lie.
    pub const COUNTERS_AT: u64 = PAGE;
}

/// The `meta` memory, seen by the one thread that owns the disk.
pub struct Meta {
    base: *mut u8,
    layout: Layout,
    /// Where the directory that counts lies.
    directory_at: u64,
}

// SAFETY: the pointer is to memory that the creator promised for the lifetime of the value; there is one owner.
unsafe impl Send for Meta {}

impl Meta {
    /// Takes memory for the disk of this number and spec. Zeroed memory is formatted; other memory must be that disk's and fit
    /// the spec in all that it records: limits, full policy and the size of a part may be others. Returns whether it had been formatted
    /// before.
    ///
    /// # Safety
    /// `base` is page-aligned, readable and writable for `Layout::of(spec).len_bytes()` bytes for as long as
    /// the value lives, and nobody else writes to it.
    pub unsafe fn open(base: *mut u8, spec: &DiskSpec, disk_id: u64) -> Result<(Meta, bool), DiskError> {
        spec.check()?;
        let mut meta = Meta { base, layout: Layout::of(spec), directory_at: 0 };
        let h = meta.header();
        let fields = [
            (&h.size_bytes, spec.size_bytes, "disk size"),
            (&h.base_bytes, spec.base_bytes, "base image size"),
            (&h.mode, spec.mode as u64, "mode"),
            (&h.segment_blocks, u64::from(spec.shape.segment_blocks), "segment size"),
            (&h.disk_id, disk_id, "disk number"),
        ];
        let existing = match h.magic.load(Ordering::Acquire) {
            0 => {
                for (field, value, _) in fields {
                    put(field, value, Ordering::Relaxed);
                }
                put(&h.generation, generation::seal(1), Ordering::Relaxed);
                put(&h.segments_used, 0, Ordering::Relaxed);
                put(&h.ceiling, 0, Ordering::Relaxed);
                put(&h.layout_version, LAYOUT_VERSION, Ordering::Relaxed);
                put(&h.magic, MAGIC, Ordering::Release);
                false
            }
            MAGIC => {
                let version = h.layout_version.load(Ordering::Relaxed);
                if version != LAYOUT_VERSION {
                    return Err(DiskError::Damaged(format!(
                        "layout version {version}, this program knows {LAYOUT_VERSION}"
                    )));
                }
                for (field, want, what) in fields {
                    let found = field.load(Ordering::Relaxed);
                    if found != want {
                        return Err(DiskError::Damaged(format!("{what} is {found}, expected {want}")));
                    }
                }
                let generation = h.generation.load(Ordering::Relaxed);
                if !generation::is_sealed(generation) {
                    return Err(DiskError::Damaged(format!(
                        "generation {generation:#018x} was never stored"
                    )));
                }
                true
            }
            other => return Err(DiskError::Damaged(format!("no disk here (magic {other:#018x})"))),
        };
        meta.directory_at = meta.layout.directory(meta.generation()).start;
        Ok((meta, existing))
    }

    /// Reads the generation of a formatted disk from its header page.
    ///
    /// # Safety
    /// `base` is aligned to 8 and readable for 4096 bytes.
    pub unsafe fn read_generation(base: *const u8) -> u64 {
        // SAFETY: promised by the caller; the header is plain atomics.
        Layout::generation(unsafe { &*base.cast::<Header>() }.generation.load(Ordering::Relaxed))
    }

    /// Segments that the file may hold; at most as many as the table has.
    pub(crate) fn ceiling(&self) -> u32 {
        self.header().ceiling.load(Ordering::Relaxed).min(self.layout.segments as u64) as u32
    }

    pub(crate) fn set_ceiling(&self, segments: u32) {
        put(&self.header().ceiling, segments.into(), Ordering::Relaxed);
    }

    fn header(&self) -> &Header {
        // SAFETY: `open`'s caller promised the memory; the header is plain atomics at its start.
        unsafe { &*self.base.cast::<Header>() }
    }

    /// The counters.
    #[inline]
    pub fn counters(&self) -> &Counters {
        // SAFETY: inside the promised memory (`Layout::of`), aligned to a page, plain atomics.
        unsafe { &*self.base.add(PAGE as usize).cast::<Counters>() }
    }

    /// Where each piece lies.
    pub fn layout(&self) -> &Layout {
        &self.layout
    }

    /// The disk's generation: 1 at birth, one more after each reset.
    pub fn generation(&self) -> u64 {
        Layout::generation(self.header().generation.load(Ordering::Relaxed))
    }

    /// Slots from this one on were never used, by no process.
    pub(crate) fn slots_used(&self) -> u32 {
        u32::try_from(self.header().slots_used.load(Ordering::Relaxed)).unwrap_or(u32::MAX)
    }

    /// Sets that number. To be called before the first of these slots is used.
    #[inline]
    pub(crate) fn set_slots_used(&self, slots: u32) {
        put(&self.header().slots_used, u64::from(slots), Ordering::Release);
    }

    /// Records that a reset has begun: from here on a process that attaches finishes it.
    pub(crate) fn begin_reset(&self) {
        put(&self.header().ending, generation::seal(self.generation()), Ordering::SeqCst);
    }

    /// Forgets every block, by one store: afterwards the disk reads as its base image. The other directory is
    /// clean; from here on this one is the other.
    pub(crate) fn reset(&mut self) {
        let generation = self.generation() + 1;
        self.directory_at = self.layout.directory(generation).start;
        put(&self.header().generation, generation::seal(generation), Ordering::SeqCst);
    }

    /// Whether a reset of this generation had begun when its process died.
    pub(crate) fn is_ending(&self) -> bool {
        self.header().ending.load(Ordering::Acquire) == generation::seal(self.generation())
    }

    /// Whether the mark of a reset may be on the medium.
    pub(crate) fn is_marked(&self) -> bool {
        self.header().marked.load(Ordering::Acquire) != 0
    }

    /// Sets this flag before the mark is written, and clears it after the mark was removed.
    pub(crate) fn set_marked(&self, marked: bool) {
        put(&self.header().marked, marked.into(), Ordering::SeqCst);
    }

    /// Whether the map was filled from the file's live map, by this process or an earlier one.
    pub(crate) fn has_states(&self) -> bool {
        self.header().has_states.load(Ordering::Acquire) != 0
    }

    /// Records that the map was filled.
    pub(crate) fn set_has_states(&self) {
        put(&self.header().has_states, 1, Ordering::Release);
    }

    /// Finishes such a reset.
    pub(crate) fn finish_reset(&mut self) {
        if self.is_ending() {
            for region in 0..self.layout.regions {
                if self.leftover(region).is_some() {
                    self.forget(region);
                    self.forget_written(region..region + 1);
                }
            }
            self.reset();
        }
    }

    /// The directory that does not count: clean, or the earlier generation's that is being cleared.
    pub(crate) fn other_directory(&self) -> Range<u64> {
        self.layout.directory(self.generation() + 1)
    }

    /// Whether an earlier generation had written the region's map page; `None`: the region is clear.
    pub(crate) fn leftover(&self, region: usize) -> Option<bool> {
        assert!(region < self.layout.regions);
        let byte = self.byte(self.other_directory().start, region).load(Ordering::Acquire);
        (byte != RegionState::Untouched as u8).then_some(byte == RegionState::Mapped as u8)
    }

    /// Clears the region in the other directory.
    pub(crate) fn forget(&self, region: usize) {
        if self.leftover(region).is_some() {
            crash_points::store();
            self.byte(self.other_directory().start, region)
                .store(RegionState::Untouched as u8, Ordering::Release);
        }
    }

    /// Number of regions.
    pub fn regions(&self) -> usize {
        self.layout.regions
    }

    #[inline]
    fn byte(&self, at: u64, index: usize) -> &AtomicU8 {
        // SAFETY: callers check `index` against the number of bytes at `at`.
        unsafe { &*self.base.add(at as usize + index).cast::<AtomicU8>() }
    }

    /// The state of a region in the directory. An unknown byte reads as `Untouched`; `attach` refuses it before.
    #[inline]
    pub fn region(&self, region: usize) -> RegionState {
        match self.region_byte(region) {
            1 => RegionState::Mapped,
            2 => RegionState::Zero,
            _ => RegionState::Untouched,
        }
    }

    /// The directory's raw byte.
    #[inline]
    pub fn region_byte(&self, region: usize) -> u8 {
        assert!(region < self.layout.regions);
        self.byte(self.directory_at, region).load(Ordering::Acquire)
    }

    /// Sets a region's directory byte.
    #[cfg_attr(feature = "crash-points", track_caller)]
    pub fn set_region(&self, region: usize, state: RegionState) {
        assert!(region < self.layout.regions);
        crash_points::store();
        self.byte(self.directory_at, region).store(state as u8, Ordering::Release);
    }

    /// The state of a segment in the segment table.
    pub(crate) fn segment(&self, segment: u32) -> SegmentMark {
        assert!((segment as usize) < self.layout.segments);
        match self.byte(self.layout.segments_at, segment as usize).load(Ordering::Acquire) {
            1 => SegmentMark::Busy,
            2 => SegmentMark::Sealed,
            3 => SegmentMark::Empty,
            _ => SegmentMark::Free,
        }
    }

    /// Marks a segment.
    #[cfg_attr(feature = "crash-points", track_caller)]
    pub(crate) fn set_segment(&self, segment: u32, mark: SegmentMark) {
        assert!((segment as usize) < self.layout.segments);
        crash_points::store();
        self.byte(self.layout.segments_at, segment as usize).store(mark as u8, Ordering::Release);
    }

    /// How many segments were ever opened; at most as many as the table has.
    pub(crate) fn segments_used(&self) -> u32 {
        self.header().segments_used.load(Ordering::Acquire).min(self.layout.segments as u64) as u32
    }

    /// Sets that number: the segments below it have marks.
    pub(crate) fn set_segments_used(&self, segments: u32) {
        put(&self.header().segments_used, segments.into(), Ordering::Release);
    }

    #[inline]
    fn cell(&self, block: Block) -> &AtomicU64 {
        assert!(block.region() < self.layout.regions);
        // SAFETY: the map holds a whole page of entries for every region below `regions`.
        unsafe { &*self.base.add(self.layout.map_at as usize).cast::<AtomicU64>().add(block.0 as usize) }
    }

    /// The map entry of a block in a mapped region.
    #[inline]
    pub fn entry(&self, block: Block) -> Entry {
        Entry::from_bits(self.cell(block).load(Ordering::Acquire))
    }

    /// The commit: one release store.
    #[inline]
    #[cfg_attr(feature = "crash-points", track_caller)]
    pub fn set_entry(&self, block: Block, entry: Entry) {
        crash_points::store();
        self.cell(block).store(entry.bits(), Ordering::Release);
    }

    /// How much was written to a region: the bits of a [`Written`].
    #[inline]
    pub(crate) fn written(&self, region: usize) -> &AtomicU64 {
        assert!(region < self.layout.regions);
        // SAFETY: the area holds a word for every region below `regions`, and begins with a page.
        unsafe { &*self.base.add(self.layout.written_at as usize).cast::<AtomicU64>().add(region) }
    }

    /// Asks the processor to fetch a block's directory byte; of its entry too when the region is mapped.
    #[inline]
    pub fn prefetch(&self, block: Block) {
        if block.region() < self.layout.regions && self.region(block.region()) == RegionState::Mapped {
            prefetch(self.cell(block));
        }
    }
}

/// Asks the processor to fetch the cache line of a value; nothing on processors for which that is not written.
#[inline]
pub fn prefetch<T>(value: &T) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: prefetching has no effect on memory and cannot fault.
    unsafe {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        _mm_prefetch::<_MM_HINT_T0>(std::ptr::from_ref(value).cast());
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = value;
}
