//! What an error of a front end is about. Owns the context of this protocol's errors and how it reads.

use super::message::name;
use crate::error::ErrorContext;
use rustix::io::Errno;
use std::fmt;

/// Why something that a front end wanted could not be done, or why its connection or queue was stopped.
pub type Error = crate::Error<Context>;

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

impl ErrorContext for Context {
    fn each(&self, show: &mut dyn FnMut(fmt::Arguments<'_>) -> fmt::Result) -> fmt::Result {
        match self.message.map(|code| (code, name(code))) {
            Some((_, Some(name))) => show(format_args!("{name}"))?,
            Some((code, None)) => show(format_args!("message {code}"))?,
            None => {}
        }
        if let Some(queue) = self.queue {
            show(format_args!("queue {queue}"))?;
        }
        if let Some(head) = self.head {
            show(format_args!("head {head}"))?;
        }
        if let Some(descriptor) = self.descriptor {
            show(format_args!("descriptor {descriptor}"))?;
        }
        if let Some(object) = self.object {
            show(format_args!("{object}"))?;
        }
        if let Some((at, len)) = self.range {
            show(format_args!("{len} bytes at {at:#x}"))?;
        }
        Ok(())
    }
}

impl Error {
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
    use crate::ErrorKind;

    #[test]
    fn an_error_says_what_failed_on_which_object_and_why() {
        let check = |error: Error, text: &str| assert_eq!(error.to_string(), text);
        check(
            Error::protocol("the size is not a power of two (virtio 2.7)")
                .found(12u32)
                .on_queue(1u16)
                .in_message(8),
            "SET_VRING_NUM, queue 1: the size is not a power of two (virtio 2.7): 12",
        );
        check(
            Error::new(ErrorKind::NoMemoryRegion, "it lies in no memory region")
                .of("used ring")
                .at(0x1000, 70)
                .on_queue(0u16),
            "queue 0, used ring, 70 bytes at 0x1000: it lies in no memory region: is all of the machine's memory shared?",
        );
        check(
            Error::io("fstat failed", Errno::BADF).of("call eventfd"),
            "call eventfd: fstat failed: Bad file descriptor (os error 9)",
        );
        check(
            Error::new(ErrorKind::UnknownMessage, "this device has no such message").in_message(99),
            "message 99: this device has no such message",
        );
        check(Error::protocol("a loop (virtio 2.7.5.1)"), "a loop (virtio 2.7.5.1)");
    }
}
