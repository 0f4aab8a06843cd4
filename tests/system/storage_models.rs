//! Storage models: what stands on one does what its numbers say, by fio over NBD, and nothing is lost by it.
//!
//! `SPILLWAY_MODEL_SECONDS` makes the loads so long, and takes all models that have names (a soak: 10); without it each takes a
//! second, on those that any host is fast enough for.

use crate::deaths::{kill_worker, nothing_failed, seed};
use crate::world::{DEADLINE, MIB, World, succeeds, until};
use serde_json::Value;
use spillway_testkit::disk::program;
use spillway_testkit::process::cpu_seconds_of;
use spillway_testkit::{Disk, Driver, End, Mixed, Oracle, Rng, Shape, load as pattern};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// Written whole in half a second at 35 MB/s.
const SPAN: u64 = 16 * MIB;
/// How far a rate may be from the model's.
const SHARE: f64 = 0.1;
/// How often a busy host may make a device too slow.
const TRIES: usize = 8;
/// And for how long.
const TRIED: Duration = Duration::from_secs(30);
/// How much faster than a model the host's own disk must be for it to be shown there: fio and the worker share its processors.
const ROOM: f64 = 3.0;

/// A load of fio's, and what the model says of it.
struct Load {
    rw: &'static str,
    bs: &'static str,
    depth: u32,
    /// Seconds that are not counted: a burst is used up in them.
    ramp: u32,
    expected: Rate,
}

#[derive(Clone, Copy, Debug)]
enum Rate {
    Iops(f64),
    Bytes(f64),
    /// The nanoseconds that three of four requests take at least: those that had the processors when they wanted them.
    Took(f64),
}

const fn load(rw: &'static str, bs: &'static str, depth: u32, expected: Rate) -> Load {
    Load { rw, bs, depth, ramp: 0, expected }
}

/// The first one writes every byte: what is read later is in the difference file.
const HDD: [Load; 6] = [
    load("write", "1m", 4, Rate::Bytes(35e6)),
    load("randwrite", "4k", 1, Rate::Took(1e9 / 459.0)),
    load("randwrite", "4k", 16, Rate::Iops(459.0)),
    load("randread", "4k", 1, Rate::Took(1e9 / 459.0)),
    load("randread", "4k", 16, Rate::Iops(459.0)),
    load("read", "1m", 4, Rate::Bytes(35e6)),
];
const FILER: [Load; 1] = [load("randwrite", "4k", 16, Rate::Iops(1600.0))];
/// In the half an hour of its burst.
const P10: [Load; 2] =
    [load("randwrite", "4k", 64, Rate::Iops(3500.0)), load("write", "1m", 4, Rate::Bytes(170e6))];
/// By its own numbers but for the length of the burst, which is over.
const P10_RESTLESS: [Load; 2] = [
    Load { ramp: 3, ..load("randwrite", "4k", 64, Rate::Iops(500.0)) },
    Load { ramp: 3, ..load("write", "1m", 4, Rate::Bytes(100e6)) },
];
const SATA_SSD: [Load; 3] = [
    load("randwrite", "4k", 1, Rate::Took(80e3)),
    load("randwrite", "4k", 64, Rate::Iops(90_000.0)),
    load("write", "1m", 4, Rate::Bytes(520e6)),
];
const NVME: [Load; 3] = [
    load("randwrite", "4k", 1, Rate::Took(20e3)),
    load("randwrite", "4k", 64, Rate::Iops(500_000.0)),
    load("write", "1m", 4, Rate::Bytes(3e9)),
];
/// The same kinds of device, slow enough for any host.
const BURSTS: [Load; 2] = [
    Load { ramp: 1, ..load("randwrite", "4k", 16, Rate::Iops(500.0)) },
    Load { ramp: 1, ..load("write", "1m", 4, Rate::Bytes(20.0 * MIB as f64)) },
];
const LATENCY: [Load; 2] =
    [load("randwrite", "4k", 1, Rate::Took(4e6)), load("randwrite", "4k", 16, Rate::Took(4e6))];

