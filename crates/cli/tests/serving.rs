//! `serve` with its figures, its resets and its end, as clients see them.

#![allow(clippy::unwrap_used, reason = "a test that fails here has failed")]

mod common;

use common::{
    PATIENCE, Server, World, alive, finishes, is_root, is_socket, qemu_io, refuses, spillway, stats, ticks,
    until,
};
use rustix::process::{Pid, Signal};
use serde_json::Value;
use spillway_testkit::{Driver, Shape, skip};
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::os::unix::net::UnixStream;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

fn controlled(world: &World) -> Command {
    let mut command = world.serve();
    command.arg("--control").arg(world.path("control")).args(["--ram", "4M", "--overflow", "64M"]);
    command
}

#[test]
fn ready_says_all_and_the_end_leaves_nothing() {
    for signal in [Signal::TERM, Signal::INT, Signal::HUP] {
        let world = World::new();
        let server = Server::start(controlled(&world).arg("--vhost-user").arg(world.path("vhost")));
        let report = &server.report;
        assert_eq!(report["pid"], server.child.id());
        assert_eq!((&report["mode"], &report["size_bytes"]), (&"ram+overflow".into(), &(16 << 20).into()));
        assert_eq!(report["nbd"], world.path("nbd").to_str().unwrap());
        assert_eq!(world.left(), ["base.raw", "control", "nbd", "vhost"]);
        for socket in ["control", "nbd", "vhost"] {
            assert!(is_socket(&world.path(socket)), "{socket}");
            assert_eq!(
                world.path(socket).metadata().unwrap().permissions().mode() & 0o777,
                0o600,
                "{socket}"
            );
        }
        let worker = server.worker_pid();
        assert!(alive(worker));
        assert_eq!(rustix::process::getpgid(Some(worker)).unwrap(), worker, "in a group of its own");
        let (code, text) = server.end(signal);
        assert_eq!((code, text.as_str()), (0, ""), "{signal:?}");
        assert!(!alive(worker));
        assert_eq!(world.left(), ["base.raw"]);
    }
}

/// Who ignores SIGCHLD has its children's ends forgotten, and a program inherits that.
#[test]
fn workers_that_die_are_followed_by_others_whoever_started_it() {
    let world = World::new();
    let mut command = Command::new("bash");
    let serve = controlled(&world);
    command.args(["-c", "trap '' CHLD; exec \"$@\"", "bash"]).arg(serve.get_program()).args(serve.get_args());
    let server = Server::start(command.stderr(Stdio::null()));
    let mut last = server.worker_pid();
    for _ in 0..4 {
        rustix::process::kill_process(last, Signal::KILL).unwrap();
        let serving = || stats(&world)["worker_pid"].as_i64().and_then(|pid| Pid::from_raw(pid as i32));
        until("another worker", || serving().is_some_and(|pid| pid != last));
        last = serving().unwrap();
    }
    let begun = Instant::now();
    assert_eq!(server.end(Signal::TERM).0, 0);
    assert!(begun.elapsed() < Duration::from_secs(5), "nobody said that the worker had ended");
    assert!(!alive(last));
}

#[test]
fn the_line_for_people_names_every_way_in() {
    let world = World::new();
    let mut child = controlled(&world).stdin(Stdio::null()).stdout(Stdio::piped()).spawn().unwrap();
    let mut line = String::new();
    BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
    rustix::process::kill_process(Pid::from_child(&child), Signal::TERM).unwrap();
    assert!(child.wait().unwrap().success());
    assert!(line.starts_with("spillway: ready: ") && line.contains("16.0 MiB"), "{line}");
    for way in [
        format!("NBD {}", world.path("nbd").display()),
        format!("control {}", world.path("control").display()),
    ] {
        assert!(line.contains(&way), "{line}");
    }
}

