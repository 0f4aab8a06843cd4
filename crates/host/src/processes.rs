//! Processes that outlive the daemon: disks and VMMs. Owns how they are started so that the next daemon finds them, and
//! how they are ended; knows nothing of what they do.
//!
//! Invariant: a process records its own identity before it executes its program, so that nobody else needs to. Until then
//! it holds a lock on the record, which readers wait for.

#![expect(unsafe_code, reason = "between fork and exec, and for descriptors")]

use crate::error::HostError;
use crate::guard::GuardPage;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{FlockOperation, Mode, OFlags, flock};
use rustix::io::{Errno, FdFlags};
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};
use spillway_api::ErrorCode;
use std::fs::File;
use std::future::pending;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::os::unix::fs::FileExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

/// Longest time until a forked process has recorded its identity.
const BIRTH: Duration = Duration::from_secs(5);
/// Longest time until a killed process has ended.
const DEATH: Duration = Duration::from_secs(10);
/// Size of a UUID as text with a newline.
const BOOT_ID_BYTES: usize = 37;
/// Largest log of a process; a longer one is truncated.
const MAX_LOG_BYTES: u64 = 1 << 20;
/// Longest part of the log that counts as its last words.
const MOST_LAST_BYTES: u64 = 1000;
/// Interval of polling a process without a usable pidfd.
const UNWATCHED: Duration = Duration::from_secs(1);

/// A process that was alive when this value was made.
#[derive(Debug)]
pub struct Process {
    pid: Pid,
    pidfd: OwnedFd,
    name: String,
}

/// State of the last process of a name in a folder.
#[derive(Debug)]
pub enum ObservedProcess {
    /// No process was started.
    None,
    /// The process is alive.
    Alive(Process),
    /// The process has ended.
    Ended,
}

/// Starts a process with the folder as its working directory, in a session of its own, as nobody's child. Its output goes
/// to `NAME.log`. Refused while the last process of that name is alive.
pub fn start(folder: &Path, name: &str, command: Command) -> Result<Process, HostError> {
    start_with(folder, name, command, &[])
}

