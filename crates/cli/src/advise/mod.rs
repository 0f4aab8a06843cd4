//! `spillway advise`: how much RAM a write cache needs, from traces of the disks that it would serve.
//!
//! Invariant: what is counted and what is estimated are never in one column.

mod live;
mod picture;

use crate::error::{Exit, Failure};
use crate::host::Daemon;
use crate::output;
use crate::table::percent;
use crate::trace::{Format, Source};
use clap::ValueEnum;
use picture::Line;
use serde::Serialize;
use spillway_advisor::curve::{self, Curve, Point};
use spillway_advisor::estimate::{Bursts, Estimate, collector_rewrites};
use spillway_advisor::lru::Lru;
use spillway_advisor::policy::Policy;
use spillway_advisor::shards::{Sample, Shards};
use spillway_advisor::{BLOCK_BYTES, Event, Profile, share_budget};
use spillway_api::{Name, parse_size, size_text};
use spillway_control::bytes;
use std::fmt::{Display, Write};
use std::path::{Path, PathBuf};

/// Overflow limit and bandwidth of which nothing is said.
const OVERFLOW_DEFAULT: &str = "10G";
const BANDWIDTH_DEFAULT: &str = "500M";
/// Limits at which the product's policy runs at once.
const POLICY_LIMITS: usize = 24;
const POLICY_SAMPLE: f64 = 0.05;
/// What exact counting may take.
const MOST_MEMORY: usize = 4 << 30;
/// Below so many blocks a sample says little, and the policy is run on all.
const FEW_BLOCKS: u64 = 1 << 20;

/// What `--help` shows below the options.
pub const EXAMPLES: &str = "\
Examples:
  spillway advise vm1.trace
  spillway advise vm1.trace --goal 99% --json | jq .recommended_bytes
  spillway advise desk-*.trace --json | jq '.traces[] | [.trace, .zero_overflow_bytes]'
  spillway advise desk-*.trace --budget 16G --svg desk.svg
  spillway advise hm_0.csv.gz --format msr --method policy
  spillway advise --live desk

One pass over the trace gives the result for every size of the RAM tier. Methods: 'lru' counts exactly, for a cache with LRU
eviction; 'sampled' does the same on a sample of the blocks, as every served disk does ('spillway stats --curve'); 'policy'
runs Spillway's own eviction on a sample, at 24 sizes, and at 24 more around the recommended one. The columns 'collector'
and 'waits' are estimates, for an overflow file of --overflow on a disk that writes --overflow-bandwidth per second.";

/// Options of `advise`.
#[derive(Debug, clap::Args)]
pub struct Advise {
    /// Trace files, one for each disk; - for standard input. Unpacked if the name ends in .gz, .tar or .tgz
    #[arg(value_name = "TRACE", required_unless_present = "live")]
    traces: Vec<PathBuf>,
    /// Instead of traces, use the live curves of this catalog's machines
    #[arg(long, value_name = "CATALOG", conflicts_with_all = ["traces", "format", "budget", "svg", "method", "overflow", "overflow_bandwidth"])]
    live: Option<Name>,
    /// Where spillwayd is.
    #[command(flatten)]
    pub daemon: Daemon,
    #[command(flatten)]
    format: Format,
    /// The share of the written bytes that RAM should absorb
    #[arg(long, value_name = "PERCENT", value_parser = share, default_value = "95%")]
    goal: f64,
    /// Divide this much RAM between the machines of the traces, so that least is evicted
    #[arg(long, value_name = "SIZE", value_parser = parse_size)]
    budget: Option<u64>,
    /// Also draw the curves into this SVG file
    #[arg(long, value_name = "FILE")]
    svg: Option<PathBuf>,
    /// How to compute the curve (see below)
    #[arg(long, value_enum, default_value_t = Method::Lru)]
    method: Method,
    /// For the estimates: limit of the overflow file
    #[arg(long, value_name = "SIZE", value_parser = parse_size, default_value = OVERFLOW_DEFAULT)]
    overflow: u64,
    /// For the estimates: bytes per second that the overflow's disk writes
    #[arg(long, value_name = "SIZE", value_parser = parse_size, default_value = BANDWIDTH_DEFAULT)]
    overflow_bandwidth: u64,
}

/// How the curve is computed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Method {
    /// Exact, for a cache with LRU eviction
    Lru,
    /// The same on a sample of at most 4,096 blocks
    Sampled,
    /// Spillway's own eviction, on a sample
    Policy,
}

fn share(text: &str) -> Result<f64, String> {
    let percent = text.strip_suffix('%').unwrap_or(text);
    let share = percent.parse::<f64>().ok().map(|percent| percent / 100.0);
    share.filter(|share| (0.0..=1.0).contains(share)).ok_or_else(|| "a share is 0% to 100%".into())
}

