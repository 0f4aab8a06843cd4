//! Discard and write-zeroes: the range reads as zeroes, and its space is freed.
//!
//! Invariant: discard leaves partial blocks as they are; write-zeroes zeroes exactly its range.

use crate::engine::Engine;
use crate::entry::{Entry, Place};
use crate::io::Io;
use crate::request::Operation;
use crate::shared::{Piece, Shared};
use crate::table::{Active, Wait};
use spillway_layout::{BLOCK_BYTES, Block, REGION_BLOCKS, REGION_BYTES, RegionState, SECTOR_BYTES, add};

/// Map entries that cost as much time as copying a block.
const ENTRIES_PER_BLOCK: u32 = 16;

impl Engine {
    /// Continues a discard or write-zeroes as far as possible without waiting.
    pub fn zero<I: Io>(&mut self, shared: &mut Shared, io: &mut I, a: &mut Active) {
        // In units of a map entry looked at.
        let mut budget = shared.admission.budget() * ENTRIES_PER_BLOCK;
        self.zero_range(shared, io, a, &mut budget);
        shared.admission.set_budget(budget.div_ceil(ENTRIES_PER_BLOCK));
    }

    fn zero_range<I: Io>(&mut self, shared: &mut Shared, io: &mut I, a: &mut Active, budget: &mut u32) {
        let exact = a.request.operation != Operation::Discard;
        let start = a.request.sector * SECTOR_BYTES;
        while a.at < a.len() {
            if shared.has_begun_enough(a) {
                return;
            }
            if *budget == 0 {
                a.wait = Wait::Turn;
                return;
            }
            let position = start + u64::from(a.at);
            let piece = shared.piece(a);
            if !piece.whole {
                *budget = budget.saturating_sub(64);
                if exact && !self.zero_piece(shared, io, a, piece) {
                    return;
                }
                a.at += piece.len;
                continue;
            }
            // Whole blocks up to the end of the range or of the region, whichever comes first.
            let disk_left = shared.spec.size_bytes - position;
            let end = u64::from(a.len() - a.at);
            let blocks =
                if end == disk_left { end.div_ceil(BLOCK_BYTES as u64) } else { end / BLOCK_BYTES as u64 };
            let region = piece.block.region();
            let in_region = REGION_BLOCKS - piece.block.0 as usize % REGION_BLOCKS;
            let n = (blocks as usize).min(in_region);
            let region_end = ((region as u64 + 1) * REGION_BYTES).min(shared.spec.size_bytes);
            let whole_region = (piece.block.0 as usize).is_multiple_of(REGION_BLOCKS)
                && piece.block.offset_bytes() + n as u64 * BLOCK_BYTES as u64 >= region_end;
            let cost = self.zero_blocks(shared, io, piece.block, n, whole_region);
            *budget = budget.saturating_sub(cost);
            let bytes = (n as u64 * BLOCK_BYTES as u64).min(end);
            a.at += bytes as u32;
        }
        a.walked = true;
        if let Engine::InPlace(e) = self {
            e.punch(shared, io, a);
        }
    }

    /// Zeroes whole blocks of one region. Returns what it cost.
    fn zero_blocks<I: Io>(
        &mut self,
        shared: &mut Shared,
        io: &mut I,
        first: Block,
        n: usize,
        whole_region: bool,
    ) -> u32 {
        let region = first.region();
        let blocks = first.0..first.0 + n as u32;
        if let Engine::InPlace(e) = self {
            e.note_zero(blocks.clone());
        }
        let blocks = blocks.map(Block);
        let map = &mut shared.map;
        let mut given = 0;
        match map.region(region) {
            RegionState::Zero => return 8,
            RegionState::Untouched if whole_region => {
                // In a mode in which all blocks have their places in the file from the start, those are freed.
                let old = map.place(first);
                map.set_region_zero(region);
                if let Place::Overflow(..) = old {
                    blocks.for_each(|_| _ = self.give_up(shared, old, true));
                }
                return 8;
            }
            RegionState::Mapped if whole_region => {
                // The directory says zero first: what the entries say no longer counts.
                map.set_region_zero(region);
                for block in blocks {
                    let old = shared.map.entry(block).place();
                    given += self.give_up(shared, old, true);
                }
                shared.map.unmap(io, region);
            }
            _ => {
                for block in blocks {
                    let old = shared.map.commit(block, Entry::ZERO);
                    given += self.give_up(shared, old, true);
                }
                let mapped = shared.map.region(region) == RegionState::Mapped;
                if mapped && n >= REGION_BLOCKS / 8 && shared.map.is_region_zero(region) {
                    shared.map.set_region_zero(region);
                    shared.map.unmap(io, region);
                }
            }
        }
        add(&shared.counters().discard_bytes, given);
        n as u32 + 64
    }

    /// Frees the space of a block's old content. Returns the bytes freed.
    fn give_up(&mut self, shared: &Shared, old: Place, to_host: bool) -> u64 {
        match self {
            Engine::Cached(e) => e.give_up(&shared.map, old, to_host),
            Engine::InPlace(e) => e.give_up(old),
        }
    }

    /// Write-zeroes of part of a block. False: the request waits.
    fn zero_piece<I: Io>(&mut self, shared: &mut Shared, io: &mut I, a: &mut Active, piece: Piece) -> bool {
        let old = shared.map.place(piece.block);
        match self {
            _ if old == Place::Zero => true,
            Engine::Cached(e) => e.zero_piece(shared, io, a, piece, old),
            Engine::InPlace(e) => e.merge(shared, io, a, piece, old, None).is_some(),
        }
    }
}
