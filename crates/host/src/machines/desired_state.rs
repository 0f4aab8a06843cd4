//! What is wanted of machines, as it is kept. Owns these records; starts nothing.
//!
//! Invariant: what is wanted is recorded before anything is done about it, and counted, so that it is done once.

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

/// What is wanted of a machine. One without a record is to be off.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct DesiredState {
    /// Whether it is to run.
    pub power: Power,
    /// How long its guest may take to shut down.
    pub grace_seconds: u32,
    /// How often it was asked to restart.
    pub restarts: u64,
    /// How often it was asked to be reset.
    pub resets: u64,
    /// Whose it is for now.
    pub claim: Option<ClaimRecord>,
    /// Not to be started or claimed.
    pub drained: bool,
}

/// A claim. It is counted by a clock that nobody sets: the host's since its start.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ClaimRecord {
    /// Which one, of all that there ever were.
    pub id: String,
    /// Who has the machine.
    pub owner: String,
    /// What the claim said, for people and programs.
    pub labels: BTreeMap<Name, String>,
    /// When it was made, for people.
    #[schema(value_type = String, format = DateTime)]
    pub since: Timestamp,
    /// How long it lasts from when it was made or renewed; `None`: until it is released.
    pub ttl_seconds: Option<u32>,
    /// Whether the machine was started for it.
    pub started: bool,
    /// When it was made or renewed.
    made: BootInstant,
}

/// Seconds since a start of the host's.
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

/// Which start of the host this is. Asked for each claim that is listed: it stays the same while this process lives.
pub fn boot_id() -> String {
    static BOOT: LazyLock<String> = LazyLock::new(|| {
        // It is there on every Linux.
        processes::boot_id().map(|id| String::from_utf8_lossy(&id).trim().to_owned()).unwrap_or_default()
    });
    BOOT.clone()
}

impl ClaimRecord {
    /// From now on.
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

    /// How long it still lasts; `None`: until it is released. What was claimed before the host started is over.
    pub fn remaining(&self) -> Option<Duration> {
        let now = BootInstant::now();
        if now.boot != self.made.boot {
            return Some(Duration::ZERO);
        }
        let end = self.made.seconds.saturating_add(self.ttl_seconds?.into());
        Some(Duration::from_secs(end.saturating_sub(now.seconds)))
    }

    /// It lasts so long from now on.
    pub fn renew(&mut self, ttl_seconds: Option<u32>) {
        (self.ttl_seconds, self.made) = (ttl_seconds, BootInstant::now());
    }

    /// As others see it.
    pub fn describe(&self) -> Claim {
        let left_seconds = self.remaining().map(|left| left.as_secs());
        let ClaimRecord { id, owner, labels, since, ttl_seconds, .. } = self.clone();
        Claim { id, owner, labels, since, ttl_seconds, left_seconds }
    }
}

impl DesiredState {
    /// How long its guest may take to shut down.
    pub fn grace(&self) -> Duration {
        Duration::from_secs(self.grace_seconds.into())
    }

    /// Nobody has it any more, and what they have written goes, unless its catalog keeps what is written. It is stopped if
    /// as many as are kept warm are free without it, and somebody started it for the claim or others have taken its place.
    pub fn release(&mut self, spec: &CatalogSpec, free: usize) {
        let started = self.claim.take().is_some_and(|claim| claim.started);
        self.count_reset(spec);
        if (started || spec.warm > 0) && free >= spec.warm as usize {
            self.power = Power::Off;
        }
    }

    /// It is to run for somebody, or to be ready for anybody: not with what still runs of an earlier life.
    pub fn start_fresh(&mut self, spec: &CatalogSpec) {
        if self.power == Power::Off {
            self.count_reset(spec);
            self.power = Power::On;
        }
    }

    /// What runs of it, if anything does, is not gone on with.
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
