//! Where a machine's disk was written most since its last reset. Owns the format; the disk counts.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// Ranges of a disk that its guest has written most since the last reset.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct DirtyRanges {
    /// Number of the disk's generation, which a reset raises.
    pub generation: u64,
    /// Size of the disk that the guest sees, in bytes.
    pub size_bytes: u64,
    /// Size of the regions in which writes are counted, in bytes.
    pub region_bytes: u64,
    /// Bytes that the guest has written since the reset, each as often as it was written.
    pub written_bytes: u64,
    /// Number of all ranges, with those that are not listed.
    pub ranges_total: u64,
    /// Ranges that were written most, in descending order.
    pub ranges: Vec<DirtyRange>,
}

/// Adjacent regions of a disk, none of which was written more than twice as much as another.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct DirtyRange {
    /// Offset of the range on the disk, in bytes.
    pub offset_bytes: u64,
    /// Length of the range on the disk, in bytes.
    pub length_bytes: u64,
    /// Bytes that were written there, each as often as it was written.
    pub written_bytes: u64,
}
