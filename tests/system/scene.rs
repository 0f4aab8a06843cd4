//! A disk whose overflow fails as it is told, what the disk should hold, and what it tells of.
//!
//! Owns the fault too. Of the worker's two engines the threads are struck by strace, in their own system calls: on any
//! kernel, and in the calls that are meant alone. An io_uring's operations are no calls: its disk lies on one that fails
//! (`below.rs`). Invariant: a [`Fault`] that has ended strikes no more.

use crate::below::Below;
use crate::deaths::seed;
use crate::world::{DEADLINE, MIB, PATIENCE, World, until};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use spillway_testkit::{Disk, Driver, End, Mixed, Oracle, Server, Shape};
use std::fs::{File, read_dir, read_link};
use std::io::{BufRead, BufReader, Write};
use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, TryRecvError, channel};
use std::time::Duration;

/// Who does the worker's I/O.
pub const ENGINES: [&str; 2] = ["threads", "io_uring"];
/// I/O threads of a worker.
const THREADS: usize = 4;
pub const PIECE: usize = 256 << 10;
pub const BLOCK: usize = 4096;

const SHAPE: Shape = Shape { queues: 2, depth: 32, request_bytes: PIECE, deadline: DEADLINE };

/// A fault, from its beginning until its end.
pub struct Fault {
    strace: Server,
    log: PathBuf,
    /// In whose calls it is; none of the worker's, if it is in the disk below.
    threads: Option<Threads>,
}

/// I/O threads of a worker.
struct Threads {
    worker: Pid,
    tasks: Vec<PathBuf>,
}

impl Fault {
    /// From now on this call of the first `threads` I/O threads ends otherwise; `how` is strace's.
    pub fn in_threads(world: &World, disk: &Disk, threads: usize, call: &str, how: &str) -> Fault {
        let worker = disk.worker().unwrap();
        let is_io =
            |task: &PathBuf| std::fs::read(task.join("comm")).is_ok_and(|name| name.starts_with(b"io-"));
        let mut tasks: Vec<PathBuf> = Vec::new();
        // One that has only begun may not have all of them.
        until("its I/O threads", disk, || {
            let all = read_dir(format!("/proc/{worker}/task")).unwrap().map(|task| task.unwrap().path());
            tasks = all.filter(is_io).collect();
            tasks.len() == THREADS
        });
        tasks.sort();
        tasks.truncate(threads);
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
        let worker = Pid::from_raw(worker as i32).unwrap();
        let fault = Fault { strace, log, threads: Some(Threads { worker, tasks }) };
        until("strace has attached", disk, || fault.lines(" attached") == threads);
        fault
    }

    /// The same in the disk below, whose calls have other names.
    fn in_disk(world: &World, below: &Below, call: &str, how: &str) -> Fault {
        let call = if call == "pwritev2" { "pwrite64" } else { call };
        let log = world.path("strace.log");
        Fault { strace: below.inject(call, how, &log), log, threads: None }
    }

    pub fn lines(&self, with: &str) -> usize {
        let text = std::fs::read(&self.log).unwrap();
        String::from_utf8_lossy(&text).lines().filter(|line| line.contains(with)).count()
    }

    /// How many calls it has struck.
    pub fn struck(&self) -> usize {
        self.lines("(INJECTED)")
    }

    /// Calls are what they were again. Returns how many it has struck.
    pub fn end(mut self) -> usize {
        match self.threads.take() {
            Some(threads) => self.leave(&threads),
            // One that strace leaves while it replaces it is an error too, and not counted.
            None => _ = self.strace.stop().unwrap(),
        }
        self.struck()
    }

    /// The worker stands still meanwhile, outside of any call: strace would leave one that it has begun to replace, and
    /// the thread number that this returns would be taken for bytes that were written.
    fn leave(&mut self, threads: &Threads) {
        let mut lives = kill_process(threads.worker, Signal::STOP).is_ok();
        let mut still = 0;
        while lives && still < 3 {
            std::thread::sleep(Duration::from_millis(5));
            let states: Vec<_> = threads.tasks.iter().map(|task| state(task)).collect();
            // One of a call that strace has yet to see is the same: strace sleeps when it has seen all.
            let strace = state(Path::new(&format!("/proc/{}", self.strace.pid())));
            lives = !states.iter().any(|state| matches!(state, None | Some('Z' | 'X')));
            // It ends by itself after all that it has followed.
            lives &= !matches!(strace, None | Some('Z'));
            let stand = states.iter().all(|state| matches!(state, Some('t' | 'T')));
            still = if stand && strace == Some('S') { still + 1 } else { 0 };
        }
        self.strace.stop().unwrap();
        if lives {
            assert_eq!(self.lines("<detached"), 0, "a call was under way");
            kill_process(threads.worker, Signal::CONT).unwrap();
        }
    }
}

impl Drop for Fault {
    /// A test that fails under a fault says what the fault did.
    fn drop(&mut self) {
        if std::thread::panicking() {
            let strace = state(Path::new(&format!("/proc/{}", self.strace.pid())));
            let log = std::fs::read(&self.log).unwrap_or_default();
            let log = String::from_utf8_lossy(&log);
            let from = log.lines().count().saturating_sub(40);
            let last: Vec<&str> = log.lines().skip(from).collect();
            eprintln!("the fault: strace is {strace:?}, struck {}\n{}", self.struck(), last.join("\n"));
        }
    }
}

/// A thread's state, a letter. `None`: it is gone.
fn state(task: &Path) -> Option<char> {
    // It follows the name, which ends with a parenthesis.
    std::fs::read_to_string(task.join("stat")).ok()?.rsplit(") ").next()?.chars().next()
}

