//! Creates the overflow (or difference) file, which the worker reads and writes. The file has no name: no other process can
//! open it, and its space is freed when the last fd is closed.
//!
//! Invariant: when `create` returns an error, nothing is left in the folder.

use super::Log;
use super::past_cache::{ALIGNMENT, Block};
use rustix::fs::{AtFlags, FallocateFlags, Mode, OFlags};
use rustix::io::Errno;
use spillway_control::named::in_memory;
use spillway_control::{ErrorKind, SupervisorError, bytes};
use std::os::fd::OwnedFd;
use std::path::Path;

/// Smallest free space that the folder must have: a few segments.
const LEAST_FREE_BYTES: u64 = 8 << 20;

/// The file, and how it was opened.
#[derive(Debug)]
pub(super) struct OverflowFile {
    pub fd: OwnedFd,
    /// Open O_DIRECT.
    pub direct: bool,
}

impl OverflowFile {
    /// Extends the file to at least this length. Its content and its allocated blocks do not change.
    pub fn lengthen(&self, file_bytes: u64) -> Result<(), SupervisorError> {
        let cannot = |e| {
            SupervisorError::internal(&format!("cannot make the overflow file {} long", bytes(file_bytes)), e)
        };
        let len = rustix::fs::fstat(&self.fd).map_err(cannot)?.st_size as u64;
        if len < file_bytes { rustix::fs::ftruncate(&self.fd, file_bytes).map_err(cannot) } else { Ok(()) }
    }
}

/// What to do on a file system without O_DIRECT.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Direct {
    /// Use the page cache, and log a warning.
    Wanted,
    /// Fail: mode `direct` requires it.
    Needed,
}

impl Direct {
    /// Handles a file system without O_DIRECT.
    fn is_missing(self, dir: &Path, what: &str, log: &mut Log) -> Result<(), SupervisorError> {
        let dir = dir.display();
        match self {
            Direct::Wanted => log(&format!("{dir} {what}: the overflow goes through the page cache")),
            Direct::Needed => {
                return Err(SupervisorError::new(
                    ErrorKind::Create,
                    format!(
                        "overflow folder {dir} {what}, and --mode direct writes past the page cache: name a \
                         folder on ext4 or XFS with --overflow-dir, or choose another mode"
                    ),
                ));
            }
        }
        Ok(())
    }
}

/// Makes an unlinked file in `dir`, `file_bytes` long and empty. `limit_bytes` is what it may come to hold;
/// `setting` says what to do where there is no O_DIRECT.
pub(super) fn create(
    dir: &Path,
    file_bytes: u64,
    limit_bytes: u64,
    setting: Direct,
    log: &mut Log,
) -> Result<OverflowFile, SupervisorError> {
    check_dir(dir, limit_bytes, log)?;
    let (fd, direct) = open_unlinked(dir, setting, log)?;
    let cannot = |what: &str, error: Errno| {
        let advice = "choose another folder with --overflow-dir or a smaller --overflow";
        SupervisorError::on_path(ErrorKind::Create, what, dir, error, advice)
    };
    rustix::fs::ftruncate(&fd, file_bytes)
        .map_err(|e| cannot(&format!("cannot make an overflow file of {} in", bytes(file_bytes)), e))?;

    // Write once now, so that a file system that cannot be written is an error here and not in the guest.
    let mut block = Block::zeroed();
    let (fd, direct) = match write_block(&fd, &mut block) {
        Err(Errno::INVAL) if direct => {
            setting.is_missing(dir, "takes no O_DIRECT writes of 4 KiB", log)?;
            let flags = rustix::fs::fcntl_getfl(&fd).map_err(|e| cannot("cannot use a file in", e))?;
            rustix::fs::fcntl_setfl(&fd, flags - OFlags::DIRECT)
                .map_err(|e| cannot("cannot use a file in", e))?;
            write_block(&fd, &mut block).map_err(|e| cannot("cannot write in overflow folder", e))?;
            (fd, false)
        }
        Err(e) => return Err(cannot("cannot write in overflow folder", e)),
        Ok(()) => (fd, direct),
    };
    let punch = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
    if rustix::fs::fallocate(&fd, punch, 0, ALIGNMENT as u64).is_err() {
        log(&format!(
            "the file system of {} cannot take back parts of a file: the overflow will not shrink",
            dir.display()
        ));
    }
    Ok(OverflowFile { fd, direct })
}

