//! Windows' driver `viostor` on a disk, without Windows: a driver that lays its requests out as `viostor` does, asks for all that
//! it asks for, and resets its device when the disk does not answer. Every byte is checked.
//!
//! `SPILLWAY_VIOSTOR` says how many requests (100,000; a soak takes 10 million).

use crate::deaths::{grown, nothing_failed, seed, worker};
use crate::world::{MIB, World, until};
use rustix::process::{Pid, Signal};
use serde_json::Value;
use spillway_testkit::disk::figure;
use spillway_testkit::process::send_signal;
use spillway_testkit::viostor::{Adapter, Command, Mode, Windows};
use spillway_testkit::{Disk, Oracle, Rng};
use std::time::{Duration, Instant};

/// The image ends before the disk does.
const IMAGE: u64 = 32 * MIB;
const DISK: u64 = 48 * MIB;
/// Processors of the guest, each with a queue of its own.
const CPUS: usize = 4;
/// Descriptors of a queue: what QEMU makes.
const QUEUE: u16 = 128;
/// Within it each command must end while the disk is said to hang. Windows has 60 s.
const TIMEOUT: Duration = Duration::from_millis(300);
/// How often each trouble comes.
const TROUBLES: u64 = 5;

/// What happens while requests are under way.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Trouble {
    /// The worker stands still, requests time out, the driver resets the device, the worker goes on.
    Hangs,
    /// The same, but the worker is killed while the reset waits for it.
    HangsAndDies,
    /// The worker stands still, for less than a time-out.
    Stutters,
    /// The worker is killed.
    Dies,
    /// The device is reset while nothing is wrong.
    Reset,
    /// Windows stops, its dump driver takes the disk over, and then it starts again.
    CrashDump,
}

const ALL: [Trouble; 6] = [
    Trouble::Hangs,
    Trouble::HangsAndDies,
    Trouble::Stutters,
    Trouble::Dies,
    Trouble::Reset,
    Trouble::CrashDump,
];

/// What the troubles were to come to.
#[derive(Debug, Default)]
struct Meant {
    resets: u64,
    timed_out_resets: u64,
    deaths: u64,
    dumped: u64,
}

fn requests() -> u64 {
    std::env::var("SPILLWAY_VIOSTOR").ok().and_then(|n| n.parse().ok()).unwrap_or(100_000)
}

fn connect(disk: &Disk) -> Adapter {
    Adapter::connect(&disk.vhost(), CPUS, QUEUE).unwrap_or_else(|e| panic!("{e:#}\n{}", disk.log()))
}

fn signal(pid: u32, signal: Signal) {
    send_signal(Pid::from_raw(pid as i32).unwrap(), signal).unwrap();
}

/// Stops the worker.
fn hold_still(disk: &Disk) -> u32 {
    let pid = worker(disk);
    signal(pid, Signal::STOP);
    pid
}

/// One trouble, and that it came to what it should.
fn trouble(disk: &Disk, windows: &mut Windows, what: Trouble, rng: &mut Rng, meant: &mut Meant) {
    let must =
        |result: anyhow::Result<()>| result.unwrap_or_else(|e| panic!("{what:?}: {e:#}\n{}", disk.log()));
    match what {
        Trouble::Hangs | Trouble::HangsAndDies => {
            let pid = hold_still(disk);
            let overdue = windows.run_into_timeout(TIMEOUT).unwrap();
            assert!(overdue > 0 && windows.adapter().in_flight() == usize::from(QUEUE));
            let dies = what == Trouble::HangsAndDies;
            must(
                windows.reset(Mode::Running, || signal(pid, if dies { Signal::KILL } else { Signal::CONT })),
            );
            meant.timed_out_resets += 1;
            meant.resets += 1;
            meant.deaths += u64::from(dies);
        }
        Trouble::Stutters => {
            let pid = hold_still(disk);
            let overdue = windows.run_into_timeout(Duration::from_millis(rng.below(50))).unwrap();
            assert!(overdue > 0);
            signal(pid, Signal::CONT);
        }
        Trouble::Dies => {
            signal(worker(disk), Signal::KILL);
            meant.deaths += 1;
        }
        Trouble::Reset => {
            must(windows.reset(Mode::Running, || {}));
            meant.resets += 1;
        }
        Trouble::CrashDump => {
            must(windows.reset(Mode::Dump, || {}));
            assert_eq!(windows.adapter().queues(), 1);
            let dumped = 50 + rng.below(200);
            must(windows.run(dumped));
            must(windows.reset(Mode::Running, || {}));
            assert_eq!(windows.adapter().queues(), CPUS);
            meant.resets += 2;
            meant.dumped += dumped;
        }
    }
    // The next one comes when this one is over.
    until("the next worker", disk, || disk.figure("restarts").unwrap() == meant.deaths);
    must(windows.run(2 * u64::from(QUEUE)));
}

