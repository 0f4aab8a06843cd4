//! A worker dies, another is given the same memory and files: everything that was acknowledged is there.
//!
//! The worker is this very program, executed again; the client is `qemu-io` over NBD.

#![allow(clippy::unwrap_used, reason = "a test that fails here has failed")]

use rustix::fs::{MemfdFlags, OFlags, SealFlags};
use rustix::process::{Pid, Signal, kill_process};
use spillway_core::{DiskSpec, FullPolicy, Layout, LogShape, Mode};
use spillway_worker::channel::{self, BaseCache, ClientKind, FromWorker, ImageFormat, Start, ToWorker};
use spillway_worker::supervisor::channel_from_supervisor;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::net::UnixListener;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};

const SIZE: u64 = 64 << 20;

/// Not a test of its own: what the worker's process executes.
#[test]
fn worker_process() {
    if std::env::var_os("SPILLWAY_ATTACH_WORKER").is_none() {
        return;
    }
    std::process::exit(spillway_worker::worker::main(channel_from_supervisor().unwrap()));
}

struct Memory {
    spec: DiskSpec,
    fds: Vec<OwnedFd>,
}

impl Memory {
    fn new(spec: DiskSpec, dir: &std::path::Path) -> Memory {
        let memfd = |len: u64| {
            let fd =
                rustix::fs::memfd_create("disk", MemfdFlags::ALLOW_SEALING | MemfdFlags::CLOEXEC).unwrap();
            rustix::fs::ftruncate(&fd, len).unwrap();
            rustix::fs::fcntl_add_seals(&fd, SealFlags::SHRINK).unwrap();
            fd
        };
        let base = dir.join("base.raw");
        let pattern: Vec<u8> = (0..SIZE).map(|i| (i / 4096 % 251) as u8 + 1).collect();
        std::fs::write(&base, pattern).unwrap();
        let mut fds = vec![memfd(Layout::of(&spec).len_bytes())];
        fds.push(std::fs::File::open(&base).unwrap().into());
        if spec.mode.has_ram() {
            fds.push(memfd(spec.ram_limit_bytes));
        }
        if spec.mode.has_file() {
            let flags = OFlags::RDWR | OFlags::CREATE | OFlags::DIRECT | OFlags::CLOEXEC;
            fds.push(rustix::fs::open(dir.join("overflow"), flags, 0o600.into()).unwrap());
        }
        Memory { spec, fds }
    }

    fn start(&self) -> Worker {
        let (ours, theirs) = channel::pair().unwrap();
        let theirs = rustix::io::fcntl_dupfd_cloexec(&theirs, 10).unwrap();
        let from = theirs.as_raw_fd();
        let mut command = Command::new(std::env::current_exe().unwrap());
        command
            .args(["--exact", "worker_process", "--nocapture"])
            .env("SPILLWAY_ATTACH_WORKER", "1")
            .stdout(Stdio::null());
        // SAFETY: one system call on plain numbers between fork and exec.
        unsafe {
            command.pre_exec(move || {
                if libc::dup2(from, 3) < 0 { Err(std::io::Error::last_os_error()) } else { Ok(()) }
            })
        };
        let child = command.spawn().unwrap();
        let spec = &self.spec;
        let start = Start {
            size_bytes: spec.size_bytes,
            base_bytes: spec.base_bytes,
            mode: spec.mode.name().into(),
            full: spec.full.name().into(),
            ram_limit_bytes: spec.ram_limit_bytes,
            overflow_limit_bytes: spec.overflow_limit_bytes,
            format: ImageFormat::Raw,
            base_cache: BaseCache::Host,
            queues: 1,
            serial: "attach".into(),
            overflow_direct: true,
        };
        let fds: Vec<_> = self.fds.iter().map(AsFd::as_fd).collect();
        channel::send(&ours, &ToWorker::Start(start), &fds).unwrap();
        let worker = Worker { child, channel: ours };
        assert!(matches!(worker.next(), FromWorker::Ready));
        worker
    }
}

struct Worker {
    child: Child,
    channel: OwnedFd,
}

impl Worker {
    /// The next message that is not merely something for the log.
    fn next(&self) -> FromWorker {
        loop {
            match channel::receive(&self.channel).unwrap().expect("the worker lives").0 {
                FromWorker::Event { .. } => {}
                FromWorker::Failed { error } => panic!("{error}"),
                message => return message,
            }
        }
    }

