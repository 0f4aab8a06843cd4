//! Memory and disk space stay within their limits at every moment, and come back.

use crate::client::{Lost, NbdClient};
use crate::deaths::Enough;
use crate::world::{MIB, PATIENCE, World, fio_ends, succeeds};
use spillway_testkit::disk::figure;
use spillway_testkit::footprint::{anonymous_bytes, memfd_bytes, nameless_bytes};
use spillway_testkit::process::wait_until;
use spillway_testkit::{Disk, Driver, End, Load, Oracle, Shape};
use std::path::Path;
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};

/// Bytes of its memfds and of its overflow file. Both processes also hold the guest's memory, which is not the disk's.
fn held(disk: &Disk, dir: &Path) -> (u64, u64) {
    let pids = [disk.supervisor()];
    (memfd_bytes(&pids, "spillway").unwrap(), nameless_bytes(&pids, dir).unwrap())
}

/// One look from outside at what a disk holds, and what it may.
struct Sample {
    memory: u64,
    memory_limit: u64,
    file: u64,
}

impl Sample {
    fn take(disk: &Disk, dir: &Path, ram: u64) -> Sample {
        let own = [disk.supervisor(), disk.worker().unwrap()].map(|p| anonymous_bytes(p).unwrap());
        // The allowance moves meanwhile: the larger of before and after.
        let allowed = || {
            let stats = disk.stats().unwrap();
            let live = figure(&stats, "overflow.used_bytes").unwrap() / 4096;
            24 * live + figure(&stats, "map.bytes").unwrap()
        };
        let before = allowed();
        let (memory, file) = held(disk, dir);
        let memory = memory + own.iter().sum::<u64>();
        Sample { memory, memory_limit: ram * 102 / 100 + 16 * MIB + before.max(allowed()), file }
    }
}

#[test]
fn memory_and_file_stay_within_their_limits_and_come_back() {
    let Some(world) = World::new(&[]) else { return };
    let (ram, overflow, set) = (32 * MIB, 128 * MIB, 128 * MIB);
    let image = world.image(16 * MIB);
    let disk =
        world.serve(&image, &["--size", "128M", "--ram", "32M", "--overflow", "128M", "--full", "fail"]);
    let shape = Shape { queues: 2, depth: 32, request_bytes: 64 << 10, ..Shape::default() };
    let mut driver = Driver::connect_with(&disk.vhost(), shape).unwrap();
    let mut oracle = Oracle::with_base(set, 31, &image).unwrap();

    let over = AtomicBool::new(false);
    let (mut samples, mut most_memory, mut most_file) = (0, 0, 0);
    std::thread::scope(|scope| {
        let load = scope.spawn(|| {
            // Whole blocks at random, written over and over, so that the file fills and is collected; then
            // the same with edges inside blocks and discards between.
            let blocks = Load {
                span_bytes: set,
                random_share: 1.0,
                end: End::Count(150_000),
                ..Load::seed_004(32, End::Count(0))
            };
            let edges =
                Load { request_bytes: 3584, discard_share: 0.1, end: End::Count(40_000), seed: 9, ..blocks };
            let large = Load { request_bytes: 64 << 10, end: End::Count(5_000), seed: 10, ..blocks };
            let outcome = [blocks, edges, large]
                .iter()
                .try_for_each(|l| driver.run_checked(l, &mut oracle).map(|_| ()));
            let outcome = outcome.and_then(|()| driver.verify(&oracle));
            over.store(true, Ordering::Release);
            outcome
        });
        while !over.load(Ordering::Acquire) {
            let s = Sample::take(&disk, world.dir(), ram);
            assert!(s.memory <= s.memory_limit, "{} bytes of memory, {} allowed", s.memory, s.memory_limit);
            // The file system's own tree of extents counts as blocks of the file.
            let allowed = overflow + (64 << 10);
            assert!(s.file <= allowed, "an overflow file of {} bytes, {allowed} allowed", s.file);
            (samples, most_memory, most_file) =
                (samples + 1, most_memory.max(s.memory), most_file.max(s.file));
        }
        load.join().unwrap().unwrap_or_else(|e| panic!("{e:#}\n{}\n{}", disk.log(), disk.stats().unwrap()));
    });
    // What does not fit the RAM tier fits the file, its reserve left out: it is never full.
    assert!(!disk.log().contains("the write cache is full"), "{}", disk.log());
    assert!(samples >= 50, "only {samples} looks");
    assert!(most_memory > ram && most_file > overflow / 2, "it was filled: {most_memory}, {most_file}");
    let stats = disk.stats().unwrap();
    assert!(figure(&stats, "ram.peak_bytes").unwrap() <= ram);
    assert!(figure(&stats, "collector.moved_blocks").unwrap() > 0, "the file was reused: {stats}");

    let empty = Sample::take(&disk, world.dir(), 0);
    driver.discard(0, set).unwrap();
    oracle.discarded(0, set);
    let mut left = (0, 0);
    let back = wait_until(PATIENCE, || {
        left = held(&disk, world.dir());
        (left.0 <= 2 * MIB && left.1 <= 4 * MIB).then_some(())
    });
    assert!(back.is_some(), "{left:?} bytes of memory and file do not come back: {}", disk.stats().unwrap());
    assert!(empty.file > 4 * MIB, "there was something to give back");
    for key in ["ram.used_bytes", "overflow.used_bytes"] {
        assert_eq!(disk.figure(key).unwrap(), 0, "{key}");
    }
    driver.verify(&oracle).unwrap();
    drop(driver);
    disk.stop().unwrap();
}