/// How long each load runs, if this is the long form.
fn long() -> Option<u32> {
    std::env::var("SPILLWAY_MODEL_SECONDS").ok().and_then(|n| n.parse().ok())
}

fn create(world: &World, model: &str) -> PathBuf {
    let path = world.path("model");
    let mut create = Command::new(program().unwrap());
    create.args(["storage-model", "create", "--force", model]).arg(&path);
    succeeds(&mut create);
    path
}

fn on<'a>(option: &'a str, model: &'a Path) -> [&'a str; 2] {
    [option, model.to_str().unwrap()]
}

/// What fio gets, and how many requests a second that is.
fn measure(world: &World, disk: &Disk, load: &Load, seconds: u32) -> (Rate, f64) {
    let mut fio = Command::new("fio");
    // It leaves state files where it stands.
    fio.current_dir(world.dir());
    fio.args(["--ioengine=nbd", "--name=load", "--output-format=json", "--time_based", "--norandommap"]);
    fio.arg("--percentile_list=25");
    fio.arg(format!("--uri={}", disk.nbd_uri())).arg(format!("--size={SPAN}"));
    fio.args([format!("--rw={}", load.rw), format!("--bs={}", load.bs), format!("--iodepth={}", load.depth)]);
    fio.args([format!("--ramp_time={}", load.ramp), format!("--runtime={seconds}")]);
    let stdout = succeeds(&mut fio);
    let json: Value = serde_json::from_str(&stdout[stdout.find('{').unwrap()..]).unwrap();
    let way = &json["jobs"][0][if load.rw.ends_with("read") { "read" } else { "write" }];
    let figure = |figure: &Value| figure.as_f64().unwrap();
    let rate = match load.expected {
        Rate::Iops(_) => Rate::Iops(figure(&way["iops"])),
        Rate::Bytes(_) => Rate::Bytes(figure(&way["bw_bytes"])),
        Rate::Took(_) => Rate::Took(figure(&way["clat_ns"]["percentile"]["25.000000"])),
    };
    (rate, figure(&way["iops"]))
}

fn ratio(found: Rate, expected: Rate) -> f64 {
    match (found, expected) {
        (Rate::Iops(found), Rate::Iops(expected)) | (Rate::Bytes(found), Rate::Bytes(expected)) => {
            found / expected
        }
        (Rate::Took(found), Rate::Took(expected)) => expected / found,
        _ => panic!("{found:?} is not of the kind of {expected:?}"),
    }
}

/// Another test on the same processors and store may keep fio from asking for a while: then it is measured again.
fn holds(world: &World, disk: &Disk, model: &str, load: &Load, seconds: u32) {
    let (begun, mut ratios) = (Instant::now(), Vec::new());
    while begun.elapsed() < TRIED && ratios.len() < TRIES {
        let (found, iops) = measure(world, disk, load, seconds);
        let Load { rw, bs, depth, expected, .. } = load;
        println!("{model}: {rw} {bs}, {depth} at once: {found:.0?}, of {expected:.0?}; {iops:.1} a second");
        ratios.push(ratio(found, *expected));
        // A busy host makes a device slower, never faster.
        let ratio = ratios.last().unwrap();
        assert!(
            *ratio <= 1.0 + SHARE,
            "{model}: {rw} {bs}, {depth} at once: {ratios:.3?} of what it should be"
        );
        if *ratio >= 1.0 - SHARE {
            return;
        }
    }
    panic!("{model}: {} {}, {} at once: {ratios:.3?} of what it should be", load.rw, load.bs, load.depth);
}

/// A disk in which every write and read is one of the store.
fn judge(world: &World, model: &str, loads: &[Load], seconds: u32) {
    let image = world.blank(SPAN);
    let path = create(world, model);
    let disk = world.serve(&image, &[&["--mode", "direct"], &on("--overflow-model", &path)[..]].concat());
    loads.iter().for_each(|load| holds(world, &disk, model, load, seconds));
    disk.stop().unwrap();
}

