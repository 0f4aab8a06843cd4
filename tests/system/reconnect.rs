//! Clients that connect again when the other side has hung up.
//!
//! QEMU's `reconnect=1`, a second later, is the way on where nothing else is: after a reset by force, a stop of the disk,
//! the death of all of its processes. What was written is gone then; the machine is not, and no request of its fails.
//! The death of a worker alone closes no VMM's connection (`deaths.rs`), nor does an upgrade; NBD clients lose theirs.

use crate::client::{Lost, NbdClient};
use crate::deaths::{Enough, seed};
use crate::machine;
use crate::world::{DEADLINE, MIB, World, succeeds, until};
use rustix::process::{Pid, Signal, kill_process};
use sha2::{Digest, Sha256};
use spillway_testkit::cpio::Entry;
use spillway_testkit::disk::figure;
use spillway_testkit::guest::{Accelerator, Guest, GuestDisk, GuestSpec, Kit};
use spillway_testkit::{Disk, Driver, End, Mixed, Oracle, Shape, skip};
use std::process::Command;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

const PIECE: u64 = 64 << 10;
/// Pieces that the guest writes at last, one at a time: more than fit where it begins.
const MUCH: u64 = 96;

/// Reads the image and writes into it, and does both again on each disk that it finds itself on: it knows one by
/// what it had written being gone. The host makes it another when it has heard that. At last it writes much.
const WORK: &str = "#!/bin/busybox sh
set -e
exec >/dev/ttyS1 2>&1
from() { dd if=/dev/vda of=/tmp/$1 bs=64k skip=$2 count=$3 iflag=direct 2>/dev/null || { echo a read failed; exit 1; }; }
to() { dd if=/tmp/$1 of=/dev/vda bs=64k seek=$2 oflag=direct conv=notrunc,fsync 2>/dev/null; }
there() { from back 16 16; cmp -s /tmp/noise /tmp/back; }
both() {
    from image 0 64
    echo image $1 $(sha256sum </tmp/image)
    to noise 16
    there
    echo written $1
}
dd if=/dev/urandom of=/tmp/noise bs=64k count=16 2>/dev/null
dd if=/dev/urandom of=/tmp/much bs=64k count=MUCH 2>/dev/null
for disk in 0 1; do
    both $disk
    while there; do :; done
done
both 2
to much 64
from back 64 MUCH
right=0
n=0
while [ $n -lt MUCH ]; do
    for file in much back; do dd if=/tmp/$file of=/tmp/$file.1 bs=64k skip=$n count=1 2>/dev/null; done
    if cmp -s /tmp/much.1 /tmp/back.1; then right=$((right + 1)); fi
    n=$((n + 1))
done
echo right $right
";

#[test]
fn qemu_connects_again_after_a_reset_a_stop_and_a_death_of_all() {
    let Some(world) = World::new(&["qemu-system-x86_64"]) else { return };
    let Some(kit) = Kit::find() else { return skip("guest: not built, run 'make image'") };
    let image = world.image(4 * MIB);
    let sum: String =
        Sha256::digest(std::fs::read(&image).unwrap()).iter().map(|b| format!("{b:02x}")).collect();
    let disk = world.serve(&image, &["--size", "32M", "--ram", "8M", "--overflow", "64M"]);
    let work = WORK.replace("MUCH", &MUCH.to_string());
    let spec = GuestSpec {
        dir: world.dir().into(),
        disks: vec![GuestDisk::VhostUser(disk.vhost())],
        system: false,
        payload: vec![Entry::file("payload/run", 0o755, work)],
        memory_mib: 256,
        vcpus: 2,
        accelerator: Accelerator::Tcg,
        reboots: false,
    };
    let mut guest = Guest::start(&kit, &spec).unwrap();
    // What the image holds, wherever the guest found itself, and that it could write.
    let mut works = |disk: &Disk, number: u32| {
        let written = format!("written {number}");
        guest.wait_report(&written, machine::PATIENCE).unwrap_or_else(|e| panic!("{e:#}\n{}", disk.log()));
        let read = format!("image {number} {sum}");
        assert!(guest.reports().iter().any(|line| line.starts_with(&read)), "{:?}: {sum}", guest.reports());
    };

    works(&disk, 0);
    let program = spillway_testkit::disk::program().unwrap();
    succeeds(Command::new(&program).arg("reset").arg(disk.control()).arg("--force"));
    works(&disk, 1);
    assert_eq!((disk.figure("generation").unwrap(), disk.figure("clients").unwrap()), (2, 1));

    disk.stop().unwrap();
    let disk = world.serve(&image, &["--size", "32M", "--mode", "ram", "--ram", "4M"]);
    works(&disk, 2);

    // A write waits for space when they die: the next disk finds it in QEMU's table of requests in flight.
    until("a write waits", &disk, || disk.figure("waiting").unwrap() == 1);
    let before = disk.figure("planes.guest.written_bytes").unwrap() / PIECE - 16;
    assert!((1..MUCH - 1).contains(&before), "{before}");
    for pid in [disk.supervisor(), disk.worker().unwrap()] {
        kill_process(Pid::from_raw(pid as i32).unwrap(), Signal::KILL).unwrap();
    }
    drop(disk);
    let disk = world.serve(&image, &["--size", "32M", "--ram", "64M", "--overflow", "64M"]);
    let right = guest.wait_report("right", machine::PATIENCE);
    let right = right.unwrap_or_else(|e| panic!("{e:#}\n{}", disk.log()));
    assert_eq!(right, format!("right {}", MUCH - before), "but for the {before} that were done before");
    guest.wait(machine::PATIENCE).unwrap();
    assert!(guest.console().iter().any(|l| l.starts_with("GUEST-EXIT 0")), "{}", guest.tail());
    assert_eq!(disk.figure("failed.requests").unwrap(), 0);
    disk.stop().unwrap();
}

