//! What users saw: response times, and what workloads measured by themselves.
//!
//! Invariant: each action has a scale of its own, so that a short one can be seen beside a long one.

use super::answer::describe;
use super::bars::{self, Bar};
use super::figures::{Response, Score, Spread, actions, measure, measures, response_points, response_step};
use super::how;
use super::numbers::{number, ratio};
use super::page::{Page, Table, figure, safe, scenario};
use super::results::Results;
use super::svg::Picture;
use super::views;
use crate::markup::plain;
use crate::workload::THRESHOLD_MS;
use anyhow::Result;
use std::collections::BTreeSet;

/// Response times of all actions.
pub struct Users {
    /// Each with its scenarios' response times, in the order of the study.
    pub actions: Vec<(String, Vec<Option<Response>>)>,
    /// One for each action.
    pub pictures: Vec<Picture>,
    /// All actions: over time, and beside the baseline. None where users did nothing.
    pub over_time: Option<(Picture, Picture)>,
}

const ALL: &str = "Mean response of all actions";

impl Users {
    /// From all runs.
    pub fn of(results: &Results) -> Result<Users> {
        let mut users = Users { actions: Vec::new(), pictures: Vec::new(), over_time: None };
        for name in actions(results) {
            let of = |measured| Response::of(measured, Some(&name));
            let responses: Vec<Option<Response>> = results.scenarios.iter().map(of).collect();
            let means: Vec<Option<Spread>> =
                responses.iter().map(|r| r.as_ref().map(|r| r.mean_ms)).collect();
            users.pictures.push(small(results, &format!("{}: mean response, ms", plain(&name)), &means)?);
            users.actions.push((name, responses));
        }
        if !users.actions.is_empty() {
            let step = response_step(results);
            let lines = views::over_time(results, ALL, "ms", step, &|of| response_points(of, step))?;
            let means = results.scenarios.iter().map(|of| Some(Response::of(of, None)?.mean_ms));
            let means: Vec<_> = means.collect();
            users.over_time = Some((lines, views::beside(results, ALL, "mean of the run", "ms", &means)?));
        }
        Ok(users)
    }
}

/// A small picture: one value of each scenario, without an axis.
pub fn small(results: &Results, title: &str, values: &[Option<Spread>]) -> Result<Picture> {
    let base = results.scenarios.iter().position(|m| m.scenario.name == results.record.study.baseline);
    let base = base.and_then(|place| values[place]);
    let names: Vec<String> = results.scenarios.iter().map(|m| plain(&m.scenario.name)).collect();
    let bars: Vec<Bar> = values
        .iter()
        .enumerate()
        .map(|(place, spread)| Bar {
            name: &names[place],
            place,
            value: spread.map(|s| s.mean),
            spread: spread.filter(|s| s.runs > 1).map(|s| (s.low, s.high)),
            words: match (spread, spread.and_then(|s| s.relative(base.as_ref()))) {
                (None, _) => "not measured".into(),
                (Some(s), Some(relative)) => format!("{} \u{b7} {}", ratio(relative), number(s.mean)),
                (Some(s), None) => number(s.mean),
            },
        })
        .collect();
    bars::draw(title, None, None, &bars)
}

/// Small pictures side by side, under their titles.
pub fn many(page: &mut Page, pictures: &[Picture]) {
    page.put("<div class=\"many\">");
    for picture in pictures {
        let title = safe(&picture.label);
        page.put(&format!("<figure><figcaption>{title}</figcaption>{}</figure>", picture.inline()));
    }
    page.put("</div>");
}

/// The chapter.
pub fn chapter(page: &mut Page, results: &Results, users: &Users) {
    page.chapter("users", "User view");
    page.say("sub", "How long users waited, and what the workload measured by itself.");
    let score: Vec<Option<Score>> = results.scenarios.iter().map(Score::of).collect();
    if score.iter().any(Option::is_some) {
        page.part("score", "Score");
        let mut table = Table::new("words", ["", "sessions before response degrades", "in which runs"]);
        for (place, (measured, score)) in results.scenarios.iter().zip(&score).enumerate() {
            let all = score.filter(|score| score.carried.is_none()).and_then(|score| score.reached);
            let words = score.map_or_else(|| "not measured".into(), |score| score.words());
            table.row([scenario(place, &measured.scenario.name), figure(all.as_ref()), safe(&words)]);
        }
        page.put(&table.html());
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
        false => responses(page, results, users),
    }
    let names = measures(results);
    if names.is_empty() {
        return;
    }
    page.part("measures", "What the workload measured");
    let heads = results.scenarios.iter().map(|measured| measured.scenario.name.clone());
    let mut table = Table::new("figures", [String::from("figure")].into_iter().chain(heads));
    for name in names.iter().filter(|name| *name != "score.sessions") {
        let (what, better) = describe(name);
        let better =
            if better.is_empty() { String::new() } else { format!(" <small>{better} is better</small>") };
        let cells = results.scenarios.iter().map(|measured| figure(measure(measured, name).as_ref()));
        let key = if what == *name {
            String::new()
        } else {
            format!(" <small><code>{}</code></small>", safe(name))
        };
        table.row([format!("{}{key}{better}", safe(&what))].into_iter().chain(cells));
    }
    page.put(&table.html());
}

/// What responses may exceed their baseline by, in words: scenarios may differ.
fn thresholds(results: &Results) -> String {
    let study = &results.record.study;
    let of = |scenario| study.number(scenario, "threshold_ms").unwrap_or(THRESHOLD_MS);
    let all: BTreeSet<String> =
        study.scenarios.iter().map(|scenario| format!("{} ms", number(of(scenario)))).collect();
    all.into_iter().collect::<Vec<_>>().join(" or ")
}

fn responses(page: &mut Page, results: &Results, users: &Users) {
    if let Some((lines, bars)) = &users.over_time {
        let caption = format!(
            "Lower is better. All actions by when they began, each {} s. {}",
            response_step(results),
            views::runs_words(results)
        );
        views::pair(page, (lines, caption), (bars, "Lower is better.".into()));
    }
    page.say("sub", "Each action's mean response: lower is better.");
    many(page, &users.pictures);
    let mut table = Table::new(
        "responses",
        ["action", "scenario", "how often", "mean, ms", "95th percentile, ms", "worst, ms"],
    );
    for (name, scenarios) in &users.actions {
        let mut first = safe(name);
        for (place, (measured, response)) in results.scenarios.iter().zip(scenarios).enumerate() {
            let Some(r) = response else { continue };
            let figures = [&r.count, &r.mean_ms, &r.p95_ms, &r.worst_ms].map(|spread| figure(Some(spread)));
            let head = [std::mem::take(&mut first), scenario(place, &measured.scenario.name)];
            table.row(head.into_iter().chain(figures));
        }
    }
    page.put(&table.html());
    page.say(
        "note",
        "Each is the mean of the runs, with the lowest and the highest of them; each picture has a scale of \
                      its own.",
    );
}
