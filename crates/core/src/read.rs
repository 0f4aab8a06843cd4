//! Guest reads: from RAM at once, zeroes at once, the base image at once if its pages are there, else later.
//!
//! Invariant: content from the overflow reaches the guest only after its checksum was found right.

use crate::counters::add;
use crate::disk::Disk;
use crate::entry::Place;
use crate::error::Errno;
use crate::io::{Event, Io};
use crate::ops::Op;
use crate::table::{Active, Id, Wait};
use crate::units::{BLOCK_BYTES, Block, Location, SECTOR_BYTES};

const BLOCK: u32 = BLOCK_BYTES as u32;
/// Bytes of one asynchronous read at most.
const RUN_BYTES: u32 = 256 * 1024;

impl Disk {
    #[inline]
    pub(crate) fn walk_read<I: Io>(&mut self, io: &mut I, a: &mut Active) {
        let mut budget = self.budget;
        self.read_blocks(io, a, &mut budget);
        self.budget = budget;
    }

    #[inline]
    fn read_blocks<I: Io>(&mut self, io: &mut I, a: &mut Active, budget: &mut u32) {
        let token = a.request.token;
        let start = a.request.sector * SECTOR_BYTES;
        let mut in_ram = false;
        while a.at < a.len() {
            if self.has_begun_enough(a) {
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
            let n;
            let result = match self.place(block) {
                Place::Ram(slot) => {
                    n = left.min(BLOCK - within);
                    *budget -= 1;
                    self.ram.touch(slot);
                    let c = self.meta.counters();
                    add(&c.ram.reads, u64::from(!in_ram));
                    add(&c.ram.read_bytes, u64::from(n));
                    in_ram = true;
                    io.slot_to_guest(token, a.at, slot, within as usize, n as usize)
                }
                Place::Zero => {
                    n = self.run_len(block, within, left, budget, |p, _| p == Place::Zero);
                    in_ram = false;
                    self.counters().zero.read(u64::from(n));
                    io.zero_guest(token, a.at, n)
                }
                Place::Base => {
                    let run =
                        self.run_len(block, within, left.min(RUN_BYTES), budget, |p, _| p == Place::Base);
                    in_ram = false;
                    // The image may end inside its last block: the rest of that block is zero.
                    match u32::try_from(self.spec.base_bytes.saturating_sub(position))
                        .unwrap_or(u32::MAX)
                        .min(run)
                    {
                        0 => {
                            n = run;
                            self.counters().zero.read(u64::from(n));
                            io.zero_guest(token, a.at, n)
                        }
                        len => {
                            n = len;
                            self.counters().base.read(u64::from(n));
                            io.base_to_guest(token, a.at, position, n).unwrap_or_else(|| {
                                let id = self.row(a);
                                a.pending += 1;
                                let op = self.ops.begin(Op::BaseRead { id, at: a.at });
                                io.read_base(op, position, n);
                                Ok(())
                            })
                        }
                    }
                }
                Place::Overflow(location, _) => {
                    let most = left.min(RUN_BYTES - within);
                    n = self.run_len(
                        block,
                        within,
                        most,
                        budget,
                        |p, i| matches!(p, Place::Overflow(l, _) if l.0 == location.0.wrapping_add(i)),
                    );
                    in_ram = false;
                    let id = self.row(a);
                    a.pending += 1;
                    self.read_overflow_run(io, id, a.at, block, location, within, n);
                    Ok(())
                }
            };
            a.moved_bytes += u64::from(n);
            if let Err(errno) = result {
                a.errno = Some(errno);
                return;
            }
            a.at += n;
        }
        a.walked = true;
    }

    /// How many of the `most` bytes from byte `within` of `block` on lie in blocks that `same` accepts.
    #[inline]
    fn run_len(
        &self,
        block: Block,
        within: u32,
        most: u32,
        budget: &mut u32,
        same: impl Fn(Place, u32) -> bool,
    ) -> u32 {
        let mut n = most.min(BLOCK - within);
        *budget -= 1;
        let mut i = 1;
        while n < most && *budget > 0 && same(self.place(Block(block.0 + i)), i) {
            n = most.min(n + BLOCK);
            i += 1;
            *budget -= 1;
        }
        n
    }

    #[allow(clippy::too_many_arguments)] // one call, and each is what the read is
    fn read_overflow_run<I: Io>(
        &mut self,
        io: &mut I,
        id: Id,
        at: u32,
        block: Block,
        location: Location,
        skip: u32,
        len: u32,
    ) {
        let bytes = (skip + len).next_multiple_of(BLOCK);
        self.pin(location);
        self.counters().overflow.read(u64::from(bytes));
        // The identity of `counters` counts guest bytes: what a partial block reads beyond them is a merge's.
        add(&self.counters().merges_overflow_bytes, u64::from(bytes - len));
        let op = self.ops.begin(Op::OverflowRead { id, at, block, location, skip, len });
        io.read_overflow(op, location.offset_bytes(), bytes);
    }

    pub(crate) fn base_read_done<I: Io>(&mut self, io: &mut I, id: Id, at: u32, bytes: Result<&[u8], Errno>) {
        let token = self.table.get(id).request.token;
        let result = bytes.and_then(|bytes| io.copy_to_guest(token, at, bytes));
        self.operation_done(io, id, result);
    }

    #[allow(clippy::too_many_arguments)] // the fields of the operation
    pub(crate) fn overflow_read_done<I: Io>(
        &mut self,
        io: &mut I,
        id: Id,
        at: u32,
        block: Block,
        skip: u32,
        len: u32,
        bytes: Result<&[u8], Errno>,
    ) {
        let token = self.table.get(id).request.token;
        let result = bytes.and_then(|bytes| {
            for (i, content) in bytes.chunks_exact(BLOCK_BYTES).enumerate() {
                self.verify(io, Block(block.0 + i as u32), content)?;
            }
            io.copy_to_guest(token, at, &bytes[skip as usize..][..len as usize])?;
            for (i, content) in bytes.chunks_exact(BLOCK_BYTES).enumerate() {
                self.promote(io, Block(block.0 + i as u32), content);
            }
            Ok(())
        });
        self.operation_done(io, id, result);
    }

    /// Checks a block's content, read from the overflow, against the checksum in its map entry. The entry may
    /// name another location than was read (the collector moved the block meanwhile): content and checksum
    /// are the same there. Or a slot (another read promoted it): that holds what was found right then.
    pub(crate) fn verify<I: Io>(&self, io: &mut I, block: Block, content: &[u8]) -> Result<(), Errno> {
        let is_right = match self.place(block) {
            Place::Overflow(_, checksum) => {
                self.spec.mode.writes_in_place() || crc32c::crc32c(content) == checksum
            }
            Place::Ram(slot) => content == io.slot(slot),
            Place::Base | Place::Zero => true,
        };
        if is_right {
            return Ok(());
        }
        add(&self.counters().checksum_mismatches, 1);
        io.event(Event::ChecksumMismatch);
        Err(Errno::IO)
    }
}
