//! What a load may rely on while it goes on: a limit that changes costs it no request, and each queue gets its share.

use crate::deaths::seed;
use crate::world::{MIB, World, succeeds, until};
use spillway_testkit::disk::{figure, program};
use spillway_testkit::footprint::memfd_bytes;
use spillway_testkit::process::wait_until;
use spillway_testkit::{Ask, Driver, End, Load, Oracle, Rng, Shape};
use std::process::Command;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// How long the memory of a RAM limit that has fallen may take to come back, and so how long a write may wait for it.
const BACK_WITHIN: Duration = Duration::from_secs(5);

#[test]
fn a_ram_limit_that_falls_under_load_gives_memory_back_and_costs_no_request() {
    let Some(world) = World::new(&[]) else { return };
    // 128 MiB must leave: a disk that others keep busy too takes that in the time.
    let (size, from, to) = (160 * MIB, 256 * MIB, 32 * MIB);
    let image = world.image(16 * MIB);
    let disk = world.serve(&image, &["--size", "160M", "--ram", "256M", "--overflow", "1G"]);
    let seed = seed();
    let shape = Shape { queues: 2, depth: 32, request_bytes: 64 << 10, ..Shape::default() };
    let mut driver = Driver::connect_with(&disk.vhost(), shape).unwrap();
    let mut oracle = Oracle::with_base(size, seed, &image).unwrap();
    driver.run_checked(&Load::fill(size, 64 << 10), &mut oracle).unwrap();
    let held = || memfd_bytes(&[disk.supervisor()], "spillway-data").unwrap();
    assert!((size..=from).contains(&held()), "{} bytes are held", held());

    let (over, completed, longest_ns) = (AtomicBool::new(false), AtomicU64::new(0), AtomicU64::new(0));
    std::thread::scope(|scope| {
        let load = scope.spawn(|| {
            let mut round = 0;
            while !over.load(Ordering::Relaxed) {
                round += 1;
                let writes = Load {
                    write_share: 1.0,
                    random_share: 1.0,
                    span_bytes: size,
                    end: End::Count(200),
                    seed: seed ^ round,
                    ..Load::seed_004(32, End::Count(0))
                };
                let measured = driver
                    .run_checked(&writes, &mut oracle)
                    .unwrap_or_else(|e| panic!("{e:#}\n{}", disk.log()));
                completed.fetch_add(measured.requests, Ordering::Relaxed);
                longest_ns.fetch_max(measured.max_ns, Ordering::Relaxed);
            }
        });
        let so_far = || completed.load(Ordering::Relaxed);
        // Whatever happens here, the load must end.
        let outcome = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            until("the load runs", &disk, || so_far() > 0 || load.is_finished());
            succeeds(Command::new(program().unwrap()).arg("set").arg(disk.control()).args(["--ram", "32M"]));
            let (at_set, begun) = (so_far(), Instant::now());
            let back = wait_until(BACK_WITHIN, || (held() <= to).then(|| begun.elapsed()));
            let back = back
                .unwrap_or_else(|| panic!("{} bytes are held after {BACK_WITHIN:?}\n{}", held(), disk.log()));
            let meanwhile = so_far() - at_set;
            // And there it stays, however much is written.
            until("the load goes on", &disk, || {
                assert!(held() <= to, "{} bytes are held", held());
                so_far() >= at_set + meanwhile + 20_000 || load.is_finished()
            });
            println!(
                "back after {back:?}, {meanwhile} requests meanwhile, {} afterwards",
                so_far() - at_set - meanwhile
            );
        }));
        over.store(true, Ordering::Relaxed);
        load.join().unwrap();
        outcome.unwrap_or_else(|e| std::panic::resume_unwind(e));
    });
    let longest = Duration::from_nanos(longest_ns.into_inner());
    println!("the longest request {longest:?}");
    assert!(longest < BACK_WITHIN, "{longest:?}");
    let stats = disk.stats().unwrap();
    assert_eq!(figure(&stats, "failed.requests").unwrap(), 0);
    assert_eq!(figure(&stats, "ram.limit_bytes").unwrap(), to);
    assert!(figure(&stats, "evictions.blocks").unwrap() * 4096 >= size - to, "{stats}");
    driver.verify(&oracle).unwrap();
    drop(driver);
    disk.stop().unwrap();
}

