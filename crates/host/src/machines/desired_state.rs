//! Records of the desired state of machines, and of their claims. Starts nothing.
//!
//! Invariant: a desired state is recorded before anything acts on it. Restarts and resets are counted, so that each
//! happens once.

use crate::processes;
use crate::store::StoredRecord;
use jiff::Timestamp;
use rustix::time::{ClockId, clock_gettime};
use serde::{Deserialize, Serialize};
use spillway_api::{CatalogSpec, Claim, Name, Power};
use std::collections::BTreeMap;
use std::sync::LazyLock;
use std::time::Duration;
use utoipa::ToSchema;
use uuid::Uuid;

/// Desired state of a machine. A machine without this record should be off.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct DesiredState {
    /// Whether the machine should run.
    pub power: Power,
    /// Seconds that the guest gets to shut down.
    pub grace_seconds: u32,
    /// Number of restarts that were requested.
    pub restarts: u64,
    /// Number of resets that were requested.
    pub resets: u64,
    /// The current claim, if any.
    pub claim: Option<ClaimRecord>,
    /// Whether the machine is drained: it is neither started nor claimed.
    pub drained: bool,
    /// Whether a client has asked for the machine's last start, restart or reset, and not the daemon. It goes first then.
    #[serde(default)]
    pub requested: bool,
}

/// Record of a claim. Its time is measured by the host's monotonic clock since boot, which cannot be set.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ClaimRecord {
    /// Unique id of the claim.
    pub id: String,
    /// Owner of the claim.
    pub owner: String,
    /// Labels of the claim, given by the client.
    pub labels: BTreeMap<Name, String>,
    /// Wall-clock time when the claim was made, for people.
    #[schema(value_type = String, format = DateTime)]
    pub since: Timestamp,
    /// Duration in seconds from when the claim was made or renewed; `None`: until it is released.
    pub ttl_seconds: Option<u32>,
    /// Whether the machine was started for this claim.
    pub started: bool,
    /// When the claim was made or last renewed.
    made: BootInstant,
}

/// A point in time: seconds since a boot of the host.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
struct BootInstant {
    boot: String,
    seconds: u64,
}

impl BootInstant {
    fn now() -> BootInstant {
        let seconds = clock_gettime(ClockId::Boottime).tv_sec;
        BootInstant { boot: boot_id(), seconds: u64::try_from(seconds).unwrap_or(0) }
    }
}

/// Returns the id of the host's current boot, which is read once: it stays the same while this process runs.
pub fn boot_id() -> String {
    static BOOT: LazyLock<String> = LazyLock::new(|| {
        // Every Linux kernel provides it.
        processes::boot_id().map(|id| String::from_utf8_lossy(&id).trim().to_owned()).unwrap_or_default()
    });
    BOOT.clone()
}

impl ClaimRecord {
    /// Creates a claim that begins now.
    pub fn new(ttl_seconds: Option<u32>, started: bool, owner: &str) -> ClaimRecord {
        ClaimRecord {
            id: Uuid::new_v4().to_string(),
            owner: owner.into(),
            labels: BTreeMap::new(),
            since: Timestamp::now(),
            ttl_seconds,
            started,
            made: BootInstant::now(),
        }
    }

    /// Remaining time of the claim; `None`: until it is released. A claim of an earlier boot has expired.
    pub fn remaining(&self) -> Option<Duration> {
        let now = BootInstant::now();
        if now.boot != self.made.boot {
            return Some(Duration::ZERO);
        }
        let end = self.made.seconds.saturating_add(self.ttl_seconds?.into());
        Some(Duration::from_secs(end.saturating_sub(now.seconds)))
    }

    /// Renews the claim for `ttl_seconds` from now.
    pub fn renew(&mut self, ttl_seconds: Option<u32>) {
        (self.ttl_seconds, self.made) = (ttl_seconds, BootInstant::now());
    }

