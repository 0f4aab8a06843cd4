//! The supervisor against a worker that only pretends: what it is given, what it hands on, how it ends. The
//! stand-in is this very program, executed again as a worker is.

#![allow(clippy::unwrap_used, reason = "a test that fails here has failed")]

use spillway_core::LAYOUT_VERSION;
use spillway_worker::channel::{self, ClientKind, FromWorker, ToWorker};
use spillway_worker::supervisor::{
    BaseCache, ErrorKind, FullPolicy, Mode, Options, Program, Supervisor, SupervisorError,
    channel_from_supervisor,
};
use std::io::{BufRead, BufReader, Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

const ROLE: &str = "SPILLWAY_STAND_IN";

/// Not a test of its own: what the stand-in executes.
#[test]
fn stand_in() {
    let Ok(role) = std::env::var(ROLE) else { return };
    let Some(channel) = channel_from_supervisor() else { return };
    hello(&channel, LAYOUT_VERSION);
    pretend(&role, channel);
}

/// The same as the program of an upgrade: its role is the name of its file.
#[test]
fn __worker() {
    let Some(channel) = channel_from_supervisor() else { return };
    let role = std::env::current_exe().unwrap().file_name().unwrap().to_str().unwrap().to_owned();
    hello(&channel, LAYOUT_VERSION + u64::from(role == "other-layout"));
    pretend(&role, channel);
}

fn hello(channel: &OwnedFd, layout: u64) {
    let version = "9.9".into();
    let hello = FromWorker::Hello { protocol: channel::PROTOCOL_VERSION, layout, version };
    channel::send(channel, &hello, &[]).unwrap();
}

fn pretend(role: &str, channel: OwnedFd) {
    let (start, fds) = match channel::receive(&channel).unwrap() {
        Some((ToWorker::Start(start), fds)) => (start, fds),
        // A program that was looked at and not taken.
        None => std::process::exit(0),
        other => panic!("{other:?}"),
    };
    if role == "closes" {
        drop(channel);
        loop {
            std::thread::park();
        }
    }
    let say = |message: FromWorker| channel::send(&channel, &message, &[]).unwrap();
    match role {
        "fails" => {
            say(FromWorker::Failed { error: "no io_uring on this host: enable it".into() });
            std::process::exit(1);
        }
        "exits" => std::process::exit(3),
        _ => {}
    }
    // The disk as it was given: lengths and writability of each fd, in order.
    let shape: Vec<String> = fds
        .iter()
        .map(|fd| {
            let flags = rustix::fs::fcntl_getfl(fd).unwrap();
            let writable = flags.contains(rustix::fs::OFlags::RDWR);
            format!("{}{}", rustix::fs::fstat(fd).unwrap().st_size, if writable { "+" } else { "" })
        })
        .collect();
    say(FromWorker::Event {
        kind: "notice".into(),
        text: format!("{} {} {}", start.mode, start.serial, shape.join(" ")),
    });
    let group = rustix::process::getpgrp() == rustix::process::getpid();
    let open = std::fs::read_dir("/proc/self/fd").unwrap().count();
    say(FromWorker::Event { kind: "notice".into(), text: format!("group {group} fds {}", open - fds.len()) });
    say(FromWorker::Ready { engine: "threads".into() });
    // A counter, as a worker would keep it.
    std::fs::File::from(fds[0].try_clone().unwrap()).write_at(&7u64.to_ne_bytes(), 4096).unwrap();
    let mut clients: Vec<(u64, OwnedFd)> = Vec::new();
    while let Some((message, mut fds)) = channel::receive(&channel).unwrap() {
        match message {
            ToWorker::Client { id, kind } => {
                if kind == ClientKind::VhostUser {
                    fds.pop().expect("a VMM comes with a table");
                }
                let fd = fds.pop().expect("a client comes with its fd");
                if kind == ClientKind::VhostUser && clients.iter().any(|(other, _)| *other % 2 == 0) {
                    say(FromWorker::ClientGone { id, reason: "refused: a VMM is connected".into() });
                    continue;
                }
                UnixStream::from(fd.try_clone().unwrap())
                    .write_all(format!("{kind:?} {id}\n").as_bytes())
                    .unwrap();
                clients.push((id, fd));
            }
            ToWorker::Reset { force } => {
                let result =
                    if force || clients.is_empty() { Ok(2) } else { Err("a client is connected".into()) };
                for (id, _) in clients.drain(..if force { clients.len() } else { 0 }) {
                    say(FromWorker::ClientGone { id, reason: String::new() });
                }
                say(FromWorker::ResetDone { result });
            }
            ToWorker::Stop if role == "hangs" => {}
            ToWorker::Stop => break,
            ToWorker::Start(_) => panic!("started twice"),
            ToWorker::Set(_) => say(FromWorker::SetDone { result: Ok(()) }),
            ToWorker::Message { .. } | ToWorker::Replay { .. } | ToWorker::Left { .. } => {}
        }
    }
    std::process::exit(0);
}

struct World {
    dir: tempfile::TempDir,
    lines: Arc<Mutex<Vec<String>>>,
}

impl World {
    fn new() -> World {
        let dir = tempfile::tempdir_in("/var/tmp").unwrap();
        std::fs::write(dir.path().join("base.raw"), vec![7; 1 << 20]).unwrap();
        World { dir, lines: Arc::default() }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn options(&self) -> Options {
        Options {
            image: self.path("base.raw"),
            format: None,
            base_cache: BaseCache::Host,
            size_bytes: Some(8 << 20),
            mode: Mode::RamOverflow,
            full: FullPolicy::Pause,
            ram_limit_bytes: 1 << 20,
            overflow_limit_bytes: 64 << 20,
            overflow_dir: self.dir.path().into(),
            queues: 4,
            vhost_user: Some(self.path("vhost")),
            nbd: Some(self.path("nbd")),
            control: Some(self.path("control")),
            warn_at: 80,
            critical_at: 90,
            socket_mode: 0o600,
            socket_group: None,
            identity: self.path("vhost"),
        }
    }

    fn start(&self, role: &str, options: Options) -> Result<Supervisor, SupervisorError> {
        let arguments = [
            format!("{ROLE}={role}"),
            std::env::current_exe().unwrap().display().to_string(),
            "--exact".into(),
            "stand_in".into(),
            "--nocapture".into(),
        ];
        let program = Program::new("/usr/bin/env", arguments.map(Into::into).into());
        let lines = Arc::clone(&self.lines);
        Supervisor::start(
            options,
            &program,
            Box::new(move |line: &str| lines.lock().unwrap().push(line.into())),
        )
    }

    fn serving(&self, role: &str) -> Supervisor {
        let mut supervisor = self.start(role, self.options()).unwrap();
        assert_eq!(supervisor.ready(&[]).unwrap(), None);
        supervisor
    }

    fn logged(&self, what: &str) -> bool {
        self.lines.lock().unwrap().iter().any(|line| line.contains(what))
    }

    fn left(&self) -> Vec<String> {
        let names = std::fs::read_dir(self.dir.path()).unwrap();
        let mut names: Vec<_> = names.map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        names
    }
}

/// Runs the supervisor while another thread does the clients' part.
fn meanwhile<T: Send>(supervisor: &mut Supervisor, clients: impl FnOnce() -> T + Send) -> T {
    let (mut done, told) = UnixStream::pair().unwrap();
    std::thread::scope(|scope| {
        let clients = scope.spawn(move || {
            let result = clients();
            done.write_all(b".").unwrap();
            result
        });
        // Also ends when the thread panics: then the other end is closed.
        supervisor.run(&[told.as_fd()], None).unwrap();
        clients.join().unwrap()
    })
}

fn ask(stream: &mut UnixStream, request: &str) -> serde_json::Value {
    writeln!(stream, "{request}").unwrap();
    let mut line = String::new();
    BufReader::new(stream).read_line(&mut line).unwrap();
    serde_json::from_str(&line).unwrap()
}

fn connect(path: &PathBuf) -> UnixStream {
    let stream = UnixStream::connect(path).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
    stream
}

fn greeting(stream: &UnixStream) -> String {
    let mut line = String::new();
    BufReader::new(stream).read_line(&mut line).unwrap();
    line
}

#[test]
fn the_worker_gets_the_disk_and_nothing_else() {
    let world = World::new();
    let mut supervisor = world.serving("serves");
    let lines = world.lines.lock().unwrap().join("\n");
    let mut words = lines.lines().next().unwrap().split(' ');
    assert_eq!(words.next(), Some("ram+overflow"));
    assert!(
        words.next().is_some_and(|serial| serial.starts_with("spillway-") && serial.len() <= 20),
        "{lines}"
    );
    let shape: Vec<_> = words.collect();
    assert_eq!((shape.len(), shape[1], shape[3]), (5, "1048576", "67112960+"), "{lines}");
    assert!(shape[0].ends_with('+') && shape[2].ends_with('+') && shape[4] == "4096+", "{lines}");
    // stdin, stdout, stderr, the channel, and the directory that is read.
    assert!(lines.contains("group true fds 5"), "{lines}");
    supervisor.stop(&[]).unwrap();
    assert_eq!(world.left(), ["base.raw"]);
}

#[test]
fn clients_reach_the_worker_and_a_second_vmm_is_its_decision() {
    let world = World::new();
    let mut supervisor = world.serving("serves");
    let (vhost, nbd) = (world.path("vhost"), world.path("nbd"));
    meanwhile(&mut supervisor, || {
        let first = connect(&nbd);
        assert_eq!(greeting(&first), "Nbd 1\n");
        let vmm = connect(&vhost);
        assert_eq!(greeting(&vmm), "VhostUser 2\n");
        assert_eq!(greeting(&connect(&vhost)), "", "the second VMM");
        assert_eq!(greeting(&connect(&nbd)), "Nbd 4\n");
    });
    assert!(world.logged("vhost-user client 3: refused: a VMM is connected"));
    assert_eq!(supervisor.stats().clients, 3);
    supervisor.stop(&[]).unwrap();
}

#[test]
fn the_control_socket_answers_many_at_once() {
    let world = World::new();
    let mut supervisor = world.serving("serves");
    let (control, nbd) = (world.path("control"), world.path("nbd"));
    meanwhile(&mut supervisor, || {
        // One that says nothing, one that says half a line, one that never reads.
        let _silent = connect(&control);
        connect(&control).write_all(b"{\"comm").unwrap();
        let mut deaf = connect(&control);
        deaf.set_write_timeout(Some(Duration::from_millis(50))).unwrap();
        while deaf.write_all(b"{\"command\":\"stats\"}\n").is_ok() {}

        let mut one = connect(&control);
        let pong = ask(&mut one, r#"{"command":"ping"}"#);
        assert_eq!(pong["ok"]["pid"], std::process::id());
        assert_eq!(pong["ok"]["size_bytes"], 8 << 20);
        let stats = ask(&mut one, r#"{"command":"stats"}"#);
        assert_eq!(
            (&stats["ok"]["schema"], &stats["ok"]["planes"]["guest"]["reads"]),
            (&1.into(), &7.into())
        );
        assert_eq!(ask(&mut one, "nonsense")["error"]["code"], "invalid");

        assert_eq!(ask(&mut one, r#"{"command":"reset"}"#)["ok"]["generation"], 2);
        let mut client = connect(&nbd);
        assert!(greeting(&client).starts_with("Nbd"));
        let mut two = connect(&control);
        let refused = ask(&mut two, r#"{"command":"reset"}"#);
        assert_eq!(
            (&refused["error"]["code"], &refused["error"]["message"]),
            (&"refused".into(), &"a client is connected".into())
        );
        assert_eq!(ask(&mut two, r#"{"command":"reset","force":true}"#)["ok"]["generation"], 2);
        assert_eq!(client.read(&mut [0]).unwrap(), 0, "forced: disconnected");
        assert_eq!(ask(&mut two, r#"{"command":"stats"}"#)["ok"]["clients"], 0);
    });
    supervisor.stop(&[]).unwrap();
}

#[test]
fn too_many_control_connections_are_told_so() {
    let world = World::new();
    let mut supervisor = world.serving("serves");
    let control = world.path("control");
    meanwhile(&mut supervisor, || {
        let held: Vec<_> = (0..32).map(|_| connect(&control)).collect();
        let mut line = String::new();
        BufReader::new(connect(&control)).read_line(&mut line).unwrap();
        assert!(line.contains("\"busy\""), "{line}");
        drop(held);
        let deadline = Instant::now() + Duration::from_secs(10);
        while !ask_once(&control).contains("\"ok\"") {
            assert!(Instant::now() < deadline, "the places were not given free");
        }
    });
    supervisor.stop(&[]).unwrap();
}

fn ask_once(control: &PathBuf) -> String {
    let mut stream = connect(control);
    let _ = stream.write_all(b"{\"command\":\"ping\"}\n");
    greeting(&stream)
}

#[test]
fn clients_beyond_the_bound_are_turned_away_and_the_vmm_is_not() {
    let world = World::new();
    let mut supervisor = world.serving("serves");
    let (vhost, nbd) = (world.path("vhost"), world.path("nbd"));
    meanwhile(&mut supervisor, || {
        let held: Vec<_> = (0..16).map(|_| connect(&nbd)).collect();
        assert!(held.iter().all(|client| greeting(client).starts_with("Nbd")));
        assert_eq!(greeting(&connect(&nbd)), "");
        // The stand-in refuses it, by then for its own reasons: it got that far.
        assert_eq!(greeting(&connect(&vhost)), "");
    });
    assert!(world.logged("16 NBD clients are connected") && world.logged("refused: a VMM is connected"));
    supervisor.stop(&[]).unwrap();
}

#[test]
fn a_worker_that_does_not_come_up_is_an_error_that_says_why() {
    for (role, why) in [("fails", "no io_uring on this host"), ("exits", "before it served (exit status: 3)")]
    {
        let world = World::new();
        let mut supervisor = world.start(role, world.options()).unwrap();
        let error = supervisor.ready(&[]).unwrap_err();
        assert_eq!(error.kind, ErrorKind::Internal);
        assert!(error.message.contains(why), "{role}: {error}");
        drop(supervisor);
        assert_eq!(world.left(), ["base.raw"]);
    }
}

#[test]
fn a_worker_that_closes_its_channel_is_ended() {
    let world = World::new();
    let mut supervisor = world.start("closes", world.options()).unwrap();
    let pid = supervisor.report().worker_pid;
    let error = supervisor.ready(&[]).unwrap_err();
    assert!(error.message.contains("closed its channel"), "{error}");
    assert!(!PathBuf::from(format!("/proc/{pid}")).exists());
}

#[test]
fn a_worker_that_dies_is_followed_by_another() {
    let world = World::new();
    let mut supervisor = world.serving("serves");
    let (control, nbd, vhost) = (world.path("control"), world.path("nbd"), world.path("vhost"));
    let first = supervisor.report().worker_pid;
    meanwhile(&mut supervisor, || {
        let nbd = connect(&nbd);
        assert!(greeting(&nbd).starts_with("Nbd"));
        let vmm = connect(&vhost);
        assert_eq!(greeting(&vmm), "VhostUser 2\n");
        let mut one = connect(&control);
        let mut pid = first;
        for _ in 0..5 {
            let raw = rustix::process::Pid::from_raw(pid as i32).unwrap();
            rustix::process::kill_process(raw, rustix::process::Signal::KILL).unwrap();
            assert_eq!(
                greeting(&vmm),
                "VhostUser 2\n",
                "its connection is still open, the next worker has it"
            );
            let next = ask(&mut one, r#"{"command":"ping"}"#)["ok"]["worker_pid"].as_u64().unwrap() as u32;
            assert_ne!(next, pid);
            pid = next;
        }
        assert_eq!((&nbd).read(&mut [0]).unwrap(), 0, "an NBD client connects again");
        assert_eq!(ask(&mut one, r#"{"command":"stats"}"#)["ok"]["clients"], 1);
    });
    assert!(world.logged("SIGKILL") && world.logged("1 NBD client(s) lost the connection"));
    supervisor.stop(&[]).unwrap();
    assert_eq!(world.left(), ["base.raw"]);
}

/// Asks for an upgrade to this very program under a name that is its role.
fn upgrade(world: &World, role: &str) -> serde_json::Value {
    let binary = world.path(role);
    std::fs::copy(std::env::current_exe().unwrap(), &binary).unwrap();
    let answer = upgrade_to(world, &binary);
    std::fs::remove_file(binary).unwrap();
    answer
}

fn upgrade_to(world: &World, binary: &Path) -> serde_json::Value {
    let mut control = connect(&world.path("control"));
    ask(&mut control, &serde_json::json!({ "command": "upgrade", "binary": binary }).to_string())
}

#[test]
fn another_program_takes_over_and_one_that_does_not_fit_changes_nothing() {
    let world = World::new();
    let mut supervisor = world.serving("serves");
    let vhost = world.path("vhost");
    let first = supervisor.report().worker_pid;
    meanwhile(&mut supervisor, || {
        let vmm = connect(&vhost);
        assert_eq!(greeting(&vmm), "VhostUser 1\n");
        let pid = || {
            let mut control = connect(&world.path("control"));
            ask(&mut control, r#"{"command":"ping"}"#)["ok"]["worker_pid"].as_u64().unwrap()
        };
        let refusals: [(&str, &dyn Fn() -> serde_json::Value); 5] = [
            ("no such file", &|| upgrade_to(&world, &world.path("nothing"))),
            ("permission denied", &|| upgrade_to(&world, &world.path("base.raw"))),
            ("no spillway that can take over", &|| upgrade_to(&world, Path::new("/usr/bin/true"))),
            ("layout", &|| upgrade(&world, "other-layout")),
            ("did not say what it is in 5 s", &|| upgrade_to(&world, Path::new("/usr/bin/yes"))),
        ];
        for (why, try_it) in refusals {
            let answer = try_it();
            assert_eq!(answer["error"]["code"], "refused", "{why}: {answer}");
            assert!(answer["error"]["message"].as_str().unwrap().contains(why), "{why}: {answer}");
            assert_eq!(pid(), u64::from(first), "{why}");
        }
        let answer = upgrade(&world, "exits");
        assert!(answer["error"]["message"].as_str().unwrap().contains("the old program goes on"), "{answer}");
        assert_eq!(greeting(&vmm), "VhostUser 1\n", "the old program has the VMM again");
        let answer = upgrade(&world, "serves");
        assert_eq!(answer["ok"]["version"], "9.9", "{answer}");
        assert_eq!(greeting(&vmm), "VhostUser 1\n", "and now the new one");
        assert_eq!(answer["ok"]["worker_pid"], pid());
        // Its file is gone by now, and it is what is started again.
        let raw = rustix::process::Pid::from_raw(pid() as i32).unwrap();
        rustix::process::kill_process(raw, rustix::process::Signal::KILL).unwrap();
        assert_eq!(greeting(&vmm), "VhostUser 1\n");
        let exe = std::fs::read_link(format!("/proc/{}/exe", pid())).unwrap();
        assert!(exe.display().to_string().contains("serves"), "{exe:?}");
    });
    supervisor.stop(&[]).unwrap();
    assert_eq!(world.left(), ["base.raw"]);
}

#[test]
fn a_worker_that_does_not_stop_is_ended_at_the_second_signal() {
    let world = World::new();
    let mut supervisor = world.serving("hangs");
    let pid = supervisor.report().worker_pid;
    let (mut signal, told) = UnixStream::pair().unwrap();
    signal.write_all(b".").unwrap();
    let begun = Instant::now();
    supervisor.stop(&[told.as_fd()]).unwrap();
    assert!(begun.elapsed() < Duration::from_secs(5));
    assert!(!PathBuf::from(format!("/proc/{pid}")).exists());
    assert_eq!(world.left(), ["base.raw"]);
}

#[test]
fn each_mode_gets_what_it_has() {
    for (mode, shape) in [(Mode::Ram, 4), (Mode::Overflow, 4), (Mode::Direct, 4), (Mode::RamOverflow, 5)] {
        let world = World::new();
        let mut supervisor = world.start("serves", Options { mode, ..world.options() }).unwrap();
        supervisor.ready(&[]).unwrap();
        let line = world.lines.lock().unwrap()[0].clone();
        assert_eq!(line.split(' ').count(), 2 + shape, "{line}");
        if mode == Mode::Direct {
            // The disk, and a block that it never uses; then its lifeline.
            assert!(line.ends_with(&format!(" {}+ 4096+", 8388608 + 4096)), "{line}");
        }
        supervisor.stop(&[]).unwrap();
    }
}

#[test]
fn an_error_leaves_no_file_behind() {
    let world = World::new();
    std::fs::write(world.path("control"), "in the way").unwrap();
    let error = world.start("serves", world.options()).err().unwrap();
    assert_eq!(error.kind, ErrorKind::Create);
    assert_eq!(world.left(), ["base.raw", "control"]);
}
