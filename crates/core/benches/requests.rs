//! What the core itself takes for a request, in nanoseconds, without a copy or any I/O: for comparing two builds.
//!
//! `cargo bench -p spillway-core` runs all loads, `cargo bench -p spillway-core -- ram-16` those whose name contains the word. Each
//! figure is the best of five runs: what the code takes, not what the host was doing.

#[path = "../tests/common/mod.rs"]
mod common;

use common::{Real, TURN};
use spillway_core::{Mode, Operation};
use std::time::Instant;

struct Load {
    name: &'static str,
    mode: Mode,
    blocks: u64,
    slots: u64,
    /// Requests of one turn.
    depth: u64,
    write_percent: u64,
}

const LOADS: [Load; 6] = [
    Load::new("ram-1", Mode::RamOverflow, 40_000, 65_536, 1, 30),
    Load::new("ram-16", Mode::RamOverflow, 40_000, 65_536, 16, 30),
    Load::new("ram-16-writes", Mode::RamOverflow, 40_000, 65_536, 16, 100),
    Load::new("overfull-16", Mode::RamOverflow, 100_000, 65_536, 16, 30),
    Load::new("overfull-16-writes", Mode::RamOverflow, 100_000, 65_536, 16, 100),
    Load::new("overflow-16-writes", Mode::Overflow, 40_000, 0, 16, 100),
];

impl Load {
    const fn new(
        name: &'static str,
        mode: Mode,
        blocks: u64,
        slots: u64,
        depth: u64,
        write_percent: u64,
    ) -> Load {
        Load { name, mode, blocks, slots, depth, write_percent }
    }

    /// Nanoseconds a request.
    fn run(&self) -> f64 {
        const REQUESTS: u64 = 800_000;
        let write = Operation::Write { fua: false };
        let mut real = Real::new(self.mode, self.blocks, self.slots, 1024);
        for first in (0..self.blocks).step_by(TURN as usize) {
            real.turn((first..first + TURN).map(|block| (write, block)));
        }
        let mut seed = 88_172_645_463_325_252_u64;
        let mut random = || {
            seed ^= seed << 13;
            seed ^= seed >> 7;
            seed ^= seed << 17;
            seed
        };
        let mut best = f64::MAX;
        for _ in 0..5 {
            let begun = Instant::now();
            for _ in 0..REQUESTS / self.depth {
                let mut requests = [(write, 0); 16];
                for request in &mut requests[..self.depth as usize] {
                    let bits = random();
                    let writes = (bits >> 33) % 100 < self.write_percent;
                    *request = (if writes { write } else { Operation::Read }, bits % self.blocks);
                }
                real.turn(requests[..self.depth as usize].iter().copied());
            }
            best = best.min(begun.elapsed().as_nanos() as f64 / REQUESTS as f64);
        }
        best
    }
}

fn main() {
    let words: Vec<String> = std::env::args().skip(1).filter(|word| !word.starts_with('-')).collect();
    for load in LOADS.iter().filter(|load| words.iter().all(|word| load.name.contains(word.as_str()))) {
        println!("{:20} {:6.1} ns", load.name, load.run());
    }
}
