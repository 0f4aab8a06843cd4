//! A disposable disk as one guest sees it: a shared read-only base image, a block map, a bounded RAM tier and an overflow log.
//!
//! The core decides and does no I/O itself: requests and finished I/O go in, calls of the [`Io`] trait come out. It reads no
//! clock, has no thread and takes no lock, so that a model test, a simulator and a fuzzer run the very code that serves
//! guests.

mod admission;
mod attach;
mod check;
mod copy;
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
mod health;
mod io;
mod level;
mod level_watch;
mod lists;
mod map;
mod meta;
mod ops;
mod request;
mod run_queue;
mod serve;
mod shared;
mod table;
mod word_pages;

pub use copy::{copy_past_caches, is_zero, is_zero_now};
pub use disk::Disk;
pub use engine::cached::DataMemory;
pub use engine::in_place::StateMap;
pub use entry::{Entry, Place};
pub use error::{DiskError, Errno};
pub use io::{Event, GuestBuffers, Io, OpId, PARTS, PartId};
pub use level::{Level, Thresholds};
pub use map::ExtentSource;
pub use meta::{Meta, prefetch};
pub use request::{Operation, Request, Token};
pub use spillway_layout::{
    BLOCK_BYTES, BLOCK_SECTORS, Block, BlockState, CacheId, Counters, DiskSpec, FileMap, FullPolicy,
    Histogram, LAYOUT_VERSION, Layout, Location, LogShape, MAX_DISK_BYTES, MIN_SEGMENTS, Mode, Plane,
    REGION_BLOCKS, REGION_BYTES, RESET_MARK, RegionState, SECTOR_BYTES, STATE_PAGE_BLOCKS, Slot, Written,
    add, bytes_in_words, find_bad_state, get, set, state_map_bytes,
};
