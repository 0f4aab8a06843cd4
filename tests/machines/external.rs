//! Disks for VMMs that somebody else starts, beside machines that the daemon runs itself.

use crate::world::World;
use serde_json::Value;
use spillway_testkit::skip;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::PathBuf;
use std::process::Command;

const GIB: u64 = 1 << 30;
/// The first byte of the image is a `v`.
const FIRST: &str = "read -P 118 0 1";

/// What qemu-io says to commands for the disk of a machine, over NBD.
fn io(machine: &Value, commands: &[&str]) -> String {
    let socket = machine["status"]["run"]["nbd_socket"].as_str().expect("an NBD socket");
    let mut qemu_io = Command::new("qemu-io");
    qemu_io.args(["-f", "raw", &format!("nbd+unix:///?socket={socket}")]);
    commands.iter().for_each(|command| _ = qemu_io.args(["-c", command]));
    let done = qemu_io.output().unwrap();
    format!("{}{}", String::from_utf8_lossy(&done.stdout), String::from_utf8_lossy(&done.stderr))
}

/// Adds a machine, which is the same each time.
fn add(world: &World, name: &str, size: &str) -> Value {
    let added = world.json(&["machine", "add", "vms", name, "--size", size]);
    assert_eq!(world.json(&["machine", "add", "vms", name, "--size", size])["identity"], added["identity"]);
    added
}

#[test]
fn a_disk_for_another_vmm_is_made_started_forgotten_and_grown() {
    let Some(world) = World::new("qemu") else { return };
    if !spillway_testkit::has_program("qemu-io") {
        return skip("qemu-io is not installed: run 'make install-deps'");
    }
    world.import("golden", "version-1");
    world.catalog("desk", 1, &["--image", "golden"]);
    world.ok(&[
        "catalog",
        "create",
        "vms",
        "--image",
        "golden",
        "--vmm",
        "external",
        "--ram",
        "8M",
        "--overflow",
        "64M",
    ]);
    let added = add(&world, "vm-101-disk-0", "1G");
    assert_eq!((&added["size_bytes"], added["power"].as_str()), (&GIB.into(), Some("off")));
    assert_eq!(world.json(&["catalog", "show", "vms"])["spec"]["count"], 1);

    // Both kinds run beside each other.
    world.ok(&["machine", "start", "vm-101-disk-0", "desk-001", "--wait"]);
    let running = world.machine("vm-101-disk-0");
    assert_eq!(running["status"]["run"]["hypervisor"], "none");
    assert!(running["status"]["run"]["vmm_pid"].is_null());
    assert_eq!(world.machine("desk-001")["status"]["run"]["hypervisor"], "qemu");
    let written =
        io(&running, &["write -P 7 0 64k", "write -P 8 1023M 64k", "read -P 8 1023M 64k", "length"]);
    assert!(written.contains("1 GiB") && !written.contains("ailed"), "{written}");
    // Starting again changes nothing.
    world.ok(&["machine", "start", "vm-101-disk-0", "--wait"]);
    assert!(!io(&world.machine("vm-101-disk-0"), &["read -P 7 0 64k"]).contains("ailed"));
    let (code, _, error) = world.spillway(&["machine", "resize", "vm-101-disk-0", "2G"]);
    assert!(code != 0 && error.contains("vm-101-disk-0"), "it runs: {code} {error}");

    // A reset, and a stop, forget.
    world.ok(&["machine", "reset", "vm-101-disk-0", "--wait"]);
    let reset = io(&world.machine("vm-101-disk-0"), &["read -P 0 1023M 64k", FIRST]);
    assert!(!reset.contains("ailed"), "{reset}");
    io(&world.machine("vm-101-disk-0"), &["write -P 9 0 64k"]);
    world.ok(&["machine", "stop", "vm-101-disk-0", "--wait"]);
    world.ok(&["machine", "stop", "vm-101-disk-0", "--wait"]);
    world.ok(&["machine", "resize", "vm-101-disk-0", "2G"]);
    let (code, _, error) = world.spillway(&["machine", "resize", "vm-101-disk-0", "1G"]);
    assert!(code != 0 && error.contains("cannot shrink"), "{error}");
    world.ok(&["machine", "start", "vm-101-disk-0", "--wait"]);
    let grown = io(&world.machine("vm-101-disk-0"), &[FIRST, "read -P 0 2047M 64k", "length"]);
    assert!(grown.contains("2 GiB") && !grown.contains("ailed"), "{grown}");

    // Names and sizes that cannot be.
    for (arguments, why) in [
        (&["machine", "add", "vms", "vm-101-disk-0", "--size", "3G"][..], "another size"),
        (&["machine", "add", "vms", "desk-001"], "is in the catalog 'desk'"),
        (&["machine", "add", "vms", "small", "--size", "1M"], "is less than the 16M"),
        (&["machine", "add", "desk", "other"], "where vmm is external"),
        (&["machine", "resize", "desk-001", "1G"], "desk-001"),
    ] {
        let (code, _, error) = world.spillway(arguments);
        assert!(code != 0 && error.contains(why), "{arguments:?}: {error}");
    }
    // A name of the pattern is not given again when the catalog grows.
    add(&world, "vms-003", "16M");
    world.ok(&["catalog", "scale", "vms", "4"]);
    let (code, _, error) = world.spillway(&["catalog", "scale", "vms", "3"]);
    assert!(code != 0 && error.contains("remove them by name"), "{error}");
    let names: Vec<String> =
        world.list(Some("vms")).iter().map(|machine| machine["name"].as_str().unwrap().to_owned()).collect();
    assert_eq!(names.len(), 4, "{names:?}");
    world.ok(&["machine", "stop", "vm-101-disk-0", "--wait"]);
    world.ok(&["machine", "delete", "vm-101-disk-0"]);
    assert_eq!(world.json(&["catalog", "show", "vms"])["spec"]["count"], 3);
}

