//! `meta` memory with anything in it: a disk is refused, or attached and then works. Memory that an earlier worker
//! left, or that a fault has changed, must not make the next one panic or look outside its bounds.

use crate::input::Input;
use crate::rng::Rng;
use crate::sim::{Client, Ended, Sim};
use spillway_core::{
    BLOCK_BYTES, BLOCK_SECTORS, Counters, DataMemory, Disk, DiskSpec, Errno, FullPolicy, Layout, LogShape,
    Meta, Mode, Operation, Request, SECTOR_BYTES, StateMap, Token, state_map_bytes,
};

const BLOCKS: u64 = 600;
/// CRC-32C of a block of 0xFF, with which the stand-in's file is full.
const FULL_OF_ONES: u64 = 0x25c1_fe13;

/// Room for `meta`, aligned to a page, and behind it for the live map of mode `persistent`.
struct Memory {
    words: Vec<u64>,
    len: usize,
}

impl Memory {
    fn new(len: u64) -> Memory {
        Memory { words: vec![0; (len as usize + 4096) / 8], len: len as usize }
    }

    fn base(&mut self) -> *mut u8 {
        let start = self.words.as_mut_ptr().cast::<u8>();
        start.wrapping_add(start.align_offset(4096))
    }

    fn write(&mut self, at: usize, bytes: &[u8]) {
        let at = at.min(self.len);
        let len = bytes.len().min(self.len - at);
        // SAFETY: `at + len` is at most the length; no disk is attached now, so nobody else uses the memory.
        unsafe { self.base().add(at).copy_from_nonoverlapping(bytes.as_ptr(), len) }
    }

    /// Attaches as a worker does; `None` when the memory is refused.
    fn attach(&mut self, spec: DiskSpec) -> Option<Disk> {
        // SAFETY: a page more than the layout was allocated, and the memory outlives the disk.
        let (meta, existing) = unsafe { Meta::open(self.base(), &spec, 1) }.ok()?;
        if spec.mode == Mode::Persistent {
            let live = self.base().wrapping_add(Layout::of(&spec).len_bytes() as usize);
            // SAFETY: the same; the map is behind the layout.
            let live = unsafe { StateMap::new(live, spec.blocks()) };
            return Disk::attach_persistent(meta, existing, spec, live).ok();
        }
        Disk::attach(meta, existing, spec, data(&spec)).ok()
    }
}

/// Memory for the slots, with room for the limit to grow.
fn data(spec: &DiskSpec) -> DataMemory {
    DataMemory { bytes: 2 * spec.ram_limit_bytes, huge_pages: false }
}

fn spec(mode: Mode) -> DiskSpec {
    let shape = LogShape { segment_blocks: 8, part_blocks: 4 };
    DiskSpec {
        size_bytes: BLOCKS * BLOCK_BYTES as u64 - 1024,
        base_bytes: if mode == Mode::Ephemeral { 0 } else { 100 * BLOCK_BYTES as u64 + 512 },
        mode,
        full: FullPolicy::Fail,
        ram_limit_bytes: if mode.has_ram() { 24 * BLOCK_BYTES as u64 } else { 0 },
        overflow_limit_bytes: if mode.has_log() { 20 * 8 * BLOCK_BYTES as u64 } else { 0 },
        shape,
    }
}

