//! Traces that others have recorded, line by line, as events.
//!
//! Owns the way from a line to an event, and what becomes of a line that says nothing sensible; each format's fields are in
//! its own file. The format is always said, never guessed. Invariant: memory is bounded whatever the file holds.

mod blkparse;
mod csv;
mod fio;
mod gunzip;
mod packed;
mod passed;
mod untar;

pub use blkparse::BlockAction;
pub use gunzip::Gunzip;
pub use packed::unpack;
pub use passed::Passed;
pub use untar::Untar;

use crate::event::{Event, Operation};
use std::io::{self, BufRead, Read};
use std::str::FromStr;

/// Bytes of a line at most.
const MAX_LINE_BYTES: u64 = 64 << 10;

/// The format of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Format {
    /// Text of blkparse in its default form.
    Blkparse,
    /// An I/O log of fio, version 2.
    FioV2,
    /// The same, version 3.
    FioV3,
    /// CSV of the MSR Cambridge traces.
    Msr,
    /// CSV of the SYSTOR '17 traces of virtual desktops.
    Systor17,
    /// CSV of Alibaba's block traces.
    Alibaba,
    /// CSV of Tencent's CBS traces.
    Tencent,
}

impl Format {
    /// All formats.
    pub const ALL: [Format; 7] = [
        Format::Blkparse,
        Format::FioV2,
        Format::FioV3,
        Format::Msr,
        Format::Systor17,
        Format::Alibaba,
        Format::Tencent,
    ];

    /// The name of the format on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Format::Blkparse => "blkparse",
            Format::FioV2 => "fio2",
            Format::FioV3 => "fio3",
            Format::Msr => "msr",
            Format::Systor17 => "systor17",
            Format::Alibaba => "alibaba",
            Format::Tencent => "tencent",
        }
    }
}

impl FromStr for Format {
    type Err = String;
    fn from_str(s: &str) -> Result<Self, String> {
        let names = Format::ALL.map(Format::name).join(", ");
        Format::ALL
            .into_iter()
            .find(|f| f.name() == s)
            .ok_or_else(|| format!("unknown trace format '{s}': there are {names}"))
    }
}

/// Options of an import.
#[derive(Clone, Debug)]
pub struct Options {
    /// Device whose requests are imported, as the file names it (blkparse `8,0`, fio the file's name, MSR `host.disk`,
    /// else the number). `None`: the file must have only one.
    pub device: Option<String>,
    /// Whether a bad line is skipped and counted; else it ends the import.
    pub skip_bad: bool,
    /// The event of blkparse that counts as the request.
    pub block_action: BlockAction,
    /// Size of the disk; a line with a request beyond it is bad. `u64::MAX` if it is not known.
    pub disk_bytes: u64,
}

impl Default for Options {
    fn default() -> Options {
        Options { device: None, skip_bad: false, block_action: BlockAction::Queue, disk_bytes: u64::MAX }
    }
}

/// Why a file cannot be imported any further.
#[derive(Debug, thiserror::Error)]
pub enum ImportError {
    /// The input cannot be read.
    #[error("cannot read the trace to be imported")]
    Io(#[from] io::Error),
    /// A line is not what its format says.
    #[error("line {line}: {what}")]
    Line {
        /// Counted from 1.
        line: u64,
        /// Description of the error.
        what: String,
    },
}

/// The content of a line.
enum ParsedLine<'a> {
    /// A request of a device, at a time in microseconds: since 1970, or since the begin where the format has no date.
    Request {
        device: Device<'a>,
        time_us: u64,
        operation: Operation,
        offset: u64,
        len: u64,
        /// Whether a flush comes before it, at the same time.
        flush_first: bool,
    },
    /// A line that is no request.
    Passed(Passed),
}

/// A device's name: of one part, or of two with a dot between them.
#[derive(Clone, Copy, PartialEq)]
struct Device<'a>(&'a str, Option<&'a str>);

impl Device<'_> {
    fn is(&self, name: &str) -> bool {
        match self.1 {
            None => self.0 == name,
            Some(second) => name.strip_prefix(self.0).and_then(|rest| rest.strip_prefix('.')) == Some(second),
        }
    }

    fn name(&self) -> String {
        self.1.map_or_else(|| self.0.into(), |second| format!("{}.{second}", self.0))
    }
}

