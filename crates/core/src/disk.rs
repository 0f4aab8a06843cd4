//! The disk as a state machine: requests and finished operations go in, calls of [`Io`] come out.
//!
//! This file owns the state and the life of a request; what each operation does to blocks is beside it: `read`,
//! `write`, `direct`, `discard`, `evict`, `collect`. Invariant: a request is in the table exactly while it is
//! unfinished and could not be finished at once.

use crate::collect::Victim;
use crate::counters::{Counters, add, set};
use crate::drain::Drain;
use crate::entry::Place;
use crate::error::{DiskError, Errno};
use crate::evict::Leaving;
use crate::health::{OverflowHealth, RETRY_NS};
use crate::io::{Io, PartId};
use crate::level::{LevelWatch, Thresholds};
use crate::log::{Log, Stream};
use crate::meta::Meta;
use crate::ops::Operations;
use crate::part::Parts;
use crate::persist::Persistent;
use crate::promote::RecentReads;
use crate::ram::RamTier;
use crate::request::{Operation, Request};
use crate::spec::{DiskSpec, Mode};
use crate::table::{Active, Id, Table, Wait};
use crate::units::{BLOCK_BYTES, BLOCK_SECTORS, Block, SECTOR_BYTES, Slot};
use crate::written::WordPages;
use std::collections::{HashMap, VecDeque};

/// Blocks that all requests together may touch before a turn's end, and again at its end: well below a
/// millisecond of copying.
pub(crate) const TURN_BLOCKS: u32 = 256;
/// Requests that waited behind another and are looked at again in one turn.
pub(crate) const RETESTS: u32 = 64;
/// Map entries that cost as much as a block of copying.
pub(crate) const ENTRIES_PER_BLOCK: u32 = 16;
/// A disk: base image, block map, write cache and overflow, as one guest sees it.
pub struct Disk {
    pub(crate) spec: DiskSpec,
    pub(crate) meta: Meta,
    pub(crate) ram: RamTier,
    pub(crate) recent_reads: RecentReads,
    pub(crate) log: Log,
    pub(crate) parts: Parts,
    pub(crate) table: Table,
    pub(crate) ops: Operations,
    pub(crate) victim: Option<Victim>,
    /// Parts whose append must wait for a segment.
    pub(crate) unflushed: VecDeque<PartId>,

    /// Requests that wait behind another, by that other's row; with their sequence, as rows are reused.
    pub(crate) behind: HashMap<Id, Vec<(Id, u64)>>,
    pub(crate) room_waiters: VecDeque<Id>,
    pub(crate) part_waiters: VecDeque<Id>,
    pub(crate) turn_waiters: VecDeque<Id>,
    pub(crate) drain_waiters: Vec<Id>,
    pub(crate) flush_waiters: Vec<Id>,
    /// Requests that may go on.
    pub(crate) runnable: VecDeque<(Id, u64)>,

    pub(crate) drain: Drain,
    pub(crate) now_ns: u64,
    /// Writes that waited for room when the last turn ended.
    pub(crate) waiting: u64,
    /// Until when the stalls are accounted for.
    pub(crate) stalls_until_ns: u64,
    /// Blocks that may still be touched in this half of the turn.
    pub(crate) budget: u32,
    pub(crate) retests: u32,
    /// Eviction has gone a step, or its hand too far without a cold block: it goes on in the next turn.
    pub(crate) evict_again: bool,
    /// Until when empty segments stay in the file because more are filled, or a punch failed.
    pub(crate) punch_after_ns: u64,
    /// The file system cannot punch.
    pub(crate) no_punching: bool,
    pub(crate) sequence: u64,
    /// Reads and writes that completed at once in this turn, for the latency histograms.
    pub(crate) batch: [u64; 2],
    /// Blocks in the file that is written in place (modes `direct`, `persistent`, `ephemeral`).
    pub(crate) direct_blocks: u64,
    /// What outlives everything (mode `persistent`).
    pub(crate) persistent: Option<Box<Persistent>>,
    pub(crate) health: OverflowHealth,
    /// When the collector tries segments again that it could not empty.
    pub(crate) collect_again_ns: u64,
    pub(crate) full: bool,
    /// It was told that the disk is full, and not yet that it has room again.
    pub(crate) told_full: bool,
    pub(crate) level: LevelWatch,
    pub(crate) overflowed: bool,
    pub(crate) resetting: bool,
    /// No more requests come.
    pub(crate) winding_down: bool,
    /// A reset in mode `direct` has given the difference file back, as far as its file system can.
    pub(crate) file_emptied: bool,
    /// From which region on what an earlier generation left is still to be forgotten.
    pub(crate) forget_from: Option<usize>,
    /// Of the page of words that the walk is in, some are an earlier generation's.
    pub(crate) forget_words: bool,
    pub(crate) word_pages: WordPages,
    pub(crate) punches: u32,
    /// The part that eviction copies blocks to.
    pub(crate) leaving: Option<Leaving>,
    /// Reserved slots whose blocks' old content is on its way.
    pub(crate) merging_slots: u32,
    /// Spare memory of its list.
    pub(crate) picked: Vec<(Block, Slot)>,
    pub(crate) slots_scratch: Vec<Slot>,
}

