//! The model test: the true core against a plain record of what was written, with the same random operations,
//! faults, crashes and attaches.
//!
//! `SPILLWAY_MODEL_OPS` says how many operations (default 1,000,000), `SPILLWAY_SEED` where to begin. A failure
//! prints the seed of its episode: `SPILLWAY_SEED=... SPILLWAY_MODEL_OPS=1` runs that episode again.

mod canary;
mod medium;
mod oracle;
mod rng;
#[allow(dead_code, reason = "the crash tests use more of it")]
mod run;
mod sim;

use rng::Rng;
use run::Run;
use spillway_core::{DataMemory, DiskSpec, Errno, Event, Level, LogShape, Mode, Operation, get};
use std::collections::BTreeMap;
use std::panic::AssertUnwindSafe;

/// Operations in one episode: one disk, from birth to end. A large disk has fewer.
const EPISODE: u64 = 20_000;

fn episode(seed: u64, tally: &mut BTreeMap<&'static str, u64>) -> u64 {
    let mut run = Run::new(seed);
    let mut steps = 0;
    while run.next < if run.is_large() { EPISODE / 10 } else { EPISODE } {
        run.step();
        steps += 1;
        if steps % 1_000 == 0 {
            run.check();
        }
    }
    run.read_all();
    run.sim.tally.iter().for_each(|(what, n)| *tally.entry(what).or_default() += n);
    *tally.entry("promoted").or_default() += get(&run.counters().promoted_blocks);
    run.next
}

/// A tier larger than what the eviction hand passes in one turn, all of it hot: a burst that needs space gets it
/// without anything else happening.
#[test]
fn a_hot_tier_makes_room_for_a_burst() {
    let mut run = Run::with(run::hot_spec(), 7);
    for _ in 0..5 {
        (0..18_000).for_each(|block| run.write_block(block));
        run.rest();
    }
    (30_000..36_000).for_each(|block| run.write_block(block));
    run.rest();
    assert_eq!(run.unfinished(), 0, "writes were left behind");
    run.check();
}

/// Once RAM and log are full, what is there can still be written again, any number of times.
#[test]
fn a_full_disk_takes_overwrites() {
    for mode in [Mode::RamOverflow, Mode::Overflow] {
        let mut run = Run::with(run::full_spec(mode), 11);
        let mut there = 0;
        loop {
            run.write_block(there);
            run.rest();
            if run.unfinished() > 0 {
                break;
            }
            there += 1;
        }
        run.cancel();
        assert!((112..=144).contains(&there), "{there} of 16 segments' worth and 32 slots");
        for block in (0..there).chain((0..there).rev()).chain((0..there).step_by(7)) {
            run.write_block(block);
            run.rest();
            assert_eq!(run.unfinished(), 0, "{mode}: block {block} of {there} cannot be written again");
        }
        run.check();
        run.read_all();
    }
}

/// A write that is canceled while it has all the operations under way that it may have ends with them, though
/// there is no space for the rest of it.
#[test]
fn a_withdrawn_write_begins_nothing_more() {
    let shape = LogShape { segment_blocks: 64, part_blocks: 32 };
    let limit = 24 * 64 * 4096;
    let spec = DiskSpec {
        shape,
        overflow_limit_bytes: limit,
        size_bytes: 1 << 23,
        ..run::full_spec(Mode::Overflow)
    };
    let mut run = Run::with(spec, 5);
    run.write_blocks(0, 16 * 63 - 80);
    run.rest();
    assert_eq!(run.unfinished(), 0);
    run.write_blocks(1100, 200);
    run.withdraw_at_once();
    assert_eq!(run.unfinished(), 0, "it waits for space that nobody will make");
    run.check();
}

/// Writes that fail go to other segments; when they go on failing the disk is degraded, RAM keeps what is not
/// written, and the first write that succeeds ends that. Each is said once.
#[test]
fn a_file_that_cannot_be_written_degrades_the_disk_until_it_can() {
    let mut run = Run::with(run::full_spec(Mode::RamOverflow), 3);
    run.sim().failing_writes = u32::MAX;
    (0..40).for_each(|block| run.write_block(block));
    run.settle();
    let degraded = Event::Degraded(Errno::IO);
    assert_eq!((run.seen(degraded), get(&run.counters().degraded)), (1, 1));
    assert_eq!(get(&run.counters().ram_used_bytes), 32 * 4096, "RAM keeps what cannot be written");
    assert_eq!((run.unfinished(), get(&run.counters().failed)), (8, 0), "the rest waits");
    run.sim().failing_writes = 0;
    run.settle();
    assert_eq!((run.unfinished(), run.seen(degraded), run.seen(Event::Recovered)), (0, 1, 1));
    assert_eq!(get(&run.counters().degraded), 0);
    run.check();
    run.read_all();
}

/// Who stops waits for no background eviction; a write that waits for a slot still gets one.
#[test]
fn a_disk_that_winds_down_evicts_for_those_alone_who_wait() {
    for winds_down in [false, true] {
        let mut run = Run::with(run::full_spec(Mode::RamOverflow), 3);
        (0..32).for_each(|block| run.write_block(block));
        if winds_down {
            run.wind_down();
        }
        run.settle();
        assert_eq!(run.overflow_writes() == 0, winds_down);
        (32..50).for_each(|block| run.write_block(block));
        run.settle();
        assert_eq!((run.unfinished(), get(&run.counters().evictions_blocks) >= 18), (0, true));
        run.check();
        run.read_all();
    }
}