/// A file that is being imported: an iterator of events.
pub struct Import<R: BufRead> {
    from: R,
    format: Format,
    options: Options,
    line: Vec<u8>,
    lines: u64,
    skipped: u64,
    passed: passed::Counts,
    /// Number of events that were returned.
    given: u64,
    pending: Option<Event>,
    /// Set in blkparse's summary, behind the events.
    in_summary: bool,
    /// Number of requests whose time is before that of an earlier one.
    went_back: u64,
    most_back_us: u64,
    begin_us: Option<u64>,
    last_us: u64,
    /// Sum of the waits until now: version 2 of fio's log has no times.
    waited_us: u64,
    /// Set where no device was named: the file may have only one.
    only_one: bool,
    ended: bool,
}

/// Why a line gives no event.
enum ParseFailure {
    /// The line is bad; others may be good.
    Line(String),
    /// The whole file is bad.
    File(String),
}

impl From<String> for ParseFailure {
    fn from(what: String) -> ParseFailure {
        ParseFailure::Line(what)
    }
}

impl<R: BufRead> Import<R> {
    /// Starts to import.
    pub fn new(from: R, format: Format, options: Options) -> Import<R> {
        let only_one = options.device.is_none();
        Import {
            from,
            format,
            options,
            line: Vec::new(),
            lines: 0,
            skipped: 0,
            passed: passed::Counts::default(),
            given: 0,
            pending: None,
            in_summary: false,
            went_back: 0,
            most_back_us: 0,
            begin_us: None,
            last_us: 0,
            waited_us: 0,
            only_one,
            ended: false,
        }
    }

    /// Number of lines that were read.
    pub fn lines(&self) -> u64 {
        self.lines
    }

    /// Number of bad lines that were skipped.
    pub fn skipped(&self) -> u64 {
        self.skipped
    }

    /// Number of events.
    pub fn events(&self) -> u64 {
        self.given
    }

    /// Lines that are no requests of the device, and how many of each kind. Bad lines are not among them.
    pub fn passed(&self) -> impl Iterator<Item = (Passed, u64)> + '_ {
        self.passed.iter()
    }

    /// Number of requests whose time is before that of an earlier request, and the largest difference in microseconds.
    /// Such requests are given the earlier request's time.
    pub fn went_back(&self) -> (u64, u64) {
        (self.went_back, self.most_back_us)
    }

    /// The first event's time in microseconds since 1970, where the format says it: the begin that events count from.
    pub fn begin_unix_us(&self) -> Option<u64> {
        let has_date = !matches!(self.format, Format::Blkparse | Format::FioV2 | Format::FioV3);
        self.begin_us.filter(|_| has_date)
    }

    /// Reads the next line. False: there is none.
    fn next_line(&mut self) -> Result<bool, ImportError> {
        self.line.clear();
        let n = (&mut self.from).take(MAX_LINE_BYTES).read_until(b'\n', &mut self.line)?;
        self.lines += u64::from(n > 0);
        if n as u64 == MAX_LINE_BYTES && self.line.last() != Some(&b'\n') {
            // Whatever this is, lines have ended.
            self.ended = true;
            return Err(self.line_error(format!("it has more than {MAX_LINE_BYTES} bytes: this is no text")));
        }
        Ok(n > 0)
    }

    fn line_error(&self, what: String) -> ImportError {
        ImportError::Line { line: self.lines, what }
    }

    /// The event of the line that was read, if it is one of the device that is wanted.
    fn parse(&mut self) -> Result<Option<Event>, ParseFailure> {
        let line = std::mem::take(&mut self.line);
        let parsed = match std::str::from_utf8(&line) {
            Ok(text) => self.parse_text(text.trim()),
            Err(_) => Err("it is no UTF-8".to_string().into()),
        };
        self.line = line;
        parsed
    }

    fn parse_text(&mut self, text: &str) -> Result<Option<Event>, ParseFailure> {
        if let Some(head) = fio::head(self.format) {
            match (self.lines == 1, fio::is_head(text)) {
                (true, _) if text == head => return self.count_passed(Passed::Heading),
                (true, _) => {
                    let other = if fio::is_head(text) { ": is --format the other version's?" } else { "" };
                    return Err(ParseFailure::File(format!("it does not begin with '{head}'{other}")));
                }
                (false, true) => {
                    let what = "another log begins here, whose times begin anew: import each by itself";
                    return Err(ParseFailure::File(what.into()));
                }
                (false, false) => {}
            }
        }
        if text.is_empty() {
            return Ok(None);
        }
        if self.format == Format::Blkparse {
            let place = blkparse::text_part(text);
            self.in_summary |= place == Some(blkparse::TextPart::Summary);
            if place.is_some() || self.in_summary && blkparse::is_summary(text) {
                return self.count_passed(Passed::Heading);
            }
            if self.in_summary && blkparse::is_event(text) {
                let what = "events behind a summary: these are two recordings, whose times begin anew: import each by itself";
                return Err(ParseFailure::File(what.into()));
            }
        }
        let said = match self.format {
            Format::Blkparse => blkparse::parse(text, self.options.block_action)?,
            Format::FioV2 => fio::parse_v2(text, &mut self.waited_us)?,
            Format::FioV3 => fio::parse_v3(text)?,
            _ if csv::is_header(text, self.format) => ParsedLine::Passed(Passed::Heading),
            Format::Msr => csv::msr(text)?,
            Format::Systor17 => csv::systor17(text)?,
            Format::Alibaba => csv::alibaba(text)?,
            Format::Tencent => csv::tencent(text)?,
        };
        let (device, time_us, operation, offset, len, flush_first) = match said {
            ParsedLine::Passed(what) => return self.count_passed(what),
            ParsedLine::Request { device, time_us, operation, offset, len, flush_first } => {
                (device, time_us, operation, offset, len, flush_first)
            }
        };
        match &self.options.device {
            Some(wanted) if !device.is(wanted) => {
                if self.only_one {
                    let (first, other) = (quote(wanted), quote(&device.name()));
                    return Err(ParseFailure::File(format!(
                        "devices '{first}' and '{other}': say which one is wanted"
                    )));
                }
                return self.count_passed(Passed::OtherDevice);
            }
            _ => {}
        }
        if operation.has_range() && len == 0 {
            return self.count_passed(Passed::Empty);
        }
        let mut event = Event { time_us: 0, operation, offset_bytes: offset, len_bytes: len };
        event.check(self.options.disk_bytes)?;
        // A good line: the first one says what the others are compared with.
        self.options.device.get_or_insert_with(|| device.name());
        let begin_us = *self.begin_us.get_or_insert(time_us);
        let back_us = (begin_us + self.last_us).saturating_sub(time_us);
        self.went_back += u64::from(back_us > 0);
        self.most_back_us = self.most_back_us.max(back_us);
        event.time_us = time_us.saturating_sub(begin_us).max(self.last_us);
        self.last_us = event.time_us;
        if flush_first {
            self.pending = Some(event);
            event = Event { operation: Operation::Flush, offset_bytes: 0, len_bytes: 0, ..event };
        }
        Ok(Some(event))
    }

    /// Counts a line that is no request of the device.
    fn count_passed(&mut self, what: Passed) -> Result<Option<Event>, ParseFailure> {
        self.passed.add(what);
        Ok(None)
    }
}