impl Disk {
    /// The disk's counters.
    #[inline]
    pub fn counters(&self) -> &Counters {
        self.meta.counters()
    }

    /// What the disk was asked to be.
    pub fn spec(&self) -> &DiskSpec {
        &self.spec
    }

    /// 1 at birth, one more after each reset.
    pub fn generation(&self) -> u64 {
        self.meta.generation()
    }

    /// Unfinished requests.
    pub fn unfinished(&self) -> usize {
        self.table.len()
    }

    /// Asks the processor to fetch what a request will need first.
    #[inline]
    pub fn prefetch(&self, request: &Request) {
        self.meta.prefetch(Block((request.sector * SECTOR_BYTES / BLOCK_BYTES as u64) as u32));
    }

    /// The second step, some requests later: the map entry is here now, fetch what it names.
    #[inline]
    pub fn prefetch_slot<I: Io>(&self, io: &I, request: &Request) {
        let block = Block((request.sector * SECTOR_BYTES / BLOCK_BYTES as u64) as u32);
        if block.region() < self.meta.regions()
            && let Place::Ram(slot) = self.place(block)
        {
            self.ram.prefetch(slot);
            io.prefetch_slot(slot);
        }
    }

    /// A turn of the owner's loop begins: what is submitted from here on arrived at `now_ns`, a monotonic
    /// time in nanoseconds.
    #[inline]
    pub fn begin_turn(&mut self, now_ns: u64) {
        self.now_ns = now_ns;
        self.budget = TURN_BLOCKS;
    }

    /// Takes a request. It is completed through `io`, at once or later.
    #[inline]
    pub fn submit<I: Io>(&mut self, io: &mut I, request: Request) {
        self.sequence += 1;
        let end = request.sector.checked_add(u64::from(request.sectors));
        if end.is_none_or(|end| end > self.spec.size_bytes / SECTOR_BYTES)
            || u64::from(request.sectors) * SECTOR_BYTES > u64::from(u32::MAX)
        {
            add(&self.counters().failed, 1);
            io.complete(request.token, Err(Errno::INVALID));
            return;
        }
        let mut a = Active::new(request, self.now_ns, self.sequence);
        if request.sectors == 0 && !a.is_flush() {
            a.walked = true;
        } else if let Some(blocker) = self.table.blocker(&a) {
            self.wait_behind(a, blocker);
            return;
        }
        self.run(io, &mut a);
    }

    /// Carries a request on as far as it goes.
    #[inline]
    pub(crate) fn run<I: Io>(&mut self, io: &mut I, a: &mut Active) {
        a.wait = Wait::Operations;
        if self.holds_requests() {
            a.wait = Wait::Drain;
        } else if !a.walked && a.errno.is_none() {
            match a.request.operation {
                Operation::Read => self.walk_read(io, a),
                Operation::Write { .. } => match self.spec.mode {
                    Mode::RamOverflow | Mode::Ram => self.walk_write(io, a),
                    Mode::Overflow => self.walk_write_log(io, a),
                    Mode::Direct | Mode::Persistent | Mode::Ephemeral => self.walk_write_direct(io, a),
                },
                Operation::Discard | Operation::WriteZeroes { .. } => self.walk_zero(io, a),
                Operation::Flush => self.walk_flush(io, a),
            }
        }
        if a.pending == 0 && (a.walked || a.errno.is_some()) {
            self.finish(io, a);
            return;
        }
        if a.errno.is_some() {
            a.wait = Wait::Operations;
        }
        if a.wait == Wait::Room && !a.stalled {
            a.stalled = true;
            add(&self.counters().stalls, 1);
        }
        let id = match a.id {
            Some(id) => {
                *self.table.get_mut(id) = *a;
                id
            }
            None => self.table.insert(a),
        };
        match a.wait {
            Wait::Room => self.room_waiters.push_back(id),
            Wait::Part => self.part_waiters.push_back(id),
            Wait::Turn => self.turn_waiters.push_back(id),
            Wait::Drain => self.drain_waiters.push(id),
            Wait::Writes => self.flush_waiters.push(id),
            Wait::Operations | Wait::Overlap | Wait::Nothing => {}
        }
    }

