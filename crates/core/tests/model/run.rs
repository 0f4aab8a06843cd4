//! One run of the model: a disk, what its clients sent, and what it must read as. The model test and the fuzzer
//! share it; what decides its course is the [`Rng`] that they give it.

use crate::oracle::{self, Oracle, State, ZERO};
use crate::rng::Rng;
use crate::sim::{Client, Ended, Sim};
use spillway_core::{
    BLOCK_BYTES, BLOCK_SECTORS, Counters, DataMemory, Disk, DiskSpec, Errno, Event, FullPolicy, Layout,
    Level, LogShape, Meta, Mode, Operation, Request, SECTOR_BYTES, StateMap, Thresholds, Token, Written, get,
    state_map_bytes,
};
use std::collections::{HashMap, VecDeque};

struct Memory {
    words: Vec<u64>,
    /// The live map of mode `persistent`.
    states: Vec<u64>,
}

impl Memory {
    fn new(spec: &DiskSpec) -> Memory {
        // A page more, so that a page-aligned part of it is long enough.
        let words = vec![0; (Layout::of(spec).len_bytes() as usize + 4096) / 8];
        Memory { words, states: vec![0; (state_map_bytes(spec.blocks()) as usize + 4096) / 8] }
    }

    /// All is lost but what a file has.
    fn lose_meta(&mut self) {
        self.words.fill(0);
    }

    fn states(&mut self) -> *mut u8 {
        let states = self.states.as_mut_ptr().cast::<u8>();
        // SAFETY: there is a page more than the map needs.
        unsafe { states.add(states.align_offset(4096)) }
    }

    /// The live map, of which no disk is attached.
    fn live(&mut self, spec: &DiskSpec) -> &mut [u8] {
        let len = state_map_bytes(spec.blocks()) as usize;
        // SAFETY: it is that long, and borrowed with all of the memory.
        unsafe { std::slice::from_raw_parts_mut(self.states(), len) }
    }

    fn base(&mut self) -> *mut u8 {
        let base = self.words.as_mut_ptr().cast::<u8>();
        // SAFETY: there is a page more than the layout needs.
        unsafe { base.add(base.align_offset(4096)) }
    }

    /// A copy of some of it. No disk is being called.
    fn words_at(&mut self, range: std::ops::Range<u64>) -> Vec<u64> {
        let base = self.base().cast::<u64>();
        // SAFETY: inside the layout; the disk's own view is of atomics, and it does nothing now.
        range.step_by(8).map(|at| unsafe { base.add(at as usize / 8).read() }).collect()
    }

    fn attach(&mut self, spec: DiskSpec, data: DataMemory) -> Disk {
        let aligned = self.base();
        let states = self.states();
        // SAFETY: both are longer than what is laid out in them by a page, are not touched otherwise, and outlive the disk.
        let disk = unsafe {
            let (meta, existing) = Meta::open(aligned, &spec, 1).expect("the memory fits");
            if spec.mode == Mode::Persistent {
                let live = StateMap::new(states, spec.blocks());
                Disk::attach_persistent(meta, existing, spec, live)
            } else {
                Disk::attach(meta, existing, spec, data)
            }
        };
        disk.expect("what the core wrote, it can attach to")
    }
}

/// A RAM tier of 20,000 slots before a roomy log.
pub fn hot_spec() -> DiskSpec {
    DiskSpec {
        size_bytes: 160 << 20,
        base_bytes: 0,
        mode: Mode::RamOverflow,
        full: FullPolicy::Pause,
        ram_limit_bytes: 20_000 * BLOCK_BYTES as u64,
        overflow_limit_bytes: 256 << 20,
        shape: LogShape::default(),
    }
}

/// A small RAM tier before a log that together do not hold the disk.
pub fn full_spec(mode: Mode) -> DiskSpec {
    let shape = LogShape { segment_blocks: 8, part_blocks: 4 };
    DiskSpec {
        size_bytes: 512 * BLOCK_BYTES as u64,
        base_bytes: 0,
        mode,
        full: FullPolicy::Pause,
        ram_limit_bytes: if mode.has_ram() { 32 * BLOCK_BYTES as u64 } else { 0 },
        overflow_limit_bytes: 24 * 8 * BLOCK_BYTES as u64,
        shape,
    }
}

/// An overflow limit for a disk of so many blocks, in segments.
fn random_segments(rng: &mut Rng, blocks: u64, shape: &LogShape) -> u64 {
    let most = 8 + blocks / u64::from(shape.segment_blocks - 1);
    16 + rng.below(most + most / 2)
}

fn random_spec(rng: &mut Rng) -> DiskSpec {
    let mode = if rng.chance(2) { Mode::RamOverflow } else { Mode::ALL[rng.below(6) as usize] };
    // Now and then a disk of several regions, with requests that take several turns.
    let blocks = if rng.chance(20) { 1_000 + rng.below(3_000) } else { 16 + rng.below(241) };
    let size_bytes = (blocks * BLOCK_SECTORS - rng.below(8)) * SECTOR_BYTES;
    let base_bytes = match rng.below(3) {
        _ if mode == Mode::Ephemeral => 0,
        0 => size_bytes,
        1 => 0,
        _ => rng.below(size_bytes / SECTOR_BYTES) * SECTOR_BYTES,
    };
    let shape = LogShape { segment_blocks: 4 + rng.below(13) as u32, part_blocks: 2 + rng.below(15) as u32 };
    let segments = random_segments(rng, blocks, &shape);
    DiskSpec {
        size_bytes,
        base_bytes,
        mode,
        full: if rng.chance(2) { FullPolicy::Pause } else { FullPolicy::Fail },
        ram_limit_bytes: if mode.has_ram() {
            (16 + rng.below(blocks * 3 / 4 + 16)) * BLOCK_BYTES as u64
        } else {
            0
        },
        overflow_limit_bytes: if mode.has_log() {
            segments * u64::from(shape.segment_blocks) * BLOCK_BYTES as u64
        } else {
            0
        },
        shape,
    }
}

