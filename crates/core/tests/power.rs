//! What is left of a disk in mode `persistent`, whose map has many pages, after everything that it can be found after: power
//! losses, its file system mounted anew in the same boot, copies of the file, deaths of all processes, pages of the live map
//! that the kernel could not write. What was flushed is there, or something later; in the same page cache what was completed.
//!
//! Owns a medium of sparse blocks, the page cache of the live map, which reaches the medium at any time, and a plain record of
//! what each block may be. The model test does the same on disks of one page with all operations and faults; here rounds of
//! FLUSH take several staging buffers.

#![allow(clippy::unwrap_used, reason = "a test that fails here has failed")]

#[path = "model/rng.rs"]
#[allow(dead_code, reason = "the model uses more of it")]
mod rng;

use rng::{Rng, seed};
use spillway_core::{
    BLOCK_BYTES, BLOCK_SECTORS, CacheId, Disk, DiskSpec, Errno, Event, FileMap, FullPolicy, GuestBuffers, Io,
    Layout, LogShape, Meta, Mode, OpId, Operation, PARTS, PartId, RESET_MARK, Request, STATE_PAGE_BLOCKS,
    Slot, StateMap, Token, find_bad_state, state_map_bytes,
};
use std::collections::{BTreeMap, HashMap};

/// Pages of the map; a staging buffer takes few of them.
const PAGES: u32 = 21;
const BLOCKS: u32 = PAGES * STATE_PAGE_BLOCKS - 7;
const SHAPE: LogShape = LogShape { segment_blocks: 16, part_blocks: 4 };
/// Where the durable map begins in the medium's numbering of blocks, its mark first.
const MAP_AT: u64 = 1 << 40;
/// Where the live map is.
const LIVE_AT: u64 = 1 << 41;

/// What a block holds: the number of the write, 0 for zeroes.
type Content = u64;
/// What every block of the image holds.
const IMAGE: Content = u64::MAX;

fn bytes(content: Content) -> Vec<u8> {
    content.to_le_bytes().repeat(BLOCK_BYTES / 8)
}

/// The medium: of each block what is stable, and what was written since.
#[derive(Default)]
struct Medium {
    now: HashMap<u64, Vec<u8>>,
    /// Earlier contents, with the number of the change that superseded each.
    past: BTreeMap<u64, Vec<(u64, Vec<u8>)>>,
    changes: u64,
}

impl Medium {
    fn read(&self, block: u64) -> Vec<u8> {
        self.now.get(&block).cloned().unwrap_or_else(|| vec![0; BLOCK_BYTES])
    }

    fn write(&mut self, block: u64, content: Vec<u8>, stable: bool) {
        self.changes += 1;
        let old = self.now.insert(block, content).unwrap_or_else(|| vec![0; BLOCK_BYTES]);
        if stable {
            self.past.remove(&block);
        } else {
            self.past.entry(block).or_default().push((self.changes, old));
        }
    }

    fn synced(&mut self, changes: u64) {
        self.past.retain(|_, past| {
            past.retain(|&(by, _)| by > changes);
            !past.is_empty()
        });
    }

    /// Any of its contents, by sectors in the map and whole elsewhere.
    fn lose_power(&mut self, rng: &mut Rng) {
        for (block, past) in std::mem::take(&mut self.past) {
            let now = self.now.get_mut(&block).unwrap();
            let unit = if block >= MAP_AT { 512 } else { BLOCK_BYTES };
            for (i, piece) in now.chunks_exact_mut(unit).enumerate() {
                if let Some((_, old)) = past.get(rng.below(past.len() as u64 + 1) as usize) {
                    piece.copy_from_slice(&old[i * unit..][..unit]);
                }
            }
        }
    }
}

enum Pending {
    Read(u64, u32),
    Write(PartId, usize, u64, u32, bool),
    Punch(u64, u64),
    Sync(u64),
    Drain,
}

