//! How many blocks the log writes for one that it was asked to write, beside a greedy collector in its plainest
//! form: the same segments, the same share of living blocks, uniform random overwrites.
//!
//! `SPILLWAY_SEED` repeats a run; `cargo test --test amplification -- --nocapture` prints the curve.

use spillway_core::{
    BLOCK_BYTES, BLOCK_SECTORS, DataMemory, Disk, DiskSpec, Errno, Event, FullPolicy, GuestBuffers, Io,
    Layout, LogShape, Meta, Mode, OpId, Operation, PARTS, PartId, Request, Slot, Token, get,
};
use std::collections::{HashMap, VecDeque};

const SEGMENTS: u64 = 512;
const SHAPE: LogShape = LogShape { segment_blocks: 256, part_blocks: 48 };
const DATA_BLOCKS: u64 = SHAPE.segment_blocks as u64 - 1;
/// Slots of the tier in mode `ram+overflow`: next to nothing.
const SLOTS: u64 = 256;
/// What every block but a summary holds.
const CONTENT: u8 = 0x5A;
/// Living blocks are overwritten so often before the count begins, and while it goes on.
const WARM_UP: u64 = 6;
const COUNTED: u64 = 3;

/// splitmix64.
struct Rng(u64);

impl Rng {
    fn below(&mut self, n: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        ((u128::from(z ^ (z >> 31)) * u128::from(n)) >> 64) as u64
    }
}

fn seed() -> u64 {
    let seed = std::env::var("SPILLWAY_SEED").map_or_else(
        |_| {
            std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).expect("after 1970").as_nanos()
                as u64
        },
        |s| s.parse().expect("a number"),
    );
    println!("amplification: SPILLWAY_SEED={seed}");
    seed
}

enum Begun {
    Read(u64, u32),
    Other,
}

