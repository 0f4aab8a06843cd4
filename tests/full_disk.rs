//! Machines with real disks on a file system that is full, and machines whose records cannot be read: what is asked with the
//! shipped programs. Nobody runs guests here: disks are served.
#![allow(clippy::unwrap_used)]

use serde_json::Value;
use spillway_testkit::disk;
use spillway_testkit::process::wait_until;
use std::fs::File;
use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

/// A file system of 256 MiB, and a daemon whose state is on it.
struct World {
    dir: tempfile::TempDir,
    daemon: Option<Child>,
}

impl World {
    /// None: mounting is not allowed here, which is said.
    fn new() -> Option<World> {
        let dir = tempfile::tempdir_in("/var/tmp").unwrap();
        let (image, state) = (dir.path().join("image"), dir.path().join("state"));
        std::fs::create_dir(&state).unwrap();
        File::create(&image).unwrap().set_len(256 << 20).unwrap();
        let made = Command::new("mkfs.ext4").args(["-q", "-F", "-m", "0"]).arg(&image).status();
        assert!(made.unwrap().success());
        let mounted = Command::new("mount").args(["-o", "loop"]).args([&image, &state]).status();
        if !mounted.unwrap().success() {
            spillway_testkit::skip("mounting an image is not allowed here");
            return None;
        }
        let mut world = World { dir, daemon: None };
        world.start();
        Some(world)
    }

    fn state(&self) -> PathBuf {
        self.dir.path().join("state")
    }

    fn start(&mut self) {
        let mut daemon = Command::new(disk::daemon_program().unwrap());
        daemon.arg("--state").arg(self.state()).arg("--socket").arg(self.dir.path().join("sock"));
        let mut daemon = daemon.args(["--hypervisor", "none"]).stdout(Stdio::piped()).spawn().unwrap();
        let mut line = String::new();
        BufReader::new(daemon.stdout.take().unwrap()).read_line(&mut line).unwrap();
        assert!(line.contains("ready"), "{line:?}");
        self.daemon = Some(daemon);
    }

    fn kill(&mut self) {
        if let Some(mut daemon) = self.daemon.take() {
            daemon.kill().unwrap();
            daemon.wait().unwrap();
        }
    }

    /// Exit code, and what was said.
    fn spillway(&self, arguments: &[&str]) -> (i32, String) {
        let mut command = Command::new(disk::program().unwrap());
        command.args(arguments).env("SPILLWAY_SOCKET", self.dir.path().join("sock"));
        let done = command.output().unwrap();
        let text = [done.stdout, done.stderr].concat();
        (done.status.code().unwrap(), String::from_utf8(text).unwrap())
    }

    fn ok(&self, arguments: &[&str]) -> String {
        let (code, output) = self.spillway(arguments);
        assert_eq!(code, 0, "{arguments:?}: {output}");
        output
    }

    fn json(&self, arguments: &[&str]) -> Value {
        serde_json::from_str(&self.ok(&[arguments, &["--json"]].concat())).unwrap()
    }

    /// The process that serves a machine's disk.
    fn disk_pid(&self, machine: &str) -> u64 {
        self.json(&["machine", "show", machine])["status"]["run"]["disk_pid"].as_u64().unwrap()
    }

    fn generation(&self, machine: &str) -> u64 {
        let control = self.state().join("run/machines").join(machine).join("disk.ctl");
        self.json(&["stats", control.to_str().unwrap()])["generation"].as_u64().unwrap()
    }
}

impl Drop for World {
    fn drop(&mut self) {
        if self.daemon.is_some() {
            let _ = self.spillway(&["host", "close", "--wait"]);
        }
        self.kill();
        let _ = Command::new("umount").arg("-l").arg(self.state()).status();
    }
}

/// Takes all that is left.
fn fill(folder: &Path) {
    let mut file = File::options().create(true).append(true).open(folder.join("a-guest")).unwrap();
    for size in [1 << 20, 4096, 1] {
        while file.write_all(&vec![0xaa; size]).is_ok() {}
    }
    let refused = std::fs::write(folder.join("more"), [1; 4096]).unwrap_err();
    assert_eq!(refused.kind(), std::io::ErrorKind::StorageFull);
    let _ = std::fs::remove_file(folder.join("more"));
    while file.write_all(&[0xaa; 512]).is_ok() {}
}