struct Host {
    medium: Medium,
    /// The page cache of the live map.
    live: Vec<u64>,
    /// One of so many pages of it cannot be written; 0 for none.
    loses_one_in: u64,
    /// One could not, and nobody has been told yet.
    lost: bool,
    rng: Rng,
    parts: Vec<Vec<u8>>,
    pending: Vec<(OpId, Pending)>,
    /// By token: what a write writes, and what a read found.
    contents: HashMap<u64, Content>,
    completed: Vec<(u64, Result<(), Errno>)>,
    syncs: u64,
}

impl Host {
    fn live_page(&mut self, page: u32) -> *mut u8 {
        aligned(&mut self.live).wrapping_add(page as usize * BLOCK_BYTES)
    }

    fn read_live(&mut self, page: u32) -> Vec<u8> {
        let mut bytes = vec![0; BLOCK_BYTES];
        // SAFETY: the map has so many pages; the disk, which stores to them, is not being called.
        unsafe { self.live_page(page).copy_to(bytes.as_mut_ptr(), BLOCK_BYTES) };
        bytes
    }

    fn set_live(&mut self, page: u32, bytes: &[u8]) {
        assert_eq!(bytes.len(), BLOCK_BYTES);
        // SAFETY: the same.
        unsafe { self.live_page(page).copy_from(bytes.as_ptr(), BLOCK_BYTES) };
    }

    /// The kernel writes a page of the live map, or cannot: then it takes it for written, and reads what was there before.
    fn write_back(&mut self, page: u32) {
        let (bytes, at) = (self.read_live(page), LIVE_AT + u64::from(page));
        let before = self.medium.read(at);
        if bytes == before {
            return;
        }
        if self.loses_one_in > 0 && self.rng.below(self.loses_one_in) == 0 {
            self.set_live(page, &before);
            self.lost = true;
        } else {
            self.medium.write(at, bytes, false);
        }
    }
}

impl GuestBuffers for Host {
    fn copy_from_guest(&mut self, _: Token, _: u32, _: &mut [u8]) -> Result<(), Errno> {
        unreachable!("only whole blocks are written")
    }
    fn copy_to_guest(&mut self, token: Token, _: u32, from: &[u8]) -> Result<(), Errno> {
        let content = Content::from_le_bytes(from[..8].try_into().unwrap());
        assert!(from == bytes(content), "it is of two writes");
        self.contents.insert(token.0, content);
        Ok(())
    }
    fn zero_guest(&mut self, token: Token, _: u32, _: u32) -> Result<(), Errno> {
        self.contents.insert(token.0, 0);
        Ok(())
    }
    fn complete(&mut self, token: Token, result: Result<(), Errno>) {
        assert!(result.is_ok() || self.loses_one_in > 0, "{result:?}");
        self.completed.push((token.0, result));
    }
}