/// A disk so fast that all has ended when it is looked at. All blocks hold the same, so that only summaries are
/// kept.
struct Instant {
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
        unreachable!("nothing is read")
    }
    fn zero_guest(&mut self, _: Token, _: u32, _: u32) -> Result<(), Errno> {
        unreachable!("nothing is read")
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
        unreachable!("nothing is read")
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

/// The true log.
struct Real {
    disk: Disk,
    io: Instant,
    content: Vec<u8>,
    now_ns: u64,
    token: u64,
    _memory: Vec<u64>,
}

impl Real {
    fn new(mode: Mode, living: u64) -> Real {
        let spec = DiskSpec {
            size_bytes: (living + if mode.has_ram() { SLOTS } else { 0 }) * BLOCK_BYTES as u64,
            base_bytes: 0,
            mode,
            full: FullPolicy::Fail,
            ram_limit_bytes: if mode.has_ram() { SLOTS * BLOCK_BYTES as u64 } else { 0 },
            overflow_limit_bytes: SEGMENTS * u64::from(SHAPE.segment_blocks) * BLOCK_BYTES as u64,
            shape: SHAPE,
        };
        let mut memory = vec![0u64; (Layout::of(&spec).len_bytes() as usize + 4096) / 8];
        let start = memory.as_mut_ptr().cast::<u8>();
        let base = start.wrapping_add(start.align_offset(4096));
        // SAFETY: the memory is longer than the layout by a page, is not moved, and outlives the disk.
        let (meta, existing) = unsafe { Meta::open(base, &spec) }.expect("new memory");
        let data = DataMemory { bytes: spec.ram_limit_bytes, huge_pages: false };
        let disk = Disk::attach(meta, existing, spec, data).expect("new memory");
        let content = vec![CONTENT; BLOCK_BYTES * 16];
        Real { disk, io: Instant::new(), content, now_ns: 1, token: 0, _memory: memory }
    }

    fn turn(&mut self, blocks: impl Iterator<Item = u64>) {
        self.disk.begin_turn(self.now_ns);
        for block in blocks {
            self.token += 1;
            self.io.unfinished += 1;
            let request = Request {
                token: Token(self.token),
                operation: Operation::Write { fua: false },
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

    /// Blocks that were to be written, and blocks that were moved.
    fn counts(&self) -> (u64, u64) {
        let c = self.disk.counters();
        (get(&c.evictions_blocks) + get(&c.overflow_guest_blocks), get(&c.collector_moved_blocks))
    }

    fn amplification(mode: Mode, living: u64, seed: u64) -> f64 {
        let mut real = Real::new(mode, living);
        let blocks = real.disk.spec().size_bytes / BLOCK_BYTES as u64;
        let mut rng = Rng(seed);
        for first in (0..blocks).step_by(32) {
            real.turn(first..blocks.min(first + 32));
        }
        let mut write = |real: &mut Real, n: u64| {
            for _ in 0..n / 32 {
                real.turn((0..32).map(|_| rng.below(blocks)));
            }
        };
        write(&mut real, WARM_UP * living);
        let before = real.counts();
        write(&mut real, COUNTED * living);
        let after = real.counts();
        real.disk.check();
        let (asked, moved) = (after.0 - before.0, after.1 - before.1);
        (asked + moved) as f64 / asked as f64
    }
}

/// The plainest greedy collector: one segment is open for writes and one for survivors; when no more segments are
/// free than `KEEP`, the one with the fewest living blocks is emptied.
struct Greedy {
    /// Where each block lives.
    at: Vec<u32>,
    /// The blocks that were appended to each segment, dead or alive.
    appended: Vec<Vec<u32>>,
    live: Vec<u32>,
    open: [usize; 2],
    free: Vec<usize>,
    asked: u64,
    moved: u64,
}

/// One to be filled, and one that survivors can always go to.
const KEEP: usize = 2;

impl Greedy {
    fn append(&mut self, stream: usize, block: u32) {
        let old = self.at[block as usize];
        if old != u32::MAX {
            self.live[old as usize] -= 1;
        }
        if self.appended[self.open[stream]].len() as u64 == DATA_BLOCKS {
            self.open[stream] = self.free.pop().expect("the collector keeps some");
        }
        let segment = self.open[stream];
        self.appended[segment].push(block);
        self.live[segment] += 1;
        self.at[block as usize] = segment as u32;
    }

    fn write(&mut self, block: u32) {
        self.append(0, block);
        self.asked += 1;
        while self.free.len() < KEEP {
            let closed = (0..self.live.len()).filter(|s| !self.open.contains(s) && !self.free.contains(s));
            let victim = closed.min_by_key(|&s| self.live[s]).expect("some are closed");
            for block in std::mem::take(&mut self.appended[victim]) {
                if self.at[block as usize] == victim as u32 {
                    self.append(1, block);
                    self.moved += 1;
                    // A block that was appended twice lives once: here it is gone already.
                }
            }
            assert_eq!(self.live[victim], 0);
            self.free.push(victim);
        }
    }

    fn amplification(living: u64, seed: u64) -> f64 {
        let segments = SEGMENTS as usize;
        let mut greedy = Greedy {
            at: vec![u32::MAX; living as usize],
            appended: vec![Vec::new(); segments],
            live: vec![0; segments],
            open: [0, 1],
            free: (2..segments).collect(),
            asked: 0,
            moved: 0,
        };
        let mut rng = Rng(seed);
        (0..living).for_each(|block| greedy.write(block as u32));
        (0..WARM_UP * living).for_each(|_| greedy.write(rng.below(living) as u32));
        (greedy.asked, greedy.moved) = (0, 0);
        (0..COUNTED * living).for_each(|_| greedy.write(rng.below(living) as u32));
        (greedy.asked + greedy.moved) as f64 / greedy.asked as f64
    }
}

#[test]
fn writes_are_not_multiplied() {
    let seed = seed();
    println!("living  greedy  overflow  ram+overflow");
    let rows: Vec<_> = [50u64, 60, 70, 75, 80, 85, 90]
        .into_iter()
        .map(|percent| {
            let living = SEGMENTS * u64::from(SHAPE.segment_blocks) * percent / 100;
            let greedy = Greedy::amplification(living, seed);
            let [straight, evicted] =
                [Mode::Overflow, Mode::RamOverflow].map(|mode| Real::amplification(mode, living, seed));
            println!("{percent:>5}%  {greedy:>6.3}  {straight:>8.3}  {evicted:>12.3}");
            (percent, greedy, straight.max(evicted))
        })
        .collect();
    for (percent, greedy, real) in rows {
        assert!(real <= greedy * 1.15, "{percent}%: {real} is more than 15% above {greedy}");
        let bound = match percent {
            50 => 1.35,
            80 => 3.1,
            _ => f64::INFINITY,
        };
        assert!(real < bound, "{percent}%: {real}");
    }
}
