//! `spillway top`, `spillway doctor`, `spillway event` and exit codes as people and scripts use them.
#![allow(clippy::unwrap_used)]

mod daemon_world;

use daemon_world::World;
use spillway_testkit::disk;
use std::io::{BufRead, BufReader, Read, Write};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc;
use std::time::{Duration, Instant};

fn with_catalog() -> World {
    let world = World::new();
    let file = world.path("a.raw").display().to_string();
    std::fs::File::create(&file).unwrap().set_len(1 << 20).unwrap();
    world.ok(&["image", "import", "debian", &file, "--format", "raw"]);
    world.ok(&["catalog", "create", "desk", "--image", "debian", "--count", "2"]);
    world
}

#[test]
fn top_is_a_table_where_there_is_no_terminal() {
    let world = with_catalog();
    let table = world.ok(&["top", "--by", "catalog"]);
    let lines: Vec<&str> = table.lines().collect();
    assert!(lines[0].starts_with("NAME") && lines[0].contains("FULL IN"), "{table}");
    assert!(lines[1].starts_with("desk") && lines[1].contains("0/2"), "{table}");
    let json = world.json(&["top", "--by", "catalog"]);
    assert_eq!(
        (&json["rows"][0]["name"], &json["rows"][0]["rates"]["writes"]),
        (&"desk".into(), &0.0.into())
    );
    assert_eq!(world.json(&["top", "--by", "catalog", "--filter", "other"])["rows"], serde_json::json!([]));
    let (code, _, err) = world.spillway(&["top", "--sort", "size"]);
    assert!(code == 2 && err.contains("written/s"), "{err}");
    let (code, _, err) = world.spillway(&["top", "--socket", "/nonexistent"]);
    assert!(code == 69 && err.contains("is spillwayd running?"), "{err}");
}

/// A process that does not outlive its test; with its terminal goes what runs on it.
struct Ended(Child);

