//! Where descriptors go that nobody may wait for: a thread that closes them, one after the other, and does nothing
//! else. To close a file is to ask its file system, and with FUSE that is a program that need never answer.
//!
//! Owns what waits to be closed; never holds up who hands it over. Invariant: as long as [`MOST`] or more wait, nobody is
//! to be let in who could add to them: what a hostile client can have held here has a bound.

use std::mem::ManuallyDrop;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Sender, channel};

/// So many may wait before those who bring more are turned away.
const MOST: usize = 64;

#[derive(Debug, Default)]
pub(super) struct Closer {
    /// To the thread, once there was a use for it.
    way: Option<Sender<OwnedFd>>,
    kept: Vec<ManuallyDrop<OwnedFd>>,
    waiting: Arc<AtomicUsize>,
}

impl Closer {
    /// They are closed when that is possible.
    pub fn close(&mut self, fds: Vec<OwnedFd>) {
        self.waiting.fetch_add(fds.len(), Ordering::Relaxed);
        self.kept.extend(fds.into_iter().map(ManuallyDrop::new));
        if self.way.is_none() && !self.kept.is_empty() {
            self.way = self.start();
        }
        // Without a thread they are kept, for when there is one.
        let Some(way) = &self.way else { return };
        for fd in self.kept.drain(..) {
            if let Err(unsent) = way.send(ManuallyDrop::into_inner(fd)) {
                std::mem::forget(unsent);
            }
        }
    }

    /// Whether so many wait that no more are to come.
    pub fn is_stuck(&self) -> bool {
        self.waiting.load(Ordering::Relaxed) >= MOST
    }

    fn start(&self) -> Option<Sender<OwnedFd>> {
        let (way, fds) = channel::<OwnedFd>();
        let waiting = Arc::clone(&self.waiting);
        let close = move || {
            for fd in fds {
                drop(fd);
                waiting.fetch_sub(1, Ordering::Relaxed);
            }
        };
        let thread = std::thread::Builder::new().name("closer".into()).stack_size(64 << 10);
        thread.spawn(close).ok().map(|_| way)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Read;

    #[test]
    fn what_is_handed_over_is_closed_and_room_comes_back() {
        let mut closer = Closer::default();
        let mut pipes = Vec::new();
        for _ in 0..3 * MOST {
            let (reader, writer) = std::io::pipe().unwrap();
            closer.close(vec![writer.into()]);
            pipes.push(reader);
        }
        // Until the other end is closed there is no end of file.
        pipes.iter_mut().for_each(|reader| assert_eq!(reader.read(&mut [0]).unwrap(), 0));
        let room = std::time::Instant::now() + std::time::Duration::from_secs(10);
        while closer.is_stuck() {
            assert!(std::time::Instant::now() < room);
            std::thread::yield_now();
        }
    }
}
