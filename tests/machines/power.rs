//! What a power loss leaves behind, made by hand: files that were removed are there again, others are not.

use crate::world::{World, is_alive, kill, signal};
use rustix::process::Signal;
use serde_json::Value;
use spillway_testkit::process::wait_until;
use std::fs;
use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;

/// A daemon that serves disks for others, all of whose processes are killed at once.
struct Host(World);

impl Host {
    fn new() -> Option<Host> {
        World::new("none").map(Host)
    }

    fn file(&self, machine: &str, name: &str) -> PathBuf {
        self.0.machines().join(machine).join(name)
    }

    /// The daemon and a machine's disk end without a word; so many processes of others are left.
    fn goes_down(&mut self, machine: &str, left: usize) {
        let disk = self.0.pid(machine, "disk_pid");
        self.0.kill_daemon();
        kill(disk);
        let gone = || (self.0.processes().len() == left).then_some(());
        wait_until(Duration::from_secs(20), gone).expect("its disk lives on");
    }

    /// What is written down of a machine's run is of an earlier start of the host.
    fn has_started_again(&self, machine: &str) {
        let path = self.file(machine, "run.json");
        let mut run: Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
        run["boot"] = "another".into();
        fs::write(&path, run.to_string()).unwrap();
    }

    /// Whether a machine's disk begins with zeroes where its image has some.
    fn is_as_its_image(&self, machine: &str) -> bool {
        let socket = self.0.machine(machine)["status"]["run"]["nbd_socket"].as_str().unwrap().to_owned();
        let read = ["-f", "raw", "-c", "read -P 0 4096 4096", &format!("nbd+unix:///?socket={socket}")];
        Command::new("qemu-io").args(read).status().unwrap().success()
    }
}

#[test]
fn a_copy_that_somebody_had_is_given_to_nobody() {
    let Some(mut host) = Host::new() else { return };
    host.0.import("golden", "version-1");
    let cache = host.0.path("cache");
    host.0.ok(&["store", "add", "cache", cache.to_str().unwrap(), "--class", "cache"]);
    host.0.ok(&["catalog", "create", "copy", "--image", "golden", "--count", "1", "--mode", "ephemeral"]);
    let identity = host.0.machine("copy-001")["identity"]["uuid"].as_str().unwrap().to_owned();
    let copy = cache.join("copies").join(format!("copy-001-{identity}.raw"));
    let comes_back = || fs::write(&copy, vec![7; 16 << 20]).unwrap();

    // Of a run that nobody knows any more.
    fs::create_dir_all(copy.parent().unwrap()).unwrap();
    comes_back();
    host.0.ok(&["machine", "start", "copy-001", "--wait"]);
    assert!(host.is_as_its_image("copy-001"));

    // Of one that is written down, and none of whose processes is.
    host.goes_down("copy-001", 0);
    host.has_started_again("copy-001");
    fs::remove_file(host.file("copy-001", "disk.process")).unwrap();
    comes_back();
    host.0.start_daemon();
    host.0.until("copy-001", "running", |m| m["status"]["phase"] == "running");
    assert!(host.is_as_its_image("copy-001"));
    assert!(!copy.exists(), "its server has it");
}

#[test]
fn a_record_that_is_gone_or_damaged_is_its_own_machines_trouble() {
    let Some(mut host) = Host::new() else { return };
    host.0.import("golden", "version-1");
    host.0.ok(&["catalog", "create", "desk", "--image", "golden", "--count", "2"]);
    host.0.ok(&["machine", "start", "desk-001", "desk-002", "--wait"]);
    let runs =
        |world: &World, name: &str| world.until(name, "running", |m| m["status"]["phase"] == "running");
    let count = |world: &World| world.processes().len();
    let damages = |host: &Host| fs::write(host.file("desk-001", "run.json"), "{\"uuid\":").unwrap();

    // A folder that was being removed, of whose disk nobody knows any more.
    host.0.kill_daemon();
    fs::remove_file(host.file("desk-001", "run.json")).unwrap();
    host.0.start_daemon();
    let machine = runs(&host.0, "desk-001");
    assert_eq!((&machine["status"]["run"]["crashes"], count(&host.0)), (&0.into(), 4));

    // Cut off while nothing of it runs: it says nothing that matters.
    host.goes_down("desk-001", 2);
    damages(&host);
    host.0.start_daemon();
    assert_eq!(runs(&host.0, "desk-001")["status"]["run"]["crashes"], 0);

    // Damaged while it runs: it goes on, and so does everybody else.
    let disks = ["desk-001", "desk-002"].map(|name| host.0.pid(name, "disk_pid"));
    host.0.kill_daemon();
    damages(&host);
    host.0.start_daemon();
    runs(&host.0, "desk-002");
    let failed = host.0.until("desk-001", "failed", |m| m["status"]["phase"] == "failed");
    let why = failed["status"]["message"].as_str().unwrap();
    assert!(why.contains("run.json is damaged") && why.contains("machine stop desk-001"), "{why}");
    assert!(disks.iter().all(|pid| is_alive(*pid)));
    host.0.ok(&["machine", "stop", "desk-001", "--wait"]);
    assert_eq!(count(&host.0), 2, "{:?}", host.0.processes());
    assert!(!host.0.machines().join("desk-001").exists());
    host.0.ok(&["machine", "start", "desk-001", "--wait"]);
}

