//! Requests that wait: for an earlier one, for a slot, for room, for a staging buffer; and their withdrawal.
//!
//! Invariant: a waiting request is on exactly one list, and the lists are served in order of arrival.

use crate::disk::Disk;
use crate::entry::Place;
use crate::error::Errno;
use crate::io::{Event, Io};
use crate::part::{Source, Staged};
use crate::request::Token;
use crate::spec::{FullPolicy, Mode};
use crate::table::{Active, Id, Wait};

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
        while let Some(&id) = self.room_waiters.front() {
            if self.spec.mode.has_ram() && self.ram.free() == 0 {
                break;
            }
            self.room_waiters.pop_front();
            let mut a = *self.table.get(id);
            let before = a.at;
            let waiting = self.room_waiters.len();
            self.run(io, &mut a);
            if self.room_waiters.len() > waiting {
                self.room_waiters.rotate_right(1);
                moved |= a.at != before;
                break;
            }
            moved = true;
        }
        let waiting = self.wants_room();
        if self.full && (moved || !waiting && self.has_room()) {
            self.full = false;
            io.event(Event::Room);
        }
        if waiting && !moved && self.no_room_in_sight() {
            if !self.full {
                self.full = true;
                io.event(Event::Full);
            }
            if self.spec.full == FullPolicy::Fail {
                self.drop_unflushed(io, Errno::NO_SPACE, |_| true);
                while let Some(id) = self.room_waiters.pop_front() {
                    self.fail_parked(io, id, Errno::NO_SPACE);
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
    fn drop_unflushed<I: Io>(&mut self, io: &mut I, errno: Errno, which: impl Fn(Token) -> bool) {
        for _ in 0..self.unflushed.len() {
            let part = self.unflushed.pop_front().expect("counted");
            let staged = std::mem::take(&mut self.parts.get(part).staged);
            let leaves = |s: &Staged| match s.source {
                Source::Write(id) => which(self.table.get(id).request.token),
                Source::Evict(_) | Source::Collect(_) => false,
            };
            // They leave together: the bytes of a part do not move.
            if !staged.iter().all(leaves) {
                self.parts.get(part).staged = staged;
                self.unflushed.push_back(part);
                continue;
            }
            self.parts.release(part);
            for staged in staged {
                let Source::Write(id) = staged.source else { continue };
                if !matches!(self.place(staged.block), Place::Overflow(..)) {
                    self.log.arriving -= 1;
                }
                self.operation_done(io, id, Err(errno));
            }
        }
    }

    /// Somebody waits for a slot, or for a segment.
    pub(crate) fn wants_room(&self) -> bool {
        !self.room_waiters.is_empty() || !self.unflushed.is_empty()
    }

    /// A write that needs room would find some.
    fn has_room(&self) -> bool {
        if self.spec.mode.has_ram() { self.ram.free() > 0 } else { self.log.room() > 0 }
    }

    /// Nothing that is under way, or can be, will make room for a write.
    fn no_room_in_sight(&self) -> bool {
        let log_is_at_rest = self.victim.is_none()
            && self.punches == 0
            && !self.hand_tired
            && self.parts.in_use() == self.unflushed.len();
        let log_is_full = self.log.room() == 0
            || self.now_ns < self.rest_until_ns
            || !(self.log.can_write() || self.log.can_collect() && self.log.emptiest().is_some());
        match self.spec.mode {
            Mode::Ram => self.ram.free() == 0,
            Mode::RamOverflow => {
                self.ram.free() == 0 && self.ram.evicting() == 0 && log_is_at_rest && log_is_full
            }
            Mode::Overflow => log_is_at_rest && log_is_full,
            Mode::Direct => false,
        }
    }

    /// Nothing is being carried out, and nothing that is under way makes room: what is unfinished waits for room
    /// that somebody else must make, or behind something that does.
    pub fn only_waits_for_room(&self) -> bool {
        let none_is_moving =
            self.ops.len() == self.free_ops.len() && self.runnable.is_empty() && self.turn_waiters.is_empty();
        self.table.is_empty() || none_is_moving && self.no_room_in_sight()
    }

    /// Withdraws those parked requests that `which` names: they complete with `errno`, which for a client that
    /// has gone is `CANCELED`. Requests whose operations are under way complete by themselves soon.
    pub fn cancel<I: Io>(&mut self, io: &mut I, errno: Errno, which: impl Fn(Token) -> bool) {
        let mut parked = Vec::new();
        for (id, a) in self.table.iter_mut() {
            if a.wait != Wait::Operations && which(a.request.token) {
                // No list holds a request that waits for its operations.
                a.wait = Wait::Operations;
                a.errno.get_or_insert(errno);
                parked.push(id);
            }
        }
        self.drop_unflushed(io, errno, &which);
        if parked.is_empty() {
            return;
        }
        let table = &self.table;
        let still = |wait: Wait| move |id: &Id| table.exists(*id) && table.get(*id).wait == wait;
        self.room_waiters.retain(still(Wait::Room));
        self.part_waiters.retain(still(Wait::Part));
        self.turn_waiters.retain(still(Wait::Turn));
        self.flush_waiters.retain(still(Wait::Writes));
        for id in parked {
            // Its last operation may have ended with the parts that were just dropped.
            if self.table.exists(id) {
                self.fail_parked(io, id, errno);
            }
        }
    }
}