/// What an earlier process has told of is not told again, and what it has told of and is over is told.
#[test]
fn states_are_told_once_whatever_dies() {
    let mut run = Run::with(run::full_spec(Mode::Ram), 3);
    let again = |run: &mut Run| {
        run.attach_again();
        run.set_thresholds(50, 95);
        run.settle();
    };
    run.set_thresholds(50, 95);
    (0..18).for_each(|block| run.write_block(block));
    run.settle();
    assert_eq!(run.levels(), [Level::Warning]);
    (0..3).for_each(|_| again(&mut run));
    run.discard(0, 3);
    run.settle();
    again(&mut run);
    assert_eq!(run.levels(), [Level::Warning], "47% is within the hysteresis of 50%");
    (18..40).for_each(|block| run.write_block(block));
    run.settle();
    assert_eq!((run.levels().len(), run.seen(Event::Full), run.seen(Event::SpaceAvailable)), (2, 1, 0));
    again(&mut run);
    assert_eq!((run.levels().len(), run.seen(Event::Full), run.seen(Event::SpaceAvailable)), (2, 1, 0));
    run.discard(0, 40);
    run.settle();
    assert_eq!(run.levels(), [Level::Warning, Level::Critical, Level::Normal]);
    assert_eq!((run.seen(Event::Full), run.seen(Event::SpaceAvailable)), (1, 1));
    run.check();

    // Full without anybody who waits: that there is space needs no write to show.
    let mut run = Run::with(run::full_spec(Mode::Overflow), 3);
    (0..160).for_each(|block| run.write_block(block));
    run.settle();
    assert_eq!((run.seen(Event::Full), run.seen(Event::SpaceAvailable)), (1, 0));
    run.withdraw_at_once();
    run.attach_again();
    run.settle();
    run.discard(0, 100);
    run.settle();
    assert_eq!((run.unfinished(), run.seen(Event::Full), run.seen(Event::SpaceAvailable)), (0, 1, 1));
    run.check();

    let mut run = Run::with(run::full_spec(Mode::RamOverflow), 3);
    run.sim().failing_writes = u32::MAX;
    (0..40).for_each(|block| run.write_block(block));
    run.settle();
    run.attach_again();
    run.settle();
    let degraded = Event::Degraded(Errno::IO);
    assert_eq!((run.seen(degraded), get(&run.counters().degraded)), (1, 1));
    run.sim().failing_writes = 0;
    (40..60).for_each(|block| run.write_block(block));
    run.settle();
    assert_eq!((run.seen(degraded), run.seen(Event::Recovered), get(&run.counters().degraded)), (1, 1, 0));
    run.check();

    let mut run = Run::with(run::full_spec(Mode::Overflow), 3);
    run.sim().no_space = true;
    for round in 0..3 {
        (0..20).for_each(|block| run.write_block(block));
        run.settle();
        assert_eq!((run.seen(Event::Full), run.seen(Event::SpaceAvailable)), (1, 0), "{round}");
        run.attach_again();
        run.settle();
    }
    run.sim().no_space = false;
    run.write_block(0);
    run.settle();
    assert_eq!((run.seen(Event::Full), run.seen(Event::SpaceAvailable)), (1, 1));
    run.check();
}

/// What fails at one place of the file is written at another, again and again.
#[test]
fn a_bad_spot_of_the_file_costs_a_segment_and_no_more() {
    for mode in [Mode::RamOverflow, Mode::Overflow] {
        // The last time the next segment begins with a bad sector too.
        for (bad_segment, bad_bytes) in [(0, 512), (1, 512), (5, 512), (3, 7 * 4096 + 512)] {
            let mut run = Run::with(run::full_spec(mode), 3);
            let segment_bytes = 8 * 4096;
            let start = bad_segment * segment_bytes + 4096;
            run.sim().bad_spot = start..start + bad_bytes;
            for round in 0..40 {
                for block in 0..90 {
                    run.write_block((block * 7 + round) % 90);
                    run.turn();
                }
                run.settle();
                assert_eq!(run.unfinished(), 0, "{mode}: all goes on");
            }
            let c = run.counters();
            let (errors, failed, segments) = (
                get(&c.overflow_write_errors),
                get(&c.failed),
                get(&c.overflow.written_bytes) / segment_bytes,
            );
            assert!(segments > 300, "{segments} segments were written");
            let most = if bad_bytes == 512 { 5 } else { 20 };
            assert!((1..most).contains(&errors), "{mode}: {errors} tries at the bad spot");
            assert_eq!((failed, run.seen(Event::Degraded(Errno::IO))), (0, 0));
            run.check();
            run.read_all();
        }
    }
}

/// On a full file system what the file holds already can be written over: a place that it does not hold, and that was
/// tried in vain, is not tried before those.
#[test]
fn a_full_file_system_leaves_what_the_file_holds() {
    let mut run = Run::with(run::full_spec(Mode::Overflow), 3);
    // Twelve segments, in order.
    (0..84).for_each(|block| run.write_block(block));
    run.settle();
    run.sim().no_new_space = true;
    for round in 0..6 {
        (0..7).for_each(|n| run.write_block(200 + round * 7 + n));
        run.turn();
        // While that fails, two segments fall empty: one may not do for parts that come in another order.
        run.discard(round * 14, 14);
        run.settle();
        assert_eq!(run.unfinished(), 0, "{round}");
    }
    let c = run.counters();
    let (errors, failed) = (get(&c.overflow_write_errors), get(&c.failed));
    assert!((1..=4).contains(&errors) && failed == 0, "{errors} tries where nothing can be written");
    run.check();
    run.read_all();
}

