//! Errors of the client. Owns the messages.

use crate::Problem;
use spillway_control::Exit;
use std::io;
use std::path::PathBuf;

/// Error of a request: no response, or a refusal.
#[derive(Debug, thiserror::Error)]
pub enum ClientError {
    /// The connection to the daemon could not be made.
    #[error("{at}: {source}: {hint}")]
    Connect {
        /// Address or socket of the daemon that was tried.
        at: String,
        /// Error that the operating system reported.
        source: io::Error,
        /// Advice to the user on what to do next.
        hint: &'static str,
    },
    /// The server did not prove its identity; no request was sent to it.
    #[error("{at}: its certificate is not trusted: {why}")]
    Untrusted {
        /// Address or socket of the daemon that was asked.
        at: String,
        /// What is wrong with it, and what to do.
        why: String,
    },
    /// The response was cut off, or does not come from spillwayd.
    #[error("{at}: {why}: is it spillwayd that listens there?")]
    Broken {
        /// Address or socket of the daemon that was asked.
        at: String,
        /// What is wrong with the response.
        why: String,
    },
    /// A local file, such as a token or certificates, cannot be used.
    #[error("{}: {source}", path.display())]
    File {
        /// File that could not be read.
        path: PathBuf,
        /// What is wrong with the file.
        source: io::Error,
    },
    /// A signal has interrupted the request.
    #[error("{at}: interrupted while it was asked")]
    Interrupted {
        /// Address or socket of the daemon that was asked.
        at: String,
    },
    /// The daemon refused the request, for this reason.
    #[error(transparent)]
    Refused(Problem),
}

impl ClientError {
    /// Exit code of a program that ends with this error.
    pub fn exit(&self) -> Exit {
        match self {
            ClientError::Connect { source, .. } | ClientError::File { source, .. }
                if source.kind() == io::ErrorKind::PermissionDenied =>
            {
                Exit::Permission
            }
            ClientError::Untrusted { .. } => Exit::Permission,
            ClientError::File { .. } => Exit::Usage,
            ClientError::Connect { .. } | ClientError::Broken { .. } => Exit::Unavailable,
            ClientError::Interrupted { .. } => Exit::Interrupted,
            ClientError::Refused(refusal) => refusal.code.exit(),
        }
    }
}
