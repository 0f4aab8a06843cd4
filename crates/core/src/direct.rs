//! Guest writes that go straight to the file: appended to the log in mode `overflow`, in place in the
//! file in modes `direct`, `persistent` and `ephemeral`.
//!
//! Invariant: a block is committed after its write is done, and the request completes after that.

use crate::copy::is_zero;
use crate::counters::add;
use crate::disk::Disk;
use crate::entry::{Entry, Place};
use crate::error::Errno;
use crate::io::{Io, PartId};
use crate::log::Stream;
use crate::ops::{MAX_PENDING, Merge, MergeTo, Op};
use crate::part::{PartState, Source, Staged};
use crate::request::Operation;
use crate::states::BlockState;
use crate::table::{Active, Id, Wait};
use crate::units::{BLOCK_BYTES, Block, Location};
use crate::write::Piece;

const BLOCK: u32 = BLOCK_BYTES as u32;

impl Disk {
    /// Gives all of the difference file back to its file system. One that cannot do it keeps what nobody reads any more.
    pub(crate) fn empty_file<I: Io>(&mut self, io: &mut I) {
        self.punches += 1;
        let op = self.ops.begin(Op::EmptyFile);
        io.punch_overflow(op, 0, self.spec.size_bytes.next_multiple_of(BLOCK_BYTES as u64));
    }

    /// Mode `overflow`: blocks gather in a part, which is written when it is full or the turn ends.
    pub(crate) fn walk_write_log<I: Io>(&mut self, io: &mut I, a: &mut Active) {
        while a.at < a.len() {
            if a.pending >= MAX_PENDING {
                return;
            }
            if self.budget == 0 {
                a.wait = Wait::Turn;
                return;
            }
            self.budget -= 1;
            let piece = self.piece(a);
            let old = self.place(piece.block);
            if !self.log_has_room_for(a, old) {
                return;
            }
            if !piece.whole && old != Place::Zero {
                if self.merge_to_page(io, a, piece, old, Some(a.at)).is_err() {
                    return;
                }
                a.at += piece.len;
                continue;
            }
            let (part, page) = match self.log_page(io) {
                Ok(page) => page,
                Err(wait) => {
                    a.wait = wait;
                    return;
                }
            };
            let at = page * BLOCK_BYTES;
            if piece.len < BLOCK {
                io.part(part)[at..at + BLOCK_BYTES].fill(0);
            }
            let copied =
                io.guest_to_part(a.request.token, a.at, part, at + piece.from as usize, piece.len as usize);
            if let Err(errno) = copied {
                a.errno = Some(errno);
                return;
            }
            if is_zero(&io.part(part)[at..at + BLOCK_BYTES]) {
                self.commit(piece.block, Entry::ZERO);
                self.counters().zero.write(u64::from(piece.len));
            } else {
                let id = self.row(a);
                a.pending += 1;
                self.stage_write(io, id, piece.block, part, page);
                self.count_straight(piece.len);
            }
            a.moved_bytes += u64::from(piece.len);
            a.at += piece.len;
        }
        a.walked = true;
    }

    fn count_straight(&self, guest_bytes: u32) {
        add(&self.counters().overflow_guest_bytes, u64::from(guest_bytes));
    }

    /// A page of the part that fills; an empty part if there is none.
    fn log_page<I: Io>(&mut self, io: &mut I) -> Result<(PartId, usize), Wait> {
        if let Some(part) = self.parts.filling(Stream::Write) {
            let used = self.parts.get(part).staged.len();
            if used < self.log.ready(Stream::Write, &self.meta) as usize {
                return Ok((part, used));
            }
            self.flush_part(io, part);
        }
        if !self.unflushed.is_empty()
            || self.health.rests(self.now_ns)
            || self.log.ready(Stream::Write, &self.meta) == 0
        {
            return Err(Wait::Room);
        }
        self.parts.take(Stream::Write).map(|part| (part, 0)).ok_or(Wait::Part)
    }

