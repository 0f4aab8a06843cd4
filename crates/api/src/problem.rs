//! Problem details (RFC 9457) of refused requests. Owns the kinds of problems, whose words are stable.
//!
//! Invariant: a kind has one status, one title and one address; `docs/api.md` lists them all.

use serde::{Deserialize, Serialize};
use spillway_control::Exit;
use std::fmt;
use utoipa::ToSchema;

/// Path of the descriptions of problems; each is below it under its word.
pub const PROBLEM_TYPES: &str = "/v1/problem-types";
/// Media type of error responses.
pub const PROBLEM_JSON: &str = "application/problem+json";

/// Kind of a problem, a stable word for programs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum ErrorCode {
    /// A part of the request has a value that it cannot have.
    Invalid,
    /// The request has no token, or one that the daemon does not know.
    Unauthenticated,
    /// The user's role, or a setting of the daemon, does not permit the request.
    Forbidden,
    /// There is no object of that name.
    NotFound,
    /// The path does not take the method of the request.
    MethodNotAllowed,
    /// The body of the request did not arrive in time.
    Timeout,
    /// An object of that name exists already.
    Exists,
    /// Other objects still use the object.
    InUse,
    /// The state of the object does not allow the request now, or another request is changing it.
    Conflict,
    /// The request was cancelled before it was carried out.
    Cancelled,
    /// The host has not enough memory or disk for the request.
    Exhausted,
    /// The object was changed after the client read it: it has another entity tag than `If-Match` names.
    PreconditionFailed,
    /// The request is larger than the daemon accepts.
    TooLarge,
    /// The body of the request is of another type than JSON.
    UnsupportedMediaType,
    /// The `Idempotency-Key` belongs to an earlier request that had another body.
    KeyReused,
    /// Too many requests or connections at a time, of this caller or of all. A later request may succeed.
    Busy,
    /// Something that the request needs is missing: a program, a hypervisor, a file system.
    Unavailable,
    /// Stored data differs from what was written.
    Damaged,
    /// The daemon has a fault, which its log explains.
    Internal,
}

impl ErrorCode {
    /// All kinds of problems, in the order of their statuses.
    pub const ALL: [ErrorCode; 19] = [
        ErrorCode::Invalid,
        ErrorCode::Unauthenticated,
        ErrorCode::Forbidden,
        ErrorCode::NotFound,
        ErrorCode::MethodNotAllowed,
        ErrorCode::Timeout,
        ErrorCode::Exists,
        ErrorCode::InUse,
        ErrorCode::Conflict,
        ErrorCode::Cancelled,
        ErrorCode::Exhausted,
        ErrorCode::PreconditionFailed,
        ErrorCode::TooLarge,
        ErrorCode::UnsupportedMediaType,
        ErrorCode::KeyReused,
        ErrorCode::Busy,
        ErrorCode::Damaged,
        ErrorCode::Internal,
        ErrorCode::Unavailable,
    ];

    /// Exit code of a program that ends with such a refusal.
    pub fn exit(self) -> Exit {
        match self {
            ErrorCode::Invalid
            | ErrorCode::MethodNotAllowed
            | ErrorCode::UnsupportedMediaType
            | ErrorCode::TooLarge => Exit::Usage,
            ErrorCode::Unauthenticated | ErrorCode::Forbidden => Exit::Permission,
            ErrorCode::NotFound => Exit::Image,
            ErrorCode::Exists
            | ErrorCode::InUse
            | ErrorCode::Conflict
            | ErrorCode::PreconditionFailed
            | ErrorCode::KeyReused
            | ErrorCode::Timeout
            | ErrorCode::Cancelled
            | ErrorCode::Busy => Exit::Refused,
            ErrorCode::Exhausted => Exit::Create,
            ErrorCode::Unavailable => Exit::Unavailable,
            ErrorCode::Internal | ErrorCode::Damaged => Exit::Internal,
        }
    }

    /// Returns the HTTP status, the title, and the advice for clients.
    fn facts(self) -> (u16, &'static str, &'static str) {
        match self {
            ErrorCode::Invalid => (400, "The request is invalid", "Correct what `detail` names."),
            ErrorCode::Unauthenticated => (
                401,
                "The caller is unknown",
                "Send a token that spillwayd knows: `Authorization: Bearer TOKEN`.",
            ),
            ErrorCode::Forbidden => (
                403,
                "The request is not permitted",
                "Use a token with the role, or change the setting, that `detail` names.",
            ),
            ErrorCode::NotFound => {
                (404, "The object does not exist", "Check the name. After a DELETE: it is done.")
            }
            ErrorCode::MethodNotAllowed => {
                (405, "The method is not allowed", "Use a method that the header `Allow` names.")
            }
            ErrorCode::Timeout => {
                (408, "The request took too long", "Send the whole body within 30 seconds.")
            }
            ErrorCode::Exists => {
                (409, "The object exists already", "Read the object, and compare; or take another name.")
            }
            ErrorCode::InUse => (409, "The object is in use", "Release or delete first what `detail` names."),
            ErrorCode::Conflict => (
                409,
                "The state does not allow the request",
                "Read the object, and do first what `detail` names.",
            ),
            ErrorCode::Cancelled => {
                (409, "The request was cancelled", "Send the request again if it is still needed.")
            }
            ErrorCode::Exhausted => {
                (409, "The host has no capacity left", "Free what `detail` names, or wait until others do.")
            }
            ErrorCode::PreconditionFailed => {
                (412, "The object has changed", "Read the object, decide again, and send its new tag.")
            }
            ErrorCode::TooLarge => (413, "The request is too large", "Send several smaller requests."),
            ErrorCode::UnsupportedMediaType => {
                (415, "The body is not JSON", "Send JSON with `Content-Type: application/json`.")
            }
            ErrorCode::KeyReused => (
                422,
                "The key belongs to another request",
                "Use a new `Idempotency-Key` for each new request.",
            ),
            ErrorCode::Busy => (429, "Too many requests", "Wait for a response before the next request."),
            ErrorCode::Damaged => {
                (500, "Stored data is damaged", "Restore or import again what `detail` names.")
            }
            ErrorCode::Internal => {
                (500, "The daemon has a fault", "See the log of spillwayd, and report the fault.")
            }
            ErrorCode::Unavailable => {
                (503, "Something that is needed is not available", "Provide what `detail` names.")
            }
        }
    }

