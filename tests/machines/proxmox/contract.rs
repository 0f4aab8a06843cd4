//! Each method of the plugin, against a daemon.

use super::{CLONE, MACHINE, MIB, Node, TEMPLATE, io, worker};
use crate::world::{BOOT, World, is_alive, kill};
use serde_json::json;
use spillway_testkit::process::wait_until;
use spillway_testkit::{has_program, skip};
use std::process::Command;

#[test]
fn the_plugin_is_one_that_proxmox_loads() {
    let Some(world) = World::new("none") else { return };
    let Some(mut node) = Node::new(&world) else { return };
    // Proxmox refuses what is newer than its own API, and warns of what is older.
    for (theirs, ours) in [(10, 10), (11, 11), (12, 12), (15, 15), (16, 15)] {
        assert_eq!(node.ok("api", json!({ "api": theirs })), ours);
    }
    let about = node.ok("about", json!({}));
    assert_eq!(about["data"]["content"], json!([{ "images": 1 }, { "images": 1 }]));
    assert_eq!(about["data"]["format"], json!([{ "raw": 1 }, "raw"]));
    assert!(about["options"]["shared"].is_null(), "what is on one node is not on the others");
    for (name, property) in about["properties"].as_object().unwrap() {
        assert!(name.starts_with("spillway-"), "names of properties are those of all plugins: {name}");
        assert!(!property["description"].as_str().unwrap().is_empty());
        assert_eq!(about["options"][name]["optional"], 1);
        // In another folder, the plugin would not find the disks, records and marks of this one.
        let is_place = ["spillway-dir", "spillway-state", "spillway-socket"].contains(&&**name);
        assert_eq!(about["options"][name]["fixed"] == 1, is_place, "{name}");
    }
    assert_eq!(node.ok("status", json!({})), json!([1000, 600, 400, 1]));

    for (volume, parts) in [
        ("vm-101-disk-0", json!(["images", "vm-101-disk-0", "101", null, null, null, "raw"])),
        ("vm-101-cloudinit", json!(["images", "vm-101-cloudinit", "101", null, null, null, "raw"])),
        (TEMPLATE, json!(["images", TEMPLATE, "9000", null, null, 1, "raw"])),
        (CLONE, json!(["images", "vm-101-disk-0", "101", TEMPLATE, "9000", null, "raw"])),
    ] {
        assert_eq!(node.of("parse", volume), parts);
    }
    for volume in
        ["", "..", "vm-101-disk-0\n", "vm-1-disk-0", "vm-101-disk-0/..", "../vm-101-disk-0", "/etc/passwd"]
    {
        for call in ["parse", "path", "free", "activate", "size"] {
            assert!(
                node.refused(call, json!({ "volume": volume })).contains("unable to parse"),
                "{volume:?}"
            );
        }
    }
    // Names of storages that the daemon has no names for, and settings that lead elsewhere.
    for storage in ["Desks", "desks_1", "desks.x", &"s".repeat(31)] {
        assert!(node.refused("add", json!({ "storage": storage })).contains("lower-case letters"));
    }
    node.ok("add", json!({ "storage": "s".repeat(30) }));
    for folder in ["relative", "/var/lib/../../etc", "/a b", "/a;b", "/a\n"] {
        let refused = node.refused("activate_storage", json!({ "config": { "spillway-dir": folder } }));
        assert!(refused.contains("plain absolute path"), "{refused}");
    }
    let away = world.path("nobody");
    let refused = node.refused(
        "activate_storage",
        json!({ "config": { "spillway-dir": world.path("pve"), "spillway-socket": away } }),
    );
    assert!(refused.contains("nobody") && refused.contains("host show"), "{refused}");
}

/// Disks and daemon are gone, and the daemon comes back.
pub fn lose_power(world: &mut World) {
    let disk = world.pid(MACHINE, "disk_pid");
    let worker = worker(world, MACHINE);
    world.kill_daemon();
    kill(disk);
    // Without a client the worker does not outlive its supervisor.
    wait_until(BOOT, || (!is_alive(disk) && !is_alive(worker)).then_some(())).expect("they end");
    world.start_daemon();
}

