//! The worker's process: started by re-executing this program, spoken to over its channel, ended by its pidfd.
//! Never signals a number that may have become somebody else.
//!
//! Invariant: messages reach the worker whole and in order; one that the channel cannot take yet waits here
//! with its fds, and nobody else does.

use crate::channel::{self, FromWorker, ToWorker};
use crate::lifeline::Lifeline;
use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::fs::OFlags;
use rustix::io::Errno;
use rustix::process::{PidfdFlags, Signal};
use spillway_control::program::check_program_file;
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

/// What is executed as worker.
#[derive(Clone, Debug)]
pub struct Program {
    /// The file.
    pub path: PathBuf,
    /// Its arguments.
    pub arguments: Vec<OsString>,
    /// Keeps `path` what it was, if it names an fd.
    _held: Option<Arc<File>>,
}

impl Program {
    /// A file and its arguments.
    pub fn new(path: impl Into<PathBuf>, arguments: Vec<OsString>) -> Program {
        Program { path: path.into(), arguments, _held: None }
    }

    /// A program of this kind that lies elsewhere: the file that is there now, whatever becomes of the path.
    /// An error if somebody else could change what is in it.
    pub(super) fn elsewhere(path: &Path) -> Result<Program, SupervisorError> {
        let cannot = |e| {
            let advice = "give the path of another spillway-worker";
            SupervisorError::on_path(ErrorKind::Unavailable, "cannot open", path, e, advice)
        };
        let flags = OFlags::PATH | OFlags::CLOEXEC;
        let held = rustix::fs::open(path, flags, rustix::fs::Mode::empty()).map_err(|e| cannot(e.into()))?;
        let held = File::from(held);
        check_program_file(path, &held.metadata().map_err(cannot)?)?;
        let path = format!("/proc/self/fd/{}", held.as_raw_fd());
        Ok(Program { _held: Some(Arc::new(held)), ..Program::new(path, vec![WORK.into()]) })
    }
}

impl Default for Program {
    /// This very program, whatever has become of its file.
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
    /// Starts a worker in a process group of its own, with nothing but its channel and our stderr.
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

    /// Its process id.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Readable when it has ended.
    pub fn pidfd(&self) -> BorrowedFd<'_> {
        self.pidfd.as_fd()
    }

    /// By what it tells of its death, which comes before its end.
    pub fn lifeline(&self) -> &Lifeline {
        &self.lifeline
    }

    /// Its channel, to poll.
    pub fn channel(&self) -> BorrowedFd<'_> {
        self.channel.as_fd()
    }

    /// Whether messages wait for room in the channel.
    pub fn has_unsent(&self) -> bool {
        !self.outbox.is_empty()
    }

    /// Sends a message, now or as soon as there is room. A worker that has gone shows by its pidfd.
    pub fn send(&mut self, message: ToWorker, fds: Vec<OwnedFd>) -> Result<(), SupervisorError> {
        self.outbox.push_back((message, fds));
        self.send_waiting()
    }

    /// Sends what waits, as far as there is room.
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

    /// The next message, if there is one.
    pub fn receive(&self) -> Result<Received, SupervisorError> {
        match channel::receive(&self.channel) {
            Ok(Some((message, fds))) => Ok(Received::Message(message, fds)),
            Ok(None) => Ok(Received::Closed),
            Err(e) if e.would_block() => Ok(Received::Nothing),
            Err(e) if e.is_closed() => Ok(Received::Closed),
            Err(e) => Err(SupervisorError::internal("cannot understand the worker", e)),
        }
    }

    /// How it ended, if it has.
    pub fn ended(&mut self) -> Option<ExitStatus> {
        self.child.try_wait().ok().flatten()
    }

    /// Ends it at once; its pidfd tells when it has ended.
    pub fn end(&self) {
        let _ = rustix::process::pidfd_send_signal(&self.pidfd, Signal::KILL);
    }

    /// Ends it at once and waits for that, for some seconds at most. False: something in the kernel keeps it, such as a
    /// system call that does not return.
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
    /// Nobody holds the disk after its supervisor has let go of it, but for one that the kernel keeps.
    fn drop(&mut self) {
        if self.ended().is_none() {
            self.kill();
        }
    }
}

/// The worker's end of the channel, in the process that a supervisor has started; `None` in any other. To be
/// called once, before anything else is opened.
pub fn channel_from_supervisor() -> Option<OwnedFd> {
    // SAFETY: only asks what the number stands for.
    let candidate = unsafe { BorrowedFd::borrow_raw(CHANNEL_FD) };
    if rustix::net::sockopt::socket_type(candidate) != Ok(rustix::net::SocketType::SEQPACKET) {
        return None;
    }
    // SAFETY: a supervisor puts the channel there before it executes this program, and nothing else owns it.
    Some(unsafe { OwnedFd::from_raw_fd(CHANNEL_FD) })
}

/// What came over the channel.
pub(super) enum Received {
    Message(FromWorker, Vec<OwnedFd>),
    Nothing,
    Closed,
}
