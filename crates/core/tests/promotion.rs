//! What it brings, and costs, that blocks come back to RAM when they are read from the overflow again and again: reads
//! and writes of the overflow for each request, on the true core.
//!
//! `SPILLWAY_SEED` repeats a run; `cargo test --test promotion -- --nocapture` prints the table.

mod common;
#[path = "model/rng.rs"]
#[allow(dead_code, reason = "the model uses more of it")]
mod rng;

use common::{Real, TURN};
use rng::{Rng, seed};
use spillway_core::{BLOCK_BYTES, Mode, Operation, get};

const SLOTS: u64 = 16384;
const WRITE: Operation = Operation::Write { fua: false };

/// Which block a request uses.
#[derive(Clone, Copy, Debug)]
enum Blocks {
    Any,
    /// Nine of ten times the first tenth.
    Skewed,
    /// All but these.
    Cold,
}

struct Load {
    name: &'static str,
    /// Of the disk.
    blocks: u64,
    writes_percent: u64,
    written: Blocks,
    read: Blocks,
}

/// For each request: reads of the overflow for the guest, blocks evicted, blocks promoted.
type Rates = [f64; 3];

impl Load {
    fn request(&self, rng: &mut Rng) -> (Operation, u64) {
        let is_write = rng.below(100) < self.writes_percent;
        let (operation, blocks) = if is_write { (WRITE, self.written) } else { (Operation::Read, self.read) };
        let hot = self.blocks / 10;
        let block = match blocks {
            Blocks::Skewed if rng.below(10) > 0 => rng.below(hot),
            Blocks::Skewed | Blocks::Any => rng.below(self.blocks),
            Blocks::Cold => hot + rng.below(self.blocks - hot),
        };
        (operation, block)
    }

    /// All blocks are written, the hot ones first; then the load runs, and is counted in three parts of five requests
    /// for each block.
    fn run(&self, seed: u64) -> [Rates; 3] {
        let mut rng = Rng(seed);
        let mut real = Real::new(Mode::RamOverflow, self.blocks, SLOTS, 1024);
        for first in (0..self.blocks).step_by(TURN as usize) {
            real.turn((first..self.blocks.min(first + TURN)).map(|block| (WRITE, block)));
        }
        let counts = |real: &Real| {
            let c = real.disk.counters();
            let reads = (get(&c.overflow.read_bytes) - get(&c.collector_read_bytes)) / BLOCK_BYTES as u64;
            [reads, get(&c.evictions_blocks), get(&c.promoted_blocks)]
        };
        let turns = 5 * self.blocks / TURN;
        let rates = [(); 3].map(|()| {
            let before = counts(&real);
            (0..turns).for_each(|_| real.turn((0..TURN).map(|_| self.request(&mut rng))));
            let after = counts(&real);
            std::array::from_fn(|i| (after[i] - before[i]) as f64 / (turns * TURN) as f64)
        });
        real.disk.check();
        print!("{:<52}", self.name);
        rates.iter().for_each(|[read, evicted, promoted]| print!(" {read:.4} {evicted:.4} {promoted:.4} |"));
        println!();
        rates
    }
}

#[test]
fn hot_overflowed_blocks_come_back_and_others_do_not() {
    use Blocks::{Any, Cold, Skewed};
    let seed = seed();
    println!("for each request, in three parts of the run: overflow reads, blocks evicted, blocks promoted");
    let large = SLOTS * 5 / 2;
    let load = |name, blocks, writes_percent, written, read| {
        Load { name, blocks, writes_percent, written, read }.run(seed)
    };
    let [first, _, last] = load("80% reads, skewed; writes elsewhere", large, 20, Cold, Skewed);
    // Without promotion the hot blocks, 0.72 of the requests and more, are read from the overflow for ever: 0.77.
    assert!(first[0] < 0.3 && last[0] < 0.08, "reads of the overflow: {first:?}, then {last:?}");
    let [first, _, last] = load("reads alone, skewed", large, 0, Any, Skewed);
    assert!(first[0] < 0.3 && last[0] < 0.1, "reads of the overflow: {first:?}, then {last:?}");
    load("80% reads, reads and writes skewed alike", large, 20, Skewed, Skewed);
    for [_, evicted, promoted] in load("80% writes, uniform", large, 80, Any, Any) {
        assert!(promoted < 0.003 * evicted, "{promoted} promoted for {evicted} evicted");
    }
    load("80% reads, uniform", large, 20, Any, Any);
    for [_, evicted, promoted] in load("80% writes, uniform, tier of 80%", SLOTS * 5 / 4, 80, Any, Any) {
        assert!(promoted < 0.03 * evicted, "{promoted} promoted for {evicted} evicted");
    }
}
