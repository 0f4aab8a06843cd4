//! Counts writes since the last reset: for each 2 MiB region the number of blocks written. A block that is written twice counts
//! twice; whether it is still there is in the block map.
//!
//! Invariant: a word counts only in the generation that it names, so a reset touches none.
//! A word is cleared while its generation is forgotten, long before the 16 bits of generation in it come round.

const COUNT_BITS: u32 = 48;
/// Largest value of a counter: 2^60 bytes. It saturates there.
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

    /// The word as it is stored in memory.
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
