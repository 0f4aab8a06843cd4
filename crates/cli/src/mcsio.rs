//! The figures under the names of the performance object "Citrix MCS Storage Driver", for people who know those.
//!
//! Invariant: the same figures as in every other view; only the names differ.

use crate::table::percent;
use serde_json::Value;
use spillway_control::counters::{Counter, of_mcsio};
use spillway_control::{Stats, bytes};
use std::fmt::Write;

/// The limit of what has one.
fn whole(counter: &Counter, stats: &Stats) -> Option<u64> {
    match counter.key {
        "ram.used_bytes" => Some(stats.ram.limit_bytes),
        "overflow.used_bytes" => Some(stats.overflow.limit_bytes),
        _ => None,
    }
}

/// An object of name and value.
pub fn json(stats: &Stats) -> Value {
    of_mcsio().map(|(name, counter)| (name.to_owned(), Value::from((counter.value)(stats)))).collect()
}

/// A table, with the per cent used of what has a size.
pub fn table(stats: &Stats) -> String {
    let mut out = String::from("Citrix MCS Storage Driver\n");
    for (name, counter) in of_mcsio() {
        let value = (counter.value)(stats);
        let used =
            whole(counter, stats).filter(|&w| w > 0).map(|whole| format!("{} used", percent(value, whole)));
        let line = format!("  {name:<26} {value:>18} {:>12}  {}", bytes(value), used.unwrap_or_default());
        let _ = writeln!(out, "{}", line.trim_end());
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_name_is_there_and_what_has_a_size_has_its_per_cent() {
        let mut stats = Stats::default();
        stats.ram.used_bytes = 128 << 20;
        stats.ram.limit_bytes = 256 << 20;
        stats.planes.overflow.written_bytes = 4096;
        let text = table(&stats);
        assert_eq!(text.lines().count(), 9);
        assert!(text.contains("50.0% used"), "{text}");
        let written = text.lines().find(|l| l.contains("Cache disk bytes written")).unwrap();
        assert!(written.contains("4096") && written.ends_with("4.0 KiB"), "{text}");
        let json = json(&stats);
        assert_eq!(json.as_object().unwrap().len(), 8);
        assert_eq!(json["Cache disk bytes written"], 4096);
        // Without a limit there is nothing to be used up.
        assert!(!text.lines().find(|l| l.contains("Cache disk used")).unwrap().contains('%'), "{text}");
    }
}
