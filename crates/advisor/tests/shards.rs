//! The sample beside all blocks: how far off it is, and what it takes.
//!
//! `SPILLWAY_SEED` repeats a run; `SPILLWAY_SHARDS_BLOCKS` is how many blocks each trace has (100 million in the long form);
//! `cargo test --test shards -- --nocapture` prints the table.

mod common;

use common::generate::{Load, Requests};
use common::seed;
use spillway_advisor::lru::Lru;
use spillway_advisor::shards::{Sample, Shards};
use spillway_advisor::{BLOCK_BYTES, Profile};

const SIZES: u64 = 64;

/// The mean and the greatest difference, over sizes evenly spaced up to the peak, of the share of the written blocks that is
/// evicted, and of the peak of the overflow as a share of the peak of what lives.
fn errors(exact: &Profile, sample: &Profile) -> [f64; 4] {
    let totals = exact.totals();
    let (mut evicted, mut space) = (Vec::new(), Vec::new());
    for i in 1..=SIZES {
        let size = totals.peak_live_blocks * i / SIZES;
        let differ = |a: u64, b: u64, of: u64| a.abs_diff(b) as f64 / of.max(1) as f64;
        let of = totals.written_blocks + totals.read_blocks;
        evicted.push(differ(exact.evicted_blocks(size), sample.evicted_blocks(size), of));
        let peaks = (exact.peak_overflow_blocks(size), sample.peak_overflow_blocks(size));
        space.push(differ(peaks.0, peaks.1, totals.peak_live_blocks));
    }
    let mean = |d: &[f64]| d.iter().sum::<f64>() / d.len() as f64;
    let most = |d: &[f64]| d.iter().copied().fold(0.0, f64::max);
    [mean(&evicted), most(&evicted), mean(&space), most(&space)]
}

/// By rate, and what a live disk has: at most so many blocks.
const SAMPLES: [(&str, Sample); 5] = [
    ("1 in 10", Sample { rate: 0.1, most_blocks: None }),
    ("1 in 30", Sample { rate: 1.0 / 30.0, most_blocks: None }),
    ("1 in 100", Sample { rate: 0.01, most_blocks: None }),
    ("1 in 1,000", Sample { rate: 0.001, most_blocks: None }),
    ("4,096 blocks", Sample { rate: 0.1, most_blocks: Some(4096) }),
];

#[test]
fn a_sample_is_near_what_all_blocks_say() {
    let seed = seed();
    let n: u64 = std::env::var("SPILLWAY_SHARDS_BLOCKS").map_or(2_000_000, |n| n.parse().expect("a number"));
    let blocks = (n / 10).min(4_000_000);
    println!("{n} blocks of {blocks}; evicted: mean, greatest difference; peak of the overflow: the same");
    for load in [Load::Zipf, Load::Loop, Load::Scan, Load::Uniform, Load::Discards] {
        let mut requests = Requests::new(load, blocks, 30, seed);
        let mut lru = Lru::new(blocks * BLOCK_BYTES);
        let mut samples = SAMPLES.map(|(name, sample)| (name, Shards::new(blocks * BLOCK_BYTES, sample)));
        for _ in 0..n {
            let event = requests.next();
            lru.event(&event);
            samples.iter_mut().for_each(|(_, sample)| sample.event(&event));
        }
        let exact = lru.profile();
        for (name, sample) in &samples {
            let found = errors(&exact, &sample.profile());
            let (load, kib) = (format!("{load:?}"), sample.memory_bytes() / 1024);
            println!("{load:<9} {name:<12} {found:.4?} rate {:.4}, {kib} KiB", sample.rate());
            // What so many blocks stand for is off by the root of their number; a cliff that is a little beside its place is
            // as far off as it is high, at a size or two; and blocks that are hot are few, whatever the rate.
            let off = 1.0 / (exact.totals().peak_live_blocks as f64 * sample.rate()).sqrt();
            let most = [off + 0.03, 2.0 * off + 0.03];
            assert!(
                found[0] < most[0] && found[2] < most[1],
                "{load}, {name}: {found:?}, not below {most:?}"
            );
        }
        let bounded = &samples[4].1;
        assert!(bounded.memory_bytes() < 1 << 20, "{} bytes", bounded.memory_bytes());
        for (_, sample) in &samples[..4] {
            assert_eq!(sample.profile().totals().written_blocks, exact.totals().written_blocks);
        }
    }
}

#[test]
fn a_sample_of_all_blocks_is_exact_where_needs_are_small() {
    let mut requests = Requests::new(Load::Discards, 120, 30, seed());
    let mut lru = Lru::new(120 * BLOCK_BYTES);
    let mut all = Shards::new(120 * BLOCK_BYTES, Sample { rate: 1.0, most_blocks: None });
    for _ in 0..50_000 {
        let event = requests.next();
        lru.event(&event);
        all.event(&event);
    }
    let (exact, all) = (lru.profile(), all.profile());
    assert_eq!(exact.totals(), all.totals());
    for size in 0..130 {
        assert_eq!(exact.evicted_blocks(size), all.evicted_blocks(size), "{size}");
        assert_eq!(exact.overflow_read_blocks(size), all.overflow_read_blocks(size), "{size}");
    }
}