#[test]
fn a_working_set_that_fits_writes_no_overflow() {
    let Some(world) = World::new(&[]) else { return };
    let image = world.blank(128 * MIB);
    for request_bytes in [4096, 64 << 10] {
        let disk = world.serve(&image, &["--ram", "64M", "--overflow", "256M"]);
        let shape = Shape { depth: 64, request_bytes: 64 << 10, ..Shape::default() };
        let mut driver = Driver::connect_with(&disk.vhost(), shape).unwrap();
        let span = 64 * MIB * 9 / 10 / (64 << 10) * (64 << 10);
        let mut oracle = Oracle::new(128 * MIB, 41);
        driver.run_checked(&Load::fill(span, 64 << 10), &mut oracle).unwrap();
        let load = Load {
            request_bytes,
            span_bytes: span,
            random_share: 1.0,
            end: End::Count(5 * span / request_bytes as u64),
            ..Load::seed_004(64, End::Count(0))
        };
        driver.run_checked(&load, &mut oracle).unwrap();
        driver.flush().unwrap();
        let stats = disk.stats().unwrap();
        assert_eq!(figure(&stats, "ram.used_bytes").unwrap(), span);
        for key in
            ["planes.overflow.written_bytes", "overflow.file_bytes", "evictions.blocks", "stalls.count"]
        {
            assert_eq!(figure(&stats, key).unwrap(), 0, "{key}");
        }
        driver.verify(&oracle).unwrap();
        drop(driver);
        disk.stop().unwrap();
    }
}

/// Whoever has an answer and then asks for the figures finds the request in them, however busy the processors are: also one
/// for which a thread had to read the base image, and that could not be done at once.
#[test]
fn what_was_answered_is_in_the_figures() {
    let Some(world) = World::new(&["qemu-img", "qemu-io"]) else { return };
    let raw = world.image(64 * MIB);
    let images = [raw.clone(), world.qcow2(&raw, "compressed.qcow2", &["-c"])];
    let is_over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let _over = Enough(&is_over);
        for _ in 0..2 * std::thread::available_parallelism().unwrap().get() {
            scope.spawn(|| {
                while !is_over.load(Ordering::Relaxed) {
                    std::hint::spin_loop();
                }
            });
        }
        for image in &images {
            let all_is_in = |disk: &Disk, write: &mut dyn FnMut(u64)| {
                for n in 0..250 {
                    write(n * (256 << 10) + 512);
                    let stats = disk.stats().unwrap();
                    let keys = ["planes.guest.written_bytes", "ram.used_bytes", "inflight"];
                    let figures = keys.map(|key| figure(&stats, key).unwrap());
                    assert_eq!(figures, [(n + 1) * 512, (n + 1) * 4096, 0], "{}: {n}", image.display());
                }
            };
            let disk = world.serve(image, &["--ram", "32M"]);
            let mut driver = Driver::connect(&disk.vhost()).unwrap();
            all_is_in(&disk, &mut |at| driver.write_at(at, &[7; 512]).unwrap());
            drop(driver);
            disk.stop().unwrap();

            let disk = world.serve(image, &["--ram", "32M"]);
            let mut nbd = NbdClient::connect(&disk, 0..1, Lost::Fail);
            all_is_in(&disk, &mut |at| nbd.ask(&format!("write -P 7 {at} 512")));
            nbd.leave();
            disk.stop().unwrap();
        }
    });
}