/// All tiers were used: otherwise less was tested than it seems.
fn every_tier_was_used(before: &Value, after: &Value) {
    for key in
        ["evictions.blocks", "collector.moved_blocks", "planes.base.read_bytes", "planes.overflow.read_bytes"]
    {
        let grown = grown(before, after, key);
        println!("{key}: {grown}");
        assert!(grown > 0, "{key}: {after}");
    }
}

#[test]
fn windows_reads_what_it_wrote_through_timeouts_resets_and_deaths() {
    let Some(world) = World::new(&[]) else { return };
    let requests = requests();
    let seed = seed();
    let image = world.image(IMAGE);
    let disk = world.serve(&image, &["--size", "48M", "--ram", "8M", "--overflow", "64M"]);
    let oracle = Oracle::with_base(DISK, seed, &image).unwrap();
    let mut windows = Windows::new(connect(&disk), oracle, seed);
    assert_eq!(windows.adapter().queues(), CPUS);
    let limits = windows.adapter().limits();
    assert_eq!((limits.block_bytes, limits.physical_block_exp, limits.granularity_blocks), (512, 3, 8));
    assert_eq!((limits.transfer_bytes, limits.segments, limits.depth), (125 * 4096, 126, usize::from(QUEUE)));
    assert_eq!((limits.unmap_ranges, limits.unmap_granularity_blocks), (1, 8));
    let before = disk.stats().unwrap();
    let mut rng = Rng::new(seed ^ 1);
    let mut meant = Meant::default();
    let begin = Instant::now();
    // Each trouble as often, in an order by chance.
    let mut troubles: Vec<Trouble> = ALL.repeat((TROUBLES * (requests / 1_000_000).clamp(1, 10)) as usize);
    (1..troubles.len()).rev().for_each(|i| troubles.swap(i, rng.below(i as u64 + 1) as usize));
    let share = requests / (troubles.len() as u64 + 1);
    let run = |windows: &mut Windows, most: u64| {
        windows.run(most).unwrap_or_else(|e| panic!("{e:#}\n{}", disk.log()));
    };
    for &what in &troubles {
        run(&mut windows, share);
        trouble(&disk, &mut windows, what, &mut rng, &mut meant);
    }
    let rest = requests.saturating_sub(windows.counts().requests());
    run(&mut windows, rest);
    windows.verify().unwrap_or_else(|e| panic!("{e:#}\n{}", disk.log()));
    let strays = windows.adapter().look_for_all_strays();
    let counts = windows.counts();
    let seconds = begin.elapsed().as_secs_f64();
    println!("{counts:?}");
    println!(
        "meant {meant:?}, {} troubles, {strays} stray writes, {seconds:.1} s, {:.0} requests a second",
        troubles.len(),
        counts.requests() as f64 / seconds
    );
    assert_eq!(counts.mismatches, 0, "{:#?}\n{}", windows.wrong(), disk.log());
    assert_eq!(strays, 0, "the disk wrote to memory of requests after the reset of their device");
    assert!(counts.requests() >= requests, "{counts:?}");
    assert_eq!(counts.resets, meant.resets);
    assert_eq!(meant.timed_out_resets, 2 * troubles.len() as u64 / ALL.len() as u64);
    // A reset after a time-out finds all that could be under way.
    assert!(counts.repeated >= meant.timed_out_resets * u64::from(QUEUE), "{counts:?}");
    let each = requests / 1000;
    for (what, count, least) in [
        ("reads", counts.reads, 300 * each),
        ("writes", counts.writes, 300 * each),
        ("forced writes", counts.forced_writes, 30 * each),
        ("UNMAPs", counts.unmaps, 30 * each),
        ("empty UNMAPs", counts.empty_unmaps, each),
        ("flushes", counts.flushes, 20 * each),
        ("serial numbers", counts.serial_numbers, each / 2),
        ("changes of the write cache", counts.cache_changes, 1),
    ] {
        assert!(count >= least, "{count} {what}: {least} at least were meant");
    }
    let after = disk.stats().unwrap();
    assert_eq!(figure(&after, "restarts").unwrap(), meant.deaths);
    assert_eq!(figure(&after, "checksum_mismatches").unwrap(), 0);
    nothing_failed(&after);
    every_tier_was_used(&before, &after);
    drop(windows);
    disk.stop().unwrap();
}

