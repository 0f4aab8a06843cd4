//! When what has not worked is tried again. Owns the counts of what has failed lately, and whether the machine was given up.
//!
//! Invariant: each try waits twice as long as the one before it, up to a bound; what no other try mends is tried again only
//! once what was wanted, or the catalog, has changed.

use crate::store::Revision;
use std::time::{Duration, Instant};

/// Between two tries of what does not work: twice as long after each.
const RETRY: Duration = Duration::from_secs(1);
const LONGEST_RETRY: Duration = Duration::from_secs(60);
/// A VMM that has run so long does not fail at once.
const STABLE: Duration = Duration::from_secs(60);

/// The tries to bring a machine to what is wanted of it.
#[derive(Default)]
pub struct Attempts {
    /// What has not worked since it last ran for a while.
    failures: u32,
    /// How often its VMM or its disk has ended by itself since it was last off.
    crashes: u32,
    /// When the VMM was started, by this daemon.
    begun: Option<Instant>,
    /// It is not started again before.
    not_before: Option<Instant>,
    /// What was wanted, and the catalog's revision, when it failed in a way that no other try mends.
    given_up: Option<(Revision, u64)>,
}

impl Attempts {
    /// Somebody wants something: what has failed is tried at once.
    pub fn begin_anew(&mut self) {
        (self.not_before, self.failures) = (None, 0);
    }

    /// It is off: nothing of what has failed counts any more.
    pub fn forget(&mut self) {
        (self.failures, self.crashes, self.not_before, self.given_up) = (0, 0, None, None);
    }

    /// Its VMM was started.
    pub fn vmm_begins(&mut self) {
        self.begun = Some(Instant::now());
    }

    /// Its VMM runs: once it has for a while, the next failure is the first one.
    pub fn vmm_runs(&mut self) {
        if self.begun.is_some_and(|begun| begun.elapsed() > STABLE) {
            self.failures = 0;
        }
    }

    /// How often its VMM or its disk has ended by itself.
    pub fn crashes(&self) -> u32 {
        self.crashes
    }

    /// Until when nothing is tried.
    pub fn pauses_until(&self) -> Option<Instant> {
        self.not_before.filter(|until| *until > Instant::now())
    }

    /// Its VMM or its disk has ended by itself.
    pub fn crashed(&mut self) {
        self.crashes += 1;
        self.not_before = Some(Instant::now() + self.pause());
    }

    /// Something has failed. How long until it is tried again.
    pub fn pause(&mut self) -> Duration {
        let pause = RETRY.saturating_mul(1 << self.failures.min(6)).min(LONGEST_RETRY);
        self.failures += 1;
        pause
    }

    /// Whatever wakes it, it is not tried again before this; what was given up waits for a change.
    pub fn not_before(&mut self, until: Instant) {
        self.not_before = self.given_up.is_none().then_some(until);
    }

    /// No other try mends what has failed with this wanted, and this revision of the catalog.
    pub fn give_up(&mut self, wanted: Revision, catalog: u64) {
        self.given_up = Some((wanted, catalog));
    }

    /// With what it was given up, if it was.
    pub fn given_up(&self) -> Option<(Revision, u64)> {
        self.given_up
    }

    /// Something has changed since it was given up.
    pub fn take_up(&mut self) {
        self.given_up = None;
    }
}
