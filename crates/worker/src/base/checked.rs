//! A raw image that is compared with its digests as it is read. Owns the list, and which chunks were found good; says
//! so, that these are read without it from then on.
//!
//! Invariant: no byte of a chunk is handed out before all of it was found to be what its digest says. What the store
//! gives for the same bytes later is not looked at again.

use super::digests::{CHUNK_BYTES, ChunkDigest, list_bytes, of_chunk};
use super::extents::{Extent, ExtentKind};
use super::reader::Contents;
use super::source::{Source, StoreRead};
use rustix::io::Errno;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

/// The image.
pub struct Checked {
    source: Source,
    size_bytes: u64,
    chunks: Vec<Chunk>,
    buffer: Vec<u8>,
    damaged_at: Option<u64>,
}

struct Chunk {
    digest: ChunkDigest,
    state: State,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum State {
    /// Not read yet.
    Unknown,
    Good,
    /// It was not what it should be, which was told.
    Damaged,
}

impl Checked {
    /// Reads the list.
    pub fn new(file: File, size_bytes: u64, direct: bool, list: File) -> Result<Checked, String> {
        let source = Source::new(file, direct).map_err(|e| format!("cannot measure the base image: {e}"))?;
        let mut digests = vec![0; list_bytes(size_bytes) as usize];
        list.read_exact_at(&mut digests, 0)
            .map_err(|e| format!("cannot read the base image's digests: {e}"))?;
        let (digests, _) = digests.as_chunks();
        let chunk = |digest: &ChunkDigest| Chunk { digest: *digest, state: State::Unknown };
        Ok(Checked {
            source,
            size_bytes,
            chunks: digests.iter().map(chunk).collect(),
            buffer: Vec::new(),
            damaged_at: None,
        })
    }

    /// Reads a whole chunk into the buffer and looks whether it is good.
    fn check(&mut self, index: usize) -> io::Result<()> {
        let at = index as u64 * CHUNK_BYTES;
        self.buffer.resize((self.size_bytes - at).min(CHUNK_BYTES) as usize, 0);
        self.source.read_exact(&mut self.buffer, at)?;
        let chunk = &mut self.chunks[index];
        if of_chunk(&self.buffer) == chunk.digest {
            chunk.state = State::Good;
            return Ok(());
        }
        if chunk.state != State::Damaged {
            chunk.state = State::Damaged;
            self.damaged_at = Some(at);
        }
        Err(Errno::IO.into())
    }
}

impl Contents for Checked {
    fn read(&mut self, offset: u64, out: &mut [u8]) -> io::Result<()> {
        if offset.checked_add(out.len() as u64).is_none_or(|end| end > self.size_bytes) {
            return Err(Errno::INVAL.into());
        }
        let mut done = 0;
        while done < out.len() {
            let at = offset + done as u64;
            let (index, inside) = ((at / CHUNK_BYTES) as usize, (at % CHUNK_BYTES) as usize);
            let len = (out.len() - done).min(CHUNK_BYTES as usize - inside);
            let to = &mut out[done..done + len];
            if self.chunks[index].state == State::Good {
                self.source.read_exact(to, at)?;
            } else {
                self.check(index)?;
                to.copy_from_slice(&self.buffer[inside..inside + len]);
            }
            done += len;
        }
        Ok(())
    }

    /// The good chunks from that of `offset` on, as one.
    fn extents(&mut self, offset: u64) -> Vec<Extent> {
        let from = (offset / CHUNK_BYTES) as usize;
        let good = self.chunks[from.min(self.chunks.len())..].iter().take_while(|c| c.state == State::Good);
        let offset = from as u64 * CHUNK_BYTES;
        let end = (offset + good.count() as u64 * CHUNK_BYTES).min(self.size_bytes);
        let kind = ExtentKind::Raw { file_offset: offset };
        let good = end.checked_sub(offset).filter(|len| *len > 0);
        good.map(|len| Extent { offset, len, kind }).into_iter().collect()
    }

    fn take_traffic(&mut self) -> Vec<StoreRead> {
        self.source.take_traffic()
    }

    fn take_damage(&mut self) -> Option<u64> {
        self.damaged_at.take()
    }
}