    fn walk_flush<I: Io>(&mut self, io: &mut I, a: &mut Active) {
        if self.table.earliest_writer().is_some_and(|sequence| sequence < a.sequence) {
            a.wait = Wait::Writes;
            return;
        }
        a.walked = true;
        if self.spec.mode.writes_in_place() {
            let id = self.row(a);
            a.pending += 1;
            self.sync_in_place(io, id);
        }
    }

    /// The request's row in the table: operations name it.
    pub(crate) fn row(&mut self, a: &mut Active) -> Id {
        match a.id {
            Some(id) => id,
            None => self.table.insert(a),
        }
    }

    pub(crate) fn finish<I: Io>(&mut self, io: &mut I, a: &Active) {
        let c = self.meta.counters();
        let bytes = u64::from(a.len());
        let result = a.errno.map_or(Ok(()), Err);
        match (a.request.operation, result) {
            (Operation::Read, Ok(())) => c.guest.read(bytes),
            (Operation::Write { .. }, Ok(())) if bytes == 0 => c.guest.write(bytes),
            (Operation::Write { .. }, Ok(())) => {
                c.guest.write(bytes);
                let end = a.request.sector + u64::from(a.request.sectors);
                let blocks = a.request.sector / BLOCK_SECTORS..end.div_ceil(BLOCK_SECTORS);
                let blocks = blocks.start as u32..blocks.end as u32;
                let regions = Block(blocks.start).region()..=Block(blocks.end - 1).region();
                if regions.clone().any(|region| self.meta.is_unwritten(region)) {
                    self.written_first(regions);
                }
                self.meta.count_written(blocks);
            }
            (Operation::Read, Err(_)) => add(&c.failed_read_bytes, a.moved_bytes),
            (Operation::Write { .. }, Err(_)) => add(&c.failed_written_bytes, a.moved_bytes),
            (Operation::Flush, _) => add(&c.flushes, 1),
            (Operation::Discard, _) => add(&c.discards, 1),
            (Operation::WriteZeroes { .. }, _) => add(&c.write_zeroes, 1),
        }
        let c = self.meta.counters();
        if result.is_err() {
            add(&c.failed, 1);
        }
        match a.id {
            None => match a.request.operation {
                Operation::Read => self.batch[0] += 1,
                Operation::Write { .. } => self.batch[1] += 1,
                _ => {}
            },
            Some(id) => {
                let ns = self.now_ns.saturating_sub(a.start_ns);
                match a.request.operation {
                    Operation::Read => c.read_latency.record(ns, 1),
                    Operation::Write { .. } => c.write_latency.record(ns, 1),
                    _ => {}
                }
                self.table.remove(id);
                self.wake_behind(id);
            }
        }
        io.complete(a.request.token, result);
    }

