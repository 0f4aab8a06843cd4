//! Requests that wait: which of them go on at the end of a turn, what happens to them when the disk is full, and their
//! cancellation.
//!
//! Invariant: while requests wait for space and nothing can free any, the event for that was sent once.

use crate::disk::Disk;
use crate::error::Errno;
use crate::io::{Event, Io, OpId};
use crate::request::Token;
use crate::table::Id;
use spillway_layout::FullPolicy;

/// The most reads that may be abandoned at a time: it bounds the memory of a worker whose guest resets its device again and
/// again while the image cannot be read.
const MAX_ABANDONED: usize = 16 << 10;

impl Disk {
    /// Continues the requests that wait for nothing any more, in their order.
    #[inline]
    pub(crate) fn run_runnable<I: Io>(&mut self, io: &mut I) {
        if self.shared.admission.may_run_some() {
            self.run_those(io);
        }
    }

    fn run_those<I: Io>(&mut self, io: &mut I) {
        while let Some(mut a) = self.shared.admission.next_runnable() {
            self.run(io, &mut a);
        }
        for mut a in self.shared.admission.take_flushes() {
            self.run_flush(io, &mut a);
        }
    }

    /// Lets requests that wait for a staging buffer, a slot or space try again, in their order.
    pub(crate) fn serve_waiters<I: Io>(&mut self, io: &mut I) {
        while let Some(mut a) = self.shared.admission.next_part_waiter() {
            let waiting = self.shared.admission.part_waiters();
            self.run(io, &mut a);
            if self.shared.admission.part_waiters() > waiting {
                self.shared.admission.keep_part_waiter_first();
                break;
            }
        }
        let mut moved = false;
        while let Some(i) = self.engine.next_to_serve(&self.shared) {
            let mut a = self.shared.admission.take_space_waiter(i);
            let before = a.at;
            let waiting = self.shared.admission.space_waiters();
            let full = !self.engine.has_space();
            self.run(io, &mut a);
            let waits_again = self.shared.admission.space_waiters() > waiting;
            let progressed = !waits_again || a.at != before;
            moved |= !full && progressed;
            if waits_again {
                self.shared.admission.keep_space_waiter_at(i);
            }
            if !progressed {
                break;
            }
        }
        self.watch_full(io, moved);
        self.finish_all(io);
        self.run_runnable(io);
        self.engine.flush_parts(&mut self.shared, io);
    }

    /// Decides whether the disk is full, after the requests that could go on did (`moved`: some got space).
    fn watch_full<I: Io>(&mut self, io: &mut I, moved: bool) {
        let Disk { shared, engine, .. } = self;
        let waiting = engine.wants_space(shared);
        if shared.admission.is_full() && (moved || !waiting && engine.has_space()) {
            shared.admission.set_full(false);
        }
        // Without a RAM tier a write that tries the overflow again does not show that there is space before it has succeeded.
        let on_trial = !shared.spec.mode.has_ram() && shared.health.is_on_trial();
        if !shared.admission.is_full()
            && !on_trial
            && shared.admission.set_full_event_sent(false, shared.map.counters())
        {
            io.event(Event::SpaceAvailable);
        }
        if !waiting || moved || !engine.cannot_gain_space(shared) {
            return;
        }
        shared.admission.set_full(true);
        if shared.admission.set_full_event_sent(true, shared.map.counters()) {
            io.event(Event::Full);
        }
        if shared.spec.full == FullPolicy::Fail {
            let errno = engine.no_space_errno(shared);
            engine.drop_without_segment(shared, io, |_| Some(errno));
            shared.admission.fail_space_waiters(errno);
        }
    }

    /// Counts the requests that wait for space.
    pub(crate) fn count_waiting(&mut self) {
        let without_segment = self.engine.without_segment();
        self.shared.admission.count_waiting(&without_segment, self.shared.map.counters());
    }

    /// Whether all unfinished requests wait for space that only somebody outside can free, or behind such a request.
    pub fn only_waits_for_space(&self) -> bool {
        self.unfinished() == 0 || self.has_in_flight_only(0) && self.engine.cannot_gain_space(&self.shared)
    }

    /// The same, where space that a drain may free does not count: a reset does not wait for a drain.
    pub fn only_waits_for_space_or_drain(&self) -> bool {
        let drains =
            usize::from(self.shared.drain.is_in_flight() && !self.engine.holds_requests(&self.shared));
        self.unfinished() == 0
            || self.has_in_flight_only(drains) && self.engine.cannot_gain_space_without_drain(&self.shared)
    }

    /// Whether no request can go on, and at most so many operations are in flight.
    fn has_in_flight_only(&self, operations: usize) -> bool {
        self.shared.ops.in_flight() <= operations && self.shared.admission.has_nothing_to_run()
    }

    /// Cancels the requests for which `which` is true. Those that wait complete with `errno`, which is `CANCELED` if their client
    /// has gone. Those with operations in flight start no more of them, and complete when these have ended.
    pub fn cancel<I: Io>(&mut self, io: &mut I, errno: Errno, which: impl Fn(Token) -> bool) {
        let parked = self.shared.admission.cancel(errno, which);
        self.engine.drop_without_segment(&mut self.shared, io, |a| a.canceled);
        self.finish_all(io);
        for id in parked {
            // Its last operation may have ended with the parts that were just dropped.
            if self.shared.admission.table().exists(id) {
                self.shared.admission.fail(id, errno);
            }
        }
        self.finish_all(io);
        self.shared.admission.count_stalls(self.shared.map.counters());
        self.count_waiting();
    }

    /// The requests that wait for nothing but reads of the base image: their tokens, and when each came.
    pub fn waiting_for_base(&self) -> Vec<(Token, u64)> {
        let reads = self.shared.ops.base_reads();
        let of = |reads: &[(Id, OpId)]| {
            let a = self.shared.admission.table().get(reads[0].0);
            (a.pending as usize == reads.len()).then_some((a.request.token, a.start_ns))
        };
        reads.chunk_by(|a, b| a.0 == b.0).filter_map(of).collect()
    }

    /// Completes canceled requests that wait for nothing but reads of the base image, with `CANCELED`: those for which `which` is
    /// true, and which came at `came_by_ns` or before. What these reads bring is dropped. Returns when the earliest of the others
    /// came that will wait for nothing else either.
    pub fn abandon_base_reads<I: Io>(
        &mut self,
        io: &mut I,
        came_by_ns: u64,
        which: impl Fn(Token) -> bool,
    ) -> Option<u64> {
        let mut next_ns: Option<u64> = None;
        for reads in self.shared.ops.base_reads().chunk_by(|a, b| a.0 == b.0) {
            let a = self.shared.admission.table().get(reads[0].0);
            let waits_for_no_more = a.pending as usize == reads.len();
            if a.canceled.is_none()
                || !waits_for_no_more
                || !which(a.request.token)
                || self.shared.ops.abandoned() + reads.len() > MAX_ABANDONED
            {
                continue;
            }
            if a.start_ns > came_by_ns {
                next_ns = Some(next_ns.map_or(a.start_ns, |ns| ns.min(a.start_ns)));
                continue;
            }
            for &(_, op) in reads {
                let op = self.shared.ops.abandon(op);
                self.engine.read_done(&mut self.shared, io, op, Err(Errno::CANCELED));
            }
        }
        self.finish_all(io);
        next_ns
    }
}
