//! `make demo`: one machine, the same work, three kinds of disk. What seed 000 measured, in small and by plane.
//!
//! Owns the order of the scenarios and what is shown. Invariant: the image has the digests of its import afterwards, and
//! every figure was measured in this run.

mod progress;
mod scenario;
mod table;

use anyhow::{Context, Result, ensure};
use clap::Parser;
use progress::Progress;
use scenario::{Host, Outcome, SCENARIOS};
use serde::Serialize;
use spillway_lab::Stamp;
use spillway_testkit::cores::Hardware;
use spillway_testkit::guest::{Accelerator, Kit};
use spillway_testkit::process::clean_up_when_interrupted;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Instant;

/// Shows where a machine's I/O goes, with and without Spillway's cache.
#[derive(Parser)]
#[command(name = "demo")]
struct Options {
    /// A folder on the disk, for difference file and overflow.
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
    progress.say("looking whether KVM runs guests here");
    let accelerator = Accelerator::probe(&kit)?;
    progress.say("spillwayd starts, and imports the golden image");
    let host = Host::new(&spillway, &kit, work.path())?;
    let (_console, address) = host.daemon.console()?;
    progress.note(&format!("the console, in a browser on this host while the demo runs:\n\n    {address}\n"));
    let mut outcomes = Vec::new();
    for scenario in &chosen {
        // The first machine of a host: nothing of the image is in the page cache yet.
        forget(&work.path().join("state/store"))?;
        progress.machine(scenario.name);
        let outcome = scenario::run(scenario, &host, &mut progress);
        outcomes.push(outcome.with_context(|| format!("scenario '{}'", scenario.name))?);
    }
    progress.say("the image's digests");
    let verified = host.daemon.ask(&["image", "verify", scenario::IMAGE])?;
    let top = host.daemon.ask(&["top", "--by", "catalog"])?;
    progress.finish();

    let hardware = Hardware::look(&options.dir)?;
    println!(
        "One image of Debian 12, three catalogs, and in each a machine that does the same: boot, logon, 256 MB copied, documents"
    );
    println!("saved, copies read again, deleted, trimmed. Each on a fresh disk.\n");
    for s in &chosen {
        println!("  {:<9} {}", s.name, s.what);
    }
    println!("\nAs a user does it:\n");
    println!("  spillway image import {} golden.raw --format raw", scenario::IMAGE);
    for outcome in &outcomes {
        // What its machine boots is the same for all.
        let (command, _) = outcome.spillway.split_once(" --memory").unwrap_or((&outcome.spillway, ""));
        println!("  {command} {}", outcome.options.join(" "));
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
    println!(
        "\nspillway top --by catalog:\n\n{top}\nspillway image verify {}: {}",
        scenario::IMAGE,
        verified.trim()
    );
    drop(host);
    if let Some(out) = &options.out {
        let report =
            Report { schema: 1, stamp, hardware, accelerator: accelerator.name(), outcomes: &outcomes };
        keep(&report, out)?;
    }
    println!("All in {:.0} s.\n", begin.elapsed().as_secs_f64());
    println!("{}", table::last_line(&outcomes));
    Ok(())
}

/// Takes all files below a folder out of the host's page cache.
fn forget(folder: &Path) -> Result<()> {
    let cannot = |path: &Path| format!("{}: cannot be taken out of the page cache", path.display());
    for entry in std::fs::read_dir(folder).with_context(|| cannot(folder))? {
        let path = entry?.path();
        if path.is_dir() {
            forget(&path)?;
            continue;
        }
        let file = std::fs::File::open(&path).with_context(|| cannot(&path))?;
        rustix::fs::fsync(&file)?;
        rustix::fs::fadvise(&file, 0, None, rustix::fs::Advice::DontNeed).with_context(|| cannot(&path))?;
    }
    Ok(())
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
