//! What users saw: response times, and what workloads measured by themselves.
//!
//! Invariant: each action has a scale of its own, so that a short one can be seen beside a long one.

use super::answer::{describe, is_better};
use super::figures::{Response, Spread};
use super::how;
use super::page::{Cell, Page, Table};
use super::results::Results;
use super::views;
use crate::markup::plain;
use crate::numbers::number;
use crate::picture::Picture;
use crate::workload::THRESHOLD_MS;
use anyhow::Result;
use std::collections::BTreeSet;

/// Response times of all actions.
pub struct Users<'a> {
    /// Each with its scenarios' response times, in the order of the study.
    pub actions: Vec<(&'a str, Vec<Option<&'a Response>>)>,
    /// One for each action.
    pub pictures: Vec<Picture>,
    /// All actions: over time, and beside the baseline. None where users did nothing.
    pub over_time: Option<(Picture, Picture)>,
}

const ALL: &str = "Mean response of all actions";

impl<'a> Users<'a> {
    /// From all runs.
    pub fn of(results: &'a Results) -> Result<Users<'a>> {
        let mut users = Users { actions: Vec::new(), pictures: Vec::new(), over_time: None };
        for name in &results.actions {
            let responses: Vec<Option<&Response>> =
                results.scenarios.iter().map(|scenario| scenario.responses.get(name)).collect();
            let means: Vec<Option<Spread>> = responses.iter().map(|r| r.map(|r| r.mean_ms)).collect();
            users.pictures.push(views::small(
                results,
                &format!("{}: mean response, ms", plain(name)),
                &means,
            )?);
            users.actions.push((name.as_str(), responses));
        }
        if !users.actions.is_empty() {
            let step = results.seconds_between_responses;
            let lines = views::over_time(results, ALL, "ms", step, &|of| &of.response_points)?;
            let means = results.scenarios.iter().map(|scenario| scenario.mean_response_ms);
            let means: Vec<_> = means.collect();
            users.over_time = Some((lines, views::beside(results, ALL, "mean of the run", "ms", &means)?));
        }
        Ok(users)
    }
}

/// Adds the chapter.
pub fn add_chapter<'a>(page: &mut Page<'a>, results: &Results, users: &'a Users) {
    page.chapter("users", "User view");
    page.say("sub", "How long users waited, and what the workload measured by itself.");
    if results.scenarios.iter().any(|scenario| scenario.score.is_some()) {
        page.part("score", "Score");
        let mut table = Table::new("words", ["", "sessions before response degrades", "in which runs"]);
        for (place, scenario) in results.scenarios.iter().enumerate() {
            let score = scenario.score;
            let all = score.filter(|score| score.carried.is_none()).and_then(|score| score.reached);
            let words = score.map_or_else(|| "not measured".into(), |score| score.words());
            let name = Cell::scenario(place, &scenario.name);
            table.row([name, Cell::figure(all.as_ref()), Cell::text(words)]);
        }
        page.table(table);
        page.say(
            "note",
            &format!(
                "Sessions that were active when the mean of several responses first exceeded its baseline, that of the fastest \
                 responses, by {}. A run that did not reach that carried all its sessions. A mean is shown only where all runs reached it.",
                thresholds(results)
            ),
        );
    }
    if how::emulated(results) {
        page.say("warn", how::EMULATED);
    }
    page.part("responses", "Response times");
    match users.actions.is_empty() {
        true => page.say("note", "Users did nothing in this study: it has no response times."),
        false => add_responses(page, results, users),
    }
    let names = results.workload_figures();
    if names.is_empty() {
        return;
    }
    page.part("measures", "What the workload measured");
    let mut table = Table::by_scenario("figures", "figure", results);
    for name in names.into_iter().filter(|name| *name != "score.sessions") {
        let (what, better) = describe(name);
        let cells = results.scenarios.iter().map(|scenario| Cell::figure(scenario.workload(name).as_ref()));
        let key = if what == name { "" } else { name };
        let first = Cell::text(what).and_small_code(key).and_small(&is_better(better));
        table.row([first].into_iter().chain(cells));
    }
    page.table(table);
}

/// What responses may exceed their baseline by, in words: scenarios may differ.
fn thresholds(results: &Results) -> String {
    let study = &results.record.study;
    let of = |scenario| study.number(scenario, "threshold_ms").unwrap_or(THRESHOLD_MS);
    let all: BTreeSet<String> =
        study.scenarios.iter().map(|scenario| format!("{} ms", number(of(scenario)))).collect();
    all.into_iter().collect::<Vec<_>>().join(" or ")
}

fn add_responses<'a>(page: &mut Page<'a>, results: &Results, users: &'a Users) {
    if let Some((lines, bars)) = &users.over_time {
        let caption = format!(
            "Lower is better. All actions by when they began, each {} s. {}",
            results.seconds_between_responses,
            views::runs_words(results)
        );
        page.pair((lines, caption), (bars, "Lower is better.".into()));
    }
    page.say("sub", "Each action's mean response: lower is better.");
    page.pictures(&users.pictures);
    let mut table = Table::new(
        "responses",
        ["action", "scenario", "how often", "mean, ms", "95th percentile, ms", "worst, ms"],
    );
    for (name, scenarios) in &users.actions {
        let mut first = Cell::text(name);
        for (place, (scenario, response)) in results.scenarios.iter().zip(scenarios).enumerate() {
            let Some(response) = response else { continue };
            let figures = response.spreads().map(|(_, spread)| Cell::figure(Some(spread)));
            let head = [std::mem::take(&mut first), Cell::scenario(place, &scenario.name)];
            table.row(head.into_iter().chain(figures));
        }
    }
    page.table(table);
    page.say(
        "note",
        "Each is the mean of the runs, with the lowest and the highest of them; each picture has a scale of \
                      its own.",
    );
}
