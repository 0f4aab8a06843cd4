//! Host, machine and cache: each metric over time, beside the baseline, and in figures.
//!
//! Invariant: a metric without a value above 0 has no picture, only its name in a line of text.

use super::bars::{self, Bar};
use super::figures::{Figures, Spread, telling_unit};
use super::lines::{self, Line};
use super::page::{Cell, Page, Table};
use super::results::{Results, ScenarioResults};
use crate::markup::plain;
use crate::numbers::{number, ratio};
use crate::picture::Picture;
use crate::study::{Better, Kind, METRICS, Metric, SUMS, View};
use anyhow::Result;

/// A metric with its figures and pictures.
pub struct ShownMetric<'a> {
    /// The metric.
    pub metric: &'static Metric,
    /// In the order of the study.
    pub figures: Vec<Option<&'a Figures>>,
    /// Over time and as bars; none where there is nothing to see.
    pub pictures: Option<(Picture, Picture)>,
}

impl<'a> ShownMetric<'a> {
    /// All metrics.
    pub fn all(results: &'a Results) -> Result<Vec<ShownMetric<'a>>> {
        METRICS.iter().map(|metric| ShownMetric::of(results, metric)).collect()
    }

    /// Sums over several, which only tables have.
    pub fn sums(results: &'a Results) -> [ShownMetric<'a>; 2] {
        SUMS.each_ref().map(|metric| ShownMetric::figures(results, metric))
    }

    fn figures(results: &'a Results, metric: &'static Metric) -> ShownMetric<'a> {
        let figures = results.scenarios.iter().map(|scenario| scenario.figures(metric)).collect();
        ShownMetric { metric, figures, pictures: None }
    }

    fn of(results: &'a Results, metric: &'static Metric) -> Result<ShownMetric<'a>> {
        let mut shown = ShownMetric::figures(results, metric);
        let spreads = shown.telling();
        if spreads.iter().flatten().any(|spread| spread.high > 0.0) && results.shows(metric) {
            let step = results.seconds_between_points;
            let lines = over_time(results, metric.title, metric.unit, step, &|of| of.points(metric))?;
            let what = if metric.kind == Kind::Rate { "total of the run" } else { "mean over the run" };
            shown.pictures =
                Some((lines, beside(results, metric.title, what, telling_unit(metric), &spreads)?));
        }
        Ok(shown)
    }

    /// By how much of the baseline's each scenario has: none where that is 0, or not known.
    pub fn relative(&self, results: &Results) -> Vec<Option<f64>> {
        let spreads = self.telling();
        let base = baseline(results, &spreads);
        spreads.iter().map(|spread| spread.as_ref()?.relative(base.as_ref())).collect()
    }

    /// What scenarios are compared by.
    fn telling(&self) -> Vec<Option<Spread>> {
        self.figures.iter().map(|f| f.and_then(|f| f.telling(self.metric))).collect()
    }
}

/// The baseline's value, in the order of the study.
fn baseline(results: &Results, spreads: &[Option<Spread>]) -> Option<Spread> {
    spreads.get(results.baseline()?).copied().flatten().filter(|spread| spread.mean > 0.0)
}

/// A line for each scenario. `step` seconds lie between two points.
pub fn over_time(
    results: &Results,
    title: &str,
    unit: &str,
    step: usize,
    points: &dyn Fn(&ScenarioResults) -> &[Option<Spread>],
) -> Result<Picture> {
    let mut lines: Vec<Line> = Vec::new();
    for (place, scenario) in results.scenarios.iter().enumerate() {
        let points = points(scenario);
        if points.iter().any(Option::is_some) {
            lines.push(Line { name: plain(&scenario.name), place, points });
        }
    }
    lines::draw(&format!("{title}: over time"), unit, step, &lines)
}

/// A bar for each scenario, in percent of the baseline; `what` the values are, in the order of the study.
pub fn beside(
    results: &Results,
    title: &str,
    what: &str,
    unit: &str,
    spreads: &[Option<Spread>],
) -> Result<Picture> {
    let name = plain(&results.record.study.baseline);
    let label = format!("{title}: beside {name}");
    match baseline(results, spreads) {
        Some(base) => {
            let bars = scenario_bars(results, spreads, unit, 100.0 / base.mean);
            bars::draw(&label, Some(&format!("{what}, {name} = 100%")), Some("%"), &bars)
        }
        None => bars::draw(&label, Some(what), Some(unit), &scenario_bars(results, spreads, unit, 1.0)),
    }
}

/// A small picture: one value of each scenario, without an axis.
pub fn small(results: &Results, title: &str, spreads: &[Option<Spread>]) -> Result<Picture> {
    bars::draw(title, None, None, &scenario_bars(results, spreads, "", 1.0))
}

