//! The words that count writes to each region ([`Written`]), in `meta` memory: counting, clearing, and which pages of them have
//! memory.
//!
//! Invariant: a region whose word counts is not untouched in the directory: that is how it is found when it is to be cleared.

use crate::crash_points;
use crate::meta::Meta;
use spillway_layout::{Block, REGION_BLOCKS, Written};
use std::ops::Range;
use std::sync::atomic::Ordering::Relaxed;

/// Regions whose words fill a page.
pub(crate) const WORDS_PER_PAGE: usize = 512;

/// Which pages of words hold memory, as far as this process knows: a bit for each.
pub(crate) struct WordPages(Vec<u64>);

impl WordPages {
    /// None, for so many regions.
    pub fn none(regions: usize) -> WordPages {
        WordPages(vec![0; regions.div_ceil(WORDS_PER_PAGE * 64)])
    }

    /// Records that the page with this region's word has memory. True: it had none before.
    pub fn insert(&mut self, region: usize) -> bool {
        let page = region / WORDS_PER_PAGE;
        let (word, bit) = (&mut self.0[page / 64], 1 << (page % 64));
        let new = *word & bit == 0;
        *word |= bit;
        new
    }

    /// Records that its memory was released. True: it had some.
    pub fn remove(&mut self, region: usize) -> bool {
        let there = !self.insert(region);
        let page = region / WORDS_PER_PAGE;
        self.0[page / 64] &= !(1 << (page % 64));
        there
    }

    /// To be called at a reset: all words belong to another generation.
    pub fn clear(&mut self) {
        self.0.fill(0);
    }

    /// The number of pages with memory.
    pub fn count(&self) -> usize {
        self.0.iter().map(|word| word.count_ones() as usize).sum()
    }
}

impl Meta {
    /// Counts a completed write, which touched these blocks: one load and one store for each region.
    #[inline]
    pub(crate) fn count_written(&self, blocks: Range<u32>) {
        let mut at = blocks.start;
        while at < blocks.end {
            let region = Block(at).region();
            let stop = blocks.end.min(((region + 1) * REGION_BLOCKS) as u32);
            let word = self.written(region);
            let sum = Written::from_bits(word.load(Relaxed)).plus(stop - at, self.generation());
            word.store(sum.bits(), Relaxed);
            at = stop;
        }
    }

    /// Whether nothing was written to the region since the reset.
    #[inline]
    pub(crate) fn is_unwritten(&self, region: usize) -> bool {
        Written::from_bits(self.written(region).load(Relaxed)).blocks(self.generation()) == 0
    }

    /// Clears the words of these regions that an earlier generation left, or they would count again when the 16 bits
    /// of generation in them come round. Returns whether none is left that counts now.
    pub(crate) fn forget_written(&self, regions: Range<usize>) -> bool {
        let generation = self.generation();
        let mut none = true;
        for region in regions {
            let word = self.written(region);
            if Written::from_bits(word.load(Relaxed)).blocks(generation) > 0 {
                none = false;
            } else {
                crash_points::store();
                word.store(0, Relaxed);
            }
        }
        none
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use spillway_layout::{DiskSpec, FullPolicy, Layout, LogShape, Mode, RegionState};

    /// Clears a word, as it would count again 65,536 resets later.
    #[test]
    fn a_word_is_cleared_when_its_generation_is_forgotten() {
        let spec = DiskSpec {
            size_bytes: 4 << 20,
            base_bytes: 0,
            mode: Mode::Ram,
            full: FullPolicy::Fail,
            ram_limit_bytes: 1 << 20,
            overflow_limit_bytes: 0,
            shape: LogShape::default(),
        };
        let mut memory = vec![0u64; (Layout::of(&spec).len_bytes() as usize + 4096) / 8];
        let start = memory.as_mut_ptr().cast::<u8>();
        // SAFETY: the memory is longer than the layout by a page, is not moved, and outlives `meta`.
        let (mut meta, _) = unsafe { Meta::open(start.add(start.align_offset(4096)), &spec, 1) }.unwrap();
        for region in 0..2 {
            meta.set_region(region, RegionState::Mapped);
        }
        meta.count_written(0..600);
        meta.reset();
        meta.count_written(0..1);
        let words = |meta: &Meta| [0, 1].map(|region| meta.written(region).load(Relaxed));
        let before = words(&meta);
        assert!(meta.forget_written(1..2) && !meta.forget_written(0..2));
        assert_eq!(words(&meta), [before[0], 0], "what counts now stays");
        assert_eq!(Written::from_bits(before[0]).blocks(2), 1);
    }
}
