//! The policy in miniature beside the true core: the same requests, one at a time, and the same counts.
//!
//! `SPILLWAY_SEED` repeats a run; `cargo test --test policy -- --nocapture` prints the tables.

mod common;
#[allow(dead_code, reason = "the core's own tests use more of it")]
#[path = "../../core/tests/common/mod.rs"]
mod core_common;

use common::generate::{Load, Requests};
use common::seed;
use core_common::Real;
use spillway_advisor::policy::{Policy, TierOutcome};
use spillway_advisor::{BLOCK_BYTES, Event, Operation};

/// One request of one block to the core.
fn submit(real: &mut Real, event: &Event) {
    let operation = match event.operation {
        Operation::Read => spillway_core::Operation::Read,
        Operation::Write => spillway_core::Operation::Write { fua: false },
        _ => spillway_core::Operation::Discard,
    };
    let first = event.offset_bytes / BLOCK_BYTES;
    (first..first + event.len_bytes / BLOCK_BYTES).for_each(|b| real.turn([(operation, b)].into_iter()));
}

/// Evicted, read of the overflow, promoted: the core's, and in miniature on all blocks.
fn both(load: Load, blocks: u64, slots: u64, n: u64, seed: u64) -> [[u64; 3]; 2] {
    let mut real = Real::new(spillway_core::Mode::RamOverflow, blocks, slots, 1024);
    let mut policy = Policy::new(blocks * BLOCK_BYTES, &[slots * BLOCK_BYTES], 1.0);
    let mut requests = Requests::new(load, blocks, 50, seed);
    for _ in 0..n {
        let event = requests.next();
        submit(&mut real, &event);
        policy.event(&event);
    }
    real.disk.check();
    let c = real.disk.counters();
    let get = spillway_core::get;
    let read = (get(&c.overflow.read_bytes) - get(&c.collector_read_bytes)) / BLOCK_BYTES;
    let TierOutcome { evicted_blocks, overflow_read_blocks, promoted_blocks, .. } = policy.outcomes()[0];
    let core = [get(&c.evictions_blocks), read, get(&c.promoted_blocks)];
    [core, [evicted_blocks, overflow_read_blocks, promoted_blocks]]
}

#[test]
fn on_all_blocks_it_does_what_the_core_does() {
    let seed = seed();
    for load in [Load::Zipf, Load::Loop, Load::Scan, Load::Uniform] {
        for (blocks, slots) in [(3000, 700), (3000, 2400), (2000, 64), (9000, 4000)] {
            let [core, miniature] = both(load, blocks, slots, 60_000, seed);
            assert_eq!(core, miniature, "{load:?}, {slots} slots for {blocks} blocks");
        }
    }
}

#[test]
fn what_is_given_up_changes_little() {
    // The core gives the memory of such slots back to the host and may take others for the next writes, so that its hand meets
    // blocks in another order. Mostly it is the same to the last block.
    let [core, miniature] = both(Load::Discards, 9000, 3000, 200_000, seed());
    println!("evicted, read back, promoted: {core:?}, in miniature {miniature:?}");
    for (core, miniature) in core.into_iter().zip(miniature).take(2) {
        let off = core.abs_diff(miniature) as f64 / core as f64;
        assert!(off < 0.02, "{core} and {miniature}");
    }
}

#[test]
fn a_sample_is_near_all_blocks() {
    let seed = seed();
    let n: u64 = std::env::var("SPILLWAY_POLICY_BLOCKS").map_or(3_000_000, |n| n.parse().expect("a number"));
    let blocks = n / 10;
    let limits: Vec<u64> = (1..=8).map(|i| blocks * BLOCK_BYTES * i / 8).collect();
    println!(
        "{n} requests to {blocks} blocks: share of the writes that is evicted, of all blocks and of 1 in 20"
    );
    for load in [Load::Zipf, Load::Scan, Load::Uniform, Load::Discards] {
        let mut requests = Requests::new(load, blocks, 50, seed);
        let mut all = Policy::new(blocks * BLOCK_BYTES, &limits, 1.0);
        let mut sample = Policy::new(blocks * BLOCK_BYTES, &limits, 0.05);
        for _ in 0..n {
            let event = requests.next();
            all.event(&event);
            sample.event(&event);
        }
        let shares = |outcome: &TierOutcome| {
            [outcome.evicted_blocks, outcome.overflow_read_blocks]
                .map(|blocks| blocks as f64 / (n / 2) as f64)
        };
        for (all, sample) in all.outcomes().iter().zip(sample.outcomes()) {
            let (all, sample) = (shares(all), shares(&sample));
            print!(" {:.3} {:.3} |", all[0], sample[0]);
            for (all, sample) in all.into_iter().zip(sample) {
                assert!((all - sample).abs() < 0.06, "{load:?}: {all} and {sample}");
            }
        }
        println!(" {load:?}");
    }
}
