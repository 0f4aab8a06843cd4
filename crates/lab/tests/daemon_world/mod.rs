//! A daemon of the test's own, asked by the shipped `spillway`.
#![allow(clippy::unwrap_used)]

use serde_json::Value;
use spillway_lab::disk;
use spillway_lab::process::wait_until;
use std::path::PathBuf;
use std::process::{Child, Command};
use std::time::Duration;

/// A folder, and the daemon that keeps its state there. Its machines cannot be started: it has no disks to give.
pub struct World {
    dir: tempfile::TempDir,
    daemon: Child,
}

impl World {
    pub fn new() -> World {
        let dir = tempfile::tempdir_in("/var/tmp").unwrap();
        let program = disk::program().unwrap().with_file_name("spillwayd");
        let mut daemon = Command::new(program);
        daemon.arg("--state").arg(dir.path().join("state")).arg("--socket").arg(dir.path().join("sock"));
        daemon.args(["--hypervisor", "none", "--spillway", "/nonexistent/spillway"]);
        let daemon =
            daemon.stdout(std::process::Stdio::null()).spawn().expect("'make test' builds spillwayd");
        let world = World { dir, daemon };
        let listens = || world.path("sock").exists().then_some(());
        wait_until(Duration::from_secs(20), listens).expect("spillwayd does not listen");
        world
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// Exit code, standard output, standard error.
    pub fn spillway(&self, arguments: &[&str]) -> (i32, String, String) {
        let mut command = Command::new(disk::program().unwrap());
        command.args(arguments).env("SPILLWAY_SOCKET", self.path("sock"));
        let done = command.output().unwrap();
        let text = |bytes| String::from_utf8(bytes).unwrap();
        (done.status.code().unwrap(), text(done.stdout), text(done.stderr))
    }

    pub fn ok(&self, arguments: &[&str]) -> String {
        let (code, out, err) = self.spillway(arguments);
        assert_eq!(code, 0, "{arguments:?}: {out}{err}");
        out
    }

    pub fn json(&self, arguments: &[&str]) -> Value {
        serde_json::from_str(&self.ok(&[arguments, &["--json"]].concat())).unwrap()
    }
}

impl Drop for World {
    fn drop(&mut self) {
        let _ = self.daemon.kill();
        let _ = self.daemon.wait();
    }
}
