//! What stands beside the page: each picture as a file, and all figures as CSV and JSON.
//!
//! Invariant: a report is put in its place when it is whole; until then the one before stays as it was.

use super::answer::Row;
use super::counters::Counter;
use super::expected::Expected;
use super::figures::{
    Figures, Response, Spread, measure, measures, points, response_points, response_step, step, telling_unit,
};
use super::results::Results;
use super::seeds::{Beside, sentence};
use super::svg::Picture;
use super::users::Users;
use super::views::Shown;
use crate::study::Action;
use anyhow::{Context, Result};
use rustix::fs::{CWD, RenameFlags, renameat_with};
use rustix::io::Errno;
use serde::Serialize;
use serde_json::{Value, json};
use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};

/// Everything that a report is made of.
pub struct Parts<'a> {
    /// The runs.
    pub results: &'a Results,
    /// The answer's table, and pictures of it.
    pub answer: (&'a [Row], &'a [Picture]),
    /// All metrics.
    pub shown: &'a [Shown],
    /// Sums over several.
    pub sums: &'a [Shown],
    /// All counters of the disks.
    pub counters: &'a [Counter],
    /// Response times.
    pub users: &'a Users,
    /// The published figures.
    pub beside: &'a [Beside],
    /// What it was to show.
    pub expected: &'a [Expected],
}

