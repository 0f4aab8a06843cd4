//! LRU at every size in one pass, against caches that are simulated one by one.
//!
//! `SPILLWAY_SEED` repeats a run.

mod common;

use common::{Rng, seed};
use spillway_advisor::lru::Lru;
use spillway_advisor::{BLOCK_BYTES, Event, Operation, Step};
use std::collections::HashSet;

/// A cache of one size, in its plainest form: the order of what it holds, and what it has evicted.
#[derive(Default)]
struct Cache {
    size: usize,
    held: Vec<u32>,
    overflow: HashSet<u32>,
    evicted: u64,
    read: u64,
    peak: usize,
}

impl Cache {
    fn used(&mut self, block: u32, comes: bool, reads: bool) {
        if let Some(at) = self.held.iter().position(|&b| b == block) {
            self.held.remove(at);
        } else if self.overflow.remove(&block) {
            self.read += u64::from(reads);
        } else if !comes {
            return;
        }
        self.held.push(block);
        if self.held.len() > self.size {
            self.overflow.insert(self.held.remove(0));
            self.evicted += 1;
        }
        self.peak = self.peak.max(self.overflow.len());
    }

    fn step(&mut self, step: &Step) {
        match step {
            Step::Read(block) => self.used(*block, false, true),
            Step::Write { block, whole } => self.used(*block, true, !whole),
            Step::Remove(blocks) => {
                self.held.retain(|b| !blocks.contains(b));
                self.overflow.retain(|b| !blocks.contains(b));
            }
            Step::Reset => {
                self.held.clear();
                self.overflow.clear();
            }
        }
    }
}

/// A trace of a disk of so many blocks, in which one request in `gives_up` gives something up.
fn trace(rng: &mut Rng, blocks: u64, n: usize, gives_up: u64) -> Vec<Event> {
    let hot = 1 + rng.below(blocks);
    let mut next = || {
        let kind = rng.below(gives_up);
        let operation = match (kind, rng.below(30)) {
            (0, 0) => Operation::Reset,
            (0, 1..10) => Operation::WriteZeroes,
            (0, _) => Operation::Discard,
            (_, 0..12) => Operation::Read,
            (_, 12) => Operation::Flush,
            _ => Operation::Write,
        };
        if !operation.has_range() {
            return Event { time_us: 0, operation, offset_bytes: 0, len_bytes: 0 };
        }
        let unit = if rng.below(4) == 0 { 512 } else { BLOCK_BYTES };
        let end = if rng.below(2) == 0 { hot } else { blocks } * BLOCK_BYTES / unit;
        let offset = rng.below(end);
        let len = (1 + rng.below(6) * rng.below(6)).min(blocks * BLOCK_BYTES / unit - offset);
        Event { time_us: 0, operation, offset_bytes: offset * unit, len_bytes: len * unit }
    };
    (0..n).map(|_| next()).collect()
}

#[test]
fn every_size_is_as_if_simulated_alone() {
    let seed = seed();
    let rounds = std::env::var("SPILLWAY_LRU_ROUNDS").map_or(60, |n| n.parse().expect("a number"));
    for round in 0..rounds {
        let mut rng = Rng(seed.wrapping_add(round));
        let blocks = [5, 40, 130][rng.below(3) as usize];
        let gives_up = [3, 20, 200, 1 << 40][rng.below(4) as usize];
        let disk_bytes = blocks * BLOCK_BYTES;
        let events = trace(&mut rng, blocks, 1500, gives_up);
        let sizes: Vec<u64> = (1..=blocks + 1).collect();
        let mut lru = Lru::with_sizes(disk_bytes, &sizes);
        let cache = |&size: &u64| Cache { size: size as usize, ..Cache::default() };
        let mut caches: Vec<Cache> = sizes.iter().map(cache).collect();
        let mut peak_live = 0;
        for event in &events {
            event.check(disk_bytes).expect("inside the disk");
            lru.event(event);
            event.steps(disk_bytes, |step| {
                caches.iter_mut().for_each(|c| c.step(&step));
                peak_live = peak_live.max(caches[0].held.len() + caches[0].overflow.len());
            });
        }
        let profile = lru.profile();
        assert_eq!(profile.totals().peak_live_blocks, peak_live as u64, "round {round}");
        for cache in &caches {
            let size = cache.size as u64;
            let found = (
                profile.evicted_blocks(size),
                profile.overflow_read_blocks(size),
                profile.peak_overflow_blocks(size),
            );
            let wanted = (cache.evicted, cache.read, cache.peak as u64);
            assert_eq!(found, wanted, "seed {seed}, round {round}, {size} of {blocks} blocks");
        }
    }
}

#[test]
fn a_long_trace_with_many_blocks_agrees_at_some_sizes() {
    let mut rng = Rng(seed());
    let blocks = 3000;
    let events = trace(&mut rng, blocks, 40_000, 50);
    let sizes = [1, 7, 100, 900, 2500];
    let mut lru = Lru::with_sizes(u64::MAX, &sizes);
    let mut caches = sizes.map(|size| Cache { size: size as usize, ..Cache::default() });
    for event in &events {
        lru.event(event);
        event.steps(u64::MAX, |step| caches.iter_mut().for_each(|c| c.step(&step)));
    }
    let profile = lru.profile();
    for cache in &caches {
        let size = cache.size as u64;
        assert_eq!(profile.evicted_blocks(size), cache.evicted, "{size}");
        assert_eq!(profile.overflow_read_blocks(size), cache.read, "{size}");
        assert_eq!(profile.peak_overflow_blocks(size), cache.peak as u64, "{size}");
    }
    assert_eq!(profile.evicted_blocks(profile.totals().peak_live_blocks), 0);
}

#[test]
fn without_discards_the_peak_is_exact_at_every_size() {
    let mut rng = Rng(seed());
    let mut lru = Lru::new(u64::MAX);
    trace(&mut rng, 3000, 20_000, 1 << 40).iter().for_each(|e| lru.event(e));
    let profile = lru.profile();
    let live = profile.totals().peak_live_blocks;
    (0..=live + 10)
        .for_each(|size| assert_eq!(profile.peak_overflow_blocks(size), live.saturating_sub(size)));
}

#[test]
fn a_discard_of_the_whole_disk_costs_no_more_than_what_lives() {
    let mut lru = Lru::new(u64::MAX);
    let all = |operation| Event { time_us: 0, operation, offset_bytes: 0, len_bytes: 1 << 30 };
    lru.event(&all(Operation::Write));
    let most = lru.memory_bytes();
    lru.event(&all(Operation::Discard));
    let mut lru = Lru::new(u64::MAX);
    lru.event(&all(Operation::Write));
    lru.event(&all(Operation::Discard));
    assert!(lru.memory_bytes() < most, "it has shrunk");
    let mut lru = Lru::new(u64::MAX);
    let event = |operation, offset_bytes, len_bytes| Event { time_us: 0, operation, offset_bytes, len_bytes };
    for _ in 0..1000 {
        lru.event(&event(Operation::Write, 1 << 40, 8192));
        lru.event(&event(Operation::Discard, 0, 1 << 42));
    }
    assert_eq!(lru.profile().totals().peak_live_blocks, 2);
    assert_eq!(lru.profile().evicted_blocks(1), 1000);
}
