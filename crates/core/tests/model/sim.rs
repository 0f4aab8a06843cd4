//! A stand-in for the worker: memory for slots, file and image, operations that end in any order, with faults.

use crate::medium::Medium;
use crate::oracle;
use crate::rng::Rng;
use spillway_core::{
    BLOCK_BYTES, DataMemory, DiskSpec, Errno, Event, GuestBuffers, Io, Layout, Mode, OpId, PARTS, PartId,
    RESET_MARK, SECTOR_BYTES, Slot, Token, find_bad_state, state_map_bytes,
};
use std::collections::{BTreeMap, HashMap, HashSet};

/// One request as its client sees it.
pub struct Client {
    pub data: Vec<u8>,
    pub result: Option<Result<(), Errno>>,
}

enum Pending {
    ReadBase {
        offset: u64,
        len: u32,
    },
    ReadFile {
        offset: u64,
        len: u32,
        early: Option<Vec<u8>>,
    },
    WriteFile {
        part: PartId,
        at: usize,
        offset: u64,
        len: u32,
        early: Option<Vec<u8>>,
        sync: bool,
    },
    Punch {
        offset: u64,
        len: u64,
    },
    /// Of the durable map, as the staging buffer has it while it is under way.
    WriteMap {
        part: PartId,
        at: usize,
        page: u32,
        pages: u32,
        sync: bool,
    },
    /// Makes stable what had landed before it began.
    Sync {
        landed: u64,
    },
    Drain,
}

/// An operation under way.
struct UnderWay {
    op: OpId,
    pending: Pending,
    /// It ends long after others that began with it.
    slow: bool,
}

/// What a dead process had begun and has not landed yet: from this place on, these bytes, or a hole.
struct Dead {
    offset: u64,
    len: u64,
    bytes: Option<Vec<u8>>,
}

fn overlap(a: (u64, u64), b: (u64, u64)) -> bool {
    a.0 < b.0 + b.1 && b.0 < a.0 + a.1
}

pub struct Sim {
    pub clients: HashMap<u64, Client>,
    pub completed: Vec<u64>,
    data: Vec<u8>,
    base: Vec<u8>,
    pub file: Vec<u8>,
    /// The durable map of mode `persistent`, its page for the mark first.
    pub durable: Vec<u8>,
    /// What a power loss may leave of the two.
    file_medium: Medium,
    durable_medium: Medium,
    /// The file's last block when the process began, which a drain punches.
    spare_at: usize,
    /// Nothing that a dead process had begun is under way.
    pub drained: bool,
    parts: Vec<Vec<u8>>,
    pending: Vec<UnderWay>,
    /// I/O of dead processes: it lands, or vanishes, at any moment until a drain has ended.
    dead: Vec<Dead>,
    /// The same of the durable map.
    dead_pages: Vec<(u32, Vec<u8>)>,
    pub rng: Rng,
    /// Faults per 65,536 operations.
    pub faults: u32,
    /// So many of the next writes and reads of the file fail.
    pub failing_writes: u32,
    pub failing_reads: u32,
    /// So many of the next reads of the file bring something else.
    pub damaged_reads: u32,
    /// Writes that touch this range of the file fail.
    pub bad_spot: std::ops::Range<u64>,
    /// Reads of the base image do not end.
    pub base_is_away: bool,
    /// The file system is full: writes fail.
    pub no_space: bool,
    /// It is full, but what a file holds already can be written over.
    pub no_new_space: bool,
    /// Blocks of the file that are written and were not punched since.
    backed: HashSet<u64>,
    /// The file system cannot punch.
    pub no_punching: bool,
    /// Writes and punches that have landed in the file.
    pub landed: u64,
    /// Blocks of the file that no sync has made stable yet: which of those it was that changed them.
    pub unstable: HashMap<u64, u64>,
    /// What is read back from the file is checked.
    checked: bool,
    /// Called before each store to a slot, for tests that stop there.
    pub store: fn(),
    /// What has gone wrong so far, and how often.
    pub tally: BTreeMap<&'static str, u64>,
    /// Events seen, for tests that want some.
    pub events: Vec<Event>,
    /// The `meta` memory, to be spoilt where the map is given back.
    pub meta: *mut u8,
    map: std::ops::Range<u64>,
    /// Slots that hold memory.
    held: Vec<bool>,
    pub held_slots: u32,
    huge_pages: bool,
    /// Huge pages of which a part was given back.
    pub split: u32,
    /// Slots given memory ahead of their use, in all.
    pub populated: u64,
    /// Blocks stored in adjacent slots at once, and those of them in slots without memory.
    pub stretches: (u64, u64),
    /// Versions up to this one are of an earlier generation.
    pub forgotten: oracle::Version,
}

