//! Overhead: what recording, and another program's extra work, cost each request on the data path.
//!
//! Owns the pairs. Two disks live side by side and the same load runs on one and then the other, several times in turn: the
//! median difference of these turns is the pair's. Each pair is of new disks, since one of two disks of the same
//! program can be faster for as long as both live. How far such disks differ is measured too, beside `--against`: what is
//! less than that cannot be told from nothing.
//!
//! With one request at a time there are some 500,000 a second, and what is added to one is missed by the next;
//! with 16 there are as many as one thread can ask, so that each nanosecond shows. The recorder is stopped while it is
//! measured: the ring is written and nobody reads it, so that its own processor time, of which two cores have none to
//! spare, is not counted.

use crate::Options;
use crate::checks::{Asked, Check, check};
use crate::environment::{Environment, Origin};
use anyhow::{Context, Result, bail, ensure};
use serde::Serialize;
use serde_json::Value;
use spillway_testkit::cores;
use spillway_testkit::disk::{figure, went_wrong};
use spillway_testkit::{Disk, Driver, End, Load, Server, Shape};
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Requests at once.
const DEPTHS: [usize; 2] = [1, 16];
/// What the pairs are of.
const RECORDING: &str = "recording";
const AGAINST: &str = "this program";
const TWICE: &str = "the same program twice";
/// What a request may take at 500,000 a second.
const BUDGET_NS: f64 = 2000.0;
/// What may be added, in percent of what one may take at 500,000 a second.
const RECORDING_PERCENT: f64 = 3.0;
const AGAINST_PERCENT: f64 = 1.0;
const LEAST_PAIRS: usize = 10;
/// Of each pair of disks.
const TURNS: usize = 7;
const SPAN: u64 = 5 << 29;

/// One side of the pairs.
struct Side {
    disk: Disk,
    driver: Driver,
    recorder: Option<Server>,
    _files: tempfile::TempDir,
}

impl Side {
    fn new(environment: &Environment, program: &Path, records: bool) -> Result<Side> {
        let files = tempfile::Builder::new().prefix("disk.").tempdir_in(environment.disk())?;
        let base = files.path().join("base.raw");
        std::fs::File::create(&base)?.set_len(SPAN)?;
        let disk = Disk::start_with(program, files.path(), &base, &["--ram", "3G", "--overflow", "4G"])?;
        cores::pin_process(disk.worker()?, environment.serving())?;
        let shape = Shape { depth: 16, request_bytes: 64 << 10, ..Shape::default() };
        let mut driver = Driver::connect_with(&disk.vhost(), shape)?;
        driver.run(&Load::fill(SPAN, 64 << 10))?;
        let recorder = records.then(|| recorder(program, files.path(), &disk.control())).transpose()?;
        Ok(Side { disk, driver, recorder, _files: files })
    }

    /// Nanoseconds a request.
    fn measure(&mut self, depth: usize, time: Duration) -> Result<f64> {
        let load = |time| Load { span_bytes: SPAN, ..Load::seed_004(depth, End::After(time)) };
        self.driver.run(&load(time / 6))?;
        Ok(1e9 / self.driver.run(&load(time))?.iops)
    }

    fn end(mut self) -> Result<()> {
        if let Some(recorder) = &mut self.recorder {
            // It ends with an error, since it has lost what came while it was stopped.
            recorder.stop()?;
            let said = recorder.tail();
            let json = said.lines().find_map(|line| serde_json::from_str::<Value>(line).ok());
            let lost = json.and_then(|json| figure(&json, "lost").ok());
            ensure!(lost > Some(0), "the recorder was told of nothing: {said}");
        }
        if let Some(wrong) = went_wrong(&self.disk.stats()?) {
            bail!("a disk cannot be counted on: {wrong}");
        }
        drop(self.driver);
        self.disk.stop()
    }
}

/// One that has the ring, and is stopped.
fn recorder(program: &Path, dir: &Path, control: &Path) -> Result<Server> {
    let trace = dir.join("trace");
    let program = program.to_str().context("the program's path is not UTF-8")?;
    // One that is stopped would not hear anything gentler when this program has gone.
    let words = ["--pdeathsig", "KILL", program, "trace", "record", "--json", "--out"];
    let mut arguments = words.map(String::from).to_vec();
    arguments.extend([&trace, control].map(|path| path.display().to_string()));
    let mut recorder = Server::start("recorder", "setpriv", &arguments, None, &dir.join("recorder.log"))?;
    // It makes the file once the disk has given it the ring.
    recorder.wait_for(&trace, Duration::from_secs(30))?;
    recorder.pause()?;
    Ok(recorder)
}

