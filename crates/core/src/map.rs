//! The block map as the disk uses it: where each block is, the commit of a new place, and the count of writes since the reset.
//!
//! Owns the `meta` memory. The engine frees the space of a block's old place. Invariant: of a region that is not
//! mapped, no entry is read; its entries are all written before it is.

use crate::entry::{Entry, Place};
use crate::error::DiskError;
use crate::io::Io;
use crate::meta::Meta;
use crate::word_pages::{WORDS_PER_PAGE, WordPages};
use spillway_layout::{
    BLOCK_BYTES, BLOCK_SECTORS, Block, Counters, DiskSpec, Location, Mode, REGION_BLOCKS, REGION_BYTES,
    RegionState, add, set,
};
use std::ops::{Range, RangeInclusive};

/// Where the content of a range of a disk comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ExtentSource {
    /// The base image.
    Base,
    /// It reads as zeroes.
    Zero,
    /// The RAM tier, or a file of the disk's own.
    Written,
}

/// The most that one step of [`BlockMap::forget`] may cost, in regions looked at: well below a millisecond.
const FORGET_COST: u32 = 8 * 1024;
/// The cost of releasing a page, and of a call that releases some.
const PAGE_COST: u32 = 32;
const CALL_COST: u32 = 128;

pub(crate) struct BlockMap {
    meta: Meta,
    size_bytes: u64,
    base_bytes: u64,
    /// Each block has its place in the file from the start (mode `ephemeral`): untouched blocks beyond the image are there.
    file_from_start: bool,
    word_pages: WordPages,
    /// The first region whose state of an earlier generation is still to be cleared.
    forget_from: Option<usize>,
    /// Some words in the page where the walk is are of an earlier generation.
    forget_words: bool,
}

impl BlockMap {
    /// The map in `meta`, which is formatted for this spec. It is not checked yet: see [`BlockMap::adopt`].
    pub fn new(meta: Meta, spec: &DiskSpec) -> BlockMap {
        BlockMap {
            word_pages: WordPages::none(meta.regions()),
            meta,
            size_bytes: spec.size_bytes,
            base_bytes: spec.base_bytes,
            file_from_start: spec.mode == Mode::Ephemeral,
            // It is not known whether it is clean: looking is cheaper than keeping account of it.
            forget_from: Some(0),
            forget_words: false,
        }
    }

    /// The memory. Other parts of it, the marks of segments and of slots, belong to their owners.
    #[inline]
    pub fn meta(&self) -> &Meta {
        &self.meta
    }

    #[inline]
    pub fn counters(&self) -> &Counters {
        self.meta.counters()
    }

    /// Blocks of the disk.
    pub fn blocks(&self) -> u32 {
        self.size_bytes.div_ceil(BLOCK_BYTES as u64) as u32
    }

    /// Blocks of a region that lie on the disk.
    pub fn blocks_of(&self, region: usize) -> Range<u32> {
        let first = (region * REGION_BLOCKS) as u32;
        first..(first + REGION_BLOCKS as u32).min(self.blocks())
    }

    /// Whether the image ends before the region.
    pub fn is_beyond_base(&self, region: usize) -> bool {
        region as u64 * REGION_BYTES >= self.base_bytes
    }

    /// Ends a reset during which a process died, and calls `takes` for each block that is not in the base image. It returns
    /// whether the block can be where the map says.
    pub fn adopt(&mut self, mut takes: impl FnMut(&Meta, Block, Place) -> bool) -> Result<(), DiskError> {
        self.meta.finish_reset();
        let damaged = |what: String| Err(DiskError::Damaged(what));
        let (mut mapped, blocks) = (0, self.blocks());
        for region in 0..self.meta.regions() {
            if self.meta.region_byte(region) > RegionState::Zero as u8 {
                return damaged(format!("directory byte of region {region}"));
            }
            // Its page of words counts as having memory: to find out would allocate it.
            match self.meta.region(region) {
                RegionState::Untouched => continue,
                RegionState::Zero => {
                    self.word_pages.insert(region);
                    continue;
                }
                RegionState::Mapped => self.word_pages.insert(region),
            };
            mapped += 1;
            let first = (region * REGION_BLOCKS) as u32;
            for block in first..(first + REGION_BLOCKS as u32) {
                let entry = self.meta.entry(Block(block));
                let fits = match entry.place() {
                    _ if !entry.is_well_formed() => false,
                    Place::Base if self.file_from_start => block >= blocks,
                    Place::Base | Place::Zero => true,
                    _ if block >= blocks => false,
                    place => takes(&self.meta, Block(block), place),
                };
                if !fits {
                    return damaged(format!("map entry of block {block}: {entry:?}"));
                }
            }
        }
        set(&self.counters().map_bytes, (mapped + self.word_pages.count() as u64) * BLOCK_BYTES as u64);
        self.counters().write_off();
        Ok(())
    }

