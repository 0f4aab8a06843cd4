//! Each machine's QEMU runs as a user of its own: without rights, and with nothing of another machine's in reach.

use crate::world::{World, is_alive};
use std::collections::HashSet;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::Command;

/// The lines of a process's status, by name.
fn status(pid: u32, name: &str) -> String {
    let text = fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let line = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
    line.unwrap_or_else(|| panic!("{name} is not in {text}")).trim().to_owned()
}

/// The user that a process runs as, which has no more rights than any.
fn user_without_rights(pid: u32) -> u32 {
    let user: u32 = status(pid, "Uid").split_whitespace().next().unwrap().parse().unwrap();
    let same = [user; 4].map(|user| user.to_string()).join("\t");
    assert_eq!((status(pid, "Uid"), status(pid, "Gid")), (same.clone(), same));
    for rights in ["CapInh", "CapPrm", "CapEff", "CapAmb"] {
        assert_eq!(u64::from_str_radix(&status(pid, rights), 16), Ok(0), "{rights}");
    }
    assert_eq!((status(pid, "NoNewPrivs").as_str(), status(pid, "Seccomp").as_str()), ("1", "2"));
    let groups = status(pid, "Groups");
    let roots = groups.split_whitespace().any(|group| group == "0");
    assert!(!roots && groups.split_whitespace().count() <= 1, "{groups}");
    user
}

/// Whether a user can do this in a folder that it has been put into, as its QEMU is.
fn can(user: u32, folder: &Path, command: &str) -> bool {
    let ids = [format!("--reuid={user}"), format!("--regid={user}")];
    let mut shell = Command::new("setpriv");
    shell.args(ids).args(["--clear-groups", "--no-new-privs", "sh", "-c", command]).current_dir(folder);
    shell.output().unwrap().status.success()
}

#[test]
fn a_qemu_has_a_user_of_its_own_and_reaches_nothing_else() {
    if !rustix::process::geteuid().is_root() {
        return spillway_testkit::skip("only root gives machines users of their own");
    }
    let Some(mut world) = World::new("qemu") else { return };
    world.import("golden", "version-1");
    let temp = world.path("temp");
    world.ok(&["store", "add", "temp", temp.to_str().unwrap(), "--class", "temp"]);
    world.catalog("desk", 3, &["--image", "golden", "--data-disk", "32M", "--scratch-disk", "16M"]);
    // Nobody but root may read it where it lies.
    fs::set_permissions(world.path("initrd"), fs::Permissions::from_mode(0o600)).unwrap();
    let two = ["desk-001", "desk-002"];
    world.ok(&[&["machine", "start", "--wait"][..], &two].concat());
    let users = two.map(|name| user_without_rights(world.pid(name, "vmm_pid")));
    let range = 2_100_000_000..=2_100_065_535;
    assert!(users[0] != users[1] && users.iter().all(|user| range.contains(user)), "{users:?}");

    // They boot, and have what is theirs.
    for name in two {
        world.tell(name, "putvdb", "PUT");
        world.tell(name, "putvdc", "PUT");
        assert_eq!(world.tell(name, "getvdb", "GOT"), "GOT kept");
        assert!(world.tell(name, "seedvdd", "SEED").contains("iid-"));
    }
    // Nothing of another's, even from within its folder; of its own no more than the disk's socket.
    let folders = two.map(|name| world.machines().join(name));
    assert!(
        can(users[0], &folders[0], "test -w disk.sock"),
        "a QEMU connects again to a disk that let it go"
    );
    for file in fs::read_dir(&folders[0]).unwrap() {
        let name = file.unwrap().file_name().into_string().unwrap();
        assert!(
            !can(users[1], &folders[0], &format!("test -r {name} || test -w {name} || test -e {name}")),
            "{name}"
        );
        let reaches = can(users[0], &folders[0], &format!("test -r {name} || test -w {name}"));
        assert_eq!(reaches, name == "disk.sock", "{name}");
    }
    for deed in ["ls", "touch x", "rm -f qmp.sock", "ln -s /etc/passwd y"] {
        assert!(!can(users[0], &folders[0], deed), "{deed}");
    }
    for file in fs::read_dir(world.path("state/store/data"))
        .unwrap()
        .chain(fs::read_dir(temp.join("scratch")).unwrap())
    {
        let file = file.unwrap().path();
        let (folder, name) = (file.parent().unwrap(), file.file_name().unwrap().to_str().unwrap());
        assert!(!can(users[0], folder, &format!("test -r {name} || test -w {name}")), "{name}");
    }
    assert!(!can(users[0], Path::new("/"), &format!("kill -0 {}", world.pid("desk-002", "vmm_pid"))));

    // Another daemon knows who has which, one whose record is damaged included; a machine keeps its own over a restart.
    world.kill_daemon();
    let run = folders[1].join("run.json");
    let record = fs::read(&run).unwrap();
    fs::write(&run, "{").unwrap();
    world.start_daemon();
    world.until("desk-002", "failed", |m| m["status"]["phase"] == "failed");
    world.ok(&["machine", "start", "desk-003", "--wait"]);
    fs::write(&run, record).unwrap();
    world.ok(&["machine", "restart", "desk-001", "--force", "--wait"]);
    let third = user_without_rights(world.pid("desk-003", "vmm_pid"));
    assert_eq!(HashSet::from([users[0], users[1], third]).len(), 3);
    assert_eq!(user_without_rights(world.pid("desk-001", "vmm_pid")), users[0]);
    assert_eq!(world.tell("desk-001", "getvdb", "GOT"), "GOT kept");
    let doctor = world.spillway(&["doctor"]).1;
    assert!(doctor.contains("a user of its own, of 2100000000-2100065535"), "{doctor}");

    // As before, if that is what is wanted: from each machine's next start on, and not without a word.
    world.kill_daemon();
    world.options = ["--guest-users", "none", "--accelerator", "auto"].map(String::from).into();
    world.start_daemon();
    world.until("desk-001", "running", |m| m["status"]["phase"] == "running");
    assert_eq!(user_without_rights(world.pid("desk-001", "vmm_pid")), users[0]);
    world.ok(&["machine", "restart", "desk-001", "--force", "--wait"]);
    let vmm = world.pid("desk-001", "vmm_pid");
    assert!(is_alive(vmm) && status(vmm, "Uid").starts_with("0\t"));
    assert!(world.spillway(&["doctor"]).1.contains("run as spillwayd's own user"));
}
