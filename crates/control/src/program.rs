//! The program that serves disks, `spillway-worker`: where it is, and what it is started with.
//!
//! Invariant: it is never looked for by a name alone, so that nothing in PATH decides what serves a disk.

use crate::error::{ErrorKind, SupervisorError};
use crate::settings::ServeSettings;
use serde::{Deserialize, Serialize};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// The name of its file.
pub const WORKER: &str = "spillway-worker";
/// Where a package installs it.
pub const LIBEXEC: &str = match option_env!("SPILLWAY_LIBEXEC") {
    Some(folder) => folder,
    None => "/usr/lib/spillway",
};
/// Its argument: serve a disk, which the next one describes.
pub const SERVE: &str = "serve";
/// Its argument: say what there is on this host.
pub const PROBE: &str = "probe";

/// What `spillway-worker serve` is to do: its one argument, as JSON.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ServeOrder {
    /// The disk.
    pub settings: ServeSettings,
    /// What it says on standard output.
    pub output: ServeOutput,
}

/// What is said on standard output while a disk is served.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum ServeOutput {
    /// A line for people when it is ready.
    Line,
    /// A [`Report`](crate::Report) as one line of JSON when it is ready.
    Report,
    /// The same, and [`Stats`](crate::Stats) as another line of JSON when it has ended.
    ReportAndStats,
}

/// What `spillway-worker probe` says, as JSON.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Probe {
    /// The program's version.
    pub version: String,
    /// Whether the I/O of files can be done by io_uring; if not, why.
    pub io_uring: Result<(), String>,
    /// Version of the kernel's Landlock; 0 for none.
    pub landlock: u32,
}

/// Where the program is: beside the running program, as it is built, else where a package installs it.
pub fn worker_program() -> Result<PathBuf, SupervisorError> {
    let own = std::env::current_exe()
        .map_err(|e| SupervisorError::internal("cannot tell which program this is", e))?;
    let beside = own.parent().unwrap_or(Path::new("/"));
    let places = [beside, Path::new(LIBEXEC)];
    places.iter().map(|folder| folder.join(WORKER)).find(|path| path.is_file()).ok_or_else(|| {
        SupervisorError::new(
            ErrorKind::Unavailable,
            format!(
                "{WORKER}, the program that serves disks, is neither in {} nor in {LIBEXEC}: install the whole package, or \
                 build it with 'cargo build -p spillway-worker'",
                beside.display()
            ),
        )
    })
}

impl ServeOrder {
    /// As arguments of the program.
    pub fn arguments(&self) -> Result<[String; 2], SupervisorError> {
        let order = serde_json::to_string(self).map_err(|e| {
            let advice = "give files and sockets names that are UTF-8";
            SupervisorError::caused(ErrorKind::Options, "this disk cannot be described", e, advice)
        })?;
        Ok([SERVE.into(), order])
    }
}

/// The command that serves a disk.
pub fn serve_command(order: &ServeOrder) -> Result<Command, SupervisorError> {
    let mut command = Command::new(worker_program()?);
    command.args(order.arguments()?);
    Ok(command)
}

/// Asks the program what there is on this host.
pub fn probe() -> Result<Probe, SupervisorError> {
    let program = worker_program()?;
    let (at, kind, advice) = (program.display(), ErrorKind::Unavailable, "install the whole package again");
    let done = Command::new(&program)
        .arg(PROBE)
        .stdin(Stdio::null())
        .output()
        .map_err(|e| SupervisorError::caused(kind, format!("{at}: it cannot be started"), e, advice))?;
    serde_json::from_slice(&done.stdout).map_err(|e| {
        let what = format!("{at}: it has ended with {}, and what it says cannot be read", done.status);
        SupervisorError::caused(kind, what, e, advice)
    })
}