/// While all writes of mode `overflow` fail, they wait, and are tried now and then: that they wait is said once, and once
/// that they do no longer.
#[test]
fn writes_that_are_tried_again_and_again_are_told_of_once() {
    let mut run = Run::with(run::full_spec(Mode::Overflow), 3);
    run.sim().no_space = true;
    for _ in 0..3 {
        (0..20).for_each(|block| run.write_block(block));
        run.settle();
    }
    let tries = get(&run.counters().overflow_write_errors);
    assert!(tries > 10, "{tries} tries");
    let (unfinished, c) = (run.unfinished() as u64, run.counters());
    assert!(unfinished > 0);
    let (waiting, stalls, ns) = (get(&c.waiting), get(&c.stalls), get(&c.stalls_ns));
    assert_eq!(
        (waiting, get(&c.inflight)),
        (20, unfinished),
        "of each block one write, the others wait behind it"
    );
    assert!(stalls == waiting && ns > 0, "{stalls} stalls, {ns} ns");
    assert_eq!((run.seen(Event::Full), run.seen(Event::SpaceAvailable)), (1, 0));
    run.sim().no_space = false;
    run.settle();
    assert_eq!((run.unfinished(), run.seen(Event::Full), run.seen(Event::SpaceAvailable)), (0, 1, 1));
    run.check();
}

/// Whoever goes while it waits has waited until then, and no longer.
#[test]
fn what_is_withdrawn_has_waited_until_then() {
    let mut run = Run::with(run::full_spec(Mode::Overflow), 3);
    run.sim().no_space = true;
    (0..20).for_each(|block| run.write_block(block));
    run.settle();
    assert_eq!(get(&run.counters().waiting), 20);
    let before = get(&run.counters().stalls_ns);
    run.cancel_all_after(1_000_000_000);
    let c = run.counters();
    assert_eq!((get(&c.waiting), get(&c.stalls_ns) - before), (0, 20_000_000_000));
    (0..3).for_each(|_| _ = run.turn());
    assert_eq!(get(&run.counters().stalls_ns) - before, 20_000_000_000);
}

/// In mode `overflow` a write is tried in three segments before its request fails; a read fails for its request.
#[test]
fn a_fault_of_the_file_costs_one_request_at_most() {
    let mut run = Run::with(run::full_spec(Mode::Overflow), 3);
    for (failing, failed) in [(1, 0), (2, 0), (3, 1)] {
        run.sim().failing_writes = failing;
        run.write_block(0);
        run.settle();
        assert_eq!((run.unfinished(), get(&run.counters().failed)), (0, failed), "{failing} writes failed");
    }
    run.write_block(0);
    run.settle();
    run.sim().failing_reads = 1;
    run.read_block(0);
    run.settle();
    run.read_block(0);
    run.settle();
    assert_eq!((run.unfinished(), get(&run.counters().failed)), (0, 2), "the second read succeeds");
    assert_eq!(get(&run.counters().overflow_read_errors), 1);
    assert_eq!(run.seen(Event::OverflowReadFailed(Errno::IO)), 1);
    run.check();
}

/// Of two reads of a block that are under way, the first to end brings it back to RAM: what the second has read is
/// checked all the same.
#[test]
fn a_read_that_a_promotion_overtakes_is_checked() {
    let mut run = Run::with(run::full_spec(Mode::RamOverflow), 3);
    (0..60).for_each(|block| run.write_block(block));
    run.settle();
    let promoted = |run: &mut Run| get(&run.counters().promoted_blocks);
    for _ in 0..2 {
        run.read_block(0);
        run.settle();
    }
    (0..2).for_each(|_| run.read_block(0));
    while promoted(&mut run) == 0 {
        run.end_operation();
    }
    assert_eq!(run.unfinished(), 1, "the other read is under way");
    run.sim().damaged_reads = 1;
    run.settle();
    let c = run.counters();
    assert_eq!((get(&c.checksum_mismatches), get(&c.failed), get(&c.guest.reads)), (1, 1, 3));
    let read = get(&c.overflow.reads);
    run.read_block(0);
    assert_eq!((run.unfinished(), get(&run.counters().overflow.reads)), (0, read), "it is in RAM");
    run.check();
    run.read_all();
}

/// Promotions, however many while eviction does nothing, leave writes half of the slots that it keeps free.
#[test]
fn promotions_leave_slots_to_writes() {
    let spec = DiskSpec { ram_limit_bytes: 100 * 4096, ..run::full_spec(Mode::RamOverflow) };
    let mut run = Run::with(spec, 3);
    (0..150).for_each(|block| run.write_block(block));
    run.settle();
    for block in (0..40).flat_map(|block| [block; 3]) {
        run.read_block(block);
        while run.unfinished() > 0 {
            run.end_operation();
        }
    }
    let promoted = get(&run.counters().promoted_blocks);
    assert!((1..=5).contains(&promoted), "{promoted} promoted into 10 free slots");
    let stalls = get(&run.counters().stalls);
    (200..205).for_each(|block| run.write_block(block));
    assert_eq!((run.unfinished(), get(&run.counters().stalls)), (0, stalls));
    run.settle();
    run.check();
    run.read_all();
}

/// The barrier punches the file's last block, as the process found it: until it has ended the log must not grow to
/// where that is.
#[test]
fn a_limit_does_not_grow_while_a_drain_is_under_way() {
    let mut run = Run::with(run::full_spec(Mode::Overflow), 9);
    run.write_block(0);
    run.rest();
    run.attach_again();
    let larger = 48 * 8 * 4096;
    assert!(!run.set_limit(larger), "the segment that was open waits for a drain");
    assert!(run.set_limit(20 * 8 * 4096), "less is no danger");
    run.rest();
    assert!(run.set_limit(larger));
    run.check();
}