/// What may live in the overflow.
fn capacity_bytes(spec: &DiskSpec) -> u64 {
    let reserve = 8.max(spec.segments() / 20);
    let segments = u64::from(spec.segments().saturating_sub(reserve));
    segments * u64::from(spec.shape.segment_blocks - 1) * BLOCK_BYTES as u64
}

/// Whether all blocks of the disk fit in at once: then, without faults, nothing ever waits for long or fails.
fn is_roomy(spec: &DiskSpec) -> bool {
    let log = capacity_bytes(spec) / BLOCK_BYTES as u64;
    match spec.mode {
        Mode::Direct | Mode::Persistent | Mode::Ephemeral => true,
        Mode::Ram => spec.slots() >= spec.blocks(),
        Mode::RamOverflow | Mode::Overflow => log >= u64::from(spec.blocks()),
    }
}

/// A submitted request.
#[derive(Clone)]
struct Sent {
    operation: Operation,
    sector: u64,
    sectors: u64,
    version: oracle::Version,
    holes: bool,
    /// The sectors that it changes.
    changes: std::ops::Range<u64>,
    /// What had landed in the file when it came.
    landed: u64,
    /// Requests that had ended when it came.
    then: u64,
}

pub struct Run {
    spec: DiskSpec,
    data: DataMemory,
    memory: Memory,
    disk: Option<Disk>,
    pub sim: Sim,
    oracle: Oracle,
    rng: Rng,
    sent: HashMap<u64, Sent>,
    /// What a dead process left unfinished, in its order.
    cut_off: VecDeque<Sent>,
    /// What the oracle knows, and whether a reset is under way.
    generation: u64,
    resetting: bool,
    /// A reset has begun since the last request that promised stability.
    may_be_marked: bool,
    /// Number of the next request.
    pub next: u64,
    version: u32,
    now_ns: u64,
    stuck: u32,
    pub faulty: bool,
    /// The RAM limit fell, and more may hold memory until the disk has come to rest.
    shrinking: bool,
    highest_limit_bytes: u64,
    /// The next request when a limit or the policy last changed.
    changed: u64,
}

impl Run {
    pub fn new(seed: u64) -> Run {
        let mut rng = Rng(seed);
        let spec = random_spec(&mut rng);
        let faulty = rng.chance(2);
        // Of some disks only the file system is full at times.
        let faults = if faulty && !rng.chance(4) { rng.below(2_000) as u32 } else { 0 };
        // Space for the limit to grow, with huge pages or without.
        let huge_pages = rng.chance(3);
        let unit = if huge_pages { 2 << 20 } else { BLOCK_BYTES as u64 };
        let data = DataMemory { bytes: (2 * spec.ram_limit_bytes).next_multiple_of(unit), huge_pages };
        let mut run = Run::on(spec, data, Rng(rng.next()));
        run.sim.faults = faults;
        run.sim.no_punching = run.rng.chance(8);
        run.faulty = faulty;
        run
    }

    /// With space for the limit to grow to twice what it is.
    pub fn with(spec: DiskSpec, seed: u64) -> Run {
        Run::on(spec, DataMemory { bytes: 2 * spec.ram_limit_bytes, huge_pages: false }, Rng(seed))
    }

    /// The same on a given memory for the slots.
    pub fn on(spec: DiskSpec, data: DataMemory, mut rng: Rng) -> Run {
        let mut base = vec![0; spec.base_bytes as usize];
        for (i, s) in base.chunks_exact_mut(SECTOR_BYTES as usize).enumerate() {
            oracle::fill(oracle::BASE, i as u64, s);
        }
        let mut memory = Memory::new(&spec);
        let disk = Some(memory.attach(spec, data));
        let mut sim = Sim::new(&spec, data, base, Rng(rng.next()));
        sim.meta = memory.base();
        let image_bytes = if spec.mode == Mode::Ephemeral { spec.size_bytes } else { spec.base_bytes };
        let oracle = Oracle::new(spec.size_bytes / SECTOR_BYTES, image_bytes / SECTOR_BYTES);
        Run {
            spec,
            data,
            memory,
            disk,
            sim,
            oracle,
            rng,
            sent: HashMap::new(),
            cut_off: VecDeque::new(),
            generation: 1,
            resetting: false,
            may_be_marked: false,
            next: 1,
            version: 1,
            now_ns: 1,
            stuck: 0,
            faulty: false,
            shrinking: false,
            highest_limit_bytes: spec.ram_limit_bytes,
            changed: 0,
        }
    }

    fn disk(&mut self) -> (&mut Disk, &mut Sim) {
        (self.disk.as_mut().expect("only taken while it is replaced"), &mut self.sim)
    }

