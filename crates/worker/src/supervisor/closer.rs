//! Closes file descriptors on a thread of its own, one after the other. close(2) asks the file system, and a FUSE file
//! system may never answer.
//!
//! Owns the descriptors that wait to be closed; never blocks its caller. Invariant: while [`MOST`] or more descriptors wait,
//! no client that could add more is accepted, so that a hostile client can occupy only a bounded number.

use std::mem::ManuallyDrop;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Sender, channel};

/// Number of waiting descriptors from which on clients that could add more are refused.
const MOST: usize = 64;

#[derive(Debug, Default)]
pub(super) struct Closer {
    /// Channel to the thread, which starts with the first descriptor.
    sender: Option<Sender<OwnedFd>>,
    kept: Vec<ManuallyDrop<OwnedFd>>,
    waiting: Arc<AtomicUsize>,
}

impl Closer {
    /// Closes the descriptors on the thread.
    pub fn close(&mut self, fds: Vec<OwnedFd>) {
        self.waiting.fetch_add(fds.len(), Ordering::Relaxed);
        self.kept.extend(fds.into_iter().map(ManuallyDrop::new));
        if self.sender.is_none() && !self.kept.is_empty() {
            self.sender = self.start();
        }
        // If the thread cannot be started, keep them until it can.
        let Some(sender) = &self.sender else { return };
        for fd in self.kept.drain(..) {
            if let Err(unsent) = sender.send(ManuallyDrop::into_inner(fd)) {
                std::mem::forget(unsent);
            }
        }
    }

    /// Whether [`MOST`] or more descriptors wait.
    pub fn is_stuck(&self) -> bool {
        self.waiting.load(Ordering::Relaxed) >= MOST
    }

    fn start(&self) -> Option<Sender<OwnedFd>> {
        let (sender, fds) = channel::<OwnedFd>();
        let waiting = Arc::clone(&self.waiting);
        let close = move || {
            for fd in fds {
                drop(fd);
                waiting.fetch_sub(1, Ordering::Relaxed);
            }
        };
        let thread = std::thread::Builder::new().name("closer".into()).stack_size(64 << 10);
        thread.spawn(close).ok().map(|_| sender)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Read;

    #[test]
    fn descriptors_are_closed_and_clients_are_accepted_again() {
        let mut closer = Closer::default();
        let mut pipes = Vec::new();
        for _ in 0..3 * MOST {
            let (reader, writer) = std::io::pipe().unwrap();
            closer.close(vec![writer.into()]);
            pipes.push(reader);
        }
        // End of file is read only after the other end is closed.
        pipes.iter_mut().for_each(|reader| assert_eq!(reader.read(&mut [0]).unwrap(), 0));
        let deadline = std::time::Instant::now() + std::time::Duration::from_secs(10);
        while closer.is_stuck() {
            assert!(std::time::Instant::now() < deadline);
            std::thread::yield_now();
        }
    }
}
