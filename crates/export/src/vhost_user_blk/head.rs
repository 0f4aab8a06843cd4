//! What is remembered of one head of a queue while it is not the driver's. Owns where its buffers are; never
//! looks into them.
//!
//! Invariant: `first` and `several` were translated when the head was taken, and stay mapped until its
//! generation is released.

use super::memory::Segment;
use spillway_core::Errno;
use std::ops::Range;

/// The data of a request that has none.
pub(super) const NO_SEGMENT: Segment = Segment { at: std::ptr::null_mut(), len: 0 };

/// Whose a head is.
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

/// What must be remembered of a head while it is unfinished.
pub(super) struct Head {
    pub state: HeadState,
    /// Memory generation that its pointers belong to.
    pub generation: u32,
    /// What the used element says after success.
    pub used_bytes: u32,
    /// What it counts for in the budget of its front end, while it is unfinished.
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
            let room = segment.len as usize;
            if skip >= room {
                skip -= room;
                continue;
            }
            let piece = (room - skip).min(len - done);
            copy(segment.at.wrapping_add(skip), done..done + piece);
            (skip, done) = (0, done + piece);
            if done == len {
                return Ok(());
            }
        }
        Err(Errno::FAULT)
    }
}
