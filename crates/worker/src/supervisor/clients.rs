//! The connections: VMMs and NBD clients at the exports, users and programs at the control socket. Owns the table of
//! clients; passes each client to the worker, and never waits for any.
//!
//! Invariant: a client is in the table until the worker reports its end, or until the death of a worker has cut its
//! connection.

use super::control::Peer;
use super::event_loop::Supervisor;
use super::session::{MOST_DEATHS, Session};
use super::upgrade::Upgrade;
use super::watchers::Question;
use crate::channel::{ClientKind, ToWorker};
use crate::worker::ReportedError;
use rustix::event::PollFlags;
use rustix::io::Errno;
use spillway_control::{Request, Response};
use spillway_core::Mode;
use spillway_export::vhost_user_blk;
use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

/// Largest number of connections of each kind. Further connections are closed at once.
const MAX_CLIENTS: usize = 16;
/// Largest number of connections to the control socket.
const MAX_PEERS: usize = 32;
/// Pause in accepting connections after the host had no fds or memory for one.
const ACCEPT_REST: Duration = Duration::from_secs(1);

/// A connection at an export.
#[derive(Debug)]
pub(super) enum Client {
    /// Served by the worker alone. The supervisor keeps the socket to shut it down if the worker dies.
    Nbd(OwnedFd),
    /// Outlives the worker: the supervisor relays its messages.
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
    /// Control connection that waits for the result. It may be closed by now.
    by: u64,
    force: bool,
    /// Generation of the disk that the reset ends.
    generation: u64,
    /// Set once the present worker has been sent the request.
    asked: bool,
}

impl Supervisor {
    /// Whether new connections must wait. All wait during a reset, and during an upgrade while neither worker serves. VMMs also wait until the worker
    /// has been told of a VMM that has left, and, if the limit is reached, until the worker has released one that has left.
    pub(super) fn must_wait(&self, kind: ClientKind) -> bool {
        let between = self.reset.is_some() || self.upgrade.as_ref().is_some_and(Upgrade::is_between);
        let sessions = || {
            self.clients.values().filter_map(|client| match client {
                Client::Vmm(session) => Some(session),
                Client::Nbd(_) => None,
            })
        };
        let waits_for_end = || {
            let full = sessions().count() >= MAX_CLIENTS;
            sessions().any(|session| session.has_unreported_hangup() || full && session.has_ended())
        };
        between || kind == ClientKind::VhostUser && waits_for_end()
    }

