//! What a request costs: no allocation, and (with `--nocapture`, optimised) how many go through in a second.
//! Alone in its program, because it replaces the allocator by one that counts.

#![allow(clippy::unwrap_used, reason = "a test may end at what it did not expect")]

#[path = "vhost_user_blk/vmm.rs"]
mod vmm;

use spillway_core::GuestBuffers;
use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::sync::atomic::Ordering;
use std::time::Instant;
use vmm::*;

struct Counting;

thread_local! {
    static ALLOCATIONS: Cell<u64> = const { Cell::new(0) };
}

// SAFETY: hands everything to the system's allocator.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.set(ALLOCATIONS.get() + 1);
        // SAFETY: as the caller promises.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        // SAFETY: as the caller promises.
        unsafe { System.dealloc(at, layout) }
    }

    unsafe fn realloc(&self, at: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        ALLOCATIONS.set(ALLOCATIONS.get() + 1);
        // SAFETY: as the caller promises.
        unsafe { System.realloc(at, layout, size) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

const BATCH: u64 = 16;

/// Sets a batch of chains up; they are offered again and again.
fn heads(rig: &mut Rig, kind: u32, indirect: bool, pieces: u32) -> Vec<u16> {
    (0..BATCH)
        .map(|n| {
            let at = SCRATCH + n * 0x4000;
            rig.memory.write(at, &Rig::header(kind, n * 8));
            let mut buffers = vec![(at, 16, false)];
            let len = 4096 / pieces;
            buffers.extend((0..pieces).map(|piece| (at + 0x1000 + u64::from(piece * len), len, kind == 0)));
            buffers.push((at + 16, 1, true));
            rig.driver.chain(&rig.memory, &buffers, indirect.then_some(at + 0x400))
        })
        .collect()
}

fn round(rig: &mut Rig, heads: &[u16], block: &mut [u8; 4096], copy: bool) {
    for &head in heads {
        rig.driver.offer(&rig.memory, head);
    }
    while let Some(request) = rig.frontend.next(0) {
        if copy {
            let _ = match request.operation {
                spillway_core::Operation::Read => rig.frontend.copy_to_guest(request.token, 0, block),
                _ => rig.frontend.copy_from_guest(request.token, 0, block),
            };
        }
        rig.frontend.complete(request.token, Ok(()));
    }
    rig.frontend.publish(0);
    let index = rig.memory.u16(rig.driver.used + 2).load(Ordering::Acquire);
    assert_eq!(index, rig.driver.available_index);
}

#[test]
fn a_request_allocates_nothing() {
    let mut block = [0; 4096];
    for indirect in [false, true] {
        for kind in [0, 1] {
            for pieces in [1, 4] {
                let mut rig = Rig::new(256, ALL_FEATURES);
                rig.driver.want_interrupt(&rig.memory, false);
                let heads = heads(&mut rig, kind, indirect, pieces);
                // Once around, so that room that is used again exists.
                round(&mut rig, &heads, &mut block, true);
                let before = ALLOCATIONS.get();
                let start = Instant::now();
                const ROUNDS: u64 = 20_000;
                for _ in 0..ROUNDS {
                    round(&mut rig, &heads, &mut block, true);
                }
                let took = start.elapsed();
                assert_eq!(ALLOCATIONS.get(), before, "{indirect} {kind} {pieces}");
                let start = Instant::now();
                for _ in 0..ROUNDS {
                    round(&mut rig, &heads, &mut block, false);
                }
                let bare = start.elapsed();
                let each = |took: std::time::Duration| took.as_nanos() as u64 / (ROUNDS * BATCH);
                println!(
                    "indirect {indirect}, {}, pieces {pieces}: {} ns a request with a warm copy, {} ns without",
                    if kind == 0 { "read" } else { "write" },
                    each(took),
                    each(bare)
                );
            }
        }
    }
}
