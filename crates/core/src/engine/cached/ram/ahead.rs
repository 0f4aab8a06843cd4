//! Counts of free slots that were made ready ahead of writes. Data only: `memory` decides what is made ready, and when.

/// Free slots that were made ready.
#[derive(Default)]
pub(crate) struct Ahead {
    /// How many of the free slots with memory were made ready and not used.
    pub slots: u32,
    /// Slots taken in this turn that had no memory, or would have had none; and when there were some.
    pub taken: u32,
    pub taken_ns: u64,
    /// In this turn adjacent slots were taken that had no memory, or were ready.
    pub filled: bool,
    /// Such writes have come recently, and not all slots that may be made ready are.
    pub to_fill: bool,
}