/// The group may connect to the disk, and can do nothing else.
#[test]
fn a_group_reaches_the_sockets_of_the_disk_alone() {
    if !rustix::process::geteuid().is_root() {
        return skip("only root can give a socket to a group: run as root");
    }
    let Some(world) = World::new("qemu") else { return };
    world.import("golden", "version-1");
    let options = ["--vmm", "external", "--socket-group", "games", "--ram", "8M", "--overflow", "64M"];
    world.ok(&[&["catalog", "create", "vms", "--image", "golden"], &options[..]].concat());
    world.ok(&["machine", "add", "vms", "web"]);
    world.ok(&["machine", "start", "web", "--wait"]);
    let run = world.machine("web")["status"]["run"].clone();
    let socket = |name: &str| PathBuf::from(run[name].as_str().unwrap());
    let listed = Command::new("getent").args(["group", "games"]).output().unwrap();
    let group: u32 = String::from_utf8(listed.stdout).unwrap().split(':').nth(2).unwrap().parse().unwrap();
    for name in ["disk_socket", "nbd_socket"] {
        let found = std::fs::metadata(socket(name)).unwrap();
        assert_eq!((found.gid(), found.permissions().mode() & 0o777), (group, 0o660), "{name}");
    }
    let as_member = |program: &str, path: &PathBuf| {
        let mut command = Command::new("setpriv");
        command.args([
            "--reuid=4242",
            &format!("--regid={group}"),
            "--clear-groups",
            "--inh-caps=-all",
            program,
        ]);
        command.arg(path).output().unwrap().status.success()
    };
    let nbd = PathBuf::from(format!("nbd+unix:///?socket={}", socket("nbd_socket").display()));
    assert!(as_member("nbdinfo", &nbd), "it connects");
    for secret in [socket("control_socket").with_file_name("run.json"), world.machines().join("web")] {
        assert!(!as_member(if secret.is_dir() { "ls" } else { "cat" }, &secret), "{}", secret.display());
    }
    let control = std::fs::metadata(socket("control_socket")).unwrap();
    assert_eq!(control.permissions().mode() & 0o077, 0, "the control socket is the daemon's");
    let (code, _, error) =
        world.spillway(&["catalog", "create", "x", "--image", "golden", "--socket-group", "games"]);
    assert!(code != 0 && error.contains("vmm = external"), "{error}");
}