    /// Converts the claim for the API.
    pub fn describe(&self) -> Claim {
        let left_seconds = self.remaining().map(|left| left.as_secs());
        let ClaimRecord { id, owner, labels, since, ttl_seconds, .. } = self.clone();
        Claim { id, owner, labels, since, ttl_seconds, left_seconds }
    }
}

impl DesiredState {
    /// Time that the guest gets to shut down.
    pub fn grace(&self) -> Duration {
        Duration::from_secs(self.grace_seconds.into())
    }

    /// Ends the claim and resets the machine, unless its catalog keeps writes. The machine is stopped if `free` other
    /// machines are enough for the warm count and it was started for the claim, or others have taken its place.
    pub fn release(&mut self, spec: &CatalogSpec, free: usize) {
        self.requested = false;
        let started = self.claim.take().is_some_and(|claim| claim.started);
        self.count_reset(spec);
        if (started || spec.warm > 0) && free >= spec.warm as usize {
            self.power = Power::Off;
        }
    }

    /// Turns the machine on with a fresh disk: what still runs from an earlier start is not continued.
    pub fn start_fresh(&mut self, spec: &CatalogSpec) {
        if self.power == Power::Off {
            self.count_reset(spec);
            (self.power, self.requested) = (Power::On, false);
        }
    }

    /// Whether somebody waits for the machine: a client has claimed it or asked for its start.
    pub fn is_awaited(&self) -> bool {
        self.requested || self.claim.is_some()
    }

    /// Counts a reset, unless the catalog keeps writes.
    fn count_reset(&mut self, spec: &CatalogSpec) {
        self.resets += u64::from(!spec.keeps_writes());
    }
}

impl StoredRecord for DesiredState {
    const PREFIX: &'static str = "wanted/";
    const WORD: &'static str = "machine";
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pool_that_is_full_takes_none_back() {
        let claimed = |started| DesiredState {
            power: Power::On,
            claim: Some(ClaimRecord::new(None, started, "ci")),
            ..DesiredState::default()
        };
        let pooled = serde_json::json!({ "image": "debian" });
        let dedicated = serde_json::json!({ "image": "debian", "type": "dedicated" });
        for (spec, started, warm, free, power, resets) in [
            // It takes its place in the pool again.
            (&pooled, false, 2, 1, Power::On, 1),
            // Another one has it. Whoever starts it while its guest still shuts down must not meet that guest.
            (&pooled, false, 2, 2, Power::Off, 1),
            // Somebody had started it before, and started it stays.
            (&pooled, false, 0, 0, Power::On, 1),
            (&pooled, true, 0, 0, Power::Off, 1),
            (&pooled, true, 1, 0, Power::On, 1),
            // The catalog has become one whose disks are kept.
            (&dedicated, false, 0, 0, Power::On, 0),
        ] {
            let mut wanted = claimed(started);
            let spec: CatalogSpec = serde_json::from_value(spec.clone()).unwrap();
            wanted.release(&CatalogSpec { warm, ..spec }, free);
            assert_eq!((wanted.claim, wanted.power, wanted.resets), (None, power, resets), "{warm} {free}");
        }
    }

    #[test]
    fn a_claim_ends_by_its_own_clock_or_with_the_host() {
        assert_eq!(ClaimRecord::new(None, false, "ci").remaining(), None);
        let claim = ClaimRecord::new(Some(3600), false, "ci");
        assert!(claim.remaining().is_some_and(|left| left > Duration::from_secs(3598)));
        let mut earlier = claim.clone();
        earlier.made.seconds -= earlier.made.seconds.min(3600);
        assert!(earlier.remaining() < claim.remaining());
        let before =
            ClaimRecord { made: BootInstant { boot: "another".into(), ..claim.made.clone() }, ..claim };
        assert_eq!(before.remaining(), Some(Duration::ZERO));
        earlier.renew(Some(7200));
        assert!(earlier.remaining().is_some_and(|left| left > Duration::from_secs(7198)));
        earlier.renew(None);
        assert_eq!(earlier.remaining(), None);
    }
}
