//! Retries of what has failed. Owns the counts of recent failures, and whether the machine has failed permanently.
//!
//! Invariant: each retry waits twice as long as the one before, up to a bound. After a permanent failure the machine is
//! retried only when its desired state or its catalog changes.

use crate::error::HostError;
use crate::store::Revision;
use std::collections::VecDeque;
use std::time::{Duration, Instant};

/// First delay of a retry; each further one is twice as long.
const RETRY: Duration = Duration::from_secs(1);
const LONGEST_RETRY: Duration = Duration::from_secs(60);
/// A VMM that has run this long has started successfully.
const STABLE: Duration = Duration::from_secs(60);
/// No guest has done its work within this time.
const JUST_BEGUN: Duration = Duration::from_secs(2);
/// A machine that has crashed this often within the time below has failed.
pub const CRASHES: usize = 5;
const CRASHES_WITHIN: Duration = Duration::from_secs(600);

/// Counts failures of a machine and delays retries.
#[derive(Default)]
pub struct Attempts {
    /// Number of failures since the machine last ran for a while.
    failures: u32,
    /// Number of unexpected ends of the VMM or the disk since the machine was last off.
    crashes: u32,
    /// Times of the last crashes, at most [`CRASHES`] of them.
    crashed: VecDeque<Instant>,
    /// When this daemon started the VMM.
    begun: Option<Instant>,
    /// Earliest time of the next attempt.
    not_before: Option<Instant>,
    given_up: Option<PermanentFailure>,
    /// The last failure that was reported.
    reported: Option<String>,
}

/// A failure that no retry can fix.
struct PermanentFailure {
    /// Revision of the desired state at that time.
    wanted: Revision,
    /// Revision of the catalog at that time.
    catalog: u64,
    /// The error.
    why: HostError,
}

impl Attempts {
    /// Forgets the delay, since a client wants something: the next attempt follows at once.
    pub fn begin_anew(&mut self) {
        (self.not_before, self.failures, self.reported) = (None, 0, None);
        self.crashed.clear();
    }

    /// Forgets all failures, since the machine is off.
    pub fn forget(&mut self) {
        *self = Attempts { begun: self.begun, ..Attempts::default() };
    }

    /// Notes the start of the VMM.
    pub fn vmm_begins(&mut self) {
        self.begun = Some(Instant::now());
    }

    /// Notes that the VMM runs: after a while, its next failure counts as the first.
    pub fn vmm_runs(&mut self) {
        if self.begun.is_some_and(|begun| begun.elapsed() > STABLE) {
            (self.failures, self.reported) = (0, None);
        }
    }

    /// Whether the last report was not of this failure. It is from now on.
    pub fn is_new(&mut self, failure: &str) -> bool {
        let is_new = self.reported.as_deref() != Some(failure);
        if is_new {
            self.reported = Some(failure.to_owned());
        }
        is_new
    }

    /// Whether this daemon has just started the VMM.
    pub fn has_just_begun(&self) -> bool {
        self.begun.is_some_and(|begun| begun.elapsed() < JUST_BEGUN)
    }

    /// Whether an earlier daemon has started the VMM.
    pub fn is_adopted(&self) -> bool {
        self.begun.is_none()
    }

    /// Number of unexpected ends of the VMM or the disk.
    pub fn crashes(&self) -> u32 {
        self.crashes
    }

    /// Earliest time of the next attempt.
    pub fn pauses_until(&self) -> Option<Instant> {
        self.not_before.filter(|until| *until > Instant::now())
    }

    /// Counts an unexpected end of the VMM or the disk.
    pub fn crash(&mut self, now: Instant) {
        self.crashes += 1;
        self.crashed.truncate(CRASHES - 1);
        self.crashed.push_front(now);
        self.not_before = Some(now + self.pause());
    }

    /// Returns the text of the failure if the machine crashes repeatedly.
    pub fn is_crashing(&self, now: Instant) -> Option<String> {
        let first = self.crashed.get(CRASHES - 1)?;
        let minutes = CRASHES_WITHIN.as_secs() / 60;
        let is_often = now.saturating_duration_since(*first) < CRASHES_WITHIN;
        is_often.then(|| format!("it has ended by itself {CRASHES} times within {minutes} minutes"))
    }

    /// Counts a failure. Returns the delay until the next attempt.
    pub fn pause(&mut self) -> Duration {
        let pause = RETRY.saturating_mul(1 << self.failures.min(6)).min(LONGEST_RETRY);
        self.failures += 1;
        pause
    }

    /// Delays the next attempt until this time, whatever wakes the task; after a permanent failure, until a change.
    pub fn not_before(&mut self, until: Instant) {
        self.not_before = self.given_up.is_none().then_some(until);
    }

    /// Records a failure with the revisions of the desired state and the catalog. Returns the error to show: a permanent
    /// failure stays the reason, whatever else fails meanwhile.
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

    /// Revisions of the desired state and the catalog at the time of a permanent failure.
    pub fn given_up(&self) -> Option<(Revision, u64)> {
        self.given_up.as_ref().map(|given_up| (given_up.wanted, given_up.catalog))
    }

    /// Forgets a permanent failure, since something has changed.
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
