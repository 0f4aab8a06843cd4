//! `spillway lab`: studies, done by `spillway-lab`, which is installed beside this program: what drives disks and boots machines is
//! in no process that serves them.
//!
//! Owns what the commands are called and what their options mean; that program reads the same options again.

use crate::error::{Exit, Failure};
use clap::{Args, Subcommand};
use std::ffi::OsString;
use std::net::SocketAddr;
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

const STORE_PROXY_EXAMPLES: &str = "\
Examples:
  spillway lab store-proxy --folder /srv/images --model latency=30ms,latency-p99=300ms,bandwidth=100M
  spillway lab store-proxy --to http://127.0.0.1:9000 --model status-503=0.05,cut-body=0.01,at=/chunks/
  spillway registry add far http://127.0.0.1:8080                                 a folder, behind --listen 127.0.0.1:8080
  spillway registry add far s3://images/golden --endpoint http://127.0.0.1:8080   an S3 service, behind the same
  spillway image import far --from far/debian:1 --residency lazy                  a version that was pushed to that registry
  curl http://127.0.0.1:8081/figures                                              with --control 127.0.0.1:8081
  curl http://127.0.0.1:8081/model -d '{ \"latency_ns\": 30000000, \"next\": [\"reset\"], \"away\": null }'

It prints its addresses and runs until it is interrupted. A model has these parts, each at most once:
  latency=TIME         median time from a request to the first byte of its answer: us, ms or s
  latency-p99=TIME     99th percentile of that time [default: every request takes the median]
  bandwidth=SIZE       bytes per second of all connections together, in each direction
  status-403=CHANCE    from 0 to 1: the answer is 403, and the store is not asked. The same: status-404, status-429, status-500,
                       status-503
  cut-body=CHANCE      the connection is closed after a random part of the body
  flipped-bit=CHANCE   one bit of the body is wrong
  other-object=CHANCE  the body is that of another object
  stalled-body=CHANCE  the body makes no progress after a random part of it
  reset=CHANCE         the connection is reset; the store may have carried out the request
  stall=TIME           how long a stalled body makes no progress [default: for ever]
  at=TEXT              only requests whose path has this text have faults [default: all]
  away=HOW             silent: requests are not answered until that changes. refuses: connections are refused

The control endpoint has GET and DELETE /figures, and GET and POST /model. POST replaces the whole model. Its 'next' is a list of
faults that the next requests have, one each.";

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
    /// Make the store of a registry behave as one that is far away, slow, busy or broken, by a proxy in front of it
    #[command(after_help = STORE_PROXY_EXAMPLES)]
    StoreProxy(StoreProxy),
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

/// Options of `lab store-proxy`.
#[derive(Debug, Args)]
#[command(group(clap::ArgGroup::new("origin").required(true).args(["to", "folder"])))]
pub struct StoreProxy {
    /// Address and port at which clients are answered; port 0 is a free one
    #[arg(long, value_name = "ADDR:PORT", default_value = "127.0.0.1:0")]
    listen: SocketAddr,
    /// Address and port of the control endpoint, which must not be reachable by others
    #[arg(long, value_name = "ADDR:PORT", default_value = "127.0.0.1:0")]
    control: SocketAddr,
    /// Pass requests on to this store, as http://HOST:PORT
    #[arg(long, value_name = "URL")]
    to: Option<String>,
    /// Serve the files of this folder, which are only read
    #[arg(long, value_name = "DIR")]
    folder: Option<PathBuf>,
    /// Delays, bandwidth and faults, such as latency=30ms,status-503=0.01 [default: none]
    #[arg(long, value_name = "MODEL")]
    model: Option<String>,
    /// Seed of the random choices: the same one repeats them for each object
    #[arg(long, value_name = "N", default_value_t = 1)]
    seed: u64,
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
