//! A recorded machine: every request of its whole life, and when its users did what.
//!
//! Owns `trace` and `actions.json` of its folder. Invariant: both times are of the trace's clock, microseconds since it began.

use anyhow::{Context, Result, ensure};
use serde::{Deserialize, Serialize};
use std::path::{Path, PathBuf};

/// Form of `actions.json`.
const SCHEMA: u32 = 1;

/// A recording that can be asked of disks.
#[derive(Clone, Debug, PartialEq)]
pub struct Recording {
    /// The trace's file.
    pub trace: PathBuf,
    /// The rest.
    pub actions: Actions,
}

/// What `actions.json` says.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Actions {
    /// Of another version of this program if it is another.
    pub schema: u32,
    /// The workload that was recorded.
    pub workload: String,
    /// Its seed.
    pub seed: u64,
    /// When the machine was started.
    pub started_us: u64,
    /// When it was up: what is before is its boot.
    pub up_us: u64,
    /// When its work was done.
    pub done_us: u64,
    /// In the order of their begin.
    pub actions: Vec<Recorded>,
}

/// Something that a user did.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Recorded {
    /// Of several in the machine.
    pub session: u32,
    /// `logon`, `open`, `save`...
    pub name: String,
    /// When it began.
    pub begin_us: u64,
    /// When it had ended there.
    pub end_us: u64,
}

impl Recording {
    /// Finds one in its folder.
    pub fn read(dir: &Path) -> Result<Recording> {
        let path = dir.join("actions.json");
        let text =
            std::fs::read_to_string(&path).with_context(|| format!("{}: cannot read", path.display()))?;
        let actions: Actions =
            serde_json::from_str(&text).with_context(|| format!("{}: no recording", path.display()))?;
        ensure!(actions.schema == SCHEMA, "{}: of another version of this program", path.display());
        ensure!(
            actions.started_us <= actions.up_us && actions.up_us <= actions.done_us,
            "{}: the machine was up before it was started, or done before it was up",
            path.display()
        );
        let trace = dir.join("trace");
        ensure!(trace.is_file(), "{}: no trace", trace.display());
        Ok(Recording { trace, actions })
    }
}
