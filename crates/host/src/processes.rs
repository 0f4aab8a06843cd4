//! Processes that outlive the daemon: disks and virtual machines. Owns how they are begun so that the next daemon
//! finds them again, and how they are ended; knows nothing of what they do.
//!
//! Invariant: of one name in one folder at most one process runs; from the instant of its fork on it holds the lock
//! file `NAME.lock`, so that whoever cannot lock it knows that it lives, and nobody needs to have recorded that.

#![expect(unsafe_code, reason = "between fork and exec")]

use crate::error::HostError;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{FlockOperation, Mode, OFlags, flock};
use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};
use spillway_api::ErrorCode;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// How long a process that has just been forked may take to say who it is.
const BIRTH: Duration = Duration::from_secs(5);
/// How long one that was killed may take to end.
const DEATH: Duration = Duration::from_secs(10);

/// A process that lived when this value was made.
#[derive(Debug)]
pub struct Process {
    pid: Pid,
    pidfd: OwnedFd,
    name: String,
}

/// Begins a process in a folder, which becomes its working directory, in a session of its own. It is nobody's
/// child. What it says goes to `NAME.log`.
pub fn start(folder: &Path, name: &str, mut command: Command) -> Result<Process, HostError> {
    let program = command.get_program().to_string_lossy().into_owned();
    let cannot = |what: &str, e: io::Error| {
        let code = match e.kind() {
            io::ErrorKind::NotFound => ErrorCode::Unavailable,
            _ => ErrorCode::Internal,
        };
        HostError::new(code, format!("{name} in {}: {program} {what}: {e}", folder.display()))
    };
    let lock =
        File::options().create(true).truncate(false).read(true).write(true).open(lock_path(folder, name));
    let lock = lock.map_err(|e| cannot("cannot be begun", e))?;
    let until = Instant::now() + BIRTH;
    loop {
        match flock(&lock, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => break,
            // Somebody may only be looking.
            Err(Errno::WOULDBLOCK) if find(folder, name)?.is_some() || Instant::now() > until => {
                let message = format!("{name} in {} runs already", folder.display());
                return Err(HostError::new(ErrorCode::Conflict, message));
            }
            Err(Errno::WOULDBLOCK) => std::thread::sleep(Duration::from_millis(1)),
            Err(e) => return Err(cannot("cannot be begun", e.into())),
        }
    }
    lock.set_len(0).map_err(|e| cannot("cannot be begun", e))?;
    let log = File::options().create(true).append(true).open(folder.join(format!("{name}.log")));
    let log = log.and_then(|log| Ok((log.try_clone()?, log))).map_err(|e| cannot("has no log", e))?;
    command.current_dir(folder).stdin(Stdio::null()).stdout(log.0).stderr(log.1);
    let fd = lock.as_raw_fd();
    let born = move || {
        // SAFETY: system calls on plain numbers. The process between us and the one that executes ends at once.
        unsafe {
            match libc::fork() {
                0 => {}
                -1 => return Err(io::Error::last_os_error()),
                _ => libc::_exit(0),
            }
            if libc::setsid() < 0 || libc::fcntl(fd, libc::F_SETFD, 0) < 0 {
                return Err(io::Error::last_os_error());
            }
        }
        // Who it is, in its own words: a number alone may be somebody else's tomorrow.
        let mut stat = [0; 1024];
        let this = rustix::fs::open(c"/proc/self/stat", OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())?;
        let n = rustix::io::read(&this, &mut stat)?;
        // SAFETY: the file is open in every process that was forked with it.
        rustix::io::pwrite(unsafe { BorrowedFd::borrow_raw(fd) }, &stat[..n], 0)?;
        Ok(())
    };
    // SAFETY: it makes system calls and neither allocates nor locks.
    unsafe { command.pre_exec(born) };
    let spawned = command.spawn().and_then(|mut between| between.wait());
    spawned.map_err(|e| cannot("cannot be executed", e))?;
    // From here on the lock is held by the process alone.
    drop(lock);
    match find(folder, name)? {
        Some(process) => Ok(process),
        None => Err(cannot("ended at once", io::Error::other(tail(folder, name)))),
    }
}

/// The process of that name in a folder, if it lives.
pub fn find(folder: &Path, name: &str) -> Result<Option<Process>, HostError> {
    let broken = |e: io::Error| {
        let path = lock_path(folder, name);
        HostError::new(ErrorCode::Internal, format!("{}: {e}", path.display()))
    };
    let until = Instant::now() + BIRTH;
    loop {
        let lock = match File::open(lock_path(folder, name)) {
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(None),
            lock => lock.map_err(broken)?,
        };
        // Shared: another look, or a start that looks first, must not take this for the process.
        match flock(&lock, FlockOperation::NonBlockingLockShared) {
            Ok(()) => return Ok(None),
            Err(Errno::WOULDBLOCK) => {}
            Err(e) => return Err(broken(e.into())),
        }
        let mut stat = [0; 1024];
        let n = lock.read_at(&mut stat, 0).map_err(broken)?;
        if let Some((pid, begun)) = identity(&stat[..n]) {
            match pidfd_open(pid, PidfdFlags::empty()) {
                // Opened before it is looked at, so that it cannot become another meanwhile.
                Ok(pidfd) if begins(pid) == Some(begun) => {
                    return Ok(Some(Process { pid, pidfd, name: name.to_owned() }));
                }
                Ok(_) | Err(Errno::SRCH) => {}
                Err(e) => return Err(broken(e.into())),
            }
        }
        // It is just being born, or has just died.
        if Instant::now() > until {
            return Err(broken(io::Error::other("somebody holds it and does not say who")));
        }
        std::thread::sleep(Duration::from_millis(2));
    }
}

