//! The disk's generation as it is stored: 48 bits, and above them a check, the complement of their three words' sum without
//! carry. One word, so that a reset is one store.
//!
//! Invariant: as the generation says which directory counts, one that a fault has changed never counts.

const BITS: u32 = 48;
const MASK: u64 = (1 << BITS) - 1;

/// The word that says this generation.
pub fn seal(generation: u64) -> u64 {
    let generation = generation_of(generation);
    let check = !(generation ^ generation >> 16 ^ generation >> 32) as u16;
    u64::from(check) << BITS | generation
}

/// The generation that a word says; its check is not looked at.
#[inline]
pub fn generation_of(word: u64) -> u64 {
    word & MASK
}

/// Whether the check is right: this word may have been stored.
pub fn is_sealed(word: u64) -> bool {
    word == seal(word)
}
