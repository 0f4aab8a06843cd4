//! Limits that change while a disk is served, and what is told of it.

#![allow(clippy::unwrap_used, reason = "a test that fails here has failed")]

mod common;

use common::{PATIENCE, Server, World, finishes, qemu_io_command, refuses, spillway, until};
use serde_json::Value;
use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

const MIB: u64 = 1 << 20;

fn control(world: &World, command: &str, options: &[&str]) -> Command {
    let mut all = spillway();
    all.arg(command).arg(world.path("control")).args(options);
    all
}

fn serve(world: &World, options: &[&str]) -> Server {
    let mut serve = spillway();
    serve.arg("serve").arg("--image").arg(world.path("base.raw")).args(options);
    serve.arg("--nbd").arg(world.path("nbd")).arg("--control").arg(world.path("control"));
    if !options.contains(&"ram") {
        serve.arg("--overflow-dir").arg(world.dir.path());
    }
    Server::start(&mut serve)
}

fn set(world: &World, options: &[&str]) -> Value {
    let (code, out, err) = finishes(control(world, "set", options).arg("--json"));
    assert_eq!((code, err.as_str()), (0, ""), "{options:?}");
    serde_json::from_str(&out).unwrap()
}

fn figure(world: &World, pointer: &str) -> u64 {
    let (code, out, err) = finishes(&mut control(world, "stats", &["--json"]));
    assert_eq!((code, err.as_str()), (0, ""));
    serde_json::from_str::<Value>(&out).unwrap().pointer(pointer).and_then(Value::as_u64).unwrap()
}

/// Starts qemu-io on the disk.
fn begin(world: &World, commands: &[&str]) -> Child {
    let mut qemu_io = qemu_io_command(world, commands);
    qemu_io.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
}

/// Waits for its end, which must be a success.
fn succeeds(qemu_io: Child) {
    let output = qemu_io.wait_with_output().unwrap();
    let text =
        String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && !text.contains("failed") && !text.contains("error"), "{text}");
}

#[test]
fn limits_grow_beyond_their_start_and_fall_and_memory_comes_back() {
    let world = World::new();
    let server = serve(&world, &["--ram", "2M", "--overflow", "32M"]);
    assert_eq!(set(&world, &["--ram", "24M", "--overflow", "64M"])["ram_bytes"], 24 * MIB);
    succeeds(begin(&world, &["write -P 7 0 16M"]));
    assert_eq!(figure(&world, "/ram/used_bytes"), 16 * MIB);
    assert_eq!(figure(&world, "/overflow/limit_bytes"), 64 * MIB);
    let limits = set(&world, &["--ram", "1M", "--full", "fail", "--warn-at", "60"]);
    assert_eq!(
        (&limits["full"], &limits["warn_at"], &limits["critical_at"]),
        (&"fail".into(), &60.into(), &90.into())
    );
    until("the RAM tier is within its new limit", || figure(&world, "/ram/used_bytes") <= MIB);
    assert_eq!(figure(&world, "/ram/limit_bytes"), MIB);
    let memory = || {
        let fds = std::fs::read_dir(format!("/proc/{}/fd", server.pid().as_raw_nonzero())).unwrap();
        let data = fds.map(|fd| fd.unwrap().path()).find(|fd| {
            std::fs::read_link(fd).is_ok_and(|to| to.display().to_string().contains("spillway-data"))
        });
        std::os::unix::fs::MetadataExt::blocks(&std::fs::metadata(data.unwrap()).unwrap()) * 512
    };
    until("its memory is back", || memory() <= MIB + MIB / 4);
    succeeds(begin(&world, &["read -P 7 0 16M", "write -P 8 4M 1M", "read -P 8 4M 1M"]));
    // A new worker has the limits that hold, not those of the start.
    rustix::process::kill_process(server.worker_pid(), rustix::process::Signal::KILL).unwrap();
    until("another worker serves", || figure(&world, "/restarts") == 1);
    assert_eq!(figure(&world, "/ram/limit_bytes"), MIB);
    succeeds(begin(&world, &["read -P 7 0 4M", "read -P 8 4M 1M"]));
    assert_eq!(set(&world, &["--warn-at", "61"])["overflow_bytes"], 64 * MIB);
}