/// What one trace has come to.
#[derive(Serialize)]
struct Advice {
    trace: String,
    requests: u64,
    seconds: f64,
    method: Method,
    written_bytes: u64,
    #[serde(flatten)]
    curve: Curve,
    /// For each point of the curve, in its order.
    estimates: Vec<Estimates>,
    #[serde(skip_serializing_if = "Option::is_none")]
    budget_share_bytes: Option<u64>,
}

#[derive(Serialize)]
struct Estimates {
    ram_bytes: u64,
    collector_rewrites: Estimate,
    urgent: Estimate,
}

/// Advises.
pub fn advise(args: &Advise) -> Result<(), Failure> {
    if let Some(catalog) = &args.live {
        return live::live(&args.daemon, catalog, args.goal);
    }
    if args.method == Method::Policy
        && let Some(once) = args.traces.iter().find(|path| !path.is_file())
    {
        let why = "--method policy reads a trace more than once: this is no file";
        return Err(Failure::usage(format!("{}: {why}", once.display())));
    }
    let mut all = args.traces.iter().map(|path| one(args, path)).collect::<Result<Vec<_>, _>>()?;
    if let Some(budget) = args.budget {
        // What each would save in a second: one trace may be longer than another.
        let longest = all.iter().map(|advice| advice.seconds).fold(0.0, f64::max);
        let curve = |advice: &Advice| {
            let scale = if advice.seconds > 0.0 { longest / advice.seconds } else { 1.0 };
            let scaled = |bytes: u64| (bytes as f64 * scale) as u64;
            let points = advice.curve.curve.iter();
            points.map(|p| Point { overflow_write_bytes: scaled(p.overflow_write_bytes), ..*p }).collect()
        };
        let curves: Vec<Vec<Point>> = all.iter().map(curve).collect();
        let shares = share_budget(&curves, budget).ok_or_else(|| {
            let least = curves.iter().filter_map(|curve| curve.first()).map(|point| point.ram_bytes).sum();
            let message = format!(
                "--budget {}: the least that {} machines can have is {}",
                size_text(budget),
                curves.len(),
                ram(least)
            );
            Failure::new(Exit::Usage, message)
        })?;
        all.iter_mut().zip(shares).for_each(|(advice, share)| advice.budget_share_bytes = Some(share));
    }
    if let Some(path) = &args.svg {
        draw(path, &all)?;
    }
    let text = match args.daemon.json {
        true => format!("{:#}\n", json(&all)),
        false => all.iter().map(|advice| table(args, advice)).collect::<Vec<_>>().join("\n"),
    };
    output::print(&text).map(drop)
}

/// For programs: a list of all, and what one has come to at the top, too.
fn json(all: &[Advice]) -> serde_json::Value {
    let list = serde_json::json!({ "traces": all });
    match all {
        [one] => {
            let mut top = serde_json::json!(one);
            top["traces"] = list["traces"].clone();
            top
        }
        _ => list,
    }
}

fn draw(path: &Path, all: &[Advice]) -> Result<(), Failure> {
    let lines = all.iter().map(|advice| Line {
        name: &advice.trace,
        curve: &advice.curve,
        share_bytes: advice.budget_share_bytes,
    });
    let cannot =
        |e: &dyn Display| Failure::new(Exit::Create, format!("{}: cannot draw: {e}", path.display()));
    let svg = picture::svg(&lines.collect::<Vec<_>>()).map_err(|e| cannot(&e))?;
    std::fs::write(path, svg).map_err(|e| cannot(&e))
}

/// The method, as it goes through a trace.
enum Counter {
    Lru(Lru),
    Sampled(Shards),
}

impl Counter {
    fn event(&mut self, event: &Event) {
        match self {
            Counter::Lru(lru) => lru.event(event),
            Counter::Sampled(shards) => shards.event(event),
        }
    }

    fn memory_bytes(&self) -> usize {
        match self {
            Counter::Lru(lru) => lru.memory_bytes(),
            Counter::Sampled(shards) => shards.memory_bytes(),
        }
    }

    fn profile(&self) -> Profile {
        match self {
            Counter::Lru(lru) => lru.profile(),
            Counter::Sampled(shards) => shards.profile(),
        }
    }
}

