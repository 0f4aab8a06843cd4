//! Writes of many whole blocks into the RAM tier, stored a stretch at a time instead of a block at a time.
//!
//! Owns the cut of such a write into stretches: neighbouring blocks that lie, or will lie, in adjacent slots. One
//! call fills all slots of a stretch, so that the host can give new slots their memory and their content in one
//! go. Invariant: the commit rule of `write`, for each block of the stretch.
//! Why: `docs/design/009-memory-of-the-ram-tier.md`.

use crate::engine::cached::slots::SHORTEST_STRETCH;
use crate::engine::cached::tiers::Tiers;
use crate::entry::{Entry, Place};
use crate::error::Errno;
use crate::io::Io;
use crate::map::BlockMap;
use crate::shared::Shared;
use crate::table::Active;
use spillway_layout::{BLOCK_BYTES, Block, Slot};

/// How the blocks at a request's place were or must be stored.
pub(super) enum Stretch {
    /// So many bytes of the request were stored.
    Stored(u32),
    /// So many bytes from the request's place on are to be written block by block; at least one block.
    TooShort(u32),
}

impl Tiers {
    /// Stores the longest stretch that begins at the request's place. The caller has checked that the request has
    /// at least [`SHORTEST_STRETCH`] blocks left, and accounts for what was stored on the plane `ram`.
    pub fn write_stretch<I: Io>(
        &mut self,
        shared: &mut Shared,
        io: &mut I,
        a: &mut Active,
    ) -> Result<Stretch, Errno> {
        const BLOCK: u32 = BLOCK_BYTES as u32;
        let piece = shared.piece(a);
        if !piece.whole {
            return Ok(Stretch::TooShort(piece.len));
        }
        let token = a.request.token;
        let most = ((a.len() - a.at) / BLOCK).min(shared.admission.budget());
        let first = shared.map.place(piece.block);
        let mut blocks = 0;
        while blocks < most && continues(&shared.map, first, Block(piece.block.0 + blocks), blocks) {
            // A block of zeroes takes no slot. If the guest changes it after this check, either result is valid.
            if io.guest_is_zero(token, a.at + blocks * BLOCK, BLOCK)? {
                break;
            }
            blocks += 1;
        }
        if blocks < SHORTEST_STRETCH {
            return Ok(Stretch::TooShort(blocks.max(1) * BLOCK));
        }
        if let Place::Ram(slot) = first {
            (0..blocks).for_each(|i| self.ram.touch_written(Slot(slot.0 + i)));
            io.guest_to_slots(token, a.at, slot, blocks, false)?;
        } else {
            let may = self.has_space() && !self.log.is_over() && shared.admission.may_take_space(a);
            let taken = if may { self.ram.allocate_run(io, shared.map.meta(), blocks) } else { None };
            let Some((slot, n, fresh)) = taken else { return Ok(Stretch::TooShort(blocks * BLOCK)) };
            blocks = n;
            if let Err(errno) = io.guest_to_slots(token, a.at, slot, blocks, fresh) {
                (0..blocks).for_each(|i| self.ram.release(Slot(slot.0 + i), false));
                return Err(errno);
            }
            for i in 0..blocks {
                let (block, slot) = (Block(piece.block.0 + i), Slot(slot.0 + i));
                self.ram.own(slot, block);
                self.commit(&mut shared.map, block, Entry::ram(slot));
            }
        }
        shared.admission.set_budget(shared.admission.budget() - blocks);
        a.at += blocks * BLOCK;
        a.moved_bytes += u64::from(blocks * BLOCK);
        Ok(Stretch::Stored(blocks * BLOCK))
    }
}

/// Whether a block, `after` blocks behind one at `first`, lies or will lie in the slot that many behind.
fn continues(map: &BlockMap, first: Place, block: Block, after: u32) -> bool {
    match (first, map.place(block)) {
        (Place::Ram(first), Place::Ram(slot)) => slot.0 == first.0 + after,
        (Place::Ram(_), _) | (_, Place::Ram(_)) => false,
        _ => true,
    }
}
