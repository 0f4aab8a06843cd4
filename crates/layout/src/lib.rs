//! Layout of a disk's shared memory and files, and the units and types that all crates share.
//!
//! Owns formats and vocabulary, so that programs which only look at a disk, or ask for one, need nothing that serves it.
//! Never does I/O, and never decides what happens to a request.

mod counters;
mod file_map;
mod generation;
mod histogram;
mod image;
mod memory;
pub mod persistent_file;
mod spec;
mod states;
mod units;
mod written;

pub use counters::{Balance, Counters, Plane, add, get, set};
pub use file_map::{CacheId, FileMap};
pub use generation::{generation_of, is_sealed, seal};
pub use histogram::Histogram;
pub use image::{BaseCache, ImageFormat};
pub use memory::{Header, LAYOUT_VERSION, Layout, MAGIC, RegionState, SegmentMark};
pub use spec::{DiskSpec, FullPolicy, LogShape, MIN_SEGMENTS, Mode};
pub use states::{
    BlockState, RESET_MARK, STATE_LOW_BITS, STATE_PAGE_BLOCKS, STATE_WORD_BLOCKS, find_bad_state,
    state_map_bytes,
};
pub use units::{
    BLOCK_BYTES, BLOCK_SECTORS, Block, Location, MAX_DISK_BYTES, REGION_BLOCKS, REGION_BYTES, SECTOR_BYTES,
    Slot, bytes_in_words,
};
pub use written::Written;
