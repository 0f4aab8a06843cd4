//! The worker dies, the machine goes on: no error, no wrong byte, a short pause.
//!
//! `SPILLWAY_KILLS` says how often a worker is killed in each test (20; a soak takes 200 and more).

use crate::machine::{self, Machine, Work};
use crate::world::{MIB, World, succeeds, until};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use spillway_testkit::cores::median;
use spillway_testkit::disk::figure;
use spillway_testkit::{Disk, Driver, End, Load, Mixed, Oracle, Rng, Shape};
use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

const SHAPE: Shape =
    Shape { queues: 2, depth: 32, request_bytes: 1 << 20, deadline: Duration::from_secs(30) };

/// What a worker dies of: most often of what leaves it no instruction.
const SIGNALS: [Signal; 8] = [
    Signal::KILL,
    Signal::KILL,
    Signal::KILL,
    Signal::ABORT,
    Signal::TERM,
    Signal::SEGV,
    Signal::BUS,
    Signal::ILL,
];

pub fn kills() -> u32 {
    std::env::var("SPILLWAY_KILLS").ok().and_then(|n| n.parse().ok()).unwrap_or(20)
}

/// A load of everything on 128 MiB.
fn a_while(seed: u64) -> Mixed {
    let (span_bytes, largest_bytes) = (128 * MIB, 256 << 10);
    let end = End::After(Duration::from_millis(300));
    Mixed { start_bytes: 0, span_bytes, largest_bytes, depth: 32, end, seed }
}

pub fn seed() -> u64 {
    let seed = std::env::var("SPILLWAY_SEED").ok().and_then(|n| n.parse().ok());
    let seed = seed.unwrap_or_else(|| u64::from(std::process::id()));
    println!("SPILLWAY_SEED={seed}");
    seed
}

/// Who serves now. Asked without starting a program: that would share this process's sockets for a moment, and a
/// VMM that has left would seem to be there.
pub fn worker(disk: &Disk) -> u32 {
    let mut control = UnixStream::connect(disk.control()).unwrap();
    control.write_all(b"{\"command\":\"ping\"}\n").unwrap();
    let mut line = String::new();
    BufReader::new(control).read_line(&mut line).unwrap();
    let answer: Value = serde_json::from_str(&line).unwrap();
    answer["ok"]["worker_pid"].as_u64().unwrap() as u32
}

/// Kills the worker after the last one at a random instant of its life, and returns its process id.
pub fn kill_worker(disk: &Disk, last: u32, longest: Duration, rng: &mut Rng) -> u32 {
    let mut pid = last;
    until("another worker", disk, || {
        pid = worker(disk);
        pid != last && pid != 0
    });
    std::thread::sleep(Duration::from_micros(rng.below(longest.as_micros() as u64)));
    let worker = Pid::from_raw(pid as i32).unwrap();
    // Once in a while it stands still for a moment before.
    if rng.below(8) == 0 {
        kill_process(worker, Signal::STOP).unwrap();
        std::thread::sleep(Duration::from_micros(rng.below(100_000)));
        kill_process(worker, Signal::CONT).unwrap();
    }
    let signal = SIGNALS[rng.below(SIGNALS.len() as u64) as usize];
    // A process that has only begun may take a fault that was sent for one that comes again.
    until("it dies", disk, || {
        let _gone = kill_process(worker, signal);
        self::worker(disk) != pid
    });
    pid
}

/// Kills workers at random instants until it has been often enough, or was as others found. `enough` is set then.
/// Returns how often.
pub fn kill_at_random(disk: &Disk, times: u32, longest: Duration, rng: &mut Rng, enough: &AtomicBool) -> u32 {
    let (mut last, mut killed) = (0, 0);
    while killed < times && !enough.load(Ordering::Relaxed) {
        last = kill_worker(disk, last, longest, rng);
        killed += 1;
    }
    enough.store(true, Ordering::Relaxed);
    killed
}

/// Set when it is dropped, so that a failure ends what goes on until then.
pub struct Enough<'a>(pub &'a AtomicBool);

impl Drop for Enough<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

pub fn nothing_failed(stats: &Value) {
    for key in ["failed.requests", "checksum_mismatches"] {
        assert_eq!(figure(stats, key).unwrap(), 0, "{key}: {stats}");
    }
}

