//! One virtqueue: takes requests off its ring and gives answers back. Owns the ring's indices and the state of
//! each head; never reads a control message and never blocks.
//!
//! Life of a head: *free* (the driver's), then *unfinished* (taken off the ring, at the disk), then *answered*
//! (in the used ring, the used index not yet moved), then free again by [`Queue::publish`].
//!
//! Invariant: a head is in at most one of these states, so a driver that makes a head available again before
//! it got it back stops its queue and never confuses two requests.

use super::budget::Budget;
use super::chain::Scratch;
use super::config::Device;
use super::head::{Head, HeadState, NO_SEGMENT};
use super::inflight::Marks;
use super::memory::{Hint, Memory, Segment};
use super::message::VringAddr;
use super::request::{Status, Submission};
use super::ring::{MAX_QUEUE_SIZE, Ring};
use super::signal::Signal;
use spillway_core::{Errno, Operation, Request, Token};
use std::os::fd::OwnedFd;
use std::sync::atomic::{Ordering, fence};

/// Heads answered without the disk between two publications: as many as a reactor takes requests in a turn.
const MAX_REFUSED: u16 = 32;

/// How the driver says that there is work.
pub(super) enum Kick {
    Fd(OwnedFd),
    /// It does not: look all the time.
    Poll,
}

/// A queue is broken: why. It stays stopped until the front end sets it up anew.
pub(super) struct Broken(pub String);

/// Where addresses of each kind were found the last time.
#[derive(Default)]
pub(super) struct Hints {
    pub table: Hint,
    pub header: Hint,
    pub data: Hint,
    pub status: Hint,
}

/// What a chain turned out to be.
pub(super) enum Taken {
    /// For the disk.
    Submit(Submission),
    /// Answered already.
    Answered,
}

pub(super) struct Queue {
    /// Started, enabled, sound and not stopping: requests may be taken.
    pub live: bool,
    event_idx: bool,
    pub indirect: bool,
    pub size: u16,
    pub next_available: u16,
    /// The available index as last read; never behind `next_available`.
    seen_available: u16,
    next_used: u16,
    published_used: u16,
    pub ring: Option<Ring>,
    pub heads: Vec<Head>,
    /// Heads answered and not yet published.
    batch: Vec<u16>,
    /// Heads in `batch` that never went to the disk.
    refused: u16,
    /// Heads that an earlier process took and did not answer, the oldest last.
    resubmit: Vec<u16>,
    marks: Option<Marks>,
    pub unfinished: usize,
    /// What the unfinished ones hold of the budget.
    held_bytes: usize,
    pub hints: Hints,
    token_base: u64,

    /// Broke the rules: stays stopped until the front end sets it up anew.
    pub broken: bool,
    /// Something worth a line in the log.
    pub notice: Option<String>,
    pub started: bool,
    pub stopping: bool,
    /// SET_VRING_ENABLE, when it came.
    pub enabled: Option<bool>,
    pub addresses: Option<VringAddr>,
    pub base: u16,
    /// An earlier process served this life of the queue: what its table says holds, whatever the base.
    pub resumed: bool,
    pub kick: Option<Kick>,
    /// Kicks that came while nothing had ever been on the ring.
    pub kicks: u64,
    pub call: Option<Signal>,
    pub error: Option<OwnedFd>,
}

impl Queue {
    pub(super) fn new(token_base: u64) -> Queue {
        Queue {
            live: false,
            event_idx: false,
            indirect: false,
            size: 0,
            next_available: 0,
            seen_available: 0,
            next_used: 0,
            published_used: 0,
            ring: None,
            heads: Vec::new(),
            batch: Vec::new(),
            refused: 0,
            resubmit: Vec::new(),
            marks: None,
            unfinished: 0,
            held_bytes: 0,
            hints: Hints::default(),
            token_base,
            broken: false,
            notice: None,
            started: false,
            stopping: false,
            enabled: None,
            addresses: None,
            base: 0,
            resumed: false,
            kick: None,
            kicks: 0,
            call: None,
            error: None,
        }
    }

