//! The file system below the overflow is full long before the overflow's limit is: others have filled it.
//!
//! A small ext4 of its own, on a loop device, so that the kernel says what a full one says and when. What is injected
//! instead (`faults.rs`) cannot fall short in the middle of a write, or take its time until freed space can be used.

use crate::scene::Events;
use crate::world::{DEADLINE, MIB, PATIENCE, World, succeeds, until};
use rustix::fs::{FallocateFlags, Mode, OFlags};
use rustix::process::geteuid;
use spillway_testkit::process::wait_until;
use spillway_testkit::{Ask, Disk, Driver, Oracle, Shape, skip};
use std::path::PathBuf;
use std::process::Command;

const DISK: u64 = 96 * MIB;
const FILE_SYSTEM: u64 = 64 * MIB;
/// More than the file system has, and than the disk.
const OVERFLOW: &str = "256M";
const PIECE: usize = 64 << 10;
const EIO: i32 = 5;

/// A mounted file system that nobody else uses.
struct SmallFileSystem {
    dir: PathBuf,
}

impl SmallFileSystem {
    /// None: it cannot be had here, which has been said.
    fn new(world: &World) -> Option<SmallFileSystem> {
        if !geteuid().is_root() {
            skip("a small file system can be mounted by root only");
            return None;
        }
        let (image, dir) = (world.path("small.img"), world.path("small"));
        std::fs::File::create(&image).unwrap().set_len(FILE_SYSTEM).unwrap();
        std::fs::create_dir(&dir).unwrap();
        succeeds(
            Command::new("mke2fs").args(["-q", "-F", "-t", "ext4", "-b", "4096", "-m", "0"]).arg(&image),
        );
        let mounted = Command::new("mount").args(["-o", "loop"]).arg(&image).arg(&dir).output().unwrap();
        if !mounted.status.success() {
            skip("this host mounts no loop device");
            return None;
        }
        Some(SmallFileSystem { dir })
    }

    fn filler(&self) -> PathBuf {
        self.dir.join("filler")
    }

    /// Another's file takes all that is free.
    fn fill(&self) {
        let flags = OFlags::CREATE | OFlags::WRONLY | OFlags::CLOEXEC;
        let file = rustix::fs::open(self.filler(), flags, Mode::RUSR).unwrap();
        let mut end = 0;
        for piece in [MIB, 4096] {
            loop {
                match rustix::fs::fallocate(&file, FallocateFlags::empty(), end, piece) {
                    Ok(()) => end += piece,
                    Err(rustix::io::Errno::NOSPC) => break,
                    Err(e) => panic!("{}: {e}", self.filler().display()),
                }
            }
        }
        rustix::fs::fsync(&file).unwrap();
        assert!(end > 16 * MIB, "{end} bytes were free");
    }

    /// It takes itself away again.
    fn empty(&self) {
        std::fs::remove_file(self.filler()).unwrap();
    }
}

impl Drop for SmallFileSystem {
    fn drop(&mut self) {
        // Lazily: should the test have failed, its disk may still be ending.
        let unmounted = Command::new("umount").arg("--lazy").arg(&self.dir).status();
        assert!(unmounted.is_ok_and(|s| s.success()) || std::thread::panicking(), "umount");
    }
}

/// A disk whose overflow is on a small file system.
struct Scene<'a> {
    small: &'a SmallFileSystem,
    disk: Disk,
    driver: Driver,
    oracle: Oracle,
    events: Events,
    at: u64,
}

impl Scene<'_> {
    /// A disk that has begun to use its overflow, on a file system that is full then.
    fn new<'a>(world: &World, small: &'a SmallFileSystem, options: &[&str]) -> Scene<'a> {
        let image = world.image(8 * MIB);
        let place = ["--size", "96M", "--overflow-dir", small.dir.to_str().unwrap()];
        let disk = world.serve(&image, &[options, &place].concat());
        let shape = Shape { queues: 2, depth: 8, request_bytes: PIECE, deadline: DEADLINE };
        let driver = Driver::connect_with(&disk.vhost(), shape).unwrap();
        let oracle = Oracle::with_base(DISK, 91, &image).unwrap();
        let events = Events::follow(&disk);
        let mut scene = Scene { small, disk, driver, oracle, events, at: 0 };
        for _ in 0..24 * MIB / PIECE as u64 {
            scene.write().unwrap();
        }
        until("the overflow is used", &scene.disk, || scene.figure("overflow.used_bytes") > 4 * MIB);
        small.fill();
        scene
    }

    fn figure(&self, key: &str) -> u64 {
        self.disk.figure(key).unwrap()
    }

    /// Writes the next piece, unless that fails; then it is the next still.
    fn write(&mut self) -> Result<(), i32> {
        let mut content = vec![0; PIECE];
        self.oracle.write(self.at, &mut content);
        let errno = |e: anyhow::Error| e.downcast_ref::<std::io::Error>().unwrap().raw_os_error().unwrap();
        self.driver.write_at(self.at, &content).map_err(errno)?;
        self.at += PIECE as u64;
        Ok(())
    }

    /// Reads and checks every byte but those of the next piece.
    fn check(&mut self) {
        let mut content = vec![0; PIECE];
        for at in (0..DISK).step_by(PIECE).filter(|at| *at != self.at) {
            self.driver.read_at(at, &mut content).unwrap();
            self.oracle.check(at, &content).unwrap_or_else(|e| panic!("{e:#}\n{}", self.disk.log()));
        }
    }

    /// There is space: everything that follows succeeds, and nothing is wrong.
    fn goes_on(mut self) {
        for _ in 0..12 * MIB / PIECE as u64 {
            self.write().unwrap();
        }
        self.driver.verify(&self.oracle).unwrap_or_else(|e| panic!("{e:#}\n{}", self.disk.log()));
        until("it is well again", &self.disk, || self.figure("degraded") == 0);
        assert_eq!(self.figure("checksum_mismatches"), 0);
        drop(self.driver);
        self.disk.stop().unwrap();
        let left: Vec<_> =
            std::fs::read_dir(&self.small.dir).unwrap().map(|e| e.unwrap().file_name()).collect();
        assert_eq!(left, ["lost+found"], "the overflow file went with its disk");
    }
}