/// Else nobody died in the midst of either.
pub fn evicted_and_collected(before: &Value, after: &Value) {
    let [evicted, moved] =
        ["evictions.blocks", "collector.moved_blocks"].map(|key| grown(before, after, key));
    println!("{evicted} blocks evicted, {moved} moved by the collector");
    assert!(evicted > 0 && moved > 0, "{after}");
}

/// By how much a figure has grown.
pub fn grown(before: &Value, after: &Value, key: &str) -> u64 {
    figure(after, key).unwrap() - figure(before, key).unwrap()
}

#[test]
fn a_driver_without_a_table_sees_no_error_and_no_wrong_byte() {
    let Some(world) = World::new(&[]) else { return };
    let image = world.image(32 * MIB);
    let seed = seed();
    let both = ["--ram", "16M", "--overflow", "136M"].as_slice();
    for (mode, engine, options) in [
        ("ram+overflow", "io_uring", both),
        ("ram+overflow", "threads", both),
        ("overflow", "io_uring", &["--overflow", "300M"]),
        ("direct", "io_uring", &[]),
        ("ram", "io_uring", &["--ram", "200M"]),
    ] {
        let what = format!("{mode} by {engine}");
        let disk = world.serve_by(engine, &image, &[&["--size", "128M", "--mode", mode], options].concat());
        let mut oracle = Oracle::with_base(128 * MIB, seed, &image).unwrap();
        let mut driver = Driver::connect_with(&disk.vhost(), SHAPE).unwrap();
        let (mut requests, mut longest, mut round) = (0, 0, 0);
        let mut load = |driver: &mut Driver, oracle: &mut Oracle| {
            round += 1;
            let mixed = a_while(seed ^ round);
            let measured =
                driver.run_mixed(&mixed, oracle).unwrap_or_else(|e| panic!("{what}: {e:#}\n{}", disk.log()));
            requests += measured.requests;
            longest = longest.max(measured.max_ns);
        };
        if mode == "ram+overflow" {
            until("the collector begins", &disk, || {
                load(&mut driver, &mut oracle);
                disk.figure("collector.moved_blocks").unwrap() > 0
            });
        }
        let before = disk.stats().unwrap();
        let mut rng = Rng::new(seed);
        let (mut killed, mut restarts) = (0, 0);
        // Some die before they have taken the disk over; on a slow host most do: then more of them must.
        while killed < kills() || restarts < u64::from(kills()) / 4 {
            let enough = AtomicBool::new(false);
            killed += std::thread::scope(|scope| {
                let killer = scope
                    .spawn(|| kill_at_random(&disk, kills(), Duration::from_millis(60), &mut rng, &enough));
                while !killer.is_finished() {
                    load(&mut driver, &mut oracle);
                }
                killer.join().unwrap()
            });
            until("the last one's successor", &disk, || worker(&disk) != 0);
            restarts = disk.figure("restarts").unwrap();
        }
        driver.verify(&oracle).unwrap_or_else(|e| panic!("{what}: {e:#}\n{}", disk.log()));
        let stats = disk.stats().unwrap();
        restarts = figure(&stats, "restarts").unwrap();
        assert!(restarts <= u64::from(killed), "{what}: {restarts} restarts, {killed} killed");
        assert_eq!(stats["engine"], engine, "{what}");
        nothing_failed(&stats);
        if mode == "ram+overflow" {
            evicted_and_collected(&before, &stats);
        }
        println!("{what}: {requests} requests, the slowest {} ms", longest / 1_000_000);
        drop(driver);
        disk.stop().unwrap();
    }
}

