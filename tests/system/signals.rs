//! What ends a worker that serves: each signal there is, and a panic in any of its threads. Whatever it was, the disk
//! is served on, by the next worker if this one has ended, and every byte is what it was.

use crate::deaths::{nothing_failed, seed, worker};
use crate::world::{MIB, World, until};
use rustix::process::{Pid, Signal, kill_process};
use spillway_testkit::{Disk, Driver, Oracle, Rng, Server, Shape};
use std::path::PathBuf;
use std::time::Duration;

const SHAPE: Shape =
    Shape { queues: 1, depth: 8, request_bytes: 64 << 10, deadline: Duration::from_secs(30) };
const DISK: u64 = 12 * MIB;
const PIECE: usize = 64 << 10;

/// What is written somewhere, and what is everywhere.
struct Content {
    driver: Driver,
    oracle: Oracle,
    rng: Rng,
}

impl Content {
    /// More than the RAM tier holds.
    fn filled(disk: &Disk, image: &std::path::Path) -> Content {
        let seed = seed();
        let driver = Driver::connect_with(&disk.vhost(), SHAPE).unwrap();
        let oracle = Oracle::with_base(DISK, seed, image).unwrap();
        let mut content = Content { driver, oracle, rng: Rng::new(seed) };
        (0..DISK / PIECE as u64).for_each(|i| content.write(i * PIECE as u64));
        content
    }

    fn write(&mut self, at: u64) {
        let mut piece = vec![0; PIECE];
        self.oracle.write(at, &mut piece);
        self.driver.write_at(at, &piece).unwrap();
    }

    fn goes_on(&mut self, disk: &Disk, after: &str) {
        let at = self.rng.below(DISK / PIECE as u64) * PIECE as u64;
        self.write(at);
        self.driver.verify(&self.oracle).unwrap_or_else(|e| panic!("{after}: {e:#}\n{}", disk.log()));
    }
}

fn send(pid: u32, signal: Signal) {
    kill_process(Pid::from_raw(pid as i32).unwrap(), signal).unwrap();
}

/// Sent to a worker, which is stopped by some, ignores others, and dies of all that are left.
#[test]
fn every_signal_there_is_leaves_a_disk_that_is_served() {
    const STOP: [Signal; 4] = [Signal::STOP, Signal::TSTP, Signal::TTIN, Signal::TTOU];
    // By default, but for PIPE: that is told as an error of the write.
    const IGNORED: [Signal; 5] = [Signal::CHILD, Signal::CONT, Signal::URG, Signal::WINCH, Signal::PIPE];
    let Some(world) = World::new(&[]) else { return };
    let image = world.image(8 * MIB);
    let disk = world.serve(&image, &["--size", "12M", "--ram", "4M", "--overflow", "64M"]);
    let mut content = Content::filled(&disk, &image);
    let named = (1..=31).map(|n| Signal::from_named_raw(n).unwrap());
    // SAFETY: the first and the last real-time signal that the C library leaves to programs; no signal handler is set here.
    let real_time = [34, 64].map(|n| unsafe { Signal::from_raw_unchecked(n) });
    let mut died = 0;
    for signal in named.chain(real_time) {
        let pid = worker(&disk);
        send(pid, signal);
        if STOP.contains(&signal) {
            send(pid, Signal::CONT);
        } else if !IGNORED.contains(&signal) {
            until(&format!("the next after {signal:?}"), &disk, || ![0, pid].contains(&worker(&disk)));
            died += 1;
        }
        content.goes_on(&disk, &format!("{signal:?}"));
        let lives = worker(&disk) == pid;
        assert_eq!(lives, STOP.contains(&signal) || IGNORED.contains(&signal), "{signal:?}");
    }
    let stats = disk.stats().unwrap();
    assert_eq!((died, stats["restarts"].as_u64()), (24, Some(24)));
    nothing_failed(&stats);
    drop(content);
    disk.stop().unwrap();
}

/// From now on, in the worker's threads of that name, a call that gives space back ends with what the kernel never says:
/// a build with its checks on panics.
fn trip(world: &World, disk: &Disk, thread: &str) -> Server {
    let is_it = |task: &PathBuf| std::fs::read_to_string(task.join("comm")).unwrap().starts_with(thread);
    let tasks = std::fs::read_dir(format!("/proc/{}/task", worker(disk))).unwrap();
    let tasks: Vec<PathBuf> = tasks.map(|task| task.unwrap().path()).filter(is_it).collect();
    assert!(!tasks.is_empty(), "{thread}");
    let id = |task: &PathBuf| task.file_name().unwrap().to_str().unwrap().to_string();
    let mut arguments: Vec<String> = tasks.iter().flat_map(|task| ["-p".to_string(), id(task)]).collect();
    // A call that does nothing stands in for it: for none at all the sandbox would end the worker.
    for option in ["trace=fallocate", "inject=fallocate:retval=1000:syscall=gettid"] {
        arguments.extend(["-e".to_string(), option.to_string()]);
    }
    let log = world.path("strace.log");
    let strace = Server::start("strace", "strace", &arguments, None, &log).unwrap();
    until("strace has attached", disk, || {
        std::fs::read_to_string(&log).unwrap().matches(" attached").count() == tasks.len()
    });
    strace
}

#[test]
fn a_panic_in_any_thread_ends_the_worker_and_the_next_goes_on() {
    let Some(world) = World::new(&["strace"]) else { return };
    let image = world.image(8 * MIB);
    for (engine, thread, name) in [
        ("threads", "io-", "io-"),
        ("threads", "spillway-worker", "main"),
        ("io_uring", "spillway-worker", "main"),
    ] {
        let disk = world.serve_by(engine, &image, &["--size", "12M", "--ram", "4M", "--overflow", "64M"]);
        let mut content = Content::filled(&disk, &image);
        let what = format!("a panic in {thread} of {engine}");
        for n in 1..=3 {
            let pid = worker(&disk);
            let mut strace = trip(&world, &disk, thread);
            // Slots of the RAM tier and segments of the file have nothing left in them.
            content.driver.discard(0, DISK).unwrap();
            content.oracle.discarded(0, DISK);
            until(&format!("the next after {what}"), &disk, || ![0, pid].contains(&worker(&disk)));
            strace.stop().unwrap();
            (0..DISK / PIECE as u64).for_each(|i| content.write(i * PIECE as u64));
            content.goes_on(&disk, &what);
            until("it is said of what it died", &disk, || disk.log().matches("SIGABRT").count() == n);
            // Two of its I/O threads may have begun to.
            let panics = disk.log().matches(&format!("thread '{name}")).count();
            assert!((n..=2 * n).contains(&panics), "{what}: {}", disk.log());
        }
        nothing_failed(&disk.stats().unwrap());
        drop(content);
        disk.stop().unwrap();
    }
}
