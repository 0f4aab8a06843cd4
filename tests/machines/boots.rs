//! Machines have turns to boot, and catalogs start in an order.

use crate::world::{BOOT, World};
use serde_json::Value;
use std::time::{Duration, Instant};

/// A daemon with these options.
fn world(options: &[&str]) -> Option<World> {
    let mut world = World::new("qemu")?;
    world.kill_daemon();
    world.options.extend(options.iter().map(|option| option.to_string()));
    world.start_daemon();
    Some(world)
}

fn is_ready(machine: &Value) -> bool {
    machine["status"]["ready"] == true
}

/// Whether it is written down that a machine is ready. A new daemon says so of none before it has looked.
fn is_recorded_ready(world: &World, name: &str) -> bool {
    let run = std::fs::read_to_string(world.machines().join(name).join("run.json"));
    run.is_ok_and(|run| run.contains("\"ready\": true"))
}

/// Names of the machines of a catalog whose QEMU runs.
fn with_vmm(world: &World, catalog: &str) -> Vec<String> {
    let qemus = world.processes().into_iter().filter(|process| process.contains("qemu-system"));
    let named = qemus.filter_map(|line| Some(line.split(" -name ").nth(1)?.split(' ').next()?.to_owned()));
    named.filter(|name| name.starts_with(catalog)).collect()
}

#[test]
fn of_many_machines_few_boot_at_a_time() {
    const MACHINES: usize = 20;
    let Some(mut world) = world(&["--boots-at-once", "2", "--vcpu-overcommit", "10000"]) else { return };
    world.import("golden", "version-1");
    world.catalog("desk", MACHINES as u32, &["--image", "golden", "--ready", "serial:^GUEST-UP"]);
    world.ok(&["machine", "start", "--catalog", "desk"]);
    let (mut most, mut has_waited, mut left) = (0, false, MACHINES);
    let until = Instant::now() + BOOT;
    while left > 0 {
        // What is not ready now was not ready when its QEMU was seen.
        let running = with_vmm(&world, "desk");
        let booting: Vec<_> = running.iter().filter(|name| !is_recorded_ready(&world, name)).collect();
        assert!(booting.len() <= 2, "{booting:?}");
        most = most.max(booting.len());
        let machines = world.list(Some("desk"));
        let waits = |machine: &Value| {
            let message = machine["status"]["message"].as_str().unwrap_or_default();
            machine["status"]["phase"] == "starting" && message.ends_with(" machines boot before it")
        };
        has_waited |= machines.iter().any(waits);
        let ready = machines.iter().filter(|machine| is_ready(machine)).count();
        left = MACHINES - ready;
        assert!(Instant::now() < until, "{left} are not ready");
        if ready >= MACHINES / 4 && !world.options.iter().any(|option| option == "--claim-ttl") {
            // The next daemon finds those that boot, and gives no turn too many.
            world.options.extend(["--claim-ttl", "1h"].map(String::from));
            world.kill_daemon();
            world.start_daemon();
        }
        // Between two samples: to look all the time would take the processors that the guests boot with.
        std::thread::sleep(Duration::from_millis(50));
    }
    assert!(most == 2 && has_waited, "{most}");
}

#[test]
fn a_machine_that_is_never_ready_does_not_keep_others_from_booting() {
    let Some(world) = world(&["--boots-at-once", "1", "--boot-patience", "4"]) else { return };
    world.import("golden", "version-1");
    world.catalog("stuck", 1, &["--image", "golden", "--ready", "serial:^never"]);
    world.catalog("desk", 3, &["--image", "golden", "--ready", "serial:^GUEST-UP"]);
    world.ok(&["machine", "start", "stuck-001"]);
    world.until("stuck-001", "running", |machine| machine["status"]["phase"] == "running");
    world.ok(&["machine", "start", "desk-001"]);
    let waits = |machine: &Value| machine["status"]["message"] == "1 machine boots before it";
    world.until("desk-001", "waiting", waits);
    assert!(with_vmm(&world, "desk").is_empty());
    // A wait for the machine goes on while it waits for its turn.
    world.ok(&["machine", "start", "desk-001", "--wait"]);
    assert!(is_ready(&world.machine("desk-001")) && !is_ready(&world.machine("stuck-001")));
    // One that waits is stopped like any other.
    world.ok(&["machine", "restart", "stuck-001", "--force"]);
    world.until("stuck-001", "starting", |machine| machine["status"]["run"]["vmm_pid"].is_null());
    world.until("stuck-001", "running", |machine| machine["status"]["phase"] == "running");
    world.ok(&["machine", "start", "desk-002"]);
    world.until("desk-002", "waiting", waits);
    world.ok(&["machine", "stop", "desk-002", "--wait"]);
    // Its turn is another's, and it does not come for it later.
    world.ok(&["machine", "start", "desk-003", "--wait"]);
    assert!(is_ready(&world.machine("desk-003")));
    assert_eq!(world.machine("desk-002")["status"]["phase"], "stopped");
    assert_eq!((with_vmm(&world, "desk-002"), with_vmm(&world, "desk-003").len()), (vec![], 1));
}

#[test]
fn catalogs_start_one_after_the_other() {
    let Some(mut world) = world(&["--boots-at-once", "0"]) else { return };
    world.import("golden", "version-1");
    // As after a boot of the host, nobody has asked for them, and they may all start at the same time.
    world.ok(&["host", "close", "--wait"]);
    let ready = ["--image", "golden", "--ready", "serial:^GUEST-UP", "--autostart"];
    world.catalog("late", 2, &[&ready[..], &["--start-order", "5", "--start-delay", "2"]].concat());
    world.catalog("early", 2, &ready);
    world.ok(&["host", "open"]);
    let early = ["early-001", "early-002"];
    let (mut has_waited, mut ready_since, mut has_died) = (false, None, false);
    let until = Instant::now() + BOOT;
    let starts = loop {
        // What runs now has started when the others were ready.
        let late = with_vmm(&world, "late");
        let ready = early.iter().filter(|name| is_recorded_ready(&world, name)).count();
        assert!(late.is_empty() || ready == 2, "{late:?}");
        if ready == 2 {
            ready_since.get_or_insert_with(Instant::now);
        }
        if late.len() == 2 {
            break Instant::now();
        }
        let message = world.machine("late-002")["status"]["message"].as_str().unwrap_or_default().to_owned();
        has_waited |= message.contains("of a lower start_order");
        assert!(Instant::now() < until, "{message}");
        if ready == 1 && !has_died {
            has_died = true;
            world.kill_daemon();
            world.start_daemon();
        }
        std::thread::sleep(Duration::from_millis(50));
    };
    assert!(has_waited && starts - ready_since.unwrap() > Duration::from_secs(1));
    for name in ["late-001", "late-002"] {
        world.until(name, "ready", is_ready);
    }
    // Who asks for a machine does not wait for others, and a daemon that begins lets run what runs.
    let before = ["late-001", "early-001"].map(|name| world.pid(name, "vmm_pid"));
    world.set("early", &["ready = \"serial:^never\""]);
    world.ok(&["machine", "restart", "early-002", "--force"]);
    world.kill_daemon();
    world.start_daemon();
    world.ok(&["machine", "stop", "late-002", "--force", "--wait"]);
    world.ok(&["machine", "start", "late-002", "--wait"]);
    assert!(!is_ready(&world.machine("early-002")));
    assert_eq!(["late-001", "early-001"].map(|name| world.pid(name, "vmm_pid")), before);
}
