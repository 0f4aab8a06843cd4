//! The public traces that are CSV: which field is what, and in which unit. No field of theirs is ever quoted.

use super::{Device, Format, ParsedLine, Passed, microseconds, number, quote, sectors};
use crate::event::Operation;

/// Microseconds from 1601, where Windows begins to count, to 1970.
const WINDOWS_EPOCH_US: u64 = 11_644_473_600_000_000;

fn fields<const N: usize>(text: &str) -> Result<[&str; N], String> {
    let mut fields = [""; N];
    let mut n = 0;
    for field in text.split(',') {
        if let Some(place) = fields.get_mut(n) {
            *place = field.trim();
        }
        n += 1;
    }
    if n == N { Ok(fields) } else { Err(format!("{n} fields, and there should be {N}")) }
}

/// Whether a line is a header that names the fields: of files that were joined there is one before each. A line of a trace begins with a
/// number.
pub(super) fn is_header(text: &str, format: Format) -> bool {
    let names = match format {
        Format::Msr => fields::<7>(text).map(Vec::from),
        Format::Systor17 => fields::<6>(text).map(Vec::from),
        _ => fields::<5>(text).map(Vec::from),
    };
    let is_name = |field: &&str| {
        let rest = |byte: u8| byte.is_ascii_alphanumeric() || b" _-()/".contains(&byte);
        field.starts_with(|first: char| first.is_ascii_alphabetic()) && field.bytes().all(rest)
    };
    names.is_ok_and(|names| names.iter().all(is_name))
}

/// A request, when its time is known: what it does by the words for reads and writes, and from where and how far in some unit.
fn request<'a>(
    device: Device<'a>,
    time_us: u64,
    (kind, [read, write]): (&str, [&str; 2]),
    (offset, len): (&str, &str),
    unit: fn(&str, &str) -> Result<u64, String>,
) -> Result<ParsedLine<'a>, String> {
    let operation = if kind.eq_ignore_ascii_case(read) {
        Operation::Read
    } else if kind.eq_ignore_ascii_case(write) {
        Operation::Write
    } else {
        return Err(format!("operation '{}' is neither {read} nor {write}", quote(kind)));
    };
    let (offset, len) = (unit(offset, "offset")?, unit(len, "size")?);
    Ok(ParsedLine::Request { device, time_us, operation, offset, len, flush_first: false })
}

/// Time in 100 ns since 1601, host, disk, Read or Write, offset and size in bytes, response time.
pub(super) fn msr(text: &str) -> Result<ParsedLine<'_>, String> {
    let [time, host, disk, kind, offset, size, _response] = fields(text)?;
    let time_us = (number(time, "time")? / 10)
        .checked_sub(WINDOWS_EPOCH_US)
        .ok_or_else(|| format!("time '{}' is before 1970: it counts 100 ns from 1601", quote(time)))?;
    request(Device(host, Some(disk)), time_us, (kind, ["Read", "Write"]), (offset, size), number)
}

/// Seconds since 1970 with a fraction, response time, R or W or nothing, LUN, offset and size in bytes.
pub(super) fn systor17(text: &str) -> Result<ParsedLine<'_>, String> {
    let [time, _response, kind, lun, offset, size] = fields(text)?;
    if kind.is_empty() {
        // Neither a read nor a write: the traces have such lines.
        return Ok(ParsedLine::Passed(Passed::NoOperation));
    }
    request(Device(lun, None), microseconds(time, "time")?, (kind, ["R", "W"]), (offset, size), number)
}

/// Device, R or W, offset and length in bytes, microseconds since 1970.
pub(super) fn alibaba(text: &str) -> Result<ParsedLine<'_>, String> {
    let [device, kind, offset, length, time] = fields(text)?;
    request(Device(device, None), number(time, "time")?, (kind, ["R", "W"]), (offset, length), number)
}

/// Seconds since 1970, offset and size in sectors, 0 for a read or 1 for a write, volume.
pub(super) fn tencent(text: &str) -> Result<ParsedLine<'_>, String> {
    let [time, offset, size, kind, volume] = fields(text)?;
    request(Device(volume, None), microseconds(time, "time")?, (kind, ["0", "1"]), (offset, size), sectors)
}
