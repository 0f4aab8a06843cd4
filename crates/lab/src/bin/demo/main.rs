//! `make demo`: one machine, the same work, three kinds of disk. What seed 000 measured, in small and by plane.
//!
//! Owns the order of the scenarios and what is shown. Invariant: the base image has the same digest before and
//! after, and every figure was measured in this run.

mod progress;
mod scenario;
mod table;

use anyhow::{Context, Result, ensure};
use clap::Parser;
use progress::Progress;
use scenario::{Outcome, SCENARIOS};
use serde::Serialize;
use sha2::{Digest, Sha256};
use spillway_lab::Stamp;
use spillway_lab::cores::Hardware;
use spillway_lab::guest::{Accelerator, Kit};
use spillway_lab::process::clean_up_when_interrupted;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Instant;

/// Shows where a machine's I/O goes, with and without Spillway's cache.
#[derive(Parser)]
#[command(name = "demo")]
struct Options {
    /// A directory on the disk, for difference file and overflow.
    #[arg(long, default_value = "/var/tmp")]
    dir: PathBuf,
    /// The spillway program [default: beside this program].
    #[arg(long)]
    spillway: Option<PathBuf>,
    /// Keep all figures as JSON.
    #[arg(long)]
    out: Option<PathBuf>,
    /// Only these scenarios (1, 2, 3).
    #[arg(long, value_delimiter = ',')]
    only: Vec<usize>,
}

/// What is kept.
#[derive(Serialize)]
struct Report<'a> {
    schema: u32,
    #[serde(flatten)]
    stamp: Stamp,
    hardware: Hardware,
    accelerator: &'static str,
    base_sha256: &'a str,
    outcomes: &'a [Outcome],
}

fn main() -> ExitCode {
    match demo(&Options::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(e) => {
            eprintln!("demo: {e:#}");
            ExitCode::FAILURE
        }
    }
}

fn demo(options: &Options) -> Result<()> {
    let begin = Instant::now();
    let kit = Kit::find().context("the guest has not been built: run 'make image'")?;
    let spillway = match &options.spillway {
        Some(path) => path.clone(),
        None => std::env::current_exe()?.with_file_name("spillway"),
    };
    ensure!(spillway.is_file(), "{}: not there: run 'make demo', which builds it", spillway.display());
    let chosen: Vec<_> = SCENARIOS
        .iter()
        .enumerate()
        .filter(|(i, _)| options.only.is_empty() || options.only.contains(&(i + 1)))
        .map(|(_, s)| s)
        .collect();

    let stamp = Stamp::now(&spillway);
    let work = tempfile::Builder::new().prefix("spillway-demo.").tempdir_in(&options.dir)?;
    clean_up_when_interrupted(vec![work.path().into()])?;

    let mut progress = Progress::new(chosen.len());
    progress.say("the base image's digest");
    let before = digest(&kit.golden())?;
    progress.say("looking whether KVM runs guests here");
    let accelerator = Accelerator::probe(&kit)?;
    let mut outcomes = Vec::new();
    for scenario in &chosen {
        // The first machine of a host: nothing of the image is in the page cache yet.
        forget(&kit.golden())?;
        progress.machine(scenario.name);
        let outcome = scenario::run(scenario, &spillway, &kit, accelerator, work.path(), &mut progress);
        outcomes.push(outcome.with_context(|| format!("scenario '{}'", scenario.name))?);
    }
    progress.say("the base image's digest again");
    let after = digest(&kit.golden())?;
    progress.finish();

    let hardware = Hardware::look(&options.dir)?;
    println!(
        "One Debian 12 machine, the same work on each disk: boot, logon, 256 MB copied, documents saved,"
    );
    println!(
        "copies read again, deleted, trimmed. Each scenario on a fresh disk over the same base image.\n"
    );
    for s in &chosen {
        println!("  {:<9} {}", s.name, s.what);
    }
    println!("\nMeasured: {stamp}");
    println!(
        "Hardware: {}, {} cores, {} GiB; disk: {}; the guest runs on {}\n",
        hardware.cpu,
        hardware.cores,
        hardware.ram_bytes >> 30,
        hardware.disk,
        accelerator.name()
    );
    println!("{}", table::table(&outcomes));
    ensure!(before == after, "the base image changed: its SHA-256 was {before} and is {after}");
    println!("\nThe base image is unchanged: SHA-256 {before} before and after.");
    if let Some(out) = &options.out {
        let report = Report {
            schema: 1,
            stamp,
            hardware,
            accelerator: accelerator.name(),
            base_sha256: &before,
            outcomes: &outcomes,
        };
        keep(&report, out)?;
    }
    println!("All in {:.0} s.\n", begin.elapsed().as_secs_f64());
    println!("{}", table::last_line(&outcomes));
    Ok(())
}

/// SHA-256 of a file, in hexadecimal.
fn digest(path: &Path) -> Result<String> {
    let mut file = std::fs::File::open(path).with_context(|| format!("{}: cannot open", path.display()))?;
    let mut hasher = Sha256::new();
    std::io::copy(&mut file, &mut hasher).with_context(|| format!("{}: cannot read", path.display()))?;
    Ok(hasher.finalize().iter().map(|byte| format!("{byte:02x}")).collect())
}

/// Takes a file out of the host's page cache.
fn forget(path: &Path) -> Result<()> {
    let file = std::fs::File::open(path).with_context(|| format!("{}: cannot open", path.display()))?;
    rustix::fs::fsync(&file)?;
    rustix::fs::fadvise(&file, 0, None, rustix::fs::Advice::DontNeed)
        .with_context(|| format!("{}: cannot be taken out of the page cache", path.display()))
}

fn keep(report: &Report<'_>, out: &Path) -> Result<()> {
    if let Some(dir) = out.parent().filter(|d| !d.as_os_str().is_empty()) {
        std::fs::create_dir_all(dir).with_context(|| format!("{}: cannot create", dir.display()))?;
    }
    let mut text = serde_json::to_string_pretty(report)?;
    text.push('\n');
    std::fs::write(out, text).with_context(|| format!("{}: cannot write", out.display()))?;
    println!("Kept in {}", out.display());
    Ok(())
}
