//! One virtqueue: takes requests off its ring and gives answers back. Owns the ring's indices and the state of
//! each head; never reads a control message and never blocks.
//!
//! Life of a head: *free* (the driver's), then *unfinished* (taken off the ring, at the disk), then *answered*
//! (in the used ring, the used index not yet moved), then free again by [`Queue::publish`].
//!
//! Invariant: a head is in at most one of these states. A driver that makes a head available again before it was used
//! stops its queue, and two requests are never confused.

use super::budget::Budget;
use super::chain::Scratch;
use super::config::Device;
use super::error::Error;
use super::head::{Head, HeadState, NO_SEGMENT};
use super::inflight::InflightQueue;
use super::memory::{Hint, Memory, Segment};
use super::request::{Status, Submission};
use super::ring::Ring;
use super::setup::{RingFeatures, Setup};
use super::signal::Signal;
use crate::ErrorKind;
use spillway_core::{Errno, Operation, Request, Token};
use std::sync::atomic::{Ordering, fence};

/// Heads answered without the disk between two publications: as many as a reactor takes requests in a turn.
const MAX_REFUSED: u16 = 32;

/// The region in which an address of each kind was found last time.
#[derive(Default)]
pub(super) struct Hints {
    pub table: Hint,
    pub header: Hint,
    pub data: Hint,
    pub status: Hint,
}

/// What became of a chain.
pub(super) enum ChainOutcome {
    /// The disk has to carry it out.
    Submit(Submission),
    /// It was answered without the disk.
    Answered,
    /// It broke a rule, and the queue was stopped.
    Stopped,
}

/// Indices of the two rings; they count up and wrap around.
#[derive(Clone, Copy, Default)]
struct Indices {
    /// The next entry of the available ring to take.
    next_available: u16,
    /// The available index as last read; never behind `next_available`.
    cached_available: u16,
    /// The next entry of the used ring to fill.
    next_used: u16,
    /// The used index that the driver sees.
    published_used: u16,
}

/// One virtqueue.
pub(super) struct Queue {
    /// Requests may be taken: it is started and enabled, not stopping and not broken.
    pub live: bool,
    pub features: RingFeatures,
    indices: Indices,
    /// `None` while it is stopped, and while no memory region holds it.
    pub ring: Option<Ring>,
    pub heads: Vec<Head>,
    /// Heads answered and not yet published.
    batch: Vec<u16>,
    /// Heads in `batch` that never went to the disk.
    refused: u16,
    /// Heads to be taken again, the oldest last: an earlier process has not answered them, or the ring was gone when
    /// they completed.
    resubmit: Vec<u16>,
    inflight: Option<InflightQueue>,
    /// Requests taken and not completed.
    pub unfinished: usize,
    /// Bytes of the budget that the unfinished requests hold.
    held_bytes: usize,
    pub hints: Hints,
    token_base: u64,

    pub setup: Setup,
    pub started: bool,
    /// GET_VRING_BASE has come, and its reply is still due.
    pub stopping: bool,
    /// The driver broke a rule: no requests are taken until the front end sets the queue up anew.
    pub broken: bool,
    /// The first error that `take_notice` has not returned yet.
    pub notice: Option<Error>,
    /// Kicks since the start, counted while nothing was ever on the ring.
    pub idle_kicks: u64,
}

impl Queue {
    /// A queue that is not set up; its number is in its tokens.
    pub(super) fn new(token_base: u64) -> Queue {
        Queue {
            live: false,
            features: RingFeatures::default(),
            indices: Indices::default(),
            ring: None,
            heads: Vec::new(),
            batch: Vec::new(),
            refused: 0,
            resubmit: Vec::new(),
            inflight: None,
            unfinished: 0,
            held_bytes: 0,
            hints: Hints::default(),
            token_base,
            setup: Setup::default(),
            started: false,
            stopping: false,
            broken: false,
            notice: None,
            idle_kicks: 0,
        }
    }

    /// Begins to serve the ring, after recovery of the requests that an earlier process left unanswered.
    pub(super) fn start(
        &mut self,
        memory: &Memory,
        mut inflight: InflightQueue,
        features: RingFeatures,
    ) -> Result<(), Error> {
        let (size, base) = (self.setup.size, self.setup.base);
        let no_addresses = || Error::new(ErrorKind::WrongState, "it has no addresses");
        let addresses = self.setup.addresses.as_ref().ok_or_else(no_addresses)?;
        let ring = Ring::new(memory, addresses, size)?;
        let used = ring.used_index();
        let mut resubmit = inflight.recover(used);
        let mut next = used.wrapping_add(resubmit.len() as u16);
        if inflight.is_own() && !self.setup.resumed && next != base {
            // Our own table is of an earlier setup of this queue.
            inflight.clear(used);
            resubmit.clear();
            next = base;
        }
        resubmit.reverse();
        self.resubmit = resubmit;
        self.inflight = Some(inflight);
        self.heads.resize_with(usize::from(size), Head::free);
        self.batch.clear();
        self.refused = 0;
        self.batch.reserve_exact(usize::from(size));
        self.indices =
            Indices { next_available: next, cached_available: next, next_used: used, published_used: used };
        self.hints = Hints::default();
        self.features = features;
        self.ring = Some(ring);
        self.started = true;
        let resumed = std::mem::take(&mut self.setup.resumed);
        if resumed || used != 0 || !self.resubmit.is_empty() {
            // An earlier process may have ended between its last answer and the interrupt for it. That answer may be the
            // one that took the used index around to 0.
            self.signal();
        }
        self.ask_for_kicks();
        Ok(())
    }

