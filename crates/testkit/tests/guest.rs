//! The guests themselves, on plain files: what the system tests and the demo stand on.

use spillway_testkit::cpio::Entry;
use spillway_testkit::guest::{Accelerator, Guest, GuestDisk, GuestSpec, Kit};
use spillway_testkit::{has_program, skip};
use std::time::Duration;

#[test]
fn the_small_guest_formats_fills_and_checks_a_disk() {
    let Some(kit) = Kit::find() else { return skip("guest: not built, run 'make image'") };
    if !has_program("qemu-system-x86_64") {
        return skip("guest: qemu-system-x86_64 is not installed");
    }
    let dir = tempfile::tempdir().unwrap();
    let disk = dir.path().join("disk.raw");
    std::fs::File::create(&disk).unwrap().set_len(64 << 20).unwrap();
    let work = "#!/bin/busybox sh\nset -e\nexec >/dev/ttyS1 2>&1\n/sbin/mke2fs -q -t ext4 /dev/vda\n\
                mount -t ext4 /dev/vda /mnt\ndd if=/dev/urandom of=/mnt/f bs=64k count=64 2>/dev/null\n\
                sha256sum /mnt/f >/tmp/sum\necho 3 >/proc/sys/vm/drop_caches\nsha256sum -c /tmp/sum\n\
                rm /mnt/f\nsync\nfstrim /mnt\numount /mnt\n/sbin/e2fsck -f -n /dev/vda && echo clean\n";
    let mut guest = Guest::start(
        &kit,
        &GuestSpec {
            dir: dir.path().into(),
            disks: vec![GuestDisk::Raw(disk)],
            system: false,
            payload: vec![Entry::file("payload/run", 0o755, work)],
            memory_mib: 256,
            vcpus: 1,
            accelerator: Accelerator::Tcg,
            reboots: false,
        },
    )
    .unwrap();
    guest.wait(Duration::from_secs(400)).unwrap();
    let reports = guest.reports();
    assert!(reports.iter().any(|l| l == "/mnt/f: OK"), "{reports:?}");
    assert!(reports.iter().any(|l| l == "clean"), "{reports:?}");
    assert!(guest.console().iter().any(|l| l.starts_with("GUEST-EXIT 0")), "{}", guest.tail());
}
