//! The state of one head of a queue: whose it is, and while it is unfinished where its buffers are. Never looks into
//! them.
//!
//! Invariant: `first` and `several` were translated when the head was taken, and stay mapped until its
//! generation is released.

use super::memory::Segment;
use spillway_core::Errno;
use std::ops::Range;

/// The data of a request that has none.
pub(super) const NO_SEGMENT: Segment = Segment { at: std::ptr::null_mut(), len: 0 };

/// Who owns a head, and how far its request has come.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum HeadState {
    /// The driver's.
    Free,
    /// Taken off the ring, at the disk.
    Unfinished,
    /// Unfinished, but its buffers are no longer ours to touch.
    Abandoned,
    /// In the used ring, the used index not yet moved.
    Answered,
}

/// One head: a slot of the queue by which the driver names a request.
pub(super) struct Head {
    pub state: HeadState,
    /// Memory generation that its pointers belong to.
    pub generation: u32,
    /// What the used element says after success.
    pub used_bytes: u32,
    /// Bytes that it counts for in the budget of its front end while it is unfinished.
    pub held_bytes: u32,
    /// Where its status byte goes.
    pub status: *mut u8,
    /// The first segment of the data, which mostly is the only one.
    pub first: Segment,
    /// All segments when there are several, else a list without memory.
    pub several: Vec<Segment>,
}

impl Head {
    pub(super) fn free() -> Head {
        Head {
            state: HeadState::Free,
            generation: 0,
            used_bytes: 0,
            held_bytes: 0,
            status: std::ptr::null_mut(),
            first: NO_SEGMENT,
            several: Vec::new(),
        }
    }

    /// Calls `copy` for each piece of guest memory that `len` bytes from `at` on lie in.
    #[inline(always)]
    pub(super) fn pieces(
        &self,
        at: u32,
        len: usize,
        mut copy: impl FnMut(*mut u8, Range<usize>),
    ) -> Result<(), Errno> {
        if at as usize + len <= self.first.len as usize {
            copy(self.first.at.wrapping_add(at as usize), 0..len);
            return Ok(());
        }
        let (mut skip, mut done) = (at as usize, 0);
        for segment in &self.several {
            let segment_len = segment.len as usize;
            if skip >= segment_len {
                skip -= segment_len;
                continue;
            }
            let piece = (segment_len - skip).min(len - done);
            copy(segment.at.wrapping_add(skip), done..done + piece);
            (skip, done) = (0, done + piece);
            if done == len {
                return Ok(());
            }
        }
        Err(Errno::FAULT)
    }
}
