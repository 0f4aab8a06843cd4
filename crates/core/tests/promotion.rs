//! x
mod common;

use common::{Real, Rng, TURN, seed};
use spillway_core::{BLOCK_BYTES, Mode, Operation, get};

const SLOTS: u64 = 16384;
const BLOCKS: u64 = SLOTS * 5 / 2;
const HOT: u64 = BLOCKS / 10;
const WRITE: Operation = Operation::Write { fua: false };

#[test]
fn measure() {
    let seed = seed();
    for (name, load) in [
        ("uniform 80% writes", 0),
        ("uniform 80% reads", 1),
        ("skew both", 2),
        ("skew reads, cold writes", 3),
        ("skew reads only", 4),
    ] {
        let mut rng = Rng(seed);
        let mut real = Real::new(Mode::RamOverflow, BLOCKS, SLOTS, 1024);
        for first in (0..BLOCKS).step_by(TURN as usize) {
            real.turn((first..first + TURN).map(|b| (WRITE, b)));
        }
        let mut request = || {
            let skew = |rng: &mut Rng| if rng.below(10) > 0 { rng.below(HOT) } else { rng.below(BLOCKS) };
            match load {
                0 => (if rng.below(5) > 0 { WRITE } else { Operation::Read }, rng.below(BLOCKS)),
                1 => (if rng.below(5) == 0 { WRITE } else { Operation::Read }, rng.below(BLOCKS)),
                2 => (if rng.below(5) == 0 { WRITE } else { Operation::Read }, skew(&mut rng)),
                3 => {
                    if rng.below(5) == 0 {
                        (WRITE, HOT + rng.below(BLOCKS - HOT))
                    } else {
                        (Operation::Read, skew(&mut rng))
                    }
                }
                _ => (Operation::Read, skew(&mut rng)),
            }
        };
        print!("{name:<24}");
        let counts = |real: &Real| {
            let c = real.disk.counters();
            [
                (get(&c.overflow.read_bytes) - get(&c.collector_read_bytes)) / BLOCK_BYTES as u64,
                get(&c.evictions_blocks),
                get(&c.promoted_blocks),
            ]
        };
        for _ in 0..3 {
            let before = counts(&real);
            let n = 5 * BLOCKS;
            for _ in 0..n / TURN {
                real.turn((0..TURN).map(|_| request()));
            }
            let after = counts(&real);
            print!(" |");
            for i in 0..3 {
                print!(" {:.4}", (after[i] - before[i]) as f64 / n as f64);
            }
        }
        println!();
        real.disk.check();
    }
}
