//! Encodes and decodes one record of a chunk. Owns the bits; knows no frames.
//!
//! Invariants: what was encoded is what is decoded; decoding takes at most [`MAX_BYTES`] bytes and says what is wrong
//! instead of guessing.

use crate::event::{Event, Operation};

/// Most bytes of a record: flags and three varints.
pub(super) const MAX_BYTES: usize = 1 + 3 * MAX_VARINT;
const MAX_VARINT: usize = 10;

const OPERATION: u8 = 0b111;
/// Flag: the range begins where that of the previous record ended.
const FOLLOWS: u8 = 1 << 3;
const SAME_LENGTH: u8 = 1 << 4;
const SAME_TIME: u8 = 1 << 5;
const UNIT_SHIFT: u8 = 6;
/// Units, by their number, as powers of two.
const UNITS: [u32; 3] = [0, 9, 12];

/// The fields of a record that the next one is encoded against.
#[derive(Clone, Copy, Default)]
pub(super) struct PreviousRecord {
    time_us: u64,
    end_bytes: u64,
    len_bytes: u64,
}

impl PreviousRecord {
    /// Appends an event, which has passed its check. Time never goes back: an earlier one counts as the one before.
    pub fn encode(&mut self, event: &Event, out: &mut Vec<u8>) {
        let time_us = event.time_us.max(self.time_us);
        let delta = event.offset_bytes.wrapping_sub(self.end_bytes);
        let has_range = event.operation.has_range();
        let same_time = time_us == self.time_us;
        let follows = has_range && delta == 0;
        let same_length = has_range && event.len_bytes == self.len_bytes;
        let all = if follows { 0 } else { delta } | if same_length { 0 } else { event.len_bytes };
        let unit = (0..UNITS.len()).rev().find(|&u| all.trailing_zeros() >= UNITS[u]).unwrap_or(0);
        let unit = if has_range { unit } else { 0 };
        let bit = |is: bool, bit: u8| if is { bit } else { 0 };
        out.push(
            event.operation as u8
                | bit(follows, FOLLOWS)
                | bit(same_length, SAME_LENGTH)
                | bit(same_time, SAME_TIME)
                | (unit as u8) << UNIT_SHIFT,
        );
        if !same_time {
            put(out, time_us - self.time_us);
        }
        self.time_us = time_us;
        if !has_range {
            return;
        }
        if !follows {
            let signed = delta as i64 >> UNITS[unit];
            put(out, (signed << 1 ^ signed >> 63) as u64);
        }
        if !same_length {
            put(out, event.len_bytes >> UNITS[unit]);
        }
        self.end_bytes = event.offset_bytes + event.len_bytes;
        self.len_bytes = event.len_bytes;
    }

    /// Takes the next event off `bytes`, of a disk that ends at `end_bytes`.
    pub fn decode(&mut self, bytes: &mut &[u8], end_bytes: u64) -> Result<Event, String> {
        let (&flags, rest) = bytes.split_first().ok_or("it ends before its records do")?;
        *bytes = rest;
        let operation = *Operation::ALL
            .get(usize::from(flags & OPERATION))
            .ok_or_else(|| format!("operation {}", flags & OPERATION))?;
        let unit = *UNITS.get(usize::from(flags >> UNIT_SHIFT)).ok_or("a unit that is none")?;
        if flags & SAME_TIME == 0 {
            let later = get(bytes)?;
            self.time_us = self.time_us.checked_add(later).ok_or("a time beyond all times")?;
        }
        let mut event = Event { time_us: self.time_us, operation, offset_bytes: 0, len_bytes: 0 };
        if !operation.has_range() {
            return match flags & (FOLLOWS | SAME_LENGTH) {
                0 if unit == 0 => Ok(event),
                _ => Err(format!("{operation:?} with a range")),
            };
        }
        let mut delta = 0;
        if flags & FOLLOWS == 0 {
            let zigzag = get(bytes)?;
            let units = (zigzag >> 1) as i64 ^ -((zigzag & 1) as i64);
            delta = units.checked_mul(1 << unit).ok_or("an offset beyond all disks")?;
        }
        event.offset_bytes = self.end_bytes.checked_add_signed(delta).ok_or("an offset below 0")?;
        event.len_bytes = self.len_bytes;
        if flags & SAME_LENGTH == 0 {
            event.len_bytes = get(bytes)?.checked_mul(1 << unit).ok_or("a length beyond all disks")?;
        }
        event.check(end_bytes)?;
        self.end_bytes = event.offset_bytes + event.len_bytes;
        self.len_bytes = event.len_bytes;
        Ok(event)
    }
}

fn put(out: &mut Vec<u8>, mut n: u64) {
    while n >= 0x80 {
        out.push(n as u8 | 0x80);
        n >>= 7;
    }
    out.push(n as u8);
}

fn get(bytes: &mut &[u8]) -> Result<u64, String> {
    let mut n = 0;
    for i in 0..MAX_VARINT {
        let (&byte, rest) = bytes.split_first().ok_or("it ends inside a number")?;
        *bytes = rest;
        if i == MAX_VARINT - 1 && byte > 1 {
            break;
        }
        n |= u64::from(byte & 0x7F) << (7 * i);
        if byte & 0x80 == 0 {
            return Ok(n);
        }
    }
    Err("a number of more than 64 bits".into())
}
