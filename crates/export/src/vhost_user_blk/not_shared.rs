//! A VMM whose memory is not shared with us: how that shows, and what to do about it. Says it to the log, and changes nothing
//! else.
//!
//! QEMU without a memory backend hands over no memory. With `share=off` it hands over a file of which it has a private
//! copy, so that its guest fills rings that we never see.
//!
//! Invariant: nothing is said of a ring on which something was ever seen.

use super::frontend::Frontend;
use super::queue::{Kick, Queue};
use super::ring::Ring;
use rustix::io::{Errno, ReadWriteFlags, preadv2};
use std::io::IoSliceMut;

/// What to do about memory that is not shared, for each VMM.
const SHARE_MEMORY: &str = "QEMU: -object memory-backend-memfd,id=mem,size=SIZE,share=on -machine memory-backend=mem; \
     libvirt: <memoryBacking><source type='memfd'/><access mode='shared'/></memoryBacking>; \
     Cloud Hypervisor: --memory size=SIZE,shared=on; 'spillway attach' prints the rest";

impl Frontend {
    /// The kick eventfd of this queue was raised. True: there is a notice. QEMU raises it once itself; a driver that kicks
    /// again, with nothing on the ring, writes to another ring than this one.
    #[inline]
    pub fn kicked(&mut self, queue: u16) -> bool {
        let queue = self.queues.get_mut(usize::from(queue));
        queue.is_some_and(|queue| queue.is_untouched() && queue.count_kicks() > 1) && self.note_empty_rings()
    }

    #[cold]
    fn note_empty_rings(&mut self) -> bool {
        if self.queues.iter().any(|queue| queue.started && !queue.is_untouched()) {
            return false;
        }
        self.tell_not_shared("its driver has kicked, and the queue's memory that was handed over is empty");
        true
    }

    /// Says once, until memory comes, that the machine's memory is not shared with us.
    pub(super) fn tell_not_shared(&mut self, sign: &str) {
        if !std::mem::replace(&mut self.told_not_shared, true) {
            self.notice.get_or_insert(format!("the VMM's memory is not shared: {sign}. {SHARE_MEMORY}"));
        }
    }
}

impl Queue {
    /// Kicks since the start, while nothing was ever on the ring. A kick that cannot be counted counts as one.
    #[cold]
    fn count_kicks(&mut self) -> u64 {
        let mut count = [0; 8];
        if let Some(Kick::Fd(fd)) = &self.kick {
            // Never waits, whatever the VMM has done with it. An eventfd has no position.
            let mut to = [IoSliceMut::new(&mut count)];
            let more = match preadv2(fd, &mut to, u64::MAX, ReadWriteFlags::NOWAIT) {
                Ok(8) => u64::from_ne_bytes(count),
                Err(Errno::AGAIN) => 0,
                _ => 1,
            };
            self.kicks = self.kicks.saturating_add(more);
        }
        self.kicks
    }

    /// Live, and nothing was ever on its ring.
    pub(super) fn is_untouched(&self) -> bool {
        self.live && self.next_available == 0 && self.ring.as_ref().is_some_and(Ring::is_untouched)
    }
}