fn one(args: &Advise, path: &Path) -> Result<Advice, Failure> {
    let mut source = Source::open(path, &args.format)?;
    let disk_bytes = Some(source.head().disk_bytes).filter(|bytes| *bytes > 0).unwrap_or(u64::MAX);
    let mut counter = match args.method {
        Method::Sampled => Counter::Sampled(Shards::new(disk_bytes, Sample::default())),
        Method::Lru | Method::Policy => Counter::Lru(Lru::new(disk_bytes)),
    };
    let (mut bursts, mut requests, mut last_us) = (Bursts::default(), 0, 0);
    while let Some(event) = source.next()? {
        counter.event(&event);
        bursts.event(&event);
        requests += 1;
        if requests % 64 == 0 && counter.memory_bytes() > MOST_MEMORY {
            let message = format!(
                "{}: more blocks live than {} of memory can count exactly: use --method sampled",
                path.display(),
                bytes(MOST_MEMORY as u64)
            );
            return Err(Failure::new(Exit::Refused, message));
        }
        last_us = event.time_us;
    }
    source.tell_end();
    let live = source.head().notes.get("live_bytes").and_then(|bytes| bytes.parse().ok()).unwrap_or(0);
    if live > 0 {
        let message = format!(
            "{}: when it began, {} were written already that it does not know: the disk needs up to that much more",
            path.display(),
            bytes(live)
        );
        output::complain("warning", &message);
    }
    let profile = counter.profile();
    drop(counter);
    let mut curve = Curve::new(&profile, args.goal);
    // What stands out is among the points too.
    let points = curve.curve.iter().map(|point| point.ram_bytes);
    let limits: Vec<u64> = points.chain([curve.recommended_bytes]).chain(curve.knee_bytes).collect();
    curve = Curve::at(&profile, args.goal, &limits);
    if args.method == Method::Policy {
        by_policy(args, path, (disk_bytes, requests), &profile, &mut curve)?;
    }
    let estimates = curve.curve.iter().map(|point| Estimates {
        ram_bytes: point.ram_bytes,
        collector_rewrites: collector_rewrites(point, args.overflow),
        urgent: bursts.urgent(point, args.overflow_bandwidth),
    });
    Ok(Advice {
        trace: source.path().display().to_string(),
        requests,
        seconds: last_us as f64 / 1e6,
        method: args.method,
        written_bytes: profile.written_bytes(),
        estimates: estimates.collect(),
        curve,
        budget_share_bytes: None,
    })
}

/// A second pass: what the product would do at some sizes up to the one at which nothing overflows.
fn by_policy(
    args: &Advise,
    path: &Path,
    (disk_bytes, requests): (u64, u64),
    profile: &Profile,
    curve: &mut Curve,
) -> Result<(), Failure> {
    let sample = if profile.totals().peak_live_blocks <= FEW_BLOCKS { 1.0 } else { POLICY_SAMPLE };
    let run = |limits: &[u64]| {
        let mut policy = Policy::new(disk_bytes, limits, sample);
        let (mut source, mut seen) = (Source::open(path, &args.format)?, 0);
        while let Some(event) = source.next()? {
            policy.event(&event);
            seen += 1;
        }
        if seen != requests {
            let message = format!("{}: it has changed while it was read", path.display());
            return Err(Failure::new(Exit::Image, message));
        }
        let points: Vec<Point> = policy.outcomes().into_iter().map(Point::from).collect();
        Ok((points, policy.rate()))
    };
    // Up to where an LRU cache would need no more, and then finer around the goal.
    let may_leave = (profile.written_bytes() as f64 * (1.0 - args.goal) + 1e-3) as u64;
    let (mut points, rate) = run(&curve::limits(curve.zero_overflow_bytes, POLICY_LIMITS))?;
    // By a sample more may live than do: then what is tried is doubled, until nothing is evicted.
    while let Some(last) = points.last().filter(|last| last.overflow_write_bytes > 0) {
        let step = last.ram_bytes / POLICY_LIMITS as u64;
        let above: Vec<u64> = (1..=POLICY_LIMITS as u64).map(|i| last.ram_bytes + step * i).collect();
        points.extend(run(&above)?.0);
    }
    let reaches = points.iter().position(|point| point.overflow_write_bytes <= may_leave);
    if let Some(at) = reaches.filter(|at| *at > 0) {
        let (low, high) = (points[at - 1].ram_bytes, points[at].ram_bytes);
        let between = (1..=POLICY_LIMITS as u64).map(|i| low + (high - low) / (POLICY_LIMITS as u64 + 1) * i);
        points.extend(run(&between.collect::<Vec<_>>())?.0);
        points.sort_by_key(|point| point.ram_bytes);
    }
    let zero = points.iter().find(|point| point.overflow_write_bytes == 0);
    curve.zero_overflow_bytes = zero.map_or(curve.zero_overflow_bytes, |point| point.ram_bytes);
    let reaches = points.iter().find(|point| point.overflow_write_bytes <= may_leave);
    curve.recommended_bytes = reaches.map_or(curve.zero_overflow_bytes, |point| point.ram_bytes);
    let most_bytes = profile.evicted_blocks(0) * BLOCK_BYTES;
    curve.knee_bytes = curve::knee_of(&points, curve.zero_overflow_bytes, most_bytes);
    (curve.curve, curve.sampled_one_in) = (points, 1.0 / rate);
    Ok(())
}

