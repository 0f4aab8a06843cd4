//! The drain: I/O that a dead process had begun may land on the file long after another has attached. Until a
//! barrier says that all of it has ended, nothing new is begun where it could land.
//!
//! Owns when the barrier is asked for; what waits for it is the engine's to say. Invariant: no place of the file
//! that a dead process may still be writing or punching is written, punched or used again before the barrier
//! has ended well. In the log that is the segments that were marked busy; of a file that is written in place all of it, so
//! every request waits. With other memory a disk begins only when the lock of its file is free: no I/O is under way then.

use crate::health::RETRY_NS;
use crate::io::Io;
use crate::ops::{Op, Operations};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// Nothing of a dead process is under way.
    Done,
    /// To be asked for, from this time on.
    Wanted {
        from_ns: u64,
    },
    UnderWay,
}

/// How far the barrier is.
pub(crate) struct Drain(State);

impl Drain {
    /// Of a disk that has just been attached to.
    pub fn new(is_needed: bool) -> Drain {
        Drain(if is_needed { State::Wanted { from_ns: 0 } } else { State::Done })
    }

    /// I/O of a dead process may still land.
    #[inline]
    pub fn is_needed(&self) -> bool {
        self.0 != State::Done
    }

    pub fn is_under_way(&self) -> bool {
        self.0 == State::UnderWay
    }

    /// The barrier has failed, and is tried again later.
    pub fn rests(&self, now_ns: u64) -> bool {
        matches!(self.0, State::Wanted { from_ns } if from_ns > now_ns)
    }

    /// Time at which the barrier must be started, in nanoseconds; 0 if none is pending.
    pub fn deadline_ns(&self) -> u64 {
        if let State::Wanted { from_ns } = self.0 { from_ns } else { 0 }
    }

    /// Asks for the barrier when it is time.
    #[inline]
    pub fn begin<I: Io>(&mut self, io: &mut I, ops: &mut Operations, now_ns: u64) {
        if matches!(self.0, State::Wanted { from_ns } if from_ns <= now_ns) {
            self.0 = State::UnderWay;
            io.drain_overflow(ops.begin(Op::Drain));
        }
    }

    /// The barrier has failed.
    pub fn fail(&mut self, now_ns: u64) {
        self.0 = State::Wanted { from_ns: now_ns + RETRY_NS };
    }

    /// Nothing of a dead process can land any more.
    pub fn end(&mut self) {
        self.0 = State::Done;
    }
}