#[test]
fn a_disk_becomes_a_template_and_its_clones_forget() {
    let Some(mut world) = World::new("none") else { return };
    let Some(mut node) = Node::new(&world) else { return };
    if !has_program("qemu-io") {
        return skip("qemu-io is not installed: run 'make install-deps'");
    }
    node.template_and_clone();
    let sizes = [(format!("desks:{TEMPLATE}"), 16 * MIB), (format!("desks:{CLONE}"), 16 * MIB)];
    assert_eq!(node.volumes(), sizes);
    let spec = world.json(&["catalog", "show", "desks-base-9000-disk-0"])["spec"].clone();
    assert_eq!(
        (&spec["ram_bytes"], &spec["full"], &spec["vmm"]),
        (&json!(8 * MIB), &json!("fail"), &json!("external"))
    );

    // Proxmox activates a volume that is active, for backups and moves: nothing of it is lost.
    node.of("activate", CLONE);
    assert!(io(&mut node, CLONE, "write -P 7 1M 64k"));
    node.of("activate", CLONE);
    assert!(io(&mut node, CLONE, "read -P 7 1M 64k"));
    world.kill_daemon();
    world.start_daemon();
    node.of("activate", CLONE);
    assert!(io(&mut node, CLONE, "read -P 7 1M 64k"), "a daemon's end is no end of a disk");
    // The end of a run forgets, as often as it is told.
    node.of("deactivate", CLONE);
    node.of("deactivate", CLONE);
    node.of("activate", CLONE);
    assert!(io(&mut node, CLONE, "read -P 0 1M 64k") && io(&mut node, CLONE, "read -P 118 0 1"));

    // The VM ends while the daemon is away. It is forgotten before it is used again.
    assert!(io(&mut node, CLONE, "write -P 8 1M 64k"));
    world.kill_daemon();
    assert!(node.refused("deactivate", json!({ "volume": CLONE })).contains("machine stop"));
    world.start_daemon();
    assert!(io(&mut node, CLONE, "read -P 8 1M 64k"), "it is there still");
    node.of("activate", CLONE);
    assert!(io(&mut node, CLONE, "read -P 0 1M 64k"));
    assert!(io(&mut node, CLONE, "write -P 8 1M 64k"));
    node.of("activate", CLONE);
    assert!(io(&mut node, CLONE, "read -P 8 1M 64k"), "once, and not again");

    lose_power(&mut world);
    node.of("activate", CLONE);
    assert!(io(&mut node, CLONE, "read -P 0 1M 64k"));
}

#[test]
fn disks_grow_while_the_vm_is_off() {
    let Some(world) = World::new("none") else { return };
    let Some(mut node) = Node::new(&world) else { return };
    node.template_and_clone();
    let size = |volume: &str, bytes: u64| json!({ "volume": volume, "bytes": bytes });
    node.of("activate", CLONE);
    let running = json!({ "volume": CLONE, "bytes": 32 * MIB, "running": 1 });
    assert!(node.refused("resize", running).contains("shut it down first"));
    // A move has activated it, and the VM is off.
    node.ok("resize", size(CLONE, 32 * MIB - 1024));
    assert_eq!(node.of("size", CLONE)[0], 32 * MIB);
    assert!(node.refused("resize", size(CLONE, 16 * MIB)).contains("shrink"));
    for saved in [json!({ "lock": "suspended" }), json!({ "vmstate": "local:vm-101-state-suspend" })] {
        node.ok("configure", json!({ "vmid": 101, "properties": saved }));
        assert!(node.refused("resize", size(CLONE, 64 * MIB)).contains("hibernated"));
    }
    node.ok("configure", json!({ "vmid": 101, "properties": {} }));
    assert!(node.refused("resize", size(TEMPLATE, 32 * MIB)).contains("template"));
    for bytes in [json!("-1"), json!("1T"), json!("9".repeat(30)), json!(null)] {
        node.refused("resize", json!({ "volume": CLONE, "bytes": bytes }));
    }
    assert_eq!(node.of("size", TEMPLATE)[0], 16 * MIB);

    assert_eq!(node.ok("alloc", json!({ "vmid": 101, "kib": 1024 })), "vm-101-disk-1");
    node.ok("resize", size("vm-101-disk-1", 2 * MIB));
    assert_eq!(node.of("size", "vm-101-disk-1")[0], 2 * MIB);
    assert!(node.refused("resize", size("vm-101-disk-1", MIB)).contains("shrink"));
    // QEMU makes it larger itself.
    node.ok("resize", json!({ "volume": "vm-101-disk-1", "bytes": 4 * MIB, "running": 1 }));
    assert_eq!(node.of("size", "vm-101-disk-1")[0], 2 * MIB);
}