#[test]
fn with_pause_a_write_waits_until_others_give_the_file_system_back() {
    for mode in [&["--ram", "16M"][..], &["--mode", "overflow"]] {
        let Some(world) = World::new(&["mke2fs"]) else { return };
        let Some(small) = SmallFileSystem::new(&world) else { return };
        let mut s = Scene::new(&world, &small, &[mode, &["--overflow", OVERFLOW]].concat());
        assert!(s.disk.log().contains("notice") && s.disk.log().contains("free"), "{}", s.disk.log());
        let mut content = vec![0; PIECE];
        let waiting = loop {
            s.oracle.write(s.at, &mut content);
            let write = Ask::Write { offset: s.at, len: PIECE };
            let buffer = s.driver.start(write, |to| to.copy_from_slice(&content)).unwrap();
            let mut done = false;
            until("a write completes or waits", &s.disk, || {
                done = s.driver.is_finished(buffer);
                done || s.events.count("full") > 0
            });
            if !done {
                break buffer;
            }
            assert_eq!(s.driver.finish(buffer, |_| {}).unwrap(), 0, "{mode:?}");
            s.at += PIECE as u64;
        };
        assert!(s.figure("overflow.used_bytes") < FILE_SYSTEM / 2, "the limit is far away");
        // Without a RAM tier its block is on the way to the file already, and not counted as waiting for space.
        let has_ram = mode[0] == "--ram";
        assert_eq!(s.figure("inflight"), 1, "{mode:?}");
        assert!(s.figure("waiting") == 1 || !has_ram, "{mode:?}");
        until("it is degraded", &s.disk, || s.figure("degraded") == 1);
        // Reads go on, and what was tried meanwhile has changed nothing.
        s.check();
        let errors = s.figure("overflow.write_errors");
        until("it is tried again", &s.disk, || s.figure("overflow.write_errors") > errors);
        assert!(!s.driver.is_finished(waiting), "{mode:?}: nobody has made space yet");
        assert!(s.events.count("space-available") + s.events.count("recovered") == 0, "{mode:?}");
        assert!(s.disk.log().contains("(os error 28)"), "{}", s.disk.log());

        s.small.empty();
        assert_eq!(s.driver.finish(waiting, |_| {}).unwrap(), 0, "{mode:?}: it goes on by itself");
        s.at += PIECE as u64;
        until("it says so", &s.disk, || s.events.count("space-available") * s.events.count("recovered") > 0);
        for kind in ["overflow-write-failed", "degraded", "full", "recovered", "space-available"] {
            assert_eq!(s.events.count(kind), 1, "{mode:?}: {kind}");
        }
        assert_eq!((s.figure("waiting"), s.figure("failed.requests")), (0, 0), "{mode:?}");
        assert!(s.figure("stalls.ns") > 0 || !has_ram, "{mode:?}");
        s.goes_on();
    }
}

#[test]
fn with_fail_a_write_gets_enospc_until_others_give_the_file_system_back() {
    for mode in [
        &["--ram", "16M", "--overflow", OVERFLOW, "--full", "fail"][..],
        &["--mode", "overflow", "--overflow", OVERFLOW, "--full", "fail"],
        &["--mode", "direct"],
    ] {
        let Some(world) = World::new(&["mke2fs", "qemu-io"]) else { return };
        let Some(small) = SmallFileSystem::new(&world) else { return };
        let mut s = Scene::new(&world, &small, mode);
        let error = loop {
            match s.write() {
                Ok(()) => assert!(s.at < DISK, "{mode:?}: it is never full"),
                Err(errno) => break errno,
            }
        };
        assert_eq!(error, EIO, "{mode:?}: virtio has no other");
        assert_eq!(refusal(&s.disk, s.at), "write failed: No space left on device", "{mode:?}");
        assert_eq!((s.figure("waiting"), s.figure("inflight")), (0, 0), "{mode:?}");
        s.check();

        s.small.empty();
        // Whoever tries again gets on as soon as the disk has tried again.
        let again = wait_until(PATIENCE, || s.write().ok());
        assert!(again.is_some(), "{mode:?}: {}", s.disk.log());
        let failed = s.figure("failed.requests");
        assert!(failed >= 2);
        assert!(s.events.count("overflow-write-failed") > 0, "{mode:?}");
        assert!(s.disk.log().contains("(os error 28)"), "{}", s.disk.log());
        s.goes_on();
    }
}

/// What an NBD client is told that writes there.
fn refusal(disk: &Disk, at: u64) -> String {
    let mut qemu_io = Command::new("qemu-io");
    qemu_io.args(["-f", "raw"]).arg(disk.nbd_uri()).args(["-c", &format!("write -P 1 {at} {PIECE}")]);
    let output = qemu_io.output().unwrap();
    let text = [output.stdout, output.stderr].concat();
    String::from_utf8_lossy(&text).trim().to_string()
}