impl Io for Host {
    fn slot(&mut self, _: Slot) -> &mut [u8] {
        unreachable!()
    }
    fn guest_to_slot(&mut self, _: Token, _: u32, _: Slot, _: usize, _: usize) -> Result<bool, Errno> {
        unreachable!()
    }
    fn slot_to_guest(&mut self, _: Token, _: u32, _: Slot, _: usize, _: usize) -> Result<(), Errno> {
        unreachable!()
    }
    fn guest_to_part(
        &mut self,
        token: Token,
        _: u32,
        part: PartId,
        at: usize,
        len: usize,
    ) -> Result<(), Errno> {
        let content = bytes(self.contents[&token.0]);
        self.parts[part.0 as usize][at..at + len].copy_from_slice(&content[..len]);
        Ok(())
    }
    fn slot_to_part(&mut self, _: Slot, _: PartId, _: usize) {
        unreachable!()
    }
    fn part(&mut self, part: PartId) -> &mut [u8] {
        &mut self.parts[part.0 as usize]
    }
    fn release_slots(&mut self, _: &[Slot]) {}
    fn release_meta(&mut self, _: std::ops::Range<u64>) {}
    fn base_to_guest(&mut self, token: Token, _: u32, _: u64, _: u32) -> Option<Result<(), Errno>> {
        self.contents.insert(token.0, IMAGE);
        Some(Ok(()))
    }
    fn read_base(&mut self, _: OpId, _: u64, _: u32) {
        unreachable!("it is read at once")
    }
    fn read_overflow(&mut self, op: OpId, offset: u64, len: u32) {
        self.pending.push((op, Pending::Read(offset / BLOCK_BYTES as u64, len / BLOCK_BYTES as u32)));
    }
    fn write_overflow(&mut self, op: OpId, part: PartId, at: usize, offset: u64, len: u32, sync: bool) {
        let (block, blocks) = (offset / BLOCK_BYTES as u64, len / BLOCK_BYTES as u32);
        self.pending.push((op, Pending::Write(part, at, block, blocks, sync)));
    }
    fn write_map(&mut self, op: OpId, part: PartId, at: usize, page: u32, pages: u32, sync: bool) {
        self.pending.push((op, Pending::Write(part, at, MAP_AT + u64::from(page), pages, sync)));
    }
    fn punch_overflow(&mut self, op: OpId, offset: u64, len: u64) {
        self.pending.push((op, Pending::Punch(offset / BLOCK_BYTES as u64, len / BLOCK_BYTES as u64)));
    }
    fn sync_overflow(&mut self, op: OpId) {
        self.syncs += 1;
        (0..PAGES).for_each(|page| self.write_back(page));
        self.pending.push((op, Pending::Sync(self.medium.changes)));
    }
    fn drain_overflow(&mut self, op: OpId) {
        self.pending.push((op, Pending::Drain));
    }
    fn event(&mut self, event: Event) {
        assert!(self.loses_one_in > 0, "{event:?}");
    }
}

/// What a block may be after a power loss: the newest that is stable, then all that came after.
struct Expected {
    contents: Vec<(Content, Option<u64>)>,
}

/// What the file is found after.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum After {
    /// Only the processes have died.
    Death,
    /// The host has booted.
    Power,
    /// Its file system was shut down, and mounted again.
    Mount,
    /// A snapshot of the volume is mounted beside it.
    Snapshot,
    /// The file is a copy, in the same file system.
    Copy,
}

/// What tells one page cache from another.
#[derive(Clone, Copy, Debug)]
struct Cache {
    boot: u32,
    mount: u32,
    inode: u32,
}

type Naming = fn(Cache) -> [u32; 4];

struct Machine {
    spec: DiskSpec,
    disk: Option<Disk>,
    host: Host,
    rng: Rng,
    meta: Vec<u64>,
    cache: Cache,
    /// How a page cache is named.
    named: Naming,
    /// What the file's header says.
    recorded: Option<CacheId>,
    /// The last request before the kernel lost a page of the live map, unless a FLUSH has ended well that came after it.
    lost_at: Option<u64>,
    expected: BTreeMap<u32, Expected>,
    /// What each unfinished request is, and when it came.
    sent: HashMap<u64, (Operation, u32, Content, u64)>,
    token: u64,
    ended: u64,
    now_ns: u64,
}

fn aligned(memory: &mut [u64]) -> *mut u8 {
    let start = memory.as_mut_ptr().cast::<u8>();
    start.wrapping_add(start.align_offset(4096))
}

impl Machine {
    fn new(rng: Rng) -> Machine {
        let spec = DiskSpec {
            size_bytes: u64::from(BLOCKS) * BLOCK_BYTES as u64,
            base_bytes: u64::from(BLOCKS) * BLOCK_BYTES as u64,
            mode: Mode::Persistent,
            full: FullPolicy::Pause,
            ram_limit_bytes: 0,
            overflow_limit_bytes: 0,
            shape: SHAPE,
        };
        let (live, seed) = (vec![0; (state_map_bytes(BLOCKS) as usize + 4096) / 8], rng.0);
        let host = Host {
            medium: Medium::default(),
            live,
            loses_one_in: 0,
            lost: false,
            rng: Rng(!seed),
            parts: vec![vec![0; SHAPE.part_blocks as usize * BLOCK_BYTES]; PARTS],
            pending: Vec::new(),
            contents: HashMap::new(),
            completed: Vec::new(),
            syncs: 0,
        };
        let mut machine = Machine {
            spec,
            disk: None,
            host,
            rng,
            meta: vec![0; (Layout::of(&spec).len_bytes() as usize + 4096) / 8],
            cache: Cache { boot: 1, mount: 1, inode: 1 },
            named: |cache| [cache.boot, cache.mount, cache.inode, 0],
            recorded: None,
            lost_at: None,
            expected: BTreeMap::new(),
            sent: HashMap::new(),
            token: 0,
            ended: 0,
            now_ns: 1,
        };
        machine.start();
        machine
    }

