//! A daemon of one's own with its machines, as a user has them: `spillwayd` on a folder, asked by `spillway`.
//!
//! Invariant: when a [`Daemon`] is dropped its machines have ended too, which would outlive it otherwise.

use crate::disk::check_built;
use crate::process::{Server, wait_until};
use anyhow::{Context, Result, bail, ensure};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use std::ffi::OsStr;
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

/// How long it may take until it is ready.
const PATIENCE: Duration = Duration::from_secs(30);

/// A running `spillwayd`.
pub struct Daemon {
    server: Server,
    /// The command line, in words.
    words: Vec<String>,
    spillway: PathBuf,
    dir: PathBuf,
}

impl Daemon {
    /// Starts the one that lies beside `spillway`. State, socket and messages go to `dir`.
    pub fn start(spillway: &Path, dir: &Path, options: &[&str]) -> Result<Daemon> {
        Daemon::start_within(&[], spillway, dir, options)
    }

    /// The same by a command that executes what follows its own words, such as `nsenter --net=FILE`.
    pub fn start_within(prefix: &[String], spillway: &Path, dir: &Path, options: &[&str]) -> Result<Daemon> {
        let program = spillway.with_file_name("spillwayd");
        check_built(&program)?;
        let text = |path: PathBuf| path.display().to_string();
        let mut words = prefix.to_vec();
        words.push(program.to_str().context("the program's path is not UTF-8")?.into());
        words.extend(["--state".into(), text(dir.join("state"))]);
        words.extend(["--socket".into(), text(dir.join("sock"))]);
        words.extend(options.iter().map(ToString::to_string));
        let server = begin(&words, dir)?;
        Ok(Daemon { server, words, spillway: spillway.into(), dir: dir.into() })
    }

    /// Ends it, as a service manager does, and starts it again. Its machines go on.
    pub fn restart(&mut self) -> Result<()> {
        self.server.stop()?;
        self.server = begin(&self.words, &self.dir)?;
        Ok(())
    }

    /// What `spillway` prints when it is asked so, as a user would.
    pub fn ask(&self, arguments: &[&str]) -> Result<String> {
        let done = Command::new(&self.spillway)
            .args(arguments)
            .env("SPILLWAY_SOCKET", self.dir.join("sock"))
            .output()
            .with_context(|| format!("{}: cannot be executed", self.spillway.display()))?;
        if !done.status.success() {
            bail!("spillway {}: {}", arguments.join(" "), String::from_utf8_lossy(&done.stderr).trim());
        }
        String::from_utf8(done.stdout).context("what it printed is not UTF-8")
    }

    /// The same with `--json`.
    pub fn json(&self, arguments: &[&str]) -> Result<Value> {
        let text = self.ask(&[arguments, &["--json"]].concat())?;
        serde_json::from_str(&text).with_context(|| format!("spillway {} --json", arguments.join(" ")))
    }

    /// What the API has at a path.
    pub fn get(&self, path: &str) -> Result<Value> {
        let mut stream = UnixStream::connect(self.dir.join("sock"))?;
        write!(stream, "GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")?;
        let mut answer = String::new();
        stream.read_to_string(&mut answer)?;
        let (head, body) = answer.split_once("\r\n\r\n").context("an answer without a header")?;
        ensure!(head.starts_with("HTTP/1.1 200 "), "GET {path}: {answer}");
        serde_json::from_str(body).with_context(|| format!("GET {path}: {body}"))
    }

    /// Opens its web console to one browser until the value is dropped; returns the address too.
    pub fn console(&self) -> Result<(Server, String)> {
        let (program, log) = (self.spillway.display().to_string(), self.dir.join("console.log"));
        let arguments =
            ["console", "--socket", &self.dir.join("sock").display().to_string()].map(String::from);
        let mut console = Server::start("spillway console", &program, &arguments, None, &log)?;
        let address = wait_until(PATIENCE, || {
            let said = std::fs::read_to_string(&log).unwrap_or_default();
            let address =
                said.lines().next().filter(|line| line.starts_with("http://") && said.contains("Ctrl-C"));
            match (address, console.ended().ok()?) {
                (Some(address), _) => Some(Some(address.to_owned())),
                (None, ended) => ended.map(|_| None),
            }
        });
        let address = address
            .flatten()
            .with_context(|| format!("{} prints no address\n{}", console.command, console.tail()))?;
        Ok((console, address))
    }

    /// Process id.
    pub fn pid(&self) -> u32 {
        self.server.pid()
    }

    /// The end of what it has printed.
    pub fn tail(&self) -> String {
        self.server.tail()
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        let _ = self.ask(&["machine", "stop", "--all", "--force", "--wait"]);
        let _ = self.server.stop();
        end_machines(&self.dir);
    }
}

/// Starts a daemon that keeps its files in this folder, and waits until it is ready.
fn begin(words: &[String], dir: &Path) -> Result<Server> {
    let log = dir.join("spillwayd.log");
    let mut server = Server::start("spillwayd", &words[0], &words[1..], None, &log)?;
    let ready = wait_until(PATIENCE, || {
        let is_ready = std::fs::read_to_string(&log).unwrap_or_default().contains("spillwayd: ready on");
        (is_ready || server.ended().ok().flatten().is_some()).then_some(is_ready)
    });
    ensure!(ready == Some(true), "{} is not ready\n{}", server.command, server.tail());
    Ok(server)
}

/// Ends every process that works in a folder below this one: machines are nobody's children.
pub fn end_machines(dir: &Path) {
    let Ok(dir) = dir.canonicalize() else { return };
    for entry in std::fs::read_dir("/proc").into_iter().flatten().flatten() {
        let works_there = std::fs::read_link(entry.path().join("cwd")).is_ok_and(|cwd| cwd.starts_with(&dir));
        let pid = entry.file_name().to_str().and_then(|name| name.parse().ok()).and_then(Pid::from_raw);
        if let Some(pid) = pid.filter(|_| works_there && !is_this(entry.file_name().as_os_str())) {
            let _ = kill_process(pid, Signal::KILL);
        }
    }
}

fn is_this(name: &OsStr) -> bool {
    name == std::process::id().to_string().as_str()
}
