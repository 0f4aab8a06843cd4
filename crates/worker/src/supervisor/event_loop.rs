//! The supervisor: the disk, its worker, its sockets and its clients, on one thread that sleeps in poll(2).
//! Never touches guest data, never waits for a client.
//!
//! Invariant: everything that must outlive a worker is in [`Disk`]; what belongs to one worker's life is in
//! [`Worker`] and in the client table.

use super::control::{Answer, Peer, Request};
use super::disk::{Disk, Options};
use super::error::{ErrorKind, SupervisorError};
use super::process::{Program, Received, Worker};
use super::socket::{Listener, Rights};
use super::stats::{Stats, Window};
use super::{Log, Report};
use crate::channel::{ClientKind, FromWorker, ToWorker};
use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::io::Errno;
use std::collections::BTreeMap;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::time::{Duration, Instant};

/// Most connections at a time, of each kind; more are closed at once.
const MAX_CLIENTS: usize = 16;
/// Most connections to the control socket at a time.
const MAX_PEERS: usize = 32;
/// How long a worker may take to serve, to stop, and to end after it closed its channel.
const START_DEADLINE: Duration = Duration::from_secs(60);
const STOP_DEADLINE: Duration = Duration::from_secs(10);
const END_DEADLINE: Duration = Duration::from_secs(5);
/// How long to leave the listeners alone when the host has no fds or memory for a connection.
const ACCEPT_REST: Duration = Duration::from_secs(1);

/// A disk being served.
pub struct Supervisor {
    options: Options,
    disk: Disk,
    window: Window,
    worker: Worker,
    exports: Vec<(ClientKind, Listener)>,
    control: Option<Listener>,
    clients: BTreeMap<u64, ClientKind>,
    peers: BTreeMap<u64, Peer>,
    /// The peer that waits for a reset under way; it may have gone meanwhile.
    reset_by: Option<u64>,
    next_id: u64,
    serving: bool,
    /// Set when the worker has closed its channel: when it must have ended.
    end_by: Option<Instant>,
    accept_after: Option<Instant>,
    told_full: bool,
    log: Log,
}

#[derive(Clone, Copy)]
enum Source {
    WorkerEnd,
    Channel,
    Export(usize),
    Control,
    Peer(u64),
    Wake(usize),
}

impl Supervisor {
    /// Makes the disk and its sockets and starts the worker. Wait with [`Supervisor::ready`].
    pub fn start(options: Options, program: &Program, mut log: Log) -> Result<Supervisor, SupervisorError> {
        let rights = Rights::new(options.socket_mode, options.socket_group.as_deref())?;
        let disk = Disk::prepare(&options, &mut log)?;
        let window = Window::open(&disk.meta)?;
        let mut exports = Vec::new();
        for (kind, path) in [(ClientKind::VhostUser, &options.vhost_user), (ClientKind::Nbd, &options.nbd)] {
            if let Some(path) = path {
                exports.push((kind, Listener::bind(path, &rights)?));
            }
        }
        let control = match &options.control {
            Some(path) => Some(Listener::bind(path, &rights)?),
            None => None,
        };
        let mut worker = Worker::start(program)?;
        let (message, fds) = disk.start_message()?;
        worker.send(message, fds)?;
        Ok(Supervisor {
            options,
            disk,
            window,
            worker,
            exports,
            control,
            clients: BTreeMap::new(),
            peers: BTreeMap::new(),
            reset_by: None,
            next_id: 1,
            serving: false,
            end_by: None,
            accept_after: None,
            told_full: false,
            log,
        })
    }

