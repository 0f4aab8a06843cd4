//! The block map as the disk uses it: where a block is, the commit of where it is from now on, and what that
//! frees.
//!
//! Invariant: of a region that is not mapped, no entry is read; its entries are all written before it is.

use crate::counters::{add, set};
use crate::disk::Disk;
use crate::entry::{Entry, Place};
use crate::error::DiskError;
use crate::io::Io;
use crate::meta::RegionState;
use crate::spec::Mode;
use crate::units::{BLOCK_BYTES, Block, Location, REGION_BLOCKS, REGION_BYTES};
use crate::written::WORDS_PER_PAGE;
use std::ops::{Range, RangeInclusive};

/// Where the content of a stretch of a disk comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ExtentSource {
    /// The base image.
    Base,
    /// Nowhere: it reads as zeroes.
    Zero,
    /// The RAM tier, or a file of the disk's own.
    Written,
}

/// What one step of [`Disk::forget`] may cost, in regions looked at: well below a millisecond.
const FORGET_COST: u32 = 8 * 1024;
/// What a page given back costs, and a call that gives some.
const PAGE_COST: u32 = 32;
const CALL_COST: u32 = 128;

impl Disk {
    /// Rebuilds everything but the map from the map.
    pub(crate) fn adopt(&mut self) -> Result<(), DiskError> {
        self.meta.finish_reset();
        let damaged = |what: String| Err(DiskError::Damaged(what));
        let mut mapped = 0;
        for region in 0..self.meta.regions() {
            if self.meta.region_byte(region) > RegionState::Zero as u8 {
                return damaged(format!("directory byte of region {region}"));
            }
            // Whether its page of words is there cannot be seen without making it.
            match self.meta.region(region) {
                RegionState::Untouched => {
                    if self.spec.mode == Mode::Ephemeral {
                        let left = u64::from(self.spec.blocks()) - (region * REGION_BLOCKS) as u64;
                        self.direct_blocks += left.min(REGION_BLOCKS as u64);
                    }
                    continue;
                }
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
                    // Each block has a place of its own from the start.
                    Place::Base if self.spec.mode == Mode::Ephemeral => block >= self.spec.blocks(),
                    Place::Base | Place::Zero => true,
                    _ if block >= self.spec.blocks() => false,
                    Place::Ram(slot) => self.ram.adopt(slot, Block(block)),
                    Place::Overflow(location, checksum) if self.spec.mode.writes_in_place() => {
                        self.direct_blocks += 1;
                        location.0 == block && checksum == 0
                    }
                    Place::Overflow(location, _) => {
                        self.spec.mode.has_log() && self.log.adopt(location, block, &self.meta)
                    }
                };
                if !fits {
                    return damaged(format!("map entry of block {block}: {entry:?}"));
                }
            }
        }
        self.ram.finish_adopting(&self.meta);
        self.log.finish_adopting(&self.meta);
        self.overflowed = self.log.live() > 0;
        set(&self.counters().map_bytes, (mapped + self.word_pages.count() as u64) * BLOCK_BYTES as u64);
        self.counters().write_off();
        Ok(())
    }

    /// Where a block's newest content is.
    #[inline]
    pub(crate) fn place(&self, block: Block) -> Place {
        let place = match self.meta.region(block.region()) {
            RegionState::Untouched => Place::Base,
            RegionState::Zero => Place::Zero,
            RegionState::Mapped => self.meta.entry(block).place(),
        };
        if place == Place::Base && block.offset_bytes() >= self.spec.base_bytes {
            return self.beyond_base(block);
        }
        place
    }

    /// Where a block is that nothing has touched and no image reaches.
    #[inline]
    fn beyond_base(&self, block: Block) -> Place {
        match self.spec.mode {
            Mode::Ephemeral => Place::Overflow(Location(block.0), 0),
            _ => Place::Zero,
        }
    }

    /// Where the content of the disk comes from, from byte `offset` on: for how many bytes, at most up to `end`. Looks
    /// at 512 map entries or as many regions at most.
    pub fn extent(&self, offset: u64, end: u64) -> (u64, ExtentSource) {
        let end = end.min(self.spec.size_bytes);
        let source = |at: u64| match self.place(Block((at / BLOCK_BYTES as u64) as u32)) {
            Place::Base => ExtentSource::Base,
            Place::Zero => ExtentSource::Zero,
            Place::Ram(_) | Place::Overflow(..) => ExtentSource::Written,
        };
        let first = source(offset);
        let mut at = offset;
        for _ in 0..REGION_BLOCKS {
            let region = (at / REGION_BYTES) as usize;
            // A region that is not mapped is all one thing, but for the one in which the image ends.
            let uniform = match self.meta.region(region) {
                RegionState::Mapped => false,
                RegionState::Zero => true,
                RegionState::Untouched => {
                    let start = region as u64 * REGION_BYTES;
                    self.spec.base_bytes <= start || self.spec.base_bytes >= start + REGION_BYTES
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

    /// The commit: the block's newest content is `entry`'s from here on. What it was before is given up.
    #[inline]
    pub(crate) fn commit(&mut self, block: Block, entry: Entry) -> u64 {
        if entry == Entry::ZERO && self.place(block) == Place::Zero {
            return 0;
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
        self.give_up(old, entry == Entry::ZERO)
    }

    /// Frees what a block's earlier content took. Returns the bytes given back.
    pub(crate) fn give_up(&mut self, old: Place, to_host: bool) -> u64 {
        match old {
            Place::Base | Place::Zero => return 0,
            Place::Ram(slot) => self.ram.release(slot, to_host),
            Place::Overflow(..) if self.spec.mode.writes_in_place() => self.direct_blocks -= 1,
            Place::Overflow(location, _) => self.log.dead(location, &self.meta),
        }
        BLOCK_BYTES as u64
    }

    fn map_region(&mut self, region: usize, state: RegionState) {
        let first = (region * REGION_BLOCKS) as u32;
        for block in first..first + REGION_BLOCKS as u32 {
            let entry = match state {
                RegionState::Zero => Entry::ZERO,
                _ if self.spec.mode == Mode::Ephemeral && block < self.spec.blocks() => {
                    Entry::overflow(Location(block), 0)
                }
                _ => Entry::BASE,
            };
            self.meta.set_entry(Block(block), entry);
        }
        self.meta.set_region(region, RegionState::Mapped);
        add(&self.counters().map_bytes, BLOCK_BYTES as u64);
    }

    /// The first write since the reset to some of these regions is about to be counted.
    #[cold]
    pub(crate) fn written_first(&mut self, regions: RangeInclusive<usize>) {
        for region in regions {
            if self.word_pages.insert(region) {
                add(&self.counters().map_bytes, BLOCK_BYTES as u64);
            }
            // Zeroes were written where there were zeroes: it looks as before, and is known to have been written.
            if self.meta.region(region) == RegionState::Untouched {
                let first = Block((region * REGION_BLOCKS) as u32);
                match first.offset_bytes() >= self.spec.base_bytes && self.beyond_base(first) == Place::Zero {
                    true => self.meta.set_region(region, RegionState::Zero),
                    false => self.map_region(region, RegionState::Untouched),
                }
            }
        }
    }

    /// Bytes of a block that lie on the disk: all, but for a partial last one.
    #[inline]
    pub(crate) fn block_len(&self, block: Block) -> u32 {
        (self.spec.size_bytes - block.offset_bytes()).min(BLOCK_BYTES as u64) as u32
    }

    pub(crate) fn pin(&mut self, location: Location) {
        if self.spec.mode.has_log() {
            let segment = self.log.segment_of(location);
            self.log.pin(segment);
        }
    }

    pub(crate) fn unpin(&mut self, location: Location) {
        if self.spec.mode.has_log() {
            let segment = self.log.segment_of(location);
            self.log.unpin(segment, &self.meta);
        }
    }

    /// The map page of a region that is not mapped any more goes back to the host.
    pub(crate) fn unmap<I: Io>(&mut self, io: &mut I, region: usize) {
        io.release_meta(self.meta.layout().map_pages(region..region + 1));
        let c = self.meta.counters();
        add(&c.map_bytes, (BLOCK_BYTES as u64).wrapping_neg());
    }

    /// After a reset or an attach, a step: what an earlier generation has left in the other directory is
    /// forgotten, and the map pages that it used and this one does not go back to the host. True: there is more.
    pub(crate) fn forget<I: Io>(&mut self, io: &mut I) -> bool {
        let Some(from) = self.forget_from else { return false };
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

    /// The regions up to `end` are forgotten: so are, by whole pages, the words that say what was written to them.
    /// Returns what it cost.
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
}
