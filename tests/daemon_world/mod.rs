//! A daemon of the test's own, asked by the shipped `spillway`.
#![allow(dead_code, clippy::unwrap_used, reason = "each test program uses its part")]

use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use spillway_testkit::disk;
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

/// A folder, and the daemon that keeps its state there. Its machines cannot be started: it has no disks to give.
pub struct World {
    dir: tempfile::TempDir,
    options: Vec<String>,
    daemon: Child,
    /// What it said when it was ready.
    pub ready_line: String,
}

impl World {
    pub fn new() -> World {
        World::with(|_| Vec::new())
    }

    /// With more options of the daemon's, which may name files of its folder.
    pub fn with(options: impl FnOnce(&Path) -> Vec<String>) -> World {
        let dir = tempfile::tempdir_in("/var/tmp").unwrap();
        let options = options(dir.path());
        let (daemon, ready_line) = start(dir.path(), &options);
        World { dir, options, daemon, ready_line }
    }

    /// Kills the daemon.
    pub fn kill(&mut self) {
        self.daemon.kill().unwrap();
        self.daemon.wait().unwrap();
    }

    /// Starts another one.
    pub fn start(&mut self) {
        (self.daemon, self.ready_line) = start(self.dir.path(), &self.options);
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// The program, which will ask this daemon.
    pub fn command(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(disk::program().unwrap());
        command.args(arguments).env("SPILLWAY_SOCKET", self.path("sock"));
        command
    }

    /// Exit code, standard output, standard error.
    pub fn spillway(&self, arguments: &[&str]) -> (i32, String, String) {
        finishes(&mut self.command(arguments))
    }

    /// All metrics of the daemon, also those of each machine.
    pub fn metrics(&self) -> String {
        let mut stream = UnixStream::connect(self.path("sock")).unwrap();
        let request = "GET /v1/metrics?machines=true HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n";
        stream.write_all(request.as_bytes()).unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        answer.split_once("\r\n\r\n").unwrap().1.to_owned()
    }

    pub fn ok(&self, arguments: &[&str]) -> String {
        let (code, out, err) = self.spillway(arguments);
        assert_eq!(code, 0, "{arguments:?}: {out}{err}");
        out
    }

    /// Processes that work in this world's folder, and their command lines.
    pub fn processes(&self) -> Vec<(Pid, String)> {
        let folder = self.dir.path().canonicalize().unwrap();
        let found = std::fs::read_dir("/proc").unwrap().flatten().filter_map(|entry| {
            let pid = entry.file_name().to_str().and_then(|name| Pid::from_raw(name.parse().ok()?))?;
            std::fs::read_link(entry.path().join("cwd")).ok().filter(|cwd| cwd.starts_with(&folder))?;
            let line = std::fs::read(entry.path().join("cmdline")).unwrap_or_default();
            Some((pid, String::from_utf8_lossy(&line).replace('\0', " ")))
        });
        found.collect()
    }

    pub fn json(&self, arguments: &[&str]) -> Value {
        serde_json::from_str(&self.ok(&[arguments, &["--json"]].concat())).unwrap()
    }
}

/// Runs it to its end: exit code, standard output, standard error.
pub fn finishes(command: &mut Command) -> (i32, String, String) {
    let done = command.output().unwrap();
    let text = |bytes| String::from_utf8(bytes).unwrap();
    (done.status.code().unwrap(), text(done.stdout), text(done.stderr))
}

/// A daemon, once it is ready, and what it says then.
fn start(dir: &Path, options: &[String]) -> (Child, String) {
    let mut daemon = Command::new(disk::daemon_program().unwrap());
    daemon.arg("--state").arg(dir.join("state")).arg("--socket").arg(dir.join("sock"));
    daemon.args(["--hypervisor", "none"]).args(options);
    if !options.iter().any(|option| option == "--worker") {
        daemon.args(["--worker", "/nonexistent/spillway"]);
    }
    let mut daemon = daemon.stdout(Stdio::piped()).spawn().expect("'make test' builds spillwayd");
    let mut ready_line = String::new();
    BufReader::new(daemon.stdout.take().unwrap()).read_line(&mut ready_line).unwrap();
    assert!(ready_line.contains("ready"), "{ready_line:?}");
    (daemon, ready_line)
}

impl Drop for World {
    fn drop(&mut self) {
        let _ = self.daemon.kill();
        let _ = self.daemon.wait();
        // What outlives a daemon.
        self.processes().into_iter().for_each(|(pid, _)| _ = kill_process(pid, Signal::KILL));
    }
}
