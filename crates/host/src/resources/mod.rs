//! Resources of the host for its machines: memory for their caches, space in its stores. Owns the promises and the
//! readings; allocates nothing itself.

pub mod budget;
pub mod memory;
pub mod space;