fn write_block(fd: &OwnedFd, block: &mut Block) -> Result<(), Errno> {
    match rustix::io::pwrite(fd, block.bytes(), 0) {
        Ok(n) if n == ALIGNMENT => Ok(()),
        Ok(_) => Err(Errno::NOSPC),
        Err(e) => Err(e),
    }
}

fn check_dir(dir: &Path, limit_bytes: u64, log: &mut Log) -> Result<(), SupervisorError> {
    let advice = "make it, or name another with --overflow-dir";
    let metadata = std::fs::metadata(dir)
        .map_err(|e| SupervisorError::on_path(ErrorKind::Create, "overflow folder", dir, e, advice))?;
    if !metadata.is_dir() {
        return Err(SupervisorError::new(
            ErrorKind::Create,
            format!("overflow folder {}: not a folder: name one with --overflow-dir", dir.display()),
        ));
    }
    let shape = rustix::fs::statfs(dir).map_err(|e| {
        SupervisorError::on_path(ErrorKind::Create, "cannot look at overflow folder", dir, e, advice)
    })?;
    if let Some(name) = in_memory(&shape) {
        return Err(SupervisorError::new(
            ErrorKind::Create,
            format!(
                "overflow folder {}: it is {name}, which is memory: name a folder on a disk with \
                 --overflow-dir, or use --mode ram",
                dir.display()
            ),
        ));
    }
    let free = (shape.f_bavail as u64).saturating_mul(shape.f_bsize as u64);
    if free < LEAST_FREE_BYTES {
        return Err(SupervisorError::new(
            ErrorKind::Create,
            format!(
                "overflow folder {}: only {} are free: make space, or name another with --overflow-dir",
                dir.display(),
                bytes(free)
            ),
        ));
    }
    if free < limit_bytes {
        log(&format!(
            "overflow folder {} has {} free, less than the {} that this disk may come to use",
            dir.display(),
            bytes(free),
            bytes(limit_bytes)
        ));
    }
    Ok(())
}

