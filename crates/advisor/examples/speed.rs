//! Blocks a second of the engines on generated traces, beside their memory.
//!
//! `cargo run --release -p spillway-advisor --example speed [BLOCKS]`; `SPILLWAY_SEED` repeats a run. Requests are generated
//! before the clock runs, a slice at a time. The clock is the time that this thread had a processor, so that a busy machine
//! changes less; what others do to caches and memory counts all the same.

#[allow(dead_code, reason = "the tests use more of it")]
#[path = "../tests/common/mod.rs"]
mod common;

use common::generate::{Load, Requests};
use spillway_advisor::curve::limits;
use spillway_advisor::lru::Lru;
use spillway_advisor::policy::Policy;
use spillway_advisor::shards::{Sample, Shards};
use spillway_advisor::trace::{Head, TraceReader, TraceWriter};
use spillway_advisor::{BLOCK_BYTES, Event};
use std::time::Duration;

const SLICE: u64 = 1 << 20;
const DISTINCT: u64 = 4_000_000;

/// How long this thread had a processor.
fn on_processor() -> Duration {
    let text =
        std::fs::read_to_string("/proc/thread-self/schedstat").expect("Linux with scheduler statistics");
    Duration::from_nanos(text.split(' ').next().and_then(|n| n.parse().ok()).expect("nanoseconds first"))
}

/// Runs an engine over so many requests of a load; how long that took.
fn run<E>(load: Load, n: u64, seed: u64, engine: &mut E, mut event: impl FnMut(&mut E, &Event)) -> Duration {
    let mut requests = Requests::new(load, DISTINCT, 30, seed);
    let mut took = Duration::ZERO;
    let mut left = n;
    while left > 0 {
        let slice: Vec<Event> = (0..left.min(SLICE)).map(|_| requests.next()).collect();
        left -= slice.len() as u64;
        let begin = on_processor();
        slice.iter().for_each(|e| event(engine, e));
        took += on_processor() - begin;
    }
    took
}

fn show(load: Load, name: &str, n: u64, took: Duration, bytes: usize) {
    let rate = n as f64 / took.as_secs_f64() / 1e6;
    println!("{:<9} {name:<28} {rate:>7.2} million blocks/s {:>9} KiB", format!("{load:?}"), bytes / 1024);
}

fn main() {
    let n: u64 = std::env::args().nth(1).map_or(20_000_000, |n| n.parse().expect("a number of blocks"));
    let seed = common::seed();
    println!("{n} blocks of {DISTINCT}, 3 in 10 read");
    let disk_bytes = DISTINCT * BLOCK_BYTES;
    for load in [Load::Zipf, Load::Uniform, Load::Scan, Load::Loop, Load::Discards] {
        let mut lru = Lru::new(disk_bytes);
        let took = run(load, n, seed, &mut lru, |e, event| e.event(event));
        show(load, "LRU, exact", n, took, lru.memory_bytes());
        let zero = lru.profile().zero_overflow_bytes();
        for (sample, name) in [
            (Sample { rate: 0.01, most_blocks: None }, "LRU, 1 in 100"),
            (Sample { rate: 0.001, most_blocks: None }, "LRU, 1 in 1000"),
            (Sample { most_blocks: Some(8192), ..Sample::default() }, "LRU, 8,192 blocks"),
        ] {
            let mut shards = Shards::new(disk_bytes, sample);
            let took = run(load, n, seed, &mut shards, |e, event| e.event(event));
            show(load, name, n, took, shards.memory_bytes());
        }
        let mut policy = Policy::new(disk_bytes, &limits(zero, 24), 0.01);
        let took = run(load, n, seed, &mut policy, |e, event| e.event(event));
        show(load, "clock at 24 limits, 1 in 100", n, took, policy.memory_bytes());

        let mut writer = TraceWriter::new(Vec::new(), &Head::new(disk_bytes)).expect("memory");
        let written = n.min(4 * SLICE);
        let took = run(load, written, seed, &mut writer, |w, e| w.push(e).expect("memory"));
        let file = writer.finish().expect("memory");
        show(load, "trace, written", written, took, file.len());
        let begin = on_processor();
        let read = TraceReader::new(&file[..]).expect("just written").filter(Result::is_ok).count() as u64;
        show(load, "trace, read", read, on_processor() - begin, file.len());
    }
}
