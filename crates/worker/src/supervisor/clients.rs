//! Who is connected: VMMs and NBD clients at the exports, people and programs at the control socket. Owns the table
//! of clients; hands each to the worker, and never waits for any.
//!
//! Invariant: a client is in the table until the worker says that it is gone, or until a worker's death has cut its
//! connection.

use super::control::Peer;
use super::event_loop::Supervisor;
use super::session::Session;
use super::upgrade::Upgrade;
use crate::channel::{ClientKind, ToWorker};
use crate::worker::ReportedError;
use rustix::event::PollFlags;
use rustix::io::Errno;
use spillway_control::{Answer, Request};
use spillway_core::Mode;
use spillway_export::vhost_user_blk;
use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

/// Most connections at a time, of each kind; more are closed at once.
const MAX_CLIENTS: usize = 16;
/// Most connections to the control socket at a time.
const MAX_PEERS: usize = 32;
/// How long to leave the listeners alone when the host has no fds or memory for a connection.
const ACCEPT_REST: Duration = Duration::from_secs(1);

/// A connection at an export.
#[derive(Debug)]
pub(super) enum Client {
    /// Served by the worker alone. This end of its socket is there to let it go should the worker die.
    Nbd(OwnedFd),
    /// Outlives the worker.
    Vmm(Box<Session>),
}

impl Client {
    fn kind(&self) -> ClientKind {
        match self {
            Client::Nbd(_) => ClientKind::Nbd,
            Client::Vmm(_) => ClientKind::VhostUser,
        }
    }
}

/// A reset under way.
#[derive(Debug)]
pub(super) struct Reset {
    /// The peer that waits for it; it may have gone meanwhile.
    by: u64,
    force: bool,
    /// The generation that it is to end.
    generation: u64,
    /// The worker that there is was told of it.
    asked: bool,
}

impl Supervisor {
    /// Whether who connects must wait: while the worker would turn everybody away, and a VMM until it knows that the one
    /// before it has left, and, when there are as many as there may be, until it has let go of one that has.
    pub(super) fn must_wait(&self, kind: ClientKind) -> bool {
        let between = self.reset.is_some() || self.upgrade.as_ref().is_some_and(Upgrade::is_between);
        let sessions = || {
            self.clients.values().filter_map(|client| match client {
                Client::Vmm(session) => Some(session),
                Client::Nbd(_) => None,
            })
        };
        let goes = || {
            let full = sessions().count() >= MAX_CLIENTS;
            sessions().any(|session| session.is_leaving() || full && session.has_left())
        };
        between || kind == ClientKind::VhostUser && goes()
    }

    pub(super) fn on_export(&mut self, index: usize) {
        let (kind, listener) = &self.exports[index];
        let kind = *kind;
        // The worker may have died in this round: an NBD client that no worker has heard of would wait for ever.
        if !self.life.serving() || self.must_wait(kind) {
            return;
        }
        let accepted = listener.accept();
        let Some(socket) = self.accepted(accepted) else { return };
        let full = self.clients.values().filter(|client| client.kind() == kind).count() >= MAX_CLIENTS;
        let why = if kind == ClientKind::VhostUser && self.closer.is_stuck() {
            Some(
                "files of VMMs that were let go cannot be closed: until they are, VMMs are turned away"
                    .into(),
            )
        } else {
            full.then(|| format!("{MAX_CLIENTS} {} clients are connected: more are turned away", name(kind)))
        };
        if let Some(why) = why {
            if !self.full_event_sent.contains(&why) {
                (self.log)(&why);
                self.full_event_sent.push(why);
            }
            return;
        }
        let id = self.new_id();
        match kind {
            ClientKind::Nbd => {
                // Without an fd to spare it is turned away.
                if let Ok(ours) = socket.try_clone() {
                    self.clients.insert(id, Client::Nbd(ours));
                    self.tell(ToWorker::Client { id, kind }, vec![socket]);
                }
            }
            ClientKind::VhostUser => {
                let made = Session::new(id, socket, self.disk.queues())
                    .and_then(|session| session.introduce().map(|parcels| (session, parcels)));
                match made {
                    Ok((session, parcels)) => {
                        parcels.into_iter().for_each(|(message, fds)| self.tell(message, fds));
                        self.clients.insert(id, Client::Vmm(Box::new(session)));
                    }
                    Err(e) => {
                        let text = format!("a VMM is turned away: {}", spillway_control::plain(&e));
                        self.announce("client", &text);
                    }
                }
            }
        }
    }

