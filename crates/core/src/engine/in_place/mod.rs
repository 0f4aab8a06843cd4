//! Writes in place: each block has its place in a file, which FLUSH brings to the medium. Modes `direct`, `persistent` and
//! `ephemeral`.
//!
//! Owns the file's blocks and, in mode `persistent`, the map that outlives all processes. Invariant: after an earlier process has
//! died no I/O is started before the drain has ended.

mod flush;
mod persist;
mod states;
mod write;

pub use states::StateMap;

use crate::engine::holdings::Holdings;
use crate::engine::in_place::persist::{Mark, Persistent};
use crate::engine::part::Parts;
use crate::engine::part::Stream;
use crate::entry::{Entry, Place};
use crate::error::{DiskError, Errno};
use crate::io::Io;
use crate::map::BlockMap;
use crate::ops::Op;
use crate::shared::Shared;
use spillway_layout::{BLOCK_BYTES, Block, BlockState, Location};
use std::ops::Range;

pub(crate) struct InPlace {
    parts: Parts,
    /// Blocks in the file.
    file_blocks: u64,
    /// The map that outlives all processes (mode `persistent`).
    persistent: Option<Box<Persistent>>,
    /// A reset has emptied the file, as far as its file system can.
    file_emptied: bool,
    /// The file is being emptied.
    emptying: bool,
}

impl InPlace {
    pub fn new() -> InPlace {
        InPlace {
            parts: Parts::new(),
            file_blocks: 0,
            persistent: None,
            file_emptied: false,
            emptying: false,
        }
    }

    // Attaching.

    /// Adopts a block where the map says it is. False: it cannot be there.
    pub fn adopt(&mut self, block: Block, place: Place) -> bool {
        let Place::Overflow(location, checksum) = place else { return false };
        self.file_blocks += 1;
        location.0 == block.0 && checksum == 0
    }

    /// In mode `persistent`, before the map is adopted: fills a new `meta` from the live map.
    ///
    /// # Errors
    /// The map is another disk's, or damaged.
    pub fn load_states(map: &BlockMap, live: &mut StateMap) -> Result<(), DiskError> {
        persist::load_states(map, live)
    }

    /// To be called after the last `adopt`: counts the untouched blocks that have had their places in the file from the start, and
    /// makes the live map, if there is one, equal to the adopted map.
    pub fn finish_adopting(&mut self, map: &BlockMap, live: Option<StateMap>) {
        self.file_blocks += map.untouched_in_file();
        self.persistent = live.map(|live| Box::new(persist::adopt_states(map, live)));
    }

    // Operations that have ended.

    pub fn op_done<I: Io>(&mut self, shared: &mut Shared, io: &mut I, op: Op, result: Result<(), Errno>) {
        match op {
            Op::DirectWrite(write) => self.written(shared, io, write, result),
            // A hole that could not be punched costs space, not correctness: the map already says zero.
            Op::DirectPunch { id, sync: false } => shared.admission.operation_done(id, Ok(())),
            Op::DirectPunch { id, sync: true } => self.sync(shared, io, id),
            Op::Sync { id } => self.end_sync(shared, &[id], result),
            Op::EmptyFile => {
                self.emptying = false;
                if shared.drain.is_needed() {
                    end_draining(shared);
                }
            }
            Op::Drain => self.drained(shared, io, result),
            Op::RoundSync => self.round_synced(shared, io, result),
            Op::RoundWrite => self.round_written(shared, io, result),
            Op::Mark { part, set } => self.mark_written(shared, io, part, set, result),
            other => panic!("{other:?} is not one of this engine"),
        }
    }

    /// Handles the end of the barrier for I/O of a dead process.
    fn drained<I: Io>(&mut self, shared: &mut Shared, io: &mut I, result: Result<(), Errno>) {
        if let Err(errno) = result {
            shared.map.meta().record_unreported(errno);
            self.stable_write_failed(errno);
            let now_ns = shared.now_ns();
            shared.drain.fail(now_ns);
        } else if self.file_blocks == 0 {
            // The file may hold blocks of an earlier generation, if a process died during its reset. Most often it holds none.
            self.empty_file(shared, io);
        } else {
            end_draining(shared);
        }
    }

