//! What an error of an NBD connection is about. Owns the context of this protocol's errors and how it reads.

use super::protocol::{command_name, option_name};
use crate::error::ErrorContext;
use std::fmt;

/// Why a connection was ended by this side, or could not be made.
pub type Error = crate::Error<Context>;

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

impl ErrorContext for Context {
    fn each(&self, show: &mut dyn FnMut(fmt::Arguments<'_>) -> fmt::Result) -> fmt::Result {
        match self.option.map(|option| (option, option_name(option))) {
            Some((_, Some(name))) => show(format_args!("{name}"))?,
            Some((option, None)) => show(format_args!("option {option}"))?,
            None => {}
        }
        match self.command.map(|command| (command, command_name(command))) {
            Some((_, Some(name))) => show(format_args!("{name}"))?,
            Some((command, None)) => show(format_args!("command {command}"))?,
            None => {}
        }
        if let Some(cookie) = self.cookie {
            show(format_args!("cookie {cookie:#x}"))?;
        }
        if let Some((offset, len)) = self.range {
            show(format_args!("{len} bytes at {offset:#x}"))?;
        }
        Ok(())
    }
}

impl Error {
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
    use crate::ErrorKind;
    use rustix::io::Errno;

    #[test]
    fn an_error_says_what_failed_on_which_object_and_why() {
        let check = |error: Error, text: &str| assert_eq!(error.to_string(), text);
        check(
            Error::new(ErrorKind::Limit, "the write is too long")
                .above((32u32 << 20) + 512, MAX_PAYLOAD_BYTES)
                .in_command(CMD_WRITE, 7, 4096, (32 << 20) + 512),
            "NBD_CMD_WRITE, cookie 0x7, 33554944 bytes at 0x1000: the write is too long: 33554944, \
             at most 33554432 is allowed",
        );
        check(Error::protocol("malformed").in_option(OPT_GO), "NBD_OPT_GO: malformed");
        check(Error::protocol("malformed").in_option(99), "option 99: malformed");
        check(
            Error::io("the socket failed", Errno::TIMEDOUT),
            "the socket failed: Connection timed out (os error 110)",
        );
    }
}
