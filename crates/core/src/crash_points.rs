//! Crash points: a test ends the process, as far as the core is concerned, before a chosen store to shared memory.
//!
//! Owns the countdown, one for each thread; never decides what is a store: `meta` calls before each of its own, but
//! for those of counters, and the test for those of slots. Invariant: one call of [`stop_at`] stops once.

use std::cell::{Cell, RefCell};
use std::panic::Location;

thread_local! {
    static PASSED: RefCell<Vec<&'static Location<'static>>> = const { RefCell::new(Vec::new()) };
    static STOP_AT: Cell<u64> = const { Cell::new(0) };
}

/// What a stop unwinds with. Nothing of the disk may be used after it but the memory that it was attached to.
pub struct Stopped;

/// Stops before the `n`-th store from now on; 0: before none.
pub fn stop_at(n: u64) {
    PASSED.with_borrow_mut(Vec::clear);
    STOP_AT.set(n);
}

/// Where in the code the stores since the last [`stop_at`] were, that which was stopped included.
pub fn passed() -> Vec<&'static Location<'static>> {
    PASSED.with_borrow(Vec::clone)
}

/// To be called before a store to shared memory.
///
/// # Panics
/// With [`Stopped`], and without a message, when it is the one to stop before.
#[track_caller]
pub fn store() {
    let here = Location::caller();
    let passed = PASSED.with_borrow_mut(|passed| {
        passed.push(here);
        passed.len() as u64
    });
    if passed == STOP_AT.get() {
        STOP_AT.set(0);
        std::panic::resume_unwind(Box::new(Stopped));
    }
}
