//! Programs and files in guests: what a machine's guest agent is asked to run, to write and to read.
//!
//! Invariant: bytes of a guest are base64 in JSON, never text that could lose some of them.

use crate::bounds::{self, Bounded, OutOfBounds};
use base64ct::{Base64, Encoding};
use serde::de::Error;
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use std::borrow::Cow;
use std::collections::BTreeMap;
use std::fmt;
use std::time::Duration;
use utoipa::openapi::RefOr;
use utoipa::openapi::schema::{KnownFormat, ObjectBuilder, Schema, SchemaFormat, Type};
use utoipa::{PartialSchema, ToSchema};

/// Time that a program in a guest has if a request gives none, in seconds.
pub const GUEST_TIME_LIMIT_SECONDS_DEFAULT: u32 = 60;
/// Largest standard input of a program in a guest.
pub const MOST_GUEST_INPUT_BYTES: usize = 64 << 10;
/// Largest command of a guest's program as it is sent to the agent, in JSON: words, variables, and the input in base64. It is one line
/// of the input of `virsh`.
pub const MOST_GUEST_COMMAND_BYTES: usize = 120 << 10;
/// Largest part of the standard output, and of the standard error, of a program in a guest that is kept.
pub const MOST_GUEST_OUTPUT_BYTES: usize = 1 << 20;
/// Largest file that is written to a guest or read of it.
pub const MOST_GUEST_FILE_BYTES: usize = 16 << 20;
/// Largest number of words of a command in a guest, and of variables of its environment.
pub const MOST_GUEST_WORDS: usize = 256;
/// Longest path of a file in a guest, in bytes.
pub const MOST_GUEST_PATH_BYTES: usize = 4096;

/// Bytes, which are base64 (RFC 4648, 4) in JSON.
#[derive(Clone, Default, PartialEq, Eq)]
pub struct Base64Bytes(pub Vec<u8>);

/// They may be secret.
impl fmt::Debug for Base64Bytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} bytes", self.0.len())
    }
}

impl Serialize for Base64Bytes {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(&Base64::encode_string(&self.0))
    }
}

impl<'de> Deserialize<'de> for Base64Bytes {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Base64Bytes, D::Error> {
        let text = Cow::<'de, str>::deserialize(deserializer)?;
        Base64::decode_vec(&text)
            .map(Base64Bytes)
            .map_err(|_| D::Error::custom("it is not base64 with padding (RFC 4648, 4)"))
    }
}

impl PartialSchema for Base64Bytes {
    fn schema() -> RefOr<Schema> {
        let base64 = SchemaFormat::KnownFormat(KnownFormat::Byte);
        ObjectBuilder::new().schema_type(Type::String).format(Some(base64)).into()
    }
}

impl ToSchema for Base64Bytes {}

/// A program to run in a machine's guest.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct GuestProgram {
    /// The program, by a path or a name that the guest's agent finds in its `PATH`, and its arguments, 1 to 256. There is no
    /// shell unless it is the program.
    #[schema(min_items = 1, max_items = 256)]
    pub argv: Vec<String>,
    /// Environment of the program, at most 256 variables: these and no others. By default that of the agent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub environment: Option<BTreeMap<String, String>>,
    /// Standard input of the program, at most 64 KiB, in base64. By default there is none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<String>, format = Byte)]
    pub stdin_base64: Option<Base64Bytes>,
    /// How many seconds the end of the program is waited for. By default 60. The program goes on when they are over: a guest
    /// agent cannot end it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub time_limit_seconds: Option<u32>,
}

impl GuestProgram {
    /// How long the end of the program is waited for.
    pub fn time_limit(&self) -> Duration {
        Duration::from_secs(self.time_limit_seconds.unwrap_or(GUEST_TIME_LIMIT_SECONDS_DEFAULT).into())
    }

    /// Checks words, variables and input. An error says what is wrong, without a value that may be secret.
    pub fn check(&self) -> Result<(), String> {
        let is_text = |text: &String| !text.contains('\0');
        let no_variables = BTreeMap::new();
        let variables = self.environment.as_ref().unwrap_or(&no_variables);
        if self.argv.first().is_none_or(String::is_empty) {
            return Err("argv: it begins with a program".into());
        }
        if self.argv.len() > MOST_GUEST_WORDS || variables.len() > MOST_GUEST_WORDS {
            return Err(format!("argv and environment have at most {MOST_GUEST_WORDS} entries each"));
        }
        if !self.argv.iter().chain(variables.keys()).chain(variables.values()).all(is_text) {
            return Err("argv and environment cannot contain zero bytes".into());
        }
        if variables.keys().any(|name| name.is_empty() || name.contains('=')) {
            return Err("environment: a name is not empty and has no '='".into());
        }
        match &self.stdin_base64 {
            Some(input) if input.0.len() > MOST_GUEST_INPUT_BYTES => Err(format!(
                "stdin_base64: at most {} KiB: put larger input into a file first",
                MOST_GUEST_INPUT_BYTES >> 10
            )),
            _ => Ok(()),
        }
    }
}

