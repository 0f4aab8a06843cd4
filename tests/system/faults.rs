//! A disk below the overflow that fails, falls short, lies or forgets: the RAM tier keeps what cannot be written, a
//! read that cannot be had is one request's error, and no byte is ever wrong.
//!
//! Both engines meet errors, each its own way (`scene.rs`). A write that falls short or lies is told to threads only: a
//! disk below the block layer cannot. Bits are flipped in the file behind the worker's back.

use crate::below;
use crate::scene::{BLOCK, ENGINES, Fault, PIECE, Scene, errno};
use crate::world::{MIB, PATIENCE, World, until};
use spillway_testkit::disk::figure;
use spillway_testkit::process::wait_until;
use spillway_testkit::{Ask, Oracle};
use std::time::Duration;

const EIO: i32 = 5;

#[test]
fn what_cannot_be_written_stays_in_ram_and_goes_when_it_can() {
    for engine in ENGINES {
        let ways: &[&str] = match engine {
            "threads" => &["error=EIO", "error=ENOSPC", "retval=1000"],
            _ => &["error=EIO", "error=ENOSPC"],
        };
        stays_in_ram_and_goes_when_it_can(engine, ways);
    }
}

fn stays_in_ram_and_goes_when_it_can(engine: &str, ways: &[&str]) {
    let Some(world) = World::new(&below::PROGRAMS) else { return };
    let Some(mut s) = Scene::by(engine, &world, &["--ram", "16M", "--overflow", "256M"]) else { return };
    for how in ways {
        let before = s.disk.stats().unwrap();
        let fault = s.fault("pwritev2", how);
        // More than what eviction begins at, and less than the limit.
        s.fill(0, 15 * MIB);
        assert_eq!([s.events.next(), s.events.next()], ["overflow-write-failed", "degraded"], "{how}");
        assert_eq!(s.figure("degraded"), 1);
        s.load(15 * MIB, 3000);
        s.fill(0, 15 * MIB);
        s.verify();

        // What needs space beyond it waits, and nothing else does.
        let mut content = vec![0; PIECE];
        let writes: Vec<usize> = (0..8)
            .map(|i| {
                let offset = 32 * MIB + i * PIECE as u64;
                s.oracle.write(offset, &mut content);
                s.driver.start(Ask::Write { offset, len: PIECE }, |to| to.copy_from_slice(&content)).unwrap()
            })
            .collect();
        until("writes wait", &s.disk, || s.figure("waiting") > 0);
        assert!(writes.iter().any(|&w| !s.driver.is_finished(w)));
        (0..15 * MIB).step_by(PIECE).for_each(|at| s.read(at, PIECE).unwrap());
        let stats = s.disk.stats().unwrap();
        for key in ["evictions.blocks", "failed.requests"] {
            assert_eq!(figure(&stats, key).unwrap(), figure(&before, key).unwrap(), "{how}: {key}");
        }
        assert!(fault.struck() >= 3, "{how}");
        assert!(figure(&stats, "overflow.write_errors").unwrap() >= 3, "{how}");

        fault.end();
        for write in writes {
            assert_eq!(s.driver.finish(write, |_| {}).unwrap(), 0, "{how}: it goes on by itself");
        }
        assert_eq!(s.events.next(), "recovered", "{how}");
        s.load(64 * MIB, 1000);
        s.verify();
        assert_eq!(s.figure("degraded"), 0, "{how}");
        assert!(s.figure("evictions.blocks") > figure(&stats, "evictions.blocks").unwrap(), "{how}");
        s.driver.discard(0, 64 * MIB).unwrap();
        s.oracle.discarded(0, 64 * MIB);
    }
    assert_eq!(s.figure("checksum_mismatches"), 0);
    s.end();
}

#[test]
fn writes_that_fail_now_and_then_are_done_elsewhere() {
    let Some(world) = World::new(&["strace"]) else { return };
    // A request that has no RAM tier before it may meet two failures, and no third.
    for (mode, threads, when) in [("ram+overflow", 4, "when=1..60+2"), ("overflow", 1, "when=1..2")] {
        let ram: &[&str] = if mode == "overflow" { &[] } else { &["--ram", "16M"] };
        let mut s = Scene::new(&world, &[&["--mode", mode, "--overflow", "256M"], ram].concat());
        s.fill(0, 64 * MIB);
        let mut struck = 0;
        for how in ["error=EIO", "retval=1000", "retval=0", "error=EIO"] {
            let fault = Fault::in_threads(&world, &s.disk, threads, "pwritev2", &format!("{how}:{when}"));
            s.load(64 * MIB, 1500);
            struck += fault.end();
        }
        s.verify();
        let stats = s.disk.stats().unwrap();
        println!("{mode}: {struck} writes failed");
        assert_eq!(figure(&stats, "overflow.write_errors").unwrap(), struck as u64, "{mode}");
        assert!(struck >= if mode == "overflow" { 6 } else { 100 }, "{mode}: {struck}");
        for key in ["failed.requests", "degraded", "checksum_mismatches"] {
            assert_eq!(figure(&stats, key).unwrap(), 0, "{mode}: {key}");
        }
        assert_eq!(s.events.next(), "overflow-write-failed", "{mode}");
        s.end();
    }
}

