//! Where a disk was written most since its last reset: the answer. Owns the JSON keys.

use serde::{Deserialize, Serialize};

/// Version of the keys.
const SCHEMA: u32 = 1;
/// What was written, most first.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
#[expect(missing_docs, reason = "each key is described in docs/counters.md")]
pub struct Dirty {
    pub schema: u32,
    pub serial: String,
    pub generation: u64,
    pub size_bytes: u64,
    pub region_bytes: u64,
    pub written_bytes: u64,
    pub ranges_total: u64,
    pub ranges: Vec<DirtyRange>,
}

/// Adjacent regions that were written alike.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
#[expect(missing_docs, reason = "as in Dirty")]
pub struct DirtyRange {
    pub offset_bytes: u64,
    pub length_bytes: u64,
    pub written_bytes: u64,
}

impl Dirty {
    /// Most rows that can be asked for.
    pub const MAX_ROWS: u32 = 4096;
    /// Version of the keys.
    pub const SCHEMA: u32 = SCHEMA;
    /// Rows when nothing is said.
    pub const ROWS_DEFAULT: u32 = 20;
}
