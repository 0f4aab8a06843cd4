//! What is kept of a study and of each run, as JSON beside the samples.
//!
//! Layout of a results folder: `study.json` ([`StudyRecord`]), `study.toml` as it was given, and for each run
//! `runs/SCENARIO-N/` with `run.json` ([`RunRecord`], written last), `samples.csv` ([`super::Samples`]) and what the programs said.

use super::spec::Study;
use anyhow::{Context, Result, ensure};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::path::Path;

/// Form of both records.
pub const SCHEMA: u32 = 1;

/// What holds for all runs.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct StudyRecord {
    /// [`SCHEMA`].
    pub schema: u32,
    /// The study as it is run: the shorter form's values put in.
    pub study: Study,
    /// Whether it is the shorter form.
    pub quick: bool,
    /// When it began, as `2026-01-31T12:00:00Z`.
    pub begun: String,
    /// The command that began it.
    pub command: String,
    /// Versions by name: spillway, its commit, qemu, the machines' image (which fixes their fio) and their kernel.
    pub versions: BTreeMap<String, String>,
    /// Hardware by name: cpu, cores, RAM, disk, the host's kernel; how guests run (KVM, TCG).
    pub hardware: BTreeMap<String, String>,
}

/// What a run was, without what it measured.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct RunFacts {
    /// The scenario's name.
    pub scenario: String,
    /// Number of the run in its scenario, from 1 on.
    pub run: u32,
    /// Seed of its random choices.
    pub seed: u64,
    /// When it began.
    pub begun: String,
    /// Time from its first command to its last figure.
    pub seconds: f64,
    /// Where the work was done: `guest`, `replay`, `host`.
    pub engine: String,
    /// Number of machines.
    pub machines: u32,
    /// Why it does not count; none for one that does.
    pub dropped: Option<String>,
    /// Commands as they were given.
    pub commands: Vec<String>,
}

/// The record of a run.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct RunRecord {
    /// [`SCHEMA`].
    pub schema: u32,
    /// What the run was.
    #[serde(flatten)]
    pub facts: RunFacts,
    /// What users did, and how long it took.
    pub actions: Vec<Action>,
    /// What the workload measured by itself, by name: `boot_s`, `fio.iometer-citrix.iops`...
    pub figures: BTreeMap<String, f64>,
}

/// Something that a user did.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Action {
    /// 0, 1, 2...
    pub machine: u32,
    /// Of several in one machine.
    pub session: u32,
    /// `logon`, `open`, `save`...
    pub name: String,
    /// When it began, since the work's begin.
    pub at_s: f64,
    /// How long it took.
    pub took_ms: f64,
}

/// Reads one of the records.
pub fn read<T: for<'a> Deserialize<'a>>(path: &Path) -> Result<T> {
    let text = std::fs::read_to_string(path).with_context(|| format!("{}: cannot read", path.display()))?;
    let form: serde_json::Value =
        serde_json::from_str(&text).with_context(|| format!("{}: no JSON", path.display()))?;
    ensure!(form["schema"] == SCHEMA, "{}: of another version of this program", path.display());
    serde_json::from_value(form).with_context(|| format!("{}: no record of a study", path.display()))
}
