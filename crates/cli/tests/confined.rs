//! What a worker can do, and what it needs of its host: the rights of each of its threads, and hosts that forbid
//! io_uring.

#![allow(clippy::unwrap_used, reason = "a test that fails here has failed")]

mod common;

use common::{Server, World, finishes, qemu_io, ticks, until};
use rustix::process::{Pid, Signal};
use spillway_testkit::{Driver, Shape};
use std::os::unix::process::CommandExt;
use std::process::Command;
use std::time::{Duration, Instant};

const ENGINES: [&str; 2] = ["io_uring", "threads"];

/// Of all threads of a process: name, `status`, and ticks of processor time.
fn threads(pid: Pid) -> Vec<(String, String, u64)> {
    let tasks = std::fs::read_dir(format!("/proc/{}/task", pid.as_raw_nonzero())).unwrap();
    tasks
        .map(|task| {
            let path = task.unwrap().path();
            let read = |name| std::fs::read_to_string(path.join(name)).unwrap();
            (read("comm").trim().to_string(), read("status"), ticks(&read("stat")))
        })
        .collect()
}

#[track_caller]
fn line<'a>(status: &'a str, key: &str) -> &'a str {
    status.lines().find_map(|l| l.strip_prefix(key)).unwrap_or_else(|| panic!("no {key} {status}")).trim()
}

#[test]
fn every_thread_of_a_worker_is_confined() {
    let world = World::new();
    let qcow2 = world.path("base.qcow2");
    let mut convert = Command::new("qemu-img");
    convert.args(["convert", "-f", "raw", "-O", "qcow2", "-c"]).arg(world.path("base.raw")).arg(&qcow2);
    assert_eq!(finishes(&mut convert).0, 0);
    for (engine, names) in ENGINES.into_iter().zip([
        vec!["base-reader", "spillway-worker"],
        vec!["base-reader", "io-0", "io-1", "io-2", "io-3", "spillway-worker"],
    ]) {
        let mut serve = common::spillway();
        serve
            .arg("serve")
            .args(["--format", "qcow2", "--mode", "ram", "--ram", "16M", "--image"])
            .arg(&qcow2);
        serve.arg("--nbd").arg(world.path("nbd")).arg("--control").arg(world.path("control"));
        let server = Server::start(serve.env("SPILLWAY_ENGINE", engine));
        qemu_io(&world, &["read 0 16M", "write -P 3 0 1M"]);
        let threads = threads(server.worker_pid());
        let mut found: Vec<_> = threads.iter().map(|(name, ..)| name.as_str()).collect();
        found.sort_unstable();
        // The kernel's own for an io_uring may be among them.
        found.retain(|name| !name.starts_with("iou-"));
        assert_eq!(found, names, "{engine}");
        for (name, status, _) in &threads {
            let got = ["NoNewPrivs:", "Seccomp:", "CapEff:", "CapPrm:", "CapInh:", "CapAmb:"]
                .map(|key| line(status, key).trim_start_matches('0'));
            assert_eq!(got, ["1", "2", "", "", "", ""], "{engine}, {name}: {status}");
        }
        let limits = format!("/proc/{}/limits", server.worker_pid().as_raw_nonzero());
        let limits = std::fs::read_to_string(limits).unwrap();
        let core = limits.lines().find(|l| l.starts_with("Max core file size")).unwrap();
        assert!(core.split_whitespace().skip(4).take(2).all(|n| n == "0" || n == "1"), "{core}");
        assert_eq!(figures(&world)["landlock"], landlock_version(), "{engine}");
        let (_, table, _) = finishes(common::spillway().arg("stats").arg(world.path("control")));
        assert!(table.contains(&format!("I/O by {engine}, ")), "{table}");
        // Nothing was lacking on this host, or it was said.
        let (code, text) = server.end(Signal::TERM);
        assert_eq!(code, 0, "{text}");
        assert!(!text.contains("no filter of system calls"), "{text}");
    }
}

/// What `stats --json` says.
fn figures(world: &World) -> serde_json::Value {
    let (code, out, err) = finishes(common::spillway().arg("stats").arg(world.path("control")).arg("--json"));
    assert_eq!((code, err.as_str()), (0, ""));
    serde_json::from_str(&out).unwrap()
}

/// The kernel's own answer; 0 if it has none.
fn landlock_version() -> u64 {
    const VERSION: u32 = 1;
    // SAFETY: with this flag it makes nothing and reads no memory.
    let answer = unsafe {
        libc::syscall(libc::SYS_landlock_create_ruleset, std::ptr::null::<libc::c_void>(), 0usize, VERSION)
    };
    u64::try_from(answer).unwrap_or(0)
}

