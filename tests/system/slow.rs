//! A disk below the overflow that takes half a second for everything, while workers are killed.
//!
//! What a dead worker had begun lands long after its successor has attached (`below.rs`).
//!
//! What it shows is that nothing fails and nothing is wrong. That a dead worker's place is not used too early it does not show:
//! on a disk this slow that place is hardly ever wanted again in time. The core's model and crash tests show that.

use crate::below::{self, Below};
use crate::deaths::{grown, kill_worker, kills, nothing_failed, seed, worker};
use crate::machine::{self, Machine, Work};
use crate::world::{MIB, World, until};
use spillway_testkit::disk::figure;
use spillway_testkit::{Driver, End, Mixed, Oracle, Rng, Server, Shape};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

const SPAN: u64 = 32 * MIB;
const DELAY: Duration = Duration::from_millis(500);

/// How many workers die of each way to be slow: 4 of 25. Each takes seconds.
fn deaths() -> u32 {
    (kills() / 6).clamp(4, 33)
}

/// Reads and writes take [`DELAY`] longer until the value is dropped: each, or one of so many of each of nbdkit's
/// threads, so that those that come later overtake them.
fn slow_down(world: &World, below: &Below, one_of: u32) -> Server {
    let how = format!("delay_enter={}:when=1+{one_of}", DELAY.as_micros());
    below.inject("pread64,pwrite64", &how, &world.path("strace.log"))
}

#[test]
fn workers_are_killed_while_the_overflow_takes_half_a_second() {
    let Some(world) = World::new(&below::PROGRAMS) else { return };
    let Some(mut slow) = Below::new(&world, 256 * MIB, true) else { return };
    let image = world.image(8 * MIB);
    let options = ["--size", "32M", "--ram", "8M", "--overflow", "128M", "--overflow-dir", slow.dir()];
    let disk = world.serve(&image, &options);
    slow.hide();
    let seed = seed();
    let mut rng = Rng::new(seed);
    let mut oracle = Oracle::with_base(SPAN, seed, &image).unwrap();
    let shape = Shape { queues: 2, depth: 64, request_bytes: 1 << 20, deadline: Duration::from_secs(60) };
    let mut driver = Driver::connect_with(&disk.vhost(), shape).unwrap();
    let mut mixed = Mixed {
        start_bytes: 0,
        span_bytes: SPAN,
        largest_bytes: 128 << 10,
        depth: 64,
        end: End::Count(3000),
        seed,
    };
    driver.run_mixed(&mixed, &mut oracle).unwrap_or_else(|e| panic!("{e:#}\n{}", disk.log()));
    let before = disk.stats().unwrap();

    let (mut last, mut slowest_ns) = (0, 0);
    for one_of in [1, 2] {
        let delay = slow_down(&world, &slow, one_of);
        let enough = AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                for _ in 0..deaths() {
                    last = kill_worker(&disk, last, 5 * DELAY, &mut rng);
                }
                enough.store(true, Ordering::Relaxed);
            });
            while !enough.load(Ordering::Relaxed) {
                mixed = Mixed { end: End::Count(100), seed: mixed.seed + 1, ..mixed };
                let measured = driver.run_mixed(&mixed, &mut oracle);
                let measured = measured.unwrap_or_else(|e| panic!("{e:#}\n{}", disk.log()));
                slowest_ns = slowest_ns.max(measured.max_ns);
            }
        });
        drop(delay);
        driver.verify(&oracle).unwrap_or_else(|e| panic!("{e:#}\n{}", disk.log()));
    }
    until("the last one's successor", &disk, || disk.worker().is_ok_and(|pid| pid != last));
    let stats = disk.stats().unwrap();

    let grown = |key: &str| grown(&before, &stats, key);
    println!(
        "the slowest request {} ms; {} overflow reads, {} writes; {} restarts",
        slowest_ns / 1_000_000,
        grown("planes.overflow.reads"),
        grown("planes.overflow.writes"),
        grown("restarts")
    );
    assert!(slowest_ns > DELAY.as_nanos() as u64, "it was slow");
    assert!(grown("planes.overflow.writes") > 10, "{stats}");
    assert!(grown("restarts") > u64::from(deaths()), "{stats}");
    for key in ["failed.requests", "checksum_mismatches", "overflow.write_errors", "overflow.read_errors"] {
        assert_eq!(disk.figure(key).unwrap(), 0, "{key}");
    }
    drop(driver);
    disk.stop().unwrap();
}

/// The machine's own patience with its disk has no end; a task of it that got nothing for two minutes would be a fault.
#[test]
fn a_machine_works_while_its_workers_are_killed_and_the_overflow_takes_half_a_second() {
    let Some(world) = World::new(&[&below::PROGRAMS[..], &machine::PROGRAMS].concat()) else { return };
    let Some(kit) = machine::kit() else { return };
    let Some(mut slow) = Below::new(&world, 256 * MIB, true) else { return };
    let disk =
        world.serve(&kit.golden(), &["--ram", "16M", "--overflow", "128M", "--overflow-dir", slow.dir()]);
    slow.hide();
    let mut rng = Rng::new(seed());
    let rounds = deaths() / 4;
    let work = Work { rounds, file_mib: 18 };
    let mut machine = Machine::boot(&kit, &world, &disk, &work);
    machine.has_booted();
    let before = disk.stats().unwrap();
    let delay = slow_down(&world, &slow, 1);
    let (mut last, mut killed) = (0, 0);
    while machine.works() {
        last = kill_worker(&disk, last, 5 * DELAY, &mut rng);
        killed += 1;
    }
    drop(delay);
    until("the last one's successor", &disk, || ![0, last].contains(&worker(&disk)));
    println!("{killed} workers killed");
    machine.ended_well();
    let stats = disk.stats().unwrap();
    nothing_failed(&stats);
    for (key, longest) in [
        ("planes.overflow.reads", "latency.overflow_read.max_ns"),
        ("planes.overflow.writes", "latency.overflow_write.max_ns"),
    ] {
        println!("{} {key}", grown(&before, &stats, key));
        assert!(grown(&before, &stats, key) > 10, "{key}: {stats}");
        assert!(figure(&stats, longest).unwrap() > DELAY.as_nanos() as u64, "it was slow: {stats}");
    }
    assert!(killed >= deaths(), "{killed}");
    disk.stop().unwrap();
}
