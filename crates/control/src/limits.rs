//! Changes of a disk that is served. Owns how it is seen whether one was carried out.

use crate::disk_settings::DiskSettings;
use serde_json::Value;

/// Whether the settings that were answered have the rates that were asked for: an earlier version knows none, and leaves
/// out what it does not know.
pub fn rate_is_met(change: &DiskSettings, answer: &Value) -> bool {
    let is_met = |name: &str, asked: Option<u64>| {
        asked.is_none_or(|asked| answer[name].as_u64().unwrap_or(0) == asked)
    };
    is_met("iops", change.iops) && is_met("bandwidth_bytes", change.bandwidth_bytes)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn a_rate_is_met_by_who_says_that_it_has_it() {
        let has = json!({ "ram_bytes": 1, "iops": 500, "iops_burst": 50, "bandwidth_bytes": 0 });
        let earlier = json!({ "ram_bytes": 1, "full": "pause" });
        for (iops, bandwidth_bytes, met, met_by_earlier) in [
            (Some(500), Some(0), true, false),
            (Some(500), None, true, false),
            (Some(400), Some(0), false, false),
            (None, Some(1 << 20), false, false),
            (Some(0), Some(0), false, true),
            (None, None, true, true),
        ] {
            let change =
                DiskSettings { iops, bandwidth_bytes, ram_bytes: Some(1), ..DiskSettings::default() };
            let found = [&has, &earlier].map(|answer| rate_is_met(&change, answer));
            assert_eq!(found, [met, met_by_earlier], "{iops:?} {bandwidth_bytes:?}");
        }
    }
}
