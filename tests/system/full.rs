//! A write cache that is full: what still goes on, and how it gets going again.

use crate::world::{MIB, World, qemu_io, until};
use spillway_testkit::disk::figure;
use spillway_testkit::{Ask, Disk, Driver, Oracle, Shape};

const DISK: u64 = 96 * MIB;
const PIECE: usize = 64 << 10;

const EIO: i32 = 5;

const MODES: [&[&str]; 3] = [
    &["--ram", "16M", "--overflow", "20M"],
    &["--mode", "ram", "--ram", "16M"],
    &["--mode", "overflow", "--overflow", "20M"],
];

struct Scene {
    disk: Disk,
    driver: Driver,
    oracle: Oracle,
    /// Where the write was that found no space.
    full_at: u64,
}

impl Scene {
    /// A disk of which no more than the image has been read.
    fn new(world: &World, mode: &[&str], policy: &str) -> Scene {
        let image = world.image(8 * MIB);
        let disk = world.serve(&image, &[mode, &["--size", "96M", "--full", policy]].concat());
        let shape = Shape { queues: 2, depth: 8, request_bytes: PIECE, ..Shape::default() };
        let driver = Driver::connect_with(&disk.vhost(), shape).unwrap();
        let oracle = Oracle::with_base(DISK, 71, &image).unwrap();
        Scene { disk, driver, oracle, full_at: 0 }
    }

    /// Writes a piece. What is there after an error is anyone's guess.
    fn try_write(&mut self, at: u64) -> Result<(), i32> {
        let mut content = vec![0; PIECE];
        self.oracle.write(at, &mut content);
        let errno = |e: anyhow::Error| e.downcast_ref::<std::io::Error>().unwrap().raw_os_error().unwrap();
        self.driver.write_at(at, &content).map_err(errno)
    }

    fn discard(&mut self, at: u64, len: u64) {
        self.driver.discard(at, len).unwrap();
        self.oracle.discarded(at, len);
    }

    /// Reads and checks everything but the write that found no space.
    fn check(&mut self) {
        let mut content = vec![0; PIECE];
        for at in (0..DISK).step_by(PIECE).filter(|at| *at != self.full_at) {
            self.driver.read_at(at, &mut content).unwrap();
            self.oracle.check(at, &content).unwrap();
        }
    }

    /// Overwrites what was written last and first: where there is a RAM tier before an overflow, the one is in
    /// RAM and the other is not.
    fn overwrite(&mut self) {
        for i in 1..=32 {
            self.try_write(self.full_at - i * PIECE as u64).unwrap();
            self.try_write((i - 1) * PIECE as u64).unwrap();
        }
    }

    fn took_what_it_could(&self, has_both: bool) {
        let least = if has_both { 26 } else { 11 };
        assert!(self.full_at >= least * MIB, "full after {} bytes", self.full_at);
    }
}

#[test]
fn with_fail_new_blocks_get_an_error_until_something_is_discarded() {
    for mode in MODES {
        let Some(world) = World::new(&[]) else { return };
        let mut s = Scene::new(&world, mode, "fail");
        let error = loop {
            match s.try_write(s.full_at) {
                Ok(()) => s.full_at += PIECE as u64,
                Err(errno) => break errno,
            }
        };
        assert_eq!(error, EIO, "{mode:?}: virtio has no other");
        s.took_what_it_could(mode.len() == 4 && mode[0] == "--ram");
        s.check();
        s.overwrite();
        s.driver.flush().unwrap();
        assert!(s.try_write(s.full_at).is_err(), "{mode:?}: it is as full as before");
        assert!(s.disk.figure("failed.requests").unwrap() >= 2);
        assert_eq!(s.disk.figure("inflight").unwrap(), 0);
        // Zeroes take no space.
        s.driver.write_zeroes(s.full_at, PIECE as u64, true).unwrap();
        s.oracle.zeroed(s.full_at, PIECE as u64);

        s.discard(MIB, 6 * MIB);
        let from = s.full_at;
        for i in 0..64 {
            s.try_write(from + i * PIECE as u64).unwrap_or_else(|e| panic!("{mode:?}: {i}: errno {e}"));
        }
        s.full_at = DISK;
        s.check();
        drop(s.driver);
        s.disk.stop().unwrap();
    }
}

#[test]
fn with_pause_a_write_waits_until_something_is_discarded() {
    for mode in MODES {
        let Some(world) = World::new(&["qemu-io"]) else { return };
        let mut s = Scene::new(&world, mode, "pause");
        let mut content = vec![0; PIECE];
        // Until one is left in flight that waits for space, and the disk says so.
        let waiting = loop {
            s.oracle.write(s.full_at, &mut content);
            let write = Ask::Write { offset: s.full_at, len: PIECE };
            let buffer = s.driver.start(write, |to| to.copy_from_slice(&content)).unwrap();
            until("a write completes or waits", &s.disk, || {
                s.driver.is_finished(buffer) || s.disk.log().contains("the write cache is full")
            });
            if s.disk.log().contains("the write cache is full") {
                break buffer;
            }
            assert_eq!(s.driver.finish(buffer, |_| {}).unwrap(), 0);
            s.full_at += PIECE as u64;
        };
        s.took_what_it_could(mode.len() == 4 && mode[0] == "--ram");
        let stats = s.disk.stats().unwrap();
        assert_eq!(figure(&stats, "waiting").unwrap(), 1, "{mode:?}");
        assert_eq!(figure(&stats, "inflight").unwrap(), 1, "{mode:?}");

        // All else goes on, on its own ring and by NBD.
        s.check();
        s.overwrite();
        s.driver.flush().unwrap();
        qemu_io(&s.disk, &["read 0 8M", "flush", "discard 90M 1M"]);
        assert!(!s.driver.is_finished(waiting), "{mode:?}: nothing has made space yet");
        let stats = s.disk.stats().unwrap();
        assert_eq!(figure(&stats, "waiting").unwrap(), 1, "{mode:?}");
        let (count, ns) = (figure(&stats, "stalls.count").unwrap(), figure(&stats, "stalls.ns").unwrap());
        assert!(count >= 1, "{mode:?}");

        s.discard(MIB, 6 * MIB);
        assert_eq!(s.driver.finish(waiting, |_| {}).unwrap(), 0, "{mode:?}: it goes on by itself");
        let stats = s.disk.stats().unwrap();
        assert!(figure(&stats, "stalls.ns").unwrap() > ns, "{mode:?}: {stats}");
        assert_eq!(figure(&stats, "waiting").unwrap(), 0);
        until("the disk says so", &s.disk, || s.disk.log().contains("has space again"));
        let from = s.full_at;
        for i in 1..48 {
            s.try_write(from + i * PIECE as u64).unwrap();
        }
        s.full_at = DISK;
        s.check();
        drop(s.driver);
        s.disk.stop().unwrap();
    }
}
