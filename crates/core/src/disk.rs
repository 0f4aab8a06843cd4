//! The disk as a state machine: requests and finished operations go in, calls of [`Io`] come out.
//!
//! Owns the life of a request and of a turn, and delegates each step: `admission` decides which request goes on, the engine carries
//! it out on blocks. Invariant: a request that does not complete at once is in the table exactly while it is unfinished.

use crate::engine::Engine;
use crate::entry::Place;
use crate::error::{DiskError, Errno};
use crate::health::RETRY_NS;
use crate::io::{Io, OpId};
use crate::level::Thresholds;
use crate::level_watch::LevelWatch;
use crate::map::ExtentSource;
use crate::ops::Op;
use crate::request::{Operation, Request};
use crate::shared::Shared;
use crate::table::{Active, Wait};
use spillway_layout::{BLOCK_BYTES, Block, Counters, DiskSpec, FullPolicy, Mode, SECTOR_BYTES, add, set};

/// A disk: base image, block map, write cache and overflow, as one guest sees it.
pub struct Disk {
    pub(crate) shared: Shared,
    pub(crate) engine: Engine,
    pub(crate) level: LevelWatch,
    /// Reads and writes that completed at once in this turn, for the latency histograms.
    pub(crate) batch: [u64; 2],
}

impl Disk {
    /// The disk's counters.
    #[inline]
    pub fn counters(&self) -> &Counters {
        self.shared.counters()
    }

    /// The specification of the disk.
    pub fn spec(&self) -> &DiskSpec {
        &self.shared.spec
    }

    /// The disk's generation: 1 at birth, one more after each reset.
    pub fn generation(&self) -> u64 {
        self.shared.map.meta().generation()
    }

    /// Unfinished requests.
    pub fn unfinished(&self) -> usize {
        self.shared.admission.table().len()
    }

    /// Whether the disk is full: writes that need space wait or fail.
    pub fn is_full(&self) -> bool {
        self.shared.admission.is_full()
    }

    /// Blocks in the write cache, and how many there may be: (0, 1) in modes without a write cache.
    pub fn fill(&self) -> (u64, u64) {
        self.engine.fill()
    }

    /// Where the content of the disk comes from, from byte `offset` on: for how many bytes, at most up to `end`. Looks
    /// at 512 map entries or as many regions at most.
    pub fn extent(&self, offset: u64, end: u64) -> (u64, ExtentSource) {
        self.shared.map.extent(offset, end)
    }

    /// Asks the processor to fetch the map entry that a request needs first.
    #[inline]
    pub fn prefetch(&self, request: &Request) {
        self.shared.map.prefetch(Block((request.sector * SECTOR_BYTES / BLOCK_BYTES as u64) as u32));
    }

    /// The second step, some requests later: the map entry is here now, fetch what it names.
    #[inline]
    pub fn prefetch_slot<I: Io>(&self, io: &I, request: &Request) {
        let block = Block((request.sector * SECTOR_BYTES / BLOCK_BYTES as u64) as u32);
        if self.shared.map.has(block)
            && let Place::Ram(slot) = self.shared.map.place(block)
        {
            self.engine.prefetch(slot);
            io.prefetch_slot(slot);
        }
    }

    /// A turn of the owner's loop begins: what is submitted from here on arrived at `now_ns`, a monotonic
    /// time in nanoseconds.
    #[inline]
    pub fn begin_turn(&mut self, now_ns: u64) {
        self.shared.admission.begin_turn(now_ns);
    }

    /// Takes a request. It is completed through `io`, at once or later.
    #[inline]
    pub fn submit<I: Io>(&mut self, io: &mut I, request: Request) {
        let end = request.sector.checked_add(u64::from(request.sectors));
        if end.is_none_or(|end| end > self.shared.spec.size_bytes / SECTOR_BYTES)
            || u64::from(request.sectors) * SECTOR_BYTES > u64::from(u32::MAX)
        {
            add(&self.counters().failed, 1);
            io.complete(request.token, Err(Errno::INVALID));
            return;
        }
        let mut a = self.shared.admission.arrived(request);
        if self.shared.admission.admits(&mut a) {
            self.run(io, &mut a);
        }
    }

