//! The engine that carries requests out on blocks. There are two: through the write cache (RAM tier, overflow log, or both), and
//! in place in a file.
//!
//! Owns the choice between them, made once when the disk is attached to. Invariant: an engine touches blocks, and records for
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
use crate::table::{Active, Id};
use spillway_layout::{Block, DiskSpec, Slot};

#[derive(Debug)]
pub(crate) enum Engine {
    Cached(Box<Cached>),
    InPlace(Box<InPlace>),
}

impl Engine {
    /// Adopts a block where the map says it is. False: it cannot be there.
    pub fn adopt(&mut self, meta: &Meta, block: Block, place: Place) -> bool {
        match self {
            Engine::Cached(e) => e.adopt(meta, block, place),
            Engine::InPlace(e) => e.adopt(block, place),
        }
    }

    /// To be called after the last `adopt`. Returns whether a drain is needed, and whether only a write can show that a full
    /// overflow has space.
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

    /// Whether requests, and a reset, must wait for the drain.
    #[inline]
    pub fn holds_requests(&self, shared: &Shared) -> bool {
        matches!(self, Engine::InPlace(_)) && shared.drain.is_needed()
    }

    /// Continues a write as far as possible without waiting.
    #[inline]
    pub fn write<I: Io>(&mut self, shared: &mut Shared, io: &mut I, a: &mut Active) {
        match self {
            Engine::Cached(e) => e.write(shared, io, a),
            Engine::InPlace(e) => e.write(shared, io, a),
        }
    }

    /// FLUSH, of which no earlier write is being carried out: promises nothing for a write cache; writes in place are on the medium
    /// when it completes.
    pub fn flush<I: Io>(&mut self, shared: &mut Shared, io: &mut I, a: &mut Active) {
        a.walked = true;
        if let Engine::InPlace(e) = self {
            let id = shared.admission.begin_operation(a);
            e.sync(shared, io, id);
        }
    }

    /// Handles the end of a read.
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

    /// Handles the end of an operation other than a read.
    pub fn op_done<I: Io>(&mut self, shared: &mut Shared, io: &mut I, op: Op, result: Result<(), Errno>) {
        match self {
            Engine::Cached(e) => e.op_done(shared, io, op, result),
            Engine::InPlace(e) => e.op_done(shared, io, op, result),
        }
    }

    /// The work before the requests that wait for space are served: the write cache frees space.
    pub fn work<I: Io>(&mut self, shared: &mut Shared, io: &mut I) {
        if let Engine::Cached(e) = self {
            e.work(shared, io);
        }
    }

    /// The work after the requests that wait for space were served.
    pub fn work_again<I: Io>(&mut self, shared: &mut Shared, io: &mut I) {
        if let Engine::Cached(e) = self {
            e.make_more_space(shared, io);
        }
    }

    /// The work at the end of a turn: provides and releases memory in steps, and brings a reset to the medium. True: there is more
    /// to do at once.
    pub fn tidy<I: Io>(&mut self, shared: &mut Shared, io: &mut I, idle: bool) -> bool {
        match self {
            Engine::Cached(e) => e.tidy(shared, io, idle),
            Engine::InPlace(e) => {
                e.flush_reset(shared, io);
                false
            }
        }
    }

    /// Whether eviction has more to do in the next turn.
    pub fn has_more_work(&self) -> bool {
        matches!(self, Engine::Cached(e) if e.has_more_work())
    }

    /// When it must be called again even if nothing happens. Times that have passed do not count.
    pub fn deadlines_ns(&self) -> [u64; 3] {
        match self {
            Engine::Cached(e) => e.deadlines_ns(),
            Engine::InPlace(_) => [0; 3],
        }
    }

    /// Whether a request waits for a slot or for a segment.
    pub fn wants_space(&self, shared: &Shared) -> bool {
        matches!(self, Engine::Cached(e) if e.wants_space(shared))
    }

    /// Whether there is space for a write that needs some.
    pub fn has_space(&self) -> bool {
        matches!(self, Engine::Cached(e) if e.has_space())
    }

    /// Which of the requests that wait for space could go on now.
    pub fn next_to_serve(&self, shared: &Shared) -> Option<usize> {
        if let Engine::Cached(e) = self { e.next_to_serve(shared) } else { None }
    }

    /// Whether there is a staging buffer for a write.
    pub fn can_take_part(&self) -> bool {
        match self {
            Engine::Cached(e) => e.can_take_part(),
            Engine::InPlace(e) => e.can_take_part(),
        }
    }

    /// Whether nothing in flight, and nothing that could be started, frees space for a write.
    pub fn cannot_gain_space(&self, shared: &Shared) -> bool {
        let drain_is_backing_off = shared.drain.is_backing_off(shared.now_ns());
        (!shared.drain.is_needed() || drain_is_backing_off) && self.cannot_gain_space_without_drain(shared)
    }

    /// The same, where a drain in progress does not count.
    pub fn cannot_gain_space_without_drain(&self, shared: &Shared) -> bool {
        match self {
            Engine::Cached(e) => e.has_no_space(shared),
            // A barrier may fail for ever.
            Engine::InPlace(_) => {
                shared.admission.has_drain_waiters() && shared.drain.is_backing_off(shared.now_ns())
            }
        }
    }

    /// Requests whose blocks wait for a segment.
    pub fn without_segment(&self) -> Vec<Id> {
        if let Engine::Cached(e) = self { e.without_segment() } else { Vec::new() }
    }

    /// Drops such blocks of requests.
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

    /// Writes parts that were filled meanwhile.
    pub fn flush_parts<I: Io>(&mut self, shared: &mut Shared, io: &mut I) {
        if let Engine::Cached(e) = self {
            e.flush_parts(shared, io);
        }
    }

    /// The errno of writes that fail because there is no space. Space that cannot be used because of errors is not missing space.
    pub fn no_space_errno(&self, shared: &Shared) -> Errno {
        match self {
            Engine::Cached(e) if shared.overflow_is_backing_off() && e.has_space_in_log() => {
                shared.health.errno()
            }
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

    /// The space that it uses.
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

    /// Whether a reset may happen now. To be called again after each turn until it is true.
    pub fn is_ready_for_reset<I: Io>(&mut self, shared: &mut Shared, io: &mut I) -> bool {
        match self {
            Engine::Cached(e) => e.is_quiet(),
            Engine::InPlace(e) => e.is_ready_for_reset(shared, io),
        }
    }

    /// To be called when the map has forgotten every block.
    pub fn reset(&mut self, shared: &Shared) {
        match self {
            Engine::Cached(e) => e.reset(shared),
            Engine::InPlace(e) => e.reset(),
        }
    }

    /// Brings everything to the medium before the process ends. `None`: it is in progress.
    pub fn make_durable<I: Io>(&mut self, shared: &mut Shared, io: &mut I) -> Option<Result<(), Errno>> {
        if let Engine::InPlace(e) = self { e.make_durable(shared, io) } else { Some(Ok(())) }
    }

    /// Changes the limits to those of `spec`, which differs in nothing else.
    pub fn set_limits(&mut self, shared: &mut Shared, spec: DiskSpec) -> Result<(), DiskError> {
        if let Engine::Cached(e) = self { e.set_limits(shared, spec) } else { Ok(()) }
    }
}
