//! What the supervisor and the worker say to each other while the disk is served: clients, resets, the end, and
//! what is worth a line in the log. Owns the channel; touches no content.
//!
//! Invariant: each client that the supervisor sends is answered by one `ClientGone`, each message of a VMM by one
//! `Answered` unless its client goes first, each reset by one `ResetDone`.

use super::clients::{NbdClient, Vmm};
use super::error::{ConnectionEnd, Error, ErrorKind, ReportedError};
use super::events::{describe, state_of};
use super::now_ns;
use super::reactor::Reactor;
use crate::channel::{self, ChannelError, ClientKind, FromWorker, ToWorker};
use rustix::event::{PollFd, PollFlags, poll};
use spillway_control::DiskSettings;
use spillway_core::{DiskError, Errno, Thresholds, Token};
use spillway_export::vhost_user_blk::{self, DeviceConfig, Frontend, Handled, Packet, Reply};
use spillway_export::{Figures, nbd};
use spillway_image::digests::CHUNK_BYTES;
use std::collections::HashSet;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

/// How long a VMM may say nothing at first.
const SILENCE_NS: u64 = 10_000_000_000;
/// How long a request may have waited for the base image before a stop of its queue no longer waits for it. A store in good health
/// answers sooner.
const STOP_PATIENCE_NS: u64 = 200_000_000;
/// NBD clients at a time.
const MAX_NBD: usize = 16;
/// VMMs that have left and still have requests at the store, beside the one that serves: each may hold what one may.
const MOST_LEAVING: usize = 2;

impl Reactor {
    pub(super) fn take_messages(&mut self) -> Result<(), Error> {
        loop {
            match channel::receive::<ToWorker>(&self.channel) {
                Ok(Some((message, fds))) => self.on_message(message, fds),
                Err(e) if e.would_block() => return Ok(()),
                Ok(None) | Err(ChannelError::Socket(_)) => {
                    self.stage.orphaned = true;
                    return Ok(());
                }
                Err(e) => {
                    let reason = "a message of the supervisor cannot be read";
                    return Err(Error::new(ErrorKind::Channel, reason).because(e));
                }
            }
        }
    }

    pub(super) fn on_message(&mut self, message: ToWorker, mut fds: Vec<OwnedFd>) {
        match message {
            ToWorker::Client { id, kind } => {
                if let Err(error) = self.add_client(id, kind, fds) {
                    self.client_gone(id, Some(error.report()));
                }
            }
            ToWorker::Replay { id, bytes } => {
                if let Some(i) = self.serving_vmm(id) {
                    self.control(i, |frontend, changes| frontend.replay(Packet { bytes, fds }, changes));
                }
            }
            ToWorker::Message { id, bytes } => {
                if let Some(i) = self.serving_vmm(id) {
                    let handled = self
                        .control(i, |frontend, changes| frontend.on_message(Packet { bytes, fds }, changes));
                    match handled {
                        Some(Handled::Accepted(answer)) => self.answered(i, true, answer),
                        Some(Handled::Refused(answer)) => self.answered(i, false, answer),
                        Some(Handled::Pending) | None => {}
                    }
                }
            }
            ToWorker::Left { id, error } => {
                if let Some(i) = self.serving_vmm(id) {
                    self.end_vmm(i, error.map_or(ConnectionEnd::Left, ConnectionEnd::from));
                }
            }
            ToWorker::Chunks => self.connect_chunks(fds),
            ToWorker::Reset { force } => {
                // One that has closed its side may not have been noticed yet, or still have requests unfinished.
                let clients = self.io.clients.present();
                if clients > 0 && !force {
                    let error = Error::new(ErrorKind::Refused, "clients are still connected")
                        .figures(Figures::Found(clients as u64))
                        .advice("disconnect them, or use --force");
                    self.send(&FromWorker::ResetDone { result: Err(error.report()) }, &[]);
                } else {
                    self.stage.resetting = true;
                }
            }
            ToWorker::Set(settings) => {
                let result = self.set(settings).map_err(|e| {
                    Error::new(ErrorKind::Settings, "the limits stay as they are").because(e).report()
                });
                self.send(&FromWorker::SetDone { result }, &[]);
            }
            ToWorker::Trace { on } => {
                let cannot = || Error::new(ErrorKind::Channel, "requests cannot be recorded");
                let recorded = match (on, fds.pop()) {
                    (true, None) => {
                        Err(cannot().advice("the memory for them has to come with the message `trace`"))
                    }
                    (_, memory) => self.tap.record(memory).map_err(|e| cannot().because(e)),
                };
                if let Err(error) = recorded {
                    self.tell(&error.to_string());
                }
            }
            ToWorker::Curve { goal } => {
                let curve = self.tap.curve(goal, self.disk.fill(), self.io.now_ns());
                self.send(&FromWorker::Curve { curve }, &[]);
            }
            ToWorker::Touched => {
                let chunks = self.io.base.take_touched();
                self.send(&FromWorker::Touched { chunks }, &[]);
            }
            ToWorker::Stop { disk_goes_on } => {
                (self.stage.stopping, self.stage.disk_goes_on) = (true, disk_goes_on);
                self.disk.wind_down();
            }
            ToWorker::Start(_) => self.tell("a second `start` was ignored"),
        }
    }

