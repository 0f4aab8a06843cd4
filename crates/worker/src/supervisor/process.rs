//! The worker's process: starts it by executing this program again, exchanges messages over its channel, kills it by its
//! pidfd. Never signals a process ID, which may belong to another process by then.
//!
//! Invariant: messages reach the worker whole and in order. A message that does not fit into the channel is queued here with
//! its fds, and the supervisor does not wait.

use crate::channel::{self, FromWorker, ToWorker};
use crate::lifeline::Lifeline;
use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::fs::OFlags;
use rustix::io::Errno;
use rustix::process::{PidfdFlags, Signal};
use spillway_control::program::{check_program, check_program_file};
use spillway_control::{ErrorKind, SupervisorError, default_signals};
use std::collections::VecDeque;
use std::ffi::OsString;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// The argument of a program that is started as a worker.
pub const WORK: &str = "__worker";
/// The fd that a worker finds its channel at.
const CHANNEL_FD: i32 = 3;
/// How long a process that was killed may take to end.
const KILL_DEADLINE: Duration = Duration::from_secs(5);

/// The program that is executed as a worker.
#[derive(Clone, Debug)]
pub struct Program {
    /// Path of the file.
    pub path: PathBuf,
    /// Its arguments.
    pub arguments: Vec<OsString>,
    /// Keeps the fd open that `path` names, if it is a path in /proc/self/fd.
    _held: Option<Arc<File>>,
}

impl Program {
    /// A file and its arguments.
    pub fn new(path: impl Into<PathBuf>, arguments: Vec<OsString>) -> Program {
        Program { path: path.into(), arguments, _held: None }
    }

    /// A worker program at another path. Holds the file that is there now, even if the path changes later. Returns an
    /// error if another user could change the file.
    pub(super) fn elsewhere(path: &Path) -> Result<Program, SupervisorError> {
        let cannot = |e| {
            let advice = "give the path of another spillway-worker";
            SupervisorError::on_path(ErrorKind::Unavailable, "cannot open", path, e, advice)
        };
        let path = &check_program(path)?;
        let flags = OFlags::PATH | OFlags::CLOEXEC;
        let held = rustix::fs::open(path, flags, rustix::fs::Mode::empty()).map_err(|e| cannot(e.into()))?;
        let held = File::from(held);
        check_program_file(path, &held.metadata().map_err(cannot)?)?;
        let path = format!("/proc/self/fd/{}", held.as_raw_fd());
        Ok(Program { _held: Some(Arc::new(held)), ..Program::new(path, vec![WORK.into()]) })
    }
}

impl Default for Program {
    /// The program that runs, even if its file was replaced.
    fn default() -> Self {
        Program::new("/proc/self/exe", vec![WORK.into()])
    }
}

/// A running worker.
#[derive(Debug)]
pub(super) struct Worker {
    child: Child,
    pidfd: OwnedFd,
    channel: OwnedFd,
    lifeline: Lifeline,
    outbox: VecDeque<(ToWorker, Vec<OwnedFd>)>,
}

impl Worker {
    /// Starts a worker in a process group of its own. It inherits its channel and stderr, nothing else.
    pub fn start(program: &Program) -> Result<Worker, SupervisorError> {
        let cannot = |e: io::Error| SupervisorError::internal("cannot start the worker", e);
        let (ours, theirs) = channel::pair().map_err(cannot)?;
        let lifeline = Lifeline::new().map_err(cannot)?;
        rustix::io::ioctl_fionbio(&ours, true).map_err(|e| cannot(e.into()))?;
        // Out of the way of CHANNEL_FD, so that dup2 below always clears close-on-exec.
        let theirs =
            rustix::io::fcntl_dupfd_cloexec(&theirs, CHANNEL_FD + 1).map_err(|e| cannot(e.into()))?;
        let from = theirs.as_raw_fd();
        let mut command = Command::new(&program.path);
        command
            .args(&program.arguments)
            .arg0("spillway-worker")
            .process_group(0)
            .stdin(Stdio::null())
            .stdout(Stdio::null());
        default_signals(&mut command);
        // SAFETY: only system calls on plain numbers between fork and exec; `theirs` lives until after `spawn`.
        unsafe {
            command.pre_exec(move || {
                if libc::dup2(from, CHANNEL_FD) < 0 {
                    return Err(io::Error::last_os_error());
                }
                // What our own parent left open is not the worker's. A kernel without the call keeps it open.
                let first = CHANNEL_FD as u32 + 1;
                libc::syscall(libc::SYS_close_range, first, u32::MAX, libc::CLOSE_RANGE_CLOEXEC);
                Ok(())
            });
        }
        let mut child = command.spawn().map_err(cannot)?;
        let pid = rustix::process::Pid::from_child(&child);
        match rustix::process::pidfd_open(pid, PidfdFlags::empty()) {
            Ok(pidfd) => Ok(Worker { child, pidfd, channel: ours, lifeline, outbox: VecDeque::new() }),
            Err(e) => {
                let _ = child.kill();
                let _ = child.wait();
                Err(cannot(e.into()))
            }
        }
    }

