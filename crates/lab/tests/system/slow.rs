//! A disk below the overflow that takes half a second for everything, while workers are killed.
//!
//! The slowness is below the kernel's block layer, so that what a dead worker had begun lands long after its successor
//! has attached: ext4 on a loop device, on a file of nbdfuse, on nbdkit, whose every pread and pwrite strace holds
//! up. (dm-delay would do; many kernels lack it. strace on the worker would hold up calls that have not begun, which
//! die with it.) It can be begun and ended at any time, and a worker that is new need not be caught first.
//!
//! What it shows is that nothing fails and nothing is wrong. That a dead worker's place is not used too early it does not show:
//! on a disk this slow that place is hardly ever wanted again in time. The core's model and crash tests show that.

use crate::deaths::{kill_worker, seed};
use crate::world::{MIB, PATIENCE, World, succeeds, until};
use rustix::process::geteuid;
use spillway_lab::disk::figure;
use spillway_lab::process::wait_until;
use spillway_lab::{Driver, End, Mixed, Oracle, Rng, Server, Shape, skip};
use std::path::PathBuf;
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// In each of two rounds.
const KILLS: u32 = 4;
const SPAN: u64 = 32 * MIB;
const DELAY: Duration = Duration::from_millis(500);

/// A file system whose disk can be made slow.
struct SlowDisk {
    /// Where it is mounted; nowhere once it has been hidden.
    dir: Option<PathBuf>,
    strace_log: PathBuf,
    nbdfuse: Server,
    nbdkit: Server,
}

impl SlowDisk {
    /// None: it cannot be had here, which has been said.
    fn new(world: &World, bytes: u64) -> Option<SlowDisk> {
        if !geteuid().is_root() {
            skip("only root can mount a slow disk");
            return None;
        }
        if !PathBuf::from("/dev/fuse").exists() || !PathBuf::from("/dev/loop-control").exists() {
            skip("a slow disk needs FUSE and loop devices, which this kernel lacks");
            return None;
        }
        let [image, socket, file, dir] = ["disk.img", "disk.sock", "disk", "slow"].map(|n| world.path(n));
        std::fs::File::create(&image).unwrap().set_len(bytes).unwrap();
        std::fs::File::create(&file).unwrap();
        std::fs::create_dir(&dir).unwrap();
        // Nothing that the kernel would go on writing by itself.
        let options = ["-q", "-F", "-b", "4096", "-m", "0", "-E", "lazy_itable_init=0,lazy_journal_init=0"];
        succeeds(Command::new("mkfs.ext4").args(options).arg(&image));

        let text = |path: &PathBuf| path.display().to_string();
        let start = |name: &str, arguments: &[String]| {
            Server::start(name, name, arguments, None, &world.path(&format!("{name}.log"))).unwrap()
        };
        let serve = ["-f", "-t", "8", "-U", &text(&socket), "file", &text(&image)].map(String::from);
        let mut nbdkit = start("nbdkit", &serve);
        nbdkit.wait_for(&socket, PATIENCE).unwrap();
        let uri = format!("nbd+unix:///?socket={}", socket.display());
        let nbdfuse = start("nbdfuse", &["-C".into(), "16".into(), text(&file), uri]);
        let disk = SlowDisk { dir: Some(dir.clone()), strace_log: world.path("strace.log"), nbdfuse, nbdkit };
        let there = wait_until(PATIENCE, || (file.metadata().ok()?.len() == bytes).then_some(()));
        assert!(there.is_some(), "{}", disk.nbdfuse.tail());

        let mut losetup = Command::new("losetup");
        let device = succeeds(losetup.args(["--find", "--show", "--direct-io=on"]).arg(&file));
        let mounted =
            Command::new("mount").args(["-t", "ext4", "-o", "noatime", device.trim()]).arg(&dir).status();
        // Its last user takes the device along, and that one the file.
        succeeds(Command::new("losetup").args(["--detach", device.trim()]));
        succeeds(Command::new("umount").arg("--lazy").arg(&file));
        assert!(mounted.unwrap().success());
        Some(disk)
    }

    fn dir(&self) -> &str {
        self.dir.as_ref().unwrap().to_str().unwrap()
    }

    /// Nobody finds it any more; it goes with who uses it now, however that ends.
    fn hide(&mut self) {
        if let Some(dir) = self.dir.take() {
            succeeds(Command::new("umount").arg("--lazy").arg(dir));
        }
    }