    /// Blocks of untouched regions that have had their places in the file from the start.
    pub fn untouched_in_file(&self) -> u64 {
        let untouched =
            |&region: &usize| self.file_from_start && self.meta.region(region) == RegionState::Untouched;
        (0..self.meta.regions()).filter(untouched).map(|region| self.blocks_of(region).len() as u64).sum()
    }

    /// Asks the processor to fetch a block's entry.
    #[inline]
    pub fn prefetch(&self, block: Block) {
        self.meta.prefetch(block);
    }

    /// Whether the block's region is one of the disk's.
    #[inline]
    pub fn has(&self, block: Block) -> bool {
        block.region() < self.meta.regions()
    }

    /// Where a block's newest content is.
    #[inline]
    pub fn place(&self, block: Block) -> Place {
        let place = match self.meta.region(block.region()) {
            RegionState::Untouched => Place::Base,
            RegionState::Zero => Place::Zero,
            RegionState::Mapped => self.meta.entry(block).place(),
        };
        if place == Place::Base && block.offset_bytes() >= self.base_bytes {
            return self.beyond_base(block);
        }
        place
    }

    /// Where an untouched block beyond the image is.
    #[inline]
    fn beyond_base(&self, block: Block) -> Place {
        if self.file_from_start { Place::Overflow(Location(block.0), 0) } else { Place::Zero }
    }

    /// Where the content of the disk comes from, from byte `offset` on: for how many bytes, at most up to `end`. Looks
    /// at 512 map entries or as many regions at most.
    pub fn extent(&self, offset: u64, end: u64) -> (u64, ExtentSource) {
        let end = end.min(self.size_bytes);
        let source = |at: u64| match self.place(Block((at / BLOCK_BYTES as u64) as u32)) {
            Place::Base => ExtentSource::Base,
            Place::Zero => ExtentSource::Zero,
            Place::Ram(_) | Place::Overflow(..) => ExtentSource::Written,
        };
        let first = source(offset);
        let mut at = offset;
        for _ in 0..REGION_BLOCKS {
            let region = (at / REGION_BYTES) as usize;
            // All blocks of a region that is not mapped are alike, except in the region in which the image ends.
            let uniform = match self.meta.region(region) {
                RegionState::Mapped => false,
                RegionState::Zero => true,
                RegionState::Untouched => {
                    let start = region as u64 * REGION_BYTES;
                    self.base_bytes <= start || self.base_bytes >= start + REGION_BYTES
                }
            };
            let unit = if uniform { REGION_BYTES } else { BLOCK_BYTES as u64 };
            at = (at / unit + 1) * unit;
            if at >= end || source(at) != first {
                break;
            }
        }
        (at.min(end) - offset, first)
    }

    /// The commit: the block's newest content is `entry`'s from here on. Returns its old place, to be freed.
    #[inline]
    #[must_use]
    pub fn commit(&mut self, block: Block, entry: Entry) -> Place {
        if entry == Entry::ZERO && self.place(block) == Place::Zero {
            return Place::Zero;
        }
        let region = block.region();
        let old = match self.meta.region(region) {
            RegionState::Mapped => self.meta.entry(block).place(),
            state => {
                self.map_region(region, state);
                self.meta.entry(block).place()
            }
        };
        self.meta.set_entry(block, entry);
        old
    }

    /// The entry of a block whose region is mapped.
    pub fn entry(&self, block: Block) -> Entry {
        self.meta.entry(block)
    }

    #[inline]
    pub fn region(&self, region: usize) -> RegionState {
        self.meta.region(region)
    }

    /// Makes the region zero in the directory: its entries no longer count.
    pub fn set_region_zero(&mut self, region: usize) {
        self.meta.set_region(region, RegionState::Zero);
    }

    /// Whether all of the region's blocks that lie on the disk are zero.
    pub fn is_region_zero(&self, region: usize) -> bool {
        self.blocks_of(region).all(|block| self.place(Block(block)) == Place::Zero)
    }

    fn map_region(&mut self, region: usize, state: RegionState) {
        let first = (region * REGION_BLOCKS) as u32;
        for block in first..first + REGION_BLOCKS as u32 {
            let entry = match state {
                RegionState::Zero => Entry::ZERO,
                _ if self.file_from_start && block < self.blocks() => Entry::overflow(Location(block), 0),
                _ => Entry::BASE,
            };
            self.meta.set_entry(Block(block), entry);
        }
        self.meta.set_region(region, RegionState::Mapped);
        add(&self.counters().map_bytes, BLOCK_BYTES as u64);
    }

    /// Counts a completed write of these sectors.
    #[inline]
    pub fn count_written(&mut self, sectors: Range<u64>) {
        let blocks = sectors.start / BLOCK_SECTORS..sectors.end.div_ceil(BLOCK_SECTORS);
        let blocks = blocks.start as u32..blocks.end as u32;
        let regions = Block(blocks.start).region()..=Block(blocks.end - 1).region();
        if regions.clone().any(|region| self.meta.is_unwritten(region)) {
            self.written_first(regions);
        }
        self.meta.count_written(blocks);
    }

