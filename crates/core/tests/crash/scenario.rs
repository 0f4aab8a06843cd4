//! What the stopped disk was doing: a fixed course through every part of the core, the same each time.
//!
//! Owns the steps; never looks whether it was stopped before. Invariant: a step makes sense after any number of the
//! earlier ones was cut off in the middle.

use crate::run::{self, Run};
use spillway_core::{BLOCK_BYTES, BLOCK_SECTORS, DiskSpec, Mode, Operation, get};

const WRITE: Operation = Operation::Write { fua: false };
const FUA: Operation = Operation::Write { fua: true };
const ZEROES: Operation = Operation::WriteZeroes { fua: false };
/// Blocks of a region.
const REGION: u64 = 512;

/// Three regions and a bit; the image ends in the middle of a block of the first.
pub fn spec(mode: Mode) -> DiskSpec {
    DiskSpec {
        size_bytes: (3 * REGION + 5) * BLOCK_BYTES as u64 - 512,
        base_bytes: if mode == Mode::Ephemeral { 0 } else { 100 * BLOCK_BYTES as u64 + 1536 },
        // Then the mode without an overflow has space for the working set too.
        ram_limit_bytes: match mode {
            Mode::RamOverflow => 32 * BLOCK_BYTES as u64,
            Mode::Ram => 200 * BLOCK_BYTES as u64,
            Mode::Overflow | Mode::Direct | Mode::Persistent | Mode::Ephemeral => 0,
        },
        ..run::full_spec(mode)
    }
}

pub const STEPS: &[fn(&mut Run)] = &[
    whole_writes,
    partial_writes,
    overwrites,
    repeated_reads,
    collection,
    discards,
    death_while_writing,
    whole_regions,
    lower_limits,
    higher_limits,
    full,
    reset,
    second_generation,
    reset,
];

/// Some of what is under way ends, and a turn goes by.
fn go_on(run: &mut Run, ends: usize) {
    (0..ends).for_each(|_| run.end_operation());
    run.turn();
}

fn blocks(run: &mut Run, operation: Operation, first: u64, n: u64) {
    run.request(operation, first * BLOCK_SECTORS, n * BLOCK_SECTORS);
}

fn whole_writes(run: &mut Run) {
    for block in 0..44 {
        run.write_block(block);
        if block % 4 == 0 {
            go_on(run, 1);
        }
    }
    blocks(run, WRITE, 60, 6);
    blocks(run, FUA, 3 * REGION - 2, 4);
    run.settle();
}

/// Merges with the image, with its end, with slots, with the overflow, with nothing; into the disk's last block.
fn partial_writes(run: &mut Run) {
    for (sector, sectors) in
        [(75 * 8 + 3, 2), (100 * 8 + 1, 5), (3, 1), (43 * 8 + 7, 2), (120 * 8 + 2, 3), (12_323, 2)]
    {
        run.request(WRITE, sector, sectors);
        go_on(run, 1);
        run.request(Operation::Read, sector, sectors);
        run.request(ZEROES, sector + 1, sectors);
    }
    run.request(Operation::Flush, 0, 0);
    run.settle();
}

fn overwrites(run: &mut Run) {
    for block in (0..44).rev().step_by(3) {
        run.write_block(block);
        go_on(run, 1);
        run.write_block(block);
    }
    run.settle();
}

/// What has left RAM is read until it is back, two reads at a time, while the collector and eviction are at work.
fn repeated_reads(run: &mut Run) {
    for i in 0..160 {
        (0..2).for_each(|_| run.read_block(i / 8));
        run.write_block(44 + i * 5 % 40);
        go_on(run, 3);
    }
    run.settle();
}

/// More is written than the file has segments, so that live blocks must move.
fn collection(run: &mut Run) {
    for i in 0..260 {
        run.write_block(i * 37 % 90);
        if i % 3 == 0 {
            go_on(run, 2);
        }
    }
    run.settle();
}