    /// Continues a request as far as possible without waiting.
    #[inline]
    pub(crate) fn run<I: Io>(&mut self, io: &mut I, a: &mut Active) {
        let Disk { shared, engine, .. } = self;
        a.wait = Wait::Operations;
        if engine.holds_requests(shared) {
            a.wait = Wait::Drain;
        } else if !a.walked && a.errno.is_none() {
            match a.request.operation {
                Operation::Read => engine.read(shared, io, a),
                Operation::Write { .. } => engine.write(shared, io, a),
                Operation::Discard | Operation::WriteZeroes { .. } => engine.zero(shared, io, a),
                Operation::Flush if shared.admission.awaits_writes(a) => a.wait = Wait::Writes,
                Operation::Flush => engine.flush(shared, io, a),
            }
        }
        self.finish_or_park(io, a);
    }

    /// Carries out a flush for which no write is waited for.
    pub(crate) fn run_flush<I: Io>(&mut self, io: &mut I, a: &mut Active) {
        a.wait = Wait::Operations;
        self.engine.flush(&mut self.shared, io, a);
        self.finish_or_park(io, a);
    }

    #[inline]
    fn finish_or_park<I: Io>(&mut self, io: &mut I, a: &mut Active) {
        if a.pending == 0 && (a.walked || a.errno.is_some()) {
            self.finish(io, a);
        } else {
            self.shared.admission.park(a, self.shared.map.counters());
        }
    }

    /// Answers a request.
    #[inline]
    fn finish<I: Io>(&mut self, io: &mut I, a: &Active) {
        let result = a.errno.map_or(Ok(()), Err);
        self.count_finished(a, result);
        let c = self.shared.map.counters();
        match a.id {
            None => match a.request.operation {
                Operation::Read => self.batch[0] += 1,
                Operation::Write { .. } => self.batch[1] += 1,
                _ => {}
            },
            Some(id) => {
                let ns = self.shared.now_ns().saturating_sub(a.start_ns);
                match a.request.operation {
                    _ if result == Err(Errno::CANCELED) => {}
                    Operation::Read => c.read_latency.record(ns, 1),
                    Operation::Write { .. } => c.write_latency.record(ns, 1),
                    _ => {}
                }
                self.shared.admission.remove(id);
            }
        }
        io.complete(a.request.token, result);
    }

    #[inline]
    fn count_finished(&mut self, a: &Active, result: Result<(), Errno>) {
        let c = self.shared.map.counters();
        let bytes = u64::from(a.len());
        match (a.request.operation, result) {
            (Operation::Read, Ok(())) => c.guest.read(bytes),
            (Operation::Write { .. }, Ok(())) => {
                c.guest.write(bytes);
                if bytes > 0 {
                    let end = a.request.sector + u64::from(a.request.sectors);
                    self.shared.map.count_written(a.request.sector..end);
                }
            }
            (Operation::Read, Err(_)) => add(&c.failed_read_bytes, a.moved_bytes),
            (Operation::Write { .. }, Err(_)) => add(&c.failed_written_bytes, a.moved_bytes),
            // If its client comes back, it is counted when it is carried out again.
            (_, Err(Errno::CANCELED)) => {}
            (Operation::Flush, _) => add(&c.flushes, 1),
            (Operation::Discard, _) => add(&c.discards, 1),
            (Operation::WriteZeroes { .. }, _) => add(&c.write_zeroes, 1),
        }
        if result.is_err_and(|errno| errno != Errno::CANCELED) {
            add(&self.shared.map.counters().failed, 1);
        }
    }

    /// To be called when a read has ended: `bytes` is its data, or why it failed.
    pub fn read_done<I: Io>(&mut self, io: &mut I, op: OpId, bytes: Result<&[u8], Errno>) {
        let op = self.shared.ops.end(op);
        if matches!(op, Op::Abandoned) {
            return;
        }
        self.engine.read_done(&mut self.shared, io, op, bytes);
        self.finish_all(io);
    }

