//! What requests do to blocks. There are two ways: through the write cache (RAM tier, overflow log, or both), and in place
//! in a file.
//!
//! Owns the choice between them, made once when the disk is attached to. Invariant: an engine touches blocks, and says of
//! requests only what they wait for and which of their operations have ended; it never calls the disk.

pub(crate) mod cached;
mod discard;
mod holdings;
pub(crate) mod in_place;
pub(crate) mod part;
mod read;

use crate::engine::cached::Cached;
use crate::engine::holdings::Holdings;
use crate::engine::in_place::{InPlace, StateMap};
use crate::engine::part::Parts;
use crate::entry::Place;
use crate::error::{DiskError, Errno};
use crate::io::Io;
use crate::map::BlockMap;
use crate::meta::Meta;
use crate::ops::{Merge, Op};
use crate::shared::Shared;
use crate::table::{Active, Id, Wait};
use spillway_layout::{Block, DiskSpec, Slot};

#[derive(Debug)]
pub(crate) enum Engine {
    Cached(Box<Cached>),
    InPlace(Box<InPlace>),
}

impl Engine {
    /// Takes what the map says of a block that is somewhere. False: it cannot be there.
    pub fn adopt(&mut self, meta: &Meta, block: Block, place: Place) -> bool {
        match self {
            Engine::Cached(e) => e.adopt(meta, block, place),
            Engine::InPlace(e) => e.adopt(block, place),
        }
    }

    /// After the last of them. Whether something must wait for what a dead process had begun, and whether it is only known when
    /// a write has succeeded that a full overflow has room.
    pub fn finish_adopting(
        &mut self,
        map: &BlockMap,
        existing: bool,
        live: Option<StateMap>,
    ) -> (bool, bool) {
        match self {
            Engine::Cached(e) => (e.finish_adopting(map), e.is_on_trial_when_full()),
            Engine::InPlace(e) => {
                e.finish_adopting(map, live);
                (existing, false)
            }
        }
    }

    /// Whether requests, and a reset, must wait for what a dead process had begun.
    #[inline]
    pub fn holds_requests(&self, shared: &Shared) -> bool {
        matches!(self, Engine::InPlace(_)) && shared.drain.is_needed()
    }

    /// Carries a write on as far as it goes.
    #[inline]
    pub fn write<I: Io>(&mut self, shared: &mut Shared, io: &mut I, a: &mut Active) {
        match self {
            Engine::Cached(e) => e.write(shared, io, a),
            Engine::InPlace(e) => e.write(shared, io, a),
        }
    }

    /// FLUSH: of what is in a write cache nothing is promised, of what is in place that it is on the medium.
    pub fn flush<I: Io>(&mut self, shared: &mut Shared, io: &mut I, a: &mut Active) {
        if shared.admission.table().earliest_writer().is_some_and(|sequence| sequence < a.sequence) {
            a.wait = Wait::Writes;
            return;
        }
        a.walked = true;
        if let Engine::InPlace(e) = self {
            let id = shared.admission.begin_operation(a);
            e.sync(shared, io, id);
        }
    }

    /// A read has ended.
    pub fn read_done<I: Io>(&mut self, shared: &mut Shared, io: &mut I, op: Op, bytes: Result<&[u8], Errno>) {
        let of_base = matches!(op, Op::BaseRead { .. } | Op::Merge(Merge { location: None, .. }));
        if let (Err(errno), false) = (bytes, of_base) {
            crate::health::read_failed(io, shared.counters(), errno);
        }
        match (op, self) {
            (Op::BaseRead { id, at }, _) => shared.base_read_done(io, id, at, bytes),
            (Op::OverflowRead(read), engine) => engine.overflow_read_done(shared, io, read, bytes),
            (Op::Merge(merge), Engine::Cached(e)) => e.merge_done(shared, io, merge, bytes),
            (Op::Merge(merge), Engine::InPlace(e)) => e.merge_done(shared, io, merge, bytes),
            (Op::Summary { segment }, Engine::Cached(e)) => e.summary_done(shared, io, segment, bytes),
            (Op::Collect(read), Engine::Cached(e)) => e.collect_read_done(shared, io, read, bytes),
            (other, _) => panic!("{other:?} is not a read of this engine"),
        }
    }

    /// An operation other than a read has ended.
    pub fn op_done<I: Io>(&mut self, shared: &mut Shared, io: &mut I, op: Op, result: Result<(), Errno>) {
        match self {
            Engine::Cached(e) => e.op_done(shared, io, op, result),
            Engine::InPlace(e) => e.op_done(shared, io, op, result),
        }
    }

    /// Before the requests of the turn that wait for room are looked at: the write cache works on what makes room.
    pub fn work<I: Io>(&mut self, shared: &mut Shared, io: &mut I) {
        if let Engine::Cached(e) = self {
            e.work(shared, io);
        }
    }

    /// The same, after it.
    pub fn work_again<I: Io>(&mut self, shared: &mut Shared, io: &mut I) {
        if let Engine::Cached(e) = self {
            e.make_more_room(shared, io);
        }
    }

    /// At the end of a turn: memory comes and goes in steps. True: there is more to do at once.
    pub fn tidy<I: Io>(&mut self, shared: &mut Shared, io: &mut I, idle: bool) -> bool {
        match self {
            Engine::Cached(e) => e.tidy(shared, io, idle),
            Engine::InPlace(_) => false,
        }
    }

