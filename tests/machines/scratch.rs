//! Scratch disks that are formatted: what the daemon gives each run, and what it keeps for the next one.

use crate::world::World;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;

fn scratch_disk(world: &World) -> PathBuf {
    let disks = std::fs::read_dir(world.path("temp/scratch")).unwrap();
    let [disk] = disks.map(|entry| entry.unwrap().path()).collect::<Vec<_>>().try_into().unwrap();
    disk
}

#[test]
fn each_run_begins_with_the_file_system_that_its_catalog_says() {
    let Some(mut world) = World::new("none") else { return };
    world.import("golden", "version-1");
    world.ok(&["store", "add", "temp", world.path("temp").to_str().unwrap(), "--class", "temp"]);
    let format = ["--scratch-disk", "16M", "--scratch-format", "ext4:scratch"];
    world.ok(&[&["catalog", "create", "desk", "--image", "golden", "--count", "1"], &format[..]].concat());
    let start = |world: &World| {
        world.ok(&["machine", "start", "desk-001", "--wait"]);
        std::fs::read(scratch_disk(world)).unwrap()
    };
    let first = start(&world);
    // The superblock's magic number and label, in the partition.
    let superblock = &first[(1 << 20) + 1024..][..1024];
    assert_eq!((&superblock[56..58], &superblock[120..128]), (&[0x53, 0xef][..], &b"scratch\0"[..]));
    // What the guest leaves there.
    let disk = std::fs::File::options().write(true).open(scratch_disk(&world)).unwrap();
    (0..16).for_each(|at| disk.write_all_at(&[7; 4096], (at << 20) + 5000).unwrap());
    world.ok(&["machine", "stop", "desk-001", "--wait"]);
    assert!(start(&world) == first, "after a reset it is the same");
    // The next start has another label, as its catalog says then.
    world.set("desk", &[r#"scratch_format = "ext4:other""#]);
    world.ok(&["machine", "restart", "desk-001", "--wait"]);
    let other = std::fs::read(scratch_disk(&world)).unwrap();
    assert_eq!(&other[(1 << 20) + 1024 + 120..][..6], b"other\0");
    let templates = world.path("temp/scratch-templates");
    assert_eq!(std::fs::read_dir(&templates).unwrap().count(), 2);
    // A daemon begins with none: those of an earlier release may be made in another way.
    world.kill_daemon();
    world.start_daemon();
    assert_eq!(std::fs::read_dir(&templates).unwrap().count(), 0);
    world.ok(&["machine", "stop", "desk-001", "--wait"]);
}

/// A machine whose disk is kept keeps its scratch disk as well, until its catalog says another format.
#[test]
fn another_format_replaces_a_disk_that_is_not_reset() {
    let Some(world) = World::new("none") else { return };
    world.import("golden", "version-1");
    world.ok(&["store", "add", "temp", world.path("temp").to_str().unwrap(), "--class", "temp"]);
    let kept = ["--reset", "never", "--scratch-disk", "16M", "--scratch-format", "ext4:scratch"];
    world.ok(&[&["catalog", "create", "desk", "--image", "golden", "--count", "1"], &kept[..]].concat());
    world.ok(&["machine", "start", "desk-001", "--wait"]);
    let disk = std::fs::File::options().write(true).open(scratch_disk(&world)).unwrap();
    disk.write_all_at(b"of the guest", 8 << 20).unwrap();
    let has = |text: &[u8], at: usize| std::fs::read(scratch_disk(&world)).unwrap()[at..].starts_with(text);
    world.ok(&["machine", "restart", "desk-001", "--wait"]);
    assert!(has(b"of the guest", 8 << 20) && has(b"scratch\0", (1 << 20) + 1024 + 120));
    world.set("desk", &[r#"scratch_format = "ext4:other""#]);
    world.ok(&["machine", "restart", "desk-001", "--wait"]);
    assert!(!has(b"of the guest", 8 << 20) && has(b"other\0", (1 << 20) + 1024 + 120));
    world.ok(&["machine", "stop", "desk-001", "--wait"]);
}
