//! Admission of requests: the unfinished ones, what each waits for, and how much all of them may do in a turn.
//!
//! Owns the order of requests, the lists of those that wait, the budget of a turn, the stall times, and whether the disk is full.
//! Knows no blocks: the engine carries requests out. Invariants: a waiting request is on exactly one list,
//! and the lists are served in order of arrival; a request whose last operation has ended is finished before the next one is
//! looked at.

use crate::error::Errno;
use crate::request::{Operation, Request, Token};
use crate::run_queue::RunQueue;
use crate::table::{Active, Id, Table, Wait};
use spillway_layout::{Counters, add, set};
use std::collections::VecDeque;

/// Blocks that all requests together may touch before a turn's end, and again at its end: well below a
/// millisecond of copying.
pub(crate) const TURN_BLOCKS: u32 = 256;
/// Rows that may be visited from one turn's end to the next one's to find what requests must wait for: well below a millisecond.
/// A search that exceeds it is carried to its end.
const TURN_VISITS: u32 = 32 << 10;
/// What a request that is checked again counts at least, as it may go on then.
const RECHECK_VISITS: u32 = TURN_VISITS / 64;
/// The most operations that one request may have in flight.
pub(crate) const MAX_PENDING: u32 = 64;

pub(crate) struct Admission {
    table: Table,
    /// Requests that wait behind another one, that have yet to be compared with the others, or that may go on.
    queue: RunQueue,
    space_waiters: VecDeque<Id>,
    part_waiters: VecDeque<Id>,
    turn_waiters: VecDeque<Id>,
    drain_waiters: Vec<Id>,
    flush_waiters: Vec<Id>,
    /// Requests whose last operation has ended.
    finished: Vec<Id>,
    sequence: u64,
    now_ns: u64,
    /// Blocks that may still be touched in this half of the turn.
    budget: u32,
    /// Rows that may still be visited until the turn's end.
    visits: u32,
    /// Writes that waited for space when the last turn ended.
    waiting: u64,
    /// The time up to which stalls have been counted.
    stalls_until_ns: u64,
    full: bool,
    /// The event that the disk is full was sent, and the event that it has space again was not.
    full_event_sent: bool,
}

impl Admission {
    /// Without any request. `full_event_sent`: an earlier process has sent the event that the disk is full.
    pub fn new(full_event_sent: bool) -> Admission {
        Admission {
            table: Table::new(),
            queue: RunQueue::new(),
            space_waiters: VecDeque::new(),
            part_waiters: VecDeque::new(),
            turn_waiters: VecDeque::new(),
            drain_waiters: Vec::new(),
            flush_waiters: Vec::new(),
            finished: Vec::new(),
            sequence: 0,
            now_ns: 0,
            budget: TURN_BLOCKS,
            visits: TURN_VISITS,
            waiting: 0,
            stalls_until_ns: 0,
            full: full_event_sent,
            full_event_sent,
        }
    }

    /// The time of the turn, monotonic, in nanoseconds.
    #[inline]
    pub fn now_ns(&self) -> u64 {
        self.now_ns
    }

    /// The unfinished requests.
    #[inline]
    pub fn table(&self) -> &Table {
        &self.table
    }

    // The turn.

    #[inline]
    pub fn begin_turn(&mut self, now_ns: u64) {
        self.now_ns = now_ns;
        self.budget = TURN_BLOCKS;
    }

    /// Whether no block was touched in this half of the turn.
    pub fn is_budget_whole(&self) -> bool {
        self.budget == TURN_BLOCKS
    }

    /// Ends the turn: starts the budget for long requests, which go on after all others.
    pub fn end_turn(&mut self, now_ns: u64, c: &Counters) {
        self.now_ns = now_ns;
        self.count_stalls(c);
        self.budget = TURN_BLOCKS;
        self.visits = TURN_VISITS;
    }

    #[inline]
    pub fn budget(&self) -> u32 {
        self.budget
    }

    #[inline]
    pub fn set_budget(&mut self, blocks: u32) {
        self.budget = blocks;
    }

    /// Takes one block from the budget of the turn. Returns false if the budget is spent: the request waits for the next turn.
    #[inline]
    pub fn takes_block(&mut self, a: &mut Active) -> bool {
        if self.budget == 0 {
            a.wait = Wait::Turn;
            return false;
        }
        self.budget -= 1;
        true
    }

