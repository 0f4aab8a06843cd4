//! `spillway-lab`: the part of `spillway` that drives disks from outside, started by `spillway lab` and `spillway trace replay`. Its own
//! program, so that what it needs is in no process that serves.
//!
//! Invariant: a failure is said on standard error, in one line but for what a machine's console said last, without anything that
//! a terminal obeys, and has an exit code of `spillway`'s.

mod far_store;
mod predictions;
mod studies;

use anyhow::{Context, Result};
use clap::{Parser, Subcommand};
use indicatif::{ProgressBar, ProgressStyle};
use spillway_advisor::trace::TraceReader;
use spillway_lab::markup::plain;
use spillway_lab::replay::{Replayed, Speed, replay};
use spillway_testkit::{Driver, Shape};
use std::fs::File;
use std::io::{BufReader, Read};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

/// Drives disks from outside.
#[derive(Parser)]
#[command(name = "spillway-lab", version)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Ask a disk what a trace holds
    Replay(Replay),
    /// Run a study
    Run(studies::RunOptions),
    /// Go on with a study
    Resume(studies::ResumeOptions),
    /// Render a study's report
    Report(studies::ReportOptions),
    /// Compare two folders of results
    Compare {
        /// One
        a: PathBuf,
        /// The other
        b: PathBuf,
        /// JSON
        #[arg(long)]
        json: bool,
    },
    /// Compare the advisor's curves with disks of other sizes
    Predict(predictions::Predict),
    /// Make a registry's store behave as one that is far away, slow, busy or broken
    StoreProxy(far_store::ProxyOptions),
    /// Show the studies that are shipped
    List {
        /// JSON
        #[arg(long)]
        json: bool,
    },
}

#[derive(Debug, clap::Args)]
struct Replay {
    /// The trace; - for standard input
    trace: PathBuf,
    /// vhost-user socket of the disk
    #[arg(long, value_name = "SOCK")]
    to: PathBuf,
    /// 1 as recorded, 2 twice as fast, full as fast as the disk answers
    #[arg(long, value_parser = speed, default_value = "1")]
    speed: Speed,
    /// Requests under way at most
    #[arg(long, value_name = "N", default_value_t = 64, value_parser = clap::value_parser!(u16).range(1..=256))]
    depth: u16,
    /// One JSON object in the end
    #[arg(long)]
    json: bool,
}

fn speed(text: &str) -> Result<Speed, String> {
    if text == "full" {
        return Ok(Speed::Full);
    }
    match text.parse() {
        Ok(times) if times > 0.0 && f64::is_finite(times) => Ok(Speed::Times(times)),
        _ => Err("a number above 0, or full".into()),
    }
}

fn main() -> ExitCode {
    let done = match Cli::parse().command {
        Command::Replay(args) => run_replay(&args).map(|()| ExitCode::SUCCESS),
        Command::Run(args) => studies::run(&args),
        Command::Resume(args) => studies::resume(&args),
        Command::Report(args) => studies::make_report(&args),
        Command::Compare { a, b, json } => studies::compare(&a, &b, json),
        Command::Predict(args) => predictions::predict(&args),
        Command::StoreProxy(args) => far_store::run(&args).map(|never| match never {}),
        Command::List { json } => studies::list(json),
    };
    done.unwrap_or_else(|e| {
        // A machine's console may be in it.
        let lines: Vec<String> = format!("{e:#}").lines().map(plain).collect();
        eprintln!("spillway: error: {}", lines.join("\n"));
        ExitCode::from(70)
    })
}

fn run_replay(args: &Replay) -> Result<()> {
    let from: Box<dyn Read> = match args.trace == Path::new("-") {
        true => Box::new(std::io::stdin()),
        false => Box::new(File::open(&args.trace).with_context(|| args.trace.display().to_string())?),
    };
    let reader = TraceReader::new(BufReader::with_capacity(256 << 10, from));
    let reader = reader.with_context(|| args.trace.display().to_string())?;
    let depth = usize::from(args.depth);
    let shape = Shape { queues: 1, depth, request_bytes: 1 << 20, deadline: Duration::from_secs(600) };
    let mut driver = Driver::connect_with(&args.to, shape)?;
    let bar = ProgressBar::new_spinner();
    bar.set_style(ProgressStyle::with_template("{msg}").expect("the template is right"));
    let done = replay(&mut driver, reader, args.speed, |requests, passed| {
        bar.set_message(format!("{requests} requests in {} s", passed.as_secs()));
    })?;
    bar.finish_and_clear();
    if args.json {
        println!("{}", serde_json::to_string(&done)?);
    } else {
        print(&done);
    }
    Ok(())
}

fn print(done: &Replayed) {
    let rate = done.requests as f64 / done.seconds.max(1e-9);
    println!(
        "{} requests in {:.1} s, {rate:.0} a second; {} failed",
        done.requests, done.seconds, done.failed
    );
    if let Some(seconds) = done.trace_seconds {
        println!("at this speed the trace is {seconds:.1} s long; {} began more than 1 ms late", done.late);
    }
    if done.left_out > 0 {
        println!("{} resets were left out: 'spillway reset' does them", done.left_out);
    }
    for (name, latency) in [("reads", done.read), ("writes", done.write)] {
        let us = |ns: u64| ns as f64 / 1000.0;
        let (p50, p99, max) = (us(latency.p50_ns), us(latency.p99_ns), us(latency.max_ns));
        println!("{name:<8}{:>12}   p50 {p50:.0} us, p99 {p99:.0} us, max {max:.0} us", latency.count);
    }
}
