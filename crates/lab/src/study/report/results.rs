//! The results of a study: everything that its report shows, small enough to be kept when the runs' own files are not.
//!
//! Owns the file `results.json`. Invariants: a report is rendered from this alone; what is read is as its writer leaves it, or an error
//! that says what is wrong and where.

use super::figures::{Figures, Response, Score, Spread};
use super::measured::{Measurements, check_file_size};
use crate::numbers::plausible;
use crate::study::metric::named;
use crate::study::{Metric, RunFacts, StudyRecord};
use anyhow::{Context, Result, bail, ensure};
use serde::{Deserialize, Serialize};
use serde_json::ser::{Formatter, PrettyFormatter, Serializer};
use std::collections::{BTreeMap, BTreeSet};
use std::io::Write;
use std::path::Path;

/// Version of the file's form.
pub const SCHEMA: u32 = 1;
/// Name of the file in a folder of results.
pub const FILE: &str = "results.json";
/// Size of the file, at most.
const MOST_BYTES: u64 = 64 << 20;

/// The results of a study.
#[derive(Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Results {
    /// `SCHEMA`.
    pub schema: u32,
    /// What holds for all runs.
    #[serde(rename = "study")]
    pub record: StudyRecord,
    /// The study's file as it was given, if it was still there.
    pub file: Option<String>,
    /// Seconds between two points of `MetricResults::points`.
    pub seconds_between_points: usize,
    /// Seconds between two points of `ScenarioResults::response_points`.
    pub seconds_between_responses: usize,
    /// Names of the users' actions, in the order in which users first did them.
    pub actions: Vec<String>,
    /// In the order of the study.
    pub scenarios: Vec<ScenarioResults>,
    /// Runs that do not count.
    pub dropped: Vec<RunFacts>,
    /// Folders of runs that have no record.
    pub unfinished: Vec<String>,
}

/// The results of a scenario.
#[derive(Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ScenarioResults {
    /// The scenario's name.
    pub name: String,
    /// Runs that count, by number; none where all were dropped.
    pub runs: Vec<RunFacts>,
    /// By the metric's key.
    pub metrics: BTreeMap<String, MetricResults>,
    /// The disks' counters, by key.
    pub counters: BTreeMap<String, Spread>,
    /// The workload's own figures that every run has, by name.
    pub workload: BTreeMap<String, Spread>,
    /// How many sessions were carried, where the workload tries that.
    pub score: Option<Score>,
    /// Response times, by the action's name.
    pub responses: BTreeMap<String, Response>,
    /// The mean response time of all actions together, in milliseconds.
    pub mean_response_ms: Option<Spread>,
    /// The mean response time of all actions, in milliseconds, by when they began.
    #[serde(with = "compact_points")]
    pub response_points: Vec<Option<Spread>>,
}

/// A metric in a scenario.
#[derive(Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MetricResults {
    /// Over the runs.
    pub figures: Figures,
    /// Over time: `[mean, low, high, runs]`, or null where nothing is known.
    #[serde(with = "compact_points")]
    pub points: Vec<Option<Spread>>,
}

/// Reads the results in a folder: from its runs, where it has them, else as they were kept. With the runs, where it has them.
pub fn read(dir: &Path) -> Result<(Results, Option<Measurements>)> {
    let (kept, study) = (dir.join(FILE), dir.join("study.json"));
    if kept.is_file() && !dir.join("runs").is_dir() {
        return Ok((Results::read_kept(&kept)?, None));
    }
    if !study.is_file() {
        bail!("{}: no results of a study: it has neither study.json nor {FILE}", dir.display());
    }
    let measurements = Measurements::read(dir)?;
    Ok((measurements.results(), Some(measurements)))
}

impl Results {
    /// Reads the results in a folder: from its runs, where it has them, else as they were kept.
    pub fn read(dir: &Path) -> Result<Results> {
        Ok(read(dir)?.0)
    }

