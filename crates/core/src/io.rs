//! The interface between the core, which decides, and its owner, which does the I/O.
//!
//! The core calls these in the order in which they must happen. The calls of the first two groups act at
//! once; the asynchronous ones return at once and are answered later, never from inside the call, by
//! [`crate::Disk::read_done`] or [`crate::Disk::op_done`] with the same [`OpId`].

use crate::copy::is_zero;
use crate::error::Errno;
use crate::level::Level;
use crate::request::Token;
use spillway_layout::{BLOCK_BYTES, Slot};
use std::ops::Range;

/// Names an asynchronous operation in flight.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct OpId(pub u32);

/// Names one of the [`PARTS`] staging buffers that overflow writes start from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct PartId(pub u8);

/// How many staging buffers there are.
pub const PARTS: usize = 8;

/// The buffers of the requests that exports have handed in. Implemented by every export.
///
/// `at` and `len` are bytes within the request's data and lie inside it: the core checks its own
/// arithmetic, the implementation checks guest memory. An `Err` fails that one request.
pub trait GuestBuffers {
    /// Copies from the guest into `to`. What the guest changes meanwhile is read once.
    fn copy_from_guest(&mut self, token: Token, at: u32, to: &mut [u8]) -> Result<(), Errno>;
    /// The same into memory that will not be read soon. Returns whether all of it was zero.
    #[inline]
    fn store_from_guest(&mut self, token: Token, at: u32, to: &mut [u8]) -> Result<bool, Errno> {
        self.copy_from_guest(token, at, to)?;
        Ok(is_zero(to))
    }
    /// Whether the guest's bytes are all zero just now. The guest may change them after that.
    fn guest_is_zero(&mut self, token: Token, at: u32, len: u32) -> Result<bool, Errno> {
        let mut bytes = [0; BLOCK_BYTES];
        for from in (0..len).step_by(BLOCK_BYTES) {
            let bytes = &mut bytes[..(len - from).min(BLOCK_BYTES as u32) as usize];
            self.copy_from_guest(token, at + from, bytes)?;
            if !is_zero(bytes) {
                return Ok(false);
            }
        }
        Ok(true)
    }
    /// Copies `from` to the guest.
    fn copy_to_guest(&mut self, token: Token, at: u32, from: &[u8]) -> Result<(), Errno>;
    /// Fills guest memory with zeroes.
    fn zero_guest(&mut self, token: Token, at: u32, len: u32) -> Result<(), Errno>;
    /// Answers a finished request. `Err(Errno::CANCELED)`: drop it without an answer.
    fn complete(&mut self, token: Token, result: Result<(), Errno>);
}

/// An event that people and programs outside want to know of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Event {
    /// The first block of this generation was written to the overflow.
    FirstOverflow,
    /// Writes wait or fail: the write cache is full.
    Full,
    /// Writes no longer wait: there is space again.
    SpaceAvailable,
    /// A block read back from the overflow did not match its checksum.
    ChecksumMismatch,
    /// An overflow write failed with this errno, the first in a row.
    OverflowWriteFailed(Errno),
    /// An overflow read failed with this errno.
    OverflowReadFailed(Errno),
    /// Overflow writes fail again and again. The disk backs off between tries, and blocks that are not written stay in RAM.
    Degraded(Errno),
    /// An overflow write has succeeded again.
    Recovered,
    /// The write cache has reached another level; this per cent of it is used.
    Level(Level, u8),
    /// A segment's summary could not be used: the segment is not collected until it is empty.
    SummaryUnusable,
}

