//! A worker of its own process: this very program, executed again, on memory and files that the test made.
#![allow(dead_code, reason = "each test program uses its part")]

use rustix::fs::{MemfdFlags, OFlags, SealFlags};
use rustix::process::{Pid, Signal, kill_process};
use spillway_control::DiskSettings;
use spillway_control::storage_model::{Model, Parameters};
use spillway_core::{DiskSpec, FullPolicy, Layout, LogShape, Mode};
use spillway_layout::persistent_file::DATA_AT;
use spillway_layout::{BaseCache, ImageFormat};
use spillway_worker::channel::{self, FromWorker, Start, ToWorker};
use spillway_worker::supervisor::channel_from_supervisor;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

pub const SIZE: u64 = 64 << 20;
/// Queues that a VMM may use.
pub const QUEUES: u16 = 2;

/// A disk as large as its base image, with these limits.
pub fn spec(mode: Mode, ram_limit_bytes: u64, overflow_limit_bytes: u64) -> DiskSpec {
    DiskSpec {
        size_bytes: SIZE,
        base_bytes: if mode == Mode::Ephemeral { 0 } else { SIZE },
        mode,
        full: FullPolicy::Pause,
        ram_limit_bytes,
        overflow_limit_bytes,
        shape: LogShape::default(),
    }
}

/// Not a test of its own: what the worker's process executes.
#[test]
fn worker_process() {
    if std::env::var_os("SPILLWAY_ATTACH_WORKER").is_none() {
        return;
    }
    std::process::exit(spillway_worker::worker::main(channel_from_supervisor().unwrap()));
}

pub struct Memory {
    pub spec: DiskSpec,
    /// The number of the disk that its workers are told to serve.
    pub disk_id: u64,
    /// The engine of its workers; empty for the one that the host has.
    pub engine: &'static str,
    /// The storage model of its base image, which is then read past the page cache.
    pub base_model: Option<OwnedFd>,
    fds: Vec<OwnedFd>,
}

impl Memory {
    pub fn new(spec: DiskSpec, dir: &std::path::Path) -> Memory {
        let memfd = |len: u64| {
            let fd =
                rustix::fs::memfd_create("disk", MemfdFlags::ALLOW_SEALING | MemfdFlags::CLOEXEC).unwrap();
            rustix::fs::ftruncate(&fd, len).unwrap();
            rustix::fs::fcntl_add_seals(&fd, SealFlags::SHRINK).unwrap();
            fd
        };
        let base = dir.join("base.raw");
        let pattern: Vec<u8> = (0..SIZE).map(|i| (i / 4096 % 251) as u8 + 1).collect();
        std::fs::write(&base, &pattern).unwrap();
        let mut fds = vec![memfd(Layout::of(&spec).len_bytes())];
        fds.push(std::fs::File::open(&base).unwrap().into());
        if spec.mode.has_ram() {
            fds.push(memfd(spec.ram_limit_bytes));
        }
        if spec.mode.has_file() {
            let flags = OFlags::RDWR | OFlags::CREATE | OFlags::DIRECT | OFlags::CLOEXEC;
            let path = dir.join("overflow");
            if spec.mode == Mode::Ephemeral {
                std::fs::write(&path, &pattern).unwrap();
            }
            let file = rustix::fs::open(path, flags, 0o600.into()).unwrap();
            let data_at = if spec.mode == Mode::Persistent { DATA_AT } else { 0 };
            rustix::fs::ftruncate(&file, data_at + spec.file_bytes()).unwrap();
            fds.push(file);
        }
        Memory { spec, disk_id: 1, engine: "", base_model: None, fds }
    }

    /// A store of the base image that takes this long for each read.
    pub fn slow_base(mut self, dir: &std::path::Path, latency: Duration) -> Memory {
        let model = dir.join("model");
        let latency_ns = latency.as_nanos() as u64;
        std::fs::write(&model, Model::file(Parameters { latency_ns, ..Parameters::default() })).unwrap();
        self.base_model = Some(std::fs::File::options().read(true).write(true).open(model).unwrap().into());
        let flags = OFlags::RDONLY | OFlags::DIRECT | OFlags::CLOEXEC;
        self.fds[1] = rustix::fs::open(dir.join("base.raw"), flags, 0.into()).unwrap();
        self
    }

    pub fn start(&self) -> Worker {
        self.start_after(&[])
    }

    /// A worker after others that have died and perhaps not ended, by their pidfds.
    pub fn start_after(&self, predecessors: &[BorrowedFd<'_>]) -> Worker {
        let (ours, theirs) = channel::pair().unwrap();
        let theirs = rustix::io::fcntl_dupfd_cloexec(&theirs, 10).unwrap();
        let from = theirs.as_raw_fd();
        let mut command = Command::new(std::env::current_exe().unwrap());
        command
            .args(["--exact", "common::worker_process", "--nocapture"])
            .env("SPILLWAY_ATTACH_WORKER", "1")
            .env("SPILLWAY_ENGINE", self.engine)
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
            disk_id: self.disk_id,
            predecessors: predecessors.len() as u8,
            size_bytes: spec.size_bytes,
            base_bytes: spec.base_bytes,
            settings: DiskSettings {
                mode: Some(spec.mode),
                full: Some(spec.full),
                ram_bytes: Some(spec.ram_limit_bytes),
                overflow_bytes: Some(spec.overflow_limit_bytes),
                base_cache: self.base_model.is_some().then_some(BaseCache::None),
                ..DiskSettings::default()
            },
            format: ImageFormat::Raw,
            digests: false,
            chunk_bytes: None,
            base_model: self.base_model.is_some(),
            overflow_model: false,
            nbd: true,
            export: "run-1".into(),
            queues: QUEUES,
            serial: "attach".into(),
            writeback: true,
        };
        let lifeline = rustix::fs::memfd_create("lifeline", MemfdFlags::CLOEXEC).unwrap();
        rustix::fs::ftruncate(&lifeline, 4096).unwrap();
        let fds: Vec<_> =
            self.fds.iter().chain(&self.base_model).chain([&lifeline]).map(AsFd::as_fd).collect();
        let fds = [&fds, predecessors].concat();
        channel::send(&ours, &ToWorker::Start(start), &fds).unwrap();
        let worker = Worker { child, channel: ours };
        assert!(matches!(worker.next(), FromWorker::Ready { .. }));
        worker
    }
}

pub struct Worker {
    pub child: Child,
    pub channel: OwnedFd,
}

impl Worker {
    /// The next message that is not merely something for the log.
    pub fn next(&self) -> FromWorker {
        loop {
            match channel::receive(&self.channel).unwrap().expect("the worker lives").0 {
                FromWorker::Event { .. } | FromWorker::Hello { .. } => {}
                FromWorker::Failed { error } => panic!("{error}"),
                message => return message,
            }
        }
    }

    pub fn kill(mut self) {
        kill_process(Pid::from_child(&self.child), Signal::KILL).unwrap();
        self.child.wait().unwrap();
    }
}
