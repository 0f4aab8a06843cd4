//! How much RAM a write cache needs: from a trace of a disk's requests to its overflow at every size, in one pass.
//!
//! Owns the trace's format, its importers and the engines that count; serves no disk and starts nothing.

pub mod curve;
pub mod estimate;
mod event;
pub mod import;
mod limit;
pub mod lru;
pub mod policy;
mod profile;
mod sample;
pub mod shards;
mod share;
mod space;
mod stack;
pub mod trace;

pub use event::{BLOCK_BYTES, Event, MAX_DISK_BYTES, MAX_REQUEST_BLOCKS, MAX_REQUEST_BYTES, Operation, Step};
pub use limit::{free_blocks, limit_bytes, staying_blocks};
pub use profile::{Profile, Totals};
pub use share::share_budget;