#[test]
fn names_are_free_and_what_is_gone_is_gone() {
    let Some(world) = World::new("none") else { return };
    let Some(mut node) = Node::new(&world) else { return };
    node.template_and_clone();
    // Files, templates and clones of a VM have numbers of their own.
    assert_eq!(node.ok("alloc", json!({ "vmid": 9000, "kib": 528 })), "vm-9000-disk-1");
    assert_eq!(node.of("create_base", "vm-9000-disk-1"), "base-9000-disk-1");
    let firmware = node.ok("clone", json!({ "volume": "base-9000-disk-1", "vmid": 101 }));
    assert_eq!(firmware, "base-9000-disk-1/vm-101-disk-1");
    node.of("activate", "base-9000-disk-1/vm-101-disk-1");
    assert_eq!(
        node.of("size", "base-9000-disk-1/vm-101-disk-1")[0],
        528 << 10,
        "UEFI wants its size exactly"
    );
    assert_eq!(node.ok("alloc", json!({ "vmid": 101, "kib": 64 })), "vm-101-disk-2");
    assert_eq!(node.ok("alloc", json!({ "vmid": 101, "kib": "64.5" })), "vm-101-disk-3");
    assert_eq!(node.of("size", "vm-101-disk-3")[0], 65 << 10, "no less than was asked for");
    let named = node.ok("alloc", json!({ "vmid": 101, "kib": 4096, "name": "vm-101-cloudinit" }));
    assert_eq!(named, "vm-101-cloudinit");
    assert!(
        node.refused("alloc", json!({ "vmid": 101, "kib": 4096, "name": "vm-101-cloudinit" }))
            .contains("exists")
    );
    for (wrong, why) in [
        (json!({ "vmid": 101, "kib": 64, "name": "vm-102-disk-0" }), "not a name for a disk of VM 101"),
        (json!({ "vmid": 101, "kib": 64, "name": "base-101-disk-0" }), "not a name"),
        (json!({ "vmid": 101, "kib": 64, "name": "../x" }), "unable to parse"),
        (json!({ "vmid": 101, "kib": 64, "format": "qcow2" }), "raw"),
        (json!({ "vmid": 101, "kib": "0" }), "no number"),
        (json!({ "vmid": 101, "kib": "1e9" }), "no number"),
    ] {
        let refused = node.refused("alloc", wrong.clone());
        assert!(refused.contains(why), "{wrong}: {refused}");
    }
    // Names that become a template that there is, or are a clone's. What is there stays.
    for (vm, name) in
        [(9000, "vm-9000-disk-0"), (9000, "vm-9000-disk-00"), (101, "vm-101-disk-0"), (101, "vm-101-disk-2")]
    {
        let refused = node.refused("alloc", json!({ "vmid": vm, "kib": 1024, "name": name }));
        assert!(refused.contains("already") && refused.contains(name), "{refused}");
    }
    assert_eq!(node.of("size", TEMPLATE)[0], 16 * MIB);
    let named = node.ok("alloc", json!({ "vmid": 9002, "kib": 1024, "name": "vm-9002-disk-7" }));
    node.of("free", named.as_str().unwrap());
    let of_vm = node.ok("list", json!({ "vmid": "101" }));
    assert_eq!(of_vm.as_array().unwrap().len(), 5, "{of_vm}");
    let chosen = node.ok("list", json!({ "volumes": [format!("desks:{CLONE}"), "desks:vm-7-disk-0"] }));
    assert_eq!(chosen.as_array().unwrap().len(), 1, "{chosen}");

    // Another storage has nothing of this one.
    assert_eq!(node.ok("list", json!({ "storage": "other", "config": { "spillway-socket": world.path("sock"), "spillway-dir": world.path("other") } })), json!([]));

    // A conversion that broke off after the image was made is begun again.
    let file = world.path("pve/vm-9001-disk-0");
    node.ok("alloc", json!({ "vmid": 9001, "kib": 1024 }));
    world.ok(&["image", "import", "desks-base-9001-disk-0", file.to_str().unwrap(), "--format", "raw"]);
    assert_eq!(node.of("create_base", "vm-9001-disk-0"), "base-9001-disk-0");
    assert_eq!(
        world.json(&["image", "show", "desks-base-9001-disk-0"])["versions"].as_array().unwrap().len(),
        1
    );

    // With its template the daemon would remove the clones.
    assert!(node.refused("free", json!({ "volume": TEMPLATE })).contains("in use by linked clones"));
    let mut volumes: Vec<String> = node.volumes().into_iter().map(|(name, _)| name).collect();
    volumes.sort_by_key(|name| !name.contains('/'));
    for volume in &volumes {
        let volume = volume.strip_prefix("desks:").unwrap();
        node.of("free", volume);
        node.of("free", volume);
    }
    assert_eq!(node.volumes(), []);
    assert_eq!(world.json(&["image", "list"])["items"], json!([]));
    assert_eq!(std::fs::read_dir(world.path("pve")).unwrap().count(), 0);
    for call in ["activate", "size", "blockdev"] {
        let is_there = node.call(call, json!({ "volume": CLONE }))["error"].is_null();
        assert_eq!(is_there, call == "blockdev", "{call}: a node is a path alone");
    }
}