    // A request begins, goes on and ends.

    /// A new request, to be admitted next.
    #[inline(always)] // A request is built where it stays: to move one costs as much as to look a block up.
    pub fn arrived(&mut self, request: Request) -> Active {
        self.sequence += 1;
        Active::new(request, self.now_ns, self.sequence)
    }

    /// Whether the request may begin. If not, it waits behind an earlier one that it overlaps, or to be checked.
    #[inline]
    pub fn admits(&mut self, a: &mut Active) -> bool {
        if a.request.sectors == 0 && !a.is_flush() {
            a.walked = true;
            return true;
        }
        !self.table.may_be_blocked(a) || self.is_free(*a)
    }

    /// Whether a new request overlaps no earlier one. If no more rows may be visited in this turn, it waits to be checked.
    #[cold]
    #[inline(never)]
    fn is_free(&mut self, mut a: Active) -> bool {
        if a.is_flush() {
            return true;
        }
        if self.visits == 0 {
            a.wait = Wait::Overlap;
            let id = self.keep(&mut a);
            self.queue.push(id);
            return false;
        }
        self.visits = self.visits.saturating_sub(self.table.rows());
        let blocker = self.table.blocker(&a);
        if let Some(blocker) = blocker {
            self.wait_behind(a, blocker);
        }
        blocker.is_none()
    }

    /// The request's row in the table: operations name it.
    pub fn row(&mut self, a: &mut Active) -> Id {
        match a.id {
            Some(id) => id,
            None => self.table.insert(a),
        }
    }

    /// The row of a request that begins one more operation.
    pub fn begin_operation(&mut self, a: &mut Active) -> Id {
        a.pending += 1;
        self.row(a)
    }

    /// Puts a request that cannot go on onto the list of what it waits for.
    pub fn park(&mut self, a: &mut Active, c: &Counters) {
        if a.errno.is_some() {
            a.wait = Wait::Operations;
        }
        if a.wait == Wait::Space && !a.stalled {
            a.stalled = true;
            add(&c.stalls, 1);
        }
        let id = self.keep(a);
        match a.wait {
            Wait::Space => self.space_waiters.push_back(id),
            Wait::Part => self.part_waiters.push_back(id),
            Wait::Turn => self.turn_waiters.push_back(id),
            Wait::Drain => self.drain_waiters.push(id),
            Wait::Writes => self.flush_waiters.push(id),
            Wait::Operations | Wait::Overlap | Wait::Nothing => {}
        }
    }

    /// Stores the request's state in its row.
    fn keep(&mut self, a: &mut Active) -> Id {
        match a.id {
            Some(id) => {
                *self.table.get_mut(id) = *a;
                id
            }
            None => self.table.insert(a),
        }
    }

    /// Lets the request wait until that row is finished; it is checked again then.
    fn wait_behind(&mut self, mut a: Active, blocker: Id) {
        a.wait = Wait::Overlap;
        let id = self.keep(&mut a);
        self.queue.wait_behind(id, blocker);
    }

    /// Records the end of one of a request's operations.
    pub fn operation_done(&mut self, id: Id, result: Result<(), Errno>) {
        let a = self.table.get_mut(id);
        a.pending -= 1;
        if let Err(errno) = result {
            a.errno.get_or_insert(errno);
            if matches!(a.wait, Wait::Space | Wait::Part | Wait::Turn) {
                // It starts no more operations, so it waits for nothing else.
                a.wait = Wait::Operations;
                self.prune_lists();
            }
        }
        let a = self.table.get_mut(id);
        if a.pending == 0 && (a.walked || a.errno.is_some()) {
            self.finished.push(id);
        } else if !a.walked && a.errno.is_none() && a.wait == Wait::Operations && a.pending <= MAX_PENDING / 2
        {
            a.wait = Wait::Nothing;
            self.queue.push(id);
        }
    }

    /// Counts bytes that an operation has moved for a request.
    pub fn moved(&mut self, id: Id, bytes: u32) {
        self.table.get_mut(id).moved_bytes += u64::from(bytes);
    }