/// In mode `ephemeral` a copy of an image, else anything.
fn initial_file(spec: &DiskSpec, len: u64) -> Vec<u8> {
    let mut file = vec![0xFF; len as usize];
    if spec.mode == Mode::Ephemeral {
        let sectors = file[..spec.size_bytes as usize].chunks_exact_mut(SECTOR_BYTES as usize);
        sectors.enumerate().for_each(|(i, s)| oracle::fill(oracle::BASE, i as u64, s));
    }
    file
}

pub enum Ended {
    Read(OpId, Result<Vec<u8>, Errno>),
    Other(OpId, Result<(), Errno>),
}

impl Sim {
    pub fn new(spec: &DiskSpec, data: DataMemory, base: Vec<u8>, rng: Rng) -> Sim {
        let file = spec.file_bytes();
        let durable = match spec.mode {
            Mode::Persistent => BLOCK_BYTES + state_map_bytes(spec.blocks()) as usize,
            _ => 0,
        };
        Sim {
            clients: HashMap::new(),
            completed: Vec::new(),
            data: vec![0xDD; data.bytes as usize],
            base,
            file: initial_file(spec, file),
            durable: vec![0; durable],
            file_medium: Medium::default(),
            durable_medium: Medium::default(),
            spare_at: (file as usize).saturating_sub(BLOCK_BYTES),
            drained: true,
            parts: vec![vec![0xCC; spec.shape.part_blocks as usize * BLOCK_BYTES]; PARTS],
            pending: Vec::new(),
            dead: Vec::new(),
            dead_pages: Vec::new(),
            rng,
            faults: 0,
            failing_writes: 0,
            failing_reads: 0,
            damaged_reads: 0,
            bad_spot: 0..0,
            base_is_away: false,
            no_space: false,
            no_new_space: false,
            backed: HashSet::new(),
            no_punching: false,
            landed: 0,
            unstable: HashMap::new(),
            checked: spec.mode.has_log(),
            store: || {},
            tally: BTreeMap::new(),
            events: Vec::new(),
            meta: std::ptr::null_mut(),
            map: Layout::of(spec).map_range(),
            held: vec![false; data.slots() as usize],
            held_slots: 0,
            huge_pages: data.huge_pages,
            populated: 0,
            stretches: (0, 0),
            split: 0,
            forgotten: 0,
        }
    }

    pub fn has_pending(&self) -> bool {
        !self.pending.is_empty()
    }

    /// How many operations are under way.
    pub fn under_way(&self) -> usize {
        self.pending.len()
    }

    /// Whether nothing but reads of the base image is under way.
    pub fn reads_only_base(&self) -> bool {
        self.pending.iter().all(|one| matches!(one.pending, Pending::ReadBase { .. }))
    }

    /// Notes that this has happened.
    pub fn count(&mut self, what: &'static str) {
        *self.tally.entry(what).or_default() += 1;
    }

    fn begin(&mut self, op: OpId, pending: Pending) {
        let slow = self.rng.chance(64);
        self.pending.push(UnderWay { op, pending, slow });
    }

