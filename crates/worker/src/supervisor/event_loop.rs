//! The event loop of the supervisor: the disk, its worker, its sockets and its clients, on one thread that waits in
//! poll(2). Other threads wait for the worker's death, close file descriptors whose close(2) may block, and query the use of
//! huge pages. Never accesses guest data, never waits for a client.
//!
//! Invariant: all state that must outlive a worker is in [`Disk`] and in the client table; the state of one worker is in
//! [`Life`].

use super::Log;
use super::chunks::Chunks;
use super::clients::{Client, Reset};
use super::closer::Closer;
use super::control::Peer;
use super::dirty::dirty_ranges;
use super::disk::Disk;
use super::huge_pages::HugePages;
use super::life::{Life, START_DEADLINE};
use super::limits::changed;
use super::process::Program;
use super::socket::{Listener, Rights};
use super::states::ReportedStates;
use super::upgrade::Upgrade;
use super::watchers::Watchers;
use crate::channel::{ClientKind, ToWorker};
use crate::worker::ReportedError;
use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::io::Errno;
use spillway_control::{
    Dirty, DiskSettings, ErrorKind, Report, Response, STOPPED_CLEANLY, ServeSettings, Stats, SupervisorError,
    Window, bytes,
};
use spillway_core::{Layout, Mode};
use std::collections::BTreeMap;
use std::os::fd::{AsFd, BorrowedFd};
use std::path::Path;
use std::time::Instant;

/// A disk being served.
pub struct Supervisor {
    pub(super) options: ServeSettings,
    pub(super) disk: Disk,
    /// Of a disk whose image is streamed.
    pub(super) chunks: Option<Chunks>,
    pub(super) window: Window,
    pub(super) life: Life,
    pub(super) exports: Vec<(ClientKind, Listener)>,
    pub(super) control: Option<Listener>,
    pub(super) clients: BTreeMap<u64, Client>,
    pub(super) peers: BTreeMap<u64, Peer>,
    pub(super) reset: Option<Reset>,
    pub(super) upgrade: Option<Upgrade>,
    pub(super) change: Option<Change>,
    pub(super) watchers: Watchers,
    pub(super) next_id: u64,
    pub(super) accept_after: Option<Instant>,
    /// Reasons for which clients are refused and that are in the log already.
    pub(super) full_event_sent: Vec<String>,
    pub(super) reported: ReportedStates,
    pub(super) closer: Closer,
    huge_pages: HugePages,
    pub(super) log: Log,
}

/// A change of limits under way. The disk's settings are those that a worker has accepted. A new worker starts with these,
/// and is sent the change after that.
#[derive(Debug)]
pub(super) struct Change {
    by: u64,
    settings: DiskSettings,
}

#[derive(Clone, Copy)]
enum Source {
    /// The worker has died, and its process has not ended.
    WorkerDeath,
    WorkerEnd,
    /// The process of an earlier worker has ended.
    Dead,
    Channel,
    /// Channel of a new worker during an upgrade.
    Candidate,
    /// Connection for chunks of a streamed image, on which an answer is waited for.
    Chunks,
    Export(usize),
    Vmm(u64),
    Control,
    Peer(u64),
    Wake(usize),
}

impl Supervisor {
    /// Creates the disk and its sockets, and starts the worker. [`Supervisor::ready`] waits until it serves.
    pub fn start(
        options: ServeSettings,
        program: &Program,
        mut log: Log,
    ) -> Result<Supervisor, SupervisorError> {
        options.check()?;
        allow_fds();
        let rights = Rights::new(options.socket_mode(), options.socket_group.as_deref())?;
        let disk = Disk::prepare(&options, &mut log)?;
        let window = Window::open(&disk.meta)
            .map_err(|e| SupervisorError::internal("cannot map the counters", std::io::Error::other(e)))?;
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
        let mut supervisor = Supervisor {
            chunks: options.streamed.as_ref().map(Chunks::new).transpose()?,
            options,
            disk,
            window,
            life: Life::new(program.clone()),
            exports,
            control,
            clients: BTreeMap::new(),
            peers: BTreeMap::new(),
            reset: None,
            upgrade: None,
            change: None,
            watchers: Watchers::default(),
            next_id: 1,
            accept_after: None,
            full_event_sent: Vec::new(),
            reported: ReportedStates::default(),
            closer: Closer::default(),
            huge_pages: HugePages::default(),
            log,
        };
        supervisor.begin_worker()?;
        Ok(supervisor)
    }