    /// Begins to serve the ring, after recovery of what an earlier process left behind.
    pub(super) fn start(
        &mut self,
        memory: &Memory,
        mut marks: Marks,
        event_idx: bool,
        indirect: bool,
    ) -> Result<(), String> {
        let addresses = self.addresses.as_ref().ok_or("the queue has no addresses")?;
        let ring = Ring::new(memory, addresses, self.size)?;
        let used = ring.used_index();
        let size = self.size;
        let mut resubmit = marks.recover(used).heads;
        let mut next = used.wrapping_add(resubmit.len() as u16);
        if marks.is_own() && !self.resumed && next != self.base {
            // Our own table is about an earlier life of this queue.
            marks.clear(used);
            resubmit.clear();
            next = self.base;
        }
        resubmit.reverse();
        self.resubmit = resubmit;
        self.marks = Some(marks);
        self.heads.resize_with(usize::from(size), Head::free);
        self.batch.clear();
        self.refused = 0;
        self.batch.reserve_exact(usize::from(size));
        (self.next_available, self.seen_available) = (next, next);
        (self.next_used, self.published_used) = (used, used);
        self.hints = Hints::default();
        (self.event_idx, self.indirect) = (event_idx, indirect);
        self.ring = Some(ring);
        self.started = true;
        let resumed = std::mem::take(&mut self.resumed);
        if resumed || used != 0 || !self.resubmit.is_empty() {
            // An earlier process may have gone between its last answer and the interrupt for it, which may be the one
            // that took the used index around to 0.
            self.signal();
        }
        self.ask_for_kicks();
        Ok(())
    }

    /// The ring is where the new memory regions say, or nowhere.
    pub(super) fn move_ring(&mut self, memory: &Memory) {
        if let (true, Some(addresses)) = (self.started, self.addresses.as_ref()) {
            match Ring::new(memory, addresses, self.size) {
                Ok(ring) => self.ring = Some(ring),
                Err(why) => {
                    self.ring = None;
                    self.notice.get_or_insert(why);
                }
            }
        }
    }

    /// Ends the queue's life. The index of the next available head goes back to the front end.
    pub(super) fn stop(&mut self) -> u16 {
        if self.started {
            self.base = self.next_available;
        }
        self.started = false;
        self.stopping = false;
        self.kicks = 0;
        self.live = false;
        self.resumed = false;
        self.ring = None;
        self.broken = false;
        self.resubmit.clear();
        self.batch.clear();
        for head in &mut self.heads {
            head.state = HeadState::Free;
        }
        self.base
    }

    /// Back to the initial state. Of the file descriptors the one for errors stays: QEMU sends it once in the
    /// life of a connection, the others before each start.
    pub(super) fn reset(&mut self) {
        *self = Queue { error: self.error.take(), ..Queue::new(self.token_base) };
    }

    /// The queue of another device, which has nothing of the last one's.
    pub(super) fn renew(&mut self) {
        *self = Queue::new(self.token_base);
    }

    /// Whether the driver, or an earlier process, left something that may be taken now.
    #[inline]
    pub(super) fn has_work(&self, budget: &Budget) -> bool {
        let Some(ring) = &self.ring else { return false };
        self.live
            && (ring.available_index() != self.next_available || !self.resubmit.is_empty())
            && budget.has_room(self.held_bytes)
    }

    /// Takes the next request for the disk. Answers no more than [`MAX_REFUSED`] others between two publications,
    /// so that a driver that keeps on adding bad ones cannot hold the thread.
    #[inline]
    pub(super) fn next(
        &mut self,
        memory: &mut Memory,
        device: &Device,
        budget: &mut Budget,
        scratch: &mut Scratch,
    ) -> Option<Request> {
        while self.refused < MAX_REFUSED {
            if !self.live || !budget.has_room(self.held_bytes) {
                return None;
            }
            let head = match self.take_head() {
                Ok(Some(head)) => head,
                Ok(None) => return None,
                Err(broken) => {
                    self.break_down(broken);
                    return None;
                }
            };
            let taken = super::short::take(self, head, memory, device);
            let taken = match taken {
                Some(submission) => Ok(Taken::Submit(submission)),
                None => super::chain::take(self, head, memory, device, budget, scratch),
            };
            if memory.guard().poisoned() {
                self.live = false;
                return None;
            }
            match taken {
                Ok(Taken::Submit(Submission { operation, sector, sectors })) => {
                    let state = &mut self.heads[usize::from(head)];
                    state.state = HeadState::Unfinished;
                    state.generation = memory.acquire();
                    self.unfinished += 1;
                    let moves = matches!(operation, Operation::Read | Operation::Write { .. });
                    budget.hold(&mut self.held_bytes, state, if moves { sectors } else { 0 });
                    let token = Token(self.token_base | u64::from(head));
                    return Some(Request { token, operation, sector, sectors });
                }
                Ok(Taken::Answered) => self.refused += 1,
                Err(broken) => {
                    self.break_down(broken);
                    return None;
                }
            }
        }
        None
    }