/// Everything the core asks for.
pub trait Io: GuestBuffers {
    /// The content of a slot. The core hands out no two overlapping uses at a time.
    fn slot(&mut self, slot: Slot) -> &mut [u8];
    /// Asks the processor to fetch a slot's beginning. A hint.
    #[inline]
    fn prefetch_slot(&self, _slot: Slot) {}
    /// Copies guest data straight into a slot, from byte `slot_at` on. Returns whether all of it was zero.
    fn guest_to_slot(
        &mut self,
        token: Token,
        at: u32,
        slot: Slot,
        slot_at: usize,
        len: usize,
    ) -> Result<bool, Errno>;
    /// Copies guest data straight into `blocks` whole, adjacent slots. `fresh`: they hold no memory yet.
    fn guest_to_slots(
        &mut self,
        token: Token,
        at: u32,
        first: Slot,
        blocks: u32,
        _fresh: bool,
    ) -> Result<(), Errno> {
        for i in 0..blocks {
            let at = at + i * BLOCK_BYTES as u32;
            self.guest_to_slot(token, at, Slot(first.0 + i), 0, BLOCK_BYTES)?;
        }
        Ok(())
    }
    /// Copies a slot's bytes from `slot_at` on straight to the guest.
    fn slot_to_guest(
        &mut self,
        token: Token,
        at: u32,
        slot: Slot,
        slot_at: usize,
        len: usize,
    ) -> Result<(), Errno>;
    /// Copies guest data into a staging buffer.
    fn guest_to_part(
        &mut self,
        token: Token,
        at: u32,
        part: PartId,
        part_at: usize,
        len: usize,
    ) -> Result<(), Errno>;
    /// Copies a whole slot into a staging buffer.
    fn slot_to_part(&mut self, slot: Slot, part: PartId, part_at: usize);
    /// A whole staging buffer.
    fn part(&mut self, part: PartId) -> &mut [u8];
    /// Gives `n` free slots from this one on memory ahead of their use. A hint; their content is undefined.
    fn populate_slots(&mut self, _first: Slot, _n: u32) {}
    /// Releases the memory of these free slots to the host. Sorted ascending; content is undefined after.
    fn release_slots(&mut self, slots: &[Slot]);
    /// Releases whole pages of the `meta` memory to the host. The content of its map is undefined after; all else, which was
    /// cleared before, is zero or as it was.
    fn release_meta(&mut self, pages: Range<u64>);

    /// Serves a guest read from the base image at once if that cannot block (resident pages). `None`: it
    /// would block, use [`Io::read_base`]. `offset..offset + len` lies inside the image, and in one aligned piece of 256 KiB.
    fn base_to_guest(&mut self, token: Token, at: u32, offset: u64, len: u32) -> Option<Result<(), Errno>>;
    /// Reads from the base image. `offset..offset + len` lies inside the image, and in one aligned piece of 256 KiB.
    /// Answered by `read_done`.
    fn read_base(&mut self, op: OpId, offset: u64, len: u32);
    /// Reads whole blocks of the overflow (difference) file; `len` at most 256 KiB. Answered by `read_done`.
    fn read_overflow(&mut self, op: OpId, offset: u64, len: u32);
    /// Writes whole blocks from a staging buffer. With `sync`, stable before it is done. Answered by `op_done`.
    fn write_overflow(&mut self, op: OpId, part: PartId, part_at: usize, offset: u64, len: u32, sync: bool);
    /// Punches a range out of the overflow (difference) file. Answered by `op_done`.
    fn punch_overflow(&mut self, op: OpId, offset: u64, len: u64);
    /// A barrier: ends when no I/O of a dead process on the file can land any more. Answered by `op_done`.
    fn drain_overflow(&mut self, op: OpId);
    /// Writes pages from a staging buffer to the durable map of mode `persistent`, whose page 0 is for the mark of a reset.
    /// With `sync`, stable before it is done. Answered by `op_done`.
    fn write_map(&mut self, _op: OpId, _part: PartId, _part_at: usize, _page: u32, _pages: u32, _sync: bool) {
        unreachable!("only mode persistent has a durable map");
    }
    /// fdatasync of the file that is written in place. Answered by `op_done`.
    fn sync_overflow(&mut self, op: OpId);

    /// Reports an event.
    fn event(&mut self, event: Event);
}
