//! One connection of a VMM, as the reactor uses it. Owns all that belongs to the connection; never decides when
//! to process a queue. What its control messages do is in `control.rs`.
//!
//! Invariant: while a stop or reset waits for unfinished requests (`held`), no further message is handled, so
//! that replies keep the order of the questions and a queue never starts over unfinished requests.

use super::budget::Budget;
use super::chain::Scratch;
use super::config::{Device, DeviceConfig};
use super::connection::{Answer, Connection, Packet};
use super::head::Head;
use super::inflight::{Table, inflight_table};
use super::memory::{Memory, copy_from_guest, copy_to_guest};
use super::message::{VringState, code, reply};
use super::queue::Queue;
use super::sigbus::Guard;
use super::{Change, Disconnect, MAX_QUEUES, TOKEN_TAG};
use spillway_core::{Errno, GuestBuffers, Request, Token, copy_past_caches, is_zero_now};
use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};

/// Messages handled in one call, so that a front end that never stops sending cannot hold the thread.
const MESSAGES_PER_CALL: usize = 1024;

/// A reply that waits for unfinished requests.
#[derive(Clone, Copy)]
pub(super) enum HeldReply {
    /// GET_VRING_BASE of this queue.
    Base(u16),
    /// RESET_DEVICE, to be acknowledged or not.
    Reset { acknowledge: bool },
}

/// What became of a message.
#[derive(Debug)]
pub enum Handled {
    /// It is carried out; a later process must know of it.
    Accepted(Option<Answer>),
    /// It has changed nothing.
    Refused(Option<Answer>),
    /// Its answer waits for unfinished requests; no other message may come before it.
    Held,
}

/// One VMM's connection: the back-end side of vhost-user for a block device. See the [module](super).
pub struct Frontend {
    pub(super) queues: Vec<Queue>,
    pub(super) device: Device,
    budget: Budget,
    /// Room to take one chain apart.
    scratch: Scratch,
    session: u8,
    connection: Connection,
    pub(super) features: u64,
    pub(super) protocol: u64,
    /// Lent by the front end.
    pub(super) table: Option<Table>,
    pub(super) own_table: Table,
    /// What is handled now is what an earlier process has carried out.
    pub(super) replaying: bool,
    pub(super) held: Option<HeldReply>,
    gone: Option<Disconnect>,
    pub(super) notice: Option<String>,
    spoken: bool,
    /// SET_OWNER has come.
    pub(super) owned: bool,
    /// It was said that the VMM's memory is not shared.
    pub(super) told_not_shared: bool,
    /// Last, so that the guard of its mappings, and of the in-flight table's, goes after all of them.
    pub(super) memory: Memory,
}

impl Frontend {
    /// Takes over a connected socket and makes it non-blocking.
    ///
    /// # Errors
    /// No or more than 64 queues, or the system's.
    pub fn new(socket: OwnedFd, config: DeviceConfig, session: u8) -> io::Result<Frontend> {
        let table = inflight_table(config.queues)?;
        Frontend::resume(socket, config, session, table)
    }

    /// The same with a table of requests in flight from [`inflight_table`] that an earlier process may have used:
    /// what that was told comes by [`Frontend::replay`].
    ///
    /// # Errors
    /// As [`Frontend::new`].
    pub fn resume(
        socket: OwnedFd,
        config: DeviceConfig,
        session: u8,
        own_table: OwnedFd,
    ) -> io::Result<Frontend> {
        if config.queues == 0 || config.queues > MAX_QUEUES {
            return Err(io::Error::other(format!(
                "{} queues; 1 to {MAX_QUEUES} are possible",
                config.queues
            )));
        }
        let memory = Memory::new(Guard::new()?);
        let own_table = Table::map_own(own_table, config.queues, memory.guard()).map_err(io::Error::other)?;
        let token =
            |queue: u16| u64::from(TOKEN_TAG) << 56 | u64::from(session) << 48 | u64::from(queue) << 32;
        Ok(Frontend {
            queues: (0..config.queues).map(|queue| Queue::new(token(queue))).collect(),
            device: Device::new(&config),
            budget: Budget::default(),
            scratch: Scratch::default(),
            session,
            connection: Connection::new(socket)?,
            features: 0,
            protocol: 0,
            table: None,
            own_table,
            replaying: false,
            held: None,
            gone: None,
            notice: None,
            spoken: false,
            owned: false,
            told_not_shared: false,
            memory,
        })
    }

