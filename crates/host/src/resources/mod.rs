//! What the host has for its machines: memory for their caches, room in its stores. Owns who was promised what, and how
//! much of it is left; gives nothing itself.

pub mod budget;
pub mod memory;
pub mod space;