#[test]
fn a_disk_of_seed_004_does_459_requests_or_35_mb_a_second() {
    let Some(world) = World::new(&["fio"]) else { return };
    judge(&world, "hdd-seed-004", &HDD, long().unwrap_or(1));
}

#[test]
fn a_device_with_limits_keeps_to_them_when_its_burst_is_used() {
    let Some(world) = World::new(&["fio"]) else { return };
    let seconds = long().unwrap_or(1);
    judge(&world, "filer-1600-iops", &FILER, seconds);
    judge(&world, "iops=500,iops-burst=200,bandwidth=20M,bandwidth-burst=10M", &BURSTS, seconds);
    judge(&world, "latency=4ms", &LATENCY, seconds);
    if long().is_some() {
        judge(&world, "premium-disk-p10", &P10, seconds);
        let restless = "latency=1ms,iops=500,iops-burst=3000,iops-peak=3500,bandwidth=100000000,bandwidth-burst=140000000,bandwidth-peak=170000000";
        judge(&world, restless, &P10_RESTLESS, seconds);
        judge_fast_ones(&world, seconds);
    }
}

/// What half of the writes take at most, one at a time, by the lab's own generator: NBD and fio take as long as such a device.
fn alone(disk: &Disk, seconds: u32) -> f64 {
    let mut driver = Driver::connect(&disk.vhost()).unwrap();
    let end = End::After(Duration::from_secs(seconds.into()));
    let load = pattern::Load {
        write_share: 1.0,
        random_share: 1.0,
        span_bytes: SPAN,
        ..pattern::Load::seed_004(1, end)
    };
    driver.run(&load).unwrap().p50_ns as f64
}

/// Not every host is fast enough for these: where it is not, they make nothing faster.
fn judge_fast_ones(world: &World, seconds: u32) {
    for (model, loads) in [("sata-ssd", SATA_SSD), ("nvme", NVME)] {
        let image = world.blank(SPAN);
        let path = create(world, model);
        let free = world.serve(&image, &["--mode", "direct"]);
        let possible = loads.each_ref().map(|load| measure(world, &free, load, seconds).0);
        let possible_alone = alone(&free, seconds);
        free.stop().unwrap();
        let disk = world.serve(&image, &[&["--mode", "direct"], &on("--overflow-model", &path)[..]].concat());
        for (load, possible) in loads.iter().zip(possible) {
            if ratio(possible, load.expected) >= ROOM {
                holds(world, &disk, model, load, seconds);
            } else {
                let (found, iops) = measure(world, &disk, load, seconds);
                let (rw, bs, depth) = (load.rw, load.bs, load.depth);
                println!("{model}: {rw} {bs}, {depth} at once: {found:.0?}, {iops:.1} a second");
                println!("    the host alone {possible:.0?}: too slow for {:.0?}", load.expected);
                assert!(ratio(found, load.expected) <= 1.0 + SHARE, "{found:?}, of {:?}", load.expected);
            }
        }
        let Rate::Took(expected) = loads[0].expected else { panic!("{:?}", loads[0].expected) };
        let found = alone(&disk, seconds);
        println!(
            "{model}: randwrite 4k, 1 at once, without NBD: {found:.0} ns; the host alone {possible_alone:.0}"
        );
        assert!(found >= (1.0 - SHARE) * expected, "{model}: {found} ns, of {expected}");
        if possible_alone < expected {
            assert!(found <= (1.0 + SHARE) * expected, "{model}: {found} ns, of {expected}");
        }
        disk.stop().unwrap();
    }
}

