//! Names of images, catalogs, machines and stores. Owns the syntax.
//!
//! Invariant: a [`Name`] is valid as a host name, as a file name, and as a part of a path or URL.

use serde::{Deserialize, Serialize};
use std::fmt;
use std::str::FromStr;
use utoipa::ToSchema;

/// A name: 1 to 63 letters a to z, digits and hyphens, no hyphen at its ends (a label of RFC 1123).
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, ToSchema)]
#[serde(try_from = "String")]
#[schema(value_type = String, pattern = "^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$", example = "debian")]
pub struct Name(String);

/// Error for a text that is not a valid name.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("'{}' is no name: it takes 1 to 63 letters a to z, digits and hyphens, with no hyphen at its ends", shown(.0))]
pub struct NameError(String);

/// Shortens a text so that people recognise it.
fn shown(text: &str) -> String {
    let mut short: String = text.chars().take(64).flat_map(char::escape_debug).collect();
    if text.chars().nth(64).is_some() {
        short.push_str("...");
    }
    short
}

impl Name {
    /// Returns the name as text.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl FromStr for Name {
    type Err = NameError;

    fn from_str(text: &str) -> Result<Name, NameError> {
        Name::try_from(text.to_owned())
    }
}

impl TryFrom<String> for Name {
    type Error = NameError;

    fn try_from(text: String) -> Result<Name, NameError> {
        let bytes = text.as_bytes();
        let plain = |b: &u8| b.is_ascii_lowercase() || b.is_ascii_digit();
        let ends = [bytes.first(), bytes.last()].into_iter().all(|b| b.is_some_and(plain));
        if ends && bytes.len() <= 63 && bytes.iter().all(|b| plain(b) || *b == b'-') {
            Ok(Name(text))
        } else {
            Err(NameError(text))
        }
    }
}

impl fmt::Display for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_can_be_a_host_and_a_file() {
        for text in ["a", "7", "debian", "desk-001", "a--b", &"x".repeat(63)] {
            assert_eq!(text.parse::<Name>().map(|n| n.to_string()), Ok(text.to_owned()));
        }
        let long = "x".repeat(64);
        for text in ["", "-", "a-", "-a", "A", "a.b", "a/b", "..", "a b", "a\n", "é", "a\0", &long] {
            assert!(text.parse::<Name>().is_err(), "{text:?}");
        }
        let json: Result<Name, _> = serde_json::from_str("\"../etc\"");
        assert!(json.is_err());
    }

    #[test]
    fn an_error_shows_no_more_than_it_must() {
        let error = "\u{1b}[2J".repeat(1000).parse::<Name>().unwrap_err().to_string();
        assert!(error.len() < 900 && !error.contains('\u{1b}'), "{error}");
    }
}
