//! The product's own policy in miniature: a clock with two bits of frequency, the reserve that eviction keeps free, parts,
//! and promotion at the third read, for several RAM limits at once, on a sample of the blocks.
//!
//! LRU says what a cache of a size must lose at the least; this says what the product's tier of a limit loses. A tier of a
//! hundredth sees a hundredth of the blocks. Invariants: on all blocks, one request at a time, a tier does what
//! `spillway_core::Disk` does (the test `policy` compares them); each live block is in each tier's RAM or overflow.

mod tier;

use crate::event::{Event, Step};
use crate::sample::{hash, rate, threshold};
use crate::stack::Table;
use tier::Tier;

/// What one tier did, scaled to all blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct TierOutcome {
    /// Its RAM limit.
    pub ram_bytes: u64,
    /// Blocks that eviction wrote.
    pub evicted_blocks: u64,
    /// Blocks that were read back for requests.
    pub overflow_read_blocks: u64,
    /// Blocks that came back to RAM by being read.
    pub promoted_blocks: u64,
    /// Most live blocks in its overflow at a time.
    pub peak_overflow_blocks: u64,
}

/// Runs the product's policy for several RAM limits at once.
pub struct Policy {
    disk_bytes: u64,
    threshold: u32,
    limits: Vec<u64>,
    tiers: Vec<Tier>,
    /// The index that a live block has in every tier.
    blocks: Table,
    free: Vec<u32>,
    next: u32,
}

impl Policy {
    /// For these RAM limits in bytes, on this share of the blocks.
    pub fn new(disk_bytes: u64, limits: &[u64], sample: f64) -> Policy {
        let threshold = threshold(sample);
        let tiers = limits.iter().map(|&limit| Tier::new(limit, rate(threshold))).collect();
        Policy {
            disk_bytes,
            threshold,
            limits: limits.to_vec(),
            tiers,
            blocks: Table::new(),
            free: Vec::new(),
            next: 0,
        }
    }

    /// Adds an event, which has passed its check.
    pub fn event(&mut self, event: &Event) {
        event.steps(self.disk_bytes, |step| self.step(step));
    }

    fn step(&mut self, step: Step) {
        match step {
            Step::Read(block) => {
                if hash(block) < self.threshold
                    && let Some(index) = self.blocks.get(block)
                {
                    self.tiers.iter_mut().for_each(|tier| tier.read(block, index));
                }
            }
            Step::Write { block, whole } => {
                if hash(block) >= self.threshold {
                    return;
                }
                let index = self.blocks.get(block).unwrap_or_else(|| self.take_index(block));
                self.tiers.iter_mut().for_each(|tier| tier.write(index, whole));
            }
            Step::Remove(range) => {
                let threshold = self.threshold;
                for block in self.blocks.in_range(range, |block| hash(block) < threshold) {
                    if let Some(index) = self.blocks.remove(block) {
                        self.tiers.iter_mut().for_each(|tier| tier.remove(index));
                        self.free.push(index);
                    }
                }
            }
            Step::Reset => {
                self.tiers.iter_mut().for_each(Tier::reset);
                self.blocks.clear();
                self.free.clear();
                self.next = 0;
            }
        }
    }

    fn take_index(&mut self, block: u32) -> u32 {
        let index = self.free.pop().unwrap_or_else(|| {
            self.next += 1;
            self.next - 1
        });
        self.blocks.insert(block, index);
        index
    }

    /// What each tier has done until now, in the order of the limits.
    pub fn outcomes(&self) -> Vec<TierOutcome> {
        let scale = 1.0 / rate(self.threshold);
        let all = |n: u64| (n as f64 * scale).round() as u64;
        let outcome = |(&ram_bytes, tier): (&u64, &Tier)| TierOutcome {
            ram_bytes,
            evicted_blocks: all(tier.evicted),
            overflow_read_blocks: all(tier.overflow_read),
            promoted_blocks: all(tier.promoted),
            peak_overflow_blocks: all(tier.peak_overflow.into()),
        };
        self.limits.iter().zip(&self.tiers).map(outcome).collect()
    }

    /// The share of the blocks that is sampled.
    pub fn rate(&self) -> f64 {
        rate(self.threshold)
    }

    /// Bytes of memory that it uses.
    pub fn memory_bytes(&self) -> usize {
        self.blocks.bytes() + self.free.capacity() * 4 + self.tiers.iter().map(Tier::bytes).sum::<usize>()
    }
}
