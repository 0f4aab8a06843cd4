//! Figures of machines: what is counted over their ends, and what a disk that hangs costs.

use crate::world::{World, kill};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use spillway_testkit::process::{send_signal, wait_until};
use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdout, Command, Stdio};
use std::time::{Duration, Instant};

const MIB: u64 = 1 << 20;

fn exposition(world: &World, path: &str) -> String {
    let (head, body) = world.ask("GET", path, "");
    assert!(head.contains("text/plain; version=0.0.4"), "{head}");
    body
}

/// A sample's value.
fn metric(world: &World, sample: &str) -> Option<f64> {
    let text = exposition(world, "/v1/metrics?machines=true");
    let line = text.lines().find_map(|line| line.strip_prefix(sample)?.strip_prefix(' ').map(str::to_owned));
    line.map(|value| value.parse().unwrap())
}

fn catalog(world: &World) -> Value {
    world.object("/v1/figures")["catalogs"][0].clone()
}

/// Waits for the catalog's figures to be so.
fn until(world: &World, what: &str, is: impl Fn(&Value) -> bool) -> Value {
    let found = wait_until(Duration::from_secs(10), || {
        // Figures may be of the moment before it was made.
        Some(catalog(world)).filter(|found| !found.is_null() && is(found))
    });
    found.unwrap_or_else(|| panic!("{what}: {:#}", catalog(world)))
}

/// A client of a machine's disk that stays connected.
struct Writer {
    qemu_io: Child,
    said: BufReader<ChildStdout>,
}

impl Writer {
    fn of(world: &World, machine: &str) -> Writer {
        let socket = world.machine(machine)["status"]["run"]["nbd_socket"].as_str().unwrap().to_owned();
        let mut qemu_io = Command::new("qemu-io")
            .args(["-f", "raw", &format!("nbd+unix:///?socket={socket}")])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let said = BufReader::new(qemu_io.stdout.take().unwrap());
        let mut writer = Writer { qemu_io, said };
        writer.does("read 0 512", "read 512/512");
        writer
    }

    fn write(&mut self, mib: u64) {
        self.does(&format!("write -P 7 0 {mib}M"), "wrote");
    }

    fn does(&mut self, command: &str, says: &str) {
        writeln!(self.qemu_io.stdin.as_mut().unwrap(), "{command}").unwrap();
        let mut line = String::new();
        while !line.contains(says) {
            line.clear();
            assert_ne!(self.said.read_line(&mut line).unwrap(), 0, "{command}");
        }
    }
}

impl Drop for Writer {
    fn drop(&mut self) {
        self.qemu_io.kill().unwrap();
        self.qemu_io.wait().unwrap();
    }
}

fn write(world: &World, machine: &str, mib: u64) {
    qemu_io(world, machine, &[&format!("write -P 7 0 {mib}M")]);
}

fn qemu_io(world: &World, machine: &str, commands: &[&str]) {
    let socket = world.machine(machine)["status"]["run"]["nbd_socket"].as_str().unwrap().to_owned();
    let commands = commands.iter().flat_map(|command| ["-c", command]);
    let done = Command::new("qemu-io")
        .args(["-f", "raw"])
        .args(commands)
        .arg(format!("nbd+unix:///?socket={socket}"))
        .output()
        .unwrap();
    assert!(done.status.success(), "{done:?}");
}

fn written(catalog: &Value) -> u64 {
    catalog["counters"]["guest"]["written_bytes"].as_u64().unwrap()
}