    /// Goes on with another connection for chunks of the streamed image. If it cannot be used, that is found out in this turn.
    fn connect_chunks(&mut self, fds: Vec<OwnedFd>) {
        if let Some(watch) = self.watches.chunks.take() {
            self.unwatch(watch);
        }
        let connected = match <[OwnedFd; 2]>::try_from(fds) {
            Ok([connection, memory]) => self.io.base.connect(connection, memory),
            Err(_) => Err(io::ErrorKind::InvalidInput.into()),
        };
        match connected {
            Ok(()) => self.watch_chunks(),
            Err(e) => self.tell(&format!("the connection for chunks of the image cannot be used: {e}")),
        }
        if self.watches.chunks.is_none() {
            self.send(&FromWorker::ChunksLost, &[]);
        }
    }

    /// Tells the supervisor once when the connection for chunks is lost.
    #[inline]
    pub(super) fn keep_chunks(&mut self) {
        if self.watches.chunks.is_some()
            && self.io.base.connection().is_none()
            && let Some(watch) = self.watches.chunks.take()
        {
            self.unwatch(watch);
            self.send(&FromWorker::ChunksLost, &[]);
        }
    }

    /// All of them, or none.
    fn set(&mut self, settings: DiskSettings) -> Result<(), DiskError> {
        let thresholds =
            Thresholds { warning_percent: settings.warn_at(), critical_percent: settings.critical_at() };
        thresholds.check()?;
        self.disk.set_limits(settings.ram_bytes(), settings.overflow_bytes())?;
        self.disk.set_full_policy(settings.full());
        self.disk.set_thresholds(thresholds)?;
        if self.start.settings.rate() != settings.rate() {
            self.throttle.set(settings.rate());
        }
        self.start.settings = settings;
        Ok(())
    }

    /// A VMM that is not on its way out.
    fn serving_vmm(&self, id: u64) -> Option<usize> {
        self.io.clients.vmms.iter().position(|v| v.id == id && v.ended.is_none())
    }

    /// Tells the supervisor what to answer a VMM. What the message began is known to it before anything comes of it:
    /// a later worker is told that it was carried out.
    pub(super) fn answered(&mut self, i: usize, accepted: bool, answer: Option<Reply>) {
        let Reply { bytes, fd } = answer.unwrap_or_default();
        let vmm = &self.io.clients.vmms[i];
        let message = FromWorker::Answered {
            id: vmm.id,
            accepted,
            answer: (!bytes.is_empty()).then_some(bytes),
            writeback: vmm.frontend.writeback(),
        };
        let fds: Vec<_> = fd.iter().map(AsFd::as_fd).collect();
        self.send(&message, &fds);
    }

