//! The supervisor is killed: its worker serves on until the last client has left, and then nothing is left of the disk but
//! the names of its sockets.
//!
//! What is left is looked for among all processes: whoever has one of the disk's files open, or mapped.

use crate::client::{Lost, NbdClient};
use crate::deaths::{Enough, seed};
use crate::world::{DEADLINE, MIB, World, until};
use rustix::fs::{major, minor};
use rustix::process::{Pid, Signal, kill_process};
use spillway_testkit::{Driver, End, Mixed, Oracle, Shape};
use std::collections::BTreeSet;
use std::io::ErrorKind;
use std::os::unix::fs::MetadataExt;
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// Below, the VMM's; above, the NBD client's.
const VMM: u64 = 48 * MIB;
const SHAPE: Shape = Shape { queues: 2, depth: 32, request_bytes: 1 << 20, deadline: DEADLINE };

/// A file that has no name: device and inode.
type Nameless = (u64, u64);

fn processes() -> impl Iterator<Item = u32> {
    std::fs::read_dir("/proc").unwrap().filter_map(|e| e.unwrap().file_name().to_str()?.parse().ok())
}

/// The memfds and the deleted files that a process has open; nothing for one that has ended.
fn nameless(pid: u32) -> Vec<(Nameless, String)> {
    let Ok(fds) = std::fs::read_dir(format!("/proc/{pid}/fd")) else { return vec![] };
    fds.flatten()
        .filter_map(|fd| {
            let link = std::fs::read_link(fd.path()).ok()?.to_str()?.to_string();
            let file = std::fs::metadata(fd.path()).ok()?;
            link.ends_with(" (deleted)").then_some(((file.dev(), file.ino()), link))
        })
        .collect()
}

/// Whether a process has mapped one of them.
fn maps(pid: u32, files: &BTreeSet<Nameless>) -> bool {
    let text = std::fs::read_to_string(format!("/proc/{pid}/maps")).unwrap_or_default();
    let of = |&(dev, inode): &Nameless| format!(" {:02x}:{:02x} {inode} ", major(dev), minor(dev));
    files.iter().map(of).any(|mapping| text.contains(&mapping))
}

/// The processes that hold one of these files, in whatever way.
fn holders(files: &BTreeSet<Nameless>) -> Vec<u32> {
    let holds = |&pid: &u32| nameless(pid).iter().any(|(file, _)| files.contains(file)) || maps(pid, files);
    processes().filter(holds).collect()
}

fn children(parent: u32) -> Vec<u32> {
    let is_child = |pid: &u32| {
        let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
        // After the name, which may hold anything: the state, the parent.
        let parent_of_it = stat.rsplit_once(')').and_then(|(_, fields)| fields.split_whitespace().nth(1));
        parent_of_it == Some(parent.to_string().as_str())
    };
    processes().filter(is_child).collect()
}

fn load(driver: &mut Driver, oracle: &mut Oracle, seed: u64) {
    let (span_bytes, end) = (VMM, End::Count(1000));
    let mixed = Mixed { start_bytes: 0, span_bytes, largest_bytes: 256 << 10, depth: 32, end, seed };
    driver.run_mixed(&mixed, oracle).unwrap();
}

#[test]
fn without_its_supervisor_a_worker_serves_on_until_its_last_client_leaves() {
    let Some(world) = World::new(&["qemu-io"]) else { return };
    let image = world.image(16 * MIB);
    let seed = seed();
    for last in ["the VMM", "the NBD client"] {
        // The second time it takes over the sockets that the first left behind.
        let disk = world.serve(&image, &["--size", "64M", "--ram", "8M", "--overflow", "128M"]);
        let mut oracle = Oracle::with_base(64 * MIB, seed, &image).unwrap();
        let mut driver = Driver::connect_with(&disk.vhost(), SHAPE).unwrap();
        let mut nbd = NbdClient::connect(&disk, 48..64, Lost::Fail);
        let (supervisor, worker) = (disk.supervisor(), disk.worker().unwrap());
        assert_eq!(children(supervisor), [worker]);

        // What the VMM lent them is its own, and so is what a test beside this one let its children inherit.
        let dir = world.dir().to_str().unwrap();
        let is_its_own = |name: &str| name.starts_with("/memfd:spillway-") || name.starts_with(dir);
        let of_the_disk = nameless(supervisor).into_iter().filter(|(_, name)| is_its_own(name));
        let (files, names): (BTreeSet<Nameless>, Vec<String>) = of_the_disk.unzip();
        for name in ["/memfd:spillway-meta", "/memfd:spillway-data", dir] {
            assert!(names.iter().any(|n| n.starts_with(name)), "{name}: {names:?}");
        }
        let mut both = [supervisor, worker];
        both.sort_unstable();
        let mut held_by = holders(&files);
        held_by.sort_unstable();
        assert_eq!(held_by, both);

        let (rounds, enough) = (AtomicU64::new(0), AtomicBool::new(false));
        std::thread::scope(|scope| {
            let _enough = Enough(&enough);
            scope.spawn(|| {
                while !enough.load(Ordering::Relaxed) {
                    load(&mut driver, &mut oracle, seed + rounds.fetch_add(1, Ordering::Relaxed));
                }
            });
            until("the VMM is at work", &disk, || rounds.load(Ordering::Relaxed) > 1);
            (0..20).for_each(|_| nbd.step());
            kill_process(Pid::from_raw(supervisor as i32).unwrap(), Signal::KILL).unwrap();
            until("the supervisor has gone", &disk, || holders(&files) == [worker]);
            let before = rounds.load(Ordering::Relaxed);
            (0..100).for_each(|_| nbd.step());
            until("the VMM goes on", &disk, || rounds.load(Ordering::Relaxed) > before + 1);
        });

        // Each finds what the other has written.
        let mut content = vec![0; 1 << 20];
        for (at, pattern) in nbd.content() {
            driver.read_at(at, &mut content).unwrap();
            assert!(content.iter().all(|&b| b == pattern), "{at}");
        }
        driver.write_zeroes(VMM, 64 * MIB - VMM, true).unwrap();
        oracle.zeroed(VMM, 64 * MIB - VMM);
        driver.verify(&oracle).unwrap();
        (0..20).for_each(|_| nbd.step());

        // Nobody else is let in.
        for socket in [disk.vhost(), disk.nbd(), disk.control()] {
            let error = UnixStream::connect(&socket).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::ConnectionRefused, "{}", socket.display());
        }
        match last {
            "the VMM" => {
                nbd.leave();
                (0..5).for_each(|i| load(&mut driver, &mut oracle, !seed + i));
                drop(driver);
            }
            _ => {
                drop(driver);
                (0..100).for_each(|_| nbd.step());
                nbd.verify();
                nbd.leave();
            }
        }
        until("nobody holds any of the disk", &disk, || holders(&files).is_empty());
        until("the worker has gone", &disk, || processes().all(|pid| pid != worker));
        let mut left: Vec<_> =
            std::fs::read_dir(world.dir()).unwrap().map(|e| e.unwrap().file_name()).collect();
        left.sort_unstable();
        assert_eq!(left, ["base.raw", "control", "nbd", "spillway.log", "vhost"], "{last} was the last");
    }
}
