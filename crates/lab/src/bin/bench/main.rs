//! `make bench`: Spillway and its peers, side by side.
//!
//! Owns the command line, and which part is measured. Invariant: a part that was asked for is measured whole, or the
//! exit status says that it was not.

mod bound;
mod checks;
mod cliff;
mod cliff_report;
mod environment;
mod first_minute;
mod first_minute_report;
mod nbd;
mod overhead;
mod peers;
mod report;
mod scale;
mod scale_report;
mod stream;
mod targets;

use anyhow::{Context, Result, ensure};
use clap::{Parser, ValueEnum};
use serde::Serialize;
use spillway_testkit::steady::Patience;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

/// What is measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Part {
    /// Each load on every disk: in RAM, with RAM for 40%, skewed; and the disk's own bound
    Peers,
    /// One load over working sets of half to four times the RAM tier
    Cliff,
    /// Disks of 4 GiB to 4 TiB: what it takes to attach and to reset them, and how much memory they hold
    Scale,
    /// A fresh disk, large requests, clients that sleep, a busy host, many disks at once
    FirstMinute,
    /// What recording costs each request, and with --against what this program costs beside another, in pairs of new disks
    Overhead,
    /// Images from a far store: boots, misses, many hosts and disks, faults, outages. For root: hosts have network namespaces
    Stream,
    /// A disk that QEMU reaches over NBD, beside one on vhost-user: in one guest, and without a guest
    Nbd,
    /// Scale, first-minute, cliff, then peers
    All,
}

impl Part {
    /// Whether it is all of it, or this one.
    fn includes(self, part: Part) -> bool {
        self == part || self == Part::All && !matches!(part, Part::Overhead | Part::Stream | Part::Nbd)
    }
}

/// Measures Spillway beside qemu-storage-daemon.
#[derive(Parser)]
#[command(
    name = "bench",
    after_help = "Times: 'peers' takes about 20 minutes, 'cliff' about 50, 'scale' about 2, 'first-minute' about 20, 'overhead' about 4, with --against 12, 'stream' an hour or more, 'nbd' about 6, 'all --quick' about 8.\n\
        Nothing else may run meanwhile: both cores are used.\n\n\
        Examples:\n  \
        bench --quick                  each load on every disk\n  \
        bench cliff --out /tmp/found   cliff.json and cliff.svg there\n  \
        bench all --check              everything, and status 1 when a target is missed"
)]
struct Options {
    /// What is measured.
    #[arg(value_enum, default_value_t = Part::Peers)]
    part: Part,
    /// Short points, 2 rounds; the cliff with a RAM tier of 256 MiB and half of its working sets.
    #[arg(long)]
    quick: bool,
    /// Seconds a point in each round [default: 10, of the cliff 20, of overhead 0.2, of nbd 5; quick 2, 1, 0.1 and 1].
    #[arg(long, value_parser = seconds)]
    seconds: Option<f64>,
    /// Rounds; the figures are medians over them [default: 3, of first-minute 5, of overhead 20; quick 2].
    #[arg(long, value_parser = clap::value_parser!(u16).range(1..))]
    rounds: Option<u16>,
    /// Rows [default: all]. Of 'first-minute': fresh-sequential, fresh-deep, fresh-random, fresh-many, nbd-64k, nbd-256k, nbd-1m, asleep, asleep-together, demo. Of 'stream': S1, S3 to S10.
    #[arg(long, value_delimiter = ',')]
    rows: Vec<String>,
    /// Queue depths of the peers' part.
    #[arg(long, value_delimiter = ',', default_values_t = [1, 16, 64])]
    depths: Vec<usize>,
    /// A folder on the disk: 14 GiB for overlays and overflows.
    #[arg(long, default_value = "/var/tmp")]
    dir: PathBuf,
    /// A folder on tmpfs: 3 GiB, for the cliff 5.
    #[arg(long, default_value = "/dev/shm")]
    tmpfs: PathBuf,
    /// The spillway program [default: beside this program].
    #[arg(long)]
    spillway: Option<PathBuf>,
    /// For the part 'overhead': another spillway program to compare with.
    #[arg(long)]
    against: Option<PathBuf>,
    /// The cores that drive and serve [default: the first two].
    #[arg(long, value_delimiter = ',')]
    cores: Vec<usize>,
    /// Without Spillway: to try the peers.
    #[arg(long, conflicts_with = "check")]
    peers_only: bool,
    /// The folder for bench.json, cliff.json, cliff.svg, scale.json, first-minute.json, overhead.json, nbd.json and stream.json.
    #[arg(long, default_value = "docs/benchmarks")]
    out: PathBuf,
    /// Exit with 1 when a target of the parts 'peers', 'scale', 'first-minute', 'overhead' and 'stream' is missed, after a list of all that are.
    #[arg(long)]
    check: bool,
}

fn seconds(text: &str) -> Result<f64, String> {
    match text.parse() {
        Ok(n) if (0.1..=3600.0).contains(&n) => Ok(n),
        _ => Err("not a number from 0.1 to 3600".into()),
    }
}