/// The kernel takes a while to take a dead worker's memory apart: nobody waits for that.
#[test]
fn a_pause_does_not_depend_on_how_much_memory_the_dead_one_held() {
    const KILLS: usize = 9;
    const FILLED: u64 = 2560 * MIB;
    let Some(world) = World::new(&[]) else { return };
    let image = world.image(16 * MIB);
    let disk = world.serve(&image, &["--size", "2560M", "--ram", "3G", "--overflow", "1G"]);
    let mut driver = Driver::connect_with(&disk.vhost(), SHAPE).unwrap();
    driver.run(&Load::fill(FILLED, 1 << 20)).unwrap();
    let mut pauses: Vec<f64> = (0..KILLS as u64)
        .map(|i| {
            let load = Load { seed: i, ..Load::seed_004(16, End::After(Duration::from_millis(1500))) };
            let measured = std::thread::scope(|scope| {
                scope.spawn(|| {
                    std::thread::sleep(Duration::from_millis(400));
                    let worker = Pid::from_raw(worker(&disk) as i32).unwrap();
                    kill_process(worker, Signal::KILL).unwrap();
                });
                driver.run(&load).unwrap_or_else(|e| panic!("{e:#}\n{}", disk.log()))
            });
            measured.max_ns as f64 / 1e6
        })
        .collect();
    let p50 = median(&mut pauses);
    println!("the longest request at each of {KILLS} deaths: {pauses:.0?} ms, median {p50:.0}");
    assert_eq!(disk.figure("restarts").unwrap(), KILLS as u64);
    assert!(p50 < 100.0 && pauses.iter().all(|&ms| ms < 1000.0), "{pauses:?}");
    drop(driver);
    // A stop beside a dead worker that has not ended.
    let last = Pid::from_raw(worker(&disk) as i32).unwrap();
    kill_process(last, Signal::KILL).unwrap();
    until("the next worker", &disk, || ![0, last.as_raw_nonzero().get() as u32].contains(&worker(&disk)));
    disk.stop().unwrap();
}

/// A worker that stands still is no dead one: it goes on where it stood.
#[test]
fn a_worker_that_was_stopped_lives_on() {
    const STOPPED: Duration = Duration::from_secs(2);
    let Some(world) = World::new(&[]) else { return };
    let image = world.image(32 * MIB);
    let disk = world.serve(&image, &["--size", "64M", "--ram", "16M", "--overflow", "96M"]);
    let seed = seed();
    let mut oracle = Oracle::with_base(64 * MIB, seed, &image).unwrap();
    let mut driver = Driver::connect_with(&disk.vhost(), SHAPE).unwrap();
    let mixed = Mixed {
        start_bytes: 0,
        span_bytes: 64 * MIB,
        largest_bytes: 256 << 10,
        depth: 32,
        end: End::After(STOPPED + Duration::from_secs(2)),
        seed,
    };
    let measured = std::thread::scope(|scope| {
        scope.spawn(|| {
            until("the load evicts", &disk, || disk.figure("evictions.blocks").unwrap() > 0);
            let stopped = Pid::from_raw(worker(&disk) as i32).unwrap();
            kill_process(stopped, Signal::STOP).unwrap();
            std::thread::sleep(STOPPED);
            kill_process(stopped, Signal::CONT).unwrap();
        });
        driver.run_mixed(&mixed, &mut oracle).unwrap_or_else(|e| panic!("{e:#}\n{}", disk.log()))
    });
    assert!(measured.max_ns > STOPPED.as_nanos() as u64 * 9 / 10, "{measured:?}");
    driver.verify(&oracle).unwrap_or_else(|e| panic!("{e:#}\n{}", disk.log()));
    let stats = disk.stats().unwrap();
    assert_eq!(figure(&stats, "restarts").unwrap(), 0, "{}", disk.log());
    nothing_failed(&stats);
    drop(driver);
    disk.stop().unwrap();
}

/// From the firmware's first look at the disk on.
#[test]
fn a_machine_boots_and_works_while_its_workers_are_killed() {
    let Some(world) = World::new(&machine::PROGRAMS) else { return };
    let Some(kit) = machine::kit() else { return };
    // Room for what lives and little more, so that the collector has work: journal and logs grow with the rounds.
    let overflow = format!("{}M", 55 + kills() / 25);
    let disk = world.serve(&kit.golden(), &["--ram", "16M", "--overflow", &overflow]);
    // Six kills or more in each round, as fast as the host is, and ten and more in the boot.
    let work = Work { rounds: kills().saturating_sub(10).div_ceil(5), file_mib: 48 };
    let seed = seed();
    let before = disk.stats().unwrap();
    let mut machine = Machine::boot(&kit, &world, &disk, &work);
    let mut rng = Rng::new(seed);
    let (mut last, mut killed) = (0, 0);
    // Rare enough that it gets on.
    while machine.works() {
        last = kill_worker(&disk, last, Duration::from_millis(900), &mut rng);
        killed += 1;
    }
    println!("{killed} workers killed");
    until("the last one's successor", &disk, || ![0, last].contains(&worker(&disk)));
    machine.ended_well();
    let stats = disk.stats().unwrap();
    nothing_failed(&stats);
    evicted_and_collected(&before, &stats);
    assert!(killed >= kills(), "{killed}");
    disk.stop().unwrap();
}