    /// All invariants.
    pub fn check(&mut self) {
        self.disk().0.check();
        let generation = self.disk().0.generation();
        let words = self.memory.words_at(Layout::of(&self.spec).written_range());
        for (region, bits) in words.into_iter().enumerate() {
            let expected = self.oracle.blocks_written.get(&(region as u64)).copied().unwrap_or(0);
            assert_eq!(
                Written::from_bits(bits).blocks(generation),
                expected,
                "blocks written, region {region}"
            );
        }
        self.check_memory();
    }

    /// Writes of the overflow file.
    pub fn overflow_writes(&mut self) -> u64 {
        get(&self.disk().0.counters().overflow.writes)
    }

    /// Pages of the map that were not given back: these begin with what giving back leaves.
    pub fn map_pages_held(&mut self) -> u64 {
        let map = Layout::of(&self.spec).map_range();
        let pages = (map.start..map.end).step_by(4096);
        // SAFETY: the memory is longer than the map's end, and nobody writes to it now.
        let first = |at: u64| unsafe { self.memory.base().add(at as usize).read() };
        pages.map(first).filter(|&byte| byte != 0xA5).count() as u64
    }

    /// No more slots than the limit hold memory.
    fn check_memory(&mut self) {
        let held = self.sim.held_slots;
        // The last huge page may reach beyond it.
        let limit = self.spec.slots() + if self.data.huge_pages { 511 } else { 0 };
        assert!(held <= limit || self.shrinking, "{held} slots hold memory, {limit} may: {:?}", self.disk);
    }

    /// At rest a limit that has fallen is reached.
    fn check_shrunk(&mut self) {
        self.shrinking = false;
        self.check_memory();
    }

    /// Submits something.
    pub fn submit(&mut self) {
        let disk_sectors = self.spec.size_bytes / SECTOR_BYTES;
        let sectors = match self.rng.below(10) {
            0..=4 => BLOCK_SECTORS,
            5 => 1 + self.rng.below(16),
            6 => 1 + self.rng.below(7),
            7 => BLOCK_SECTORS * (1 + self.rng.below(8)),
            8 => 1 + self.rng.below(200),
            _ => 1 + self.rng.below(disk_sectors),
        }
        .min(disk_sectors);
        let mut sector = self.rng.below(disk_sectors - sectors + 1);
        if self.rng.chance(2) {
            sector = sector / BLOCK_SECTORS * BLOCK_SECTORS;
        }
        let operation = match self.rng.below(20) {
            0..=6 => Operation::Read,
            7..=15 => Operation::Write { fua: self.rng.chance(8) },
            16 | 17 if self.rng.chance(3) => Operation::Discard,
            16 | 17 => Operation::WriteZeroes { fua: self.rng.chance(4) },
            18 => Operation::Flush,
            _ => Operation::Write { fua: false },
        };
        self.version += 1;
        let version = if self.rng.chance(10) { ZERO } else { self.version };
        let (sector, sectors) = if operation == Operation::Flush { (0, 0) } else { (sector, sectors) };
        let holes = self.rng.chance(5);
        self.send_with(operation, sector, sectors, version, holes);
    }

    fn send(&mut self, operation: Operation, sector: u64, sectors: u64, version: oracle::Version) {
        self.send_with(operation, sector, sectors, version, false);
    }

    /// Submits a request; a write gives its sectors this version, or with `holes` leaves some blocks all zeroes.
    fn send_with(
        &mut self,
        operation: Operation,
        sector: u64,
        sectors: u64,
        version: oracle::Version,
        holes: bool,
    ) {
        let disk_sectors = self.spec.size_bytes / SECTOR_BYTES;
        let id = self.next;
        self.next += 1;
        let mut data = Vec::new();
        let mut changes = sector..sector + sectors;
        match operation {
            Operation::Read => data = vec![0xEE; (sectors * SECTOR_BYTES) as usize],
            Operation::Write { .. } => {
                data = vec![0; (sectors * SECTOR_BYTES) as usize];
                for (s, sector) in data.chunks_exact_mut(SECTOR_BYTES as usize).zip(sector..) {
                    let version = if holes && is_hole(version, sector) { ZERO } else { version };
                    oracle::fill(version, sector, s);
                    self.oracle.written(sector, version, id);
                }
            }
            Operation::WriteZeroes { .. } => {
                changes.clone().for_each(|s| self.oracle.written(s, ZERO, id));
            }
            Operation::Discard => {
                // Whole blocks only; the disk's last block is whole if the range reaches its end.
                let end = sector + sectors;
                let end = if end == disk_sectors { end } else { end / BLOCK_SECTORS * BLOCK_SECTORS };
                changes = sector.next_multiple_of(BLOCK_SECTORS)..end;
                changes.clone().for_each(|s| self.oracle.written(s, ZERO, id));
            }
            Operation::Flush => {}
        }
        self.sim.clients.insert(id, Client { data, result: None });
        let landed = self.sim.landed;
        self.sent.insert(
            id,
            Sent { operation, sector, sectors, version, holes, changes, landed, then: self.oracle.now },
        );
        let request = Request { token: Token(id), operation, sector, sectors: sectors as u32 };
        let whole = matches!(operation, Operation::Write { .. })
            && sector.is_multiple_of(BLOCK_SECTORS)
            && sectors.is_multiple_of(BLOCK_SECTORS);
        let (disk, sim) = self.disk();
        let finds_slots = whole && sectors / BLOCK_SECTORS <= u64::from(disk.slots_to_take());
        let stalls = get(&disk.counters().stalls);
        disk.submit(sim, request);
        let waits = get(&disk.counters().stalls) > stalls;
        assert!(!(waits && finds_slots), "a write waits while slots are free: {:?}", self.disk);
        self.reap();
        self.disk().0.check_step((sector / BLOCK_SECTORS) as u32);
    }

