//! Text of blkparse as it is without options: device, processor, number, seconds, process, event, what kind, sector + sectors.
//!
//! Invariant: of all events of a request only the chosen one counts, so that none is counted twice.

use super::{Device, Said, microseconds, sectors, shown};
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

pub(super) fn parse(text: &str, action: BlockAction) -> Result<Said<'_>, String> {
    // Behind the events there is a summary: of each processor, and in all.
    if ["CPU", "Total", "Throughput", "Events"].iter().any(|word| text.starts_with(word)) {
        return Ok(Said::End);
    }
    let mut fields = text.split_ascii_whitespace();
    let mut next = |what: &str| fields.next().ok_or_else(|| format!("there is no {what}"));
    let device = next("device")?;
    if !device.split_once(',').is_some_and(|(a, b)| a.parse::<u32>().is_ok() && b.parse::<u32>().is_ok()) {
        return Err(format!("'{}' is no device like 8,0", shown(device)));
    }
    let (_processor, _number) = (next("processor")?, next("number")?);
    let time = next("time")?;
    let _process = next("process")?;
    if next("event")? != action.letter() {
        return Ok(Said::Nothing);
    }
    let kind = next("kind of request")?;
    let time_us = microseconds(time, "time")?;
    let flushes = kind.starts_with('F');
    let kind = kind.trim_start_matches('F');
    let operation = match kind.as_bytes() {
        [b'R', ..] => Operation::Read,
        [b'W', b'Z', ..] => Operation::WriteZeroes,
        [b'W', ..] => Operation::Write,
        [b'D', ..] => Operation::Discard,
        _ => Operation::Flush,
    };
    let device = Device(device, None);
    let flush = Said::Request { device, time_us, operation: Operation::Flush, offset: 0, len: 0 };
    let Some(sector) = fields.next().filter(|f| !f.starts_with(['[', '('])) else {
        // No sectors: a flush, or something that is for the driver alone.
        return Ok(if flushes { flush } else { Said::Nothing });
    };
    if operation == Operation::Flush {
        return Ok(if flushes { flush } else { Said::Nothing });
    }
    let (offset, plus) = (sectors(sector, "sector")?, fields.next());
    if plus != Some("+") {
        return Err(format!("sector {} has no '+ sectors' behind it", shown(sector)));
    }
    let len = sectors(fields.next().unwrap_or(""), "number of sectors")?;
    // A flush before data may come with no data.
    Ok(if flushes && len == 0 { flush } else { Said::Request { device, time_us, operation, offset, len } })
}
