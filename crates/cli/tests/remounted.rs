//! Mode `persistent` on real file systems whose live map has reached the medium before the data that it tells of: after a
//! forced shutdown and a new mount in the same boot, on a crash-consistent copy of the volume, and after the death of all
//! processes alone.
//!
//! Owns what each block may then be. Invariant: what nobody wrote is the image's.

#![allow(clippy::unwrap_used, reason = "a test that fails here has failed")]

mod common;

use common::volume::{Volume, kill, mount_for_this_thread_alone, runs, serve};
use common::{World, is_root};
use rustix::process::Signal;
use spillway_control::persistent_file::LIVE_AT;
use spillway_control::{Content, DiskAtRest};
use spillway_testkit::{Driver, skip};
use std::fs::File;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::Command;

const BLOCK: u64 = 4096;
const DISK_BYTES: u64 = 16 << 20;
/// Each byte of the image.
const IMAGE: u8 = 0xaa;
/// The block that is flushed.
const FLUSHED: u8 = 0x11;
/// The sector of each block that is written and not flushed.
const NEW: u8 = 0x22;
/// Blocks of which one sector is written.
const BLOCKS: std::ops::Range<u64> = 16..1016;

/// As if the device had gone: nothing more reaches it, the journal neither.
fn shut_down(volume: &Volume) {
    // `_IOR('X', 125, __u32)`, ext4's and XFS's; 2: without the log.
    const GOING_DOWN: u64 = 0x8004_587d;
    let (folder, flags) = (File::open(&volume.at).unwrap(), 2u32);
    // SAFETY: the call reads four bytes, which are there, and the fd is open.
    let result = unsafe { libc::ioctl(folder.as_raw_fd(), GOING_DOWN, &raw const flags) };
    assert_eq!(result, 0, "{}", std::io::Error::last_os_error());
}

/// The live map reaches the medium, as it may at any time, and nothing else does.
fn write_live_map(disk: &Path) {
    let file = File::open(disk).unwrap();
    let flags =
        libc::SYNC_FILE_RANGE_WAIT_BEFORE | libc::SYNC_FILE_RANGE_WRITE | libc::SYNC_FILE_RANGE_WAIT_AFTER;
    // SAFETY: the call takes numbers alone, and the fd is open.
    let result = unsafe { libc::sync_file_range(file.as_raw_fd(), LIVE_AT as i64, BLOCK as i64, flags) };
    assert_eq!(result, 0, "{}", std::io::Error::last_os_error());
}

/// A block's content is the image's with the new sector or without. Whether it has that.
fn is_new(block: u64, content: &[u8]) -> bool {
    let (sector, rest) = content.split_at(512);
    assert!(rest.iter().all(|&byte| byte == IMAGE), "block {block}: what nobody wrote is {:#x}", rest[0]);
    let new = sector[0] == NEW;
    assert!(
        sector.iter().all(|&byte| byte == if new { NEW } else { IMAGE }),
        "block {block}: {:#x}",
        sector[0]
    );
    new
}

/// How many of the blocks are as they were written last; what was flushed is there.
fn look(driver: &mut Driver) -> u64 {
    let mut content = vec![0; BLOCK as usize];
    driver.read_at(0, &mut content).unwrap();
    assert_eq!(content, [FLUSHED; BLOCK as usize]);
    let mut new = 0;
    for block in BLOCKS {
        driver.read_at(block * BLOCK, &mut content).unwrap();
        new += u64::from(is_new(block, &content));
    }
    new
}

/// The same of a disk that nobody serves.
fn look_at_rest(disk: &Path) -> u64 {
    let disk = DiskAtRest::open(disk, "golden:1", DISK_BYTES).unwrap();
    let (mut new, mut flushed) = (0, false);
    let listed = disk.parts(|part| {
        if let Content::Own { at } = part.content {
            for from in (0..part.len).step_by(BLOCK as usize) {
                let mut content = vec![0; BLOCK as usize];
                disk.file().read_exact_at(&mut content, at + from).unwrap();
                match (part.from + from) / BLOCK {
                    0 => flushed = content == [FLUSHED; BLOCK as usize],
                    block => new += u64::from(is_new(block, &content)),
                }
            }
        }
        Ok::<_, spillway_control::SupervisorError>(())
    });
    listed.unwrap();
    assert!(flushed, "what was flushed is there");
    new
}

fn what_is_found(kind: &str, is_shut_down: bool) {
    if !is_root() {
        return skip("file systems can be mounted by root only");
    }
    mount_for_this_thread_alone();
    let world = World::new();
    std::fs::write(world.path("base.raw"), vec![IMAGE; DISK_BYTES as usize]).unwrap();
    let [volume, copy] = ["volume", "copy"].map(|name| Volume::of(&world, name));
    volume.make(kind);
    if !volume.mount() {
        return skip(&format!("this host mounts no loop device with {kind}"));
    }
    let (server, mut driver) = serve(&world, &volume.disk());
    // The map's page is there already when it changes: only the data needs the journal.
    driver.write_at(0, &[FLUSHED; BLOCK as usize]).unwrap();
    driver.flush().unwrap();
    for block in BLOCKS {
        driver.write_at(block * BLOCK, &[NEW; 512]).unwrap();
    }
    write_live_map(&volume.disk());
    volume.copied(&copy);
    if is_shut_down {
        shut_down(&volume);
    }
    drop(driver);
    kill(server);
    let all = BLOCKS.end - BLOCKS.start;
    let whole = |disk: &Path| {
        let at_rest = look_at_rest(disk);
        let (server, mut driver) = serve(&world, disk);
        let new = look(&mut driver);
        println!("{kind}, {}: {new} of {all} blocks are new", disk.display());
        assert_eq!(at_rest, new);
        server
    };
    if !is_shut_down {
        // The same mount, in another place too: as a service sees it that has a mount namespace of its own.
        let elsewhere = Volume::of(&world, "elsewhere");
        assert!(runs(Command::new("mount").arg("--bind").arg(&volume.at).arg(&elsewhere.at)));
        assert_eq!(look_at_rest(&volume.disk()), all, "what was completed is there");
        for disk in [elsewhere.disk(), volume.disk()] {
            let (server, mut driver) = serve(&world, &disk);
            assert_eq!(look(&mut driver), all, "what was completed is there");
            kill(server);
        }
        elsewhere.unmount();
        // Or somebody writes over it what a snapshot had, into the same file. (A btrfs is mounted once by its id.)
        if kind != "btrfs" {
            let beside = Volume { image: world.path("beside.img"), at: elsewhere.at.clone() };
            copy.copied(&beside);
            assert!(beside.mount());
            assert!(runs(Command::new("cp").arg(beside.disk()).arg(volume.disk())));
            beside.unmount();
            kill(whole(&volume.disk()));
        }
    }
    volume.unmount();
    for volume in [volume, copy] {
        assert!(volume.mount());
        assert_eq!(whole(&volume.disk()).end(Signal::TERM).0, 0);
        volume.unmount();
    }
}

#[test]
fn xfs_that_was_shut_down() {
    what_is_found("xfs", true);
}

#[test]
fn ext4_that_was_shut_down() {
    what_is_found("ext4", true);
}

#[test]
fn xfs_that_is_still_mounted() {
    what_is_found("xfs", false);
}

#[test]
fn ext4_that_is_still_mounted() {
    what_is_found("ext4", false);
}

#[test]
fn btrfs_that_is_still_mounted() {
    what_is_found("btrfs", false);
}