    /// Takes note of what has completed.
    fn reap(&mut self) {
        for id in std::mem::take(&mut self.sim.completed) {
            self.stuck = 0;
            let client = self.sim.clients.remove(&id).expect("completed");
            let sent = self.sent.remove(&id).expect("was sent");
            match (sent.operation, client.result.expect("completed")) {
                (Operation::Read, Ok(())) => {
                    for (i, content) in client.data.chunks_exact(SECTOR_BYTES as usize).enumerate() {
                        self.oracle.check(sent.sector + i as u64, content, id);
                    }
                }
                (_, Ok(())) => {
                    if self.spec.mode.writes_in_place() {
                        self.check_stable(&sent);
                    }
                    if matches!(sent.operation, Operation::Write { .. }) {
                        self.oracle.acknowledged(&sent.changes);
                    }
                    self.oracle.ended(sent.changes.clone(), id, State::Done);
                    match sent.operation {
                        Operation::Flush => self.oracle.flushed(sent.then),
                        Operation::Write { fua: true } | Operation::WriteZeroes { fua: true } => {
                            self.oracle.stable(sent.changes, id);
                        }
                        _ => continue,
                    }
                    self.may_be_marked = false;
                }
                (_, Err(errno)) => {
                    let allowed = [Errno::CANCELED, Errno::NO_SPACE];
                    assert!(self.faulty || allowed.contains(&errno), "{errno} without a fault");
                    let may_be_full = self.spec.full == FullPolicy::Fail
                        && (self.faulty || !is_roomy(&self.spec))
                        || self.faulty && self.spec.mode.writes_in_place();
                    // A request that came before a change may have failed before it.
                    let may_be_full = may_be_full || id < self.changed;
                    assert!(errno != Errno::NO_SPACE || may_be_full, "ENOSPC with space: {:?}", self.disk);
                    self.oracle.ended(sent.changes, id, State::Failed);
                }
            }
        }
    }

    /// Written in place: what a request has promised to be stable is.
    fn check_stable(&self, sent: &Sent) {
        match sent.operation {
            Operation::Flush => {
                let missed = self.sim.unstable.iter().find(|&(_, &at)| at <= sent.landed);
                assert_eq!(missed, None, "a FLUSH is done: a block, and what changed it before");
            }
            Operation::Write { fua: true } | Operation::WriteZeroes { fua: true } => {
                let whole = sent.changes.start.div_ceil(BLOCK_SECTORS)..sent.changes.end / BLOCK_SECTORS;
                for block in whole {
                    let unstable = self.sim.unstable.get(&block).filter(|_| !self.sim.no_punching);
                    assert_eq!(unstable, None, "a FUA request is done: block {block}");
                }
            }
            _ => {}
        }
    }

    /// Ends one operation.
    pub fn end_operation(&mut self) {
        let (disk, sim) = (self.disk.as_mut().expect("there"), &mut self.sim);
        match sim.end_one() {
            Some(Ended::Read(op, result)) => disk.read_done(sim, op, result.as_deref().map_err(|e| *e)),
            Some(Ended::Other(op, result)) => disk.op_done(sim, op, result),
            None => {}
        }
        self.reap();
    }

    /// One turn of a reactor's loop; whether there is more to do.
    pub fn turn(&mut self) -> bool {
        self.now_ns += 1 + self.rng.below(100_000_000);
        let now = self.now_ns;
        let (disk, sim) = self.disk();
        disk.begin_turn(now);
        let more = disk.end_turn(sim, now);
        self.reap();
        more
    }

    /// What the test wants to break.
    pub fn sim(&mut self) -> &mut Sim {
        self.faulty = true;
        &mut self.sim
    }

    /// No more requests are to come.
    pub fn wind_down(&mut self) {
        self.disk().0.wind_down();
    }

    /// Says from what on the level is told of.
    pub fn set_thresholds(&mut self, warning_percent: u8, critical_percent: u8) {
        self.disk().0.set_thresholds(Thresholds { warning_percent, critical_percent }).expect("they can be");
    }

    /// The levels that were told of, one after the other.
    pub fn levels(&self) -> Vec<Level> {
        let level = |event: &Event| if let Event::Level(level, _) = event { Some(*level) } else { None };
        self.sim.events.iter().filter_map(level).collect()
    }

    /// How often this event was seen.
    pub fn seen(&self, event: Event) -> usize {
        self.sim.events.iter().filter(|&&e| e == event).count()
    }

    pub fn counters(&mut self) -> &Counters {
        self.disk().0.counters()
    }

    /// Reads one block.
    pub fn read_block(&mut self, block: u64) {
        self.send(Operation::Read, block * BLOCK_SECTORS, BLOCK_SECTORS, ZERO);
    }

    /// Writes one block whole.
    pub fn write_block(&mut self, block: u64) {
        self.version += 1;
        self.send(Operation::Write { fua: false }, block * BLOCK_SECTORS, BLOCK_SECTORS, self.version);
    }