    /// A block for the log, from a request.
    fn stage_write<I: Io>(&mut self, io: &mut I, id: Id, block: Block, part: PartId, page: usize) {
        let checksum = crc32c::crc32c(&io.part(part)[page * BLOCK_BYTES..][..BLOCK_BYTES]);
        if !matches!(self.place(block), Place::Overflow(..)) {
            self.log.arriving += 1;
        }
        let staged = Staged { block, location: Location(0), checksum, source: Source::Write(id) };
        self.parts.get(part).staged.push(staged);
    }

    /// Starts the merge of a block that is written (or, without `at`, zeroed) in part, into a page of its own.
    /// An error leaves the request waiting for one, or for what it has begun.
    pub(crate) fn merge_to_page<I: Io>(
        &mut self,
        io: &mut I,
        a: &mut Active,
        piece: Piece,
        old: Place,
        at: Option<u32>,
    ) -> Result<(), ()> {
        if self.has_begun_enough(a) {
            // Its wait is for its own operations.
            return Err(());
        }
        let to = if self.spec.mode.writes_in_place() { self.direct_page() } else { self.merge_part() };
        let Some((part, page)) = to else {
            a.wait = Wait::Part;
            return Err(());
        };
        let id = self.row(a);
        a.pending += 1;
        let to = MergeTo::Page(part, page);
        let merge =
            Merge { id, block: piece.block, from: piece.from, len: piece.len, at, location: None, to };
        self.start_merge(io, merge, old);
        Ok(())
    }

    /// A part of its own for one merged block: it is not filled further, so that nobody waits for its read.
    fn merge_part(&mut self) -> Option<(PartId, usize)> {
        let part = self.parts.take(Stream::Write)?;
        self.parts.get(part).state = PartState::Writing;
        Some((part, 0))
    }

    /// A merged block is complete in its page, or the merge failed.
    pub(crate) fn page_merged<I: Io>(
        &mut self,
        io: &mut I,
        merge: Merge,
        part: PartId,
        page: usize,
        guest_bytes: u32,
        merged: Result<(), Errno>,
    ) {
        let Merge { id, block, .. } = merge;
        if merged.is_ok() {
            self.table.get_mut(id).moved_bytes += u64::from(guest_bytes);
            self.count_straight(guest_bytes);
        }
        match (self.spec.mode.writes_in_place(), merged) {
            (true, Ok(())) => self.write_in_place(io, id, block, part, page, 1),
            (true, Err(errno)) => {
                self.direct_page_done(part);
                self.operation_done(io, id, Err(errno));
            }
            (false, Ok(())) if is_zero(&io.part(part)[page * BLOCK_BYTES..][..BLOCK_BYTES]) => {
                self.parts.release(part);
                self.commit(block, Entry::ZERO);
                self.operation_done(io, id, Ok(()));
            }
            (false, Ok(())) => {
                self.stage_write(io, id, block, part, page);
                self.unflushed.push_back(part);
                self.flush_parts(io);
                self.drop_unflushed(io, |a| a.withdrawn);
            }
            (false, Err(errno)) => {
                self.parts.release(part);
                self.operation_done(io, id, Err(errno));
            }
        }
    }

    /// In place: runs of whole blocks, each to its own.
    pub(crate) fn walk_write_direct<I: Io>(&mut self, io: &mut I, a: &mut Active) {
        while a.at < a.len() {
            if a.pending >= MAX_PENDING {
                return;
            }
            let piece = self.piece(a);
            let old = self.place(piece.block);
            if !piece.whole && old != Place::Zero {
                if self.merge_to_page(io, a, piece, old, Some(a.at)).is_err() {
                    return;
                }
                a.at += piece.len;
                continue;
            }
            let whole_blocks = if piece.len == BLOCK { (a.len() - a.at) / BLOCK } else { 1 };
            let Some((part, page, n)) = self.direct_run(whole_blocks as usize) else {
                a.wait = Wait::Part;
                return;
            };
            let at = page * BLOCK_BYTES;
            let bytes = if piece.len == BLOCK { n * BLOCK_BYTES } else { piece.len as usize };
            if piece.len < BLOCK {
                io.part(part)[at..at + BLOCK_BYTES].fill(0);
            }
            if let Err(errno) = io.guest_to_part(a.request.token, a.at, part, at + piece.from as usize, bytes)
            {
                self.direct_page_done(part);
                a.errno = Some(errno);
                return;
            }
            let id = self.row(a);
            a.pending += 1;
            self.count_straight(bytes as u32);
            a.moved_bytes += bytes as u64;
            a.at += bytes as u32;
            self.write_in_place(io, id, piece.block, part, page, n as u32);
        }
        a.walked = true;
    }

