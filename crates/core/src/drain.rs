//! The drain: I/O that a dead process had begun may land on the file long after another has attached. Until a
//! barrier says that all of it has ended, nothing new is begun where it could land.
//!
//! Owns when the barrier is asked for; which segments wait for it is the log's. Invariant: no place of the file
//! that a dead process may still be writing or punching is written, punched or used again before the barrier
//! has ended well. In the log that is the segments that were marked busy; of a file that is written in place all of it, so
//! every request waits. With other memory a disk begins only when the lock of its file is free: no I/O is under way then.

use crate::disk::Disk;
use crate::error::Errno;
use crate::health::RETRY_NS;
use crate::io::Io;
use crate::ops::Op;
use crate::table::Wait;

/// How far the barrier is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Drain {
    /// Nothing of a dead process is under way.
    Done,
    /// To be asked for, from this time on.
    Wanted {
        from_ns: u64,
    },
    UnderWay,
}

impl Disk {
    /// I/O of a dead process may still land.
    #[inline]
    pub(crate) fn is_draining(&self) -> bool {
        self.drain != Drain::Done
    }

    /// The barrier has failed, and is tried again later.
    pub(crate) fn drain_rests(&self) -> bool {
        matches!(self.drain, Drain::Wanted { from_ns } if from_ns > self.now_ns)
    }

    /// Whether requests, and a reset, must wait for the barrier.
    #[inline]
    pub(crate) fn holds_requests(&self) -> bool {
        self.is_draining() && self.spec.mode.writes_in_place()
    }

    /// After the map was adopted: whether a barrier is needed.
    pub(crate) fn begin_draining(&mut self, existing: bool) {
        if self.log.is_draining() || existing && self.spec.mode.writes_in_place() {
            self.drain = Drain::Wanted { from_ns: 0 };
        }
    }

    /// Asks for the barrier when it is time.
    pub(crate) fn drain<I: Io>(&mut self, io: &mut I) {
        if matches!(self.drain, Drain::Wanted { from_ns } if from_ns <= self.now_ns) {
            self.drain = Drain::UnderWay;
            let op = self.ops.begin(Op::Drain);
            io.drain_overflow(op);
        }
    }

    /// The barrier has ended.
    pub(crate) fn drained<I: Io>(&mut self, io: &mut I, result: Result<(), Errno>) {
        if result.is_err() {
            self.drain = Drain::Wanted { from_ns: self.now_ns + RETRY_NS };
        } else if self.spec.mode.writes_in_place() && self.direct_blocks == 0 {
            // What the file may hold is of an earlier generation, whose reset a death has cut off. Most often it holds nothing.
            self.empty_file(io);
        } else {
            self.end_draining();
        }
    }

    /// The difference file was given back, as far as its file system can: for a reset, or behind the barrier.
    pub(crate) fn file_emptied_or_not(&mut self) {
        self.punches -= 1;
        if self.is_draining() {
            self.end_draining();
        }
    }

    fn end_draining(&mut self) {
        self.drain = Drain::Done;
        self.log.drained(&self.meta);
        for id in std::mem::take(&mut self.drain_waiters) {
            self.table.get_mut(id).wait = Wait::Turn;
            self.turn_waiters.push_back(id);
        }
    }
}
