//! The runs that a results folder holds, as they were measured: whole runs by scenario, dropped runs, and runs that never ended.
//!
//! Owns reading them and the step from them to [`Results`]. Invariant: a file that is not as its writer leaves it is an error that names
//! it; a run without its record is not finished, and counts nowhere.

use super::counters;
use super::figures::{self, Figures, Response, Score, Spread};
use super::results::{self, MetricResults, Results, ScenarioResults};
use super::series::{Rows, Series};
use crate::numbers::plausible;
use crate::study::{Engine, METRICS, Metric, RunRecord, SUMS, Samples, Scenario, Study, StudyRecord, record};
use anyhow::{Context, Result, ensure};
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

/// Size of a record or of a study's file, at most.
const MOST_RECORD_BYTES: u64 = 64 << 20;
/// Size of a run's samples, at most: enough for 60 machines over hours.
const MOST_SAMPLES_BYTES: u64 = 1 << 30;
/// Nothing that is measured takes longer.
const LONGEST_SECONDS: f64 = 7.0 * 86400.0;

/// Everything that a results folder holds.
pub struct Measurements {
    /// What holds for all runs.
    record: StudyRecord,
    /// The study's file as it was given, if it is still there.
    file: Option<String>,
    /// In the order of the study.
    scenarios: Vec<Measured>,
    /// Runs that do not count: their records say why.
    dropped: Vec<RunRecord>,
    /// Folders of runs that have no record.
    unfinished: Vec<String>,
}

/// A scenario and its whole runs.
pub struct Measured {
    /// The scenario as the study has it.
    scenario: Scenario,
    /// By number; none where all were dropped.
    pub runs: Vec<MeasuredRun>,
}

/// A whole run.
pub struct MeasuredRun {
    /// What it has left.
    pub record: RunRecord,
    /// By the metric's key.
    series: BTreeMap<&'static str, Series>,
    /// The disks' counters.
    counters: BTreeMap<String, f64>,
}

impl Measurements {
    /// Reads a results folder.
    pub fn read(dir: &Path) -> Result<Measurements> {
        let path = dir.join("study.json");
        let record: StudyRecord = read_record(&path)?;
        // Its names become names of files.
        record.study.check().with_context(|| format!("{}: an invalid study", path.display()))?;
        let of = |scenario: &Scenario| Measured { scenario: scenario.clone(), runs: Vec::new() };
        let scenarios = record.study.scenarios.iter().map(of).collect();
        let file = study_file(dir)?;
        let mut found = Measurements { record, file, scenarios, dropped: Vec::new(), unfinished: Vec::new() };
        found.read_runs(&dir.join("runs"))?;
        Ok(found)
    }

    /// What reports are rendered from.
    pub fn results(&self) -> Results {
        let step = figures::step(self.runs());
        let response_step = figures::response_step(self.runs(), step);
        let actions = figures::actions(self.runs());
        let scenario = |measured: &Measured| measured.results(step, response_step, &actions);
        Results {
            schema: results::SCHEMA,
            seconds_between_points: step,
            seconds_between_responses: response_step,
            scenarios: self.scenarios.iter().map(scenario).collect(),
            actions,
            dropped: self.dropped.iter().map(|record| record.facts.clone()).collect(),
            unfinished: self.unfinished.clone(),
            record: self.record.clone(),
            file: self.file.clone(),
        }
    }

