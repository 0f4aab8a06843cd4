//! Writes in place: each block has its place in a file, which FLUSH brings to the medium. Modes `direct`, `persistent` and
//! `ephemeral`.
//!
//! Owns the file's blocks and, in mode `persistent`, the map that outlives everything. Invariant: behind a dead process
//! nothing is begun before the drain has ended.

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
    /// What outlives everything (mode `persistent`).
    persistent: Option<Box<Persistent>>,
    /// A reset has given the file back, as far as its file system can.
    file_emptied: bool,
    /// All of the file is being given back.
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

    /// Takes what the map says of a block. False: it cannot be there.
    pub fn adopt(&mut self, block: Block, place: Place) -> bool {
        let Place::Overflow(location, checksum) = place else { return false };
        self.file_blocks += 1;
        location.0 == block.0 && checksum == 0
    }

    /// In mode `persistent`, before the map is adopted: a new `meta` becomes what the live map says.
    ///
    /// # Errors
    /// The map is another disk's, or damaged.
    pub fn load_states(map: &BlockMap, live: &mut StateMap) -> Result<(), DiskError> {
        persist::load_states(map, live)
    }

    /// After the last block: those that have had their places in the file from the start, and that nothing has touched, count
    /// too; and the live map, if there is one, becomes what the adopted map says.
    pub fn finish_adopting(&mut self, map: &BlockMap, live: Option<StateMap>) {
        self.file_blocks += map.untouched_in_file();
        self.persistent = live.map(|live| Box::new(persist::adopt_states(map, live)));
    }

    // Operations that have ended.

    pub fn op_done<I: Io>(&mut self, shared: &mut Shared, io: &mut I, op: Op, result: Result<(), Errno>) {
        match op {
            Op::DirectWrite(write) => self.written(shared, io, write, result),
            // A hole that could not be punched costs room, not correctness: the map already says zero.
            Op::DirectPunch { id, sync: false } => shared.admission.operation_done(id, Ok(())),
            Op::DirectPunch { id, sync: true } => self.sync(shared, io, id),
            Op::Sync { id } => shared.admission.operation_done(id, result),
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

    /// The barrier behind what a dead process had begun has ended.
    fn drained<I: Io>(&mut self, shared: &mut Shared, io: &mut I, result: Result<(), Errno>) {
        if result.is_err() {
            let now_ns = shared.now_ns();
            shared.drain.fail(now_ns);
        } else if self.file_blocks == 0 {
            // What the file may hold is of an earlier generation, whose reset a death has cut off. Most often it holds nothing.
            self.empty_file(shared, io);
        } else {
            end_draining(shared);
        }
    }

    /// Gives all of the file back to its file system. One that cannot do it keeps what nobody reads any more.
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

    /// Frees what a block's earlier content took. Returns the bytes given back.
    pub fn give_up(&mut self, old: Place) -> u64 {
        let in_file = matches!(old, Place::Overflow(..));
        self.file_blocks -= u64::from(in_file);
        if in_file { BLOCK_BYTES as u64 } else { 0 }
    }

    /// These blocks are zeroes from here on, the live map is to say.
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

    /// Whether the map may forget every block now. The medium, in mode `persistent`, says so first: what it says of each block
    /// takes longer. Then the file is emptied: the map is still the old one, but nobody reads, as the disk is quiet, and
    /// whoever attaches after a death in the middle finishes the reset.
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
            Some((Mark::Unwritten, false)) if !shared.overflow_rests() => self.write_mark(shared, io, true),
            Some(_) => {}
        }
        false
    }

    /// The map has forgotten every block.
    pub fn reset(&mut self) {
        self.file_emptied = false;
    }

    // For the self-check.

    /// Panics with what is wrong, if anything is.
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

/// Nothing of a dead process can land any more: requests may begin.
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
