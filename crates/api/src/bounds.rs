//! Bounds of every number in requests. Owns the table, which validation, the OpenAPI document and the help of `spillway`
//! use.
//!
//! Invariant: every number of a request is in the table; a test compares it with the document.

use crate::catalog::{
    CatalogRollback, CatalogSpec, CatalogUpdate, Hardware, NewCatalog, RolloutChange, RolloutStrategy,
};
use crate::fleet::{
    FleetCatalogRollback, FleetCatalogSpec, FleetCatalogUpdate, FleetEventRequest, FleetHostChange,
    FleetSettings, NewFleet, NewFleetCatalog, NewFleetImage, PlacerChange,
};
use crate::host::NewHostAction;
use crate::image::{ImageCommit, ImageDownload, ImageImport, VersionChoice};
use crate::machine::{ClaimRenewal, MachineAction, MachineSize, NewClaim, NewMachine};
use crate::registry::{ImagePull, ImagePush, Registry, RegistryCollection};
use crate::stores::StoreFolder;
use crate::{Empty, size_text};
use spillway_control::DiskSettings;
use spillway_control::disk_settings as settings;
use std::fmt;
use std::ops::RangeInclusive;

/// The range of a number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Bounds {
    /// The smallest value that is accepted, in the unit of the bounds.
    pub least: u64,
    /// The largest value that is accepted, in the unit of the bounds.
    pub most: u64,
    /// Every value is a multiple of this.
    pub step: u64,
    /// Whether the number is in bytes, and shown as a size.
    pub is_size: bool,
}

const MIB: u64 = 1 << 20;
const TIB: u64 = 1 << 40;
const DAY: u64 = 24 * 60 * 60;

/// Bounds of the number of machines of a catalog, and of its warm count.
pub const MACHINES: Bounds = Bounds::count(0, 100_000);
/// Bounds of the number of virtual processors of a machine.
pub const VCPUS: Bounds = Bounds::count(1, 255);
/// Bounds of the number of processor sockets of a machine.
pub const SOCKETS: Bounds = Bounds::count(1, 255);
/// Bounds of the memory of a machine, in bytes.
pub const MEMORY_BYTES: Bounds = Bounds::bytes(64 * MIB, 16 * TIB, MIB);
/// Bounds of the limit of a RAM tier, in bytes; the same as a disk's.
pub const RAM_BYTES: Bounds = Bounds::of(&settings::RAM_BYTES, true);
/// Bounds of the guaranteed part of a RAM tier, in bytes.
pub const RAM_GUARANTEE_BYTES: Bounds = Bounds::bytes(0, 4 * TIB, 1);
/// Bounds of the limit of an overflow file, in bytes.
pub const OVERFLOW_BYTES: Bounds = Bounds::of(&settings::OVERFLOW_BYTES, true);
/// Bounds of the size of data disks and scratch disks, in bytes.
pub const DISK_BYTES: Bounds = Bounds::bytes(MIB, 4 * TIB, MIB);
/// Bounds of the rate and the burst of requests, per second; 0: no limit.
pub const IOPS: Bounds = Bounds::of(&settings::IOPS, false);
/// Bounds of the rate and the burst of bytes, per second; 0: no limit.
pub const BANDWIDTH_BYTES: Bounds = Bounds::of(&settings::BANDWIDTH_BYTES, true);
/// Bounds of the thresholds of the write cache, in per cent of it.
pub const PERCENT: Bounds = Bounds::of(&settings::PERCENT, false);
/// Bounds of the time that a guest gets to shut down, in seconds.
pub const GRACE_SECONDS: Bounds = Bounds::count(0, 3600);
/// Bounds of the place of a catalog in the order of starts.
pub const START_ORDER: Bounds = Bounds::count(0, 1000);
/// Bounds of the time between the start of a catalog's machines and the readiness of those before them, in seconds.
pub const START_DELAY_SECONDS: Bounds = Bounds::count(0, 3600);
/// Bounds of the time for which a rollout spares claimed machines, in seconds.
pub const CLAIM_GRACE_SECONDS: Bounds = Bounds::count(0, 30 * DAY);
/// Bounds of the time without progress after which a rollout is stalled, in seconds.
pub const DEADLINE_SECONDS: Bounds = Bounds::count(1, 7 * DAY);
/// Bounds of the number of machines that a rollout restarts at the same time.
pub const BATCH: Bounds = Bounds::count(1, 100_000);
/// Bounds of the duration of a claim, in seconds; 0: until it is released.
pub const TTL_SECONDS: Bounds = Bounds::count(0, 366 * DAY);
/// Bounds of the number of an image's version.
pub const VERSION: Bounds = Bounds::count(1, u32::MAX as u64);
/// Bounds of the number of objects on a page.
pub const LIMIT: Bounds = Bounds::count(1, crate::MOST_ON_A_PAGE as u64);
/// Bounds of the number of past events with which a stream begins.
pub const PAST_EVENTS: Bounds = Bounds::count(0, crate::MOST_ON_A_PAGE as u64);
/// Bounds of the time for which a response is delayed, in seconds.
pub const WAIT_SECONDS: Bounds = Bounds::count(0, 30);
/// Bounds of the time for which the end of a program in a guest is waited for, in seconds.
pub const TIME_LIMIT_SECONDS: Bounds = Bounds::count(1, 3600);
/// Bounds of the part of a history, in seconds.
pub const HISTORY_SECONDS: Bounds = Bounds::count(1, DAY);
/// Bounds of the grace and the gap of a collection of garbage, in seconds: below an hour a push in progress could be taken for an
/// interrupted one.
pub const COLLECTION_SECONDS: Bounds = Bounds::count(3600, 366 * DAY);
/// Bounds of the time since its last sign of life after which a host counts as lost, in seconds. Its lease lasts 15 seconds.
pub const LOST_AFTER_SECONDS: Bounds = Bounds::count(20, DAY);
/// Bounds of the number of hosts that have all of an image.
pub const COPIES: Bounds = Bounds::count(0, 100_000);
/// Bounds of numbers of operations and events.
const NUMBER: Bounds = Bounds::count(0, i64::MAX as u64);
/// Bounds of a share of a whole.
const SHARE: Bounds = Bounds::count(0, 1);

