//! A disk below the overflow that fails, falls short, lies or forgets: the RAM tier keeps what cannot be written, a
//! read that cannot be had is one request's error, and no byte is ever wrong.
//!
//! Faults are made by strace in the system calls of the worker's I/O threads (`SPILLWAY_ENGINE=threads`: an io_uring's
//! operations are no calls), on any kernel and for the calls that are meant alone. dm-flakey, which many kernels lack,
//! fails by place and second, the file system's own writes too. Bits are flipped in the file behind the worker's back.

use crate::deaths::seed;
use crate::world::{MIB, PATIENCE, World, until};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use spillway_lab::disk::figure;
use spillway_lab::{Ask, Disk, Driver, End, Mixed, Oracle, Server, Shape};
use std::fs::{File, read_dir, read_link};
use std::io::{BufRead, BufReader, Write};
use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::Duration;

const SHAPE: Shape = Shape { queues: 2, depth: 32, request_bytes: PIECE, deadline: PATIENCE };
const PIECE: usize = 256 << 10;
const BLOCK: usize = 4096;
const EIO: i32 = 5;

/// A fault in the calls of I/O threads, from its beginning until its end.
pub struct Fault {
    strace: Server,
    log: PathBuf,
    worker: Pid,
    tasks: Vec<PathBuf>,
}

impl Fault {
    /// From now on this call of the first `threads` I/O threads ends otherwise; `how` is strace's.
    fn begin(world: &World, disk: &Disk, threads: usize, call: &str, how: &str) -> Fault {
        let worker = disk.worker().unwrap();
        let is_io = |task: &PathBuf| std::fs::read(task.join("comm")).unwrap().starts_with(b"io-");
        let mut tasks: Vec<PathBuf> = read_dir(format!("/proc/{worker}/task"))
            .unwrap()
            .map(|task| task.unwrap().path())
            .filter(is_io)
            .collect();
        tasks.sort();
        tasks.truncate(threads);
        assert_eq!(tasks.len(), threads);
        let mut arguments: Vec<String> = tasks
            .iter()
            .flat_map(|task| ["-p".to_string(), task.file_name().unwrap().to_str().unwrap().to_string()])
            .collect();
        // A call that does nothing stands in for it: for none at all the sandbox would end the worker.
        for option in [format!("trace={call}"), format!("inject={call}:{how}:syscall=gettid")] {
            arguments.extend(["-e".to_string(), option]);
        }
        let log = world.path("strace.log");
        let strace = Server::start("strace", "strace", &arguments, None, &log).unwrap();
        let fault = Fault { strace, log, worker: Pid::from_raw(worker as i32).unwrap(), tasks };
        until("strace has attached", disk, || fault.lines(" attached") == threads);
        fault
    }

    pub fn lines(&self, with: &str) -> usize {
        let text = std::fs::read(&self.log).unwrap();
        String::from_utf8_lossy(&text).lines().filter(|line| line.contains(with)).count()
    }

    /// How many calls it has struck.
    fn struck(&self) -> usize {
        self.lines("(INJECTED)")
    }

    /// Calls are what they were again. Returns how many it has struck.
    ///
    /// The worker stands still meanwhile, outside of any call: strace would leave one that it has begun to replace, and
    /// the thread number that this returns would be taken for bytes that were written.
    pub fn end(mut self) -> usize {
        let mut lives = kill_process(self.worker, Signal::STOP).is_ok();
        let mut still = 0;
        while lives && still < 3 {
            std::thread::sleep(Duration::from_millis(5));
            let states: Vec<_> = self.tasks.iter().map(|task| state(task)).collect();
            lives = !states.iter().any(|state| matches!(state, None | Some('Z' | 'X')));
            still = if states.iter().all(|state| matches!(state, Some('t' | 'T'))) { still + 1 } else { 0 };
        }
        self.strace.stop().unwrap();
        if lives {
            assert_eq!(self.lines("<detached"), 0, "a call was under way");
            kill_process(self.worker, Signal::CONT).unwrap();
        }
        self.struck()
    }
}

/// A thread's state, a letter. `None`: it is gone.
fn state(task: &Path) -> Option<char> {
    // It follows the name, which ends with a parenthesis.
    std::fs::read_to_string(task.join("stat")).ok()?.rsplit(") ").next()?.chars().next()
}

