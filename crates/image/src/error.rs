//! Why a base image cannot be used. Owns the words that a person reads; never decides anything.
//!
//! Invariant: every error names the image, says what is wrong with it and what to do about it.

use std::fmt;
use std::path::{Path, PathBuf};

/// Stable kinds, for exit codes and tests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ImageErrorKind {
    /// There is no such file.
    Missing,
    /// It may not be read.
    Permission,
    /// Neither a regular file nor a block device.
    NotAFile,
    /// The format is not said, or is not what the file holds.
    Format,
    /// The size is not one that a disk can have.
    Size,
    /// A qcow2 feature that a base image may not use: backing file, data file, encryption and others.
    Unsupported,
    /// The image contradicts itself, is cut off, or was left dirty.
    Damaged,
    /// Somebody has it open for writing.
    InUse,
    /// Reading past the page cache was asked for and the file system refuses it.
    Direct,
    /// The host could not read it.
    Io,
}

/// Why a base image cannot be used: kind, image, what is wrong, what to do.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ImageError {
    kind: ImageErrorKind,
    path: PathBuf,
    what: String,
    advice: String,
}

impl ImageError {
    pub(super) fn new(
        kind: ImageErrorKind,
        path: &Path,
        what: impl Into<String>,
        advice: impl Into<String>,
    ) -> Self {
        ImageError { kind, path: path.to_owned(), what: what.into(), advice: advice.into() }
    }

    /// Which kind.
    pub fn kind(&self) -> ImageErrorKind {
        self.kind
    }

    /// The image.
    pub fn path(&self) -> &Path {
        &self.path
    }
}

impl fmt::Display for ImageError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "base image {} {}: {}", self.path.display(), self.what, self.advice)
    }
}

impl std::error::Error for ImageError {}