impl Bounds {
    const fn count(least: u64, most: u64) -> Bounds {
        Bounds { least, most, step: 1, is_size: false }
    }

    const fn bytes(least: u64, most: u64, step: u64) -> Bounds {
        Bounds { least, most, step, is_size: true }
    }

    const fn of(range: &RangeInclusive<u64>, is_size: bool) -> Bounds {
        Bounds { least: *range.start(), most: *range.end(), step: 1, is_size }
    }

    /// Refuses a value that is out of bounds. `name` is for the error.
    pub fn check(&self, name: &str, value: u64) -> Result<(), OutOfBounds> {
        self.check_value(value).map_err(|OutOfBounds(fault)| OutOfBounds(format!("{name}: {fault}")))
    }

    /// Refuses a value that is out of bounds, for who names it in the error already.
    pub fn check_value(&self, value: u64) -> Result<(), OutOfBounds> {
        match (self.least..=self.most).contains(&value) && value.is_multiple_of(self.step) {
            true => Ok(()),
            false => Err(OutOfBounds(format!("allowed is {self}, not {}", self.text(value)))),
        }
    }

    /// Adds the bounds to the help of an option.
    pub fn help(&self, text: &str) -> String {
        format!("{text} ({self})")
    }

    fn text(&self, value: u64) -> String {
        if self.is_size { size_text(value) } else { value.to_string() }
    }
}

/// `1 to 255`, `64M to 16T in whole 1M`.
impl fmt::Display for Bounds {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} to {}", self.text(self.least), self.text(self.most))?;
        match self.step {
            1 => Ok(()),
            MIB => f.write_str(", whole MiB"),
            step => write!(f, ", multiples of {}", self.text(step)),
        }
    }
}

/// Error for a number that is out of bounds.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct OutOfBounds(String);

/// Body of a request with bounded numbers.
pub trait Bounded {
    /// Refuses the body if a number is out of bounds.
    fn check_bounds(&self) -> Result<(), OutOfBounds>;
}