/// Who resets a disk whose worker has just died need not wait for the barrier: the new generation leaves alone what the
/// dead one may still write to, also after another death.
#[test]
fn a_reset_after_a_death_does_not_wait_for_the_barrier() {
    let mut haunted = 0;
    for seed in 0..200 {
        let mode = if seed % 2 == 0 { Mode::RamOverflow } else { Mode::Overflow };
        let mut run = Run::with(run::full_spec(mode), seed);
        let write = |run: &mut Run, n: u64, ends: u64| {
            (0..n).for_each(|block| run.write_block(block * 7 % n));
            for _ in 0..ends {
                run.turn();
                run.end_operation();
            }
        };
        write(&mut run, 100, seed % 40);
        for _ in 0..=seed % 3 {
            run.attach_again();
            haunted += u64::from(run.reset_meanwhile());
            write(&mut run, 150, seed % 7);
        }
        run.settle();
        run.check();
        run.read_all();
        // With nothing left in it, all of the file is there again but for what is open.
        run.discard(0, 512);
        run.settle();
        let file = get(&run.counters().overflow_file_bytes);
        assert!(file <= 2 * 8 * 4096, "seed {seed}: {file} bytes in the file");
        assert_eq!((run.unfinished(), run.sim.is_haunted()), (0, false), "seed {seed}");
    }
    assert!(haunted > 100, "{haunted}");
}

/// The same while writes wait for space, which is why a disk is reset most often; they fail.
#[test]
fn nor_does_one_by_force_of_a_full_disk() {
    let mut before = 0;
    for seed in 0..40 {
        let mut run = Run::with(run::full_spec(Mode::RamOverflow), seed);
        (0..250).for_each(|block| run.write_block(block));
        run.rest();
        assert!(run.unfinished() > 0, "it is not full");
        // Its VMM has them done again.
        run.die();
        run.attach();
        run.redo();
        before += u64::from(run.reset_by_force());
        (0..100).for_each(|block| run.write_block(block));
        run.rest();
        assert_eq!(run.unfinished(), 0, "seed {seed}");
        run.read_all();
        run.check();
    }
    assert!(before > 30, "{before} of 40");
}

/// Both limits change, or neither; also while the overflow must not grow.
#[test]
fn of_two_limits_none_changes_when_one_is_refused() {
    let spec = DiskSpec { ram_limit_bytes: 64 * 4096, ..run::full_spec(Mode::RamOverflow) };
    let mut run = Run::with(spec, 3);
    (0..100).for_each(|block| run.write_block(block));
    run.rest();
    let overflow = |segments: u64| segments * 8 * 4096;
    for (slots, segments, granted) in
        [(129, 20, false), (15, 48, false), (20, 17, false), (20, 24, true), (60, 20, true), (60, 24, true)]
    {
        assert_eq!(
            run.set_limits(slots * 4096, overflow(segments)),
            granted,
            "{slots} slots, {segments} segments"
        );
        run.rest();
    }
    run.attach_again();
    assert!(!run.set_limits(129 * 4096, overflow(20)) && !run.set_limits(64 * 4096, overflow(25)));
    run.rest();
    assert!(run.set_limits(64 * 4096, overflow(48)), "the drain is done");
    run.check();
    run.read_all();
}

/// While nothing in the RAM tier can leave it, as old content is awaited for all of it, the disk sleeps.
#[test]
fn eviction_sleeps_while_the_whole_tier_waits_for_old_content() {
    let spec = run::full_spec(Mode::RamOverflow);
    let mut run = Run::with(DiskSpec { base_bytes: spec.size_bytes, ..spec }, 3);
    (0..40).for_each(|block| run.request(Operation::Write { fua: false }, block * 8 + 1, 2));
    assert!((0..50).any(|_| !run.turn()), "it goes on and on");
    assert_eq!((run.unfinished(), get(&run.counters().ram_used_bytes)), (40, 32 * 4096));
    run.settle();
    assert_eq!(run.unfinished(), 0);
    run.check();
    run.read_all();
}

/// In mode `direct` a reset gives the file's space back, also when a death cuts it off, and when the file system could not the
/// last time.
#[test]
fn a_reset_leaves_nothing_in_the_difference_file() {
    let spec = DiskSpec { overflow_limit_bytes: 0, ..run::full_spec(Mode::Direct) };
    let is_empty = |run: &mut Run| run.sim.file.iter().all(|&byte| byte == 0);
    let write = |run: &mut Run| {
        (0..40).for_each(|block| run.write_block(block));
        run.rest();
        assert_eq!((run.unfinished(), is_empty(run)), (0, false));
    };
    let cut_off = |seed: u64| {
        let mut run = Run::with(spec, seed);
        write(&mut run);
        run.cut_off_reset();
        run.rest();
        assert!(is_empty(&mut run), "cut off, seed {seed}");
        run
    };
    // Of some the dead process's punch lands, of some it does not.
    (1..16).for_each(|seed| drop(cut_off(seed)));
    let mut run = cut_off(16);
    write(&mut run);
    run.sim.no_punching = true;
    run.reset();
    run.rest();
    assert!(!is_empty(&mut run));
    run.sim.no_punching = false;
    run.reset();
    assert!(is_empty(&mut run), "the second try");
    write(&mut run);
    run.attach_again();
    run.rest();
    assert!(!is_empty(&mut run), "what lives there stays");
    run.check();
    run.read_all();
}

