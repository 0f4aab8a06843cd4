//! A disk's rate limit: what its guest gets, live and over deaths of the worker, and that all who ask get their turn.

use crate::client::{Lost, NbdClient};
use crate::world::{DEADLINE, MIB, World, succeeds, until};
use rustix::process::{Pid, Signal, kill_process};
use spillway_testkit::disk::program;
use spillway_testkit::{Ask, Disk, Driver, End, Load, Measured, Shape};
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

const SHAPE: Shape = Shape { queues: 2, depth: 16, request_bytes: 64 << 10, deadline: DEADLINE };
const SPAN: u64 = 64 * MIB;

/// Reads and writes that always wait, for so long.
fn measure(driver: &mut Driver, request_bytes: usize, time: Duration) -> Measured {
    let load = Load { request_bytes, span_bytes: SPAN, ..Load::seed_004(16, End::After(time)) };
    driver.run(&load).unwrap()
}

fn set(disk: &Disk, limits: &[&str]) -> String {
    succeeds(Command::new(program().unwrap()).arg("set").arg(disk.control()).args(limits))
}

fn near(found: f64, expected: f64, share: f64) {
    assert!((found - expected).abs() <= expected * share, "{found}, and not {expected}");
}

#[test]
fn a_guest_gets_as_much_as_its_disk_may_and_no_more() {
    let Some(world) = World::new(&[]) else { return };
    let image = world.blank(SPAN);
    let disk = world.serve(&image, &["--ram", "96M", "--iops", "459", "--iops-burst", "20"]);
    let mut driver = Driver::connect_with(&disk.vhost(), SHAPE).unwrap();
    let second = Duration::from_secs(1);
    let limited = measure(&mut driver, 4096, 2 * second);
    near(limited.iops, 464.0, 0.08);
    // Sixteen wait in turn.
    near(limited.p50_ns as f64, 16e9 / 459.0, 0.15);
    let throttled = disk.figure("throttled.ns").unwrap();
    assert!((1_500_000_000..3_000_000_000).contains(&throttled), "{throttled}");
    assert!(disk.figure("throttled.count").unwrap() > 100);
    // One at a time, that is not there yet when the disk goes to sleep.
    let before = disk.figure("throttled.ns").unwrap();
    driver.run(&Load { span_bytes: SPAN, ..Load::seed_004(1, End::After(second)) }).unwrap();
    let alone = disk.figure("throttled.ns").unwrap() - before;
    assert!(alone > 500_000_000, "{alone}");

    // The next worker has the limit too.
    let before = disk.worker().unwrap();
    kill_process(Pid::from_raw(before as i32).unwrap(), Signal::KILL).unwrap();
    until("another worker", &disk, || disk.worker().is_ok_and(|now| now != before && now != 0));
    near(measure(&mut driver, 4096, 2 * second).iops, 464.0, 0.08);

    let output = set(&disk, &["--iops", "0", "--bandwidth", "35M", "--bandwidth-burst", "64K"]);
    assert!(output.contains("at most 35.0 MiB/s") && !output.contains("requests/s"), "{output}");
    let large = measure(&mut driver, 64 << 10, 2 * second);
    near(large.iops * 65536.0, 35.0 * MIB as f64, 0.08);
    // A burst: what a second allows begins at once.
    set(&disk, &["--bandwidth", "0", "--iops", "1000", "--iops-burst", "1000"]);
    let begun = Instant::now();
    let count = Load { span_bytes: SPAN, ..Load::seed_004(16, End::Count(1000)) };
    driver.run(&count).unwrap();
    assert!(begun.elapsed() < second / 2, "{:?}", begun.elapsed());
    near(measure(&mut driver, 4096, second).iops, 1000.0, 0.1);

    // Another rate has not the burst of the last one.
    set(&disk, &["--iops", "500"]);
    std::thread::sleep(second / 2);
    near(measure(&mut driver, 4096, 2 * second).iops, 515.0, 0.1);
    let output = set(&disk, &["--iops", "0"]);
    assert!(output.contains("no limit of its rate"), "{output}");
    let free = measure(&mut driver, 4096, second / 2);
    assert!(free.iops > 20_000.0, "{}", free.iops);
    drop(driver);
    disk.stop().unwrap();
}

#[test]
fn under_a_limit_each_queue_and_client_has_its_turn() {
    let Some(world) = World::new(&["qemu-io"]) else { return };
    let image = world.blank(SPAN);
    let disk = world.serve(&image, &["--ram", "96M", "--iops", "1000", "--iops-burst", "2"]);
    let mut driver = Driver::connect_with(&disk.vhost(), SHAPE).unwrap();
    let mut nbd = NbdClient::connect(&disk, 48..64, Lost::Fail);
    let over = AtomicBool::new(false);
    let (mut of_queues, mut steps) = ([0; 2], 0);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let ask = |i: u64| Ask::Read { offset: i % 1024 * 4096, len: 4096 };
            let mut under_way: Vec<_> = (0..16).map(|i| driver.start(ask(i), |_| {}).unwrap()).collect();
            while !over.load(Ordering::Relaxed) {
                std::thread::sleep(Duration::from_micros(500));
                for buffer in &mut under_way {
                    if driver.is_finished(*buffer) {
                        assert_eq!(driver.finish(*buffer, |_| {}).unwrap(), 0);
                        // A buffer's number says which queue it goes to.
                        of_queues[*buffer % 2] += 1;
                        *buffer = driver.start(ask(of_queues[0] + of_queues[1]), |_| {}).unwrap();
                    }
                }
            }
            under_way.into_iter().for_each(|buffer| _ = driver.finish(buffer, |_| {}).unwrap());
        });
        let begun = Instant::now();
        while begun.elapsed() < Duration::from_secs(2) {
            nbd.step();
            steps += 1;
        }
        over.store(true, Ordering::Relaxed);
    });
    // A step is two requests, and waits for each: it has its turn within a few of the others'.
    let [first, second] = of_queues;
    assert!(first + second > 600 && first.abs_diff(second) <= (first + second) / 10, "{of_queues:?}");
    assert!(steps > 70, "{steps} steps of the NBD client beside {of_queues:?}");
    nbd.verify();
    nbd.leave();
    drop(driver);
    disk.stop().unwrap();
}