/// The same of an io_uring. How a write of its falls into calls of the disk below is for the kernel to say.
#[test]
fn writes_of_an_io_uring_that_fail_now_and_then_are_done_elsewhere() {
    let Some(world) = World::new(&below::PROGRAMS) else { return };
    let Some(mut s) = Scene::by("io_uring", &world, &["--ram", "16M", "--overflow", "256M"]) else { return };
    s.fill(0, 64 * MIB);
    let fault = s.fault("pwritev2", "error=EIO:when=2+3");
    s.load(64 * MIB, 6000);
    let struck = fault.end();
    s.verify();
    s.load(64 * MIB, 1500);
    s.verify();
    let stats = s.disk.stats().unwrap();
    let errors = figure(&stats, "overflow.write_errors").unwrap();
    println!("{struck} calls failed, {errors} writes");
    assert!(struck >= 20 && errors >= 10, "{struck} calls, {errors} writes");
    for key in ["failed.requests", "degraded", "checksum_mismatches"] {
        assert_eq!(figure(&stats, key).unwrap(), 0, "{key}");
    }
    assert_eq!(s.events.next(), "overflow-write-failed");
    s.end();
}

#[test]
fn without_a_ram_tier_a_write_is_an_error_after_three_tries() {
    ENGINES.into_iter().for_each(is_an_error_after_three_tries);
}

fn is_an_error_after_three_tries(engine: &str) {
    let Some(world) = World::new(&below::PROGRAMS) else { return };
    let Some(mut s) = Scene::by(engine, &world, &["--mode", "overflow", "--overflow", "256M"]) else {
        return;
    };
    s.fill(0, 16 * MIB);
    let fault = s.fault("pwritev2", "error=EIO");
    assert_eq!(s.write(MIB, PIECE / 4), Err(EIO));
    assert_eq!(s.figure("overflow.write_errors"), 3);
    assert!(fault.struck() >= 3);
    let mut failed = 1;
    while s.figure("degraded") == 0 {
        assert_eq!(s.write(MIB, PIECE / 4), Err(EIO));
        failed += 1;
    }
    assert_eq!([s.events.next(), s.events.next()], ["overflow-write-failed", "degraded"]);
    for at in [0, 2 * MIB, 15 * MIB] {
        s.read(at, PIECE).unwrap();
    }
    assert_eq!(s.figure("failed.requests"), failed);
    fault.end();
    s.write(MIB, PIECE / 4).unwrap();
    assert_eq!(s.events.next(), "recovered");
    assert_eq!(s.figure("degraded"), 0);

    // A file system that is full is waited for.
    let fault = s.fault("pwritev2", "error=ENOSPC");
    let mut content = vec![0; PIECE / 4];
    s.oracle.write(MIB, &mut content);
    let write = Ask::Write { offset: MIB, len: content.len() };
    let write = s.driver.start(write, |to| to[..content.len()].copy_from_slice(&content)).unwrap();
    until("it is degraded", &s.disk, || s.figure("degraded") == 1);
    // The figure shows it before the disk tells of it. What the disk has told of is in its log.
    assert_eq!([s.events.next(), s.events.next()], ["overflow-write-failed", "degraded"]);
    assert!(fault.struck() >= 3);
    assert!(!s.driver.is_finished(write));
    let log = s.disk.log();
    assert!(
        log.contains("(os error 28); writes wait;") && log.contains("(os error 5); writes fail;"),
        "{log}"
    );
    fault.end();
    assert_eq!(s.driver.finish(write, |_| {}).unwrap(), 0);
    s.verify();
    assert_eq!((s.figure("degraded"), s.figure("failed.requests")), (0, failed));
    s.end();
}

