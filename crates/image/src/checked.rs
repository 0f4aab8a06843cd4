//! A raw image that is compared with its digests as it is read. Owns the list, and which chunks were found good; says
//! so, that these are read without it from then on.
//!
//! Invariant: no byte of a chunk is handed out before all of it was found to be what its digest says. What the store
//! gives for the same bytes later is not looked at again. Of a chunk whose digest is that of zeroes the store is never asked.

use super::digests::{CHUNK_BYTES, ChunkDigest, OF_ZEROES, list_bytes, of_chunk};
use super::error::ImageError;
use super::extents::{Extent, ExtentKind, MOST_EXTENTS};
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
    /// All zeroes, as its digest says.
    Zero,
    Good,
    /// It was not what it should be, which was told.
    Damaged,
}

impl Checked {
    /// Reads the list.
    pub fn new(file: File, size_bytes: u64, direct: bool, list: File) -> Result<Checked, ImageError> {
        let source = Source::new(file, direct).map_err(|e| ImageError::io("cannot be measured", &e))?;
        let mut digests = vec![0; list_bytes(size_bytes) as usize];
        list.read_exact_at(&mut digests, 0)
            .map_err(|e| ImageError::io("has digests that cannot be read", &e))?;
        let (digests, _) = digests.as_chunks();
        let chunk = |digest: &ChunkDigest| {
            let state = if *digest == OF_ZEROES { State::Zero } else { State::Unknown };
            Chunk { digest: *digest, state }
        };
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

impl Checked {
    /// What is known of the chunks of a range, to the first that is not, or, if `on`, beyond.
    fn known(&self, offset: u64, len: u64, on: bool) -> Vec<Extent> {
        let mut extents: Vec<Extent> = Vec::new();
        let end = offset.saturating_add(len);
        let from = (offset / CHUNK_BYTES) as usize;
        let chunks = self.chunks.iter().zip((0..).step_by(CHUNK_BYTES as usize)).skip(from);
        for (chunk, at) in chunks.take_while(|(_, at)| *at < end) {
            let kind = match chunk.state {
                State::Good => ExtentKind::Raw { file_offset: at },
                State::Zero => ExtentKind::Zero,
                State::Unknown | State::Damaged if on => continue,
                State::Unknown | State::Damaged => break,
            };
            let next = Extent { offset: at, len: (self.size_bytes - at).min(CHUNK_BYTES), kind };
            let full = extents.len() == MOST_EXTENTS;
            match extents.last_mut() {
                Some(last) if last.joins(&next) => last.len += next.len,
                _ if full => break,
                _ => extents.push(next),
            }
        }
        extents
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
            match self.chunks[index].state {
                State::Good => self.source.read_exact(to, at)?,
                State::Zero => to.fill(0),
                State::Unknown | State::Damaged => {
                    self.check(index)?;
                    to.copy_from_slice(&self.buffer[inside..inside + len]);
                }
            }
            done += len;
        }
        Ok(())
    }

    /// From the chunk of `offset` on, up to the first that was not read yet.
    fn extents(&mut self, offset: u64) -> Vec<Extent> {
        self.known(offset, u64::MAX, false)
    }

    /// What is known in the range, which may be nothing of its first chunks.
    fn map(&mut self, offset: u64, len: u64) -> Vec<Extent> {
        self.known(offset, len, true)
    }

    fn take_traffic(&mut self) -> Vec<StoreRead> {
        self.source.take_traffic()
    }

    fn take_damage(&mut self) -> Option<u64> {
        self.damaged_at.take()
    }
}