/// For so long two queues are driven.
const DRIVEN: Duration = Duration::from_secs(3);
/// The longest that a write may wait for space then, whatever else the host's disk has to do: a third of the time after
/// which a guest's driver gives up. What it was is printed.
const LONGEST_WAIT: Duration = Duration::from_secs(10);
/// How many others may complete while one waits, for each that is under way: whatever the disk's speed, one that is
/// passed over again and again is seen.
const MOST_OVERTAKING: u64 = 16;

#[test]
fn two_queues_that_wait_for_room_get_equal_shares_and_no_request_waits_long() {
    const QUEUES: usize = 2;
    const BYTES: usize = 64 << 10;
    const DONE: usize = usize::MAX;
    let Some(world) = World::new(&[]) else { return };
    let image = world.blank(16 * MIB);
    let disk = world.serve(&image, &["--size", "256M", "--ram", "16M", "--overflow", "600M"]);
    let shape = Shape { queues: QUEUES, depth: 32 * QUEUES, request_bytes: BYTES, ..Shape::default() };
    let mut driver = Driver::connect_with(&disk.vhost(), shape).unwrap();
    let mut rng = Rng::new(seed());
    let mut write = |driver: &mut Driver| {
        let (offset, number) = (rng.below(256 * MIB / BYTES as u64) * BYTES as u64, rng.next_u64() | 1);
        let fill = |to: &mut [u8]| to.as_chunks_mut().0.iter_mut().for_each(|w| *w = number.to_le_bytes());
        (driver.start(Ask::Write { offset, len: BYTES }, fill).unwrap(), Instant::now())
    };
    let mut under_way: Vec<_> = (0..shape.depth).map(|_| (write(&mut driver), 0)).collect();
    // A buffer's requests always take the same queue, and a buffer that is free is the next one taken: each queue has
    // as many requests under way as the other, always.
    let queue_of = |buffer: usize| buffer % QUEUES;
    let (mut completed, mut longest) = ([0u64; QUEUES], [Duration::ZERO; QUEUES]);
    let (mut all, mut most_overtaking) = (0, 0);
    let begun = Instant::now();
    while driver.in_flight() > 0 {
        for ((buffer, started), completed_before) in &mut under_way {
            if *buffer == DONE || !driver.is_finished(*buffer) {
                continue;
            }
            assert_eq!(driver.finish(*buffer, |_| {}).unwrap(), 0, "{}", disk.log());
            let queue = queue_of(*buffer);
            longest[queue] = longest[queue].max(started.elapsed());
            most_overtaking = most_overtaking.max(all - *completed_before);
            completed[queue] += 1;
            all += 1;
            if begun.elapsed() < DRIVEN {
                ((*buffer, *started), *completed_before) = (write(&mut driver), all);
                assert_eq!(queue_of(*buffer), queue);
            } else {
                *buffer = DONE;
            }
        }
        std::thread::yield_now();
    }
    let stats = disk.stats().unwrap();
    let stalls = figure(&stats, "stalls.count").unwrap();
    println!(
        "completed by queue {completed:?}, the longest wait {longest:?}, at most {most_overtaking} others meanwhile, {stalls} stalls"
    );
    assert!(all * BYTES as u64 > 4 * 16 * MIB, "{all} writes are not much more than the RAM tier");
    assert!(completed.iter().all(|&n| n * 10 >= all * 4), "{completed:?}");
    assert!(longest.iter().all(|&l| l < LONGEST_WAIT), "{longest:?}");
    assert!(most_overtaking < MOST_OVERTAKING * shape.depth as u64, "{most_overtaking} overtook one");
    assert!(stalls > 0, "nothing had to wait: {stats}");
    assert_eq!(figure(&stats, "failed.requests").unwrap(), 0);
    drop(driver);
    disk.stop().unwrap();
}
