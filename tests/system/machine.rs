//! A real machine on a disk: Debian boots from it, and works with ext4 and fio, while something happens to the disk.
//!
//! Owns the work, and the verdict on it: the machine's own, its kernel's, and that of e2fsck on what is left. A machine
//! whose disk answers no more is not given up by its kernel: virtio-blk has no time limit. The test's patience ends it,
//! which is for one report and not for all: how long all take depends on the host and on what is done to the disk.

use crate::world::{World, succeeds};
use spillway_testkit::cpio::Entry;
use spillway_testkit::guest::{self, Accelerator, Guest, GuestDisk, GuestSpec, Kit};
use spillway_testkit::{Disk, skip};
use std::process::Command;
use std::time::{Duration, Instant};

/// The programs that it needs.
pub const PROGRAMS: [&str; 3] = ["qemu-system-x86_64", "nbdcopy", "e2fsck"];

/// Within it a machine reports something, or has powered off.
pub const PATIENCE: Duration = Duration::from_secs(600);

/// ext4 and fio with verification, `ROUNDS` times.
const WORK: &str = "#!/bin/sh
exec >/dev/ttyS1 2>&1
set -e
echo begun
cd /root
n=0
while [ $n -lt ROUNDS ]; do
    fio --name=v --filename=/root/file --size=FILE_MIBM --bsrange=4k-128k --rw=randwrite --randseed=$n --ioengine=libaio \\
        --direct=1 --iodepth=16 --verify=crc32c --verify_fatal=1 --do_verify=1 --eta=never --output=/run/fio.log || { cat /run/fio.log; exit 1; }
    # From the disk, not from memory.
    echo 3 >/proc/sys/vm/drop_caches
    md5sum /usr/bin/* >/run/sums
    [ $n -gt 0 ] || cp /run/sums /run/first
    cmp /run/first /run/sums
    n=$((n + 1))
    echo round $n
done
# Of the boot too. A task that hung was given nothing for two minutes.
dmesg >/run/dmesg
if grep -E 'I/O error|JBD2: |EXT4-fs (error|warning)|blocked for more than' /run/dmesg; then exit 1; fi
";

const SERVICE: &str = "[Service]
Type=oneshot
ExecStart=/bin/sh -c '/run/payload/work; echo WORK-EXIT $? >/dev/ttyS1; sync; systemctl poweroff --force'
[Install]
WantedBy=multi-user.target
";

/// How much a machine does.
pub struct Work {
    pub rounds: u32,
    /// Of fio's file.
    pub file_mib: u32,
}

/// What it boots from. None: not built, which has been said.
pub fn kit() -> Option<Kit> {
    let kit = Kit::find();
    if kit.is_none() {
        skip("guest: not built, run 'make image'");
    }
    kit
}

/// A machine that boots, works and powers off.
pub struct Machine<'a> {
    world: &'a World,
    disk: &'a Disk,
    guest: Guest,
    /// How much it had reported, and when that was seen.
    heard: (usize, Instant),
}

impl Machine<'_> {
    /// Boots it from a disk with the kit's golden image.
    pub fn boot<'a>(kit: &Kit, world: &'a World, disk: &'a Disk, work: &Work) -> Machine<'a> {
        let script = WORK.replace("ROUNDS", &work.rounds.to_string());
        let script = script.replace("FILE_MIB", &work.file_mib.to_string());
        let spec = GuestSpec {
            dir: world.dir().into(),
            disks: vec![GuestDisk::VhostUser(disk.vhost())],
            system: true,
            payload: [vec![Entry::file("payload/work", 0o755, script)], guest::service("work", SERVICE)]
                .concat(),
            memory_mib: 512,
            vcpus: 2,
            accelerator: Accelerator::Tcg,
            reboots: false,
        };
        Machine { world, disk, guest: Guest::start(kit, &spec).unwrap(), heard: (0, Instant::now()) }
    }

    /// Whether it has not powered off yet. A failure when it has reported nothing for too long.
    pub fn works(&mut self) -> bool {
        let reports = self.guest.reports();
        if reports.len() != self.heard.0 {
            self.heard = (reports.len(), Instant::now());
        }
        let in_time = self.heard.1.elapsed() < PATIENCE;
        assert!(in_time, "nothing for {PATIENCE:?}: {reports:?}\n{}\n{}", self.guest.tail(), self.disk.log());
        self.guest.ended().unwrap().is_none()
    }

    /// Waits until its work begins.
    pub fn has_booted(&mut self) {
        let begun = self.guest.wait_report("begun", PATIENCE);
        begun.unwrap_or_else(|e| panic!("{e:#}\n{}", self.disk.log()));
    }

    /// It has powered off: its work went well, nobody saw an error, and its file system is whole.
    pub fn ended_well(self) {
        let log = self.disk.log();
        let reports = self.guest.reports();
        let well = reports.iter().any(|line| line == "WORK-EXIT 0");
        assert!(well, "{reports:?}\n{}\n{log}", self.guest.tail());
        let console = self.guest.console().join("\n");
        for word in ["I/O error", "EXT4-fs error", "Remounting filesystem read-only"] {
            assert!(!console.contains(word), "{console}");
        }
        let copy = self.world.path("copy.raw");
        succeeds(Command::new("nbdcopy").arg(self.disk.nbd_uri()).arg(&copy));
        succeeds(Command::new("e2fsck").arg("-fn").arg(&copy));
    }
}
