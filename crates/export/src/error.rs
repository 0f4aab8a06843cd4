//! Why a connection, a message, a queue or an export failed. Owns the error type of all protocols and how it reads; each
//! protocol adds its own context. Never decides what follows from an error.
//!
//! Invariant: an error holds numbers and static text only, so clients that cause any number of them make nothing grow.
//! The text is put together when an error is shown.

use rustix::io::Errno;
use std::fmt;

/// Kind of an error, for programs: few and stable.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ErrorKind {
    /// The client, front end or driver breaks a rule of its protocol's specification.
    Protocol,
    /// The client exceeds a limit of this process, such as a write of more than 32 MiB or too many memory regions.
    Limit,
    /// A system call failed; the error's source says how.
    Io,
    /// NBD: the client asks for an export that does not exist, by an option that has no reply for it.
    UnknownExport,
    /// NBD: the export itself cannot be described in the protocol.
    InvalidExport,
    /// NBD: a read failed after a part of its data was sent. Only the end of the connection can report it.
    LateReadError,
    /// vhost-user: a feature is used that was not offered, or that was not negotiated.
    NotNegotiated,
    /// vhost-user: this device does not know the message.
    UnknownMessage,
    /// vhost-user: the message is not allowed now, such as a new size for a queue that is started.
    WrongState,
    /// vhost-user: a number points beyond a table, a file or the address space.
    OutOfBounds,
    /// vhost-user: an address lies in none of the memory regions that the front end has passed.
    NoMemoryRegion,
    /// vhost-user: the memory of the VMM is private to it.
    NotShared,
    /// vhost-user: a file behind guest memory has become shorter than the front end announced.
    MemoryShrunk,
    /// vhost-user: the protocol does not use a file descriptor of this kind.
    WrongDescriptor,
}

impl ErrorKind {
    /// What to do about it, behind the reason.
    fn advice(self) -> &'static str {
        match self {
            ErrorKind::NoMemoryRegion => ": is all of the machine's memory shared?",
            ErrorKind::NotShared => {
                ". QEMU: -object memory-backend-memfd,id=mem,size=SIZE,share=on -machine memory-backend=mem; \
                 libvirt: <memoryBacking><source type='memfd'/><access mode='shared'/></memoryBacking>; \
                 Cloud Hypervisor: --memory size=SIZE,shared=on; 'spillway attach' prints the rest"
            }
            _ => "",
        }
    }
}

/// What an error of one protocol is about. Only what is known is set.
pub trait ErrorContext: Copy + Default {
    /// Passes what is set to `show`, from the outermost object to the innermost.
    fn each(&self, show: &mut dyn FnMut(fmt::Arguments<'_>) -> fmt::Result) -> fmt::Result;
}

/// Numbers that an error is about: what was found, and what would have been right.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Figures {
    /// No number matters.
    #[default]
    None,
    /// A number that is wrong as such.
    Found(u64),
    /// A set of bits, or an address: shown in hexadecimal.
    Bits(u64),
    /// Another number than the one that was expected.
    Unequal {
        /// The number.
        found: u64,
        /// What it has to be.
        expected: u64,
    },
    /// More than the largest number that is allowed.
    Above {
        /// The number.
        found: u64,
        /// The largest that is allowed.
        most: u64,
    },
    /// Less than the smallest number that is allowed.
    Below {
        /// The number.
        found: u64,
        /// The smallest that is allowed.
        least: u64,
    },
}

impl fmt::Display for Figures {
    /// Follows a sentence: begins with a colon unless there is nothing to show.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Figures::None => Ok(()),
            Figures::Found(found) => write!(f, ": {found}"),
            Figures::Bits(bits) => write!(f, ": {bits:#x}"),
            Figures::Unequal { found, expected } => write!(f, ": {found} instead of {expected}"),
            Figures::Above { found, most } => write!(f, ": {found}, at most {most} is allowed"),
            Figures::Below { found, least } => write!(f, ": {found}, at least {least} is needed"),
        }
    }
}

/// Why something that a client or front end asked for failed, or why its connection or queue was stopped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Error<C> {
    /// For programs.
    pub kind: ErrorKind,
    /// What is wrong, for people.
    pub reason: &'static str,
    /// What it is about.
    pub context: C,
    /// The numbers that are wrong, and those that would be right.
    pub figures: Figures,
    /// Error of the operating system or the disk.
    pub source: Option<Errno>,
}

impl<C: ErrorContext> fmt::Display for Error<C> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut separator = "";
        self.context.each(&mut |part| {
            write!(f, "{separator}{part}")?;
            separator = ", ";
            Ok(())
        })?;
        if !separator.is_empty() {
            f.write_str(": ")?;
        }
        write!(f, "{}{}", self.reason, self.figures)?;
        if let Some(errno) = self.source {
            write!(f, ": {errno}")?;
        }
        f.write_str(self.kind.advice())
    }
}

impl<C: ErrorContext + fmt::Debug + 'static> std::error::Error for Error<C> {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        self.source.as_ref().map(|errno| errno as _)
    }
}

impl<C: ErrorContext> Error<C> {
    #[cold]
    pub(crate) fn new(kind: ErrorKind, reason: &'static str) -> Self {
        Error { kind, reason, context: C::default(), figures: Figures::None, source: None }
    }

    /// The other side broke a rule.
    #[cold]
    pub(crate) fn protocol(reason: &'static str) -> Self {
        Error::new(ErrorKind::Protocol, reason)
    }

    /// A system call failed.
    #[cold]
    pub(crate) fn io(reason: &'static str, source: Errno) -> Self {
        Error { source: Some(source), ..Error::new(ErrorKind::Io, reason) }
    }

    /// What the other side asked for failed on our side, outside of this crate.
    #[cold]
    pub fn from_io(reason: &'static str, error: &std::io::Error) -> Self {
        Error { source: Errno::from_io_error(error), ..Error::new(ErrorKind::Io, reason) }
    }

    fn figures(self, figures: Figures) -> Self {
        Error { figures, ..self }
    }

    pub(crate) fn found(self, found: impl Into<u64>) -> Self {
        self.figures(Figures::Found(found.into()))
    }

    pub(crate) fn bits(self, bits: u64) -> Self {
        self.figures(Figures::Bits(bits))
    }

    pub(crate) fn unequal(self, found: usize, expected: usize) -> Self {
        self.figures(Figures::Unequal { found: found as u64, expected: expected as u64 })
    }

    pub(crate) fn above(self, found: impl Into<u64>, most: impl Into<u64>) -> Self {
        self.figures(Figures::Above { found: found.into(), most: most.into() })
    }

    pub(crate) fn below(self, found: impl Into<u64>, least: impl Into<u64>) -> Self {
        self.figures(Figures::Below { found: found.into(), least: least.into() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{nbd, vhost_user_blk};

    /// An error is copied on paths that a hostile client takes as often as it likes.
    #[test]
    fn an_error_is_small_and_holds_no_memory() {
        fn size_of_copy<T: Copy>() -> usize {
            size_of::<T>()
        }
        assert!(size_of_copy::<nbd::Error>() <= 112);
        assert!(size_of_copy::<vhost_user_blk::Error>() <= 120);
    }

    /// As `anyhow` and `{:#}` chains read it.
    #[test]
    fn the_operating_systems_error_is_the_source() {
        let error = nbd::Error::io("the socket failed", Errno::TIMEDOUT);
        let source = std::error::Error::source(&error).map(ToString::to_string);
        assert_eq!(source.as_deref(), Some("Connection timed out (os error 110)"));
    }
}