    /// Does something to these sectors; a write gives them a version of their own.
    pub fn request(&mut self, operation: Operation, sector: u64, sectors: u64) {
        self.version += 1;
        self.send(operation, sector, sectors, self.version);
    }

    /// Whether this request is unfinished.
    pub fn is_unfinished(&self, request: u64) -> bool {
        self.sent.contains_key(&request)
    }

    /// Writes so many blocks from this one on in one request.
    pub fn write_blocks(&mut self, block: u64, n: u64) {
        self.version += 1;
        self.send(Operation::Write { fua: false }, block * BLOCK_SECTORS, n * BLOCK_SECTORS, self.version);
    }

    /// The same with blocks of zeroes among them.
    pub fn write_blocks_with_holes(&mut self, block: u64, n: u64) {
        self.version += 1;
        let (sector, sectors) = (block * BLOCK_SECTORS, n * BLOCK_SECTORS);
        self.send_with(Operation::Write { fua: false }, sector, sectors, self.version, true);
    }

    /// Asks for what has completed to be stable.
    pub fn flush(&mut self) {
        self.send(Operation::Flush, 0, 0, ZERO);
    }

    /// Brings everything to the medium, as whoever stops does.
    pub fn make_durable(&mut self) {
        assert_eq!(self.try_make_durable(), Ok(()));
        self.oracle.flushed(self.oracle.now);
        self.may_be_marked = false;
    }

    /// The same, whatever its result.
    pub fn try_make_durable(&mut self) -> Result<(), Errno> {
        for _ in 0..10_000 {
            let (disk, sim) = self.disk();
            if let Some(result) = disk.make_durable(sim) {
                return result;
            }
            self.end_operation();
            self.turn();
        }
        panic!("it is not put away: {:?}", self.disk);
    }

    /// All operations in flight fail.
    pub fn fail_all(&mut self) {
        assert!(self.sim.has_pending(), "nothing is in flight");
        self.faulty = true;
        self.sim.faults = 65_536;
        while self.sim.has_pending() {
            self.end_operation();
        }
        self.sim.faults = 0;
    }

    /// Discards so many blocks from this one on.
    pub fn discard(&mut self, block: u64, n: u64) {
        self.send(Operation::Discard, block * BLOCK_SECTORS, n * BLOCK_SECTORS, ZERO);
    }

    /// The client goes while what it sent is under way.
    pub fn withdraw_at_once(&mut self) {
        let (disk, sim) = self.disk();
        disk.cancel(sim, Errno::CANCELED, |_| true);
        self.rest();
    }

    /// Gives up what waits.
    pub fn cancel(&mut self) {
        self.cancel_all();
        self.rest();
    }

    pub fn is_large(&self) -> bool {
        self.spec.blocks() > 512
    }

    pub fn unfinished(&self) -> usize {
        self.sent.len()
    }

    /// Runs as long as a reactor would before it sleeps without a deadline.
    pub fn rest(&mut self) {
        let mut turns = 0;
        while self.turn() || self.sim.has_pending() {
            while self.sim.has_pending() {
                self.end_operation();
            }
            turns += 1;
            assert!(turns < 100_000, "the disk does not come to rest: {:?}", self.disk);
        }
    }

    /// Runs until nothing moves any more, deadlines included.
    pub fn settle(&mut self) {
        let mut rounds = 0;
        loop {
            let more = self.turn();
            if !more && !self.sim.has_pending() {
                let deadline = self.disk().0.deadline_ns();
                match deadline {
                    Some(ns) if rounds < 10_000 => self.now_ns = self.now_ns.max(ns),
                    _ => return,
                }
            }
            while self.sim.has_pending() {
                self.end_operation();
            }
            rounds += 1;
            assert!(rounds < 20_000, "the disk does not come to rest");
        }
    }

    /// A client goes: its requests end without anyone else's help.
    pub fn cancel_some(&mut self) {
        let (disk, sim) = self.disk();
        disk.cancel(sim, Errno::CANCELED, |t| t.0 % 2 == 0);
        disk.publish_gauges();
        let c = disk.counters();
        assert!(get(&c.waiting) <= get(&c.inflight), "none waits that has gone");
        self.reap();
        let mut turns = 0;
        while self.sent.keys().any(|id| id % 2 == 0) {
            if self.sim.has_pending() {
                self.end_operation();
            } else {
                self.turn();
                turns += 1;
                assert!(turns < 10_000, "canceled requests do not end: {:?}", self.disk);
            }
        }
    }

    /// A client stops its queue, and does not wait for the base image.
    pub fn stop(&mut self) {
        let is_its = |id: &u64| id.is_multiple_of(2);
        let its = self.sent.iter().filter(|(id, _)| is_its(id));
        let mut its: Vec<_> = its.map(|(&id, sent)| (id, sent.clone())).collect();
        its.sort_by_key(|&(id, _)| id);
        let (disk, sim) = self.disk();
        disk.cancel(sim, Errno::CANCELED, |t| is_its(&t.0));
        let next = disk.abandon_base_reads(sim, u64::MAX, |t| is_its(&t.0));
        assert_eq!(next, None, "none came later than at the end of time");
        self.reap();
        // Those that wait for something else end by themselves.
        its.retain(|(id, _)| !self.sent.contains_key(id));
        self.sim.count("stops of a queue");
        self.cut_off.extend(its.into_iter().map(|(_, sent)| sent));
    }

