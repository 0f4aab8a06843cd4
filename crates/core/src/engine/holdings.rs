//! The space that a disk uses, for its gauges. Data only.

/// The space that a disk uses, in blocks.
#[derive(Clone, Copy, Default)]
pub(crate) struct Holdings {
    pub ram: u64,
    pub ram_peak: u64,
    pub overflow: u64,
    /// Of the overflow file, or the file that is written in place.
    pub file: u64,
}