    fn read_runs(&mut self, runs: &Path) -> Result<()> {
        if !runs.is_dir() {
            return Ok(());
        }
        let mut folders = Vec::new();
        for entry in std::fs::read_dir(runs).with_context(|| format!("{}: cannot read", runs.display()))? {
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
        self.scenarios.iter_mut().for_each(|s| s.runs.sort_by_key(|run| run.record.facts.run));
        self.dropped.sort_by(|a, b| (&a.facts.scenario, a.facts.run).cmp(&(&b.facts.scenario, b.facts.run)));
        Ok(())
    }

    fn read_run(&mut self, folder: &Path, name: &str, path: &Path) -> Result<()> {
        let record: RunRecord = read_record(path)?;
        let wrong = |what: &str| format!("{}: {what}", path.display());
        // Two folders can then not hold the same run.
        ensure!(
            name == format!("{}-{}", record.facts.scenario, record.facts.run),
            wrong("the record is not of this folder's run")
        );
        let measured = self.scenarios.iter_mut().find(|s| s.scenario.name == record.facts.scenario);
        let measured = measured.with_context(|| wrong("the study has no such scenario"))?;
        if record.facts.dropped.is_some() {
            self.dropped.push(record);
            return Ok(());
        }
        let action =
            |a: &crate::study::Action| plausible(a.took_ms).is_some() && a.at_s.abs() <= LONGEST_SECONDS;
        ensure!(record.actions.iter().all(action), wrong("an action took an impossible time"));
        for (figure, value) in &record.figures {
            ensure!(
                plausible(*value).is_some(),
                wrong(&format!("'{figure}' is an impossible figure: {value}"))
            );
        }
        ensure!(plausible(record.facts.seconds).is_some(), wrong("it took an impossible time"));
        let path = folder.join("samples.csv");
        check_file_size(&path, MOST_SAMPLES_BYTES)?;
        let samples = Samples::read(&path)?;
        for (i, row) in samples.rows.iter().enumerate() {
            let sane = row.time_s.is_finite() && row.time_s.abs() <= LONGEST_SECONDS;
            let line = i + 2;
            ensure!(sane, "{}: line {line}: {} is not a time of a run", path.display(), row.time_s);
            ensure!(
                row.machine < record.facts.machines,
                "{}: line {line}: machine {} of {}",
                path.display(),
                row.machine,
                record.facts.machines
            );
        }
        let rows = Rows::of(&samples);
        let series = |metric: &Metric| {
            Some((metric.key, rows.series(&metric_in_scenario(metric, &measured.scenario))?))
        };
        let series = METRICS.iter().chain(&SUMS).filter_map(series).collect();
        measured.runs.push(MeasuredRun { record, series, counters: counters::of_run(&samples) });
        Ok(())
    }

    /// Whole runs of all scenarios.
    pub fn runs(&self) -> impl Iterator<Item = &MeasuredRun> {
        self.scenarios.iter().flat_map(|measured| &measured.runs)
    }
}

impl Measured {
    fn results(&self, step: usize, response_step: usize, actions: &[String]) -> ScenarioResults {
        let metric = |metric: &Metric| {
            let figures = Figures::of(self, metric)?;
            Some((metric.key.into(), MetricResults { figures, points: figures::points(self, metric, step) }))
        };
        let counters: BTreeSet<&String> = self.runs.iter().flat_map(|run| run.counters.keys()).collect();
        let counter = |key: &String| {
            let values = self.runs.iter().filter_map(|run| run.counters.get(key).copied());
            Some((key.clone(), Spread::of(values)?))
        };
        let response = |name: &String| Some((name.clone(), Response::of(self, Some(name))?));
        ScenarioResults {
            name: self.scenario.name.clone(),
            runs: self.runs.iter().map(|run| run.record.facts.clone()).collect(),
            metrics: METRICS.iter().chain(&SUMS).filter_map(metric).collect(),
            counters: counters.into_iter().filter_map(counter).collect(),
            workload: figures::workload(self),
            score: Score::of(self),
            responses: actions.iter().filter_map(response).collect(),
            mean_response_ms: Response::of(self, None).map(|all| all.mean_ms),
            response_points: figures::response_points(self, response_step),
        }
    }
}

/// A metric as a scenario has it: where machines have a disk as any other, what would be an overflow is the disk itself, and
/// a driver inside would count what the machine does.
pub fn metric_in_scenario(metric: &Metric, scenario: &Scenario) -> Metric {
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

impl MeasuredRun {
    /// What was measured of a metric.
    pub fn of(&self, metric: &Metric) -> Option<&Series> {
        self.series.get(metric.key)
    }

    /// Every metric that was measured.
    pub fn all_series(&self) -> impl Iterator<Item = &Series> {
        self.series.values()
    }
}

fn read_record<T: for<'a> serde::Deserialize<'a>>(path: &Path) -> Result<T> {
    check_file_size(path, MOST_RECORD_BYTES)?;
    record::read(path)
}

pub fn check_file_size(path: &Path, most: u64) -> Result<()> {
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
    check_file_size(&path, MOST_RECORD_BYTES)?;
    let bytes = std::fs::read(&path).with_context(|| format!("{}: cannot read", path.display()))?;
    Ok(Some(String::from_utf8_lossy(&bytes).into_owned()))
}
