//! How long a version that is about to be rolled out is waited for because of its boot set.
//!
//! Invariant: a set is advice. A host that cannot bring it (no space in its cache, a damaged chunk, a registry that is away) gets the version
//! all the same, later; and a version that was here does not go away again because of a set that somebody has recorded since.

use spillway_api::Name;
use spillway_fleet::agent::{WantedShares, WantedVersion};
use spillway_fleet::records::VersionName;
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Longest time that a version is waited for.
const PATIENCE: Duration = Duration::from_secs(120);

/// Since when versions are waited for, by image and number; none: not any more.
type Begun = BTreeMap<(Name, u32), Option<Instant>>;

/// The versions that are waited for. A clone is the same.
#[derive(Clone, Default)]
pub struct BootSetWaits(Arc<Mutex<Begun>>);

impl BootSetWaits {
    /// Whether a version that is here is still waited for, if the host lacks a part of its boot set, or not.
    pub fn waits(&self, of: &VersionName, lacks: bool, now: Instant) -> bool {
        let mut versions = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let since = versions.entry((of.image.clone(), of.version)).or_insert(Some(now));
        if !lacks || since.is_some_and(|since| now.duration_since(since) >= PATIENCE) {
            *since = None;
        }
        since.is_some()
    }

    /// Forgets the versions that are not about to be rolled out.
    pub fn retain(&self, wanted: &WantedShares) {
        let mut versions = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        versions.retain(|(image, number), _| {
            wanted
                .versions
                .values()
                .any(|WantedVersion { of, .. }| of.image == *image && of.version == *number)
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(version: u32) -> VersionName {
        VersionName { image: "debian".parse().unwrap(), version }
    }

    #[test]
    fn a_version_is_waited_for_some_time_and_then_never_again() {
        let (waits, now) = (BootSetWaits::default(), Instant::now());
        let at = |seconds| now + Duration::from_secs(seconds);
        assert!(waits.waits(&of(1), true, now) && waits.waits(&of(1), true, at(119)));
        assert!(!waits.waits(&of(1), true, at(120)), "it cannot be brought");
        assert!(!waits.waits(&of(1), true, at(121)));
        assert!(waits.waits(&of(2), true, at(121)), "another one has its own time");
        assert!(!waits.waits(&of(2), false, at(122)));
        assert!(!waits.waits(&of(2), true, at(123)), "a set that is recorded later keeps it from nothing");
        let version = WantedVersion { of: of(2), source: None, residency: None };
        let versions = BTreeMap::from([("desk".parse().unwrap(), version)]);
        waits.retain(&WantedShares { versions, ..WantedShares::default() });
        assert!(waits.waits(&of(1), true, at(124)), "another rollout of it");
        assert!(!waits.waits(&of(2), true, at(124)));
    }
}
