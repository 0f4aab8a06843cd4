//! How many operations large requests have under way together, on a base image that answers only when it is told to.
//!
//! The true core; contents do not matter here, the model looks after those.

use spillway_core::{
    BLOCK_BYTES, DataMemory, Disk, DiskSpec, Errno, Event, FullPolicy, GuestBuffers, Io, Layout, LogShape,
    Meta, Mode, OpId, Operation, PartId, Request, Slot, Token,
};
use std::collections::{HashMap, VecDeque};
use std::ops::Range;

const DISK_BYTES: u64 = 64 << 20;
/// What no request gets without many operations: they are of 256 KiB at most.
const REQUEST_BYTES: u64 = 32 << 20;
const REQUESTS: usize = 200;

/// The host's side: remembers.
#[derive(Default)]
struct Slow {
    begun: VecDeque<(OpId, u32)>,
    completed: Vec<Token>,
    parts: HashMap<u32, Vec<u8>>,
    /// Writes of the overflow.
    writes: VecDeque<OpId>,
}

impl GuestBuffers for Slow {
    fn copy_from_guest(&mut self, _: Token, _: u32, _: &mut [u8]) -> Result<(), Errno> {
        unreachable!("nothing is written")
    }
    fn copy_to_guest(&mut self, _: Token, _: u32, _: &[u8]) -> Result<(), Errno> {
        Ok(())
    }
    fn zero_guest(&mut self, _: Token, _: u32, _: u32) -> Result<(), Errno> {
        unreachable!("all is in the image")
    }
    fn complete(&mut self, token: Token, result: Result<(), Errno>) {
        assert_eq!(result, Ok(()));
        self.completed.push(token);
    }
}

impl Io for Slow {
    fn slot(&mut self, _: Slot) -> &mut [u8] {
        unreachable!("nothing is written")
    }
    fn guest_to_slot(&mut self, _: Token, _: u32, _: Slot, _: usize, _: usize) -> Result<bool, Errno> {
        unreachable!("nothing is written")
    }
    fn slot_to_guest(&mut self, _: Token, _: u32, _: Slot, _: usize, _: usize) -> Result<(), Errno> {
        unreachable!("nothing is written")
    }
    fn guest_to_part(&mut self, _: Token, _: u32, part: PartId, at: usize, len: usize) -> Result<(), Errno> {
        self.part(part)[at..at + len].fill(9);
        Ok(())
    }
    fn slot_to_part(&mut self, _: Slot, _: PartId, _: usize) {
        unreachable!("nothing is written")
    }
    fn part(&mut self, part: PartId) -> &mut [u8] {
        self.parts.entry(part.0.into()).or_insert_with(|| vec![0; 64 * BLOCK_BYTES])
    }
    fn release_slots(&mut self, _: &[Slot]) {}
    fn release_meta(&mut self, _: Range<u64>) {}
    fn base_to_guest(&mut self, _: Token, _: u32, _: u64, _: u32) -> Option<Result<(), Errno>> {
        None
    }
    fn read_base(&mut self, op: OpId, _: u64, len: u32) {
        self.begun.push_back((op, len));
    }
    fn read_overflow(&mut self, _: OpId, _: u64, _: u32) {
        unreachable!("nothing is there")
    }
    fn write_overflow(&mut self, op: OpId, _: PartId, _: usize, _: u64, _: u32, _: bool) {
        self.writes.push_back(op);
    }
    fn punch_overflow(&mut self, _: OpId, _: u64, _: u64) {
        unreachable!("nothing is there")
    }
    fn sync_overflow(&mut self, _: OpId) {
        unreachable!("nothing is there")
    }
    fn drain_overflow(&mut self, _: OpId) {
        unreachable!("nothing is there")
    }
    fn event(&mut self, event: Event) {
        assert!(matches!(event, Event::FirstOverflow), "{event:?}");
    }
}

/// Turns until the disk can do no more by itself.
fn settle(disk: &mut Disk, io: &mut Slow, now_ns: &mut u64) {
    loop {
        *now_ns += 1;
        if !disk.end_turn(io, *now_ns) {
            return;
        }
        disk.begin_turn(*now_ns);
    }
}