    /// What a VMM waited for may be done now: answers it.
    pub(super) fn finish_stops(&mut self, i: usize) {
        if self.stage.orphaned {
            self.control(i, |frontend, changes| frontend.finish_stops(changes));
        } else if let Some(Some(answer)) = self.control(i, |frontend, _| frontend.finish_pending()) {
            self.answered(i, true, answer);
        }
    }

    /// A VMM that stops a queue or resets its device does not wait long for the base image, whose store may be away: QEMU answers
    /// nobody meanwhile. Its requests stay undone, and what is read for them reaches nobody.
    pub(super) fn abandon_base_reads(&mut self) {
        let hurries = self.stage.takes_none() && self.io.base.chunks_are_missing();
        self.stage.abandon_at_ns = if hurries { self.cancel_base_reads() } else { None };
        for i in 0..self.io.clients.vmms.len() {
            let next_ns = self.io.clients.vmms[i].frontend.may_abandon().and_then(|which| {
                let came_by_ns = self.io.now_ns().saturating_sub(STOP_PATIENCE_NS);
                self.disk.abandon_base_reads(&mut self.io, came_by_ns, which)
            });
            self.io.clients.vmms[i].abandon_at_ns = next_ns.map(|ns| ns + STOP_PATIENCE_NS);
        }
    }

    /// A disk that stops or is reset does not wait long for chunks either. What waited for them is left unanswered: if the disk goes
    /// on, the next worker begins it anew. Returns when to look again.
    fn cancel_base_reads(&mut self) -> Option<u64> {
        let came_by_ns = self.io.now_ns().saturating_sub(STOP_PATIENCE_NS);
        let (late, others): (Vec<_>, Vec<_>) =
            self.disk.waiting_for_base().into_iter().partition(|&(_, came_ns)| came_ns <= came_by_ns);
        if !late.is_empty() {
            let late: HashSet<_> = late.into_iter().map(|(token, _)| token.0).collect();
            self.disk.cancel(&mut self.io, Errno::CANCELED, |token| late.contains(&token.0));
            self.disk.abandon_base_reads(&mut self.io, came_by_ns, |token| late.contains(&token.0));
        }
        others.iter().map(|&(_, came_ns)| came_ns + STOP_PATIENCE_NS).min()
    }

    fn add_client(&mut self, id: u64, kind: ClientKind, mut fds: Vec<OwnedFd>) -> Result<(), Error> {
        if self.stage.takes_none() {
            return Err(refused("the disk is being reset or stopped").advice("connect again later"));
        }
        let table = if kind == ClientKind::VhostUser { fds.pop() } else { None };
        let (Some(socket), true) = (fds.pop(), fds.is_empty()) else {
            let reason = "a client came without its socket, or a VMM without its table of requests";
            return Err(Error::new(ErrorKind::Channel, reason));
        };
        match kind {
            ClientKind::VhostUser => self.add_vmm(id, socket, table.expect("one of two")),
            ClientKind::Nbd => {
                let clients = &mut self.io.clients.nbd;
                let n = clients.iter().position(Option::is_none).unwrap_or(clients.len());
                if n >= MAX_NBD {
                    return Err(refused("as many NBD clients are connected as there may be")
                        .figures(Figures::Found(MAX_NBD as u64))
                        .advice("disconnect one of them"));
                }
                let info = nbd::ExportInfo {
                    size_bytes: self.start.size_bytes,
                    name: self.start.export.clone(),
                    description: format!("Spillway disk {}", self.start.serial),
                };
                let mut connection =
                    nbd::Connection::new(socket, info, n as u16, &self.nbd_budget).map_err(cannot_serve)?;
                connection.set_disk_full(self.disk_full);
                let wait = connection.handshake_deadline().map_or(0, |d| d.as_nanos() as u64);
                let deadline_ns = now_ns() + wait;
                let client = NbdClient {
                    id,
                    connection,
                    active: true,
                    touched: true,
                    ended: None,
                    watch: None,
                    hung_up: false,
                    deadline_ns,
                };
                if n == clients.len() {
                    clients.push(Some(client));
                } else {
                    clients[n] = Some(client);
                }
                Ok(())
            }
        }
    }