/// A discard that begins or ends within a block (issue 513): what is beside it stays, to the sector.
#[test]
fn discards_that_do_not_fit_blocks_keep_the_rest() {
    let Some(world) = World::new(&[]) else { return };
    let image = world.image(2 * MIB);
    let disk = world.serve(&image, &["--size", "4M", "--ram", "8M", "--overflow", "16M"]);
    let oracle = Oracle::with_base(4 * MIB, 1, &image).unwrap();
    let mut windows = Windows::new(connect(&disk), oracle, 1);
    // Over written blocks, over the image, over what lies behind it.
    for start in [0, 2048, 6144] {
        let write = |sector| Command::Write { sector, sectors: 64, fua: false };
        if start == 0 {
            windows.one(write(start)).unwrap();
        }
        for (sector, sectors) in [(1, 6), (1, 7), (7, 1), (7, 2), (8, 7), (9, 15), (15, 18), (1, 62), (40, 8)]
        {
            windows.one(Command::Unmap(vec![(start + sector, sectors)])).unwrap();
            windows.verify().unwrap();
        }
    }
    assert_eq!(windows.counts().mismatches, 0, "{:#?}", windows.wrong());
    drop(windows);
    disk.stop().unwrap();
}

/// "Optimize drive" on a volume of more than one discard can name: Windows cuts at the limit (pull requests 824, 858), and all
/// blocks are given back, also those at the cuts.
#[test]
fn a_retrim_gives_all_blocks_back() {
    const SIZE: u64 = 9 << 30;
    let Some(world) = World::new(&[]) else { return };
    let image = world.blank(MIB);
    let disk = world.serve(&image, &["--size", "9G", "--ram", "16M", "--overflow", "16M"]);
    let mut windows = Windows::new(connect(&disk), Oracle::new(SIZE, 1), 1);
    let limit = u64::from(windows.adapter().limits().unmap_sectors);
    assert!(2 * limit < SIZE / 512, "it is cut twice");
    for sector in [0, limit - limit % 8 - 8, 2 * limit - 2 * limit % 8 - 8, SIZE / 512 - 16] {
        windows.one(Command::Write { sector, sectors: 16, fua: true }).unwrap();
    }
    assert!(disk.figure("ram.used_bytes").unwrap() >= 8 * 4096);
    windows.retrim(0, SIZE / 512).unwrap();
    assert_eq!(disk.figure("ram.used_bytes").unwrap(), 0, "{}", disk.stats().unwrap());
    drop(windows);
    disk.stop().unwrap();
}