    /// Ends one operation, any one; or none, when that is a slow one.
    pub fn end_one(&mut self) -> Option<Ended> {
        if !self.dead.is_empty() && self.rng.chance(4) {
            self.land_dead();
        }
        if self.pending.is_empty() {
            return None;
        }
        let i = self.rng.below(self.pending.len() as u64) as usize;
        let is_held = self.base_is_away && matches!(self.pending[i].pending, Pending::ReadBase { .. });
        if is_held || self.pending[i].slow && !self.rng.chance(32) {
            return None;
        }
        let UnderWay { op, pending, slow } = self.pending.swap_remove(i);
        let mut fault = self.rng.below(65_536) < u64::from(self.faults);
        let failing = match pending {
            Pending::ReadFile { .. } => &mut self.failing_reads,
            Pending::WriteFile { .. } | Pending::WriteMap { .. } => &mut self.failing_writes,
            _ => &mut 0,
        };
        fault |= *failing > 0;
        *failing = failing.saturating_sub(1);
        for (what, happens) in [("errors", fault), ("slow operations", slow)] {
            if happens {
                self.count(what);
            }
        }
        Some(match pending {
            Pending::ReadBase { .. } | Pending::ReadFile { .. } if fault => Ended::Read(op, Err(Errno::IO)),
            Pending::ReadBase { offset, len } => {
                Ended::Read(op, Ok(self.base[offset as usize..][..len as usize].to_vec()))
            }
            Pending::ReadFile { offset, len, .. } | Pending::WriteFile { offset, len, .. }
                if offset + u64::from(len) > self.file.len() as u64 =>
            {
                // Only a disk attached to damaged memory asks for that.
                let (read, errno) = (matches!(pending, Pending::ReadFile { .. }), Errno::IO);
                if read { Ended::Read(op, Err(errno)) } else { Ended::Other(op, Err(errno)) }
            }
            Pending::ReadFile { offset, len, early } => {
                let now = || self.file[offset as usize..][..len as usize].to_vec();
                let mut bytes = early.unwrap_or_else(now);
                let damaged = self.damaged_reads > 0 || self.rng.below(65_536) < u64::from(self.faults);
                self.damaged_reads = self.damaged_reads.saturating_sub(1);
                if self.checked && damaged {
                    bytes[self.rng.below(u64::from(len)) as usize] ^= 1 << self.rng.below(8);
                    self.count("flipped bits");
                }
                Ended::Read(op, Ok(bytes))
            }
            Pending::WriteFile { part, at, offset, len, early, sync } => {
                let now = || self.parts[part.0 as usize][at..at + len as usize].to_vec();
                let bytes = early.unwrap_or_else(now);
                let bad = self.bad_spot.start < offset + u64::from(len) && offset < self.bad_spot.end;
                let mut blocks = offset / BLOCK_BYTES as u64..(offset + u64::from(len)) / BLOCK_BYTES as u64;
                let no_space = self.no_space
                    || self.no_new_space && blocks.clone().any(|block| !self.backed.contains(&block));
                let fault = fault || no_space || bad;
                if no_space {
                    self.count("writes to a full file system");
                } else {
                    self.backed.extend(&mut blocks);
                }
                // A failed write may have written some sectors of it.
                let whole = len as usize;
                let landed =
                    if fault { self.rng.below(u64::from(len) + 1) as usize / 512 * 512 } else { whole };
                self.before_landing(offset, len.into());
                self.file[offset as usize..][..landed].copy_from_slice(&bytes[..landed]);
                self.land(offset, u64::from(len), sync && !fault);
                let errno = if no_space { Errno::NO_SPACE } else { Errno::IO };
                Ended::Other(op, if fault { Err(errno) } else { Ok(()) })
            }
            Pending::Punch { .. } if self.no_punching => Ended::Other(op, Err(Errno::NOT_SUPPORTED)),
            Pending::Punch { offset, len } => {
                if !fault && offset + len <= self.file.len() as u64 {
                    self.before_landing(offset, len);
                    self.file[offset as usize..][..len as usize].fill(0);
                    self.land(offset, len, false);
                    let block = |offset| offset / BLOCK_BYTES as u64;
                    self.backed.retain(|at| !(block(offset)..block(offset + len)).contains(at));
                }
                Ended::Other(op, if fault { Err(Errno::IO) } else { Ok(()) })
            }
            Pending::Drain if fault => Ended::Other(op, Err(Errno::IO)),
            Pending::Drain => {
                self.land_all();
                self.file[self.spare_at..][..BLOCK_BYTES].fill(0);
                self.drained = true;
                Ended::Other(op, Ok(()))
            }
            Pending::Sync { .. } if fault => Ended::Other(op, Err(Errno::IO)),
            Pending::Sync { landed } => {
                self.unstable.retain(|_, &mut at| at > landed);
                self.file_medium.synced(landed);
                self.durable_medium.synced(landed);
                Ended::Other(op, Ok(()))
            }
            Pending::WriteMap { part, at, page, pages, sync } => {
                let whole = pages as usize * BLOCK_BYTES;
                let written = if fault { self.rng.below(pages.into()) as usize * BLOCK_BYTES } else { whole };
                let bytes = self.parts[part.0 as usize][at..at + written].to_vec();
                self.land_pages(page, &bytes);
                if sync && !fault {
                    self.durable_medium.stable(page.into()..(page + pages).into());
                }
                Ended::Other(op, if fault { Err(Errno::IO) } else { Ok(()) })
            }
        })
    }

