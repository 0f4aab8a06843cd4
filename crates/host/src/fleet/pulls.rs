//! Pulls of images that were begun for the fleet. Owns the pause after one that has failed.
//!
//! Invariant: why the last pull of a version has failed for good is said until another one has succeeded.

use crate::error::HostError;
use spillway_api::{ErrorCode, Name, Operation, OperationState};
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// Shortest time between the beginnings of two pulls of a version. Each failure for good makes it twice as long.
const PAUSE: Duration = Duration::from_secs(20);
/// How often the pause is doubled.
const MOST_DOUBLED: u32 = 3;

/// Age of a pull from which why it has failed says nothing of the next one.
const FORGOTTEN: Duration = Duration::from_secs(600);

/// The last pull of a version.
#[derive(Debug)]
struct BegunPull {
    operation: u64,
    begun: Instant,
    /// Whether this pull has failed.
    has_failed: bool,
    /// Why this pull, or the one before, has failed for good.
    failure: Option<HostError>,
    /// Why this pull, or the one before, has failed at all.
    last: Option<HostError>,
    /// Number of pulls that have failed for good, one after the other.
    failures: u32,
}

/// The last pull of each version. A clone is the same.
#[derive(Clone, Default)]
pub struct FleetPulls(Arc<Mutex<BTreeMap<(Name, u32), BegunPull>>>);

impl FleetPulls {
    fn all(&self) -> MutexGuard<'_, BTreeMap<(Name, u32), BegunPull>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A pull of a version was begun as this operation.
    pub fn begun(&self, name: &Name, number: u32, operation: u64) {
        let mut all = self.all();
        let before = all.remove(&(name.clone(), number));
        let (failure, last, failures) = before.map_or((None, None, 0), |pull| {
            let last = pull.last.filter(|_| pull.begun.elapsed() < FORGOTTEN);
            (pull.failure, last, pull.failures)
        });
        let pull = BegunPull { operation, begun: Instant::now(), has_failed: false, failure, last, failures };
        all.insert((name.clone(), number), pull);
    }

    /// The host has a version.
    pub fn succeeded(&self, name: &Name, number: u32) {
        self.all().remove(&(name.clone(), number));
    }

    /// Why the last pull of a version that has ended has failed. The same while another one is under way.
    pub fn last_failure(&self, name: &Name, number: u32) -> Option<String> {
        self.all().get(&(name.clone(), number))?.last.as_ref().map(|failure| failure.message.clone())
    }

    /// What is said while a version is being brought: that it is, or why the pull before has failed for good.
    pub fn under_way(&self, name: &Name, number: u32) -> HostError {
        let failure = self.all().get(&(name.clone(), number)).and_then(|pull| pull.failure.clone());
        failure.unwrap_or_else(|| {
            HostError::new(ErrorCode::Conflict, format!("{name}:{number} is being brought to the host"))
        })
    }

    /// Refuses for a while after a pull that has failed, with its reason. `find` returns an operation.
    ///
    /// # Errors
    /// The last pull has failed, lately. `unavailable`: another one may succeed.
    pub fn check(
        &self,
        name: &Name,
        number: u32,
        find: impl FnOnce(u64) -> Option<Operation>,
    ) -> Result<(), HostError> {
        let mut all = self.all();
        let Some(pull) = all.get_mut(&(name.clone(), number)) else { return Ok(()) };
        if let Some(OperationState::Failed { error }) = find(pull.operation).map(|operation| operation.state)
        {
            let message = format!("{name}:{number} could not be brought to the host: {}", error.detail);
            let code = lasting(error.code);
            let failure = HostError::new(code.unwrap_or(ErrorCode::Unavailable), message);
            if !std::mem::replace(&mut pull.has_failed, true) {
                pull.failures = if code.is_some() { pull.failures.saturating_add(1) } else { 0 };
                pull.failure = code.is_some().then(|| failure.clone());
                pull.last = Some(failure.clone());
            }
            let pause = PAUSE * (1 << pull.failures.saturating_sub(1).min(MOST_DOUBLED));
            if pull.begun.elapsed() < pause {
                return Err(failure);
            }
        }
        Ok(())
    }
}

