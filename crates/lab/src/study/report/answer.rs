//! The answer: the most telling figures, one column a scenario, as the published tables have them.
//!
//! Invariant: a row is there only if a scenario has it.

use super::figures::{Score, Spread};
use super::results::{Results, ScenarioResults};
use crate::study::metric::{GUEST_IO, HOST_IO, named};
use serde::Serialize;
use std::collections::BTreeSet;

/// One figure of all scenarios.
#[derive(Debug, Serialize)]
pub struct AnswerRow {
    /// What, and in what.
    pub what: String,
    /// Which way is good, in a word; empty where neither is.
    pub better: &'static str,
    /// In the order of the study.
    pub scenarios: Vec<Option<Spread>>,
    /// What is known where there is no figure; empty where nothing is said.
    pub words: Vec<String>,
    /// Whether scenarios lie apart in it by what they are, so that a picture is worth its place.
    #[serde(skip)]
    pub picture: bool,
}

const LOWER: &str = "lower";
const HIGHER: &str = "higher";

/// What a workload's figure is called, and which way is good.
pub fn describe(name: &str) -> (String, &'static str) {
    let plain = |what: &str, better| (what.to_string(), better);
    if let Some((profile, last)) = name.strip_prefix("fio.").and_then(|rest| rest.rsplit_once('.')) {
        let (what, better) = match last {
            "began_s" => ("began at, s", ""),
            "iops" => ("I/Os per second", HIGHER),
            "mb_s" => ("MB per second", HIGHER),
            "mean_ms" => ("mean response time, ms", LOWER),
            "p50_ms" => ("median response time, ms", LOWER),
            "p99_ms" => ("99th percentile of response times, ms", LOWER),
            "max_ms" => ("longest response time, ms", LOWER),
            other => (other, ""),
        };
        return (format!("{profile}: {what}"), better);
    }
    match name {
        "boot_s" => plain("Boot time, s", LOWER),
        "logon_s" => plain("Logon time, s", LOWER),
        "score.sessions" => plain("Score: sessions before response degrades", HIGHER),
        "score.active" => plain("Most sessions at a time", ""),
        "replay.requests" => plain("Requests asked of the disks", ""),
        "replay.late" => plain("Requests that began more than a millisecond late", LOWER),
        "replay.seconds" => plain("Longest replay of a machine's work, s", LOWER),
        "replay.actions_without_requests" => plain("Actions that asked nothing of the disk", ""),
        other => plain(other, ""),
    }
}

/// Which way is good, in a sentence; empty where neither is.
pub fn is_better(better: &str) -> String {
    if better.is_empty() { String::new() } else { format!("{better} is better") }
}

/// All rows that there are.
pub fn rows(results: &Results) -> Vec<AnswerRow> {
    let mut rows = Vec::new();
    let mut add = |what: String, better, picture, of: &dyn Fn(&ScenarioResults) -> Option<Spread>| {
        let scenarios: Vec<Option<Spread>> = results.scenarios.iter().map(of).collect();
        if scenarios.iter().flatten().next().is_some() {
            let words = vec![String::new(); scenarios.len()];
            rows.push(AnswerRow { what, better, scenarios, words, picture });
        }
    };
    let names = results.workload_figures();
    let profiles: BTreeSet<&str> = names
        .iter()
        .filter_map(|name| name.strip_prefix("fio.")?.rsplit_once('.').map(|(profile, _)| profile))
        .collect();
    for profile in &profiles {
        // What is asked with large blocks is bandwidth.
        let lasts: &[&str] = match profile.starts_with("fio-") {
            true => &["mb_s", "mean_ms"],
            false => &["iops", "mb_s", "mean_ms", "p99_ms"],
        };
        for &last in lasts {
            let name = format!("fio.{profile}.{last}");
            let (what, better) = describe(&name);
            add(what, better, last != "p99_ms", &|of| of.workload(&name));
        }
    }
    if profiles.is_empty() {
        let what = "Machines' reads and writes per second";
        add(what.into(), "", false, &|of| of.figures(&GUEST_IO)?.mean);
    }
    let what = "Mean response time of users' actions, ms";
    add(what.into(), LOWER, true, &|of| of.mean_response_ms);
    for name in ["logon_s", "boot_s"] {
        let (what, better) = describe(name);
        add(what, better, true, &|of| of.workload(name));
    }
    let cpu = |of: &ScenarioResults| {
        let of = |key: &str| of.figures(named(key)?)?.mean;
        of("host-cpu").or_else(|| of("host-cpu-worker"))
    };
    // Of a load that runs for a time, who does more moves more.
    let lower = if results.is_by_time() { "" } else { LOWER };
    add("Processor of the host, % of a core".into(), lower, false, &cpu);
    let what = "Reads and writes of the host's storage per second";
    add(what.into(), lower, true, &|of| of.figures(&HOST_IO)?.mean);
    for (key, what) in [
        ("host-read-bytes", "Read from the host's storage, MB"),
        ("host-written-bytes", "Written to the host's storage, MB"),
    ] {
        add(what.into(), lower, false, &|of| of.figures(named(key)?)?.total);
    }
    add("RAM of the cache at its highest, MB".into(), LOWER, false, &|of| {
        of.figures(named("ram-used")?)?.peak
    });
    rows.extend(score(results));
    rows
}

/// The score, which a scenario has as a figure only if all its runs reached it.
fn score(results: &Results) -> Option<AnswerRow> {
    let scores: Vec<Option<Score>> = results.scenarios.iter().map(|scenario| scenario.score).collect();
    scores.iter().flatten().next()?;
    let figure =
        |of: &Option<Score>| of.as_ref()?.reached.filter(|_| of.is_some_and(|s| s.carried.is_none()));
    let scenarios: Vec<Option<Spread>> = scores.iter().map(figure).collect();
    let words = scores.iter().map(|of| of.as_ref().map_or_else(String::new, Score::words)).collect();
    let picture = scenarios.iter().all(Option::is_some);
    let (what, better) = describe("score.sessions");
    Some(AnswerRow { what, better, scenarios, words, picture })
}