/// Formats a disk, writes anything over its memory, attaches, and uses what was attached.
pub fn meta_attach(data: &[u8]) {
    let mut input = Input(data);
    let setup = input.u8();
    let spec = spec(match setup >> 3 & 3 {
        1 => Mode::Persistent,
        2 => Mode::Ephemeral,
        _ => Mode::ALL[usize::from(setup & 3)],
    });
    let layout = Layout::of(&spec);
    let states = layout.len_bytes() as usize;
    let mut memory = Memory::new(layout.len_bytes() + state_map_bytes(spec.blocks()));
    if setup & 4 == 0 {
        drop(memory.attach(spec).expect("zeroed memory becomes a new disk"));
    }
    let map = layout.map_range().start as usize;
    // The segments' marks lie behind the counters; how many there are stands in the header.
    let marks = (Layout::COUNTERS_AT as usize + size_of::<Counters>()).next_multiple_of(4096);
    memory.write(64, &[16]);
    while !input.is_empty() {
        match input.u8() % 8 {
            // A map entry: block, kind, location or slot, checksum.
            0..=3 => {
                let block = usize::from(input.u16()) % 1024;
                let (kind, place) = (u64::from(input.u8()), u64::from(input.u8()));
                let location = match kind & 3 {
                    0 | 2 => place,
                    1 => place << 32 | FULL_OF_ONES,
                    _ => place << 32 | u64::from(input.u8()),
                };
                let bits = kind >> 6 << 62 | location;
                memory.write(map + block * 8, &bits.to_le_bytes());
            }
            // A byte of either directory, which lie on the pages before the map, or a segment's mark.
            4 => {
                let at = input.u8();
                memory
                    .write(map - 4096 * (1 + usize::from(at >> 7)) + usize::from(at & 3), &[input.u8() & 3]);
            }
            // A byte of the map in the file: four blocks.
            5 if spec.mode == Mode::Persistent => {
                memory.write(states + usize::from(input.u8()), &[input.u8()]);
            }
            5 => memory.write(marks + usize::from(input.u8() & 15), &[input.u8() & 3]),
            // A word of header or counters.
            6 => {
                let at = usize::from(input.u16()) * 8 % marks;
                let mut word = input.u64();
                // The generation and the one that was to end count only with their check.
                if matches!(at, 48 | 56) && word & 4 == 0 {
                    word = u64::from(!(word as u16 & 3)) << 48 | word & 3;
                }
                memory.write(at, &word.to_le_bytes());
            }
            _ => {
                let at = input.u16() as usize * 8 % layout.len_bytes() as usize;
                let len = input.u8() as usize;
                memory.write(at, input.bytes(len));
            }
        }
    }
    if let Some(mut disk) = memory.attach(spec) {
        use_disk(&mut disk, &spec, memory.base());
    }
}

/// Reads all of it, writes some of it, throws it away, and checks as it goes. The disk's memory lies at `meta`.
fn use_disk(disk: &mut Disk, spec: &DiskSpec, meta: *mut u8) {
    let mut sim = Sim::new(spec, data(spec), vec![1; spec.base_bytes as usize], Rng(7));
    sim.meta = meta;
    for block in 0..spec.blocks() {
        disk.check_step(block);
        if block % 61 == 0 {
            assert!(disk.extent(u64::from(block) * BLOCK_BYTES as u64, spec.size_bytes).0 > 0);
        }
    }
    let sectors = spec.size_bytes / SECTOR_BYTES;
    let requests = [
        (Operation::Read, 0, sectors),
        (Operation::Write { fua: false }, 3, 20 * BLOCK_SECTORS),
        (Operation::WriteZeroes { fua: false }, 11, BLOCK_SECTORS),
        (Operation::Discard, 64, 512 * BLOCK_SECTORS),
        (Operation::Write { fua: true }, sectors - 41, 41),
        (Operation::Flush, 0, 0),
        (Operation::Read, 0, sectors),
    ];
    let mut now_ns = 1;
    for (token, (operation, sector, sectors)) in (1..).zip(requests) {
        let data = vec![5; (sectors * SECTOR_BYTES) as usize];
        sim.clients.insert(token, Client { data, result: None });
        disk.begin_turn(now_ns);
        disk.submit(&mut sim, Request { token: Token(token), operation, sector, sectors: sectors as u32 });
        // To the end of what moves, then the next; what waits for space is withdrawn.
        for _ in 0..200 {
            let more = disk.end_turn(&mut sim, now_ns);
            now_ns += 1_000_000;
            match sim.end_one() {
                Some(Ended::Read(op, result)) => {
                    disk.read_done(&mut sim, op, result.as_deref().map_err(|e| *e))
                }
                Some(Ended::Other(op, result)) => disk.op_done(&mut sim, op, result),
                None if !more && !sim.has_pending() => break,
                None => {}
            }
        }
        disk.check_step((sector / BLOCK_SECTORS) as u32);
    }
    disk.cancel(&mut sim, Errno::CANCELED, |_| true);
    for _ in 0..10_000 {
        match sim.end_one() {
            Some(Ended::Read(op, result)) => disk.read_done(&mut sim, op, result.as_deref().map_err(|e| *e)),
            Some(Ended::Other(op, result)) => disk.op_done(&mut sim, op, result),
            None if !sim.has_pending() => break,
            // It takes long.
            None => {}
        }
        disk.end_turn(&mut sim, now_ns);
    }
    assert_eq!(disk.unfinished(), 0, "requests outlive cancel: {disk:?}");
    if spec.mode != Mode::Ephemeral && disk.reset(&mut sim) {
        disk.check();
    }
}
