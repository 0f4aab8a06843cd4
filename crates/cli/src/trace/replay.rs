//! `spillway trace replay`: what a trace holds is asked of a disk again. Done by `spillway-lab`, which is installed beside this
//! program: what drives disks is in no process that serves them.

use crate::error::{Exit, Failure};
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::Command;

/// The program.
const PROGRAM: &str = "spillway-lab";

/// Options of `trace replay`.
#[derive(Debug, clap::Args)]
pub struct Replay {
    /// A trace of 'spillway trace'; - for standard input
    #[arg(value_name = "TRACE")]
    trace: PathBuf,
    /// vhost-user socket of the disk, which must be as large as the one that was recorded
    #[arg(long, value_name = "SOCK")]
    to: PathBuf,
    /// 1 as it was recorded, 2 twice as fast, full as fast as the disk answers
    #[arg(long, value_name = "SPEED", default_value = "1")]
    speed: String,
    /// Requests under way at most
    #[arg(long, value_name = "N", default_value_t = 64, value_parser = clap::value_parser!(u16).range(1..=256))]
    depth: u16,
    /// Print one JSON object in the end
    #[arg(long)]
    json: bool,
}

/// Becomes the program that does it.
pub fn replay(args: &Replay) -> Result<(), Failure> {
    // As it is built, and as it is installed.
    let own = std::env::current_exe().ok();
    let places = ["", "../lib/spillway"].map(|place| Some(own.as_ref()?.parent()?.join(place).join(PROGRAM)));
    let found = places.into_iter().flatten().find(|path| path.is_file());
    let program = found.unwrap_or_else(|| PROGRAM.into());
    let mut command = Command::new(&program);
    command.arg("replay").arg("--to").arg(&args.to).args(["--speed", &args.speed]);
    command.args(["--depth", &args.depth.to_string()]).args(args.json.then_some("--json"));
    let error = command.arg("--").arg(&args.trace).exec();
    let message = format!("{}: {error}: it comes with spillway", program.display());
    Err(Failure::new(Exit::Unavailable, message))
}
