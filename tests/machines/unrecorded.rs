//! What a guest does while nothing can be recorded of it: a full disk, a folder that cannot be written. It is known when it can be,
//! and nobody gets the machine meanwhile.

use crate::world::{World, is_alive};
use std::fs;

/// Whether anything can be recorded of a machine: what is written first has a folder in its place, as root may write everywhere.
fn can_be_recorded(world: &World, machine: &str, can: bool) {
    let new = world.machines().join(machine).join("run.json.new");
    if can {
        return fs::remove_dir(new).unwrap();
    }
    fs::remove_file(&new).unwrap();
    fs::create_dir(new).unwrap();
}

/// Waits until it is told that a machine's record cannot be written.
fn assert_not_ready(world: &World, machine: &str) {
    let machine_status = world.until(machine, "told of", |m| {
        m["status"]["phase"] == "failed"
            && m["status"]["message"].as_str().is_some_and(|why| why.contains("cannot be written"))
    });
    assert_eq!(machine_status["status"]["ready"], false, "{machine_status:#}");
}

#[test]
fn the_end_of_a_guest_that_cannot_be_recorded_is_not_forgotten() {
    let Some(world) = World::new("qemu") else { return };
    world.import("golden", "version-1");
    world.catalog("desk", 1, &["--image", "golden"]);
    world.catalog("kiosk", 1, &["--image", "golden", "--reset", "guest-reboot"]);
    let both = ["desk-001", "kiosk-001"];
    world.ok(&[&["machine", "start", "--wait"][..], &both].concat());
    let vmms = both.map(|name| world.pid(name, "vmm_pid"));
    world.tell("kiosk-001", "markmine", "MARKED");
    both.iter().for_each(|name| can_be_recorded(&world, name, false));
    world.say("desk-001", "poweroff");
    world.say("kiosk-001", "reboot");
    for name in both {
        assert_not_ready(&world, name);
        let catalog = name.split('-').next().unwrap();
        let (code, _, error) = world.spillway(&["machine", "claim", catalog]);
        assert!(code == 73 && error.contains("is free and ready"), "{name}: {code} {error}");
    }
    assert!(vmms.iter().all(|pid| is_alive(*pid)), "they are held until it is recorded why they end");
    both.iter().for_each(|name| can_be_recorded(&world, name, true));
    world.until("desk-001", "off", |m| m["status"]["phase"] == "stopped" && m["power"] == "off");
    let kiosk = world.until("kiosk-001", "another VMM", |m| {
        m["status"]["phase"] == "running" && m["status"]["run"]["vmm_pid"] != vmms[1]
    });
    assert_eq!(kiosk["status"]["run"]["crashes"], 0);
    assert!(world.tell("kiosk-001", "state", "STATE").contains("mark= "), "it has forgotten");
}

#[test]
fn readiness_that_cannot_be_recorded_is_not_forgotten() {
    let Some(world) = World::new("qemu") else { return };
    world.import("golden", "version-1");
    // Its console says so once.
    world.catalog("pool", 1, &["--image", "golden", "--ready", "serial:^GUEST-UP"]);
    world.ok(&["machine", "start", "pool-001"]);
    world.until("pool-001", "started", |m| m["status"]["phase"] == "running");
    can_be_recorded(&world, "pool-001", false);
    assert_not_ready(&world, "pool-001");
    let vmm = world.pid("pool-001", "vmm_pid");
    can_be_recorded(&world, "pool-001", true);
    world.until("pool-001", "ready", |m| m["status"]["ready"] == true);
    assert_eq!(world.pid("pool-001", "vmm_pid"), vmm);
}