    fn read_kept(path: &Path) -> Result<Results> {
        check_file_size(path, MOST_BYTES)?;
        let at = || path.display().to_string();
        let text = std::fs::read_to_string(path).with_context(|| format!("{}: cannot read", at()))?;
        let json: serde_json::Value =
            serde_json::from_str(&text).with_context(|| format!("{}: no JSON", at()))?;
        ensure!(
            json["schema"] == SCHEMA,
            "{}: of another version of this program: its schema is {}, {SCHEMA} was expected",
            at(),
            json["schema"]
        );
        // From the text again, so that an error says its line.
        let results: Results =
            serde_json::from_str(&text).with_context(|| format!("{}: no results of a study", at()))?;
        results.check().with_context(at)?;
        Ok(results)
    }

    /// Whether all parts fit each other, and all figures are figures that a study can have measured.
    fn check(&self) -> Result<()> {
        // Its names become names of files.
        self.record.study.check().context("study")?;
        let names = |all: &mut dyn Iterator<Item = &String>| all.cloned().collect::<Vec<_>>();
        let of_study = names(&mut self.record.study.scenarios.iter().map(|scenario| &scenario.name));
        let here = names(&mut self.scenarios.iter().map(|scenario| &scenario.name));
        ensure!(
            of_study == here,
            "scenarios: {} are there, but the study has {}",
            here.join(", "),
            of_study.join(", ")
        );
        let steps = [self.seconds_between_points, self.seconds_between_responses];
        ensure!(steps.iter().all(|step| *step > 0), "the time between two points is 0");
        let actions: BTreeSet<&String> = self.actions.iter().collect();
        for scenario in &self.scenarios {
            scenario.check(&actions).with_context(|| format!("scenario '{}'", scenario.name))?;
        }
        for run in &self.dropped {
            ensure!(self.scenario(&run.scenario).is_some(), "dropped: no scenario '{}'", run.scenario);
            check_run(run)?;
        }
        Ok(())
    }

    /// Writes the file. Two results that are the same make the same file.
    pub fn write(&self, to: &mut impl Write) -> Result<()> {
        self.serialize(&mut Serializer::with_formatter(&mut *to, Lines::default()))?;
        Ok(to.write_all(b"\n")?)
    }

    /// Whole runs of all scenarios.
    pub fn runs(&self) -> impl Iterator<Item = &RunFacts> {
        self.scenarios.iter().flat_map(|scenario| &scenario.runs)
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
        let on_model = self.record.study.scenarios.iter().any(|scenario| !scenario.storage.is_empty());
        let notes = [metric.note, if on_model { metric.on_model } else { "" }];
        notes.into_iter().filter(|note| !note.is_empty()).collect::<Vec<_>>().join("; ")
    }

    /// A scenario by its name.
    pub fn scenario(&self, name: &str) -> Option<&ScenarioResults> {
        self.scenarios.iter().find(|scenario| scenario.name == name)
    }

    /// The place of the scenario that is 100%.
    pub fn baseline(&self) -> Option<usize> {
        self.scenarios.iter().position(|scenario| scenario.name == self.record.study.baseline)
    }

    /// Names of all figures of workloads.
    pub fn workload_figures(&self) -> BTreeSet<&str> {
        self.scenarios.iter().flat_map(|scenario| scenario.workload.keys().map(String::as_str)).collect()
    }
}

impl ScenarioResults {
    /// A metric's figures; none where no run measured it.
    pub fn figures(&self, metric: &Metric) -> Option<&Figures> {
        self.metrics.get(metric.key).map(|found| &found.figures)
    }

    /// A metric over time.
    pub fn points(&self, metric: &Metric) -> &[Option<Spread>] {
        self.metrics.get(metric.key).map_or(&[], |found| &found.points)
    }

    /// A workload's own figure; none where a run does not have it.
    pub fn workload(&self, name: &str) -> Option<Spread> {
        self.workload.get(name).copied()
    }