#[test]
fn upgrades_under_load_lose_nothing() {
    let Some(world) = World::new(&[]) else { return };
    let image = world.image(32 * MIB);
    let disk = world.serve(&image, &["--size", "128M", "--ram", "16M", "--overflow", "300M"]);
    let seed = seed();
    let mut oracle = Oracle::with_base(128 * MIB, seed, &image).unwrap();
    let mut driver = Driver::connect_with(&disk.vhost(), SHAPE).unwrap();
    let done = AtomicBool::new(false);
    let mut slowest = 0;
    let pauses = std::thread::scope(|scope| {
        let upgrades = scope.spawn(|| {
            let program = spillway_testkit::disk::program().unwrap();
            let upgrade = || {
                let mut command = std::process::Command::new(&program);
                let answer = succeeds(command.arg("upgrade").arg(disk.control()).arg("--json"));
                let answer: Value = serde_json::from_str(&answer).unwrap();
                answer["pause_ms"].as_u64().unwrap()
            };
            let pauses: Vec<u64> = (0..10).map(|_| upgrade()).collect();
            done.store(true, Ordering::Relaxed);
            pauses
        });
        let mut round = 0;
        while !done.load(Ordering::Relaxed) && !upgrades.is_finished() {
            round += 1;
            let mixed = a_while(seed ^ round);
            let measured =
                driver.run_mixed(&mixed, &mut oracle).unwrap_or_else(|e| panic!("{e:#}\n{}", disk.log()));
            slowest = slowest.max(measured.max_ns);
        }
        upgrades.join().unwrap()
    });
    driver.verify(&oracle).unwrap_or_else(|e| panic!("{e:#}\n{}", disk.log()));
    assert_eq!(disk.figure("restarts").unwrap(), 10);
    assert_eq!(disk.figure("failed.requests").unwrap(), 0);
    println!("pauses {pauses:?} ms, the slowest request {} ms", slowest / 1_000_000);
    drop(driver);
    disk.stop().unwrap();
}

/// NBD has no way to go on with a connection: its client connects again and repeats what was not answered.
#[test]
fn an_nbd_client_that_connects_again_sees_no_error() {
    let Some(world) = World::new(&["qemu-io"]) else { return };
    let image = world.blank(64 * MIB);
    let disk = world.serve(&image, &["--size", "64M", "--ram", "8M", "--overflow", "128M"]);
    let mut rng = Rng::new(seed());
    let enough = AtomicBool::new(false);
    let target = format!(
        "driver=raw,file.driver=nbd,file.server.type=unix,file.server.path={},file.reconnect-delay=60,file.open-timeout=30",
        disk.nbd().display()
    );
    let mut written = [0; 60];
    let killed = std::thread::scope(|scope| {
        let killer =
            scope.spawn(|| kill_at_random(&disk, kills(), Duration::from_millis(400), &mut rng, &enough));
        let _enough = Enough(&enough);
        let mut steps = 0..;
        while !killer.is_finished() {
            let mut qemu_io = std::process::Command::new("qemu-io");
            qemu_io.args(["--image-opts", &target]);
            for i in steps.by_ref().take(100) {
                let (at, pattern) = (i * 37 % written.len(), i % 250 + 1);
                let back = i * 23 % written.len();
                written[at] = pattern;
                qemu_io.args(["-c", &format!("write -P {pattern} {at}M 1M")]);
                qemu_io.args(["-c", &format!("read -P {} {back}M 1M", written[back])]);
            }
            let text = succeeds(&mut qemu_io);
            assert!(!text.contains("failed") && !text.contains("error"), "{text}");
        }
        killer.join().unwrap()
    });
    println!("{killed} workers killed");
    assert_eq!(killed, kills());
    until("the last one's successor", &disk, || disk.figure("worker_pid").is_ok_and(|pid| pid != 0));
    disk.stop().unwrap();
}
