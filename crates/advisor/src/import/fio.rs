//! I/O logs of fio: a first line that names the version, then file, action, offset and length; version 3 with a time before
//! them, version 2 with waits between them. All in bytes and microseconds.

use super::{Device, Format, ParsedLine, Passed, number, quote};
use crate::event::Operation;

/// The first line.
pub(super) fn head(format: Format) -> Option<&'static str> {
    match format {
        Format::FioV2 => Some("fio version 2 iolog"),
        Format::FioV3 => Some("fio version 3 iolog"),
        _ => None,
    }
}

/// Whether a line is the first of a log.
pub(super) fn is_head(text: &str) -> bool {
    text.strip_prefix("fio version ").is_some_and(|rest| rest.ends_with(" iolog"))
}

pub(super) fn parse_v2<'a>(text: &'a str, waited_us: &mut u64) -> Result<ParsedLine<'a>, String> {
    let (file, rest) = word(text, "file")?;
    let (action, rest) = word(rest, "action")?;
    if action == "wait" {
        // Each counts from the one before.
        let (wait, _) = word(rest, "time to wait")?;
        *waited_us = waited_us.saturating_add(number(wait, "time to wait")?);
        return Ok(ParsedLine::Passed(Passed::OfFiles));
    }
    parse_action(file, action, rest, *waited_us)
}

pub(super) fn parse_v3(text: &str) -> Result<ParsedLine<'_>, String> {
    let (time, rest) = word(text, "time")?;
    let time_us = number(time, "time")?;
    let (file, rest) = word(rest, "file")?;
    let (action, rest) = word(rest, "action")?;
    parse_action(file, action, rest, time_us)
}

fn parse_action<'a>(file: &'a str, action: &str, rest: &str, time_us: u64) -> Result<ParsedLine<'a>, String> {
    let operation = match action {
        "add" | "open" | "close" => return Ok(ParsedLine::Passed(Passed::OfFiles)),
        "read" => Operation::Read,
        "write" => Operation::Write,
        "trim" => Operation::Discard,
        "sync" | "datasync" | "sync_file_range" => Operation::Flush,
        _ => return Err(format!("unknown action '{}'", quote(action))),
    };
    let device = Device(file, None);
    if !operation.has_range() {
        return Ok(ParsedLine::Request { device, time_us, operation, offset: 0, len: 0, flush_first: false });
    }
    let (offset, rest) = word(rest, "offset")?;
    let (len, _) = word(rest, "length")?;
    let (offset, len) = (number(offset, "offset")?, number(len, "length")?);
    Ok(ParsedLine::Request { device, time_us, operation, offset, len, flush_first: false })
}

fn word<'a>(text: &'a str, what: &str) -> Result<(&'a str, &'a str), String> {
    let text = text.trim_start();
    let end = text.find(|c: char| c.is_ascii_whitespace()).unwrap_or(text.len());
    if end == 0 { Err(format!("there is no {what}")) } else { Ok(text.split_at(end)) }
}