/// The code of a failure that another pull does not mend.
fn lasting(code: ErrorCode) -> Option<ErrorCode> {
    match code {
        ErrorCode::Unavailable | ErrorCode::Busy | ErrorCode::Cancelled | ErrorCode::Timeout => None,
        // An image without the signature that the registry asks for: elsewhere the code says that another step goes first.
        ErrorCode::Conflict => Some(ErrorCode::Forbidden),
        code => Some(code),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    #[test]
    fn a_failure_is_said_until_the_next_pull() {
        let (pulls, name) = (FleetPulls::default(), "debian".parse().unwrap());
        let operation = |state: Value| -> Option<Operation> {
            let json = json!({ "id": 7, "what": "pull", "state": state, "done_bytes": 0, "total_bytes": 0 });
            Some(serde_json::from_value(json).unwrap())
        };
        let failed = |code: &str| {
            operation(
                json!({ "phase": "failed", "error": { "code": code, "type": "about:blank", "title": "t", "status": 507, "detail": "it is full" } }),
            )
        };
        assert!(pulls.check(&name, 3, |_| panic!("there is none")).is_ok());
        pulls.begun(&name, 3, 7);
        for (code, said) in [
            ("unavailable", ErrorCode::Unavailable),
            ("cancelled", ErrorCode::Unavailable),
            ("exhausted", ErrorCode::Exhausted),
            ("damaged", ErrorCode::Damaged),
            ("conflict", ErrorCode::Forbidden),
        ] {
            let why = pulls.check(&name, 3, |id| failed(code).filter(|_| id == 7)).unwrap_err();
            assert!(why.message.contains("debian:3") && why.message.contains("it is full"), "{why}");
            assert_eq!(why.code, said);
        }
        assert!(pulls.check(&name, 4, |_| failed("exhausted")).is_ok(), "it is another version");
        assert!(pulls.check(&name, 3, |_| operation(json!({ "phase": "running" }))).is_ok());
        age(&pulls, PAUSE);
        assert!(pulls.check(&name, 3, |_| failed("exhausted")).is_ok());
    }

    fn age(pulls: &FleetPulls, by: Duration) {
        pulls.all().values_mut().for_each(|pull| pull.begun = pull.begun.checked_sub(by).unwrap());
    }

    #[test]
    fn a_failure_for_good_is_said_while_it_is_tried_again_and_tried_less_often() {
        let (pulls, name): (_, Name) = (FleetPulls::default(), "debian".parse().unwrap());
        let failed = |code: &str| -> Option<Operation> {
            let error = json!({ "code": code, "type": "about:blank", "title": "t", "status": 507, "detail": "it is not signed" });
            let json = json!({ "id": 7, "what": "pull", "state": { "phase": "failed", "error": error }, "done_bytes": 0, "total_bytes": 0 });
            Some(serde_json::from_value(json).unwrap())
        };
        for (operation, pause) in [20, 40, 80, 160, 160].into_iter().enumerate() {
            pulls.begun(&name, 3, operation as u64);
            let is_new = operation == 0;
            assert_eq!(pulls.under_way(&name, 3).code == ErrorCode::Conflict, is_new, "{operation}");
            assert_eq!(pulls.check(&name, 3, |_| failed("damaged")).unwrap_err().code, ErrorCode::Damaged);
            age(&pulls, Duration::from_secs(pause - 1));
            assert!(pulls.check(&name, 3, |_| failed("damaged")).is_err(), "{pause}");
            age(&pulls, Duration::from_secs(1));
            assert!(pulls.check(&name, 3, |_| failed("damaged")).is_ok(), "{pause}");
        }
        // A registry that is away now says nothing of the image.
        pulls.begun(&name, 3, 9);
        assert_eq!(
            pulls.check(&name, 3, |_| failed("unavailable")).unwrap_err().code,
            ErrorCode::Unavailable
        );
        assert_eq!(pulls.under_way(&name, 3).code, ErrorCode::Conflict);
        let away = pulls.last_failure(&name, 3).unwrap();
        pulls.begun(&name, 3, 10);
        assert_eq!(pulls.last_failure(&name, 3).as_ref(), Some(&away), "the same while the next one goes on");
        age(&pulls, FORGOTTEN);
        pulls.begun(&name, 3, 11);
        assert_eq!(pulls.last_failure(&name, 3), None, "another rollout, hours later");
        pulls.succeeded(&name, 3);
        assert!(pulls.check(&name, 3, |_| panic!("there is none")).is_ok());
    }
}