    /// Eviction goes on in the next turn.
    pub fn goes_on(&self) -> bool {
        matches!(self, Engine::Cached(e) if e.goes_on())
    }

    /// When it must be asked again even if nothing happens; what is over says nothing.
    pub fn deadlines_ns(&self) -> [u64; 3] {
        match self {
            Engine::Cached(e) => e.deadlines_ns(),
            Engine::InPlace(_) => [0; 3],
        }
    }

    /// Somebody waits for a slot, or for a segment.
    pub fn wants_room(&self, shared: &Shared) -> bool {
        matches!(self, Engine::Cached(e) if e.wants_room(shared))
    }

    /// A write that needs room would find some.
    pub fn has_room(&self) -> bool {
        matches!(self, Engine::Cached(e) if e.has_room())
    }

    /// Who of those that wait for room would get on now.
    pub fn next_to_serve(&self, shared: &Shared) -> Option<usize> {
        if let Engine::Cached(e) = self { e.next_to_serve(shared) } else { None }
    }

    /// A write that needs a staging buffer would find one.
    pub fn can_take_part(&self) -> bool {
        match self {
            Engine::Cached(e) => e.can_take_part(),
            Engine::InPlace(e) => e.can_take_part(),
        }
    }

    /// Nothing that is under way, or can be, will make room for a write.
    pub fn has_no_room_in_sight(&self, shared: &Shared) -> bool {
        let drain_rests = shared.drain.rests(shared.now_ns());
        (!shared.drain.is_needed() || drain_rests) && self.has_no_room_without_drain(shared)
    }

    /// The same, but that a drain under way may yet.
    pub fn has_no_room_without_drain(&self, shared: &Shared) -> bool {
        match self {
            Engine::Cached(e) => e.has_no_room(shared),
            // A barrier that fails may do so for ever.
            Engine::InPlace(_) => shared.admission.has_drain_waiters() && shared.drain.rests(shared.now_ns()),
        }
    }

    /// Requests whose blocks found no segment to go to.
    pub fn without_segment(&self) -> Vec<Id> {
        if let Engine::Cached(e) = self { e.without_segment() } else { Vec::new() }
    }

    /// Gives up blocks of such requests.
    pub fn drop_without_segment<I: Io>(
        &mut self,
        shared: &mut Shared,
        io: &mut I,
        why: impl Fn(&Active) -> Option<Errno>,
    ) {
        if let Engine::Cached(e) = self {
            e.drop_unflushed(shared, io, why);
        }
    }

    /// Writes what gathered meanwhile.
    pub fn flush_parts<I: Io>(&mut self, shared: &mut Shared, io: &mut I) {
        if let Engine::Cached(e) = self {
            e.flush_parts(shared, io);
        }
    }

    /// Why writes that find no room fail: room that cannot be used for errors is no lack of room.
    pub fn why_no_room(&self, shared: &Shared) -> Errno {
        match self {
            Engine::Cached(e) if shared.overflow_rests() && e.has_room_in_log() => shared.health.errno(),
            _ => Errno::NO_SPACE,
        }
    }

    /// The staging buffers; for the self-check.
    pub fn parts(&self) -> &Parts {
        match self {
            Engine::Cached(e) => e.parts(),
            Engine::InPlace(e) => e.parts(),
        }
    }

    /// What it holds.
    pub fn holdings(&self) -> Holdings {
        match self {
            Engine::Cached(e) => e.holdings(),
            Engine::InPlace(e) => e.holdings(),
        }
    }

    /// Blocks in the write cache, and how many there may be. Without one there are none of 1.
    pub fn fill(&self) -> (u64, u64) {
        if let Engine::Cached(e) = self { e.fill() } else { (0, 1) }
    }

    /// Asks the processor to fetch what a use of the slot will change.
    #[inline]
    pub fn prefetch(&self, slot: Slot) {
        if let Engine::Cached(e) = self {
            e.prefetch(slot);
        }
    }

    /// Whether a reset may happen now. It is to be asked again after each turn.
    pub fn is_ready_for_reset<I: Io>(&mut self, shared: &mut Shared, io: &mut I) -> bool {
        match self {
            Engine::Cached(e) => e.is_quiet(),
            Engine::InPlace(e) => e.is_ready_for_reset(shared, io),
        }
    }

    /// The map has forgotten every block.
    pub fn reset(&mut self, shared: &Shared) {
        match self {
            Engine::Cached(e) => e.reset(shared),
            Engine::InPlace(e) => e.reset(),
        }
    }

    /// Brings everything to the medium, for whoever stops. `None`: it is on its way.
    pub fn make_durable<I: Io>(&mut self, shared: &mut Shared, io: &mut I) -> Option<Result<(), Errno>> {
        if let Engine::InPlace(e) = self { e.make_durable(shared, io) } else { Some(Ok(())) }
    }

    /// Changes the limits to those of `spec`, which differs in nothing else.
    pub fn set_limits(&mut self, shared: &mut Shared, spec: DiskSpec) -> Result<(), DiskError> {
        if let Engine::Cached(e) = self { e.set_limits(shared, spec) } else { Ok(()) }
    }
}
