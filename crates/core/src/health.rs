//! Whether the overflow takes writes: errors in a row, the rest between tries, and what is told of it.
//!
//! Owns what is known from writes that ended; never begins one. Invariant: after [`WRITE_TRIES`] failures in a row, or one for
//! want of room, nothing is written for [`RETRY_NS`].

use crate::error::Errno;
use crate::io::{Event, Io};
use spillway_layout::{Counters, add, get, set};

/// Tries in a row, each in another segment, after which the overflow counts as degraded.
pub(crate) const WRITE_TRIES: u32 = 3;
/// How long eviction and collection rest after errors.
pub(crate) const RETRY_NS: u64 = 1_000_000_000;
/// Overflow writes that fail within this time fail for one reason.
const SAME_HICCUP_NS: u64 = 10_000_000;

pub(crate) struct OverflowHealth {
    /// Writes that failed in a row, not counting those that were under way together; and when the last did.
    errors: u32,
    error_ns: u64,
    errno: Errno,
    /// They go on failing.
    degraded: bool,
    rest_until_ns: u64,
}

impl OverflowHealth {
    /// As an earlier process has told: what it said is not said again, but that it is over. With `on_trial` it is not known
    /// whether writes succeed until one has.
    pub fn adopt(c: &Counters, on_trial: bool) -> OverflowHealth {
        OverflowHealth {
            errors: 0,
            error_ns: 0,
            errno: Errno::IO,
            degraded: get(&c.degraded) != 0,
            rest_until_ns: on_trial.into(),
        }
    }

    /// A write failed. Writing rests after some failures in a row, and at once when the file system is full.
    pub fn write_failed<I: Io>(&mut self, io: &mut I, c: &Counters, now_ns: u64, errno: Errno) {
        add(&c.overflow_write_errors, 1);
        if self.errors == 0 {
            io.event(Event::OverflowWriteFailed(errno));
        }
        if self.errors == 0 || now_ns >= self.error_ns + SAME_HICCUP_NS {
            self.errors += 1;
            self.error_ns = now_ns;
        }
        self.errno = errno;
        if self.errors >= WRITE_TRIES || errno == Errno::NO_SPACE {
            self.rest_until_ns = now_ns + RETRY_NS;
        }
        if self.errors >= WRITE_TRIES && !self.degraded {
            self.set_degraded(c, true);
            io.event(Event::Degraded(errno));
        }
    }

    /// A write succeeded.
    pub fn write_succeeded<I: Io>(&mut self, io: &mut I, c: &Counters) {
        (self.errors, self.rest_until_ns) = (0, 0);
        if self.degraded {
            self.set_degraded(c, false);
            io.event(Event::Recovered);
        }
    }

    fn set_degraded(&mut self, c: &Counters, degraded: bool) {
        self.degraded = degraded;
        set(&c.degraded, degraded.into());
    }

    /// Nothing is to be written yet.
    #[inline]
    pub fn rests(&self, now_ns: u64) -> bool {
        now_ns < self.rest_until_ns
    }

    /// No write has succeeded since writing rested.
    pub fn is_on_trial(&self) -> bool {
        self.rest_until_ns != 0
    }

    /// When writing may be tried again; may be over.
    pub fn rest_until_ns(&self) -> u64 {
        self.rest_until_ns
    }

    /// Why the last write that failed did.
    pub fn errno(&self) -> Errno {
        self.errno
    }
}

/// A read of the overflow failed: that is an error for who asked, and for nobody else.
pub(crate) fn read_failed<I: Io>(io: &mut I, c: &Counters, errno: Errno) {
    add(&c.overflow_read_errors, 1);
    io.event(Event::OverflowReadFailed(errno));
}
