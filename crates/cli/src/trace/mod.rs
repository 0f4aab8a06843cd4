//! `spillway trace`: what a disk was asked, in a file: recorded from a disk, or imported from what others have recorded.
//!
//! Invariant: a file that is there is never written over; one that was broken off says so and can be read up to there.

mod import;
mod info;
mod record;
mod replay;
mod source;

pub use source::{Format, Source};

use crate::error::{Exit, Failure};
use clap::Subcommand;
use spillway_advisor::trace::TraceError;
use std::fs::File;
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};

const RECORD_EXAMPLES: &str = "\
Examples:
  spillway trace record /run/vm1.ctl --out vm1.trace               until Ctrl-C, or until the disk ends
  spillway trace record /run/vm1.ctl --out vm1.trace --seconds 3600
  spillway trace record $(spillway machine show desk-001 --json | jq -r .status.run.control_socket) --out desk.trace

Where requests begin, how long they are and when they came is recorded, and never what is in them; of a
disk with a RAM tier also which blocks were all zeroes. A second of 100,000 requests takes half a megabyte.";

const IMPORT_EXAMPLES: &str = "\
Examples:
  blktrace -d /dev/vda -o - | blkparse -i - | spillway trace import - --format blkparse --out vda.trace
  spillway trace import hm_0.csv.gz --format msr --out hm_0.trace
  spillway trace import alibaba.csv --format alibaba --device 17 --out volume-17.trace";

const REPLAY_EXAMPLES: &str = "\
Examples:
  spillway serve --image debian.raw --ram 512M --vhost-user /run/try.sock --control /run/try.ctl &
  spillway trace replay vm1.trace --to /run/try.sock --speed full
  spillway stats /run/try.ctl

What is written is made up; where, how much, when and in which order is the trace's. Requests of more than 1 MiB
are asked in pieces, and at most --depth at a time.";

/// What to do with traces.
#[derive(Debug, Subcommand)]
pub enum TraceCommand {
    /// Record the requests of a disk in a trace, until Ctrl-C
    #[command(after_help = RECORD_EXAMPLES)]
    Record(record::Record),
    /// Convert a trace of another program
    #[command(after_help = IMPORT_EXAMPLES)]
    Import(import::Import),
    /// Send the requests of a trace to a disk, at their recorded pace or another
    #[command(after_help = REPLAY_EXAMPLES)]
    Replay(replay::Replay),
    /// Summarize a trace: requests, bytes, duration
    Info(info::Info),
}

/// Does it.
pub fn trace(command: &TraceCommand) -> Result<(), Failure> {
    match command {
        TraceCommand::Record(args) => record::record(args),
        TraceCommand::Import(args) => import::import(args),
        TraceCommand::Replay(args) => replay::replay(args),
        TraceCommand::Info(args) => info::info(args),
    }
}

/// Where a new trace goes.
#[derive(Debug, clap::Args)]
struct Out {
    /// Trace file to create, which must not exist; - for standard output
    #[arg(short, long, value_name = "FILE")]
    out: PathBuf,
}

impl Out {
    fn create(&self) -> Result<Box<dyn Write>, Failure> {
        if self.out == Path::new("-") {
            return Ok(Box::new(BufWriter::new(io::stdout())));
        }
        let file = File::create_new(&self.out).map_err(|e| {
            let what = match e.kind() {
                io::ErrorKind::AlreadyExists => "it exists: give another path, or remove it".into(),
                _ => e.to_string(),
            };
            Failure::new(Exit::Create, format!("{}: {what}", self.out.display()))
        })?;
        Ok(Box::new(BufWriter::new(file)))
    }

    /// What was begun is of no use.
    fn remove(&self) {
        if self.out != Path::new("-") {
            let _ = std::fs::remove_file(&self.out);
        }
    }

    fn failed(&self, error: &TraceError) -> Failure {
        let why = match error {
            TraceError::Io(e) => format!("{error}: {e}"),
            _ => error.to_string(),
        };
        Failure::new(Exit::Create, format!("{}: {why}", self.out.display()))
    }
}

/// What cannot be read.
fn unreadable(path: &Path, why: impl std::fmt::Display) -> Failure {
    Failure::new(Exit::Image, format!("{}: {why}", path.display()))
}
