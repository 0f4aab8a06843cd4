//! Text of blkparse as it is without options: device, processor, number, seconds, process, event, what kind, sector + sectors.
//!
//! Invariant: of all events of a request only the chosen one counts, so that none is counted twice.

use super::{Device, ParsedLine, Passed, microseconds, quote, sectors};
use crate::event::Operation;

/// Which event of a request counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BlockAction {
    /// `Q`: it came to the queue, as the guest made it.
    Queue,
    /// `D`: it went to the driver, merged with others.
    Issue,
    /// `C`: it was completed.
    Complete,
}

impl BlockAction {
    fn letter(self) -> &'static str {
        match self {
            BlockAction::Queue => "Q",
            BlockAction::Issue => "D",
            BlockAction::Complete => "C",
        }
    }
}

/// Returns the part that a line belongs to or begins: the head before the events, or the summary behind them, of each processor, of
/// each program, and in all.
pub(super) fn text_part(text: &str) -> Option<TextPart> {
    if text.starts_with("Input file ") {
        return Some(TextPart::Head);
    }
    let begins = ["CPU", "Total", "Throughput", "Events"].iter().any(|word| text.starts_with(word));
    (begins || is_program(text)).then_some(TextPart::Summary)
}

/// A part of the text that has no events.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum TextPart {
    Head,
    Summary,
}

/// A program's name with its process number, as the summary by programs has it: `dd (4162)`, `dd (4162, ...)`.
fn is_program(text: &str) -> bool {
    let number = text.strip_suffix(')').and_then(|text| text.rsplit_once(" (")).map(|(_, number)| number);
    let digits = number.map(|number| number.strip_suffix(", ...").unwrap_or(number));
    digits.is_some_and(|digits| !digits.is_empty() && digits.bytes().all(|byte| byte.is_ascii_digit()))
}

/// A line within the summary: a name and a figure.
pub(super) fn is_summary(text: &str) -> bool {
    !is_event(text) && (text.contains(':') || is_program(text))
}

/// Whether it begins with a device, as events do.
pub(super) fn is_event(text: &str) -> bool {
    text.split_ascii_whitespace().next().is_some_and(is_device)
}

fn is_device(field: &str) -> bool {
    field.split_once(',').is_some_and(|(a, b)| a.parse::<u32>().is_ok() && b.parse::<u32>().is_ok())
}

pub(super) fn parse(text: &str, action: BlockAction) -> Result<ParsedLine<'_>, String> {
    let mut fields = text.split_ascii_whitespace();
    let mut next = |what: &str| fields.next().ok_or_else(|| format!("there is no {what}"));
    let device = next("device")?;
    if !is_device(device) {
        return Err(format!("'{}' is not a device such as 8,0", quote(device)));
    }
    let (_processor, _number) = (next("processor")?, next("number")?);
    let time = next("time")?;
    let _process = next("process")?;
    if next("event")? != action.letter() {
        return Ok(ParsedLine::Passed(Passed::OtherEvent));
    }
    let kind = next("kind of request")?;
    let time_us = microseconds(time, "time")?;
    // Before the operation: the medium is flushed first. Behind it F means FUA.
    let flush_first = kind.starts_with('F');
    let kind = kind.trim_start_matches('F');
    let operation = match kind.as_bytes() {
        [b'R', ..] => Some(Operation::Read),
        [b'W', b'Z', ..] => Some(Operation::WriteZeroes),
        [b'W', ..] => Some(Operation::Write),
        [b'D', ..] => Some(Operation::Discard),
        _ => None,
    };
    let device = Device(device, None);
    let flush = ParsedLine::Request {
        device,
        time_us,
        operation: Operation::Flush,
        offset: 0,
        len: 0,
        flush_first: false,
    };
    // `sector + sectors`; `0` alone where a flush is completed; a number of bytes and the words of a command that is
    // for the device alone; a time in parentheses where each is followed through.
    let sector = fields.next().filter(|field| !field.starts_with(['[', '(']));
    let behind = fields.next();
    let range = match (sector, behind) {
        (None, _) => None,
        (Some(sector), Some("+")) => Some((sector, fields.next().unwrap_or(""))),
        (Some(number), behind) if behind.is_none_or(|field| field.starts_with(['[', '('])) => {
            number.parse::<u64>().map_err(|_| format!("sector '{}' is no number", quote(number)))?;
            None
        }
        (Some(sector), _) => return Err(format!("sector {} has no '+ sectors' behind it", quote(sector))),
    };
    Ok(match (range, operation) {
        (Some((sector, len)), Some(operation)) => {
            let (offset, len) = (sectors(sector, "sector")?, sectors(len, "number of sectors")?);
            // A flush before data may come with no data.
            match flush_first && len == 0 {
                true => flush,
                false => ParsedLine::Request { device, time_us, operation, offset, len, flush_first },
            }
        }
        (_, _) if flush_first => flush,
        // The data of a flush that had none: the flush itself is told of in another line.
        (None, Some(Operation::Write)) => ParsedLine::Passed(Passed::NoData),
        _ => ParsedLine::Passed(Passed::Command),
    })
}