    /// The same; and the queue starts again, with what was not done, or anew.
    fn stop_and_start(&mut self) {
        self.stop();
        for _ in 0..self.rng.below(8) {
            self.end_operation();
        }
        if self.rng.chance(4) {
            self.cut_off.clear();
        }
        self.redo();
    }

    /// All clients go, with which a later turn begins.
    pub fn cancel_all_after(&mut self, ns: u64) {
        self.now_ns += ns;
        let now = self.now_ns;
        self.disk().0.begin_turn(now);
        self.cancel_all();
        self.disk().0.publish_gauges();
    }

    pub fn cancel_all(&mut self) {
        let (disk, sim) = self.disk();
        disk.cancel(sim, Errno::CANCELED, |_| true);
        self.reap();
    }

    /// The process dies and another attaches.
    pub fn crash(&mut self) {
        let c = self.counters();
        // While a RAM limit that has fallen is being reached the overflow has to take what leaves.
        let shrinks = get(&c.ram_used_bytes) > get(&c.ram_limit_bytes);
        if self.spec.mode.has_log() && self.rng.chance(8) && !shrinks {
            // Whoever starts the next one has another limit in mind.
            self.spec.overflow_limit_bytes = self.random_limit();
            self.sim.lengthen(&self.spec);
        }
        self.die();
        self.attach();
        // Some clients have an in-flight table, others are gone.
        if self.rng.chance(2) {
            self.redo();
        }
        self.cut_off.clear();
    }

    /// The same, with the limit as it is, and all clients are gone.
    pub fn attach_again(&mut self) {
        self.die();
        self.cut_off.clear();
        self.attach();
    }

    /// The process dies. What it has completed stays completed.
    pub fn die(&mut self) {
        self.disk = None;
        self.reap();
        self.sim.count("crashes");
        self.sim.crash();
        self.oracle.crash();
        let mut sent: Vec<_> = std::mem::take(&mut self.sent).into_iter().collect();
        sent.sort_by_key(|&(id, _)| id);
        // Those that it had not done again yet came later.
        for (_, sent) in sent.into_iter().rev() {
            self.cut_off.push_front(sent);
        }
    }

    /// Another process attaches to what the dead one left.
    pub fn attach(&mut self) {
        self.disk = Some(self.memory.attach(self.spec, self.data));
        // Slots beyond the limit may hold memory: the new process must look.
        self.shrinking |= self.highest_limit_bytes > self.spec.ram_limit_bytes;
        let generation = self.disk().0.generation();
        if generation != self.generation {
            assert!(self.resetting && generation == self.generation + 1, "generation {generation}");
            self.begin_generation();
        }
        self.resetting = false;
        self.disk().0.check();
    }

    /// Mode `persistent`: all processes die, and with `power` what was not on the medium is gone too. Others open the file.
    pub fn lose_all(&mut self, power: bool) {
        self.disk = None;
        self.reap();
        self.sim.count(if power { "power losses" } else { "deaths of all" });
        let live = self.memory.live(&self.spec);
        let reset = self.sim.open_again(live, power);
        assert!(!reset || self.may_be_marked, "there was no reset, or it is done");
        // If power was not lost, a mark may be off in memory alone: its removal was under way, and nobody has waited for it.
        self.may_be_marked &= !reset && !power;
        (self.sent, self.cut_off) = (HashMap::new(), VecDeque::new());
        match power {
            true => self.oracle.lose_power(),
            false => self.oracle.crash(),
        }
        if reset {
            self.oracle.reset();
        }
        // What is counted begins anew, with the generation.
        self.oracle.blocks_written.clear();
        (self.generation, self.resetting) = (1, false);
        self.memory.lose_meta();
        self.attach();
    }

    /// What was cut off is submitted again, in its order, as from an in-flight table.
    pub fn redo(&mut self) {
        while let Some(Sent { operation, sector, sectors, version, holes, .. }) = self.cut_off.pop_front() {
            self.send_with(operation, sector, sectors, version, holes);
        }
    }

    /// No client comes back for what was cut off.
    pub fn forget_cut_off(&mut self) {
        self.cut_off.clear();
    }

    /// Whether the disk's mode has an overflow log.
    pub fn has_log(&self) -> bool {
        self.spec.mode.has_log()
    }

    fn begin_generation(&mut self) {
        self.generation = self.disk().0.generation();
        self.resetting = false;
        self.oracle.reset();
        self.sim.forgotten = self.version;
        self.sim.unstable.clear();
    }

    fn random_limit(&mut self) -> u64 {
        let shape = self.spec.shape;
        let segments = random_segments(&mut self.rng, self.spec.blocks().into(), &shape);
        segments * self.spec.segment_bytes() + self.rng.below(self.spec.segment_bytes())
    }

    /// Asks for other limits; the file is long enough before. They are both granted, or nothing changes.
    pub fn set_limits(&mut self, ram_bytes: u64, overflow_bytes: u64) -> bool {
        let before = self.spec;
        let spec = DiskSpec { ram_limit_bytes: ram_bytes, overflow_limit_bytes: overflow_bytes, ..before };
        if spec.mode.has_log() {
            self.sim.lengthen(&spec);
        }
        let granted = self.disk().0.set_limits(ram_bytes, overflow_bytes).is_ok();
        if granted {
            self.changed = self.next;
            self.spec = spec;
            self.shrinking |= ram_bytes < before.ram_limit_bytes;
            self.highest_limit_bytes = self.highest_limit_bytes.max(ram_bytes);
        }
        let spec = *self.disk().0.spec();
        assert_eq!(spec, self.spec);
        granted
    }

