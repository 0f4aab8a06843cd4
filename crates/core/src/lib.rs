//! A disposable disk as one guest sees it: a shared read-only base image, a block map, a bounded RAM tier and an overflow log.
//!
//! The core decides and does no I/O itself: requests and finished I/O go in, calls of the [`Io`] trait come out. It reads no
//! clock, has no thread and takes no lock, so that a model test, a simulator and a fuzzer run the very code that serves
//! guests.

mod admission;
mod attach;
mod check;
mod copy;
mod counters;
#[cfg(feature = "crash-points")]
pub mod crash_points;
#[cfg(not(feature = "crash-points"))]
mod crash_points {
    /// A store to shared memory: nothing stops here.
    #[inline(always)]
    pub(crate) fn store() {}
}
mod disk;
mod drain;
mod engine;
mod entry;
mod error;
mod generation;
mod health;
mod histogram;
mod io;
mod level;
mod level_watch;
mod map;
mod meta;
mod ops;
mod page_cache;
mod request;
mod serve;
mod shared;
mod spec;
mod table;
mod units;
mod word_pages;
mod written;

pub use copy::{copy_past_caches, is_zero, is_zero_now};
pub use counters::{Counters, Plane, add, get, set};
pub use disk::Disk;
pub use engine::cached::DataMemory;
pub use engine::in_place::{
    BlockState, RESET_MARK, STATE_PAGE_BLOCKS, StateMap, find_bad_state, state_map_bytes,
};
pub use entry::{Entry, Place};
pub use error::{DiskError, Errno};
pub use histogram::Histogram;
pub use io::{Event, GuestBuffers, Io, OpId, PARTS, PartId};
pub use level::{Level, Thresholds};
pub use map::ExtentSource;
pub use meta::{LAYOUT_VERSION, Layout, Meta, RegionState, prefetch};
pub use page_cache::{CacheId, FileMap};
pub use request::{Operation, Request, Token};
pub use spec::{DiskSpec, FullPolicy, LogShape, MIN_SEGMENTS, Mode};
pub use units::{
    BLOCK_BYTES, BLOCK_SECTORS, Block, Location, MAX_DISK_BYTES, REGION_BLOCKS, REGION_BYTES, SECTOR_BYTES,
    Slot, bytes_in_words,
};
pub use written::Written;