#[test]
fn sockets_have_the_rights_that_were_asked() {
    if !is_root() {
        return skip("only root can give a socket to any group");
    }
    let world = World::new();
    let server =
        Server::start(controlled(&world).args(["--socket-mode", "0660", "--socket-group", "daemon"]));
    let metadata = world.path("nbd").metadata().unwrap();
    let daemon = finishes(Command::new("getent").args(["group", "daemon"])).1;
    let gid: u32 = daemon.split(':').nth(2).unwrap().parse().unwrap();
    assert_eq!((metadata.permissions().mode() & 0o777, metadata.gid()), (0o660, gid));
    assert_eq!(server.end(Signal::TERM).0, 0);
}

#[test]
fn a_server_that_was_killed_leaves_sockets_that_the_next_one_takes() {
    let world = World::new();
    let mut first = Server::start(&mut controlled(&world));
    let worker = first.worker_pid();
    rustix::process::kill_process(first.pid(), Signal::KILL).unwrap();
    first.child.wait().unwrap();
    assert!(is_socket(&world.path("nbd")));
    // Nobody is connected, so its worker has nobody to serve.
    until("the worker leaves with its supervisor", || !alive(worker));
    let second = Server::start(&mut controlled(&world));
    assert_eq!(second.end(Signal::TERM).0, 0);
    assert_eq!(world.left(), ["base.raw"]);
}

#[test]
fn a_signal_before_it_is_ready_is_heeded() {
    // Whenever it comes, nothing stays behind.
    for delay in [0, 1, 2, 5, 10, 20] {
        let world = World::new();
        let mut child = controlled(&world).stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
        let begun = Instant::now();
        until("the time to send it", || begun.elapsed() >= Duration::from_millis(delay));
        let _ = rustix::process::kill_process(Pid::from_child(&child), Signal::INT);
        let status = child.wait().unwrap();
        // Before it had looked after signals it is simply gone, and had made nothing.
        use std::os::unix::process::ExitStatusExt;
        assert!(status.success() || status.signal() == Some(2), "{delay} ms: {status}");
        assert_eq!(world.left(), ["base.raw"], "{delay} ms");
    }
}

#[test]
fn nohup_is_respected() {
    let world = World::new();
    let serve = controlled(&world);
    let mut ignoring = Command::new("bash");
    ignoring
        .args(["-c", "trap '' HUP INT; exec \"$0\" \"$@\""])
        .arg(serve.get_program())
        .args(serve.get_args());
    let server = Server::start(&mut ignoring);
    for signal in [Signal::HUP, Signal::INT] {
        rustix::process::kill_process(server.pid(), signal).unwrap();
    }
    assert_eq!(stats(&world)["schema"], 1, "it still serves");
    assert_eq!(server.end(Signal::TERM).0, 0);
}