    /// To be called when an operation other than a read has ended.
    pub fn op_done<I: Io>(&mut self, io: &mut I, op: OpId, result: Result<(), Errno>) {
        let op = self.shared.ops.end(op);
        self.engine.op_done(&mut self.shared, io, op, result);
        self.finish_all(io);
    }

    /// Answers the requests whose last operation has ended.
    pub(crate) fn finish_all<I: Io>(&mut self, io: &mut I) {
        if !self.shared.admission.has_finished() {
            return;
        }
        let finished = self.shared.admission.take_finished();
        for &id in &finished {
            let a = *self.shared.admission.table().get(id);
            self.finish(io, &a);
        }
        self.shared.admission.return_finished(finished);
    }

    /// Ends the turn: continues requests that can go on, evicts cold blocks, publishes gauges. Returns whether there is more to
    /// do at once. If not, the owner may sleep until something arrives or [`Disk::deadline_ns`].
    pub fn end_turn<I: Io>(&mut self, io: &mut I, now_ns: u64) -> bool {
        let admission = &mut self.shared.admission;
        let c = self.shared.map.counters();
        if self.batch[0] > 0 {
            c.read_latency.record(now_ns.saturating_sub(admission.now_ns()), self.batch[0]);
        }
        if self.batch[1] > 0 {
            c.write_latency.record(now_ns.saturating_sub(admission.now_ns()), self.batch[1]);
        }
        let idle = self.batch == [0; 2] && admission.is_budget_whole();
        self.batch = [0; 2];
        admission.end_turn(now_ns, c);
        if !admission.table().is_empty() {
            self.run_runnable(io);
            for _ in 0..self.shared.admission.turn_waiters() {
                let Some(mut a) = self.shared.admission.next_turn_waiter() else { break };
                self.run(io, &mut a);
            }
        }
        self.shared.drain.begin(io, &mut self.shared.ops, now_ns);
        self.engine.work(&mut self.shared, io);
        if self.shared.spec.mode.has_log() {
            // Requests may have waited for what has just been written.
            self.run_runnable(io);
        }
        self.serve_waiters(io);
        self.engine.work_again(&mut self.shared, io);
        self.finish_all(io);
        let more = self.engine.tidy(&mut self.shared, io, idle) | self.shared.map.forget(io);
        let (used, total) = self.engine.fill();
        self.level.watch(io, self.shared.map.counters(), used, total);
        self.count_waiting();
        self.publish_gauges();
        more || self.engine.has_more_work() || self.can_go_on()
    }

    /// Whether some request could go on now.
    fn can_go_on(&self) -> bool {
        let admission = &self.shared.admission;
        !admission.has_nothing_to_run()
            || self.engine.next_to_serve(&self.shared).is_some()
            || admission.part_waiters() > 0 && self.engine.can_take_part()
    }

    /// When the owner must call [`Disk::end_turn`] even if nothing arrives, which may be at once; `None`: never.
    pub fn deadline_ns(&self) -> Option<u64> {
        let now_ns = self.shared.now_ns();
        if self.can_go_on() {
            return Some(now_ns);
        }
        // While a request waits for space its stall time is counted on, and a full file system may get space.
        let waiting = if self.engine.wants_space(&self.shared) { now_ns + RETRY_NS } else { 0 };
        let own = [self.shared.health.retry_at_ns(), self.shared.drain.deadline_ns(), waiting];
        own.into_iter().chain(self.engine.deadlines_ns()).filter(|&ns| ns > now_ns).min()
    }

    /// To be called when no more requests come. From here on blocks are evicted, and segments collected, only while a request
    /// waits for space.
    pub fn wind_down(&mut self) {
        self.shared.winding_down = true;
    }

