//! How many blocks the log writes for one that it was asked to write, beside a greedy collector in its plainest
//! form: the same segments, the same share of live blocks, uniform random overwrites.
//!
//! `SPILLWAY_SEED` repeats a run; `cargo test --test amplification -- --nocapture` prints the curve.

mod common;
#[path = "model/rng.rs"]
#[allow(dead_code, reason = "the model uses more of it")]
mod rng;

use common::{DATA_BLOCKS, Real, SHAPE, TURN};
use rng::{Rng, seed};
use spillway_core::{Mode, Operation, get};

const SEGMENTS: u64 = 512;
/// Slots of the tier in mode `ram+overflow`: next to nothing.
const SLOTS: u64 = 256;
/// Living blocks are overwritten so often before the count begins, and while it goes on.
const WARM_UP: u64 = 6;
const COUNTED: u64 = 3;

/// Blocks that were to be written, and blocks that were moved.
fn counts(real: &Real) -> (u64, u64) {
    let c = real.disk.counters();
    (get(&c.evictions_blocks) + get(&c.overflow_guest_blocks), get(&c.collector_moved_blocks))
}

/// The true log's.
fn amplification(mode: Mode, live: u64, seed: u64) -> f64 {
    let slots = if mode.has_ram() { SLOTS } else { 0 };
    let blocks = live + slots;
    let mut real = Real::new(mode, blocks, slots, SEGMENTS);
    let mut rng = Rng(seed);
    let write = |block| (Operation::Write { fua: false }, block);
    for first in (0..blocks).step_by(TURN as usize) {
        real.turn((first..blocks.min(first + TURN)).map(write));
    }
    let mut overwrite = |real: &mut Real, n: u64| {
        for _ in 0..n / TURN {
            real.turn((0..TURN).map(|_| write(rng.below(blocks))));
        }
    };
    overwrite(&mut real, WARM_UP * live);
    let before = counts(&real);
    overwrite(&mut real, COUNTED * live);
    let after = counts(&real);
    real.disk.check();
    let (asked, moved) = (after.0 - before.0, after.1 - before.1);
    (asked + moved) as f64 / asked as f64
}

/// The plainest greedy collector: one segment is open for writes and one for survivors; when no more segments are
/// free than `KEEP`, the one with the fewest live blocks is emptied.
struct Greedy {
    /// Where each block lives.
    at: Vec<u32>,
    /// The blocks that were appended to each segment, dead or alive.
    appended: Vec<Vec<u32>>,
    live: Vec<u32>,
    open: [usize; 2],
    free: Vec<usize>,
    asked: u64,
    moved: u64,
}

/// One to be filled, and one that survivors can always go to.
const KEEP: usize = 2;

impl Greedy {
    fn append(&mut self, stream: usize, block: u32) {
        let old = self.at[block as usize];
        if old != u32::MAX {
            self.live[old as usize] -= 1;
        }
        if self.appended[self.open[stream]].len() as u64 == DATA_BLOCKS {
            self.open[stream] = self.free.pop().expect("the collector keeps some");
        }
        let segment = self.open[stream];
        self.appended[segment].push(block);
        self.live[segment] += 1;
        self.at[block as usize] = segment as u32;
    }

    fn write(&mut self, block: u32) {
        self.append(0, block);
        self.asked += 1;
        while self.free.len() < KEEP {
            let closed = (0..self.live.len()).filter(|s| !self.open.contains(s) && !self.free.contains(s));
            let victim = closed.min_by_key(|&s| self.live[s]).expect("some are closed");
            for block in std::mem::take(&mut self.appended[victim]) {
                if self.at[block as usize] == victim as u32 {
                    self.append(1, block);
                    self.moved += 1;
                    // A block that was appended twice lives once: here it is gone already.
                }
            }
            assert_eq!(self.live[victim], 0);
            self.free.push(victim);
        }
    }

    fn amplification(live: u64, seed: u64) -> f64 {
        let segments = SEGMENTS as usize;
        let mut greedy = Greedy {
            at: vec![u32::MAX; live as usize],
            appended: vec![Vec::new(); segments],
            live: vec![0; segments],
            open: [0, 1],
            free: (2..segments).collect(),
            asked: 0,
            moved: 0,
        };
        let mut rng = Rng(seed);
        (0..live).for_each(|block| greedy.write(block as u32));
        (0..WARM_UP * live).for_each(|_| greedy.write(rng.below(live) as u32));
        (greedy.asked, greedy.moved) = (0, 0);
        (0..COUNTED * live).for_each(|_| greedy.write(rng.below(live) as u32));
        (greedy.asked + greedy.moved) as f64 / greedy.asked as f64
    }
}

#[test]
fn writes_are_not_multiplied() {
    let seed = seed();
    println!("live  greedy  overflow  ram+overflow");
    let rows: Vec<_> = [50u64, 60, 70, 75, 80, 85, 90]
        .into_iter()
        .map(|percent| {
            let live = SEGMENTS * u64::from(SHAPE.segment_blocks) * percent / 100;
            let greedy = Greedy::amplification(live, seed);
            let [straight, evicted] =
                [Mode::Overflow, Mode::RamOverflow].map(|mode| amplification(mode, live, seed));
            println!("{percent:>5}%  {greedy:>6.3}  {straight:>8.3}  {evicted:>12.3}");
            (percent, greedy, straight.max(evicted))
        })
        .collect();
    for (percent, greedy, real) in rows {
        assert!(real <= greedy * 1.15, "{percent}%: {real} is more than 15% above {greedy}");
        let bound = match percent {
            50 => 1.35,
            80 => 3.1,
            _ => f64::INFINITY,
        };
        assert!(real < bound, "{percent}%: {real}");
    }
}