/// What the pairs have come to: medians of theirs.
#[derive(Serialize)]
struct Overhead {
    what: String,
    /// Requests at once.
    depth: usize,
    /// Requests a second of the first side.
    per_second: f64,
    /// Nanoseconds that were added to a request.
    added_ns: f64,
    /// The quarter and three quarters of those.
    added_quartiles_ns: [f64; 2],
    /// What was added, as a share of what a request takes here, so that so many fewer are done.
    share: f64,
    /// The same of what a request may take at 500,000 a second.
    share_of_budget: f64,
    pairs: Vec<Pair>,
}

/// One pair of disks: medians of its turns.
#[derive(Serialize)]
struct Pair {
    before_ns: f64,
    after_ns: f64,
    /// Of the differences.
    added_ns: f64,
}

/// All of it.
#[derive(Serialize)]
pub struct Report {
    schema: u32,
    origin: Origin,
    found: Vec<Overhead>,
    /// What may be added, and was.
    pub checks: Vec<Check>,
}

/// Measures pairs: recording beside not recording; and, with `--against`, this program beside another, and beside itself.
pub fn measure(options: &Options, environment: &Environment) -> Result<Report> {
    let this = &environment.spillway;
    if let Some(against) = &options.against {
        let bytes = |path: &PathBuf| {
            std::fs::read(path).with_context(|| format!("{}: cannot be read", path.display()))
        };
        ensure!(bytes(against)? != bytes(this)?, "--against: {} is the same program", against.display());
    }
    // What is started from here on stays on the core that drives, but for each worker's first thread, which serves.
    environment.keep_to_core()?;
    let mut found = pairs(options, environment, RECORDING, (this, false), (this, true))?;
    if let Some(against) = &options.against {
        found.extend(pairs(options, environment, AGAINST, (against, false), (this, false))?);
        found.extend(pairs(options, environment, TWICE, (this, false), (this, false))?);
    }
    let checks = checks(&found);
    Ok(Report { schema: 2, origin: environment.origin.clone(), found, checks })
}

/// Programs, and whether their disks are recorded.
type Which<'a> = (&'a PathBuf, bool);

fn pairs(
    options: &Options,
    environment: &Environment,
    what: &str,
    before: Which,
    after: Which,
) -> Result<Vec<Overhead>> {
    let time = Duration::from_secs_f64(options.seconds(0.2, 0.1));
    let pairs = options.rounds.map_or(if options.quick { 2 } else { 20 }, usize::from);
    // Of each pair, by depth.
    let mut found: [Vec<Pair>; DEPTHS.len()] = Default::default();
    for pair in 0..pairs {
        // The one that begins, with its memory, its disk and its turns.
        let first = pair % 2;
        let mut sides: Vec<Side> = if first == 0 { [before, after] } else { [after, before] }
            .into_iter()
            .map(|(program, records)| Side::new(environment, program, records))
            .collect::<Result<_>>()?;
        for (depth, found) in DEPTHS.into_iter().zip(&mut found) {
            let mut turns = [Vec::new(), Vec::new()];
            for turn in 0..TURNS {
                for side in [turn % 2, 1 - turn % 2] {
                    turns[side ^ first].push(sides[side].measure(depth, time)?);
                }
            }
            found.push(Pair::of(turns));
        }
        sides.into_iter().try_for_each(Side::end)?;
    }
    let of = |(depth, pairs)| Overhead::of(what, depth, pairs);
    Ok(DEPTHS.into_iter().zip(found).map(of).collect())
}

impl Overhead {
    fn of(what: &str, depth: usize, pairs: Vec<Pair>) -> Overhead {
        let each = |of: fn(&Pair) -> f64, share| quantile(pairs.iter().map(of).collect(), share);
        let added = |share| each(|pair| pair.added_ns, share);
        Overhead {
            what: what.into(),
            depth,
            per_second: each(|pair| 1e9 / pair.before_ns, 0.5),
            added_ns: added(0.5),
            added_quartiles_ns: [added(0.25), added(0.75)],
            share: each(|pair| pair.added_ns / pair.before_ns, 0.5),
            share_of_budget: added(0.5) / BUDGET_NS,
            pairs,
        }
    }
}

