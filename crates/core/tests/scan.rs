//! What a large sequential write does to the hot set in the RAM tier: the true core's clock beside models of other
//! policies, on one trace.
//!
//! Hits are counted on reads; overwrites are half of the hot requests, and bring back what has left. A block enters a
//! model's tier when it is written, never when it is read. `SPILLWAY_SEED` repeats a run; `cargo test --test scan --
//! --nocapture` prints the table.

mod common;
#[path = "model/rng.rs"]
#[allow(dead_code, reason = "the model uses more of it")]
mod rng;

use common::{Real, TURN};
use rng::{Rng, seed};
use spillway_core::{BLOCK_BYTES, Mode, Operation, get};
use std::collections::{BTreeMap, HashMap, HashSet, VecDeque};

const SLOTS: u64 = 8192;
/// Blocks that stay when eviction is_backing_off: all but a tenth.
const STAYING: usize = (SLOTS - SLOTS / 10) as usize;
/// The hot set: half of the tier.
const HOT: u64 = SLOTS / 2;
/// What is written once, in order.
const SCAN: u64 = 8 * SLOTS;
/// Two hot sets and two scans.
const BLOCKS: u64 = 2 * (HOT + SCAN);
/// Requests to the hot set before the scan, and after it.
const BEFORE: u64 = 8 * HOT;
const AFTER: u64 = HOT / 2;
const WRITE: Operation = Operation::Write { fua: false };

#[derive(Clone, Copy, Debug, PartialEq)]
enum Load {
    Uniform,
    /// Nine of ten requests go to a tenth of the hot set.
    Skewed,
}

type Trace = Vec<(Operation, u64)>;

/// Before, during and after a scan, of which of each turn's requests `scanning` are, and while another hot set is
/// used beside another scan; 0: there is none, but as many hot requests as with half.
fn trace(load: Load, scanning: u64, seed: u64) -> [Trace; 4] {
    let mut rng = Rng(seed);
    let mut hot = |first| {
        let block =
            if load == Load::Skewed && rng.below(10) > 0 { rng.below(HOT / 10) } else { rng.below(HOT) };
        (if rng.below(2) == 0 { Operation::Read } else { WRITE }, first + block)
    };
    let mut beside = |first, mut scan: std::ops::Range<u64>| {
        let mut requests = Trace::new();
        while !scan.is_empty() {
            let n = if scanning == 0 { TURN / 2 } else { scanning };
            let once = scan.by_ref().take(n as usize).map(|b| (WRITE, b));
            requests.extend(once.filter(|_| scanning > 0));
            requests.extend((n..TURN).map(|_| hot(first)));
        }
        requests
    };
    let during = beside(0, 2 * HOT..2 * HOT + SCAN);
    let moved = beside(HOT, 2 * HOT + SCAN..BLOCKS);
    let before = (0..HOT).map(|b| (WRITE, b)).chain((0..BEFORE).map(|_| hot(0))).collect();
    [before, during, (0..AFTER).map(|_| hot(0)).collect(), moved]
}

/// Share of the reads in each of the trace's phases that found their block in RAM.
fn hits(trace: &[Trace; 4], mut serve: impl FnMut(&[(Operation, u64)]) -> u64) -> [f64; 4] {
    std::array::from_fn(|i| {
        let reads = trace[i].iter().filter(|r| r.0 == Operation::Read).count();
        trace[i].chunks(TURN as usize).map(&mut serve).sum::<u64>() as f64 / reads as f64
    })
}

fn real(trace: &[Trace; 4]) -> [f64; 4] {
    let mut real = Real::new(Mode::RamOverflow, BLOCKS, SLOTS, 1024);
    let in_ram = |real: &Real| get(&real.disk.counters().ram.read_bytes) / BLOCK_BYTES as u64;
    let shares = hits(trace, |requests| {
        let before = in_ram(&real);
        real.turn(requests.iter().copied());
        in_ram(&real) - before
    });
    real.disk.check();
    shares
}

#[derive(Clone, Copy, PartialEq, Debug)]
enum Policy {
    Fifo,
    Lru,
    Clock,
    Sieve,
    S3Fifo,
}

/// A tier of `STAYING` blocks under a policy, in its plainest form.
struct Model {
    policy: Policy,
    /// Of each block in the tier: its place in its queue, how often it was used since it came there, and the queue.
    blocks: HashMap<u64, (u64, u8, usize)>,
    /// By place. All but S3-FIFO have the second queue only.
    queues: [BTreeMap<u64, u64>; 2],
    next: u64,
    /// Sieve's.
    hand: u64,
    /// What has left S3-FIFO's first queue.
    ghost: (VecDeque<u64>, HashSet<u64>),
}

impl Model {
    fn new(policy: Policy) -> Model {
        let (blocks, queues, ghost) = Default::default();
        Model { policy, blocks, queues, next: 0, hand: 0, ghost }
    }

