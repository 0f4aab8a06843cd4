//! Discard and write-zeroes: room goes back, the range reads as zeroes.
//!
//! Invariant: discard leaves partial blocks as they are; write-zeroes zeroes exactly its range.

use crate::counters::add;
use crate::disk::{Disk, ENTRIES_PER_BLOCK};
use crate::entry::{Entry, Place};
use crate::io::Io;
use crate::meta::RegionState;
use crate::ops::{Merge, MergeTo, Op};
use crate::request::Operation;
use crate::spec::Mode;
use crate::states::BlockState;
use crate::table::{Active, Wait};
use crate::units::{BLOCK_BYTES, Block, REGION_BLOCKS, REGION_BYTES, SECTOR_BYTES};
use crate::write::Piece;

impl Disk {
    pub(crate) fn walk_zero<I: Io>(&mut self, io: &mut I, a: &mut Active) {
        // In units of a map entry looked at.
        let mut budget = self.budget * ENTRIES_PER_BLOCK;
        self.zero_range(io, a, &mut budget);
        self.budget = budget.div_ceil(ENTRIES_PER_BLOCK);
    }

    fn zero_range<I: Io>(&mut self, io: &mut I, a: &mut Active, budget: &mut u32) {
        let exact = a.request.operation != Operation::Discard;
        let start = a.request.sector * SECTOR_BYTES;
        while a.at < a.len() {
            if self.has_begun_enough(a) {
                return;
            }
            if *budget == 0 {
                a.wait = Wait::Turn;
                return;
            }
            let position = start + u64::from(a.at);
            let piece = self.piece(a);
            if !piece.whole {
                *budget = budget.saturating_sub(64);
                if exact && !self.zero_piece(io, a, piece) {
                    return;
                }
                a.at += piece.len;
                continue;
            }
            // Whole blocks up to the end of the range or of the region, whichever comes first.
            let disk_left = self.spec.size_bytes - position;
            let end = u64::from(a.len() - a.at);
            let blocks =
                if end == disk_left { end.div_ceil(BLOCK_BYTES as u64) } else { end / BLOCK_BYTES as u64 };
            let region = piece.block.region();
            let in_region = REGION_BLOCKS - piece.block.0 as usize % REGION_BLOCKS;
            let n = (blocks as usize).min(in_region);
            let region_end = ((region as u64 + 1) * REGION_BYTES).min(self.spec.size_bytes);
            let whole_region = (piece.block.0 as usize).is_multiple_of(REGION_BLOCKS)
                && piece.block.offset_bytes() + n as u64 * BLOCK_BYTES as u64 >= region_end;
            let cost = self.zero_blocks(io, piece.block, n, whole_region);
            *budget = budget.saturating_sub(cost);
            let bytes = (n as u64 * BLOCK_BYTES as u64).min(end);
            a.at += bytes as u32;
        }
        a.walked = true;
        if self.spec.mode.writes_in_place() {
            self.punch_difference(io, a);
        }
    }

    /// Zeroes whole blocks of one region. Returns what it cost.
    fn zero_blocks<I: Io>(&mut self, io: &mut I, first: Block, n: usize, whole_region: bool) -> u32 {
        let region = first.region();
        let blocks = first.0..first.0 + n as u32;
        if let Some(p) = &mut self.persistent {
            p.set(blocks.clone(), BlockState::Zero);
        }
        let blocks = blocks.map(Block);
        let mut given = 0;
        match self.meta.region(region) {
            RegionState::Zero => return 8,
            RegionState::Untouched if whole_region => {
                self.meta.set_region(region, RegionState::Zero);
                if self.spec.mode == Mode::Ephemeral {
                    self.direct_blocks -= n as u64;
                }
                return 8;
            }
            RegionState::Mapped if whole_region => {
                // The directory says zero first: what the entries say no longer counts.
                self.meta.set_region(region, RegionState::Zero);
                for block in blocks {
                    let old = self.meta.entry(block).place();
                    given += self.give_up(old, true);
                }
                self.unmap(io, region);
            }
            _ => {
                for block in blocks {
                    given += self.commit(block, Entry::ZERO);
                }
                let mapped = self.meta.region(region) == RegionState::Mapped;
                if mapped && n >= REGION_BLOCKS / 8 && self.region_is_zero(region) {
                    self.meta.set_region(region, RegionState::Zero);
                    self.unmap(io, region);
                }
            }
        }
        add(&self.counters().discard_bytes, given);
        n as u32 + 64
    }

    fn region_is_zero(&self, region: usize) -> bool {
        let first = (region * REGION_BLOCKS) as u32;
        (first..first + REGION_BLOCKS as u32).all(|b| {
            u64::from(b) * BLOCK_BYTES as u64 >= self.spec.size_bytes || self.place(Block(b)) == Place::Zero
        })
    }

    /// Write-zeroes of part of a block. False: the request waits.
    fn zero_piece<I: Io>(&mut self, io: &mut I, a: &mut Active, piece: Piece) -> bool {
        match self.place(piece.block) {
            Place::Zero => true,
            Place::Ram(slot) => {
                self.ram.touch_written(slot);
                io.slot(slot)[piece.from as usize..][..piece.len as usize].fill(0);
                true
            }
            old if self.spec.mode.has_ram() => {
                let Some(slot) = self.slot_for(io, a, old) else { return false };
                let id = self.row(a);
                a.pending += 1;
                let merge = Merge {
                    id,
                    block: piece.block,
                    from: piece.from,
                    len: piece.len,
                    at: None,
                    location: None,
                    to: MergeTo::Slot(slot),
                };
                self.start_merge(io, merge, old);
                true
            }
            old => {
                if self.spec.mode == Mode::Overflow && !self.log_has_room_for(a, old) {
                    return false;
                }
                self.merge_to_page(io, a, piece, old, None).is_ok()
            }
        }
    }

    /// Written in place: the whole blocks of the range leave the file.
    fn punch_difference<I: Io>(&mut self, io: &mut I, a: &mut Active) {
        let start = (a.request.sector * SECTOR_BYTES).next_multiple_of(BLOCK_BYTES as u64);
        let end = a.request.sector * SECTOR_BYTES + u64::from(a.len());
        let end = if end == self.spec.size_bytes { end.next_multiple_of(BLOCK_BYTES as u64) } else { end };
        let end = end / BLOCK_BYTES as u64 * BLOCK_BYTES as u64;
        let sync = a.request.operation == Operation::WriteZeroes { fua: true };
        if start >= end {
            // Only parts of blocks: their writes are synced if that was asked. A block that was zero already had none, and
            // the medium need not say so yet.
            let first = (a.request.sector * SECTOR_BYTES / BLOCK_BYTES as u64) as u32;
            if sync && self.may_be_unstable(first..(first + 2).min(self.spec.blocks())) {
                let id = self.row(a);
                a.pending += 1;
                self.join_flush(io, id);
            }
            return;
        }
        let id = self.row(a);
        a.pending += 1;
        let op = self.ops.begin(Op::DirectPunch { id, sync });
        io.punch_overflow(op, start, end - start);
    }
}