/// A disk on an image as large, and a crowd of reads of all but its last part under way.
fn crowd(memory: &mut Vec<u64>, mode: Mode, io: &mut Slow, now_ns: &mut u64) -> Disk {
    let spec = DiskSpec {
        size_bytes: DISK_BYTES,
        base_bytes: DISK_BYTES,
        mode,
        full: FullPolicy::Pause,
        ram_limit_bytes: if mode.has_ram() { 1024 * BLOCK_BYTES as u64 } else { 0 },
        overflow_limit_bytes: if mode.has_log() { DISK_BYTES * 2 } else { 0 },
        shape: LogShape::default(),
    };
    memory.resize((Layout::of(&spec).len_bytes() as usize + 4096) / 8, 0);
    let start = memory.as_mut_ptr().cast::<u8>();
    let base = start.wrapping_add(start.align_offset(4096));
    // SAFETY: the memory is longer than the layout by a page, is not changed, and outlives the disk.
    let (meta, existing) = unsafe { Meta::open(base, &spec, 1) }.expect("new memory");
    let data = DataMemory { bytes: spec.ram_limit_bytes, huge_pages: false };
    let mut disk = Disk::attach(meta, existing, spec, data).expect("new memory");
    disk.begin_turn(*now_ns);
    for n in 0..REQUESTS {
        // Aligned, so that each has as many pieces as it is long; the last MiB is left to others.
        let sector = n as u64 * 512 % ((DISK_BYTES - REQUEST_BYTES - (1 << 20)) / 512);
        let request = Request {
            token: Token(n as u64),
            operation: Operation::Read,
            sector,
            sectors: (REQUEST_BYTES / 512) as u32,
        };
        disk.submit(io, request);
    }
    settle(&mut disk, io, now_ns);
    disk
}

#[test]
fn in_a_crowd_every_request_has_one_operation_and_all_end() {
    let (mut memory, mut io, mut now_ns) = (Vec::new(), Slow::default(), 1);
    let mut disk = crowd(&mut memory, Mode::Ram, &mut io, &mut now_ns);
    // The first took 64 each, the others have one.
    let (most, mut operations) = (1024 + REQUESTS, 0);
    assert!(io.begun.len() >= 1024 && io.begun.len() <= most, "{} under way", io.begun.len());

    let content = vec![7; 256 << 10];
    while let Some((op, len)) = io.begun.pop_front() {
        disk.read_done(&mut io, op, Ok(&content[..len as usize]));
        operations += 1;
        settle(&mut disk, &mut io, &mut now_ns);
        assert!(io.begun.len() <= most, "{} under way", io.begun.len());
        assert!(io.begun.len() >= disk.unfinished(), "somebody waits for nothing");
    }
    assert_eq!(operations, REQUESTS * 128);
    io.completed.sort_unstable_by_key(|token| token.0);
    assert!(io.completed.iter().map(|token| token.0).eq(0..REQUESTS as u64), "each once");
    assert_eq!(disk.unfinished(), 0);
    disk.check();
}

/// The blocks of a write gather in parts, crowd or not.
#[test]
fn in_a_crowd_writes_of_the_log_are_as_long_as_ever() {
    let (mut memory, mut io, mut now_ns) = (Vec::new(), Slow::default(), 1);
    let mut disk = crowd(&mut memory, Mode::Overflow, &mut io, &mut now_ns);
    assert!(io.begun.len() >= 1024);
    let (token, operation) = (Token(1 << 20), Operation::Write { fua: false });
    disk.begin_turn(now_ns);
    disk.submit(&mut io, Request { token, operation, sector: (DISK_BYTES - (1 << 20)) / 512, sectors: 2048 });
    let mut writes = 0;
    loop {
        settle(&mut disk, &mut io, &mut now_ns);
        let Some(op) = io.writes.pop_front() else { break };
        writes += 1;
        disk.begin_turn(now_ns);
        disk.op_done(&mut io, op, Ok(()));
    }
    assert_eq!(io.completed, [token]);
    assert!(writes <= 12, "256 blocks in {writes} writes");
}
