//! Resources of the host for its machines: memory for their caches, turns to boot, space in its stores. Owns the promises and the
//! readings; allocates nothing itself.

pub mod boots;
pub mod budget;
pub mod memory;
pub mod space;