/// In mode `persistent` a reset is there after whatever follows it, whole; cut off anywhere it is whole or nothing; and what
/// was flushed after it counts.
#[test]
fn a_reset_of_a_persistent_disk_outlives_power_losses() {
    let mut losses = BTreeMap::new();
    for seed in 0..400 {
        let base_bytes = 40 * 4096;
        let spec = DiskSpec { overflow_limit_bytes: 0, base_bytes, ..run::full_spec(Mode::Persistent) };
        let mut run = Run::with(spec, seed);
        (0..60).for_each(|block| run.write_block(block));
        run.settle();
        run.flush();
        run.settle();
        let whole = seed % 2 == 0 && run.reset_at_once();
        if whole && seed % 4 == 0 {
            (20..30).for_each(|block| run.write_block(block));
            run.settle();
            if seed % 8 == 0 {
                run.flush();
                run.settle();
            }
        } else if !whole {
            run.reset();
        }
        run.lose_all(seed % 3 > 0);
        run.read_all();
        run.check();
        *losses.entry(whole).or_insert(0) += 1;
    }
    assert!(losses[&true] > 100 && losses[&false] > 100, "{losses:?}");
}

/// Once the mark of a reset is off the medium, which needs no FLUSH, writes that completed after it outlive the death of all
/// processes; also if the process died just after the reset.
#[test]
fn writes_after_a_reset_outlive_all_processes_without_a_flush() {
    for seed in 0..200 {
        let base_bytes = 40 * 4096;
        let spec = DiskSpec { overflow_limit_bytes: 0, base_bytes, ..run::full_spec(Mode::Persistent) };
        let mut run = Run::with(spec, seed);
        (0..60).for_each(|block| run.write_block(block));
        run.settle();
        run.reset_at_once();
        if seed % 2 == 0 {
            run.attach_again();
        }
        run.rest();
        run.forget_mark();
        (20..30).for_each(|block| run.write_block(block));
        run.settle();
        run.lose_all(false);
        run.read_all();
        run.check();
    }
}

/// There are so many requests at once that it takes many turns to find which of them overlap. In some runs a part of them is
/// canceled meanwhile, or the process dies.
#[test]
fn a_thousand_requests_at_once_keep_their_order() {
    for (seed, mode) in (0..24).zip(Mode::ALL.into_iter().cycle()) {
        let mut run = Run::with(run::full_spec(mode), seed);
        (0..1_500).for_each(|_| run.submit());
        for _ in 0..seed {
            run.turn();
            run.end_operation();
        }
        match seed % 4 {
            0 => run.crash(),
            1 => run.cancel_some(),
            _ => {}
        }
        run.settle();
        run.read_all();
        run.check();
    }
}

/// A queue stops while the base image cannot be read: what waits for it, and what waits behind that, is not done, and is done
/// when the queue starts again. In each mode, and whatever the requests are.
#[test]
fn a_stop_does_not_wait_for_the_base_image() {
    for (seed, mode) in (0..60).zip(Mode::ALL.into_iter().filter(|&m| m != Mode::Ephemeral).cycle()) {
        let spec = run::full_spec(mode);
        let mut run = Run::with(DiskSpec { base_bytes: spec.size_bytes, ..spec }, seed);
        run.sim.base_is_away = true;
        // Reads, parts of blocks, what overlaps, zeroes, and a FLUSH behind them.
        for round in 0..4 {
            for (operation, at, sectors) in [
                (Operation::Read, 0, 40),
                (Operation::Write { fua: false }, 3, 2),
                (Operation::Write { fua: true }, 4, 9),
                (Operation::Read, 0, 16),
                (Operation::WriteZeroes { fua: false }, 11, 3),
                (Operation::Discard, 0, 32),
                (Operation::Flush, 0, 0),
            ] {
                // Of the queue that stops.
                run.next += run.next % 2;
                run.request(operation, if sectors == 0 { 0 } else { round * 64 + at }, sectors);
            }
        }
        while run.turn() || !run.sim.reads_only_base() {
            run.end_operation();
        }
        assert!(run.unfinished() > 20, "seed {seed}");
        run.stop();
        assert_eq!(run.unfinished(), 0, "seed {seed}");
        for _ in 0..seed % 3 {
            run.redo();
            run.turn();
            run.stop();
        }
        run.sim.base_is_away = false;
        if seed % 2 == 0 {
            run.settle();
        }
        run.redo();
        run.settle();
        let (unfinished, c) = (run.unfinished(), run.counters());
        // 4 of each were asked for.
        let counted = [&c.guest.reads, &c.guest.writes, &c.discards, &c.write_zeroes, &c.flushes].map(get);
        assert_eq!((unfinished, get(&c.failed), counted), (0, 0, [8, 8, 4, 4, 4]), "seed {seed}");
        run.read_all();
        run.check();
    }
}

/// However often a device is reset while the image cannot be read, a bounded number of reads is under way.
#[test]
fn reads_of_the_base_image_that_nobody_waits_for_are_bounded() {
    let spec = run::full_spec(Mode::Ram);
    let mut run = Run::with(DiskSpec { base_bytes: spec.size_bytes, ..spec }, 1);
    run.sim.base_is_away = true;
    while run.unfinished() == 0 {
        run.next += run.next % 2;
        run.read_block(0);
        run.turn();
        run.stop();
        run.forget_cut_off();
    }
    assert_eq!(run.sim.under_way(), (16 << 10) + 1, "the last one is waited for");
    run.sim.base_is_away = false;
    run.settle();
    assert_eq!(run.unfinished(), 0);
    run.check();
}