/// What a disk tells of, as it comes.
struct Events(BufReader<UnixStream>);

impl Events {
    fn follow(disk: &Disk) -> Events {
        let mut control = UnixStream::connect(disk.control()).unwrap();
        control.set_read_timeout(Some(PATIENCE)).unwrap();
        control.write_all(b"{\"command\":\"events\"}\n").unwrap();
        let mut events = Events(BufReader::new(control));
        assert!(events.line().get("ok").is_some());
        events
    }

    fn line(&mut self) -> Value {
        let mut line = String::new();
        self.0.read_line(&mut line).unwrap();
        serde_json::from_str(&line).unwrap()
    }

    /// The next one that is about faults.
    fn next(&mut self) -> String {
        loop {
            let kind = self.line()["event"]["kind"].as_str().unwrap().to_string();
            if !["first-overflow", "warning", "critical", "normal", "full", "room"].contains(&kind.as_str()) {
                return kind;
            }
        }
    }
}

/// A disk, what it should hold, and what it tells of.
pub struct Scene<'a> {
    world: &'a World,
    pub disk: Disk,
    pub driver: Driver,
    pub oracle: Oracle,
    events: Events,
    pub seed: u64,
}

impl Scene<'_> {
    pub fn new<'a>(world: &'a World, options: &[&str]) -> Scene<'a> {
        let image = world.image(8 * MIB);
        let disk = world.serve_by("threads", &image, &[options, &["--size", "64M"]].concat());
        let driver = Driver::connect_with(&disk.vhost(), SHAPE).unwrap();
        let seed = seed();
        let oracle = Oracle::with_base(64 * MIB, seed, &image).unwrap();
        let events = Events::follow(&disk);
        Scene { world, disk, driver, oracle, events, seed }
    }

    pub fn fault(&self, call: &str, how: &str) -> Fault {
        Fault::begin(self.world, &self.disk, 4, call, how)
    }

    /// Writes; the error is an errno. What was written then is what is expected, whether it succeeded or not.
    fn write(&mut self, at: u64, bytes: usize) -> Result<(), i32> {
        let mut content = vec![0; bytes];
        self.oracle.write(at, &mut content);
        self.driver.write_at(at, &content).map_err(|e| errno(&e))
    }

    fn fill(&mut self, from: u64, to: u64) {
        (from..to).step_by(PIECE).for_each(|at| self.write(at, PIECE).unwrap());
    }

    /// Reads, and checks what comes; the error is an errno.
    fn read(&mut self, at: u64, bytes: usize) -> Result<(), i32> {
        let mut content = vec![0; bytes];
        self.driver.read_at(at, &mut content).map_err(|e| errno(&e))?;
        self.oracle.check(at, &content).unwrap_or_else(|e| panic!("{e:#}\n{}", self.disk.log()));
        Ok(())
    }

    /// A load of everything on the first bytes of the disk, in which nothing may fail.
    fn load(&mut self, span_bytes: u64, requests: u64) {
        self.seed += 1;
        let (largest_bytes, end) = (128 << 10, End::Count(requests));
        let mixed = Mixed { start_bytes: 0, span_bytes, largest_bytes, depth: 32, end, seed: self.seed };
        let outcome = self.driver.run_mixed(&mixed, &mut self.oracle);
        outcome.unwrap_or_else(|e| panic!("{e:#}\n{}", self.disk.log()));
    }

    pub fn verify(&mut self) {
        self.driver.verify(&self.oracle).unwrap_or_else(|e| panic!("{e:#}\n{}", self.disk.log()));
    }

    pub fn figure(&self, key: &str) -> u64 {
        self.disk.figure(key).unwrap()
    }

    /// The overflow file, by a way around the worker.
    pub fn overflow_file(&self) -> File {
        let fds = format!("/proc/{}/fd", self.disk.supervisor());
        let is_it = |fd: &PathBuf| {
            read_link(fd).is_ok_and(|to| {
                to.starts_with(self.world.dir()) && to.to_string_lossy().ends_with(" (deleted)")
            })
        };
        let fd = read_dir(fds).unwrap().map(|fd| fd.unwrap().path()).find(is_it);
        File::options().read(true).write(true).open(fd.expect("the supervisor has it open")).unwrap()
    }

    /// Flips a bit of a block wherever the overflow file has it.
    fn flip(&mut self, at: u64) {
        let mut block = vec![0; BLOCK];
        self.driver.read_at(at, &mut block).unwrap();
        self.oracle.check(at, &block).unwrap();
        let file = self.overflow_file();
        let mut content = vec![0; 1 << 20];
        let mut flipped = 0;
        for offset in (0..file.metadata().unwrap().len()).step_by(content.len()) {
            let n = file.read_at(&mut content, offset).unwrap();
            for (i, there) in content[..n].chunks_exact(BLOCK).enumerate().filter(|(_, b)| **b == block) {
                let byte = at as usize / BLOCK * 7 % BLOCK;
                let place = offset + (i * BLOCK + byte) as u64;
                file.write_all_at(&[there[byte] ^ 1 << (byte % 8)], place).unwrap();
                flipped += 1;
            }
        }
        assert!(flipped > 0, "the block at {at} is not in the file");
        file.sync_all().unwrap();
    }

    pub fn end(self) {
        drop(self.driver);
        self.disk.stop().unwrap();
    }
}