    /// The turn ends: whoever can go on does, cold blocks leave, gauges are published. Returns whether there
    /// is more to do at once; else the owner may sleep until something arrives or [`Disk::deadline_ns`].
    pub fn end_turn<I: Io>(&mut self, io: &mut I, now_ns: u64) -> bool {
        let c = self.meta.counters();
        if self.batch[0] > 0 {
            c.read_latency.record(now_ns.saturating_sub(self.now_ns), self.batch[0]);
        }
        if self.batch[1] > 0 {
            c.write_latency.record(now_ns.saturating_sub(self.now_ns), self.batch[1]);
        }
        let idle = self.batch == [0; 2] && self.budget == TURN_BLOCKS;
        self.batch = [0; 2];
        self.now_ns = now_ns;
        self.count_stalls();
        // Long requests go on after all others had their turn, in their order.
        self.budget = TURN_BLOCKS;
        self.retests = RETESTS;
        if !self.table.is_empty() {
            self.run_runnable(io);
            for _ in 0..self.turn_waiters.len() {
                if self.budget == 0 {
                    break;
                }
                let id = self.turn_waiters.pop_front().expect("counted");
                let mut a = *self.table.get(id);
                self.run(io, &mut a);
            }
        }
        self.evict_again = false;
        self.drain(io);
        if self.spec.mode.has_log() {
            self.flush_parts(io);
            self.collect(io);
            self.evict(io);
            self.run_runnable(io);
        }
        self.serve_waiters(io);
        if self.spec.mode.has_log() && self.wants_room() {
            // What was free is used up, or has become worth collecting: more room must be on its way before the
            // owner sleeps.
            self.collect(io);
            self.evict(io);
        }
        if self.spec.mode.has_log() {
            // Last: what the requests above have emptied must not wait for another turn.
            self.punch(io);
        }
        self.lower_ram_ceiling();
        let more = self.ram.populate(io, &self.meta, now_ns, idle)
            | self.ram.give_back(io, &mut self.slots_scratch)
            | self.forget(io);
        let (used, total) = self.fill();
        self.level.watch(io, self.meta.counters(), used, total);
        self.waiting = self.count_waiting();
        self.publish_gauges();
        more || self.evict_again || self.can_go_on()
    }

    /// Some request could go on now: what it waited for is there.
    fn can_go_on(&self) -> bool {
        !self.runnable.is_empty()
            || !self.turn_waiters.is_empty()
            || self.next_to_serve().is_some()
            || !self.part_waiters.is_empty() && self.parts.can_take(Stream::Write)
    }

    /// When the owner must call [`Disk::end_turn`] even if nothing arrives, which may be at once; `None`: never.
    pub fn deadline_ns(&self) -> Option<u64> {
        if self.can_go_on() {
            return Some(self.now_ns);
        }
        // While something waits for room the clock of the stalls goes on, and a full file system may have room.
        let waiting = if self.wants_room() { self.now_ns + RETRY_NS } else { 0 };
        let drain = if let Drain::Wanted { from_ns } = self.drain { from_ns } else { 0 };
        let ram = self.ram.deadline_ns();
        let all =
            [self.health.rest_until_ns(), self.collect_again_ns, self.punch_after_ns, waiting, drain, ram];
        all.into_iter().filter(|&ns| ns > self.now_ns).min()
    }

    /// No more requests come: from here on blocks leave the RAM tier, and segments are collected, only while something waits
    /// for room.
    pub fn wind_down(&mut self) {
        self.winding_down = true;
    }

    /// Eviction and collection begin nothing: a reset, or the end, waits for what is under way.
    pub(crate) fn stands_still(&self) -> bool {
        self.resetting || self.winding_down && !self.wants_room()
    }

    /// Writes that need room wait or fail.
    pub fn is_full(&self) -> bool {
        self.full
    }

    /// Says from what on the level is told of.
    ///
    /// # Errors
    /// As [`Thresholds::check`].
    pub fn set_thresholds(&mut self, thresholds: Thresholds) -> Result<(), DiskError> {
        self.level.set_thresholds(thresholds)
    }

    /// Blocks in the write cache, and how many there may be. A mode without one has none of 1.
    pub fn fill(&self) -> (u64, u64) {
        let (ram, log) = (u64::from(self.ram.used()), self.log.live());
        let (ram_limit, log_limit) = (u64::from(self.ram.limit()), self.log.capacity());
        match self.spec.mode {
            Mode::RamOverflow => (ram + log, ram_limit + log_limit),
            Mode::Ram => (ram, ram_limit),
            Mode::Overflow => (log, log_limit),
            Mode::Direct | Mode::Persistent | Mode::Ephemeral => (0, 1),
        }
    }

    /// Tells what it holds and what is unfinished. To be called before a client is told of what is done: who has an
    /// answer finds it in the figures.
    pub fn publish_gauges(&self) {
        let c = self.meta.counters();
        const BLOCK: u64 = BLOCK_BYTES as u64;
        set(&c.ram_used_bytes, u64::from(self.ram.used()) * BLOCK);
        set(&c.ram_peak_bytes, u64::from(self.ram.peak()) * BLOCK);
        set(&c.overflow_used_bytes, (self.log.live() + self.direct_blocks) * BLOCK);
        set(&c.overflow_file_bytes, (self.log.file_blocks() + self.direct_blocks) * BLOCK);
        set(&c.inflight, self.table.len() as u64);
        set(&c.waiting, self.waiting);
    }
}