    /// Pages of the durable map change.
    fn land_pages(&mut self, page: u32, bytes: &[u8]) {
        self.landed += 1;
        let pages = page.into()..u64::from(page) + (bytes.len() / BLOCK_BYTES) as u64;
        self.durable_medium.changes(self.landed, pages, &self.durable);
        self.durable[page as usize * BLOCK_BYTES..][..bytes.len()].copy_from_slice(bytes);
    }

    /// A range of the file is about to change.
    fn before_landing(&mut self, offset: u64, len: u64) {
        if !self.durable.is_empty() {
            let blocks = offset / BLOCK_BYTES as u64..(offset + len) / BLOCK_BYTES as u64;
            self.file_medium.changes(self.landed + 1, blocks, &self.file);
        }
    }

    /// A range of the file has changed.
    fn land(&mut self, offset: u64, len: u64, stable: bool) {
        self.landed += 1;
        if stable {
            self.file_medium.stable(offset / BLOCK_BYTES as u64..(offset + len) / BLOCK_BYTES as u64);
        }
        for block in offset / BLOCK_BYTES as u64..(offset + len) / BLOCK_BYTES as u64 {
            if stable {
                self.unstable.remove(&block);
            } else {
                self.unstable.insert(block, self.landed);
            }
        }
    }

    fn copy_fails(&mut self) -> bool {
        self.faults > 0 && self.rng.below(65_536) < u64::from(self.faults) / 4
    }

    /// Something that a dead process had begun lands, or never will.
    fn land_dead(&mut self) {
        let i = self.rng.below(self.dead.len() as u64) as usize;
        let Dead { offset, len, bytes } = self.dead.swap_remove(i);
        if self.rng.chance(4) {
            return;
        }
        self.before_landing(offset, len);
        let file = &mut self.file[offset as usize..][..len as usize];
        match bytes {
            Some(bytes) => file.copy_from_slice(&bytes),
            None => file.fill(0),
        }
        self.land(offset, len, false);
    }

    fn land_dead_pages(&mut self) {
        for (page, bytes) in std::mem::take(&mut self.dead_pages) {
            if !self.rng.chance(4) {
                self.land_pages(page, &bytes);
            }
        }
    }

    /// Everything of a dead process that still lands has.
    fn land_all(&mut self) {
        while !self.dead.is_empty() {
            self.land_dead();
        }
        self.land_dead_pages();
    }

    /// Every process has died, and perhaps power is lost: what was in memory is gone, and somebody opens the file as its
    /// lock is free. Whether a reset that had begun is finished by that.
    pub fn open_again(&mut self, live: &mut [u8], power: bool) -> bool {
        self.crash();
        self.land_all();
        if power {
            self.file_medium.lose(&mut self.file, &mut self.rng);
            self.durable_medium.lose(&mut self.durable, &mut self.rng);
        }
        let (mark, map) = self.durable.split_at_mut(BLOCK_BYTES);
        let reset = mark.starts_with(&RESET_MARK);
        if reset {
            map.fill(0);
            mark.fill(0);
        }
        if power || reset {
            live.copy_from_slice(map);
        }
        assert_eq!(find_bad_state(live), None);
        if reset {
            // Whoever opens it syncs that.
            self.durable_medium = Medium::default();
        }
        if power {
            self.unstable.clear();
        }
        reset
    }