    /// Finds the ring in the new memory regions. It has none while they do not hold it.
    pub(super) fn move_ring(&mut self, memory: &Memory) {
        if let (true, Some(addresses)) = (self.started, self.setup.addresses.as_ref()) {
            match Ring::new(memory, addresses, self.setup.size) {
                Ok(ring) => self.ring = Some(ring),
                Err(error) => {
                    self.ring = None;
                    self.notice.get_or_insert(error);
                }
            }
        }
    }

    /// Stops serving the ring. Returns the index of the next available head, for the front end.
    pub(super) fn stop(&mut self) -> u16 {
        if self.started {
            self.setup.base = self.indices.next_available;
        }
        self.started = false;
        self.stopping = false;
        self.idle_kicks = 0;
        self.live = false;
        self.setup.resumed = false;
        self.ring = None;
        self.broken = false;
        self.resubmit.clear();
        self.batch.clear();
        for head in &mut self.heads {
            head.state = HeadState::Free;
        }
        self.setup.base
    }

    /// Back to the initial state. The file descriptor for errors stays: QEMU sends it once in the life of a connection,
    /// the others before each start.
    pub(super) fn reset(&mut self) {
        let error = self.setup.error.take();
        self.reset_for_new_device();
        self.setup.error = error;
    }

    /// Back to the initial state, for another device: nothing of the last one's stays.
    pub(super) fn reset_for_new_device(&mut self) {
        *self = Queue::new(self.token_base);
    }

