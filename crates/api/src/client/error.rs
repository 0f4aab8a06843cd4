//! Why a daemon could not be asked, or says no. Owns the words.

use crate::ErrorBody;
use std::io;
use std::path::PathBuf;

/// Why there is no answer, or the answer is no.
#[derive(Debug, thiserror::Error)]
pub enum ClientError {
    /// Nobody could be asked.
    #[error("{at}: {source}: {hint}")]
    Connect {
        /// The address.
        at: String,
        /// What the kernel said.
        source: io::Error,
        /// What to do.
        hint: &'static str,
    },
    /// Who listens there does not show to be who is meant: nothing was said to it.
    #[error("{at}: its certificate is not trusted: {why}")]
    Untrusted {
        /// The address.
        at: String,
        /// What is wrong with it, and what to do.
        why: String,
    },
    /// The answer was cut off, or is not one of the daemon's.
    #[error("{at}: {why}: is it spillwayd that listens there?")]
    Broken {
        /// The address.
        at: String,
        /// What is wrong with it.
        why: String,
    },
    /// A file of this side's: a token, certificates.
    #[error("{}: {source}", path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        source: io::Error,
    },
    /// A signal has ended the waiting.
    #[error("{at}: interrupted while it was asked")]
    Interrupted {
        /// The address.
        at: String,
    },
    /// The daemon says no.
    #[error(transparent)]
    Refused(ErrorBody),
}
