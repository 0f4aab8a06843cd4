//! Limits that are to change while the disk serves. Owns what a mode has of them; the limits that hold are the disk's.
//!
//! Invariant: what is not named stays as it is.

use super::control::Answer;
use super::disk::Disk;
use crate::channel::Limits;
use serde::{Deserialize, Serialize};

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
    /// `pause` or `fail`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub full: Option<String>,
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
    /// The limits of a disk with this changed. An error says why it cannot be.
    pub(super) fn change(&self, disk: &Disk) -> Result<Limits, Answer> {
        if *self == LimitChange::default() {
            return Err(Answer::error("invalid", "nothing to change was named"));
        }
        let spec = &disk.spec;
        let (mode, without) = (spec.mode, |what: &str| {
            Err(Answer::error("refused", format!("mode {} has no {what}", spec.mode)))
        });
        if self.ram_bytes.is_some() && !mode.has_ram() {
            return without("RAM tier");
        }
        if self.overflow_bytes.is_some() && !mode.has_log() {
            return without("overflow limit");
        }
        let has_cache = mode.has_ram() || mode.has_log();
        if !has_cache && (self.full.is_some() || self.warn_at.is_some() || self.critical_at.is_some()) {
            return without("write cache that could be full");
        }
        let mut limits = disk.limits();
        match self.full.as_deref().map(str::parse) {
            Some(Ok(full)) => limits.full = full,
            Some(Err(e)) => return Err(Answer::error("invalid", e)),
            None => {}
        }
        limits.ram_bytes = self.ram_bytes.unwrap_or(limits.ram_bytes);
        limits.overflow_bytes = self.overflow_bytes.unwrap_or(limits.overflow_bytes);
        limits.warn_at = self.warn_at.unwrap_or(limits.warn_at);
        limits.critical_at = self.critical_at.unwrap_or(limits.critical_at);
        let rate = &mut limits.rate;
        for (is, wished, burst, wished_burst) in [
            (&mut rate.iops, self.iops, &mut rate.iops_burst, self.iops_burst),
            (
                &mut rate.bandwidth_bytes,
                self.bandwidth_bytes,
                &mut rate.bandwidth_burst_bytes,
                self.bandwidth_burst_bytes,
            ),
        ] {
            // A burst is of its rate: another rate of which no more is said has the usual one.
            *burst = wished_burst.unwrap_or(if wished.is_some() { 0 } else { *burst });
            *is = wished.unwrap_or(*is);
        }
        Ok(limits)
    }

    /// Whether the limits that were answered have the rates that were wished for: an earlier version knows none, and leaves
    /// out what it does not know.
    pub fn rate_is_met(&self, limits: &serde_json::Value) -> bool {
        let has = |name: &str| limits["rate"][name].as_u64().unwrap_or(0);
        let is_met = |name: &str, wished: Option<u64>| wished.is_none_or(|wished| has(name) == wished);
        is_met("iops", self.iops) && is_met("bandwidth_bytes", self.bandwidth_bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn a_rate_is_met_by_who_says_that_it_has_it() {
        let wish = |iops, bandwidth_bytes| LimitChange {
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
            let wish = wish(iops, bandwidth);
            let found = [&has, &earlier].map(|limits| wish.rate_is_met(limits));
            assert_eq!(found, [met, met_by_earlier], "{iops:?} {bandwidth:?}");
        }
    }
}