#[test]
fn figures_follow_the_io_in_every_form() {
    let world = World::new();
    let server = Server::start(&mut controlled(&world));
    qemu_io(&world, &["write -P 7 0 1M", "read -P 7 0 1M", "write -z 1M 64k", "discard 0 512k", "flush"]);
    let s = stats(&world);
    for (pointer, least) in [
        ("/planes/guest/writes", 1),
        ("/planes/guest/written_bytes", 1 << 20),
        ("/planes/ram/written_bytes", 1 << 20),
        ("/planes/guest/read_bytes", 1 << 20),
        ("/planes/guest/reads", 1),
        ("/discards/count", 1),
        ("/discards/bytes", 512 << 10),
        ("/write_zeroes", 1),
        ("/flushes", 1),
        ("/ram/used_bytes", 512 << 10),
        ("/ram/limit_bytes", 4 << 20),
        ("/ram/peak_bytes", 1 << 20),
        ("/overflow/limit_bytes", 64 << 20),
        ("/map/bytes", 4096),
        ("/latency/write/p99_ns", 1),
    ] {
        let got = s.pointer(pointer).and_then(Value::as_u64);
        assert!(got >= Some(least), "{pointer}: {got:?}, at least {least}: {s:#}");
    }
    assert_eq!((&s["schema"], &s["generation"], &s["resets"]), (&1.into(), &1.into(), &0.into()));
    assert_eq!(s["planes"]["overflow"]["written_bytes"], 0);

    let control = world.path("control");
    let (_, table, _) = finishes(spillway().arg("stats").arg(&control));
    assert!(table.contains("guest") && table.contains("RAM tier") && table.contains("of 4.0 MiB"), "{table}");
    let (_, names, _) = finishes(spillway().arg("stats").arg(&control).args(["--names", "mcsio"]));
    assert!(names.contains("Cache memory used") && names.contains("% used"), "{names}");
    let mut names = spillway();
    let (_, names, _) = finishes(names.arg("stats").arg(&control).args(["--names", "mcsio", "--json"]));
    let names: Value = serde_json::from_str(&names).unwrap();
    assert_eq!(names["Cache memory used"], s["ram"]["used_bytes"], "{names}");
    let (_, text, _) = finishes(spillway().arg("stats").arg(&control).arg("--prometheus"));
    assert_eq!(s["serial"], server.report["serial"]);
    let (serial, bytes) = (s["serial"].as_str().unwrap(), &s["planes"]["guest"]["written_bytes"]);
    let written = format!("spillway_written_bytes_total{{disk=\"{serial}\",plane=\"guest\"}} {bytes}");
    assert!(text.contains(&written), "{text}");
    assert_eq!(server.end(Signal::TERM).0, 0);
}

#[test]
fn watching_goes_on_until_nobody_serves() {
    let world = World::new();
    let server = Server::start(&mut controlled(&world));
    let mut watch = spillway();
    watch.arg("stats").arg(world.path("control")).args(["--watch", "--json"]).stdout(Stdio::piped());
    let mut watch = watch.stderr(Stdio::piped()).spawn().unwrap();
    let mut lines = BufReader::new(watch.stdout.take().unwrap()).lines();
    for _ in 0..2 {
        let line: Value = serde_json::from_str(&lines.next().unwrap().unwrap()).unwrap();
        assert_eq!(line["schema"], 1);
    }
    assert_eq!(server.end(Signal::TERM).0, 0);
    let status = watch.wait().unwrap();
    let mut err = String::new();
    watch.stderr.take().unwrap().read_to_string(&mut err).unwrap();
    assert_eq!(status.code(), Some(69), "{err}");
    assert!(err.contains("see whether 'spillway serve' still runs"), "{err}");
}

#[test]
fn a_reset_is_a_new_generation_and_refused_while_somebody_is_connected() {
    let world = World::new();
    let server = Server::start(&mut controlled(&world));
    let control = world.path("control");
    let base = std::fs::read(world.path("base.raw")).unwrap();
    qemu_io(&world, &["write -P 0xee 0 2M"]);

    let mut client = UnixStream::connect(world.path("nbd")).unwrap();
    client.set_read_timeout(Some(PATIENCE)).unwrap();
    let mut greeting = [0; 18];
    client.read_exact(&mut greeting).unwrap();
    refuses(spillway().arg("reset").arg(&control), 75, &["client"]);
    qemu_io(&world, &["read -P 0xee 0 2M"]);

    let (code, out, err) = finishes(spillway().arg("reset").arg(&control).arg("--force"));
    assert_eq!((code, out.as_str()), (0, "generation 2\n"), "{err}");
    assert_eq!(client.read(&mut [0]).unwrap_or(0), 0, "disconnected");
    let s = stats(&world);
    assert_eq!((&s["generation"], &s["ram"]["used_bytes"], &s["clients"]), (&2.into(), &0.into(), &0.into()));

    qemu_io(&world, &["read -P 0 0 512", "read -P 1 512 512"]);
    until("the last client has gone", || stats(&world)["clients"] == 0);
    let (code, out, err) = finishes(spillway().arg("reset").arg(&control));
    assert_eq!((code, out.as_str()), (0, "generation 3\n"), "{err}");
    assert_eq!(server.end(Signal::TERM).0, 0);
    assert!(std::fs::read(world.path("base.raw")).unwrap() == base, "the image is never written");
}

