//! The public traces that are CSV: which field is what, and in which unit. No field of theirs is ever quoted.

use super::{Device, Said, microseconds, number, sectors, shown};
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

fn operation(field: &str, read: &str, write: &str) -> Result<Operation, String> {
    if field.eq_ignore_ascii_case(read) {
        Ok(Operation::Read)
    } else if field.eq_ignore_ascii_case(write) {
        Ok(Operation::Write)
    } else {
        Err(format!("operation '{}' is neither {read} nor {write}", shown(field)))
    }
}

/// Time in 100 ns since 1601, host, disk, Read or Write, offset and size in bytes, response time.
pub(super) fn msr(text: &str) -> Result<Said<'_>, String> {
    let [time, host, disk, kind, offset, size, _response] = fields(text)?;
    let time_us = (number(time, "time")? / 10)
        .checked_sub(WINDOWS_EPOCH_US)
        .ok_or_else(|| format!("time '{}' is before 1970: it counts 100 ns from 1601", shown(time)))?;
    let (offset, len) = (number(offset, "offset")?, number(size, "size")?);
    let operation = operation(kind, "Read", "Write")?;
    Ok(Said::Request { device: Device(host, Some(disk)), time_us, operation, offset, len })
}

/// Seconds since 1970 with a fraction, response time, R or W or nothing, LUN, offset and size in bytes.
pub(super) fn systor17(text: &str) -> Result<Said<'_>, String> {
    let [time, _response, kind, lun, offset, size] = fields(text)?;
    if kind.is_empty() {
        // Neither a read nor a write: the traces have such lines.
        return Ok(Said::Nothing);
    }
    let time_us = microseconds(time, "time")?;
    let (offset, len) = (number(offset, "offset")?, number(size, "size")?);
    let operation = operation(kind, "R", "W")?;
    Ok(Said::Request { device: Device(lun, None), time_us, operation, offset, len })
}

/// Device, R or W, offset and length in bytes, microseconds since 1970.
pub(super) fn alibaba(text: &str) -> Result<Said<'_>, String> {
    let [device, kind, offset, length, time] = fields(text)?;
    let time_us = number(time, "time")?;
    let (offset, len) = (number(offset, "offset")?, number(length, "length")?);
    let operation = operation(kind, "R", "W")?;
    Ok(Said::Request { device: Device(device, None), time_us, operation, offset, len })
}

/// Seconds since 1970, offset and size in sectors, 0 for a read or 1 for a write, volume.
pub(super) fn tencent(text: &str) -> Result<Said<'_>, String> {
    let [time, offset, size, kind, volume] = fields(text)?;
    let time_us = microseconds(time, "time")?;
    let (offset, len) = (sectors(offset, "offset")?, sectors(size, "size")?);
    let operation = operation(kind, "0", "1")?;
    Ok(Said::Request { device: Device(volume, None), time_us, operation, offset, len })
}