    /// Up to `n` adjacent pages of the part that hands out pages; counted as one write under way.
    fn direct_run(&mut self, n: usize) -> Option<(PartId, usize, usize)> {
        let pages = self.spec.shape.part_blocks as usize;
        let part = match self.parts.filling(Stream::Write) {
            Some(part) => part,
            None => self.parts.take(Stream::Write)?,
        };
        let p = self.parts.get(part);
        let page = p.used;
        let n = n.min(pages - page);
        p.used += n;
        p.writes += 1;
        if p.used == pages {
            p.state = PartState::Writing;
        }
        Some((part, page, n))
    }

    fn direct_page(&mut self) -> Option<(PartId, usize)> {
        self.direct_run(1).map(|(part, page, _)| (part, page))
    }

    fn direct_page_done(&mut self, part: PartId) {
        let p = self.parts.get(part);
        p.writes -= 1;
        if p.writes == 0 {
            self.parts.release(part);
        }
    }

    fn write_in_place<I: Io>(&mut self, io: &mut I, id: Id, block: Block, part: PartId, page: usize, n: u32) {
        let (sync, bytes) = (self.is_fua(id), n * BLOCK);
        self.counters().overflow.write(u64::from(bytes));
        let op = self.ops.begin(Op::DirectWrite { id, part, block, n });
        io.write_overflow(op, part, page * BLOCK_BYTES, block.offset_bytes(), bytes, sync);
    }

    fn is_fua(&self, id: Id) -> bool {
        let operation = self.table.get(id).request.operation;
        matches!(operation, Operation::Write { fua: true } | Operation::WriteZeroes { fua: true })
    }

    /// FLUSH, one of the request's operations: all that has completed is on the medium when it ends.
    pub(crate) fn sync_in_place<I: Io>(&mut self, io: &mut I, id: Id) {
        if self.persistent.is_some() {
            return self.join_flush(io, id);
        }
        let op = self.ops.begin(Op::Sync { id });
        io.sync_overflow(op);
    }

    pub(crate) fn direct_written<I: Io>(
        &mut self,
        io: &mut I,
        id: Id,
        part: PartId,
        block: Block,
        n: u32,
        result: Result<(), Errno>,
    ) {
        match result {
            Ok(()) => {
                self.health.write_succeeded(io, self.meta.counters());
                add(&self.counters().overflow_guest_blocks, u64::from(n));
                if let Some(p) = &mut self.persistent {
                    p.set(block.0..block.0 + n, BlockState::File);
                }
                for b in block.0..block.0 + n {
                    if !matches!(self.place(Block(b)), Place::Overflow(..)) {
                        self.direct_blocks += 1;
                        self.commit(Block(b), Entry::overflow(Location(b), 0));
                    }
                }
            }
            Err(errno) => {
                add(&self.counters().lost_blocks, u64::from(n));
                self.health.write_failed(io, self.meta.counters(), self.now_ns, errno);
                if self.is_fua(id) {
                    self.stable_write_failed(errno);
                }
            }
        }
        self.direct_page_done(part);
        if result.is_ok() && self.is_fua(id) {
            self.end_when_stable(io, id, block.0..block.0 + n);
        } else {
            self.operation_done(io, id, result);
        }
    }
}