    /// The supervisor makes the file ready.
    fn start(&mut self) {
        let mut name = [0; 16];
        name.chunks_mut(4)
            .zip((self.named)(self.cache))
            .for_each(|(to, n)| to.copy_from_slice(&n.to_le_bytes()));
        let now = Some(CacheId(name));
        if FileMap::to_start_from(self.recorded, now) == FileMap::Durable {
            for page in 0..PAGES {
                let durable = self.host.medium.read(MAP_AT + 1 + u64::from(page));
                self.host.set_live(page, &durable);
            }
        }
        for page in 0..PAGES {
            let live = self.host.read_live(page);
            assert_eq!(find_bad_state(&live), None);
            self.host.medium.write(LIVE_AT + u64::from(page), live, false);
        }
        // An fsync, the header, and another one.
        self.host.medium.past.clear();
        self.recorded = now;
        self.meta.fill(0);
        self.attach();
    }

    /// A worker attaches to the memory as it is.
    fn attach(&mut self) {
        let (meta, live) = (aligned(&mut self.meta), aligned(&mut self.host.live));
        // SAFETY: both are long enough, are not moved, and outlive the disk; nobody else touches them while it lives.
        let disk = unsafe {
            let (meta, existing) = Meta::open(meta, &self.spec, 1).unwrap();
            Disk::attach_persistent(meta, existing, self.spec, StateMap::new(live, BLOCKS))
        };
        self.disk = Some(disk.unwrap());
    }

    /// Everything ends, and somebody opens the file, or what is the file now.
    fn find_again(&mut self, after: After) {
        self.disk = None;
        // What was under way has reached the medium or not.
        for (_, pending) in std::mem::take(&mut self.host.pending) {
            if self.rng.below(2) == 0 {
                self.host.land(&pending);
            }
        }
        if after != After::Death {
            self.host.medium.lose_power(&mut self.rng);
            for page in 0..PAGES {
                let found = self.host.medium.read(LIVE_AT + u64::from(page));
                self.host.set_live(page, &found);
            }
        }
        let cache = &mut self.cache;
        match after {
            After::Death => {}
            After::Power => (cache.boot, cache.mount) = (cache.boot + 1, cache.mount + 1),
            After::Mount | After::Snapshot => cache.mount += 1,
            After::Copy => cache.inode += 1,
        }
        let mark = self.host.medium.read(MAP_AT).starts_with(&RESET_MARK);
        assert!(!mark, "nobody has reset it");
        let strict = after == After::Death && self.lost_at.is_none();
        (self.host.lost, self.lost_at) = (false, None);
        self.sent.clear();
        self.host.completed.clear();
        self.start();
        self.compare(after, strict);
    }

    /// Each block is one of what it may be: what was completed last, if that counts, or flushed last, or something later. What
    /// was found after a death is what was completed last, and not flushed yet: what was under way may still be in the file.
    fn compare(&mut self, after: After, completed: bool) {
        for block in self.expected.keys().copied().collect::<Vec<_>>() {
            let found = self.read(block);
            let expected = self.expected.get_mut(&block).unwrap();
            let last = expected.contents.iter().rposition(|(_, done)| done.is_some()).unwrap();
            let first = if completed { last } else { 0 };
            let at = expected.contents.iter().rposition(|&(content, _)| content == found);
            let Some(at) = at.filter(|&at| at >= first) else {
                panic!("after {after:?} block {block} is {found}, of {:?}", &expected.contents[first..]);
            };
            expected.contents.remove(at);
            if after != After::Death {
                expected.contents.clear();
            }
            expected.contents.push((found, Some(self.ended)));
        }
    }

