//! A real kernel's ext4 on the disk: filled past the RAM tier, checked, given back, found again by the next machine.

use crate::world::{MIB, World, until};
use sha2::{Digest, Sha256};
use spillway_testkit::cpio::Entry;
use spillway_testkit::disk::figure;
use spillway_testkit::guest::{Accelerator, Guest, GuestDisk, GuestSpec, Kit};
use spillway_testkit::{Disk, skip};
use std::path::Path;
use std::time::Duration;

const HEAD: &str = "#!/bin/busybox sh\nset -e\nexec >/dev/ttyS1 2>&1\n";

/// Makes a file system, fills it, checks it from the disk, deletes part of it.
const FIRST: &str = "/sbin/mke2fs -q -t ext4 /dev/vda
mount -t ext4 /dev/vda /mnt
mkdir /mnt/kept /mnt/gone
dd if=/dev/urandom of=/tmp/noise bs=1M count=8 2>/dev/null
for i in 1 2 3 4 5 6 7 8 9; do
    (echo kept $i; cat /tmp/noise) >/mnt/kept/$i
done
for i in 1 2 3; do (echo gone $i; cat /tmp/noise) >/mnt/gone/$i; done
i=0
while [ $i -lt 300 ]; do echo small $i >/mnt/kept/small.$i; i=$((i + 1)); done
(cd /mnt && md5sum kept/* gone/* >/tmp/sums)
cp /tmp/sums /mnt/sums
sync
echo 3 >/proc/sys/vm/drop_caches
(cd /mnt && md5sum -c -s sums) && echo checked
rm -r /mnt/gone
sync
echo 3 >/proc/sys/vm/drop_caches
grep kept /mnt/sums >/tmp/kept
(cd /mnt && md5sum -c -s /tmp/kept) && echo checked again
umount /mnt
/sbin/e2fsck -f -n /dev/vda >/tmp/fsck && echo clean
";

/// Finds it all again, changes some of it, gives everything back.
const SECOND: &str = "mount -t ext4 /dev/vda /mnt
grep kept /mnt/sums >/tmp/kept
(cd /mnt && md5sum -c -s /tmp/kept) && echo found
printf '\\nchanged\\n' >>/mnt/kept/3
[ \"$(tail -n 1 /mnt/kept/3)\" = changed ] && echo written
rm -r /mnt/kept
sync
/bin/busybox fstrim /mnt
umount /mnt
/sbin/e2fsck -f -n /dev/vda >/tmp/fsck && echo clean
";

fn digest(path: &Path) -> Vec<u8> {
    let mut sha = Sha256::new();
    std::io::copy(&mut std::fs::File::open(path).unwrap(), &mut sha).unwrap();
    sha.finalize().to_vec()
}

/// Before a reboot and after it, in one script: the first boot finds no file system.
const BOTH: &str = "if mount -t ext4 /dev/vda /mnt; then
    (cd /mnt && md5sum -c -s sums) && echo found after the reboot
    umount /mnt
    /sbin/e2fsck -f -n /dev/vda >/tmp/fsck && echo clean
    exit
fi
/sbin/mke2fs -q -t ext4 /dev/vda
mount -t ext4 /dev/vda /mnt
dd if=/dev/urandom of=/mnt/file bs=1M count=48 2>/dev/null
(cd /mnt && md5sum file >sums)
sync
echo written
reboot -f
sleep 1000
";

/// A driver that may not use tables must find `seg_max` segments' room in QEMU's usual queue of 128, or its kernel waits
/// for ever.
const NO_TABLES: [&str; 2] = ["-global", "vhost-user-blk-pci.indirect_desc=off"];

/// Boots a machine that does this, and returns what it reported.
fn boot(kit: &Kit, world: &World, disk: &Disk, work: &str, reboots: bool, further: &[&str]) -> Vec<String> {
    let spec = GuestSpec {
        dir: world.dir().into(),
        disks: vec![GuestDisk::VhostUser(disk.vhost())],
        system: false,
        payload: vec![Entry::file("payload/run", 0o755, format!("{HEAD}{work}"))],
        memory_mib: 256,
        vcpus: 2,
        accelerator: Accelerator::Tcg,
        reboots,
    };
    let mut guest = Guest::start_with(kit, &spec, further).unwrap();
    guest.wait(Duration::from_secs(400)).unwrap_or_else(|e| panic!("{e:#}\n{}", disk.log()));
    let reports = guest.reports();
    let ended = guest.console().iter().any(|l| l.starts_with("GUEST-EXIT 0"));
    assert!(ended, "{reports:?}\n{}\n{}", guest.tail(), disk.log());
    reports
}

#[test]
fn ext4_in_a_guest_survives_the_overflow_and_the_machine() {
    let Some(world) = World::new(&["qemu-system-x86_64"]) else { return };
    let Some(kit) = Kit::find() else { return skip("guest: not built, run 'make image'") };
    let image = world.image(64 * MIB);
    let before = digest(&image);
    let disk = world.serve(&image, &["--size", "512M", "--ram", "32M", "--overflow", "256M"]);

    let reports = boot(&kit, &world, &disk, FIRST, false, &[]);
    for word in ["checked", "checked again", "clean"] {
        assert!(reports.iter().any(|l| l == word), "no '{word}': {reports:?}");
    }
    let stats = disk.stats().unwrap();
    let full = figure(&stats, "ram.used_bytes").unwrap() + figure(&stats, "overflow.used_bytes").unwrap();
    assert!(full > 70 * MIB, "{full} bytes are no more than the RAM: {stats}");
    assert!(figure(&stats, "evictions.blocks").unwrap() > 0 && figure(&stats, "flushes").unwrap() > 0);

    let reports = boot(&kit, &world, &disk, SECOND, false, &[]);
    for word in ["found", "written", "clean"] {
        assert!(reports.iter().any(|l| l == word), "no '{word}': {reports:?}");
    }
    until("fstrim has given RAM and overflow back", &disk, || {
        let stats = disk.stats().unwrap();
        figure(&stats, "ram.used_bytes").unwrap() + figure(&stats, "overflow.used_bytes").unwrap() < 16 * MIB
            && figure(&stats, "overflow.file_bytes").unwrap() < 24 * MIB
    });
    assert!(disk.figure("discards.bytes").unwrap() > 70 * MIB);
    disk.stop().unwrap();
    assert!(digest(&image) == before, "the base image has changed");
}

#[test]
fn what_was_synced_is_there_after_a_reboot_inside_one_qemu() {
    let Some(world) = World::new(&["qemu-system-x86_64"]) else { return };
    let Some(kit) = Kit::find() else { return skip("guest: not built, run 'make image'") };
    let image = world.image(16 * MIB);
    let disk = world.serve(&image, &["--size", "256M", "--ram", "32M", "--overflow", "256M"]);
    let reports = boot(&kit, &world, &disk, BOTH, true, &NO_TABLES);
    let line_of = |word: &str| reports.iter().position(|l| l == word);
    let order = ["written", "found after the reboot", "clean"].map(line_of);
    assert!(order.iter().all(Option::is_some) && order.is_sorted(), "{reports:?}\n{}", disk.log());
    assert!(disk.figure("evictions.blocks").unwrap() > 0, "some of it came back from the overflow");
    assert_eq!(disk.figure("generation").unwrap(), 1);
    disk.stop().unwrap();
}
