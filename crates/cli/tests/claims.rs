//! What becomes of a claim whose command fails or is interrupted, before a small stand-in for the daemon, which says when it answers.

#![allow(clippy::unwrap_used, reason = "a test that fails here has failed")]

mod common;

use common::until;
use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};
use spillway_api::{ErrorCode, Problem};
use std::io::{Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Barrier, Mutex};

const DELETE_OF_FLEET: &str = "DELETE /v1/fleet/hosts/host-b/api/v1/machines/runner-1/claim?claim=id-1";
const DELETE: &str = "DELETE /v1/machines/runner-1/claim?claim=id-1";

/// What the stand-in does with a request.
enum Reply {
    Json(u16, Value),
    /// It reads until the client has gone.
    Silence,
    /// It closes the connection.
    Cut,
}

/// A request that the stand-in has got.
#[derive(Clone)]
struct Asked {
    /// Method and path.
    line: String,
    key: Option<String>,
}

struct StandIn {
    asked: Arc<Mutex<Vec<Asked>>>,
    dir: tempfile::TempDir,
}

/// How a command has ended.
struct Ended {
    code: Option<i32>,
    out: String,
    err: String,
}

impl StandIn {
    /// Answers each request by its method and path, and its number, counted from 0.
    fn start(reply: impl Fn(&str, usize) -> Reply + Send + Sync + 'static) -> StandIn {
        let dir = tempfile::Builder::new().prefix("spw").tempdir().unwrap();
        let listener = UnixListener::bind(dir.path().join("sock")).unwrap();
        let asked = Arc::new(Mutex::new(Vec::new()));
        let (all, reply) = (Arc::clone(&asked), Arc::new(reply));
        std::thread::spawn(move || {
            for stream in listener.incoming() {
                let (mut stream, all, reply) = (stream.unwrap(), Arc::clone(&all), Arc::clone(&reply));
                std::thread::spawn(move || {
                    let Some(asked) = read(&mut stream) else { return };
                    let line = asked.line.clone();
                    let number = {
                        let mut all = all.lock().unwrap();
                        all.push(asked);
                        all.len() - 1
                    };
                    answer(stream, reply(&line, number));
                });
            }
        });
        StandIn { asked, dir }
    }

    /// Starts a command.
    fn spawn(&self, arguments: &str, stdout: Stdio) -> Child {
        let mut command = Command::new(env!("CARGO_BIN_EXE_spillway"));
        command.args(arguments.split(' ')).arg("--socket").arg(self.dir.path().join("sock"));
        command.env_remove("SPILLWAY_HOST").stdin(Stdio::null()).stdout(stdout).stderr(Stdio::piped());
        command.spawn().unwrap()
    }

    /// Runs a command to its end.
    fn run(&self, arguments: &str) -> Ended {
        end(self.spawn(arguments, Stdio::piped()))
    }

    /// Runs a command and sends it a signal as soon as there was a request that begins so.
    fn interrupt(&self, arguments: &str, at: &str, signal: Signal) -> Ended {
        let child = self.spawn(arguments, Stdio::piped());
        until(at, || self.has(at));
        kill_process(Pid::from_child(&child), signal).unwrap();
        end(child)
    }

    fn has(&self, begin: &str) -> bool {
        self.asked.lock().unwrap().iter().any(|asked| asked.line.starts_with(begin))
    }
}

fn end(child: Child) -> Ended {
    let done = child.wait_with_output().unwrap();
    let text = |bytes| String::from_utf8(bytes).unwrap();
    Ended { code: done.status.code(), out: text(done.stdout), err: text(done.stderr) }
}

fn read(stream: &mut UnixStream) -> Option<Asked> {
    let mut text = String::new();
    let mut byte = [0];
    while !text.ends_with("\r\n\r\n") {
        stream.read_exact(&mut byte).ok()?;
        text.push(byte[0].into());
    }
    let header = |name: &str| {
        let mut values = text.lines().filter_map(|line| line.split_once(": "));
        values.find(|(found, _)| *found == name).map(|(_, value)| value.to_owned())
    };
    let length = header("content-length").map_or(0, |length| length.parse().unwrap());
    stream.read_exact(&mut vec![0; length]).ok()?;
    let line = text.lines().next().unwrap().trim_end_matches(" HTTP/1.1").to_owned();
    Some(Asked { line, key: header("idempotency-key") })
}

fn answer(mut stream: UnixStream, reply: Reply) {
    match reply {
        Reply::Json(status, body) => {
            let body = body.to_string();
            let head = format!("HTTP/1.1 {status} X\r\nconnection: close\r\ncontent-length: {}", body.len());
            // The client may have gone.
            let _ = stream.write_all(format!("{head}\r\n\r\n{body}").as_bytes());
        }
        Reply::Silence => _ = stream.read_to_end(&mut Vec::new()),
        Reply::Cut => {}
    }
}

