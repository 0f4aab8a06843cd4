//! Which request may go on: the unfinished ones, what each waits for, and how much all of them may do in a turn.
//!
//! Owns the order of requests, the lists of those that wait, the budget of a turn, the clock of stalls, and whether the disk is
//! full. Knows no blocks: what a request does to them is for the engine. Invariants: a waiting request is on exactly one list,
//! and the lists are served in order of arrival; a request whose last operation has ended is finished before the next one is
//! looked at.

use crate::error::Errno;
use crate::request::{Operation, Request, Token};
use crate::table::{Active, Id, Table, Wait};
use spillway_layout::{Counters, add, set};
use std::collections::{HashMap, VecDeque};

/// Blocks that all requests together may touch before a turn's end, and again at its end: well below a
/// millisecond of copying.
pub(crate) const TURN_BLOCKS: u32 = 256;
/// Requests that waited behind another and are looked at again in one turn.
const RETESTS: u32 = 64;
/// Operations that one request may have under way.
pub(crate) const MAX_PENDING: u32 = 64;

pub(crate) struct Admission {
    table: Table,
    /// Requests that wait behind another, by that other's row; with their sequence, as rows are reused.
    behind: HashMap<Id, Vec<(Id, u64)>>,
    room_waiters: VecDeque<Id>,
    part_waiters: VecDeque<Id>,
    turn_waiters: VecDeque<Id>,
    drain_waiters: Vec<Id>,
    flush_waiters: Vec<Id>,
    /// Requests that may go on.
    runnable: VecDeque<(Id, u64)>,
    /// Requests whose last operation has ended.
    finished: Vec<Id>,
    sequence: u64,
    now_ns: u64,
    /// Blocks that may still be touched in this half of the turn.
    budget: u32,
    retests: u32,
    /// Writes that waited for room when the last turn ended.
    waiting: u64,
    /// Until when the stalls are accounted for.
    stalls_until_ns: u64,
    full: bool,
    /// It was told that the disk is full, and not yet that it has room again.
    full_event_sent: bool,
}

