//! What a connection holds, counted by the allocator: at rest, in flow, with a client that does not read, with a
//! full disk. One test, so that nobody else allocates meanwhile.
#![allow(clippy::unwrap_used)]

mod common;

use common::wire::*;
use common::{Bench, Pace, info};
use spillway_export::nbd::Budget;
use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

struct Counting;

static LIVE: AtomicUsize = AtomicUsize::new(0);
static PEAK: AtomicUsize = AtomicUsize::new(0);

// SAFETY: every call goes to the system's allocator with the arguments as they came.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        PEAK.fetch_max(LIVE.fetch_add(layout.size(), Relaxed) + layout.size(), Relaxed);
        // SAFETY: as the caller promised.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        LIVE.fetch_sub(layout.size(), Relaxed);
        // SAFETY: as the caller promised.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

const KIB: usize = 1 << 10;
const MIB: usize = 1 << 20;

/// What is live more than `before`, and the most that was since the last call.
fn grown(before: usize) -> (usize, usize) {
    let live = LIVE.load(Relaxed);
    let peak = PEAK.swap(live, Relaxed);
    (live - before, peak - before)
}

#[test]
fn a_connection_holds_little_and_gives_it_back() {
    for structured in [true, false] {
        one_connection(structured);
    }
    many_connections();
}

fn one_connection(structured: bool) {
    let data = vec![1; 32 * MIB];
    for len in [512, 4 * KIB, 4 * KIB + 512, 64 * KIB, MIB, 4 * MIB, 32 * MIB] {
        let reads = request(0, READ, 1, 0, len as u32).repeat((128 * MIB / len).min(4096));
        let writes = write(0, 1, 0, &data[..len]).repeat((96 * MIB / len).min(8192));
        for full in [false, true] {
            let mut bench = Bench::negotiated(32 * MIB, structured, false);
            bench.disk.keep_log = false;
            bench.received = Vec::with_capacity(130 * MIB);
            bench.disk.waiting = Vec::with_capacity(32 << 10);
            bench.shrink_socket();
            bench.connection.set_disk_full(full);
            bench.connection.release_idle_memory();
            bench.receive();
            let before = LIVE.load(Relaxed) - 64 * KIB;
            let (idle, _) = grown(before);
            assert!(idle < 72 * KIB, "{idle} at rest after the handshake");

            // A client that does not read, and long reads of clients of the old kind, which are gathered.
            bench.send_until_stuck(&reads);
            let (_, peak) = grown(before);
            let gathers = !structured && len == 4 * MIB;
            let most = if gathers { 4 * MIB + 512 * KIB } else { 3 * MIB };
            assert!(peak < most, "reads of {len}, structured: {structured}: {peak}");
            assert!(!gathers || peak > 4 * MIB, "{peak}");
            bench.settle();
            bench.received.clear();
            grown(before);

            // Writes that wait.
            bench.disk.pace = Pace::Later;
            bench.send_until_stuck(&writes);
            let (_, peak) = grown(before);
            let most = if full { 6 * MIB } else { 3 * MIB };
            assert!(peak < most, "writes of {len}, disk full: {full}: {peak}");
            if full && len > 4 * KIB {
                assert!(
                    peak > 4 * MIB - 512 * KIB,
                    "writes of {len} are taken in while the disk is full: {peak}"
                );
            }
            bench.disk.pace = Pace::AtOnce;
            bench.connection.set_disk_full(false);
            let waiting: Vec<_> = bench.disk.waiting.drain(..).collect();
            for request in waiting {
                bench.disk.submit(&mut bench.connection, request);
            }
            bench.settle();
            bench.connection.release_idle_memory();
            // Half a write may be there still.
            let (idle, _) = grown(before);
            assert!(idle < 64 * KIB + 256 * KIB + 150 * KIB, "{idle} at rest after writes of {len}");
        }
    }
}

/// Together they hold no more than the budget, and one piece each; and none of them is stopped by the others.
fn many_connections() {
    const CLIENTS: usize = 18;
    let before = LIVE.load(Relaxed);
    let budget = Budget::new();
    let mut benches: Vec<Bench> = (0..CLIENTS)
        .map(|n| {
            let mut bench = Bench::sharing(info(32 * MIB), &budget);
            bench.agree(n % 2 == 0, false);
            bench.disk.bytes = Vec::new();
            bench.disk.waiting = Vec::with_capacity(32 << 10);
            bench.disk.keep_log = false;
            bench.disk.pace = Pace::Later;
            bench.shrink_socket();
            bench.connection.set_disk_full(true);
            bench
        })
        .collect();
    grown(before);
    let data = vec![1; 32 * MIB];
    let write = write(0, 1, 0, &data);
    let read = request(0, READ, 2, 0, 4 << 20);
    let (idle, _) = grown(before);
    for (n, bench) in benches.iter_mut().enumerate() {
        match n % 3 {
            0 => bench.send_until_stuck(&read),
            _ => bench.send_until_stuck(&write),
        };
        assert!(!bench.disk.waiting.is_empty(), "{n} cannot go on");
    }
    let (live, peak) = grown(before);
    // Of the three readers without structured replies two find space to gather.
    let most = (4 + 8) * MIB + CLIENTS * (512 + 64) * KIB;
    assert!(peak - idle < most, "{}", peak - idle);
    assert!(live - idle > 4 * MIB && budget.used_bytes() <= 4 * MIB + CLIENTS * 512 * KIB);
    assert_eq!(budget.gathered_bytes(), 8 * MIB);
    drop(benches);
    assert_eq!((budget.used_bytes(), budget.gathered_bytes(), budget.kept_bytes()), (0, 0, 0));
}
