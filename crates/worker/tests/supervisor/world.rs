//! A supervisor with a worker that only pretends: this very program, executed again as a worker is.

use spillway_control::{DiskSettings, Mode, ServeSettings, SupervisorError};
use spillway_core::LAYOUT_VERSION;
use spillway_worker::channel::{self, ClientKind, FromWorker, ToWorker};
use spillway_worker::supervisor::{Program, Supervisor, channel_from_supervisor};
use spillway_worker::worker::{ErrorKind, ReportedError};
use std::io::{BufRead, BufReader, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::{Arc, Mutex};
use std::time::Duration;

const ROLE: &str = "SPILLWAY_STAND_IN";
/// How long a stand-in that is late takes.
pub const LATE: Duration = Duration::from_millis(500);
/// Messages of a VMM: one that kills every stand-in which is `poisoned` by it, and one that it answers with an echo.
pub const POISON: [u8; 12] = message(3);
pub const QUESTION: [u8; 12] = message(1);
/// How often one that babbles says all that nobody asked for.
pub const BABBLE: u64 = 5_000;

/// SET_OWNER or GET_FEATURES: a header without a payload.
const fn message(code: u8) -> [u8; 12] {
    [code, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0]
}

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
    if role == "thinks" {
        std::thread::sleep(LATE);
    }
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
            say(FromWorker::Failed {
                error: ReportedError::new(ErrorKind::Engine, "no io_uring on this host: enable it"),
            });
            std::process::exit(1);
        }
        "exits" => std::process::exit(3),
        "late" if has_served(&fds[0]) => std::thread::sleep(LATE),
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
        text: format!("{} {} {}", start.settings.mode(), start.serial, shape.join(" ")),
    });
    let group = rustix::process::getpgrp() == rustix::process::getpid();
    let open = std::fs::read_dir("/proc/self/fd").unwrap().count();
    say(FromWorker::Event { kind: "notice".into(), text: format!("group {group} fds {}", open - fds.len()) });
    // A counter, as a worker would keep it.
    std::fs::File::from(fds[0].try_clone().unwrap()).write_at(&7u64.to_ne_bytes(), 4096).unwrap();
    say(FromWorker::Ready { engine: "threads".into(), landlock: 0 });
    if role == "babbles" {
        let babble = ReportedError::new(ErrorKind::Engine, "babble");
        for id in 0..BABBLE {
            say(FromWorker::Failed { error: babble.clone() });
            say(FromWorker::Event { kind: "notice".into(), text: "babble".into() });
            say(FromWorker::ClientGone { id, error: Some(babble.clone()) });
            say(FromWorker::Ready { engine: "babble".into(), landlock: 77 });
            say(FromWorker::ResetDone { result: Ok(77) });
            say(FromWorker::SetDone { result: Ok(()) });
        }
        // Beyond the second whose lines it has used up.
        std::thread::sleep(Duration::from_millis(1_100));
        say(FromWorker::Event { kind: "notice".into(), text: "that was all".into() });
    }
    let mut clients: Vec<(u64, OwnedFd)> = Vec::new();
    while let Some((message, mut fds)) = channel::receive(&channel).unwrap() {
        match message {
            ToWorker::Client { id, kind } => {
                if kind == ClientKind::VhostUser {
                    fds.pop().expect("a VMM comes with a table");
                }
                let fd = fds.pop().expect("a client comes with its fd");
                if kind == ClientKind::VhostUser && clients.iter().any(|(other, _)| *other % 2 == 0) {
                    let error = ReportedError::new(ErrorKind::Refused, "refused: a VMM is connected");
                    say(FromWorker::ClientGone { id, error: Some(error) });
                    continue;
                }
                // It may have left already.
                let _ = UnixStream::from(fd.try_clone().unwrap())
                    .write_all(format!("{kind:?} {id}\n").as_bytes());
                clients.push((id, fd));
            }
            ToWorker::Reset { force } => {
                say(FromWorker::Event { kind: "notice".into(), text: "asked for a reset".into() });
                let refusal = ReportedError::new(ErrorKind::Refused, "a client is connected");
                let result = if force || clients.is_empty() { Ok(2) } else { Err(refusal) };
                for (id, _) in clients.drain(..if force { clients.len() } else { 0 }) {
                    say(FromWorker::ClientGone { id, error: None });
                }
                say(FromWorker::ResetDone { result });
            }
            ToWorker::Stop { .. } if role == "hangs" => {}
            ToWorker::Stop { .. } => {
                if role == "lingers" {
                    say(FromWorker::Event { kind: "notice".into(), text: "it lingers".into() });
                    std::thread::sleep(LATE);
                }
                break;
            }
            ToWorker::Start(_) => panic!("started twice"),
            ToWorker::Trace { on } => {
                assert_eq!(fds.len(), usize::from(on), "a ring comes with it");
                say(FromWorker::Event { kind: "notice".into(), text: format!("recorded: {on}") });
            }
            ToWorker::Touched => say(FromWorker::Touched { chunks: vec![3, 1] }),
            ToWorker::Curve { goal } => say(FromWorker::Curve { curve: serde_json::json!({ "goal": goal }) }),
            ToWorker::Set(_) => say(FromWorker::SetDone { result: Ok(()) }),
            ToWorker::Left { id, error } => {
                clients.retain(|(other, _)| *other != id);
                say(FromWorker::ClientGone { id, error });
            }
            ToWorker::Message { bytes, .. } if role == "poisoned" && bytes == POISON => std::process::exit(9),
            ToWorker::Message { id, bytes } => {
                let answer = (role == "poisoned").then_some(bytes);
                say(FromWorker::Answered { id, accepted: true, answer, writeback: true });
            }
            ToWorker::Replay { .. } | ToWorker::Chunks => {}
        }
    }
    std::process::exit(0);
}