    /// The process dies. What was under way may land later.
    pub fn crash(&mut self) {
        for UnderWay { pending, .. } in std::mem::take(&mut self.pending) {
            match pending {
                Pending::WriteFile { part, at, offset, len, early, .. } => {
                    let now = || self.parts[part.0 as usize][at..at + len as usize].to_vec();
                    let bytes = Some(early.unwrap_or_else(now));
                    self.dead.push(Dead { offset, len: len.into(), bytes });
                }
                Pending::Punch { offset, len } => self.dead.push(Dead { offset, len, bytes: None }),
                Pending::WriteMap { part, at, page, pages, .. } => {
                    let bytes = self.parts[part.0 as usize][at..][..pages as usize * BLOCK_BYTES].to_vec();
                    self.dead_pages.push((page, bytes));
                }
                Pending::ReadBase { .. }
                | Pending::ReadFile { .. }
                | Pending::Sync { .. }
                | Pending::Drain => {}
            }
        }
        for _ in 0..self.rng.below(self.dead.len() as u64 + 1) {
            self.land_dead();
        }
        if !self.dead_pages.is_empty() && self.rng.chance(2) {
            self.land_dead_pages();
        }
        self.drained = false;
        self.spare_at = self.file.len().saturating_sub(BLOCK_BYTES);
        self.parts.iter_mut().for_each(|p| p.fill(0xCC));
        self.clients.clear();
        self.completed.clear();
    }

    /// Makes the file long enough for a disk of this spec.
    pub fn lengthen(&mut self, spec: &DiskSpec) {
        let bytes = self.file.len().max(spec.file_bytes() as usize);
        self.file.resize(bytes, 0xFF);
    }

    /// Something that a dead process had begun may still land.
    pub fn is_haunted(&self) -> bool {
        !self.dead.is_empty() || !self.dead_pages.is_empty()
    }

    /// Nothing that a dead process had begun can land in this range.
    fn assert_drained(&self, offset: u64, len: u64) {
        for dead in &self.dead {
            let meets = overlap((offset, len), (dead.offset, dead.len));
            assert!(!meets, "I/O of a dead process may still land at {offset}..+{len}");
        }
    }

    /// Gives a slot memory, with huge pages all of one if nothing of it is there.
    fn hold(&mut self, slot: Slot) {
        let i = slot.0 as usize;
        if self.held[i] {
            return;
        }
        let unit = i / 512 * 512..(i / 512 + 1) * 512;
        let huge = self.huge_pages && self.held[unit.clone()].iter().all(|held| !held);
        for i in if huge { unit } else { i..i + 1 } {
            self.held[i] = true;
            self.held_slots += 1;
        }
    }

    /// Where it lies; whatever touches it makes it hold memory.
    fn slot_range(&mut self, slot: Slot, at: usize, len: usize) -> std::ops::Range<usize> {
        assert!(at + len <= BLOCK_BYTES);
        self.hold(slot);
        let start = slot.0 as usize * BLOCK_BYTES + at;
        start..start + len
    }

    fn client(&mut self, token: Token) -> &mut Client {
        let client = self.clients.get_mut(&token.0).expect("a token of an unfinished request");
        assert!(client.result.is_none(), "its buffers are used after its completion");
        client
    }
}

impl GuestBuffers for Sim {
    fn copy_from_guest(&mut self, token: Token, at: u32, to: &mut [u8]) -> Result<(), Errno> {
        to.copy_from_slice(&self.client(token).data[at as usize..][..to.len()]);
        Ok(())
    }

    fn copy_to_guest(&mut self, token: Token, at: u32, from: &[u8]) -> Result<(), Errno> {
        if self.copy_fails() {
            return Err(Errno::FAULT);
        }
        self.client(token).data[at as usize..][..from.len()].copy_from_slice(from);
        Ok(())
    }

    fn zero_guest(&mut self, token: Token, at: u32, len: u32) -> Result<(), Errno> {
        if self.copy_fails() {
            return Err(Errno::FAULT);
        }
        self.client(token).data[at as usize..][..len as usize].fill(0);
        Ok(())
    }

    fn complete(&mut self, token: Token, result: Result<(), Errno>) {
        let client = self.clients.get_mut(&token.0).expect("a request is completed once");
        assert!(client.result.replace(result).is_none(), "completed twice");
        self.completed.push(token.0);
    }
}

