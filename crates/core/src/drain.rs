//! The drain: I/O that a dead process has started may land on the file long after another has attached. Until a barrier shows
//! that all of it has ended, no new I/O is started where it could land.
//!
//! Owns the time of the barrier; the engine decides what waits for it. Invariant: no place of the file
//! that a dead process may still be writing or punching is written, punched or used again before the barrier
//! has succeeded. In the log that is the segments that were marked busy; of a file that is written in place all of it, so
//! every request waits. With other memory a disk begins only when the lock of its file is free: no I/O is in flight then.

use crate::health::RETRY_NS;
use crate::io::Io;
use crate::ops::{Op, Operations};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// No I/O of a dead process is in flight.
    Done,
    /// The barrier may be started from this time on.
    Wanted {
        from_ns: u64,
    },
    InProgress,
}

/// The state of the barrier.
pub(crate) struct Drain(State);

impl Drain {
    /// For a disk that has just been attached to.
    pub fn new(is_needed: bool) -> Drain {
        Drain(if is_needed { State::Wanted { from_ns: 0 } } else { State::Done })
    }

    /// Whether I/O of a dead process may still land.
    #[inline]
    pub fn is_needed(&self) -> bool {
        self.0 != State::Done
    }

    pub fn is_in_flight(&self) -> bool {
        self.0 == State::InProgress
    }

    /// Whether the barrier has failed, and is tried again later.
    pub fn is_backing_off(&self, now_ns: u64) -> bool {
        matches!(self.0, State::Wanted { from_ns } if from_ns > now_ns)
    }

    /// Time at which the barrier must be started, in nanoseconds; 0 if none is pending.
    pub fn deadline_ns(&self) -> u64 {
        if let State::Wanted { from_ns } = self.0 { from_ns } else { 0 }
    }

    /// Starts the barrier when it is time.
    #[inline]
    pub fn begin<I: Io>(&mut self, io: &mut I, ops: &mut Operations, now_ns: u64) {
        if matches!(self.0, State::Wanted { from_ns } if from_ns <= now_ns) {
            self.0 = State::InProgress;
            io.drain_overflow(ops.begin(Op::Drain));
        }
    }

    /// Records that the barrier has failed.
    pub fn fail(&mut self, now_ns: u64) {
        self.0 = State::Wanted { from_ns: now_ns + RETRY_NS };
    }

    /// Records that no I/O of a dead process can land any more.
    pub fn end(&mut self) {
        self.0 = State::Done;
    }
}
