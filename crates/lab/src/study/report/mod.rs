//! Reports: a results folder as one page that needs nothing else, with every picture and figure as files beside it.
//!
//! Owns what is shown and in which order. Invariant: a report shows every run that was begun, by its figures or by why it
//! has none; it never writes what was measured.

mod answer;
mod bars;
mod compare;
mod counters;
mod expected;
mod figures;
mod files;
mod how;
mod lines;
mod numbers;
mod page;
mod results;
mod scale;
mod seeds;
mod series;
mod svg;
#[cfg(test)]
mod tests;
mod users;
mod views;

pub use compare::{Comparison, compare};
pub use expected::{Expected, can_be_known};
pub use results::Results;

use crate::study::View;
use answer::Row;
use anyhow::{Result, bail};
use page::{Page, Table, figure_of, safe, scenario};
use std::path::{Path, PathBuf};
use svg::Picture;
use users::Users;
use views::Shown;

/// Pictures under the answer's table.
const MOST_PICTURES: usize = 6;

/// A report that is written.
pub struct Report {
    /// Where its page is.
    pub page: PathBuf,
    /// What the study was to show.
    pub expected: Vec<Expected>,
}

/// Writes `report.html` and the folder `report` beside it into a results folder.
pub fn write(dir: &Path) -> Result<Report> {
    let results = Results::read(dir)?;
    if results.runs().next().is_none() {
        bail!(
            "{}: no run counts: {} dropped, {} not finished; let the study go on, then ask again",
            dir.display(),
            results.dropped.len(),
            results.unfinished.len()
        );
    }
    let rows = answer::rows(&results);
    let of = |row: &Row| users::small(&results, &row.what, &row.scenarios);
    let chosen = rows.iter().filter(|row| row.picture).take(MOST_PICTURES);
    let pictures: Vec<Picture> = chosen.map(of).collect::<Result<_>>()?;
    let shown = Shown::all(&results)?;
    let users = Users::of(&results)?;
    let beside = seeds::beside(&results);
    let expected = expected::all(&results);
    let mut page = Page::default();
    asked(&mut page, &results);
    answered(&mut page, &results, &rows, &pictures);
    expected::part(&mut page, &expected);
    for view in [View::Host, View::Machine, View::Cache] {
        views::chapter(&mut page, &results, &shown, view);
    }
    let counters = counters::all(&results);
    counters::part(&mut page, &results, &counters);
    users::chapter(&mut page, &results, &users);
    seeds::chapter(&mut page, &results, &beside);
    how::chapter(&mut page, &results);
    let html = page.html(&results.record.study.title, &head(&results));
    let answer = (&rows[..], &pictures[..]);
    let sums = &Shown::sums(&results);
    let (shown, users, beside, counters) = (&shown, &users, &beside, &counters);
    let parts =
        files::Parts { results: &results, answer, shown, sums, counters, users, beside, expected: &expected };
    let page = files::write(&parts, &html)?;
    Ok(Report { page, expected })
}

fn head(results: &Results) -> String {
    let record = &results.record;
    let runs = results.runs().count();
    let form = if record.quick { ", the shorter form" } else { "" };
    format!(
        "<h1>{}</h1>\n<p class=\"sub\">Study <code>{}</code>{form}, begun {}. {} scenarios, {runs} runs, {} dropped, {} not \
         finished.</p>\n",
        safe(&record.study.title),
        safe(&record.study.name),
        safe(&record.begun),
        results.scenarios.len(),
        results.dropped.len(),
        results.unfinished.len(),
    )
}

fn asked(page: &mut Page, results: &Results) {
    let study = &results.record.study;
    page.chapter("asked", "What was asked");
    page.say("question", &study.question);
    for caution in how::cautions(results) {
        page.say("warn", &caution);
    }
    let mut table =
        Table::new("words", ["scenario", "what it is", "engine", "machines", "disk", "stands on", "runs"]);
    for (place, measured) in results.scenarios.iter().enumerate() {
        let of = &measured.scenario;
        let base = if of.name == study.baseline { " <small>baseline, 100%</small>" } else { "" };
        let words = |pairs: &std::collections::BTreeMap<String, String>| {
            let pairs: Vec<String> = pairs.iter().map(|(name, value)| format!("{name} {value}")).collect();
            safe(&pairs.join(", "))
        };
        let disk = if of.null_disk { "none: it does nothing".into() } else { words(&of.disk) };
        let machines = measured.runs.first().map_or(of.machines, |run| run.record.machines);
        table.row([
            format!("{}{base}", scenario(place, &of.name)),
            safe(&of.what),
            study.engine(of).name().into(),
            machines.to_string(),
            disk,
            words(&of.storage),
            measured.runs.len().to_string(),
        ]);
    }
    page.put(&table.html());
}

fn answered(page: &mut Page, results: &Results, rows: &[Row], pictures: &[Picture]) {
    page.chapter("answer", "The answer");
    let study = &results.record.study;
    let heads = results.scenarios.iter().map(|measured| measured.scenario.name.clone());
    let mut table = Table::new("answer", [String::new()].into_iter().chain(heads));
    let base = results.scenarios.iter().position(|m| m.scenario.name == study.baseline);
    for row in rows {
        let better = match row.better {
            "" => String::new(),
            better => format!(" <small>{better} is better</small>"),
        };
        let baseline = base.and_then(|place| row.scenarios[place]);
        let cell = |(place, spread): (usize, &Option<figures::Spread>)| {
            let relative = spread.and_then(|s| s.relative(baseline.as_ref())).filter(|_| Some(place) != base);
            let relative = relative.map_or(String::new(), |r| format!(" <b>{}</b>", numbers::ratio(r)));
            match row.words[place].as_str() {
                "" => figure_of(spread.as_ref(), &relative),
                words if spread.is_none() => safe(words),
                words => format!("{} <small>{}</small>", figure_of(spread.as_ref(), &relative), safe(words)),
            }
        };
        let cells = row.scenarios.iter().enumerate().map(cell);
        table.row([format!("{}{better}", safe(&row.what))].into_iter().chain(cells));
    }
    page.put(&table.html());
    let one = results.runs().all(|run| run.record.run == 1);
    let spread =
        if one { "One run of each: no spread is known." } else { "Small: the lowest and the highest run." };
    page.say("note", &format!("{spread} Bold: the ratio to the baseline, {}.", study.baseline));
    users::many(page, pictures);
}