fn table(args: &Advise, advice: &Advice) -> String {
    let mut out = String::new();
    let written = advice.written_bytes;
    let _ = writeln!(
        out,
        "{}: {} written in {} requests over {:.0} s, at most {} of it live at a time",
        advice.trace,
        bytes(written),
        advice.requests,
        advice.seconds,
        bytes(advice.curve.totals.peak_live_blocks * BLOCK_BYTES)
    );
    if advice.curve.sampled_one_in > 1.0 {
        let _ = writeln!(out, "one block in {:.0} was counted", advice.curve.sampled_one_in);
    }
    let _ = writeln!(out, "\n{}{:>16}{:>16}", head(), "collector (est)", "waits (est)");
    let stand_out: Vec<u64> = advice.budget_share_bytes.into_iter().collect();
    for i in shown(&advice.curve, &stand_out) {
        let (point, estimates) = (&advice.curve.curve[i], &advice.estimates[i]);
        let estimate = |e: Estimate| e.estimated_bytes.map_or("no space".into(), bytes);
        let (collector, urgent) = (estimate(estimates.collector_rewrites), estimate(estimates.urgent));
        let _ = writeln!(out, "{}{collector:>16}{urgent:>16}", row(point, written));
    }
    out.push_str(&conclusion(&advice.curve));
    if let Some(share) = advice.budget_share_bytes {
        let _ = writeln!(out, "its share of {}: {}", bytes(args.budget.unwrap_or(0)), ram(share));
    }
    out
}

/// The curve of a disk that is served: what has gone along for so many seconds.
pub fn of_disk(curve: &Curve, seconds: f64) -> String {
    let written = curve.totals.written_blocks * BLOCK_BYTES;
    let mut out = format!(
        "since the worker began, {seconds:.0} s ago, {} were written; one block in {:.0} was counted\n\n{}\n",
        bytes(written),
        curve.sampled_one_in,
        head()
    );
    for i in shown(curve, &[]) {
        let _ = writeln!(out, "{}", row(&curve.curve[i], written));
    }
    out + &conclusion(curve)
}

/// A limit as options take it, not less than it is.
pub fn ram(limit_bytes: u64) -> String {
    let unit = if limit_bytes < 8 << 20 { 1 << 10 } else { 1 << 20 };
    size_text(limit_bytes.div_ceil(unit) * unit)
}

fn head() -> String {
    format!("{:>12}{:>11}{:>14}{:>14}{:>14}", "RAM tier", "absorbed", "evicted", "read back", "overflow")
}

fn row(point: &Point, written: u64) -> String {
    let absorbed = percent(written.saturating_sub(point.overflow_write_bytes), written);
    format!(
        "{:>12}{absorbed:>11}{:>14}{:>14}{:>14}",
        ram(point.ram_bytes),
        bytes(point.overflow_write_bytes),
        bytes(point.overflow_read_bytes),
        bytes(point.peak_overflow_bytes)
    )
}

fn conclusion(curve: &Curve) -> String {
    let mut out = String::new();
    let _ = writeln!(out, "\nnothing overflows from {} on", ram(curve.zero_overflow_bytes));
    match curve.knee_bytes {
        Some(knee) => _ = writeln!(out, "the knee, after which more RAM brings little, is at {}", ram(knee)),
        None => _ = writeln!(out, "the curve has no knee that was found"),
    }
    let goal = (curve.goal * 1e4).round() / 100.0;
    let _ = writeln!(
        out,
        "recommended, to absorb {goal}% of what is written: --ram {}",
        ram(curve.recommended_bytes)
    );
    out
}

/// About a dozen of the points, and those that stand out: their places in the curve.
fn shown(curve: &Curve, more: &[u64]) -> impl Iterator<Item = usize> {
    let points = curve.curve.len();
    let step = points.div_ceil(12).max(1);
    let stands_out = |ram_bytes| {
        ram_bytes == curve.recommended_bytes
            || curve.knee_bytes == Some(ram_bytes)
            || more.contains(&ram_bytes)
    };
    (0..points)
        .filter(move |i| (points - 1 - i).is_multiple_of(step) || stands_out(curve.curve[*i].ram_bytes))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_goal_is_a_share() {
        assert_eq!(share("95%"), Ok(0.95));
        assert_eq!(share("50"), Ok(0.5));
        for text in ["-1%", "101%", "nan", "", "x"] {
            assert!(share(text).is_err(), "{text}");
        }
    }
}