    /// The worker dies, and another one takes over: what was completed is there.
    fn lose_worker(&mut self) {
        self.disk = None;
        for (_, pending) in std::mem::take(&mut self.host.pending) {
            if self.rng.below(2) == 0 {
                self.host.land(&pending);
            }
        }
        self.host.completed.clear();
        self.sent.clear();
        self.attach();
        self.compare(After::Death, true);
    }

    fn read(&mut self, block: u32) -> Content {
        let token = self.send(Operation::Read, block, 0);
        while self.sent.contains_key(&token) {
            self.turn();
            self.end_one();
        }
        self.host.contents.remove(&token).unwrap()
    }

    fn send(&mut self, operation: Operation, block: u32, content: Content) -> u64 {
        self.token += 1;
        let token = self.token;
        let (sector, sectors) = match operation {
            Operation::Flush => (0, 0),
            _ => (u64::from(block) * BLOCK_SECTORS, BLOCK_SECTORS as u32),
        };
        if !matches!(operation, Operation::Read | Operation::Flush) {
            let expected =
                self.expected.entry(block).or_insert_with(|| Expected { contents: vec![(IMAGE, Some(0))] });
            expected.contents.push((content, None));
        }
        self.host.contents.insert(token, content);
        self.sent.insert(token, (operation, block, content, self.ended));
        let request = Request { token: Token(token), operation, sector, sectors };
        self.disk.as_mut().unwrap().submit(&mut self.host, request);
        self.reap();
        token
    }

    fn reap(&mut self) {
        if self.host.lost && self.lost_at.is_none_or(|at| at < self.token) {
            self.lost_at = Some(self.token);
        }
        for (token, result) in std::mem::take(&mut self.host.completed) {
            self.ended += 1;
            let (operation, block, content, then) = self.sent.remove(&token).unwrap();
            let done = |expected: &Expected| {
                expected.contents.iter().rposition(|&(_, d)| d.is_some_and(|d| d <= then))
            };
            match operation {
                Operation::Read => continue,
                // It may be there or not.
                _ if result.is_err() => {}
                Operation::Flush => {
                    if self.lost_at.is_some_and(|at| at < token) {
                        self.lost_at = None;
                    }
                    for expected in self.expected.values_mut() {
                        let stable = done(expected).unwrap_or(0);
                        expected.contents.drain(..stable);
                    }
                }
                _ => {
                    let expected = self.expected.get_mut(&block).unwrap();
                    let of = |&(c, done): &(Content, Option<u64>)| c == content && done.is_none();
                    let i = expected.contents.iter().position(of).unwrap();
                    expected.contents[i].1 = Some(self.ended);
                    if matches!(
                        operation,
                        Operation::Write { fua: true } | Operation::WriteZeroes { fua: true }
                    ) {
                        expected.contents.drain(..i);
                    }
                }
            }
            self.host.contents.remove(&token);
        }
    }

    fn turn(&mut self) {
        self.now_ns += 10_000;
        let disk = self.disk.as_mut().unwrap();
        disk.begin_turn(self.now_ns);
        disk.end_turn(&mut self.host, self.now_ns);
        self.reap();
    }

    fn end_one(&mut self) {
        if self.host.pending.is_empty() {
            return;
        }
        let i = self.rng.below(self.host.pending.len() as u64) as usize;
        let (op, pending) = self.host.pending.swap_remove(i);
        let disk = self.disk.as_mut().unwrap();
        if let Pending::Read(block, blocks) = pending {
            let found: Vec<u8> =
                (block..block + u64::from(blocks)).flat_map(|b| self.host.medium.read(b)).collect();
            disk.read_done(&mut self.host, op, Ok(&found));
        } else {
            self.host.land(&pending);
            let reports_loss = matches!(pending, Pending::Sync(_) | Pending::Write(_, _, _, _, true));
            let lost = reports_loss && std::mem::take(&mut self.host.lost);
            disk.op_done(&mut self.host, op, if lost { Err(Errno::IO) } else { Ok(()) });
        }
        self.reap();
    }