    /// A VMM has sent something, or hung up.
    pub(super) fn on_vmm(&mut self, id: u64, flags: PollFlags) {
        let Some(Client::Vmm(session)) = self.clients.get_mut(&id) else { return };
        if flags.contains(PollFlags::HUP) {
            session.hung_up();
        }
        let parcel = match flags.contains(PollFlags::IN) {
            true => session.next(),
            // Nothing can be read now, and nothing will be answered any more.
            false => Some(session.leave(&vhost_user_blk::Disconnect::Left)),
        };
        self.closer.close(session.take_suspects());
        if let Some((message, fds)) = parcel {
            self.tell(message, fds);
        }
        self.forget_left();
    }

    /// Without a worker nobody else has to let go of a VMM that has left.
    fn forget_left(&mut self) {
        if self.life.worker.is_none() {
            self.clients.retain(|_, client| match client {
                Client::Nbd(_) => true,
                Client::Vmm(session) => session.interest().is_some(),
            });
        }
    }

    /// The worker has answered a VMM's message.
    pub(super) fn on_answered(
        &mut self,
        id: u64,
        accepted: bool,
        answer: Option<Vec<u8>>,
        fds: Vec<OwnedFd>,
        writeback: bool,
    ) {
        self.disk.remember_writeback(writeback);
        let Some(Client::Vmm(session)) = self.clients.get_mut(&id) else { return };
        let answer = answer.map(|bytes| vhost_user_blk::Answer { bytes, fd: fds.into_iter().next() });
        if let Some((message, fds)) = session.answered(accepted, answer) {
            self.tell(message, fds);
        }
    }

    pub(super) fn on_client_gone(&mut self, id: u64, error: Option<ReportedError>) {
        self.full_event_sent.clear();
        if let Some(client) = self.clients.remove(&id)
            && let Some(error) = error
            && self.life.may_say_more()
        {
            let text = format!("{} client {id}: {error}", name(client.kind()));
            self.announce("client", &text);
        }
    }

    /// A worker has died: forgets those whose connection ended with it, and says how many NBD clients they were.
    pub(super) fn drop_lost_clients(&mut self) -> usize {
        let (mut nbd, mut let_go) = (0, Vec::new());
        self.clients.retain(|&id, client| match client {
            Client::Nbd(socket) => {
                // A dead worker's end is open for as long as the kernel takes its memory apart. One that has hung up
                // already cannot be hung up on.
                let _ = rustix::net::shutdown(socket, rustix::net::Shutdown::Both);
                nbd += 1;
                false
            }
            Client::Vmm(session) => {
                let (present, survives) = (session.interest().is_some(), session.survives());
                if present && !survives {
                    let_go.push(id);
                }
                survives
            }
        });
        for id in let_go {
            let text =
                format!("vhost-user client {id}: let go: worker after worker died with its message in hand");
            self.announce("client", &text);
        }
        nbd
    }

    pub(super) fn on_control(&mut self) {
        let Some(listener) = &self.control else { return };
        let accepted = listener.accept();
        let Some(fd) = self.accepted(accepted) else { return };
        let mut peer = Peer::new(fd);
        if self.peers.len() >= MAX_PEERS {
            peer.answer(&Answer::error(
                "busy",
                format!("{MAX_PEERS} connections are open: close one of them"),
            ));
            return;
        }
        let id = self.new_id();
        self.peers.insert(id, peer);
    }

    fn accepted(&mut self, accepted: Result<Option<OwnedFd>, Errno>) -> Option<OwnedFd> {
        accepted.unwrap_or_else(|e| {
            (self.log)(&format!("cannot take a connection: {}", spillway_control::plain(&e.into())));
            self.accept_after = Some(Instant::now() + ACCEPT_REST);
            None
        })
    }

    pub(super) fn on_peer(&mut self, id: u64, flags: PollFlags) {
        if let Some(peer) = self.peers.get_mut(&id) {
            peer.ready(flags);
        }
        self.serve_peer(id);
    }

    pub(super) fn answer(&mut self, id: u64, answer: &Answer) {
        if let Some(peer) = self.peers.get_mut(&id) {
            peer.answer(answer);
        }
        self.serve_peer(id);
    }