    /// The same for the overflow alone.
    pub fn set_limit(&mut self, bytes: u64) -> bool {
        let changed = self.set_limits(self.spec.ram_limit_bytes, bytes);
        if changed {
            self.sim.count("changes of the overflow limit");
        }
        changed
    }

    /// The overflow's limit changes while the disk serves.
    fn change_limit(&mut self) {
        let bytes = self.random_limit();
        let spec = DiskSpec { overflow_limit_bytes: bytes, ..self.spec };
        let before = self.spec.overflow_limit_bytes;
        let may_grow = self.sim.drained && self.spec.mode.has_log();
        let c = self.counters();
        // What a lower RAM limit has sent on its way counts as what lives there.
        let live =
            get(&c.overflow_used_bytes) + get(&c.ram_used_bytes).saturating_sub(get(&c.ram_limit_bytes));
        if self.set_limit(bytes) {
            assert!(self.spec.mode.has_log());
        } else {
            assert!(!may_grow || bytes < before, "{before} cannot grow to {bytes}: {:?}", self.disk);
            // It can be lowered, unless what lives there, or is on its way, does not fit.
            let capacity = capacity_bytes(&spec).saturating_sub(64 * BLOCK_BYTES as u64);
            assert!(!may_grow || self.sim.no_punching || live > capacity, "{bytes}: {:?}", self.disk);
        }
        let limit = get(&self.counters().overflow_limit_bytes);
        if self.spec.mode.has_log() {
            let rest = self.spec.overflow_limit_bytes % self.spec.segment_bytes();
            assert_eq!(limit, self.spec.overflow_limit_bytes - rest);
        }
        self.disk().0.check();
    }

    /// At rest the file is within its limit, unless more lives in the log than may, or it cannot shrink.
    fn check_limit(&mut self) {
        let (faulty, no_punching) = (self.faulty, self.sim.no_punching);
        let spec = self.spec;
        let c = self.disk().0.counters();
        let (live, file) = (get(&c.overflow_used_bytes), get(&c.overflow_file_bytes));
        if spec.mode.has_log() && !faulty && !no_punching && live <= capacity_bytes(&spec) {
            assert!(file <= spec.overflow_limit_bytes, "{file} bytes in the file: {spec:?}, {:?}", self.disk);
        }
    }

    pub fn reset(&mut self) {
        if self.spec.mode == Mode::Ephemeral {
            return;
        }
        self.cancel_all();
        let mut turns = 0;
        while !self.sent.is_empty() {
            self.end_operation();
            self.turn();
            turns += 1;
            assert!(turns < 100_000, "requests outlive cancel: {:?}", self.disk);
        }
        (self.resetting, self.may_be_marked) = (true, true);
        let mut turns = 0;
        loop {
            let (disk, sim) = self.disk();
            if disk.reset(sim) {
                break;
            }
            if self.rng.chance(10) {
                if self.spec.mode == Mode::Persistent && self.rng.chance(2) {
                    let power = self.rng.chance(2);
                    self.lose_all(power);
                } else {
                    self.crash();
                }
                return;
            }
            self.end_operation();
            self.turn();
            turns += 1;
            assert!(turns < 100_000, "the reset does not end: {:?}", self.disk);
        }
        self.sim.count("resets");
        self.begin_generation();
        self.check();
    }

    /// A reset of a disk at rest from its beginning to its end.
    pub fn reset_at_once(&mut self) -> bool {
        (self.resetting, self.may_be_marked) = (true, true);
        loop {
            let (disk, sim) = self.disk();
            if disk.reset(sim) {
                self.begin_generation();
                return true;
            }
            self.end_operation();
            self.turn();
        }
    }

    /// No start finds the mark of a reset any more.
    pub fn forget_mark(&mut self) {
        self.may_be_marked = false;
    }

    /// A reset of a disk without requests, during which no operation ends. Whether I/O of a dead process may land still.
    pub fn reset_meanwhile(&mut self) -> bool {
        (self.resetting, self.may_be_marked) = (true, true);
        for _ in 0..100 {
            let (disk, sim) = self.disk();
            if disk.reset(sim) {
                self.begin_generation();
                self.check();
                return self.sim.is_haunted();
            }
            self.turn();
        }
        panic!("the reset waits for what is under way: {:?}", self.disk);
    }

    /// What a reset by force does of a disk whose requests wait for space. Whether it was done before a barrier's end.
    pub fn reset_by_force(&mut self) -> bool {
        self.turn();
        for _ in 0..1_000 {
            let (disk, sim) = self.disk();
            if disk.only_waits_for_space_or_drain() {
                disk.cancel(sim, Errno::CANCELED, |_| true);
                self.reap();
                assert!(self.sent.is_empty(), "requests outlive it");
                (self.resetting, self.may_be_marked) = (true, true);
                let (disk, sim) = self.disk();
                if disk.reset(sim) {
                    self.begin_generation();
                    return !self.sim.drained;
                }
            }
            self.end_operation();
            self.turn();
        }
        panic!("the reset does not end");
    }