    /// Waits until the worker serves. `Some(n)` when the n-th of `wake` was readable first.
    pub fn ready(&mut self, wake: &[BorrowedFd<'_>]) -> Result<Option<usize>, SupervisorError> {
        let deadline = Instant::now() + START_DEADLINE;
        while !self.serving {
            if let Some(woken) = self.step(wake, Some(deadline))? {
                return Ok(Some(woken));
            }
            if Instant::now() >= deadline {
                return Err(SupervisorError::new(
                    ErrorKind::Internal,
                    format!("the worker did not begin to serve in {} s: try again", START_DEADLINE.as_secs()),
                ));
            }
        }
        Ok(None)
    }

    /// Serves until one of `wake` is readable, and says which; `None` when the time `until` has come first. An
    /// error when the worker has died.
    pub fn run(
        &mut self,
        wake: &[BorrowedFd<'_>],
        until: Option<Instant>,
    ) -> Result<Option<usize>, SupervisorError> {
        loop {
            if let Some(woken) = self.step(wake, until)? {
                return Ok(Some(woken));
            }
            if until.is_some_and(|until| Instant::now() >= until) {
                return Ok(None);
            }
        }
    }

    /// Stops serving: sockets first, then the worker, which completes what it accepted. It is killed when it
    /// takes too long, or when one of `hurry` is readable. The figures stay readable.
    pub fn stop(&mut self, hurry: &[BorrowedFd<'_>]) -> Result<(), SupervisorError> {
        self.exports.clear();
        self.control = None;
        self.peers.clear();
        self.reset_by = None;
        if let Some(status) = self.worker.ended() {
            return self.judge_end(status);
        }
        self.worker.send(ToWorker::Stop, Vec::new())?;
        let deadline = Instant::now() + STOP_DEADLINE;
        loop {
            let events = self.poll(hurry, Some(deadline))?;
            for (source, flags) in &events {
                match source {
                    // Its last words may say why.
                    Source::WorkerEnd => self.on_channel(PollFlags::IN)?,
                    Source::Channel => self.on_channel(*flags)?,
                    _ => {}
                }
            }
            if let Some(status) = self.worker.ended() {
                return self.judge_end(status);
            }
            let hurried = events.iter().any(|(source, _)| matches!(source, Source::Wake(_)));
            let by = self.end_by.map_or(deadline, |by| by.min(deadline));
            if hurried || Instant::now() >= by {
                (self.log)("the worker has not stopped yet: ending it");
                self.worker.kill();
                return Ok(());
            }
        }
    }

    fn judge_end(&self, status: std::process::ExitStatus) -> Result<(), SupervisorError> {
        if status.success() {
            return Ok(());
        }
        Err(SupervisorError::new(
            ErrorKind::Internal,
            format!(
                "the worker ended while it was stopping ({status}): what it served is gone: please report this"
            ),
        ))
    }

    /// What is served, where, by whom.
    pub fn report(&self) -> Report {
        Report {
            pid: std::process::id(),
            worker_pid: self.worker.pid(),
            image: text(&self.options.image),
            format: self.disk.format,
            mode: self.disk.spec.mode.name().into(),
            full: self.disk.spec.full.name().into(),
            size_bytes: self.disk.spec.size_bytes,
            base_bytes: self.disk.spec.base_bytes,
            ram_limit_bytes: self.disk.spec.ram_limit_bytes,
            overflow_limit_bytes: self.disk.spec.overflow_limit_bytes,
            overflow_direct: self.disk.overflow_direct(),
            serial: self.disk.serial().into(),
            vhost_user: self.options.vhost_user.as_deref().map(text),
            nbd: self.options.nbd.as_deref().map(text),
            control: self.options.control.as_deref().map(text),
        }
    }

    /// The figures now.
    pub fn stats(&self) -> Stats {
        let spec = &self.disk.spec;
        Stats {
            serial: self.disk.serial().into(),
            mode: spec.mode.name().into(),
            full: spec.full.name().into(),
            size_bytes: spec.size_bytes,
            base_bytes: spec.base_bytes,
            clients: self.clients.len() as u64,
            ..self.window.read()
        }
    }

    /// One round: wait for something, do all of it.
    fn step(
        &mut self,
        wake: &[BorrowedFd<'_>],
        deadline: Option<Instant>,
    ) -> Result<Option<usize>, SupervisorError> {
        let events = self.poll(wake, deadline)?;
        let mut woken = None;
        for (source, flags) in events {
            match source {
                Source::WorkerEnd => {
                    // Its last words may say why.
                    self.on_channel(PollFlags::IN)?;
                    if let Some(status) = self.worker.ended() {
                        return Err(self.died(&status.to_string()));
                    }
                }
                Source::Channel => self.on_channel(flags)?,
                Source::Export(index) => self.on_export(index)?,
                Source::Control => self.on_control(),
                Source::Peer(id) => self.on_peer(id, flags)?,
                Source::Wake(index) => woken = woken.or(Some(index)),
            }
        }
        if self.end_by.is_some_and(|by| Instant::now() >= by) {
            self.worker.kill();
            return Err(self.died("it had closed its channel and was ended"));
        }
        Ok(woken)
    }

    fn died(&self, how: &str) -> SupervisorError {
        let message = match self.serving {
            true => format!(
                "the worker has died ({how}): what the guest wrote is lost, start it anew: please report this"
            ),
            false => format!("the worker ended before it served ({how}): please report this"),
        };
        SupervisorError::new(ErrorKind::Internal, message)
    }

    fn poll(
        &mut self,
        wake: &[BorrowedFd<'_>],
        deadline: Option<Instant>,
    ) -> Result<Vec<(Source, PollFlags)>, SupervisorError> {
        let now = Instant::now();
        self.accept_after = self.accept_after.filter(|&after| after > now);
        let mut sources = vec![(Source::WorkerEnd, self.worker.pidfd(), PollFlags::IN)];
        if self.end_by.is_none() {
            let unsent = if self.worker.has_unsent() { PollFlags::OUT } else { PollFlags::empty() };
            sources.push((Source::Channel, self.worker.channel(), PollFlags::IN | unsent));
        }
        if self.serving && self.accept_after.is_none() {
            let exports = self.exports.iter().enumerate();
            sources.extend(exports.map(|(i, (_, l))| (Source::Export(i), l.as_fd(), PollFlags::IN)));
            sources.extend(self.control.iter().map(|l| (Source::Control, l.as_fd(), PollFlags::IN)));
        }
        sources
            .extend(self.peers.iter().map(|(id, peer)| (Source::Peer(*id), peer.as_fd(), peer.interest())));
        sources.extend(wake.iter().enumerate().map(|(i, fd)| (Source::Wake(i), *fd, PollFlags::IN)));

        let mut fds: Vec<_> =
            sources.iter().map(|(_, fd, interest)| PollFd::from_borrowed_fd(*fd, *interest)).collect();
        let until = [deadline, self.end_by, self.accept_after].into_iter().flatten().min();
        let timeout = until.map(|until| {
            let left = until.saturating_duration_since(now);
            Timespec { tv_sec: left.as_secs() as i64, tv_nsec: i64::from(left.subsec_nanos()) }
        });
        match rustix::event::poll(&mut fds, timeout.as_ref()) {
            Ok(_) => {}
            Err(Errno::INTR) => return Ok(Vec::new()),
            Err(e) => return Err(SupervisorError::internal("cannot wait for events", e)),
        }
        let hits = sources.iter().zip(&fds).map(|((source, ..), fd)| (*source, fd.revents()));
        Ok(hits.filter(|(_, flags)| !flags.is_empty()).collect())
    }

    fn on_channel(&mut self, flags: PollFlags) -> Result<(), SupervisorError> {
        if flags.contains(PollFlags::OUT) {
            self.worker.send_waiting()?;
        }
        loop {
            match self.worker.receive()? {
                Received::Message(message) => self.on_message(message)?,
                Received::Nothing => return Ok(()),
                Received::Closed => {
                    self.end_by = self.end_by.or(Some(Instant::now() + END_DEADLINE));
                    return Ok(());
                }
            }
        }
    }

    fn on_message(&mut self, message: FromWorker) -> Result<(), SupervisorError> {
        match message {
            FromWorker::Ready => self.serving = true,
            FromWorker::Failed { error } => return Err(SupervisorError::new(ErrorKind::Internal, error)),
            FromWorker::ClientGone { id, reason } => {
                self.told_full = false;
                if let Some(kind) = self.clients.remove(&id)
                    && !reason.is_empty()
                {
                    (self.log)(&format!("{} client {id}: {reason}", name(kind)));
                }
            }
            FromWorker::ResetDone { result } => {
                let answer = match result {
                    Ok(generation) => {
                        (self.log)(&format!("reset: this is generation {generation}"));
                        Answer::Ok(serde_json::json!({ "generation": generation }))
                    }
                    Err(why) => Answer::error("refused", why),
                };
                if let Some(id) = self.reset_by.take() {
                    self.answer(id, &answer)?;
                }
            }
            FromWorker::Event { text } => (self.log)(&text),
        }
        Ok(())
    }

    fn on_export(&mut self, index: usize) -> Result<(), SupervisorError> {
        let (kind, listener) = &self.exports[index];
        let kind = *kind;
        let accepted = listener.accept();
        let Some(fd) = self.accepted(accepted) else { return Ok(()) };
        if self.clients.values().filter(|&&k| k == kind).count() >= MAX_CLIENTS {
            if !std::mem::replace(&mut self.told_full, true) {
                (self.log)(&format!(
                    "{MAX_CLIENTS} {} clients are connected: more are turned away",
                    name(kind)
                ));
            }
            return Ok(());
        }
        let id = self.new_id();
        self.clients.insert(id, kind);
        self.worker.send(ToWorker::Client { id, kind }, vec![fd])
    }

    fn on_control(&mut self) {
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
            (self.log)(&format!("cannot take a connection: {}", super::error::plain(&e.into())));
            self.accept_after = Some(Instant::now() + ACCEPT_REST);
            None
        })
    }

    fn on_peer(&mut self, id: u64, flags: PollFlags) -> Result<(), SupervisorError> {
        if let Some(peer) = self.peers.get_mut(&id) {
            peer.ready(flags);
        }
        self.serve_peer(id)
    }

    fn answer(&mut self, id: u64, answer: &Answer) -> Result<(), SupervisorError> {
        if let Some(peer) = self.peers.get_mut(&id) {
            peer.answer(answer);
        }
        self.serve_peer(id)
    }

    /// Takes a peer's requests as long as it reads the answers.
    fn serve_peer(&mut self, id: u64) -> Result<(), SupervisorError> {
        while let Some(request) = self.peers.get_mut(&id).and_then(Peer::next_request) {
            let answer = match request {
                Request::Ping => Answer::Ok(self.ping()),
                Request::Stats => {
                    Answer::Ok(serde_json::to_value(self.stats()).expect("plain numbers and text"))
                }
                Request::Reset { .. } if self.reset_by.is_some() => {
                    Answer::error("busy", "a reset is under way: wait for it")
                }
                Request::Reset { force } => {
                    self.reset_by = Some(id);
                    self.worker.send(ToWorker::Reset { force }, Vec::new())?;
                    return Ok(());
                }
            };
            if let Some(peer) = self.peers.get_mut(&id) {
                peer.answer(&answer);
            }
        }
        if self.peers.get(&id).is_some_and(Peer::is_done) {
            self.peers.remove(&id);
        }
        Ok(())
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

fn text(path: &Path) -> String {
    path.display().to_string()
}

fn name(kind: ClientKind) -> &'static str {
    match kind {
        ClientKind::VhostUser => "vhost-user",
        ClientKind::Nbd => "NBD",
    }
}