#[test]
fn what_was_written_stays_counted_whatever_becomes_of_the_machine() {
    let Some(mut world) = World::new("none") else { return };
    world.import("golden", "version-1");
    world.ok(&["catalog", "create", "desk", "--image", "golden", "--count", "3", "--ram", "8M"]);
    world.ok(&["machine", "start", "desk-001", "desk-002", "--wait"]);
    write(&world, "desk-001", 1);
    let first = until(&world, "1 MiB", |c| written(c) == MIB);
    assert_eq!(first["machines"]["running"], 2);
    assert_eq!((&first["disks"], &first["levels"]["ram_used_bytes"]), (&2.into(), &MIB.into()));
    assert_eq!(first["spared_bytes"], 0, "it may still be written to the disk");

    // A machine that is stopped, one whose disk is killed: what was last seen of them counts.
    write(&world, "desk-001", 2);
    world.ok(&["machine", "stop", "desk-001", "--wait"]);
    let stopped = until(&world, "3 MiB", |c| written(c) == 3 * MIB);
    assert_eq!(stopped["spared_bytes"], 3 * MIB, "it never was");
    write(&world, "desk-002", 1);
    until(&world, "4 MiB", |c| written(c) == 4 * MIB);
    let disk = world.pid("desk-002", "disk_pid");
    kill(disk);
    world.until("desk-002", "served again", |m| {
        m["status"]["phase"] == "running" && m["status"]["run"]["disk_pid"] != disk
    });
    write(&world, "desk-002", 1);
    until(&world, "5 MiB", |c| written(c) == 5 * MIB);
    let sample = r#"spillway_catalog_written_bytes_total{catalog="desk",plane="guest"}"#;
    assert_eq!(metric(&world, sample), Some(5.0 * MIB as f64));
    let of_one = r#"spillway_machine_written_bytes_total{catalog="desk",machine="desk-001",plane="guest"}"#;
    assert_eq!(metric(&world, of_one), Some(3.0 * MIB as f64));
    assert!(
        !exposition(&world, "/v1/metrics").contains("machine="),
        "labels are bounded unless it is asked for"
    );
    assert!(metric(&world, r#"spillway_events_total{kind="stopped"}"#) >= Some(1.0));
    assert!(metric(&world, r#"spillway_api_requests_total{code="200"}"#) > Some(5.0));
    assert!(metric(&world, r#"spillway_store_free_bytes{store="default"}"#) > Some(1e6));

    // The next daemon counts from 0, and only what happens from then on.
    world.kill_daemon();
    world.start_daemon();
    world.until("desk-002", "running", |m| m["status"]["phase"] == "running");
    until(&world, "asked", |c| c["disks"] == 1 && written(c) == 0);
    write(&world, "desk-002", 1);
    until(&world, "1 MiB", |c| written(c) == MIB);
    world.ok(&["machine", "stop", "desk-002", "--wait"]);
    let ended = until(&world, "stopped", |c| c["levels"]["ram_used_bytes"] == 0);
    assert_eq!((written(&ended), &ended["spared_bytes"]), (MIB, &(2 * MIB).into()));
}

#[test]
fn a_disk_that_hangs_costs_its_own_figures_only() {
    let Some(world) = World::new("none") else { return };
    world.import("golden", "version-1");
    world.ok(&["catalog", "create", "desk", "--image", "golden", "--count", "4", "--ram", "8M"]);
    world.ok(&["machine", "start", "--catalog", "desk", "--wait"]);
    until(&world, "all of them", |c| c["disks"] == 4 && c["unresponsive_disks"] == 0);
    let disk = Pid::from_raw(world.pid("desk-003", "disk_pid") as i32).unwrap();
    let mut guest = Writer::of(&world, "desk-003");
    send_signal(disk, Signal::STOP).unwrap();
    // Who answers for the disk hangs, and who serves it does not: what it counts is seen without asking anybody.
    guest.write(2);
    until(&world, "2 MiB more", |c| written(c) == 2 * MIB);
    until(&world, "one is unresponsive", |c| c["disks"] == 3 && c["unresponsive_disks"] == 1);
    let begun = Instant::now();
    let unresponsive = r#"spillway_catalog_disks_unresponsive{catalog="desk"}"#;
    assert_eq!(metric(&world, unresponsive), Some(1.0));
    assert!(begun.elapsed() < Duration::from_secs(2), "{:?}", begun.elapsed());
    let limit = 32.0 * MIB as f64;
    let sample = r#"spillway_catalog_ram_limit_bytes{catalog="desk"}"#;
    assert_eq!(metric(&world, sample), Some(limit), "its last known figures");
    guest.write(3);
    until(&world, "5 MiB", |c| written(c) == 5 * MIB);
    kill_process(disk, Signal::CONT).unwrap();
    until(&world, "it is back", |c| c["disks"] == 4);
    assert_eq!(written(&catalog(&world)), 5 * MIB);
}

/// Number of requests, and the bound that this share of them did not exceed.
fn quantile(histogram: &Value, share: f64) -> (u64, u64) {
    let list = |name: &str| histogram[name].as_array().unwrap().iter().map(|n| n.as_u64().unwrap());
    let count: u64 = list("counts").sum();
    let rank = ((count as f64 * share).ceil() as u64).max(1);
    let mut seen = 0;
    let found = list("bounds_ns").zip(list("counts")).find(|(_, n)| {
        seen += n;
        seen >= rank
    });
    (count, found.map_or(0, |(bound, _)| bound))
}

#[test]
fn one_disk_says_how_long_its_requests_took_and_where_it_was_written() {
    let Some(world) = World::new("none") else { return };
    world.import("golden", "version-1");
    world.ok(&["catalog", "create", "desk", "--image", "golden", "--count", "2", "--ram", "8M"]);
    world.ok(&["machine", "start", "desk-001", "--wait"]);
    let writes: Vec<String> = (0..40).map(|n| format!("write -P 7 {}k 4k", n % 8 * 4)).collect();
    let writes = writes.iter().map(String::as_str).chain(["write -P 8 8M 512k", "read 0 4k"]);
    qemu_io(&world, "desk-001", &writes.collect::<Vec<_>>());
    let latency = world.object("/v1/machines/desk-001/latency");
    assert_eq!(latency["disk_pid"], world.pid("desk-001", "disk_pid"));
    let stats = &world.json(&["machine", "stats", "desk-001"])["latency"];
    for operation in ["read", "write", "overflow_write"] {
        for (share, key) in [(0.5, "p50_ns"), (0.99, "p99_ns")] {
            let (count, bound) = quantile(&latency[operation], share);
            let middle = stats[operation][key].as_u64().unwrap();
            assert_eq!(count, stats[operation]["count"], "{operation}");
            assert!(bound >= middle && bound <= middle + middle / 16, "{operation} {key}: {bound} {middle}");
        }
    }
    assert!(quantile(&latency["write"], 0.5).0 >= 41 && quantile(&latency["chunk"], 0.5) == (0, 0));

    let dirty = world.object("/v1/machines/desk-001/dirty-ranges");
    assert_eq!((&dirty["written_bytes"], &dirty["ranges_total"]), (&((160 + 512) << 10).into(), &2.into()));
    let ranges = dirty["ranges"].as_array().unwrap();
    let starts: Vec<_> = ranges.iter().map(|r| (&r["offset_bytes"], &r["written_bytes"])).collect();
    let [hot, cold] = [(8 * MIB, 512 << 10), (0, 160 << 10)].map(|(at, bytes)| (at.into(), bytes.into()));
    assert_eq!(starts, [(&hot.0, &hot.1), (&cold.0, &cold.1)]);
    let first = world.object("/v1/machines/desk-001/dirty-ranges?limit=1");
    assert_eq!((first["ranges"].as_array().unwrap().len(), &first["ranges_total"]), (1, &2.into()));

    let table = world.ok(&["machine", "stats", "desk-001", "--dirty", "--top", "1"]);
    assert!(table.contains(" 8388608 ") && table.contains("1 more with 160.0 KiB"), "{table}");

    for (path, status) in [
        ("desk-001/dirty-ranges?limit=0", 400),
        ("desk-001/dirty-ranges?limit=1001", 400),
        ("desk-002/latency", 409),
        ("desk-002/dirty-ranges", 409),
        ("desk-003/latency", 404),
    ] {
        assert_eq!(world.status(&format!("/v1/machines/{path}")), status, "{path}");
    }
    let disk = Pid::from_raw(world.pid("desk-001", "disk_pid") as i32).unwrap();
    send_signal(disk, Signal::STOP).unwrap();
    std::thread::sleep(Duration::from_millis(500));
    let begun = Instant::now();
    assert_eq!(world.status("/v1/machines/desk-001/latency"), 503);
    assert!(begun.elapsed() < Duration::from_secs(5), "{:?}", begun.elapsed());
    kill_process(disk, Signal::CONT).unwrap();
}

#[test]
fn a_catalog_names_its_fullest_machine_and_adds_the_curves_of_all() {
    let Some(world) = World::new("none") else { return };
    world.import("golden", "version-1");
    let create = ["catalog", "create", "desk", "--image", "golden", "--count", "3", "--ram", "8M"];
    world.ok(&[&create[..], &["--overflow", "32M"]].concat());
    assert_eq!(world.status("/v1/catalogs/desk/curve"), 409);
    assert_eq!(world.status("/v1/catalogs/none/curve"), 404);
    world.ok(&["machine", "start", "desk-001", "desk-002", "--wait"]);
    let empty = until(&world, "both", |c| c["disks"] == 2);
    assert!(empty["fullest"].is_null() && empty["first_full"].is_null(), "{empty}");
    write(&world, "desk-001", 1);
    write(&world, "desk-002", 3);
    let filled = until(&world, "it grows", |c| c["fullest"]["used_bytes"] == 3 * MIB);
    let name = "desk-002";
    assert_eq!(
        (&filled["fullest"]["name"], &filled["fullest"]["limit_bytes"]),
        (&name.into(), &(40 * MIB).into())
    );
    assert_eq!(filled["first_full"]["name"], name);
    let seconds = filled["first_full"]["seconds"].as_u64().unwrap();
    assert!(seconds < 13 * 30, "3 MiB in these seconds, and 37 are left: {seconds}");

    let [one, other] =
        ["desk-001", "desk-002"].map(|name| world.object(&format!("/v1/machines/{name}/curve")));
    let sum = world.object("/v1/catalogs/desk/curve");
    assert_eq!(
        (&sum["machines"], &sum["disks"], &sum["written_bytes"]),
        (&2.into(), &2.into(), &(4 * MIB).into())
    );
    let most = |key: &str| one[key].as_u64().max(other[key].as_u64());
    for key in ["zero_overflow_bytes", "recommended_bytes"] {
        assert_eq!(sum[key].as_u64(), most(key), "{key}");
    }
    let least = |curve: &Value| curve["curve"][0].clone();
    assert_eq!(least(&sum)["ram_bytes"], least(&one)["ram_bytes"].clone());
    let evicted = |curve: &Value| least(curve)["overflow_write_bytes"].as_u64().unwrap();
    assert_eq!(evicted(&sum), evicted(&one) + evicted(&other), "{sum}");

    world.ok(&["machine", "stop", "desk-002", "--wait"]);
    let left = until(&world, "the other", |c| c["fullest"]["name"] == "desk-001");
    assert_ne!(left["first_full"]["name"], name, "{left}");
}