    /// Whether there is a request that may be taken now.
    #[inline]
    pub(super) fn has_work(&self, budget: &Budget) -> bool {
        let Some(ring) = &self.ring else { return false };
        self.live
            && (ring.available_index() != self.indices.next_available || !self.resubmit.is_empty())
            && budget.admits(self.held_bytes)
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
            if !self.live || !budget.admits(self.held_bytes) {
                return None;
            }
            let head = self.take_head()?;
            let outcome = match super::fast_path::take(self, head, memory, device) {
                Some(submission) => ChainOutcome::Submit(submission),
                None => super::chain::take(self, head, memory, device, budget, scratch),
            };
            if memory.guard().poisoned() {
                self.live = false;
                return None;
            }
            match outcome {
                ChainOutcome::Submit(Submission { operation, sector, sectors }) => {
                    let state = &mut self.heads[usize::from(head)];
                    state.state = HeadState::Unfinished;
                    state.generation = memory.acquire();
                    self.unfinished += 1;
                    let moves = matches!(operation, Operation::Read | Operation::Write { .. });
                    budget.hold(&mut self.held_bytes, state, if moves { sectors } else { 0 });
                    let token = Token(self.token_base | u64::from(head));
                    return Some(Request { token, operation, sector, sectors });
                }
                ChainOutcome::Answered => self.refused += 1,
                ChainOutcome::Stopped => return None,
            }
        }
        None
    }

    /// The next head, marked as in flight. `None`: there is none, or the driver broke a rule and the queue was stopped.
    #[inline(always)]
    fn take_head(&mut self) -> Option<u16> {
        let ring = self.ring.as_ref()?;
        if !self.resubmit.is_empty() {
            return self.resubmit.pop();
        }
        let indices = &mut self.indices;
        if indices.next_available == indices.cached_available {
            let index = ring.available_index();
            let new = index.wrapping_sub(indices.next_available);
            if new == 0 {
                return None;
            }
            if new > ring.size() {
                self.break_down_on_index(new);
                return None;
            }
            indices.cached_available = index;
        }
        let head = ring.available_head(indices.next_available);
        indices.next_available = indices.next_available.wrapping_add(1);
        if indices.next_available != indices.cached_available {
            ring.prefetch_descriptor(ring.available_head(indices.next_available));
        }
        if self.heads.get(usize::from(head)).is_none_or(|head| head.state != HeadState::Free) {
            self.break_down_on_head(head);
            return None;
        }
        if let Some(inflight) = &mut self.inflight {
            inflight.take(head);
        }
        Some(head)
    }

    /// The driver made more heads available at once than there are.
    #[cold]
    #[inline(never)]
    fn break_down_on_index(&mut self, new: u16) {
        let reason = "more heads became available than the queue has (virtio 2.7.13)";
        self.break_down(Error::protocol(reason).of("available index").above(new, self.heads.len() as u64));
    }

    /// The driver made a head available that it must not.
    #[cold]
    #[inline(never)]
    fn break_down_on_head(&mut self, head: u16) {
        let size = self.heads.len() as u64;
        self.break_down(if u64::from(head) >= size {
            Error::new(ErrorKind::OutOfBounds, "a head lies beyond the descriptor table")
                .above(head, size - 1)
        } else {
            Error::protocol("it was made available again before it was used").at_head(head)
        });
    }

    /// Fills in the state of a head, for [`super::chain`].
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
                // No memory region holds the ring now: the request is carried out again when one does. It is still
                // marked in the in-flight table.
                _ if self.ring.is_none() => self.resubmit.insert(0, head),
                Ok(()) => self.answer(head, at, Status::Ok, used_bytes),
                Err(Errno::CANCELED) => {}
                // The data was not filled: the status counts as written only where no data comes before it.
                Err(errno) => self.answer(head, at, Status::of(errno), u32::from(used_bytes == 1)),
            }
        }
        // Last: the memory that the status lies in may be unmapped with its last request.
        memory.release(generation);
    }

    /// Writes the status and puts the head in the used ring.
    #[inline(always)]
    pub(super) fn answer(&mut self, head: u16, at: *mut u8, status: Status, used_bytes: u32) {
        let Some(ring) = &self.ring else { return };
        // SAFETY: one byte of guest memory, translated when the head was taken and held by its generation, or
        // translated just now.
        unsafe { at.write_volatile(status as u8) };
        ring.set_used(self.indices.next_used, head, used_bytes);
        self.indices.next_used = self.indices.next_used.wrapping_add(1);
        if let Some(inflight) = &self.inflight {
            inflight.link(head);
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
        ring.set_used_index(self.indices.next_used);
        if memory.guard().poisoned() {
            return;
        }
        if let Some(inflight) = &self.inflight {
            inflight.give_back(&self.batch, self.indices.next_used);
        }
        for &head in &self.batch {
            self.heads[usize::from(head)].state = HeadState::Free;
        }
        self.batch.clear();
        self.refused = 0;
        let old = std::mem::replace(&mut self.indices.published_used, self.indices.next_used);
        // The used index must be visible before whether the driver asks for interrupts is read: it does both the other way round.
        fence(Ordering::SeqCst);
        let wanted = if self.features.event_idx {
            let event = ring.used_event();
            self.indices.next_used.wrapping_sub(event).wrapping_sub(1)
                < self.indices.next_used.wrapping_sub(old)
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
        if let Some(call) = &mut self.setup.call {
            call.raise();
        }
    }

    /// Asks the driver not to kick while we look at the ring anyway.
    #[inline]
    pub(super) fn disable_notifications(&mut self) {
        // With EVENT_IDX the driver kicks only when it passes `avail_event`, and it has passed the last one.
        if let (false, Some(ring)) = (self.features.event_idx, &self.ring) {
            ring.set_notify(false);
        }
    }

    /// Asks the driver to kick. True if it has added requests meanwhile, for which it will not kick.
    #[inline]
    pub(super) fn enable_notifications(&mut self, budget: &Budget) -> bool {
        self.ask_for_kicks();
        self.has_work(budget)
    }

    #[inline]
    fn ask_for_kicks(&mut self) {
        let Some(ring) = &self.ring else { return };
        if self.features.event_idx {
            ring.set_available_event(self.indices.next_available);
        } else {
            ring.set_notify(true);
        }
        // That it asks for kicks must be visible before the index is read: the driver does both the other way round.
        fence(Ordering::SeqCst);
    }

    /// Stops the queue until the front end sets it up anew: the driver broke a rule.
    #[cold]
    #[inline(never)]
    pub(super) fn break_down(&mut self, error: Error) {
        self.live = false;
        self.broken = true;
        self.notice.get_or_insert(error);
        if let Some(eventfd) = &self.setup.error {
            let _ = Signal::new(eventfd).map(|mut signal| signal.raise());
        }
    }

    /// Whether its requests are in a table that the front end has handed over.
    pub(super) fn is_in_front_ends_table(&self) -> bool {
        self.inflight.as_ref().is_some_and(|inflight| !inflight.is_own())
    }

    /// Whether the queue is live, and nothing was ever on its ring.
    pub(super) fn is_untouched(&self) -> bool {
        self.live && self.indices.next_available == 0 && self.ring.as_ref().is_some_and(Ring::is_untouched)
    }

    /// Abandons all unfinished requests: their buffers can no longer be read, written or answered.
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
