//! What a power loss may leave of a file: of each sector what it held when it was last made stable, or anything that was
//! written there since.
//!
//! Owns the past contents; the newest is whoever's that writes. Invariant: what was superseded before a sync began is
//! forgotten when that has ended.

use crate::rng::Rng;
use spillway_core::{BLOCK_BYTES, SECTOR_BYTES};
use std::collections::HashMap;

#[derive(Default)]
pub struct Medium {
    /// By block: earlier contents, each with the number of the change that superseded it.
    past: HashMap<u64, Vec<(u64, Vec<u8>)>>,
}

impl Medium {
    /// The change of this number is about to be made to all these blocks of a file.
    pub fn changes(&mut self, number: u64, blocks: std::ops::Range<u64>, file: &[u8]) {
        for block in blocks {
            let old = file[block as usize * BLOCK_BYTES..][..BLOCK_BYTES].to_vec();
            self.past.entry(block).or_default().push((number, old));
        }
    }

    /// What these blocks hold now is stable.
    pub fn stable(&mut self, blocks: std::ops::Range<u64>) {
        blocks.for_each(|block| _ = self.past.remove(&block));
    }

    /// The changes up to this one are.
    pub fn synced(&mut self, number: u64) {
        self.past.retain(|_, past| {
            past.retain(|&(by, _)| by > number);
            !past.is_empty()
        });
    }

    /// Power is lost: the file is what is left of it.
    pub fn lose(&mut self, file: &mut [u8], rng: &mut Rng) {
        let mut all: Vec<_> = std::mem::take(&mut self.past).into_iter().collect();
        // The same course for the same seed.
        all.sort_by_key(|&(block, _)| block);
        for (block, past) in all {
            let whole = rng.chance(2).then(|| rng.below(past.len() as u64 + 1));
            let now = &mut file[block as usize * BLOCK_BYTES..][..BLOCK_BYTES];
            for (i, sector) in now.chunks_exact_mut(SECTOR_BYTES as usize).enumerate() {
                let which = whole.unwrap_or_else(|| rng.below(past.len() as u64 + 1));
                if let Some((_, old)) = past.get(which as usize) {
                    sector.copy_from_slice(&old[i * SECTOR_BYTES as usize..][..SECTOR_BYTES as usize]);
                }
            }
        }
    }
}