    fn add_vmm(&mut self, id: u64, socket: OwnedFd, table: OwnedFd) -> Result<(), Error> {
        for i in 0..self.io.clients.vmms.len() {
            if self.io.clients.vmms[i].is_present() {
                return Err(refused("a VMM is connected already, and a disk serves one at a time")
                    .advice("disconnect it first"));
            }
            self.end_vmm(i, ConnectionEnd::Left);
        }
        let leaving = self.io.clients.vmms.iter().filter(|v| v.frontend.unfinished() > 0).count();
        if leaving > MOST_LEAVING {
            return Err(
                refused("requests of VMMs that have left are still in flight").advice("connect again later")
            );
        }
        let config = DeviceConfig {
            size_bytes: self.start.size_bytes,
            queues: self.start.queues.clamp(1, 64),
            serial: self.start.serial.clone(),
            writeback: self.writeback,
        };
        // Earlier ones may still have requests unfinished.
        self.next_session = self.next_session.wrapping_add(1);
        while self.io.clients.vmms.iter().any(|v| v.session == session_of(self.next_session)) {
            self.next_session = self.next_session.wrapping_add(1);
        }
        let frontend = Frontend::resume(socket, config, self.next_session, table).map_err(cannot_serve)?;
        let kicks = vec![None; usize::from(frontend.queue_count())];
        let session = session_of(self.next_session);
        let deadline_ns = now_ns() + SILENCE_NS;
        self.io.clients.vmms.push(Vmm {
            id,
            session,
            frontend,
            dirty: 0,
            ended: None,
            watch: None,
            kicks,
            polled: 0,
            deadline_ns,
            abandon_at_ns: None,
        });
        Ok(())
    }

    /// A VMM is on its way out: its memory is not touched any more, and it is let go when nothing of it is
    /// unfinished.
    #[cold]
    pub(super) fn end_vmm(&mut self, i: usize, why: ConnectionEnd) {
        let vmm = &mut self.io.clients.vmms[i];
        if vmm.ended.is_none() {
            vmm.ended = Some(Box::new(why));
            vmm.frontend.disconnect();
            self.writeback = vmm.frontend.writeback();
        }
    }

    /// Says what a VMM's session has to say.
    pub(super) fn tell_notices(&mut self, i: usize) {
        while let Some(notice) = self.io.clients.vmms[i].frontend.take_notice() {
            if self.telling.pace.allows(self.io.now_ns()) {
                self.tell(&format!("VMM {}: {notice}", self.io.clients.vmms[i].id));
            }
        }
    }

    /// Drops the connections that have ended and of which nothing is unfinished.
    pub(super) fn release_ended_clients(&mut self) {
        for i in (0..self.io.clients.vmms.len()).rev() {
            let vmm = &self.io.clients.vmms[i];
            if !vmm.frontend.has_received() && self.io.now_ns() >= vmm.deadline_ns {
                self.end_vmm(i, too_slow("it has said nothing for 10 seconds").into());
            }
            let vmm = &mut self.io.clients.vmms[i];
            if vmm.ended.is_none() {
                continue;
            }
            let watches: Vec<u32> = {
                let kicks = vmm.kicks.iter_mut().filter_map(Option::take).map(|(watch, _)| watch);
                kicks.chain(vmm.watch.take()).collect()
            };
            let session = vmm.session;
            watches.into_iter().for_each(|w| self.unwatch(w));
            self.withdraw(|t| t.0 >> 48 == session);
            if self.io.clients.vmms[i].frontend.unfinished() == 0 {
                self.tell_notices(i);
                let vmm = self.io.clients.vmms.remove(i);
                self.client_gone(vmm.id, vmm.ended.and_then(|why| why.report()));
            }
        }
        let only_waits = self.stage.orphaned && self.disk.only_waits_for_space();
        for n in 0..self.io.clients.nbd.len() {
            let now_ns = self.io.now_ns();
            let Some(client) = self.io.clients.nbd[n].as_mut() else { continue };
            let late = now_ns >= client.deadline_ns;
            if late && client.ended.is_none() && client.connection.handshake_deadline().is_some() {
                client.end(too_slow("its handshake took more than 10 seconds").into());
            }
            if only_waits && client.hung_up && client.connection.is_disconnecting() {
                // Nobody will ever make space for what it left behind.
                client.end(ConnectionEnd::Left);
            }
            if client.ended.is_none() {
                continue;
            }
            if let Some((watch, _)) = client.watch.take() {
                self.unwatch(watch);
            }
            self.withdraw(|t| nbd_token(t) && usize::from(nbd::token_connection(t)) == n);
            self.give_up_questions(n);
            let client = self.io.clients.nbd[n].as_ref().expect("looked at above");
            if client.connection.unfinished() == 0 {
                let client = self.io.clients.nbd[n].take().expect("looked at above");
                self.client_gone(client.id, client.ended.and_then(|why| why.report()));
            }
        }
    }