fn errno(error: &anyhow::Error) -> i32 {
    let io = error.downcast_ref::<std::io::Error>().unwrap_or_else(|| panic!("{error:#}"));
    io.raw_os_error().unwrap()
}

const ALWAYS: [&str; 3] = ["error=EIO", "error=ENOSPC", "retval=1000"];

#[test]
fn what_cannot_be_written_stays_in_ram_and_goes_when_it_can() {
    let Some(world) = World::new(&["strace"]) else { return };
    let mut s = Scene::new(&world, &["--ram", "16M", "--overflow", "256M"]);
    for how in ALWAYS {
        let before = s.disk.stats().unwrap();
        let fault = s.fault("pwritev2", how);
        // More than what eviction begins at, and less than the limit.
        s.fill(0, 15 * MIB);
        assert_eq!([s.events.next(), s.events.next()], ["overflow-write-failed", "degraded"], "{how}");
        assert_eq!(s.figure("degraded"), 1);
        s.load(15 * MIB, 3000);
        s.fill(0, 15 * MIB);
        s.verify();

        // What needs room beyond it waits, and nothing else does.
        let mut content = vec![0; PIECE];
        let writes: Vec<usize> = (0..8)
            .map(|i| {
                let offset = 32 * MIB + i * PIECE as u64;
                s.oracle.write(offset, &mut content);
                s.driver.start(Ask::Write { offset, len: PIECE }, |to| to.copy_from_slice(&content)).unwrap()
            })
            .collect();
        until("writes wait", &s.disk, || s.figure("waiting") > 0);
        assert!(writes.iter().any(|&w| !s.driver.is_finished(w)));
        (0..15 * MIB).step_by(PIECE).for_each(|at| s.read(at, PIECE).unwrap());
        let stats = s.disk.stats().unwrap();
        for key in ["evictions.blocks", "failed.requests"] {
            assert_eq!(figure(&stats, key).unwrap(), figure(&before, key).unwrap(), "{how}: {key}");
        }
        assert!(fault.struck() >= 3, "{how}");
        assert!(figure(&stats, "overflow.write_errors").unwrap() >= 3, "{how}");

        fault.end();
        for write in writes {
            assert_eq!(s.driver.finish(write, |_| {}).unwrap(), 0, "{how}: it goes on by itself");
        }
        assert_eq!(s.events.next(), "recovered", "{how}");
        s.load(64 * MIB, 1000);
        s.verify();
        assert_eq!(s.figure("degraded"), 0, "{how}");
        assert!(s.figure("evictions.blocks") > figure(&stats, "evictions.blocks").unwrap(), "{how}");
        s.driver.discard(0, 64 * MIB).unwrap();
        s.oracle.discarded(0, 64 * MIB);
    }
    assert_eq!(s.figure("checksum_mismatches"), 0);
    s.end();
}