    fn check(&self, actions: &BTreeSet<&String>) -> Result<()> {
        for run in &self.runs {
            ensure!(run.scenario == self.name && run.dropped.is_none(), "run {} is not one of its", run.run);
            check_run(run)?;
        }
        for (key, metric) in &self.metrics {
            let wrong = || format!("metric '{key}'");
            named(key).with_context(wrong).context("no such metric is known")?;
            metric.figures.spreads().try_for_each(|(_, spread)| check_spread(spread)).with_context(wrong)?;
            check_points(&metric.points).with_context(wrong)?;
        }
        for (key, spread) in self.counters.iter().chain(&self.workload) {
            check_spread(spread).with_context(|| format!("'{key}'"))?;
        }
        if let Some(score) = self.score {
            [score.reached, score.carried].iter().flatten().try_for_each(check_spread).context("score")?;
        }
        for (name, response) in &self.responses {
            ensure!(actions.contains(name), "action '{name}' is not in the list of all actions");
            response
                .spreads()
                .try_for_each(|(_, spread)| check_spread(spread))
                .with_context(|| name.clone())?;
        }
        self.mean_response_ms.iter().try_for_each(check_spread).context("mean response time")?;
        check_points(&self.response_points).context("responses over time")
    }
}

fn check_run(run: &RunFacts) -> Result<()> {
    ensure!(plausible(run.seconds).is_some(), "run {} took an impossible time", run.run);
    Ok(())
}

fn check_points(points: &[Option<Spread>]) -> Result<()> {
    for (i, point) in points.iter().enumerate() {
        point.as_ref().map_or(Ok(()), check_spread).with_context(|| format!("point {i}"))?;
    }
    Ok(())
}

fn check_spread(spread: &Spread) -> Result<()> {
    let Spread { mean, low, high, runs } = *spread;
    let known = [mean, low, high].iter().all(|value| plausible(*value).is_some());
    ensure!(known && low <= mean && mean <= high, "an impossible figure: {mean}, from {low} to {high}");
    ensure!(runs > 0, "a figure of no run");
    Ok(())
}

/// Points as `[mean, low, high, runs]`: most of the file are points.
mod compact_points {
    use super::Spread;
    use serde::{Deserialize, Deserializer, Serializer};

    type Point = (f64, f64, f64, usize);

    pub fn serialize<S: Serializer>(points: &[Option<Spread>], to: S) -> Result<S::Ok, S::Error> {
        let point = |spread: Spread| -> Point { (spread.mean, spread.low, spread.high, spread.runs) };
        to.collect_seq(points.iter().map(|spread| spread.map(point)))
    }

    pub fn deserialize<'a, D: Deserializer<'a>>(from: D) -> Result<Vec<Option<Spread>>, D::Error> {
        let points = Vec::<Option<Point>>::deserialize(from)?;
        let spread = |(mean, low, high, runs): Point| Spread { mean, low, high, runs };
        Ok(points.into_iter().map(|point| point.map(spread)).collect())
    }
}

/// JSON of which each field of an object stands on a line of its own, but for the inside of figures, and each list on one line unless objects
/// are in it: a difference of two files shows what differs, and an error's line tells where it is.
#[derive(Default)]
struct Lines {
    pretty: PrettyFormatter<'static>,
    depth: usize,
}

/// From here on objects stand on one line.
const INLINE_DEPTH: usize = 3;

impl Formatter for Lines {
    fn begin_object<W: ?Sized + Write>(&mut self, to: &mut W) -> std::io::Result<()> {
        self.depth += 1;
        if self.depth > INLINE_DEPTH { to.write_all(b"{") } else { self.pretty.begin_object(to) }
    }

    fn end_object<W: ?Sized + Write>(&mut self, to: &mut W) -> std::io::Result<()> {
        self.depth -= 1;
        if self.depth >= INLINE_DEPTH { to.write_all(b"}") } else { self.pretty.end_object(to) }
    }

    fn begin_object_key<W: ?Sized + Write>(&mut self, to: &mut W, first: bool) -> std::io::Result<()> {
        match (self.depth > INLINE_DEPTH, first) {
            (true, true) => Ok(()),
            (true, false) => to.write_all(b", "),
            (false, _) => self.pretty.begin_object_key(to, first),
        }
    }

    fn begin_object_value<W: ?Sized + Write>(&mut self, to: &mut W) -> std::io::Result<()> {
        self.pretty.begin_object_value(to)
    }

    fn end_object_value<W: ?Sized + Write>(&mut self, to: &mut W) -> std::io::Result<()> {
        if self.depth > INLINE_DEPTH { Ok(()) } else { self.pretty.end_object_value(to) }
    }
}
