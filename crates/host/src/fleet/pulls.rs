//! Pulls of images that were begun for the fleet. Owns the pause after one that has failed.
//!
//! Invariant: why the last pull of a version has failed is said until another one is begun.

use crate::error::HostError;
use spillway_api::{ErrorCode, Name, Operation, OperationState};
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Shortest time between the beginnings of two pulls of a version.
const PAUSE: Duration = Duration::from_secs(20);

/// Operations, and when they were begun, by image and version.
type BegunPulls = BTreeMap<(Name, u32), (u64, Instant)>;

/// The last pull of each version. A clone is the same.
#[derive(Clone, Default)]
pub struct FleetPulls(Arc<Mutex<BegunPulls>>);

impl FleetPulls {
    /// A pull of a version was begun as this operation.
    pub fn begun(&self, name: &Name, number: u32, operation: u64) {
        let mut all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        all.insert((name.clone(), number), (operation, Instant::now()));
    }

    /// Refuses for a while after a pull that has failed, with its reason. `find` returns an operation.
    ///
    /// # Errors
    /// The last pull has failed, lately.
    pub fn check(
        &self,
        name: &Name,
        number: u32,
        find: impl FnOnce(u64) -> Option<Operation>,
    ) -> Result<(), HostError> {
        let mut all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let key = (name.clone(), number);
        let Some((id, begun)) = all.get(&key).copied() else { return Ok(()) };
        if begun.elapsed() >= PAUSE {
            all.remove(&key);
            return Ok(());
        }
        match find(id).map(|operation| operation.state) {
            Some(OperationState::Failed { error }) => {
                let message = format!("{name}:{number} could not be brought to the host: {}", error.detail);
                Err(HostError::new(ErrorCode::Unavailable, message))
            }
            _ => Ok(()),
        }
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
        let failed = || {
            operation(
                json!({ "phase": "failed", "error": { "code": "exhausted", "type": "about:blank", "title": "t", "status": 507, "detail": "it is full" } }),
            )
        };
        assert!(pulls.check(&name, 3, |_| panic!("there is none")).is_ok());
        pulls.begun(&name, 3, 7);
        let why = pulls.check(&name, 3, |id| failed().filter(|_| id == 7)).unwrap_err();
        assert!(why.message.contains("debian:3") && why.message.contains("it is full"), "{why}");
        assert!(pulls.check(&name, 4, |_| failed()).is_ok(), "it is another version");
        assert!(pulls.check(&name, 3, |_| operation(json!({ "phase": "running" }))).is_ok());
        let long_ago = Instant::now().checked_sub(PAUSE).unwrap();
        pulls.0.lock().unwrap().insert((name.clone(), 3), (7, long_ago));
        assert!(pulls.check(&name, 3, |_| failed()).is_ok());
    }
}
