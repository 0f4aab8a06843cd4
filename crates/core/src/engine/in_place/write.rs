//! Guest writes that go to each block's place in the file, and their FLUSH.
//!
//! Invariant: a block is committed after its write is done, and the request completes after that.

use crate::admission::MAX_PENDING;
use crate::engine::in_place::InPlace;
use crate::engine::part::PartState;
use crate::engine::part::Stream;
use crate::entry::Place;
use crate::error::Errno;
use crate::io::{Io, PartId};
use crate::ops::{DirectWrite, Merge, MergeTo, Op};
use crate::request::Operation;
use crate::shared::{Piece, Shared};
use crate::table::{Active, Id, Wait};
use spillway_layout::{BLOCK_BYTES, Block, BlockState, SECTOR_BYTES, add};

const BLOCK: u32 = BLOCK_BYTES as u32;

impl InPlace {
    /// Writes runs of whole blocks, each block to its own place.
    pub fn write<I: Io>(&mut self, shared: &mut Shared, io: &mut I, a: &mut Active) {
        while a.at < a.len() {
            if a.pending >= MAX_PENDING {
                return;
            }
            let piece = shared.piece(a);
            let old = shared.map.place(piece.block);
            if !piece.whole && old != Place::Zero {
                let at = Some(a.at);
                if self.merge(shared, io, a, piece, old, at).is_none() {
                    return;
                }
                a.at += piece.len;
                continue;
            }
            let whole_blocks = if piece.len == BLOCK { (a.len() - a.at) / BLOCK } else { 1 };
            let Some((part, page, n)) = self.take_pages(shared, whole_blocks as usize) else {
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
                self.pages_done(part);
                a.errno = Some(errno);
                return;
            }
            let id = shared.admission.begin_operation(a);
            add(&shared.counters().overflow_guest_bytes, bytes as u64);
            a.moved_bytes += bytes as u64;
            a.at += bytes as u32;
            self.write_pages_of(shared, io, id, piece.block, (part, page), n as u32);
        }
        a.walked = true;
    }

