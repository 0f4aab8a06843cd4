//! What is libvirt's own: domains of others, and a libvirtd that is not there or does not answer.

use crate::world::{World, is_alive, kill};
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::time::{Duration, Instant};

#[test]
fn a_domain_of_somebody_elses_is_refused_and_left_alone() {
    let Some(mut world) = World::new("libvirt") else { return };
    world.import("golden", "version-1");
    world.catalog("desk", 2, &["--image", "golden"]);
    let uuid = world.machine("desk-002")["identity"]["uuid"].as_str().unwrap().to_owned();
    let file = world.path("stranger.xml");
    let libvirtd = world.libvirtd().unwrap();
    // One has the name, the other the UUID of a machine.
    for (name, uuid) in [("spillway-desk-001", ""), ("other", &*format!("<uuid>{uuid}</uuid>"))] {
        let stranger = format!(
            "<domain type='qemu'><name>{name}</name>{uuid}<memory unit='MiB'>64</memory>
             <os><type arch='x86_64' machine='q35'>hvm</type></os></domain>"
        );
        std::fs::write(&file, stranger).unwrap();
        libvirtd.virsh(&["define", file.to_str().unwrap()]);
        libvirtd.virsh(&["start", name]);
    }
    let domains = |world: &mut World| {
        let libvirtd = world.libvirtd().unwrap();
        ["spillway-desk-001", "other"].map(|name| libvirtd.virsh(&["dumpxml", name]))
    };
    let before = domains(&mut world);
    for name in ["desk-001", "desk-002"] {
        let (code, _, error) = world.spillway(&["machine", "start", name, "--wait"]);
        assert!(code != 0 && error.contains("is not this machine's, and is not changed"), "{code}: {error}");
    }
    let (_, _, error) = world.spillway(&["machine", "stop", "desk-002", "--force", "--wait"]);
    assert!(error.contains("is not changed"), "{error}");
    assert_eq!(domains(&mut world), before);
    world.libvirtd().unwrap().virsh(&["destroy", "other"]);
    world.libvirtd().unwrap().virsh(&["undefine", "other"]);
    world.until("desk-002", "stopped", |m| m["status"]["phase"] == "stopped");
}

#[test]
fn a_libvirtd_that_is_not_there_is_waited_for() {
    let Some(mut world) = World::new("libvirt") else { return };
    world.import("golden", "version-1");
    world.catalog("desk", 2, &["--image", "golden"]);
    world.ok(&["machine", "start", "desk-001", "--wait"]);
    world.tell("desk-001", "markmine", "MARKED");
    let vmm = world.pid("desk-001", "vmm_pid");
    world.libvirtd().unwrap().kill();
    world.ok(&["machine", "start", "desk-002"]);
    world.until("desk-002", "failed", |m| {
        let message = m["status"]["message"].as_str().unwrap_or_default();
        m["status"]["phase"] == "failed" && message.contains("libvirt (qemu:///")
    });
    // It comes back, and so does what was wanted; who ran does not notice.
    world.libvirtd().unwrap().start();
    world.until("desk-002", "running", |m| m["status"]["phase"] == "running");
    assert_eq!(world.pid("desk-001", "vmm_pid"), vmm);
    assert!(world.tell("desk-001", "state", "STATE").contains("mark=mine "));

    // What ends while nobody is there comes back clean when somebody is.
    world.libvirtd().unwrap().kill();
    kill(vmm);
    world.until("desk-001", "failed", |m| m["status"]["phase"] == "failed");
    world.libvirtd().unwrap().start();
    world.until("desk-001", "running", |m| m["status"]["phase"] == "running");
    assert!(world.tell("desk-001", "state", "STATE").contains("mark= "));
}

#[test]
fn a_libvirtd_that_does_not_answer_holds_up_nobody_else() {
    let Some(mut world) = World::new("libvirt") else { return };
    world.import("golden", "version-1");
    world.catalog("desk", 2, &["--image", "golden"]);
    world.ok(&["machine", "start", "desk-001", "--wait"]);
    // How long its guest takes to boot says nothing of libvirtd.
    world.tell("desk-001", "state", "STATE");
    let libvirtd = world.libvirtd().unwrap().pid();
    signal(libvirtd, "STOP");
    world.ok(&["machine", "start", "desk-002"]);
    world.until("desk-002", "starting", |m| m["status"]["phase"] == "starting");
    let asked = Instant::now();
    assert_eq!(world.machine("desk-001")["status"]["phase"], "running");
    assert!(asked.elapsed() < Duration::from_secs(20));
    world.tell("desk-001", "state", "STATE");
    signal(libvirtd, "CONT");
    world.until("desk-002", "running", |m| m["status"]["phase"] == "running");
}

/// The disk is for the machine's QEMU and nobody else, the rest not even for that.
#[test]
fn its_qemu_reaches_the_disk_and_nothing_else() {
    let Some(mut world) = World::new("libvirt") else { return };
    if world.libvirtd().unwrap().uri() != "qemu:///system" {
        spillway_testkit::skip("only the system's libvirt runs QEMU as another user: run as root");
        return;
    }
    world.import("golden", "version-1");
    world.catalog("desk", 1, &["--image", "golden"]);
    world.ok(&["machine", "start", "desk-001", "--wait"]);
    let vmm = world.pid("desk-001", "vmm_pid");
    assert!(is_alive(vmm));
    let owner = std::fs::metadata(format!("/proc/{vmm}")).unwrap();
    assert_ne!(owner.uid(), 0);
    let group = owner.gid();
    let folder = world.machines().join("desk-001");
    let rights = |path: &std::path::Path| {
        let found = std::fs::symlink_metadata(path).unwrap();
        (found.gid(), found.permissions().mode() & 0o777)
    };
    for folder in folder.ancestors().take(4) {
        assert_eq!(rights(folder), (group, 0o710), "{}", folder.display());
    }
    assert_eq!(rights(&folder.join("disk.sock")), (group, 0o660));
    for other in ["disk.ctl", "run.json", "domain.xml"] {
        assert_eq!(rights(&folder.join(other)).1 & 0o077, 0, "{other}");
    }
    for other in std::fs::read_dir(world.path("state")).unwrap().flatten() {
        if other.file_name() != "run" {
            assert_eq!(rights(&other.path()).1 & 0o077, 0, "{}", other.path().display());
        }
    }
}

fn signal(pid: u32, name: &str) {
    let done = std::process::Command::new("kill").args([&format!("-{name}"), &pid.to_string()]).status();
    assert!(done.unwrap().success());
}
