//! Overhead: what recording, and another program's extra work, cost each request on the data path.
//!
//! Owns the pairs. Two disks live side by side and the same load runs on one and then the other, several times in turn: the
//! median difference of these turns is the pair's. Each pair is of new disks, since where the kernel puts a program's
//! memory alone makes one of two disks of the same program faster for as long as both live. How far such disks differ is measured too,
//! beside `--against`: what is less than that cannot be told from nothing.
//!
//! With one request at a time there are some 500,000 a second, and what is added to one is missed by the next;
//! with 16 there are as many as one thread can ask, so that each nanosecond shows. The recorder is stopped while it is
//! measured: the ring is written and nobody reads it, so that its own processor time, of which two cores have none to
//! spare, is not counted.

use crate::Options;
use crate::checks::{Asked, Check, check};
use crate::ground::{Ground, Origin};
use anyhow::{Context, Result, ensure};
use rustix::process::{Pid, Signal, kill_process};
use serde::Serialize;
use spillway_lab::cores;
use spillway_lab::{Disk, Driver, End, Load, Shape};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
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
    recorder: Option<Child>,
    _files: tempfile::TempDir,
}

impl Side {
    fn new(ground: &Ground, program: &Path, records: bool) -> Result<Side> {
        let files = tempfile::Builder::new().prefix("disk.").tempdir_in(ground.disk())?;
        let base = files.path().join("base.raw");
        std::fs::File::create(&base)?.set_len(SPAN)?;
        let disk = Disk::start_with(program, files.path(), &base, &["--ram", "3G", "--overflow", "4G"])?;
        cores::pin_process(disk.worker()?, ground.serving())?;
        let shape = Shape { depth: 16, request_bytes: 64 << 10, ..Shape::default() };
        let mut driver = Driver::connect_with(&disk.vhost(), shape)?;
        driver.run(&Load::fill(SPAN, 64 << 10))?;
        let mut recorder = None;
        if records {
            let mut command = Command::new(program);
            command.args(["trace", "record", "--out", "-"]).arg(disk.control());
            command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
            let child = command.spawn().context("the recorder")?;
            std::thread::sleep(Duration::from_millis(500));
            let pid = Pid::from_raw(child.id().try_into()?).context("a process id")?;
            kill_process(pid, Signal::STOP).context("the recorder has ended")?;
            recorder = Some(child);
        }
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
            let ended = recorder.try_wait()?;
            ensure!(ended.is_none(), "the recorder has ended: {ended:?}");
            recorder.kill()?;
            recorder.wait()?;
        }
        drop(self.driver);
        self.disk.stop()
    }
}

/// What the pairs have come to.
#[derive(Serialize)]
struct Overhead {
    what: String,
    /// Requests at once.
    depth: usize,
    pairs: usize,
    /// Requests a second of the first side.
    per_second: f64,
    /// Medians of the pairs: of each side, and of the differences.
    before_ns: f64,
    after_ns: f64,
    added_ns: f64,
    /// The quarter and three quarters of those differences.
    added_quartiles_ns: [f64; 2],
    /// What was added, as a share of what a request takes here, so that so many fewer are done.
    share: f64,
    /// The same of what a request may take at 500,000 a second.
    share_of_budget: f64,
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
pub fn measure(options: &Options, ground: &Ground) -> Result<Report> {
    ground.keep_to_core()?;
    let this = &ground.spillway;
    let mut found = pairs(options, ground, RECORDING, (this, false), (this, true))?;
    if let Some(against) = &options.against {
        found.extend(pairs(options, ground, AGAINST, (against, false), (this, false))?);
        found.extend(pairs(options, ground, TWICE, (this, false), (this, false))?);
    }
    let checks = checks(&found);
    Ok(Report { schema: 2, origin: ground.origin.clone(), found, checks })
}

/// Programs, and whether their disks are recorded.
type Which<'a> = (&'a PathBuf, bool);

fn pairs(
    options: &Options,
    ground: &Ground,
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
            .map(|(program, records)| Side::new(ground, program, records))
            .collect::<Result<_>>()?;
        for (depth, found) in DEPTHS.into_iter().zip(&mut found) {
            let mut turns = [Vec::new(), Vec::new()];
            for turn in 0..TURNS {
                for side in [turn % 2, 1 - turn % 2] {
                    turns[side ^ first].push(sides[side].measure(depth, time)?);
                }
            }
            found.push(Pair::of(&turns));
        }
        sides.into_iter().try_for_each(Side::end)?;
    }
    let of = |(depth, pairs): (usize, Vec<Pair>)| {
        let each = |of: fn(&Pair) -> f64, share| quantile(pairs.iter().map(of).collect(), share);
        let (before_ns, added_ns) = (each(|pair| pair.before_ns, 0.5), each(|pair| pair.added_ns, 0.5));
        Overhead {
            what: what.into(),
            depth,
            pairs: pairs.len(),
            per_second: 1e9 / before_ns,
            before_ns,
            after_ns: each(|pair| pair.after_ns, 0.5),
            added_ns,
            added_quartiles_ns: [0.25, 0.75].map(|share| each(|pair| pair.added_ns, share)),
            share: added_ns / before_ns,
            share_of_budget: added_ns / BUDGET_NS,
        }
    };
    Ok(DEPTHS.into_iter().zip(found).map(of).collect())
}

/// One pair of disks: medians of its turns.
struct Pair {
    before_ns: f64,
    after_ns: f64,
    added_ns: f64,
}

impl Pair {
    /// From nanoseconds a request, before and after, of each turn.
    fn of([before, after]: &[Vec<f64>; 2]) -> Pair {
        let added = after.iter().zip(before).map(|(after, before)| after - before).collect();
        let [before_ns, after_ns, added_ns] =
            [before.clone(), after.clone(), added].map(|ns| quantile(ns, 0.5));
        Pair { before_ns, after_ns, added_ns }
    }
}

/// Sets what was found against what may be.
fn checks(found: &[Overhead]) -> Vec<Check> {
    let of = |one: &Overhead| {
        let most = match one.what.as_str() {
            RECORDING => RECORDING_PERCENT,
            AGAINST => AGAINST_PERCENT,
            _ => return None,
        };
        let words = format!("{}, {} at once: at most {most}% at 500,000 a second", one.what, one.depth);
        let from =
            format!("{:+.1} ns of {:.1}, at {:.0} a second", one.added_ns, one.before_ns, one.per_second);
        // A median of fewer says nothing.
        let found = (one.pairs >= LEAST_PAIRS).then_some((one.share_of_budget * 100.0, from));
        Some(check(words, Asked::AtMost(most), found))
    };
    found.iter().filter_map(of).collect()
}

fn quantile(mut values: Vec<f64>, share: f64) -> f64 {
    values.sort_by(f64::total_cmp);
    values.get(((values.len() - 1) as f64 * share).round() as usize).copied().unwrap_or(f64::NAN)
}

/// For people.
pub fn print(report: &Report) {
    for one in &report.found {
        println!(
            "{}, {} at once, {:.0} a second: {:.1} ns a request before, {:.1} after; {:+.1} ns (quartiles {:+.1}, {:+.1}), {} pairs: \
             {:+.2}% of a request, {:+.2}% of what one may take at 500,000 a second",
            one.what,
            one.depth,
            one.per_second,
            one.before_ns,
            one.after_ns,
            one.added_ns,
            one.added_quartiles_ns[0],
            one.added_quartiles_ns[1],
            one.pairs,
            one.share * 100.0,
            one.share_of_budget * 100.0
        );
    }
    report.checks.iter().for_each(|check| println!("{}", check.line()));
}