    /// Brings everything to the medium before the process ends. No request may be unfinished or arrive meanwhile. `None`: it is in
    /// progress; call again after each [`Disk::end_turn`].
    pub fn make_durable<I: Io>(&mut self, io: &mut I) -> Option<Result<(), Errno>> {
        self.engine.make_durable(&mut self.shared, io)
    }

    /// Resets the disk to its image, by one store; the memory is released to the host in the turns that follow. Returns false
    /// while operations are in flight, or while memory of an earlier reset is still being released: call again after each
    /// [`Disk::end_turn`] until it is true. No request may be unfinished or arrive meanwhile.
    ///
    /// If the process dies in the middle, the next one to attach finds either the whole old generation or the new one. Why:
    /// `docs/design/008-reset-by-generation.md`.
    pub fn reset<I: Io>(&mut self, io: &mut I) -> bool {
        assert!(self.shared.admission.table().is_empty(), "a reset needs an idle disk");
        assert!(self.shared.spec.mode != Mode::Ephemeral, "there is nothing that it could be reset to");
        self.shared.resetting = true;
        if self.shared.map.is_forgetting() || !self.engine.is_ready_for_reset(&mut self.shared, io) {
            return false;
        }
        self.shared.resetting = false;
        self.shared.map.reset();
        self.engine.reset(&self.shared);
        self.shared.admission.set_full(false);
        add(&self.counters().resets, 1);
        self.publish_gauges();
        true
    }

    /// Changes the limits of the RAM tier and of the overflow while the disk serves: both, or neither.
    ///
    /// Blocks beyond a lower RAM limit are evicted in the turns that follow, and the memory beyond it is released to the host. A
    /// lower overflow limit counts at once for new blocks, and the file shrinks to it in the background. For a higher one the
    /// file ([`DiskSpec::file_bytes`]) must be long enough before.
    ///
    /// # Errors
    /// Each error leaves both limits as they are. The mode has no such tier; the limit is out of range, or larger than the memory
    /// of the slots; live blocks and the reserve do not fit in it; the file system cannot punch holes; or the overflow would grow
    /// while I/O of an earlier worker may be in flight, which ends by itself.
    pub fn set_limits(&mut self, ram_bytes: u64, overflow_bytes: u64) -> Result<(), DiskError> {
        let before = self.shared.spec;
        let spec = DiskSpec { ram_limit_bytes: ram_bytes, overflow_limit_bytes: overflow_bytes, ..before };
        if ram_bytes != before.ram_limit_bytes && !spec.mode.has_ram() {
            return Err(DiskError::Spec(format!("mode {} has no RAM tier", spec.mode)));
        }
        if overflow_bytes != before.overflow_limit_bytes && !spec.mode.has_log() {
            return Err(DiskError::Spec(format!("mode {} has no overflow limit", spec.mode)));
        }
        self.engine.set_limits(&mut self.shared, spec)
    }

    /// Changes what happens to writes for which there is no space, including those that wait now.
    pub fn set_full_policy(&mut self, full: FullPolicy) {
        self.shared.spec.full = full;
    }

    /// Sets the fill levels at which events are sent.
    ///
    /// # Errors
    /// As [`Thresholds::check`].
    pub fn set_thresholds(&mut self, thresholds: Thresholds) -> Result<(), DiskError> {
        self.level.set_thresholds(thresholds)
    }

    /// Publishes the gauges of used space and of unfinished requests. To be called before clients get answers, so that a client
    /// that has an answer finds it in the gauges.
    pub fn publish_gauges(&self) {
        let (c, holdings) = (self.counters(), self.engine.holdings());
        const BLOCK: u64 = BLOCK_BYTES as u64;
        set(&c.ram_used_bytes, holdings.ram * BLOCK);
        set(&c.ram_peak_bytes, holdings.ram_peak * BLOCK);
        set(&c.overflow_used_bytes, holdings.overflow * BLOCK);
        set(&c.overflow_file_bytes, holdings.file * BLOCK);
        set(&c.inflight, self.unfinished() as u64);
        set(&c.waiting, self.shared.admission.waiting());
    }
}
