//! `spillway trace replay`: what a trace holds is asked of a disk again. Done by `spillway-lab`, which is installed beside this
//! program: what drives disks is in no process that serves them.

use crate::error::Failure;
use crate::lab::become_lab;
use std::ffi::OsString;
use std::path::PathBuf;

/// Options of `trace replay`.
#[derive(Debug, clap::Args)]
pub struct Replay {
    /// A trace of 'spillway trace'; - for standard input
    #[arg(value_name = "TRACE")]
    trace: PathBuf,
    /// vhost-user socket of the disk, which must be as large as the one that was recorded
    #[arg(long, value_name = "SOCK")]
    to: PathBuf,
    /// Pace: 1 is the recorded pace, 2 twice as fast, full as fast as the disk completes requests
    #[arg(long, value_name = "SPEED", default_value = "1")]
    speed: String,
    /// Largest number of requests in flight
    #[arg(long, value_name = "N", default_value_t = 64, value_parser = clap::value_parser!(u16).range(1..=256))]
    depth: u16,
    /// Print one JSON object at the end
    #[arg(long)]
    json: bool,
}

/// Becomes the program that does it.
pub fn replay(args: &Replay) -> Result<(), Failure> {
    let mut all: Vec<OsString> = vec!["replay".into(), "--to".into(), args.to.clone().into()];
    all.extend(["--speed", &args.speed, "--depth", &args.depth.to_string()].map(Into::into));
    all.extend(args.json.then(|| "--json".into()));
    all.extend(["--".into(), args.trace.clone().into()]);
    Err(become_lab(all))
}
