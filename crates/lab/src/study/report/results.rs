//! What a results folder holds: the whole runs of each scenario, those that were dropped, those that never ended.
//!
//! Invariant: a file that is not as its writer leaves it is an error that names it; a run without its record is not
//! finished, and counts nowhere.

use super::counters;
use super::numbers::sound;
use super::series::{Rows, Series};
use crate::study::{Engine, METRICS, Metric, RunRecord, SUMS, Samples, Scenario, Study, StudyRecord, record};
use anyhow::{Context, Result, bail, ensure};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// Records and a study's file are small.
const MOST_RECORD_BYTES: u64 = 64 << 20;
/// 60 machines over hours.
const MOST_SAMPLES_BYTES: u64 = 1 << 30;
/// Nothing that is measured takes longer.
const LONGEST_SECONDS: f64 = 7.0 * 86400.0;

/// A results folder.
pub struct Results {
    /// Where it is.
    pub dir: PathBuf,
    /// What holds for all runs.
    pub record: StudyRecord,
    /// The study's file as it was given, if it is still there.
    pub file: Option<String>,
    /// In the order of the study.
    pub scenarios: Vec<Measured>,
    /// Runs that do not count: their records say why.
    pub dropped: Vec<RunRecord>,
    /// Folders of runs that have no record.
    pub unfinished: Vec<String>,
}

/// A scenario and its whole runs.
pub struct Measured {
    /// What it is.
    pub scenario: Scenario,
    /// By number; none where all were dropped.
    pub runs: Vec<Run>,
}

/// A whole run.
pub struct Run {
    /// What it has left.
    pub record: RunRecord,
    /// By the metric's key.
    pub series: BTreeMap<&'static str, Series>,
    /// The disks' counters.
    pub counters: BTreeMap<String, f64>,
}

impl Results {
    /// Reads one.
    pub fn read(dir: &Path) -> Result<Results> {
        let path = dir.join("study.json");
        if !path.is_file() {
            bail!("{}: no results of a study: it has no study.json", dir.display());
        }
        let record: StudyRecord = read_record(&path)?;
        // Its names become names of files.
        record.study.check().with_context(|| format!("{}: no study that can be", path.display()))?;
        let of = |scenario: &Scenario| Measured { scenario: scenario.clone(), runs: Vec::new() };
        let scenarios = record.study.scenarios.iter().map(of).collect();
        let file = study_file(dir)?;
        let dir = dir.to_owned();
        let mut results =
            Results { dir, record, file, scenarios, dropped: Vec::new(), unfinished: Vec::new() };
        results.read_runs()?;
        Ok(results)
    }

    fn read_runs(&mut self) -> Result<()> {
        let runs = self.dir.join("runs");
        if !runs.is_dir() {
            return Ok(());
        }
        let mut folders = Vec::new();
        for entry in std::fs::read_dir(&runs).with_context(|| format!("{}: cannot read", runs.display()))? {
            let path = entry.with_context(|| format!("{}: cannot read", runs.display()))?.path();
            if path.is_dir() {
                folders.push(path);
            }
        }
        folders.sort();
        for folder in folders {
            let name = folder.file_name().map(|n| n.to_string_lossy().into_owned()).unwrap_or_default();
            match folder.join("run.json") {
                path if path.exists() => self.read_run(&folder, &name, &path)?,
                _ => self.unfinished.push(name),
            }
        }
        self.scenarios.iter_mut().for_each(|s| s.runs.sort_by_key(|run| run.record.run));
        self.dropped.sort_by(|a, b| (&a.scenario, a.run).cmp(&(&b.scenario, b.run)));
        Ok(())
    }

    fn read_run(&mut self, folder: &Path, name: &str, path: &Path) -> Result<()> {
        let record: RunRecord = read_record(path)?;
        let wrong = |what: &str| format!("{}: {what}", path.display());
        // Two folders can then not hold the same run.
        ensure!(
            name == format!("{}-{}", record.scenario, record.run),
            wrong("the record is not of this folder's run")
        );
        let measured = self.scenarios.iter_mut().find(|s| s.scenario.name == record.scenario);
        let measured = measured.with_context(|| wrong("the study has no such scenario"))?;
        if record.dropped.is_some() {
            self.dropped.push(record);
            return Ok(());
        }
        let action = |a: &crate::study::Action| sound(a.took_ms).is_some() && a.at_s.abs() <= LONGEST_SECONDS;
        ensure!(record.actions.iter().all(action), wrong("an action took no time that can be"));
        for (figure, value) in &record.figures {
            ensure!(sound(*value).is_some(), wrong(&format!("'{figure}' is no figure that can be: {value}")));
        }
        ensure!(sound(record.seconds).is_some(), wrong("it took no time that can be"));
        let path = folder.join("samples.csv");
        is_below(&path, MOST_SAMPLES_BYTES)?;
        let samples = Samples::read(&path)?;
        for (i, row) in samples.rows.iter().enumerate() {
            let sane = row.time_s.is_finite() && row.time_s.abs() <= LONGEST_SECONDS;
            let line = i + 2;
            ensure!(sane, "{}: line {line}: {} is no time of a run", path.display(), row.time_s);
            ensure!(
                row.machine < record.machines,
                "{}: line {line}: machine {} of {}",
                path.display(),
                row.machine,
                record.machines
            );
        }
        let rows = Rows::of(&samples);
        let series =
            |metric: &Metric| Some((metric.key, rows.series(&as_there(metric, &measured.scenario))?));
        let series = METRICS.iter().chain(&SUMS).filter_map(series).collect();
        measured.runs.push(Run { record, series, counters: counters::of_run(&samples) });
        Ok(())
    }

