//! The supervisor: makes a disk, starts the worker that serves it, and holds everything that outlives one.
//!
//! It owns every fd, path and socket; the worker is given fds. Used by `spillway serve` and `spillway run`.

mod at_rest;
mod client;
mod clients;
mod closer;
mod control;
mod digests;
mod dirty;
mod disk;
mod ephemeral;
mod error;
mod event_loop;
mod huge_pages;
mod life;
mod limits;
mod memory;
mod model;
mod named;
mod overflow;
mod page_cache;
mod persistent;
mod process;
mod session;
mod signals;
mod socket;
mod states;
mod stats;
mod upgrade;
mod watchers;

pub use crate::channel::{BaseCache, ImageFormat, Limits, Rate};
pub use at_rest::{Content, DiskAtRest, Part};
pub use client::{Client, Recorder};
pub use control::{Answer, Request};
pub use digests::Digests;
pub use dirty::{Dirty, DirtyRange};
pub use disk::Options;
pub use error::{ErrorKind, SupervisorError};
pub use event_loop::{PUT_AWAY, Supervisor};
pub use limits::LimitChange;
pub use process::{Program, channel_from_supervisor, default_signals, end_with_parent};
pub use signals::Signals;
pub use spillway_core::{FullPolicy, Mode, bytes_in_words as bytes};
pub use stats::{
    BasePlane, Collector, Discards, Evictions, Failed, Latencies, Latency, Map, Merges, Overflow, Plane,
    Planes, Promotions, Ram, SCHEMA, Stalls, Stats, Throttled,
};

use serde::{Deserialize, Serialize};

/// Takes lines that people should see.
pub type Log = Box<dyn FnMut(&str)>;

/// What is served, where, by whom: what `serve --json` prints when it is ready.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[expect(missing_docs, reason = "named as the options of `spillway serve`")]
pub struct Report {
    pub pid: u32,
    pub worker_pid: u32,
    pub image: String,
    pub disk: Option<String>,
    pub format: ImageFormat,
    pub mode: String,
    pub full: String,
    pub size_bytes: u64,
    pub base_bytes: u64,
    pub ram_limit_bytes: u64,
    pub overflow_limit_bytes: u64,
    pub overflow_direct: bool,
    pub serial: String,
    pub vhost_user: Option<String>,
    pub nbd: Option<String>,
    pub control: Option<String>,
}
