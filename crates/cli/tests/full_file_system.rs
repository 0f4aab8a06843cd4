//! A file system that is full keeps no guest from what needs no new room: TRIM, FLUSH, overwriting, and the end.
//!
//! Owns small file systems on loop devices. Invariant: what it mounted is unmounted when a test ends, also when it fails.

#![allow(clippy::unwrap_used, reason = "a test that fails here has failed")]

mod common;

use common::{Server, World, finishes, is_root, qemu_io, spillway};
use rustix::fs::{FallocateFlags, fallocate};
use rustix::io::Errno;
use rustix::process::Signal;
use spillway_control::persistent_file::{DURABLE_AT, LIVE_AT};
use spillway_testkit::skip;
use std::fs::File;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::Command;

const GIB: u64 = 1 << 30;
const KIB: u64 = 1 << 10;
/// So large that its maps have many pages: 64 GiB are 4 MiB of each.
const DISK: u64 = 64 * GIB;
const MAP: u64 = DISK / GIB * 64 * KIB;

fn succeeds(command: &mut Command) {
    let (code, out, err) = finishes(command);
    assert_eq!(code, 0, "{command:?}: {out}{err}");
}

/// A mounted file system that nobody else uses.
struct Small(PathBuf);

impl Small {
    /// None: it cannot be had here, which has been said.
    fn mount(world: &World, kind: &str) -> Option<Small> {
        let (image, at) = (world.path(&format!("{kind}.img")), world.path(kind));
        std::fs::create_dir(&at).unwrap();
        File::create(&image).unwrap().set_len(512 << 20).unwrap();
        succeeds(Command::new(format!("mkfs.{kind}")).arg("-q").arg(&image));
        let mounted = Command::new("mount").args(["-o", "loop"]).arg(&image).arg(&at).output().unwrap();
        if !mounted.status.success() {
            skip(&format!("this host mounts no {kind} of a loop device"));
            return None;
        }
        Some(Small(at))
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }

    /// Another's file takes all that is free.
    fn fill(&self) {
        let file = File::create(self.path("filler")).unwrap();
        let mut end = 0;
        for piece in [1 << 20, 64 * KIB, 4 * KIB] {
            loop {
                match fallocate(&file, FallocateFlags::empty(), end, piece) {
                    Ok(()) => end += piece,
                    Err(Errno::NOSPC) => break,
                    Err(e) => panic!("{e}"),
                }
            }
        }
        file.sync_all().unwrap();
        assert!(end > 16 << 20, "{end} bytes were free");
    }
}

impl Drop for Small {
    fn drop(&mut self) {
        // Lazily: should the test have failed, its disk may still be ending.
        let unmounted = Command::new("umount").arg("--lazy").arg(&self.0).status();
        assert!(unmounted.is_ok_and(|s| s.success()) || std::thread::panicking(), "umount");
    }
}

fn serve(world: &World, small: &Small, mode: &str) -> Command {
    let mut serve = spillway();
    serve.args(["serve", "--mode", mode, "--nbd"]).arg(world.path("nbd"));
    if mode == "ephemeral" {
        serve.arg("--disk").arg(small.path("copy"));
        return serve;
    }
    serve.arg("--image").arg(world.path("large.raw"));
    match mode {
        "persistent" => serve.arg("--disk").arg(small.path("disk")),
        _ => serve.arg("--overflow-dir").arg(&small.0),
    };
    serve
}

/// Blocks that nobody has written are trimmed, in every GiB of the disk, with a FLUSH now and then.
fn trim(world: &World, from: u64) {
    let mut commands = Vec::new();
    for n in 0..DISK / GIB {
        commands.push(format!("discard {} 64k", n * GIB + from));
        if n % 8 == 7 {
            commands.push("flush".into());
        }
    }
    commands.push("flush".into());
    qemu_io(world, &commands.iter().map(String::as_str).collect::<Vec<_>>());
}

fn world() -> World {
    let world = World::new();
    File::create(world.path("large.raw")).unwrap().set_len(DISK).unwrap();
    world
}

