//! Guest writes into the RAM tier, and merges of partly written blocks.
//!
//! Invariant (the commit rule): content first, then one release store of the map entry, then the completion.

use crate::copy::is_zero;
use crate::engine::cached::Cached;
use crate::engine::cached::slots::SHORTEST_STRETCH;
use crate::engine::cached::stretch::Stretch;
use crate::engine::cached::tiers::Tiers;
use crate::entry::{Entry, Place};
use crate::error::Errno;
use crate::io::Io;
use crate::ops::{Merge, MergeTo};
use crate::shared::{Piece, Shared};
use crate::table::{Active, Wait};
use spillway_layout::{BLOCK_BYTES, Block, Slot, add};

const BLOCK: u32 = BLOCK_BYTES as u32;

/// The outcome of writing a piece.
enum Written {
    /// It is in a slot.
    Stored,
    /// The block is all zeroes and took none.
    Zero,
    /// It will be in a slot once the block's old content has been read.
    Merging,
}

impl Cached {
    #[inline]
    pub(super) fn write_to_ram<I: Io>(&mut self, shared: &mut Shared, io: &mut I, a: &mut Active) {
        let mut in_ram = false;
        // Up to here no stretch is long enough for one copy.
        let mut by_block_until = 0;
        while a.at < a.len() {
            if shared.has_begun_enough(a) {
                return;
            }
            if shared.admission.budget() == 0 {
                a.wait = Wait::Turn;
                return;
            }
            if a.len() - a.at >= SHORTEST_STRETCH * BLOCK && a.at >= by_block_until {
                match self.tiers.write_stretch(shared, io, a) {
                    Ok(Stretch::Stored(bytes)) => {
                        let c = shared.counters();
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
            shared.admission.set_budget(shared.admission.budget() - 1);
            let piece = shared.piece(a);
            match self.write_piece(shared, io, a, piece) {
                None => return,
                Some(Ok(Written::Merging)) => {
                    a.at += piece.len;
                    in_ram = false;
                    continue;
                }
                Some(Ok(Written::Stored)) => {
                    let c = shared.counters();
                    add(&c.ram.writes, u64::from(!in_ram));
                    add(&c.ram.written_bytes, u64::from(piece.len));
                    in_ram = true;
                }
                Some(Ok(Written::Zero)) => {
                    shared.counters().zero.write(u64::from(piece.len));
                    in_ram = false;
                }
                Some(Err(errno)) => {
                    a.errno = Some(errno);
                    return;
                }
            }
            a.moved_bytes += u64::from(piece.len);
            a.at += piece.len;
        }
        a.walked = true;
    }

    /// Writes the piece of one block. `None`: the request waits for a slot.
    #[inline]
    fn write_piece<I: Io>(
        &mut self,
        shared: &mut Shared,
        io: &mut I,
        a: &mut Active,
        piece: Piece,
    ) -> Option<Result<Written, Errno>> {
        let (token, tiers) = (a.request.token, &mut self.tiers);
        let old = shared.map.place(piece.block);
        if let Place::Ram(slot) = old {
            tiers.ram.touch_written(slot);
            let zero = io.guest_to_slot(token, a.at, slot, piece.from as usize, piece.len as usize);
            return Some(zero.map(|zero| {
                if piece.whole && zero {
                    tiers.commit(&mut shared.map, piece.block, Entry::ZERO);
                    return Written::Zero;
                }
                Written::Stored
            }));
        }
        let slot = tiers.slot_for(shared, io, a, old)?;
        if !piece.whole && old != Place::Zero {
            let at = Some(a.at);
            self.merge_to_slot(shared, io, a, piece, old, at, slot);
            return Some(Ok(Written::Merging));
        }
        // The old content is not needed.
        if piece.len < BLOCK {
            io.slot(slot).fill(0);
        }
        let zero = io.guest_to_slot(token, a.at, slot, piece.from as usize, piece.len as usize);
        Some(match zero {
            Ok(zero) => {
                tiers.commit_slot(shared, piece.block, slot, zero);
                Ok(if zero { Written::Zero } else { Written::Stored })
            }
            Err(errno) => {
                tiers.ram.release(slot, false);
                Err(errno)
            }
        })
    }

    /// Reads the old content of a block that is written in part, or of which part is zeroed (`at`: none), for a slot.
    #[allow(clippy::too_many_arguments)] // what a merge is
    pub(super) fn merge_to_slot<I: Io>(
        &mut self,
        shared: &mut Shared,
        io: &mut I,
        a: &mut Active,
        piece: Piece,
        old: Place,
        at: Option<u32>,
        slot: Slot,
    ) {
        self.tiers.merging_slots += 1;
        self.begin_merge(shared, io, a, piece, old, at, MergeTo::Slot(slot));
    }

    #[allow(clippy::too_many_arguments)] // what a merge is
    pub(super) fn begin_merge<I: Io>(
        &mut self,
        shared: &mut Shared,
        io: &mut I,
        a: &mut Active,
        piece: Piece,
        old: Place,
        at: Option<u32>,
        to: MergeTo,
    ) {
        let id = shared.admission.begin_operation(a);
        if let Place::Overflow(location, _) = old {
            self.tiers.pin(location);
        }
        let Piece { block, from, len, .. } = piece;
        shared.begin_merge(io, Merge { id, block, from, len, at, location: None, to }, old);
    }

    /// Handles the end of the read of the old content: puts the new bytes over it and commits.
    pub(crate) fn merge_done<I: Io>(
        &mut self,
        shared: &mut Shared,
        io: &mut I,
        merge: Merge,
        bytes: Result<&[u8], Errno>,
    ) {
        let checked = bytes.and_then(|bytes| {
            if merge.location.is_some() {
                Tiers::verify(&shared.map, io, merge.block, bytes)?;
            }
            Ok(bytes)
        });
        if let Some(location) = merge.location {
            self.tiers.unpin(&shared.map, location);
        }
        let merged = checked.and_then(|bytes| shared.merge_content(io, &merge, bytes));
        match merge.to {
            MergeTo::Slot(slot) => self.slot_merged(shared, io, merge, slot, merged),
            MergeTo::Page(part, page) => self.page_merged(shared, io, merge, (part, page), merged),
        }
    }

    fn slot_merged<I: Io>(
        &mut self,
        shared: &mut Shared,
        io: &mut I,
        merge: Merge,
        slot: Slot,
        merged: Result<(), Errno>,
    ) {
        self.tiers.merging_slots -= 1;
        if merged.is_ok() {
            let zero = is_zero(io.slot(slot));
            self.tiers.commit_slot(shared, merge.block, slot, zero);
            let guest_bytes = merge.guest_bytes();
            if guest_bytes > 0 {
                let c = shared.counters();
                let plane = if zero { &c.zero } else { &c.ram };
                plane.write(u64::from(guest_bytes));
            }
            shared.admission.moved(merge.id, guest_bytes);
        } else {
            self.tiers.ram.release(slot, false);
        }
        shared.admission.operation_done(merge.id, merged);
    }

    /// Write-zeroes of part of a block that is not zero. False: the request waits.
    pub(crate) fn zero_piece<I: Io>(
        &mut self,
        shared: &mut Shared,
        io: &mut I,
        a: &mut Active,
        piece: Piece,
        old: Place,
    ) -> bool {
        if let Place::Ram(slot) = old {
            self.tiers.ram.touch_written(slot);
            io.slot(slot)[piece.from as usize..][..piece.len as usize].fill(0);
            return true;
        }
        if !self.tiers.has_ram {
            return self.tiers.log_has_space_for(shared, a, old)
                && self.merge_to_page(shared, io, a, piece, old, None);
        }
        let Some(slot) = self.tiers.slot_for(shared, io, a, old) else { return false };
        self.merge_to_slot(shared, io, a, piece, old, None, slot);
        true
    }
}

impl Tiers {
    /// Commits a block's newest content, which a reserved slot holds, or `zero` if it is all zeroes.
    #[inline]
    fn commit_slot(&mut self, shared: &mut Shared, block: Block, slot: Slot, zero: bool) {
        if zero {
            self.ram.release(slot, false);
            self.commit(&mut shared.map, block, Entry::ZERO);
        } else {
            self.ram.own(slot, block);
            self.commit(&mut shared.map, block, Entry::ram(slot));
        }
    }
}
