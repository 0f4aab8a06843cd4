//! The figures of a disk. Owns their stable JSON keys; never derives a rate.
//!
//! Invariant: keys are only ever added; a change of meaning raises [`SCHEMA`]. `docs/counters.md` lists them.

use serde::{Deserialize, Serialize};

/// Version of the keys.
pub const SCHEMA: u32 = 1;

/// Chunks of a streamed image that a disk has read.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Touched {
    /// Their numbers, in the order of their first use: the first 8192.
    pub chunks: Vec<u32>,
}

/// All counters and gauges of a disk at one moment.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
#[expect(missing_docs, reason = "each key is described in docs/counters.md and in spillway_layout::Counters")]
pub struct Stats {
    pub schema: u32,
    pub serial: String,
    pub mode: String,
    pub full: String,
    pub size_bytes: u64,
    pub base_bytes: u64,
    pub generation: u64,
    pub worker_pid: u32,
    pub engine: String,
    pub landlock: u32,
    pub clients: u64,
    pub planes: Planes,
    pub ram: Ram,
    pub overflow: Overflow,
    pub map: Map,
    pub evictions: Evictions,
    pub promotions: Promotions,
    pub collector: Collector,
    pub merges: Merges,
    pub discards: Discards,
    pub write_zeroes: u64,
    pub flushes: u64,
    pub stalls: Stalls,
    pub throttled: Throttled,
    pub failed: Failed,
    pub latency: Latencies,
    pub inflight: u64,
    pub waiting: u64,
    pub resets: u64,
    pub restarts: u64,
    pub checksum_mismatches: u64,
    pub degraded: u64,
    pub level: u64,
    pub is_full: u64,
    pub chunks: Chunks,
}

macro_rules! keys {
    ($(#[$doc:meta] $name:ident { $($key:ident: $type:ty),+ $(,)? })+) => {$(
        #[$doc]
        #[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
        #[serde(default)]
        #[expect(missing_docs, reason = "as in Stats")]
        pub struct $name { $(pub $key: $type),+ }
    )+};
}

keys! {
    /// By place.
    Planes { guest: Plane, ram: Plane, overflow: Plane, base: BasePlane, zero: Plane }
    /// One place.
    Plane { reads: u64, writes: u64, read_bytes: u64, written_bytes: u64 }
    /// The base image: also what the host's page cache did not have.
    BasePlane {
        reads: u64, writes: u64, read_bytes: u64, written_bytes: u64,
        store_reads: u64, store_read_bytes: u64,
    }
    /// The RAM tier.
    Ram { used_bytes: u64, limit_bytes: u64, peak_bytes: u64, huge_bytes: u64 }
    /// The overflow (difference) file.
    Overflow {
        used_bytes: u64, file_bytes: u64, limit_bytes: u64, guest_bytes: u64, guest_blocks: u64,
        summaries: u64, lost_blocks: u64, segments_punched: u64, write_errors: u64, read_errors: u64,
    }
    /// The block map.
    Map { bytes: u64 }
    /// Chunks of a streamed image, by whether they were on this host when the disk read them for the first time.
    Chunks { asked: u64, found: u64, found_bytes: u64, missing: u64, stalls: u64, stalled: u64 }
    /// RAM tier to overflow.
    Evictions { background: u64, urgent: u64, blocks: u64 }
    /// Overflow to RAM tier.
    Promotions { blocks: u64 }
    /// Overflow to overflow.
    Collector { moved_blocks: u64, read_bytes: u64 }
    /// Reads that completed a partly written block.
    Merges { base_bytes: u64, overflow_bytes: u64 }
    /// Given back.
    Discards { count: u64, bytes: u64 }
    /// Writes that waited for space.
    Stalls { count: u64, ns: u64 }
    /// Times that requests waited for the rate limit.
    Throttled { count: u64, ns: u64 }
    /// Requests that ended with an error.
    Failed { requests: u64, read_bytes: u64, written_bytes: u64 }
    /// How long things took.
    Latencies {
        read: Latency, write: Latency, overflow_read: Latency, overflow_write: Latency, base_read: Latency,
        chunk: Latency,
    }
    /// One distribution.
    Latency { p50_ns: u64, p99_ns: u64, max_ns: u64, count: u64, sum_ns: u64 }
}