#[test]
fn it_ends_with_requests_that_wait_for_room() {
    let world = World::new();
    let mut command = world.serve();
    command.arg("--control").arg(world.path("control"));
    // RAM only and smaller than what is written: the last writes wait.
    let args: Vec<_> = command.get_args().map(std::ffi::OsStr::to_owned).collect();
    let mut command = spillway();
    let skip = args.iter().position(|a| a == "--overflow-dir").unwrap();
    command.args(args.iter().enumerate().filter(|(i, _)| *i != skip && *i != skip + 1).map(|(_, a)| a));
    let server = Server::start(command.args(["--mode", "ram", "--ram", "1M"]));
    let mut writer = Command::new("qemu-io");
    writer.args(["-f", "raw"]).arg(world.nbd_uri()).args(["-c", "write -P 5 0 4M"]);
    let mut writer = writer.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
    until("a write waits", || stats(&world)["waiting"].as_u64() > Some(0));
    let begun = Instant::now();
    let (code, text) = server.end(Signal::TERM);
    assert_eq!(code, 0, "{text}");
    assert!(begun.elapsed() < Duration::from_secs(5), "{:?}: {text}", begun.elapsed());
    assert_eq!(world.left(), ["base.raw"]);
    assert!(!writer.wait().unwrap().success(), "what waits is not said to be written");
}

/// Its log goes into a pipe that is full and that nobody reads.
#[test]
fn a_log_that_nobody_reads_keeps_no_disk_from_its_next_worker() {
    use rustix::pipe::{PipeFlags, pipe_with};
    let world = World::new();
    let (_unread, log) = pipe_with(PipeFlags::CLOEXEC | PipeFlags::NONBLOCK).unwrap();
    while rustix::io::write(&log, &[b'.'; 4096]).is_ok() {}
    while rustix::io::write(&log, b".").is_ok() {}
    // As a shell would make it.
    rustix::fs::fcntl_setfl(&log, rustix::fs::OFlags::empty()).unwrap();
    /// Not left behind by a failure.
    struct Ended(std::process::Child);
    impl Drop for Ended {
        fn drop(&mut self) {
            let _ = self.0.kill();
            let _ = self.0.wait();
        }
    }
    let mut serve = controlled(&world);
    let mut serve = Ended(serve.stdin(Stdio::null()).stdout(Stdio::null()).stderr(log).spawn().unwrap());
    let control = world.path("control");
    until("it serves", || finishes(spillway().arg("stats").arg(&control)).0 == 0);
    for restarts in 1..4 {
        let pid = stats(&world)["worker_pid"].as_i64().unwrap() as i32;
        rustix::process::kill_process(Pid::from_raw(pid).unwrap(), Signal::KILL).unwrap();
        until("another worker serves", || stats(&world)["restarts"].as_u64() == Some(restarts));
    }
    rustix::process::kill_process(Pid::from_child(&serve.0), Signal::TERM).unwrap();
    assert_eq!(serve.0.wait().unwrap().code(), Some(0));
}

#[test]
fn a_worker_that_is_killed_is_followed_by_another_that_has_the_disk() {
    let world = World::new();
    let server = Server::start(&mut controlled(&world));
    qemu_io(&world, &["write -P 5 0 4M"]);
    let first = server.worker_pid();
    rustix::process::kill_process(first, Signal::KILL).unwrap();
    until("another worker serves", || stats(&world)["restarts"].as_u64() == Some(1));
    assert_ne!(stats(&world)["worker_pid"].as_u64(), Some(first.as_raw_nonzero().get() as u64));
    qemu_io(&world, &["read -P 5 0 4M"]);
    let (code, text) = server.end(Signal::TERM);
    assert_eq!(code, 0, "{text}");
    assert!(text.contains("SIGKILL") && text.contains("another worker serves"), "{text}");
    assert_eq!(world.left(), ["base.raw"]);
}