fn needs_no_room(kind: &str, modes: &[&str]) {
    if !is_root() {
        return skip("a file system can be mounted by root only");
    }
    for mode in modes {
        let world = world();
        let Some(small) = Small::mount(&world, kind) else { return };
        if *mode == "ephemeral" {
            File::create(small.path("copy")).unwrap().set_len(DISK).unwrap();
        }
        let server = Server::start(&mut serve(&world, &small, mode));
        qemu_io(&world, &["write -P 5 0 1M", "flush"]);
        small.fill();
        trim(&world, 512 << 20);
        let in_place = ["persistent", "direct", "ephemeral"].contains(mode);
        // Where the guest has written there is space, and what it has trimmed there is space as well.
        if in_place {
            qemu_io(&world, &["write -P 6 0 256k", "flush", "discard 512k 256k", "flush"]);
        }
        // The same pages of the map again.
        trim(&world, 768 << 20);
        let check = |world: &World| {
            let first = if in_place { "read -P 6 0 256k" } else { "read -P 5 0 256k" };
            qemu_io(world, &[first, "read -P 5 256k 256k", "read -P 5 768k 256k"]);
            qemu_io(world, &["read -P 0 512M 64k", "read -P 0 65024M 64k"]);
            if in_place {
                qemu_io(world, &["read -P 0 512k 256k"]);
            }
        };
        check(&world);
        let (code, text) = server.end(Signal::TERM);
        assert_eq!(code, 0, "{kind}, {mode}: {text}");
        if *mode == "persistent" {
            let server = Server::start(&mut serve(&world, &small, mode));
            check(&world);
            trim(&world, 896 << 20);
            let (code, text) = server.end(Signal::TERM);
            assert_eq!(code, 0, "{kind}, {mode}, again: {text}");
        }
    }
}

#[test]
fn on_ext4() {
    needs_no_room("ext4", &["persistent", "direct", "ephemeral", "overflow", "ram+overflow"]);
}

#[test]
fn on_xfs() {
    needs_no_room("xfs", &["persistent", "direct", "ephemeral"]);
}

/// Of what is written in place only a disk that is kept may be: its file is one that is not copied on write.
#[test]
fn on_btrfs() {
    needs_no_room("btrfs", &["persistent"]);
}

/// Bytes of a file that the file system holds, within a range.
fn held(file: &Path, from: u64, len: u64) -> u64 {
    let text = Command::new("xfs_io").args(["-r", "-c", "fiemap"]).arg(file).output().unwrap();
    let text = String::from_utf8(text.stdout).unwrap();
    let mut bytes = 0;
    // `0: [0..15]: 24..39`, in sectors; a hole has a word in place of the second range.
    for line in text.lines().filter(|line| !line.contains("hole")) {
        let Some((_, range)) = line.split_once('[') else { continue };
        let Some((a, b)) = range.split_once(']').and_then(|(range, _)| range.split_once("..")) else {
            continue;
        };
        let (a, b) = (a.parse::<u64>().unwrap() * 512, (b.parse::<u64>().unwrap() + 1) * 512);
        bytes += b.min(from + len).saturating_sub(a.max(from));
    }
    bytes
}

/// What the documents say is reserved, held against what the file system has.
#[test]
fn the_maps_of_a_disk_that_is_kept_have_their_room_from_the_start() {
    let world = world();
    let disk = world.path("disk");
    let serve = |size: &str| {
        let mut serve = spillway();
        serve.args(["serve", "--mode", "persistent", "--nbd"]).arg(world.path("nbd"));
        serve.arg("--image").arg(world.path("large.raw")).arg("--disk").arg(&disk).args(["--size", size]);
        serve
    };
    let check = |size: u64, map: u64| {
        for (what, from, len) in [
            ("headers", 0, 8 * KIB),
            ("live map", LIVE_AT, map),
            ("mark and durable map", DURABLE_AT, map + 4 * KIB),
        ] {
            assert_eq!(held(&disk, from, len), len, "{what} of {size} bytes");
        }
        let all = std::fs::metadata(&disk).unwrap().blocks() * 512;
        assert!(all < 2 * map + 64 * KIB, "{all} bytes for two maps of {map}");
    };
    let server = Server::start(&mut serve("64G"));
    check(DISK, MAP);
    assert_eq!(server.end(Signal::TERM).0, 0);
    // One that grows has more of them.
    let server = Server::start(&mut serve("128G"));
    check(2 * DISK, 2 * MAP);
    assert_eq!(server.end(Signal::TERM).0, 0);
}
