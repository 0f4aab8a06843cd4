//! What stands beside the page: each picture as a file, all figures as CSV, and what was found as JSON.
//!
//! Invariant: a report is put in its place when it is whole; until then the one before stays as it was.

use super::answer::AnswerRow;
use super::counters::Counter;
use super::expected::CheckedExpectation;
use super::figures::{Spread, telling_unit};
use super::measured::Measurements;
use super::results::{self, Results};
use super::seeds::{ComparedFigure, sentence};
use super::users::Users;
use super::views::ShownMetric;
use crate::picture::Picture;
use crate::study::Action;
use anyhow::{Context, Result};
use rustix::fs::{CWD, RenameFlags, renameat_with};
use rustix::io::Errno;
use serde_json::json;
use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};

/// Everything that a report is made of.
pub struct Parts<'a> {
    /// The page.
    pub html: &'a str,
    /// What was measured.
    pub results: &'a Results,
    /// The answer's table, and pictures of it.
    pub answer: (&'a [AnswerRow], &'a [Picture]),
    /// All metrics.
    pub shown: &'a [ShownMetric<'a>],
    /// Sums over several.
    pub sums: &'a [ShownMetric<'a>],
    /// All counters of the disks.
    pub counters: &'a [Counter<'a>],
    /// Response times.
    pub users: &'a Users<'a>,
    /// The published figures.
    pub beside: &'a [ComparedFigure],
    /// What it was to show.
    pub expected: &'a [CheckedExpectation],
    /// The runs' own files, where they are still there.
    pub measurements: Option<&'a Measurements>,
}

/// Writes the page and what stands beside it to a folder; returns where the page is. Results that come from runs are kept there, too.
pub fn write(parts: &Parts, dir: &Path) -> Result<PathBuf> {
    let wrong = || format!("{}: cannot write the report there", dir.display());
    std::fs::create_dir_all(dir).with_context(wrong)?;
    let new = tempfile::Builder::new().prefix(".report-").tempdir_in(dir).with_context(wrong)?;
    let new_file = |name: &str| new.path().join(name);
    let folder = new_file("report");
    let begin = || -> Result<()> {
        std::fs::create_dir(&folder)?;
        std::fs::write(new_file("report.html"), parts.html)?;
        pictures(parts, &folder)?;
        file(&folder.join("series.csv"), |out| series(parts, out))?;
        file(&folder.join("figures.csv"), |out| figures(parts, out))?;
        file(&folder.join("counters.csv"), |out| counters(parts, out))?;
        file(&folder.join("actions.csv"), |out| actions(parts, out))?;
        file(&folder.join("findings.json"), |out| findings(parts, out))?;
        if let Some(measurements) = parts.measurements {
            file(&folder.join("responses.csv"), |out| responses(measurements, out))?;
            file(&new_file(results::FILE), |out| parts.results.write(out))?;
        }
        Ok(())
    };
    begin().with_context(wrong)?;
    if parts.measurements.is_some() {
        put(&new_file(results::FILE), &dir.join(results::FILE))?;
    }
    put(&folder, &dir.join("report"))?;
    put(&new_file("report.html"), &dir.join("report.html"))?;
    Ok(dir.join("report.html"))
}

fn file(path: &Path, write: impl FnOnce(&mut BufWriter<File>) -> Result<()>) -> Result<()> {
    let mut out = BufWriter::new(File::create(path)?);
    write(&mut out)?;
    Ok(out.flush()?)
}

/// Puts what is new in the place of what is old, which goes where the new was: it goes with that folder.
fn put(new: &Path, old: &Path) -> Result<()> {
    let wrong = || format!("{}: cannot put the new report there", old.display());
    match renameat_with(CWD, new, CWD, old, RenameFlags::EXCHANGE) {
        Ok(()) => return Ok(()),
        Err(Errno::NOENT) => {}
        // Not on this file system.
        Err(_) if old.is_dir() => {
            std::fs::rename(old, new.with_extension("old")).with_context(wrong)?;
        }
        Err(_) => {}
    }
    std::fs::rename(new, old).with_context(wrong)
}

fn pictures(parts: &Parts, folder: &Path) -> Result<()> {
    for shown in parts.shown {
        if let Some((lines, bars)) = &shown.pictures {
            std::fs::write(folder.join(format!("{}-lines.svg", shown.metric.key)), lines.file()?)?;
            std::fs::write(folder.join(format!("{}-bars.svg", shown.metric.key)), bars.file()?)?;
        }
    }
    if let Some((lines, bars)) = &parts.users.over_time {
        std::fs::write(folder.join("response-lines.svg"), lines.file()?)?;
        std::fs::write(folder.join("response-bars.svg"), bars.file()?)?;
    }
    // Their names come from files: a number is no path.
    for (name, pictures) in [("answer", parts.answer.1), ("response", &parts.users.pictures[..])] {
        for (i, picture) in pictures.iter().enumerate() {
            std::fs::write(folder.join(format!("{name}-{}-bars.svg", i + 1)), picture.file()?)?;
        }
    }
    Ok(())
}

