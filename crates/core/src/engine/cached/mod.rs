//! The write cache: a RAM tier, an overflow log, or a RAM tier in front of an overflow log.
//!
//! Owns both tiers and what moves blocks between them: eviction, the collector, promotion, the punching of empty segments. Each
//! works on the tiers that are handed to it and knows nothing of the others. Invariant: of two places of a block, the map names
//! the one that holds its newest content.

mod append;
mod check;
mod collect;
mod evict;
mod limits;
mod log;
mod punch;
mod ram;
mod segments;
mod slots;
mod space;
mod stretch;
mod summary;
mod tiers;
mod write;

pub use ram::DataMemory;

use crate::engine::cached::collect::Collector;
use crate::engine::cached::evict::Eviction;
use crate::engine::cached::log::Doubt;
use crate::engine::cached::punch::Punching;
use crate::engine::cached::tiers::Tiers;
use crate::engine::holdings::Holdings;
use crate::engine::part::{Source, Stream};
use crate::entry::{Entry, Place};
use crate::error::Errno;
use crate::health::WRITE_TRIES;
use crate::io::{Event, Io, PartId};
use crate::map::BlockMap;
use crate::meta::Meta;
use crate::ops::{CollectRead, Op};
use crate::shared::Shared;
use crate::table::Active;
use spillway_layout::{BLOCK_BYTES, Block, DiskSpec, FullPolicy, Location, Mode, Slot, add, get};
use spillway_policy::{RecentReads, Reserve};

pub(crate) struct Cached {
    tiers: Tiers,
    recent_reads: RecentReads,
    eviction: Eviction,
    collector: Collector,
    punching: Punching,
    /// A block was written to the overflow in this generation.
    overflowed: bool,
    slots_scratch: Vec<Slot>,
}

impl Cached {
    pub fn new(spec: &DiskSpec, data: DataMemory) -> Cached {
        Cached {
            tiers: Tiers::new(spec, data),
            recent_reads: RecentReads::new(spec.slots().into(), 1.0),
            eviction: Eviction::default(),
            collector: Collector::default(),
            punching: Punching::default(),
            overflowed: false,
            slots_scratch: Vec::new(),
        }
    }

    // Attaching.

    /// Adopts a block where the map says it is. False: it cannot be there.
    pub fn adopt(&mut self, meta: &Meta, block: Block, place: Place) -> bool {
        match place {
            Place::Ram(slot) => self.tiers.ram.adopt(slot, block),
            Place::Overflow(location, _) => {
                self.tiers.has_log && self.tiers.log.adopt(location, block.0, meta)
            }
            Place::Base | Place::Zero => true,
        }
    }

    /// To be called after the last `adopt`. True: some segments wait until no I/O of a dead process can land.
    pub fn finish_adopting(&mut self, map: &BlockMap) -> bool {
        let tiers = &mut self.tiers;
        tiers.ram.finish_adopting(map.meta());
        tiers.log.finish_adopting(map.meta());
        tiers.ram.remember_peak(get(&map.counters().ram_peak_bytes) / BLOCK_BYTES as u64);
        self.overflowed = tiers.log.live() > 0;
        tiers.log.is_draining()
    }

    /// Whether only a write can show that the file system has space: when a disk without a RAM tier was full.
    pub fn is_on_trial_when_full(&self) -> bool {
        !self.tiers.has_ram && self.tiers.log.space() > 0
    }

    /// Handles the end of the barrier for I/O of a dead process.
    fn drained(&mut self, shared: &mut Shared, result: Result<(), Errno>) {
        if result.is_err() {
            let now_ns = shared.now_ns();
            shared.drain.fail(now_ns);
        } else {
            shared.drain.end();
            self.tiers.log.drained(shared.map.meta());
        }
    }

    // Requests.

    #[inline]
    pub fn write<I: Io>(&mut self, shared: &mut Shared, io: &mut I, a: &mut Active) {
        if self.tiers.has_ram {
            self.write_to_ram(shared, io, a);
        } else {
            self.write_to_log(shared, io, a);
        }
    }

    #[inline]
    pub fn prefetch(&self, slot: Slot) {
        self.tiers.ram.prefetch(slot);
    }

    /// Counts a read of the block in this slot.
    #[inline]
    pub fn touch(&mut self, slot: Slot) {
        self.tiers.ram.touch(slot);
    }

    /// Counts a read of this place that begins.
    pub fn pin(&mut self, location: Location) {
        self.tiers.pin(location);
    }

    /// Counts the end of such a read.
    pub fn unpin(&mut self, shared: &Shared, location: Location) {
        self.tiers.unpin(&shared.map, location);
    }

    /// Checks a block that was read from the log.
    pub fn verify<I: Io>(shared: &Shared, io: &mut I, block: Block, content: &[u8]) -> Result<(), Errno> {
        Tiers::verify(&shared.map, io, block, content)
    }

