//! The peak of the overflow: the most live blocks that a cache of some size has had there at a time.
//!
//! Owns one count for each of some sizes. Where nothing was ever discarded, the peak of a cache of C blocks is the most live
//! blocks less C, and needs no count. Invariant: counts are kept while the stack may have holes.

use crate::stack::{BlockUse, Stack};

/// Counts the peaks of caches of some sizes.
pub(crate) struct OverflowPeaks {
    /// Sizes of the caches in blocks, growing.
    caches: Vec<u32>,
    /// Blocks in the overflow of each cache now; kept only while the stack may have holes.
    now: Vec<u32>,
    peak: Vec<u32>,
    /// Most live blocks while the stack had no holes.
    peak_live: u32,
    counting: bool,
}

impl OverflowPeaks {
    pub fn new(caches: Vec<u32>) -> OverflowPeaks {
        let n = caches.len();
        OverflowPeaks { caches, now: vec![0; n], peak: vec![0; n], peak_live: 0, counting: false }
    }

    /// Number of the caches that are smaller than `blocks`.
    fn below(&self, blocks: u32) -> usize {
        self.caches.partition_point(|&c| c < blocks)
    }

    /// Counts a new block. Caches from `hole` on had a hole for it; the others evicted a block.
    #[inline]
    pub fn count_insert(&mut self, stack: &Stack, hole: u32) {
        if self.counting {
            let n = self.below(hole);
            for (now, peak) in self.now[..n].iter_mut().zip(&mut self.peak) {
                *now += 1;
                *peak = (*peak).max(*now);
            }
        }
        self.update_counting(stack);
    }

    /// Counts the use of a block: caches below its need brought it back, and those without a hole evicted another for it.
    #[inline]
    pub fn count_use(&mut self, what: BlockUse) {
        if self.counting && what.hole < what.need {
            let (from, to) = (self.below(what.hole), self.below(what.need));
            self.now[from..to].iter_mut().for_each(|now| *now -= 1);
        }
    }

    /// Counts a block that was discarded.
    pub fn count_removal(&mut self, stack: &Stack, what: BlockUse) {
        if self.counting {
            let n = self.below(what.need);
            self.now[..n].iter_mut().for_each(|now| *now -= 1);
        }
        self.update_counting(stack);
    }

    fn update_counting(&mut self, stack: &Stack) {
        if !stack.may_have_holes() {
            self.counting = false;
            self.peak_live = self.peak_live.max(stack.len());
        } else if !self.counting {
            self.counting = true;
            self.recount(stack);
        }
    }

    /// Counts anew the blocks in the overflow of each cache.
    pub fn recount(&mut self, stack: &Stack) {
        for ((now, peak), &cache) in self.now.iter_mut().zip(&mut self.peak).zip(&self.caches) {
            *now = stack.evicted(cache);
            *peak = (*peak).max(*now);
        }
    }

    /// Counts for caches of other sizes from here on.
    pub fn change_caches(&mut self, caches: Vec<u32>, stack: &Stack) {
        *self = OverflowPeaks::new(caches);
        self.update_counting(stack);
    }

    /// Counts that all blocks were discarded.
    pub fn clear(&mut self) {
        self.counting = false;
        self.now.fill(0);
    }

    /// The size of each cache, and its peak.
    pub fn peaks(&self) -> impl Iterator<Item = (u32, u32)> {
        let peaks = self.caches.iter().zip(&self.peak);
        peaks.map(|(&cache, &peak)| (cache, peak.max(self.peak_live.saturating_sub(cache))))
    }
}