/// The claimed machine, which starts.
fn machine() -> Value {
    json!({
        "name": "runner-1", "catalog": "runner", "number": 1, "created": "2026-01-01T00:00:00Z", "power": "on", "drained": false,
        "identity": { "uuid": "u", "mac": "m" },
        "claim": { "id": "id-1", "owner": "ci", "labels": {}, "ttl_seconds": 60, "left_seconds": 50, "since": "2026-01-01T00:00:00Z" },
        "status": { "phase": "starting", "ready": false, "settled": false, "permanent": false },
    })
}

fn claim(is_repeated: bool) -> Reply {
    let fence = json!({ "host_epoch": 1, "revision": 1 });
    Reply::Json(
        200,
        json!({ "host": "host-b", "machine": machine(), "address": null, "claim": "id-1", "fence": fence, "request": "job-1",
            "is_repeated": is_repeated }),
    )
}

/// Answers a claim of the fleet, lets the client wait for the machine, and releases it.
fn fleet(is_repeated: bool) -> impl Fn(&str, usize) -> Reply {
    move |line, _| match line.split_once(' ').unwrap().0 {
        "POST" => claim(is_repeated),
        "DELETE" => Reply::Json(200, machine()),
        _ => Reply::Silence,
    }
}

const WAITS: &str = "GET /v1/fleet/hosts/host-b/api/v1/machines/runner-1?wait=";
const ASKS: &str = "POST /v1/fleet/catalogs/runner/claims";
const STAYS: [&str; 3] =
    ["the claim of host-b/runner-1 stays", "job-1", "spillway fleet release host-b/runner-1 --claim id-1"];

#[track_caller]
fn ends(ended: &Ended, code: i32, words: &[&str]) {
    let Ended { code: got, out, err } = ended;
    assert!(*got == Some(code) && out.is_empty(), "{got:?} {out} {err}");
    for word in words {
        assert!(err.contains(word), "'{word}' is not in: {err}");
    }
}

/// Without its id, a release would end the claim of whoever has the machine by then.
#[test]
fn a_claim_that_has_ended_before_its_answer_releases_nothing() {
    let daemon = StandIn::start(|_, _| {
        let mut machine = machine();
        machine["claim"] = Value::Null;
        Reply::Json(200, machine)
    });
    ends(&daemon.run("machine claim runner --wait"), 75, &["runner-1: its claim has ended"]);
    assert!(!daemon.has("DELETE"));
}

#[test]
fn an_interrupted_claim_of_a_fleet_is_undone() {
    for (signal, arguments) in [
        (Signal::INT, "fleet claim runner --wait"),
        (Signal::TERM, "fleet claim runner --wait --key job-1"),
        (Signal::HUP, "fleet claim runner --wait --timeout 30"),
    ] {
        let daemon = StandIn::start(fleet(false));
        let ended = daemon.interrupt(arguments, WAITS, signal);
        ends(&ended, 130, &["interrupted", "the claim of host-b/runner-1 is undone"]);
        assert!(daemon.has(DELETE_OF_FLEET), "{arguments}");
    }
}

/// With an id that was made here nobody else can have the claim, also if the answer to the first request is lost.
#[test]
fn a_claim_of_a_fleet_whose_answer_is_awaited_is_undone() {
    for arguments in ["fleet claim runner", "fleet claim runner --wait"] {
        let daemon = StandIn::start(|line, number| match (line, number) {
            (_, 0) => Reply::Silence,
            (line, _) => fleet(true)(line, number),
        });
        let ended = daemon.interrupt(arguments, ASKS, Signal::INT);
        ends(&ended, 130, &["interrupted", "the claim of host-b/runner-1 is undone"]);
        assert!(daemon.has(DELETE_OF_FLEET), "{arguments}");
        let asked = daemon.asked.lock().unwrap();
        let is_first: Vec<_> = asked.iter().map(|asked| asked.line.contains("first=true")).collect();
        assert_eq!(is_first, [true, false, false], "{arguments}");
        assert!(asked[0].key.is_some() && asked[0].key == asked[1].key);
    }
    let daemon = StandIn::start(|line, number| match number {
        0 => Reply::Silence,
        _ if line.starts_with("POST") => {
            Reply::Json(409, json!(Problem::new(ErrorCode::Exhausted, "no machine is free")))
        }
        _ => Reply::Cut,
    });
    ends(&daemon.interrupt("fleet claim runner", ASKS, Signal::INT), 130, &["nothing is claimed"]);
}

#[test]
fn a_claim_of_a_fleet_that_another_run_uses_is_not_undone() {
    let wait = "fleet claim runner --wait --key job-1";
    let daemon = StandIn::start(fleet(true));
    ends(&daemon.interrupt(wait, WAITS, Signal::INT), 130, &STAYS);
    assert!(!daemon.has("DELETE"));

    let daemon =
        StandIn::start(|line, number| if number == 0 { Reply::Silence } else { fleet(true)(line, number) });
    ends(&daemon.interrupt("fleet claim runner --key job-1", ASKS, Signal::INT), 130, &STAYS);
    assert!(!daemon.has("DELETE"));

    let daemon = StandIn::start(fleet(true));
    ends(&daemon.run(&format!("{wait} --timeout 0")), 75, &STAYS);
    assert!(!daemon.has("DELETE"));

    let (reader, writer) = std::io::pipe().unwrap();
    drop(reader);
    ends(&end(daemon.spawn("fleet claim runner --key job-1", writer.into())), 73, &STAYS);
    assert!(!daemon.has("DELETE"));
}

