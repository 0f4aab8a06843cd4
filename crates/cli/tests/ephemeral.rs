//! Mode `ephemeral` as its users see it: a copy that is the disk's alone, written in place, and gone with it.

#![allow(clippy::unwrap_used, reason = "a test that fails here has failed")]

mod common;

use common::{Server, World, alive, qemu_io, refuses, spillway, stats, until};
use rustix::process::{Pid, Signal};
use std::process::Command;

const MIB: u64 = 1 << 20;

/// What the image's bytes at an offset are.
fn sector(offset: u64) -> u64 {
    offset / 512 % 251
}

/// `serve` of a new copy of the image in this folder.
fn ephemeral(world: &World) -> Command {
    std::fs::copy(world.path("base.raw"), world.path("copy")).unwrap();
    on(world, "copy")
}

fn on(world: &World, disk: &str) -> Command {
    let mut command = spillway();
    command.args(["serve", "--mode", "ephemeral", "--disk"]).arg(world.path(disk));
    command.arg("--nbd").arg(world.path("nbd")).arg("--control").arg(world.path("control"));
    command
}

#[test]
fn the_copy_is_served_in_place_and_gone_with_its_disk() {
    let world = World::new();
    let server = Server::start(ephemeral(&world).args(["--size", "24M"]));
    assert_eq!(world.left(), ["base.raw", "control", "nbd"], "its name is gone");
    let image = |mib: u64| format!("read -P {} {mib}M 512", sector(mib * MIB));
    qemu_io(&world, &[&image(0), &image(15), "read -P 0 16M 8M", "write -P 7 1M 64k", "write -P 8 5120 512"]);
    let of_image = format!("read -P {} 4608 512", sector(4608));
    qemu_io(&world, &["read -P 7 1M 64k", "read -P 8 5120 512", &of_image, &image(2)]);
    let stats_now = stats(&world);
    let planes = &stats_now["planes"];
    assert_eq!((&planes["base"]["reads"], &planes["zero"]["reads"]), (&0.into(), &0.into()));
    let (guest, own) = (&planes["guest"], &planes["overflow"]);
    assert!(own["read_bytes"].as_u64() >= guest["read_bytes"].as_u64(), "{planes}");
    assert!(own["written_bytes"].as_u64() >= guest["written_bytes"].as_u64(), "{planes}");
    assert_eq!(stats_now["overflow"]["used_bytes"], 24 << 20, "all of it is its own");
    qemu_io(&world, &["discard 0 8M", "read -P 0 0 8M", &image(9)]);
    assert_eq!(stats(&world)["overflow"]["used_bytes"], 16 << 20);
    // What it was copied from is as it was.
    let expected: Vec<u8> = (0..16u32 << 20).map(|i| (i / 512 % 251) as u8).collect();
    assert!(std::fs::read(world.path("base.raw")).unwrap() == expected);
    refuses(spillway().arg("reset").arg(world.path("control")), 75, &["mode ephemeral", "a new copy"]);
    refuses(
        spillway().arg("reset").arg(world.path("control")).args(["--force", "--discard-data"]),
        75,
        &["mode ephemeral"],
    );
    assert_eq!(server.end(Signal::TERM).0, 0);
    assert_eq!(world.left(), ["base.raw"]);
}

#[test]
fn what_was_written_survives_its_worker() {
    let world = World::new();
    let server = Server::start(&mut ephemeral(&world));
    let mut last = server.worker_pid();
    for round in 1..5 {
        qemu_io(&world, &[&format!("write -P {round} {round}M 1M"), "discard 8M 1M"]);
        rustix::process::kill_process(last, Signal::KILL).unwrap();
        let serving = || stats(&world)["worker_pid"].as_i64().and_then(|pid| Pid::from_raw(pid as i32));
        until("another worker", || serving().is_some_and(|pid| pid != last));
        last = serving().unwrap();
        let image = format!("read -P {} 12M 512", sector(12 * MIB));
        qemu_io(&world, &[&format!("read -P {round} {round}M 1M"), "read -P 0 8M 1M", &image]);
        assert_eq!(stats(&world)["overflow"]["used_bytes"], 15 << 20);
    }
    assert_eq!(server.end(Signal::TERM).0, 0);
    assert!(!alive(last));
}

