//! The true core on a disk so fast that all has ended when it is looked at.
//!
//! Owns no figure: what is counted is in the disk's counters. Every block holds the same, so that a test of what goes where
//! runs millions of blocks in seconds; that contents are right is for the model to show.

use spillway_core::{
    BLOCK_BYTES, BLOCK_SECTORS, DataMemory, Disk, DiskSpec, Errno, Event, FullPolicy, GuestBuffers, Io,
    Layout, LogShape, Meta, Mode, OpId, Operation, PARTS, PartId, Request, Slot, Token,
};
use std::collections::{HashMap, VecDeque};

pub const SHAPE: LogShape = LogShape { segment_blocks: 256, part_blocks: 48 };
/// Blocks of a segment but its summary.
pub const DATA_BLOCKS: u64 = SHAPE.segment_blocks as u64 - 1;
/// What every block but a summary holds.
const CONTENT: u8 = 0x5A;
/// Requests of one turn.
pub const TURN: u64 = 32;

enum Begun {
    Read(u64, u32),
    Other,
}

/// The host's side. Of the overflow only summaries are kept.
pub struct Instant {
    parts: Vec<Vec<u8>>,
    slot: Vec<u8>,
    summaries: HashMap<u64, Vec<u8>>,
    begun: VecDeque<(OpId, Begun)>,
    unfinished: u64,
}

impl Instant {
    fn new() -> Instant {
        Instant {
            parts: vec![vec![0; SHAPE.part_blocks as usize * BLOCK_BYTES]; PARTS],
            slot: vec![CONTENT; BLOCK_BYTES],
            summaries: HashMap::new(),
            begun: VecDeque::new(),
            unfinished: 0,
        }
    }

    fn is_summary(location: u64) -> bool {
        location % u64::from(SHAPE.segment_blocks) == DATA_BLOCKS
    }
}

impl GuestBuffers for Instant {
    fn copy_from_guest(&mut self, _: Token, _: u32, to: &mut [u8]) -> Result<(), Errno> {
        to.fill(CONTENT);
        Ok(())
    }
    fn copy_to_guest(&mut self, _: Token, _: u32, _: &[u8]) -> Result<(), Errno> {
        Ok(())
    }
    fn zero_guest(&mut self, _: Token, _: u32, _: u32) -> Result<(), Errno> {
        Ok(())
    }
    fn complete(&mut self, _: Token, result: Result<(), Errno>) {
        assert_eq!(result, Ok(()));
        self.unfinished -= 1;
    }
}

impl Io for Instant {
    fn slot(&mut self, _: Slot) -> &mut [u8] {
        &mut self.slot
    }
    fn guest_to_slot(&mut self, _: Token, _: u32, _: Slot, _: usize, _: usize) -> Result<bool, Errno> {
        Ok(false)
    }
    fn slot_to_guest(&mut self, _: Token, _: u32, _: Slot, _: usize, _: usize) -> Result<(), Errno> {
        Ok(())
    }
    fn guest_to_part(&mut self, _: Token, _: u32, part: PartId, at: usize, len: usize) -> Result<(), Errno> {
        self.parts[part.0 as usize][at..at + len].fill(CONTENT);
        Ok(())
    }
    fn slot_to_part(&mut self, _: Slot, part: PartId, at: usize) {
        self.parts[part.0 as usize][at..at + BLOCK_BYTES].fill(CONTENT);
    }
    fn part(&mut self, part: PartId) -> &mut [u8] {
        &mut self.parts[part.0 as usize]
    }
    fn release_slots(&mut self, _: &[Slot]) {}
    fn release_meta(&mut self, _: std::ops::Range<u64>) {}
    fn base_to_guest(&mut self, _: Token, _: u32, _: u64, _: u32) -> Option<Result<(), Errno>> {
        unreachable!("there is no image")
    }
    fn read_base(&mut self, _: OpId, _: u64, _: u32) {
        unreachable!("there is no image")
    }
    fn read_overflow(&mut self, op: OpId, offset: u64, len: u32) {
        self.begun.push_back((op, Begun::Read(offset / BLOCK_BYTES as u64, len)));
    }
    fn write_overflow(&mut self, op: OpId, part: PartId, at: usize, offset: u64, len: u32, _: bool) {
        let last = (offset + u64::from(len)) / BLOCK_BYTES as u64 - 1;
        if Instant::is_summary(last) {
            let end = at + len as usize;
            let page = self.parts[part.0 as usize][end - BLOCK_BYTES..end].to_vec();
            self.summaries.insert(last, page);
        }
        self.begun.push_back((op, Begun::Other));
    }
    fn punch_overflow(&mut self, op: OpId, _: u64, _: u64) {
        self.begun.push_back((op, Begun::Other));
    }
    fn sync_overflow(&mut self, op: OpId) {
        self.begun.push_back((op, Begun::Other));
    }
    fn drain_overflow(&mut self, op: OpId) {
        self.begun.push_back((op, Begun::Other));
    }
    fn event(&mut self, event: Event) {
        assert!(matches!(event, Event::FirstOverflow | Event::Level(..)), "{event:?}");
    }
}