/// Arguments, variables and input may be secret.
impl fmt::Debug for GuestProgram {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let program = self.argv.first().map_or("", String::as_str);
        write!(f, "{program:?} and {} more words", self.argv.len().saturating_sub(1))
    }
}

impl Bounded for GuestProgram {
    fn check_bounds(&self) -> Result<(), OutOfBounds> {
        let limit = self.time_limit_seconds.unwrap_or(GUEST_TIME_LIMIT_SECONDS_DEFAULT);
        bounds::TIME_LIMIT_SECONDS.check("time_limit_seconds", limit.into())
    }
}

/// What became of a program in a machine's guest.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct GuestProgramResult {
    /// Id of the process in the guest. Once the program has ended, another process may have it.
    pub pid: u64,
    /// Whether the program has ended. `false`: the time limit is over, and it may still run, or what it has started still has its
    /// outputs open.
    pub ended: bool,
    /// Exit code of the program; `null`: it has not ended, or a signal has ended it.
    pub exit_code: Option<u32>,
    /// Number of the signal, or in Windows of the exception, that has ended the program; else `null`.
    pub signal: Option<u32>,
    /// Standard output of a program that has ended, in base64: its first MiB.
    #[schema(value_type = String, format = Byte)]
    pub stdout_base64: Base64Bytes,
    /// Whether the standard output was longer than what is here.
    pub stdout_cut: bool,
    /// Standard error of a program that has ended, in base64: its first MiB.
    #[schema(value_type = String, format = Byte)]
    pub stderr_base64: Base64Bytes,
    /// Whether the standard error was longer than what is here.
    pub stderr_cut: bool,
}

/// A file that was written to a machine's guest.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct GuestFile {
    /// Path of the file in the guest.
    pub path: String,
    /// Length of the file in bytes.
    pub bytes: u64,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_are_base64_and_not_shown() {
        let asked = r#"{"argv":["cat"],"stdin_base64":"AP/+"}"#;
        let program: GuestProgram = serde_json::from_str(asked).unwrap();
        assert_eq!(program.stdin_base64.as_ref().unwrap().0, [0, 255, 254]);
        assert_eq!(serde_json::to_string(&program).unwrap(), asked);
        for wrong in ["AP/", "AP_-", "AP/+\n", "=", "A"] {
            let asked = serde_json::json!({ "argv": ["cat"], "stdin_base64": wrong });
            assert!(serde_json::from_value::<GuestProgram>(asked).is_err(), "{wrong:?}");
        }
    }

    #[test]
    fn what_may_be_secret_is_not_in_the_words_for_a_log() {
        let asked =
            r#"{"argv":["login","hunter2"],"environment":{"KEY":"hunter3"},"stdin_base64":"aHVudGVyNA=="}"#;
        let program: GuestProgram = serde_json::from_str(asked).unwrap();
        assert_eq!(
            format!("{program:?} {:?}", program.stdin_base64),
            r#""login" and 1 more words Some(7 bytes)"#
        );
    }

    #[test]
    fn what_no_agent_can_be_given_is_refused_without_its_value() {
        let program =
            |value: serde_json::Value| serde_json::from_value::<GuestProgram>(value).unwrap().check();
        let many = vec!["hunter2"; MOST_GUEST_WORDS + 1];
        let input = Base64::encode_string(&vec![b'x'; MOST_GUEST_INPUT_BYTES + 1]);
        for (wrong, words) in [
            (serde_json::json!({ "argv": [] }), "begins with a program"),
            (serde_json::json!({ "argv": ["", "hunter2"] }), "begins with a program"),
            (serde_json::json!({ "argv": many }), "at most 256"),
            (serde_json::json!({ "argv": ["a", "hunter2\0"] }), "zero bytes"),
            (serde_json::json!({ "argv": ["a"], "environment": { "hunter2=": "" } }), "no '='"),
            (serde_json::json!({ "argv": ["a"], "environment": { "": "hunter2" } }), "not empty"),
            (serde_json::json!({ "argv": ["a"], "stdin_base64": input }), "at most 64 KiB"),
        ] {
            let error = program(wrong).unwrap_err();
            assert!(error.contains(words) && !error.contains("hunter2"), "{error}");
        }
        program(serde_json::json!({ "argv": ["a", ""], "environment": { "A": "b=c" } })).unwrap();
    }

    #[test]
    fn the_time_limit_has_bounds() {
        let limit = |seconds: u32| {
            let asked = serde_json::json!({ "argv": ["x"], "time_limit_seconds": seconds });
            serde_json::from_value::<GuestProgram>(asked).unwrap().check_bounds()
        };
        assert!(limit(1).is_ok() && limit(3600).is_ok());
        assert_eq!(limit(0).unwrap_err().to_string(), "time_limit_seconds: allowed is 1 to 3600, not 0");
        assert!(limit(3601).is_err());
    }
}