    /// Runs `qemu-io` commands against it.
    fn qemu_io(&self, dir: &std::path::Path, commands: &[String]) {
        let path = dir.join("nbd.sock");
        let listener = UnixListener::bind(&path).unwrap();
        let mut client = Command::new("qemu-io");
        client.args(["-f", "raw"]);
        client.args(commands.iter().flat_map(|c| ["-c", c]));
        let mut client = client
            .arg(format!("nbd+unix:///?socket={}", path.display()))
            .stdout(Stdio::piped())
            .spawn()
            .expect("qemu-io (Debian: qemu-utils) is needed");
        let (socket, _) = listener.accept().unwrap();
        let message = ToWorker::Client { id: 1, kind: ClientKind::Nbd };
        channel::send(&self.channel, &message, &[socket.as_fd()]).unwrap();
        drop(socket);
        let mut said = String::new();
        std::io::Read::read_to_string(&mut client.stdout.take().unwrap(), &mut said).unwrap();
        assert!(client.wait().unwrap().success() && !said.contains("failed"), "{said}");
        assert!(matches!(self.next(), FromWorker::ClientGone { id: 1, .. }));
        std::fs::remove_file(path).unwrap();
    }

    fn kill(mut self) {
        kill_process(Pid::from_child(&self.child), Signal::KILL).unwrap();
        self.child.wait().unwrap();
    }
}

/// 160 pieces of 64 KiB, 100 KiB apart from each other: 10 MiB, some blocks in part.
fn commands(verb: &str, round: u64) -> Vec<String> {
    (0..160u64)
        .map(|i| format!("{verb} -P {} {} 65536", (i * 7 + round * 31) % 250 + 1, i * 100 * 1024 + 512))
        .collect()
}

#[test]
fn what_was_acknowledged_survives_its_worker() {
    for mode in Mode::ALL {
        let dir = tempfile::tempdir_in("/var/tmp").unwrap();
        let spec = DiskSpec {
            size_bytes: SIZE,
            base_bytes: SIZE,
            mode,
            full: FullPolicy::Pause,
            // In mode `ram+overflow` most of it is in the overflow, in `ram` all of it in RAM.
            ram_limit_bytes: match mode {
                Mode::RamOverflow => 2 << 20,
                Mode::Ram => 32 << 20,
                Mode::Overflow | Mode::Direct => 0,
            },
            overflow_limit_bytes: if mode.has_log() { 64 << 20 } else { 0 },
            shape: LogShape::default(),
        };
        let memory = Memory::new(spec, dir.path());
        let worker = memory.start();
        worker.qemu_io(dir.path(), &commands("write", 0));
        worker.kill();
        for round in 1..4 {
            let worker = memory.start();
            worker.qemu_io(dir.path(), &commands("read", round - 1));
            // Unwritten blocks are the image's.
            worker.qemu_io(dir.path(), &[format!("read -P {} {} 4096", 10_000 % 251 + 1, 10_000u64 * 4096)]);
            worker.qemu_io(dir.path(), &["discard 0 16M".into(), "read -P 0 0 16M".into()]);
            worker.qemu_io(dir.path(), &commands("write", round));
            worker.kill();
        }
        println!("{mode}: 3 workers after the first, each found what the one before had acknowledged");
    }
}

#[test]
fn memory_of_another_disk_is_refused() {
    let dir = tempfile::tempdir_in("/var/tmp").unwrap();
    let spec = DiskSpec {
        size_bytes: SIZE,
        base_bytes: SIZE,
        mode: Mode::Ram,
        full: FullPolicy::Pause,
        ram_limit_bytes: 1 << 20,
        overflow_limit_bytes: 0,
        shape: LogShape::default(),
    };
    let mut memory = Memory::new(spec, dir.path());
    memory.start().kill();
    memory.spec.size_bytes = SIZE / 2;
    memory.spec.base_bytes = SIZE / 2;
    let refused = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| memory.start()));
    let panic = refused.err().expect("it is not this disk's memory");
    let words = panic.downcast_ref::<String>().unwrap();
    assert!(words.contains("disk size is 67108864, expected 33554432"), "{words}");
}