/// Opens a file with O_TMPFILE and O_DIRECT if the file system has them. Logs which one is missing.
fn open_unlinked(dir: &Path, setting: Direct, log: &mut Log) -> Result<(OwnedFd, bool), SupervisorError> {
    let mode = Mode::RUSR | Mode::WUSR;
    let base = OFlags::RDWR | OFlags::CLOEXEC;
    let cannot = |error: Errno| {
        let advice = "let this user write there, or name another with --overflow-dir";
        SupervisorError::on_path(
            ErrorKind::Create,
            "cannot make a file in overflow folder",
            dir,
            error,
            advice,
        )
    };
    // O_EXCL: the file can never be given a name.
    let nameless = base | OFlags::TMPFILE | OFlags::EXCL;
    match rustix::fs::open(dir, nameless | OFlags::DIRECT, mode) {
        Ok(fd) => return Ok((fd, true)),
        Err(Errno::INVAL | Errno::OPNOTSUPP | Errno::ISDIR | Errno::NOENT) => {}
        Err(e) => return Err(cannot(e)),
    }
    match rustix::fs::open(dir, nameless, mode) {
        Ok(fd) => {
            setting.is_missing(dir, "has no O_DIRECT", log)?;
            return Ok((fd, false));
        }
        Err(Errno::INVAL | Errno::OPNOTSUPP | Errno::ISDIR | Errno::NOENT) => {}
        Err(e) => return Err(cannot(e)),
    }
    log(&format!("{} has no O_TMPFILE: the overflow file has a name for a moment", dir.display()));
    let at = rustix::fs::open(dir, OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())
        .map_err(cannot)?;
    for attempt in 0..100 {
        let name = format!(".spillway-overflow-{}-{attempt}", std::process::id());
        let opened = match rustix::fs::openat(&at, &name, base | OFlags::CREATE | OFlags::EXCL, mode) {
            Err(Errno::EXIST) => continue,
            opened => opened.map_err(cannot)?,
        };
        rustix::fs::unlinkat(&at, &name, AtFlags::empty()).map_err(cannot)?;
        // The name is gone, but O_DIRECT can be turned on afterwards, where it is known.
        let flags = rustix::fs::fcntl_getfl(&opened).map_err(cannot)?;
        let direct = rustix::fs::fcntl_setfl(&opened, flags | OFlags::DIRECT).is_ok();
        if !direct {
            setting.is_missing(dir, "has no O_DIRECT", log)?;
        }
        return Ok((opened, direct));
    }
    Err(cannot(Errno::EXIST))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::{Arc, Mutex};

    fn log() -> (Log, Arc<Mutex<Vec<String>>>) {
        let lines = Arc::new(Mutex::new(Vec::new()));
        let to = Arc::clone(&lines);
        (Box::new(move |line: &str| to.lock().unwrap().push(line.to_owned())), lines)
    }

    #[test]
    fn the_file_has_no_name_its_length_and_no_blocks() {
        let dir = tempfile::tempdir_in("/var/tmp").unwrap();
        let (mut log, _) = log();
        let file = create(dir.path(), 64 << 20, 1 << 20, Direct::Wanted, &mut log).unwrap();
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
        let stat = rustix::fs::fstat(&file.fd).unwrap();
        assert_eq!((stat.st_size, stat.st_nlink, stat.st_blocks), (64 << 20, 0, 0));
        let flags = rustix::fs::fcntl_getfl(&file.fd).unwrap();
        assert_eq!(flags.contains(OFlags::DIRECT), file.direct);
        // Nobody can give it a name.
        let from = format!("/proc/self/fd/{}", std::os::fd::AsRawFd::as_raw_fd(&file.fd));
        let to = dir.path().join("named");
        assert!(
            rustix::fs::linkat(rustix::fs::CWD, &from, rustix::fs::CWD, &to, AtFlags::SYMLINK_FOLLOW)
                .is_err()
        );
    }

    #[test]
    fn memory_is_refused_as_a_disk() {
        let (mut log, _) = log();
        let error = create(Path::new("/dev/shm"), 1 << 20, 1 << 20, Direct::Wanted, &mut log).unwrap_err();
        assert_eq!(error.kind, ErrorKind::Create);
        assert!(error.to_string().contains("tmpfs") && error.to_string().contains("--mode ram"), "{error}");
    }

    #[test]
    fn a_directory_that_is_none_is_refused() {
        let dir = tempfile::tempdir_in("/var/tmp").unwrap();
        let (mut log, _) = log();
        let error = create(&dir.path().join("none"), 1 << 20, 1 << 20, Direct::Wanted, &mut log).unwrap_err();
        assert!(error.to_string().contains("no such file or directory"), "{error}");
        let file = dir.path().join("file");
        std::fs::File::create(&file).unwrap();
        let error = create(&file, 1 << 20, 1 << 20, Direct::Wanted, &mut log).unwrap_err();
        assert!(error.to_string().contains("not a folder"), "{error}");
    }

    #[test]
    fn a_limit_beyond_the_free_space_is_a_warning() {
        let dir = tempfile::tempdir_in("/var/tmp").unwrap();
        let (mut log, lines) = log();
        create(dir.path(), 1 << 20, 1 << 60, Direct::Wanted, &mut log).unwrap();
        assert!(lines.lock().unwrap().iter().any(|l| l.contains("less than the")));
    }
}