fn stock(world: &World, count: &str) {
    let image = world.dir.path().join("image.raw");
    std::fs::write(&image, vec![1; 4 << 20]).unwrap();
    world.ok(&["image", "import", "debian", image.to_str().unwrap(), "--format", "raw"]);
    world.ok(&[
        "catalog",
        "create",
        "desk",
        "--image",
        "debian",
        "--count",
        count,
        "--ram",
        "16M",
        "--overflow",
        "64M",
    ]);
    world.ok(&["machine", "start", "--catalog", "desk", "--wait"]);
}

#[test]
fn machines_are_reset_and_stopped_on_a_file_system_that_is_full() {
    let Some(mut world) = World::new() else { return };
    stock(&world, "4");
    let state = world.state();
    fill(&state);
    for (reset, stop) in [("desk-001", "desk-002"), ("desk-001", "desk-003")] {
        let (before, pid) = (world.generation(reset), world.disk_pid(reset));
        world.ok(&["machine", "reset", reset, "--wait"]);
        assert!(world.generation(reset) > before && world.disk_pid(reset) == pid, "it is the same process");
        world.ok(&["machine", "stop", stop, "--wait"]);
        world.ok(&["machine", "delete", stop]);
        fill(&state);
        world.kill();
        fill(&state);
        world.start();
    }
    // It is recorded that the reset was done: the next daemon does not do it again.
    let generation = world.generation("desk-001");
    world.ok(&["machine", "restart", "desk-004", "--wait"]);
    assert_eq!(world.generation("desk-001"), generation);
    // What needs space ends with its own code.
    world.ok(&["catalog", "scale", "desk", "3"]);
    let (code, output) = world.spillway(&["machine", "start", "desk-002", "--wait"]);
    assert_eq!(code, 73, "{output}");
    world.ok(&["host", "close", "--wait"]);
    world.ok(&["catalog", "delete", "desk"]);
    world.ok(&["image", "delete", "debian"]);
    assert_eq!(std::fs::read_dir(state.join("run/machines")).unwrap().count(), 0);
}

/// Changes what is recorded, as another version would have written it.
const CHANGE: &str = "import sqlite3, sys
db = sqlite3.connect(sys.argv[1])
changed = db.execute(\"UPDATE objects SET value = ?2 WHERE key = ?1\", (sys.argv[2], sys.argv[3].encode())).rowcount
db.commit()
sys.exit(0 if changed == 1 else 1)
";

#[test]
fn what_runs_of_a_machine_whose_record_cannot_be_read_is_left_alone() {
    let Some(mut world) = World::new() else { return };
    stock(&world, "2");
    let pids = ["desk-001", "desk-002"].map(|name| world.disk_pid(name));
    let is_alive = |pid: u64| Path::new(&format!("/proc/{pid}")).exists();
    for key in ["machines/desk-001", "catalogs/desk"] {
        world.kill();
        let database = world.state().join("state.db");
        let done = Command::new("python3").args(["-c", CHANGE]).arg(&database).args([key, "{}"]).status();
        assert!(done.unwrap().success(), "{key}");
        world.start();
        let shown = world.ok(&["host", "show"]);
        assert!(shown.contains(&format!("set aside: {key} cannot be read")), "{shown}");
        let reported = || {
            let events = world.ok(&["event", "--kind", "failed", "--object", "machine/desk-001"]);
            events.contains("cannot be read").then_some(())
        };
        wait_until(Duration::from_secs(20), reported).unwrap();
        assert!(pids.iter().all(|pid| is_alive(*pid)), "{key}");
    }
    // Another machine is what it was, and is stopped by its name only once its catalog can be read again.
    let (code, output) = world.spillway(&["machine", "reset", "desk-002", "--discard-data"]);
    assert!(code == 70 && output.contains("catalogs/desk"), "{code}: {output}");
    world.kill();
    for pid in pids {
        Command::new("kill").arg(pid.to_string()).status().unwrap();
        wait_until(Duration::from_secs(20), || (!is_alive(pid)).then_some(())).unwrap();
    }
}