    /// Process ID of the worker.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Readable when the process has ended.
    pub fn pidfd(&self) -> BorrowedFd<'_> {
        self.pidfd.as_fd()
    }

    /// Signals the worker's death, which comes before the end of its process.
    pub fn lifeline(&self) -> &Lifeline {
        &self.lifeline
    }

    /// The channel, for poll(2).
    pub fn channel(&self) -> BorrowedFd<'_> {
        self.channel.as_fd()
    }

    /// Whether messages wait for space in the channel.
    pub fn has_unsent(&self) -> bool {
        !self.outbox.is_empty()
    }

    /// Sends a message, now or as soon as the channel has space. It is no error if the worker has ended: its pidfd shows that.
    pub fn send(&mut self, message: ToWorker, fds: Vec<OwnedFd>) -> Result<(), SupervisorError> {
        self.outbox.push_back((message, fds));
        self.send_waiting()
    }

    /// Sends queued messages as far as the channel has space.
    pub fn send_waiting(&mut self) -> Result<(), SupervisorError> {
        while let Some((message, fds)) = self.outbox.front() {
            let borrowed: Vec<_> = fds.iter().map(AsFd::as_fd).collect();
            match channel::send(&self.channel, message, &borrowed) {
                Err(e) if e.would_block() => break,
                Err(e) if e.is_closed() => self.outbox.clear(),
                Err(e) => return Err(SupervisorError::internal("cannot speak to the worker", e)),
                Ok(()) => {
                    self.outbox.pop_front();
                }
            }
        }
        Ok(())
    }

    /// Receives the next message, if there is one.
    pub fn receive(&self) -> Result<Received, SupervisorError> {
        match channel::receive(&self.channel) {
            Ok(Some((message, fds))) => Ok(Received::Message(message, fds)),
            Ok(None) => Ok(Received::Closed),
            Err(e) if e.would_block() => Ok(Received::Nothing),
            Err(e) if e.is_closed() => Ok(Received::Closed),
            Err(e) => Err(SupervisorError::internal("cannot understand the worker", e)),
        }
    }

    /// Exit status of the process, if it has ended.
    pub fn ended(&mut self) -> Option<ExitStatus> {
        self.child.try_wait().ok().flatten()
    }

    /// Kills the process. Its pidfd shows when it has ended.
    pub fn end(&self) {
        let _ = rustix::process::pidfd_send_signal(&self.pidfd, Signal::KILL);
    }

    /// Kills the process and waits for its end, at most [`KILL_DEADLINE`]. Returns false if it has not ended by then, for
    /// example because a system call does not return.
    pub fn kill(&mut self) -> bool {
        self.end();
        let deadline = Instant::now() + KILL_DEADLINE;
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            let timeout = Timespec { tv_sec: left.as_secs() as i64, tv_nsec: i64::from(left.subsec_nanos()) };
            let mut end = [PollFd::new(&self.pidfd, PollFlags::IN)];
            if rustix::event::poll(&mut end, Some(&timeout)) != Err(Errno::INTR) {
                return self.ended().is_some();
            }
        }
    }
}

impl Drop for Worker {
    /// Kills the process, so that no worker uses the disk after its supervisor has released it.
    fn drop(&mut self) {
        if self.ended().is_none() {
            self.kill();
        }
    }
}

/// Returns the worker's end of the channel in a process that a supervisor has started, `None` in any other. Call it once,
/// before any other file is opened.
pub fn channel_from_supervisor() -> Option<OwnedFd> {
    // SAFETY: the fd is only queried; one that is not open gives an error.
    let candidate = unsafe { BorrowedFd::borrow_raw(CHANNEL_FD) };
    if rustix::net::sockopt::socket_type(candidate) != Ok(rustix::net::SocketType::SEQPACKET) {
        return None;
    }
    // SAFETY: a supervisor puts the channel there before it executes this program, and nothing else owns it.
    Some(unsafe { OwnedFd::from_raw_fd(CHANNEL_FD) })
}

/// Result of receiving from the channel.
pub(super) enum Received {
    Message(FromWorker, Vec<OwnedFd>),
    Nothing,
    Closed,
}
