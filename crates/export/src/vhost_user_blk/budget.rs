//! What the unfinished requests of one front end may take of our memory. Owns the account, and memory that the next
//! request uses again; never looks into a request.
//!
//! Invariant: all that is held is held by unfinished requests. So a queue that is not read for want of room is read
//! again when one of them ends, which every owner of a [`super::Frontend`] notices.

use super::head::Head;
use super::memory::Segment;

/// What a request takes besides its segments: at the disk a row, its places on lists, an operation and a read.
const REQUEST_BYTES: usize = 512;
/// Sectors of data for which a request counts as one byte more. They take no memory, but time: with this weight a front
/// end has at most 2 GiB of reads and writes under way, and each queue one more than is in its own part.
const SECTORS_PER_BYTE: u32 = 2;
/// What the queues may hold before each must keep to what is its own.
const SHARED_BYTES: usize = 2 << 20;
/// What is each queue's own: no queue keeps others from being read. Some 46 writes of 1 MiB in pages.
const OWN_BYTES: usize = 256 << 10;
/// Segments that a spare list has room for: a request of 128 KiB in pages.
const SPARE_SEGMENTS: usize = 32;
const MAX_SPARE: usize = 256;

#[derive(Default)]
pub(super) struct Budget {
    held_bytes: usize,
    spare: Vec<Vec<Segment>>,
}

impl Budget {
    /// Whether a queue that holds so much may take another request, of any length.
    #[inline(always)]
    pub(super) fn has_room(&self, queue_bytes: usize) -> bool {
        self.held_bytes < SHARED_BYTES || queue_bytes < OWN_BYTES
    }

    /// The request of a head is taken, which reads or writes so many sectors, from a queue that holds so much.
    #[inline(always)]
    pub(super) fn hold(&mut self, queue_bytes: &mut usize, head: &mut Head, data_sectors: u32) {
        let bytes = REQUEST_BYTES
            + head.several.capacity() * size_of::<Segment>()
            + (data_sectors / SECTORS_PER_BYTE) as usize;
        // At most 4 MiB for the data, and the longest list of segments.
        head.held_bytes = bytes as u32;
        *queue_bytes += bytes;
        self.held_bytes += bytes;
    }

    /// It is over.
    #[inline(always)]
    pub(super) fn release(&mut self, queue_bytes: &mut usize, head: &mut Head) {
        let bytes = head.held_bytes as usize;
        *queue_bytes -= bytes;
        self.held_bytes -= bytes;
        if head.several.capacity() > 0 {
            self.keep(std::mem::take(&mut head.several));
        }
    }

    /// What very many segments took is not kept.
    fn keep(&mut self, mut list: Vec<Segment>) {
        if list.capacity() <= SPARE_SEGMENTS && self.spare.len() < MAX_SPARE {
            list.clear();
            self.spare.push(list);
        }
    }

    /// These segments as a list that is not longer than it must be.
    pub(super) fn list(&mut self, segments: &[Segment]) -> Vec<Segment> {
        let spare = if segments.len() <= SPARE_SEGMENTS { self.spare.pop() } else { None };
        let mut list = spare.unwrap_or_else(|| Vec::with_capacity(segments.len().max(SPARE_SEGMENTS)));
        list.extend_from_slice(segments);
        list
    }
}