#[test]
fn writes_that_fail_now_and_then_are_done_elsewhere() {
    let Some(world) = World::new(&["strace"]) else { return };
    // A request that has no RAM tier before it may meet two failures, and no third.
    for (mode, threads, when) in [("ram+overflow", 4, "when=1..60+2"), ("overflow", 1, "when=1..2")] {
        let ram: &[&str] = if mode == "overflow" { &[] } else { &["--ram", "16M"] };
        let mut s = Scene::new(&world, &[&["--mode", mode, "--overflow", "256M"], ram].concat());
        s.fill(0, 64 * MIB);
        let mut struck = 0;
        for how in ["error=EIO", "retval=1000", "retval=0", "error=EIO"] {
            let fault = Fault::begin(&world, &s.disk, threads, "pwritev2", &format!("{how}:{when}"));
            s.load(64 * MIB, 1500);
            struck += fault.end();
        }
        s.verify();
        let stats = s.disk.stats().unwrap();
        println!("{mode}: {struck} writes failed");
        assert_eq!(figure(&stats, "overflow.write_errors").unwrap(), struck as u64, "{mode}");
        assert!(struck >= if mode == "overflow" { 6 } else { 100 }, "{mode}: {struck}");
        for key in ["failed.requests", "degraded", "checksum_mismatches"] {
            assert_eq!(figure(&stats, key).unwrap(), 0, "{mode}: {key}");
        }
        assert_eq!(s.events.next(), "overflow-write-failed", "{mode}");
        s.end();
    }
}

#[test]
fn without_a_ram_tier_a_write_is_an_error_after_three_tries() {
    let Some(world) = World::new(&["strace"]) else { return };
    let mut s = Scene::new(&world, &["--mode", "overflow", "--overflow", "256M"]);
    s.fill(0, 16 * MIB);
    let fault = s.fault("pwritev2", "error=EIO");
    assert_eq!(s.write(MIB, PIECE / 4), Err(EIO));
    assert_eq!(fault.struck(), 3);
    let mut failed = 1;
    while s.figure("degraded") == 0 {
        assert_eq!(s.write(MIB, PIECE / 4), Err(EIO));
        failed += 1;
    }
    assert_eq!([s.events.next(), s.events.next()], ["overflow-write-failed", "degraded"]);
    for at in [0, 2 * MIB, 15 * MIB] {
        s.read(at, PIECE).unwrap();
    }
    assert_eq!(s.figure("failed.requests"), failed);
    fault.end();
    s.write(MIB, PIECE / 4).unwrap();
    assert_eq!(s.events.next(), "recovered");
    assert_eq!(s.figure("degraded"), 0);

    // A file system that is full is waited for.
    let fault = s.fault("pwritev2", "error=ENOSPC");
    let mut content = vec![0; PIECE / 4];
    s.oracle.write(MIB, &mut content);
    let write = Ask::Write { offset: MIB, len: content.len() };
    let write = s.driver.start(write, |to| to[..content.len()].copy_from_slice(&content)).unwrap();
    until("it is degraded", &s.disk, || s.figure("degraded") == 1);
    assert!(!s.driver.is_finished(write));
    let log = s.disk.log();
    assert!(
        log.contains("(os error 28); writes wait;") && log.contains("(os error 5); writes fail;"),
        "{log}"
    );
    fault.end();
    assert_eq!(s.driver.finish(write, |_| {}).unwrap(), 0);
    s.verify();
    assert_eq!((s.figure("degraded"), s.figure("failed.requests")), (0, failed));
    s.end();
}

