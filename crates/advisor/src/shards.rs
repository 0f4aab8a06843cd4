//! LRU caches of every size on a sample of the blocks: fast and small enough to go along with a live disk.
//!
//! A block belongs to the sample or not, by a hash of its number; a sample of one in a hundred is to caches of a hundredth
//! what the disk is to whole ones (Waldspurger's SHARDS). Blocks that are discarded leave the stack as in [`crate::lru`].
//! With a bound on the blocks in the sample the rate falls as they come, and those that no longer belong to it are
//! dropped. Invariants: every count is weighted by the rate at its time; memory is bounded where the sample is.

use crate::event::{BLOCK_BYTES, Event, Operation, Step};
use crate::limit::spread;
use crate::overflow_peaks::OverflowPeaks;
use crate::profile::{Profile, Totals};
use crate::sample::{Needs, hash, rate, threshold};
use crate::stack::{BlockUse, Stack};

/// Sizes at which the peak of the overflow is counted.
const PEAK_SIZES: usize = 64;
/// When the sample is full, its rate is multiplied by this.
const RATE_FACTOR: f64 = 0.75;

/// How a sample is taken.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sample {
    /// Share of the blocks that is sampled at first.
    pub rate: f64,
    /// Most blocks in the sample; none: the rate stays.
    pub most_blocks: Option<u32>,
}

impl Default for Sample {
    /// For a live disk: at most 4,096 blocks, which takes some 100 KiB.
    fn default() -> Sample {
        Sample { rate: 0.1, most_blocks: Some(4096) }
    }
}

/// Counts evictions and reads of the overflow for caches of every size, on a sample.
pub struct Shards {
    disk_bytes: u64,
    threshold: u32,
    most_blocks: u32,
    stack: Stack,
    overflow_peaks: OverflowPeaks,
    /// Of each size in [`Shards::sizes`], the peak at earlier rates.
    peaks: Vec<u64>,
    sizes: Vec<u64>,
    evicted: Needs,
    read: Needs,
    written_blocks: u64,
    read_blocks: u64,
    new: f64,
    base_read: f64,
    peak_live: f64,
}

impl Shards {
    /// For a disk of this size; `u64::MAX` if it is not known.
    pub fn new(disk_bytes: u64, sample: Sample) -> Shards {
        let sizes = spread(1 << 8, 1 << 31, PEAK_SIZES);
        let mut shards = Shards {
            disk_bytes,
            threshold: threshold(sample.rate),
            most_blocks: sample.most_blocks.unwrap_or(u32::MAX).max(16),
            stack: Stack::new(),
            overflow_peaks: OverflowPeaks::new(Vec::new()),
            peaks: vec![0; sizes.len()],
            sizes,
            evicted: Needs::new(),
            read: Needs::new(),
            written_blocks: 0,
            read_blocks: 0,
            new: 0.0,
            base_read: 0.0,
            peak_live: 0.0,
        };
        shards.overflow_peaks.change_caches(shards.caches(), &shards.stack);
        shards
    }

    /// The share of the blocks that is sampled now.
    pub fn rate(&self) -> f64 {
        rate(self.threshold)
    }

    fn caches(&self) -> Vec<u32> {
        self.sizes.iter().map(|&s| ((s as f64 * self.rate()).round() as u32).max(1)).collect()
    }

    /// Adds an event, which has passed its check.
    #[inline]
    pub fn event(&mut self, event: &Event) {
        let (disk_bytes, threshold) = (self.disk_bytes, self.threshold);
        if matches!(event.operation, Operation::Read | Operation::Write) && event.len_bytes > 0 {
            // The usual case: of most requests no block belongs to the sample.
            let first = event.offset_bytes / BLOCK_BYTES;
            let end = (event.offset_bytes + event.len_bytes).div_ceil(BLOCK_BYTES);
            match event.operation {
                Operation::Read => self.read_blocks += end - first,
                _ => self.written_blocks += end - first,
            }
            if (first as u32..end as u32).all(|block| hash(block) >= threshold) {
                return;
            }
        }
        event.steps(disk_bytes, |step| self.step(step, event.operation == Operation::WriteZeroes));
    }

