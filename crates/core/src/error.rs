//! Errors as values: an errno for the guest, and a kind with context for people.

use std::fmt;

/// A Linux errno, the one thing that every protocol can carry.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Errno(pub i32);

impl Errno {
    /// I/O error: the host could not read or write.
    pub const IO: Errno = Errno(5);
    /// The request itself is malformed (guest-caused).
    pub const INVALID: Errno = Errno(22);
    /// The write cache is full and its policy is `fail`.
    pub const NO_SPACE: Errno = Errno(28);
    /// Guest memory could not be read or written (guest-caused).
    pub const FAULT: Errno = Errno(14);
    /// Not supported.
    pub const NOT_SUPPORTED: Errno = Errno(95);
    /// Withdrawn by [`crate::Disk::cancel`]: the export drops it without an answer.
    pub const CANCELED: Errno = Errno(125);
}

impl fmt::Display for Errno {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        std::io::Error::from_raw_os_error(self.0).fmt(f)
    }
}

/// Why a disk could not be made or attached.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum DiskError {
    /// The specification asks for something that cannot be: what, and what to do.
    Spec(String),
    /// The memory to attach to is not what the specification says: where, and what was found.
    Damaged(String),
}

impl fmt::Display for DiskError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            DiskError::Spec(what) => f.write_str(what),
            DiskError::Damaged(what) => write!(f, "the disk's memory does not fit: {what}"),
        }
    }
}

impl std::error::Error for DiskError {}
