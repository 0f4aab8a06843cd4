//! Reads files of NTFS volumes ([`NtfsVolume`]) and values of Windows registry hives ([`Hive`]), for checks of images.
//! Never writes, replays no log, and decompresses nothing.
//!
//! Invariant: the bytes are untrusted. Every length is checked before it is used, every list, chain and tree has a bound,
//! and nothing outside the source is read: whatever the bytes are, the result is a value or an error, without a panic, in
//! bounded memory. The source bounds the time: an error of it ends every loop that reads.
//!
//! Why these are parsers of our own: `docs/design/054-windows-images.md`.

mod bytes;
mod content;
mod folder;
mod hive;
mod record;
mod volume;

pub use content::NtfsFile;
pub use hive::{Hive, Key, Value};
pub use volume::{FolderItem, NtfsVolume};

use std::fmt;

/// Bytes that are read by their offset: a part of a disk, or a file.
pub trait ByteSource {
    /// Number of bytes.
    fn len_bytes(&self) -> u64;

    /// Fills the buffer with the bytes from this offset, all of which must exist.
    fn read_at(&self, at: u64, buffer: &mut [u8]) -> Result<(), NtfsError>;
}

impl<S: ByteSource + ?Sized> ByteSource for &S {
    fn len_bytes(&self) -> u64 {
        (**self).len_bytes()
    }

    fn read_at(&self, at: u64, buffer: &mut [u8]) -> Result<(), NtfsError> {
        (**self).read_at(at, buffer)
    }
}

impl ByteSource for [u8] {
    fn len_bytes(&self) -> u64 {
        self.len() as u64
    }

    fn read_at(&self, at: u64, buffer: &mut [u8]) -> Result<(), NtfsError> {
        let at = usize::try_from(at).map_err(|_| NtfsError::Unreadable)?;
        buffer.copy_from_slice(bytes::part(self, at, buffer.len()).map_err(|_| NtfsError::Unreadable)?);
        Ok(())
    }
}

/// Reason why a volume, a file or a hive cannot be read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NtfsError {
    /// The source has no such bytes, or did not return them.
    Unreadable,
    /// The structure with this name contradicts itself.
    Damaged(&'static str),
    /// The content has a form that this crate does not read.
    Unsupported(&'static str),
}

impl fmt::Display for NtfsError {
    fn fmt(&self, to: &mut fmt::Formatter) -> fmt::Result {
        match self {
            NtfsError::Unreadable => write!(to, "a part of it cannot be read"),
            NtfsError::Damaged(what) => write!(to, "its {what} is damaged"),
            NtfsError::Unsupported(what) => write!(to, "it is {what}"),
        }
    }
}

impl std::error::Error for NtfsError {}
