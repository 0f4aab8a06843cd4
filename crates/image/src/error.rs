//! Why a base image cannot be used. Owns the words that a person reads; never decides anything.
//!
//! Invariant: every error says what is wrong with the image and what to do about it, and names the image where its path is
//! known: a worker is given an open file and no path.

use rustix::io::Errno;
use std::borrow::Cow;
use std::fmt;
use std::io;
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
    /// It is not what it was when its disk was started.
    Changed,
    /// The host has no memory, thread or file descriptor left to read it with.
    Resources,
}

/// Why a base image cannot be used: a kind, the image and what is wrong with it, what to do, and what the operating system
/// said.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{}{what}{}: {advice}", Image(.path.as_deref()), Cause(*.source))]
pub struct ImageError {
    kind: ImageErrorKind,
    path: Option<PathBuf>,
    /// A predicate of the image.
    what: Cow<'static, str>,
    advice: Cow<'static, str>,
    source: Option<Errno>,
}

impl ImageError {
    /// `what` is a predicate of the image.
    pub(super) fn new(
        kind: ImageErrorKind,
        what: impl Into<Cow<'static, str>>,
        advice: impl Into<Cow<'static, str>>,
    ) -> Self {
        ImageError { kind, path: None, what: what.into(), advice: advice.into(), source: None }
    }

    /// A read of the image failed, or a question about its file.
    pub(super) fn io(what: &'static str, source: &io::Error) -> Self {
        let advice = "check the store that it is on (`dmesg` tells more)";
        ImageError::new(ImageErrorKind::Io, what, advice).because(source)
    }

    /// What is needed to read the image could not be made.
    pub(super) fn resources(what: &'static str, source: &io::Error) -> Self {
        let advice = "see that memory, threads and file descriptors are left (free, ulimit -a)";
        ImageError::new(ImageErrorKind::Resources, what, advice).because(source)
    }

    fn because(self, source: &io::Error) -> Self {
        ImageError { source: Errno::from_io_error(source), ..self }
    }

    /// Names the image.
    pub(super) fn of(self, path: &Path) -> Self {
        ImageError { path: Some(path.to_owned()), ..self }
    }

    /// Which kind.
    pub fn kind(&self) -> ImageErrorKind {
        self.kind
    }

    /// The image; none where only its open file is known.
    pub fn path(&self) -> Option<&Path> {
        self.path.as_deref()
    }
}

/// The subject of the sentence.
struct Image<'a>(Option<&'a Path>);

impl fmt::Display for Image<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            Some(path) => write!(f, "base image {} ", path.display()),
            None => f.write_str("the base image "),
        }
    }
}

/// The operating system's reason, in brackets.
struct Cause(Option<Errno>);

impl fmt::Display for Cause {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.map_or(Ok(()), |errno| write!(f, " ({errno})"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_error_says_which_image_what_is_wrong_why_and_what_to_do() {
        let source = io::Error::from_raw_os_error(libc::EIO);
        let error = ImageError::io("cannot be measured", &source);
        assert_eq!(
            error.to_string(),
            "the base image cannot be measured (Input/output error (os error 5)): check the store that it is on \
             (`dmesg` tells more)"
        );
        assert_eq!(std::error::Error::source(&error).unwrap().to_string(), source.to_string());
        let error = ImageError::new(ImageErrorKind::Size, "is empty", "make it anew").of(Path::new("/a.raw"));
        assert_eq!(error.to_string(), "base image /a.raw is empty: make it anew");
    }
}
