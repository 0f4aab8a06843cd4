//! The disk of `spillway run`: `spillway-worker` as a child, which serves it and says how it went.
//!
//! Invariant: it ends before this value does, or with this process. What it complains of, it writes to standard error itself.

use super::{internal, wait_for};
use crate::error::{Exit, Failure};
use crate::output;
use rustix::process::{Pid, PidfdFlags, Signal};
use spillway_control::program::{ServeOrder, ServeOutput, serve_command};
use spillway_control::{
    ErrorKind, ServeSettings, Signals, Stats, SupervisorError, default_signals, end_with_parent,
};
use std::io::{BufRead, BufReader};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Child, ChildStdout, ExitCode, ExitStatus, Stdio};

/// The disk's server.
pub struct DiskServer {
    child: Child,
    /// Readable when it has ended.
    pub pidfd: OwnedFd,
    lines: BufReader<ChildStdout>,
}

/// What came first when a disk was started.
pub enum Start {
    /// It serves.
    Ready,
    /// A signal.
    Interrupted,
    /// It has ended, and has said why; what this program ends with.
    Failed(ExitCode),
}

impl DiskServer {
    /// Starts it. Wait with [`DiskServer::ready`].
    pub fn start(settings: ServeSettings) -> Result<DiskServer, Failure> {
        let mut command = serve_command(&ServeOrder { settings, output: ServeOutput::ReportAndStats })?;
        // In a group of its own: what the terminal sends is for the machine, whose disk ends after it.
        command.process_group(0).stdin(Stdio::null()).stdout(Stdio::piped());
        default_signals(&mut command);
        end_with_parent(&mut command);
        let mut child = command.spawn().map_err(|e| {
            let program = command.get_program().to_string_lossy();
            let message = format!("{program}: {e}: install the whole package again");
            SupervisorError::new(ErrorKind::Unavailable, message)
        })?;
        let stdout = child.stdout.take().expect("it was asked for");
        match rustix::process::pidfd_open(Pid::from_child(&child), PidfdFlags::empty()) {
            Ok(pidfd) => Ok(DiskServer { child, pidfd, lines: BufReader::new(stdout) }),
            Err(e) => {
                let _ = child.kill();
                let _ = child.wait();
                Err(internal(e.into()))
            }
        }
    }

    /// Waits until it serves.
    pub fn ready(&mut self, signals: &Signals) -> Result<Start, Failure> {
        if wait_for([self.lines.get_ref().as_fd(), signals.as_fd()], None)? == Some(1) {
            return Ok(Start::Interrupted);
        }
        let mut report = String::new();
        match self.lines.read_line(&mut report).map_err(internal)? {
            0 => Ok(Start::Failed(ended(self.child.wait().map_err(internal)?))),
            _ => Ok(Start::Ready),
        }
    }

    /// Stops it, and waits until it has ended: its figures, or what this program ends with if it has failed. Another signal
    /// makes it hurry.
    pub fn stop(&mut self, signals: &Signals) -> Result<Result<Stats, ExitCode>, Failure> {
        self.ask_to_end();
        while wait_for([self.pidfd.as_fd(), signals.as_fd()], None)? == Some(1) {
            signals.take();
            self.ask_to_end();
        }
        let status = self.child.wait().map_err(internal)?;
        let mut last = String::new();
        while self.lines.read_line(&mut last).map_err(internal)? > 0 {}
        if !status.success() {
            return Ok(Err(ended(status)));
        }
        let last = last.lines().last().unwrap_or_default();
        serde_json::from_str(last).map(Ok).map_err(|e| internal(e.into()))
    }

    fn ask_to_end(&self) {
        let _ = rustix::process::pidfd_send_signal(&self.pidfd, Signal::TERM);
    }
}

/// What this program ends with, since the disk's server has ended so.
fn ended(status: ExitStatus) -> ExitCode {
    match (status.code(), status.signal()) {
        // It was asked to end before it had begun.
        (_, Some(signal)) if signal == Signal::TERM.as_raw() => ExitCode::SUCCESS,
        (Some(code), _) => ExitCode::from(u8::try_from(code).unwrap_or(1)),
        (None, _) => {
            output::complain(
                "error",
                &format!("the disk's server has ended ({status}), and with it the machine"),
            );
            ExitCode::from(Exit::Internal as u8)
        }
    }
}

impl Drop for DiskServer {
    fn drop(&mut self) {
        if let Ok(None) = self.child.try_wait() {
            self.ask_to_end();
            let _ = self.child.wait();
        }
    }
}