/// One after the other, each at once after the one before it has left, while others want the processors and workers
/// are killed now and then.
#[test]
fn vmms_that_come_and_go_are_all_served() {
    use std::io::{Read, Write};
    use std::os::unix::net::UnixStream;
    use std::sync::atomic::{AtomicBool, Ordering};
    let world = World::new();
    let server = Server::start(controlled(&world).arg("--vhost-user").arg(world.path("vhost")));
    let over = AtomicBool::new(false);
    struct Over<'a>(&'a AtomicBool);
    impl Drop for Over<'_> {
        fn drop(&mut self) {
            self.0.store(true, Ordering::Relaxed);
        }
    }
    let refused = std::thread::scope(|scope| {
        let _over = Over(&over);
        for _ in 0..2 {
            scope.spawn(|| {
                while !over.load(Ordering::Relaxed) {
                    std::hint::spin_loop()
                }
            });
        }
        // GET_FEATURES: a header without a payload. Its answer is a header and a word.
        let question = [1u32, 1, 0].map(u32::to_ne_bytes).concat();
        (0..20_000).any(|n| {
            let mut vmm = UnixStream::connect(world.path("vhost")).unwrap();
            vmm.set_read_timeout(Some(Duration::from_secs(30))).unwrap();
            if n % 3000 == 2999 {
                let worker = stats(&world)["worker_pid"].as_i64().unwrap() as i32;
                rustix::process::kill_process(Pid::from_raw(worker).unwrap(), Signal::KILL).unwrap();
            }
            let refused = vmm.write_all(&question).is_err() || vmm.read_exact(&mut [0; 20]).is_err();
            // To drop it would not do: what another test starts has it too, until it executes its program.
            let _ = vmm.shutdown(std::net::Shutdown::Both);
            refused
        })
    });
    let restarts = stats(&world)["restarts"].as_u64();
    let (code, text) = server.end(Signal::TERM);
    assert_eq!((code, refused, restarts), (0, false, Some(6)), "{text}");
}

#[test]
fn an_upgrade_goes_on_with_what_was_written() {
    let world = World::new();
    let server = Server::start(&mut controlled(&world));
    qemu_io(&world, &["write -P 5 0 4M"]);
    let first = server.worker_pid();
    let (code, out, err) = finishes(spillway().arg("upgrade").arg(world.path("control")).arg("--json"));
    assert_eq!((code, err.as_str()), (0, ""));
    let done: Value = serde_json::from_str(&out).unwrap();
    assert_eq!(done["version"], env!("CARGO_PKG_VERSION"));
    assert_ne!(done["worker_pid"].as_u64(), Some(first.as_raw_nonzero().get() as u64));
    assert_eq!(stats(&world)["worker_pid"], done["worker_pid"]);
    qemu_io(&world, &["read -P 5 0 4M"]);
    let mut other = spillway();
    other.arg("upgrade").arg(world.path("control")).args(["--binary", "/usr/bin/true"]);
    let (code, _, err) = finishes(&mut other);
    assert_eq!(code, 75, "{err}");
    assert!(err.contains("is served as before"), "{err}");
    qemu_io(&world, &["read -P 5 0 4M"]);
    let (code, text) = server.end(Signal::TERM);
    assert_eq!(code, 0, "{text}");
}

/// Processor time of a process in ticks of 10 ms, and how often it was woken: all its threads.
fn activity(pid: Pid) -> (u64, u64) {
    let dir = format!("/proc/{}", pid.as_raw_nonzero());
    let stat = std::fs::read_to_string(format!("{dir}/stat")).unwrap();
    let woken = |task: std::io::Result<std::fs::DirEntry>| -> u64 {
        let status = std::fs::read_to_string(task.unwrap().path().join("status")).unwrap();
        let line = status.lines().find_map(|l| l.strip_prefix("voluntary_ctxt_switches:")).unwrap();
        line.trim().parse().unwrap()
    };
    (ticks(&stat), std::fs::read_dir(format!("{dir}/task")).unwrap().map(woken).sum())
}