#[test]
fn a_kept_disk_that_has_not_ended_cleanly_is_told_of() {
    let Some(host) = Host::new() else { return };
    host.0.import("golden", "version-1");
    host.0.ok(&["catalog", "create", "own", "--image", "golden", "--count", "1", "--type", "dedicated"]);
    for (hangs, events) in [(false, 0), (true, 1), (false, 1)] {
        host.0.ok(&["machine", "start", "own-001", "--wait"]);
        if hangs {
            let worker = host.0.processes().into_iter().find(|process| process.contains("__worker")).unwrap();
            signal(worker.split(' ').next().unwrap().parse().unwrap(), Signal::STOP);
        }
        host.0.ok(&["machine", "stop", "own-001", "--wait"]);
        assert_eq!(host.0.events("its disk has not ended cleanly"), events);
    }
}

#[test]
fn what_only_a_disks_process_kept_is_not_lost_without_a_word() {
    let Some(host) = Host::new() else { return };
    host.0.import("golden", "version-1");
    host.0.ok(&["catalog", "create", "still", "--image", "golden", "--count", "1", "--reset", "never"]);
    for events in [0, 1] {
        host.0.ok(&["machine", "start", "still-001", "--wait"]);
        host.0.ok(&["machine", "stop", "still-001", "--wait"]);
        assert_eq!(host.0.processes().len(), 2, "it is served on");
        assert_eq!(host.0.events("and with it what was written"), events);
        let event_raised = || (host.0.events("and with it what was written") == events + 1).then_some(());
        kill(host.0.pid("still-001", "disk_pid"));
        wait_until(Duration::from_secs(20), event_raised).expect("it is not told of");
    }
}

#[test]
fn a_deleted_machine_that_keeps_files_has_its_grace_unless_they_go_too() {
    let Some(world) = World::new("qemu") else { return };
    world.import("golden", "version-1");
    for (with_data, left) in [(None, 1), (Some("--with-data"), 0)] {
        world.catalog("own", 1, &["--image", "golden", "--type", "dedicated", "--grace", "0"]);
        world.ok(&["machine", "start", "own-001", "--wait"]);
        // What holds for machines that run too.
        let spec: Value = serde_json::from_str(&world.get("/v1/catalogs/own")).unwrap();
        let mut spec = spec["spec"].clone();
        spec["grace_seconds"] = 300.into();
        world.ask("PUT", "/v1/catalogs/own", &spec.to_string());
        let run = world.machines().join("own-001/run.json");
        let is_written =
            || fs::read_to_string(&run).unwrap().contains("\"grace_seconds\": 300").then_some(());
        wait_until(Duration::from_secs(20), is_written).expect("its grace is not known");
        let vmm = world.pid("own-001", "vmm_pid");
        world.ok(&[&["catalog", "delete", "own"][..], with_data.as_slice()].concat());
        let has_ended = || (!is_alive(vmm)).then_some(());
        if with_data.is_none() {
            // Its guest does not hear the power button.
            assert_eq!(wait_until(Duration::from_secs(3), has_ended), None);
            kill(vmm);
        }
        wait_until(Duration::from_secs(20), has_ended).expect("it has no grace");
        wait_until(Duration::from_secs(20), || world.processes().is_empty().then_some(())).unwrap();
        let leftovers = world.json(&["leftover", "list"])["items"].as_array().unwrap().len();
        assert_eq!(leftovers, left);
        let kept = || fs::read_dir(world.path("state/store/disks")).map_or(0, Iterator::count);
        assert!(with_data.is_some() || kept() == 1);
        for leftover in world.json(&["leftover", "list"])["items"].as_array().unwrap() {
            world.ok(&["leftover", "delete", leftover["uuid"].as_str().unwrap()]);
        }
        wait_until(Duration::from_secs(20), || (kept() == 0).then_some(())).expect("its disk's file is left");
    }
}

#[test]
fn a_host_is_closed_when_nothing_runs_any_more() {
    let Some(world) = World::new("qemu") else { return };
    world.import("golden", "version-1");
    world.catalog("desk", 3, &["--image", "golden", "--grace", "1"]);
    world.catalog("own", 1, &["--image", "golden", "--type", "dedicated", "--grace", "1"]);
    world.ok(&["machine", "start", "--all", "--wait"]);
    let running = world.processes().len();
    // One is not understood any more, and runs on; another is deleted while its guest has its grace.
    fs::write(world.machines().join("desk-002/run.json"), "{").unwrap();
    world.ok(&["machine", "undrain", "desk-002"]);
    world.until("desk-002", "failed", |machine| machine["status"]["phase"] == "failed");
    assert_eq!(world.processes().len(), running, "they run on");
    world.ok(&["catalog", "delete", "own"]);
    let closed = world.ok(&["host", "close", "--wait"]);
    assert!(closed.contains("closed: no machine starts") && closed.contains("0 machines run"), "{closed}");
    assert_eq!(world.processes(), [""; 0]);
    world.ok(&["host", "open"]);
    world.ok(&["machine", "start", "desk-002", "--wait"]);
    world.ok(&["host", "close", "--wait", "--timeout", "60"]);
    assert_eq!(world.processes(), [""; 0]);
}
