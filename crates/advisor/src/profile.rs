//! The counts of one pass over a trace: for each size, how much was evicted and read back, and the peak of the overflow.
//!
//! Invariant: everything here falls, or stays, as the size grows.

use crate::event::BLOCK_BYTES;
use crate::limit::{limit_bytes, staying_blocks};

/// Blocks written and read, over the whole trace.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct Totals {
    /// Blocks that were written; a block that was written twice counts twice.
    pub written_blocks: u64,
    /// Blocks that were read.
    pub read_blocks: u64,
    /// Blocks among them that were not in the write cache: never written, or discarded since.
    pub base_read_blocks: u64,
    /// Blocks that came to the write cache: the first time, or after they were discarded.
    pub new_blocks: u64,
    /// Most live blocks at a time.
    pub peak_live_blocks: u64,
}

/// What of a trace goes to the overflow, for caches of every size.
#[derive(Clone, Debug, PartialEq)]
pub struct Profile {
    totals: Totals,
    /// Number of blocks that each counted block stands for: 1 where all were counted.
    scale: f64,
    /// Needs that occurred, growing; and what had this need or a greater one: evicted, read back.
    needs: Vec<u32>,
    evicted: Vec<u64>,
    read: Vec<u64>,
    /// For caches of some sizes in blocks, growing: the most that lived in the overflow.
    peaks: Vec<(u64, u64)>,
}

impl Profile {
    /// From how often each need occurred, in the order of the needs; none is greater than what lived.
    pub(crate) fn new(
        totals: Totals,
        scale: f64,
        counts: impl Iterator<Item = (u32, f64, f64)>,
        peaks: Vec<(u64, u64)>,
    ) -> Profile {
        let (mut needs, mut sums) = (Vec::new(), Vec::new());
        for (need, evicted, read) in counts.filter(|c| c.1 + c.2 > 0.0) {
            needs.push(need);
            sums.push((evicted, read));
        }
        let mut sum = (0.0, 0.0);
        for (evicted, read) in sums.iter_mut().rev() {
            sum = (sum.0 + *evicted, sum.1 + *read);
            (*evicted, *read) = sum;
        }
        let evicted = sums.iter().map(|s| s.0.round() as u64).collect();
        let read = sums.iter().map(|s| s.1.round() as u64).collect();
        Profile { totals, scale, needs, evicted, read, peaks }
    }

    /// Blocks written and read in all.
    pub fn totals(&self) -> Totals {
        self.totals
    }

    /// One block in this many was counted.
    pub fn scale(&self) -> f64 {
        self.scale
    }

    /// Index of the first need that is greater than `blocks`.
    fn beyond(&self, blocks: u64) -> usize {
        self.needs.partition_point(|&need| u64::from(need) <= blocks)
    }

    /// Blocks that a cache of `blocks` blocks evicts.
    pub fn evicted_blocks(&self, blocks: u64) -> u64 {
        self.evicted.get(self.beyond(blocks)).copied().unwrap_or(0)
    }

    /// Blocks that such a cache reads back: for reads, and for writes of part of a block.
    pub fn overflow_read_blocks(&self, blocks: u64) -> u64 {
        self.read.get(self.beyond(blocks)).copied().unwrap_or(0)
    }

    /// Most live blocks in the overflow of such a cache. Between two sizes at which that was counted it falls evenly; but if at both it is
    /// what lives beyond the cache, as always where nothing was discarded, then between them too.
    pub fn peak_overflow_blocks(&self, blocks: u64) -> u64 {
        let at = self.peaks.partition_point(|p| p.0 < blocks);
        let (before, after) = (at.checked_sub(1).map(|i| self.peaks[i]), self.peaks.get(at));
        let beyond = |size: u64| self.totals.peak_live_blocks.saturating_sub(size);
        let is_beyond = |(size, peak): (u64, u64)| (peak.abs_diff(beyond(size)) as f64) < self.scale;
        match (before, after) {
            (_, Some(&(size, peak))) if size == blocks => peak,
            (Some(from), Some(&to)) if is_beyond(from) && is_beyond(to) => beyond(blocks),
            (Some((a, high)), Some(&(b, low))) => {
                let part = (blocks - a) as f64 / (b - a) as f64;
                (high as f64 - part * (high - low.min(high)) as f64).ceil() as u64
            }
            (None, Some(&(_, peak))) => peak.max(beyond(blocks)),
            _ => 0,
        }
    }

    /// The least limit at which nothing is evicted.
    pub fn zero_overflow_bytes(&self) -> u64 {
        limit_bytes(self.needs.last().map_or(0, |&need| u64::from(need)))
    }

    /// The least limit at which at most `evicted_blocks` are evicted.
    pub fn limit_for(&self, evicted_blocks: u64) -> u64 {
        let at = self.evicted.partition_point(|&e| e > evicted_blocks);
        // All needs before it may stay in the cache.
        let staying = at.checked_sub(1).map_or(0, |i| u64::from(self.needs[i]));
        limit_bytes(staying)
    }

    /// The share of the written blocks that a limit keeps from the overflow.
    pub fn absorbed(&self, limit: u64) -> f64 {
        if self.totals.written_blocks == 0 {
            return 1.0;
        }
        1.0 - (self.evicted_blocks(staying_blocks(limit)) as f64 / self.totals.written_blocks as f64).min(1.0)
    }

    /// Bytes that were written in all, in whole blocks.
    pub fn written_bytes(&self) -> u64 {
        self.totals.written_blocks * BLOCK_BYTES
    }
}