    fn insert(&mut self, block: u64, used: u8, queue: usize) {
        self.next += 1;
        self.queues[queue].insert(self.next, block);
        self.blocks.insert(block, (self.next, used, queue));
    }

    /// Returns whether the block was there.
    fn access(&mut self, operation: Operation, block: u64) -> bool {
        if let Some((place, used, queue)) = self.blocks.get_mut(&block) {
            *used = (*used + 1).min(3);
            if self.policy == Policy::Lru {
                let (place, queue) = (*place, *queue);
                self.queues[queue].remove(&place);
                self.insert(block, 0, queue);
            }
            return true;
        }
        if operation == WRITE {
            while self.blocks.len() >= STAYING {
                self.evict();
            }
            let queue = usize::from(self.policy != Policy::S3Fifo || self.ghost.1.remove(&block));
            self.insert(block, 0, queue);
        }
        false
    }

    /// Takes a block out, or a step towards that.
    fn evict(&mut self) {
        let small = self.policy == Policy::S3Fifo && self.queues[0].len() >= STAYING / 10;
        let queue = usize::from(!small);
        let from = if self.policy == Policy::Sieve { self.hand } else { 0 };
        let found = self.queues[queue].range(from..).next().or_else(|| self.queues[queue].first_key_value());
        let (&place, &block) = found.expect("it is full");
        let used = &mut self.blocks.get_mut(&block).expect("it is in a queue").1;
        let stays = match self.policy {
            Policy::Fifo | Policy::Lru => false,
            _ => *used > u8::from(small),
        };
        if self.policy == Policy::Sieve {
            (*used, self.hand) = (0, place + 1);
            if stays {
                return;
            }
        }
        let used = *used;
        self.queues[queue].remove(&place);
        self.blocks.remove(&block);
        if stays {
            self.insert(block, if small { 0 } else { used - 1 }, 1);
        } else if small {
            self.ghost.0.push_back(block);
            self.ghost.1.insert(block);
            if self.ghost.0.len() > STAYING {
                self.ghost.0.pop_front().map(|old| self.ghost.1.remove(&old));
            }
        }
    }
}

fn model(policy: Policy, trace: &[Trace; 4]) -> [f64; 4] {
    let mut model = Model::new(policy);
    hits(trace, |requests| {
        let hit = |&&(operation, block): &&(Operation, u64)| {
            model.access(operation, block) && operation == Operation::Read
        };
        requests.iter().filter(hit).count() as u64
    })
}

/// One row for each share of the requests that the scan takes: what the core's reads hit during the scan, after it, and
/// with another hot set beside another scan; and what the models' do.
fn table(load: Load, seed: u64) -> Vec<(u64, [[f64; 4]; 6])> {
    let policies = [Policy::Fifo, Policy::Lru, Policy::Clock, Policy::Sieve, Policy::S3Fifo];
    println!("hot set {load:?}; hits in % of the reads during / after / of a new hot set");
    println!("written once  core            {policies:<16?}");
    let row = |scanning| {
        let trace = trace(load, scanning, seed);
        let mut shares = [real(&trace); 6];
        shares[1..].copy_from_slice(&policies.map(|policy| model(policy, &trace)));
        print!("{scanning:>5} of {TURN} ");
        shares.iter().for_each(|[_, during, after, moved]| {
            print!("  {:>3.0} /{:>3.0} /{:>3.0}", during * 100.0, after * 100.0, moved * 100.0);
        });
        println!();
        (scanning, shares)
    };
    [0, 16, 24, 28, 30, 31].into_iter().map(row).collect()
}

#[test]
fn a_scan_leaves_the_hot_set_in_ram() {
    let seed = seed();
    let uniform = table(Load::Uniform, seed);
    let skewed = table(Load::Skewed, seed);
    for (scanning, [core, fifo, lru, clock, ..]) in uniform.into_iter().chain(skewed.iter().copied()) {
        // It is a clock, and better by what comes back to RAM by being read.
        for (phase, share) in core.into_iter().enumerate() {
            let of_clock = clock[phase];
            let is_clock = (of_clock - 0.03..of_clock + 0.08).contains(&share);
            assert!(is_clock, "{scanning}, {phase}: {share}, and a clock's {of_clock}");
        }
        assert!(core[1] >= fifo[1].max(lru[1]) - 0.03, "{scanning}: {core:?}, {fifo:?}, {lru:?}");
    }
    // Seven blocks written once for each use of the hot set, eight times the tier in all.
    let (_, [[_, during, after, moved], _, lru, ..]) = skewed[3];
    assert!(during > 0.88 && after > 0.87, "{during} and {after} of the reads found their block in RAM");
    assert!(during > lru[1] + 0.1 && moved > lru[3] + 0.05, "{during} and {moved}; LRU: {lru:?}");
}
