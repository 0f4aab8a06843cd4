//! What the plugin gives to QEMU, in Debian's QEMU with real guests.

use super::{CLONE, MACHINE, MIB, Node, TEMPLATE, io, worker};
use crate::world::{BOOT, World, kill};
use serde_json::{Value, json};
use spillway_testkit::cpio::Entry;
use spillway_testkit::guest::{self, Accelerator, Guest, GuestDisk, GuestSpec, Kit};
use spillway_testkit::process::wait_until;
use std::path::PathBuf;
use std::process::Command;

/// What the Debian does: it says how large its disk is and whether it is as the template was, and writes and compares from then on.
const WORK: &str = "#!/bin/sh
exec >/dev/ttyS1 2>&1
echo size $(cat /sys/block/vda/size)
[ -e /var/mark ] && echo marked || echo clean
echo mine >/var/mark
round=0
while :; do
    head -c 300000 /dev/urandom >/var/noise
    sum=$(md5sum </var/noise)
    sync
    echo 3 >/proc/sys/vm/drop_caches
    [ \"$sum\" = \"$(md5sum </var/noise)\" ] || echo wrong
    round=$((round + 1))
    echo round $round.
done
";
const SERVICE: &str = "[Service]\nType=oneshot\nExecStart=/bin/sh /run/payload/work\n";

/// A VM whose first disk is this node, as Proxmox starts it.
fn start(kit: &Kit, dir: PathBuf, node: &Value) -> Guest {
    let spec = GuestSpec {
        dir,
        disks: Vec::<GuestDisk>::new(),
        system: true,
        payload: [vec![Entry::file("payload/work", 0o755, WORK)], guest::service("work", SERVICE)].concat(),
        memory_mib: 512,
        vcpus: 2,
        accelerator: Accelerator::Tcg,
        reboots: false,
    };
    let group = r#"{"qom-type":"throttle-group","id":"throttle0","limits":{}}"#;
    let device = "virtio-blk-pci,drive=drive0,bootindex=100";
    let further = ["-object", group, "-blockdev", &node.to_string(), "-device", device];
    Guest::start_with(kit, &spec, &further).unwrap()
}

fn rounds(guest: &Guest) -> usize {
    guest.reports().iter().filter(|line| line.starts_with("round ")).count()
}

#[test]
fn a_debian_on_a_linked_clone_forgets_grows_and_outlives_a_worker() {
    let Some(world) = World::new("none") else { return };
    let Some(mut node) = Node::new(&world) else { return };
    let kit = Kit::find().expect("the world has found it");
    let golden = kit.golden();
    let bytes = std::fs::metadata(&golden).unwrap().len();

    // As 'qm importdisk', "Convert to template", "Linked clone" and "Start" do it.
    node.ok("alloc", json!({ "vmid": 9000, "kib": bytes / 1024 }));
    let path = node.of("path", "vm-9000-disk-0")[0].as_str().unwrap().to_owned();
    let import = ["convert", "-n", "-f", "raw", "-O", "raw", golden.to_str().unwrap(), &path];
    assert!(Command::new("qemu-img").args(import).status().unwrap().success());
    node.of("create_base", "vm-9000-disk-0");
    node.ok("clone", json!({ "volume": TEMPLATE, "vmid": 101 }));
    node.of("activate", CLONE);
    let mut guest = start(&kit, world.path("."), &node.of("blockdev", CLONE));
    let size = guest.wait_report("size", BOOT).unwrap_or_else(|e| panic!("{e:#}"));
    assert_eq!(size, format!("size {}", bytes / 512));
    guest.wait_report("round 2.", BOOT).unwrap_or_else(|e| panic!("{e:#}"));
    assert!(guest.reports().iter().any(|line| line == "clean"), "{:?}", guest.reports());

    // The worker dies while the guest writes.
    let (dead, done) = (worker(&world, MACHINE), rounds(&guest));
    kill(dead);
    let goes_on = wait_until(BOOT, || (rounds(&guest) >= done + 4).then_some(()));
    goes_on.unwrap_or_else(|| panic!("{:?}\n{}", guest.reports(), guest.tail()));
    assert_ne!(worker(&world, MACHINE), dead);
    let (reports, console) = (guest.reports(), guest.console().join("\n"));
    assert!(!reports.iter().any(|line| line == "wrong"), "{reports:?}");
    assert!(!console.contains("I/O error"), "{console}");

    // "Stop", "Resize" and "Start".
    guest.kill();
    node.of("deactivate", CLONE);
    node.ok("resize", json!({ "volume": CLONE, "bytes": bytes + 1024 * MIB }));
    node.of("activate", CLONE);
    let mut guest = start(&kit, world.path("."), &node.of("blockdev", CLONE));
    let size = guest.wait_report("size", BOOT).unwrap_or_else(|e| panic!("{e:#}"));
    assert_eq!(size, format!("size {}", (bytes + 1024 * MIB) / 512));
    guest.wait_report("round 1.", BOOT).unwrap_or_else(|e| panic!("{e:#}"));
    assert!(guest.reports().iter().any(|line| line == "clean"), "{:?}", guest.reports());
    guest.kill();
    node.of("deactivate", CLONE);
}

/// Before version 9, Proxmox passes the path to `-drive`, with options that are meant for files.
#[test]
fn a_path_of_the_plugin_is_one_that_qemu_and_proxmox_know() {
    let Some(world) = World::new("none") else { return };
    let Some(mut node) = Node::new(&world) else { return };
    node.template_and_clone();
    node.of("activate", CLONE);
    let ours = node.of("blockdev", CLONE)["file"]["file"].clone();
    let theirs = node.of("path_node", CLONE);
    assert_eq!((&ours["driver"], &ours["server"]), (&theirs["driver"], &theirs["server"]));
    // The path is asked for before the disk runs, and so names no run.
    assert!(theirs["export"].is_null(), "{theirs}");
    assert_eq!(ours["export"], format!("run-{}", world.pid(MACHINE, "disk_pid")));
    assert_eq!(ours["reconnect-delay"], 60);

    let path = node.of("path", CLONE)[0].as_str().unwrap().to_owned();
    let kit = Kit::find().expect("the world has found it");
    let work = "#!/bin/busybox sh\nexec >/dev/ttyS1\nhead -c 1 /dev/vda; echo\necho X | dd of=/dev/vda bs=512 seek=8 conv=sync,fsync\necho done\n";
    let spec = GuestSpec {
        dir: world.path("."),
        disks: Vec::new(),
        system: false,
        payload: vec![Entry::file("payload/run", 0o755, work)],
        memory_mib: 256,
        vcpus: 1,
        accelerator: Accelerator::Tcg,
        reboots: false,
    };
    let drive = format!(
        "file={path},if=none,id=drive-virtio0,discard=on,format=raw,cache=none,aio=io_uring,detect-zeroes=unmap"
    );
    let device = "virtio-blk-pci,drive=drive-virtio0,id=virtio0";
    let mut guest = Guest::start_with(&kit, &spec, &["-drive", &drive, "-device", device]).unwrap();
    guest.wait(BOOT).unwrap_or_else(|e| panic!("{e:#}"));
    assert_eq!(guest.reports(), ["v", "done"]);
    assert!(io(&mut node, CLONE, "read -P 88 4k 1"));
}