/// What kinds of events a disk tells of, as they come.
pub struct Events {
    come: Receiver<String>,
    counted: Vec<String>,
}

impl Events {
    /// From here on: the disk has said that it is listened to.
    pub fn follow(disk: &Disk) -> Events {
        let mut control = UnixStream::connect(disk.control()).unwrap();
        control.set_read_timeout(Some(PATIENCE)).unwrap();
        control.write_all(b"{\"command\":\"events\"}\n").unwrap();
        let stays = control.try_clone().unwrap();
        let mut lines = BufReader::new(control).lines().map_while(Result::ok);
        let mut line = move || Some(serde_json::from_str::<Value>(&lines.next()?).unwrap());
        assert!(line().expect("an answer in time").get("ok").is_some());
        stays.set_read_timeout(None).unwrap();
        let (sender, come) = channel();
        std::thread::spawn(move || {
            while let Some(line) = line() {
                let kind = line["event"]["kind"].as_str().unwrap().to_string();
                if sender.send(kind).is_err() {
                    break;
                }
            }
        });
        Events { come, counted: Vec::new() }
    }

    /// The next one that is about faults.
    pub fn next(&mut self) -> String {
        loop {
            let kind = self.come.recv_timeout(PATIENCE).unwrap();
            if !["first-overflow", "warning", "critical", "normal", "full", "space-available"]
                .contains(&kind.as_str())
            {
                return kind;
            }
        }
    }

    /// How often it has told of this kind.
    pub fn count(&mut self, kind: &str) -> usize {
        loop {
            match self.come.try_recv() {
                Ok(kind) => self.counted.push(kind),
                Err(TryRecvError::Empty) => break,
                Err(TryRecvError::Disconnected) => panic!("nobody listens any more"),
            }
        }
        self.counted.iter().filter(|counted| *counted == kind).count()
    }
}

/// A disk, what it should hold, and what it tells of.
pub struct Scene<'a> {
    world: &'a World,
    pub disk: Disk,
    pub driver: Driver,
    pub oracle: Oracle,
    pub events: Events,
    pub seed: u64,
    /// What its overflow lies on, if that is to fail. It goes after the disk.
    below: Option<Below>,
}

impl Scene<'_> {
    /// Its I/O is done by threads.
    pub fn new<'a>(world: &'a World, options: &[&str]) -> Scene<'a> {
        Scene::start(world, "threads", None, options)
    }

    /// Its I/O is done by one of the engines. None: its disk cannot be had here, which has been said.
    pub fn by<'a>(engine: &str, world: &'a World, options: &[&str]) -> Option<Scene<'a>> {
        let below = match engine {
            "threads" => None,
            _ => Some(Below::new(world, 384 * MIB, false)?),
        };
        Some(Scene::start(world, engine, below, options))
    }

    fn start<'a>(world: &'a World, engine: &str, mut below: Option<Below>, options: &[&str]) -> Scene<'a> {
        let image = world.image(8 * MIB);
        let place = below.iter().flat_map(|below| ["--overflow-dir", below.dir()]);
        let options: Vec<&str> = options.iter().copied().chain(["--size", "64M"]).chain(place).collect();
        let disk = world.serve_by(engine, &image, &options);
        below.iter_mut().for_each(Below::hide);
        assert_eq!(disk.stats().unwrap()["engine"], engine);
        let driver = Driver::connect_with(&disk.vhost(), SHAPE).unwrap();
        let seed = seed();
        let oracle = Oracle::with_base(64 * MIB, seed, &image).unwrap();
        let events = Events::follow(&disk);
        Scene { world, disk, driver, oracle, events, seed, below }
    }

    /// From now on these calls for the overflow file end otherwise; `how` is strace's.
    pub fn fault(&self, call: &str, how: &str) -> Fault {
        match &self.below {
            Some(below) => Fault::in_disk(self.world, below, call, how),
            None => Fault::in_threads(self.world, &self.disk, THREADS, call, how),
        }
    }

    /// Writes; the error is an errno. What was written then is what is expected, whether it succeeded or not.
    pub fn write(&mut self, at: u64, bytes: usize) -> Result<(), i32> {
        let mut content = vec![0; bytes];
        self.oracle.write(at, &mut content);
        self.driver.write_at(at, &content).map_err(|e| errno(&e))
    }

    pub fn fill(&mut self, from: u64, to: u64) {
        (from..to).step_by(PIECE).for_each(|at| self.write(at, PIECE).unwrap());
    }

    /// Reads, and checks what comes; the error is an errno.
    pub fn read(&mut self, at: u64, bytes: usize) -> Result<(), i32> {
        let mut content = vec![0; bytes];
        self.driver.read_at(at, &mut content).map_err(|e| errno(&e))?;
        self.oracle.check(at, &content).unwrap_or_else(|e| panic!("{e:#}\n{}", self.disk.log()));
        Ok(())
    }

    /// A load of everything on the first bytes of the disk, in which nothing may fail.
    pub fn load(&mut self, span_bytes: u64, requests: u64) {
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
            let to = read_link(fd).unwrap_or_default().display().to_string();
            to.ends_with(" (deleted)") && !to.starts_with("/memfd:")
        };
        let fd = read_dir(fds).unwrap().map(|fd| fd.unwrap().path()).find(is_it);
        File::options().read(true).write(true).open(fd.expect("the supervisor has it open")).unwrap()
    }

    /// Flips a bit of a block wherever the overflow file has it.
    pub fn flip(&mut self, at: u64) {
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

pub fn errno(error: &anyhow::Error) -> i32 {
    let io = error.downcast_ref::<std::io::Error>().unwrap_or_else(|| panic!("{error:#}"));
    io.raw_os_error().unwrap()
}
