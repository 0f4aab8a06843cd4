//! One connection of a VMM, as the reactor uses it. Owns everything that belongs to the connection; never decides when
//! to process a queue. `control.rs` and `vring.rs` carry out its control messages.
//!
//! Invariant: while a stop or reset waits for unfinished requests (`pending`), no further message is handled. So replies
//! keep the order of the messages, and a queue never starts while it has unfinished requests.

use super::budget::Budget;
use super::chain::Scratch;
use super::config::{Device, DeviceConfig};
use super::connection::{Connection, Packet, Reply};
use super::error::Error;
use super::head::Head;
use super::inflight::{InflightTable, inflight_table};
use super::memory::{Memory, copy_from_guest, copy_to_guest};
use super::message::{VringState, code, reply};
use super::queue::Queue;
use super::sigbus::Guard;
use super::{Change, Disconnect, MAX_QUEUES, TOKEN_TAG};
use crate::ErrorKind;
use spillway_core::{Errno, GuestBuffers, Request, Token, copy_past_caches, is_zero_now};
use std::os::fd::{BorrowedFd, OwnedFd};

/// Messages handled in one call, so that a front end that never stops sending cannot hold the thread.
const MESSAGES_PER_CALL: usize = 1024;

/// A reply that waits for unfinished requests.
#[derive(Clone, Copy)]
pub(super) enum PendingReply {
    /// GET_VRING_BASE of this queue.
    Base(u16),
    /// RESET_DEVICE, to be acknowledged or not.
    Reset { acknowledge: bool },
}

/// What became of a message.
#[derive(Debug)]
pub enum Handled {
    /// It is carried out; a later process must know of it.
    Accepted(Option<Reply>),
    /// It has changed nothing.
    Refused(Option<Reply>),
    /// Its answer waits for unfinished requests; no other message may come before it.
    Pending,
}

/// One VMM's connection: the back-end side of vhost-user for a block device. See the [module](super).
pub struct Frontend {
    pub(super) queues: Vec<Queue>,
    pub(super) device: Device,
    budget: Budget,
    scratch: Scratch,
    session: u8,
    connection: Connection,
    pub(super) features: u64,
    pub(super) protocol: u64,
    /// The in-flight table that the front end has handed over.
    pub(super) table: Option<InflightTable>,
    /// The session's own, for queues for which the front end hands over none.
    pub(super) own_table: InflightTable,
    /// The message that is handled now was carried out by an earlier process already.
    pub(super) replaying: bool,
    pub(super) pending: Option<PendingReply>,
    /// Set when the connection has ended.
    ended: Option<Disconnect>,
    /// The first error of a message, or of memory that is not shared, that `take_notice` has not returned yet.
    pub(super) notice: Option<Error>,
    /// A message has come.
    received: bool,
    /// SET_OWNER has come.
    pub(super) owner_set: bool,
    /// The notice about memory that is not shared has been made; cleared when memory comes.
    pub(super) not_shared_reported: bool,
    /// Last, so that the guard of its mappings and of the in-flight table's is dropped after all of them.
    pub(super) memory: Memory,
}

impl Frontend {
    /// Takes over a connected socket and makes it non-blocking.
    ///
    /// # Errors
    /// No or more than 64 queues, or a failed system call.
    pub fn new(socket: OwnedFd, config: DeviceConfig, session: u8) -> Result<Frontend, Error> {
        check_queues(config.queues)?;
        let table = inflight_table(config.queues)
            .map_err(|e| Error::from_io("the in-flight table cannot be made", &e))?;
        Frontend::resume(socket, config, session, table)
    }

    /// The same with an in-flight table from [`inflight_table`] that an earlier process may have used. The messages that
    /// that process has carried out come by [`Frontend::replay`].
    ///
    /// # Errors
    /// As [`Frontend::new`].
    pub fn resume(
        socket: OwnedFd,
        config: DeviceConfig,
        session: u8,
        own_table: OwnedFd,
    ) -> Result<Frontend, Error> {
        check_queues(config.queues)?;
        let memory = Memory::new(Guard::new()?);
        let own_table = InflightTable::map_own(own_table, config.queues, memory.guard())?;
        let connection = Connection::new(socket)
            .map_err(|e| Error::from_io("the front end's socket cannot be made non-blocking", &e))?;
        let token =
            |queue: u16| u64::from(TOKEN_TAG) << 56 | u64::from(session) << 48 | u64::from(queue) << 32;
        Ok(Frontend {
            queues: (0..config.queues).map(|queue| Queue::new(token(queue))).collect(),
            device: Device::new(&config),
            budget: Budget::default(),
            scratch: Scratch::default(),
            session,
            connection,
            features: 0,
            protocol: 0,
            table: None,
            own_table,
            replaying: false,
            pending: None,
            ended: None,
            notice: None,
            received: false,
            owner_set: false,
            not_shared_reported: false,
            memory,
        })
    }

