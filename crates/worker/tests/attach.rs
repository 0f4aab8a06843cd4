//! A worker dies, another is given the same memory and files: everything that was acknowledged is there.
//!
//! The worker is this very program, executed again; the client is `qemu-io` over NBD.

#![allow(clippy::unwrap_used, reason = "a test that fails here has failed")]

mod common;

use common::{Memory, SIZE, Worker, spec};
use rustix::process::{Pid, PidfdFlags, pidfd_open};
use spillway_core::Mode;
use spillway_worker::channel::{self, ClientKind, FromWorker, ToWorker};
use std::os::fd::AsFd;
use std::os::unix::net::UnixListener;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// Runs `qemu-io` commands against a worker.
fn qemu_io(worker: &Worker, dir: &std::path::Path, commands: &[String]) {
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
    channel::send(&worker.channel, &message, &[socket.as_fd()]).unwrap();
    drop(socket);
    let mut stdout = String::new();
    std::io::Read::read_to_string(&mut client.stdout.take().unwrap(), &mut stdout).unwrap();
    assert!(client.wait().unwrap().success() && !stdout.contains("failed"), "{stdout}");
    assert!(matches!(worker.next(), FromWorker::ClientGone { id: 1, .. }));
    std::fs::remove_file(path).unwrap();
}

/// 160 pieces of 64 KiB, 100 KiB apart from each other: 10 MiB, some blocks in part.
fn commands(verb: &str, round: u64) -> Vec<String> {
    (0..160u64)
        .map(|i| format!("{verb} -P {} {} 65536", (i * 7 + round * 31) % 250 + 1, i * 100 * 1024 + 512))
        .collect()
}

#[test]
fn what_was_acknowledged_survives_its_worker() {
    for (mode, engine) in Mode::ALL.into_iter().flat_map(|m| [(m, "io_uring"), (m, "threads")]) {
        let dir = tempfile::tempdir_in("/var/tmp").unwrap();
        // In mode `ram+overflow` most of it is in the overflow, in `ram` all of it in RAM.
        let ram_limit_bytes = match mode {
            Mode::RamOverflow => 2 << 20,
            Mode::Ram => 32 << 20,
            Mode::Overflow | Mode::Direct | Mode::Persistent | Mode::Ephemeral => 0,
        };
        let spec = spec(mode, ram_limit_bytes, if mode.has_log() { 64 << 20 } else { 0 });
        let mut memory = Memory::new(spec, dir.path());
        memory.engine = engine;
        let worker = memory.start();
        qemu_io(&worker, dir.path(), &commands("write", 0));
        worker.kill();
        for round in 1..4 {
            let worker = memory.start();
            qemu_io(&worker, dir.path(), &commands("read", round - 1));
            // Unwritten blocks are the image's.
            qemu_io(
                &worker,
                dir.path(),
                &[format!("read -P {} {} 4096", 10_000 % 251 + 1, 10_000u64 * 4096)],
            );
            qemu_io(&worker, dir.path(), &["discard 0 16M".into(), "read -P 0 0 16M".into()]);
            qemu_io(&worker, dir.path(), &commands("write", round));
            worker.kill();
        }
        println!(
            "{mode}, {engine}: 3 workers after the first, each found what the one before had acknowledged"
        );
    }
}

/// I/O of a dead worker may still be begun until its process has ended: a file that is written in place is not touched
/// before that.
#[test]
fn the_end_of_a_dead_worker_is_waited_for() {
    for engine in ["io_uring", "threads"] {
        let dir = tempfile::tempdir_in("/var/tmp").unwrap();
        let mut memory = Memory::new(spec(Mode::Direct, 0, 0), dir.path());
        memory.engine = engine;
        let worker = memory.start();
        qemu_io(&worker, dir.path(), &["write -P 1 0 4096".into()]);
        worker.kill();
        // Two processes that take long to end.
        let [mut first, mut last] = [0; 2].map(|_| Command::new("sleep").arg("60").spawn().unwrap());
        let pidfds = [&first, &last].map(|p| pidfd_open(Pid::from_child(p), PidfdFlags::empty()).unwrap());
        let worker = memory.start_after(&pidfds.each_ref().map(AsFd::as_fd));
        let begun = Instant::now();
        let ender = std::thread::spawn(move || {
            for process in [&mut first, &mut last] {
                std::thread::sleep(Duration::from_millis(300));
                process.kill().unwrap();
                process.wait().unwrap();
            }
        });
        qemu_io(&worker, dir.path(), &["read -P 1 0 4096".into(), "write -P 2 4096 4096".into()]);
        let ms = begun.elapsed().as_millis();
        assert!((600..5000).contains(&ms), "{engine}: served after {ms} ms");
        ender.join().unwrap();
        worker.kill();
    }
}

#[test]
fn memory_of_another_disk_is_refused() {
    let dir = tempfile::tempdir_in("/var/tmp").unwrap();
    let spec = spec(Mode::Ram, 1 << 20, 0);
    let mut memory = Memory::new(spec, dir.path());
    memory.start().kill();
    memory.disk_id = 2;
    refused(&mut memory, "disk number is 1, expected 2");
    memory.disk_id = 1;
    memory.spec.size_bytes = SIZE / 2;
    memory.spec.base_bytes = SIZE / 2;
    refused(&mut memory, "disk size is 67108864, expected 33554432");
}

fn refused(memory: &mut Memory, why: &str) {
    let refused = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| memory.start()));
    let panic = refused.err().expect("it is not this disk's memory");
    let words = panic.downcast_ref::<String>().unwrap();
    assert!(words.contains(why), "{words}");
}
