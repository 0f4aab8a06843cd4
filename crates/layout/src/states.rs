//! The map of a disk that outlives its processes, in two bits a block: how it is packed, and the mark of a reset before it.
//!
//! Invariant: three of the four values are states; whatever reads a map finds out the fourth with [`find_bad_state`].

use crate::units::BLOCK_BYTES;

/// Blocks that a 64-bit word of the map tells of.
pub const STATE_WORD_BLOCKS: u32 = 32;
/// Blocks that a page of the map tells of.
pub const STATE_PAGE_BLOCKS: u32 = BLOCK_BYTES as u32 * 4;
/// The low bit of each block in a word of the map.
pub const STATE_LOW_BITS: u64 = 0x5555_5555_5555_5555;
/// What the page before the durable map begins with while a reset is not yet in that map: all of it counts as
/// [`BlockState::Base`].
pub const RESET_MARK: [u8; 16] = *b"SPILLWAY: RESET\n";

/// Where a block's content is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum BlockState {
    /// In the base image.
    Base = 0,
    /// In its place in the file.
    File = 1,
    /// Nowhere: it is all zeroes.
    Zero = 2,
}

/// Bytes of the map of a disk of so many blocks: whole pages.
#[inline]
pub fn state_map_bytes(blocks: u32) -> u64 {
    u64::from(blocks.div_ceil(STATE_PAGE_BLOCKS)) * BLOCK_BYTES as u64
}

/// The first block in bytes of a map, of whole words, that is in no state; the block that the bytes begin with is number 0.
pub fn find_bad_state(bytes: &[u8]) -> Option<u64> {
    let bad = |word: u64| word & word >> 1 & STATE_LOW_BITS;
    bytes.chunks_exact(8).enumerate().find_map(|(i, word)| {
        let bad = bad(u64::from_le_bytes(word.try_into().expect("of eight bytes")));
        (bad != 0).then(|| i as u64 * u64::from(STATE_WORD_BLOCKS) + u64::from(bad.trailing_zeros() / 2))
    })
}