    fn step(&mut self, step: Step, zeroes: bool) {
        let weight = 1.0 / self.rate();
        match step {
            Step::Read(block) => {
                if self.is_sampled(block) && !self.touch(block, true) {
                    self.base_read += weight;
                }
            }
            Step::Write { block, whole } => {
                self.written_blocks += u64::from(zeroes);
                if self.is_sampled(block) && !self.touch(block, !whole) {
                    self.new += weight;
                    self.insert(block);
                }
            }
            Step::Remove(blocks) => {
                let threshold = self.threshold;
                for block in self.stack.in_range(blocks, |block| hash(block) < threshold) {
                    if let Some(what) = self.stack.remove(block) {
                        self.evicted.add(self.scaled_need(what.need), weight);
                        self.overflow_peaks.count_removal(&self.stack, what);
                    }
                }
            }
            Step::Reset => {
                let scale = weight;
                self.stack.needs().for_each(|need| self.evicted.add(scaled(need, scale), scale));
                self.stack.clear();
                self.overflow_peaks.clear();
            }
        }
    }

    #[inline]
    fn is_sampled(&self, block: u32) -> bool {
        hash(block) < self.threshold
    }

    /// Scales a need in the sample to all blocks.
    fn scaled_need(&self, need: u32) -> u32 {
        scaled(need, 1.0 / self.rate())
    }

    fn touch(&mut self, block: u32, reads: bool) -> bool {
        let Some(what @ BlockUse { need, .. }) = self.stack.touch(block) else { return false };
        let (need, weight) = (self.scaled_need(need), 1.0 / self.rate());
        self.evicted.add(need, weight);
        if reads {
            self.read.add(need, weight);
        }
        self.overflow_peaks.count_use(what);
        true
    }

    fn insert(&mut self, block: u32) {
        while self.stack.len() >= self.most_blocks {
            self.lower_rate();
        }
        if !self.is_sampled(block) {
            return;
        }
        let hole = self.stack.insert(block);
        self.overflow_peaks.count_insert(&self.stack, hole);
        self.peak_live = self.peak_live.max(f64::from(self.stack.len()) / self.rate());
    }

    /// Lowers the rate, and drops blocks that no longer belong to the sample.
    fn lower_rate(&mut self) {
        self.peaks = self.all_peaks();
        let old = self.rate();
        self.threshold = threshold(old * RATE_FACTOR).min(self.threshold - 1).max(1);
        let now = self.threshold;
        self.stack.thin(self.rate() / old, |block| hash(block) < now);
        self.overflow_peaks.change_caches(self.caches(), &self.stack);
    }

    fn all_peaks(&self) -> Vec<u64> {
        let now = self.overflow_peaks.peaks().map(|(_, peak)| (f64::from(peak) / self.rate()).round() as u64);
        now.zip(&self.peaks).map(|(now, &before)| now.max(before)).collect()
    }

    /// Bytes of memory that it uses.
    pub fn memory_bytes(&self) -> usize {
        self.stack.bytes()
            + self.evicted.bytes()
            + self.read.bytes()
            + self.sizes.len() * (size_of::<u64>() * 2 + size_of::<u32>() * 3)
    }

    /// What was counted until now, scaled to all blocks.
    pub fn profile(&self) -> Profile {
        let weight = 1.0 / self.rate();
        let mut evicted = Needs::new();
        self.evicted.iter().for_each(|(need, w)| evicted.add(need, w));
        self.stack.needs().for_each(|need| evicted.add(self.scaled_need(need), weight));
        let totals = Totals {
            written_blocks: self.written_blocks,
            read_blocks: self.read_blocks,
            base_read_blocks: (self.base_read.round() as u64).min(self.read_blocks),
            new_blocks: self.new.round() as u64,
            peak_live_blocks: self.peak_live.round() as u64,
        };
        // A need is known to a hundredth: no cache need be larger than what has lived.
        let most = u32::try_from(totals.peak_live_blocks).unwrap_or(u32::MAX).max(1);
        let counts = evicted.iter().zip(self.read.iter()).map(|((need, e), (_, r))| (need.min(most), e, r));
        let peaks = self.sizes.iter().copied().zip(self.all_peaks()).collect();
        Profile::new(totals, weight, counts, peaks)
    }
}

/// Scales a need: each of the other blocks above one in the stack stands for `scale` blocks.
fn scaled(need: u32, scale: f64) -> u32 {
    (f64::from(need - 1) * scale).round() as u32 + 1
}
