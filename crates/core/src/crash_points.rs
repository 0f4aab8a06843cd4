//! Crash points: a test ends the process, as far as the core is concerned, before a chosen store to shared memory.
//!
//! Owns the countdown, one for each thread; never decides what is a store: `meta` calls before each of its own, but
//! for those of counters, and the test for those of slots. Invariant: one call of [`stop_at`] stops once.

use std::cell::Cell;

thread_local! {
    static PASSED: Cell<u64> = const { Cell::new(0) };
    static STOP_AT: Cell<u64> = const { Cell::new(0) };
}

/// What a stop unwinds with. Nothing of the disk may be used after it but the memory that it was attached to.
pub struct Stopped;

/// Stops before the `n`-th store from now on; 0: before none.
pub fn stop_at(n: u64) {
    PASSED.set(0);
    STOP_AT.set(n);
}

/// Stores since the last [`stop_at`], that which was stopped included.
pub fn passed() -> u64 {
    PASSED.get()
}

/// A store to shared memory is about to be done.
///
/// # Panics
/// With [`Stopped`], and without a message, when it is the one to stop before.
pub fn store() {
    PASSED.set(PASSED.get() + 1);
    if PASSED.get() == STOP_AT.get() {
        STOP_AT.set(0);
        std::panic::resume_unwind(Box::new(Stopped));
    }
}