/// A bar for each scenario: its value times `scale`, with the value in words.
fn scenario_bars(results: &Results, spreads: &[Option<Spread>], unit: &str, scale: f64) -> Vec<Bar> {
    let base = baseline(results, spreads);
    let bar = |(place, scenario): (usize, &ScenarioResults)| {
        let spread = spreads.get(place).copied().flatten();
        let words = spread.map_or_else(
            || "not measured".into(),
            |spread| {
                let ratio =
                    spread.relative(base.as_ref()).map(|relative| format!("{} \u{b7} ", ratio(relative)));
                let value = format!("{}{} {unit}", ratio.unwrap_or_default(), number(spread.mean));
                value.trim_end().to_string()
            },
        );
        Bar {
            name: plain(&scenario.name),
            place,
            value: spread.map(|spread| spread.mean * scale),
            spread: spread
                .filter(|spread| spread.runs > 1)
                .map(|spread| (spread.low * scale, spread.high * scale)),
            words,
        }
    };
    results.scenarios.iter().enumerate().map(bar).collect()
}

/// Adds the chapter of a view.
pub fn add_chapter<'a>(page: &mut Page<'a>, results: &Results, shown: &'a [ShownMetric], view: View) {
    let (id, title, words) = match view {
        View::Host => ("host", "Host view", "What the host's storage and processors had to do."),
        View::Machine => {
            ("machine", "Machine view", "What machines asked for, and what they counted themselves.")
        }
        View::Cache => ("cache", "Cache view", "Where the cache served it."),
    };
    page.chapter(id, title);
    page.say("sub", words);
    let (mut zero, mut missing) = (Vec::new(), Vec::new());
    for one in shown.iter().filter(|one| one.metric.view == view && results.shows(one.metric)) {
        match (&one.pictures, one.figures.iter().flatten().next()) {
            (Some(pictures), _) => page.together(|page| add_metric(page, results, one, pictures)),
            (None, Some(_)) => zero.push(one.metric.title),
            (None, None) => missing.push(one.metric.title),
        }
    }
    for (what, titles) in [("Zero in all scenarios", zero), ("Not measured in any scenario", missing)] {
        if !titles.is_empty() {
            page.say("note", &format!("{what}: {}.", titles.join("; ")));
        }
    }
}

fn add_metric<'a>(
    page: &mut Page<'a>,
    results: &Results,
    shown: &ShownMetric,
    (lines, bars): &'a (Picture, Picture),
) {
    let metric = shown.metric;
    page.part(metric.key, metric.title);
    let lower =
        if metric.better == Better::Lower && !results.is_by_time() { "Lower is better. " } else { "" };
    let without = if baseline(results, &shown.telling()).is_none() {
        "No baseline value: shown as they are. "
    } else {
        ""
    };
    page.pair((lines, format!("{lower}{}", runs_words(results))), (bars, format!("{lower}{without}")));
    let note = results.note(metric);
    if !note.is_empty() {
        page.say("note", &format!("Note: {note}."));
    }
    page.table(table(results, shown));
}

/// What the lines' bands are.
pub fn runs_words(results: &Results) -> String {
    let counts: Vec<usize> = results.scenarios.iter().map(|m| m.runs.len()).filter(|n| *n > 0).collect();
    match (counts.iter().min(), counts.iter().max()) {
        (_, Some(1)) => "One run: no spread is known.".into(),
        (Some(1), Some(_)) => {
            "Line: mean of the runs; band: lowest to highest. Scenarios with one run have none: \
                               no spread is known."
                .into()
        }
        (Some(low), Some(high)) if low != high => {
            format!("Line: mean of {low} to {high} runs; band: lowest to highest.")
        }
        (_, Some(runs)) => format!("Line: mean of {runs} runs; band: lowest to highest."),
        _ => String::new(),
    }
}

fn table(results: &Results, shown: &ShownMetric) -> Table {
    let metric = shown.metric;
    let several = shown.figures.iter().flatten().any(|f| f.machines > 1);
    let mut head = vec![String::new(), "of the baseline".into()];
    if metric.kind == Kind::Rate {
        head.push(format!("total, {}", telling_unit(metric)));
    }
    head.extend(["mean", "95th percentile", "peak"].map(|what| format!("{what}, {}", metric.unit)));
    if several {
        head.push("mean machine".into());
        head.push("95th percentile of machines".into());
    }
    let mut table = Table::new("figures", head);
    let relative = shown.relative(results);
    let has_baseline = baseline(results, &shown.telling()).is_some();
    for (place, scenario) in results.scenarios.iter().enumerate() {
        let mut row = vec![Cell::scenario(place, &scenario.name)];
        let Some(f) = shown.figures[place] else {
            row.push(Cell::none("not measured"));
            table.row(row);
            continue;
        };
        row.push(match relative[place] {
            Some(relative) => Cell::text(ratio(relative)),
            None if has_baseline => Cell::text("-"),
            None => Cell::none("no baseline value"),
        });
        if metric.kind == Kind::Rate {
            row.push(Cell::figure(f.total.as_ref()));
        }
        row.extend([&f.mean, &f.p95, &f.peak].map(|spread| Cell::figure(spread.as_ref())));
        if several {
            row.extend([&f.machine_mean, &f.machine_p95].map(|spread| Cell::figure(spread.as_ref())));
        }
        table.row(row);
    }
    table
}