/// Whether a stand-in before this one has kept its counter.
fn has_served(meta: &OwnedFd) -> bool {
    let mut counter = [0; 8];
    std::fs::File::from(meta.try_clone().unwrap()).read_exact_at(&mut counter, 4096).unwrap();
    counter != [0; 8]
}

pub struct World {
    pub dir: tempfile::TempDir,
    pub lines: Arc<Mutex<Vec<String>>>,
}

impl World {
    pub fn new() -> World {
        let dir = tempfile::tempdir_in("/var/tmp").unwrap();
        std::fs::write(dir.path().join("base.raw"), vec![7; 1 << 20]).unwrap();
        World { dir, lines: Arc::default() }
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    pub fn options(&self) -> ServeSettings {
        ServeSettings {
            settings: DiskSettings {
                ram_bytes: Some(1 << 20),
                overflow_bytes: Some(64 << 20),
                ..DiskSettings::default()
            },
            image: Some(self.path("base.raw")),
            size_bytes: Some(8 << 20),
            overflow_dir: Some(self.dir.path().into()),
            queues: Some(4),
            vhost_user: Some(self.path("vhost")),
            nbd: Some(self.path("nbd")),
            control: Some(self.path("control")),
            ..ServeSettings::default()
        }
    }

    /// The same in another mode.
    pub fn options_in(&self, mode: Mode) -> ServeSettings {
        let settings = self.options().settings;
        let settings = DiskSettings {
            mode: Some(mode),
            ram_bytes: settings.ram_bytes.filter(|_| mode.has_ram()),
            overflow_bytes: settings.overflow_bytes.filter(|_| mode.has_log()),
            ..settings
        };
        let overflow_dir = mode.has_file().then(|| self.dir.path().into());
        ServeSettings { settings, overflow_dir, ..self.options() }
    }

    pub fn start(&self, role: &str, options: ServeSettings) -> Result<Supervisor, SupervisorError> {
        let arguments = [
            format!("{ROLE}={role}"),
            std::env::current_exe().unwrap().display().to_string(),
            "--exact".into(),
            "world::stand_in".into(),
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

    pub fn serving(&self, role: &str) -> Supervisor {
        let mut supervisor = self.start(role, self.options()).unwrap();
        assert_eq!(supervisor.ready(&[]).unwrap(), None);
        supervisor
    }

    pub fn logged(&self, what: &str) -> bool {
        self.lines.lock().unwrap().iter().any(|line| line.contains(what))
    }

    pub fn left(&self) -> Vec<String> {
        let names = std::fs::read_dir(self.dir.path()).unwrap();
        let mut names: Vec<_> = names.map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        names
    }
}

/// Runs the supervisor while another thread does the clients' part.
pub fn meanwhile<T: Send>(supervisor: &mut Supervisor, clients: impl FnOnce() -> T + Send) -> T {
    let (mut done, stop) = UnixStream::pair().unwrap();
    std::thread::scope(|scope| {
        let clients = scope.spawn(move || {
            let result = clients();
            done.write_all(b".").unwrap();
            result
        });
        // Also ends when the thread panics: then the other end is closed.
        supervisor.run(&[stop.as_fd()], None).unwrap();
        clients.join().unwrap()
    })
}

pub fn ask(stream: &mut UnixStream, request: &str) -> serde_json::Value {
    writeln!(stream, "{request}").unwrap();
    let mut line = String::new();
    BufReader::new(stream).read_line(&mut line).unwrap();
    serde_json::from_str(&line).unwrap()
}

pub fn connect(path: &PathBuf) -> UnixStream {
    let stream = UnixStream::connect(path).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
    stream
}

pub fn greeting(stream: &UnixStream) -> String {
    let mut line = String::new();
    BufReader::new(stream).read_line(&mut line).unwrap();
    line
}