    /// Cancels the requests of a client that has gone. What reads the base image for them need not be waited for.
    fn withdraw(&mut self, which: impl Fn(Token) -> bool) {
        self.disk.cancel(&mut self.io, Errno::CANCELED, &which);
        self.disk.abandon_base_reads(&mut self.io, u64::MAX, which);
    }

    fn client_gone(&mut self, id: u64, error: Option<ReportedError>) {
        self.send(&FromWorker::ClientGone { id, error }, &[]);
    }

    /// Takes the next step of a reset: accepted requests complete, requests that wait for space fail, and clients are
    /// disconnected. Returns whether the reset is done; the loop then takes its next turn without sleeping.
    pub(super) fn advance_reset(&mut self) -> bool {
        if !self.stage.resetting || !self.disk.only_waits_for_space_or_drain() {
            return false;
        }
        self.disk.cancel(&mut self.io, Errno::IO, |_| true);
        self.publish();
        let why = |present| match present {
            true => refused("the disk was reset").into(),
            false => ConnectionEnd::Left,
        };
        for i in 0..self.io.clients.vmms.len() {
            self.end_vmm(i, why(self.io.clients.vmms[i].is_present()));
        }
        for client in self.io.clients.nbd.iter_mut().flatten() {
            client.end(why(client.is_present()));
        }
        self.release_ended_clients();
        if self.io.clients.count() > 0 || !self.disk.reset(&mut self.io) {
            return false;
        }
        self.stage.resetting = false;
        self.tap.reset(self.io.now_ns());
        self.io.base.note_touches();
        // A new generation is a new disk.
        self.writeback = true;
        let generation = self.disk.generation();
        self.send(&FromWorker::ResetDone { result: Ok(generation) }, &[]);
        true
    }

    /// Whether it is time to go: told to stop, or left alone, and nothing is unfinished but what waits for space,
    /// which goes unanswered.
    pub(super) fn is_over(&mut self) -> Result<bool, Error> {
        if !self.stage.stopping {
            return if self.stage.orphaned && self.io.clients.count() == 0 {
                self.make_durable()
            } else {
                Ok(false)
            };
        }
        if !self.disk.only_waits_for_space() || self.io.is_busy() || !self.questions.is_empty() {
            return Ok(false);
        }
        self.disk.cancel(&mut self.io, Errno::CANCELED, |_| true);
        self.publish();
        self.telling.states.hurry();
        self.tell_events(self.io.now_ns());
        self.make_durable()
    }

    /// What is to outlive this process, and the power, is on the medium.
    fn make_durable(&mut self) -> Result<bool, Error> {
        match self.disk.make_durable(&mut self.io) {
            None => Ok(false),
            Some(Ok(())) => Ok(true),
            Some(Err(errno)) => {
                let reason = "what was written since the last FLUSH may not be on the medium";
                Err(Error::new(ErrorKind::Store, reason)
                    .because(io::Error::from_raw_os_error(errno.0))
                    .advice("look after its store (dmesg)"))
            }
        }
    }