    /// A reset of a disk at rest is begun, and the process dies.
    pub fn cut_off_reset(&mut self) {
        (self.resetting, self.may_be_marked) = (true, true);
        let (disk, sim) = self.disk();
        assert!(!disk.reset(sim), "it is done at once");
        self.attach_again();
    }

    /// Every sector once, by reads.
    pub fn read_all(&mut self) {
        let faults = std::mem::replace(&mut self.sim.faults, 0);
        self.sim.no_space = false;
        self.settle();
        self.cancel_all();
        self.settle();
        assert!(self.sent.is_empty(), "requests outlive cancel: {:?}", self.disk().0);
        let sectors = self.spec.size_bytes / SECTOR_BYTES;
        let id = self.next;
        self.next += 1;
        let data = vec![0xEE; (sectors * SECTOR_BYTES) as usize];
        self.sim.clients.insert(id, Client { data, result: None });
        let read = Sent {
            operation: Operation::Read,
            sector: 0,
            sectors,
            version: ZERO,
            holes: false,
            changes: 0..0,
            landed: 0,
            then: 0,
        };
        self.sent.insert(id, read);
        let request =
            Request { token: Token(id), operation: Operation::Read, sector: 0, sectors: sectors as u32 };
        let (disk, sim) = self.disk();
        disk.submit(sim, request);
        self.reap();
        self.settle();
        assert!(self.sent.is_empty(), "a read waits for nothing");
        self.sim.faults = faults;
        self.disk().0.check();
    }

    /// The RAM limit or the full policy changes.
    fn change(&mut self) {
        self.changed = self.next;
        if self.rng.chance(3) {
            self.spec.full = if self.rng.chance(2) { FullPolicy::Pause } else { FullPolicy::Fail };
            let full = self.spec.full;
            self.disk().0.set_full_policy(full);
            self.sim.count("changes of the policy");
            return;
        }
        let most = self.data.bytes / BLOCK_BYTES as u64;
        let slots = if self.rng.chance(2) { self.rng.below(most + 4) } else { self.rng.below(40) };
        if self.rng.chance(3) {
            let overflow = self.random_limit();
            if self.set_limits(slots * BLOCK_BYTES as u64, overflow) {
                self.sim.count("changes of both limits");
            }
            self.disk().0.check();
        } else {
            self.set_ram_slots(slots);
        }
        if self.rng.chance(4) {
            self.read_all();
            if !self.faulty {
                self.check_shrunk();
            }
        }
    }

    /// Asks for another RAM limit; whether it was granted.
    pub fn set_ram_slots(&mut self, slots: u64) -> bool {
        // The gauge is that of the last turn.
        self.turn();
        let (before, bytes) = (self.spec.ram_limit_bytes, slots * BLOCK_BYTES as u64);
        let used = get(&self.counters().ram_used_bytes);
        let granted = self.set_limits(bytes, self.spec.overflow_limit_bytes);
        if granted {
            self.sim.count("changes of the RAM limit");
        }
        let possible = self.spec.mode.has_ram() && slots >= 16 && bytes <= self.data.bytes;
        assert!(
            granted || !possible || bytes < used.min(before),
            "{slots} slots were refused: {:?}",
            self.disk
        );
        assert!(!granted || possible || bytes == before);
        assert!(!granted || self.spec.mode != Mode::Ram || used <= bytes, "what is in use finds no place");
        granted
    }

    /// Does one thing.
    pub fn step(&mut self) {
        match self.rng.below(1_000) {
            0 if self.spec.mode == Mode::Persistent && self.rng.chance(2) => {
                let power = self.rng.chance(2);
                self.lose_all(power);
            }
            0 => self.crash(),
            1 if self.rng.chance(3) => self.reset(),
            2 if self.rng.chance(5) => self.read_all(),
            3 if self.rng.chance(3) => self.cancel_all(),
            3 if self.rng.chance(2) => self.stop_and_start(),
            3 => self.cancel_some(),
            4 if self.rng.chance(2) => self.change(),
            4 => self.stuck = 500,
            5 if self.rng.chance(2) => self.change_limit(),
            5 if self.faulty && self.rng.chance(3) => {
                self.sim.no_space = !self.sim.no_space;
                self.sim.count("changes of a file system to full or back");
            }
            6..=250 if self.sent.len() < 32 => self.submit(),
            _ if self.sent.len() < 8 => self.submit(),
            251..=500 => {
                self.turn();
            }
            _ => self.end_operation(),
        }
        self.check_memory();
        self.stuck += 1;
        if self.stuck > 500 {
            // Writes wait for space that nobody frees; or somebody has been forgotten.
            self.rest();
            let healthy = !self.faulty;
            self.disk().0.check_rest(healthy);
            let all_done = self.sent.is_empty() || self.faulty || !is_roomy(&self.spec);
            assert!(all_done, "requests are left behind: {:?}", self.disk);
            let parked = self.disk().0.only_waits_for_space();
            assert!(parked, "at rest, but a stop or a reset would wait: {:?}", self.disk);
            self.sim.no_space = false;
            self.settle();
            self.check_limit();
            self.cancel_all();
            self.stuck = 0;
            if healthy {
                self.settle();
                self.check_shrunk();
            }
        }
    }
}

/// Whether a write with holes leaves the block of this sector all zeroes.
fn is_hole(version: oracle::Version, sector: u64) -> bool {
    (sector / BLOCK_SECTORS + u64::from(version)).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 60 == 0
}
