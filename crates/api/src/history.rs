//! History: what figures were in the last hour and day.

use jiff::Timestamp;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// Names of all series. Up to `stalls` they are rates per second, after it levels.
pub const HISTORY_SERIES: [&str; 11] = [
    "guest_read_bytes",
    "guest_written_bytes",
    "ram_read_bytes",
    "ram_written_bytes",
    "overflow_read_bytes",
    "overflow_written_bytes",
    "base_read_bytes",
    "stalls",
    "ram_used_bytes",
    "overflow_used_bytes",
    "fill",
];

/// What figures of an object were. It is kept in memory, and begins anew with the daemon.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct History {
    /// Time of the last values.
    #[schema(value_type = String, format = DateTime)]
    pub until: Timestamp,
    /// Seconds from a value to the next one.
    pub step_seconds: u32,
    /// The series, all of one length.
    pub series: Vec<HistorySeries>,
}

/// The values of one figure.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct HistorySeries {
    /// Name of the series: `guest_read_bytes`, `guest_written_bytes`, `ram_read_bytes`, `ram_written_bytes`, `overflow_read_bytes`,
    /// `overflow_written_bytes` and `base_read_bytes` are bytes per second, `stalls` is writes per second that waited for space;
    /// `ram_used_bytes` and `overflow_used_bytes` are levels, and `fill`, from 0 to 1, is the level of the fullest write cache.
    pub name: String,
    /// The values, oldest first; null for what is not known.
    pub values: Vec<Option<f32>>,
}