    /// The control socket.
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.connection.fd()
    }

    /// Whether control messages may be handled now. False while a stop waits for unfinished requests.
    pub fn wants_read(&self) -> bool {
        self.held.is_none() && self.gone.is_none()
    }

    /// Handles the control messages that have wholly arrived; half a message stays for the next call.
    ///
    /// # Errors
    /// The connection has ended; it will say the same from now on.
    pub fn on_readable(&mut self, changes: &mut Vec<Change>) -> Result<(), Disconnect> {
        self.check()?;
        for _ in 0..MESSAGES_PER_CALL {
            if self.held.is_some() {
                return Ok(());
            }
            let handled = match self.connection.receive() {
                Ok(None) => return Ok(()),
                Ok(Some(packet)) => self.on_message(packet, changes),
                Err(disconnect) => Err(self.end(disconnect)),
            };
            match handled? {
                Handled::Accepted(Some(answer)) | Handled::Refused(Some(answer)) => self.send(&answer)?,
                Handled::Accepted(None) | Handled::Refused(None) | Handled::Held => {}
            }
        }
        Ok(())
    }

    /// Sends the reply that waited, if nothing of its queue is unfinished any more, and goes on with what the
    /// front end sent meanwhile.
    ///
    /// # Errors
    /// As [`Frontend::on_readable`].
    pub fn finish_stops(&mut self, changes: &mut Vec<Change>) -> Result<(), Disconnect> {
        match self.finish_held()? {
            None => Ok(()),
            Some(answer) => {
                answer.iter().try_for_each(|answer| self.send(answer))?;
                self.on_readable(changes)
            }
        }
    }

    fn send(&mut self, answer: &Answer) -> Result<(), Disconnect> {
        self.connection.send(answer).map_err(|disconnect| self.end(disconnect))
    }

    /// Handles a message that a supervisor has read from the socket. None may be held.
    ///
    /// # Errors
    /// As [`Frontend::on_readable`].
    pub fn on_message(&mut self, packet: Packet, changes: &mut Vec<Change>) -> Result<Handled, Disconnect> {
        self.check()?;
        if self.held.is_some() {
            return Err(self.end(Disconnect::Fault("a message came before the last one was answered".into())));
        }
        self.spoken = true;
        self.dispatch(packet, changes).map_err(|disconnect| self.end(disconnect))
    }

    /// Brings the session to where an earlier process has left it: a packet of its [`super::Record`].
    ///
    /// # Errors
    /// The session cannot go on.
    pub fn replay(&mut self, packet: Packet, changes: &mut Vec<Change>) -> Result<(), Disconnect> {
        self.replaying = true;
        let handled = self.on_message(packet, changes);
        self.replaying = false;
        match handled? {
            Handled::Refused(_) => {
                let why = self.notice.take().unwrap_or_default();
                Err(self.end(Disconnect::Fault(format!("the session cannot be taken up again: {why}"))))
            }
            Handled::Accepted(_) | Handled::Held => Ok(()),
        }
    }

    /// The answer that waited, once nothing of its queue is unfinished any more. `Some(None)`: none was asked for.
    ///
    /// # Errors
    /// As [`Frontend::on_readable`].
    pub fn finish_held(&mut self) -> Result<Option<Option<Answer>>, Disconnect> {
        if self.held.is_none() {
            return Ok(None);
        }
        self.check()?;
        Ok(self.take_held())
    }

    /// Whether a message has come: a front end speaks first, and at once.
    pub fn has_spoken(&self) -> bool {
        self.spoken
    }

    /// Ends the connection from our side, as if the front end had left: nothing of its memory is read or written
    /// any more, whatever completes later.
    pub fn disconnect(&mut self) {
        if self.gone.is_none() {
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

    /// Whether [`Frontend::next`] would find something to look at, and there is room for what it finds.
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

    /// Asks the driver not to kick: this queue is looked at anyway.
    #[inline]
    pub fn disable_notifications(&mut self, queue: u16) {
        if let Some(queue) = self.queues.get_mut(usize::from(queue)) {
            queue.disable_notifications();
        }
    }

    /// Asks the driver to kick. True: there is more meanwhile, for which it will not; look again. What there is no
    /// room for (as in [`Frontend::has_work`]) does not count: the end of a request is what brings that.
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
        (token.0 >> 48) as u16 == u16::from(TOKEN_TAG) << 8 | u16::from(self.session)
    }

    /// The queue of a token of this export.
    #[inline]
    pub fn queue_of(token: Token) -> u16 {
        (token.0 >> 32) as u16
    }

    /// The guest's choice of write-back or write-through, for the next session's [`DeviceConfig`].
    pub fn writeback(&self) -> bool {
        self.device.writeback
    }

    /// The next thing worth a line in the log, such as why a queue was stopped.
    pub fn take_notice(&mut self) -> Option<String> {
        let of_queue = |(index, queue): (usize, &mut Queue)| {
            queue.notice.take().map(|notice| format!("queue {index}: {notice}"))
        };
        self.notice.take().or_else(|| self.queues.iter_mut().enumerate().find_map(of_queue))
    }

    /// The end that has come already, or that shrunken memory brings now.
    fn check(&mut self) -> Result<(), Disconnect> {
        if let Some(gone) = &self.gone {
            return Err(gone.clone());
        }
        if self.poisoned() {
            let why = "the front end's memory has shrunk below what it announced".to_owned();
            return Err(self.end(Disconnect::Fault(why)));
        }
        Ok(())
    }

    fn end(&mut self, disconnect: Disconnect) -> Disconnect {
        self.held = None;
        for queue in &mut self.queues {
            queue.abandon();
        }
        self.gone = Some(disconnect.clone());
        disconnect
    }

    /// What is held is done, if its queue, or all, have nothing unfinished: its answer, if there is one.
    pub(super) fn take_held(&mut self) -> Option<Option<Answer>> {
        let (request, payload) = match self.held? {
            HeldReply::Base(index) => {
                let queue = &mut self.queues[usize::from(index)];
                if queue.unfinished > 0 {
                    return None;
                }
                queue.publish(&self.memory);
                let state = VringState { index: u32::from(index), num: u32::from(queue.stop()) };
                (code::GET_VRING_BASE, Some(state.to_bytes()))
            }
            HeldReply::Reset { acknowledge } => {
                if self.unfinished() > 0 {
                    return None;
                }
                for queue in &mut self.queues {
                    queue.reset();
                }
                self.features = 0;
                self.table = None;
                // `writeback` stays as the guest chose it: QEMU keeps a copy and does not say it again.
                self.device.set_features(0);
                (code::RESET_DEVICE, acknowledge.then_some([0; 8]))
            }
        };
        self.held = None;
        Some(payload.map(|payload| Answer { bytes: reply(request, &payload), fd: None }))
    }

    #[inline(always)]
    fn head(&self, token: Token) -> Result<&Head, Errno> {
        debug_assert!(self.owns(token), "a token of another session");
        let queue = self.queues.get(usize::from(Self::queue_of(token))).ok_or(Errno::FAULT)?;
        queue.unfinished_head(token.0 as u16).ok_or(Errno::FAULT)
    }

    /// Calls `each` for every piece of guest memory that `len` bytes of a request's data from `at` on lie in: where it
    /// is mapped, and its length. It stays mapped until the request is completed.
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
