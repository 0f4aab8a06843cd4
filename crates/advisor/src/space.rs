//! The most that a cache has had in its overflow at any time.
//!
//! Owns one count for each of some sizes. Where nothing was ever given up, the most that a cache of C blocks has
//! evicted is what lives beyond C, and needs no count. Invariant: counts are kept while the stack may have holes.

use crate::stack::{Stack, Use};

/// The peaks, for caches of some sizes.
pub(crate) struct Space {
    /// Sizes in blocks, growing.
    caches: Vec<u32>,
    /// Of each, blocks in its overflow now, while the stack may have holes.
    now: Vec<u32>,
    peak: Vec<u32>,
    /// While it had none, the most blocks that lived.
    peak_live: u32,
    counting: bool,
}

impl Space {
    pub fn new(caches: Vec<u32>) -> Space {
        let n = caches.len();
        Space { caches, now: vec![0; n], peak: vec![0; n], peak_live: 0, counting: false }
    }

    /// How many of the caches are smaller than `blocks`.
    fn below(&self, blocks: u32) -> usize {
        self.caches.partition_point(|&c| c < blocks)
    }

    /// A block came; caches from `hole` on had one.
    #[inline]
    pub fn inserted(&mut self, stack: &Stack, hole: u32) {
        if self.counting {
            let n = self.below(hole);
            for (now, peak) in self.now[..n].iter_mut().zip(&mut self.peak) {
                *now += 1;
                *peak = (*peak).max(*now);
            }
        }
        self.keep_up(stack);
    }

    /// A block was used again: caches below its need brought it back, and those without a hole evicted another for it.
    #[inline]
    pub fn touched(&mut self, what: Use) {
        if self.counting && what.hole < what.need {
            let (from, to) = (self.below(what.hole), self.below(what.need));
            self.now[from..to].iter_mut().for_each(|now| *now -= 1);
        }
    }

    /// A block was given up.
    pub fn removed(&mut self, stack: &Stack, what: Use) {
        if self.counting {
            let n = self.below(what.need);
            self.now[..n].iter_mut().for_each(|now| *now -= 1);
        }
        self.keep_up(stack);
    }

    fn keep_up(&mut self, stack: &Stack) {
        if !stack.may_have_holes() {
            self.counting = false;
            self.peak_live = self.peak_live.max(stack.len());
        } else if !self.counting {
            self.counting = true;
            self.count(stack);
        }
    }

    /// Counts anew what each cache has in its overflow.
    pub fn count(&mut self, stack: &Stack) {
        for ((now, peak), &cache) in self.now.iter_mut().zip(&mut self.peak).zip(&self.caches) {
            *now = stack.evicted(cache);
            *peak = (*peak).max(*now);
        }
    }

    /// For caches of other sizes from here on.
    pub fn change(&mut self, caches: Vec<u32>, stack: &Stack) {
        *self = Space::new(caches);
        self.keep_up(stack);
    }

    /// All blocks were given up.
    pub fn cleared(&mut self) {
        self.counting = false;
        self.now.fill(0);
    }

    /// Each cache with its peak.
    pub fn peaks(&self) -> impl Iterator<Item = (u32, u32)> {
        let peaks = self.caches.iter().zip(&self.peak);
        peaks.map(|(&cache, &peak)| (cache, peak.max(self.peak_live.saturating_sub(cache))))
    }
}
