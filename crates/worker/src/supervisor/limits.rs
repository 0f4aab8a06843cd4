//! Limits that are to change while the disk serves. Owns what a mode has of them; the limits that hold are the disk's.

use super::disk::Disk;
use spillway_control::{Answer, LimitChange, Limits};

/// The limits of a disk with this changed. An error says why it cannot be.
pub(super) fn changed(change: &LimitChange, disk: &Disk) -> Result<Limits, Answer> {
    if *change == LimitChange::default() {
        return Err(Answer::error("invalid", "nothing to change was named"));
    }
    let spec = &disk.spec;
    let (mode, without) =
        (spec.mode, |what: &str| Err(Answer::error("refused", format!("mode {} has no {what}", spec.mode))));
    if change.ram_bytes.is_some() && !mode.has_ram() {
        return without("RAM tier");
    }
    if change.overflow_bytes.is_some() && !mode.has_log() {
        return without("overflow limit");
    }
    let has_cache = mode.has_ram() || mode.has_log();
    if !has_cache && (change.full.is_some() || change.warn_at.is_some() || change.critical_at.is_some()) {
        return without("write cache that could be full");
    }
    let mut limits = disk.limits();
    limits.full = change.full.unwrap_or(limits.full);
    limits.ram_bytes = change.ram_bytes.unwrap_or(limits.ram_bytes);
    limits.overflow_bytes = change.overflow_bytes.unwrap_or(limits.overflow_bytes);
    limits.warn_at = change.warn_at.unwrap_or(limits.warn_at);
    limits.critical_at = change.critical_at.unwrap_or(limits.critical_at);
    let rate = &mut limits.rate;
    for (is, asked, burst, asked_burst) in [
        (&mut rate.iops, change.iops, &mut rate.iops_burst, change.iops_burst),
        (
            &mut rate.bandwidth_bytes,
            change.bandwidth_bytes,
            &mut rate.bandwidth_burst_bytes,
            change.bandwidth_burst_bytes,
        ),
    ] {
        // A burst is of its rate: another rate of which no more is said has the usual one.
        *burst = asked_burst.unwrap_or(if asked.is_some() { 0 } else { *burst });
        *is = asked.unwrap_or(*is);
    }
    Ok(limits)
}
