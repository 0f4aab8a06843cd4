//! Work for disks: what users of real machines do, recorded machines, and fio's loads.
//!
//! What is done is a workload, where is an [`Engine`]: inside of machines, as a recording asked of each disk again, or from the
//! host. Invariant: work is fixed by its count and its seed, never by what the disk can do in a time; only fio's loads, which
//! measure just that, are not.

mod fio;
mod recording;
mod stage;
mod words;

pub use recording::{Actions, Recorded, Recording};
pub use stage::{Done, RecordStage, Stage, Watcher, WorkDisk, needs_recording};

use crate::study::Engine;
use anyhow::{Result, bail};
use std::collections::BTreeMap;
use words::Words;

/// The names of all workloads.
pub const WORKLOADS: [&str; 6] =
    ["boot", "file-copy", "knowledge-worker", "session-host", "logon-storm", "fio"];

/// Refuses what a study cannot mean: a workload that there is not, one that cannot be done there, parameters that it does not
/// have, values that cannot be.
pub fn check(workload: &str, engine: Engine, parameters: &BTreeMap<String, toml::Value>) -> Result<()> {
    Words::of(workload, engine, parameters).map(drop)
}

/// Does the work: returns when it is done, or why it cannot be.
pub fn run(workload: &str, engine: Engine, stage: &Stage<'_>) -> Result<Done> {
    Words::of(workload, engine, stage.parameters)?;
    bail!("the engine '{}' is not there", engine.name())
}

/// Records one machine at that work, from its start to its end.
pub fn record(workload: &str, stage: &RecordStage<'_>) -> Result<Recording> {
    Words::of(workload, Engine::Replay, stage.parameters)?;
    bail!("nothing can be recorded")
}
