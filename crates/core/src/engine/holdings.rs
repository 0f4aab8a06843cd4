//! What a disk holds, as its figures say it. Figures only.

/// What a disk holds, in blocks, for whoever looks at its figures.
#[derive(Clone, Copy, Default)]
pub(crate) struct Holdings {
    pub ram: u64,
    pub ram_peak: u64,
    pub overflow: u64,
    /// Of the overflow file, or the file that is written in place.
    pub file: u64,
}