    pub(super) fn on_export(&mut self, index: usize) {
        let (kind, listener) = &self.exports[index];
        let kind = *kind;
        // The worker may have died in this round. An NBD client that is passed to no worker would wait for ever.
        if !self.life.serving() || self.must_wait(kind) {
            return;
        }
        let accepted = listener.accept();
        let Some(socket) = self.accepted(accepted) else { return };
        let full = self.clients.values().filter(|client| client.kind() == kind).count() >= MAX_CLIENTS;
        let why = if kind == ClientKind::VhostUser && self.closer.is_stuck() {
            Some(
                "new VMMs are refused: file descriptors of disconnected VMMs cannot be closed, since a file system does not \
                 answer; check the FUSE and network file systems of this host"
                    .into(),
            )
        } else {
            full.then(|| {
                format!(
                    "{MAX_CLIENTS} {} clients are connected, which is the limit: further ones are refused",
                    name(kind)
                )
            })
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
                // If the process is out of fds, the client is refused.
                if let Ok(ours) = socket.try_clone() {
                    self.clients.insert(id, Client::Nbd(ours));
                    self.tell(ToWorker::Client { id, kind }, vec![socket]);
                }
            }
            ClientKind::VhostUser => {
                let made = Session::new(id, socket, self.disk.queues())
                    .and_then(|session| session.start_messages().map(|messages| (session, messages)));
                match made {
                    Ok((session, messages)) => {
                        messages.into_iter().for_each(|(message, fds)| self.tell(message, fds));
                        self.clients.insert(id, Client::Vmm(Box::new(session)));
                    }
                    Err(e) => {
                        let text = format!("a VMM is refused: {}", spillway_control::plain(&e));
                        self.announce("client", &text);
                    }
                }
            }
        }
    }

    /// Handles a VMM's socket that is readable or closed.
    pub(super) fn on_vmm(&mut self, id: u64, flags: PollFlags) {
        let Some(Client::Vmm(session)) = self.clients.get_mut(&id) else { return };
        if flags.contains(PollFlags::HUP) {
            session.hung_up();
        }
        let message = match flags.contains(PollFlags::IN) {
            true => session.next(),
            // The socket is closed: nothing can be read or answered.
            false => Some(session.end(&vhost_user_blk::Disconnect::Left)),
        };
        self.closer.close(session.take_unclosable());
        if let Some((message, fds)) = message {
            self.tell(message, fds);
        }
        self.remove_ended_sessions();
    }

    /// Removes sessions that have ended. With a worker this waits for the worker's report.
    fn remove_ended_sessions(&mut self) {
        if self.life.worker.is_none() {
            self.clients.retain(|_, client| match client {
                Client::Nbd(_) => true,
                Client::Vmm(session) => session.interest().is_some(),
            });
        }
    }

    /// Handles the worker's answer to a VMM's message.
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
        let answer = answer.map(|bytes| vhost_user_blk::Reply { bytes, fd: fds.into_iter().next() });
        if let Some((message, fds)) = session.answered(accepted, answer) {
            self.tell(message, fds);
        }
    }

    pub(super) fn on_client_gone(&mut self, id: u64, error: Option<ReportedError>) {
        self.full_event_sent.clear();
        if let Some(client) = self.clients.remove(&id)
            && let Some(error) = error
            && self.life.may_log()
        {
            let text = format!("{} client {id}: {error}", name(client.kind()));
            self.announce("client", &text);
        }
    }

    /// Removes the clients whose connection ended with the worker. Returns how many of them were NBD clients.
    pub(super) fn drop_lost_clients(&mut self) -> usize {
        let (mut nbd, mut removed) = (0, Vec::new());
        self.clients.retain(|&id, client| match client {
            Client::Nbd(socket) => {
                // The dead worker's copy of the socket stays open until the kernel has freed its memory. The error is of a
                // client that has closed the connection.
                let _ = rustix::net::shutdown(socket, rustix::net::Shutdown::Both);
                nbd += 1;
                false
            }
            Client::Vmm(session) => {
                let (present, outlives) = (session.interest().is_some(), session.count_worker_death());
                if present && !outlives {
                    removed.push(id);
                }
                outlives
            }
        });
        for id in removed {
            let text = format!(
                "vhost-user client {id}: disconnected: {MOST_DEATHS} workers in a row died while they handled its message"
            );
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
            peer.answer(&Response::error(
                "busy",
                format!("{MAX_PEERS} control connections are open, which is the limit: close one of them"),
            ));
            return;
        }
        let id = self.new_id();
        self.peers.insert(id, peer);
    }

    fn accepted(&mut self, accepted: Result<Option<OwnedFd>, Errno>) -> Option<OwnedFd> {
        accepted.unwrap_or_else(|e| {
            (self.log)(&format!("cannot accept a connection: {}", spillway_control::plain(&e.into())));
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

    pub(super) fn answer(&mut self, id: u64, answer: &Response) {
        if let Some(peer) = self.peers.get_mut(&id) {
            peer.answer(answer);
        }
        self.serve_peer(id);
    }

    /// Carries out the requests of a control connection as long as it reads the answers.
    fn serve_peer(&mut self, id: u64) {
        while let Some(request) = self.peers.get_mut(&id).and_then(Peer::next_request) {
            let answer = match request {
                Request::Ping => Response::Ok(self.ping()),
                Request::Stats => {
                    Response::Ok(serde_json::to_value(self.stats()).expect("plain numbers and text"))
                }
                Request::Counters => match self.pass_counters(id) {
                    Some(answer) => answer,
                    None => continue,
                },
                Request::Latency => {
                    let latency = self.window.latency(std::process::id());
                    Response::Ok(serde_json::to_value(latency).expect("plain numbers"))
                }
                Request::Dirty { limit } => self.dirty(limit),
                Request::Reset { .. }
                    if self.reset.is_some() || self.upgrade.is_some() || self.change.is_some() =>
                {
                    Response::error(
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
                        peer.subscribe();
                    }
                    Response::Ok(serde_json::json!({ "listening": true }))
                }
                Request::Trace => return self.begin_trace(id),
                Request::Curve { goal } => match self.ask_worker(id, Question::Curve(goal)) {
                    Some(answer) => answer,
                    None => return,
                },
                Request::Touched => match self.ask_worker(id, Question::Touched) {
                    Some(answer) => answer,
                    None => return,
                },
                Request::Upgrade { binary } => match self.begin_upgrade(id, &binary) {
                    Some(answer) => answer,
                    None => return,
                },
                Request::Reset { force, discard_data } => match self.reset_refusal(discard_data) {
                    Some(why) => Response::error("refused", why),
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

    /// Why the reset is refused in this mode, if it is.
    fn reset_refusal(&self, discard_data: bool) -> Option<&'static str> {
        match self.disk.spec.mode {
            Mode::Ephemeral => Some(
                "a disk of mode ephemeral cannot be reset: stop it, and start it with a new copy of the image",
            ),
            Mode::Persistent if !discard_data => Some(
                "a reset would destroy all data that was written to this disk of mode persistent: to do so, add --discard-data",
            ),
            _ => None,
        }
    }

    pub(super) fn on_reset_done(&mut self, result: Result<u64, ReportedError>) {
        // No reset was requested: ignore what a broken worker sends.
        let Some(reset) = self.reset.take() else { return };
        let answer = match result {
            Ok(generation) => {
                self.disk.remember_writeback(true);
                self.announce("reset", &format!("reset: this is generation {generation}"));
                Response::Ok(serde_json::json!({ "generation": generation }))
            }
            Err(error) => Response::error("refused", error.text),
        };
        self.answer(reset.by, &answer);
    }

    /// Sends the reset to the worker, once. If the worker does not serve yet, it is sent when it does.
    fn ask_reset(&mut self) {
        let Some(reset) = self.reset.as_mut().filter(|reset| self.life.serving && !reset.asked) else {
            return;
        };
        reset.asked = true;
        let force = reset.force;
        self.tell(ToWorker::Reset { force }, Vec::new());
    }

    /// Notes that a new worker has not been sent the reset.
    pub(super) fn clear_reset_request(&mut self) {
        self.reset.iter_mut().for_each(|reset| reset.asked = false);
    }

    /// Continues a reset after a new worker has begun to serve: the last worker completed it, or it is sent again.
    pub(super) fn resume_reset(&mut self) {
        let Some(reset) = &self.reset else { return };
        let generation = self.window.generation();
        if generation == reset.generation {
            self.ask_reset();
        } else {
            self.on_reset_done(Ok(generation));
        }
    }

    /// Writes an event to the log, and sends it to the subscribers.
    pub(super) fn announce(&mut self, kind: &str, text: &str) {
        (self.log)(text);
        let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or_default();
        let event =
            serde_json::json!({ "event": { "kind": kind, "text": text, "unix_ms": now.as_millis() as u64 } });
        let line = format!("{event}\n");
        self.peers.values_mut().for_each(|peer| peer.send_event(line.as_bytes()));
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
