//! Where the guest wrote since the last reset: for each 2 MiB region the number of blocks written. Counts what was
//! written, again and again for the same block; never says what is still there (the block map does).
//!
//! Invariant: a word counts for the generation that it names; in any other it is nothing. So a reset touches none,
//! but for the one in 65,536 after which the generations in the words begin anew.

use crate::meta::Meta;
use crate::units::{Block, REGION_BLOCKS};
use std::ops::Range;
use std::sync::atomic::Ordering::Relaxed;

const COUNT_BITS: u32 = 48;
/// The most that a word counts: 2^60 bytes. It stays there.
const MOST: u64 = (1 << COUNT_BITS) - 1;

/// A region's word: 16 bits of the generation, 48 bits of blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Written(u64);

impl Written {
    /// A word as it lies in `meta` memory.
    #[inline]
    pub fn from_bits(bits: u64) -> Written {
        Written(bits)
    }

    /// As it lies in memory.
    #[inline]
    pub fn bits(self) -> u64 {
        self.0
    }

    /// Blocks written in this generation of the disk.
    #[inline]
    pub fn blocks(self, generation: u64) -> u64 {
        if self.0 >> COUNT_BITS == generation & 0xffff { self.0 & MOST } else { 0 }
    }

    /// With more blocks written in this generation.
    #[inline]
    #[must_use]
    pub fn plus(self, blocks: u32, generation: u64) -> Written {
        let tag = generation << COUNT_BITS;
        let before = if self.0 ^ tag <= MOST { self.0 } else { tag };
        let sum = before.wrapping_add(u64::from(blocks));
        Written(if sum ^ tag <= MOST { sum } else { tag | MOST })
    }

    /// Whether words of earlier generations would count in this one, and must be cleared first.
    pub(crate) fn begins_anew(generation: u64) -> bool {
        generation & 0xffff == 0
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
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_word_of_another_generation_is_nothing() {
        let word = Written::from_bits(0).plus(3, 7).plus(4, 7);
        assert_eq!((word.blocks(7), word.blocks(6), word.blocks(8)), (7, 0, 0));
        assert_eq!(word.plus(5, 8).blocks(8), 5);
        assert_eq!(word.plus(5, 8).blocks(7), 0);
        assert_eq!(Written::from_bits(0).blocks(0), 0);
    }

    #[test]
    fn generations_wrap_where_words_are_cleared() {
        let word = Written::from_bits(0).plus(1, 0xffff);
        assert_eq!(word.blocks(0xffff), 1);
        assert_eq!(word.blocks(0x1_0000), 0);
        let alias = word.blocks(0x1_ffff);
        assert_eq!(alias, 1, "which is why a reset clears them on the way");
        let anew: Vec<u64> = (1..=0x2_0001).filter(|&g| Written::begins_anew(g)).collect();
        assert_eq!(anew, [0x1_0000, 0x2_0000]);
    }

    #[test]
    fn counts_stay_at_their_most() {
        for generation in [2, 0xffff, 0x1_0000] {
            let nearly = Written::from_bits(generation << COUNT_BITS | (MOST - 5));
            assert_eq!(nearly.plus(5, generation).blocks(generation), MOST);
            let most = nearly.plus(u32::MAX, generation);
            assert_eq!((most.blocks(generation), most.blocks(generation + 1)), (MOST, 0));
            assert_eq!(most.plus(1, generation), most);
            assert_eq!(most.plus(1, generation + 1).blocks(generation + 1), 1);
        }
    }
}