#[test]
fn what_cannot_be_is_refused_and_nothing_changes() {
    let world = World::new();
    let _server = serve(&world, &["--ram", "4M", "--overflow", "32M"]);
    succeeds(begin(&world, &["write -P 7 0 14M"]));
    let before = set(&world, &["--full", "pause"]);
    for (options, code, words) in [
        (&["--overflow", "16M", "--ram", "8M"][..], 75, &["overflow"][..]),
        (&["--ram", "4K"], 2, &["64K to 4T"]),
        (&["--ram", "4T"], 75, &["RAM limit", "available"]),
        (&["--ram", "8M", "--overflow", "5T"], 2, &["16M to 4T"]),
        (&["--warn-at", "95"], 75, &["warn_at", "95", "90"]),
        (&["--ram", "much"], 2, &["much"]),
        (&["--warn-at", "0"], 2, &["0"]),
        (&[], 2, &["--ram"]),
    ] {
        refuses(&mut control(&world, "set", options), code, words);
        assert_eq!(set(&world, &["--full", "pause"]), before, "{options:?}");
    }
    let mut elsewhere = spillway();
    refuses(
        elsewhere.args(["set", "/nowhere/socket", "--ram", "1M"]),
        69,
        &["/nowhere/socket", "no such socket"],
    );
    succeeds(begin(&world, &["read -P 7 0 14M"]));

    let small = World::new();
    let _server = serve(&small, &["--size", "64M", "--ram", "24M", "--overflow", "16M"]);
    succeeds(begin(&small, &["write -P 6 0 16M"]));
    let figures =
        || ["/ram/limit_bytes", "/ram/used_bytes", "/overflow/used_bytes"].map(|f| figure(&small, f));
    let before = figures();
    assert_eq!(before, [24 * MIB, 16 * MIB, 0]);
    // 15 MiB would have to leave, and 8 of 16 segments of 255 blocks are the collector's reserve.
    let room = "RAM limit 1.0 MiB is too small: 16.0 MiB are in use, and the overflow has space for 8.0 MiB";
    refuses(&mut control(&small, "set", &["--ram", "1M"]), 75, &[room]);
    assert_eq!(figures(), before);
    assert_eq!(set(&small, &["--full", "pause"])["ram_bytes"], 24 * MIB);
    succeeds(begin(&small, &["read -P 6 0 16M"]));

    let direct = World::new();
    let _server = serve(&direct, &["--mode", "direct"]);
    refuses(&mut control(&direct, "set", &["--ram", "8M"]), 75, &["it has no RAM tier"]);
    refuses(&mut control(&direct, "set", &["--full", "fail"]), 75, &["full", "direct"]);
}

#[test]
fn a_write_that_waits_goes_on_when_a_limit_rises() {
    for (start, raise) in [
        (&["--mode", "ram", "--ram", "2M"][..], ["--ram", "8M"]),
        (&["--ram", "1M", "--overflow", "16M"], ["--overflow", "64M"]),
        (&["--mode", "overflow", "--overflow", "16M"], ["--overflow", "64M"]),
    ] {
        let world = World::new();
        let server = serve(&world, &[start, &["--size", "32M"]].concat());
        let len = if start.contains(&"ram") { "6M" } else { "24M" };
        let writer = begin(&world, &[&format!("write -P 9 0 {len}"), &format!("read -P 9 0 {len}")]);
        // 8 of 16 segments of 255 blocks are the collector's reserve.
        let (tier, full) =
            if len == "6M" { ("/ram/used_bytes", 2 * MIB) } else { ("/overflow/used_bytes", 8 * 255 * 4096) };
        until("the write waits", || figure(&world, "/waiting") > 0 && figure(&world, tier) == full);
        set(&world, &raise);
        succeeds(writer);
        let (code, text) = server.end(rustix::process::Signal::TERM);
        assert_eq!(code, 0, "{text}");
        assert!(text.contains("limits: "), "{text}");
    }
}

#[test]
fn who_listens_is_told_of_each_crossing_once() {
    let world = World::new();
    let server = serve(&world, &["--mode", "ram", "--ram", "10M"]);
    let mut listener = control(&world, "events", &["--json"]).stdout(Stdio::piped()).spawn().unwrap();
    let lines = BufReader::new(listener.stdout.take().unwrap()).lines();
    let (sender, events) = std::sync::mpsc::channel();
    std::thread::spawn(move || lines.map_while(Result::ok).try_for_each(|line| sender.send(line)));
    let next = |patience| events.recv_timeout(patience).map(|l| serde_json::from_str::<Value>(&l).unwrap());
    // It listens once it has been told of something.
    let mut kinds = Vec::new();
    until("it listens", || {
        set(&world, &["--full", "pause"]);
        next(Duration::from_millis(50)).is_ok()
    });
    succeeds(begin(
        &world,
        &["write -P 1 0 7M", "write -P 1 7M 1536k", "write -P 1 0 1M", "write -P 1 8704k 1M"],
    ));
    succeeds(begin(&world, &["discard 8M 1536k", "write -P 1 8M 1536k", "discard 0 16M"]));
    while !kinds.contains(&"normal".to_string()) {
        let event = next(PATIENCE).unwrap();
        assert!(
            event["unix_ms"].as_u64().unwrap() > 1_700_000_000_000 && event["text"].is_string(),
            "{event}"
        );
        let kind = event["kind"].as_str().unwrap().to_owned();
        if kind != "limits" {
            kinds.push(kind);
        }
    }
    assert_eq!(kinds, ["warning", "critical", "warning", "critical", "normal"]);
    assert_eq!(figure(&world, "/level"), 0);
    let (code, text) = server.end(rustix::process::Signal::TERM);
    assert_eq!(code, 0, "{text}");
    assert!(text.contains("critical: 9") && text.contains("back to normal"), "{text}");
    assert!(listener.wait().unwrap().success(), "it ends with the server");
}
