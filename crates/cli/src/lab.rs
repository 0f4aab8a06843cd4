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
  spillway lab run seed-000 --quick                  the short form of a study, with its report
  spillway lab run seed-002 --machines 60            a fleet of another size
  spillway lab run ./mine.toml --runs 5 --out mine   a study of your own
  spillway lab resume mine                           continue after an interruption

The scenarios take turns, run by run, each on fresh disks and with none of the image in the host's page cache. A run is
dropped, and the report says so, if its workload or one of its requests fails or its counters are incomplete.
Exit code 1: a scenario has no valid run, or an expectation of the study's file does not hold.
Machines boot the Debian of 'make image' (SPILLWAY_GUEST names another folder with one).";

const REPORT_EXAMPLES: &str = "\
Examples:
  spillway lab report mine                                     mine/report.html, and figures and pictures in mine/report
  spillway lab report docs/studies/seed-000 --out /tmp/report  a study that was kept as results.json

results.json in a folder of results is all that its report needs: copy it to keep a study without its runs.";

/// What to do with studies.
#[derive(Debug, Subcommand)]
pub enum LabCommand {
    /// Run a study, and render its report
    #[command(after_help = RUN_EXAMPLES)]
    Run(Run),
    /// Continue a study that was interrupted
    Resume {
        /// Folder of the study's results
        #[arg(value_name = "DIR")]
        dir: PathBuf,
        /// Folder on a disk for the files of disks and machines while they run
        #[arg(long, value_name = "DIR", default_value = "/var/tmp")]
        scratch: PathBuf,
        /// Print one JSON object at the end
        #[arg(long)]
        json: bool,
        /// Exit with 1 if any run was dropped, not only if a scenario has no valid run
        #[arg(long)]
        strict: bool,
    },
    /// Render the report of a study from its results: HTML, pictures, CSV and JSON
    #[command(after_help = REPORT_EXAMPLES)]
    Report {
        /// Folder of the study's results: with its runs, or with results.json alone
        #[arg(value_name = "DIR")]
        dir: PathBuf,
        /// Folder for the report [default: DIR]
        #[arg(long, value_name = "DIR")]
        out: Option<PathBuf>,
    },
    /// Compare two results of the same study
    Compare {
        /// Folder of the first results
        #[arg(value_name = "A")]
        a: PathBuf,
        /// Folder of the second results
        #[arg(value_name = "B")]
        b: PathBuf,
        /// Print JSON
        #[arg(long)]
        json: bool,
    },
    /// Compare the curves of 'spillway advise' with disks of other sizes, as in docs/predictions.md. Exit code 1: the error of
    /// 'policy' or 'sampled' is above its limit
    Predict {
        /// Folder for predictions.md and predictions.json
        #[arg(long, value_name = "DIR")]
        out: PathBuf,
        /// Runs of fresh machines for each size
        #[arg(long, value_name = "N", default_value_t = 2)]
        fresh: u32,
        /// Only these workloads, separated by commas: file-copy, knowledge-worker, session-host, iometer-citrix, iometer-vdi
        #[arg(long, value_name = "NAME", value_delimiter = ',')]
        only: Vec<String>,
        /// Folder on a disk for the files of disks and machines while they run
        #[arg(long, value_name = "DIR", default_value = "/var/tmp")]
        scratch: PathBuf,
    },
    /// List the studies that are installed
    List {
        /// Print JSON
        #[arg(long)]
        json: bool,
    },
}

/// Options of `lab run`.
#[derive(Debug, Args)]
pub struct Run {
    /// File of a study, or the name of an installed one (see 'spillway lab list')
    #[arg(value_name = "STUDY")]
    study: String,
    /// Runs of each scenario [default: the study's]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1000))]
    runs: Option<u32>,
    /// Machines of each scenario [default: the study's]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1000))]
    machines: Option<u32>,
    /// Run the short form of the study
    #[arg(long)]
    quick: bool,
    /// Only these scenarios, separated by commas; the baseline must be among them
    #[arg(long, value_name = "NAME", value_delimiter = ',')]
    only: Vec<String>,
    /// Folder for the results, which must be new or empty [default: lab-STUDY-TIME]
    #[arg(long, value_name = "DIR")]
    out: Option<PathBuf>,
    /// Folder on a disk for the files of disks and machines while they run
    #[arg(long, value_name = "DIR", default_value = "/var/tmp")]
    scratch: PathBuf,
    /// Print one JSON object at the end
    #[arg(long)]
    json: bool,
    /// Exit with 1 if any run was dropped, not only if a scenario has no valid run
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
