//! Requests that wait: for an earlier one, for a slot, for room, for a staging buffer; and their withdrawal.
//!
//! Invariant: a waiting request is on exactly one list, and the lists are served in order of arrival.

use crate::counters::{add, set};
use crate::disk::Disk;
use crate::drain::Drain;
use crate::entry::Place;
use crate::error::Errno;
use crate::io::{Event, Io};
use crate::log::Stream;
use crate::part::{Source, Staged};
use crate::request::Token;
use crate::spec::{FullPolicy, Mode};
use crate::table::{Active, Id, Wait};
use crate::units::{BLOCK_BYTES, Slot};

impl Disk {
    /// The request waits until that row is finished, and is looked at again then.
    pub(crate) fn wait_behind(&mut self, mut a: Active, blocker: Id) {
        a.wait = Wait::Overlap;
        let id = match a.id {
            Some(id) => {
                *self.table.get_mut(id) = a;
                id
            }
            None => self.table.insert(&mut a),
        };
        self.behind.entry(blocker).or_default().push((id, a.sequence));
    }

    /// This row is finished: those behind it may go on, if nothing else stands in their way.
    pub(crate) fn wake_behind(&mut self, id: Id) {
        if self.behind.is_empty() {
            return;
        }
        self.runnable.extend(self.behind.remove(&id).into_iter().flatten());
    }

    pub(crate) fn run_runnable<I: Io>(&mut self, io: &mut I) {
        while let Some(&(id, sequence)) = self.runnable.front() {
            // It may have been withdrawn meanwhile.
            let a = self.table.find(id, sequence).copied();
            if let Some(mut a) = a.filter(|a| a.wait == Wait::Overlap) {
                if self.retests == 0 {
                    return;
                }
                self.retests -= 1;
                self.runnable.pop_front();
                match self.table.blocker_among_all(&a) {
                    Some(blocker) => self.wait_behind(a, blocker),
                    None => self.run(io, &mut a),
                }
            } else {
                self.runnable.pop_front();
                if let Some(mut a) = a.filter(|a| a.wait == Wait::Nothing) {
                    self.run(io, &mut a);
                }
            }
        }
        if !self.flush_waiters.is_empty() {
            let earliest = self.table.earliest_writer().unwrap_or(u64::MAX);
            for id in std::mem::take(&mut self.flush_waiters) {
                let mut a = *self.table.get(id);
                if a.sequence < earliest {
                    self.run(io, &mut a);
                } else {
                    self.flush_waiters.push(id);
                }
            }
        }
    }

    /// Requests that wait for a staging buffer, a slot or room try again, in their order.
    pub(crate) fn serve_waiters<I: Io>(&mut self, io: &mut I) {
        while let Some(id) = self.part_waiters.pop_front() {
            let mut a = *self.table.get(id);
            let waiting = self.part_waiters.len();
            self.run(io, &mut a);
            if self.part_waiters.len() > waiting {
                // It was the first and stays so.
                self.part_waiters.rotate_right(1);
                break;
            }
        }
        let mut moved = false;
        while let Some(i) = self.next_to_serve() {
            let id = self.room_waiters.remove(i).expect("it is one of them");
            let mut a = *self.table.get(id);
            let before = a.at;
            let waiting = self.room_waiters.len();
            let full = !self.has_room();
            self.run(io, &mut a);
            if self.room_waiters.len() > waiting {
                let id = self.room_waiters.pop_back().expect("it is back");
                self.room_waiters.insert(i, id);
                moved |= !full && a.at != before;
                if a.at == before {
                    break;
                }
            } else {
                moved |= !full;
            }
        }
        let waiting = self.wants_room();
        if self.full && (moved || !waiting && self.has_room()) {
            self.full = false;
        }
        // Without a RAM tier a write that only tries the overflow again has found no room yet.
        let on_trial = !self.spec.mode.has_ram() && self.health.is_on_trial();
        if self.told_full && !self.full && !on_trial {
            self.set_told_full(false);
            io.event(Event::Room);
        }
        if waiting && !moved && self.no_room_in_sight() {
            self.full = true;
            if !self.told_full {
                self.set_told_full(true);
                io.event(Event::Full);
            }
            if self.spec.full == FullPolicy::Fail {
                // Room that cannot be used for errors is no lack of room.
                let resting = self.health.rests(self.now_ns) && self.log.room() > 0;
                let errno = if resting { self.health.errno() } else { Errno::NO_SPACE };
                self.drop_unflushed(io, |_| Some(errno));
                while let Some(id) = self.room_waiters.pop_front() {
                    self.fail_parked(io, id, errno);
                }
            }
        }
        self.run_runnable(io);
        self.flush_parts(io);
    }

    /// Ends a request that is on no list any more.
    fn fail_parked<I: Io>(&mut self, io: &mut I, id: Id, errno: Errno) {
        let a = self.table.get_mut(id);
        a.errno.get_or_insert(errno);
        a.wait = Wait::Operations;
        if a.pending == 0 {
            let a = *a;
            self.finish(io, &a);
        }
    }

