//! A trace to be read, whoever wrote it: as events, one after the other.
//!
//! Invariant: what a file is, is said and never guessed; only what it is packed in its name may say.

use super::unreadable;
use crate::error::Failure;
use crate::output;
use clap::ValueEnum;
use clap::builder::{PossibleValuesParser, TypedValueParser};
use spillway_advisor::Event;
use spillway_advisor::import::{self, BlockAction, Import, ImportError};
use spillway_advisor::trace::{End, Head, TraceError, TraceReader};
use std::fs::File;
use std::io::{self, BufRead};
use std::path::{Path, PathBuf};

/// Who wrote a file, and what of it is wanted.
#[derive(Debug, clap::Args)]
pub struct Format {
    /// Format of the trace file [default: that of 'spillway trace']
    #[arg(long, value_name = "FORMAT", value_parser = format())]
    pub format: Option<import::Format>,
    /// Device whose requests to read, as the file names it [default: the only one]
    #[arg(long, value_name = "NAME", requires = "format")]
    pub device: Option<String>,
    /// Size of the disk, if known: requests beyond it are errors
    #[arg(long, value_name = "SIZE", requires = "format", value_parser = spillway_api::parse_size)]
    pub disk_size: Option<u64>,
    /// With blkparse: which event of a request to read
    #[arg(long, value_enum, requires = "format", default_value_t = Action::Queue)]
    pub block_action: Action,
    /// Skip invalid lines, and report their number
    #[arg(long, requires = "format")]
    pub skip_bad: bool,
}

/// Events of a request in blkparse's text.
#[derive(Clone, Copy, Debug, ValueEnum)]
pub enum Action {
    /// Q: queued, as the guest sent it
    Queue,
    /// D: issued to the driver, possibly merged with others
    Issue,
    /// C: completed
    Complete,
}

fn format() -> impl TypedValueParser<Value = import::Format> {
    PossibleValuesParser::new(import::Format::ALL.map(import::Format::name))
        .map(|word| word.parse().expect("one of the words above"))
}

/// Recorders give requests of several processors out of order by less than that.
const WORTH_TELLING_US: u64 = 1_000_000;

/// A trace that is being read.
pub struct Source {
    path: PathBuf,
    from: From,
}

enum From {
    Trace(TraceReader<Box<dyn BufRead>>),
    Other(Box<Import<Box<dyn BufRead>>>, u64),
}

impl Source {
    /// Opens a file, or standard input for `-`.
    pub fn open(path: &Path, format: &Format) -> Result<Source, Failure> {
        let file = open(path).map_err(|e| unreadable(path, e))?;
        let from = match format.format {
            None => From::Trace(TraceReader::new(file).map_err(|e| unreadable(path, said(&e)))?),
            Some(of) => {
                let disk_bytes = format.disk_size.unwrap_or(u64::MAX);
                let (device, skip_bad) = (format.device.clone(), format.skip_bad);
                let block_action = match format.block_action {
                    Action::Queue => BlockAction::Queue,
                    Action::Issue => BlockAction::Issue,
                    Action::Complete => BlockAction::Complete,
                };
                let options = import::Options { device, skip_bad, block_action, disk_bytes };
                let disk_bytes = format.disk_size.unwrap_or(0);
                From::Other(Box::new(Import::new(file, of, options)), disk_bytes)
            }
        };
        Ok(Source { path: path.to_owned(), from })
    }

    /// Its name, for people.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// What it says of itself; of an import the begin is known once there was an event.
    pub fn head(&self) -> Head {
        match &self.from {
            From::Trace(reader) => reader.head().clone(),
            From::Other(import, disk_bytes) => {
                Head { begin_unix_us: import.begin_unix_us().unwrap_or(0), ..Head::new(*disk_bytes) }
            }
        }
    }

    /// The next event.
    pub fn next(&mut self) -> Result<Option<Event>, Failure> {
        let read = match &mut self.from {
            From::Trace(reader) => reader.read().map_err(|e| said(&e)),
            From::Other(import, _) => import.next().transpose().map_err(|e| match e {
                ImportError::Io(e) => e.to_string(),
                ImportError::Line { .. } => e.to_string(),
            }),
        };
        read.map_err(|why| unreadable(&self.path, why))
    }

    /// Says what a reader must know of how it ended.
    pub fn tell_end(&self) {
        let path = self.path.display();
        match &self.from {
            From::Trace(reader) => {
                if let End::Cut { at } = reader.end() {
                    output::complain(
                        "warning",
                        &format!("{path}: it was cut off, and is read up to byte {at}"),
                    );
                }
            }
            From::Other(import, _) => {
                let (lines, bad) = (import.lines(), import.skipped());
                if bad > 0 {
                    output::complain("warning", &format!("{path}: {bad} of {lines} lines were skipped"));
                }
                let (back, most_us) = import.went_back();
                if most_us >= WORTH_TELLING_US {
                    let text = format!(
                        "{path}: in {back} lines the time goes back, by {} s at most: they count as of the time before. Join \
                         parts in the order of their time, of one device",
                        most_us / 1_000_000
                    );
                    output::complain("warning", &text);
                }
                let passed: Vec<_> =
                    import.passed().map(|(what, n)| format!("{n} {}", what.in_words())).collect();
                if !passed.is_empty() {
                    let events = import.events();
                    let text = format!(
                        "{path}: {events} requests in {lines} lines; beside them {}",
                        passed.join(", ")
                    );
                    output::complain("notice", &text);
                }
            }
        }
    }

    /// How it ended, for programs: `whole`, `cut` or `unknown`.
    pub fn end(&self) -> &'static str {
        match &self.from {
            From::Trace(reader) => match reader.end() {
                End::Whole => "whole",
                End::Cut { .. } => "cut",
                End::Unknown => "unknown",
            },
            From::Other(..) => "whole",
        }
    }
}

fn said(error: &TraceError) -> String {
    match error {
        TraceError::Io(e) => e.to_string(),
        TraceError::NotATrace => {
            let formats = import::Format::ALL.map(import::Format::name).join(", ");
            format!(
                "this is not a trace of 'spillway trace': for one of another program, give --format ({formats})"
            )
        }
        _ => error.to_string(),
    }
}

fn open(path: &Path) -> io::Result<Box<dyn BufRead>> {
    match path == Path::new("-") {
        true => import::unpack(path, io::stdin()),
        false => import::unpack(path, File::open(path)?),
    }
}
