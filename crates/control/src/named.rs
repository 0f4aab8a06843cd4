//! Files that whoever starts a disk names: opened with care, for one server at a time.
//!
//! Owns what modes `persistent` and `ephemeral` have in common before they are served. Invariant: what is returned is a regular file on a disk; once
//! it is locked, nobody else serves it while any process holds it.

use crate::error::{ErrorKind, SupervisorError};
use rustix::fs::{FileType, FlockOperation, OFlags, StatFs};
use rustix::io::Errno;
use std::fs::File;
use std::os::fd::AsFd;
use std::path::Path;
use std::time::{Duration, Instant};

/// How long a file may stay locked by a process that has ended, or by one that this process starts; and how often that is
/// looked at.
const LET_GO: Duration = Duration::from_secs(5);
const LOOK_AGAIN: Duration = Duration::from_millis(10);

const TMPFS: u64 = 0x0102_1994;
const RAMFS: u64 = 0x8584_58f6;
const HUGETLBFS: u64 = 0x9584_58f6;

fn refuse(kind: ErrorKind, path: &Path, what: &str) -> SupervisorError {
    SupervisorError::new(kind, format!("disk {}: {what}", path.display()))
}

/// Opens it to read and write. `None`: it is not there.
pub fn open(path: &Path, more: OFlags) -> Result<Option<File>, SupervisorError> {
    let cannot = |e: Errno| {
        let advice = match e {
            Errno::LOOP => "it is a symbolic link: name the file itself with --disk",
            _ => "let this user read and write it, or name another with --disk",
        };
        SupervisorError::on_path(ErrorKind::Create, "cannot open disk", path, e, advice)
    };
    // A look before opening: opening alone can act on a device or wait for the other end of a pipe.
    match rustix::fs::stat(path) {
        Err(Errno::NOENT) => return Ok(None),
        Err(e) => return Err(cannot(e)),
        Ok(stat) => check_kind(path, stat.st_mode)?,
    }
    let flags = OFlags::RDWR | OFlags::CLOEXEC | OFlags::NOCTTY | OFlags::NONBLOCK | more;
    let fd = rustix::fs::open(path, flags, rustix::fs::Mode::empty()).map_err(cannot)?;
    check_kind(path, rustix::fs::fstat(&fd).map_err(cannot)?.st_mode)?;
    let shape = rustix::fs::fstatfs(&fd).map_err(cannot)?;
    check_store(path, &shape)?;
    rustix::fs::fcntl_setfl(&fd, OFlags::empty()).map_err(cannot)?;
    Ok(Some(fd.into()))
}

fn check_kind(path: &Path, mode: u32) -> Result<(), SupervisorError> {
    match FileType::from_raw_mode(mode) {
        FileType::RegularFile => Ok(()),
        _ => Err(refuse(ErrorKind::Create, path, "it is not a regular file: name one with --disk")),
    }
}

/// The folder in which a new file will be created. Fails if there is none, or if its file system keeps files in memory.
pub fn directory(path: &Path) -> Result<&Path, SupervisorError> {
    let dir = path.parent().filter(|dir| !dir.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let shape = rustix::fs::statfs(dir).map_err(|e| {
        let advice = "make its folder first, or name another with --disk";
        SupervisorError::on_path(ErrorKind::Create, "cannot make disk", path, e, advice)
    })?;
    check_store(path, &shape)?;
    Ok(dir)
}

/// The file system's name, if what it holds is in memory.
pub fn in_memory(shape: &StatFs) -> Option<&'static str> {
    match shape.f_type as u64 & 0xffff_ffff {
        TMPFS => Some("tmpfs"),
        RAMFS => Some("ramfs"),
        HUGETLBFS => Some("hugetlbfs"),
        _ => None,
    }
}

/// Nothing in memory outlives anything.
fn check_store(path: &Path, shape: &StatFs) -> Result<(), SupervisorError> {
    match in_memory(shape) {
        None => Ok(()),
        Some(name) => Err(refuse(
            ErrorKind::Create,
            path,
            &format!("it is on {name}, which is memory: name a file on a disk with --disk"),
        )),
    }
}

