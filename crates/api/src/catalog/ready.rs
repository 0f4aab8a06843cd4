//! Criterion by which a machine counts as ready. Owns the syntax.

use serde::{Deserialize, Serialize};
use std::fmt;
use std::num::NonZeroU16;
use std::str::FromStr;
use utoipa::openapi::RefOr;
use utoipa::openapi::schema::{ObjectBuilder, Schema, Type};
use utoipa::{PartialSchema, ToSchema};

/// Criterion by which a machine counts as ready: `agent`, `phone-home`, `tcp:22`, `serial:login:`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub enum Ready {
    /// Ready as soon as the guest agent in the machine answers.
    Agent,
    /// Ready as soon as the guest sends an HTTP POST to the URL in its seed disk.
    PhoneHome,
    /// Ready as soon as the guest accepts connections at this port.
    Tcp(NonZeroU16),
    /// Ready as soon as a line of the serial console matches this regular expression.
    Serial(String),
}

impl FromStr for Ready {
    type Err = String;

    fn from_str(text: &str) -> Result<Ready, String> {
        let words = "ready is agent, phone-home, tcp:PORT or serial:REGEX, such as tcp:22 or serial:login:";
        match text.split_once(':') {
            None if text == "agent" => Ok(Ready::Agent),
            None if text == "phone-home" => Ok(Ready::PhoneHome),
            Some(("tcp", port)) => match port.parse() {
                Ok(port) if !text.contains('+') => Ok(Ready::Tcp(port)),
                _ => Err(format!("'{}' is no port: {words}", port.escape_debug())),
            },
            Some(("serial", pattern)) if !pattern.is_empty() => Ok(Ready::Serial(pattern.into())),
            _ => Err(words.into()),
        }
    }
}

impl TryFrom<String> for Ready {
    type Error = String;

    fn try_from(text: String) -> Result<Ready, String> {
        text.parse()
    }
}

impl From<Ready> for String {
    fn from(ready: Ready) -> String {
        ready.to_string()
    }
}

impl fmt::Display for Ready {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Ready::Agent => f.write_str("agent"),
            Ready::PhoneHome => f.write_str("phone-home"),
            Ready::Tcp(port) => write!(f, "tcp:{port}"),
            Ready::Serial(pattern) => write!(f, "serial:{pattern}"),
        }
    }
}

impl PartialSchema for Ready {
    fn schema() -> RefOr<Schema> {
        let pattern = "^(agent|phone-home|tcp:[1-9][0-9]{0,4}|serial:.+)$";
        ObjectBuilder::new().schema_type(Type::String).pattern(Some(pattern)).into()
    }
}

impl ToSchema for Ready {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ready_is_a_word() {
        for text in ["agent", "phone-home", "tcp:22", "tcp:65535", "serial:login:", "serial:^ok: [0-9]+$"] {
            assert_eq!(text.parse::<Ready>().map(|ready| ready.to_string()), Ok(text.to_owned()));
        }
        for text in [
            "",
            "Agent",
            "agent:",
            "phone-home:",
            "tcp",
            "tcp:",
            "tcp:0",
            "tcp:+1",
            "tcp:65536",
            "serial:",
            "http:80",
        ] {
            assert!(text.parse::<Ready>().is_err(), "{text}");
        }
    }
}