    /// The control socket.
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.connection.fd()
    }

    /// Whether control messages may be handled now. False while a stop waits for unfinished requests.
    pub fn wants_read(&self) -> bool {
        self.pending.is_none() && self.ended.is_none()
    }

    /// Handles the control messages that have wholly arrived; half a message stays for the next call.
    ///
    /// # Errors
    /// The connection has ended; it will say the same from now on.
    pub fn on_readable(&mut self, changes: &mut Vec<Change>) -> Result<(), Disconnect> {
        self.check()?;
        for _ in 0..MESSAGES_PER_CALL {
            if self.pending.is_some() {
                return Ok(());
            }
            let handled = match self.connection.receive() {
                Ok(None) => return Ok(()),
                Ok(Some(packet)) => self.on_message(packet, changes),
                Err(disconnect) => Err(self.end(disconnect)),
            };
            match handled? {
                Handled::Accepted(Some(answer)) | Handled::Refused(Some(answer)) => self.send(&answer)?,
                Handled::Accepted(None) | Handled::Refused(None) | Handled::Pending => {}
            }
        }
        Ok(())
    }

    /// Sends the pending reply, if nothing of its queue is unfinished any more, and handles the messages that the front
    /// end has sent meanwhile.
    ///
    /// # Errors
    /// As [`Frontend::on_readable`].
    pub fn finish_stops(&mut self, changes: &mut Vec<Change>) -> Result<(), Disconnect> {
        match self.finish_pending()? {
            None => Ok(()),
            Some(answer) => {
                answer.iter().try_for_each(|answer| self.send(answer))?;
                self.on_readable(changes)
            }
        }
    }

    fn send(&mut self, answer: &Reply) -> Result<(), Disconnect> {
        self.connection.send(answer).map_err(|disconnect| self.end(disconnect))
    }

    /// Handles a message that a supervisor has read from the socket. No reply may be pending.
    ///
    /// # Errors
    /// As [`Frontend::on_readable`].
    pub fn on_message(&mut self, packet: Packet, changes: &mut Vec<Change>) -> Result<Handled, Disconnect> {
        self.check()?;
        if self.pending.is_some() {
            let reason = "a message came before the last one was answered";
            return Err(self.end(Error::new(ErrorKind::WrongState, reason).into()));
        }
        self.received = true;
        self.dispatch(packet, changes).map_err(|disconnect| self.end(disconnect))
    }

    /// Carries out once more what an earlier process has carried out: a packet of the session's [`super::Record`].
    ///
    /// # Errors
    /// The session cannot go on in this process.
    pub fn replay(&mut self, packet: Packet, changes: &mut Vec<Change>) -> Result<(), Disconnect> {
        self.replaying = true;
        let handled = self.on_message(packet, changes);
        self.replaying = false;
        match handled? {
            Handled::Refused(_) => {
                let refused = || Error::protocol("a message that was accepted before is refused");
                let error = self.notice.take().unwrap_or_else(refused);
                Err(self.end(Disconnect::NotResumed(error)))
            }
            Handled::Accepted(_) | Handled::Pending => Ok(()),
        }
    }

    /// Whether the front end waits, by a stop or a reset, for requests of which it can do without the end, and if so, which
    /// ones. Those of a stop stay in its in-flight table. Without a table of its own it expects a stop to complete all of them.
    pub fn may_abandon(&self) -> Option<impl Fn(Token) -> bool + use<>> {
        let queue = match self.pending? {
            PendingReply::Base(index) if self.queues[usize::from(index)].is_in_front_ends_table() => {
                Some(index)
            }
            PendingReply::Base(_) => return None,
            PendingReply::Reset { .. } => None,
        };
        let session = self.session;
        Some(move |token| {
            owns(session, token) && queue.is_none_or(|queue| Frontend::queue_of(token) == queue)
        })
    }

    /// The pending answer, once nothing of its queue is unfinished any more. `Some(None)`: none was asked for.
    ///
    /// # Errors
    /// As [`Frontend::on_readable`].
    pub fn finish_pending(&mut self) -> Result<Option<Option<Reply>>, Disconnect> {
        if self.pending.is_none() {
            return Ok(None);
        }
        self.check()?;
        Ok(self.take_pending())
    }

    /// Whether a message has come. A front end sends its first one right after it has connected.
    pub fn has_received(&self) -> bool {
        self.received
    }

    /// Ends the connection from our side, as if the front end had left: nothing of its memory is read or written
    /// any more, whatever completes later.
    pub fn disconnect(&mut self) {
        if self.ended.is_none() {
            self.end(Disconnect::Left);
        }
    }

    /// Queues on offer.
    pub fn queue_count(&self) -> u16 {
        self.queues.len() as u16
    }

    /// Whether requests may be taken from this queue.
    #[inline]
    pub fn is_live(&self, queue: u16) -> bool {
        self.queues.get(usize::from(queue)).is_some_and(|queue| queue.live) && !self.poisoned()
    }

    /// Takes the next request of a queue. Malformed and unsupported ones are answered on the way.
    #[inline]
    pub fn next(&mut self, queue: u16) -> Option<Request> {
        let queue = self.queues.get_mut(usize::from(queue))?;
        queue.next(&mut self.memory, &self.device, &mut self.budget, &mut self.scratch)
    }

    /// Whether [`Frontend::next`] would find a request, and the budget admits one.
    #[inline]
    pub fn has_work(&self, queue: u16) -> bool {
        self.queues.get(usize::from(queue)).is_some_and(|queue| queue.has_work(&self.budget))
    }

    /// Gives finished requests of a queue back to the driver, and interrupts it if it wants that.
    #[inline]
    pub fn publish(&mut self, queue: u16) {
        if let Some(queue) = self.queues.get_mut(usize::from(queue)) {
            queue.publish(&self.memory);
        }
    }

    /// Asks the driver not to kick, because the reactor looks at this queue anyway.
    #[inline]
    pub fn disable_notifications(&mut self, queue: u16) {
        if let Some(queue) = self.queues.get_mut(usize::from(queue)) {
            queue.disable_notifications();
        }
    }

    /// Asks the driver to kick. True: it has added requests meanwhile, for which it will not kick; look again. Requests
    /// that the budget does not admit (as in [`Frontend::has_work`]) do not count: they follow when another one ends.
    #[inline]
    pub fn enable_notifications(&mut self, queue: u16) -> bool {
        self.queues.get_mut(usize::from(queue)).is_some_and(|queue| queue.enable_notifications(&self.budget))
    }

    /// Requests that were taken and are not completed.
    pub fn unfinished(&self) -> usize {
        self.queues.iter().map(|queue| queue.unfinished).sum()
    }

    /// Whether the front end's memory has shrunk under us: the connection is lost.
    #[inline]
    pub fn poisoned(&self) -> bool {
        self.memory.guard().poisoned()
    }

    /// Whether this token is of this session.
    #[inline]
    pub fn owns(&self, token: Token) -> bool {
        owns(self.session, token)
    }

    /// The queue of a token of this export.
    #[inline]
    pub fn queue_of(token: Token) -> u16 {
        (token.0 >> 32) as u16
    }

    /// Whether the guest has chosen write-back, for the next session's [`DeviceConfig`].
    pub fn writeback(&self) -> bool {
        self.device.writeback
    }

    /// The next error to be logged that has not ended the connection, such as why a queue was stopped.
    pub fn take_notice(&mut self) -> Option<Error> {
        let of_queue =
            |(index, queue): (u32, &mut Queue)| queue.notice.take().map(|error| error.on_queue(index));
        self.notice.take().or_else(|| (0..).zip(&mut self.queues).find_map(of_queue))
    }

    /// Fails if the connection has ended, and ends it if guest memory has shrunk.
    fn check(&mut self) -> Result<(), Disconnect> {
        if let Some(ended) = &self.ended {
            return Err(*ended);
        }
        if self.poisoned() {
            let reason = "the front end's memory has shrunk below the size that it announced";
            return Err(self.end(Error::new(ErrorKind::MemoryShrunk, reason).into()));
        }
        Ok(())
    }

    fn end(&mut self, disconnect: Disconnect) -> Disconnect {
        self.pending = None;
        for queue in &mut self.queues {
            queue.abandon();
        }
        self.ended = Some(disconnect);
        disconnect
    }

    /// Carries out what is pending once its queue, or all queues, have no unfinished requests: its answer, if one was
    /// asked for.
    pub(super) fn take_pending(&mut self) -> Option<Option<Reply>> {
        let (request, payload) = match self.pending? {
            PendingReply::Base(index) => {
                let queue = &mut self.queues[usize::from(index)];
                if queue.unfinished > 0 {
                    return None;
                }
                queue.publish(&self.memory);
                let state = VringState { index: u32::from(index), num: u32::from(queue.stop()) };
                (code::GET_VRING_BASE, Some(state.to_bytes()))
            }
            PendingReply::Reset { acknowledge } => {
                if self.unfinished() > 0 {
                    return None;
                }
                for queue in &mut self.queues {
                    queue.reset();
                }
                self.features = 0;
                self.table = None;
                // `writeback` stays as the guest chose it: QEMU keeps a copy and does not send it again.
                self.device.set_features(0);
                (code::RESET_DEVICE, acknowledge.then_some([0; 8]))
            }
        };
        self.pending = None;
        Some(payload.map(|payload| Reply { bytes: reply(request, &payload), fd: None }))
    }

    #[inline(always)]
    fn head(&self, token: Token) -> Result<&Head, Errno> {
        debug_assert!(self.owns(token), "a token of another session");
        let queue = self.queues.get(usize::from(Self::queue_of(token))).ok_or(Errno::FAULT)?;
        queue.unfinished_head(token.0 as u16).ok_or(Errno::FAULT)
    }

    /// Calls `each` with the address and the length of every piece of guest memory that bytes `at..at + len` of a
    /// request's data lie in. The pieces stay mapped until the request is completed.
    pub fn pieces(
        &self,
        token: Token,
        at: u32,
        len: u32,
        mut each: impl FnMut(*mut u8, usize),
    ) -> Result<(), Errno> {
        self.head(token)?.pieces(at, len as usize, |guest, range| each(guest, range.len()))
    }

    #[inline(always)]
    fn unless_poisoned(&self) -> Result<(), Errno> {
        if self.poisoned() { Err(Errno::FAULT) } else { Ok(()) }
    }
}