    /// Frees the space of a block's earlier content. Returns the bytes freed.
    pub fn give_up(&mut self, map: &BlockMap, old: Place, to_host: bool) -> u64 {
        self.tiers.give_up(map, old, to_host)
    }

    /// Promotes a block to RAM if it is read again and again. Its `content` was read from the log and checked, for a request
    /// that still keeps every write of it waiting. Takes no slot that a write may need soon; eviction makes up for it by colder
    /// blocks.
    pub fn promote<I: Io>(&mut self, shared: &mut Shared, io: &mut I, block: Block, content: &[u8]) {
        let tiers = &mut self.tiers;
        if !tiers.evicts()
            || !Reserve::of(tiers.ram.limit(), shared.spec.shape.part_blocks).may_promote(tiers.ram.free())
            || tiers.wants_space(shared)
            || shared.overflow_is_backing_off()
            // Another read may have promoted it while this one was in flight.
            || !matches!(shared.map.place(block), Place::Overflow(..))
            || !self.recent_reads.count(block.0)
        {
            return;
        }
        let Some(slot) = tiers.ram.allocate(io, shared.map.meta()) else { return };
        io.slot(slot).copy_from_slice(content);
        tiers.ram.own(slot, block);
        tiers.commit(&mut shared.map, block, Entry::ram(slot));
        add(&shared.counters().promoted_blocks, 1);
    }

    // Operations that have ended.

    pub fn summary_done<I: Io>(
        &mut self,
        shared: &mut Shared,
        io: &mut I,
        segment: u32,
        bytes: Result<&[u8], Errno>,
    ) {
        self.collector.summary_done(&mut self.tiers, shared, io, segment, bytes);
    }

    pub fn collect_read_done<I: Io>(
        &mut self,
        shared: &mut Shared,
        io: &mut I,
        read: CollectRead,
        bytes: Result<&[u8], Errno>,
    ) {
        self.collector.read_done(&mut self.tiers, shared, io, read, bytes);
    }

    pub fn op_done<I: Io>(&mut self, shared: &mut Shared, io: &mut I, op: Op, result: Result<(), Errno>) {
        match op {
            Op::PartWrite { part } => self.part_written(shared, io, part, result),
            Op::Drain => self.drained(shared, result),
            Op::Punch { segment } => self.punching.done(&mut self.tiers, shared, segment, result),
            other => panic!("{other:?} is not one of this engine"),
        }
    }

    /// Handles the end of a part's write: commits those of its blocks that have not changed meanwhile.
    fn part_written<I: Io>(
        &mut self,
        shared: &mut Shared,
        io: &mut I,
        id: PartId,
        result: Result<(), Errno>,
    ) {
        let tiers = &mut self.tiers;
        let part = tiers.parts.get(id);
        let staged = std::mem::take(&mut part.staged);
        let extent = part.extent.expect("a part being written has an extent");
        let stream = part.stream;
        match result {
            Ok(()) => {
                shared.write_succeeded(io);
                if extent.seals {
                    tiers.log.kept_owners.remove(&extent.segment);
                }
            }
            Err(errno) => {
                shared.write_failed(io, errno);
                let doubt = if errno == Errno::NO_SPACE { Doubt::Space } else { Doubt::Spot };
                tiers.log.doubt(extent.segment, doubt);
                tiers.log.abandon(stream, extent.segment, shared.map.meta());
                let part = tiers.parts.get(id);
                part.failures += 1;
                // Blocks of requests are tried in other segments. Blocks from RAM stay there, and the collector's where they
                // are. While the file system is full they wait.
                let again = match errno {
                    Errno::NO_SPACE => shared.spec.full == FullPolicy::Pause,
                    _ => part.failures < WRITE_TRIES,
                };
                if again && !tiers.has_ram && stream == Stream::Write {
                    add(&shared.counters().lost_blocks, staged.len() as u64);
                    part.staged = staged;
                    part.extent = None;
                    tiers.unflushed.push_back(id);
                    tiers.log.appended(extent.segment, shared.map.meta());
                    self.drop_unflushed(shared, io, |a| a.canceled);
                    return;
                }
            }
        }
        let committed = tiers.commit_part(shared, id, &staged, result.is_ok());
        add(&shared.counters().lost_blocks, (staged.len() - committed) as u64);
        if !self.overflowed && tiers.log.live() > 0 {
            self.overflowed = true;
            io.event(Event::FirstOverflow);
        }
        for s in &staged {
            if let Source::Write(request) = s.source {
                shared.admission.operation_done(request, result);
            }
        }
        // The list keeps its memory.
        tiers.parts.get(id).staged = staged;
        tiers.parts.release(id);
        tiers.log.appended(extent.segment, shared.map.meta());
        if stream == Stream::Collect {
            self.collector.part_written(tiers, shared, io);
        }
    }