fn discards(run: &mut Run) {
    blocks(run, Operation::Discard, 5, 20);
    run.request(Operation::Discard, 30 * BLOCK_SECTORS + 3, 3 * BLOCK_SECTORS);
    blocks(run, ZEROES, 40, 9);
    run.request(ZEROES, 62 * BLOCK_SECTORS + 3, 3 * BLOCK_SECTORS);
    go_on(run, 1);
    run.settle();
}

/// One more process dies, with writes of the file under way: what comes next waits for the drain.
fn death_while_writing(run: &mut Run) {
    for block in 0..50 {
        run.write_block(block);
        if block % 8 == 0 {
            run.turn();
        }
    }
    run.attach_again();
    for block in 20..70 {
        run.write_block(block);
        if block % 5 == 0 {
            go_on(run, 1);
        }
    }
    run.settle();
}

/// A region that nobody wrote, one that is mapped, one in parts, and their next use.
fn whole_regions(run: &mut Run) {
    blocks(run, ZEROES, REGION, REGION);
    run.write_block(REGION + 7);
    blocks(run, WRITE, 2 * REGION + 3, 2);
    run.settle();
    blocks(run, Operation::Discard, REGION, 2 * REGION);
    run.write_block(2 * REGION + 1);
    blocks(run, ZEROES, 2 * REGION, REGION / 2);
    blocks(run, Operation::Discard, 2 * REGION + REGION / 2, REGION / 2);
    run.settle();
}

fn lower_limits(run: &mut Run) {
    run.set_limit(18 * 8 * BLOCK_BYTES as u64);
    run.set_ram_slots(if run.has_log() { 17 } else { 120 });
    run.settle();
    (0..30).for_each(|block| run.write_block(block));
    run.settle();
}

fn higher_limits(run: &mut Run) {
    run.set_limit(26 * 8 * BLOCK_BYTES as u64);
    run.set_ram_slots(if run.has_log() { 40 } else { 130 });
    (70..100).for_each(|block| run.write_block(block));
    run.settle();
}

/// Until writes wait; some of what is there is written again; space is made; the rest is canceled.
fn full(run: &mut Run) {
    for block in 100..300 {
        run.write_block(block);
        if block % 4 == 0 {
            go_on(run, 3);
        }
    }
    run.rest();
    for block in (0..100).step_by(7) {
        run.write_block(block);
        go_on(run, 2);
    }
    run.rest();
    blocks(run, Operation::Discard, 40, 16);
    run.rest();
    run.cancel();
}

fn reset(run: &mut Run) {
    run.reset();
    // The memory of what was is on its way back while there is something new.
    for block in [3, 4, REGION + 2, 5] {
        run.write_block(block);
        run.turn();
    }
    run.settle();
}

fn second_generation(run: &mut Run) {
    for block in 0..60 {
        run.write_block(2 * block);
        go_on(run, 1);
    }
    run.settle();
}

/// The scenario, not stopped, has been everywhere.
pub fn check_coverage(run: &mut Run, mode: Mode) {
    let c = run.counters();
    let mut all = vec![&c.discard_bytes, &c.discards, &c.write_zeroes, &c.flushes, &c.restarts];
    if mode == Mode::Ephemeral {
        all.push(&c.merges_overflow_bytes);
    } else {
        all.extend([&c.resets, &c.merges_base_bytes]);
    }
    if mode.has_log() {
        all.extend([
            &c.collector_moved_blocks,
            &c.segments_punched,
            &c.stalls,
            &c.merges_overflow_bytes,
            &c.summaries,
        ]);
    }
    if mode == Mode::RamOverflow {
        all.extend([&c.evictions_background, &c.evictions_urgent, &c.promoted_blocks]);
    }
    let counts: Vec<u64> = all.into_iter().map(get).collect();
    assert!(!counts.contains(&0), "{mode}: {counts:?}");
}