/// The kernel reports once that content could not be written. If the round after a reset hears it, or a FLUSH whose client has
/// gone, or a barrier, the next FLUSH says so; or the stop.
#[test]
fn an_error_that_nobody_heard_is_that_of_the_next_flush() {
    for (seed, mode) in (0..60).zip([Mode::Persistent, Mode::Direct, Mode::Ephemeral].into_iter().cycle()) {
        let spec = DiskSpec { overflow_limit_bytes: 0, base_bytes: 40 * 4096, ..run::full_spec(mode) };
        let base_bytes = if mode == Mode::Ephemeral { 0 } else { spec.base_bytes };
        let mut run = Run::with(DiskSpec { base_bytes, ..spec }, seed);
        run.write_block(3);
        run.rest();
        match seed % 4 {
            0 if mode == Mode::Persistent => {
                run.reset_at_once();
                run.write_block(3);
                while run.unfinished() > 0 {
                    run.end_operation();
                }
                run.turn();
                run.fail_all();
            }
            0 | 1 => {
                run.flush();
                run.cancel_all();
                run.fail_all();
            }
            _ => {
                run.attach_again();
                run.turn();
                run.fail_all();
            }
        }
        run.settle();
        let failed = get(&run.counters().failed);
        // A stop says so too; after an upgrade, the next worker.
        if mode == Mode::Persistent && seed % 2 == 0 {
            assert_eq!(run.try_make_durable(), Err(Errno::IO), "seed {seed}");
        }
        if seed % 8 < 4 {
            run.attach_again();
        }
        // What was lost is of no interest after a reset.
        let is_reset = seed % 5 == 0 && mode != Mode::Ephemeral && run.reset_at_once();
        // A write through promises its own bytes: it neither fails nor takes the error.
        for block in 20..22 {
            run.request(Operation::Write { fua: true }, block * 8, 8);
            run.settle();
            assert_eq!(get(&run.counters().failed), failed, "seed {seed}");
        }
        for _ in 0..2 {
            run.flush();
            run.settle();
            assert_eq!(get(&run.counters().failed), failed + u64::from(!is_reset), "seed {seed}");
        }
        run.check();
    }
}

/// FUA zeroes over parts of blocks that were zero already, which the medium does not know yet.
#[test]
fn durable_zeroes_outlive_a_power_loss_where_there_was_nothing_to_write() {
    for seed in 0..40 {
        let base_bytes = 40 * 4096;
        let spec = DiskSpec { overflow_limit_bytes: 0, base_bytes, ..run::full_spec(Mode::Persistent) };
        let mut run = Run::with(spec, seed);
        // Part of one block; parts of two.
        for (sector, sectors) in [(43, 3), (83, 8)] {
            run.discard(sector / 8, 2);
            run.settle();
            run.request(Operation::WriteZeroes { fua: true }, sector, sectors);
            run.settle();
            assert_eq!(run.unfinished(), 0);
        }
        run.lose_all(true);
        run.read_all();
        run.check();
    }
}

/// Who stops right after a worker's death waits for what that may still write to the map, and then all of it is kept.
#[test]
fn a_stop_after_a_death_keeps_everything() {
    let mut haunted = 0;
    for seed in 0..300 {
        let spec = DiskSpec { overflow_limit_bytes: 0, ..run::full_spec(Mode::Persistent) };
        let mut run = Run::with(spec, seed);
        for round in 0..3 {
            (0..30).for_each(|n| run.write_block(n * 3 + round));
            run.settle();
            run.flush();
            // Its pages are on their way.
            (0..seed % 4).for_each(|_| run.end_operation());
            run.attach_again();
            haunted += u64::from(run.sim.is_haunted());
            run.make_durable();
            run.lose_all(true);
            run.read_all();
        }
        run.check();
    }
    assert!(haunted > 100, "{haunted}");
}

/// Of an ephemeral disk everything is its own from the start: whole regions come and go in its figures.
#[test]
fn an_ephemeral_disk_holds_what_it_was_not_told_to_give_back() {
    let spec = DiskSpec {
        size_bytes: (3 * 512 + 5) * 4096 - 512,
        overflow_limit_bytes: 0,
        ..run::full_spec(Mode::Ephemeral)
    };
    let mut run = Run::with(spec, 3);
    let used = |run: &mut Run| {
        run.settle();
        run.check();
        get(&run.counters().overflow_used_bytes) / 4096
    };
    assert_eq!(used(&mut run), 3 * 512 + 5);
    // A region that nothing has touched, one of which a block was written, and parts of others.
    run.write_block(512);
    run.discard(0, 1024);
    assert_eq!(used(&mut run), 512 + 5);
    run.discard(1100, 10);
    run.discard(1536, 3);
    assert_eq!(used(&mut run), 512 + 5 - 13);
    run.attach_again();
    assert_eq!(used(&mut run), 512 + 5 - 13);
    run.write_block(5);
    assert_eq!(used(&mut run), 512 + 5 - 13 + 1);
    run.read_all();
}

