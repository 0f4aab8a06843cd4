//! Limits of a disk: those that hold, and those that are to change while it serves.
//!
//! Invariant: what a change does not name stays as it is.

use crate::bytes;
use serde::{Deserialize, Serialize};
use spillway_layout::FullPolicy;
use std::fmt;

/// How much a disk may do in a second, and at once beyond that.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Rate {
    /// Requests a second; 0: as many as it can.
    pub iops: u64,
    /// Requests that may begin at once; 0: what a tenth of a second allows.
    pub iops_burst: u64,
    /// Bytes of reads and writes a second; 0: as many as it can.
    pub bandwidth_bytes: u64,
    /// Bytes that may begin at once; 0: what a tenth of a second allows.
    pub bandwidth_burst_bytes: u64,
}

impl fmt::Display for Rate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (self.iops, self.bandwidth_bytes) {
            (0, 0) => f.write_str("no limit of its rate"),
            (iops, 0) => write!(f, "at most {iops} requests/s"),
            (0, bandwidth) => write!(f, "at most {}/s", bytes(bandwidth)),
            (iops, bandwidth) => write!(f, "at most {iops} requests/s and {}/s", bytes(bandwidth)),
        }
    }
}

/// What can be changed while a disk is served.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Limits {
    /// Limit of the RAM tier; 0 in modes without one.
    pub ram_bytes: u64,
    /// Limit of the overflow file; 0 in modes without one.
    pub overflow_bytes: u64,
    /// What happens to a write that finds no room.
    pub full: FullPolicy,
    /// From how many per cent of the write cache on there is a warning.
    pub warn_at: u8,
    /// The same for critical.
    pub critical_at: u8,
    /// How much it may do in a second.
    pub rate: Rate,
}

/// What is to be changed; the rest stays.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct LimitChange {
    /// Limit of the RAM tier, in bytes.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ram_bytes: Option<u64>,
    /// Limit of the overflow file, in bytes.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub overflow_bytes: Option<u64>,
    /// What happens to a write that finds no room.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub full: Option<FullPolicy>,
    /// From how many per cent of the write cache on there is a warning.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub warn_at: Option<u8>,
    /// The same for critical.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub critical_at: Option<u8>,
    /// Requests a second; 0: as many as it can. With `iops_burst` left out the burst is the usual one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub iops: Option<u64>,
    /// Requests that may begin at once; 0: what a tenth of a second allows.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub iops_burst: Option<u64>,
    /// Bytes of reads and writes a second; 0: as many as it can.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub bandwidth_bytes: Option<u64>,
    /// Bytes that may begin at once; 0: what a tenth of a second allows.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub bandwidth_burst_bytes: Option<u64>,
}

impl LimitChange {
    /// Whether the limits that were answered have the rates that were asked for: an earlier version knows none, and leaves
    /// out what it does not know.
    pub fn rate_is_met(&self, limits: &serde_json::Value) -> bool {
        let has = |name: &str| limits["rate"][name].as_u64().unwrap_or(0);
        let is_met = |name: &str, asked: Option<u64>| asked.is_none_or(|asked| has(name) == asked);
        is_met("iops", self.iops) && is_met("bandwidth_bytes", self.bandwidth_bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn a_rate_is_met_by_who_says_that_it_has_it() {
        let change_of = |iops, bandwidth_bytes| LimitChange {
            iops,
            bandwidth_bytes,
            ram_bytes: Some(1),
            ..LimitChange::default()
        };
        let has = json!({ "ram_bytes": 1, "rate": { "iops": 500, "iops_burst": 50, "bandwidth_bytes": 0 } });
        let earlier = json!({ "ram_bytes": 1, "full": "pause" });
        for (iops, bandwidth, met, met_by_earlier) in [
            (Some(500), Some(0), true, false),
            (Some(500), None, true, false),
            (Some(400), Some(0), false, false),
            (None, Some(1 << 20), false, false),
            (Some(0), Some(0), false, true),
            (None, None, true, true),
        ] {
            let change = change_of(iops, bandwidth);
            let found = [&has, &earlier].map(|limits| change.rate_is_met(limits));
            assert_eq!(found, [met, met_by_earlier], "{iops:?} {bandwidth:?}");
        }
    }
}