    /// HTTP status of a response with a problem of this kind.
    pub fn status(self) -> u16 {
        self.facts().0
    }

    /// Returns the kind of a problem when only its status is known.
    pub fn of_status(status: u16) -> ErrorCode {
        match ErrorCode::ALL.into_iter().find(|code| code.status() == status) {
            Some(code) => code,
            None if status >= 500 => ErrorCode::Internal,
            None => ErrorCode::Invalid,
        }
    }

    /// Word of this kind, such as `not_found`.
    pub fn word(self) -> String {
        match serde_json::to_value(self) {
            Ok(serde_json::Value::String(word)) => word,
            other => unreachable!("a plain enumeration is a word, not {other:?}"),
        }
    }

    /// Describes this kind.
    pub fn describe(self) -> ProblemType {
        let (status, title, advice) = self.facts();
        ProblemType {
            code: self,
            address: self.address(),
            title: title.into(),
            status,
            advice: advice.into(),
        }
    }

    fn address(self) -> String {
        format!("{PROBLEM_TYPES}/{}", self.word())
    }
}

/// A kind of problem, as the daemon describes it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ProblemType {
    /// Kind of the problem, a stable word for programs.
    pub code: ErrorCode,
    /// The `type` of each problem of this kind: the address of this description.
    #[serde(rename = "type")]
    pub address: String,
    /// What has happened, in a few words that are the same for each problem of this kind.
    pub title: String,
    /// The HTTP status of a response with a problem of this kind.
    pub status: u16,
    /// What a client does about a problem of this kind.
    pub advice: String,
}

/// Why a request was not carried out: problem details (RFC 9457), the body of every response but 2xx.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Problem {
    /// Kind of the problem: the address, on the same daemon, of its description.
    #[serde(rename = "type")]
    pub address: String,
    /// What has happened, in a few words that are the same for each problem of this kind.
    pub title: String,
    /// The HTTP status of the response.
    pub status: u16,
    /// What failed, on which object, why, and what to do; for people.
    pub detail: String,
    /// Path of the request. Absent if the problem does not belong to a request, as in an operation.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub instance: Option<String>,
    /// Kind of the problem, a stable word for programs.
    pub code: ErrorCode,
}

impl Problem {
    /// Makes a problem of this kind. The detail says what failed, on which object, why, and what to do.
    pub fn new(code: ErrorCode, detail: impl Into<String>) -> Problem {
        let (status, title, _) = code.facts();
        let (address, detail) = (code.address(), detail.into());
        Problem { address, title: title.into(), status, detail, instance: None, code }
    }
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.detail)
    }
}

impl std::error::Error for Problem {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_kind_has_a_word_a_status_and_an_address_that_the_page_lists() {
        let page = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/api.md");
        let page = std::fs::read_to_string(page).unwrap();
        for code in ErrorCode::ALL {
            let ProblemType { address, title, status, advice, .. } = code.describe();
            assert_eq!(address, format!("/v1/problem-types/{}", code.word()));
            let row = format!("| `{}` | {status} | {title} | {advice} |", code.word());
            assert!(page.contains(&row), "docs/api.md lacks the row\n{row}");
        }
        assert!(ErrorCode::ALL.is_sorted_by_key(|code| code.status()));
    }

    #[test]
    fn of_a_status_that_no_kind_has_the_kind_is_general() {
        let known = [400, 404, 415, 431, 502, 503].map(ErrorCode::of_status);
        use ErrorCode::{Internal, Invalid, NotFound, Unavailable, UnsupportedMediaType};
        assert_eq!(known, [Invalid, NotFound, UnsupportedMediaType, Invalid, Internal, Unavailable]);
    }

    #[test]
    fn a_problem_is_as_the_rfc_says() {
        let problem = Problem { instance: Some("/v1/x".into()), ..Problem::new(ErrorCode::NotFound, "no x") };
        let json = serde_json::to_value(&problem).unwrap();
        let want = serde_json::json!({
            "type": "/v1/problem-types/not_found", "title": "The object does not exist", "status": 404,
            "detail": "no x", "instance": "/v1/x", "code": "not_found",
        });
        assert_eq!(json, want);
        assert_eq!(serde_json::from_value::<Problem>(json).unwrap(), problem);
    }
}
