//! Why a daemon could not be asked, or says no. Owns the words.

use crate::Problem;
use std::io;
use std::path::PathBuf;

/// Why there is no answer, or the answer is no.
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
    /// Who listens there does not show to be who is meant: nothing was said to it.
    #[error("{at}: its certificate is not trusted: {why}")]
    Untrusted {
        /// Address or socket of the daemon that was asked.
        at: String,
        /// What is wrong with it, and what to do.
        why: String,
    },
    /// The answer was cut off, or is not one of the daemon's.
    #[error("{at}: {why}: is it spillwayd that listens there?")]
    Broken {
        /// Address or socket of the daemon that was asked.
        at: String,
        /// What is wrong with it.
        why: String,
    },
    /// A file of this side's: a token, certificates.
    #[error("{}: {source}", path.display())]
    File {
        /// File that could not be read.
        path: PathBuf,
        /// What is wrong with it.
        source: io::Error,
    },
    /// A signal has ended the waiting.
    #[error("{at}: interrupted while it was asked")]
    Interrupted {
        /// Address or socket of the daemon that was asked.
        at: String,
    },
    /// The daemon refused the request, for this reason.
    #[error(transparent)]
    Refused(Problem),
}
