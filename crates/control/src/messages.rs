//! What can be asked of a disk over its control socket, and what is answered. Owns the words; a line of JSON each.
//!
//! Invariant: an answer is one line, and comes in the order of the requests; those that listen also get a line for each event.

use crate::disk_settings::DiskSettings;
use serde::{Deserialize, Serialize};
use std::path::PathBuf;

/// Requests that a disk accepts.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "command", rename_all = "kebab-case")]
pub enum Request {
    /// Returns the processes and sockets of the disk: legal at any time.
    Ping,
    /// Returns all counters and gauges, as [`crate::Stats`]: legal at any time.
    Stats,
    /// Passes the memory of the counters with the response, to read only: a [`crate::Window`] on it shows them without asking. Only
    /// the supervisor's user and root may send this.
    Counters,
    /// Returns how long requests took since the disk was created, as [`crate::DiskLatency`]: legal at any time.
    Latency,
    /// Returns the ranges with most writes since the last reset, as [`crate::Dirty`]: legal at any time.
    Dirty {
        /// Most rows to answer with, up to [`crate::Dirty::MAX_ROWS`].
        #[serde(default = "default_rows")]
        limit: u32,
    },
    /// Discards everything that was written since the image. Refused while a client is connected, unless forced.
    Reset {
        /// Disconnect clients first.
        #[serde(default)]
        force: bool,
        /// In mode `persistent`: the data that is kept is meant.
        #[serde(default)]
        discard_data: bool,
    },
    /// Other limits, without a pause: all settings that are named but `mode` and `base_cache`, or nothing. Answered with the
    /// settings that hold then.
    Set(DiskSettings),
    /// Subscribes to events: one line for each event, `{"event":{...}}`, follows the answer until the connection ends. A
    /// client that does not read them is disconnected.
    Events,
    /// Records the disk's requests. The ring buffer of [`crate::trace_ring`] is passed with the response, and is
    /// written until the connection ends. The connection accepts no further request.
    Trace,
    /// Returns the overflow at every size of the RAM tier since the worker started: a sampled
    /// `spillway_advisor::curve::Curve`.
    Curve {
        /// The share of the written bytes that the RAM tier should absorb [default: 0.95].
        #[serde(default)]
        goal: Option<f64>,
    },
    /// Returns the chunks of a streamed image that were read since the start or the last reset, in the order of their first use, as
    /// [`crate::Touched`]. What is read afterwards is not noted before the next reset.
    Touched,
    /// Replaces the program that serves the disk. The written data and the VMM's connection are kept. Only the
    /// supervisor's user and root may send this, since the program runs with the supervisor's rights.
    Upgrade {
        /// Absolute path of the program.
        binary: PathBuf,
    },
}

fn default_rows() -> u32 {
    crate::Dirty::ROWS_DEFAULT
}

/// Response to a request, whose value is a `T`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Response<T = serde_json::Value> {
    /// The request succeeded. The value depends on the request.
    Ok(T),
    /// The request was refused, or has failed.
    Error {
        /// For programs: `invalid`, `refused`, `busy`.
        code: String,
        /// For people.
        message: String,
    },
}

impl Response {
    /// An error.
    pub fn error(code: &str, message: impl Into<String>) -> Response {
        Response::Error { code: code.into(), message: message.into() }
    }
}
