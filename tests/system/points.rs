//! Workers that die at chosen points of eviction and collection: at the 1st, the 2nd... write, read or punch of the overflow
//! file by one of its I/O threads, before it is made. The next one goes on.
//!
//! strace kills them, as `faults` makes its faults. What is asked of the disk until then is writes of whole blocks and
//! nothing else: whatever is written to the file is eviction's or the collector's, and what is read the collector's.

use crate::deaths::{evicted_and_collected, kills, nothing_failed, worker};
use crate::machine::{self, Machine, Work};
use crate::scene::{Fault, Scene};
use crate::world::{MIB, PATIENCE, World, until};
use spillway_testkit::disk::figure;
use spillway_testkit::process::wait_until;
use spillway_testkit::{Ask, Disk, Rng};
use std::os::unix::fs::MetadataExt;
use std::time::Instant;

const BLOCK: usize = 4096;
const SPAN: u64 = 44 * MIB;
const POINTS: u64 = 12;
/// Of the overflow file little is left, so that the collector has work.
const OPTIONS: [&str; 4] = ["--ram", "8M", "--overflow", "44M"];

/// Overwrites blocks at random until that has come.
fn overwrite(s: &mut Scene, rng: &mut Rng, what: &str, came: impl Fn(&Scene) -> bool) {
    const BATCH: u64 = 32;
    let by = Instant::now() + PATIENCE;
    while !came(s) {
        assert!(Instant::now() < by, "not within {PATIENCE:?}: {what}\n{}", s.disk.log());
        // Each in a part of the disk of its own: none overlaps another.
        let blocks = SPAN / BLOCK as u64 / BATCH;
        let writes: Vec<usize> = (0..BATCH)
            .map(|i| {
                let offset = (i * blocks + rng.below(blocks)) * BLOCK as u64;
                let (oracle, write) = (&mut s.oracle, Ask::Write { offset, len: BLOCK });
                s.driver.start(write, |to| oracle.write(offset, &mut to[..BLOCK])).unwrap()
            })
            .collect();
        for write in writes {
            assert_eq!(s.driver.finish(write, |_| {}).unwrap(), 0, "{}", s.disk.log());
        }
    }
}

/// Kills the worker at a thread's `n`th such call, to which `meanwhile` brings it: no other death is this one.
fn die_at(s: &mut Scene, call: &str, n: u64, meanwhile: impl FnOnce(&mut Scene, u32)) {
    let pid = worker(&s.disk);
    let fault = s.fault(call, &death(n));
    meanwhile(s, pid);
    it_died(&s.disk, pid, fault);
    s.verify();
}

fn death(n: u64) -> String {
    format!("signal=KILL:when={n}")
}

fn it_died(disk: &Disk, pid: u32, fault: Fault) {
    until("the next worker", disk, || ![0, pid].contains(&worker(disk)));
    until("strace says that it killed it", disk, || fault.lines("killed by SIGKILL") > 0);
    fault.end();
}

#[test]
fn the_next_worker_goes_on_wherever_eviction_or_collection_ended() {
    let Some(world) = World::new(&["strace"]) else { return };
    for call in ["pwritev2", "pread64"] {
        let mut s = Scene::new(&world, &OPTIONS);
        let mut rng = Rng::new(s.seed);
        overwrite(&mut s, &mut rng, "the collector begins", |s| s.figure("collector.moved_blocks") > 0);
        let before = s.disk.stats().unwrap();
        for n in 1..=POINTS {
            die_at(&mut s, call, n, |s, pid| {
                overwrite(s, &mut rng, call, |s| worker(&s.disk) != pid);
            });
        }
        let stats = s.disk.stats().unwrap();
        assert_eq!(figure(&stats, "restarts").unwrap(), POINTS, "{call}");
        nothing_failed(&stats);
        evicted_and_collected(&before, &stats);
        s.end();
    }
}

#[test]
fn the_next_worker_gives_back_what_the_dead_one_was_about_to() {
    // Two are made at a time, by whichever of four threads.
    const POINTS: u64 = 8;
    let Some(world) = World::new(&["strace"]) else { return };
    let mut s = Scene::new(&world, &OPTIONS);
    let mut rng = Rng::new(s.seed);
    let file = s.overflow_file();
    for n in 1..=POINTS {
        overwrite(&mut s, &mut rng, "the file has its size", |s| s.figure("overflow.file_bytes") >= 40 * MIB);
        die_at(&mut s, "fallocate", n, |s, _| {
            s.driver.discard(0, 64 * MIB).unwrap();
            s.oracle.discarded(0, 64 * MIB);
        });
        until("all has left the file", &s.disk, || file.metadata().unwrap().blocks() == 0);
    }
    let stats = s.disk.stats().unwrap();
    assert_eq!(figure(&stats, "restarts").unwrap(), POINTS);
    assert_eq!(figure(&stats, "overflow.file_bytes").unwrap(), 0);
    nothing_failed(&stats);
    s.end();
}

/// What is read may be the machine's own too: overflowed blocks, and what the host's cache lacks of the image.
#[test]
fn a_machine_works_on_wherever_eviction_or_collection_ended() {
    let Some(world) = World::new(&[&["strace"], &machine::PROGRAMS[..]].concat()) else { return };
    let Some(kit) = machine::kit() else { return };
    // A few of them in CI.
    let step = if kills() < 100 { 4 } else { 1 };
    let points: Vec<(&str, u64)> =
        (1..=POINTS).step_by(step).flat_map(|n| [("pwritev2", n), ("pread64", n)]).collect();
    let options = ["--ram", "16M", "--overflow", "56M"];
    let disk = world.serve_by("threads", &kit.golden(), &options);
    let before = disk.stats().unwrap();
    let rounds = if step == 1 { 10 } else { 3 };
    let work = Work { rounds, file_mib: 48 };
    let mut machine = Machine::boot(&kit, &world, &disk, &work);
    let mut died = 0;
    // The boot writes little; the first waits until something is evicted.
    for (call, n) in points.iter().cycle() {
        let pid = worker(&disk);
        let fault = Fault::in_threads(&world, &disk, 4, call, &death(*n));
        let ended = wait_until(machine::PATIENCE, || match worker(&disk) == pid {
            true => (!machine.works()).then_some(true),
            false => Some(false),
        });
        if ended == Some(true) {
            fault.end();
            break;
        }
        it_died(&disk, pid, fault);
        died += 1;
    }
    println!("{died} deaths at {} points", points.len());
    machine.ended_well();
    let stats = disk.stats().unwrap();
    assert_eq!((figure(&stats, "restarts").unwrap(), &stats["engine"]), (died as u64, &"threads".into()));
    assert!(died >= points.len(), "{died} deaths at {points:?}");
    nothing_failed(&stats);
    evicted_and_collected(&before, &stats);
    disk.stop().unwrap();
}