#[test]
fn upgrades_under_a_vmm_and_an_nbd_client_lose_nothing() {
    const UPGRADES: u64 = 8;
    /// Below, the VMM's; above, the NBD client's.
    const VMM: u64 = 96 * MIB;
    let Some(world) = World::new(&["qemu-io"]) else { return };
    let image = world.image(32 * MIB);
    let disk = world.serve(&image, &["--size", "128M", "--ram", "16M", "--overflow", "300M"]);
    let seed = seed();
    let mut oracle = Oracle::with_base(128 * MIB, seed, &image).unwrap();
    let shape = Shape { queues: 2, depth: 32, request_bytes: 1 << 20, deadline: DEADLINE };
    let mut driver = Driver::connect_with(&disk.vhost(), shape).unwrap();
    let mut nbd = NbdClient::connect(&disk, 96..128, Lost::Reconnect);
    let (rounds, steps) = (AtomicU64::new(0), AtomicU64::new(0));
    let enough = AtomicBool::new(false);
    let goes_on = || !enough.load(Ordering::Relaxed);
    std::thread::scope(|scope| {
        let _enough = Enough(&enough);
        scope.spawn(|| {
            while goes_on() {
                let (span_bytes, end) = (VMM, End::Count(500));
                let seed = seed + rounds.fetch_add(1, Ordering::Relaxed);
                let mixed =
                    Mixed { start_bytes: 0, span_bytes, largest_bytes: 256 << 10, depth: 32, end, seed };
                let outcome = driver.run_mixed(&mixed, &mut oracle);
                outcome.unwrap_or_else(|e| panic!("{e:#}\n{}", disk.log()));
            }
        });
        scope.spawn(|| {
            while goes_on() {
                nbd.step();
                steps.fetch_add(1, Ordering::Relaxed);
            }
        });
        let program = spillway_testkit::disk::program().unwrap();
        let done = || (rounds.load(Ordering::Relaxed), steps.load(Ordering::Relaxed));
        for i in 0..=UPGRADES {
            // Both get on with each worker, the last one too.
            let before = done();
            until("both are at work", &disk, || done().0 > before.0 + 1 && done().1 > before.1 + 1);
            if i < UPGRADES {
                succeeds(Command::new(&program).arg("upgrade").arg(disk.control()));
            }
        }
    });
    println!("{rounds:?} rounds of the VMM, {steps:?} steps of the NBD client");
    nbd.verify();
    let mut content = vec![0; 1 << 20];
    for (at, pattern) in nbd.content() {
        driver.read_at(at, &mut content).unwrap();
        assert!(content.iter().all(|&b| b == pattern), "{at}");
    }
    nbd.leave();
    driver.write_zeroes(VMM, 32 * MIB, true).unwrap();
    oracle.zeroed(VMM, 32 * MIB);
    driver.verify(&oracle).unwrap_or_else(|e| panic!("{e:#}\n{}", disk.log()));
    let stats = disk.stats().unwrap();
    for (key, value) in
        [("restarts", UPGRADES), ("failed.requests", 0), ("checksum_mismatches", 0), ("inflight", 0)]
    {
        assert_eq!(figure(&stats, key).unwrap(), value, "{key}");
    }
    drop(driver);
    disk.stop().unwrap();
}
