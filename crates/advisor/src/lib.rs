//! How much RAM a write cache needs: from a trace of a disk's requests to its overflow at every size, in one pass.
//!
//! Owns the trace's format, its importers and the methods that count; serves no disk and starts nothing.
//!
//! ```
//! use spillway_advisor::{curve, import, lru};
//!
//! let text = "0,W,0,8192,1577808000000000\n0,R,4096,4096,1577808000000100\n";
//! let options = import::Options::default();
//! let mut lru = lru::Lru::new(options.disk_bytes);
//! for event in import::Import::new(text.as_bytes(), import::Format::Alibaba, options) {
//!     lru.event(&event?);
//! }
//! let curve = curve::Curve::new(&lru.profile(), curve::DEFAULT_GOAL);
//! assert_eq!(curve.totals.peak_live_blocks, 2);
//! # Ok::<(), import::ImportError>(())
//! ```
//!
//! [`lru`] is exact and takes about 32 bytes a block; [`shards`] goes along with a live disk; [`policy`] is what the product
//! itself would do. Why there are three: `docs/design/040-advisor.md`.

pub mod curve;
pub mod estimate;
mod event;
pub mod import;
mod limit;
pub mod lru;
mod overflow_peaks;
pub mod policy;
mod profile;
mod sample;
pub mod shards;
mod share;
mod stack;
pub mod trace;

pub use event::{BLOCK_BYTES, Event, MAX_DISK_BYTES, MAX_REQUEST_BLOCKS, MAX_REQUEST_BYTES, Operation, Step};
pub use limit::{limit_bytes, staying_blocks};
pub use profile::{Profile, Totals};
pub use share::share_budget;
