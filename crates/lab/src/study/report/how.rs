//! How it was measured: everything that somebody needs who doubts a figure, or wants it again.
//!
//! Invariant: every run that was begun is in a table here, with what became of it.

use super::page::{Cell, Page, Table};
use super::results::Results;
use super::scale;
use crate::numbers::number;
use crate::study::{Engine, RunFacts};
use std::collections::BTreeSet;

/// What must be said of times inside of such machines.
pub const EMULATED: &str = "These guests ran without hardware virtualization (TCG): times inside of them say little about real ones.";

/// What must be said of loads that run for a time.
const BY_TIME: &str = "The loads run for a time, not for a count: a scenario that answers faster does more. What hosts, machines and caches \
                       moved is shown as it is, and is not the same work; the loads' own figures are what can be compared.";

/// Whether machines ran without hardware virtualization, so that times inside of them say little.
pub fn emulated(results: &Results) -> bool {
    let guests = results.runs().any(|run| run.engine == Engine::Guest.name());
    guests && results.record.hardware.values().any(|value| value.to_ascii_uppercase().contains("TCG"))
}

/// What must be known before any figure is read.
pub fn cautions(results: &Results) -> Vec<String> {
    let mut out = Vec::new();
    let engines: BTreeSet<&str> = results.runs().map(|run| run.engine.as_str()).collect();
    if engines.contains(Engine::Replay.name()) {
        out.push(
            "Where the engine is replay, one recorded session was asked of the disks again, by every run: no guest ran, and runs \
             differ by the host's time only, not by what users did."
                .into(),
        );
    }
    if results.is_by_time() {
        out.push(BY_TIME.into());
    }
    if emulated(results) {
        out.push(EMULATED.into());
    }
    if let Some(scale) = &results.record.study.scale {
        out.push(format!("Scaled by {}: {}.", number(scale.factor), scale.of));
    }
    out.extend(scale::words(results));
    if results.record.quick {
        let other: Vec<String> =
            results.record.study.quick.work.iter().map(|(word, value)| format!("{word} = {value}")).collect();
        let other = if other.is_empty() { String::new() } else { format!(", with {}", other.join(", ")) };
        out.push(format!("This is the shorter form of the study{other}."));
    }
    let machines: BTreeSet<u32> = results.runs().map(|run| run.machines).collect();
    if machines.len() > 1 {
        out.push(
            "Scenarios have different numbers of machines: their sums are not of the same work; the mean machine is in \
             the tables."
                .into(),
        );
    }
    let without: Vec<&str> = results
        .scenarios
        .iter()
        .filter(|scenario| scenario.runs.is_empty())
        .map(|scenario| scenario.name.as_str())
        .collect();
    if !without.is_empty() {
        out.push(format!("No whole run of: {}.", without.join(", ")));
    }
    let dropped = results.dropped.len();
    if dropped > 0 {
        out.push(format!("{dropped} of the runs were dropped; the reasons are at the end."));
    }
    out
}

fn engine_words(name: &str) -> &'static str {
    match name {
        "guest" => "the work was done inside of real machines, which ran on these disks",
        "replay" => "a recorded session asked of the disks again: no guest ran",
        "host" => "the work was asked of the disks from the host, through vhost-user: no guest ran",
        _ => "this version does not know it",
    }
}

/// Adds the chapter.
pub fn add_chapter(page: &mut Page, results: &Results) {
    page.chapter("how", "How it was measured");
    let record = &results.record;
    page.part("engines", "Where the work was done");
    let engines: BTreeSet<&str> = results.runs().map(|run| run.engine.as_str()).collect();
    let mut facts: Vec<(String, String)> =
        engines.iter().map(|name| (format!("engine {name}"), engine_words(name).to_string())).collect();
    facts.push(("workload".into(), record.study.work.workload.clone()));
    let parameters = &record.study.work.parameters;
    facts.extend(parameters.iter().map(|(name, value)| (name.clone(), value.to_string())));
    page.facts(facts);
    for caution in cautions(results) {
        page.say("", &caution);
    }
    page.part("hardware", "Hardware");
    page.facts(record.hardware.clone());
    page.part("versions", "Versions");
    page.facts(record.versions.clone());
    page.part("runs", "Runs");
    runs(page, results);
    page.part("commands", "Commands");
    page.folded("The study", &record.command);
    for run in results.runs().chain(&results.dropped) {
        page.folded(&format!("{}, run {}", run.scenario, run.run), &run.commands.join("\n"));
    }
    page.part("file", "The study's file");
    match &results.file {
        Some(text) => page.folded("study.toml", text),
        None => page.say("note", "study.toml was not in the results folder any more."),
    }
    page.part("reading", "How figures are made");
    page.say(
        "",
        "Each disk and guest is read about once a second. A rate is what a sum grew by; a sum that went back, as after a \
         restart, and a time without samples are gaps. Machines are added up second by second. Mean, 95th percentile and \
         peak are taken over the seconds of a run; a figure is the mean of its runs, beside it stand the lowest and the \
         highest run. Nothing from before the work's begin counts.",
    );
}

fn runs(page: &mut Page, results: &Results) {
    let mut table = Table::new(
        "words",
        ["scenario", "run", "engine", "machines", "seed", "begun", "seconds", "what became of it"],
    );
    let row = |run: &RunFacts| {
        let fate = match &run.dropped {
            None => Cell::text("counts"),
            Some(why) => Cell::default().and_bold("dropped").and_text(&format!(": {why}")),
        };
        [
            Cell::text(&run.scenario),
            Cell::text(run.run.to_string()),
            Cell::text(&run.engine),
            Cell::text(run.machines.to_string()),
            Cell::text(run.seed.to_string()),
            Cell::text(&run.begun),
            Cell::text(number(run.seconds)),
            fate,
        ]
    };
    results.runs().chain(&results.dropped).for_each(|run| table.row(row(run)));
    for name in &results.unfinished {
        let blank = (0..6).map(|_| Cell::default());
        let fate = Cell::text("not finished: it has no record");
        table.row([Cell::text(name)].into_iter().chain(blank).chain([fate]));
    }
    page.table(table);
}
