//! Why the connection of an NBD client failed, or could not be made. Owns the error type of this protocol and how it
//! reads; never decides what follows from an error.
//!
//! Invariant: an error holds numbers and static text only, so clients that cause any number of them make nothing grow.

use super::protocol::{command_name, option_name};
use crate::figures::{Cause, Figures};
use rustix::io::Errno;
use std::fmt;

/// What sort of thing went wrong, for programs: few and stable.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ErrorKind {
    /// The client breaks a rule of the NBD protocol.
    Protocol,
    /// The client asks for an export that does not exist, by an option that has no reply for it.
    UnknownExport,
    /// The client sends more than this server takes, such as a write of more than 32 MiB.
    Limit,
    /// A read failed when a part of its data was sent: only the end of the connection can report it.
    LateReadError,
    /// The export itself cannot be described in the protocol.
    InvalidExport,
    /// A system call failed; the error's source says how.
    Io,
}

/// What an error is about. Only what is known is set.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Context {
    /// The number of the handshake option (`NBD_OPT_*`).
    pub option: Option<u32>,
    /// The number of the command (`NBD_CMD_*`).
    pub command: Option<u16>,
    /// The client's own number of the command.
    pub cookie: Option<u64>,
    /// Offset and length of the command, in bytes.
    pub range: Option<(u64, u32)>,
}

impl fmt::Display for Context {
    /// Ends with a colon and a space unless there is nothing to show.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut separator = "";
        let mut part = |text: fmt::Arguments<'_>| {
            let result = write!(f, "{separator}{text}");
            separator = ", ";
            result
        };
        match self.option.map(|option| (option, option_name(option))) {
            Some((_, Some(name))) => part(format_args!("{name}"))?,
            Some((option, None)) => part(format_args!("option {option}"))?,
            None => {}
        }
        match self.command.map(|command| (command, command_name(command))) {
            Some((_, Some(name))) => part(format_args!("{name}"))?,
            Some((command, None)) => part(format_args!("command {command}"))?,
            None => {}
        }
        if let Some(cookie) = self.cookie {
            part(format_args!("cookie {cookie:#x}"))?;
        }
        if let Some((offset, len)) = self.range {
            part(format_args!("{len} bytes at {offset:#x}"))?;
        }
        if separator.is_empty() { Ok(()) } else { f.write_str(": ") }
    }
}

/// Why a connection was ended by this side, or could not be made.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{context}{reason}{figures}{}", Cause(*.source))]
pub struct Error {
    /// For programs.
    pub kind: ErrorKind,
    /// What is wrong, for people.
    pub reason: &'static str,
    /// What it is about.
    pub context: Context,
    /// The numbers that are wrong, and those that would be right.
    pub figures: Figures,
    /// What the operating system or the disk said.
    pub source: Option<Errno>,
}

impl Error {
    #[cold]
    pub(super) fn new(kind: ErrorKind, reason: &'static str) -> Error {
        Error { kind, reason, context: Context::default(), figures: Figures::None, source: None }
    }

    /// The client broke a rule.
    #[cold]
    pub(super) fn protocol(reason: &'static str) -> Error {
        Error::new(ErrorKind::Protocol, reason)
    }

    /// A system call failed.
    #[cold]
    pub(super) fn io(reason: &'static str, source: Errno) -> Error {
        Error { source: Some(source), ..Error::new(ErrorKind::Io, reason) }
    }

    pub(super) fn figures(self, figures: Figures) -> Error {
        Error { figures, ..self }
    }

    pub(super) fn above(self, found: impl Into<u64>, most: impl Into<u64>) -> Error {
        self.figures(Figures::Above { found: found.into(), most: most.into() })
    }

    pub(super) fn in_option(mut self, option: u32) -> Error {
        self.context.option = Some(option);
        self
    }

    pub(super) fn in_command(mut self, command: u16, cookie: u64, offset: u64, len: u32) -> Error {
        self.context.command = Some(command);
        self.context.cookie = Some(cookie);
        self.context.range = Some((offset, len));
        self
    }
}

#[cfg(test)]
mod tests {
    use super::super::protocol::{CMD_WRITE, MAX_PAYLOAD_BYTES, OPT_GO};
    use super::*;

    #[test]
    fn an_error_says_what_failed_on_which_object_and_why() {
        let says = |error: Error, text: &str| assert_eq!(error.to_string(), text);
        says(
            Error::new(ErrorKind::Limit, "the write is too long")
                .above((32u32 << 20) + 512, MAX_PAYLOAD_BYTES)
                .in_command(CMD_WRITE, 7, 4096, (32 << 20) + 512),
            "NBD_CMD_WRITE, cookie 0x7, 33554944 bytes at 0x1000: the write is too long: 33554944, \
             at most 33554432 is allowed",
        );
        says(Error::protocol("malformed").in_option(OPT_GO), "NBD_OPT_GO: malformed");
        says(Error::protocol("malformed").in_option(99), "option 99: malformed");
        says(
            Error::io("the socket failed", Errno::TIMEDOUT),
            "the socket failed: Connection timed out (os error 110)",
        );
    }

    /// It is copied on ways that a hostile client takes as often as it likes.
    #[test]
    fn an_error_is_small_and_holds_no_memory() {
        fn is_copy<T: Copy>() {}
        is_copy::<Error>();
        assert!(size_of::<Error>() <= 112, "{}", size_of::<Error>());
    }
}