/// A disk and its host.
pub struct Real {
    pub disk: Disk,
    io: Instant,
    content: Vec<u8>,
    now_ns: u64,
    token: u64,
    _memory: Vec<u64>,
}

impl Real {
    /// A new disk of so many blocks, with a RAM tier of `slots` and an overflow of `segments`.
    pub fn new(mode: Mode, blocks: u64, slots: u64, segments: u64) -> Real {
        let spec = DiskSpec {
            size_bytes: blocks * BLOCK_BYTES as u64,
            base_bytes: 0,
            mode,
            full: FullPolicy::Fail,
            ram_limit_bytes: slots * BLOCK_BYTES as u64,
            overflow_limit_bytes: segments * u64::from(SHAPE.segment_blocks) * BLOCK_BYTES as u64,
            shape: SHAPE,
        };
        let mut memory = vec![0u64; (Layout::of(&spec).len_bytes() as usize + 4096) / 8];
        let start = memory.as_mut_ptr().cast::<u8>();
        let base = start.wrapping_add(start.align_offset(4096));
        // SAFETY: the memory is longer than the layout by a page, is not moved, and outlives the disk.
        let (meta, existing) = unsafe { Meta::open(base, &spec, 1) }.expect("new memory");
        let data = DataMemory { bytes: spec.ram_limit_bytes, huge_pages: false };
        let disk = Disk::attach(meta, existing, spec, data).expect("new memory");
        let content = vec![CONTENT; BLOCK_BYTES * 64];
        Real { disk, io: Instant::new(), content, now_ns: 1, token: 0, _memory: memory }
    }

    /// One turn of requests of a block each, and all that comes of it.
    pub fn turn(&mut self, requests: impl Iterator<Item = (Operation, u64)>) {
        self.disk.begin_turn(self.now_ns);
        for (operation, block) in requests {
            self.token += 1;
            self.io.unfinished += 1;
            let request = Request {
                token: Token(self.token),
                operation,
                sector: block * BLOCK_SECTORS,
                sectors: BLOCK_SECTORS as u32,
            };
            self.disk.submit(&mut self.io, request);
        }
        loop {
            self.now_ns += 10_000;
            let more = self.disk.end_turn(&mut self.io, self.now_ns);
            if self.io.begun.is_empty() && !more && self.io.unfinished == 0 {
                return;
            }
            while let Some((op, begun)) = self.io.begun.pop_front() {
                let Begun::Read(location, len) = begun else {
                    self.disk.op_done(&mut self.io, op, Ok(()));
                    continue;
                };
                if Instant::is_summary(location) {
                    let page = self.io.summaries[&location].clone();
                    self.disk.read_done(&mut self.io, op, Ok(&page));
                } else {
                    self.disk.read_done(&mut self.io, op, Ok(&self.content[..len as usize]));
                }
            }
            self.disk.begin_turn(self.now_ns);
        }
    }
}
