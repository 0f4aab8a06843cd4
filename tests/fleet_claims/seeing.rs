//! What the daemons of a fleet show of all hosts: events, figures, and where Prometheus finds these.

use crate::world::World;
use serde_json::{Value, json};
use spillway_testkit::disk;
use std::collections::BTreeMap;
use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

/// How long an event may take on a busy machine.
const PATIENCE: Duration = Duration::from_secs(60);

fn spillway(socket: &Path, arguments: &[&str]) -> Command {
    let mut command = Command::new(disk::program().unwrap());
    command.args(arguments).env("SPILLWAY_SOCKET", socket);
    command
}

fn printed(command: &mut Command) -> String {
    let done = command.output().unwrap();
    assert!(done.status.success(), "{command:?}: {}", String::from_utf8_lossy(&done.stderr));
    String::from_utf8(done.stdout).unwrap()
}

fn curl(socket: &Path, more: &[&str], path: &str) -> Command {
    let mut curl = Command::new("curl");
    curl.args(["--silent", "--show-error", "--no-buffer", "--fail", "--unix-socket"]).arg(socket).args(more);
    curl.arg(format!("http://localhost{path}"));
    curl
}

/// Claims a machine of a host, which raises an event there. Returns the machine.
fn claim(socket: &Path) -> String {
    let claim = printed(&mut spillway(socket, &["machine", "claim", "runner"]));
    claim.split_whitespace().next().unwrap().to_owned()
}

/// A program that prints events of the fleet, a line each, and those that it has printed.
struct Follower {
    child: Child,
    lines: Receiver<Value>,
    seen: Vec<Value>,
}

impl Follower {
    fn start(mut command: Command) -> Follower {
        let mut child = command.stdout(Stdio::piped()).spawn().unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap()).lines();
        let (told, heard) = channel();
        std::thread::spawn(move || {
            for line in lines.map_while(Result::ok) {
                // Either the line of the command, or of a server-sent event.
                if let Ok(event) = serde_json::from_str(line.strip_prefix("data:").unwrap_or(&line))
                    && told.send(event).is_err()
                {
                    return;
                }
            }
        });
        Follower { child, lines: heard, seen: Vec::new() }
    }

    /// Waits for the event of a claim. Returns its id.
    fn until_claimed(&mut self, host: &str, machine: &str) -> String {
        let until = Instant::now() + PATIENCE;
        loop {
            let event = self.lines.recv_timeout(until.saturating_duration_since(Instant::now()));
            let event =
                event.unwrap_or_else(|e| panic!("no claim of {host}/{machine} ({e}): {:#?}", self.seen));
            self.seen.push(event.clone());
            if event["host"] == host && is_claim_of(&event, machine) {
                return event["event"]["id"].as_str().unwrap().to_owned();
            }
        }
    }

    /// Of each host: no event comes twice, and each comes after those before it. None is left out, except of h0, whose daemon is killed: the
    /// last ones before that may be lost.
    fn check_order(&self) {
        let mut last: BTreeMap<&str, u64> = BTreeMap::new();
        for seen in self.seen.iter().filter(|seen| !seen["event"].is_null()) {
            let number = number(seen["event"]["id"].as_str().unwrap());
            let host = seen["host"].as_str().unwrap();
            let follows = |before| number == before + 1 || host == "h0" && number > before;
            assert!(last.insert(host, number).is_none_or(follows), "{seen:#} in {:#?}", self.seen);
        }
    }
}

impl Drop for Follower {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn is_claim_of(event: &Value, machine: &str) -> bool {
    event["event"]["kind"] == "claimed" && event["event"]["object"] == format!("machine/{machine}")
}

fn number(id: &str) -> u64 {
    id.rsplit_once('-').unwrap().1.parse().unwrap()
}

#[test]
fn what_all_hosts_do_is_seen_through_any_of_them() {
    let mut world = World::new(3, 2);
    let sockets = world.sockets();
    let mut follower =
        Follower::start(spillway(&sockets[0], &["fleet", "event", "--follow", "--last", "50", "--json"]));
    let first = claim(&sockets[2]);
    let known = follower.until_claimed("h2", &first);

    // The daemon that is asked ends, and comes back.
    world.hosts[0].kill();
    let second = claim(&sockets[2]);
    world.hosts[0].start();
    follower.until_claimed("h2", &second);
    follower.check_order();

    // Another daemon goes on after an event that somebody knows.
    let body = json!({ "after": { "h2": known } }).to_string();
    let asked = ["--header", "content-type: application/json", "--data", &body];
    let mut other = Follower::start(curl(&sockets[1], &asked, "/v1/fleet/event-stream"));
    other.until_claimed("h2", &second);
    other.check_order();
    let mut of_host = other.seen.iter().filter(|seen| seen["host"] == "h2" && !seen["event"].is_null());
    let next = of_host.next().unwrap();
    assert_eq!(number(next["event"]["id"].as_str().unwrap()), number(&known) + 1, "{next:#}");

    let listed = printed(&mut spillway(&sockets[1], &["fleet", "event", "--last", "500"]));
    assert!(listed.contains(&format!("machine/{first}")) && listed.contains("h0"), "{listed}");
    figures_of_all(&mut world);
}

fn figures_of_all(world: &mut World) {
    let sockets = world.sockets();
    let figures = |world: &World| world.hosts[1].send("GET", "/v1/fleet/figures", "")["hosts"].clone();
    world.until("all hosts give figures", |world| {
        figures(world).as_array().unwrap().iter().all(|host| host["figures"].is_object())
    });
    let targets: Value =
        serde_json::from_str(&printed(&mut curl(&sockets[1], &[], "/v1/fleet/prometheus-targets"))).unwrap();
    for (target, host) in targets.as_array().unwrap().iter().zip(["h0", "h1", "h2"]) {
        assert_eq!(
            (&target["labels"]["instance"], &target["targets"][0]),
            (&json!(host), &json!("localhost"))
        );
        let path = format!("{}?machines=true", target["labels"]["__metrics_path__"].as_str().unwrap());
        let metrics = printed(&mut curl(&sockets[1], &[], &path));
        assert!(metrics.contains(&format!("machine=\"runner-{host}-001\"")), "{host}: {metrics}");
    }
    assert_eq!(targets.as_array().unwrap().len(), 3);

    let top = printed(&mut spillway(&sockets[1], &["fleet", "top", "--once"]));
    assert!(["h0", "h1", "h2"].iter().all(|host| top.lines().any(|line| line.starts_with(host))), "{top}");
    let top = printed(&mut spillway(&sockets[1], &["fleet", "top", "--per", "catalog", "--once"]));
    assert!(top.lines().any(|line| line.starts_with("runner")), "{top}");

    world.hosts[2].kill();
    let left = figures(world);
    assert!(left[1]["figures"].is_object() && left[2]["figures"].is_null(), "{left:#}");
    assert!(left[2]["unreachable"].as_str().is_some_and(|why| !why.is_empty()), "{left:#}");
}
