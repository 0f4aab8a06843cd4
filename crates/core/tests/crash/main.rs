//! Crash tests: the core is stopped before every store to shared memory, one after the other, and another attaches.
//!
//! Shared memory is `meta`, but for plain counters, and the slots; a copy into a slot stops in the middle too. Each
//! death is followed by an attach to the same memory, by what an in-flight table would do again, by all checks and
//! by the rest of the scenario. A second death hits the attach, the redoing or the clean-up after the first.
//!
//! `SPILLWAY_CRASH_STOPS` says before how many of the stores that one place in the code does a run stops, spread
//! over all of them (default 16; 0: before every store, which takes minutes, and longer random runs).
//! `SPILLWAY_SEED` chooses the course of the random runs. Needs the feature `crash-points`:
//! `cargo test --profile ci -p spillway-core --features crash-points --test crash`.

#[path = "../model/medium.rs"]
mod medium;
#[path = "../model/oracle.rs"]
mod oracle;
#[path = "../model/rng.rs"]
mod rng;
#[allow(dead_code, reason = "the model test uses more of it")]
#[path = "../model/run.rs"]
mod run;
mod scenario;
#[allow(dead_code, reason = "as above")]
#[path = "../model/sim.rs"]
mod sim;

use rng::Rng;
use run::Run;
use spillway_core::crash_points::{self, Stopped};
use spillway_core::{DataMemory, Disk, DiskSpec, Layout, Meta, Mode};
use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, Location, catch_unwind, resume_unwind};

/// Does it; true: it was stopped. Any other panic goes on.
fn is_stopped(act: impl FnOnce()) -> bool {
    match catch_unwind(AssertUnwindSafe(act)) {
        Ok(()) => false,
        Err(why) if why.is::<Stopped>() => true,
        Err(why) => resume_unwind(why),
    }
}

fn number(variable: &str) -> Option<u64> {
    std::env::var(variable).ok().map(|s| s.parse().expect("a number"))
}

/// How many stores of one place a run stops before; `None`: all.
fn stops_of_one_place() -> Option<usize> {
    Some(number("SPILLWAY_CRASH_STOPS").unwrap_or(16) as usize).filter(|&n| n > 0)
}

/// Before which of these stores to stop.
fn stops(stores: &[&'static Location<'static>]) -> Vec<u64> {
    let mut places: BTreeMap<_, Vec<u64>> = BTreeMap::new();
    for (i, place) in stores.iter().enumerate() {
        places.entry(*place).or_default().push(i as u64 + 1);
    }
    let most = stops_of_one_place().unwrap_or(stores.len());
    places.values().flat_map(|all| all.iter().copied().step_by(all.len().div_ceil(most))).collect()
}

fn begin(mode: Mode) -> Run {
    let mut run = Run::with(scenario::spec(mode), 42);
    run.sim.store = crash_points::store;
    run
}

/// Another process takes over, and comes to rest. It may be stopped itself.
fn recover(run: &mut Run, look_first: bool) {
    run.attach();
    if look_first {
        // What was cut off is there by whole sectors or not at all, and nothing else is touched.
        run.read_all();
    }
    run.redo();
    run.settle();
}

/// One run of the scenario, stopped before store `at`, and then before store `again` of the recovery (0: not).
/// Returns how many stores the recovery did.
fn stopped_run(mode: Mode, at: u64, again: u64) -> u64 {
    let mut run = begin(mode);
    let mut steps = scenario::STEPS.iter();
    crash_points::stop_at(at);
    let was_stopped = steps.any(|step| is_stopped(|| step(&mut run)));
    assert!(was_stopped, "the scenario is not the same each time");
    run.die();
    crash_points::stop_at(again);
    if is_stopped(|| recover(&mut run, at.is_multiple_of(2))) {
        run.die();
        recover(&mut run, at % 4 < 2);
    }
    let stores = crash_points::passed().len() as u64;
    crash_points::stop_at(0);
    run.check();
    run.read_all();
    steps.for_each(|step| step(&mut run));
    run.check();
    run.read_all();
    stores
}

