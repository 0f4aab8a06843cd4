//! The disk's generation as it is stored: 48 bits, and above them a check, the complement of their three words' sum without
//! carry. One word, so that a reset is one store.
//!
//! Invariant: the generation decides which directory counts, so one whose check is wrong is never used.

const BITS: u32 = 48;
const MASK: u64 = (1 << BITS) - 1;

/// Packs a generation into a word.
pub fn seal(generation: u64) -> u64 {
    let generation = generation_of(generation);
    let check = !(generation ^ generation >> 16 ^ generation >> 32) as u16;
    u64::from(check) << BITS | generation
}

/// The generation in a word; does not verify its check.
#[inline]
pub fn generation_of(word: u64) -> u64 {
    word & MASK
}

/// Whether the check of a word is right.
pub fn is_sealed(word: u64) -> bool {
    word == seal(word)
}