impl<R: BufRead> Iterator for Import<R> {
    type Item = Result<Event, ImportError>;

    fn next(&mut self) -> Option<Self::Item> {
        if let Some(event) = self.pending.take() {
            self.given += 1;
            return Some(Ok(event));
        }
        while !self.ended {
            match self.next_line() {
                Ok(true) => {}
                Ok(false) => break,
                Err(e) => {
                    self.ended = true;
                    return Some(Err(e));
                }
            }
            match self.parse() {
                Ok(Some(event)) => {
                    self.given += 1;
                    return Some(Ok(event));
                }
                Ok(None) => {}
                Err(ParseFailure::Line(_)) if self.options.skip_bad => self.skipped += 1,
                Err(ParseFailure::Line(what) | ParseFailure::File(what)) => {
                    self.ended = true;
                    return Some(Err(self.line_error(what)));
                }
            }
        }
        self.ended = true;
        None
    }
}

/// A number of a field, and which field that is.
fn number(field: &str, what: &str) -> Result<u64, String> {
    field.parse().map_err(|_| format!("{what} '{}' is no number", quote(field)))
}

/// Seconds with a fraction, exactly, as microseconds.
fn microseconds(field: &str, what: &str) -> Result<u64, String> {
    let (seconds, fraction) = field.split_once('.').unwrap_or((field, ""));
    let bad = || format!("{what} '{}' is not a time in seconds", quote(field));
    let seconds: u64 = seconds.parse().map_err(|_| bad())?;
    if !fraction.bytes().all(|b| b.is_ascii_digit()) {
        return Err(bad());
    }
    let micros = fraction.bytes().chain(std::iter::repeat(b'0')).take(6);
    let micros = micros.fold(0, |n, digit| n * 10 + u64::from(digit - b'0'));
    seconds.checked_mul(1_000_000).and_then(|us| us.checked_add(micros)).ok_or_else(bad)
}

/// Sectors of 512 bytes as bytes.
fn sectors(field: &str, what: &str) -> Result<u64, String> {
    number(field, what)?.checked_mul(512).ok_or_else(|| format!("{what} '{}' is too large", quote(field)))
}

/// Shortens a field for an error message.
fn quote(field: &str) -> String {
    field.chars().take(40).filter(|c| !c.is_control()).collect()
}
