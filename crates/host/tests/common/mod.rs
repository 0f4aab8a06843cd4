//! A daemon of the test's own, and files to give it.
#![allow(dead_code, clippy::unwrap_used)]

use rustix::process::{Pid, Signal, kill_process};
use spillway_api::client::{Client, ClientError};
use spillway_api::{
    Catalog, ImageImport, Machine, NewCatalog, Operation, OperationState, Problem, SourceFormat,
};
use spillway_testkit::process::wait_until;
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// A folder, and the daemon that keeps its state there.
pub struct World {
    dir: tempfile::TempDir,
    daemon: Option<Child>,
    /// More options of the daemon.
    options: Vec<String>,
    /// What it said when it was ready.
    pub ready_line: String,
}

impl World {
    pub fn new() -> World {
        let mut world = World::unstarted();
        world.start();
        world
    }

    /// A folder alone.
    pub fn unstarted() -> World {
        let dir = tempfile::tempdir_in("/var/tmp").unwrap();
        World { dir, daemon: None, options: Vec::new(), ready_line: String::new() }
    }

    /// Starts the daemon with more options.
    pub fn start_with(&mut self, options: Vec<String>) {
        self.options = options;
        self.start();
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    pub fn state(&self) -> PathBuf {
        self.path("state")
    }

    pub fn socket(&self) -> PathBuf {
        self.path("sock")
    }

    pub fn client(&self) -> Client {
        Client::new(&self.socket()).unwrap()
    }

    /// Starts the daemon and waits until it is ready.
    pub fn start(&mut self) {
        let mut daemon = Command::new(env!("CARGO_BIN_EXE_spillwayd"));
        daemon.arg("--state").arg(self.state()).arg("--socket").arg(self.socket());
        // No machine can start: the lab has tests of those that do.
        for (option, value) in [("--hypervisor", "none"), ("--worker", "/nonexistent/spillway")] {
            if !self.options.iter().any(|given| given == option) {
                daemon.args([option, value]);
            }
        }
        daemon.args(&self.options);
        let mut daemon = daemon.stdout(Stdio::piped()).spawn().unwrap();
        let mut line = String::new();
        BufReader::new(daemon.stdout.take().unwrap()).read_line(&mut line).unwrap();
        assert!(line.contains("ready"), "{line:?}");
        self.daemon = Some(daemon);
        self.ready_line = line;
    }

    /// A program that never serves the disk that it is asked for: a machine that is started stays on its way.
    pub fn sleeper(&self) -> String {
        let path = self.path("sleeper");
        std::fs::write(&path, "#!/bin/sh\nexec sleep 1000\n").unwrap();
        std::fs::set_permissions(&path, std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
        path.display().to_string()
    }

    /// The lines of its audit log, older parts left out.
    pub fn audit(&self) -> Vec<serde_json::Value> {
        let text = std::fs::read_to_string(self.state().join("audit.log")).unwrap_or_default();
        text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
    }

    /// Sends it a signal that it lives on with.
    pub fn signal(&self, signal: Signal) {
        spillway_testkit::process::send_signal(Pid::from_child(self.daemon.as_ref().unwrap()), signal)
            .unwrap();
    }

    /// The process of the daemon.
    pub fn pid(&self) -> u32 {
        self.daemon.as_ref().unwrap().id()
    }

    /// Ends it with a signal. Its exit code.
    pub fn end(&mut self, signal: Signal) -> Option<i32> {
        let mut daemon = self.daemon.take().unwrap();
        kill_process(Pid::from_child(&daemon), signal).unwrap();
        daemon.wait().unwrap().code()
    }

    /// The paths below a folder, sorted.
    pub fn below(&self, folder: &Path) -> Vec<String> {
        fn walk(at: &Path, top: &Path, found: &mut Vec<String>) {
            for entry in std::fs::read_dir(at).into_iter().flatten().flatten() {
                found.push(entry.path().strip_prefix(top).unwrap().display().to_string());
                if entry.file_type().unwrap().is_dir() {
                    walk(&entry.path(), top, found);
                }
            }
        }
        let mut found = Vec::new();
        walk(folder, folder, &mut found);
        found.sort();
        found
    }
}

impl Drop for World {
    fn drop(&mut self) {
        if let Some(mut daemon) = self.daemon.take() {
            let _ = daemon.kill();
            let _ = daemon.wait();
        }
    }
}

/// Waits for an operation's end.
pub fn ends(client: &Client, operation: &Operation) -> Result<(), Problem> {
    let begun = Instant::now();
    loop {
        let now: Operation = client.get(&format!("/v1/operations/{}?wait=10", operation.id)).unwrap();
        match now.state {
            OperationState::Done => return Ok(()),
            OperationState::Failed { error } => return Err(error),
            OperationState::Running => assert!(begun.elapsed() < Duration::from_secs(60), "{now:?}"),
        }
    }
}

/// More versions of an image, all of them ready; of a new one the first is published.
pub fn import(world: &World, image: &str, versions: u32) {
    let path = world.path("disk").display().to_string();
    run("qemu-img", &["create", "-q", "-f", "raw", &path, "1M"]);
    for _ in 0..versions {
        let import = ImageImport { path: path.clone(), format: SourceFormat::Raw, store: None };
        let begun: Operation = world.client().post(&format!("/v1/images/{image}/versions"), &import).unwrap();
        ends(&world.client(), &begun).unwrap();
    }
}

/// A request for a catalog.
pub fn new(name: &str, spec: &str) -> NewCatalog {
    NewCatalog { name: name.parse().unwrap(), spec: serde_json::from_str(spec).unwrap() }
}

/// Makes a catalog.
pub fn create(client: &Client, name: &str, spec: &str) -> Result<Catalog, ClientError> {
    client.post("/v1/catalogs", &new(name, spec))
}

/// The machines of a catalog.
pub fn machines(client: &Client, catalog: &str) -> Vec<Machine> {
    client.list::<Machine>(&format!("/v1/machines?catalog={catalog}")).unwrap().items
}

/// Asks until there is an answer.
pub fn until<T>(what: &str, mut question: impl FnMut() -> Option<T>) -> T {
    wait_until(Duration::from_secs(120), &mut question).unwrap_or_else(|| panic!("not so: {what}"))
}

/// What the daemon refused.
pub fn refused<T>(answer: Result<T, ClientError>) -> Problem {
    match answer {
        Err(ClientError::Refused(error)) => error,
        Err(other) => panic!("{other}"),
        Ok(_) => panic!("it was done"),
    }
}

/// Runs a program of the system that must succeed; its standard output.
pub fn run(program: &str, arguments: &[&str]) -> String {
    let done = Command::new(program).args(arguments).output().unwrap_or_else(|e| panic!("{program}: {e}"));
    let (out, err) = (String::from_utf8_lossy(&done.stdout), String::from_utf8_lossy(&done.stderr));
    assert!(done.status.success(), "{program} {arguments:?}: {out}{err}");
    out.into_owned()
}

/// Asks, and gives the head of the answer, in small letters, and the body.
pub fn head_and_body(world: &World, method: &str, path: &str, lines: &str, body: &[u8]) -> (String, Vec<u8>) {
    let mut stream = UnixStream::connect(world.socket()).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
    let head = format!(
        "{method} {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n{lines}content-length: {}\r\n\r\n",
        body.len()
    );
    stream.write_all(head.as_bytes()).unwrap();
    // It may have answered before all of it was sent.
    let _ = stream.write_all(body);
    let mut answer = Vec::new();
    let _ = stream.read_to_end(&mut answer);
    let at = answer.windows(4).position(|w| w == b"\r\n\r\n");
    let at = at.unwrap_or_else(|| panic!("{method} {path}: {:?}", String::from_utf8_lossy(&answer))) + 4;
    (String::from_utf8_lossy(&answer[..at]).to_lowercase(), answer[at..].to_vec())
}

/// Asks with more lines in the head, each with its end; gives the status and the body.
pub fn ask_with(world: &World, method: &str, path: &str, lines: &str, body: &[u8]) -> (u16, Vec<u8>) {
    let (head, body) = head_and_body(world, method, path, lines, body);
    (head.split(' ').nth(1).unwrap().parse().unwrap(), body)
}

/// The tag of an object.
pub fn tag(world: &World, path: &str) -> String {
    let (head, _) = head_and_body(world, "GET", path, "", b"");
    let line = head.lines().find_map(|line| line.strip_prefix("etag: ")).map(str::to_owned);
    line.unwrap_or_else(|| panic!("{path}: {head}"))
}

/// A file system of its own, until it is dropped.
pub struct Mounted(PathBuf);

impl Mounted {
    /// In memory, so large. None: not allowed here, which is said.
    pub fn tmpfs(at: &Path, size: &str) -> Option<Mounted> {
        let options = format!("size={size}");
        let done = Command::new("mount").args(["-t", "tmpfs", "-o", &options, "tmpfs"]).arg(at).status();
        if done.is_ok_and(|status| status.success()) {
            return Some(Mounted(at.to_owned()));
        }
        spillway_testkit::skip("mounting a tmpfs is not allowed here");
        None
    }

    /// In a file beside it, so large, made by this program. None: not allowed here, which is said.
    pub fn image(at: &Path, size: &str, mkfs: &[&str]) -> Option<Mounted> {
        let image = at.with_extension("image").display().to_string();
        run("truncate", &["-s", size, &image]);
        run(mkfs[0], &[&mkfs[1..], &[&image]].concat());
        let done = Command::new("mount").args(["-o", "loop", &image]).arg(at).status();
        if done.is_ok_and(|status| status.success()) {
            return Some(Mounted(at.to_owned()));
        }
        spillway_testkit::skip("mounting an image is not allowed here");
        None
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("-l").arg(&self.0).status();
    }
}