    /// Takes a peer's requests as long as it reads the answers.
    fn serve_peer(&mut self, id: u64) {
        while let Some(request) = self.peers.get_mut(&id).and_then(Peer::next_request) {
            let answer = match request {
                Request::Ping => Answer::Ok(self.ping()),
                Request::Stats => {
                    Answer::Ok(serde_json::to_value(self.stats()).expect("plain numbers and text"))
                }
                Request::Dirty { limit } => self.dirty(limit),
                Request::Reset { .. }
                    if self.reset.is_some() || self.upgrade.is_some() || self.change.is_some() =>
                {
                    Answer::error(
                        "busy",
                        "a reset, an upgrade or a change of limits is under way: wait for it",
                    )
                }
                Request::Set(change) => match self.begin_change(id, &change) {
                    Some(answer) => answer,
                    None => return,
                },
                Request::Events => {
                    if let Some(peer) = self.peers.get_mut(&id) {
                        peer.listen();
                    }
                    Answer::Ok(serde_json::json!({ "listening": true }))
                }
                Request::Trace => return self.begin_trace(id),
                Request::Curve { goal } => match self.ask_curve(id, goal) {
                    Some(answer) => answer,
                    None => return,
                },
                Request::Upgrade { binary } => match self.begin_upgrade(id, &binary) {
                    Some(answer) => answer,
                    None => return,
                },
                Request::Reset { force, discard_data } => match self.refuses_reset(discard_data) {
                    Some(why) => Answer::error("refused", why),
                    None => {
                        let generation = self.window.generation();
                        self.reset = Some(Reset { by: id, force, generation, asked: false });
                        self.ask_reset();
                        return;
                    }
                },
            };
            if let Some(peer) = self.peers.get_mut(&id) {
                peer.answer(&answer);
            }
        }
        if self.peers.get(&id).is_some_and(Peer::is_done) {
            self.peers.remove(&id);
        }
    }

    /// Why there is no reset in this mode, or not without more words.
    fn refuses_reset(&self, discard_data: bool) -> Option<&'static str> {
        match self.disk.spec.mode {
            Mode::Ephemeral => Some(
                "mode ephemeral has nothing to go back to: stop it, and start anew with a new copy of the image",
            ),
            Mode::Persistent if !discard_data => Some(
                "mode persistent keeps what was written, and a reset throws it away for good: if that is meant, use \
                 --discard-data",
            ),
            _ => None,
        }
    }

    pub(super) fn on_reset_done(&mut self, result: Result<u64, ReportedError>) {
        // Nobody has asked: a worker that says so is none of ours any more.
        let Some(reset) = self.reset.take() else { return };
        let answer = match result {
            Ok(generation) => {
                self.disk.remember_writeback(true);
                self.announce("reset", &format!("reset: this is generation {generation}"));
                Answer::Ok(serde_json::json!({ "generation": generation }))
            }
            Err(error) => Answer::error("refused", error.text),
        };
        self.answer(reset.by, &answer);
    }

    /// Asks the worker for the reset, once. One that does not serve yet is asked when it does.
    fn ask_reset(&mut self) {
        let Some(reset) = self.reset.as_mut().filter(|reset| self.life.serving && !reset.asked) else {
            return;
        };
        reset.asked = true;
        let force = reset.force;
        self.tell(ToWorker::Reset { force }, Vec::new());
    }

    /// Another worker is there, which was asked for nothing yet.
    pub(super) fn forget_asking(&mut self) {
        self.reset.iter_mut().for_each(|reset| reset.asked = false);
    }

    /// A worker serves anew: a reset that its predecessor left is done by now, or is asked for again.
    pub(super) fn resume_reset(&mut self) {
        let Some(reset) = &self.reset else { return };
        let generation = self.window.generation();
        if generation == reset.generation {
            self.ask_reset();
        } else {
            self.on_reset_done(Ok(generation));
        }
    }

    /// Says it in the log, and to those that listen.
    pub(super) fn announce(&mut self, kind: &str, text: &str) {
        (self.log)(text);
        let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or_default();
        let event =
            serde_json::json!({ "event": { "kind": kind, "text": text, "unix_ms": now.as_millis() as u64 } });
        let line = format!("{event}\n");
        self.peers.values_mut().for_each(|peer| peer.tell(line.as_bytes()));
        self.peers.retain(|_, peer| !peer.is_done());
    }

    fn ping(&self) -> serde_json::Value {
        let mut report = serde_json::to_value(self.report()).expect("plain numbers and text");
        report["version"] = env!("CARGO_PKG_VERSION").into();
        report
    }

    fn new_id(&mut self) -> u64 {
        let id = self.next_id;
        self.next_id += 1;
        id
    }
}

fn name(kind: ClientKind) -> &'static str {
    match kind {
        ClientKind::VhostUser => "vhost-user",
        ClientKind::Nbd => "NBD",
    }
}
