//! Figures: what a metric, a response time or a workload's own measure amounts to, over the runs of a scenario.
//!
//! Invariant: a figure is the mean of its runs and never stands without its spread, which one run does not have.

use super::measured::{Measured, MeasuredRun};
use super::series::coarse;
use crate::numbers::number;
use crate::study::{Kind, Metric};
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};

/// Points that a line has at most.
const MOST_POINTS: usize = 300;
/// Points that a line of response times has at most.
const MOST_RESPONSES: usize = 60;

/// A figure over several runs.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Spread {
    /// Of the runs.
    pub mean: f64,
    /// The lowest.
    pub low: f64,
    /// The highest.
    pub high: f64,
    /// How many.
    pub runs: usize,
}

impl Spread {
    /// None of no runs.
    pub fn of(values: impl IntoIterator<Item = f64>) -> Option<Spread> {
        let values: Vec<f64> = values.into_iter().collect();
        let (runs, first) = (values.len(), *values.first()?);
        let mean = values.iter().sum::<f64>() / runs as f64;
        let low = values.iter().copied().fold(first, f64::min);
        let high = values.iter().copied().fold(first, f64::max);
        Some(Spread { mean: mean.clamp(low, high), low, high, runs })
    }

    /// In another unit.
    pub fn times(self, by: f64) -> Spread {
        Spread { mean: self.mean * by, low: self.low * by, high: self.high * by, runs: self.runs }
    }

    /// Whether they may be the same. Not known where one is of a single run.
    pub fn overlaps(&self, other: &Spread) -> Option<bool> {
        (self.runs > 1 && other.runs > 1).then_some(self.low <= other.high && other.low <= self.high)
    }

    /// Divided by a baseline; none where that is 0.
    pub fn relative(&self, baseline: Option<&Spread>) -> Option<f64> {
        baseline.filter(|b| b.mean > 0.0).map(|b| self.mean / b.mean).filter(|ratio| ratio.is_finite())
    }
}

/// The value that a share of all does not exceed.
pub fn percentile(values: &mut [f64], share: f64) -> Option<f64> {
    values.sort_by(f64::total_cmp);
    let rank = (values.len() as f64 * share).ceil().max(1.0) as usize;
    values.get(rank - 1).copied()
}

/// One metric of one scenario.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Figures {
    /// Over the run, in [`total_unit`]; none for levels.
    pub total: Option<Spread>,
    /// Over time.
    pub mean: Option<Spread>,
    /// Over time, second by second.
    pub p95: Option<Spread>,
    /// The highest second.
    pub peak: Option<Spread>,
    /// Machines of a run, at most.
    pub machines: usize,
    /// The mean machine.
    pub machine_mean: Option<Spread>,
    /// 95% of the machines' means are not above it.
    pub machine_p95: Option<Spread>,
}

impl Figures {
    /// None where no run measured it.
    pub fn of(measured: &Measured, metric: &Metric) -> Option<Figures> {
        let series: Vec<_> = measured.runs.iter().filter_map(|run| run.of(metric)).collect();
        let known = |s: &super::series::Series| s.seconds.iter().copied().flatten().collect::<Vec<f64>>();
        let mean =
            |values: &[f64]| (!values.is_empty()).then(|| values.iter().sum::<f64>() / values.len() as f64);
        let figures = Figures {
            total: Spread::of(series.iter().filter_map(|s| s.total)).map(|t| t.times(total_unit(metric).1)),
            mean: Spread::of(series.iter().filter_map(|s| mean(&known(s)))),
            p95: Spread::of(series.iter().filter_map(|s| percentile(&mut known(s), 0.95))),
            peak: Spread::of(series.iter().filter_map(|s| percentile(&mut known(s), 1.0))),
            machines: series.iter().map(|s| s.machines.len()).max().unwrap_or(0),
            machine_mean: Spread::of(series.iter().filter_map(|s| mean(&s.machines))),
            machine_p95: Spread::of(series.iter().filter_map(|s| percentile(&mut s.machines.clone(), 0.95))),
        };
        (!series.is_empty()).then_some(figures)
    }