impl Options {
    fn seconds(&self, whole: f64, quick: f64) -> f64 {
        self.seconds.unwrap_or(if self.quick { quick } else { whole })
    }

    fn rounds(&self) -> usize {
        self.rounds.map_or(if self.quick { 2 } else { 3 }, usize::from)
    }

    fn first_minute_rounds(&self) -> usize {
        self.rounds.map_or(if self.quick { 2 } else { 5 }, usize::from)
    }

    fn takes_row(&self, key: &str) -> bool {
        self.rows.is_empty() || self.rows.iter().any(|row| row == key)
    }

    /// Longest time that a disk may take to settle before a measurement of this many seconds.
    fn patience(&self, seconds: f64) -> Patience {
        let most = Duration::from_secs(if self.quick { 8 } else { 90 });
        Patience { window: Duration::from_secs_f64((seconds / 10.0).clamp(0.2, 2.0)), most }
    }
}

/// The warm-up of a disk that has settled, or has nothing to settle.
fn warm_up(seconds: f64) -> Duration {
    Duration::from_secs_f64((seconds / 6.0).clamp(0.3, 1.5))
}

fn main() -> ExitCode {
    let options = Options::parse();
    match bench(&options) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::from(1),
        Err(e) => {
            eprintln!("bench: {e:#}");
            ExitCode::from(2)
        }
    }
}

/// Whether every target that was to be checked was met.
fn bench(options: &Options) -> Result<bool> {
    ensure!(
        !matches!(options.part, Part::Cliff | Part::Nbd) || !options.check,
        "--check: this part has no targets"
    );
    ensure!(options.part == Part::Peers || !options.peers_only, "--peers-only belongs to the part 'peers'");
    std::fs::create_dir_all(&options.out)
        .with_context(|| format!("{}: cannot create", options.out.display()))?;
    let environment = environment::Environment::prepare(options)?;
    let mut checks = Vec::new();
    if options.part.includes(Part::Scale) {
        let found = scale::measure(options, &environment)?;
        found.print();
        keep_json(&found, &options.out.join("scale.json"))?;
        checks.extend(found.checks);
    }
    if options.part.includes(Part::Overhead) {
        let found = overhead::measure(options, &environment)?;
        overhead::print(&found);
        keep_json(&found, &options.out.join("overhead.json"))?;
        checks.extend(found.checks);
    }
    if options.part.includes(Part::Nbd) {
        let found = nbd::measure(options, &environment)?;
        nbd::print(&found);
        keep_json(&found, &options.out.join("nbd.json"))?;
    }
    if options.part.includes(Part::Stream) {
        let found = stream::measure(options, &environment)?;
        found.print();
        keep_json(&found, &options.out.join("stream.json"))?;
        checks.extend(found.checks);
    }
    if options.part.includes(Part::FirstMinute) {
        let report = first_minute::measure(options, &environment)?;
        report.print();
        keep_json(&report, &options.out.join("first-minute.json"))?;
        checks.extend(report.checks);
    }
    // From here on one core runs the driver and another one the worker.
    environment.keep_to_core()?;
    if options.part.includes(Part::Cliff) {
        let found = cliff::measure(options, &environment)?;
        found.print();
        keep_json(&found, &options.out.join("cliff.json"))?;
        keep(&found.sheet().svg()?, &options.out.join("cliff.svg"))?;
    }
    if options.part.includes(Part::Peers) {
        let report = peers::measure(options, &environment)?;
        report.print();
        keep_json(&report, &options.out.join("bench.json"))?;
        checks.extend(report.checks);
    }
    let missed: Vec<_> = checks.iter().filter(|c| !c.pass).collect();
    if options.check && !missed.is_empty() {
        println!("\n{} of {} targets missed:", missed.len(), checks.len());
        missed.iter().for_each(|c| println!("  {}: {}", c.asked, c.found));
    }
    Ok(!options.check || missed.is_empty())
}

fn keep_json(report: &impl Serialize, path: &Path) -> Result<()> {
    let mut text = serde_json::to_string_pretty(report)?;
    text.push('\n');
    keep(&text, path)
}

fn keep(text: &str, path: &Path) -> Result<()> {
    std::fs::write(path, text).with_context(|| format!("{}: cannot write", path.display()))?;
    println!("Kept in {}", path.display());
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    #[test]
    fn the_command_line_is_sound_and_measures_the_peers_unless_told() {
        Options::command().debug_assert();
        let options = Options::parse_from(["bench"]);
        assert!(options.part == Part::Peers && !options.quick && options.rounds() == 3);
        let options = Options::parse_from(["bench", "cliff", "--quick", "--out", "/x"]);
        assert!(options.part == Part::Cliff && options.rounds() == 2 && options.out == Path::new("/x"));
        assert!(Options::try_parse_from(["bench", "--rounds", "0"]).is_err());
        assert!(Options::try_parse_from(["bench", "--seconds", "-1"]).is_err());
    }
}
