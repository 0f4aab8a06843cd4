//! QEMU's image locks: byte locks on the file by which QEMU's programs keep out of each other's way. Owns taking
//! them for a reader that shares the image with readers only; never locks anybody's reading out.
//!
//! Invariant: while the opened file lives, in whatever process, QEMU refuses to open the image for writing.
//!
//! QEMU holds a shared lock on byte 100 + n for each permission that it uses and on byte 200 + n for each that it
//! does not share with others (`block/file-posix.c`; n: 0 consistent read, 1 write, 3 resize). The locks belong to
//! the open file description, so they go to the worker with the fd and end with its last holder.

use super::error::{ImageError, ImageErrorKind};
use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::Path;

const USES_READ: i64 = 100;
const USES_WRITE: i64 = 101;
const USES_RESIZE: i64 = 103;
const KEEPS_WRITE_AWAY: i64 = 201;
const KEEPS_RESIZE_AWAY: i64 = 203;

/// Takes a reader's locks on an image: as long as this opened file lives, in whatever process, QEMU's programs refuse to open
/// the image for writing. The rule of every way that an image is read by: serving a disk of it, importing it.
///
/// # Errors
/// [`ImageErrorKind::InUse`]: somebody has the image open for writing.
pub fn keep_writers_out(file: &File, path: &Path) -> Result<(), ImageError> {
    if share_with_readers(file) {
        return Ok(());
    }
    Err(ImageError::new(
        ImageErrorKind::InUse,
        "is open for writing in another program (its QEMU image lock is taken)",
        "stop the machine or program that writes to it; a base image must not change while it is used",
    )
    .of(path))
}

/// Takes a reader's locks. `false`: somebody has the image open for writing. Where the file system has no locks
/// there is nothing to take, and nothing to see.
fn share_with_readers(file: &File) -> bool {
    for byte in [USES_READ, KEEPS_WRITE_AWAY, KEEPS_RESIZE_AWAY] {
        // A writer locks these bytes never exclusively for long, only to look; a failure changes nothing.
        let _unsupported = lock(file, libc::F_OFD_SETLK, libc::F_RDLCK, byte);
    }
    ![USES_WRITE, USES_RESIZE].into_iter().any(|byte| {
        lock(file, libc::F_OFD_GETLK, libc::F_WRLCK, byte).is_ok_and(|kind| kind != libc::F_UNLCK)
    })
}

/// Gives a reader's locks up, for every process that holds the opened file.
pub fn release(file: &OwnedFd) {
    for byte in [USES_READ, KEEPS_WRITE_AWAY, KEEPS_RESIZE_AWAY] {
        // Where there are no locks there is nothing to give up.
        let _unsupported = lock(file, libc::F_OFD_SETLK, libc::F_UNLCK, byte);
    }
}

/// Whether a program of QEMU's, or a disk whose base image it is, uses the file: it is open there, to read or to write.
pub fn is_locked_by_qemu(file: &File) -> bool {
    (USES_READ..=KEEPS_RESIZE_AWAY).any(|byte| {
        lock(file, libc::F_OFD_GETLK, libc::F_WRLCK, byte).is_ok_and(|kind| kind != libc::F_UNLCK)
    })
}

/// One lock command on one byte; the answer is the lock type that the kernel left in the request.
fn lock(file: &impl AsRawFd, command: libc::c_int, kind: libc::c_int, byte: i64) -> io::Result<libc::c_int> {
    // SAFETY: plain integers, for which zero is a value; OFD commands require `l_pid` to be zero.
    let mut request: libc::flock = unsafe { std::mem::zeroed() };
    request.l_type = kind as libc::c_short;
    request.l_whence = libc::SEEK_SET as libc::c_short;
    request.l_start = byte;
    request.l_len = 1;
    // SAFETY: the request lives across the call, and these commands touch nothing else.
    let done = unsafe { libc::fcntl(file.as_raw_fd(), command, &raw mut request) };
    if done == -1 { Err(io::Error::last_os_error()) } else { Ok(libc::c_int::from(request.l_type)) }
}