impl Drop for Ended {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn top_is_live_on_a_terminal_and_leaves_it_as_it_was() {
    let world = with_catalog();
    let command = format!("stty cols 160 rows 20; {} top --by catalog", disk::program().unwrap().display());
    let mut script = Command::new("script");
    script
        .args(["-qfec", &command, "/dev/null"])
        .env("SPILLWAY_SOCKET", world.path("sock"))
        .env("TERM", "xterm");
    let mut top = Ended(script.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap());
    let (mut keys, mut screen) = (top.0.stdin.take().unwrap(), top.0.stdout.take().unwrap());
    let (sender, lines) = mpsc::channel();
    std::thread::spawn(move || {
        let mut bytes = [0; 4096];
        while let Ok(n @ 1..) = screen.read(&mut bytes) {
            let _ = sender.send(String::from_utf8_lossy(&bytes[..n]).into_owned());
        }
    });
    let mut seen = String::new();
    let mut until = |word: &str| {
        let end = Instant::now() + Duration::from_secs(20);
        while !seen.contains(word) {
            match lines.recv_timeout(end.saturating_duration_since(Instant::now())) {
                Ok(more) => seen.push_str(&more),
                Err(_) => panic!("{word} is not seen: {seen:?}"),
            }
        }
        std::mem::take(&mut seen)
    };
    // The other screen of the terminal, and what is on it. Only what changes is drawn: words, and parts of words.
    assert!(until("machines").contains("\x1b[?1049h"));
    keys.write_all(b"\t").unwrap();
    until("talog");
    keys.write_all(b"/nothing\r").unwrap();
    until("nothing");
    keys.write_all(b"q").unwrap();
    until("\x1b[?1049l");
    assert!(top.0.wait().unwrap().success());
}

#[test]
fn doctor_looks_at_everything_and_says_what_to_do() {
    let world = with_catalog();
    let (code, out, err) = world.spillway(&["doctor", "--json"]);
    let found: serde_json::Value = serde_json::from_str(&out).unwrap();
    let checks = found["checks"].as_array().unwrap();
    for check in [
        "kvm",
        "qemu",
        "qemu-img",
        "debugfs",
        "io_uring",
        "aio",
        "huge-pages",
        "memlock",
        "memory",
        "swap",
        "landlock",
        "seccomp",
        "cgroup",
        "spillwayd",
        "space",
        "machines",
    ] {
        let one = checks.iter().find(|one| one["check"] == check).unwrap_or_else(|| panic!("{check}: {out}"));
        let good = one["state"] == "ok";
        assert!(good == one["advice"].is_null() && !one["text"].as_str().unwrap().is_empty(), "{one}");
    }
    let problems = checks.iter().filter(|one| one["state"] == "problem").count();
    assert_eq!(
        (found["problems"].as_u64(), code, err.as_str()),
        (Some(problems as u64), i32::from(problems > 0), "")
    );
    assert!(
        checks
            .iter()
            .any(|one| one["check"] == "space" && one["text"].as_str().unwrap().contains("state/store"))
    );

    // Everybody may use the socket; no daemon at all; a program that is missing.
    use std::os::unix::fs::PermissionsExt;
    std::fs::set_permissions(world.path("sock"), std::fs::Permissions::from_mode(0o666)).unwrap();
    let (code, out, _) = world.spillway(&["doctor"]);
    assert!(code == 1 && out.contains("PROBLEM  spillwayd") && out.contains("root here"), "{out}");
    let none = Command::new(disk::program().unwrap())
        .args(["doctor", "--socket", "/nonexistent"])
        .env("PATH", "/nonexistent")
        .output()
        .unwrap();
    let out = String::from_utf8(none.stdout).unwrap();
    assert_eq!(none.status.code(), Some(1), "{out}");
    assert!(
        out.contains("notice   spillwayd") && out.contains("PROBLEM  qemu  ") && out.contains("do: apt-get"),
        "{out}"
    );
}

/// What a program says, line by line, as it says it.
fn lines(pipe: impl Read + Send + 'static) -> mpsc::Receiver<String> {
    let (sender, lines) = mpsc::channel();
    std::thread::spawn(move || {
        BufReader::new(pipe).lines().map_while(Result::ok).try_for_each(|line| sender.send(line).ok())
    });
    lines
}

#[test]
fn events_are_listed_and_followed_over_the_daemons_end() {
    let mut world = with_catalog();
    let machine = ["--object", "machine/desk-001"];
    // Of the machine: a store may be nearly full here, and that is told too.
    let of_it = |more: &[&'static str]| [&["event"], more, &machine].concat();
    assert_eq!(world.ok(&of_it(&[])), "TIME  KIND  OBJECT  WHAT\n");
    assert_eq!(world.ok(&of_it(&["--json"])), "");
    let mut command = world.command(&["event", "--follow", "--json", "--kind", "failed"]);
    let follow = command.args(machine).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn();
    let mut follow = Ended(follow.unwrap());
    let (events, notices) = (lines(follow.0.stdout.take().unwrap()), lines(follow.0.stderr.take().unwrap()));
    let next = |lines: &mpsc::Receiver<String>| {
        lines.recv_timeout(Duration::from_secs(20)).expect("nothing is told")
    };
    let event = || serde_json::from_str::<serde_json::Value>(&next(&events)).unwrap();

    // There is no program that could serve its disk.
    world.ok(&["machine", "start", "desk-001"]);
    let first = event();
    assert_eq!((&first["kind"], &first["object"]), (&"failed".into(), &"machine/desk-001".into()));
    assert!(first["text"].as_str().unwrap().contains("/nonexistent"));
    let table = world.ok(&of_it(&["--last", "1", "--kind", "failed"]));
    let rows: Vec<&str> = table.lines().collect();
    assert!(rows.len() == 2 && rows[1].contains("failed  machine/desk-001  "), "{table}");
    let (code, _, err) = world.spillway(&["event", "--kind", "fail"]);
    assert!(code == 2 && err.contains("failed") && err.contains("rolled-out"), "{err}");

    // It is tried again whenever somebody wants it, and by the next daemon, whose events continue this one's: none comes twice.
    let again = |world: &World| {
        ["stop", "start"].iter().for_each(|action| drop(world.ok(&["machine", action, "desk-001"])));
    };
    let id = |event: serde_json::Value| {
        let id = event["id"].as_str().unwrap().to_owned();
        let (history, number) = id.rsplit_once('-').unwrap();
        (history.to_owned(), number.parse::<u64>().unwrap())
    };
    let (history, mut last) = id(first);
    let mut follows = |event| {
        let (same, next) = id(event);
        assert!(same == history && next > last, "{same}-{next} after {history}-{last}");
        last = next;
    };
    for _ in 0..2 {
        again(&world);
        follows(event());
    }
    world.kill();
    assert!(next(&notices).contains("waiting for it"));
    world.start();
    assert!(next(&notices).contains("answers again"));
    follows(event());
    again(&world);
    follows(event());
}

#[test]
fn what_a_host_has_no_room_for_has_an_exit_code_of_its_own() {
    let world = World::with(|_| ["--ram-budget", "100M"].map(str::to_owned).into());
    let file = world.path("a.raw").display().to_string();
    std::fs::File::create(&file).unwrap().set_len(1 << 20).unwrap();
    world.ok(&["image", "import", "debian", &file, "--format", "raw"]);
    let create = ["catalog", "create", "desk", "--image", "debian", "--count", "2", "--ram"];
    let (code, _, err) = world.spillway(&[&create[..], &["128M"]].concat());
    let why = "a machine needs 128.0 MiB of cache, and this host has 100.0 MiB in all";
    assert!(code == 73 && err.contains(why), "{code} {err}");
    world.ok(&[&create[..], &["64M"]].concat());
    // It is promised its cache, and fails for another reason.
    world.spillway(&["machine", "start", "desk-001", "--wait"]);
    let (code, _, err) = world.spillway(&["machine", "start", "desk-002", "--wait"]);
    assert!(
        code == 73 && err.contains("needs 64.0 MiB of cache, and 1 others have 64.0 MiB of 100.0 MiB"),
        "{code} {err}"
    );
    let machine = world.json(&["machine", "show", "desk-002"]);
    assert_eq!(
        (&machine["status"]["phase"], &machine["status"]["code"]),
        (&"waiting".into(), &"exhausted".into())
    );
    let host = world.ok(&["host", "show"]);
    assert!(
        host.contains("RAM tiers  64.0 MiB of 100.0 MiB") && host.contains("waiting    1 machines"),
        "{host}"
    );
    world.ok(&["machine", "stop", "desk-002", "--wait"]);
    assert!(world.json(&["machine", "show", "desk-002"])["status"]["code"].is_null());
}