    /// Some of everything, half of it on few blocks of each page so that they meet.
    fn step(&mut self) {
        if self.sent.len() < 40 && self.rng.below(2) == 0 {
            let of_page = [20, 120][self.rng.below(2) as usize];
            let block =
                self.rng.below(PAGES.into()) as u32 * STATE_PAGE_BLOCKS + self.rng.below(of_page) as u32 * 31;
            let content = self.token + 1;
            let fua = self.rng.below(6) == 0;
            let (operation, content) = match self.rng.below(20) {
                0 => (Operation::Flush, 0),
                1 => (Operation::Discard, 0),
                2 => (Operation::WriteZeroes { fua }, 0),
                3 => (Operation::Read, 0),
                _ => (Operation::Write { fua }, content),
            };
            self.send(operation, block, content);
        } else if self.rng.below(4) == 0 {
            self.turn();
        } else if self.rng.below(20) == 0 {
            let page = self.rng.below(PAGES.into()) as u32;
            self.host.write_back(page);
        } else {
            self.end_one();
        }
    }
}

impl Host {
    fn land(&mut self, pending: &Pending) {
        match *pending {
            Pending::Write(part, at, block, blocks, sync) => {
                for i in 0..blocks as usize {
                    let page = self.parts[part.0 as usize][at + i * BLOCK_BYTES..][..BLOCK_BYTES].to_vec();
                    self.medium.write(block + i as u64, page, sync);
                }
            }
            Pending::Punch(block, blocks) => {
                let held = self.medium.now.keys().copied();
                let mut held: Vec<_> = held.filter(|at| (block..block + blocks).contains(at)).collect();
                held.sort_unstable();
                for block in held {
                    self.medium.write(block, vec![0; BLOCK_BYTES], false);
                }
            }
            Pending::Sync(changes) => self.medium.synced(changes),
            Pending::Read(..) | Pending::Drain => {}
        }
    }
}

/// Lives of a machine, each of which ends in one of these ways.
fn live_and_find_again(machine: &mut Machine, lives: u32, ends: &[After]) {
    for _ in 0..lives {
        let steps = machine.rng.below(1_500);
        (0..steps).for_each(|_| machine.step());
        machine.disk.as_ref().unwrap().check();
        if machine.rng.below(4) == 0 {
            machine.lose_worker();
            (0..steps / 2).for_each(|_| machine.step());
        }
        let after = ends[machine.rng.below(ends.len() as u64) as usize];
        machine.find_again(after);
    }
}

const ALL: [After; 5] = [After::Death, After::Power, After::Mount, After::Snapshot, After::Copy];

#[test]
fn what_was_promised_is_there_after_whatever_it_is_found_after() {
    let seed = seed();
    for seed in seed..seed + 6 {
        live_and_find_again(&mut Machine::new(Rng(seed)), 10, &ALL);
    }
}

/// The kernel may fail to write a page of the live map, say so once, and forget what it was.
#[test]
fn pages_of_the_live_map_that_were_lost_take_nothing_that_was_flushed() {
    let seed = seed();
    for seed in seed..seed + 6 {
        let mut machine = Machine::new(Rng(seed));
        machine.host.loses_one_in = [4, 50][(seed % 2) as usize];
        live_and_find_again(&mut machine, 10, &ALL);
    }
}