    /// The next head, marked as in flight.
    #[inline(always)]
    fn take_head(&mut self) -> Result<Option<u16>, Broken> {
        let Some(ring) = &self.ring else { return Ok(None) };
        if !self.resubmit.is_empty() {
            return Ok(self.resubmit.pop());
        }
        if self.next_available == self.seen_available {
            let index = ring.available_index();
            let new = index.wrapping_sub(self.next_available);
            if new == 0 {
                return Ok(None);
            }
            if new > self.size {
                let (seen, size) = (self.next_available, self.size);
                return Err(Broken(format!(
                    "the available index went from {seen} to {index}, more than the {size} that fit (virtio 2.7.13)"
                )));
            }
            self.seen_available = index;
        }
        let head = ring.available_head(self.next_available);
        self.next_available = self.next_available.wrapping_add(1);
        if self.next_available != self.seen_available {
            ring.prefetch_descriptor(ring.available_head(self.next_available));
        }
        let state = self.heads.get(usize::from(head)).map(|head| head.state);
        if state != Some(HeadState::Free) {
            return Err(Broken(if state.is_none() {
                format!("head {head} is beyond the {} descriptors", self.size)
            } else {
                format!("head {head} was made available again before it was used")
            }));
        }
        if let Some(marks) = &mut self.marks {
            marks.take(head);
        }
        Ok(Some(head))
    }

    /// Fills in a head by hand, for [`super::chain`].
    pub(super) fn set_head(
        &mut self,
        head: u16,
        status: *mut u8,
        used_bytes: u32,
        segments: &[Segment],
        budget: &mut Budget,
    ) {
        let state = &mut self.heads[usize::from(head)];
        state.status = status;
        state.used_bytes = used_bytes;
        state.first = segments.first().copied().unwrap_or(NO_SEGMENT);
        state.several = if segments.len() > 1 { budget.list(segments) } else { Vec::new() };
    }

    /// The state of an unfinished head.
    #[inline(always)]
    pub(super) fn unfinished_head(&self, head: u16) -> Option<&Head> {
        self.heads.get(usize::from(head)).filter(|head| head.state == HeadState::Unfinished)
    }

    /// The disk has finished a request.
    #[inline]
    pub(super) fn complete(
        &mut self,
        head: u16,
        result: Result<(), Errno>,
        memory: &mut Memory,
        budget: &mut Budget,
    ) {
        let Some(state) = self.heads.get_mut(usize::from(head)) else { return };
        let abandoned = match state.state {
            HeadState::Unfinished => false,
            HeadState::Abandoned => true,
            HeadState::Free | HeadState::Answered => return,
        };
        let (at, used_bytes, generation) = (state.status, state.used_bytes, state.generation);
        state.state = HeadState::Free;
        budget.release(&mut self.held_bytes, state);
        self.unfinished -= 1;
        if !abandoned && !memory.guard().poisoned() {
            match result {
                // The region of the ring is away: the head is done anew when it is back. Its mark is still set.
                _ if self.ring.is_none() => self.resubmit.insert(0, head),
                Ok(()) => self.answer(head, at, Status::Ok, used_bytes),
                Err(Errno::CANCELED) => {}
                // What was to be filled is not: only a status with nothing before it counts as written.
                Err(errno) => self.answer(head, at, Status::of(errno), u32::from(used_bytes == 1)),
            }
        }
        // Last: the memory that the status lies in may go with its last request.
        memory.release(generation);
    }