#[test]
fn a_flipped_bit_is_an_error_for_who_reads_its_block_and_nobody_else() {
    let Some(world) = World::new(&below::PROGRAMS) else { return };
    let ram: &[&str] = &["--ram", "8M"];
    for (engine, mode, ram) in
        [("threads", "ram+overflow", ram), ("threads", "overflow", &[]), ("io_uring", "ram+overflow", ram)]
    {
        let options = [&["--mode", mode, "--overflow", "128M"], ram].concat();
        let Some(mut s) = Scene::by(engine, &world, &options) else { return };
        s.fill(0, 32 * MIB);
        let (bad, block) = (MIB + 5 * BLOCK as u64, BLOCK as u64);
        s.flip(bad);
        let around: Vec<(u64, usize)> = (0..11)
            .map(|i| {
                let offset = MIB + i * block;
                (offset, s.driver.start(Ask::Read { offset, len: BLOCK }, |_| {}).unwrap())
            })
            .collect();
        for (at, read) in around {
            let oracle = &s.oracle;
            let ret = s.driver.finish(read, |content| oracle.check(at, &content[..BLOCK]).unwrap()).unwrap();
            assert_eq!(ret, if at == bad { -EIO } else { 0 }, "{mode}: {at}");
        }
        assert_eq!(s.events.next(), "checksum-mismatch", "{mode}");
        assert_eq!((s.figure("checksum_mismatches"), s.figure("failed.requests")), (1, 1), "{mode}");
        assert_eq!(s.read(MIB, PIECE), Err(EIO), "{mode}: it is part of that");
        // What is left of it after a write of a part is not known.
        let mut content = vec![0; 512];
        Oracle::new(64 * MIB, 1).write(bad, &mut content);
        assert_eq!(s.driver.write_at(bad + 512, &content).map_err(|e| errno(&e)), Err(EIO), "{mode}");
        assert_eq!(s.read(bad, 512), Err(EIO), "{mode}: still");
        let failed = s.figure("failed.requests");
        assert_eq!(failed, 4, "{mode}");
        assert_eq!(s.figure("checksum_mismatches"), failed, "{mode}");

        s.write(bad, BLOCK).unwrap();
        s.read(bad, BLOCK).unwrap();
        // So does a discard.
        s.flip(2 * MIB);
        assert_eq!(s.read(2 * MIB, BLOCK), Err(EIO), "{mode}");
        s.driver.discard(2 * MIB, block).unwrap();
        s.oracle.discarded(2 * MIB, block);
        s.verify();
        assert_eq!(s.figure("failed.requests"), failed + 1, "{mode}");
        assert_eq!(s.figure("degraded"), 0, "{mode}: it can be written");
        s.load(64 * MIB, 2000);
        s.verify();
        s.end();
    }
}

#[test]
fn a_read_that_fails_or_falls_short_is_an_error_once() {
    // The last one says that it has read a block, and has not.
    const WAYS: [(&str, &str); 4] = [
        ("error=EIO", "overflow-read-failed"),
        ("retval=1000", "overflow-read-failed"),
        ("retval=0", "overflow-read-failed"),
        ("retval=4096", "checksum-mismatch"),
    ];
    is_an_error_once("threads", &WAYS);
    is_an_error_once("io_uring", &[WAYS[0]; 3]);
}

fn is_an_error_once(engine: &str, ways: &[(&str, &str)]) {
    let Some(world) = World::new(&below::PROGRAMS) else { return };
    let Some(mut s) = Scene::by(engine, &world, &["--ram", "8M", "--overflow", "128M"]) else { return };
    s.fill(0, 32 * MIB);
    // A piece that stays in the RAM tier: what was written last may leave it, if eviction was late and begins with it.
    let stays = wait_until(PATIENCE, || {
        let before = ["planes.overflow.reads", "evictions.blocks"].map(|key| s.figure(key));
        s.read(31 * MIB, PIECE).unwrap();
        std::thread::sleep(Duration::from_millis(50));
        let stays = ["planes.overflow.reads", "evictions.blocks"].map(|key| s.figure(key)) == before;
        if !stays {
            s.write(31 * MIB, PIECE).unwrap();
        }
        stays.then_some(())
    });
    assert!(stays.is_some(), "no piece stays in RAM");
    let mut failed = 0;
    for &(how, event) in ways {
        let fault = s.fault("pread64", how);
        let at = MIB + failed * PIECE as u64;
        assert_eq!(s.read(at, PIECE / 8), Err(EIO), "{how}");
        assert_eq!(s.events.next(), event, "{how}");
        failed += 1;
        assert_eq!(s.figure("failed.requests"), failed, "{how}");
        s.read(31 * MIB, PIECE).unwrap();
        s.write(31 * MIB, PIECE).unwrap();
        assert!(fault.end() > 0);
        s.read(at, PIECE / 8).unwrap();
    }
    assert_eq!(s.figure("overflow.read_errors"), 3);
    let lied = ways.iter().any(|way| way.1 == "checksum-mismatch");
    assert_eq!(s.figure("checksum_mismatches") > 0, lied);
    s.verify();
    assert_eq!(s.figure("failed.requests"), failed);
    s.end();
}

#[test]
fn what_the_disk_said_it_wrote_and_did_not_is_an_error_and_never_something_else() {
    let Some(world) = World::new(&["strace"]) else { return };
    let mut s = Scene::new(&world, &["--ram", "8M", "--overflow", "128M"]);
    s.fill(0, 32 * MIB);
    // The log's places were written before: what lies there is a block's, with a checksum of its own.
    s.fill(0, 32 * MIB);
    let fault = s.fault("pwritev2", "retval=1048576");
    s.fill(0, 24 * MIB);
    assert!(fault.end() > 40);
    let mut lost = 0;
    for at in (0..64 * MIB).step_by(PIECE) {
        match s.read(at, PIECE) {
            Ok(()) => {}
            Err(EIO) => lost += 1,
            Err(errno) => panic!("{at}: errno {errno}"),
        }
    }
    assert!(lost > 40, "{lost} pieces lost");
    assert!(s.figure("checksum_mismatches") >= lost);
    assert_eq!(s.figure("failed.requests"), lost);
    assert_eq!(s.events.next(), "checksum-mismatch");
    s.fill(0, 32 * MIB);
    s.verify();
    s.load(64 * MIB, 2000);
    s.verify();
    assert_eq!(s.figure("failed.requests"), lost);
    s.end();
}
