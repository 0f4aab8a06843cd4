//! Reports: the results of a study as one page that needs no other file, with every picture and figure as files beside it.
//!
//! Owns what is shown and in which order. Invariants: a report is rendered from [`Results`] alone, and the same results give the same
//! page; it shows every run that was begun, by its figures or by why it has none; it never changes what was measured.

mod answer;
mod bars;
mod compare;
mod counters;
mod expected;
mod figures;
mod files;
mod how;
mod lines;
mod measured;
mod page;
mod results;
mod scale;
mod seeds;
mod series;
#[cfg(test)]
mod tests;
mod users;
mod views;

pub use compare::{Comparison, compare};
pub use expected::{CheckedExpectation, check_expectations};
pub use results::Results;

use crate::numbers;
use crate::picture::Picture;
use crate::study::View;
use answer::AnswerRow;
use anyhow::{Result, bail};
use page::{Cell, Page, Table};
use std::path::{Path, PathBuf};
use users::Users;
use views::ShownMetric;

/// Pictures under the answer's table.
const MOST_PICTURES: usize = 6;

/// A report that is written.
pub struct Report {
    /// Where its page is.
    pub page: PathBuf,
    /// What the study was to show.
    pub expected: Vec<CheckedExpectation>,
}

/// Renders the results in a folder to `report.html` and the folder `report` beside it, in `out`. Results that come from runs are kept
/// there as `results.json`.
pub fn write(dir: &Path, out: &Path) -> Result<Report> {
    let (results, measurements) = results::read(dir)?;
    if results.runs().next().is_none() {
        bail!(
            "{}: no run counts: {} dropped, {} not finished; let the study go on, then ask again",
            dir.display(),
            results.dropped.len(),
            results.unfinished.len()
        );
    }
    let results = &results;
    let rows = answer::rows(results);
    let picture = |row: &AnswerRow| views::small(results, &row.what, &row.scenarios);
    let chosen = rows.iter().filter(|row| row.picture).take(MOST_PICTURES);
    let pictures: Vec<Picture> = chosen.map(picture).collect::<Result<_>>()?;
    let shown = ShownMetric::all(results)?;
    let sums = ShownMetric::sums(results);
    let users = Users::of(results)?;
    let beside = seeds::compare_figures(results);
    let expected = expected::all(results);
    let counters = counters::all(results);
    let mut page = Page::default();
    add_question(&mut page, results);
    add_answer(&mut page, results, &rows, &pictures);
    expected::add_part(&mut page, &expected);
    for view in [View::Host, View::Machine, View::Cache] {
        views::add_chapter(&mut page, results, &shown, view);
    }
    counters::add_part(&mut page, results, &counters);
    users::add_chapter(&mut page, results, &users);
    seeds::add_chapter(&mut page, results, &beside);
    how::add_chapter(&mut page, results);
    let html = page.html(&results.record.study.title, &subtitle(results))?;
    let parts = files::Parts {
        html: &html,
        results,
        answer: (&rows, &pictures),
        shown: &shown,
        sums: &sums,
        counters: &counters,
        users: &users,
        beside: &beside,
        expected: &expected,
        measurements: measurements.as_ref(),
    };
    let page = files::write(&parts, out)?;
    Ok(Report { page, expected })
}

fn subtitle(results: &Results) -> [Cell; 3] {
    let record = &results.record;
    let form = if record.quick { ", the shorter form" } else { "" };
    let rest = format!(
        "{form}, begun {}. {} scenarios, {} runs, {} dropped, {} not finished.",
        record.begun,
        results.scenarios.len(),
        results.runs().count(),
        results.dropped.len(),
        results.unfinished.len(),
    );
    [Cell::text("Study "), Cell::code(&record.study.name), Cell::text(rest)]
}

fn add_question(page: &mut Page, results: &Results) {
    let study = &results.record.study;
    page.chapter("asked", "What was asked");
    page.say("question", &study.question);
    for caution in how::cautions(results) {
        page.say("warn", &caution);
    }
    let mut table =
        Table::new("words", ["scenario", "what it is", "engine", "machines", "disk", "stands on", "runs"]);
    for (place, (of, measured)) in study.scenarios.iter().zip(&results.scenarios).enumerate() {
        let base = if of.name == study.baseline { "baseline, 100%" } else { "" };
        let words = |pairs: &std::collections::BTreeMap<String, String>| {
            let pairs: Vec<String> = pairs.iter().map(|(name, value)| format!("{name} {value}")).collect();
            pairs.join(", ")
        };
        let disk = if of.null_disk { "none: it does nothing".into() } else { words(&of.disk) };
        let machines = measured.runs.first().map_or(of.machines, |run| run.machines);
        table.row([
            Cell::scenario(place, &of.name).and_small(base),
            Cell::text(&of.what),
            Cell::text(study.engine(of).name()),
            Cell::text(machines.to_string()),
            Cell::text(disk),
            Cell::text(words(&of.storage)),
            Cell::text(measured.runs.len().to_string()),
        ]);
    }
    page.table(table);
}

fn add_answer<'a>(page: &mut Page<'a>, results: &Results, rows: &[AnswerRow], pictures: &'a [Picture]) {
    page.chapter("answer", "The answer");
    let mut table = Table::by_scenario("answer", "", results);
    let base = results.baseline();
    for row in rows {
        let baseline = base.and_then(|place| row.scenarios[place]);
        let cell = |(place, spread): (usize, &Option<figures::Spread>)| {
            let relative = spread.and_then(|s| s.relative(baseline.as_ref())).filter(|_| Some(place) != base);
            let relative = relative.map_or(String::new(), numbers::ratio);
            match row.words[place].as_str() {
                words if spread.is_none() && !words.is_empty() => Cell::text(words),
                words => Cell::figure_and_ratio(spread.as_ref(), &relative).and_small(words),
            }
        };
        let cells = row.scenarios.iter().enumerate().map(cell);
        let first = Cell::text(&row.what).and_small(&answer::is_better(row.better));
        table.row([first].into_iter().chain(cells));
    }
    page.table(table);
    let one = results.runs().all(|run| run.run == 1);
    let spread =
        if one { "One run of each: no spread is known." } else { "Small: the lowest and the highest run." };
    let baseline = &results.record.study.baseline;
    page.say("note", &format!("{spread} Bold: the ratio to the baseline, {baseline}."));
    page.pictures(pictures);
}