#[test]
fn a_flipped_bit_is_an_error_for_who_reads_its_block_and_nobody_else() {
    let Some(world) = World::new(&[]) else { return };
    for (mode, ram) in [("ram+overflow", ["--ram", "8M"].as_slice()), ("overflow", &[])] {
        let mut s = Scene::new(&world, &[&["--mode", mode, "--overflow", "128M"], ram].concat());
        s.fill(0, 32 * MIB);
        let (bad, block) = (MIB + 5 * BLOCK as u64, BLOCK as u64);
        s.flip(bad);
        let around: Vec<(u64, usize)> = (0..11)
            .map(|i| {
                let offset = MIB + i * block;
                (offset, s.driver.start(Ask::Read { offset, len: BLOCK }, |_| {}).unwrap())
            })
            .collect();
        for (at, read) in around {
            let oracle = &s.oracle;
            let ret = s.driver.finish(read, |content| oracle.check(at, &content[..BLOCK]).unwrap()).unwrap();
            assert_eq!(ret, if at == bad { -EIO } else { 0 }, "{mode}: {at}");
        }
        assert_eq!(s.events.next(), "checksum-mismatch", "{mode}");
        assert_eq!((s.figure("checksum_mismatches"), s.figure("failed.requests")), (1, 1), "{mode}");
        assert_eq!(s.read(MIB, PIECE), Err(EIO), "{mode}: it is part of that");
        // What is left of it after a write of a part is not known.
        let mut content = vec![0; 512];
        Oracle::new(64 * MIB, 1).write(bad, &mut content);
        assert_eq!(s.driver.write_at(bad + 512, &content).map_err(|e| errno(&e)), Err(EIO), "{mode}");
        assert_eq!(s.read(bad, 512), Err(EIO), "{mode}: still");
        let failed = s.figure("failed.requests");
        assert_eq!(failed, 4, "{mode}");
        assert_eq!(s.figure("checksum_mismatches"), failed, "{mode}");

        s.write(bad, BLOCK).unwrap();
        s.read(bad, BLOCK).unwrap();
        // So does a discard.
        s.flip(2 * MIB);
        assert_eq!(s.read(2 * MIB, BLOCK), Err(EIO), "{mode}");
        s.driver.discard(2 * MIB, block).unwrap();
        s.oracle.discarded(2 * MIB, block);
        s.verify();
        assert_eq!(s.figure("failed.requests"), failed + 1, "{mode}");
        assert_eq!(s.figure("degraded"), 0, "{mode}: it can be written");
        s.load(64 * MIB, 2000);
        s.verify();
        s.end();
    }
}

#[test]
fn a_read_that_fails_or_falls_short_is_an_error_once() {
    let Some(world) = World::new(&["strace"]) else { return };
    let mut s = Scene::new(&world, &["--ram", "8M", "--overflow", "128M"]);
    s.fill(0, 32 * MIB);
    let mut failed = 0;
    // The last one says that it has read a block, and has not.
    for (how, event) in [
        ("error=EIO", "overflow-read-failed"),
        ("retval=1000", "overflow-read-failed"),
        ("retval=0", "overflow-read-failed"),
        ("retval=4096", "checksum-mismatch"),
    ] {
        let fault = s.fault("pread64", how);
        let at = MIB + failed * PIECE as u64;
        assert_eq!(s.read(at, PIECE / 8), Err(EIO), "{how}");
        assert_eq!(s.events.next(), event, "{how}");
        failed += 1;
        assert_eq!(s.figure("failed.requests"), failed, "{how}");
        s.read(31 * MIB, PIECE).unwrap();
        s.write(31 * MIB, PIECE).unwrap();
        assert!(fault.end() > 0);
        s.read(at, PIECE / 8).unwrap();
    }
    assert_eq!(s.figure("overflow.read_errors"), 3);
    assert!(s.figure("checksum_mismatches") >= 1);
    s.verify();
    assert_eq!(s.figure("failed.requests"), failed);
    s.end();
}

#[test]
fn what_the_disk_said_it_wrote_and_did_not_is_an_error_and_never_something_else() {
    let Some(world) = World::new(&["strace"]) else { return };
    let mut s = Scene::new(&world, &["--ram", "8M", "--overflow", "128M"]);
    s.fill(0, 32 * MIB);
    // The log's places were written before: what lies there is a block's, with a checksum of its own.
    s.fill(0, 32 * MIB);
    let fault = s.fault("pwritev2", "retval=1048576");
    s.fill(0, 24 * MIB);
    assert!(fault.end() > 40);
    let mut lost = 0;
    for at in (0..64 * MIB).step_by(PIECE) {
        match s.read(at, PIECE) {
            Ok(()) => {}
            Err(EIO) => lost += 1,
            Err(errno) => panic!("{at}: errno {errno}"),
        }
    }
    assert!(lost > 40, "{lost} pieces lost");
    assert!(s.figure("checksum_mismatches") >= lost);
    assert_eq!(s.figure("failed.requests"), lost);
    assert_eq!(s.events.next(), "checksum-mismatch");
    s.fill(0, 32 * MIB);
    s.verify();
    s.load(64 * MIB, 2000);
    s.verify();
    assert_eq!(s.figure("failed.requests"), lost);
    s.end();
}
