//! The health of the overflow: write errors in a row, the backoff between tries, and the events about them.
//!
//! Learns from writes that ended; never starts one. Invariant: after [`WRITE_TRIES`] failures in a row, or one because the file
//! system is full, nothing is written for [`RETRY_NS`].

use crate::error::Errno;
use crate::io::{Event, Io};
use spillway_layout::{Counters, add, get, set};

/// Tries in a row, each in another segment, after which the overflow counts as degraded.
pub(crate) const WRITE_TRIES: u32 = 3;
/// How long eviction and collection back off after errors.
pub(crate) const RETRY_NS: u64 = 1_000_000_000;
/// Overflow writes that fail within this time of each other count as one failure.
const SAME_FAILURE_NS: u64 = 10_000_000;

pub(crate) struct OverflowHealth {
    /// Failures in a row, where writes that failed together count once; and the time of the last one.
    errors: u32,
    error_ns: u64,
    errno: Errno,
    /// Set after [`WRITE_TRIES`] failures, until a write succeeds.
    degraded: bool,
    retry_at_ns: u64,
}

impl OverflowHealth {
    /// Takes over the state of an earlier process: its events are not sent again, but the event that ends the state is. With
    /// `on_trial` the overflow counts as failing until a write has succeeded.
    pub fn adopt(c: &Counters, on_trial: bool) -> OverflowHealth {
        OverflowHealth {
            errors: 0,
            error_ns: 0,
            errno: Errno::IO,
            degraded: get(&c.degraded) != 0,
            retry_at_ns: on_trial.into(),
        }
    }

    /// Records a write that failed. Backs off after some failures in a row, and at once when the file system is full.
    pub fn write_failed<I: Io>(&mut self, io: &mut I, c: &Counters, now_ns: u64, errno: Errno) {
        add(&c.overflow_write_errors, 1);
        if self.errors == 0 {
            io.event(Event::OverflowWriteFailed(errno));
        }
        if self.errors == 0 || now_ns >= self.error_ns + SAME_FAILURE_NS {
            self.errors += 1;
            self.error_ns = now_ns;
        }
        self.errno = errno;
        if self.errors >= WRITE_TRIES || errno == Errno::NO_SPACE {
            self.retry_at_ns = now_ns + RETRY_NS;
        }
        if self.errors >= WRITE_TRIES && !self.degraded {
            self.set_degraded(c, true);
            io.event(Event::Degraded(errno));
        }
    }

    /// Records a write that succeeded.
    pub fn write_succeeded<I: Io>(&mut self, io: &mut I, c: &Counters) {
        (self.errors, self.retry_at_ns) = (0, 0);
        if self.degraded {
            self.set_degraded(c, false);
            io.event(Event::Recovered);
        }
    }

    fn set_degraded(&mut self, c: &Counters, degraded: bool) {
        self.degraded = degraded;
        set(&c.degraded, degraded.into());
    }

    /// Whether nothing may be written yet.
    #[inline]
    pub fn is_backing_off(&self, now_ns: u64) -> bool {
        now_ns < self.retry_at_ns
    }

    /// Whether no write has succeeded since the last backoff.
    pub fn is_on_trial(&self) -> bool {
        self.retry_at_ns != 0
    }

    /// When a write may be tried again; may have passed. 0 if the last write succeeded.
    pub fn retry_at_ns(&self) -> u64 {
        self.retry_at_ns
    }

    /// The errno of the last write that failed.
    pub fn errno(&self) -> Errno {
        self.errno
    }
}

/// Records a read of the overflow that failed. It fails the request that needed it, and nothing else.
pub(crate) fn read_failed<I: Io>(io: &mut I, c: &Counters, errno: Errno) {
    add(&c.overflow_read_errors, 1);
    io.event(Event::OverflowReadFailed(errno));
}