    /// The request of a row.
    pub fn token(&self, id: Id) -> Token {
        self.table.get(id).request.token
    }

    /// Returns whether the request has force unit access (FUA): its data must be on the medium before it completes.
    pub fn is_fua(&self, id: Id) -> bool {
        let operation = self.table.get(id).request.operation;
        matches!(operation, Operation::Write { fua: true } | Operation::WriteZeroes { fua: true })
    }

    /// Whether the request was canceled: its client may not hear of its result.
    pub fn is_canceled(&self, id: Id) -> bool {
        self.table.get(id).canceled.is_some()
    }

    /// Whether it is a flush of which a client hears the result.
    pub fn is_heard_flush(&self, id: Id) -> bool {
        self.table.get(id).is_flush() && !self.is_canceled(id)
    }

    /// Takes the list of requests whose last operation has ended. The caller removes each of them and gives the list back.
    pub fn take_finished(&mut self) -> Vec<Id> {
        std::mem::take(&mut self.finished)
    }

    pub fn return_finished(&mut self, mut list: Vec<Id>) {
        debug_assert!(self.finished.is_empty(), "an answer ends no operation");
        list.clear();
        self.finished = list;
    }

    #[inline]
    pub fn has_finished(&self) -> bool {
        !self.finished.is_empty()
    }

    /// Removes a finished request. Those behind it may go on, if they overlap no other.
    pub fn remove(&mut self, id: Id) {
        self.table.remove(id);
        self.queue.remove(id);
    }

    /// Fails a request that is on no list, at once or with its last operation.
    pub fn fail(&mut self, id: Id, errno: Errno) {
        let a = self.table.get_mut(id);
        a.errno.get_or_insert(errno);
        a.wait = Wait::Operations;
        if a.pending == 0 {
            self.finished.push(id);
        }
    }

    // The next request.

    /// Whether some request may go on, or is a FLUSH that waits for writes.
    #[inline]
    pub fn may_run_some(&self) -> bool {
        !self.queue.is_empty() || !self.flush_waiters.is_empty()
    }

    /// The next request that may go on, in this turn.
    pub fn next_runnable(&mut self) -> Option<Active> {
        while let Some(id) = self.queue.first() {
            let a = *self.table.get(id);
            if a.wait == Wait::Overlap && self.visits == 0 {
                return None;
            }
            self.queue.unlink(id);
            match a.wait {
                Wait::Overlap => {
                    self.visits = self.visits.saturating_sub(self.table.rows().max(RECHECK_VISITS));
                    match self.table.blocker(&a) {
                        Some(blocker) => self.wait_behind(a, blocker),
                        None => return Some(a),
                    }
                }
                Wait::Nothing => return Some(a),
                wait => debug_assert!(false, "a request that waits for {wait:?} is on another list"),
            }
        }
        None
    }

    /// Whether a flush has to wait for earlier writes. If no more rows may be visited, [`Admission::take_flushes`] finds out.
    pub fn awaits_writes(&mut self, a: &Active) -> bool {
        if self.table.is_empty() || self.visits == 0 {
            return !self.table.is_empty();
        }
        self.visits = self.visits.saturating_sub(self.table.rows());
        self.table.earliest_writer().is_some_and(|writer| writer < a.sequence)
    }

    /// FLUSH requests that have no earlier unfinished write.
    pub fn take_flushes(&mut self) -> Vec<Active> {
        if self.flush_waiters.is_empty() {
            return Vec::new();
        }
        let earliest = self.table.earliest_writer().unwrap_or(u64::MAX);
        let (table, mut due) = (&self.table, Vec::new());
        self.flush_waiters.retain(|&id| {
            let a = table.get(id);
            if a.sequence < earliest {
                due.push(*a);
            }
            a.sequence >= earliest
        });
        due
    }

    /// The number of requests that wait for their next step.
    pub fn turn_waiters(&self) -> usize {
        self.turn_waiters.len()
    }

    /// The next of those, while there is budget.
    pub fn next_turn_waiter(&mut self) -> Option<Active> {
        let id = if self.budget > 0 { self.turn_waiters.pop_front() } else { None };
        id.map(|id| *self.table.get(id))
    }

    /// The number of requests that wait for a staging buffer.
    pub fn part_waiters(&self) -> usize {
        self.part_waiters.len()
    }