impl Pair {
    /// From nanoseconds a request, before and after, of each turn.
    fn of([before, after]: [Vec<f64>; 2]) -> Pair {
        let added = after.iter().zip(&before).map(|(after, before)| after - before).collect();
        let [before_ns, after_ns, added_ns] = [before, after, added].map(|ns| quantile(ns, 0.5));
        Pair { before_ns, after_ns, added_ns }
    }
}

/// Sets what was found against what may be: of this program beside another only where the same program twice is half of
/// that apart at most. Of two builds that says nothing of where the code lies.
fn checks(found: &[Overhead]) -> Vec<Check> {
    let of = |one: &Overhead| {
        let most = match one.what.as_str() {
            RECORDING => RECORDING_PERCENT,
            AGAINST => AGAINST_PERCENT,
            _ => return None,
        };
        let asked = format!("{}, {} at once: at most {most}% at 500,000 a second", one.what, one.depth);
        let refused = |found| Some(Check { asked: asked.clone(), found, pass: false });
        if one.pairs.len() < LEAST_PAIRS {
            return refused(format!("{} pairs, {LEAST_PAIRS} are needed", one.pairs.len()));
        }
        let twice = found.iter().find(|twice| twice.what == TWICE && twice.depth == one.depth);
        let apart = twice.map_or(f64::INFINITY, |twice| twice.share_of_budget.abs() * 100.0);
        if one.what == AGAINST && apart > most / 2.0 {
            return refused(format!("cannot be told: {TWICE} is {apart:.2} apart"));
        }
        let from = format!("{:+.1} ns, at {:.0} a second", one.added_ns, one.per_second);
        Some(check(asked, Asked::AtMost(most), Some((one.share_of_budget * 100.0, from))))
    };
    found.iter().filter_map(of).collect()
}

/// Of some values, at least one: between two that are there in proportion.
fn quantile(mut values: Vec<f64>, share: f64) -> f64 {
    values.sort_by(f64::total_cmp);
    let at = (values.len() - 1) as f64 * share;
    let [low, high] = [at.floor(), at.ceil()].map(|at| values[at as usize]);
    low + (high - low) * at.fract()
}

/// For people.
pub fn print(report: &Report) {
    for one in &report.found {
        println!(
            "{}, {} at once, {:.0} a second: {:+.1} ns a request (quartiles {:+.1}, {:+.1}), {} pairs: \
             {:+.2}% of a request, {:+.2}% of what one may take at 500,000 a second",
            one.what,
            one.depth,
            one.per_second,
            one.added_ns,
            one.added_quartiles_ns[0],
            one.added_quartiles_ns[1],
            one.pairs.len(),
            one.share * 100.0,
            one.share_of_budget * 100.0
        );
    }
    report.checks.iter().for_each(|check| println!("{}", check.line()));
}

#[cfg(test)]
mod tests {
    use super::*;

    fn overhead(what: &str, added: &[f64]) -> Overhead {
        let pair =
            |&added: &f64| Pair::of([vec![400.0, 500.0, 900.0], vec![400.0 + added, 500.0 + added, 0.0]]);
        Overhead::of(what, 16, added.iter().map(pair).collect())
    }

    #[test]
    fn a_pair_is_the_median_of_its_turns_and_all_are_that_of_the_pairs() {
        let found = overhead(AGAINST, &[10.0, -2.0, 4.0, 40.0]);
        assert_eq!((found.added_ns, found.added_quartiles_ns), (7.0, [2.5, 17.5]));
        assert_eq!((found.per_second, found.share_of_budget), (2e6, 0.0035));
        assert_eq!((found.pairs[0].before_ns, found.pairs[0].after_ns), (500.0, 410.0));
    }

    #[test]
    fn what_cannot_be_told_apart_or_is_too_few_does_not_pass() {
        let judged = |added: f64, twice: f64, pairs| {
            let all = [overhead(AGAINST, &vec![added; pairs]), overhead(TWICE, &vec![twice; pairs])];
            let [check] = &checks(&all)[..] else { panic!("one check") };
            (check.pass, check.found.clone())
        };
        assert_eq!(judged(19.0, 9.0, 10), (true, "0.95 (+19.0 ns, at 2000000 a second)".into()));
        assert!(!judged(21.0, 0.0, 10).0);
        assert_eq!(
            judged(1.0, -11.0, 10),
            (false, "cannot be told: the same program twice is 0.55 apart".into())
        );
        assert_eq!(judged(1.0, 0.0, 9), (false, "9 pairs, 10 are needed".into()));
    }
}
