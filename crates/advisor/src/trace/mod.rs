//! The file of a trace: a head, then framed chunks of records, then a mark of its end.
//!
//! ```text
//! "SPLWTRC\n"  version u16  0 u16  length of the head u32  the head (JSON)  CRC32C of all before u32
//! chunk:       length u32   count u32   CRC32C of length, count and records u32   records
//! end:         a chunk of length 0 and count 0
//! record:      flags u8   [time: varint]   [offset: signed varint]   [length: varint]
//! ```
//!
//! Numbers are little-endian. A record says how much later than the one before it is, how far from that one's end it begins,
//! and how long it is; flags leave out what is 0 or the same, and give the unit (1, 512 or 4096 bytes). A request
//! that follows the one before at once is one byte. Each chunk begins anew, so that none is needed to read another.
//! Invariants: nothing holds more than one chunk; a reader believes no length before it has checked it.

mod reader;
mod record;
mod writer;

pub use reader::{End, TraceReader};
pub use writer::TraceWriter;

use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::io;

const MAGIC: [u8; 8] = *b"SPLWTRC\n";
const VERSION: u16 = 1;
/// Bytes before the head: magic, version, 0, length.
const PREFIX_BYTES: usize = 16;
/// Bytes before the records of a chunk.
const FRAME_BYTES: usize = 12;
/// Most bytes of the head.
const MAX_HEAD_BYTES: u32 = 64 << 10;
/// Most bytes of a chunk's records.
const MAX_CHUNK_BYTES: u32 = 256 << 10;

/// The head of a trace.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Head {
    /// Size of the disk; 0 if it is not known.
    #[serde(default)]
    pub disk_bytes: u64,
    /// Bytes of the blocks that the disk was served in.
    pub block_bytes: u32,
    /// The trace's begin, in microseconds since 1970; 0 if it is not known.
    #[serde(default)]
    pub begin_unix_us: u64,
    /// Notes of who recorded it, by name.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub notes: BTreeMap<String, String>,
}

impl Head {
    /// A head for a disk of this size.
    pub fn new(disk_bytes: u64) -> Head {
        let block_bytes = crate::event::BLOCK_BYTES as u32;
        Head { disk_bytes, block_bytes, begin_unix_us: 0, notes: BTreeMap::new() }
    }

    /// The byte behind the last one that an event may reach.
    pub fn end_bytes(&self) -> u64 {
        if self.disk_bytes == 0 { u64::MAX } else { self.disk_bytes }
    }
}

/// Why a trace cannot be read or written on.
#[derive(Debug, thiserror::Error)]
pub enum TraceError {
    /// The file itself cannot be read or written.
    #[error("cannot read or write the trace")]
    Io(#[from] io::Error),
    /// It is something else.
    #[error("this is no trace: it begins with other bytes; import other formats first")]
    NotATrace,
    /// It was written by a later program.
    #[error(
        "version {0} of the trace format is not known here: use the program that wrote it, or a later one"
    )]
    Version(u16),
    /// Its bytes are not what was written.
    #[error("the trace is damaged at byte {at}: {what}")]
    Damaged {
        /// Where, in bytes from the file's begin.
        at: u64,
        /// What is wrong.
        what: String,
    },
    /// What was to be written cannot be.
    #[error("invalid event of a trace: {0}")]
    Event(String),
}
