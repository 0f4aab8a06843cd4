//! Why a disk cannot be served, for people. Owns the kinds that callers turn into exit codes; never decides
//! how an error is shown.
//!
//! Invariant: a message is one line that says what, where, and what to do.

use std::fmt;
use std::io;
use std::path::Path;

/// What sort of thing went wrong: stable, few.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ErrorKind {
    /// The options ask for something that cannot be.
    Options,
    /// The base image is missing or cannot be used.
    Image,
    /// The host cannot give the memory now.
    Memory,
    /// The overflow file or a socket cannot be made.
    Create,
    /// Somebody else serves it.
    InUse,
    /// The operating system refuses access.
    Permission,
    /// Nobody serves there, or a program that is needed is not installed.
    Unavailable,
    /// The disk's supervisor says no, for now.
    Refused,
    /// The worker failed, or the host did something that it never should.
    Internal,
}

/// Why a disk cannot be served.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SupervisorError {
    /// For programs.
    pub kind: ErrorKind,
    /// For people.
    pub message: String,
}

impl SupervisorError {
    /// An error of a kind.
    pub fn new(kind: ErrorKind, message: impl Into<String>) -> Self {
        SupervisorError { kind, message: message.into() }
    }

    /// Something failed on a path: an error of `kind`, unless it was for want of permission.
    pub fn on_path(
        kind: ErrorKind,
        what: &str,
        path: &Path,
        error: impl Into<io::Error>,
        advice: &str,
    ) -> Self {
        let error = error.into();
        let kind = match error.kind() {
            io::ErrorKind::PermissionDenied => ErrorKind::Permission,
            _ => kind,
        };
        SupervisorError::new(kind, format!("{what} {}: {}: {advice}", path.display(), plain(&error)))
    }

    /// A call that cannot fail on a healthy host did.
    pub fn internal(what: &str, error: impl Into<io::Error>) -> Self {
        let advice = "see that memory, processes and file descriptors are left (free, ulimit -a), else please report this";
        SupervisorError::new(ErrorKind::Internal, format!("{what}: {}: {advice}", plain(&error.into())))
    }
}

/// The operating system's words without the number behind them.
pub fn plain(error: &io::Error) -> String {
    let text = error.to_string();
    match text.find(" (os error ") {
        Some(end) => text[..end].to_lowercase(),
        None => text,
    }
}

impl fmt::Display for SupervisorError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

impl std::error::Error for SupervisorError {}