#[test]
fn reading_an_untouched_disk_of_4_tib_allocates_no_map() {
    let Some(world) = World::new(&["nbdinfo"]) else { return };
    let image = world.image(16 * MIB);
    let disk = world.serve(&image, &["--size", "4T"]);
    let shape = Shape { depth: 16, request_bytes: 1 << 20, ..Shape::default() };
    let mut driver = Driver::connect_with(&disk.vhost(), shape).unwrap();
    assert_eq!(driver.capacity_bytes(), 4 << 40);
    let (before, _) = held(&disk, world.dir());

    // The image, then far and wide, then the last sectors.
    let mut content = vec![0; 64 << 10];
    let base = std::fs::read(&image).unwrap();
    for at in (0..16 * MIB).step_by(64 << 10) {
        driver.read_at(at, &mut content).unwrap();
        assert!(content == base[at as usize..at as usize + (64 << 10)], "{at}");
    }
    for at in (1..4096u64).map(|g| g << 30).chain([(4 << 40) - (64 << 10)]) {
        driver.read_at(at, &mut content).unwrap();
        assert!(content.iter().all(|&b| b == 0), "{at}");
    }
    let contiguous = Load {
        request_bytes: 1 << 20,
        write_share: 0.0,
        random_share: 0.0,
        start_bytes: 1 << 41,
        span_bytes: 2 << 30,
        end: End::Count(2048),
        ..Load::seed_004(16, End::Count(0))
    };
    assert_eq!(driver.run(&contiguous).unwrap().reads, 2048);
    let map = succeeds(Command::new("timeout").args(["60", "nbdinfo", "--map"]).arg(disk.nbd_uri()));
    let last = map.lines().last().unwrap_or_default().split_whitespace().collect::<Vec<_>>();
    let end = last.iter().take(2).map(|n| n.parse::<u64>().unwrap()).sum::<u64>();
    assert_eq!(end, 4 << 40, "the whole disk was asked for: {last:?}");

    assert_eq!(disk.figure("map.bytes").unwrap(), 0);
    let grown = held(&disk, world.dir()).0.saturating_sub(before);
    // The directory, a byte for each 2 MiB, is all that was looked at.
    assert!(grown <= 3 * MIB, "{grown} bytes of memory for reading what was never written");
    drop(driver);
    disk.stop().unwrap();
}

/// As many NBD clients as there can be, each with much in flight: what they hold is in the memory that a disk may
/// take beside its RAM limit.
#[test]
fn nbd_clients_keep_to_the_limit_of_memory() {
    let Some(world) = World::new(&["fio"]) else { return };
    let ram = 32 * MIB;
    let image = world.image(16 * MIB);
    let disk = world.serve(&image, &["--size", "128M", "--ram", "32M", "--overflow", "400M"]);
    // They write over each other: what they read is anyone's guess.
    let load = ["--verify=0", "--do_verify=0", "--rw=randrw", "--bsrange=4k-1m", "--size=128M"];
    let clients = ["--numjobs=14", "--iodepth=32", "--io_size=96M"];
    let fio = world.fio("clients", &disk, &[&load[..], &clients].concat());
    let over = AtomicBool::new(false);
    let (mut samples, mut least_left) = (0, u64::MAX);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            fio_ends(fio);
            over.store(true, Ordering::Release);
        });
        while !over.load(Ordering::Acquire) {
            let s = Sample::take(&disk, world.dir(), ram);
            if s.memory > s.memory_limit {
                over.store(true, Ordering::Release);
                panic!("{} bytes of memory, {} allowed", s.memory, s.memory_limit);
            }
            samples += 1;
            least_left = least_left.min(s.memory_limit - s.memory);
        }
    });
    println!("{samples} looks, at the least {least_left} bytes left");
    assert!(samples >= 20, "only {samples} looks");
    assert!(disk.figure("ram.peak_bytes").unwrap() > ram * 9 / 10, "it was filled");
    disk.stop().unwrap();
}