    /// The first of those.
    pub fn next_part_waiter(&mut self) -> Option<Active> {
        self.part_waiters.pop_front().map(|id| *self.table.get(id))
    }

    /// Keeps the request that waits again, and was the first, in the first place.
    pub fn keep_part_waiter_first(&mut self) {
        self.part_waiters.rotate_right(1);
    }

    /// The number of requests that wait for a slot, or for space in the log.
    #[inline]
    pub fn space_waiters(&self) -> usize {
        self.space_waiters.len()
    }

    /// Whether the request overtakes no other that waits for space.
    #[inline]
    pub fn may_take_space(&self, a: &Active) -> bool {
        a.stalled || self.space_waiters.is_empty()
    }

    /// The position of the first request that waits for space and for which `which` is true.
    pub fn position_of_space_waiter(&self, which: impl Fn(&Active) -> bool) -> Option<usize> {
        self.space_waiters.iter().position(|&id| which(self.table.get(id)))
    }

    /// Whether this row waits for space; for the self-check.
    pub fn waits_for_space(&self, id: Id) -> bool {
        self.space_waiters.contains(&id)
    }

    /// Takes the request at this position off that list.
    pub fn take_space_waiter(&mut self, i: usize) -> Active {
        let id = self.space_waiters.remove(i).expect("it is one of them");
        *self.table.get(id)
    }

    /// Moves the request that has joined that list last back to this position, which it had before.
    pub fn keep_space_waiter_at(&mut self, i: usize) {
        let id = self.space_waiters.pop_back().expect("it is back");
        self.space_waiters.insert(i, id);
    }

    /// Fails all requests that wait for space.
    pub fn fail_space_waiters(&mut self, errno: Errno) {
        while let Some(id) = self.space_waiters.pop_front() {
            self.fail(id, errno);
        }
    }

    /// Whether some requests wait for the drain.
    pub fn has_drain_waiters(&self) -> bool {
        !self.drain_waiters.is_empty()
    }

    /// Lets them go on: the drain has ended.
    pub fn wake_drain_waiters(&mut self) {
        for id in std::mem::take(&mut self.drain_waiters) {
            self.table.get_mut(id).wait = Wait::Turn;
            self.turn_waiters.push_back(id);
        }
    }

    /// Whether no request can go on by itself.
    pub fn has_nothing_to_run(&self) -> bool {
        self.queue.is_empty() && self.turn_waiters.is_empty()
    }

    // Cancellation.

    /// Cancels the requests for which `which` is true. Returns those that had waited and are on no list any more: the caller
    /// fails them.
    pub fn cancel(&mut self, errno: Errno, which: impl Fn(Token) -> bool) -> Vec<Id> {
        let mut parked = Vec::new();
        for (id, a) in self.table.iter_mut() {
            if !which(a.request.token) {
                continue;
            }
            a.canceled = Some(errno);
            if !(a.walked && a.wait == Wait::Operations) {
                a.errno.get_or_insert(errno);
                if a.wait != Wait::Operations {
                    a.wait = Wait::Operations;
                    parked.push(id);
                }
            }
        }
        if !parked.is_empty() {
            parked.iter().for_each(|&id| self.queue.unlink(id));
            self.prune_lists();
        }
        parked
    }

    /// Takes requests that no longer wait for what a list is for off that list.
    fn prune_lists(&mut self) {
        let table = &self.table;
        let still = |wait: Wait| move |id: &Id| table.get(*id).wait == wait;
        self.space_waiters.retain(still(Wait::Space));
        self.part_waiters.retain(still(Wait::Part));
        self.turn_waiters.retain(still(Wait::Turn));
        self.drain_waiters.retain(still(Wait::Drain));
        self.flush_waiters.retain(still(Wait::Writes));
    }

    // Stalls, and the full state.

    /// Adds the time since the last call to the stall time of the requests that waited then.
    pub fn count_stalls(&mut self, c: &Counters) {
        let ns = self.now_ns.saturating_sub(self.stalls_until_ns);
        if self.waiting > 0 {
            add(&c.stalls_ns, ns * self.waiting);
        }
        self.stalls_until_ns = self.now_ns;
    }