/// A field of CSV. What a spreadsheet would take for a formula begins with an apostrophe.
fn field(words: &str) -> String {
    let words = match words.starts_with(['=', '+', '-', '@', '\t', '\r']) {
        true => format!("'{words}"),
        false => words.to_string(),
    };
    match words.contains([',', '"', '\n', '\r']) {
        true => format!("\"{}\"", words.replace('"', "\"\"")),
        false => words,
    }
}

fn spread(spread: &Spread) -> String {
    format!("{},{},{},{}", spread.mean, spread.low, spread.high, spread.runs)
}

fn series(parts: &Parts, out: &mut impl Write) -> Result<()> {
    writeln!(out, "metric,unit,scenario,time_s,mean,low,high,runs")?;
    let mut line = |metric: &str, unit: &str, scenario: &str, step: usize, points: &[Option<Spread>]| {
        for (i, point) in points.iter().enumerate() {
            let Some(point) = point else { continue };
            writeln!(out, "{metric},{unit},{},{},{}", field(scenario), i * step, spread(point))?;
        }
        std::io::Result::Ok(())
    };
    let results = parts.results;
    for ShownMetric { metric, .. } in parts.shown {
        for scenario in &results.scenarios {
            let step = results.seconds_between_points;
            line(metric.key, metric.unit, &scenario.name, step, scenario.points(metric))?;
        }
    }
    for scenario in &results.scenarios {
        let step = results.seconds_between_responses;
        line("response", "ms", &scenario.name, step, &scenario.response_points)?;
    }
    Ok(())
}

fn figures(parts: &Parts, out: &mut impl Write) -> Result<()> {
    writeln!(out, "name,figure,unit,scenario,mean,low,high,runs,of_baseline")?;
    for shown in parts.shown.iter().chain(parts.sums) {
        let metric = shown.metric;
        let relative = shown.relative(parts.results);
        for (place, figures) in shown.figures.iter().enumerate() {
            let Some(figures) = figures else { continue };
            let scenario = field(&parts.results.scenarios[place].name);
            let telling = figures.telling(metric);
            for (name, found) in figures.spreads() {
                let unit = if name == "total" { telling_unit(metric) } else { metric.unit };
                let relative = relative[place].filter(|_| telling.as_ref() == Some(found));
                let relative = relative.map_or(String::new(), |relative| relative.to_string());
                writeln!(out, "{},{name},{unit},{scenario},{},{relative}", metric.key, spread(found))?;
            }
        }
    }
    for name in parts.results.workload_figures() {
        for scenario in &parts.results.scenarios {
            if let Some(found) = scenario.workload(name) {
                let (name, scenario) = (field(name), field(&scenario.name));
                writeln!(out, "{name},workload,,{scenario},{},", spread(&found))?;
            }
        }
    }
    Ok(())
}

fn counters(parts: &Parts, out: &mut impl Write) -> Result<()> {
    writeln!(out, "counter,figure,scenario,mean,low,high,runs")?;
    for one in parts.counters {
        let figure = if one.is_level { "highest" } else { "growth" };
        for (scenario, found) in parts.results.scenarios.iter().zip(&one.scenarios) {
            let Some(found) = found else { continue };
            writeln!(out, "{},{figure},{},{}", field(one.key), field(&scenario.name), spread(found))?;
        }
    }
    Ok(())
}

/// Each action of each run.
fn responses(measurements: &Measurements, out: &mut impl Write) -> Result<()> {
    writeln!(out, "scenario,run,machine,session,action,at_s,took_ms")?;
    for run in measurements.runs() {
        let head = format!("{},{}", field(&run.record.facts.scenario), run.record.facts.run);
        for Action { machine, session, name, at_s, took_ms } in &run.record.actions {
            writeln!(out, "{head},{machine},{session},{},{at_s:.3},{took_ms:.3}", field(name))?;
        }
    }
    Ok(())
}

fn actions(parts: &Parts, out: &mut impl Write) -> Result<()> {
    writeln!(out, "action,scenario,figure,mean,low,high,runs")?;
    for (name, scenarios) in &parts.users.actions {
        for (scenario, response) in parts.results.scenarios.iter().zip(scenarios) {
            let Some(response) = response else { continue };
            for (figure, found) in response.spreads() {
                writeln!(out, "{},{},{figure},{}", field(name), field(&scenario.name), spread(found))?;
            }
        }
    }
    Ok(())
}

/// What the report says of the results, for programs.
fn findings(parts: &Parts, out: &mut impl Write) -> Result<()> {
    let all = json!({
        "schema": results::SCHEMA,
        "scenarios": parts.results.scenarios.iter().map(|scenario| &scenario.name).collect::<Vec<_>>(),
        "answer": parts.answer.0,
        "expected": parts.expected,
        "published": {"sentence": sentence(parts.beside), "figures": parts.beside},
    });
    serde_json::to_writer_pretty(&mut *out, &all)?;
    Ok(writeln!(out)?)
}
