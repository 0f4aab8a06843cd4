//! Work for disks: what users of real machines do, recorded machines, and fio's loads.
//!
//! What is done is a workload, where is an [`Engine`]: inside of machines, as a recording asked of each disk again, or from the
//! host. Invariant: work is fixed by its count and its seed, never by what the disk can do in a time; only fio's loads, which
//! measure just that, are not.

mod fio;
mod fleet;
mod inside;
mod lines;
mod machines;
mod outside;
mod recording;
mod reported;
mod score;
mod settings;
mod stage;

pub use recording::{RecordedAction, RecordedSession, Recording};
pub use stage::{RecordStage, Stage, Watcher, WorkDisk, WorkResult};

use crate::study::Engine;
use anyhow::{Result, bail, ensure};
use settings::WorkloadSettings;
use std::collections::BTreeMap;

pub use settings::THRESHOLD_MS;

/// The names of all workloads.
pub const WORKLOADS: [&str; 6] =
    ["boot", "file-copy", "knowledge-worker", "session-host", "logon-storm", "fio"];

/// Refuses what a study cannot mean: a workload that there is not, one that cannot be done there, parameters that it does not
/// have, values that cannot be; on a null disk, all but a load of the disk itself from inside of a machine.
pub fn check(
    workload: &str,
    engine: Engine,
    parameters: &BTreeMap<String, toml::Value>,
    null_disk: bool,
) -> Result<()> {
    let settings = WorkloadSettings::of(workload, engine, parameters)?;
    ensure!(
        !null_disk || (engine == Engine::Guest && !settings.on_root()),
        "a null disk keeps nothing: only fio works on it, in a guest, with on = \"disk\" and not buffered"
    );
    Ok(())
}

/// The names of the figures that every run of a workload has. A score is not among them: not every load reaches it.
pub fn figures(
    workload: &str,
    engine: Engine,
    parameters: &BTreeMap<String, toml::Value>,
) -> Result<Vec<String>> {
    Ok(WorkloadSettings::of(workload, engine, parameters)?.figures(engine))
}

/// Runs a workload and returns its results.
pub fn run(workload: &str, engine: Engine, stage: &Stage<'_>) -> Result<WorkResult> {
    let settings = WorkloadSettings::of(workload, engine, stage.parameters)?;
    ensure!(!stage.disks.is_empty(), "there is no machine to do the work");
    match (engine, &settings) {
        (Engine::Host, WorkloadSettings::Fio(fio)) => outside::run(fio, stage),
        (Engine::Host, _) => bail!("the host can only do fio's work"),
        (Engine::Guest, settings) => inside::run(settings, stage),
        (Engine::Replay, settings) => fleet::run(workload, settings, stage),
    }
}

/// Records a machine that runs a workload, from its start to its end, on a disk of its own.
pub fn record(workload: &str, stage: &RecordStage<'_>) -> Result<Recording> {
    recording::record(workload, &WorkloadSettings::of(workload, Engine::Replay, stage.parameters)?, stage)
}
