//! What can go wrong, as the API says it. Owns the translation, not the words.

use crate::store::{Revision, StoreError};
use spillway_api::{ErrorCode, Problem};
use spillway_control::{ErrorKind, SupervisorError};

/// Why something was not done: for programs a code, for people what, where and what to do.
#[derive(Clone, Debug, thiserror::Error)]
#[error("{message}")]
pub struct HostError {
    /// For programs.
    pub code: ErrorCode,
    /// For people.
    pub message: String,
    /// Whether what failed fails again however often it is tried.
    pub is_permanent: bool,
}

impl HostError {
    /// With these words. It may work when it is tried again.
    pub fn new(code: ErrorCode, message: impl Into<String>) -> HostError {
        HostError { code, message: message.into(), is_permanent: false }
    }

    /// No other try can have another outcome until something else is asked for: other settings, another image.
    pub fn permanent(self) -> HostError {
        HostError { is_permanent: true, ..self }
    }

    /// What was sent cannot be.
    pub fn invalid(message: impl Into<String>) -> HostError {
        HostError::new(ErrorCode::Invalid, message)
    }

    /// There is none of that name; perhaps another is meant.
    pub fn not_found<'a>(word: &str, name: &str, others: impl IntoIterator<Item = &'a str>) -> HostError {
        let message = match spillway_api::nearest(name, others) {
            Some(near) => format!("there is no {word} '{name}': do you mean '{near}'?"),
            None => format!("there is no {word} '{name}'"),
        };
        HostError::new(ErrorCode::NotFound, message)
    }

    /// Refuses a change of an object (`what` names it) that has another tag now than the client has read.
    pub fn if_match(what: &str, expected: Option<Revision>, found: Revision) -> Result<(), HostError> {
        match expected {
            Some(expected) if expected != found => {
                let (found, expected) = (found.0, expected.0);
                let message = format!(
                    "{what} was changed by somebody else meanwhile: its tag is \"{found}\" now, not \"{expected}\": look again"
                );
                Err(HostError::new(ErrorCode::PreconditionFailed, message))
            }
            _ => Ok(()),
        }
    }

    /// The same for clients.
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
