//! What the tests of the program share: the real binary, servers that are ended by their process id, a folder
//! on a disk that shows what was left behind.

#![allow(dead_code, reason = "each test program uses its part")]

pub mod volume;

use rustix::process::{Pid, Signal};
use serde_json::Value;
use spillway_testkit::process::wait_until;
use std::io::{BufRead, BufReader, Read};
use std::os::unix::fs::FileTypeExt;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Command, Output, Stdio};
use std::time::Duration;

pub const PATIENCE: Duration = Duration::from_secs(30);

pub fn spillway() -> Command {
    // It starts that one, which cargo does not build for these tests.
    worker_program();
    Command::new(env!("CARGO_BIN_EXE_spillway"))
}

/// The program that serves disks, as it is built beside that one.
pub fn worker_program() -> PathBuf {
    let path = Path::new(env!("CARGO_BIN_EXE_spillway")).with_file_name("spillway-worker");
    spillway_testkit::disk::check_built(&path).unwrap_or_else(|e| panic!("{e}"));
    path
}

/// Runs to the end and returns exit code and standard error; standard output must be empty.
pub fn fails(command: &mut Command) -> (i32, String) {
    let (code, out, err) = finishes(command);
    assert_eq!(out, "", "{command:?}");
    assert_ne!(code, 0, "{command:?}: {err}");
    (code, err)
}

pub fn finishes(command: &mut Command) -> (i32, String, String) {
    let Output { status, stdout, stderr } = command.stdin(Stdio::null()).output().unwrap();
    let code = status.code().unwrap_or_else(|| panic!("{command:?} was killed: {status}"));
    (code, String::from_utf8(stdout).unwrap(), String::from_utf8(stderr).unwrap())
}

/// Asserts a failure: its code, its one line, and words in it.
#[track_caller]
pub fn refuses(command: &mut Command, code: i32, words: &[&str]) {
    let (got, err) = fails(command);
    let errors: Vec<_> = err.lines().filter(|l| l.starts_with("spillway: error: ")).collect();
    assert_eq!(errors.len(), 1, "one line of error: {err}");
    assert!(err.lines().all(|l| l.starts_with("spillway: ")), "nothing but our lines: {err}");
    for word in words {
        assert!(errors[0].contains(word), "'{word}' is not in: {err}");
    }
    assert_eq!(got, code, "exit code of: {err}");
}

/// qemu-io on a disk's NBD socket, not started yet: each word one of its commands.
pub fn qemu_io_command(world: &World, commands: &[&str]) -> Command {
    let mut qemu_io = Command::new("qemu-io");
    qemu_io.args(["-f", "raw"]).arg(world.nbd_uri());
    commands.iter().for_each(|command| _ = qemu_io.args(["-c", command]));
    qemu_io
}

/// Runs it to its end, which must be a success.
#[track_caller]
pub fn qemu_io(world: &World, commands: &[&str]) {
    let (code, out, err) = finishes(&mut qemu_io_command(world, commands));
    assert!(code == 0 && !out.contains("failed") && !out.contains("error"), "{commands:?}: {out}{err}");
}

/// The figures of the disk whose control socket is `control` there.
pub fn stats(world: &World) -> Value {
    let (code, out, err) = finishes(spillway().arg("stats").arg(world.path("control")).arg("--json"));
    assert_eq!((code, err.as_str()), (0, ""));
    serde_json::from_str(&out).unwrap()
}

/// Ticks of processor time in a `stat` of a process or a thread.
pub fn ticks(stat: &str) -> u64 {
    let fields: Vec<&str> = stat.rsplit_once(')').unwrap().1.split_whitespace().collect();
    fields[11].parse::<u64>().unwrap() + fields[12].parse::<u64>().unwrap()
}

pub fn until(what: &str, mut done: impl FnMut() -> bool) {
    let done = wait_until(PATIENCE, || done().then_some(()));
    done.unwrap_or_else(|| panic!("not in {PATIENCE:?}: {what}"));
}

