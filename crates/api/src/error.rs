//! How an answer says that something could not be done. Owns the codes, which are stable.

use serde::{Deserialize, Serialize};
use std::fmt;
use utoipa::ToSchema;

/// Reason of an error, a stable word for programs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum ErrorCode {
    /// What was sent cannot be.
    Invalid,
    /// Who asks is not known.
    Unauthenticated,
    /// The user's role does not permit the request.
    Forbidden,
    /// There is no such object.
    NotFound,
    /// An object of that name exists already.
    Exists,
    /// Other objects still use the object.
    InUse,
    /// Its state does not allow it now, or somebody else changes it.
    Conflict,
    /// More was sent than is taken.
    TooLarge,
    /// The host has not enough memory or disk for it.
    Exhausted,
    /// Too many requests or connections at a time, of this caller or of all. Asking again later may help.
    Busy,
    /// What it takes is not there: a program, a hypervisor.
    Unavailable,
    /// It was told to stop.
    Cancelled,
    /// What is stored is not what it was.
    Damaged,
    /// A fault of the daemon itself, which its log explains.
    Internal,
}

impl ErrorCode {
    /// The HTTP status that comes with it.
    pub fn status(self) -> u16 {
        match self {
            ErrorCode::Invalid => 400,
            ErrorCode::Unauthenticated => 401,
            ErrorCode::Forbidden => 403,
            ErrorCode::NotFound => 404,
            ErrorCode::Exists
            | ErrorCode::InUse
            | ErrorCode::Conflict
            | ErrorCode::Cancelled
            | ErrorCode::Exhausted => 409,
            ErrorCode::TooLarge => 413,
            ErrorCode::Busy => 429,
            ErrorCode::Unavailable => 503,
            ErrorCode::Internal | ErrorCode::Damaged => 500,
        }
    }
}

/// What every answer but 2xx carries.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ErrorBody {
    /// Reason of the error, a stable word for programs.
    pub code: ErrorCode,
    /// For people: what, where, and what to do.
    pub message: String,
}

impl ErrorBody {
    /// Makes an error of this code with a message for people.
    pub fn new(code: ErrorCode, message: impl Into<String>) -> ErrorBody {
        ErrorBody { code, message: message.into() }
    }
}

impl fmt::Display for ErrorBody {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

impl std::error::Error for ErrorBody {}
