//! What starts a disk and asks it: settings, the messages of its control socket and their client, figures, disks that nobody
//! serves, probes of the host.
//!
//! Never serves a request: who does is the program `spillway-worker`, of which only the interface is here.

mod at_rest;
mod client;
pub mod console;
pub mod counters;
mod dirty;
pub mod disk_settings;
mod error;
mod exit;
pub mod kvm;
mod latency;
mod limits;
pub mod man_page;
mod messages;
pub mod named;
pub mod output;
pub mod page_cache;
pub mod persistent;
mod process;
pub mod program;
pub mod secret;
mod settings;
mod signals;
mod stats;
pub mod storage_model;
pub mod trace_ring;
mod window;

pub use at_rest::{Content, DiskAtRest, Part};
pub use client::{Client, Recorder};
pub use dirty::{Dirty, DirtyRange};
pub use disk_settings::{DiskSettings, Rate, SettingFault};
pub use error::{ErrorKind, SupervisorError, plain};
pub use exit::Exit;
pub use latency::{DiskLatency, LatencyHistogram};
pub use limits::rate_is_met;
pub use messages::{Request, Response};
pub use process::{default_signals, end_with_parent, output_within};
pub use settings::{Digests, Report, ServeSettings, Streamed};
pub use signals::Signals;
pub use spillway_layout::{
    BaseCache, FullPolicy, ImageFormat, Mode, bytes_in_words as bytes, persistent_file,
};
pub use stats::{
    BasePlane, Chunks, Collector, Discards, Evictions, Failed, Latencies, Latency, Map, Merges, Overflow,
    Plane, Planes, Promotions, Ram, SCHEMA, Stalls, Stats, Throttled, Touched,
};
pub use window::{Window, WindowError};

/// What is said of a disk that is kept when it has ended as it should.
pub const STOPPED_CLEANLY: &str = "all that was written is on the medium";