    /// Up to `n` adjacent pages of the part that hands out pages; counted as one write in flight.
    fn take_pages(&mut self, shared: &Shared, n: usize) -> Option<(PartId, usize, usize)> {
        let pages = shared.spec.shape.part_blocks as usize;
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

    fn pages_done(&mut self, part: PartId) {
        let p = self.parts.get(part);
        p.writes -= 1;
        if p.writes == 0 {
            self.parts.release(part);
        }
    }

    /// Starts the merge of a block that is written (or, without `at`, zeroed) in part, into a page. `None`: the request waits
    /// for one, or for its own operations.
    pub fn merge<I: Io>(
        &mut self,
        shared: &mut Shared,
        io: &mut I,
        a: &mut Active,
        piece: Piece,
        old: Place,
        at: Option<u32>,
    ) -> Option<()> {
        if shared.has_begun_enough(a) {
            // It waits for its own operations.
            return None;
        }
        let Some((part, page, _)) = self.take_pages(shared, 1) else {
            a.wait = Wait::Part;
            return None;
        };
        let id = shared.admission.begin_operation(a);
        let Piece { block, from, len, .. } = piece;
        let to = MergeTo::Page(part, page);
        shared.begin_merge(io, Merge { id, block, from, len, at, location: None, to }, old);
        Some(())
    }

    /// Handles the end of a merge: the block is complete in its page, or the merge failed.
    pub fn merge_done<I: Io>(
        &mut self,
        shared: &mut Shared,
        io: &mut I,
        merge: Merge,
        bytes: Result<&[u8], Errno>,
    ) {
        let MergeTo::Page(part, page) = merge.to else { unreachable!("there are no slots") };
        if let Err(errno) = bytes.and_then(|bytes| shared.merge_content(io, &merge, bytes)) {
            self.pages_done(part);
            shared.admission.operation_done(merge.id, Err(errno));
            return;
        }
        shared.admission.moved(merge.id, merge.guest_bytes());
        add(&shared.counters().overflow_guest_bytes, u64::from(merge.guest_bytes()));
        self.write_pages_of(shared, io, merge.id, merge.block, (part, page), 1);
    }

    fn write_pages_of<I: Io>(
        &mut self,
        shared: &mut Shared,
        io: &mut I,
        id: Id,
        block: Block,
        (part, page): (PartId, usize),
        n: u32,
    ) {
        let (sync, bytes) = (shared.admission.is_fua(id), n * BLOCK);
        shared.counters().overflow.write(u64::from(bytes));
        let op = shared.ops.begin(Op::DirectWrite(DirectWrite { id, part, block, n }));
        io.write_overflow(op, part, page * BLOCK_BYTES, block.offset_bytes(), bytes, sync);
    }

    pub(super) fn written<I: Io>(
        &mut self,
        shared: &mut Shared,
        io: &mut I,
        write: DirectWrite,
        result: Result<(), Errno>,
    ) {
        let DirectWrite { id, part, block, n } = write;
        let (blocks, is_fua) = (block.0..block.0 + n, shared.admission.is_fua(id));
        match result {
            Ok(()) => {
                shared.write_succeeded(io);
                add(&shared.counters().overflow_guest_blocks, u64::from(n));
                if let Some(p) = &mut self.persistent {
                    p.set(blocks.clone(), BlockState::File);
                }
                self.commit_blocks(&mut shared.map, blocks.clone());
            }
            Err(errno) => {
                add(&shared.counters().lost_blocks, u64::from(n));
                shared.write_failed(io, errno);
                if is_fua {
                    self.stable_write_failed(errno);
                    if shared.admission.is_canceled(id) {
                        shared.map.meta().record_unreported(errno);
                    }
                }
            }
        }
        self.pages_done(part);
        if result.is_ok() && is_fua && self.may_be_unstable(blocks) {
            // It ends when the map on the medium names the content too.
            self.join_flush(shared, io, id);
        } else {
            shared.admission.operation_done(id, result);
        }
    }

    /// Begins a FLUSH as one of the request's operations. When it ends, everything completed before is on the medium.
    pub fn sync<I: Io>(&mut self, shared: &mut Shared, io: &mut I, id: Id) {
        if self.persistent.is_some() {
            return self.join_flush(shared, io, id);
        }
        let op = shared.ops.begin(Op::Sync { id });
        io.sync_overflow(op);
    }

    /// Ends a discard or write-zeroes: punches the whole blocks of its range out of the file.
    pub fn punch<I: Io>(&mut self, shared: &mut Shared, io: &mut I, a: &mut Active) {
        let size = shared.spec.size_bytes;
        let start = (a.request.sector * SECTOR_BYTES).next_multiple_of(BLOCK_BYTES as u64);
        let end = a.request.sector * SECTOR_BYTES + u64::from(a.len());
        let end = if end == size { end.next_multiple_of(BLOCK_BYTES as u64) } else { end };
        let end = end / BLOCK_BYTES as u64 * BLOCK_BYTES as u64;
        let sync = a.request.operation == Operation::WriteZeroes { fua: true };
        if start >= end {
            // Only parts of blocks: their writes are synced if that was asked. A block that was zero already had none, and
            // the medium need not say so yet.
            let first = (a.request.sector * SECTOR_BYTES / BLOCK_BYTES as u64) as u32;
            if sync && self.may_be_unstable(first..(first + 2).min(shared.spec.blocks())) {
                let id = shared.admission.begin_operation(a);
                self.join_flush(shared, io, id);
            }
            return;
        }
        let id = shared.admission.begin_operation(a);
        let op = shared.ops.begin(Op::DirectPunch { id, sync });
        io.punch_overflow(op, start, end - start);
    }
}