    /// Prepares the count of the first write since the reset to some of these regions.
    #[cold]
    fn written_first(&mut self, regions: RangeInclusive<usize>) {
        for region in regions {
            if self.word_pages.insert(region) {
                add(&self.counters().map_bytes, BLOCK_BYTES as u64);
            }
            // Zeroes were written where there were zeroes: the content is the same, and the region counts as written.
            if self.meta.region(region) == RegionState::Untouched {
                let first = Block((region * REGION_BLOCKS) as u32);
                match first.offset_bytes() >= self.base_bytes && self.beyond_base(first) == Place::Zero {
                    true => self.meta.set_region(region, RegionState::Zero),
                    false => self.map_region(region, RegionState::Untouched),
                }
            }
        }
    }

    /// Bytes of a block that lie on the disk: all, but for a partial last one.
    #[inline]
    pub fn block_len(&self, block: Block) -> u32 {
        (self.size_bytes - block.offset_bytes()).min(BLOCK_BYTES as u64) as u32
    }

    /// Releases the map page of a region that is no longer mapped to the host.
    pub fn unmap<I: Io>(&mut self, io: &mut I, region: usize) {
        io.release_meta(self.meta.layout().map_pages(region..region + 1));
        let c = self.meta.counters();
        add(&c.map_bytes, (BLOCK_BYTES as u64).wrapping_neg());
    }

    /// One step after a reset or an attach: clears the other directory of an earlier generation, and releases the map pages
    /// that only that generation used to the host. True: there is more to do.
    #[inline]
    pub fn forget<I: Io>(&mut self, io: &mut I) -> bool {
        self.forget_from.is_some_and(|from| self.forget_more(io, from))
    }

    fn forget_more<I: Io>(&mut self, io: &mut I, from: usize) -> bool {
        let regions = self.meta.regions();
        let (mut region, mut cost) = (from, 0);
        while region < regions && cost < FORGET_COST {
            let first = region;
            // One call for all pages up to the next region that is mapped now: between them there are holes.
            let mut pages: Option<Range<usize>> = None;
            while region < regions && cost < FORGET_COST && self.meta.region(region) != RegionState::Mapped {
                cost += 1;
                if self.meta.leftover(region) == Some(true) {
                    pages = Some(pages.map_or(region, |p| p.start)..region + 1);
                    cost += PAGE_COST;
                }
                region += 1;
            }
            if let Some(pages) = pages {
                io.release_meta(self.meta.layout().map_pages(pages));
                cost += CALL_COST;
            }
            if region == first {
                // Mapped now.
                region += 1;
                cost += 1;
            }
            for r in first..region {
                self.forget_words |= self.meta.leftover(r).is_some();
                self.meta.forget(r);
                cost += self.end_of_words(io, r + 1);
            }
        }
        self.forget_from = (region < regions).then_some(region);
        if self.forget_from.is_none() {
            io.release_meta(self.meta.other_directory());
        }
        self.forget_from.is_some()
    }

    /// Clears the words that count writes to the regions before `end`, if a page of them ends there. Returns the cost.
    fn end_of_words<I: Io>(&mut self, io: &mut I, end: usize) -> u32 {
        let page_ends = end.is_multiple_of(WORDS_PER_PAGE) || end == self.meta.regions();
        if !page_ends || !std::mem::take(&mut self.forget_words) {
            return 0;
        }
        let regions = (end - 1) / WORDS_PER_PAGE * WORDS_PER_PAGE..end;
        if self.meta.forget_written(regions.clone()) {
            io.release_meta(self.meta.layout().written_page(&regions));
            if self.word_pages.remove(regions.start) {
                add(&self.counters().map_bytes, (BLOCK_BYTES as u64).wrapping_neg());
            }
        }
        WORDS_PER_PAGE as u32 + CALL_COST
    }
    /// Whether the state of an earlier generation is still being cleared.
    pub fn is_forgetting(&self) -> bool {
        self.forget_from.is_some()
    }

    /// Records that a reset has begun: from here on a process that attaches finishes it.
    pub fn begin_reset(&self) {
        self.meta.begin_reset();
    }

    /// Forgets every block, by one store. [`BlockMap::forget`] clears the old state and releases its memory.
    pub fn reset(&mut self) {
        self.meta.reset();
        self.forget_from = Some(0);
        self.word_pages.clear();
        set(&self.counters().map_bytes, 0);
    }

    /// Pages of it that hold memory; for the self-check.
    pub fn pages(&self) -> usize {
        let mapped = (0..self.meta.regions()).filter(|&r| self.meta.region(r) == RegionState::Mapped);
        mapped.count() + self.word_pages.count()
    }
}