/// The last lines that a process of that name has said, for people.
pub fn tail(folder: &Path, name: &str) -> String {
    let log = std::fs::read(folder.join(format!("{name}.log"))).unwrap_or_default();
    let from = log.len().saturating_sub(2000);
    String::from_utf8_lossy(&log[from..]).trim().to_owned()
}

impl Process {
    /// Its id, for people.
    pub fn pid(&self) -> u32 {
        self.pid.as_raw_nonzero().get() as u32
    }

    /// Readable when it has ended.
    pub fn pidfd(&self) -> BorrowedFd<'_> {
        self.pidfd.as_fd()
    }

    /// Whether it has not ended, for so long at most.
    pub fn ends_within(&self, patience: Duration) -> bool {
        let until = Instant::now() + patience;
        loop {
            let left = until.saturating_duration_since(Instant::now());
            let left = Timespec { tv_sec: left.as_secs() as i64, tv_nsec: left.subsec_nanos().into() };
            match poll(&mut [PollFd::new(&self.pidfd, PollFlags::IN)], Some(&left)) {
                Err(Errno::INTR) => {}
                ended => return ended.is_ok_and(|n| n > 0),
            }
        }
    }

    /// Asks it to end, and ends it if it has not done so in time.
    pub fn end(&self, patience: Duration) -> Result<(), HostError> {
        for (signal, patience) in [(Signal::TERM, patience), (Signal::KILL, DEATH)] {
            let _ = pidfd_send_signal(&self.pidfd, signal);
            if self.ends_within(patience) {
                return Ok(());
            }
        }
        let message = format!("{} (process {}) was killed and does not end", self.name, self.pid());
        Err(HostError::new(ErrorCode::Internal, message))
    }
}

fn lock_path(folder: &Path, name: &str) -> PathBuf {
    folder.join(format!("{name}.lock"))
}

/// Process and start time, of a line of `/proc/PID/stat` (proc(5)).
fn identity(stat: &[u8]) -> Option<(Pid, u64)> {
    let stat = std::str::from_utf8(stat).ok()?;
    let pid = stat.split(' ').next()?.parse().ok()?;
    // The program's name is in parentheses and may hold anything; the start time is field 22.
    let begun = stat.rsplit_once(')')?.1.split_whitespace().nth(19)?.parse().ok()?;
    Some((Pid::from_raw(pid)?, begun))
}

fn begins(pid: Pid) -> Option<u64> {
    let stat = std::fs::read(format!("/proc/{}/stat", pid.as_raw_nonzero())).ok()?;
    identity(&stat).map(|(_, begun)| begun)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sleep(seconds: &str) -> Command {
        let mut command = Command::new("sleep");
        command.arg(seconds);
        command
    }

    #[test]
    fn a_process_is_found_again_and_is_nobodys_child() {
        let dir = tempfile::tempdir().unwrap();
        assert!(find(dir.path(), "disk").unwrap().is_none());
        let begun = start(dir.path(), "disk", sleep("1000")).unwrap();
        let pid = begun.pid();
        drop(begun);
        let error = start(dir.path(), "disk", sleep("1")).unwrap_err();
        assert_eq!(error.code, ErrorCode::Conflict);
        let found = find(dir.path(), "disk").unwrap().unwrap();
        assert_eq!(found.pid(), pid);
        let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap();
        let parent: u32 =
            stat.rsplit_once(')').unwrap().1.split_whitespace().nth(1).unwrap().parse().unwrap();
        assert_ne!(parent, std::process::id());
        found.end(Duration::from_secs(5)).unwrap();
        assert!(find(dir.path(), "disk").unwrap().is_none());
        // Its place is free.
        start(dir.path(), "disk", sleep("1000")).unwrap().end(Duration::ZERO).unwrap();
    }

    #[test]
    fn one_that_cannot_begin_says_why() {
        let dir = tempfile::tempdir().unwrap();
        let missing = start(dir.path(), "x", Command::new("/nonexistent/program")).unwrap_err();
        assert_eq!(missing.code, ErrorCode::Unavailable, "{missing}");
        let mut command = Command::new("sh");
        command.args(["-c", "echo the reason; exit 3"]);
        let begun = start(dir.path(), "y", command);
        // It may have been seen alive.
        if let Ok(begun) = begun {
            assert!(begun.ends_within(Duration::from_secs(5)));
        }
        assert_eq!(tail(dir.path(), "y"), "the reason");
        assert!(find(dir.path(), "y").unwrap().is_none());
    }

    #[test]
    fn a_number_that_is_somebody_elses_is_not_taken() {
        let dir = tempfile::tempdir().unwrap();
        let begun = start(dir.path(), "disk", sleep("1000")).unwrap();
        let path = lock_path(dir.path(), "disk");
        let stat = std::fs::read_to_string(&path).unwrap();
        let ours = std::fs::read_to_string("/proc/self/stat").unwrap();
        let forged = ours.rsplit_once(')').map(|(name, rest)| {
            let mut fields: Vec<&str> = rest.split_whitespace().collect();
            fields[19] = "1";
            format!("{name}) {}", fields.join(" "))
        });
        std::fs::write(&path, forged.unwrap()).unwrap();
        assert!(find(dir.path(), "disk").is_err());
        std::fs::write(&path, stat).unwrap();
        begun.end(Duration::ZERO).unwrap();
    }
}
