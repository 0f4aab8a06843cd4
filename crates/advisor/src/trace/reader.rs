//! Reads a trace, event by event. Holds one chunk, whose checksum was right.
//!
//! Invariant: any bytes end in events, a word on how they end, or an error; none makes it panic, take more than a chunk's
//! memory, or go on for ever.

use super::record::PreviousRecord;
use super::{FRAME_BYTES, Head, MAGIC, MAX_CHUNK_BYTES, MAX_HEAD_BYTES, PREFIX_BYTES, TraceError, VERSION};
use crate::event::{BLOCK_BYTES, Event};
use std::io::{ErrorKind, Read};

/// How a trace ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    /// Not yet seen.
    Unknown,
    /// With its mark: nothing is missing.
    Whole,
    /// Without it: whoever wrote it was stopped, or the file was cut. All whole chunks were read.
    Cut {
        /// The end of the last whole chunk, in bytes from the file's begin.
        at: u64,
    },
}

/// A trace that is being read.
pub struct TraceReader<R: Read> {
    from: R,
    head: Head,
    /// Bytes of the file that were taken, the current chunk included.
    at: u64,
    chunk: Vec<u8>,
    /// How far the chunk's records were taken.
    next: usize,
    /// Records still to come of the chunk.
    left: u32,
    before: PreviousRecord,
    last_us: u64,
    end: End,
    failed: bool,
}

impl<R: Read> TraceReader<R> {
    /// Reads the head.
    ///
    /// # Errors
    /// It is no trace, of a later version, damaged or cut off in the head; or reading fails.
    pub fn new(mut from: R) -> Result<Self, TraceError> {
        let mut prefix = [0; PREFIX_BYTES];
        let n = fill(&mut from, &mut prefix)?;
        let seen = n.min(MAGIC.len());
        if n == 0 || prefix[..seen] != MAGIC[..seen] {
            return Err(TraceError::NotATrace);
        }
        let damaged = |at: usize, what: &str| TraceError::Damaged { at: at as u64, what: what.into() };
        if n < PREFIX_BYTES {
            return Err(damaged(n, "it is cut off in the head"));
        }
        let version = u16::from_le_bytes([prefix[8], prefix[9]]);
        if version != VERSION {
            return Err(TraceError::Version(version));
        }
        let len = word(&prefix, 12);
        if len > MAX_HEAD_BYTES {
            return Err(damaged(12, "the head is too long"));
        }
        let mut rest = vec![0; len as usize + 4];
        if fill(&mut from, &mut rest)? < rest.len() {
            return Err(damaged(PREFIX_BYTES, "it is cut off in the head"));
        }
        let (json, checksum) = rest.split_at(len as usize);
        if crc32c::crc32c_append(crc32c::crc32c(&prefix), json) != word(checksum, 0) {
            return Err(damaged(PREFIX_BYTES, "the head's checksum is wrong"));
        }
        let head: Head =
            serde_json::from_slice(json).map_err(|e| damaged(PREFIX_BYTES, &format!("the head: {e}")))?;
        if u64::from(head.block_bytes) != BLOCK_BYTES {
            return Err(damaged(PREFIX_BYTES, "the head speaks of blocks that are not of 4096 bytes"));
        }
        let (at, before) = ((PREFIX_BYTES + rest.len()) as u64, PreviousRecord::default());
        let (chunk, end) = (Vec::new(), End::Unknown);
        Ok(TraceReader { from, head, at, chunk, next: 0, left: 0, before, last_us: 0, end, failed: false })
    }

    /// What the trace says of itself.
    pub fn head(&self) -> &Head {
        &self.head
    }

    /// How it ends, once there are no more events.
    pub fn end(&self) -> End {
        self.end
    }

    /// The next event; none at the end, whatever [`TraceReader::end`] is.
    ///
    /// # Errors
    /// What follows is damaged, or cannot be read. There are no events after an error.
    pub fn read(&mut self) -> Result<Option<Event>, TraceError> {
        if self.failed {
            return Ok(None);
        }
        let result = self.read_on();
        self.failed = result.is_err();
        result
    }

    fn read_on(&mut self) -> Result<Option<Event>, TraceError> {
        if self.left == 0 && (self.end != End::Unknown || !self.next_chunk()?) {
            return Ok(None);
        }
        let mut bytes = &self.chunk[self.next..];
        let decoded = self.before.decode(&mut bytes, self.head.end_bytes());
        let at = self.at - bytes.len() as u64;
        let mut event = decoded.map_err(|what| TraceError::Damaged { at, what })?;
        self.next = self.chunk.len() - bytes.len();
        self.left -= 1;
        if self.left == 0 && !bytes.is_empty() {
            return Err(TraceError::Damaged { at, what: "a chunk is longer than its records".into() });
        }
        self.last_us = self.last_us.max(event.time_us);
        event.time_us = self.last_us;
        Ok(Some(event))
    }

    /// Whether there is one.
    fn next_chunk(&mut self) -> Result<bool, TraceError> {
        let start = self.at;
        let damaged = |what: &str| TraceError::Damaged { at: start, what: what.into() };
        let mut frame = [0; FRAME_BYTES];
        if fill(&mut self.from, &mut frame)? < FRAME_BYTES {
            self.end = End::Cut { at: start };
            return Ok(false);
        }
        let (len, count, checksum) = (word(&frame, 0), word(&frame, 4), word(&frame, 8));
        if len > MAX_CHUNK_BYTES || count > len || (count == 0) != (len == 0) {
            return Err(damaged("no chunk begins so"));
        }
        self.chunk.resize(len as usize, 0);
        if fill(&mut self.from, &mut self.chunk)? < len as usize {
            self.end = End::Cut { at: start };
            return Ok(false);
        }
        if crc32c::crc32c_append(crc32c::crc32c(&frame[..8]), &self.chunk) != checksum {
            return Err(damaged("a chunk's checksum is wrong"));
        }
        self.at += (FRAME_BYTES + self.chunk.len()) as u64;
        (self.next, self.left, self.before) = (0, count, PreviousRecord::default());
        if count == 0 {
            self.end = End::Whole;
        }
        Ok(count > 0)
    }
}

impl<R: Read> Iterator for TraceReader<R> {
    type Item = Result<Event, TraceError>;

    fn next(&mut self) -> Option<Self::Item> {
        self.read().transpose()
    }
}

fn word(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(bytes[at..at + 4].try_into().expect("four bytes"))
}

/// Reads until it is full or there is no more. Returns how much.
fn fill(from: &mut impl Read, to: &mut [u8]) -> Result<usize, TraceError> {
    let mut n = 0;
    while n < to.len() {
        match from.read(&mut to[n..]) {
            Ok(0) => break,
            Ok(more) => n += more,
            Err(e) if e.kind() == ErrorKind::Interrupted => {}
            Err(e) => return Err(e.into()),
        }
    }
    Ok(n)
}
