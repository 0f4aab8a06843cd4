//! Errors of registries. Owns their kinds, which decide what a caller does next, and their words.

use serde::{Deserialize, Serialize};
use std::fmt;

/// Kind of an error: what can be done about it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum RegistryErrorKind {
    /// The store has no such object, image or version.
    Absent,
    /// The store refuses the credentials, or what they may do.
    Denied,
    /// The store does not answer, or says that it cannot now. A later attempt may succeed.
    Unreachable,
    /// An object is not what its digest, its format or another object says.
    Damaged,
    /// Another object of the same name exists.
    Exists,
    /// A signature is missing, or is not one of a required key.
    Unsigned,
    /// The store is of another format, or cannot do what is needed.
    Unsupported,
    /// Another program works on the registry.
    Busy,
    /// The settings of this host do not allow it.
    Forbidden,
    /// Something on this host failed.
    Local,
}

/// An error with what failed, on which object, why, and what to do.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub struct RegistryError {
    /// Kind of the error.
    pub kind: RegistryErrorKind,
    /// Message for people, in one sentence.
    pub message: String,
}

impl RegistryError {
    /// An error of this kind.
    pub fn new(kind: RegistryErrorKind, message: impl fmt::Display) -> RegistryError {
        RegistryError { kind, message: message.to_string() }
    }

    /// An object that is not what it should be.
    pub(crate) fn damaged(key: &str, why: impl fmt::Display) -> RegistryError {
        RegistryError::new(RegistryErrorKind::Damaged, format!("{key} is damaged: {why}"))
    }

    /// An object that is not there.
    pub(crate) fn absent(what: impl fmt::Display) -> RegistryError {
        RegistryError::new(RegistryErrorKind::Absent, what)
    }
}