impl GuestBuffers for Frontend {
    #[inline]
    fn copy_from_guest(&mut self, token: Token, at: u32, to: &mut [u8]) -> Result<(), Errno> {
        self.head(token)?.pieces(at, to.len(), |guest, range| {
            // SAFETY: `pieces` hands out mapped guest memory of exactly the range's length.
            unsafe { copy_from_guest(guest, &mut to[range]) }
        })?;
        self.unless_poisoned()
    }

    #[inline]
    fn store_from_guest(&mut self, token: Token, at: u32, to: &mut [u8]) -> Result<bool, Errno> {
        let mut zero = true;
        self.head(token)?.pieces(at, to.len(), |guest, range| {
            // SAFETY: as above.
            zero &= unsafe { copy_past_caches(guest, &mut to[range]) };
        })?;
        self.unless_poisoned().map(|()| zero)
    }

    #[inline]
    fn guest_is_zero(&mut self, token: Token, at: u32, len: u32) -> Result<bool, Errno> {
        let mut zero = true;
        self.head(token)?.pieces(at, len as usize, |guest, range| {
            // SAFETY: as above.
            zero = zero && unsafe { is_zero_now(guest, range.len()) };
        })?;
        self.unless_poisoned().map(|()| zero)
    }

    #[inline]
    fn copy_to_guest(&mut self, token: Token, at: u32, from: &[u8]) -> Result<(), Errno> {
        self.head(token)?.pieces(at, from.len(), |guest, range| {
            // SAFETY: as above.
            unsafe { copy_to_guest(&from[range], guest) }
        })?;
        self.unless_poisoned()
    }

    fn zero_guest(&mut self, token: Token, at: u32, len: u32) -> Result<(), Errno> {
        self.head(token)?.pieces(at, len as usize, |guest, range| {
            // SAFETY: as above.
            unsafe { guest.write_bytes(0, range.len()) }
        })?;
        self.unless_poisoned()
    }

    #[inline]
    fn complete(&mut self, token: Token, result: Result<(), Errno>) {
        debug_assert!(self.owns(token), "a token of another session");
        if let Some(queue) = self.queues.get_mut(usize::from(Self::queue_of(token))) {
            queue.complete(token.0 as u16, result, &mut self.memory, &mut self.budget);
        }
    }
}

#[inline]
fn owns(session: u8, token: Token) -> bool {
    (token.0 >> 48) as u16 == u16::from(TOKEN_TAG) << 8 | u16::from(session)
}

fn check_queues(queues: u16) -> Result<(), Error> {
    let error = Error::new(ErrorKind::OutOfBounds, "a disk cannot offer this number of queues");
    match queues {
        0 => Err(error.below(queues, 1u16)),
        1..=MAX_QUEUES => Ok(()),
        _ => Err(error.above(queues, MAX_QUEUES)),
    }
}
