//! Requests that wait: who of them goes on at the end of a turn, what becomes of them when the disk is full, and their
//! withdrawal.
//!
//! Invariant: while the disk waits for room that nobody can make it says so, once.

use crate::disk::Disk;
use crate::error::Errno;
use crate::io::{Event, Io};
use crate::request::Token;
use spillway_layout::FullPolicy;

impl Disk {
    /// Those for which what they waited for is there go on, in their order.
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
            self.run(io, &mut a);
        }
    }

    /// Requests that wait for a staging buffer, a slot or room try again, in their order.
    pub(crate) fn serve_waiters<I: Io>(&mut self, io: &mut I) {
        while let Some(mut a) = self.shared.admission.next_for_part() {
            let waiting = self.shared.admission.part_waiters();
            self.run(io, &mut a);
            if self.shared.admission.part_waiters() > waiting {
                self.shared.admission.stays_first_for_part();
                break;
            }
        }
        let mut moved = false;
        while let Some(i) = self.engine.next_to_serve(&self.shared) {
            let mut a = self.shared.admission.take_for_room(i);
            let before = a.at;
            let waiting = self.shared.admission.room_waiters();
            let full = !self.engine.has_room();
            self.run(io, &mut a);
            let waits_again = self.shared.admission.room_waiters() > waiting;
            let went_on = !waits_again || a.at != before;
            moved |= !full && went_on;
            if waits_again {
                self.shared.admission.keeps_place_for_room(i);
            }
            if !went_on {
                break;
            }
        }
        self.watch_full(io, moved);
        self.finish_all(io);
        self.run_runnable(io);
        self.engine.flush_parts(&mut self.shared, io);
    }

    /// Whether the disk is full, now that those who could go on have (`moved`: some found room).
    fn watch_full<I: Io>(&mut self, io: &mut I, moved: bool) {
        let Disk { shared, engine, .. } = self;
        let waiting = engine.wants_room(shared);
        if shared.admission.is_full() && (moved || !waiting && engine.has_room()) {
            shared.admission.set_full(false);
        }
        // Without a RAM tier a write that only tries the overflow again has found no room yet.
        let on_trial = !shared.spec.mode.has_ram() && shared.health.is_on_trial();
        if !shared.admission.is_full()
            && !on_trial
            && shared.admission.set_full_event_sent(false, shared.map.counters())
        {
            io.event(Event::Room);
        }
        if !waiting || moved || !engine.has_no_room_in_sight(shared) {
            return;
        }
        shared.admission.set_full(true);
        if shared.admission.set_full_event_sent(true, shared.map.counters()) {
            io.event(Event::Full);
        }
        if shared.spec.full == FullPolicy::Fail {
            let errno = engine.why_no_room(shared);
            engine.drop_without_segment(shared, io, |_| Some(errno));
            shared.admission.fail_room_waiters(errno);
        }
    }

    /// Notes how many wait for room.
    pub(crate) fn count_waiting(&mut self) {
        let without_segment = self.engine.without_segment();
        self.shared.admission.count_waiting(&without_segment, self.shared.map.counters());
    }

    /// Nothing is being carried out, and nothing that is under way makes room: what is unfinished waits for room
    /// that somebody else must make, or behind something that does.
    pub fn only_waits_for_room(&self) -> bool {
        self.unfinished() == 0 || self.moves_only(0) && self.engine.has_no_room_in_sight(&self.shared)
    }

    /// The same, or room that a drain may make: for a reset, which does not wait for one.
    pub fn only_waits_for_room_or_drain(&self) -> bool {
        let drains =
            usize::from(self.shared.drain.is_under_way() && !self.engine.holds_requests(&self.shared));
        self.unfinished() == 0
            || self.moves_only(drains) && self.engine.has_no_room_without_drain(&self.shared)
    }

    /// No request can go on, and no more than so many operations are under way.
    fn moves_only(&self, operations: usize) -> bool {
        self.shared.ops.under_way() <= operations && self.shared.admission.has_nothing_to_run()
    }

    /// Withdraws those requests that `which` names: parked ones complete with `errno`, which for a client that
    /// has gone is `CANCELED`; those with operations under way complete when these have ended, soon, and begin
    /// no more of them.
    pub fn cancel<I: Io>(&mut self, io: &mut I, errno: Errno, which: impl Fn(Token) -> bool) {
        let parked = self.shared.admission.withdraw(errno, which);
        self.engine.drop_without_segment(&mut self.shared, io, |a| a.withdrawn);
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
}
