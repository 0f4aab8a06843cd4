//! Two results of one study beside each other.
//!
//! Invariant: only results of the same work are compared, and a difference within the spread of the runs is not called one.

use super::answer::describe;
use super::figures::{Spread, telling_unit};
use super::results::{Results, ScenarioResults};
use crate::markup::plain;
use crate::numbers::{number, ratio};
use crate::study::{METRICS, StudyRecord};
use anyhow::{Result, ensure};
use comfy_table::{CellAlignment, Table, presets};
use serde::Serialize;
use std::collections::BTreeSet;
use std::fmt;
use std::path::Path;

/// What two folders hold of the same.
#[derive(Debug, Serialize)]
pub struct Comparison {
    /// The study's name.
    pub study: String,
    /// One folder.
    pub a: String,
    /// The other.
    pub b: String,
    /// What differs, and must be known.
    pub notes: Vec<String>,
    /// By scenario.
    pub rows: Vec<Compared>,
}

/// One figure in both.
#[derive(Debug, Serialize)]
pub struct Compared {
    /// The scenario.
    pub scenario: String,
    /// The metric's key, an action's, or a workload's figure.
    pub name: String,
    /// In words.
    pub what: String,
    /// In what.
    pub unit: String,
    /// There.
    pub a: Spread,
    /// Here.
    pub b: Spread,
    /// B divided by A; none where A is 0.
    pub ratio: Option<f64>,
    /// Whether lowest to highest of both meet; none where one has a single run.
    pub spreads_overlap: Option<bool>,
}

/// Compares two results folders. Refuses those of different studies.
pub fn compare(a: &Path, b: &Path) -> Result<Comparison> {
    let (left, right) = (Results::read(a)?, Results::read(b)?);
    let (one, other) = (&left.record, &right.record);
    let differ = |what: &str, one: &str, other: &str| {
        format!(
            "{} and {} are not of the same study: {what} is {one} there and {other} here",
            a.display(),
            b.display()
        )
    };
    ensure!(one.study.name == other.study.name, differ("the name", &one.study.name, &other.study.name));
    let form = |quick: bool| if quick { "the shorter" } else { "the long" };
    ensure!(one.quick == other.quick, differ("the form", form(one.quick), form(other.quick)));
    let work = |record: &StudyRecord| serde_json::to_string(&record.study.work).unwrap_or_default();
    ensure!(one.study.work == other.study.work, differ("the work", &work(one), &work(other)));
    let image = |record: &StudyRecord| String::from(record.study.image.clone());
    ensure!(one.study.image == other.study.image, differ("the image", &image(one), &image(other)));
    let mut comparison = Comparison {
        study: one.study.name.clone(),
        a: a.display().to_string(),
        b: b.display().to_string(),
        notes: Vec::new(),
        rows: Vec::new(),
    };
    for here in &left.scenarios {
        let name = &here.name;
        match right.scenario(name) {
            Some(there) => {
                let settings = [one, other].map(|record| record.study.scenario(name));
                if settings[0] != settings[1] {
                    comparison.notes.push(format!("'{name}' is not the same scenario in both"));
                }
                comparison.add_scenario(&left, here, there);
            }
            None => comparison.notes.push(format!("'{name}' is in the first only")),
        }
    }
    for there in right.scenarios.iter().filter(|there| left.scenario(&there.name).is_none()) {
        comparison.notes.push(format!("'{}' is in the second only", there.name));
    }
    let mut note = |name: &str, one: &str, other: &str| {
        if one != other {
            comparison.notes.push(format!("{name}: {one} in the first, {other} in the second"));
        }
    };
    note("the first run's seed", &one.study.runs.seed.to_string(), &other.study.runs.seed.to_string());
    let scale = |record: &StudyRecord| {
        record.study.scale.as_ref().map_or("none".into(), |scale| format!("{} of {}", scale.factor, scale.of))
    };
    note("scale", &scale(one), &scale(other));
    for (here, there) in [(&one.hardware, &other.hardware), (&one.versions, &other.versions)] {
        let names: BTreeSet<&String> = here.keys().chain(there.keys()).collect();
        for name in names {
            let [one, other] = [here, there].map(|all| all.get(name).map_or("not said", String::as_str));
            note(name, one, other);
        }
    }
    Ok(comparison)
}

impl Comparison {
    fn add_scenario(&mut self, left: &Results, a: &ScenarioResults, b: &ScenarioResults) {
        let name = &a.name;
        let scores = [a.score, b.score];
        if scores.iter().flatten().any(|score| score.carried.is_some()) {
            let [a, b] =
                scores.map(|score| score.map_or_else(|| "not measured".into(), |score| score.words()));
            self.notes
                .push(format!("'{name}': not all runs have the score: {a} in the first, {b} in the second"));
        }
        let mut add = |key: &str, what: &str, unit: &str, pair: (Option<Spread>, Option<Spread>)| {
            let (Some(one), Some(other)) = pair else { return };
            self.rows.push(Compared {
                scenario: name.clone(),
                name: key.into(),
                what: what.into(),
                unit: unit.into(),
                a: one,
                b: other,
                ratio: other.relative(Some(&one)),
                spreads_overlap: one.overlaps(&other),
            });
        };
        for metric in METRICS {
            let of = |scenario: &ScenarioResults| scenario.figures(metric)?.telling(metric);
            add(metric.key, metric.title, telling_unit(metric), (of(a), of(b)));
        }
        for action in &left.actions {
            let of = |scenario: &ScenarioResults| Some(scenario.responses.get(action)?.mean_ms);
            add(&format!("response.{action}"), &format!("{action}: mean response"), "ms", (of(a), of(b)));
        }
        for figure in left.workload_figures() {
            add(figure, &describe(figure).0, "", (a.workload(figure), b.workload(figure)));
        }
    }
}

impl fmt::Display for Comparison {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{}: A is {}, B is {}", plain(&self.study), plain(&self.a), plain(&self.b))?;
        for note in &self.notes {
            writeln!(f, "{}", plain(note))?;
        }
        let mut table = Table::new();
        table.load_preset(presets::UTF8_HORIZONTAL_ONLY);
        table.set_header(["scenario", "what", "A", "B", "B / A", "spreads"]);
        (2..5)
            .filter_map(|i| table.column_mut(i).map(|c| c.set_cell_alignment(CellAlignment::Right)))
            .count();
        let value = |spread: &Spread| match spread.runs {
            1 => number(spread.mean),
            _ => format!("{} ({} to {})", number(spread.mean), number(spread.low), number(spread.high)),
        };
        let mut last = "";
        for row in &self.rows {
            let scenario = if row.scenario == last { String::new() } else { plain(&row.scenario) };
            last = &row.scenario;
            let unit = if row.unit.is_empty() { String::new() } else { format!(", {}", row.unit) };
            let same = row.a.mean == row.b.mean;
            table.add_row([
                scenario,
                format!("{}{unit}", plain(&row.what)),
                value(&row.a),
                value(&row.b),
                row.ratio.map_or_else(|| if same { "same" } else { "A is 0" }.to_string(), ratio),
                match row.spreads_overlap {
                    None => "one run",
                    Some(true) => "overlap",
                    Some(false) => "apart",
                }
                .into(),
            ]);
        }
        writeln!(f, "{table}")
    }
}