/// The lock is the open file's: it ends with the last process that holds it, when its last I/O has ended.
pub fn lock(file: impl AsFd, path: &Path) -> Result<(), SupervisorError> {
    let said = |e| {
        let advice = "name a file on a local file system with --disk";
        SupervisorError::on_path(ErrorKind::Create, "cannot lock disk", path, e, advice)
    };
    let begun = Instant::now();
    loop {
        match rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive) {
            Err(Errno::WOULDBLOCK) => {}
            result => return result.map_err(said),
        }
        let (by, may_let_go) = holder_in_words(&file).map_err(said)?;
        if !may_let_go || begun.elapsed() >= LET_GO {
            let what = format!("it is in use {by}: stop that first, or name another with --disk");
            return Err(refuse(ErrorKind::InUse, path, &what));
        }
        std::thread::sleep(LOOK_AGAIN);
    }
}

/// Who holds the lock, as far as can be seen, and whether that may let go at any moment: an ended process, of which the kernel
/// still takes something apart.
fn holder_in_words(file: impl AsFd) -> Result<(String, bool), Errno> {
    let stat = rustix::fs::fstat(&file)?;
    let locks = std::fs::read_to_string("/proc/locks").unwrap_or_default();
    let dev = (rustix::fs::major(stat.st_dev), rustix::fs::minor(stat.st_dev));
    Ok(match holder(&locks, dev, stat.st_ino) {
        Some(pid) => match live(pid) {
            // A copy of what this process has closed may be open in one that it starts, until that executes its program.
            Some(name) => (format!("by process {pid} ({name})"), pid == std::process::id()),
            None => {
                let serves = "it serves until its last client has left";
                (format!("by a worker whose supervisor, process {pid}, has ended: {serves}"), true)
            }
        },
        // It may have let go since.
        None => ("by another process".into(), true),
    })
}

/// The name of a process that has not ended. One that nobody has waited for yet has a name still, and has ended.
fn live(pid: u32) -> Option<String> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    let (before, after) = stat.rsplit_once(')')?;
    let has_ended = after.trim_start().starts_with(['Z', 'X']);
    (!has_ended).then(|| before.split_once('(').map_or("", |(_, name)| name).to_owned())
}

/// Who took the lock, by the lines of `/proc/locks`.
fn holder(locks: &str, (major, minor): (u32, u32), inode: u64) -> Option<u32> {
    let of_file = format!("{major:02x}:{minor:02x}:{inode}");
    locks.lines().find_map(|line| {
        let mut words = line.split_whitespace().skip(1);
        let (kind, pid, file) = (words.next()?, words.nth(2)?, words.next()?);
        (kind == "FLOCK" && file == of_file).then(|| pid.parse().ok()).flatten().filter(|&pid| pid > 0)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_that_has_ended_lives_no_more_though_nobody_has_waited_for_it() {
        assert!(live(std::process::id()).is_some_and(|name| !name.is_empty()));
        let mut child = std::process::Command::new("true").spawn().unwrap();
        let until = Instant::now() + Duration::from_secs(10);
        while live(child.id()).is_some() {
            assert!(Instant::now() < until, "it is not seen that it has ended");
            std::thread::sleep(Duration::from_millis(1));
        }
        assert!(Path::new(&format!("/proc/{}/comm", child.id())).exists());
        child.wait().unwrap();
        assert_eq!(live(child.id()), None);
    }

    #[test]
    fn the_holder_of_a_lock_is_found() {
        let locks = "1: POSIX  ADVISORY  WRITE 7 fe:00:42 0 EOF\n\
                     2: FLOCK  ADVISORY  WRITE 1234 fe:00:42 0 EOF\n\
                     2: -> FLOCK  ADVISORY  WRITE 99 fe:00:42 0 EOF\n\
                     3: FLOCK  ADVISORY  WRITE -1 fe:01:43 0 EOF\n";
        assert_eq!(holder(locks, (0xfe, 0), 42), Some(1234));
        assert_eq!(holder(locks, (0xfe, 1), 42), None);
        assert_eq!(holder(locks, (0xfe, 1), 43), None, "a process of another namespace");
    }
}
