//! When what has not worked is tried again. Owns the counts of what has failed lately, and whether the machine was given up.
//!
//! Invariant: each try waits twice as long as the one before it, up to a bound; what no other try mends is tried again only
//! once what was wanted, or the catalog, has changed.

use crate::error::HostError;
use crate::store::Revision;
use std::collections::VecDeque;
use std::time::{Duration, Instant};

/// Between two tries of what does not work: twice as long after each.
const RETRY: Duration = Duration::from_secs(1);
const LONGEST_RETRY: Duration = Duration::from_secs(60);
/// A VMM that has run so long does not fail at once.
const STABLE: Duration = Duration::from_secs(60);
/// A machine that has crashed so often within this time has failed.
const CRASHES: usize = 5;
const CRASHES_WITHIN: Duration = Duration::from_secs(600);

/// The tries to bring a machine to what is wanted of it.
#[derive(Default)]
pub struct Attempts {
    /// What has not worked since it last ran for a while.
    failures: u32,
    /// How often its VMM or its disk has ended by itself since it was last off.
    crashes: u32,
    /// When it did so the last times, [`CRASHES`] of them at most.
    crashed: VecDeque<Instant>,
    /// When the VMM was started, by this daemon.
    begun: Option<Instant>,
    /// It is not started again before.
    not_before: Option<Instant>,
    given_up: Option<PermanentFailure>,
}

/// That no other try mends what has failed.
struct PermanentFailure {
    /// What was wanted then.
    wanted: Revision,
    /// The catalog's revision then.
    catalog: u64,
    /// What has failed.
    why: HostError,
}

impl Attempts {
    /// Somebody wants something: what has failed is tried at once.
    pub fn begin_anew(&mut self) {
        (self.not_before, self.failures) = (None, 0);
        self.crashed.clear();
    }

    /// It is off: nothing of what has failed counts any more.
    pub fn forget(&mut self) {
        *self = Attempts { begun: self.begun, ..Attempts::default() };
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
    pub fn crash(&mut self, now: Instant) {
        self.crashes += 1;
        self.crashed.truncate(CRASHES - 1);
        self.crashed.push_front(now);
        self.not_before = Some(now + self.pause());
    }

    /// Why it has failed although it is tried again: it ends by itself again and again.
    pub fn is_crashing(&self, now: Instant) -> Option<String> {
        let first = self.crashed.get(CRASHES - 1)?;
        let minutes = CRASHES_WITHIN.as_secs() / 60;
        let is_often = now.saturating_duration_since(*first) < CRASHES_WITHIN;
        is_often.then(|| format!("it has ended by itself {CRASHES} times within {minutes} minutes"))
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

    /// It has failed, with this wanted and this revision of the catalog. Why, for people: what is final stays the reason,
    /// whatever else fails meanwhile.
    pub fn fail(&mut self, error: &HostError, wanted: Revision, catalog: u64) -> HostError {
        if error.is_permanent {
            let mut why = error.clone();
            why.message.push_str(
                "; it is not tried again before 'machine start', or another setting or image of its catalog",
            );
            self.given_up = Some(PermanentFailure { wanted, catalog, why: why.clone() });
            return why;
        }
        match &self.given_up {
            Some(given_up) if given_up.wanted == wanted => given_up.why.clone(),
            _ => error.clone(),
        }
    }

    /// What was wanted, and the revision of the catalog, when it was given up.
    pub fn given_up(&self) -> Option<(Revision, u64)> {
        self.given_up.as_ref().map(|given_up| (given_up.wanted, given_up.catalog))
    }

    /// Something has changed since it was given up.
    pub fn take_up(&mut self) {
        self.given_up = None;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use spillway_api::ErrorCode;

    #[test]
    fn what_is_final_stays_the_reason_until_something_else_is_wanted() {
        let mut attempts = Attempts::default();
        let (first, second) = (Revision(1), Revision(2));
        let passing = HostError::new(ErrorCode::Exhausted, "the disk is full");
        assert_eq!(attempts.fail(&passing, first, 7).message, passing.message);
        let final_one = HostError::new(ErrorCode::Damaged, "the image is damaged").permanent();
        let told = attempts.fail(&final_one, first, 7);
        assert!(told.is_permanent && told.message.starts_with("the image is damaged; it is not tried again"));
        assert_eq!(attempts.given_up(), Some((first, 7)));
        let after = attempts.fail(&passing, first, 7);
        assert!(after.is_permanent && after.message == told.message, "{after}");
        assert!(!attempts.fail(&passing, second, 7).is_permanent, "it is tried again");
        attempts.take_up();
        assert!(!attempts.fail(&passing, first, 8).is_permanent);
    }

    #[test]
    fn one_that_crashes_again_and_again_has_failed_for_a_while() {
        let mut attempts = Attempts::default();
        let start = Instant::now();
        let at = |seconds| start + Duration::from_secs(seconds);
        for minute in 0..4 {
            attempts.crash(at(minute * 60));
            assert_eq!(attempts.is_crashing(at(minute * 60)), None);
        }
        attempts.crash(at(599));
        let why = attempts.is_crashing(at(599)).unwrap();
        assert_eq!(why, "it has ended by itself 5 times within 10 minutes");
        assert!(attempts.pauses_until().is_some(), "it is tried again all the same");
        assert_eq!(attempts.is_crashing(at(600)), None, "the first of them is long ago");
        attempts.crash(at(601));
        assert!(attempts.is_crashing(at(602)).is_some());
        attempts.begin_anew();
        assert_eq!((attempts.is_crashing(at(602)), attempts.crashes()), (None, 6));
    }
}