/// Type of a field with bounds.
trait Number {
    fn check(&self, name: &str, bounds: &Bounds) -> Result<(), OutOfBounds>;
}

impl Number for u8 {
    fn check(&self, name: &str, bounds: &Bounds) -> Result<(), OutOfBounds> {
        bounds.check(name, (*self).into())
    }
}

impl Number for u64 {
    fn check(&self, name: &str, bounds: &Bounds) -> Result<(), OutOfBounds> {
        bounds.check(name, *self)
    }
}

impl Number for u32 {
    fn check(&self, name: &str, bounds: &Bounds) -> Result<(), OutOfBounds> {
        bounds.check(name, (*self).into())
    }
}

impl<N: Number> Number for Option<N> {
    fn check(&self, name: &str, bounds: &Bounds) -> Result<(), OutOfBounds> {
        self.iter().try_for_each(|number| number.check(name, bounds))
    }
}

impl Number for RolloutStrategy {
    fn check(&self, name: &str, bounds: &Bounds) -> Result<(), OutOfBounds> {
        match self {
            RolloutStrategy::Batch(machines) => machines.check(&format!("{name}.batch"), bounds),
            RolloutStrategy::NextStart | RolloutStrategy::Now => Ok(()),
        }
    }
}

macro_rules! bounded {
    // Behind a semicolon: bodies that are part of this one.
    ($($body:ident { $($field:ident: $bounds:ident),* $(; $($part:ident),*)? })*) => {
        $(impl Bounded for $body {
            fn check_bounds(&self) -> Result<(), OutOfBounds> {
                $($(self.$part.check_bounds()?;)*)?
                $(self.$field.check(stringify!($field), &$bounds)?;)*
                Ok(())
            }
        })*

        /// Bounds of fields: schema, property, bounds.
        const BODIES: &[(&str, &str, &Bounds)] =
            &[$($((stringify!($body), stringify!($field), &$bounds),)*)*];
    };
}

bounded! {
    DiskSettings {
        ram_bytes: RAM_BYTES, overflow_bytes: OVERFLOW_BYTES, warn_at: PERCENT, critical_at: PERCENT, iops: IOPS,
        iops_burst: IOPS, bandwidth_bytes: BANDWIDTH_BYTES, bandwidth_burst_bytes: BANDWIDTH_BYTES
    }
    Hardware { vcpus: VCPUS, sockets: SOCKETS, memory_bytes: MEMORY_BYTES }
    CatalogSpec {
        count: MACHINES, warm: MACHINES, ram_guarantee_bytes: RAM_GUARANTEE_BYTES, data_disk_bytes: DISK_BYTES, scratch_disk_bytes: DISK_BYTES,
        grace_seconds: GRACE_SECONDS, claim_ttl_seconds: TTL_SECONDS, start_order: START_ORDER,
        start_delay_seconds: START_DELAY_SECONDS; disk, hardware
    }
    FleetSettings { lost_after_seconds: LOST_AFTER_SECONDS, min_ready: MACHINES }
    CatalogUpdate {
        rollout: BATCH, claim_grace_seconds: CLAIM_GRACE_SECONDS, deadline_seconds: DEADLINE_SECONDS, max_failed: MACHINES
    }
    CatalogRollback {
        to: VERSION, rollout: BATCH, claim_grace_seconds: CLAIM_GRACE_SECONDS, deadline_seconds: DEADLINE_SECONDS,
        max_failed: MACHINES
    }
    RolloutChange {}
    NewMachine { size_bytes: DISK_BYTES }
    MachineSize { size_bytes: DISK_BYTES }
    MachineAction { grace_seconds: GRACE_SECONDS }
    NewClaim { ttl_seconds: TTL_SECONDS }
    ClaimRenewal { ttl_seconds: TTL_SECONDS }
    VersionChoice { version: VERSION }
    ImageImport {}
    ImageDownload {}
    ImageCommit {}
    ImagePull {}
    ImagePush {}
    NewHostAction {}
    Registry {}
    RegistryCollection { grace_seconds: COLLECTION_SECONDS, gap_seconds: COLLECTION_SECONDS }
    StoreFolder {}
    Empty {}
    FleetEventRequest { limit: PAST_EVENTS }
    NewFleet {}
    NewFleetImage { full_copies: COPIES }
    PlacerChange {}
    FleetHostChange {}
    FleetCatalogUpdate { version: VERSION, strategy: BATCH, max_failed: MACHINES, deadline_seconds: DEADLINE_SECONDS }
    FleetCatalogRollback { to: VERSION }
}

