//! Why a disk cannot be served, for people. Owns the kinds that callers turn into exit codes; never decides
//! how an error is shown.
//!
//! Invariant: what an error shows is one line that says what failed, on which object, why, and what to do.

use std::error::Error;
use std::fmt;
use std::io;
use std::path::Path;
use std::sync::Arc;

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

/// Why a disk cannot be served: a kind, what failed on which object, what that was caused by, and what to do.
#[derive(Clone, Debug)]
pub struct SupervisorError {
    /// For programs.
    pub kind: ErrorKind,
    /// What failed, on which object; of an error without a source also why, and what to do. Empty where the source says it.
    what: String,
    /// What it was caused by: an error of the operating system, of another crate or of another process.
    source: Option<Arc<dyn Error + Send + Sync>>,
    /// What to do about it, behind the source.
    advice: Option<String>,
}

impl SupervisorError {
    /// An error that nothing else has caused. `what` says all that there is to say.
    pub fn new(kind: ErrorKind, what: impl Into<String>) -> Self {
        SupervisorError { kind, what: what.into(), source: None, advice: None }
    }

    /// An error that another one has caused.
    pub fn caused(
        kind: ErrorKind,
        what: impl Into<String>,
        source: impl Error + Send + Sync + 'static,
        advice: &str,
    ) -> Self {
        let (source, advice) = (Some(Arc::new(source) as _), Some(advice.into()));
        SupervisorError { kind, what: what.into(), source, advice }
    }

    /// An error of another crate or of another process, which says all that there is to say.
    pub fn of(kind: ErrorKind, source: impl Error + Send + Sync + 'static) -> Self {
        SupervisorError { kind, what: String::new(), source: Some(Arc::new(source)), advice: None }
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
        SupervisorError::caused(kind, format!("{what} {}", path.display()), error, advice)
    }

    /// A call that cannot fail on a healthy host did.
    pub fn internal(what: &str, error: impl Into<io::Error>) -> Self {
        let advice = "see that memory, processes and file descriptors are left (free, ulimit -a), else please report this";
        SupervisorError::caused(ErrorKind::Internal, what, error.into(), advice)
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
        let source = self.source.as_deref().map(|source| match source.downcast_ref() {
            Some(error) => plain(error),
            None => source.to_string(),
        });
        let parts = [Some(self.what.as_str()), source.as_deref(), self.advice.as_deref()];
        let mut separator = "";
        for part in parts.into_iter().flatten().filter(|part| !part.is_empty()) {
            write!(f, "{separator}{part}")?;
            separator = ": ";
        }
        Ok(())
    }
}

impl Error for SupervisorError {
    fn source(&self) -> Option<&(dyn Error + 'static)> {
        self.source.as_deref().map(|source| source as _)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_error_says_what_failed_on_which_object_why_and_what_to_do() {
        let denied = || io::Error::from_raw_os_error(libc::EACCES);
        let error = SupervisorError::on_path(
            ErrorKind::Create,
            "cannot open disk",
            Path::new("/a"),
            denied(),
            "let this user read it",
        );
        assert_eq!(error.to_string(), "cannot open disk /a: permission denied: let this user read it");
        assert_eq!(error.kind, ErrorKind::Permission);
        assert_eq!(error.source().unwrap().to_string(), denied().to_string());
        let error = SupervisorError::of(ErrorKind::Image, error);
        assert_eq!(error.to_string(), "cannot open disk /a: permission denied: let this user read it");
        let error = SupervisorError::new(ErrorKind::Options, "no such mode");
        assert_eq!((error.to_string().as_str(), error.source().is_none()), ("no such mode", true));
    }
}
