//! Guest writes into the RAM tier, and writes of part of a block in every mode.
//!
//! Invariant (the commit rule): content first, then one release store of the map entry, then the completion.

use crate::copy::is_zero;
use crate::counters::add;
use crate::disk::Disk;
use crate::entry::{Entry, Place};
use crate::error::Errno;
use crate::io::Io;
use crate::ops::{Merge, MergeTo, Op};
use crate::stretch::{SHORTEST_STRETCH, Stretch};
use crate::table::{Active, Wait};
use crate::units::{BLOCK_BYTES, Block, SECTOR_BYTES, Slot};

const BLOCK: u32 = BLOCK_BYTES as u32;

/// The piece of a request that lies in one block.
#[derive(Clone, Copy)]
pub(crate) struct Piece {
    pub block: Block,
    /// First byte within the block.
    pub from: u32,
    pub len: u32,
    /// It covers all of the block that lies on the disk.
    pub whole: bool,
}

impl Disk {
    #[inline]
    pub(crate) fn piece(&self, a: &Active) -> Piece {
        let position = a.request.sector * SECTOR_BYTES + u64::from(a.at);
        let block = Block((position / u64::from(BLOCK)) as u32);
        let from = (position % u64::from(BLOCK)) as u32;
        let len = (a.len() - a.at).min(BLOCK - from);
        Piece { block, from, len, whole: from == 0 && (len == BLOCK || len == self.block_len(block)) }
    }

    #[inline]
    pub(crate) fn walk_write<I: Io>(&mut self, io: &mut I, a: &mut Active) {
        let mut in_ram = false;
        // Up to here no stretch is long enough for one copy.
        let mut by_block_until = 0;
        while a.at < a.len() {
            if self.has_begun_enough(a) {
                return;
            }
            if self.budget == 0 {
                a.wait = Wait::Turn;
                return;
            }
            if a.len() - a.at >= SHORTEST_STRETCH * BLOCK && a.at >= by_block_until {
                match self.write_stretch(io, a) {
                    Ok(Stretch::Stored(bytes)) => {
                        let c = self.meta.counters();
                        add(&c.ram.writes, u64::from(!in_ram));
                        add(&c.ram.written_bytes, u64::from(bytes));
                        in_ram = true;
                        continue;
                    }
                    Ok(Stretch::TooShort(bytes)) => by_block_until = a.at + bytes,
                    Err(errno) => {
                        a.errno = Some(errno);
                        return;
                    }
                }
            }
            self.budget -= 1;
            let piece = self.piece(a);
            let token = a.request.token;
            let taken = match self.place(piece.block) {
                Place::Ram(slot) => {
                    self.ram.touch_written(slot);
                    io.guest_to_slot(token, a.at, slot, piece.from as usize, piece.len as usize).map(|zero| {
                        if piece.whole && zero {
                            self.commit(piece.block, Entry::ZERO);
                            false
                        } else {
                            true
                        }
                    })
                }
                old => {
                    let Some(slot) = self.slot_for(io, a, old) else { return };
                    if !piece.whole && old != Place::Zero {
                        let merge = Merge {
                            id: self.row(a),
                            block: piece.block,
                            from: piece.from,
                            len: piece.len,
                            at: Some(a.at),
                            location: None,
                            to: MergeTo::Slot(slot),
                        };
                        a.pending += 1;
                        a.at += piece.len;
                        self.start_merge(io, merge, old);
                        in_ram = false;
                        continue;
                    }
                    self.write_new_slot(io, a, piece, slot)
                }
            };
            match taken {
                Ok(stored) => {
                    let c = self.meta.counters();
                    if stored {
                        add(&c.ram.writes, u64::from(!in_ram));
                        add(&c.ram.written_bytes, u64::from(piece.len));
                    } else {
                        c.zero.write(u64::from(piece.len));
                    }
                    in_ram = stored;
                }
                Err(errno) => {
                    a.errno = Some(errno);
                    return;
                }
            }
            a.moved_bytes += u64::from(piece.len);
            a.at += piece.len;
        }
        a.walked = true;
    }

