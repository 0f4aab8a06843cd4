//! Figures of machines: what is counted over their ends, and what a disk that hangs costs.

use crate::world::{World, kill};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use spillway_testkit::process::wait_until;
use std::process::Command;
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

fn write(world: &World, machine: &str, mib: u64) {
    let socket = world.machine(machine)["status"]["run"]["nbd_socket"].as_str().unwrap().to_owned();
    let command = format!("write -P 7 0 {mib}M");
    let done = Command::new("qemu-io")
        .args(["-f", "raw", "-c", &command, &format!("nbd+unix:///?socket={socket}")])
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
    kill_process(disk, Signal::STOP).unwrap();
    until(&world, "one is unresponsive", |c| c["disks"] == 3 && c["unresponsive_disks"] == 1);
    let begun = Instant::now();
    let unresponsive = r#"spillway_catalog_disks_unresponsive{catalog="desk"}"#;
    assert_eq!(metric(&world, unresponsive), Some(1.0));
    assert!(begun.elapsed() < Duration::from_secs(2), "{:?}", begun.elapsed());
    let limit = 32.0 * MIB as f64;
    let sample = r#"spillway_catalog_ram_limit_bytes{catalog="desk"}"#;
    assert_eq!(metric(&world, sample), Some(limit), "its last known figures");
    kill_process(disk, Signal::CONT).unwrap();
    until(&world, "it is back", |c| c["disks"] == 4);
}
