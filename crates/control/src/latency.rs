//! How long the requests of a disk took, as histograms: the answer to [`crate::Request::Latency`]. Owns the JSON keys.
//!
//! Counts only grow. Who has two answers of one disk subtracts them, and has the percentiles of the time between; percentiles
//! since the disk's start, as [`crate::Stats`] has them, hide what has become slow an hour later.

use serde::{Deserialize, Serialize};

/// How long the requests of a disk took since it was created.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
#[serde(default)]
pub struct DiskLatency {
    /// Process id of the disk. The counts of another process begin at 0.
    pub disk_pid: u32,
    /// Reads of the guest, from their acceptance to their completion.
    pub read: LatencyHistogram,
    /// Writes of the guest, from their acceptance to their completion.
    pub write: LatencyHistogram,
    /// Reads of the overflow or difference file, as the host saw them.
    pub overflow_read: LatencyHistogram,
    /// Writes of the overflow or difference file, as the host saw them.
    pub overflow_write: LatencyHistogram,
    /// Reads of the base image that had to wait for its store.
    pub base_read: LatencyHistogram,
    /// Waits for chunks of a streamed image.
    pub chunk: LatencyHistogram,
}

/// A histogram of durations. There are 16 buckets for each power of two, so that the bound of a percentile is at most 1/16 too large.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
#[serde(default)]
pub struct LatencyHistogram {
    /// Greatest durations of the buckets that have counts, in nanoseconds, ascending. From 18 minutes on all are in the last one.
    pub bounds_ns: Vec<u64>,
    /// Numbers of requests in these buckets, in the same order.
    pub counts: Vec<u64>,
}

impl FromIterator<(u64, u64)> for LatencyHistogram {
    fn from_iter<I: IntoIterator<Item = (u64, u64)>>(buckets: I) -> LatencyHistogram {
        let (bounds_ns, counts) = buckets.into_iter().unzip();
        LatencyHistogram { bounds_ns, counts }
    }
}