/// Does the same for a process that inherits these descriptors under their current numbers, and no others.
pub fn start_with(
    folder: &Path,
    name: &str,
    command: Command,
    given: &[BorrowedFd<'_>],
) -> Result<Process, HostError> {
    start_until(folder, name, command, given, None)
}

/// Does the same, unless the deadline of this page is over when the program is about to be executed.
pub fn start_until(
    folder: &Path,
    name: &str,
    mut command: Command,
    given: &[BorrowedFd<'_>],
    page: Option<Arc<GuardPage>>,
) -> Result<Process, HostError> {
    let program = command.get_program().to_string_lossy().into_owned();
    let cannot = |what: &str, e: io::Error| {
        let code = match e.kind() {
            io::ErrorKind::NotFound => ErrorCode::Unavailable,
            io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => ErrorCode::Exhausted,
            _ => ErrorCode::Internal,
        };
        HostError::new(code, format!("{name} in {}: {program} {what}: {e}", folder.display()))
    };
    if let ObservedProcess::Alive(_) = look(folder, name)? {
        let message = format!("{name} in {} runs already", folder.display());
        return Err(HostError::new(ErrorCode::Conflict, message));
    }
    let record = begin_record(folder, name).map_err(|e| cannot("cannot be begun", e))?;
    let log = File::options().create(true).append(true).open(log_path(folder, name));
    let log = log.and_then(|log| Ok((log.try_clone()?, log))).map_err(|e| cannot("has no log", e))?;
    command.current_dir(folder).stdin(Stdio::null()).stdout(log.0).stderr(log.1);
    let fd = record.as_raw_fd();
    let given: Vec<RawFd> = given.iter().map(AsRawFd::as_raw_fd).collect();
    let limit = page.clone();
    let born = move || {
        // SAFETY: system calls on plain numbers. The intermediate process exits at once.
        unsafe {
            match libc::fork() {
                0 => {}
                -1 => return Err(io::Error::last_os_error()),
                _ => libc::_exit(0),
            }
            if libc::setsid() < 0 {
                return Err(io::Error::last_os_error());
            }
            // Descriptors that our own parent left open are not for the machine. A kernel without the call keeps them
            // open.
            libc::syscall(libc::SYS_close_range, 3, u32::MAX, libc::CLOSE_RANGE_CLOEXEC);
        }
        for given in &given {
            // SAFETY: the caller holds them open until the program is executed.
            rustix::io::fcntl_setfd(unsafe { BorrowedFd::borrow_raw(*given) }, FdFlags::empty())?;
        }
        // Record the whole identity: a process id alone may be reused.
        let mut stat = [0; 1024];
        let this = rustix::fs::open(c"/proc/self/stat", OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())?;
        let n = rustix::io::read(&this, &mut stat)?;
        // SAFETY: the file is open in every process that was forked with it.
        rustix::io::pwrite(unsafe { BorrowedFd::borrow_raw(fd) }, &stat[..n], BOOT_ID_BYTES as u64)?;
        // The mapping is shared with this process, too.
        if limit.as_ref().is_some_and(|page| page.is_over()) {
            return Err(io::Error::from_raw_os_error(libc::ETIME));
        }
        Ok(())
    };
    // SAFETY: it makes system calls and neither allocates nor locks.
    unsafe { command.pre_exec(born) };
    let spawned = command.spawn().and_then(|mut between| between.wait());
    // The lock is released with its last holder: this process, and the new one when it executes its program.
    drop(record);
    let is_late = page.is_some_and(|page| page.is_over());
    if is_late || spawned.is_err() {
        reap(folder, name, spawned.is_err())?;
    }
    if is_late {
        let message = format!("{name} in {}: the host has no lease of its fleet", folder.display());
        return Err(HostError::new(ErrorCode::Unavailable, message));
    }
    spawned.map_err(|e| cannot("cannot be executed", e))?;
    match look(folder, name)? {
        ObservedProcess::Alive(process) => Ok(process),
        ObservedProcess::None | ObservedProcess::Ended => {
            Err(cannot("ended at once", io::Error::other(last_words(folder, name))))
        }
    }
}

/// The record of a process that has no identity yet. It is locked.
fn begin_record(folder: &Path, name: &str) -> io::Result<File> {
    let path = record_path(folder, name);
    let record = File::options().create(true).truncate(false).read(true).write(true).open(path)?;
    lock(&record, FlockOperation::NonBlockingLockExclusive)?;
    record.set_len(0)?;
    record.write_all_at(&boot_id()?, 0)?;
    Ok(record)
}

/// Ends a process whose start was refused, and waits for that: one that ends by itself has released its record before it has ended, and
/// would be taken for one that runs. `has_failed`: the start itself has failed, which says more than that the record cannot be read.
fn reap(folder: &Path, name: &str, has_failed: bool) -> Result<(), HostError> {
    match look(folder, name) {
        Ok(ObservedProcess::Alive(refused)) => {
            refused.kill();
            refused.ends_within(DEATH);
            Ok(())
        }
        Err(e) if !has_failed => Err(e),
        _ => Ok(()),
    }
}

/// Adopts a process that somebody else has started as the one of this name in a folder, if its command line contains this
/// argument: its id may have been reused.
pub fn adopt(folder: &Path, name: &str, pid: u32, argument: &str) -> Result<ObservedProcess, HostError> {
    let broken = |e: io::Error| {
        let message = format!("{name} in {}: process {pid} cannot be taken over: {e}", folder.display());
        HostError::new(ErrorCode::Internal, message)
    };
    let Some(pid) = i32::try_from(pid).ok().and_then(Pid::from_raw) else { return Ok(ObservedProcess::None) };
    let process = match pidfd_open(pid, PidfdFlags::empty()) {
        Ok(pidfd) => Process { pid, pidfd, name: name.to_owned() },
        Err(Errno::SRCH) => return Ok(ObservedProcess::None),
        Err(e) => return Err(broken(e.into())),
    };
    let of = |file: &str| std::fs::read(format!("/proc/{}/{file}", process.pid())).unwrap_or_default();
    let (stat, command_line) = (of("stat"), of("cmdline"));
    // The command line belongs to this process if it is still alive.
    if process.ends_within(Duration::ZERO)
        || !command_line.split(|byte| *byte == 0).any(|word| word == argument.as_bytes())
    {
        return Ok(ObservedProcess::None);
    }
    let record = File::options().create(true).truncate(false).write(true).open(record_path(folder, name));
    let record = record.map_err(broken)?;
    lock(&record, FlockOperation::NonBlockingLockExclusive).map_err(broken)?;
    let text = [boot_id().map_err(broken)?.as_slice(), &stat].concat();
    record.set_len(0).and_then(|()| record.write_all_at(&text, 0)).map_err(broken)?;
    Ok(ObservedProcess::Alive(process))
}

/// Finds out whether the last process of that name in a folder is alive.
pub fn look(folder: &Path, name: &str) -> Result<ObservedProcess, HostError> {
    let path = record_path(folder, name);
    let broken = |e: io::Error| HostError::new(ErrorCode::Internal, format!("{}: {e}", path.display()));
    let record = match File::open(&path) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(ObservedProcess::None),
        record => record.map_err(broken)?,
    };
    lock(&record, FlockOperation::NonBlockingLockShared).map_err(broken)?;
    let mut text = [0; BOOT_ID_BYTES + 1024];
    let n = record.read_at(&mut text, 0).map_err(broken)?;
    let Some((boot, stat)) = text[..n].split_at_checked(BOOT_ID_BYTES) else {
        return Ok(ObservedProcess::None);
    };
    let Some((pid, begun)) = identity(stat) else { return Ok(ObservedProcess::None) };
    if boot != boot_id().map_err(broken)? {
        return Ok(ObservedProcess::Ended);
    }
    let process = match pidfd_open(pid, PidfdFlags::empty()) {
        // Open it before the check, so that it cannot become another process in between.
        Ok(pidfd) if begins(pid).map_err(broken)? == Some(begun) => {
            Process { pid, pidfd, name: name.to_owned() }
        }
        Ok(_) | Err(Errno::SRCH) => return Ok(ObservedProcess::Ended),
        Err(e) => return Err(broken(e.into())),
    };
    // A zombie still exists, but has ended.
    Ok(if process.ends_within(Duration::ZERO) {
        ObservedProcess::Ended
    } else {
        ObservedProcess::Alive(process)
    })
}

/// The process of that name in a folder, if it is alive. Waits for nobody: one that has not recorded its identity yet is not found.
///
/// # Errors
/// Nobody can tell whether it is alive.
pub fn peek(folder: &Path, name: &str) -> io::Result<Option<Process>> {
    let text = match std::fs::read(record_path(folder, name)) {
        Err(e) if matches!(e.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory) => {
            return Ok(None);
        }
        text => text?,
    };
    let Some((boot, stat)) = text.split_at_checked(BOOT_ID_BYTES) else { return Ok(None) };
    let Some((pid, begun)) = identity(stat) else { return Ok(None) };
    if boot != boot_id()? {
        return Ok(None);
    }
    let pidfd = match pidfd_open(pid, PidfdFlags::empty()) {
        Err(Errno::SRCH) => return Ok(None),
        pidfd => pidfd?,
    };
    let process = Process { pid, pidfd, name: name.to_owned() };
    Ok((begins(pid)? == Some(begun) && !process.ends_within(Duration::ZERO)).then_some(process))
}

/// A process with this argument in its command line, if it is alive.
pub fn peek_by_argument(pid: i32, argument: &str, name: &str) -> Option<Process> {
    let pid = Pid::from_raw(pid)?;
    let process = Process { pid, pidfd: pidfd_open(pid, PidfdFlags::empty()).ok()?, name: name.to_owned() };
    let command_line = std::fs::read(format!("/proc/{}/cmdline", process.pid())).ok()?;
    let has = command_line.split(|byte| *byte == 0).any(|word| word == argument.as_bytes());
    // The command line belongs to this process if it is still alive.
    (has && !process.ends_within(Duration::ZERO)).then_some(process)
}

/// Removes the record of the last process of that name, which must have ended.
pub fn forget(folder: &Path, name: &str) -> Result<(), HostError> {
    match std::fs::remove_file(record_path(folder, name)) {
        Err(e) if e.kind() != io::ErrorKind::NotFound => {
            let message = format!("{name} in {}: its record cannot be removed: {e}", folder.display());
            Err(HostError::new(ErrorCode::Internal, message))
        }
        _ => Ok(()),
    }
}

/// Returns the last line of a process's output, for people.
pub fn last_words(folder: &Path, name: &str) -> String {
    let end = || {
        let log = File::open(log_path(folder, name))?;
        let from = log.metadata()?.len().saturating_sub(MOST_LAST_BYTES);
        let mut end = [0; MOST_LAST_BYTES as usize];
        let n = log.read_at(&mut end, from)?;
        io::Result::Ok(String::from_utf8_lossy(&end[..n]).into_owned())
    };
    let text = end().unwrap_or_default();
    let last = text.lines().rfind(|line| !line.trim().is_empty()).unwrap_or("it said nothing").trim();
    // A guest that has taken over its VMM chooses these words, and people read them on a terminal.
    last.replace(char::is_control, "?")
}

/// Truncates the log of a process if it is large: a guest may cause output of its VMM.
pub fn bound_log(folder: &Path, name: &str) {
    let log = File::options().write(true).open(log_path(folder, name));
    if let Ok(log) = log
        && log.metadata().is_ok_and(|log| log.len() > MAX_LOG_BYTES)
    {
        let _ = log.set_len(0);
    }
}

impl Process {
    /// Id of the process, for people.
    pub fn pid(&self) -> u32 {
        self.pid.as_raw_nonzero().get() as u32
    }

    /// Returns a descriptor that is readable when the process has ended.
    pub fn watch(&self) -> Result<OwnedFd, HostError> {
        let failed =
            |e| HostError::new(ErrorCode::Exhausted, format!("{} cannot be watched: {e}", self.name));
        self.pidfd.try_clone().map_err(failed)
    }

    /// Returns another handle of the same process.
    pub fn try_clone(&self) -> Result<Process, HostError> {
        Ok(Process { pid: self.pid, pidfd: self.watch()?, name: self.name.clone() })
    }

    /// Whether the process has ended, or ends within this time.
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

    /// Kills the process, and does not wait.
    pub fn kill(&self) {
        let _ = pidfd_send_signal(&self.pidfd, Signal::KILL);
    }

    /// Asks the process to end, and kills it if it has not ended in time.
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

/// Waits until a process has ended, by the descriptor of [`Process::watch`]; forever if there is none.
pub async fn ended(pidfd: Option<OwnedFd>) {
    let Some(pidfd) = pidfd else { return pending().await };
    // SAFETY: an `OwnedFd` has one number for as long as it lives.
    let watched = unsafe { AsyncFd::register_with_interest(pidfd, Interest::READABLE) };
    match watched {
        Ok(pidfd) => _ = pidfd.readable().await,
        // The caller polls again after this pause.
        Err(_) => tokio::time::sleep(UNWATCHED).await,
    }
}

fn record_path(folder: &Path, name: &str) -> PathBuf {
    folder.join(format!("{name}.process"))
}

fn log_path(folder: &Path, name: &str) -> PathBuf {
    folder.join(format!("{name}.log"))
}

/// Takes a lock that others hold only for moments.
fn lock(record: &File, operation: FlockOperation) -> io::Result<()> {
    let until = Instant::now() + BIRTH;
    loop {
        match flock(record, operation) {
            Err(Errno::WOULDBLOCK) if Instant::now() < until => std::thread::sleep(Duration::from_millis(1)),
            Err(Errno::WOULDBLOCK) => {
                return Err(io::Error::other("another process holds its lock, and the holder is unknown"));
            }
            locked => return Ok(locked?),
        }
    }
}

/// Returns the id of the host's current boot: a UUID and a newline.
pub fn boot_id() -> io::Result<[u8; BOOT_ID_BYTES]> {
    let text = std::fs::read("/proc/sys/kernel/random/boot_id")?;
    text.try_into().map_err(|_| io::Error::other("the kernel's boot id is no UUID"))
}

/// Parses process id and start time from a line of `/proc/PID/stat` (proc(5)).
fn identity(stat: &[u8]) -> Option<(Pid, u64)> {
    let stat = std::str::from_utf8(stat).ok()?;
    let pid = stat.split(' ').next()?.parse().ok()?;
    // The program's name is in parentheses and may contain anything; the start time is field 22.
    let begun = stat.rsplit_once(')')?.1.split_whitespace().nth(19)?.parse().ok()?;
    Some((Pid::from_raw(pid)?, begun))
}

/// Returns a process's start time, in ticks since boot; `None` if there is no such process. An error leaves that open.
pub fn begins(pid: Pid) -> io::Result<Option<u64>> {
    match std::fs::read(format!("/proc/{}/stat", pid.as_raw_nonzero())) {
        Ok(stat) => Ok(identity(&stat).map(|(_, begun)| begun)),
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(e) if e.raw_os_error() == Some(libc::ESRCH) => Ok(None),
        Err(e) => Err(e),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sleep(seconds: &str) -> Command {
        let mut command = Command::new("sleep");
        command.arg(seconds);
        command
    }

    fn alive(folder: &Path, name: &str) -> Process {
        match look(folder, name).unwrap() {
            ObservedProcess::Alive(process) => process,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn a_process_is_found_again_and_is_nobodys_child() {
        let dir = tempfile::tempdir().unwrap();
        assert!(matches!(look(dir.path(), "disk").unwrap(), ObservedProcess::None));
        let begun = start(dir.path(), "disk", sleep("1000")).unwrap();
        let pid = begun.pid();
        drop(begun);
        let error = start(dir.path(), "disk", sleep("1")).unwrap_err();
        assert_eq!(error.code, ErrorCode::Conflict);
        let found = alive(dir.path(), "disk");
        assert_eq!(found.pid(), pid);
        let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap();
        let parent: u32 =
            stat.rsplit_once(')').unwrap().1.split_whitespace().nth(1).unwrap().parse().unwrap();
        assert_ne!(parent, std::process::id());
        // The kernel closes one after the other what it is not to have, the lock that was waited for among the first;
        // then the program opens its libraries, one at a time.
        let open = || std::fs::read_dir(format!("/proc/{pid}/fd")).unwrap().count();
        let until = Instant::now() + Duration::from_secs(5);
        while open() != 3 {
            assert!(Instant::now() < until, "it has more of ours than its log");
            std::thread::sleep(Duration::from_millis(1));
        }
        found.end(Duration::from_secs(5)).unwrap();
        assert!(matches!(look(dir.path(), "disk").unwrap(), ObservedProcess::Ended));
        // Its place is free.
        start(dir.path(), "disk", sleep("1000")).unwrap().end(Duration::ZERO).unwrap();
        forget(dir.path(), "disk").unwrap();
        assert!(matches!(look(dir.path(), "disk").unwrap(), ObservedProcess::None));
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
        assert_eq!(last_words(dir.path(), "y"), "the reason");
        std::fs::write(log_path(dir.path(), "y"), format!("{}\nthe end \n\n", "x".repeat(5000))).unwrap();
        assert_eq!(last_words(dir.path(), "y"), "the end");
        assert!(matches!(look(dir.path(), "y").unwrap(), ObservedProcess::Ended));
    }

    #[test]
    fn one_that_cannot_begin_says_why_though_its_record_cannot_be_read() {
        let dir = tempfile::tempdir().unwrap();
        let record = record_path(dir.path(), "x");
        let mut command = sleep("1000");
        // SAFETY: it makes system calls; short paths are not allocated.
        unsafe {
            command.pre_exec(move || {
                std::fs::remove_file(&record)?;
                std::fs::create_dir(&record)?;
                Err(io::Error::from_raw_os_error(libc::EPERM))
            });
        }
        let refused = start(dir.path(), "x", command).unwrap_err();
        assert!(refused.message.contains("sleep cannot be executed"), "{refused}");
    }

    #[test]
    fn one_that_somebody_else_has_begun_is_taken_over_if_it_is_the_one() {
        let dir = tempfile::tempdir().unwrap();
        let mut child = sleep("1000").spawn().unwrap();
        // One that has just executed its program has no command line for a moment.
        while std::fs::read(format!("/proc/{}/cmdline", child.id())).unwrap().is_empty() {
            std::thread::yield_now();
        }
        let adopt = |pid, argument| adopt(dir.path(), "vmm", pid, argument).unwrap();
        for (pid, argument) in
            [(child.id(), "100"), (child.id(), "sleep 1000"), (0, "1000"), (u32::MAX, "1000")]
        {
            assert!(matches!(adopt(pid, argument), ObservedProcess::None), "{pid} {argument}");
            assert!(matches!(look(dir.path(), "vmm").unwrap(), ObservedProcess::None));
        }
        assert!(matches!(adopt(child.id(), "1000"), ObservedProcess::Alive(_)));
        let found = alive(dir.path(), "vmm");
        assert_eq!(found.pid(), child.id());
        child.kill().unwrap();
        // Nobody has waited for it yet.
        assert!(found.ends_within(Duration::from_secs(5)));
        assert!(matches!(adopt(child.id(), "1000"), ObservedProcess::None));
        assert!(matches!(look(dir.path(), "vmm").unwrap(), ObservedProcess::Ended));
        child.wait().unwrap();
        assert!(matches!(look(dir.path(), "vmm").unwrap(), ObservedProcess::Ended));
    }

    #[test]
    fn a_number_that_is_somebody_elses_is_not_taken() {
        let dir = tempfile::tempdir().unwrap();
        let begun = start(dir.path(), "disk", sleep("1000")).unwrap();
        let path = record_path(dir.path(), "disk");
        let true_record = std::fs::read_to_string(&path).unwrap();
        let (before, after) = true_record.rsplit_once(')').unwrap();
        let mut fields: Vec<&str> = after.split_whitespace().collect();
        fields[19] = "1";
        std::fs::write(&path, format!("{before}) {}", fields.join(" "))).unwrap();
        assert!(matches!(look(dir.path(), "disk").unwrap(), ObservedProcess::Ended));
        let another_boot = format!("{}{}", "0".repeat(36), &true_record[36..]);
        std::fs::write(&path, another_boot).unwrap();
        assert!(matches!(look(dir.path(), "disk").unwrap(), ObservedProcess::Ended));
        // One that was forked and has not said who it is, and never will.
        std::fs::write(&path, &true_record[..BOOT_ID_BYTES]).unwrap();
        assert!(matches!(look(dir.path(), "disk").unwrap(), ObservedProcess::None));
        begun.end(Duration::ZERO).unwrap();
    }
}
