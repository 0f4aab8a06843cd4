//! From events to what is recommended.

mod common;

use common::generate::{Load, Requests};
use common::seed;
use spillway_advisor::curve::{Curve, DEFAULT_GOAL, MIN_RAM_BYTES, Point, knee_of, point};
use spillway_advisor::lru::Lru;
use spillway_advisor::shards::{Sample, Shards};
use spillway_advisor::{BLOCK_BYTES, Event, Operation, staying_blocks};

fn write(block: u64) -> Event {
    let offset_bytes = block * BLOCK_BYTES;
    Event { time_us: 0, operation: Operation::Write, offset_bytes, len_bytes: BLOCK_BYTES }
}

#[test]
fn a_loop_needs_all_of_it_or_nothing() {
    let mut lru = Lru::new(u64::MAX);
    (0..10_000).for_each(|i| lru.event(&write(i % 1000)));
    let curve = Curve::new(&lru.profile(), DEFAULT_GOAL);
    assert!(staying_blocks(curve.zero_overflow_bytes) == 1000);
    assert_eq!(curve.recommended_bytes, curve.zero_overflow_bytes);
    assert_eq!(curve.knee_bytes, None, "{curve:?}");
    let last = curve.curve.last().expect("points");
    assert_eq!((last.ram_bytes, last.overflow_write_bytes), (curve.zero_overflow_bytes, 0));
    // One block less, and each is gone before it is used again; but for those that are there at the end.
    let less = point(&lru.profile(), curve.zero_overflow_bytes - BLOCK_BYTES);
    assert_eq!(less.overflow_write_bytes, (10_000 - 999) * BLOCK_BYTES);
}

#[test]
fn a_samples_curve_says_the_same_in_all_its_parts() {
    for blocks in [9_000, 10_000, 11_500, 40_000, 100_000] {
        for most_blocks in [None, Some(512)] {
            let mut shards = Shards::new(u64::MAX, Sample { rate: 0.1, most_blocks });
            (0..blocks * 5).for_each(|i| shards.event(&write(i % blocks)));
            let curve = Curve::new(&shards.profile(), DEFAULT_GOAL);
            let last = curve.curve.last().expect("points");
            assert_eq!(
                (last.ram_bytes, last.overflow_write_bytes),
                (curve.zero_overflow_bytes, 0),
                "{blocks}"
            );
            assert!(curve.recommended_bytes <= curve.zero_overflow_bytes, "{blocks}");
        }
    }
}

#[test]
fn a_hot_set_is_where_the_knee_is() {
    let mut lru = Lru::new(u64::MAX);
    let mut rng = common::Rng(seed());
    for i in 0..200_000 {
        lru.event(&write(if i % 20 == 0 { 2000 + rng.below(8000) } else { rng.below(2000) }));
    }
    let curve = Curve::new(&lru.profile(), 0.9);
    let knee = staying_blocks(curve.knee_bytes.expect("there is a bend"));
    assert!((1900..3500).contains(&knee), "{knee}");
    assert!(curve.recommended_bytes < curve.zero_overflow_bytes);
}

#[test]
fn along_a_curve_nothing_grows_and_the_goal_is_reached_and_no_more() {
    for load in [Load::Zipf, Load::Scan, Load::Uniform, Load::Discards] {
        let mut lru = Lru::new(u64::MAX);
        let mut requests = Requests::new(load, 20_000, 30, seed());
        (0..300_000).for_each(|_| lru.event(&requests.next()));
        let profile = lru.profile();
        let curve = Curve::new(&profile, DEFAULT_GOAL);
        for pair in curve.curve.windows(2) {
            assert!(pair[0].ram_bytes < pair[1].ram_bytes);
            assert!(pair[0].overflow_write_bytes >= pair[1].overflow_write_bytes);
            assert!(pair[0].overflow_read_bytes >= pair[1].overflow_read_bytes);
            assert!(pair[0].peak_overflow_bytes >= pair[1].peak_overflow_bytes, "{load:?}: {pair:?}");
        }
        assert!(profile.absorbed(curve.recommended_bytes) >= DEFAULT_GOAL - 1e-9);
        if curve.recommended_bytes > MIN_RAM_BYTES {
            assert!(profile.absorbed(curve.recommended_bytes - BLOCK_BYTES) < DEFAULT_GOAL, "{load:?}");
        }
        let json = serde_json::to_string(&curve).expect("plain data");
        assert_eq!(
            serde_json::from_str::<Curve>(&json).expect("just written").recommended_bytes,
            curve.recommended_bytes
        );
    }
}

#[test]
fn a_trace_without_writes_needs_the_least() {
    let curve = Curve::new(&Lru::new(u64::MAX).profile(), DEFAULT_GOAL);
    assert_eq!((curve.zero_overflow_bytes, curve.recommended_bytes), (MIN_RAM_BYTES, MIN_RAM_BYTES));
    assert_eq!(curve.curve.len(), 1);
}

#[test]
fn the_knee_of_some_points_is_the_farthest_below_the_line() {
    let at = |ram_bytes, overflow_write_bytes| Point {
        ram_bytes,
        overflow_write_bytes,
        overflow_read_bytes: 0,
        peak_overflow_bytes: 0,
    };
    let bent = [at(10, 900), at(20, 200), at(50, 100), at(100, 0)];
    assert_eq!(knee_of(&bent, 100, 1000), Some(20));
    let straight = [at(25, 750), at(50, 500), at(100, 0)];
    for (points, end, most) in
        [(&straight[..], 100, 1000), (&bent, 0, 1000), (&bent, 100, 0), (&[], 100, 1000)]
    {
        assert_eq!(knee_of(points, end, most), None, "{points:?}");
    }
}