    /// Gives up blocks of requests that found no segment to go to.
    pub(crate) fn drop_unflushed<I: Io>(&mut self, io: &mut I, why: impl Fn(&Active) -> Option<Errno>) {
        for _ in 0..self.unflushed.len() {
            let part = self.unflushed.pop_front().expect("counted");
            let (mut staying, mut leaving): (Vec<Staged>, _) = (Vec::new(), Vec::new());
            for (page, staged) in std::mem::take(&mut self.parts.get(part).staged).into_iter().enumerate() {
                let leaves = match staged.source {
                    Source::Write(id) => why(self.table.get(id)).map(|errno| (id, errno)),
                    Source::Evict(_) | Source::Collect(_) => None,
                };
                match leaves {
                    Some((id, errno)) => leaving.push((staged, id, errno)),
                    None => {
                        let from = page * BLOCK_BYTES;
                        io.part(part).copy_within(from..from + BLOCK_BYTES, staying.len() * BLOCK_BYTES);
                        staying.push(staged);
                    }
                }
            }
            if staying.is_empty() {
                self.parts.release(part);
            } else {
                self.parts.get(part).staged = staying;
                self.unflushed.push_back(part);
            }
            for (staged, id, errno) in leaving {
                if !matches!(self.place(staged.block), Place::Overflow(..)) {
                    self.log.arriving -= 1;
                }
                self.operation_done(io, id, Err(errno));
            }
        }
    }

    /// A slot for the request's next block, which now is at `old`; without one it waits. Nobody passes those who
    /// waited before, but for writes that replace a block of a full log: one slot is for them alone.
    #[inline]
    pub(crate) fn slot_for<I: Io>(&mut self, io: &mut I, a: &mut Active, old: Place) -> Option<Slot> {
        let replaces = self.log.is_over() && matches!(old, Place::Overflow(..));
        let may = replaces || self.has_room() && (a.stalled || self.room_waiters.is_empty());
        let slot = if may { self.ram.allocate(io, &self.meta) } else { None };
        if slot.is_none() {
            a.wait = Wait::Room;
        }
        slot
    }

    /// Whether the log can take another block of the request, which now is at `old`; if not, it waits.
    pub(crate) fn log_has_room_for(&mut self, a: &mut Active, old: Place) -> bool {
        let overwrites = matches!(old, Place::Overflow(..));
        let room = overwrites || self.log.room() > 0 && (a.stalled || self.room_waiters.is_empty());
        if !room {
            a.wait = Wait::Room;
        }
        room
    }

    fn set_told_full(&mut self, full: bool) {
        self.told_full = full;
        set(&self.counters().is_full, full.into());
    }

    /// Somebody waits for a slot, or for a segment.
    pub(crate) fn wants_room(&self) -> bool {
        !self.room_waiters.is_empty() || !self.unflushed.is_empty()
    }

    /// Those that were said to wait have waited until now.
    pub(crate) fn count_stalls(&mut self) {
        let ns = self.now_ns.saturating_sub(self.stalls_until_ns);
        if self.waiting > 0 {
            add(&self.meta.counters().stalls_ns, ns * self.waiting);
        }
        self.stalls_until_ns = self.now_ns;
    }

    /// How many wait for a slot or a place in the log, or have blocks that found no segment; these count as stalled from here on.
    pub(crate) fn count_waiting(&mut self) -> u64 {
        let mut waiting = self.room_waiters.len() as u64;
        if self.unflushed.is_empty() {
            return waiting;
        }
        let mut writers = Vec::new();
        for &part in &self.unflushed {
            for staged in &self.parts.get(part).staged {
                if let Source::Write(id) = staged.source
                    && !writers.contains(&id)
                {
                    writers.push(id);
                }
            }
        }
        for id in writers {
            let a = self.table.get_mut(id);
            waiting += u64::from(a.wait != Wait::Room);
            if !std::mem::replace(&mut a.stalled, true) {
                add(&self.meta.counters().stalls, 1);
            }
        }
        waiting
    }

    /// A write that needs room would find some.
    pub(crate) fn has_room(&self) -> bool {
        if self.spec.mode.has_ram() {
            self.ram.free() > u32::from(self.log.is_over())
        } else {
            self.log.room() > 0
        }
    }

    /// Who of those that wait for room would get on now: the first, or of a full log the first that replaces one
    /// of its blocks.
    pub(crate) fn next_to_serve(&self) -> Option<usize> {
        let has_ram = self.spec.mode.has_ram();
        let can_take = if has_ram {
            self.ram.free() > 0
        } else {
            self.unflushed.is_empty()
                && !self.health.rests(self.now_ns)
                && self.log.can_write()
                && self.parts.can_take(Stream::Write)
        };
        if self.room_waiters.is_empty() || !can_take {
            return None;
        }
        if self.has_room() { Some(0) } else { self.first_that_replaces() }
    }