impl Io for Sim {
    fn slot(&mut self, slot: Slot) -> &mut [u8] {
        (self.store)();
        let range = self.slot_range(slot, 0, BLOCK_BYTES);
        &mut self.data[range]
    }

    fn guest_to_slot(
        &mut self,
        token: Token,
        at: u32,
        slot: Slot,
        slot_at: usize,
        len: usize,
    ) -> Result<bool, Errno> {
        if self.copy_fails() {
            return Err(Errno::FAULT);
        }
        let range = self.slot_range(slot, slot_at, len);
        for sector in self.data[slot.0 as usize * BLOCK_BYTES..][..BLOCK_BYTES].chunks_exact(512) {
            let old = oracle::version_of(sector).filter(|v| (1..=self.forgotten).contains(v));
            assert_eq!(old, None, "an earlier generation's content in {slot:?}");
        }
        let client = self.clients.get(&token.0).expect("a token of an unfinished request");
        let bytes = &client.data[at as usize..][..len];
        // A process may die in the middle.
        let (to, half) = (&mut self.data[range], len / 2 / 512 * 512);
        (self.store)();
        to[..half].copy_from_slice(&bytes[..half]);
        (self.store)();
        to[half..].copy_from_slice(&bytes[half..]);
        Ok(bytes.iter().all(|&b| b == 0))
    }

    fn guest_to_slots(
        &mut self,
        token: Token,
        at: u32,
        first: Slot,
        blocks: u32,
        fresh: bool,
    ) -> Result<(), Errno> {
        for i in 0..blocks {
            let slot = Slot(first.0 + i);
            assert!(!fresh || self.huge_pages || !self.held[slot.0 as usize], "{slot:?} has memory");
            self.guest_to_slot(token, at + i * BLOCK_BYTES as u32, slot, 0, BLOCK_BYTES)?;
        }
        self.stretches.0 += u64::from(blocks);
        self.stretches.1 += if fresh { u64::from(blocks) } else { 0 };
        Ok(())
    }

    fn slot_to_guest(
        &mut self,
        token: Token,
        at: u32,
        slot: Slot,
        slot_at: usize,
        len: usize,
    ) -> Result<(), Errno> {
        if self.copy_fails() {
            return Err(Errno::FAULT);
        }
        let range = self.slot_range(slot, slot_at, len);
        let client = self.clients.get_mut(&token.0).expect("a token of an unfinished request");
        client.data[at as usize..][..len].copy_from_slice(&self.data[range]);
        Ok(())
    }

    fn guest_to_part(
        &mut self,
        token: Token,
        at: u32,
        part: PartId,
        part_at: usize,
        len: usize,
    ) -> Result<(), Errno> {
        if self.copy_fails() {
            return Err(Errno::FAULT);
        }
        let client = self.clients.get(&token.0).expect("a token of an unfinished request");
        self.parts[part.0 as usize][part_at..part_at + len]
            .copy_from_slice(&client.data[at as usize..][..len]);
        Ok(())
    }

    fn slot_to_part(&mut self, slot: Slot, part: PartId, part_at: usize) {
        let range = self.slot_range(slot, 0, BLOCK_BYTES);
        self.parts[part.0 as usize][part_at..part_at + BLOCK_BYTES].copy_from_slice(&self.data[range]);
    }

    fn part(&mut self, part: PartId) -> &mut [u8] {
        &mut self.parts[part.0 as usize]
    }

    fn populate_slots(&mut self, first: Slot, n: u32) {
        self.populated += u64::from(n);
        (first.0..first.0 + n).for_each(|slot| self.hold(Slot(slot)));
    }

    fn release_slots(&mut self, slots: &[Slot]) {
        assert!(slots.is_sorted());
        for unit in slots.chunk_by(|a, b| a.0 / 512 == b.0 / 512).filter(|_| self.huge_pages) {
            let first = unit[0].0 as usize / 512 * 512;
            self.split +=
                u32::from(unit.len() < self.held[first..][..512].iter().filter(|&&held| held).count());
        }
        for &slot in slots {
            (self.store)();
            self.data[slot.0 as usize * BLOCK_BYTES..][..BLOCK_BYTES].fill(0);
            self.held_slots -= u32::from(std::mem::replace(&mut self.held[slot.0 as usize], false));
        }
    }

