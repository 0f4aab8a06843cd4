//! The staging buffers: which blocks are being written to the overflow (difference) file, and what a finished write commits. Owns
//! the bookkeeping; the worker owns the bytes.
//!
//! In the log modes a part is one write of adjacent blocks. In mode `direct` it is a page pool: several
//! writes, each to its own place, start from one part.

use crate::entry::Entry;
use crate::io::{PARTS, PartId};
use crate::table::Id;
use spillway_layout::{Block, Location, Slot};

/// A source of appends. Each stream has an open segment of its own, so that old live blocks do not mix with new ones, and the
/// collector never waits for space that eviction has taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Stream {
    /// Eviction, and the writes of mode `overflow`.
    Write = 0,
    /// The collector.
    Collect = 1,
}

/// Space for `n` blocks in a row.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Extent {
    pub segment: u32,
    pub first: Location,
    /// The extent ends the segment: its summary follows.
    pub seals: bool,
}

/// Where a block in a part comes from, and so what must still be true when its write is committed.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Source {
    /// From the RAM tier: the slot must still be marked as evicting into this part.
    Evict(Slot),
    /// From another segment: the map entry must still be this one.
    Collect(Entry),
    /// From a request, which keeps all others that overlap it waiting.
    Write(Id),
}

#[derive(Clone, Copy, Debug)]
pub(crate) struct Staged {
    pub block: Block,
    pub location: Location,
    pub checksum: u32,
    pub source: Source,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum PartState {
    Free,
    /// Taking blocks.
    Filling,
    /// Its writes are in flight.
    Writing,
}

pub(crate) struct Part {
    pub state: PartState,
    pub stream: Stream,
    /// Pages taken (mode `direct`).
    pub used: usize,
    pub staged: Vec<Staged>,
    /// Writes of it that failed (log modes).
    pub failures: u32,
    /// Where it goes (log modes).
    pub extent: Option<Extent>,
    /// Writes in flight that start from it (mode `direct`).
    pub writes: u32,
}

/// All parts.
pub(crate) struct Parts {
    parts: [Part; PARTS],
}

impl std::fmt::Debug for Parts {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_list().entries(self.parts.iter().map(|p| p.state)).finish()
    }
}

impl Parts {
    pub fn new() -> Parts {
        let part = || Part {
            state: PartState::Free,
            stream: Stream::Write,
            used: 0,
            staged: Vec::new(),
            failures: 0,
            extent: None,
            writes: 0,
        };
        Parts { parts: std::array::from_fn(|_| part()) }
    }

    pub fn get(&mut self, id: PartId) -> &mut Part {
        &mut self.parts[id.0 as usize]
    }

    pub fn iter(&self) -> impl Iterator<Item = (PartId, &Part)> {
        self.parts.iter().enumerate().map(|(i, p)| (PartId(i as u8), p))
    }

    /// Whether there is a free part for a stream. One is always left for the collector.
    pub fn can_take(&self, stream: Stream) -> bool {
        PARTS - self.in_use() > if stream == Stream::Write { 1 } else { 0 }
    }

    /// Takes a free part for a stream.
    pub fn take(&mut self, stream: Stream) -> Option<PartId> {
        if !self.can_take(stream) {
            return None;
        }
        let first = self.parts.iter().position(|p| p.state == PartState::Free)?;
        let part = &mut self.parts[first];
        part.state = PartState::Filling;
        part.stream = stream;
        Some(PartId(first as u8))
    }

    /// The part that is taking blocks for a stream.
    pub fn filling(&self, stream: Stream) -> Option<PartId> {
        self.iter().find(|(_, p)| p.state == PartState::Filling && p.stream == stream).map(|(id, _)| id)
    }

    /// Frees the part.
    pub fn release(&mut self, id: PartId) {
        let part = self.get(id);
        part.state = PartState::Free;
        part.used = 0;
        part.writes = 0;
        part.failures = 0;
        part.staged.clear();
        part.extent = None;
    }

    pub fn in_use_by(&self, stream: Stream) -> usize {
        self.parts.iter().filter(|p| p.state != PartState::Free && p.stream == stream).count()
    }

    pub fn in_use(&self) -> usize {
        self.parts.iter().filter(|p| p.state != PartState::Free).count()
    }
}