    /// Counts the requests that wait for space, and those whose blocks wait for a segment, which count as stalled from here on.
    pub fn count_waiting(&mut self, without_segment: &[Id], c: &Counters) {
        self.waiting = self.space_waiters.len() as u64;
        for &id in without_segment {
            let a = self.table.get_mut(id);
            self.waiting += u64::from(a.wait != Wait::Space);
            if !std::mem::replace(&mut a.stalled, true) {
                add(&c.stalls, 1);
            }
        }
    }

    /// The number that [`Admission::count_waiting`] has counted last.
    pub fn waiting(&self) -> u64 {
        self.waiting
    }

    /// Whether the disk is full: writes that need space wait or fail.
    pub fn is_full(&self) -> bool {
        self.full
    }

    pub fn set_full(&mut self, full: bool) {
        self.full = full;
    }

    /// Records whether the event that the disk is full has been sent. Returns true if that is a change: the caller sends the event.
    pub fn set_full_event_sent(&mut self, full: bool, c: &Counters) -> bool {
        let new = self.full_event_sent != full;
        if new {
            self.full_event_sent = full;
            set(&c.is_full, full.into());
        }
        new
    }

    /// Panics unless the rows that wait for overlap, or may go on, are the ones on the lists for that, each on one.
    pub fn check(&self) {
        let mut on_lists: Vec<Id> = self.queue.members().collect();
        on_lists.sort_unstable();
        let waiting = self.table.iter().filter(|(_, a)| matches!(a.wait, Wait::Overlap | Wait::Nothing));
        assert_eq!(on_lists, waiting.map(|(id, _)| id).collect::<Vec<_>>(), "stored overlap waiters");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn canceled_requests_leave_the_list_of_their_blocker() {
        let mut admission = Admission::new(false);
        let request = |token, operation| Request { token: Token(token), operation, sector: 0, sectors: 8 };
        let mut write = admission.arrived(request(0, Operation::Write { fua: false }));
        assert!(admission.admits(&mut write));
        admission.row(&mut write);
        for token in 1..1000 {
            let mut read = admission.arrived(request(token, Operation::Read));
            assert!(!admission.admits(&mut read));
            admission.check();
            for id in admission.cancel(Errno::CANCELED, |t| t == Token(token)) {
                admission.fail(id, Errno::CANCELED);
            }
            let finished = admission.take_finished();
            assert_eq!(finished.len(), 1);
            finished.iter().for_each(|&id| admission.remove(id));
            admission.return_finished(finished);
            admission.check();
        }
    }

    #[test]
    fn what_requests_wait_for_is_found_in_as_many_turns_as_it_takes() {
        const ROWS: usize = 5_000;
        const MORE: usize = 100;
        let mut admission = Admission::new(false);
        let request = |n: usize, block: usize| {
            let operation = Operation::Write { fua: false };
            Request { token: Token(n as u64), operation, sector: block as u64 * 8, sectors: 8 }
        };
        // The first is carried out, the others wait behind each other.
        for n in 0..ROWS {
            admission.visits = TURN_VISITS;
            let mut a = admission.arrived(request(n, 0));
            if admission.admits(&mut a) {
                admission.row(&mut a);
            }
        }
        // Each of these has to visit all those rows, which are near but of another block. The last one of a turn exceeds its budget.
        let in_a_turn = (TURN_VISITS as usize).div_ceil(ROWS);
        admission.visits = TURN_VISITS;
        let mut admitted = 0;
        for n in 0..MORE {
            let mut a = admission.arrived(request(ROWS + n, 1 + n % 30));
            admitted += usize::from(admission.admits(&mut a));
        }
        assert_eq!(admitted, in_a_turn);
        admission.check();
        while admitted < MORE {
            admission.visits = TURN_VISITS;
            let mut now = 0;
            while let Some(a) = admission.next_runnable() {
                assert_eq!(a.request.token, Token((ROWS + admitted + now) as u64));
                admission.remove(a.id.expect("it has waited"));
                now += 1;
            }
            admission.check();
            admitted += now;
            assert!(now == in_a_turn || now > 0 && admitted == MORE, "{now} in a turn");
            assert_eq!(admission.may_run_some(), admitted < MORE);
        }
    }
}
