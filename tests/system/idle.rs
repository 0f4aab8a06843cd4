//! What a disk costs that nobody asks for anything: little memory, and no processor time.
//!
//! Its memory is what its two processes have mapped, each by its share (PSS), and the memfd with map and counters,
//! mapped or not; the slots of the RAM tier are left out, and hold at rest what the guest wrote and nothing else. Of a
//! page that others have mapped too (the program itself among the disks of a host, the C library among all that runs)
//! each of them pays its part: a disk that is alone on the host pays the whole program, and 200 share it. The guest's
//! memory, mapped by the worker, is the guest's.

use crate::world::{MIB, World, until};
use spillway_testkit::disk::figure;
use spillway_testkit::footprint::{memfd_bytes, proportional_bytes};
use spillway_testkit::process::cpu_seconds_of;
use spillway_testkit::{Disk, Driver, End, Load, Shape};
use std::path::PathBuf;
use std::time::{Duration, Instant};

/// What an idle disk may cost.
const MOST: u64 = 8 * MIB;
/// Disks of a host that is full of them; each of so many has a VMM connected.
const DISKS: usize = 200;
const CONNECTED_EACH: usize = 4;
/// How long nobody asks for anything.
const QUIET: Duration = Duration::from_secs(5);
/// What all disks together may take meanwhile: five ticks of the kernel's clock of processor time.
const MOST_CPU_SECONDS: f64 = 0.05;

/// Small enough that hundreds of drivers fit a test.
const SHAPE: Shape =
    Shape { queues: 1, depth: 16, request_bytes: 64 << 10, deadline: Duration::from_secs(30) };

/// Both processes of a disk.
fn processes(disk: &Disk) -> [u32; 2] {
    [disk.supervisor(), disk.report["worker_pid"].as_u64().unwrap() as u32]
}

/// What a disk costs, and how much of that map and counters take.
fn cost(disk: &Disk) -> (u64, u64) {
    let mapped: u64 = processes(disk).iter().map(|&p| proportional_bytes(p).unwrap()).sum();
    let memfd = memfd_bytes(&processes(disk), "spillway-meta").unwrap();
    (mapped + memfd, memfd)
}

/// Waits until the slots that were made ready ahead of need are given back: those that are left have content.
#[track_caller]
fn comes_to_rest(disk: &Disk) {
    until("memory ahead of need is given back", disk, || {
        let slots = memfd_bytes(&processes(disk), "spillway-data").unwrap();
        slots <= disk.figure("ram.used_bytes").unwrap()
    });
}

#[test]
fn an_idle_disk_costs_below_8_mib() {
    let Some(world) = World::new(&[]) else { return };
    let image = world.image(64 * MIB);
    // Another disk, which has its part of the program's pages whatever other tests have now. Alone, this build of the program
    // with all its checks costs a disk more than that.
    let beside = World::new(&[]).expect("there was one");
    let other = beside.serve(&beside.image(64 * MIB), &["--ram", "64M", "--overflow", "1G"]);
    let disk = world.serve(&image, &["--size", "4G", "--ram", "64M", "--overflow", "1G"]);
    let mut driver = Driver::connect_with(&disk.vhost(), SHAPE).unwrap();
    let load = |requests, span_bytes| Load {
        random_share: 1.0,
        span_bytes,
        end: End::Count(requests),
        ..Load::seed_004(16, End::Count(0))
    };
    driver.run(&load(5_000, 64 * MIB)).unwrap();
    comes_to_rest(&disk);
    let (little, memfd) = cost(&disk);
    println!("a disk that was written a little: {little} bytes, {memfd} of them map and counters");
    assert!(little < MOST, "{little} bytes, {memfd} of them map and counters");

    // The buffers of eviction, and of reads of the overflow, were all used once.
    driver.run(&load(150_000, 256 * MIB)).unwrap();
    let large = Load { request_bytes: 64 << 10, write_share: 0.0, ..load(5_000, 256 * MIB) };
    driver.run(&large).unwrap();
    let stats = disk.stats().unwrap();
    assert!(figure(&stats, "planes.overflow.read_bytes").unwrap() > 64 * MIB, "{stats}");
    let mut last = None;
    until("eviction has done its work", &disk, || {
        let moved = disk.figure("evictions.blocks").unwrap();
        last.replace(moved) == Some(moved)
    });
    let (much, memfd) = cost(&disk);
    println!("after eviction and reads: {much} bytes, {memfd} of them map and counters");
    assert!(much < MOST, "{much} bytes, {memfd} of them map and counters");
    drop(driver);
    disk.stop().unwrap();
    other.stop().unwrap();
}

#[test]
fn two_hundred_idle_disks_take_no_processor_time() {
    let Some(world) = World::new(&[]) else { return };
    let image = world.image(8 * MIB);
    let content = std::fs::read(&image).unwrap();
    let begun = Instant::now();
    let dirs: Vec<PathBuf> = (0..DISKS).map(|i| world.path(&i.to_string())).collect();
    let disks: Vec<Disk> = dirs
        .iter()
        .map(|dir| {
            std::fs::create_dir(dir).unwrap();
            Disk::start(dir, &image, &["--size", "4G"]).unwrap()
        })
        .collect();
    let mut drivers: Vec<Driver> = disks
        .iter()
        .step_by(CONNECTED_EACH)
        .map(|disk| {
            let mut driver = Driver::connect_with(&disk.vhost(), SHAPE).unwrap();
            driver.write_at(4 * MIB, &[7; 64 << 10]).unwrap();
            driver
        })
        .collect();
    disks.iter().for_each(comes_to_rest);
    println!("{DISKS} disks, {} with a VMM, at rest after {:.1?}", drivers.len(), begun.elapsed());

    let pids: Vec<u32> = disks.iter().flat_map(processes).collect();
    let before = cpu_seconds_of(&pids).unwrap();
    std::thread::sleep(QUIET);
    let used = cpu_seconds_of(&pids).unwrap() - before;
    let costs: u64 = disks.iter().map(|disk| cost(disk).0).sum();
    println!("{:.0} ms of processor time, {} bytes a disk", used * 1e3, costs / DISKS as u64);
    assert!(used < MOST_CPU_SECONDS, "{used} s of processor time in {QUIET:?}");
    assert!(costs / (DISKS as u64) < MOST, "{costs} bytes in all");

    // They sleep, and are not dead.
    let mut read = vec![0; 64 << 10];
    for (i, disk) in disks.iter().enumerate() {
        let is_connected = i % CONNECTED_EACH == 0;
        let mut newcomer = None;
        let driver = match is_connected {
            true => &mut drivers[i / CONNECTED_EACH],
            false => newcomer.insert(Driver::connect_with(&disk.vhost(), SHAPE).unwrap()),
        };
        driver.read_at(MIB, &mut read).unwrap();
        assert!(read == content[MIB as usize..][..read.len()], "disk {i}");
        driver.read_at(4 * MIB, &mut read).unwrap();
        let there = &content[4 * MIB as usize..][..read.len()];
        assert!(if is_connected { read.iter().all(|&b| b == 7) } else { read == there }, "disk {i}");
        let stats = disk.stats().unwrap();
        assert_eq!(figure(&stats, "worker_pid").unwrap(), u64::from(processes(disk)[1]), "disk {i}: {stats}");
        assert!(figure(&stats, "planes.guest.read_bytes").unwrap() >= 2 * read.len() as u64, "disk {i}");
    }
    drop(drivers);
    for disk in disks {
        disk.stop().unwrap();
    }
    println!("ended after {:.1?}", begun.elapsed());
}