    /// The first waiting write whose next block is in the log.
    pub(crate) fn first_that_replaces(&self) -> Option<usize> {
        let replaces = |&id: &Id| {
            let a = self.table.get(id);
            matches!(self.place(self.piece(a).block), Place::Overflow(..))
        };
        self.room_waiters.iter().position(replaces)
    }

    /// Blocks that eviction may add to the log. A full log takes one more for a write that replaces a block in
    /// it: the slot is for such a write only, and with its commit the log holds one less.
    pub(crate) fn room_to_evict(&self) -> u64 {
        match self.log.room() {
            0 if self.ram.free() == 0 && self.ram.evicting() == 0 => {
                u64::from(self.first_that_replaces().is_some())
            }
            room => room,
        }
    }

    /// Nothing that is under way, or can be, will make room for a write.
    fn no_room_in_sight(&self) -> bool {
        (!self.is_draining() || self.drain_rests()) && self.no_room_without_drain()
    }

    /// The same, but that a drain under way may yet.
    fn no_room_without_drain(&self) -> bool {
        let log_is_at_rest = self.victim.is_none()
            && self.punches == 0
            && !self.evict_again
            && self.parts.in_use() == self.unflushed.len();
        let room = if self.spec.mode.has_ram() { self.room_to_evict() } else { self.log.room() };
        let log_is_full = room == 0
            || self.health.rests(self.now_ns)
            || !(self.log.can_write() || self.log.can_collect() && self.log.emptiest().is_some());
        match self.spec.mode {
            Mode::Ram => self.ram.free() == 0,
            Mode::RamOverflow => {
                self.next_to_serve().is_none() && self.ram.evicting() == 0 && log_is_at_rest && log_is_full
            }
            Mode::Overflow => log_is_at_rest && log_is_full,
            // A barrier that fails may do so for ever.
            Mode::Direct | Mode::Persistent | Mode::Ephemeral => {
                !self.drain_waiters.is_empty() && self.drain_rests()
            }
        }
    }

    /// Nothing is being carried out, and nothing that is under way makes room: what is unfinished waits for room
    /// that somebody else must make, or behind something that does.
    pub fn only_waits_for_room(&self) -> bool {
        self.table.is_empty() || self.moves_only(0) && self.no_room_in_sight()
    }

    /// The same, or room that a drain may make: for a reset, which does not wait for one.
    pub fn only_waits_for_room_or_drain(&self) -> bool {
        let drains = usize::from(self.drain == Drain::UnderWay && !self.holds_requests());
        self.table.is_empty() || self.moves_only(drains) && self.no_room_without_drain()
    }

    /// No request can go on, and no more than so many operations are under way.
    fn moves_only(&self, operations: usize) -> bool {
        self.ops.under_way() <= operations && self.runnable.is_empty() && self.turn_waiters.is_empty()
    }

    /// Withdraws those requests that `which` names: parked ones complete with `errno`, which for a client that
    /// has gone is `CANCELED`; those with operations under way complete when these have ended, soon, and begin
    /// no more of them.
    pub fn cancel<I: Io>(&mut self, io: &mut I, errno: Errno, which: impl Fn(Token) -> bool) {
        let mut parked = Vec::new();
        for (id, a) in self.table.iter_mut() {
            if !which(a.request.token) {
                continue;
            }
            a.withdrawn = Some(errno);
            if !(a.walked && a.wait == Wait::Operations) {
                a.errno.get_or_insert(errno);
                if a.wait != Wait::Operations {
                    a.wait = Wait::Operations;
                    parked.push(id);
                }
            }
        }
        if !parked.is_empty() {
            self.forget_parked();
        }
        self.drop_unflushed(io, |a| a.withdrawn);
        for id in parked {
            // Its last operation may have ended with the parts that were just dropped.
            if self.table.exists(id) {
                self.fail_parked(io, id, errno);
            }
        }
        self.count_stalls();
        self.waiting = self.count_waiting();
    }

    /// Takes requests that have stopped waiting off the lists: none holds one that waits for its operations.
    fn forget_parked(&mut self) {
        let table = &self.table;
        let still = |wait: Wait| move |id: &Id| table.get(*id).wait == wait;
        self.room_waiters.retain(still(Wait::Room));
        self.part_waiters.retain(still(Wait::Part));
        self.turn_waiters.retain(still(Wait::Turn));
        self.drain_waiters.retain(still(Wait::Drain));
        self.flush_waiters.retain(still(Wait::Writes));
    }

    /// One of its operations has failed while it waits to begin more of them: it waits no longer.
    pub(crate) fn unpark(&mut self, id: Id) {
        self.table.get_mut(id).wait = Wait::Operations;
        self.forget_parked();
    }
}