    /// All of them that are known, by the names that they have in files.
    pub fn spreads(&self) -> impl Iterator<Item = (&'static str, &Spread)> {
        let all = [
            ("total", &self.total),
            ("mean", &self.mean),
            ("p95", &self.p95),
            ("peak", &self.peak),
            ("machine_mean", &self.machine_mean),
            ("machine_p95", &self.machine_p95),
        ];
        all.into_iter().filter_map(|(name, spread)| Some((name, spread.as_ref()?)))
    }

    /// What scenarios are compared by: the total of rates, the mean of levels.
    pub fn telling(&self, metric: &Metric) -> Option<Spread> {
        match metric.kind {
            Kind::Rate => self.total,
            Kind::Level => self.mean,
        }
    }
}

/// What a total is counted in, and what seconds of the metric's unit are multiplied by.
pub fn total_unit(metric: &Metric) -> (&'static str, f64) {
    match metric.unit.strip_suffix("/s") {
        Some(unit) => (unit, 1.0),
        None if metric.unit == "% of a core" => ("s of a core", 0.01),
        None => (metric.unit, 1.0),
    }
}

/// The unit of [`Figures::telling`].
pub fn telling_unit(metric: &Metric) -> &'static str {
    match metric.kind {
        Kind::Rate => total_unit(metric).0,
        Kind::Level => metric.unit,
    }
}

/// A metric of a scenario over time: the mean of its runs, and their spread.
pub fn points(measured: &Measured, metric: &Metric, step: usize) -> Vec<Option<Spread>> {
    let of = |run: &MeasuredRun| run.of(metric).map(|series| coarse(&series.seconds, step));
    let runs: Vec<Vec<Option<f64>>> = measured.runs.iter().filter_map(of).collect();
    let length = runs.iter().map(Vec::len).max().unwrap_or(0);
    let at = |i: usize| Spread::of(runs.iter().filter_map(|run| run.get(i).copied().flatten()));
    (0..length).map(at).collect()
}

/// Seconds between two points of any line of a report.
pub fn step<'a>(runs: impl Iterator<Item = &'a MeasuredRun>) -> usize {
    let longest = runs.flat_map(MeasuredRun::all_series).map(|series| series.seconds.len()).max();
    longest.unwrap_or(0).div_ceil(MOST_POINTS).max(1)
}

/// Response times of one action in one scenario.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Response {
    /// How often in a run.
    pub count: Spread,
    /// Milliseconds.
    pub mean_ms: Spread,
    /// 95% were not slower.
    pub p95_ms: Spread,
    /// The slowest.
    pub worst_ms: Spread,
}

impl Response {
    /// All of them, by the names that they have in files.
    pub fn spreads(&self) -> impl Iterator<Item = (&'static str, &Spread)> {
        let Response { count, mean_ms, p95_ms, worst_ms } = self;
        [("count", count), ("mean_ms", mean_ms), ("p95_ms", p95_ms), ("worst_ms", worst_ms)].into_iter()
    }

    /// None where no run has it. All actions without a name.
    pub fn of(measured: &Measured, name: Option<&str>) -> Option<Response> {
        let wanted = |action: &&crate::study::Action| name.is_none_or(|name| action.name == name);
        let took = |run: &MeasuredRun| -> Vec<f64> {
            run.record.actions.iter().filter(wanted).map(|action| action.took_ms).collect()
        };
        let runs: Vec<Vec<f64>> = measured.runs.iter().map(took).filter(|took| !took.is_empty()).collect();
        Some(Response {
            count: Spread::of(runs.iter().map(|took| took.len() as f64))?,
            mean_ms: Spread::of(runs.iter().map(|took| took.iter().sum::<f64>() / took.len() as f64))?,
            p95_ms: Spread::of(runs.iter().filter_map(|took| percentile(&mut took.clone(), 0.95)))?,
            worst_ms: Spread::of(runs.iter().filter_map(|took| percentile(&mut took.clone(), 1.0)))?,
        })
    }
}