    /// Reads and writes take [`DELAY`] longer until the value is dropped: each, or one of so many of each of nbdkit's
    /// threads, so that those that come later overtake them.
    fn slow_down(&self, one_of: u32) -> Server {
        let calls = "pread64,pwrite64";
        let arguments = [
            "-f".to_string(),
            format!("--attach={}", self.nbdkit.pid()),
            format!("--trace={calls}"),
            format!("--inject={calls}:delay_enter={}:when=1+{one_of}", DELAY.as_micros()),
        ];
        let strace = Server::start("strace", "strace", &arguments, None, &self.strace_log).unwrap();
        let attached = wait_until(PATIENCE, || {
            std::fs::read_to_string(&self.strace_log).is_ok_and(|log| log.contains(" attached")).then_some(())
        });
        assert!(attached.is_some(), "{}", strace.tail());
        strace
    }
}

impl Drop for SlowDisk {
    fn drop(&mut self) {
        self.hide();
        // It ends when the last user has gone.
        let _ = self.nbdfuse.wait(PATIENCE);
    }
}

#[test]
fn workers_are_killed_while_the_overflow_takes_half_a_second() {
    let Some(world) = World::new(&["strace", "nbdkit", "nbdfuse", "mkfs.ext4"]) else { return };
    let Some(mut slow) = SlowDisk::new(&world, 256 * MIB) else { return };
    let image = world.image(8 * MIB);
    let options = ["--size", "32M", "--ram", "8M", "--overflow", "128M", "--overflow-dir", slow.dir()];
    let disk = world.serve(&image, &options);
    slow.hide();
    let seed = seed();
    let mut rng = Rng::new(seed);
    let mut oracle = Oracle::with_base(SPAN, seed, &image).unwrap();
    let shape = Shape { queues: 2, depth: 64, request_bytes: 1 << 20, deadline: Duration::from_secs(60) };
    let mut driver = Driver::connect_with(&disk.vhost(), shape).unwrap();
    let mut mixed = Mixed {
        start_bytes: 0,
        span_bytes: SPAN,
        largest_bytes: 128 << 10,
        depth: 64,
        end: End::Count(3000),
        seed,
    };
    driver.run_mixed(&mixed, &mut oracle).unwrap_or_else(|e| panic!("{e:#}\n{}", disk.log()));
    let before = disk.stats().unwrap();

    let (mut last, mut slowest_ns) = (0, 0);
    for one_of in [1, 2] {
        let delay = slow.slow_down(one_of);
        let enough = AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                for _ in 0..KILLS {
                    last = kill_worker(&disk, last, 5 * DELAY, &mut rng);
                }
                enough.store(true, Ordering::Relaxed);
            });
            while !enough.load(Ordering::Relaxed) {
                mixed = Mixed { end: End::Count(100), seed: mixed.seed + 1, ..mixed };
                let measured = driver.run_mixed(&mixed, &mut oracle);
                let measured = measured.unwrap_or_else(|e| panic!("{e:#}\n{}", disk.log()));
                slowest_ns = slowest_ns.max(measured.max_ns);
            }
        });
        drop(delay);
        driver.verify(&oracle).unwrap_or_else(|e| panic!("{e:#}\n{}", disk.log()));
    }
    until("the last one's successor", &disk, || disk.worker().is_ok_and(|pid| pid != last));
    let stats = disk.stats().unwrap();

    let grown = |key: &str| figure(&stats, key).unwrap() - figure(&before, key).unwrap();
    println!(
        "the slowest request {} ms; {} overflow reads, {} writes; {} restarts",
        slowest_ns / 1_000_000,
        grown("planes.overflow.reads"),
        grown("planes.overflow.writes"),
        grown("restarts")
    );
    assert!(slowest_ns > DELAY.as_nanos() as u64, "it was slow");
    assert!(grown("planes.overflow.writes") > 10, "{stats}");
    assert!(grown("restarts") > u64::from(KILLS), "{stats}");
    for key in ["failed.requests", "checksum_mismatches", "overflow.write_errors", "overflow.read_errors"] {
        assert_eq!(disk.figure(key).unwrap(), 0, "{key}");
    }
    drop(driver);
    disk.stop().unwrap();
}