    /// Waits until the worker serves. Returns `Some(n)` if the n-th of `wake` became readable before that.
    pub fn ready(&mut self, wake: &[BorrowedFd<'_>]) -> Result<Option<usize>, SupervisorError> {
        let deadline = Instant::now() + START_DEADLINE;
        while !self.life.serving {
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
        self.disk.take_name(&self.options)?;
        Ok(None)
    }

    /// Serves until one of `wake` is readable, and returns its index; `None` if the time `until` came first. A worker that
    /// dies is replaced.
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
    /// takes too long, or when one of `hurry` is readable. The figures stay readable. In mode `persistent` the last line of
    /// the log is [`STOPPED_CLEANLY`], or it is an error.
    pub fn stop(&mut self, hurry: &[BorrowedFd<'_>]) -> Result<(), SupervisorError> {
        self.exports.clear();
        self.control = None;
        self.peers.clear();
        self.reset = None;
        (self.upgrade, self.change) = (None, None);
        let stopped = self.stop_worker(hurry);
        self.clients.clear();
        if self.life.all_have_ended() {
            self.disk.release_image();
        }
        match (stopped?, self.disk.spec.mode) {
            (true, Mode::Persistent) => (self.log)(STOPPED_CLEANLY),
            (false, Mode::Persistent) => {
                let message = "the worker was killed before it had stopped: data that was written since the last FLUSH may not be on the medium: \
                               serve the disk again and stop it, before this host loses power";
                return Err(SupervisorError::new(ErrorKind::Internal, message));
            }
            _ => {}
        }
        Ok(())
    }

    /// Describes the disk, its sockets and its processes.
    pub fn report(&self) -> Report {
        Report {
            pid: std::process::id(),
            worker_pid: self.life.worker_pid(),
            image: text(self.options.image()),
            disk: self.options.disk.as_deref().map(text),
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

    /// The present counters and gauges.
    pub fn stats(&self) -> Stats {
        let spec = &self.disk.spec;
        let mut read = self.window.read();
        if let Some(data) = &self.disk.data {
            read.ram.huge_bytes = self.huge_pages.bytes(self.life.worker_pid(), data);
        }
        read.overflow.file_bytes = self.disk.occupied_bytes().unwrap_or(read.overflow.file_bytes);
        Stats {
            serial: self.disk.serial().into(),
            mode: spec.mode.name().into(),
            full: spec.full.name().into(),
            size_bytes: spec.size_bytes,
            base_bytes: spec.base_bytes,
            worker_pid: self.life.worker_pid(),
            engine: self.life.engine.clone(),
            landlock: self.life.landlock,
            clients: self.clients.len() as u64,
            ..read
        }
    }

    /// The regions that were written most since the last reset, at most `rows` of them.
    pub(super) fn dirty(&self, rows: u32) -> Response {
        if !(1..=Dirty::MAX_ROWS).contains(&rows) {
            return Response::error("invalid", format!("a limit is 1 to {} rows", Dirty::MAX_ROWS));
        }
        let spec = &self.disk.spec;
        match dirty_ranges(&self.disk.meta, &Layout::of(spec), spec.size_bytes, rows) {
            Ok(dirty) => {
                let dirty = Dirty { serial: self.disk.serial().into(), ..dirty };
                Response::Ok(serde_json::to_value(dirty).expect("plain numbers and text"))
            }
            Err(e) => Response::error("refused", e.to_string()),
        }
    }

    /// Waits for events, and handles all that have come.
    fn step(
        &mut self,
        wake: &[BorrowedFd<'_>],
        deadline: Option<Instant>,
    ) -> Result<Option<usize>, SupervisorError> {
        let mut woken = None;
        for (source, flags) in self.poll(wake, deadline)? {
            match source {
                Source::WorkerDeath => self.on_worker_death()?,
                Source::WorkerEnd => self.on_worker_end()?,
                Source::Dead => self.reap(),
                Source::Channel => self.on_channel(flags)?,
                Source::Candidate => self.on_candidate()?,
                Source::Chunks => self.on_chunks_opened(),
                Source::Export(index) => self.on_export(index),
                Source::Vmm(id) => self.on_vmm(id, flags),
                Source::Control => self.on_control(),
                Source::Peer(id) => self.on_peer(id, flags),
                Source::Wake(index) => woken = woken.or(Some(index)),
            }
        }
        self.keep_watchers();
        self.keep_upgrade();
        self.chunks.iter_mut().for_each(Chunks::keep);
        self.keep_worker()?;
        Ok(woken)
    }

    /// Waits for events while the worker stops, and handles those of the worker and its VMMs only. Returns whether one of
    /// `hurry` is readable.
    pub(super) fn relay_once(
        &mut self,
        hurry: &[BorrowedFd<'_>],
        deadline: Instant,
    ) -> Result<bool, SupervisorError> {
        let mut hurried = false;
        for (source, flags) in self.poll(hurry, Some(deadline))? {
            match source {
                // Its last messages may contain the reason.
                Source::WorkerEnd => self.on_channel(PollFlags::IN)?,
                Source::Channel => self.on_channel(flags)?,
                Source::Vmm(id) => self.on_vmm(id, flags),
                Source::Wake(_) => hurried = true,
                Source::Dead => self.reap(),
                Source::WorkerDeath => {}
                Source::Candidate
                | Source::Chunks
                | Source::Export(_)
                | Source::Control
                | Source::Peer(_) => {}
            }
        }
        Ok(hurried)
    }

    fn poll(
        &mut self,
        wake: &[BorrowedFd<'_>],
        deadline: Option<Instant>,
    ) -> Result<Vec<(Source, PollFlags)>, SupervisorError> {
        let now = Instant::now();
        self.accept_after = self.accept_after.filter(|&after| after > now);
        let mut sources = Vec::new();
        if let Some(worker) = &self.life.worker {
            if self.life.may_die_early() {
                sources.push((Source::WorkerDeath, worker.lifeline().death(), PollFlags::IN));
            }
            sources.push((Source::WorkerEnd, worker.pidfd(), PollFlags::IN));
            if self.life.reads_channel() {
                let unsent = if worker.has_unsent() { PollFlags::OUT } else { PollFlags::empty() };
                sources.push((Source::Channel, worker.channel(), PollFlags::IN | unsent));
            }
        }
        sources.extend(self.life.dead.iter().map(|dead| (Source::Dead, dead.pidfd(), PollFlags::IN)));
        sources.extend(self.candidate().map(|(fd, flags)| (Source::Candidate, fd, flags)));
        let asked = self.chunks.as_ref().and_then(Chunks::asked);
        sources.extend(asked.map(|fd| (Source::Chunks, fd, PollFlags::IN)));
        if self.life.has_served && self.accept_after.is_none() {
            sources.extend(self.control.iter().map(|l| (Source::Control, l.as_fd(), PollFlags::IN)));
        }
        // A VMM that reconnects has closed its old connection first. poll(2) examines the fds in order: the sessions come
        // after the listeners, so a round that shows the new connection also shows the end of the old one.
        if self.life.serving && self.accept_after.is_none() {
            let exports = self.exports.iter().enumerate();
            let open = exports.filter(|(_, (kind, _))| !self.must_wait(*kind));
            sources.extend(open.map(|(i, (_, l))| (Source::Export(i), l.as_fd(), PollFlags::IN)));
        }
        for (&id, client) in &self.clients {
            if let Client::Vmm(session) = client
                && let Some(interest) = session.interest()
            {
                sources.push((Source::Vmm(id), session.fd(), interest));
            }
        }
        sources
            .extend(self.peers.iter().map(|(id, peer)| (Source::Peer(*id), peer.as_fd(), peer.interest())));
        sources.extend(wake.iter().enumerate().map(|(i, fd)| (Source::Wake(i), *fd, PollFlags::IN)));

        let mut fds: Vec<_> =
            sources.iter().map(|(_, fd, interest)| PollFd::from_borrowed_fd(*fd, *interest)).collect();
        let upgrade = self.upgrade.as_ref().map(Upgrade::deadline);
        let chunks = self.chunks.as_ref().filter(|_| !self.life.is_stopping()).and_then(Chunks::deadline);
        let times = [deadline, self.life.deadline(), upgrade, chunks, self.accept_after];
        let until = times.into_iter().flatten().min();
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
        let mut hits: Vec<_> = hits.filter(|(_, flags)| !flags.is_empty()).collect();
        // Handle ended sessions first, so that a VMM that reconnects at the limit is not refused.
        hits.sort_by_key(|(source, _)| matches!(source, Source::Export(_)));
        Ok(hits)
    }

    /// Begins a change of limits. Returns the error response if it is refused; nothing has changed then.
    pub(super) fn begin_change(&mut self, by: u64, change: &DiskSettings) -> Option<Response> {
        if self.change.is_some() || self.reset.is_some() || self.upgrade.is_some() || !self.life.serving {
            return Some(Response::error("busy", "another change or a restart is under way: try again"));
        }
        let settings = match changed(change, &self.disk) {
            Ok(settings) => settings,
            Err(answer) => return Some(answer),
        };
        if let Err(e) = self.disk.make_room_for(&settings, self.window.read().ram.used_bytes) {
            return Some(Response::error("refused", e.to_string()));
        }
        self.tell(ToWorker::Set(settings), Vec::new());
        self.change = Some(Change { by, settings });
        None
    }

    /// Handles the worker's result of a change.
    pub(super) fn on_change_done(&mut self, result: Result<(), ReportedError>) {
        let Some(Change { by, settings }) = self.change.take() else { return };
        let answer = match result {
            Ok(()) => {
                self.disk.set(settings);
                let text = format!(
                    "limits: RAM {}, overflow {}, when full {}, warning at {}%, critical at {}%, {}",
                    bytes(settings.ram_bytes()),
                    bytes(settings.overflow_bytes()),
                    settings.full().name(),
                    settings.warn_at(),
                    settings.critical_at(),
                    settings.rate()
                );
                self.announce("limits", &text);
                Response::Ok(serde_json::to_value(settings).expect("plain numbers and text"))
            }
            Err(error) => Response::error("refused", error.text),
        };
        self.answer(by, &answer);
    }

    /// Sends an unfinished change to a new worker.
    pub(super) fn resume_change(&mut self) {
        if let Some(Change { settings, .. }) = &self.change {
            let settings = *settings;
            self.tell(ToWorker::Set(settings), Vec::new());
        }
    }
}

/// Raises the limit of fds to the maximum: a VMM may pass hundreds of memory regions and eventfds, which are held here and
/// passed on.
fn allow_fds() {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    let most = getrlimit(Resource::Nofile).maximum;
    // If that fails, a VMM that passes too many is refused.
    let _ = setrlimit(Resource::Nofile, Rlimit { current: most, maximum: most });
}

fn text(path: &Path) -> String {
    path.display().to_string()
}
