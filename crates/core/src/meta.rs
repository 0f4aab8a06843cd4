//! The disk's `meta` memory as the thread that owns the disk sees and writes it; what lies where in it, `spillway_layout`
//! says. With `copy` the only `unsafe` code of the core.
//!
//! Invariant: an entry is read only in a region whose directory byte says `mapped`; a region's entries are all written before
//! its byte turns to `mapped`.

use crate::crash_points;
use crate::entry::Entry;
use crate::error::{DiskError, Errno};
use spillway_layout::{
    Block, Counters, DiskSpec, Header, LAYOUT_VERSION, Layout, MAGIC, RegionState, SegmentMark, is_sealed,
    seal,
};
use std::ops::Range;
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};

/// Stores a word of the header.
#[inline]
#[cfg_attr(feature = "crash-points", track_caller)]
fn put(word: &AtomicU64, value: u64, order: Ordering) {
    crash_points::store();
    word.store(value, order);
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
        spec.check().map_err(DiskError::Spec)?;
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
                put(&h.generation, seal(1), Ordering::Relaxed);
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
                if !is_sealed(generation) {
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
        unsafe { &*self.base.add(Layout::COUNTERS_AT as usize).cast::<Counters>() }
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
        put(&self.header().ending, seal(self.generation()), Ordering::SeqCst);
    }

    /// Forgets every block, by one store: afterwards the disk reads as its base image. The other directory is
    /// clean; from here on this one is the other.
    pub(crate) fn reset(&mut self) {
        let generation = self.generation() + 1;
        self.directory_at = self.layout.directory(generation).start;
        put(&self.header().generation, seal(generation), Ordering::SeqCst);
        // What was lost is of the earlier generation.
        self.clear_unreported();
    }

    /// The error of an fdatasync of which no FLUSH was told, by this process or an earlier one.
    pub(crate) fn unreported(&self) -> Option<Errno> {
        match self.header().unreported.load(Ordering::Acquire) {
            0 => None,
            errno => Some(i32::try_from(errno).map_or(Errno::IO, Errno)),
        }
    }

    /// Keeps an error until a FLUSH has told it: the first one.
    pub(crate) fn record_unreported(&self, errno: Errno) {
        if self.unreported().is_none() {
            put(&self.header().unreported, errno.0.unsigned_abs().into(), Ordering::Release);
        }
    }

    pub(crate) fn clear_unreported(&self) {
        if self.unreported().is_some() {
            put(&self.header().unreported, 0, Ordering::Release);
        }
    }

    /// Whether a reset of this generation had begun when its process died.
    pub(crate) fn is_ending(&self) -> bool {
        self.header().ending.load(Ordering::Acquire) == seal(self.generation())
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

    /// How much was written to a region: the bits of a [`spillway_layout::Written`].
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
