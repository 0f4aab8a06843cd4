//! What went where between two looks at a disk's counters (docs/counters.md).
//!
//! Owns the arithmetic over planes, and no disk. Invariant: what the collector or a merge read is never counted as
//! read for a guest.

use crate::disk::figure;
use anyhow::{Context, Result};
use serde::Serialize;
use serde_json::Value;

/// Differences of counters.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Flow {
    /// Reads and writes that guests completed.
    pub guest_requests: u64,
    /// Bytes that guests wrote.
    pub guest_written_bytes: u64,
    /// Bytes written to the overflow file, by eviction and collector.
    pub overflow_written_bytes: u64,
    /// Bytes that left the RAM tier for it.
    pub evicted_bytes: u64,
    /// Bytes read from it because a guest asked for them.
    pub overflow_guest_read_bytes: u64,
    /// Bytes that the collector read.
    pub collector_read_bytes: u64,
}

impl Flow {
    /// What went where between two looks, as `spillway stats --json` gives them.
    pub fn between(before: &Value, after: &Value) -> Result<Flow> {
        let grown = |key: &str| {
            let (from, to) = (figure(before, key)?, figure(after, key)?);
            to.checked_sub(from).with_context(|| format!("the counter {key} fell from {from} to {to}"))
        };
        let collector_read_bytes = grown("collector.read_bytes")?;
        Ok(Flow {
            guest_requests: grown("planes.guest.reads")? + grown("planes.guest.writes")?,
            guest_written_bytes: grown("planes.guest.written_bytes")?,
            overflow_written_bytes: grown("planes.overflow.written_bytes")?,
            evicted_bytes: grown("evictions.blocks")? * 4096,
            overflow_guest_read_bytes: grown("planes.overflow.read_bytes")?
                .saturating_sub(collector_read_bytes + grown("merges.overflow_bytes")?),
            collector_read_bytes,
        })
    }

    /// Bytes written to the overflow for each byte that guests wrote.
    pub fn write_amplification(&self) -> f64 {
        self.overflow_written_bytes as f64 / self.guest_written_bytes.max(1) as f64
    }

    /// Share of the guest's requests that read the overflow, where each request is one of `request_bytes`.
    pub fn overflow_read_share(&self, request_bytes: usize) -> f64 {
        self.overflow_guest_read_bytes as f64 / request_bytes as f64 / self.guest_requests.max(1) as f64
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn stats(n: u64) -> Value {
        json!({
            "planes": {
                "guest": { "reads": 20 * n, "writes": 80 * n, "written_bytes": 80 * 4096 * n },
                "overflow": { "read_bytes": (12 + 7 + 2) * 4096 * n, "written_bytes": 40 * 4096 * n },
            },
            "evictions": { "blocks": 32 * n },
            "collector": { "read_bytes": 7 * 4096 * n },
            "merges": { "overflow_bytes": 2 * 4096 * n },
        })
    }

    #[test]
    fn guest_reads_of_the_overflow_are_told_from_the_collectors() {
        let flow = Flow::between(&stats(3), &stats(5)).unwrap();
        assert_eq!(flow.guest_requests, 200);
        assert_eq!(flow.evicted_bytes, 64 * 4096);
        assert_eq!(flow.collector_read_bytes, 14 * 4096);
        assert!((flow.overflow_read_share(4096) - 0.12).abs() < 1e-9, "{flow:?}");
        assert!((flow.write_amplification() - 0.5).abs() < 1e-9, "{flow:?}");
    }

    #[test]
    fn counters_that_fall_or_are_missing_are_an_error() {
        assert!(Flow::between(&stats(2), &stats(1)).unwrap_err().to_string().contains("fell"));
        assert!(Flow::between(&stats(1), &json!({})).is_err());
    }
}
