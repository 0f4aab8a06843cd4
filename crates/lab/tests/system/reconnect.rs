//! A VMM that connects again: QEMU's `reconnect=1`, a second after the other side has hung up.
//!
//! It is the way on where nothing else is: after a reset by force, a stop of the disk, the death of all of its processes.
//! What was written is gone then; the machine is not, and no request of its fails. The death of a worker alone closes no
//! connection (`deaths.rs`).

use crate::world::{MIB, PATIENCE, World, succeeds, until};
use rustix::process::{Pid, Signal, kill_process};
use sha2::{Digest, Sha256};
use spillway_lab::cpio::Entry;
use spillway_lab::guest::{Accelerator, Guest, GuestDisk, GuestSpec, Kit};
use spillway_lab::{Disk, skip};
use std::process::Command;

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
        guest.wait_report(&written, 2 * PATIENCE).unwrap_or_else(|e| panic!("{e:#}\n{}", disk.log()));
        let read = format!("image {number} {sum}");
        assert!(guest.reports().iter().any(|line| line.starts_with(&read)), "{:?}: {sum}", guest.reports());
    };

    works(&disk, 0);
    let program = spillway_lab::disk::program().unwrap();
    succeeds(Command::new(&program).arg("reset").arg(disk.control()).arg("--force"));
    works(&disk, 1);
    assert_eq!((disk.figure("generation").unwrap(), disk.figure("clients").unwrap()), (2, 1));

    disk.stop().unwrap();
    let disk = world.serve(&image, &["--size", "32M", "--mode", "ram", "--ram", "4M"]);
    works(&disk, 2);

    // A write waits for room when they die: the next disk finds it in QEMU's table of requests in flight.
    until("a write waits", &disk, || disk.figure("waiting").unwrap() == 1);
    let before = disk.figure("planes.guest.written_bytes").unwrap() / PIECE - 16;
    assert!((1..MUCH - 1).contains(&before), "{before}");
    for pid in [disk.supervisor(), disk.worker().unwrap()] {
        kill_process(Pid::from_raw(pid as i32).unwrap(), Signal::KILL).unwrap();
    }
    drop(disk);
    let disk = world.serve(&image, &["--size", "32M", "--ram", "64M", "--overflow", "64M"]);
    let right = guest.wait_report("right", 2 * PATIENCE);
    let right = right.unwrap_or_else(|e| panic!("{e:#}\n{}", disk.log()));
    assert_eq!(right, format!("right {}", MUCH - before), "but for the {before} that were done before");
    guest.wait(PATIENCE).unwrap();
    assert!(guest.console().iter().any(|l| l.starts_with("GUEST-EXIT 0")), "{}", guest.tail());
    assert_eq!(disk.figure("failed.requests").unwrap(), 0);
    disk.stop().unwrap();
}
