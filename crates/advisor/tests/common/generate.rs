//! Requests as workloads make them, block by block, from a seed.

use super::Rng;
use spillway_advisor::{BLOCK_BYTES, Event, Operation};

/// A kind of workload over so many blocks.
#[derive(Clone, Copy, Debug)]
pub enum Load {
    /// Popularity falls as a power of the rank; ranks lie scattered over the disk.
    Zipf,
    /// In order, over and over.
    Loop,
    /// Half of a hot tenth, half in order over everything.
    Scan,
    /// All alike.
    Uniform,
    /// As Zipf, and now and then 64 blocks are given up.
    Discards,
}

/// Its requests, one block each: so many in a hundred are reads.
pub struct Requests {
    load: Load,
    blocks: u64,
    reads_percent: u64,
    rng: Rng,
    at: u64,
    /// 1 - the exponent of Zipf, and what all ranks sum up to in that.
    power: f64,
    sum: f64,
    /// Prime to the number of blocks: scatters ranks.
    stride: u64,
}

impl Requests {
    pub fn new(load: Load, blocks: u64, reads_percent: u64, seed: u64) -> Requests {
        let power = 1.0 - 0.9;
        let sum = (blocks as f64).powf(power);
        let stride = (1..).map(|i| blocks * 5 / 8 + i).find(|&s| gcd(s, blocks) == 1).expect("one is");
        Requests { load, blocks, reads_percent, rng: Rng(seed), at: 0, power, sum, stride }
    }

    fn zipf(&mut self) -> u64 {
        let part = (self.rng.next() >> 11) as f64 / (1_u64 << 53) as f64;
        let rank = ((part * self.sum).powf(1.0 / self.power)) as u64;
        rank.min(self.blocks - 1) * self.stride % self.blocks
    }

    fn in_order(&mut self) -> u64 {
        self.at = (self.at + 1) % self.blocks;
        self.at
    }

    #[allow(clippy::should_implement_trait, reason = "there is always a next one")]
    pub fn next(&mut self) -> Event {
        let block = match self.load {
            Load::Zipf | Load::Discards => self.zipf(),
            Load::Loop => self.in_order(),
            Load::Scan if self.rng.below(2) == 0 => self.rng.below(self.blocks / 10),
            Load::Scan => self.in_order(),
            Load::Uniform => self.rng.below(self.blocks),
        };
        let (mut operation, mut len) = (Operation::Write, 1);
        if matches!(self.load, Load::Discards) && self.rng.below(200) == 0 {
            (operation, len) = (Operation::Discard, 64.min(self.blocks - block));
        } else if self.rng.below(100) < self.reads_percent {
            operation = Operation::Read;
        }
        Event { time_us: 0, operation, offset_bytes: block * BLOCK_BYTES, len_bytes: len * BLOCK_BYTES }
    }
}

fn gcd(a: u64, b: u64) -> u64 {
    if b == 0 { a } else { gcd(b, a % b) }
}