#[test]
fn what_cannot_be_is_refused_in_words() {
    let Some(world) = World::new("none") else { return };
    let Some(mut node) = Node::new(&world) else { return };
    node.template_and_clone();
    node.of("activate", CLONE);
    for (call, arguments, words) in [
        ("snapshot", json!({}), "have no snapshots"),
        ("rollback", json!({}), "have no snapshots"),
        ("activate", json!({ "snapshot": "one" }), "have no snapshots"),
        ("clone", json!({ "vmid": 102 }), "is not a template"),
        ("create_base", json!({}), "make a full clone"),
        ("backup", json!({}), "backup=0"),
        ("export", json!({}), "stay on their host"),
        ("rename", json!({}), "clone the VM instead"),
        ("map", json!({}), "no file"),
    ] {
        let mut asked = json!({ "volume": CLONE });
        asked.as_object_mut().unwrap().extend(arguments.as_object().unwrap().clone());
        let refused = node.refused(call, asked);
        assert!(refused.contains(words), "{call}: {refused}");
    }
    assert_eq!(node.of("export_formats", CLONE), json!([]));
    // A template, and a disk that keeps its content, are backed up as others are.
    assert_eq!(node.of("backup", TEMPLATE), 16 * MIB);
    node.ok("alloc", json!({ "vmid": 101, "kib": 1024 }));
    assert_eq!(node.of("backup", "vm-101-disk-1"), MIB);
    node.of("map", "vm-101-disk-1");
    for (feature, file, template, clone, running) in [
        ("clone", 0, 1, 0, 0),
        ("copy", 1, 1, 0, 1),
        ("template", 1, 0, 1, 1),
        ("sparseinit", 1, 0, 0, 0),
        ("snapshot", 0, 0, 0, 0),
        ("rename", 0, 0, 0, 0),
        ("replicate", 0, 0, 0, 0),
    ] {
        let mut has = |volume: &str, running: i32| {
            node.ok("feature", json!({ "feature": feature, "volume": volume, "running": running }))
        };
        let found = [has("vm-101-disk-1", 0), has(TEMPLATE, 0), has(CLONE, 0), has(CLONE, 1)];
        assert_eq!(found, [file, template, clone, running], "{feature}");
        let of_snapshot = json!({ "feature": feature, "volume": TEMPLATE, "snapshot": "one" });
        assert_eq!(node.ok("feature", of_snapshot), 0, "{feature}");
    }

    // A full clone reads the template's file, also while clones are served from it.
    let template = node.of("path", TEMPLATE)[0].as_str().unwrap().to_owned();
    let copy = world.path("copy.raw");
    let convert = ["convert", "-p", "-f", "raw", "-O", "raw", &template, copy.to_str().unwrap()];
    let done = Command::new("qemu-img").args(convert).output().unwrap();
    assert!(done.status.success(), "{done:?}");
    assert_eq!(std::fs::read(copy).unwrap()[..2], *b"v\0");
}