    /// Writes the status and puts the head in the used ring.
    #[inline(always)]
    pub(super) fn answer(&mut self, head: u16, at: *mut u8, status: Status, used_bytes: u32) {
        let Some(ring) = &self.ring else { return };
        // SAFETY: one byte of guest memory, translated when the head was taken and held by its generation, or
        // translated just now.
        unsafe { at.write_volatile(status as u8) };
        ring.set_used(self.next_used, head, used_bytes);
        self.next_used = self.next_used.wrapping_add(1);
        if let Some(marks) = &self.marks {
            marks.link(head);
        }
        self.heads[usize::from(head)].state = HeadState::Answered;
        self.batch.push(head);
    }

    /// Gives the answered heads back to the driver, all at once, and interrupts it if it wants that.
    #[inline]
    pub(super) fn publish(&mut self, memory: &Memory) {
        let Some(ring) = &self.ring else { return };
        if self.batch.is_empty() {
            return;
        }
        ring.set_used_index(self.next_used);
        if memory.guard().poisoned() {
            return;
        }
        if let Some(marks) = &self.marks {
            marks.give_back(&self.batch, self.next_used);
        }
        for &head in &self.batch {
            self.heads[usize::from(head)].state = HeadState::Free;
        }
        self.batch.clear();
        self.refused = 0;
        let old = std::mem::replace(&mut self.published_used, self.next_used);
        // The used index must be visible before the driver's wish is read: it does both the other way round.
        fence(Ordering::SeqCst);
        let wanted = if self.event_idx {
            let event = ring.used_event();
            self.next_used.wrapping_sub(event).wrapping_sub(1) < self.next_used.wrapping_sub(old)
        } else {
            !ring.interrupts_suppressed()
        };
        if wanted {
            self.signal();
        }
    }

    /// Raises the driver's interrupt.
    #[cold]
    pub(super) fn signal(&mut self) {
        if let Some(call) = &mut self.call {
            call.raise();
        }
    }

    /// Asks the driver not to kick while we look at the ring anyway.
    #[inline]
    pub(super) fn disable_notifications(&mut self) {
        // With EVENT_IDX the last wish has been passed already, which says the same.
        if let (false, Some(ring)) = (self.event_idx, &self.ring) {
            ring.set_notify(false);
        }
    }

    /// Asks the driver to kick. True if it has added something meanwhile and will not kick for that.
    #[inline]
    pub(super) fn enable_notifications(&mut self, budget: &Budget) -> bool {
        self.ask_for_kicks();
        self.has_work(budget)
    }

    #[inline]
    fn ask_for_kicks(&mut self) {
        let Some(ring) = &self.ring else { return };
        if self.event_idx {
            ring.set_available_event(self.next_available);
        } else {
            ring.set_notify(true);
        }
        // The wish must be visible before the index is read: the driver does both the other way round.
        fence(Ordering::SeqCst);
    }

    /// Stops the queue for good: the driver broke the rules, or its memory is gone.
    #[cold]
    pub(super) fn break_down(&mut self, Broken(why): Broken) {
        self.live = false;
        self.broken = true;
        self.notice.get_or_insert(why);
        if let Some(error) = &self.error {
            let _ = Signal::new(error).map(|mut error| error.raise());
        }
    }

    /// Lets go of the buffers of all unfinished requests: they can no longer be read, written or answered.
    pub(super) fn abandon(&mut self) {
        self.live = false;
        for head in &mut self.heads {
            if head.state == HeadState::Unfinished {
                head.state = HeadState::Abandoned;
            }
        }
        self.batch.clear();
        self.ring = None;
    }
}

/// Checks a queue size (2.7: a power of two).
pub(super) fn check_size(num: u32) -> Result<u16, String> {
    match u16::try_from(num) {
        Ok(size) if size.is_power_of_two() && size <= MAX_QUEUE_SIZE => Ok(size),
        _ => Err(format!(
            "a queue of {num} descriptors: not a power of two up to {MAX_QUEUE_SIZE} (virtio 2.7)"
        )),
    }
}