#[test]
fn it_takes_no_processor_time_at_rest_with_clients_connected() {
    let world = World::new();
    let server = Server::start(controlled(&world).arg("--vhost-user").arg(world.path("vhost")));
    // A VMM and an NBD client that have worked, past the RAM tier, and stay; and one that never says anything whole.
    let shape = Shape { request_bytes: 1 << 20, ..Shape::default() };
    let mut vmm = Driver::connect_with(&world.path("vhost"), shape).unwrap();
    vmm.write_at(0, &vec![7; 8 << 20]).unwrap();
    let mut nbd = Command::new("qemu-io");
    nbd.args(["-f", "raw"]).arg(world.nbd_uri()).stdin(Stdio::piped()).stdout(Stdio::piped());
    let mut nbd = nbd.spawn().unwrap();
    let mut commands = nbd.stdin.take().unwrap();
    commands.write_all(b"read -P 7 0 8M\n").unwrap();
    let figure = |key: &str| stats(&world).pointer(key).and_then(Value::as_u64).unwrap();
    until("the NBD client has worked", || figure("/planes/guest/read_bytes") == 8 << 20);
    let mut control = UnixStream::connect(world.path("control")).unwrap();
    control.write_all(b"{\"comm").unwrap();
    assert_eq!(stats(&world)["clients"], 2);

    // What was begun ends soon (eviction, polling after the last request, punching); then three seconds pass in
    // which neither process runs or wakes.
    let both = || [server.pid(), server.worker_pid()].map(activity);
    let mut last = (both(), Instant::now());
    until("three seconds at rest", || {
        std::thread::sleep(Duration::from_millis(20));
        let now = both();
        if now != last.0 {
            last = (now, Instant::now());
        }
        last.1.elapsed() > Duration::from_secs(3)
    });

    // They are still served.
    let mut content = vec![0; 1 << 20];
    vmm.read_at(0, &mut content).unwrap();
    assert!(content.iter().all(|&b| b == 7));
    commands.write_all(b"read -P 7 0 64k\n").unwrap();
    drop(commands);
    let nbd = nbd.wait_with_output().unwrap();
    let stdout = String::from_utf8_lossy(&nbd.stdout);
    assert!(
        nbd.status.success() && stdout.contains("read 65536/65536") && !stdout.contains("failed"),
        "{stdout}"
    );
    drop(vmm);
    assert_eq!(server.end(Signal::TERM).0, 0);
}

