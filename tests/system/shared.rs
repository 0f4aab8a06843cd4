//! One disk, several clients: they see each other's writes and do not feel each other's faults.

use crate::world::{MIB, World, fio_ends, qemu_io, until, until_left};
use spillway_testkit::{Ask, Driver, End, Mixed, Oracle, Shape};
use std::time::Duration;

const DISK: u64 = 128 * MIB;
const OPTIONS: [&str; 6] = ["--size", "128M", "--ram", "16M", "--overflow", "300M"];
const SHRUNK: &str = "guest memory has shrunk";
const SHAPE: Shape =
    Shape { queues: 2, depth: 16, request_bytes: 1 << 20, deadline: Duration::from_secs(30) };

fn mixed(start_bytes: u64, span_bytes: u64, end: End, seed: u64) -> Mixed {
    Mixed { start_bytes, span_bytes, largest_bytes: 256 << 10, depth: 16, end, seed }
}

#[test]
fn a_vmm_and_nbd_clients_share_a_disk() {
    let Some(world) = World::new(&["fio", "qemu-io"]) else { return };
    let image = world.image(32 * MIB);
    let disk = world.serve(&image, &OPTIONS);
    let mut oracle = Oracle::with_base(DISK, 51, &image).unwrap();
    let mut driver = Driver::connect_with(&disk.vhost(), SHAPE).unwrap();

    // Each sees what the other has written, in both tiers.
    driver.write_at(120 * MIB + 512, &[0x5a; 3 << 20]).unwrap();
    qemu_io(&disk, &["read -P 0x5a 125829632 3M", "write -P 0xa5 125829120 64k", "discard 121M 1M"]);
    let mut content = vec![0; 2 << 20];
    driver.read_at(120 * MIB, &mut content).unwrap();
    assert!(content[..64 << 10].iter().all(|&b| b == 0xa5));
    assert!(content[64 << 10..1 << 20].iter().all(|&b| b == 0x5a));
    assert!(content[1 << 20..].iter().all(|&b| b == 0));
    driver.write_zeroes(120 * MIB, 8 * MIB, true).unwrap();
    oracle.zeroed(120 * MIB, 8 * MIB);

    // Both at full load, each on its half, while other VMMs try to get in.
    let rivals = std::thread::scope(|scope| {
        let fio = world.fio(
            "half",
            &disk,
            &["--rw=randwrite", "--bsrange=4k-128k", "--offset=64M", "--size=48M", "--loops=2"],
        );
        let load = scope.spawn(|| {
            driver.run_mixed(&mixed(0, 64 * MIB, End::After(Duration::from_secs(4)), 52), &mut oracle)
        });
        let mut rivals = 0;
        while !load.is_finished() {
            let error = Driver::connect_with(&disk.vhost(), SHAPE).err().expect("a second VMM is refused");
            assert!(!format!("{error:#}").is_empty());
            rivals += 1;
        }
        load.join().unwrap().unwrap();
        fio_ends(fio);
        rivals
    });
    assert!(rivals >= 10, "{rivals}");
    // What fio left is not the oracle's.
    driver.write_zeroes(64 * MIB, 64 * MIB, true).unwrap();
    oracle.zeroed(64 * MIB, 64 * MIB);
    driver.verify(&oracle).unwrap();

    // The next VMM finds everything.
    drop(driver);
    until_left(&disk);
    let mut driver = Driver::connect_with(&disk.vhost(), SHAPE).unwrap();
    driver.verify(&oracle).unwrap();
    assert!(disk.figure("evictions.blocks").unwrap() > 0);
    drop(driver);
    disk.stop().unwrap();
}

#[test]
fn guest_memory_that_shrinks_costs_its_owner_the_connection_and_nobody_else() {
    let Some(world) = World::new(&["fio"]) else { return };
    let image = world.image(32 * MIB);
    let disk = world.serve(&image, &OPTIONS);
    let mut oracle = Oracle::with_base(DISK, 61, &image).unwrap();
    let worker = disk.worker().unwrap();
    let fio = world.fio(
        "beside",
        &disk,
        &["--rw=randwrite", "--bsrange=4k-128k", "--offset=64M", "--size=48M", "--loops=3"],
    );
    for round in 0..4 {
        let mut driver = Driver::connect_with(&disk.vhost(), SHAPE).unwrap();
        let count = End::Count(500);
        driver.run_mixed(&mixed(0, 64 * MIB, count, 62 + round), &mut oracle).unwrap();
        // Reads and writes under way while their memory goes: of blocks that the oracle does not know.
        for i in 0..12 {
            let (offset, len) = (112 * MIB + i * MIB, 1 << 20);
            let ask = if i % 2 == 0 { Ask::Write { offset, len } } else { Ask::Read { offset, len } };
            driver.start(ask, |_| {}).unwrap();
        }
        let lost = disk.log().matches(SHRUNK).count();
        driver.shrink_memory().unwrap();
        // Should all of the above have ended before: more of them.
        until("the connection ends", &disk, || {
            if driver.in_flight() < SHAPE.depth {
                driver.start(Ask::Read { offset: 112 * MIB, len: 1 << 20 }, |_| {}).unwrap();
            }
            disk.log().matches(SHRUNK).count() > lost
        });
        drop(driver);
    }
    assert_eq!(disk.log().matches(SHRUNK).count(), 4);
    fio_ends(fio);
    let mut driver = Driver::connect_with(&disk.vhost(), SHAPE).unwrap();
    driver.write_zeroes(64 * MIB, 64 * MIB, false).unwrap();
    oracle.zeroed(64 * MIB, 64 * MIB);
    driver.verify(&oracle).unwrap();
    assert!(std::path::Path::new(&format!("/proc/{worker}")).exists(), "the worker is still the same");
    drop(driver);
    disk.stop().unwrap();
}