/// fio writes 4 KiB anywhere to each disk; what that comes to on the stores below, in a second, and in how many writes.
/// So many are asked for at once that the stores have something to do while others have the processors.
fn below(disks: &[(&World, &Disk)], span: u64) -> Vec<(f64, f64)> {
    let seconds = long().unwrap_or(2);
    let figures = || {
        let of = |disk: &Disk, key: &str| disk.figure(&format!("planes.overflow.{key}")).unwrap() as f64;
        disks.iter().map(|(_, disk)| (of(disk, "written_bytes"), of(disk, "writes"))).collect::<Vec<_>>()
    };
    std::thread::scope(|scope| {
        for (world, disk) in disks {
            let mut fio = Command::new("fio");
            fio.current_dir(world.dir()).args(["--ioengine=nbd", "--name=load", "--rw=randwrite", "--bs=4k"]);
            fio.args(["--iodepth=64", "--time_based", &format!("--runtime={}", seconds + 2)]);
            fio.args([format!("--size={span}"), format!("--uri={}", disk.nbd_uri())]);
            scope.spawn(move || succeeds(&mut fio));
        }
        until("all are written to", disks[0].1, || figures().iter().all(|(_, writes)| *writes > 20.0));
        let (begun, before) = (Instant::now(), figures());
        std::thread::sleep(Duration::from_secs(seconds.into()));
        let (after, took) = (figures(), begun.elapsed().as_secs_f64());
        let grown = after.iter().zip(&before).map(|(a, b)| ((a.0 - b.0) / took, (a.1 - b.1) / took));
        grown.collect()
    })
}

#[test]
fn disks_on_one_device_share_it_and_who_waits_for_it_burns_no_processor() {
    let (Some(world), Some(other)) = (World::new(&["fio"]), World::new(&["fio"])) else { return };
    let model = create(&world, "hdd-seed-004");
    let options = [&["--mode", "direct"], &on("--overflow-model", &model)[..]].concat();
    let disks = [&world, &other].map(|world| world.serve(&world.blank(SPAN), &options));
    let workers = disks.each_ref().map(|disk| disk.worker().unwrap());
    let (begun, before) = (Instant::now(), cpu_seconds_of(&workers).unwrap());
    let found = below(&[(&world, &disks[0]), (&other, &disks[1])], SPAN);
    let used = (cpu_seconds_of(&workers).unwrap() - before) / begun.elapsed().as_secs_f64();
    let [one, two] = [found[0].1, found[1].1];
    println!("{one:.1} and {two:.1} writes a second, {used:.3} of a processor");
    assert!(((one + two) / 459.0 - 1.0).abs() <= SHARE, "{found:?}");
    assert!((one - two).abs() <= 0.2 * 459.0, "{found:?}");
    assert!(used < 0.4, "{used}");
    disks.into_iter().for_each(|disk| disk.stop().unwrap());
}

/// Random writes of a guest that do not fit the RAM.
#[test]
fn eviction_is_as_fast_as_the_device_is_in_order() {
    let Some(world) = World::new(&["fio"]) else { return };
    let image = world.blank(16 * SPAN);
    let model = create(&world, "hdd-seed-004");
    let options = [&["--ram", "16M"], &on("--overflow-model", &model)[..]].concat();
    let disk = world.serve(&image, &options);
    let rate = below(&[(&world, &disk)], 16 * SPAN)[0].0;
    println!("{:.1} MB/s are evicted", rate / 1e6);
    assert!((0.75..1.1).contains(&(rate / 35e6)), "{rate} bytes a second");
    disk.stop().unwrap();
}

/// A base image costs what its store would take, and what the host has in memory is on no store.
#[test]
fn reads_of_a_base_image_are_held_if_they_reach_its_store() {
    let Some(world) = World::new(&["qemu-img"]) else { return };
    let raw = world.image(8 * MIB);
    let images = [raw.clone(), world.qcow2(&raw, "packed.qcow2", &["-c"])];
    let model = create(&world, "latency=30ms");
    let shape = Shape { queues: 1, depth: 4, request_bytes: 64 << 10, deadline: DEADLINE };
    for image in &images {
        for (cache, held) in [("none", true), ("host", false)] {
            // From now on it is in the host's memory.
            std::fs::read(image).unwrap();
            let options = [&["--base-cache", cache], &on("--base-model", &model)[..]].concat();
            let disk = world.serve(image, &options);
            let oracle = Oracle::with_base(8 * MIB, 0, &raw).unwrap();
            let mut driver = Driver::connect_with(&disk.vhost(), shape).unwrap();
            let mut slowest = Duration::ZERO;
            for at in [0, 3 * MIB, 7 * MIB + 512] {
                let begun = Instant::now();
                let mut content = vec![0; 16 << 10];
                driver.read_at(at, &mut content).unwrap();
                slowest = slowest.max(begun.elapsed());
                oracle.check(at, &content).unwrap();
            }
            let reached = disk.figure("planes.base.store_reads").unwrap() > 0;
            assert_eq!(reached, held, "{}, {cache}", image.display());
            assert_eq!(
                slowest >= Duration::from_millis(30),
                held,
                "{slowest:?}: {}, {cache}",
                image.display()
            );
            drop(driver);
            disk.stop().unwrap();
        }
    }
}

