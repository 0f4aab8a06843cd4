//! How an eventfd of the front end is raised. Owns a ring for it; never waits.
//!
//! write(2) to an eventfd waits while its counter is full, unless its file is non-blocking, and both are in the
//! hands of whoever shares the file. The kernel's own way to raise an eventfd never waits, it is how vhost in the
//! kernel interrupts a guest, and io_uring gives it to us: a ring raises the eventfd that is registered with it
//! whenever it completes something. So the eventfd gets a ring of one entry, and is raised by an operation that
//! does nothing.
//!
//! Invariant: nothing that the front end does to its eventfd makes [`Signal::raise`] wait.

use io_uring::squeue::Entry;
use io_uring::{IoUring, opcode};
use std::io;
use std::os::fd::{AsFd, AsRawFd};

/// An eventfd that can be raised.
pub(super) struct Signal(IoUring);

impl Signal {
    /// For this eventfd; anything else is an error. The ring keeps its own reference.
    pub(super) fn new(eventfd: impl AsFd) -> io::Result<Signal> {
        let ring = IoUring::builder()
            .setup_single_issuer()
            .setup_defer_taskrun()
            .build(1)
            // Kernels before 6.1.
            .or_else(|_| IoUring::new(1))?;
        ring.submitter().register_eventfd(eventfd.as_fd().as_raw_fd())?;
        Ok(Signal(ring))
    }

    /// For another eventfd from here on. After an error it is for none.
    pub(super) fn set(&mut self, eventfd: impl AsFd) -> io::Result<()> {
        let submitter = self.0.submitter();
        submitter.unregister_eventfd()?;
        submitter.register_eventfd(eventfd.as_fd().as_raw_fd())
    }

    /// Adds one to the eventfd's counter, or leaves it where it is when it is full.
    pub(super) fn raise(&mut self) {
        let nothing: Entry = opcode::Nop::new().build();
        // SAFETY: an operation without memory and files. Of one entry the queue is empty after each submission.
        let _ = unsafe { self.0.submission().push(&nothing) };
        while let Err(error) = self.0.submit() {
            if error.kind() != io::ErrorKind::Interrupted {
                break;
            }
        }
        self.0.completion().for_each(drop);
    }
}