    pub(super) fn tell_events(&mut self, now: u64) {
        if self.disk_full != self.disk.is_full() {
            self.disk_full = self.disk.is_full();
            for client in self.io.clients.nbd.iter_mut().flatten() {
                client.connection.set_disk_full(self.disk_full);
                client.active = true;
            }
        }
        if let Some(stalled) = self.io.base.stall_change(now) {
            // Who is told finds it counted.
            self.io.base.publish(self.disk.counters());
            self.send(&stall_event(stalled), &[]);
        }
        for at in self.io.base.take_damaged() {
            if self.telling.pace.allows(now) {
                let text = match self.start.chunk_bytes {
                    Some(len) => format!(
                        "no registry has the {len} bytes of the image from {at} on as their digest says: reads there fail; \
                         the log of spillway-streamd names its object in the registry"
                    ),
                    None => format!(
                        "the base image is not what its digest says, in the {CHUNK_BYTES} bytes from {at} on: reads there fail; \
                         its store has damaged it, or another program has written to it"
                    ),
                };
                self.send(&FromWorker::Event { kind: "image-damaged".into(), text }, &[]);
            }
        }
        let events = self.io.take_events();
        if events.is_empty() && !self.telling.states.any_wait() {
            return;
        }
        let (states, others): (Vec<_>, Vec<_>) =
            events.into_iter().partition(|event| state_of(event).is_some());
        self.telling.states.extend(states);
        let mut told = self.telling.states.take(now);
        told.extend(others.into_iter().filter(|_| self.telling.pace.allows(now)));
        for event in told {
            let (kind, text) = describe(event, &self.start);
            self.send(&FromWorker::Event { kind: kind.into(), text }, &[]);
        }
    }

    pub(super) fn tell(&mut self, text: &str) {
        self.send(&FromWorker::Event { kind: "notice".into(), text: text.into() }, &[]);
    }

    /// The supervisor reads fast or is gone; a message that finds the channel full or closed is dropped, unless
    /// it is one that the supervisor waits for.
    pub(super) fn send(&mut self, message: &FromWorker, fds: &[BorrowedFd<'_>]) {
        if self.stage.orphaned {
            return;
        }
        while let Err(e) = channel::send(&self.channel, message, fds) {
            let waited_for = !matches!(message, FromWorker::Event { .. });
            if !e.would_block() || !waited_for {
                return;
            }
            let mut room = [PollFd::new(&self.channel, PollFlags::OUT)];
            let _ = poll(&mut room, None);
        }
    }
}

/// What is told when chunks of the image do not arrive, and when they do again.
fn stall_event(stalled: bool) -> FromWorker {
    let (kind, text) = match stalled {
        true => (
            "chunks-missing",
            "chunks of the image have not arrived for 10 seconds: reads that need them wait; check the registry \
             ('spillway registry check NAME')",
        ),
        false => ("chunks-arrive", "chunks of the image arrive again"),
    };
    FromWorker::Event { kind: kind.into(), text: text.into() }
}

/// The first 16 bits of a session's tokens.
fn session_of(session: u8) -> u64 {
    u64::from(vhost_user_blk::TOKEN_TAG) << 8 | u64::from(session)
}

fn refused(reason: &'static str) -> Error {
    Error::new(ErrorKind::Refused, reason)
}

fn too_slow(reason: &'static str) -> Error {
    Error::new(ErrorKind::Client, reason)
}

/// What a client has connected by cannot be used.
fn cannot_serve(source: impl std::error::Error + Send + Sync + 'static) -> Error {
    Error::new(ErrorKind::Client, "its connection cannot be served").because(source)
}

pub fn channel_nonblocking(channel: &OwnedFd) -> Result<(), Error> {
    use rustix::fs::{OFlags, fcntl_getfl, fcntl_setfl};
    let set = fcntl_getfl(channel.as_fd()).and_then(|f| fcntl_setfl(channel.as_fd(), f | OFlags::NONBLOCK));
    set.map_err(|e| Error::new(ErrorKind::Channel, "the channel cannot be made non-blocking").because(e))
}

fn nbd_token(token: Token) -> bool {
    (token.0 >> 56) as u8 == nbd::TOKEN_TAG
}
