//! `spillway lab`: studies, done by `spillway-lab`, which is installed beside this program: what drives disks and boots machines is
//! in no process that serves them.
//!
//! Owns what the commands are called and what their options mean; that program reads the same options again.

use crate::error::{Exit, Failure};
use clap::{Args, Subcommand};
use std::ffi::OsString;
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::Command;

/// The program.
const PROGRAM: &str = "spillway-lab";

const RUN_EXAMPLES: &str = "\
Examples:
  spillway lab list                                  the studies that are shipped
  spillway lab run seed-000 --quick                  the shorter form of one; its report is made in the end
  spillway lab run seed-002 --machines 60            a fleet of another size
  spillway lab run ./mine.toml --runs 5 --out mine   a study of one's own
  spillway lab resume mine                           after an interruption: what is done stays

Every scenario has its runs in turn, each on fresh disks, with nothing of the image in the host's page cache. A
run whose work fails, in which a request fails, or that cannot be counted is dropped, and the report says so.
Exit code 1: a scenario has no run that counts, or something that the study's file expects does not hold.
Machines boot the Debian of 'make image' (SPILLWAY_GUEST names another folder with one).";

const REPORT_EXAMPLES: &str = "\
Examples:
  spillway lab report mine                                     mine/report.html, and figures and pictures in mine/report
  spillway lab report docs/studies/seed-000 --out /tmp/report  a study that was kept as results.json

results.json in a folder of results is all that its report needs: copy it to keep a study without its runs.";

/// What to do with studies.
#[derive(Debug, Subcommand)]
pub enum LabCommand {
    /// Run a study, and make its report
    #[command(after_help = RUN_EXAMPLES)]
    Run(Run),
    /// Go on with a study that was interrupted
    Resume {
        /// Folder of its results
        #[arg(value_name = "DIR")]
        dir: PathBuf,
        /// A folder on a disk, for what disks and machines need while they run
        #[arg(long, value_name = "DIR", default_value = "/var/tmp")]
        scratch: PathBuf,
        /// Print one JSON object in the end
        #[arg(long)]
        json: bool,
        /// Exit with 1 if a run was dropped, not only if a scenario has none that counts
        #[arg(long)]
        strict: bool,
    },
    /// Render the report of a study from its results: HTML, pictures, CSV and JSON
    #[command(after_help = REPORT_EXAMPLES)]
    Report {
        /// Folder of its results: with its runs, or with results.json alone
        #[arg(value_name = "DIR")]
        dir: PathBuf,
        /// Folder for the report [default: DIR]
        #[arg(long, value_name = "DIR")]
        out: Option<PathBuf>,
    },
    /// Compare the results of one study, run twice
    Compare {
        /// Folder of results
        #[arg(value_name = "A")]
        a: PathBuf,
        /// Folder of results
        #[arg(value_name = "B")]
        b: PathBuf,
        /// Print JSON
        #[arg(long)]
        json: bool,
    },
    /// Compare the advisor's curves with what disks of other sizes do: the table of docs/predictions.md. Exit code 1: 'policy' or
    /// 'sampled' is farther off than it may be
    Predict {
        /// Folder for predictions.md and predictions.json
        #[arg(long, value_name = "DIR")]
        out: PathBuf,
        /// Runs of fresh machines for each size
        #[arg(long, value_name = "N", default_value_t = 2)]
        fresh: u32,
        /// Only these kinds of work: file-copy, knowledge-worker, session-host, iometer-citrix, iometer-vdi
        #[arg(long, value_name = "NAME", value_delimiter = ',')]
        only: Vec<String>,
        /// A folder on a disk, for what disks and machines need while they run
        #[arg(long, value_name = "DIR", default_value = "/var/tmp")]
        scratch: PathBuf,
    },
    /// Show the studies that are shipped
    List {
        /// Print JSON
        #[arg(long)]
        json: bool,
    },
}

/// Options of `lab run`.
#[derive(Debug, Args)]
pub struct Run {
    /// A study's file, or the name of one that is shipped
    #[arg(value_name = "STUDY")]
    study: String,
    /// Runs of each scenario [default: the study's]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1000))]
    runs: Option<u32>,
    /// Machines of each scenario [default: the study's]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1000))]
    machines: Option<u32>,
    /// The study's shorter form
    #[arg(long)]
    quick: bool,
    /// Only these scenarios; the baseline must be among them
    #[arg(long, value_name = "NAME", value_delimiter = ',')]
    only: Vec<String>,
    /// Folder for the results, which must be new or empty [default: lab-STUDY-TIME]
    #[arg(long, value_name = "DIR")]
    out: Option<PathBuf>,
    /// A folder on a disk, for what disks and machines need while they run
    #[arg(long, value_name = "DIR", default_value = "/var/tmp")]
    scratch: PathBuf,
    /// Print one JSON object in the end
    #[arg(long)]
    json: bool,
    /// Exit with 1 if a run was dropped, not only if a scenario has none that counts
    #[arg(long)]
    strict: bool,
}

/// Becomes the program that does it, with what stands behind `lab`.
pub fn lab() -> Failure {
    become_lab(std::env::args_os().skip(2))
}

/// Becomes it with these arguments.
pub fn become_lab(arguments: impl IntoIterator<Item = OsString>) -> Failure {
    // As it is built, and as it is installed.
    let own = std::env::current_exe().ok();
    let places = ["", "../lib/spillway"].map(|place| Some(own.as_ref()?.parent()?.join(place).join(PROGRAM)));
    let found = places.into_iter().flatten().find(|path| path.is_file());
    let program = found.unwrap_or_else(|| PROGRAM.into());
    let mut command = Command::new(&program);
    // It measures this program, and no other.
    if let (Some(own), None) = (own, std::env::var_os("SPILLWAY_PROGRAM")) {
        command.env("SPILLWAY_PROGRAM", own);
    }
    let error = command.args(arguments).exec();
    Failure::new(Exit::Unavailable, format!("{}: {error}: it comes with spillway", program.display()))
}
