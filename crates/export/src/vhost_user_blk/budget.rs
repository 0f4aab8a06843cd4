//! The memory that the unfinished requests of one front end may hold. Owns the account, and lists of segments that later
//! requests use again; never looks into a request.
//!
//! Invariant: every byte of the account belongs to an unfinished request. So a queue that is not read because the budget
//! is spent is read again when one of them ends, which every owner of a [`super::Frontend`] notices.

use super::head::Head;
use super::memory::Segment;

/// Bytes that a request takes besides its segments: its row, list entries, operation and read in the disk.
const REQUEST_BYTES: usize = 512;
/// Sectors of data for which a request counts as one byte more. Data takes time, not memory: with this weight a front
/// end has at most 2 GiB of reads and writes in flight, and each queue one request more than its own part allows.
const SECTORS_PER_BYTE: u32 = 2;
/// Bytes that all queues may hold together before each is limited to its own part.
const SHARED_BYTES: usize = 2 << 20;
/// Bytes that each queue may always hold, so that no queue keeps others from being read. About 46 writes of 1 MiB whose
/// segments are pages.
const OWN_BYTES: usize = 256 << 10;
/// Capacity of a spare list of segments: a request of 128 KiB in pages.
const SPARE_SEGMENTS: usize = 32;
/// Spare lists that are kept.
const MAX_SPARE: usize = 256;

/// The account of one front end.
#[derive(Default)]
pub(super) struct Budget {
    held_bytes: usize,
    spare: Vec<Vec<Segment>>,
}

impl Budget {
    /// Whether a queue that holds so much may take another request, of any length.
    #[inline(always)]
    pub(super) fn admits(&self, queue_bytes: usize) -> bool {
        self.held_bytes < SHARED_BYTES || queue_bytes < OWN_BYTES
    }

    /// Charges the request of a head that was taken, which reads or writes so many sectors, to its queue.
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

    /// Takes the charge of a request that has ended back.
    #[inline(always)]
    pub(super) fn release(&mut self, queue_bytes: &mut usize, head: &mut Head) {
        let bytes = head.held_bytes as usize;
        *queue_bytes -= bytes;
        self.held_bytes -= bytes;
        if head.several.capacity() > 0 {
            self.reuse(std::mem::take(&mut head.several));
        }
    }

    /// Keeps an emptied list for a later request; a large one is freed.
    fn reuse(&mut self, mut list: Vec<Segment>) {
        if list.capacity() <= SPARE_SEGMENTS && self.spare.len() < MAX_SPARE {
            list.clear();
            self.spare.push(list);
        }
    }

    /// A list with a copy of these segments.
    pub(super) fn list(&mut self, segments: &[Segment]) -> Vec<Segment> {
        let spare = if segments.len() <= SPARE_SEGMENTS { self.spare.pop() } else { None };
        let mut list = spare.unwrap_or_else(|| Vec::with_capacity(segments.len().max(SPARE_SEGMENTS)));
        list.extend_from_slice(segments);
        list
    }
}