/// Those that were held have not been answered: the next worker does them anew, at the device's pace.
#[test]
fn a_worker_that_is_killed_while_completions_are_held_loses_nothing() {
    let Some(world) = World::new(&[]) else { return };
    let image = world.image(8 * MIB);
    let model = create(&world, "latency=20ms");
    let mut rng = Rng::new(seed());
    for (mode, engine) in [("direct", "io_uring"), ("overflow", "threads")] {
        let both = [on("--overflow-model", &model), on("--base-model", &model)].concat();
        let options = [&["--mode", mode, "--size", "32M"][..], &both].concat();
        let disk = world.serve_by(engine, &image, &options);
        let mut oracle = Oracle::with_base(32 * MIB, rng.next_u64(), &image).unwrap();
        let shape = Shape { queues: 2, depth: 32, request_bytes: 128 << 10, deadline: DEADLINE };
        let mut driver = Driver::connect_with(&disk.vhost(), shape).unwrap();
        let enough = AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let (mut last, mut rng) = (0, Rng::new(7));
                (0..3).for_each(|_| last = kill_worker(&disk, last, Duration::from_millis(200), &mut rng));
                enough.store(true, Ordering::Relaxed);
            });
            while !enough.load(Ordering::Relaxed) {
                let (start_bytes, span_bytes, largest_bytes, depth) = (0, 32 * MIB, 64 << 10, 32);
                let (end, seed) = (End::Count(100), rng.next_u64());
                let mixed = Mixed { start_bytes, span_bytes, largest_bytes, depth, end, seed };
                let done = driver.run_mixed(&mixed, &mut oracle);
                done.unwrap_or_else(|e| panic!("{e:#}\n{}", disk.log()));
            }
        });
        driver.verify(&oracle).unwrap_or_else(|e| panic!("{e:#}\n{}", disk.log()));
        let stats = disk.stats().unwrap();
        nothing_failed(&stats);
        assert!(disk.figure("restarts").unwrap() >= 3, "{stats}");
        let typical = disk.figure("latency.overflow_write.p50_ns").unwrap();
        assert!((19_000_000..60_000_000).contains(&typical), "{typical}");
        drop(driver);
        disk.stop().unwrap();
    }
}

#[test]
fn what_is_no_model_is_refused_and_one_that_is_there_is_kept() {
    let Some(world) = World::new(&[]) else { return };
    let run = |words: &[&str]| Command::new(program().unwrap()).args(words).output().unwrap();
    let path = create(&world, "nvme");
    let path = path.to_str().unwrap();
    let before = std::fs::read(path).unwrap();
    let refused = run(&["storage-model", "create", "sata-ssd", path]);
    let stderr = String::from_utf8_lossy(&refused.stderr);
    assert!(refused.status.code() == Some(73) && stderr.contains("--force"), "{stderr}");
    assert!(std::fs::read(path).unwrap() == before);
    assert_eq!(std::fs::read_dir(world.dir()).unwrap().count(), 1, "nothing is left beside it");
    let image = world.blank(MIB);
    let (image, socket) = (image.to_str().unwrap(), world.path("nbd"));
    for option in ["--overflow-model", "--base-model"] {
        let refused = run(&["serve", "--image", image, "--nbd", socket.to_str().unwrap(), option, image]);
        let stderr = String::from_utf8_lossy(&refused.stderr);
        assert!(refused.status.code() == Some(2) && stderr.contains("storage-model create"), "{stderr}");
    }
}
