//! Errors of the host, as the API reports them. Owns the conversion, not the messages.

use crate::store::StoreError;
use spillway_api::{ErrorCode, Problem};
use spillway_control::{ErrorKind, SupervisorError};

/// Error of a request: a code for programs; for people what failed, on which object, and what to do.
#[derive(Clone, Debug, thiserror::Error)]
#[error("{message}")]
pub struct HostError {
    /// Code for programs.
    pub code: ErrorCode,
    /// Message for people.
    pub message: String,
    /// Whether retrying cannot succeed.
    pub is_permanent: bool,
}

impl HostError {
    /// Creates an error; a retry may succeed.
    pub fn new(code: ErrorCode, message: impl Into<String>) -> HostError {
        HostError { code, message: message.into(), is_permanent: false }
    }

    /// Marks the error as permanent: a retry fails until something else is requested, such as other settings or another
    /// image.
    pub fn permanent(self) -> HostError {
        HostError { is_permanent: true, ..self }
    }

    /// Error for an invalid request.
    pub fn invalid(message: impl Into<String>) -> HostError {
        HostError::new(ErrorCode::Invalid, message)
    }

    /// Error for an unknown name; suggests a similar one.
    pub fn not_found<'a>(word: &str, name: &str, others: impl IntoIterator<Item = &'a str>) -> HostError {
        let message = match spillway_api::nearest(name, others) {
            Some(near) => format!("there is no {word} '{name}': do you mean '{near}'?"),
            None => format!("there is no {word} '{name}'"),
        };
        HostError::new(ErrorCode::NotFound, message)
    }

    /// Converts the error for clients.
    pub fn problem(&self) -> Problem {
        Problem::new(self.code, self.message.clone())
    }
}

impl From<StoreError> for HostError {
    fn from(error: StoreError) -> HostError {
        let code = match &error {
            StoreError::Conflict(_) => ErrorCode::Conflict,
            StoreError::Full => ErrorCode::Exhausted,
            StoreError::Unreadable { .. } => ErrorCode::Damaged,
            _ => ErrorCode::Internal,
        };
        HostError::new(code, error.to_string())
    }
}

impl From<SupervisorError> for HostError {
    fn from(error: SupervisorError) -> HostError {
        let code = match error.kind {
            ErrorKind::Refused | ErrorKind::InUse => ErrorCode::Conflict,
            ErrorKind::Unavailable => ErrorCode::Unavailable,
            ErrorKind::Image => ErrorCode::Damaged,
            _ => ErrorCode::Internal,
        };
        HostError::new(code, error.to_string())
    }
}
