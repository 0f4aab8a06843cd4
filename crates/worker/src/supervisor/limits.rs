//! Limits that change while the disk serves: checked against the host here, carried out by the worker. Owns the
//! change under way; the limits that hold are the disk's.
//!
//! Invariant: the disk's limits are those that a worker has accepted; one that starts anew is told them, and then
//! of a change under way.

use super::bytes;
use super::control::Answer;
use super::event_loop::Supervisor;
use crate::channel::{Limits, ToWorker};
use serde::{Deserialize, Serialize};

/// What is to be changed; the rest stays.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Wish {
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

impl Wish {
    /// Whether the limits that were answered have the rates that were wished for: an earlier version knows none, and leaves
    /// out what it does not know.
    pub fn rate_is_met(&self, limits: &serde_json::Value) -> bool {
        let has = |name: &str| limits["rate"][name].as_u64().unwrap_or(0);
        let is_met = |name: &str, wished: Option<u64>| wished.is_none_or(|wished| has(name) == wished);
        is_met("iops", self.iops) && is_met("bandwidth_bytes", self.bandwidth_bytes)
    }
}

/// A change under way.
#[derive(Debug)]
pub(super) struct Change {
    by: u64,
    limits: Limits,
}

impl Supervisor {
    /// Begins. `Some`: it cannot be, and nothing has changed.
    pub(super) fn begin_change(&mut self, by: u64, wish: &Wish) -> Option<Answer> {
        if self.change.is_some() || self.reset.is_some() || self.upgrade.is_some() || !self.life.serving {
            return Some(Answer::error("busy", "another change or a restart is under way: try again"));
        }
        if *wish == Wish::default() {
            return Some(Answer::error("invalid", "nothing to change was named"));
        }
        let spec = &self.disk.spec;
        let (mode, without) = (spec.mode, |what: &str| {
            Some(Answer::error("refused", format!("mode {} has no {what}", spec.mode)))
        });
        if wish.ram_bytes.is_some() && !mode.has_ram() {
            return without("RAM tier");
        }
        if wish.overflow_bytes.is_some() && !mode.has_log() {
            return without("overflow limit");
        }
        let has_cache = mode.has_ram() || mode.has_log();
        if !has_cache && (wish.full.is_some() || wish.warn_at.is_some() || wish.critical_at.is_some()) {
            return without("write cache that could be full");
        }
        let mut limits = self.disk.limits();
        match wish.full.as_deref().map(str::parse) {
            Some(Ok(full)) => limits.full = full,
            Some(Err(e)) => return Some(Answer::error("invalid", e)),
            None => {}
        }
        limits.ram_bytes = wish.ram_bytes.unwrap_or(limits.ram_bytes);
        limits.overflow_bytes = wish.overflow_bytes.unwrap_or(limits.overflow_bytes);
        limits.warn_at = wish.warn_at.unwrap_or(limits.warn_at);
        limits.critical_at = wish.critical_at.unwrap_or(limits.critical_at);
        let rate = &mut limits.rate;
        for (is, wished, burst, wished_burst) in [
            (&mut rate.iops, wish.iops, &mut rate.iops_burst, wish.iops_burst),
            (
                &mut rate.bandwidth_bytes,
                wish.bandwidth_bytes,
                &mut rate.bandwidth_burst_bytes,
                wish.bandwidth_burst_bytes,
            ),
        ] {
            // A burst is of its rate: another rate of which no more is said has the usual one.
            *burst = wished_burst.unwrap_or(if wished.is_some() { 0 } else { *burst });
            *is = wished.unwrap_or(*is);
        }
        if let Err(e) = self.disk.make_room_for(&limits, self.window.read().ram.used_bytes) {
            return Some(Answer::error("refused", e.message));
        }
        self.tell(ToWorker::Set(limits), Vec::new());
        self.change = Some(Change { by, limits });
        None
    }

    /// The worker has accepted it, or not.
    pub(super) fn on_change_done(&mut self, result: Result<(), String>) {
        let Some(Change { by, limits }) = self.change.take() else { return };
        let answer = match result {
            Ok(()) => {
                self.disk.set_limits(limits);
                let Limits { ram_bytes, overflow_bytes, full, warn_at, critical_at, rate } = limits;
                let (ram, overflow, full) = (bytes(ram_bytes), bytes(overflow_bytes), full.name());
                let text = format!(
                    "limits: RAM {ram}, overflow {overflow}, when full {full}, warning at {warn_at}%, critical at {critical_at}%, {rate}"
                );
                self.announce("limits", &text);
                Answer::Ok(serde_json::to_value(limits).expect("plain numbers and text"))
            }
            Err(why) => Answer::error("refused", why),
        };
        self.answer(by, &answer);
    }

    /// A worker serves anew: a change that its predecessor left is asked for again.
    pub(super) fn resume_change(&mut self) {
        if let Some(Change { limits, .. }) = &self.change {
            let limits = *limits;
            self.tell(ToWorker::Set(limits), Vec::new());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn a_rate_is_met_by_who_says_that_it_has_it() {
        let wish =
            |iops, bandwidth_bytes| Wish { iops, bandwidth_bytes, ram_bytes: Some(1), ..Wish::default() };
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
