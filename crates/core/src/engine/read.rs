//! Guest reads: from RAM at once, zeroes at once, the base image at once if its pages are there, else later.
//!
//! Invariant: content from the overflow log reaches the guest only after its checksum was verified.

use crate::engine::Engine;
use crate::engine::cached::Cached;
use crate::entry::Place;
use crate::error::Errno;
use crate::io::Io;
use crate::ops::{Op, OverflowRead};
use crate::shared::{RUN_BYTES, Shared};
use crate::table::{Active, Wait};
use spillway_layout::{BLOCK_BYTES, Block, Location, SECTOR_BYTES, Slot, add};

const BLOCK: u32 = BLOCK_BYTES as u32;

impl Engine {
    /// Continues a read as far as possible without waiting.
    #[inline]
    pub fn read<I: Io>(&mut self, shared: &mut Shared, io: &mut I, a: &mut Active) {
        let mut budget = shared.admission.budget();
        self.read_blocks(shared, io, a, &mut budget);
        shared.admission.set_budget(budget);
    }

    #[inline]
    fn read_blocks<I: Io>(&mut self, shared: &mut Shared, io: &mut I, a: &mut Active, budget: &mut u32) {
        let token = a.request.token;
        let start = a.request.sector * SECTOR_BYTES;
        let mut in_ram = false;
        while a.at < a.len() {
            if shared.has_begun_enough(a) {
                return;
            }
            if *budget == 0 {
                a.wait = Wait::Turn;
                return;
            }
            let position = start + u64::from(a.at);
            let block = Block((position / u64::from(BLOCK)) as u32);
            let within = (position % u64::from(BLOCK)) as u32;
            let left = a.len() - a.at;
            let place = shared.map.place(block);
            let (n, result) = if let Place::Ram(slot) = place {
                let n = left.min(BLOCK - within);
                *budget -= 1;
                self.touch(slot);
                let c = shared.counters();
                add(&c.ram.reads, u64::from(!in_ram));
                add(&c.ram.read_bytes, u64::from(n));
                (n, io.slot_to_guest(token, a.at, slot, within as usize, n as usize))
            } else {
                self.read_elsewhere(shared, io, a, (place, block, within), budget)
            };
            in_ram = matches!(place, Place::Ram(_));
            a.moved_bytes += u64::from(n);
            if let Err(errno) = result {
                a.errno = Some(errno);
                return;
            }
            a.at += n;
        }
        a.walked = true;
    }

    /// Reads the run of blocks at the request's place, byte `within` of `block`, that are not in RAM. Returns how many bytes.
    #[inline]
    fn read_elsewhere<I: Io>(
        &mut self,
        shared: &mut Shared,
        io: &mut I,
        a: &mut Active,
        (place, block, within): (Place, Block, u32),
        budget: &mut u32,
    ) -> (u32, Result<(), Errno>) {
        let left = a.len() - a.at;
        match place {
            Place::Base => {
                let before = block.0 % (RUN_BYTES / BLOCK) * BLOCK + within;
                let most = left.min(RUN_BYTES - before);
                let run = shared.run_len(block, within, most, budget, |p, _| p == Place::Base);
                shared.read_base(io, a, run)
            }
            Place::Overflow(location, _) => {
                let next = |p, i| matches!(p, Place::Overflow(l, _) if l.0 == location.0.wrapping_add(i));
                let most = left.min(RUN_BYTES - within);
                let len = shared.run_len(block, within, most, budget, next);
                self.begin_overflow_read(shared, io, a, block, location, within, len);
                (len, Ok(()))
            }
            Place::Zero | Place::Ram(_) => {
                let n = shared.run_len(block, within, left, budget, |p, _| p == Place::Zero);
                (n, shared.read_zero(io, a, n))
            }
        }
    }

    #[allow(clippy::too_many_arguments)] // one call, and each is what the read is
    fn begin_overflow_read<I: Io>(
        &mut self,
        shared: &mut Shared,
        io: &mut I,
        a: &mut Active,
        block: Block,
        location: Location,
        skip: u32,
        len: u32,
    ) {
        let id = shared.admission.begin_operation(a);
        let bytes = (skip + len).next_multiple_of(BLOCK);
        if let Engine::Cached(e) = self {
            e.pin(location);
        }
        shared.counters().overflow.read(u64::from(bytes));
        // The identity of `counters` counts guest bytes: what a partial block reads beyond them is a merge's.
        add(&shared.counters().merges_overflow_bytes, u64::from(bytes - len));
        let read = OverflowRead { id, at: a.at, block, location, skip, len };
        let op = shared.ops.begin(Op::OverflowRead(read));
        io.read_overflow(op, location.offset_bytes(), bytes);
    }

    pub fn overflow_read_done<I: Io>(
        &mut self,
        shared: &mut Shared,
        io: &mut I,
        read: OverflowRead,
        bytes: Result<&[u8], Errno>,
    ) {
        let OverflowRead { id, at, block, location, skip, len } = read;
        let token = shared.admission.token(id);
        let result = bytes.and_then(|bytes| {
            if let Engine::Cached(_) = self {
                for (block, content) in (block.0..).zip(bytes.chunks_exact(BLOCK_BYTES)) {
                    Cached::verify(shared, io, Block(block), content)?;
                }
            }
            io.copy_to_guest(token, at, &bytes[skip as usize..][..len as usize])?;
            if let Engine::Cached(e) = self {
                for (block, content) in (block.0..).zip(bytes.chunks_exact(BLOCK_BYTES)) {
                    e.promote(shared, io, Block(block), content);
                }
            }
            Ok(())
        });
        shared.admission.operation_done(id, result);
        if let Engine::Cached(e) = self {
            e.unpin(shared, location);
        }
    }

    #[inline]
    fn touch(&mut self, slot: Slot) {
        if let Engine::Cached(e) = self {
            e.touch(slot);
        }
    }
}