    // The turn.

    /// The work before the waiting requests are served: writes filled parts, and frees space.
    pub fn work<I: Io>(&mut self, shared: &mut Shared, io: &mut I) {
        self.eviction.begin_turn();
        self.flush_parts(shared, io);
        self.make_space(shared, io);
    }

    /// Continues eviction and collection.
    fn make_space<I: Io>(&mut self, shared: &mut Shared, io: &mut I) {
        if !self.tiers.has_log {
            return;
        }
        self.collector.step(&mut self.tiers, shared, io);
        if self.tiers.evicts() {
            self.eviction.step(&mut self.tiers, shared, io);
        }
    }

    /// The work after the waiting requests were served. They may have used up the free space, or made segments worth
    /// collecting: more space must be on its way before the owner sleeps. Punches come last, so that a segment that these
    /// requests have emptied does not wait for another turn.
    pub fn make_more_space<I: Io>(&mut self, shared: &mut Shared, io: &mut I) {
        if !self.tiers.has_log {
            return;
        }
        if self.tiers.wants_space(shared) {
            self.make_space(shared, io);
        }
        self.punching.step(&mut self.tiers, shared, io);
    }

    /// Gives slots memory ahead of use, and releases memory that is not needed. True: there is more to do at once.
    pub fn tidy<I: Io>(&mut self, shared: &mut Shared, io: &mut I, idle: bool) -> bool {
        self.lower_ram_ceiling(shared);
        let ram = &mut self.tiers.ram;
        ram.populate(io, shared.map.meta(), shared.now_ns(), idle)
            | ram.give_back(io, &mut self.slots_scratch)
    }

    /// Whether eviction has more to do in the next turn.
    pub fn has_more_work(&self) -> bool {
        self.eviction.has_more_work()
    }

    pub fn deadlines_ns(&self) -> [u64; 3] {
        [self.collector.deadline_ns(), self.punching.deadline_ns(), self.tiers.ram.deadline_ns()]
    }

    // Space.

    pub fn wants_space(&self, shared: &Shared) -> bool {
        self.tiers.wants_space(shared)
    }

    pub fn has_space(&self) -> bool {
        self.tiers.has_space()
    }

    pub fn has_space_in_log(&self) -> bool {
        self.tiers.log.space() > 0
    }

    pub fn next_to_serve(&self, shared: &Shared) -> Option<usize> {
        self.tiers.next_to_serve(shared)
    }

    pub fn can_take_part(&self) -> bool {
        self.tiers.parts.can_take(Stream::Write)
    }

    /// Whether nothing in flight, and nothing that could be started, frees space for a write. A drain may still do so.
    pub fn has_no_space(&self, shared: &Shared) -> bool {
        let tiers = &self.tiers;
        let log_is_idle = || {
            !self.collector.is_busy()
                && !self.punching.is_busy()
                && !self.eviction.has_more_work()
                && tiers.parts.in_use() == tiers.unflushed.len()
        };
        match tiers.mode() {
            Mode::Ram => tiers.ram.free() == 0,
            Mode::RamOverflow => {
                tiers.next_to_serve(shared).is_none()
                    && tiers.ram.evicting() == 0
                    && log_is_idle()
                    && tiers.log_is_full(shared)
            }
            _ => log_is_idle() && tiers.log_is_full(shared),
        }
    }

    // Figures, and the reset.

    /// Blocks in the cache, and how many there may be.
    pub fn fill(&self) -> (u64, u64) {
        let (ram, log) = (u64::from(self.tiers.ram.used()), self.tiers.log.live());
        let (ram_limit, log_limit) = (u64::from(self.tiers.ram.limit()), self.tiers.log.capacity());
        match self.tiers.mode() {
            Mode::RamOverflow => (ram + log, ram_limit + log_limit),
            Mode::Ram => (ram, ram_limit),
            _ => (log, log_limit),
        }
    }

    pub fn holdings(&self) -> Holdings {
        Holdings {
            ram: self.tiers.ram.used().into(),
            ram_peak: self.tiers.ram.peak().into(),
            overflow: self.tiers.log.live(),
            file: self.tiers.log.file_blocks(),
        }
    }

    /// Whether nothing is in flight.
    pub fn is_quiet(&self) -> bool {
        self.tiers.parts.in_use() == 0 && !self.collector.is_busy() && !self.punching.is_busy()
    }

    /// To be called when the map has forgotten every block.
    pub fn reset(&mut self, shared: &Shared) {
        self.tiers.ram.reset();
        self.tiers.log.reset(shared.map.meta());
        self.recent_reads = RecentReads::new(shared.spec.slots().into(), 1.0);
        self.overflowed = false;
    }
}