    /// Empties the file. A file system that cannot do that keeps blocks that nobody reads any more.
    fn empty_file<I: Io>(&mut self, shared: &mut Shared, io: &mut I) {
        self.emptying = true;
        let op = shared.ops.begin(Op::EmptyFile);
        io.punch_overflow(op, 0, shared.spec.size_bytes.next_multiple_of(BLOCK_BYTES as u64));
    }

    // Blocks.

    /// The commit of blocks whose content is in the file.
    fn commit_blocks(&mut self, map: &mut BlockMap, blocks: Range<u32>) {
        for block in blocks.map(Block) {
            if !matches!(map.place(block), Place::Overflow(..)) {
                let old = map.commit(block, Entry::overflow(Location(block.0), 0));
                self.give_up(old);
                self.file_blocks += 1;
            }
        }
    }

    /// Frees the space of a block's old content. Returns the bytes freed.
    pub fn give_up(&mut self, old: Place) -> u64 {
        let in_file = matches!(old, Place::Overflow(..));
        self.file_blocks -= u64::from(in_file);
        if in_file { BLOCK_BYTES as u64 } else { 0 }
    }

    /// Records in the live map that these blocks are zeroes.
    pub fn note_zero(&mut self, blocks: Range<u32>) {
        if let Some(p) = &mut self.persistent {
            p.set(blocks, BlockState::Zero);
        }
    }

    pub fn can_take_part(&self) -> bool {
        self.parts.can_take(Stream::Write)
    }

    pub fn holdings(&self) -> Holdings {
        Holdings { overflow: self.file_blocks, file: self.file_blocks, ..Holdings::default() }
    }

    // The reset.

    /// Whether the map may forget every block now. In mode `persistent` a mark on the medium says so first, as the states of all
    /// blocks take longer to write. Then the file is emptied: the map is still the old one, but the disk is idle, so nobody reads.
    /// If the process dies in the middle, the next one to attach finishes the reset.
    pub fn is_ready_for_reset<I: Io>(&mut self, shared: &mut Shared, io: &mut I) -> bool {
        if self.parts.in_use() > 0 || self.emptying || shared.drain.is_needed() {
            return false;
        }
        if self.file_emptied {
            return true;
        }
        match self.persistent.as_ref().map(|p| (p.mark, p.is_busy())) {
            None | Some((Mark::Written, _)) => {
                shared.map.begin_reset();
                self.forget_states();
                self.file_blocks = 0;
                self.file_emptied = true;
                self.empty_file(shared, io);
            }
            Some((Mark::Unwritten, false)) if !shared.overflow_is_backing_off() => {
                self.write_mark(shared, io, true)
            }
            Some(_) => {}
        }
        false
    }

    /// To be called when the map has forgotten every block.
    pub fn reset(&mut self) {
        self.file_emptied = false;
    }

    // For the self-check.

    /// Panics if an invariant is broken, and names it.
    pub fn check(&self, placed: impl Iterator<Item = (Block, Place)>) {
        let mut in_file = 0;
        for (block, place) in placed {
            let fits = self.persistent.as_ref().is_none_or(|p| p.fits(block, place));
            assert!(fits, "{block:?} is at {place:?}");
            match place {
                Place::Base | Place::Zero => {}
                Place::Ram(slot) => panic!("{block:?} is in {slot:?}"),
                Place::Overflow(location, _) => {
                    assert_eq!(location, Location(block.0));
                    in_file += 1;
                }
            }
        }
        assert_eq!(in_file, self.file_blocks, "blocks in the file");
    }

    pub fn parts(&self) -> &Parts {
        &self.parts
    }
}

/// Ends the drain: no I/O of a dead process can land any more, and requests may begin.
fn end_draining(shared: &mut Shared) {
    shared.drain.end();
    shared.admission.wake_drain_waiters();
}

impl std::fmt::Debug for InPlace {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("InPlace")
            .field("parts", &self.parts)
            .field("file_blocks", &self.file_blocks)
            .finish_non_exhaustive()
    }
}