fn stop_everywhere(mode: Mode) {
    let mut run = begin(mode);
    crash_points::stop_at(0);
    scenario::STEPS.iter().for_each(|step| step(&mut run));
    let stores = crash_points::passed();
    scenario::check_coverage(&mut run, mode);
    run.check();
    run.read_all();
    let stops = stops(&stores);
    println!("crash: {mode}: {} of {} stores", stops.len(), stores.len());
    for at in stops {
        let twice = catch_unwind(|| {
            let stores = stopped_run(mode, at, 0);
            if stores > 0 {
                // Somewhere: over all first stops it is everywhere.
                stopped_run(mode, at, 1 + Rng(at).below(stores));
            }
        });
        if let Err(why) = twice {
            println!("crash: {mode}: stopped before store {at}, FAILED");
            resume_unwind(why);
        }
    }
}

#[test]
fn ram_and_overflow() {
    stop_everywhere(Mode::RamOverflow);
}

#[test]
fn ram() {
    stop_everywhere(Mode::Ram);
}

#[test]
fn overflow() {
    stop_everywhere(Mode::Overflow);
}

#[test]
fn direct() {
    stop_everywhere(Mode::Direct);
}

#[test]
fn persistent() {
    stop_everywhere(Mode::Persistent);
}

#[test]
fn ephemeral() {
    stop_everywhere(Mode::Ephemeral);
}

/// Whoever finds memory that nobody has finished formatting formats it.
#[test]
fn birth() {
    let spec: DiskSpec = scenario::spec(Mode::RamOverflow);
    let data = DataMemory { bytes: spec.ram_limit_bytes, huge_pages: false };
    let attach = |base: *mut u8| {
        // SAFETY: `base` is aligned to a page and as long as the layout; each disk is dropped before the next.
        let (meta, existing) =
            unsafe { Meta::open(base, &spec, 1) }.expect("nothing else was ever written there");
        (Disk::attach(meta, existing, spec, data).expect("an empty map fits"), existing)
    };
    let mut at = 0;
    loop {
        at += 1;
        let mut words = vec![0u64; (Layout::of(&spec).len_bytes() as usize + 4096) / 8];
        let start = words.as_mut_ptr().cast::<u8>();
        let base = start.wrapping_add(start.align_offset(4096));
        crash_points::stop_at(at);
        let was_stopped = is_stopped(|| drop(attach(base)));
        crash_points::stop_at(0);
        let (disk, _) = attach(base);
        disk.check();
        assert_eq!((disk.generation(), *disk.spec()), (1, spec));
        if !was_stopped {
            assert!(at > 10, "{at} stores");
            return;
        }
    }
}

/// The model's random operations, with faults or without, and a death at any store.
#[test]
fn random_stops() {
    let seed = rng::seed();
    let runs = if stops_of_one_place().is_none() { 2_000 } else { 20 };
    println!("crash: {runs} random runs");
    for seed in seed..seed + runs {
        let run = catch_unwind(|| random_run(seed));
        if let Err(why) = run {
            println!("crash: FAILED, again: SPILLWAY_SEED={seed}");
            resume_unwind(why);
        }
    }
}

fn random_run(seed: u64) {
    let mut rng = Rng(!seed);
    crash_points::stop_at(0);
    let mut run = Run::new(seed);
    run.sim.store = crash_points::store;
    for _ in 0..40 {
        crash_points::stop_at(1 + rng.below(600));
        let mut steps = 0;
        while steps < 2_000 && !is_stopped(|| run.step()) {
            steps += 1;
        }
        loop {
            run.die();
            crash_points::stop_at(if rng.chance(2) { 1 + rng.below(100) } else { 0 });
            let redo = rng.chance(2);
            if !is_stopped(|| {
                run.attach();
                if redo {
                    run.redo();
                }
            }) {
                break;
            }
        }
        crash_points::stop_at(0);
        run.forget_cut_off();
        run.check();
    }
    run.read_all();
}