#[test]
fn the_identities_of_the_counters_hold_under_eviction() {
    let world = World::new();
    let mut command = controlled(&world);
    let server = Server::start(command.args(["--size", "64M"]));
    // Four times the RAM tier, written twice, with edges that are no whole blocks; read back; partly discarded.
    let mut commands = vec!["write -P 1 0 16M".to_owned(), "write -P 2 4M 12M".to_owned()];
    for i in 0..64u64 {
        commands.push(format!("write -P {} {} 1536", i + 3, i * 200_704 + 512));
    }
    commands.extend(
        [
            "read -P 2 13M 1M",
            "read 0 16M",
            "read 4k 64k",
            "read 4k 64k",
            "read 4k 64k",
            "discard 8M 2M",
            "write -z 1M 1M",
            "flush",
        ]
        .map(String::from),
    );
    qemu_io(&world, &commands.iter().map(String::as_str).collect::<Vec<_>>());

    // Evictions may still be under way: the last identity holds when they are done.
    let mut s = Value::Null;
    let figure = |s: &Value, key: &str| -> u64 {
        let pointer = format!("/{}", key.replace('.', "/"));
        s.pointer(&pointer).and_then(Value::as_u64).unwrap_or_else(|| panic!("{key}: {s:#}"))
    };
    until("what was written to the file is accounted for", || {
        s = stats(&world);
        let blocks =
            ["evictions.blocks", "collector.moved_blocks", "overflow.guest_blocks", "overflow.summaries"];
        let blocks: u64 = blocks.iter().map(|key| figure(&s, key)).sum();
        figure(&s, "inflight") == 0
            && figure(&s, "planes.overflow.written_bytes")
                == 4096 * (blocks + figure(&s, "overflow.lost_blocks"))
    });
    let f = |key: &str| figure(&s, key);
    assert!(f("evictions.blocks") > 0 && f("planes.overflow.read_bytes") > 0, "it did overflow: {s:#}");
    assert!(f("promotions.blocks") > 0, "what was read again and again is back: {s:#}");
    assert_eq!(
        f("planes.guest.read_bytes") + f("failed.read_bytes"),
        f("planes.ram.read_bytes")
            + f("planes.zero.read_bytes")
            + (f("planes.base.read_bytes") - f("merges.base_bytes"))
            + (f("planes.overflow.read_bytes") - f("merges.overflow_bytes") - f("collector.read_bytes")),
        "reads: {s:#}"
    );
    assert_eq!(
        f("planes.guest.written_bytes") + f("failed.written_bytes"),
        f("planes.ram.written_bytes") + f("planes.zero.written_bytes") + f("overflow.guest_bytes"),
        "writes: {s:#}"
    );
    assert_eq!(f("planes.base.written_bytes"), 0);
    assert!(
        f("overflow.file_bytes") <= f("overflow.limit_bytes") && f("ram.peak_bytes") <= f("ram.limit_bytes")
    );
    assert_eq!(server.end(Signal::TERM).0, 0);
}

/// `serve` under strace, which makes the first opens of the overflow folder fail as another file system would.
fn where_opens_fail(world: &World, serve: &Command, how: &str) -> Command {
    let call = if cfg!(target_arch = "x86_64") { "open" } else { "openat" };
    let mut strace = Command::new("strace");
    strace
        .args(["-f", "-o", "/dev/null", "-P"])
        .arg(world.dir.path())
        .arg("-e")
        .arg(format!("inject={call}:{how}"));
    strace.arg(serve.get_program()).args(serve.get_args());
    strace
}

fn strace_runs() -> bool {
    finishes(Command::new("sh").args(["-c", "strace -o /dev/null true; echo $?"])).1.ends_with("0\n")
}

#[test]
fn mode_direct_needs_o_direct_and_not_o_tmpfile() {
    if !strace_runs() {
        return skip("strace does not run here");
    }
    let world = World::new();
    let mut direct = world.serve();
    direct.args(["--mode", "direct"]);
    let mut command = where_opens_fail(&world, &direct, "error=EINVAL:when=1");
    refuses(&mut command, 73, &["overflow folder", "has no O_DIRECT", "--mode direct", "--overflow-dir"]);
    assert_eq!(world.left(), ["base.raw"]);
    let server = Server::start(&mut where_opens_fail(&world, &direct, "error=EOPNOTSUPP:when=1..2"));
    assert_eq!(server.report["overflow_direct"], true, "without O_TMPFILE it is what it says");
    let (code, text) = server.end(Signal::TERM);
    assert!(code == 0 && text.contains("has no O_TMPFILE"), "{text}");
}

#[test]
fn file_systems_without_o_direct_or_o_tmpfile_serve_and_say_so() {
    if !strace_runs() {
        return skip("strace does not run here");
    }
    for (fault, direct, notices) in [
        ("error=EINVAL:when=1", false, vec!["has no O_DIRECT"]),
        ("error=EOPNOTSUPP:when=1..2", true, vec!["has no O_TMPFILE"]),
    ] {
        let world = World::new();
        let server = Server::start(&mut where_opens_fail(&world, &controlled(&world), fault));
        assert_eq!(server.report["overflow_direct"], direct, "{fault}");
        assert_eq!(world.left(), ["base.raw", "control", "nbd"], "{fault}: the overflow file has no name");
        qemu_io(&world, &["write -P 9 0 12M", "read -P 9 0 12M"]);
        assert!(stats(&world)["evictions"]["blocks"].as_u64() > Some(0));
        let (code, text) = server.end(Signal::TERM);
        assert_eq!(code, 0, "{text}");
        for notice in notices {
            assert!(text.contains(notice), "{fault}: {text}");
        }
        assert_eq!(world.left(), ["base.raw"]);
    }
}