/// The RAM limit rises beyond what it began with and falls again: what was beyond it is in the overflow, the memory
/// is back, and what has no place to go refuses the fall.
#[test]
fn the_ram_limit_changes_while_the_disk_serves() {
    let spec = DiskSpec {
        ram_limit_bytes: 64 * 4096,
        overflow_limit_bytes: 96 * 8 * 4096,
        ..run::full_spec(Mode::RamOverflow)
    };
    let mut run = Run::with(spec, 3);
    assert!(
        !run.set_ram_slots(129) && !run.set_ram_slots(15),
        "there is no memory for it, or it is no limit"
    );
    assert!(run.set_ram_slots(128));
    (0..110).for_each(|block| run.write_block(block));
    run.settle();
    assert_eq!((run.unfinished(), run.sim.held_slots, run.overflow_writes()), (0, 110, 0));
    assert!(run.set_ram_slots(16));
    run.rest();
    assert!(run.sim.held_slots <= 16, "{} slots hold memory", run.sim.held_slots);
    assert!(run.overflow_writes() > 0);
    run.check();
    // Whoever attaches finds slots beyond the limit, and goes on.
    assert!(run.set_ram_slots(120));
    (200..300).for_each(|block| run.write_block(block));
    run.rest();
    assert!(run.set_ram_slots(20));
    run.crash();
    run.rest();
    assert!(run.sim.held_slots <= 20, "{} slots hold memory", run.sim.held_slots);
    run.read_all();

    // Writes go on while it comes down, and do not keep it from that.
    let spec = DiskSpec {
        size_bytes: 2048 * 4096,
        ram_limit_bytes: 128 * 4096,
        overflow_limit_bytes: 1_000 * 8 * 4096,
        ..run::full_spec(Mode::RamOverflow)
    };
    let mut run = Run::with(spec, 3);
    (0..120).for_each(|block| run.write_block(block));
    run.settle();
    assert!(run.set_ram_slots(16));
    let (mut next, mut least) = (120, u64::MAX);
    while get(&run.counters().ram_used_bytes) > 16 * 4096 {
        while run.unfinished() < 4 {
            run.write_block(next);
            next += 1;
        }
        run.end_operation();
        run.turn();
        least = least.min(get(&run.counters().guest.writes));
        assert!(next < 400, "it does not come down");
    }
    let during = get(&run.counters().guest.writes) - least;
    assert!(during >= 80, "{during} writes while 104 blocks left");
    run.settle();
    assert!(run.sim.held_slots <= 16, "{} slots hold memory", run.sim.held_slots);
    run.read_all();

    // With the overflow's limit lowered at once to what this takes, none of them takes the space that it needs.
    let mut run = Run::with(DiskSpec { ram_limit_bytes: 2_048 * 4096, ..spec }, 3);
    (0..1_900).for_each(|block| run.write_block(block));
    run.settle();
    assert!(run.set_ram_slots(1_000));
    let least = (1..1_000).find(|segments| run.set_limit(segments * 8 * 4096));
    assert!(least.is_some_and(|segments| segments > 900 / 7), "{least:?} segments");
    (1_900..2_048).for_each(|block| run.write_block(block));
    run.settle();
    assert!(run.unfinished() > 0, "there is space for all");
    assert!(run.sim.held_slots <= 1_000, "{} slots hold memory", run.sim.held_slots);
    run.cancel();
    run.check();
    run.read_all();

    let mut run = Run::with(DiskSpec { ram_limit_bytes: 64 * 4096, ..run::full_spec(Mode::Ram) }, 3);
    (0..40).for_each(|block| run.write_block(block));
    assert!(!run.set_ram_slots(39) && run.set_ram_slots(40));
    run.write_block(41);
    run.rest();
    assert_eq!(run.unfinished(), 1, "it waits for space");
    assert!(run.set_ram_slots(41));
    run.rest();
    assert_eq!(run.unfinished(), 0, "there is space");
    run.read_all();

    // The log has space for 112 blocks.
    let mut run = Run::with(DiskSpec { ram_limit_bytes: 128 * 4096, ..run::full_spec(Mode::RamOverflow) }, 3);
    (0..110).for_each(|block| run.write_block(block));
    run.rest();
    assert!(run.set_ram_slots(16));
    run.rest();
    assert!(run.set_ram_slots(128));
    (110..200).for_each(|block| run.write_block(block));
    run.rest();
    assert!(!run.set_ram_slots(16), "the overflow has no space for all of it");
    assert_eq!(run.unfinished(), 0);
    run.read_all();
}

/// Two clients write without pause into a full RAM tier, and one is always the first to come: neither gets more than
/// 60% of what completes, no write waits longer than the others need that were there before it, and each wait is
/// counted.
#[test]
fn a_full_tier_is_shared_fairly() {
    const DEPTH: usize = 16;
    let spec = DiskSpec {
        size_bytes: 4096 * 4096,
        overflow_limit_bytes: 1_000 * 8 * 4096,
        ..run::full_spec(Mode::RamOverflow)
    };
    let mut run = Run::with(spec, 13);
    let (mut clients, mut completed, mut blocks) = ([vec![], vec![]], [0u64; 2], 0);
    let (mut turns, mut longest) = (0, 0);
    while completed[0] + completed[1] < 20_000 {
        // Slots come free before those that wait are served: who comes then must not pass them.
        (0..4).for_each(|_| run.end_operation());
        for client in 0..2 {
            clients[client].retain(|&(request, since)| {
                let stays = run.is_unfinished(request);
                completed[client] += u64::from(!stays);
                longest = longest.max(turns - since);
                stays
            });
            while clients[client].len() < DEPTH {
                run.write_block(client as u64 * 2_048 + blocks % 2_000);
                blocks += 1;
                clients[client].push((run.next - 1, turns));
            }
        }
        run.turn();
        turns += 1;
    }
    println!("fair: {completed:?} in {turns} turns, the longest wait took {longest}");
    let all = completed[0] + completed[1];
    assert!(completed.iter().all(|&n| n * 10 <= all * 6), "{completed:?}");
    assert!(longest <= 100, "a write has waited for {longest} turns");
    let c = run.counters();
    let (stalls, urgent) = (get(&c.stalls), get(&c.evictions_urgent));
    assert!(stalls > all / 2 && urgent > 0 && get(&c.stalls_ns) > 0, "{stalls} stalls, {urgent} urgent");
    run.rest();
    assert_eq!(get(&run.counters().waiting), 0);
    run.check();
}

