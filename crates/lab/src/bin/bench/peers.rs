//! The peers' part: each load on every disk.
//!
//! Owns the order of the measurement: all disks stay up, and within a round each point is taken on every disk
//! in turn before the next point, beginning with another disk in each round. Invariant: figures that are compared
//! were taken in the same minute, in every round; but for the disk's bound, which has rounds of its own.

use crate::environment::{Environment, order};
use crate::report::{Name, Point, Report, Round, TargetLine};
use crate::targets::{DEEPEST, Kind, Target};
use crate::{Options, bound, checks, warm_up};
use anyhow::{Context, Result, ensure};
use spillway_testkit::process::cpu_seconds;
use spillway_testkit::{End, Load, Skew};
use std::time::{Duration, Instant};

/// Size of every disk: the span of seed 004's load.
const DISK_BYTES: u64 = 5 << 29;
/// The depth that promises are made for.
pub const DEPTH: usize = 16;

/// Measures all of it.
pub fn measure(options: &Options, environment: &Environment) -> Result<Report> {
    let seconds = options.seconds(10.0, 2.0);
    ensure!(
        options.depths.iter().all(|d| (1..=DEEPEST).contains(d)),
        "--depths takes depths from 1 to {DEEPEST}"
    );
    let mut disks = Vec::new();
    for kind in Kind::ALL {
        if !(options.peers_only && kind.is_spillway()) {
            eprintln!("bench: starting {} and writing its disk over", kind.name());
            disks.push((kind, Target::start(kind.serving(), DISK_BYTES, environment)?));
        }
    }
    let at_rest = rest(&disks);
    let mut points: Vec<Point> = plan(options, seconds)
        .into_iter()
        .flat_map(|(name, load, kinds)| kinds.into_iter().map(move |kind| (name, load, kind)))
        .filter(|(_, _, kind)| disks.iter().any(|(k, _)| k == kind))
        .map(|(name, load, kind)| Point { name, load, kind, settled: vec![], runs: vec![], cpu_us: vec![] })
        .collect();
    let loads: Vec<_> = points.iter().map(|p| (p.name, p.load.depth)).collect();
    let mut rounds = Vec::new();
    for round in 0..options.rounds() {
        let before = environment.host_latency()?;
        for index in order(&loads, round) {
            let point = &mut points[index];
            let (_, disk) = disks.iter_mut().find(|(k, _)| *k == point.kind).context("no such disk")?;
            take(options, point, disk, round, seconds)?;
        }
        rounds.push(Round { before, after: environment.host_latency()? });
    }
    let targets = disks
        .iter()
        .zip(at_rest)
        .map(|((kind, disk), at_rest)| {
            let command = environment.command(&disk.server);
            Ok(TargetLine { kind: *kind, what: kind.what(), command, at_rest, stats: disk.stats()? })
        })
        .collect::<Result<_>>()?;
    drop(disks);
    let bound = match options.peers_only {
        true => None,
        false => Some(bound::measure(options, environment, seconds)?),
    };
    let origin = environment.origin.clone();
    let mut report = Report { schema: 3, origin, seconds, targets, rounds, points, bound, checks: vec![] };
    if !options.peers_only {
        report.checks = checks::of(&report);
    }
    Ok(report)
}

/// Takes a point once.
fn take(options: &Options, point: &mut Point, disk: &mut Target, round: usize, seconds: f64) -> Result<()> {
    let load = Load { seed: point.load.seed + round as u64 * 1000, ..point.load };
    if point.name != Name::Fits {
        point.settled.push(disk.settle(load, options.patience(seconds))?);
    }
    disk.warm(load, warm_up(seconds))?;
    let used = cpu_seconds(disk.server.pid());
    let begin = Instant::now();
    let measured = disk.run(&load)?;
    let share = (cpu_seconds(disk.server.pid()) - used) / begin.elapsed().as_secs_f64();
    eprintln!(
        "bench: round {}/{}, {} QD{}: {} {:.0} requests/s",
        round + 1,
        options.rounds(),
        point.name.word(),
        load.depth,
        point.kind.name(),
        measured.iops
    );
    point.cpu_us.push(share / measured.iops * 1e6);
    point.runs.push(measured);
    Ok(())
}

/// The points of a round, in order: name, load and the disks that take it.
fn plan(options: &Options, seconds: f64) -> Vec<(Name, Load, Vec<Kind>)> {
    let end = End::After(Duration::from_secs_f64(seconds));
    let fits = [Kind::Spillway, Kind::Qcow2Tmpfs, Kind::Qcow2Disk, Kind::NullCo];
    let tight = [Kind::SpillwayTight, Kind::SpillwayTighter, Kind::Qcow2Disk];
    let skewed = [Kind::SpillwayTight, Kind::Spillway, Kind::Qcow2Disk];
    let mut plan = Vec::new();
    for &depth in &options.depths {
        plan.push((Name::Fits, Load::seed_004(depth, end), fits.to_vec()));
    }
    for &depth in options.depths.iter().filter(|&&d| d > 1) {
        plan.push((Name::Tight, overfull(depth, seconds), tight.to_vec()));
    }
    for &depth in options.depths.iter().filter(|&&d| d == DEPTH) {
        let skew = Some(Skew { of_requests: 0.9, to_blocks: 0.3 });
        plan.push((Name::Skewed, Load { skew, ..overfull(depth, seconds) }, skewed.to_vec()));
    }
    plan
}

/// The load for a disk with RAM for 40% of it: uniform.
pub fn overfull(depth: usize, seconds: f64) -> Load {
    let end = End::After(Duration::from_secs_f64(seconds));
    Load { random_share: 1.0, span_bytes: DISK_BYTES, ..Load::seed_004(depth, end) }
}

/// Processor time that each process uses while nobody asks anything: used, of how much.
fn rest(disks: &[(Kind, Target)]) -> Vec<(f64, f64)> {
    // What was begun before (eviction, polling for more work) may end first.
    std::thread::sleep(Duration::from_secs(2));
    let before: Vec<f64> = disks.iter().map(|(_, t)| cpu_seconds(t.server.pid())).collect();
    let begin = Instant::now();
    std::thread::sleep(Duration::from_secs(4));
    let of = begin.elapsed().as_secs_f64();
    disks.iter().zip(before).map(|((_, t), b)| (cpu_seconds(t.server.pid()) - b, of)).collect()
}