    fn release_meta(&mut self, pages: std::ops::Range<u64>) {
        assert!(pages.start.is_multiple_of(4096) && pages.end.is_multiple_of(4096));
        // What is not the map stays as it is: the core must not rely on its being zeroed by this.
        if pages.start >= self.map.start && pages.end <= self.map.end {
            for at in pages.step_by(4096) {
                (self.store)();
                // SAFETY: the run points this at the memory, which is as long as the map's end.
                unsafe { self.meta.add(at as usize).write_bytes(0xA5, 4096) };
            }
        }
    }

    fn base_to_guest(&mut self, token: Token, at: u32, offset: u64, len: u32) -> Option<Result<(), Errno>> {
        if self.rng.below(2) == 0 {
            return None;
        }
        let from = self.base[offset as usize..][..len as usize].to_vec();
        Some(self.copy_to_guest(token, at, &from))
    }

    fn read_base(&mut self, op: OpId, offset: u64, len: u32) {
        assert!(offset + u64::from(len) <= self.base.len() as u64 && len > 0);
        self.begin(op, Pending::ReadBase { offset, len });
    }

    fn read_overflow(&mut self, op: OpId, offset: u64, len: u32) {
        assert!(offset.is_multiple_of(BLOCK_BYTES as u64) && (len as usize).is_multiple_of(BLOCK_BYTES));
        self.assert_drained(offset, len.into());
        // The disk may take the bytes at any moment from now until the read has ended.
        let now = self.file.get(offset as usize..(offset + u64::from(len)) as usize);
        let early = (self.rng.below(2) == 0).then(|| now.map(<[u8]>::to_vec)).flatten();
        self.begin(op, Pending::ReadFile { offset, len, early });
    }

    fn write_overflow(&mut self, op: OpId, part: PartId, part_at: usize, offset: u64, len: u32, sync: bool) {
        assert!(
            offset.is_multiple_of(BLOCK_BYTES as u64)
                && (len as usize).is_multiple_of(BLOCK_BYTES)
                && len > 0
        );
        self.assert_drained(offset, len.into());
        let range = offset..offset + u64::from(len);
        for UnderWay { pending: other, .. } in &self.pending {
            if let Pending::WriteFile { offset, len, .. } = other {
                assert!(
                    range.end <= *offset || offset + u64::from(*len) <= range.start,
                    "two writes of one place"
                );
            }
        }
        let early =
            (self.rng.below(2) == 0).then(|| self.parts[part.0 as usize][part_at..][..len as usize].to_vec());
        self.begin(op, Pending::WriteFile { part, at: part_at, offset, len, early, sync });
    }

    fn write_map(&mut self, op: OpId, part: PartId, at: usize, page: u32, pages: u32, sync: bool) {
        assert!(self.dead_pages.is_empty(), "I/O of a dead process may still land in the map");
        let range = page..page + pages;
        assert!(range.end as usize * BLOCK_BYTES <= self.durable.len() && pages > 0);
        for UnderWay { pending: other, .. } in &self.pending {
            if let Pending::WriteMap { page, pages, .. } = other {
                assert!(range.end <= *page || page + pages <= range.start, "two writes of one page");
            }
        }
        // Whether the content that it tells of is on the medium is for the check of what is stable to see.
        self.begin(op, Pending::WriteMap { part, at, page, pages, sync });
    }

    fn punch_overflow(&mut self, op: OpId, offset: u64, len: u64) {
        self.assert_drained(offset, len);
        let range = offset..offset + len;
        for UnderWay { pending: other, .. } in &self.pending {
            if let Pending::WriteFile { offset, len, .. } | Pending::ReadFile { offset, len, .. } = other {
                assert!(range.end <= *offset || offset + u64::from(*len) <= range.start, "a punch under I/O");
            }
        }
        self.begin(op, Pending::Punch { offset, len });
    }

    fn drain_overflow(&mut self, op: OpId) {
        self.begin(op, Pending::Drain);
    }

    fn sync_overflow(&mut self, op: OpId) {
        self.begin(op, Pending::Sync { landed: self.landed });
    }

    fn event(&mut self, event: Event) {
        self.events.push(event);
    }
}