/// The daemon does not hold the first answer back until the machine is ready: only it says whether another run uses the claim.
#[test]
fn a_claim_with_a_key_is_answered_before_its_machine_is_ready() {
    let daemon = StandIn::start(fleet(false));
    daemon.interrupt("fleet claim runner --wait --key job-1", WAITS, Signal::INT);
    assert_eq!(daemon.asked.lock().unwrap()[0].line, format!("{ASKS}?wait=0"));
}

#[test]
fn a_second_signal_does_not_end_the_release() {
    for (arguments, wait, delete) in [
        ("fleet claim runner --wait", WAITS, DELETE_OF_FLEET),
        ("machine claim runner --wait", "GET /v1/machines/runner-1?wait=", DELETE),
    ] {
        let second = Arc::new(Barrier::new(2));
        let sent = Arc::clone(&second);
        let daemon = StandIn::start(move |line, number| {
            if line.starts_with("DELETE") {
                sent.wait();
            }
            either(line, number)
        });
        let child = daemon.spawn(arguments, Stdio::piped());
        let interrupt = || kill_process(Pid::from_child(&child), Signal::INT).unwrap();
        until(wait, || daemon.has(wait));
        interrupt();
        until(delete, || daemon.has(delete));
        interrupt();
        second.wait();
        ends(&end(child), 130, &["interrupted", "is undone"]);
    }
}

/// Answers claims of a fleet and of a host.
fn either(line: &str, number: usize) -> Reply {
    if line.starts_with("POST /v1/catalogs") {
        Reply::Json(200, machine())
    } else {
        fleet(false)(line, number)
    }
}

#[test]
fn a_claim_that_cannot_be_undone_is_named() {
    let cut = |line: &str, number| if line.starts_with("DELETE") { Reply::Cut } else { either(line, number) };
    let of_fleet = ["may last", "spillway fleet release host-b/runner-1 --claim id-1", "--key job-1"];
    let of_host = ["may last", "spillway machine release runner-1 --claim id-1"];
    for (arguments, words) in [
        ("fleet claim runner --wait --timeout 0", &of_fleet[..]),
        ("machine claim runner --wait --timeout 0", &of_host),
    ] {
        let ended = StandIn::start(cut).run(arguments);
        ends(&ended, 69, words);
        assert!(!ended.err.contains("is undone"), "{}", ended.err);
    }
    let ended = StandIn::start(cut).interrupt("fleet claim runner --wait", WAITS, Signal::INT);
    ends(&ended, 69, &of_fleet);
}

#[test]
fn an_error_after_which_a_claim_may_be_there_names_its_key() {
    let refusal = |code| move |_: &str, _: usize| Reply::Json(500, json!(Problem::new(code, "why")));
    let named = |daemon: &StandIn, code| {
        let ended = daemon.run("fleet claim runner --wait --timeout 0");
        let key = daemon.asked.lock().unwrap()[0].key.clone().unwrap();
        ends(&ended, code, &[]);
        ended.err.contains(&format!("--key {key}"))
    };
    assert!(named(&StandIn::start(|_, _| Reply::Cut), 69));
    assert!(named(&StandIn::start(refusal(ErrorCode::Internal)), 70));
    assert!(named(&StandIn::start(refusal(ErrorCode::Unavailable)), 69));
    assert!(!named(&StandIn::start(refusal(ErrorCode::Exhausted)), 73));
    assert!(!named(&StandIn::start(refusal(ErrorCode::Forbidden)), 77));
}

/// The answer does not say whether another run has made the claim.
#[test]
fn a_claim_of_a_host_with_a_key_is_not_undone() {
    let daemon = StandIn::start(either);
    let wait = "GET /v1/machines/runner-1?wait=";
    let stays = ["the claim of runner-1 stays", "job-1", "spillway machine release runner-1 --claim id-1"];
    ends(&daemon.interrupt("machine claim runner --wait --key job-1", wait, Signal::INT), 130, &stays);
    ends(&daemon.run("machine claim runner --wait --key job-1 --timeout 0"), 75, &stays);
    assert!(!daemon.has("DELETE"));
    let asks = "POST /v1/catalogs/runner/claims";
    let daemon = StandIn::start(|_, _| Reply::Silence);
    let ended = daemon.interrupt("machine claim runner --wait --key job-1", asks, Signal::INT);
    ends(&ended, 130, &["the request job-1", "the claim stays"]);
    assert_eq!(daemon.asked.lock().unwrap().len(), 1);
}
