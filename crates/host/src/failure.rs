//! How the program spillwayd fails: with one line for people and the exit code of the cause. Owns which cause has which
//! code; `docs/exit-codes.md` says what the codes mean.
//!
//! Invariant: a cause that is not known here is a fault (70).

use crate::error::HostError;
use crate::store::StoreError;
use rustix::io::Errno;
use spillway_api::client::ClientError;
use spillway_control::{Exit, SupervisorError};
use std::error::Error;
use std::io;
use tokio_rustls::rustls;
use tokio_rustls::rustls::pki_types::pem;

/// A refusal to start, to back up or to restore, with its exit code.
#[derive(Debug, thiserror::Error)]
#[error("{message}")]
pub struct Failure {
    exit: Exit,
    message: String,
}

impl Failure {
    /// The options cannot be used.
    pub fn usage(message: impl Into<String>) -> Failure {
        Failure { exit: Exit::Usage, message: message.into() }
    }

    /// Somebody else uses what is needed.
    pub fn refused(message: impl Into<String>) -> Failure {
        Failure { exit: Exit::Refused, message: message.into() }
    }

    /// There is no such input.
    pub fn missing(message: impl Into<String>) -> Failure {
        Failure { exit: Exit::Image, message: message.into() }
    }
}

/// Returns the exit code of an error: that of the first cause that is known.
pub fn exit(error: &anyhow::Error) -> Exit {
    error.chain().find_map(exit_of).unwrap_or(Exit::Internal)
}

fn exit_of(cause: &(dyn Error + 'static)) -> Option<Exit> {
    if let Some(failure) = cause.downcast_ref::<Failure>() {
        return Some(failure.exit);
    }
    if let Some(error) = cause.downcast_ref::<HostError>() {
        return Some(error.code.exit());
    }
    if let Some(error) = cause.downcast_ref::<ClientError>() {
        return Some(error.exit());
    }
    if let Some(error) = cause.downcast_ref::<SupervisorError>() {
        return Some(error.kind.exit());
    }
    if let Some(error) = cause.downcast_ref::<StoreError>() {
        return match error {
            StoreError::Conflict(_) => Some(Exit::Refused),
            StoreError::Full => Some(Exit::Create),
            StoreError::Unreadable { .. }
            | StoreError::Newer { .. }
            | StoreError::Tables { .. }
            | StoreError::Copy { .. } => Some(Exit::Image),
            _ => None,
        };
    }
    if let Some(error) = cause.downcast_ref::<pem::Error>() {
        return match error {
            pem::Error::Io(error) => of_io(error.kind()),
            _ => Some(Exit::Usage),
        };
    }
    if cause.is::<rustls::Error>() {
        return Some(Exit::Usage);
    }
    if let Some(error) = cause.downcast_ref::<Errno>() {
        return of_io(error.kind());
    }
    cause.downcast_ref::<io::Error>().and_then(|error| of_io(error.kind()))
}

fn of_io(kind: io::ErrorKind) -> Option<Exit> {
    use io::ErrorKind::*;
    match kind {
        PermissionDenied => Some(Exit::Permission),
        NotFound => Some(Exit::Image),
        AddrInUse | AddrNotAvailable | AlreadyExists | IsADirectory | NotADirectory | QuotaExceeded
        | ReadOnlyFilesystem | StorageFull => Some(Exit::Create),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use anyhow::{Context, anyhow};
    use spillway_api::ErrorCode;

    #[test]
    fn the_first_cause_that_is_known_counts() {
        let io = |kind: io::ErrorKind| anyhow::Error::new(io::Error::from(kind));
        for (error, code) in [
            (anyhow!(Failure::usage("--audit twice")), Exit::Usage),
            (anyhow!(Failure::refused("another one listens")), Exit::Refused),
            (Err::<(), _>(io(io::ErrorKind::PermissionDenied)).context("/x").unwrap_err(), Exit::Permission),
            (io(io::ErrorKind::StorageFull), Exit::Create),
            (anyhow!(HostError::new(ErrorCode::Exhausted, "full")), Exit::Create),
            (anyhow!(StoreError::Full), Exit::Create),
            (anyhow!("a fault"), Exit::Internal),
        ] {
            assert_eq!(exit(&error), code, "{error:?}");
        }
    }
}