impl Bounded for FleetCatalogSpec {
    fn check_bounds(&self) -> Result<(), OutOfBounds> {
        self.catalog.check_bounds()?;
        self.fleet.check_bounds()
    }
}

impl Bounded for NewFleetCatalog {
    fn check_bounds(&self) -> Result<(), OutOfBounds> {
        self.spec.check_bounds()
    }
}

impl Bounded for NewCatalog {
    fn check_bounds(&self) -> Result<(), OutOfBounds> {
        self.spec.check_bounds()
    }
}

/// Returns the bounds of a field of a request body.
pub fn of_field(schema: &str, property: &str) -> Option<&'static Bounds> {
    match (schema, property) {
        ("RolloutStrategy", "batch") => return Some(&BATCH),
        ("GuestProgram", "time_limit_seconds") => return Some(&TIME_LIMIT_SECONDS),
        _ => {}
    }
    // The settings of its disks and machines are fields of a catalog's own.
    let bodies: &[&str] = match schema {
        "CatalogSpec" => &["CatalogSpec", "DiskSettings", "Hardware"],
        "FleetCatalogSpec" => &["CatalogSpec", "DiskSettings", "FleetSettings", "Hardware"],
        _ => &[schema],
    };
    let row = BODIES.iter().find(|(body, field, _)| bodies.contains(body) && *field == property);
    row.map(|(_, _, bounds)| *bounds)
}

/// Returns the bounds of a parameter in a path or a query.
pub fn of_parameter(name: &str) -> Option<&'static Bounds> {
    match name {
        "limit" => Some(&LIMIT),
        "wait" => Some(&WAIT_SECONDS),
        "seconds" => Some(&HISTORY_SECONDS),
        "version" => Some(&VERSION),
        "id" | "after" | "before" | "attempt" => Some(&NUMBER),
        "goal" => Some(&SHARE),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn spec(settings: &str) -> Result<(), String> {
        let spec = format!(r#"{{"image": "debian", {settings}}}"#);
        serde_json::from_str::<CatalogSpec>(&spec).unwrap().check_bounds().map_err(|e| e.to_string())
    }

    #[test]
    fn what_is_out_of_bounds_is_refused_with_them() {
        for (settings, why) in [
            (
                r#""memory_bytes": 9223372036854775808"#,
                "memory_bytes: allowed is 64M to 16T, whole MiB, not 8388608T",
            ),
            (r#""memory_bytes": 67108865"#, "memory_bytes: allowed is 64M to 16T, whole MiB, not 67108865"),
            (r#""vcpus": 0"#, "vcpus: allowed is 1 to 255, not 0"),
            (r#""vcpus": 1000000"#, "vcpus: allowed is 1 to 255, not 1000000"),
            (r#""count": 100001"#, "count: allowed is 0 to 100000, not 100001"),
            (r#""iops": 18446744073709551615"#, "iops: allowed is 0 to 1000000000"),
            (r#""overflow_bytes": 1"#, "overflow_bytes: allowed is 16M to 4T, not 1"),
            (r#""grace_seconds": 3601"#, "grace_seconds: allowed is 0 to 3600, not 3601"),
        ] {
            assert!(spec(settings).unwrap_err().starts_with(why), "{settings}: {:?}", spec(settings));
        }
        spec(r#""memory_bytes": 67108864, "vcpus": 255, "count": 100000, "iops": 0"#).unwrap();
        let batch = |machines: u32| -> CatalogUpdate {
            let update = format!(r#"{{"image": "debian", "rollout": {{"batch": {machines}}}}}"#);
            serde_json::from_str(&update).unwrap()
        };
        batch(1).check_bounds().unwrap();
        let error = batch(0).check_bounds().unwrap_err();
        assert_eq!(error.to_string(), "rollout.batch: allowed is 1 to 100000, not 0");
    }
}
