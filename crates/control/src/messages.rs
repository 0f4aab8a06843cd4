//! What can be asked of a disk over its control socket, and what is answered. Owns the words; a line of JSON each.
//!
//! Invariant: an answer is one line, and comes in the order of the requests; those that listen also get a line for each event.

use crate::disk_settings::DiskSettings;
use serde::{Deserialize, Serialize};
use std::path::PathBuf;

/// What can be asked.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "command", rename_all = "kebab-case")]
pub enum Request {
    /// Who serves: legal at any time.
    Ping,
    /// All figures, as [`crate::Stats`]: legal at any time.
    Stats,
    /// Where was written most since the last reset, as [`crate::Dirty`]: legal at any time.
    Dirty {
        /// Most rows to answer with, up to [`crate::Dirty::MAX_ROWS`].
        #[serde(default = "default_rows")]
        limit: u32,
    },
    /// Throw away everything written since the image. Refused while a client is connected, unless forced.
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
    /// What the disk is asked, as it is asked: with the answer comes the ring of [`crate::trace_ring`], which is written to
    /// until the connection ends. Nothing more can be asked on it.
    Trace,
    /// What every size of the RAM tier would have done since the worker began: a sampled `spillway_advisor::curve::Curve`.
    Curve {
        /// The share of the written bytes that the RAM tier should absorb [default: 0.95].
        #[serde(default)]
        goal: Option<f64>,
    },
    /// Another program serves from here on, with all that was written and the VMM's open connection. For the
    /// supervisor's own user and root only: the program runs with the supervisor's rights.
    Upgrade {
        /// Its absolute path.
        binary: PathBuf,
    },
}

fn default_rows() -> u32 {
    crate::Dirty::ROWS_DEFAULT
}

/// What is answered.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Answer {
    /// It was done; what, depends on the request.
    Ok(serde_json::Value),
    /// It was not done.
    Error {
        /// For programs: `invalid`, `refused`, `busy`.
        code: String,
        /// For people.
        message: String,
    },
}

impl Answer {
    /// An error.
    pub fn error(code: &str, message: impl Into<String>) -> Answer {
        Answer::Error { code: code.into(), message: message.into() }
    }
}