/// Seconds between two points of response times: rarer than other lines, as few users do something each second.
pub fn response_step<'a>(runs: impl Iterator<Item = &'a MeasuredRun>, step: usize) -> usize {
    let last = runs.flat_map(|run| &run.record.actions).map(|action| action.at_s).fold(0.0, f64::max);
    (last as usize).div_ceil(MOST_RESPONSES).max(step)
}

/// The mean response time of all actions of a scenario by when they began.
pub fn response_points(measured: &Measured, step: usize) -> Vec<Option<Spread>> {
    let of = |run: &MeasuredRun| -> BTreeMap<usize, (f64, u32)> {
        let mut points: BTreeMap<usize, (f64, u32)> = BTreeMap::new();
        for action in &run.record.actions {
            let point = points.entry(action.at_s.max(0.0) as usize / step).or_default();
            *point = (point.0 + action.took_ms, point.1 + 1);
        }
        points
    };
    let runs: Vec<_> = measured.runs.iter().map(of).collect();
    let length = runs.iter().filter_map(|points| points.keys().last()).max().map_or(0, |last| last + 1);
    let at = |i: usize| {
        Spread::of(
            runs.iter().filter_map(|points| points.get(&i)).map(|(sum, count)| sum / f64::from(*count)),
        )
    };
    (0..length).map(at).collect()
}

/// All actions, in the order in which users first did them.
pub fn actions<'a>(runs: impl Iterator<Item = &'a MeasuredRun>) -> Vec<String> {
    let mut first: BTreeMap<&str, f64> = BTreeMap::new();
    for action in runs.flat_map(|run| &run.record.actions) {
        let at = first.entry(&action.name).or_insert(action.at_s);
        *at = at.min(action.at_s);
    }
    let mut names: Vec<(&str, f64)> = first.into_iter().collect();
    names.sort_by(|a, b| a.1.total_cmp(&b.1).then(a.0.cmp(b.0)));
    names.into_iter().map(|(name, _)| name.to_string()).collect()
}

/// A workload's own figures in a scenario. One that a run does not have is left out: what the others have is not the scenario's.
pub fn workload(measured: &Measured) -> BTreeMap<String, Spread> {
    let names = measured.runs.iter().flat_map(|run| run.record.figures.keys());
    let figure = |name: &String| {
        let values: Option<Vec<f64>> =
            measured.runs.iter().map(|run| run.record.figures.get(name).copied()).collect();
        Some((name.clone(), Spread::of(values?)?))
    };
    names.collect::<BTreeSet<_>>().into_iter().filter_map(figure).collect()
}

/// The sessions at which responses degrade, which not every run reaches.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Score {
    /// In the runs that reached it.
    pub reached: Option<Spread>,
    /// Most sessions at a time, in those that did not: all were carried.
    pub carried: Option<Spread>,
}

impl Score {
    /// None where no run could have one.
    pub fn of(measured: &Measured) -> Option<Score> {
        let runs = || measured.runs.iter().map(|run| &run.record.figures);
        let score = |of: &BTreeMap<String, f64>| of.get("score.sessions").copied();
        let reached = Spread::of(runs().filter_map(score));
        let carried =
            runs().filter(|of| score(of).is_none()).filter_map(|of| of.get("score.active").copied());
        let carried = Spread::of(carried);
        (reached.is_some() || carried.is_some()).then_some(Score { reached, carried })
    }

    /// In how many runs of how many it was reached, and what is known of the others.
    pub fn words(&self) -> String {
        let count = |spread: Option<Spread>| spread.map_or(0, |s| s.runs);
        let range = |s: Spread| match (number(s.low), number(s.high)) {
            (low, high) if low == high => low,
            (low, high) => format!("{low} to {high}"),
        };
        let (k, n) = (count(self.reached), count(self.reached) + count(self.carried));
        let reached = format!("reached in {k} of {n} runs");
        match (self.reached, self.carried) {
            (Some(at), Some(more)) => format!("{reached}, at {}; else more than {}", range(at), range(more)),
            (None, Some(more)) => format!("more than {}; {reached}", range(more)),
            _ => reached,
        }
    }
}