    /// Whole runs of all scenarios.
    pub fn runs(&self) -> impl Iterator<Item = &Run> {
        self.scenarios.iter().flat_map(|measured| &measured.runs)
    }

    /// Whether a metric is among those that the study asks for.
    pub fn shows(&self, metric: &Metric) -> bool {
        let asked = &self.record.study.metrics;
        asked.is_empty() || asked.iter().any(|key| key == metric.key)
    }

    /// Whether its load runs for a time and not for a count: what a scenario moved in all is then no verdict on it.
    pub fn is_by_time(&self) -> bool {
        self.record.study.work.workload == "fio"
    }

    /// What must be said with a metric here.
    pub fn note(&self, metric: &Metric) -> String {
        let on_model = self.scenarios.iter().any(|measured| !measured.scenario.storage.is_empty());
        let notes = [metric.note, if on_model { metric.on_model } else { "" }];
        notes.into_iter().filter(|note| !note.is_empty()).collect::<Vec<_>>().join("; ")
    }

    /// A scenario by its name.
    pub fn scenario(&self, name: &str) -> Option<&Measured> {
        self.scenarios.iter().find(|measured| measured.scenario.name == name)
    }

    /// The scenario that is 100%.
    pub fn baseline(&self) -> Option<&Measured> {
        self.scenario(&self.record.study.baseline)
    }
}

/// A metric as a scenario has it: where machines have a disk as any other, what would be an overflow is the disk itself, and
/// a driver inside would count what the machine does.
pub fn as_there(metric: &Metric, scenario: &Scenario) -> Metric {
    let mode = scenario.disk.get("mode").map(String::as_str);
    let has_no_cache = scenario.null_disk || matches!(mode, Some("direct" | "ephemeral" | "persistent"));
    let inside = metric.columns.iter().take_while(|column| column.starts_with("inside.")).count();
    match inside {
        1.. if has_no_cache => Metric { columns: &metric.columns[..inside], ..*metric },
        _ => *metric,
    }
}

/// Whether a scenario's samples have a column: a null disk counts nothing, and only a guest that works tells what is inside.
pub fn is_sampled(column: &str, study: &Study, scenario: &Scenario) -> bool {
    let guest = study.engine(scenario) == Engine::Guest;
    match column.split_once('.') {
        Some(("inside", _)) => guest && study.work.workload != "boot",
        Some(("cpu", "vmm_s")) => guest,
        Some(("cpu", _)) => true,
        _ => !scenario.null_disk,
    }
}

impl Run {
    /// What was measured of a metric.
    pub fn of(&self, metric: &Metric) -> Option<&Series> {
        self.series.get(metric.key)
    }
}

fn read_record<T: for<'a> serde::Deserialize<'a>>(path: &Path) -> Result<T> {
    is_below(path, MOST_RECORD_BYTES)?;
    record::read(path)
}

fn is_below(path: &Path, most: u64) -> Result<()> {
    let found = std::fs::metadata(path).with_context(|| format!("{}: cannot read", path.display()))?;
    ensure!(found.is_file(), "{}: no file", path.display());
    ensure!(found.len() <= most, "{}: {} bytes, {most} are the most", path.display(), found.len());
    Ok(())
}

/// Only shown: what it says is in the record, too.
fn study_file(dir: &Path) -> Result<Option<String>> {
    let path = dir.join("study.toml");
    if !path.exists() {
        return Ok(None);
    }
    is_below(&path, MOST_RECORD_BYTES)?;
    let bytes = std::fs::read(&path).with_context(|| format!("{}: cannot read", path.display()))?;
    Ok(Some(String::from_utf8_lossy(&bytes).into_owned()))
}