/// The kernel says once that a page was lost, and here it says so to a FUA write while an fdatasync is under way that has left
/// the page out: that one's end is no promise.
#[test]
fn an_fdatasync_beside_a_write_that_was_told_of_a_lost_page_does_not_count() {
    let mut machine = Machine::new(Rng(1));
    let finish = |machine: &mut Machine, token: u64| {
        while machine.sent.contains_key(&token) {
            machine.end_one();
            machine.turn();
        }
    };
    let write = machine.send(Operation::Write { fua: false }, 1, 7);
    finish(&mut machine, write);
    machine.host.loses_one_in = 1;
    let flush = machine.send(Operation::Flush, 0, 0);
    for block in [STATE_PAGE_BLOCKS, STATE_PAGE_BLOCKS + 1] {
        // Of the flush's two fdatasyncs each leaves the page out.
        machine.host.loses_one_in = 1;
        while !machine.host.lost && machine.sent.contains_key(&flush) {
            machine.end_one();
            machine.turn();
        }
        machine.host.loses_one_in = u64::MAX;
        let begun = std::mem::take(&mut machine.host.pending);
        let fua = machine.send(Operation::Write { fua: true }, block, u64::from(block));
        finish(&mut machine, fua);
        assert!(!machine.host.lost, "it was told");
        machine.host.pending.extend(begun);
    }
    finish(&mut machine, flush);
    // Lost once more: what the medium has counts.
    machine.host.loses_one_in = 1;
    machine.host.write_back(0);
    machine.reap();
    machine.find_again(After::Death);
}

/// A page cache that is named by less than all that tells it from another: the model sees what that costs.
#[test]
fn what_names_a_page_cache_is_all_needed() {
    let names: [(After, Naming); 4] = [
        (After::Power, |cache| [0, 0, cache.inode, 0]),
        (After::Mount, |cache| [cache.boot, 0, cache.inode, 0]),
        (After::Snapshot, |cache| [cache.boot, 0, cache.inode, 0]),
        (After::Copy, |cache| [cache.boot, cache.mount, 0, 0]),
    ];
    for (after, named) in names {
        let caught = std::panic::catch_unwind(|| {
            let mut machine = Machine::new(Rng(7));
            machine.named = named;
            // The name of the first start was another.
            machine.find_again(After::Power);
            live_and_find_again(&mut machine, 10, &[after]);
        });
        let text = caught.expect_err("nothing was lost").downcast::<String>().unwrap();
        assert!(text.contains(&format!("after {after:?} block ")), "{text}");
    }
}

/// A FLUSH with nothing new in the map is one fdatasync, with some two, and one more for each staging buffer of pages.
#[test]
fn a_flush_syncs_as_often_as_it_must() {
    let finish = |machine: &mut Machine| {
        while !machine.sent.is_empty() {
            machine.end_one();
            machine.turn();
        }
    };
    let flush = |machine: &mut Machine, blocks: &[u32]| {
        for &block in blocks {
            machine.send(Operation::Write { fua: false }, block, 1 + u64::from(block));
        }
        finish(machine);
        let before = machine.host.syncs;
        machine.send(Operation::Flush, 0, 0);
        finish(machine);
        machine.host.syncs - before
    };
    let mut machine = Machine::new(Rng(1));
    assert_eq!(flush(&mut machine, &[]), 1);
    assert_eq!(flush(&mut machine, &[1, 2, 3]), 2);
    assert_eq!(flush(&mut machine, &[1, 2, 3]), 1, "they are in the map already");
    let pages: Vec<u32> = (0..9).map(|page| page * STATE_PAGE_BLOCKS).collect();
    assert_eq!(flush(&mut machine, &pages[1..]), 1 + 8_u64.div_ceil(SHAPE.part_blocks.into()));
    // What waits meanwhile shares the next round.
    let before = machine.host.syncs;
    (0..10).for_each(|_| _ = machine.send(Operation::Flush, 0, 0));
    finish(&mut machine);
    assert_eq!(machine.host.syncs - before, 2);
}

/// Whoever stops leaves nothing behind that a power loss could take.
#[test]
fn after_a_clean_stop_everything_is_on_the_medium() {
    for seed in 0..20 {
        let mut machine = Machine::new(Rng(seed));
        (0..500).for_each(|_| machine.step());
        while !machine.sent.is_empty() {
            machine.turn();
            machine.end_one();
        }
        loop {
            let disk = machine.disk.as_mut().unwrap();
            if let Some(result) = disk.make_durable(&mut machine.host) {
                assert_eq!(result, Ok(()));
                break;
            }
            machine.end_one();
            machine.turn();
        }
        for expected in machine.expected.values_mut() {
            let newest = expected.contents.len() - 1;
            expected.contents.drain(..newest);
        }
        machine.find_again(After::Power);
    }
}