#[test]
fn a_limit_on_file_sizes_that_the_disk_stays_within_is_no_hindrance() {
    let world = World::new();
    let serve = controlled(&world);
    // More than image, RAM tier and overflow need; less than the host's memory, for which the slots leave room.
    let mut limited = Command::new("bash");
    limited
        .args(["-c", "ulimit -f 102400; exec \"$0\" \"$@\""])
        .arg(serve.get_program())
        .args(serve.get_args());
    let server = Server::start(&mut limited);
    qemu_io(&world, &["write -P 9 0 12M", "read -P 9 0 12M"]);
    let (code, text) = server.end(Signal::TERM);
    assert_eq!(code, 0, "{text}");
}

#[test]
fn a_server_out_of_fds_goes_on_with_those_it_has() {
    let world = World::new();
    let serve = controlled(&world);
    let mut few = Command::new("bash");
    few.args(["-c", "ulimit -n 40; exec \"$0\" \"$@\""]).arg(serve.get_program()).args(serve.get_args());
    let server = Server::start(&mut few);
    let mut held = Vec::new();
    // The listen queue takes what the server cannot.
    for _ in 0..60 {
        held.push(UnixStream::connect(world.path("control")).unwrap());
    }
    let mut first = &held[0];
    first.set_read_timeout(Some(PATIENCE)).unwrap();
    first.write_all(b"{\"command\":\"ping\"}\n").unwrap();
    let mut line = String::new();
    BufReader::new(first).read_line(&mut line).unwrap();
    assert!(line.contains("\"ok\""), "{line}");
    drop(held);
    until("there is space again", || finishes(spillway().arg("stats").arg(world.path("control"))).0 == 0);
    let (code, text) = server.end(Signal::TERM);
    assert_eq!(code, 0, "{text}");
}

/// The disk's state is not QEMU's to carry away: it says so before it begins.
#[test]
fn qemu_refuses_live_migration_and_snapshots_in_words() {
    let world = World::new();
    let server = Server::start(controlled(&world).arg("--vhost-user").arg(world.path("vhost")));
    let mut qemu = Command::new("qemu-system-x86_64");
    qemu.args(["-S", "-nodefaults", "-display", "none", "-machine", "q35,memory-backend=m", "-m", "64M"]);
    qemu.args(["-object", "memory-backend-memfd,id=m,size=64M,share=on", "-qmp", "stdio"]);
    qemu.arg("-chardev").arg(format!("socket,id=disk,path={}", world.path("vhost").display()));
    qemu.args(["-device", "vhost-user-blk-pci,chardev=disk"]);
    let qemu = qemu.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn();
    let mut qemu = qemu.expect("qemu-system-x86_64 (Debian: qemu-system-x86) is needed");
    let commands = [
        r#"{"execute":"qmp_capabilities"}"#,
        r#"{"execute":"migrate","arguments":{"uri":"exec:cat >/dev/null"}}"#,
        r#"{"execute":"human-monitor-command","arguments":{"command-line":"savevm one"}}"#,
        r#"{"execute":"quit"}"#,
    ];
    qemu.stdin.take().unwrap().write_all(commands.join("\n").as_bytes()).unwrap();
    let output = qemu.wait_with_output().unwrap();
    let text_of_both = format!("{}{}", text(&output.stdout), text(&output.stderr));
    assert_eq!(
        text_of_both.matches("Migration disabled: vhost-user backend lacks").count(),
        2,
        "{text_of_both}"
    );
    let (code, text) = server.end(Signal::TERM);
    assert_eq!(code, 0, "{text}");
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}
