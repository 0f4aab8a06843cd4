//! Detects a VMM whose memory is not shared with this process. Makes a notice of it, and changes nothing else.
//!
//! QEMU without a memory backend hands over no memory. With `share=off` it hands over a file of which it has a private
//! copy, so that its guest fills rings that this process never sees.
//!
//! Invariant: a queue on whose ring something was ever written causes no such notice.

use super::error::Error;
use super::frontend::Frontend;
use super::queue::Queue;
use super::setup::Kick;
use crate::ErrorKind;
use rustix::io::{Errno, ReadWriteFlags, preadv2};
use std::io::IoSliceMut;

impl Frontend {
    /// To be called when the kick eventfd of this queue was raised. True: there is a notice. QEMU raises it once itself; a
    /// driver that kicks again, with nothing on the ring, writes to another ring than this one.
    #[inline]
    pub fn kicked(&mut self, queue: u16) -> bool {
        let queue = self.queues.get_mut(usize::from(queue));
        queue.is_some_and(|queue| queue.is_untouched() && queue.count_idle_kicks() > 1)
            && self.report_empty_rings()
    }

    #[cold]
    fn report_empty_rings(&mut self) -> bool {
        if self.queues.iter().any(|queue| queue.started && !queue.is_untouched()) {
            return false;
        }
        self.report_not_shared(
            "the VMM's memory is not shared: its driver has kicked, and the queue's memory that was handed over is empty",
        );
        true
    }

    /// Makes a notice, once until memory comes, that the machine's memory is not shared with this process.
    pub(super) fn report_not_shared(&mut self, reason: &'static str) {
        if !std::mem::replace(&mut self.not_shared_reported, true) {
            self.notice.get_or_insert(Error::new(ErrorKind::NotShared, reason));
        }
    }
}

impl Queue {
    /// Kicks since the start, while nothing was ever on the ring. A kick that cannot be counted counts as one.
    #[cold]
    fn count_idle_kicks(&mut self) -> u64 {
        let mut count = [0; 8];
        if let Some(Kick::Fd(fd)) = &self.setup.kick {
            // Never waits, whatever the VMM has done with it. An eventfd has no position.
            let mut to = [IoSliceMut::new(&mut count)];
            let more = match preadv2(fd, &mut to, u64::MAX, ReadWriteFlags::NOWAIT) {
                Ok(8) => u64::from_ne_bytes(count),
                Err(Errno::AGAIN) => 0,
                _ => 1,
            };
            self.idle_kicks = self.idle_kicks.saturating_add(more);
        }
        self.idle_kicks
    }
}