/// Writes the page and what stands beside it; returns where the page is.
pub fn write(parts: &Parts, html: &str) -> Result<PathBuf> {
    let dir = &parts.results.dir;
    let new = tempfile::Builder::new().prefix(".report-").tempdir_in(dir);
    let new = new.with_context(|| format!("{}: cannot write the report there", dir.display()))?;
    let folder = new.path().join("report");
    let page = new.path().join("report.html");
    let begin = || -> Result<()> {
        std::fs::create_dir(&folder)?;
        std::fs::write(&page, html)?;
        pictures(parts, &folder)?;
        series(parts, &folder.join("series.csv"))?;
        figures(parts, &folder.join("figures.csv"))?;
        counters(parts, &folder.join("counters.csv"))?;
        actions(parts, &folder.join("actions.csv"))?;
        responses(parts, &folder.join("responses.csv"))?;
        let mut json = BufWriter::new(File::create(folder.join("all.json"))?);
        serde_json::to_writer_pretty(&mut json, &all(parts))?;
        Ok(json.flush()?)
    };
    begin().with_context(|| format!("{}: cannot write the report there", dir.display()))?;
    put(&folder, &dir.join("report"))?;
    put(&page, &dir.join("report.html"))?;
    Ok(dir.join("report.html"))
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
            std::fs::write(folder.join(format!("{}-lines.svg", shown.metric.key)), lines.alone())?;
            std::fs::write(folder.join(format!("{}-bars.svg", shown.metric.key)), bars.alone())?;
        }
    }
    if let Some((lines, bars)) = &parts.users.over_time {
        std::fs::write(folder.join("response-lines.svg"), lines.alone())?;
        std::fs::write(folder.join("response-bars.svg"), bars.alone())?;
    }
    // Their names come from files: a number is no path.
    for (name, pictures) in [("answer", parts.answer.1), ("response", &parts.users.pictures[..])] {
        for (i, picture) in pictures.iter().enumerate() {
            std::fs::write(folder.join(format!("{name}-{}-bars.svg", i + 1)), picture.alone())?;
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

fn series(parts: &Parts, path: &Path) -> Result<()> {
    let mut out = BufWriter::new(File::create(path)?);
    writeln!(out, "metric,unit,scenario,time_s,mean,low,high,runs")?;
    let step = step(parts.results);
    for shown in parts.shown {
        for measured in &parts.results.scenarios {
            for (i, point) in points(measured, shown.metric, step).iter().enumerate() {
                let Some(point) = point else { continue };
                let name = field(&measured.scenario.name);
                let head = format!("{},{},{name},{}", shown.metric.key, shown.metric.unit, i * step);
                writeln!(out, "{head},{}", spread(point))?;
            }
        }
    }
    let step = response_step(parts.results);
    for measured in &parts.results.scenarios {
        for (i, point) in response_points(measured, step).iter().enumerate() {
            let Some(point) = point else { continue };
            writeln!(out, "response,ms,{},{},{}", field(&measured.scenario.name), i * step, spread(point))?;
        }
    }
    Ok(out.flush()?)
}

fn figures(parts: &Parts, path: &Path) -> Result<()> {
    let mut out = BufWriter::new(File::create(path)?);
    writeln!(out, "name,figure,unit,scenario,mean,low,high,runs,of_baseline")?;
    for shown in parts.shown.iter().chain(parts.sums) {
        let relative = shown.relative(parts.results);
        for (place, figures) in shown.figures.iter().enumerate() {
            let Some(f) = figures else { continue };
            let scenario = field(&parts.results.scenarios[place].scenario.name);
            for (name, found) in named(f) {
                let telling = found.is_some() && found == f.telling(shown.metric).as_ref();
                let unit = if name == "total" { telling_unit(shown.metric) } else { shown.metric.unit };
                let relative = relative[place].filter(|_| telling).map_or(String::new(), |r| r.to_string());
                if let Some(found) = found {
                    writeln!(
                        out,
                        "{},{name},{unit},{scenario},{},{relative}",
                        shown.metric.key,
                        spread(found)
                    )?;
                }
            }
        }
    }
    for name in measures(parts.results) {
        for measured in &parts.results.scenarios {
            if let Some(found) = measure(measured, &name) {
                let (name, scenario) = (field(&name), field(&measured.scenario.name));
                writeln!(out, "{name},workload,,{scenario},{},", spread(&found))?;
            }
        }
    }
    Ok(out.flush()?)
}

fn named(f: &Figures) -> [(&'static str, Option<&Spread>); 6] {
    [
        ("total", f.total.as_ref()),
        ("mean", f.mean.as_ref()),
        ("p95", f.p95.as_ref()),
        ("peak", f.peak.as_ref()),
        ("machine_mean", f.machine_mean.as_ref()),
        ("machine_p95", f.machine_p95.as_ref()),
    ]
}

fn counters(parts: &Parts, path: &Path) -> Result<()> {
    let mut out = BufWriter::new(File::create(path)?);
    writeln!(out, "counter,figure,scenario,mean,low,high,runs")?;
    for one in parts.counters {
        let figure = if one.level { "highest" } else { "growth" };
        for (measured, found) in parts.results.scenarios.iter().zip(&one.scenarios) {
            let Some(found) = found else { continue };
            let name = field(&measured.scenario.name);
            writeln!(out, "{},{figure},{name},{}", field(&one.key), spread(found))?;
        }
    }
    Ok(out.flush()?)
}

/// Each action of each run.
fn responses(parts: &Parts, path: &Path) -> Result<()> {
    let mut out = BufWriter::new(File::create(path)?);
    writeln!(out, "scenario,run,machine,session,action,at_s,took_ms")?;
    for run in parts.results.runs() {
        let head = format!("{},{}", field(&run.record.scenario), run.record.run);
        for Action { machine, session, name, at_s, took_ms } in &run.record.actions {
            writeln!(out, "{head},{machine},{session},{},{at_s:.3},{took_ms:.3}", field(name))?;
        }
    }
    Ok(out.flush()?)
}

fn actions(parts: &Parts, path: &Path) -> Result<()> {
    let mut out = BufWriter::new(File::create(path)?);
    writeln!(out, "action,scenario,figure,mean,low,high,runs")?;
    for (name, scenarios) in &parts.users.actions {
        for (measured, response) in parts.results.scenarios.iter().zip(scenarios) {
            let Some(Response { count, mean_ms, p95_ms, worst_ms }) = response else { continue };
            let head = format!("{},{}", field(name), field(&measured.scenario.name));
            for (figure, found) in
                [("count", count), ("mean_ms", mean_ms), ("p95_ms", p95_ms), ("worst_ms", worst_ms)]
            {
                writeln!(out, "{head},{figure},{}", spread(found))?;
            }
        }
    }
    Ok(out.flush()?)
}

/// Everything, for programs.
fn all(parts: &Parts) -> Value {
    let results = parts.results;
    let names: Vec<&str> = results.scenarios.iter().map(|m| m.scenario.name.as_str()).collect();
    let step = step(results);
    let metric = |shown: &Shown| {
        let scenarios = results.scenarios.iter().zip(&shown.figures).zip(shown.relative(results)).map(
            |((measured, figures), relative)| {
                json!({
                    "scenario": measured.scenario.name, "figures": figures, "of_baseline": relative,
                    "series": points(measured, shown.metric, step),
                })
            },
        );
        let Shown { metric, .. } = shown;
        json!({
            "key": metric.key, "title": metric.title, "unit": metric.unit, "total_unit": telling_unit(metric),
            "note": results.note(metric), "scenarios": scenarios.collect::<Vec<_>>(),
        })
    };
    let runs = results.runs().map(|run| &run.record);
    let response =
        |(name, found): &(String, Vec<Option<Response>>)| json!({"action": name, "scenarios": found});
    json!({
        "schema": crate::study::record::SCHEMA,
        "study": results.record,
        "scenarios": names,
        "answer": parts.answer.0,
        "seconds_between_points": step,
        "metrics": parts.shown.iter().chain(parts.sums).map(metric).collect::<Vec<_>>(),
        "counters": parts.counters,
        "responses": parts.users.actions.iter().map(response).collect::<Vec<_>>(),
        "expected": parts.expected,
        "published": {"sentence": sentence(parts.beside), "figures": parts.beside},
        "runs": runs.map(brief).collect::<Vec<_>>(),
        "dropped": results.dropped.iter().map(brief).collect::<Vec<_>>(),
        "unfinished": results.unfinished,
    })
}

/// A run without its actions, which are in its own record.
fn brief(run: &(impl Serialize + Clone)) -> Value {
    let mut value = serde_json::to_value(run).unwrap_or(Value::Null);
    if let Some(fields) = value.as_object_mut() {
        fields.remove("actions");
    }
    value
}