impl Admission {
    /// No request. With `full_event_sent` an earlier process has told that the disk is full.
    pub fn new(full_event_sent: bool) -> Admission {
        Admission {
            table: Table::new(),
            behind: HashMap::new(),
            room_waiters: VecDeque::new(),
            part_waiters: VecDeque::new(),
            turn_waiters: VecDeque::new(),
            drain_waiters: Vec::new(),
            flush_waiters: Vec::new(),
            runnable: VecDeque::new(),
            finished: Vec::new(),
            sequence: 0,
            now_ns: 0,
            budget: TURN_BLOCKS,
            retests: RETESTS,
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

    /// Nothing has been asked of blocks in this half of the turn.
    pub fn is_budget_whole(&self) -> bool {
        self.budget == TURN_BLOCKS
    }

    /// Long requests go on after all others had their turn.
    pub fn end_turn(&mut self, now_ns: u64, c: &Counters) {
        self.now_ns = now_ns;
        self.count_stalls(c);
        self.budget = TURN_BLOCKS;
        self.retests = RETESTS;
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

    /// Whether the request may begin; else it waits behind an earlier one that it overlaps.
    #[inline]
    pub fn admits(&mut self, a: &mut Active) -> bool {
        if a.request.sectors == 0 && !a.is_flush() {
            a.walked = true;
        } else if let Some(blocker) = self.table.blocker(a) {
            self.wait_behind(*a, blocker);
            return false;
        }
        true
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

    /// The request cannot go on: it waits for what it says.
    pub fn park(&mut self, a: &mut Active, c: &Counters) {
        if a.errno.is_some() {
            a.wait = Wait::Operations;
        }
        if a.wait == Wait::Room && !a.stalled {
            a.stalled = true;
            add(&c.stalls, 1);
        }
        let id = self.keep(a);
        match a.wait {
            Wait::Room => self.room_waiters.push_back(id),
            Wait::Part => self.part_waiters.push_back(id),
            Wait::Turn => self.turn_waiters.push_back(id),
            Wait::Drain => self.drain_waiters.push(id),
            Wait::Writes => self.flush_waiters.push(id),
            Wait::Operations | Wait::Overlap | Wait::Nothing => {}
        }
    }

    /// The request's state goes to its row.
    fn keep(&mut self, a: &mut Active) -> Id {
        match a.id {
            Some(id) => {
                *self.table.get_mut(id) = *a;
                id
            }
            None => self.table.insert(a),
        }
    }

    /// The request waits until that row is finished, and is looked at again then.
    fn wait_behind(&mut self, mut a: Active, blocker: Id) {
        a.wait = Wait::Overlap;
        let id = self.keep(&mut a);
        self.behind.entry(blocker).or_default().push((id, a.sequence));
    }

    /// One of a request's operations has ended.
    pub fn operation_done(&mut self, id: Id, result: Result<(), Errno>) {
        let a = self.table.get_mut(id);
        a.pending -= 1;
        if let Err(errno) = result {
            a.errno.get_or_insert(errno);
            if matches!(a.wait, Wait::Room | Wait::Part | Wait::Turn) {
                // It waits no longer to begin more of them.
                a.wait = Wait::Operations;
                self.forget_parked();
            }
        }
        let a = self.table.get_mut(id);
        if a.pending == 0 && (a.walked || a.errno.is_some()) {
            self.finished.push(id);
        } else if !a.walked && a.errno.is_none() && a.wait == Wait::Operations && a.pending <= MAX_PENDING / 2
        {
            a.wait = Wait::Nothing;
            let sequence = a.sequence;
            self.runnable.push_back((id, sequence));
        }
    }

    /// Bytes that an operation has moved for a request.
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

    /// Takes the list of requests whose last operation has ended. The caller removes each of them and gives the list back.
    pub fn take_finished(&mut self) -> Vec<Id> {
        std::mem::take(&mut self.finished)
    }

    pub fn give_back_finished(&mut self, mut list: Vec<Id>) {
        debug_assert!(self.finished.is_empty(), "an answer ends no operation");
        list.clear();
        self.finished = list;
    }

    #[inline]
    pub fn has_finished(&self) -> bool {
        !self.finished.is_empty()
    }

    /// This request is finished: those behind it may go on, if nothing else stands in their way.
    pub fn remove(&mut self, id: Id) {
        self.table.remove(id);
        if !self.behind.is_empty() {
            self.runnable.extend(self.behind.remove(&id).into_iter().flatten());
        }
    }

    /// Ends a request that is on no list any more, at once or with its last operation.
    pub fn fail(&mut self, id: Id, errno: Errno) {
        let a = self.table.get_mut(id);
        a.errno.get_or_insert(errno);
        a.wait = Wait::Operations;
        if a.pending == 0 {
            self.finished.push(id);
        }
    }

    // Who is next.

    /// Some request may go on, or is a FLUSH that waits for writes.
    #[inline]
    pub fn may_run_some(&self) -> bool {
        !self.runnable.is_empty() || !self.flush_waiters.is_empty()
    }

    /// The next request that may go on, in this turn.
    pub fn next_runnable(&mut self) -> Option<Active> {
        while let Some(&(id, sequence)) = self.runnable.front() {
            // It may have been withdrawn meanwhile.
            let a = self.table.find(id, sequence).copied();
            match a.map(|a| a.wait) {
                Some(Wait::Overlap) if self.retests == 0 => return None,
                Some(Wait::Overlap) => {
                    self.retests -= 1;
                    self.runnable.pop_front();
                    let a = a.expect("its wait was seen");
                    match self.table.blocker_among_all(&a) {
                        Some(blocker) => self.wait_behind(a, blocker),
                        None => return Some(a),
                    }
                }
                Some(Wait::Nothing) => {
                    self.runnable.pop_front();
                    return a;
                }
                _ => _ = self.runnable.pop_front(),
            }
        }
        None
    }

    /// FLUSH requests before which no write is left to wait for.
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

    /// How many wait for their next step.
    pub fn turn_waiters(&self) -> usize {
        self.turn_waiters.len()
    }

    /// The next of those, while blocks may be touched.
    pub fn next_in_turn(&mut self) -> Option<Active> {
        let id = if self.budget > 0 { self.turn_waiters.pop_front() } else { None };
        id.map(|id| *self.table.get(id))
    }

    /// How many wait for a staging buffer.
    pub fn part_waiters(&self) -> usize {
        self.part_waiters.len()
    }

    /// The first of those.
    pub fn next_for_part(&mut self) -> Option<Active> {
        self.part_waiters.pop_front().map(|id| *self.table.get(id))
    }

    /// The one that waits again was the first and stays so.
    pub fn stays_first_for_part(&mut self) {
        self.part_waiters.rotate_right(1);
    }

    /// How many wait for a slot, or room in the log.
    #[inline]
    pub fn room_waiters(&self) -> usize {
        self.room_waiters.len()
    }

    /// Whether the request passes nobody who waits for room.
    #[inline]
    pub fn may_take_room(&self, a: &Active) -> bool {
        a.stalled || self.room_waiters.is_empty()
    }

    /// The number of the first that waits for room and of which this is true.
    pub fn position_for_room(&self, which: impl Fn(&Active) -> bool) -> Option<usize> {
        self.room_waiters.iter().position(|&id| which(self.table.get(id)))
    }

    /// Whether this row waits for room; for the self-check.
    pub fn waits_for_room(&self, id: Id) -> bool {
        self.room_waiters.contains(&id)
    }

    /// Takes the one of this number off the list.
    pub fn take_for_room(&mut self, i: usize) -> Active {
        let id = self.room_waiters.remove(i).expect("it is one of them");
        *self.table.get(id)
    }

    /// The one that has joined the list last keeps this number, which it had.
    pub fn keeps_place_for_room(&mut self, i: usize) {
        let id = self.room_waiters.pop_back().expect("it is back");
        self.room_waiters.insert(i, id);
    }

    /// Nobody waits for room any more: all fail.
    pub fn fail_room_waiters(&mut self, errno: Errno) {
        while let Some(id) = self.room_waiters.pop_front() {
            self.fail(id, errno);
        }
    }

    /// Some wait for the end of what a dead process had begun.
    pub fn has_drain_waiters(&self) -> bool {
        !self.drain_waiters.is_empty()
    }

    /// It has ended.
    pub fn wake_drain_waiters(&mut self) {
        for id in std::mem::take(&mut self.drain_waiters) {
            self.table.get_mut(id).wait = Wait::Turn;
            self.turn_waiters.push_back(id);
        }
    }

    /// No request can go on by itself.
    pub fn has_nothing_to_run(&self) -> bool {
        self.runnable.is_empty() && self.turn_waiters.is_empty()
    }

    // Withdrawal.

    /// Withdraws those requests that `which` names. Returns those that had waited, and are on no list any more: they are to
    /// be failed.
    pub fn withdraw(&mut self, errno: Errno, which: impl Fn(Token) -> bool) -> Vec<Id> {
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
        parked
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

    // Stalls, and the full state.

    /// Those that were said to wait have waited until now.
    pub fn count_stalls(&mut self, c: &Counters) {
        let ns = self.now_ns.saturating_sub(self.stalls_until_ns);
        if self.waiting > 0 {
            add(&c.stalls_ns, ns * self.waiting);
        }
        self.stalls_until_ns = self.now_ns;
    }

    /// Notes how many wait for room, with those whose blocks found no segment; these count as stalled from here on.
    pub fn count_waiting(&mut self, without_segment: &[Id], c: &Counters) {
        self.waiting = self.room_waiters.len() as u64;
        for &id in without_segment {
            let a = self.table.get_mut(id);
            self.waiting += u64::from(a.wait != Wait::Room);
            if !std::mem::replace(&mut a.stalled, true) {
                add(&c.stalls, 1);
            }
        }
    }

    /// As counted last.
    pub fn waiting(&self) -> u64 {
        self.waiting
    }

    /// Writes that need room wait or fail.
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
}
