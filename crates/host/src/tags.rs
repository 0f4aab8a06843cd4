//! Entity tags (RFC 9110, 8.8.3): short numbers by which clients notice that an object was changed. Owns how they are
//! made, and the refusal of a request with an old one.
//!
//! Invariant: the tags of two states of an object are equal if and only if clients see the same of what they can change.
//! What nobody has asked for (status, progress, figures) has no effect on a tag.

use crate::error::HostError;
use crate::store::Revision;
use serde::Serialize;
use sha2::{Digest, Sha256};
use spillway_api::ErrorCode;
use std::fmt;
use std::str::FromStr;

/// Tag of an object in one state, such as `"12"`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tag(u64);

impl Tag {
    /// Tag of an object with this content: all that clients can change of it, and nothing else.
    pub fn of(content: &impl Serialize) -> Tag {
        let content = serde_json::to_vec(content).expect("objects are plain data");
        let first = Sha256::digest(content).first_chunk().copied().expect("a digest has 32 bytes");
        // At most 19 digits.
        Tag(u64::from_be_bytes(first) >> 1)
    }

    /// The number, for objects whose tag is their revision in another store.
    pub fn number(self) -> u64 {
        self.0
    }

    /// Refuses to change an object (`what` names it) whose tag is not the one that the client has read.
    pub fn check(self, what: &str, expected: Option<Tag>) -> Result<(), HostError> {
        match expected {
            Some(expected) if expected != self => {
                let message = format!(
                    "{what} was changed meanwhile: its ETag is {self} now, not {expected}: read it again"
                );
                Err(HostError::new(ErrorCode::PreconditionFailed, message))
            }
            _ => Ok(()),
        }
    }
}

/// Tag of an object whose record is written only when what clients see of it changes.
impl From<Revision> for Tag {
    fn from(revision: Revision) -> Tag {
        Tag(revision.0)
    }
}

/// As in a header.
impl fmt::Display for Tag {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "\"{}\"", self.0)
    }
}

/// From a header; the quotes may be missing.
impl FromStr for Tag {
    type Err = ();

    fn from_str(text: &str) -> Result<Tag, ()> {
        let quoted = text.strip_prefix('"').and_then(|text| text.strip_suffix('"'));
        let digits = quoted.unwrap_or(text);
        let is_plain = digits.bytes().all(|b| b.is_ascii_digit());
        digits.parse().ok().filter(|_| is_plain).map(Tag).ok_or(())
    }
}
