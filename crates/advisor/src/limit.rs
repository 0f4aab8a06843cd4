//! From a RAM limit to the blocks that stay in it.
//!
//! Owns the arithmetic around what eviction keeps free, which is the policy's. Invariant: a larger limit never holds less.

use crate::event::BLOCK_BYTES;
use spillway_policy::{MOST_KEPT_FREE, kept_free};

/// Number of blocks that a RAM tier of this limit holds when eviction rests.
pub fn staying_blocks(limit_bytes: u64) -> u64 {
    let blocks = limit_bytes / BLOCK_BYTES;
    blocks.saturating_sub(kept_free(blocks))
}

/// The least limit of a RAM tier that holds `staying` blocks when eviction rests.
pub fn limit_bytes(staying: u64) -> u64 {
    // A tenth on top, or 64 MiB where that is less; then the last few blocks.
    let mut blocks = staying + (staying / 9).clamp(1, MOST_KEPT_FREE);
    while blocks > 0 && staying_blocks((blocks - 1) * BLOCK_BYTES) >= staying {
        blocks -= 1;
    }
    while staying_blocks(blocks * BLOCK_BYTES) < staying {
        blocks += 1;
    }
    blocks * BLOCK_BYTES
}

/// `n` sizes in blocks from `from` to `to`, evenly spaced by their logarithm.
pub(crate) fn spread(from: u64, to: u64, n: usize) -> Vec<u64> {
    let (low, high) = ((from.max(1) as f64).ln(), (to.max(from).max(1) as f64).ln());
    let step = (high - low) / (n.max(2) - 1) as f64;
    let mut sizes: Vec<u64> = (0..n).map(|i| (low + step * i as f64).exp().round() as u64).collect();
    sizes.dedup();
    sizes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_limit_and_what_stays_in_it_agree() {
        let mut last = 0;
        for blocks in (0..40_000).chain([163_839, 163_840, 163_841, 1 << 20, 1 << 30]) {
            let staying = staying_blocks(blocks * BLOCK_BYTES);
            assert!(staying >= last, "{blocks}");
            last = staying;
            let least = limit_bytes(staying);
            assert!(
                least <= blocks.max(1) * BLOCK_BYTES && staying_blocks(least) == staying,
                "{blocks}: {least}"
            );
        }
        assert_eq!(staying_blocks(1 << 30), (1 << 18) - (1 << 14));
    }

    #[test]
    fn sizes_are_spread() {
        assert_eq!(spread(1, 1000, 4), [1, 10, 100, 1000]);
        assert_eq!(spread(5, 5, 8), [5]);
    }
}
