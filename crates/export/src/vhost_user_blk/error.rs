//! Why a connection, a message or a queue of a front end failed. Owns the error type of this protocol and how it
//! reads; never decides what follows from an error.
//!
//! Invariant: an error holds numbers and static text only, so a front end that causes any number of them makes nothing
//! grow. The text is put together when somebody shows it.

use super::message::name;
use crate::figures::{Cause, Figures};
use rustix::io::Errno;
use std::fmt;

/// What sort of thing went wrong, for programs: few and stable.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ErrorKind {
    /// A message or a ring breaks a rule of the vhost-user or virtio specification.
    Protocol,
    /// A feature that was not offered, or that was not negotiated, is used.
    NotNegotiated,
    /// A message that this device does not know.
    UnknownMessage,
    /// A message that is not allowed now, such as a new size for a queue that is started.
    WrongState,
    /// A number points beyond a table, a file or the address space.
    OutOfBounds,
    /// An address that lies in none of the memory regions that the front end has handed over.
    NoMemoryRegion,
    /// The memory of the VMM is private to it.
    NotShared,
    /// A file behind guest memory has become shorter than the front end announced.
    MemoryShrunk,
    /// More than this process serves, such as memory regions or replies that nobody reads.
    Limit,
    /// A file descriptor of a kind that the protocol has no use for.
    WrongDescriptor,
    /// A system call failed; the error's source says how.
    Io,
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

/// What an error is about. Only what is known is set.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Context {
    /// The number of the message (`VHOST_USER_*`).
    pub message: Option<u32>,
    /// The queue.
    pub queue: Option<u32>,
    /// The first descriptor of the chain.
    pub head: Option<u16>,
    /// The index of a descriptor within the queue's descriptor table or within an indirect table.
    pub descriptor: Option<u16>,
    /// The thing itself, such as "used ring".
    pub object: Option<&'static str>,
    /// Where it lies, an address or an offset in bytes, and its length in bytes.
    pub range: Option<(u64, u64)>,
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
        match self.message.map(|code| (code, name(code))) {
            Some((_, Some(name))) => part(format_args!("{name}"))?,
            Some((code, None)) => part(format_args!("message {code}"))?,
            None => {}
        }
        if let Some(queue) = self.queue {
            part(format_args!("queue {queue}"))?;
        }
        if let Some(head) = self.head {
            part(format_args!("head {head}"))?;
        }
        if let Some(descriptor) = self.descriptor {
            part(format_args!("descriptor {descriptor}"))?;
        }
        if let Some(object) = self.object {
            part(format_args!("{object}"))?;
        }
        if let Some((at, len)) = self.range {
            part(format_args!("{len} bytes at {at:#x}"))?;
        }
        if separator.is_empty() { Ok(()) } else { f.write_str(": ") }
    }
}

/// Why something that a front end wanted could not be done, or why its connection or queue was stopped.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{context}{reason}{figures}{}{}", Cause(*.source), .kind.advice())]
pub struct Error {
    /// For programs.
    pub kind: ErrorKind,
    /// What is wrong, for people.
    pub reason: &'static str,
    /// What it is about.
    pub context: Context,
    /// The numbers that are wrong, and those that would be right.
    pub figures: Figures,
    /// What the operating system said.
    pub source: Option<Errno>,
}

impl Error {
    #[cold]
    pub(super) fn new(kind: ErrorKind, reason: &'static str) -> Error {
        Error { kind, reason, context: Context::default(), figures: Figures::None, source: None }
    }

    /// The front end or the driver broke a rule.
    #[cold]
    pub(super) fn protocol(reason: &'static str) -> Error {
        Error::new(ErrorKind::Protocol, reason)
    }

    /// A system call failed.
    #[cold]
    pub(super) fn io(reason: &'static str, source: Errno) -> Error {
        Error { source: Some(source), ..Error::new(ErrorKind::Io, reason) }
    }

    /// What a front end asked for failed on our side, outside of this crate.
    #[cold]
    pub fn from_io(reason: &'static str, error: &std::io::Error) -> Error {
        Error { source: Errno::from_io_error(error), ..Error::new(ErrorKind::Io, reason) }
    }

    pub(super) fn figures(self, figures: Figures) -> Error {
        Error { figures, ..self }
    }

    pub(super) fn found(self, found: impl Into<u64>) -> Error {
        self.figures(Figures::Found(found.into()))
    }

    pub(super) fn bits(self, bits: u64) -> Error {
        self.figures(Figures::Bits(bits))
    }

    pub(super) fn unequal(self, found: usize, expected: usize) -> Error {
        self.figures(Figures::Unequal { found: found as u64, expected: expected as u64 })
    }

    pub(super) fn above(self, found: impl Into<u64>, most: impl Into<u64>) -> Error {
        self.figures(Figures::Above { found: found.into(), most: most.into() })
    }

    pub(super) fn below(self, found: impl Into<u64>, least: impl Into<u64>) -> Error {
        self.figures(Figures::Below { found: found.into(), least: least.into() })
    }

    pub(super) fn in_message(mut self, message: u32) -> Error {
        self.context.message = Some(message);
        self
    }

    pub(super) fn on_queue(mut self, queue: impl Into<u32>) -> Error {
        self.context.queue = Some(queue.into());
        self
    }

    pub(super) fn at_head(mut self, head: u16) -> Error {
        self.context.head = Some(head);
        self
    }

    pub(super) fn at_descriptor(mut self, descriptor: u16) -> Error {
        self.context.descriptor = Some(descriptor);
        self
    }

    /// Names the thing, unless what is further in has named it.
    pub(super) fn of(mut self, object: &'static str) -> Error {
        self.context.object.get_or_insert(object);
        self
    }

    /// Says where the thing lies, unless what is further in has said so.
    pub(super) fn at(mut self, address: u64, len: u64) -> Error {
        self.context.range.get_or_insert((address, len));
        self
    }
}

/// The error of the call of the C library that has just failed on this thread.
pub(super) fn last_errno() -> Errno {
    Errno::from_io_error(&std::io::Error::last_os_error()).unwrap_or(Errno::IO)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_error_says_what_failed_on_which_object_and_why() {
        let says = |error: Error, text: &str| assert_eq!(error.to_string(), text);
        says(
            Error::protocol("the size is not a power of two (virtio 2.7)")
                .found(12u32)
                .on_queue(1u16)
                .in_message(8),
            "SET_VRING_NUM, queue 1: the size is not a power of two (virtio 2.7): 12",
        );
        says(
            Error::new(ErrorKind::NoMemoryRegion, "it lies in no memory region")
                .of("used ring")
                .at(0x1000, 70)
                .on_queue(0u16),
            "queue 0, used ring, 70 bytes at 0x1000: it lies in no memory region: is all of the machine's memory shared?",
        );
        says(
            Error::io("fstat failed", Errno::BADF).of("call eventfd"),
            "call eventfd: fstat failed: Bad file descriptor (os error 9)",
        );
        says(
            Error::new(ErrorKind::UnknownMessage, "this device has no such message").in_message(99),
            "message 99: this device has no such message",
        );
        says(Error::protocol("a loop (virtio 2.7.5.1)"), "a loop (virtio 2.7.5.1)");
    }

    /// It is copied on ways that a hostile front end takes as often as it likes.
    #[test]
    fn an_error_is_small_and_holds_no_memory() {
        fn is_copy<T: Copy>() {}
        is_copy::<Error>();
        assert!(size_of::<Error>() <= 120, "{}", size_of::<Error>());
    }
}