    /// Fills a reserved slot for a block of which nothing old is needed, and commits it. False: the block is
    /// all zeroes and took no slot after all.
    #[inline]
    fn write_new_slot<I: Io>(
        &mut self,
        io: &mut I,
        a: &Active,
        piece: Piece,
        slot: Slot,
    ) -> Result<bool, Errno> {
        if piece.len < BLOCK {
            io.slot(slot).fill(0);
        }
        let copied = io.guest_to_slot(a.request.token, a.at, slot, piece.from as usize, piece.len as usize);
        match copied {
            Ok(zero) => {
                self.commit_slot(piece.block, slot, zero);
                Ok(!zero)
            }
            Err(errno) => {
                self.ram.release(slot, false);
                Err(errno)
            }
        }
    }

    /// A reserved slot holds a block's newest content: commit it, or `zero` if that is what it is.
    #[inline]
    fn commit_slot(&mut self, block: Block, slot: Slot, zero: bool) {
        if zero {
            self.ram.release(slot, false);
            self.commit(block, Entry::ZERO);
        } else {
            self.ram.own(slot, block);
            self.commit(block, Entry::ram(slot));
        }
    }

    /// Reads the old content of a block that is written in part.
    pub(crate) fn start_merge<I: Io>(&mut self, io: &mut I, mut merge: Merge, old: Place) {
        let block = merge.block;
        self.merging_slots += u32::from(matches!(merge.to, MergeTo::Slot(_)));
        if let Place::Overflow(location, _) = old {
            merge.location = Some(location);
            self.pin(location);
            self.counters().overflow.read(u64::from(BLOCK));
            add(&self.counters().merges_overflow_bytes, u64::from(BLOCK));
            let op = self.ops.begin(Op::Merge(merge));
            io.read_overflow(op, location.offset_bytes(), BLOCK);
        } else {
            let len = (self.spec.base_bytes - block.offset_bytes()).min(u64::from(BLOCK)) as u32;
            self.counters().base.read(u64::from(len));
            add(&self.counters().merges_base_bytes, u64::from(len));
            let op = self.ops.begin(Op::Merge(merge));
            io.read_base(op, block.offset_bytes(), len);
        }
    }

    /// The old content is here: put the new over it and commit.
    pub(crate) fn merge_done<I: Io>(&mut self, io: &mut I, merge: Merge, bytes: Result<&[u8], Errno>) {
        let block = merge.block;
        self.merging_slots -= u32::from(matches!(merge.to, MergeTo::Slot(_)));
        let checked = bytes.and_then(|bytes| {
            if merge.location.is_some() {
                self.verify(io, block, bytes)?;
            }
            Ok(bytes)
        });
        if let Some(location) = merge.location {
            self.unpin(location);
        }
        let (from, len) = (merge.from as usize, merge.len as usize);
        let token = self.table.get(merge.id).request.token;
        let merged = checked.and_then(|bytes| {
            let content = match merge.to {
                MergeTo::Slot(slot) => io.slot(slot),
                MergeTo::Page(part, page) => &mut io.part(part)[page * BLOCK_BYTES..][..BLOCK_BYTES],
            };
            content[..bytes.len()].copy_from_slice(bytes);
            content[bytes.len()..].fill(0);
            match (merge.at, merge.to) {
                (None, _) => content[from..from + len].fill(0),
                (Some(at), MergeTo::Slot(slot)) => {
                    io.guest_to_slot(token, at, slot, from, len)?;
                }
                (Some(at), MergeTo::Page(part, page)) => {
                    io.guest_to_part(token, at, part, page * BLOCK_BYTES + from, len)?;
                }
            }
            Ok(())
        });
        let guest_bytes = if merge.at.is_some() { merge.len } else { 0 };
        match (merge.to, merged) {
            (MergeTo::Slot(slot), Ok(())) => {
                let zero = is_zero(io.slot(slot));
                self.commit_slot(block, slot, zero);
                if guest_bytes > 0 {
                    let c = self.meta.counters();
                    let plane = if zero { &c.zero } else { &c.ram };
                    plane.write(u64::from(guest_bytes));
                }
                self.table.get_mut(merge.id).moved_bytes += u64::from(guest_bytes);
                self.operation_done(io, merge.id, Ok(()));
            }
            (MergeTo::Slot(slot), Err(errno)) => {
                self.ram.release(slot, false);
                self.operation_done(io, merge.id, Err(errno));
            }
            (MergeTo::Page(part, page), merged) => {
                self.page_merged(io, merge, part, page, guest_bytes, merged)
            }
        }
    }
}