/// Makes a program start where a system call answers EPERM, as container profiles have it.
fn forbid(command: &mut Command, forbidden: libc::c_long) {
    let filter = |code: u32, jt, jf, k| libc::sock_filter { code: code as u16, jt, jf, k };
    let call = std::mem::offset_of!(libc::seccomp_data, nr) as u32;
    let program = [
        filter(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, 0, 0, call),
        filter(libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K, 0, 1, forbidden as u32),
        filter(libc::BPF_RET | libc::BPF_K, 0, 0, libc::SECCOMP_RET_ERRNO | libc::EPERM as u32),
        filter(libc::BPF_RET | libc::BPF_K, 0, 0, libc::SECCOMP_RET_ALLOW),
    ];
    // SAFETY: only system calls between fork and exec; the program is owned by the closure.
    unsafe {
        command.pre_exec(move || {
            let program = libc::sock_fprog { len: 4, filter: program.as_ptr().cast_mut() };
            let mode = libc::SECCOMP_MODE_FILTER;
            if libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0
                || libc::prctl(libc::PR_SET_SECCOMP, mode, &raw const program, 0, 0) != 0
            {
                return Err(std::io::Error::last_os_error());
            }
            Ok(())
        });
    }
}

/// How often each thread of both processes was woken, and its processor time.
fn activity(server: &Server) -> Vec<(String, u64)> {
    let threads = [server.pid(), server.worker_pid()].into_iter().flat_map(threads);
    threads.map(|(_, status, ticks)| (line(&status, "voluntary_ctxt_switches:").to_string(), ticks)).collect()
}

#[test]
fn a_host_that_forbids_io_uring_is_served_by_threads_that_rest() {
    let world = World::new();
    let mut serve = world.serve();
    serve
        .args(["--ram", "4M", "--overflow", "64M", "--size", "64M", "--vhost-user"])
        .arg(world.path("vhost"))
        .arg("--control")
        .arg(world.path("control"));
    serve.env_remove("SPILLWAY_ENGINE");
    forbid(&mut serve, libc::SYS_io_uring_setup);
    let server = Server::start(&mut serve);
    // A thread names itself once it runs.
    until("its threads run", || threads(server.worker_pid()).iter().any(|(name, ..)| name == "io-0"));
    let shape = Shape { request_bytes: 1 << 20, ..Shape::default() };
    let mut vmm = Driver::connect_with(&world.path("vhost"), shape).unwrap();
    vmm.write_at(0, &vec![7; 24 << 20]).unwrap();
    qemu_io(&world, &["read -P 7 0 24M", "discard 8M 8M", "flush", "read -P 0 8M 8M"]);

    // With a VMM connected that has nothing to do no thread of either process runs.
    let mut last = (activity(&server), Instant::now());
    until("two seconds at rest", || {
        std::thread::sleep(Duration::from_millis(20));
        let now = activity(&server);
        if now != last.0 {
            last = (now, Instant::now());
        }
        last.1.elapsed() > Duration::from_secs(2)
    });
    assert_eq!(figures(&world)["engine"], "threads");
    let mut content = vec![0; 1 << 20];
    vmm.read_at(20 << 20, &mut content).unwrap();
    assert!(content.iter().all(|&b| b == 7));
    drop(vmm);
    let (code, text) = server.end(Signal::TERM);
    assert_eq!(code, 0, "{text}");
    let notices: Vec<_> = text.lines().filter(|l| l.contains("io_uring")).collect();
    assert_eq!(notices.len(), 1, "once: {text}");
    assert!(
        notices[0].starts_with("spillway: notice: cannot make an io_uring: Operation not permitted"),
        "{text}"
    );
    assert_eq!(world.left(), ["base.raw"]);
}

#[test]
fn a_host_without_landlock_is_served_and_it_is_said() {
    let world = World::new();
    let mut serve = world.serve();
    serve.args(["--ram", "4M", "--overflow", "64M", "--control"]).arg(world.path("control"));
    forbid(&mut serve, libc::SYS_landlock_create_ruleset);
    let server = Server::start(&mut serve);
    qemu_io(&world, &["write -P 7 0 8M", "read -P 7 0 8M"]);
    assert_eq!(figures(&world)["landlock"], 0);
    let (_, table, _) = finishes(common::spillway().arg("stats").arg(world.path("control")));
    assert!(table.contains("no Landlock"), "{table}");
    let (code, text) = server.end(Signal::TERM);
    assert_eq!(code, 0, "{text}");
    assert!(text.contains("notice: the sandbox is weaker: ") && text.contains("Landlock"), "{text}");
}

#[test]
fn an_engine_that_there_is_not_is_an_error() {
    let world = World::new();
    let (code, _, err) = finishes(world.serve().env("SPILLWAY_ENGINE", "steam"));
    assert_eq!(code, 70);
    let words = "SPILLWAY_ENGINE=steam: there is no such engine: use `io_uring` or `threads`";
    assert!(err.contains(words), "{err}");
}