/// A folder on a disk, with an image.
pub struct World {
    pub dir: tempfile::TempDir,
}

impl World {
    pub fn new() -> World {
        let dir = tempfile::Builder::new().prefix("spw").tempdir_in("/var/tmp").unwrap();
        let content: Vec<u8> = (0..16u32 << 20).map(|i| (i / 512 % 251) as u8).collect();
        std::fs::write(dir.path().join("base.raw"), content).unwrap();
        World { dir }
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// The programs, where any user can start it: it may lie where nobody else can reach it.
    pub fn program_for_all(&self) -> PathBuf {
        // By another process: while this one had it open to write, a child of another test could inherit that, and then
        // nobody can start it.
        let mut copy = Command::new("cp");
        copy.arg(env!("CARGO_BIN_EXE_spillway")).arg(worker_program()).arg(self.dir.path());
        assert!(copy.status().unwrap().success());
        std::fs::set_permissions(self.dir.path(), PermissionsExt::from_mode(0o755)).unwrap();
        self.path("spillway")
    }

    /// `serve` with image, overflow folder and an NBD socket, all in this folder.
    pub fn serve(&self) -> Command {
        let mut command = spillway();
        command.arg("serve").arg("--image").arg(self.path("base.raw"));
        command.arg("--overflow-dir").arg(self.dir.path()).arg("--nbd").arg(self.path("nbd"));
        command
    }

    pub fn left(&self) -> Vec<String> {
        let entries = std::fs::read_dir(self.dir.path()).unwrap();
        let mut names: Vec<_> = entries.map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        names
    }

    pub fn nbd_uri(&self) -> String {
        format!("nbd+unix:///?socket={}", self.path("nbd").display())
    }
}

/// A running `serve`, ended with the value.
pub struct Server {
    pub child: Child,
    pub report: Value,
    stdout: BufReader<ChildStdout>,
}

impl Server {
    /// Starts `serve --json` and waits until it is ready.
    pub fn start(command: &mut Command) -> Server {
        let mut child = command
            .arg("--json")
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let mut stdout = BufReader::new(child.stdout.take().unwrap());
        let mut line = String::new();
        stdout.read_line(&mut line).unwrap();
        let Ok(report) = serde_json::from_str(&line) else {
            let mut err = String::new();
            child.stderr.take().unwrap().read_to_string(&mut err).unwrap();
            panic!("{command:?} is not ready: {line}{err}");
        };
        Server { child, report, stdout }
    }

    /// The supervisor's, whatever it was started with (strace, a shell).
    pub fn pid(&self) -> Pid {
        Pid::from_raw(self.report["pid"].as_i64().unwrap() as i32).unwrap()
    }

    pub fn worker_pid(&self) -> Pid {
        Pid::from_raw(self.report["worker_pid"].as_i64().unwrap() as i32).unwrap()
    }

    /// Sends a signal, waits for the end: exit code, and what it said since it was ready.
    pub fn end(mut self, signal: Signal) -> (i32, String) {
        rustix::process::kill_process(self.pid(), signal).unwrap();
        self.wait()
    }

    pub fn wait(&mut self) -> (i32, String) {
        let mut text = String::new();
        self.stdout.read_to_string(&mut text).unwrap();
        self.child.stderr.take().unwrap().read_to_string(&mut text).unwrap();
        let status = self.child.wait().unwrap();
        (status.code().unwrap_or_else(|| panic!("killed: {status}: {text}")), text)
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        if let Ok(None) = self.child.try_wait() {
            // As a user would, so that nothing is left behind by a test that failed.
            let _ = rustix::process::kill_process(self.pid(), Signal::TERM);
            let _ = self.child.wait();
        }
    }
}

pub fn alive(pid: Pid) -> bool {
    Path::new(&format!("/proc/{}", pid.as_raw_nonzero())).exists()
}

pub fn is_socket(path: &Path) -> bool {
    path.symlink_metadata().is_ok_and(|m| m.file_type().is_socket())
}

pub fn is_root() -> bool {
    rustix::process::geteuid().is_root()
}