/// While writes take new memory, some is made ready ahead of them, never much, and none stays that is not used.
#[test]
fn memory_is_made_ready_ahead_of_writes() {
    for huge_pages in [false, true] {
        let spec =
            DiskSpec { size_bytes: 256 << 20, ram_limit_bytes: 128 << 20, ..run::full_spec(Mode::Ram) };
        let mut run = Run::on(spec, DataMemory { bytes: 128 << 20, huge_pages }, Rng(9));
        run.settle();
        assert_eq!((run.sim.held_slots, run.sim.populated), (0, 0), "an idle disk");
        for block in 0..20_000 {
            run.write_block(block);
            if block % 16 == 0 {
                run.turn();
            }
            if block == 1_000 {
                // While nothing is asked, as many as may be ahead.
                let populated = run.sim.populated;
                (0..10).for_each(|_| _ = run.turn());
                assert!(run.sim.populated - populated > 128 || huge_pages, "idle turns make some ready");
            }
            let ahead = run.sim.held_slots - (block as u32 + 1);
            assert!(ahead <= 8 * 1024, "{ahead} slots ahead");
        }
        assert!(run.sim.populated > 19_000, "{} of 20,000 were ready", run.sim.populated);
        let populated = run.sim.populated;
        // Overwrites need none, and once nobody has written to new memory for long none is there.
        for block in 0..1_000 {
            run.write_block(block);
            run.turn();
        }
        assert!(run.sim.populated - populated <= 128);
        run.settle();
        assert!(run.sim.populated - populated <= 128);
        let unit = if huge_pages { 512 } else { 1 };
        assert_eq!(run.sim.held_slots, 20_000_u32.next_multiple_of(unit), "not given back");
        run.check();
    }
}

/// Long writes of whole blocks go to adjacent slots a stretch at a time; blocks of zeroes among them take none.
#[test]
fn long_writes_are_stored_in_stretches() {
    let spec = DiskSpec { size_bytes: 64 << 20, ram_limit_bytes: 32 << 20, ..run::full_spec(Mode::Ram) };
    let mut run = Run::on(spec, DataMemory { bytes: 64 << 20, huge_pages: false }, Rng(9));
    run.write_blocks(0, 1000);
    run.settle();
    assert_eq!(run.sim.stretches, (1000, 1000), "blocks that are new");
    run.write_blocks(200, 600);
    run.settle();
    assert_eq!(run.sim.stretches, (1600, 1000), "blocks that are there");
    run.write_blocks_with_holes(1000, 1000);
    run.settle();
    let held = run.sim.held_slots;
    let (stored, fresh) = run.sim.stretches;
    assert!((2000..2600).contains(&stored) && fresh > 1200, "{stored} and {fresh}");
    assert!(held < 2000, "{held} slots are held by 2,000 blocks, of which some are zeroes");
    run.read_all();
    run.check();
}

/// With huge pages memory comes and goes by 2 MiB; only a limit that has fallen splits them.
#[test]
fn huge_pages_come_and_go_whole() {
    let spec = DiskSpec { size_bytes: 64 << 20, ram_limit_bytes: 32 << 20, ..run::full_spec(Mode::Ram) };
    let mut run = Run::on(spec, DataMemory { bytes: 64 << 20, huge_pages: true }, Rng(9));
    (0..4 * 512).for_each(|block| run.write_block(block));
    run.settle();
    assert_eq!((run.sim.held_slots, run.sim.split), (2048, 0));
    // Of two units all but one block, of a third all.
    run.discard(0, 511);
    run.discard(512, 511);
    run.discard(1024, 512);
    run.settle();
    assert_eq!((run.sim.held_slots, run.sim.split), (3 * 512, 0), "of a unit in use nothing goes");
    // What is free of the units in use is used first.
    (5_000..6_022).for_each(|block| run.write_block(block));
    run.settle();
    assert_eq!((run.sim.held_slots, run.sim.split), (3 * 512, 0));
    run.check();
    run.crash();
    run.settle();
    assert_eq!((run.sim.held_slots, run.sim.split), (3 * 512, 0), "attached");
    // Half of each unit.
    (0..3).for_each(|n| run.discard(5_000 + 300 * n, 200));
    run.settle();
    assert!(run.set_ram_slots(936));
    run.settle();
    assert!(run.sim.held_slots <= 936 + 511 && run.sim.split > 0, "{} slots hold memory", run.sim.held_slots);
    run.check();
    run.reset();
    run.settle();
    assert_eq!(run.sim.held_slots, 0);
    run.read_all();
}

#[test]
fn random_operations() {
    let ops: u64 = std::env::var("SPILLWAY_MODEL_OPS").map_or(1_000_000, |s| s.parse().expect("a number"));
    let seed = rng::seed();
    let threads = std::thread::available_parallelism().map_or(1, |n| n.get() as u64);
    println!("model: {ops} operations in {threads} threads");
    let run = |thread: u64| {
        let (mut done, mut tally, mut episode_seed) = (0, BTreeMap::new(), seed.wrapping_add(thread));
        let mut seeds = Rng(episode_seed);
        while done < ops.div_ceil(threads) {
            match std::panic::catch_unwind(AssertUnwindSafe(|| episode(episode_seed, &mut tally))) {
                Ok(n) => done += n,
                Err(panic) => {
                    println!("model: FAILED, again: SPILLWAY_SEED={episode_seed} SPILLWAY_MODEL_OPS=1");
                    std::panic::resume_unwind(panic);
                }
            }
            episode_seed = seeds.next();
        }
        (done, tally)
    };
    let all: Vec<(u64, BTreeMap<_, _>)> = std::thread::scope(|scope| {
        let all: Vec<_> = (0..threads).map(|thread| scope.spawn(move || run(thread))).collect();
        all.into_iter().map(|t| t.join().expect("its panic is above")).collect()
    });
    let mut sums = BTreeMap::new();
    all.iter().flat_map(|(_, tally)| tally).for_each(|(&what, n)| *sums.entry(what).or_insert(0) += n);
    let done: u64 = all.iter().map(|(done, _)| done).sum();
    println!("model: {done} operations done; {sums:?}");
    assert!(done < 1_000_000 || sums.len() == 15 && sums["promoted"] > 0, "in a long run all of it happens");
}
