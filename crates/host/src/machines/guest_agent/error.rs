//! Errors of questions to a guest agent. Owns their texts.
//!
//! Invariant: what an agent has said is bounded, and contains no control characters.

use crate::error::HostError;
use spillway_api::{ErrorCode, Name};
use std::fmt;

/// Longest part of an agent's own words that is passed on, in characters.
const MAX_CHARACTERS: usize = 300;

/// Why a question to a guest agent has no answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum AgentError {
    /// The agent's channel cannot be opened.
    Unreachable(String),
    /// The agent has not answered in time.
    Silent,
    /// The agent refuses, for this reason.
    Refused(String),
    /// The answer makes no sense.
    Nonsense(&'static str),
    /// The VMM whose guest was asked has ended.
    Over,
    /// The file is larger than what is read.
    FileTooLarge,
    /// It has taken too long, although the agent answers.
    Late,
    /// libvirt does not speak to the agent of this domain any more.
    ConnectionLost,
    /// A program has ended, and the answer that said how was lost, for this reason.
    ResultLost(String),
}

impl AgentError {
    /// Creates a refusal with the agent's own words.
    pub fn refused(words: &str) -> AgentError {
        AgentError::Refused(plain(words))
    }

    /// Creates an error of the channel.
    pub fn unreachable(why: impl fmt::Display) -> AgentError {
        AgentError::Unreachable(plain(&why.to_string()))
    }

    /// Whether the same question may have an answer later: a guest may be paused, or have more to do than to answer.
    pub fn is_passing(&self) -> bool {
        matches!(self, AgentError::Silent | AgentError::Unreachable(_))
    }

    /// Converts the error of a lost answer, after which the agent has not known the program any more.
    pub fn result_lost(self) -> AgentError {
        AgentError::ResultLost(match self {
            AgentError::Unreachable(why) => why,
            _ => "the answer did not come in time".into(),
        })
    }

    /// Converts the error for clients. `what` is what was asked of the guest of this machine.
    pub fn of(self, name: &Name, what: &str) -> HostError {
        let advice = "is qemu-guest-agent installed in its guest, and does it run?";
        let (code, message) = match self {
            AgentError::Unreachable(why) => (
                ErrorCode::Unavailable,
                format!("{name}: {what}: its guest agent cannot be asked: {why}: {advice}"),
            ),
            AgentError::Silent => {
                (ErrorCode::Unavailable, format!("{name}: {what}: its guest agent does not answer: {advice}"))
            }
            AgentError::Nonsense(why) => (
                ErrorCode::Unavailable,
                format!(
                    "{name}: {what}: its guest agent answers what cannot be: {why}: restart it in the guest"
                ),
            ),
            AgentError::Over => (
                ErrorCode::Conflict,
                format!(
                    "{name}: {what}: the machine or its guest was stopped, restarted or reset meanwhile: ask again when it runs"
                ),
            ),
            AgentError::FileTooLarge => (
                ErrorCode::Conflict,
                format!(
                    "{name}: {what}: it is larger than {} MiB, or does not end: split it in the guest",
                    spillway_api::MOST_GUEST_FILE_BYTES >> 20
                ),
            ),
            AgentError::Late => (
                ErrorCode::Unavailable,
                format!("{name}: {what}: its guest takes too long: try again when it has less to do"),
            ),
            AgentError::ConnectionLost => (
                ErrorCode::Unavailable,
                format!(
                    "{name}: {what}: libvirt has ended its connection to the guest agent, as it does after an answer of more than \
                     10 MiB: stop the machine and start it again, and write large outputs to a file in the guest"
                ),
            ),
            AgentError::ResultLost(why) => (
                ErrorCode::Unavailable,
                format!(
                    "{name}: {what}: it has ended, and the answer of its guest agent was lost: {why}: its outputs may be too large: \
                     write them to a file in the guest, and get that"
                ),
            ),
            AgentError::Refused(words) if is_disabled(&words) => (
                ErrorCode::Conflict,
                format!(
                    "{name}: {what}: its guest agent says '{words}': allow the guest-exec and guest-file commands in the guest, \
                     in /etc/sysconfig/qemu-ga (BLACKLIST_RPC, FILTER_RPC_ARGS) or /etc/qemu/qemu-ga.conf (block-rpcs, \
                     allow-rpcs), and restart the agent"
                ),
            ),
            AgentError::Refused(words) if words.contains("No such file or directory") => {
                (ErrorCode::NotFound, format!("{name}: {what}: its guest agent says '{words}'"))
            }
            AgentError::Refused(words) => {
                (ErrorCode::Conflict, format!("{name}: {what}: its guest agent says '{words}'"))
            }
        };
        HostError::new(code, message)
    }
}

/// Whether an agent refuses a command because of its settings (QEMU, qapi/qmp-dispatch.c).
fn is_disabled(words: &str) -> bool {
    ["has been disabled", "is disabled", "not been found", "not found, or"]
        .iter()
        .any(|text| words.contains(text))
        && words.to_ascii_lowercase().contains("command")
}

/// Shortens a text, and replaces control characters.
fn plain(words: &str) -> String {
    let words = words.chars().take(MAX_CHARACTERS);
    words.map(|c| if c.is_control() { ' ' } else { c }).collect::<String>().trim().to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_error_says_what_to_do_and_has_a_stable_code() {
        let name = "desk-001".parse().unwrap();
        let disabled = "Command guest-exec has been disabled for this instance";
        for (error, code, words) in [
            (AgentError::Silent, ErrorCode::Unavailable, "is qemu-guest-agent installed"),
            (AgentError::refused(disabled), ErrorCode::Conflict, "BLACKLIST_RPC"),
            (
                AgentError::refused("Command guest-exec has been disabled: the command is not allowed"),
                ErrorCode::Conflict,
                "allow-rpcs",
            ),
            (
                AgentError::refused("The command guest-exec has not been found"),
                ErrorCode::Conflict,
                "allow-rpcs",
            ),
            (
                AgentError::refused("failed to open file '/x' (mode: 'r'): No such file or directory"),
                ErrorCode::NotFound,
                "'/x'",
            ),
            (AgentError::refused("Permission denied"), ErrorCode::Conflict, "says 'Permission denied'"),
            (AgentError::Nonsense("a count"), ErrorCode::Unavailable, "a count"),
            (AgentError::Over, ErrorCode::Conflict, "reset meanwhile"),
            (AgentError::FileTooLarge, ErrorCode::Conflict, "16 MiB"),
            (AgentError::Late, ErrorCode::Unavailable, "too long"),
            (AgentError::ConnectionLost, ErrorCode::Unavailable, "start it again"),
            (
                AgentError::Silent.result_lost(),
                ErrorCode::Unavailable,
                "in time: its outputs may be too large",
            ),
            (AgentError::unreachable("4 MiB").result_lost(), ErrorCode::Unavailable, "lost: 4 MiB: "),
        ] {
            let error = error.of(&name, "the program 'sh' cannot be started");
            assert_eq!(error.code, code, "{error}");
            assert!(
                error.message.contains(words) && error.message.starts_with("desk-001: the program 'sh'"),
                "{error}"
            );
        }
    }

    #[test]
    fn an_agents_words_are_bounded_and_plain() {
        let AgentError::Refused(words) = AgentError::refused(&"\x1b[2J\n\u{7}x".repeat(10_000)) else {
            panic!()
        };
        assert!(words.chars().count() <= MAX_CHARACTERS && !words.contains(char::is_control));
    }
}