#[test]
fn what_is_no_copy_of_its_own_is_refused_and_left_alone() {
    let world = World::new();
    refuses(&mut on(&world, "copy"), 66, &["does not exist", "raw copy"]);
    std::fs::hard_link(world.path("base.raw"), world.path("copy")).unwrap();
    refuses(&mut on(&world, "copy"), 66, &["hard links", "copy of its own"]);
    std::fs::remove_file(world.path("copy")).unwrap();
    std::os::unix::fs::symlink("base.raw", world.path("copy")).unwrap();
    refuses(&mut on(&world, "copy"), 73, &["symbolic link"]);
    std::fs::remove_file(world.path("copy")).unwrap();
    // An image that another disk reads.
    let mut reader = spillway();
    reader.args(["serve", "--mode", "ram", "--image"]).arg(world.path("base.raw"));
    let reader = Server::start(reader.arg("--nbd").arg(world.path("other")));
    refuses(&mut on(&world, "base.raw"), 75, &["in use as an image"]);
    assert_eq!(reader.end(Signal::TERM).0, 0);
    for (len, word) in [(0, "0 bytes"), (1000, "multiple of 512")] {
        std::fs::write(world.path("copy"), vec![1; len]).unwrap();
        refuses(&mut on(&world, "copy"), 66, &[word]);
    }
    refuses(ephemeral(&world).args(["--size", "1M"]), 2, &["16.0 MiB", "--size"]);
    // A failure before anybody is served costs nothing.
    std::fs::write(world.path("nbd"), "in the way").unwrap();
    refuses(&mut ephemeral(&world), 73, &["nbd"]);
    assert_eq!(world.left(), ["base.raw", "copy", "nbd"]);
    assert_eq!(std::fs::metadata(world.path("base.raw")).unwrap().len(), 16 << 20);
    if std::path::Path::new("/dev/shm").is_dir() {
        let dir = tempfile::tempdir_in("/dev/shm").unwrap();
        std::fs::write(dir.path().join("copy"), vec![0; 4096]).unwrap();
        let mut command = spillway();
        command.args(["serve", "--mode", "ephemeral", "--disk"]).arg(dir.path().join("copy"));
        refuses(command.arg("--nbd").arg(world.path("n")), 73, &["tmpfs", "memory"]);
    }
}

/// What is shorter than a block, or ends in the middle of one, is a disk like any other, whatever its mode.
#[test]
fn images_of_a_few_sectors_are_served_in_every_mode() {
    let world = World::new();
    for sectors in [1, 2, 3, 7, 8, 9, 15, 17] {
        let size = sectors * 512;
        let content: Vec<u8> = (1..=sectors).flat_map(|sector| vec![sector as u8; 512]).collect();
        for mode in ["ram", "ram+overflow", "overflow", "direct", "persistent", "ephemeral"] {
            for cache in ["host", "none"] {
                if mode == "ephemeral" && cache == "none" {
                    continue;
                }
                let what = format!("{mode}, {cache}, {sectors} sectors");
                std::fs::write(world.path("small.raw"), &content).unwrap();
                let mut serve = spillway();
                serve.args(["serve", "--mode", mode, "--nbd"]).arg(world.path("nbd"));
                match mode {
                    "ephemeral" => {
                        std::fs::copy(world.path("small.raw"), world.path("copy")).unwrap();
                        serve.arg("--disk").arg(world.path("copy"));
                    }
                    "persistent" => {
                        serve.arg("--disk").arg(world.path("own"));
                    }
                    "ram" => {}
                    _ => {
                        serve.arg("--overflow-dir").arg(world.dir.path());
                    }
                }
                if mode != "ephemeral" {
                    serve.args(["--base-cache", cache, "--image"]).arg(world.path("small.raw"));
                }
                let server = Server::start(&mut serve);
                assert_eq!(server.report["size_bytes"], size, "{what}");
                let last = size - 512;
                let as_it_was = (0..sectors).map(|n| format!("read -P {} {} 512", n + 1, n * 512));
                let mut commands: Vec<_> = as_it_was.collect();
                commands.push(format!("write -P 99 {last} 512"));
                commands.push(format!("read -P 99 {last} 512"));
                commands.extend((0..sectors - 1).map(|n| format!("read -P {} {} 512", n + 1, n * 512)));
                commands.extend([format!("discard 0 {size}"), format!("write -z 0 {size}"), "flush".into()]);
                commands.push(format!("read -P 0 0 {size}"));
                qemu_io(&world, &commands.iter().map(String::as_str).collect::<Vec<_>>());
                let (code, text) = server.end(Signal::TERM);
                assert_eq!(code, 0, "{what}: {text}");
                assert_eq!(std::fs::read(world.path("small.raw")).unwrap(), content, "{what}");
                // It is told by its time from the next one.
                let _ = std::fs::remove_file(world.path("own"));
            }
        }
    }
}
