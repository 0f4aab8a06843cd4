//! Writes a trace as its requests come. Holds one chunk.

use super::record::{self, PreviousRecord};
use super::{Head, MAGIC, MAX_CHUNK_BYTES, MAX_HEAD_BYTES, TraceError, VERSION};
use crate::event::{BLOCK_BYTES, Event};
use std::io::Write;

/// Bytes of records at which a chunk is written: some ten thousand requests.
const CHUNK_BYTES: usize = 32 << 10;
const _: () = assert!(CHUNK_BYTES + record::MAX_BYTES <= MAX_CHUNK_BYTES as usize);

/// A trace that is being written. Without [`TraceWriter::finish`] it counts as cut off.
pub struct TraceWriter<W: Write> {
    to: W,
    end_bytes: u64,
    records: Vec<u8>,
    count: u32,
    before: PreviousRecord,
    last_us: u64,
}

impl<W: Write> TraceWriter<W> {
    /// Writes the head.
    ///
    /// # Errors
    /// The head is longer than 64 KiB or of other blocks than 4 KiB, or writing fails.
    pub fn new(mut to: W, head: &Head) -> Result<Self, TraceError> {
        if u64::from(head.block_bytes) != BLOCK_BYTES {
            return Err(TraceError::Event(format!("blocks of {} bytes: they have 4096", head.block_bytes)));
        }
        let json = serde_json::to_vec(head).map_err(std::io::Error::other)?;
        let len = u32::try_from(json.len()).ok().filter(|&len| len <= MAX_HEAD_BYTES).ok_or_else(|| {
            TraceError::Event(format!("a head of {} bytes: the most is {MAX_HEAD_BYTES}", json.len()))
        })?;
        let mut bytes = MAGIC.to_vec();
        bytes.extend(VERSION.to_le_bytes());
        bytes.extend([0, 0]);
        bytes.extend(len.to_le_bytes());
        bytes.extend(json);
        bytes.extend(crc32c::crc32c(&bytes).to_le_bytes());
        to.write_all(&bytes)?;
        let (records, before) =
            (Vec::with_capacity(CHUNK_BYTES + record::MAX_BYTES), PreviousRecord::default());
        Ok(TraceWriter { to, end_bytes: head.end_bytes(), records, count: 0, before, last_us: 0 })
    }

    /// Appends an event. A time before the last event's counts as that.
    ///
    /// # Errors
    /// It lies outside the disk or is too long, and nothing was written; or writing fails.
    pub fn push(&mut self, event: &Event) -> Result<(), TraceError> {
        event.check(self.end_bytes).map_err(TraceError::Event)?;
        self.last_us = self.last_us.max(event.time_us);
        self.before.encode(&Event { time_us: self.last_us, ..*event }, &mut self.records);
        self.count += 1;
        if self.records.len() >= CHUNK_BYTES { self.write_chunk() } else { Ok(()) }
    }

    /// Writes what has gathered: after a crash the file can be read up to here.
    ///
    /// # Errors
    /// Writing fails.
    pub fn flush(&mut self) -> Result<(), TraceError> {
        if self.count > 0 {
            self.write_chunk()?;
        }
        Ok(self.to.flush()?)
    }

    /// Ends the trace, and gives back what it was written to.
    ///
    /// # Errors
    /// Writing fails.
    pub fn finish(mut self) -> Result<W, TraceError> {
        self.flush()?;
        self.write_chunk()?;
        self.to.flush()?;
        Ok(self.to)
    }

    /// One frame. One without records is the end.
    fn write_chunk(&mut self) -> Result<(), TraceError> {
        let mut frame = (self.records.len() as u32).to_le_bytes().to_vec();
        frame.extend(self.count.to_le_bytes());
        let checksum = crc32c::crc32c_append(crc32c::crc32c(&frame), &self.records);
        frame.extend(checksum.to_le_bytes());
        self.to.write_all(&frame)?;
        self.to.write_all(&self.records)?;
        self.records.clear();
        self.count = 0;
        self.before = PreviousRecord::default();
        Ok(())
    }
}
