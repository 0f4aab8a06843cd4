//! The life cycle of worker processes: start, death, replacement. Owns the worker's process; the disk outlives it and is
//! elsewhere.
//!
//! Invariant: after the first worker has served, a worker runs or is about to be started until the supervisor stops, except
//! while a killed worker has not ended. The messages of a dead worker are processed before the next one starts.

use super::chunks::{Chunks, OpenedStream, set_cache};
use super::clients::Client;
use super::event_loop::Supervisor;
use super::process::{Program, Received, Worker};
use crate::channel::{FromWorker, MOST_DEAD, PROTOCOL_VERSION, ToWorker};
use rustix::event::PollFlags;
use spillway_control::{ErrorKind, SupervisorError, Touched};
use spillway_core::LAYOUT_VERSION;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::process::ExitStatus;
use std::time::{Duration, Instant};

/// How long a worker may take to begin to serve, to stop, and to end after it closed its channel.
pub(super) const START_DEADLINE: Duration = Duration::from_secs(60);
pub(super) const STOP_DEADLINE: Duration = Duration::from_secs(10);
const END_DEADLINE: Duration = Duration::from_secs(5);
/// A worker that dies sooner than this after its start counts as a short life.
const SHORT_LIFE: Duration = Duration::from_secs(1);
/// Messages of the worker that are processed before other events have their turn.
const MESSAGES_PER_ROUND: usize = 64;
/// Largest number of lines per second that a worker causes in the log.
const LINES_PER_SECOND: u32 = 100;
/// Messages of a dead worker that are processed: more than its channel holds.
const MAX_LAST_MESSAGES: usize = 10_000;
/// Number of short lives that are followed by the next start without a pause.
const IMMEDIATE_RESTARTS: u32 = 3;
/// Longest pause after a short life.
const MAX_BACKOFF: Duration = Duration::from_secs(1);

/// The worker process, or the wait for the next one.
#[derive(Debug)]
pub(super) struct Life {
    pub program: Program,
    pub worker: Option<Worker>,
    /// Earlier workers that have died and not ended: the kernel is freeing their memory.
    pub dead: Vec<DeadWorker>,
    /// Set while the supervisor stops and waits for the worker's end.
    stopping: bool,
    /// Set once the worker has reported that it serves.
    pub serving: bool,
    /// I/O engine of the last worker that served.
    pub engine: String,
    /// Version of Landlock that confines that worker; 0 for none.
    pub landlock: u32,
    /// Set once any worker has served.
    pub has_served: bool,
    since: Instant,
    short_lives: u32,
    /// When the next worker is started.
    start_at: Option<Instant>,
    /// When the worker must have ended, set once it has closed its channel.
    end_by: Option<Instant>,
    /// Reason why the worker was killed, and when to report that it has not ended; `None` once reported.
    ending: Option<(&'static str, Option<Instant>)>,
    /// Rates of the events that workers report, and of other lines about workers. Each has its own limit.
    events: LogRate,
    lines: LogRate,
}

/// Limits the rate of lines in the log.
#[derive(Debug)]
struct LogRate {
    count: u32,
    since: Instant,
}

impl LogRate {
    fn none() -> LogRate {
        LogRate { count: 0, since: Instant::now() }
    }

    /// Counts a line. Returns whether it is within this second's limit.
    fn admit(&mut self) -> bool {
        if self.since.elapsed() > Duration::from_secs(1) {
            *self = LogRate::none();
        }
        self.count += 1;
        self.count <= LINES_PER_SECOND
    }
}

/// A worker that has died and not ended.
#[derive(Debug)]
pub(super) struct DeadWorker {
    worker: Worker,
    /// When to report that it has not ended; `None` once reported.
    late: Option<Instant>,
}

impl DeadWorker {
    /// Readable when the process has ended.
    pub fn pidfd(&self) -> BorrowedFd<'_> {
        self.worker.pidfd()
    }
}

impl Life {
    pub fn new(program: Program) -> Life {
        Life {
            program,
            worker: None,
            dead: Vec::new(),
            stopping: false,
            serving: false,
            engine: String::new(),
            landlock: 0,
            has_served: false,
            since: Instant::now(),
            short_lives: 0,
            start_at: None,
            end_by: None,
            ending: None,
            events: LogRate::none(),
            lines: LogRate::none(),
        }
    }

    /// When [`Supervisor::keep_worker`] must be called at the latest. `None` while the supervisor stops:
    /// [`Supervisor::stop_worker`] has its own deadline.
    pub fn deadline(&self) -> Option<Instant> {
        if self.stopping {
            return None;
        }
        let start_by = (self.has_served && !self.serving).then_some(self.since + START_DEADLINE);
        let start_by = start_by.filter(|_| self.worker.is_some());
        let worker = match self.ending {
            Some((_, late)) => late,
            None => [self.end_by, start_by].into_iter().flatten().min(),
        };
        let dead = self.dead.iter().filter_map(|dead| dead.late).min();
        [self.start_at, worker, dead].into_iter().flatten().min()
    }

    /// Whether the next worker may start as soon as this one has died, before its process has ended.
    pub fn may_die_early(&self) -> bool {
        self.serving && !self.stopping && self.dead.len() < MOST_DEAD
    }

    /// Whether all worker processes have ended.
    pub fn all_have_ended(&mut self) -> bool {
        self.dead.is_empty() && self.worker.as_mut().is_none_or(|worker| worker.ended().is_some())
    }

    /// Whether the supervisor stops.
    pub fn is_stopping(&self) -> bool {
        self.stopping
    }

    /// Whether the worker serves.
    pub fn serving(&self) -> bool {
        self.serving
    }

    /// Whether the worker was killed, and has not ended.
    pub fn is_ending(&self) -> bool {
        self.ending.is_some()
    }

    /// Whether the supervisor reads messages from the worker.
    pub fn reads_channel(&self) -> bool {
        self.end_by.is_none() && self.ending.is_none()
    }

    /// Process ID of the worker; 0 if there is none at the moment.
    pub fn worker_pid(&self) -> u32 {
        self.worker.as_ref().map_or(0, Worker::pid)
    }

    /// Counts a line about the worker. Returns whether it is within this second's limit.
    pub fn may_log(&mut self) -> bool {
        self.lines.admit()
    }

    fn backoff(&self) -> Duration {
        match self.short_lives.checked_sub(IMMEDIATE_RESTARTS) {
            None => Duration::ZERO,
            Some(more) => Duration::from_millis(10 << more.min(7)).min(MAX_BACKOFF),
        }
    }
}

impl Supervisor {
    /// Starts a worker and sends it the state of the disk and the sessions.
    pub(super) fn begin_worker(&mut self) -> Result<(), SupervisorError> {
        self.life.start_at = None;
        let worker = Worker::start(&self.life.program)?;
        self.send_state(worker)
    }

    /// Makes this the worker of the disk, and sends it the state of the disk and the sessions.
    pub(super) fn send_state(&mut self, worker: Worker) -> Result<(), SupervisorError> {
        (self.life.serving, self.life.start_at) = (false, None);
        (self.life.end_by, self.life.ending) = (None, None);
        self.life.since = Instant::now();
        self.clear_reset_request();
        let ring = self.recorders_ring();
        self.chunks.iter_mut().for_each(Chunks::lost);
        // Store the worker first: if anything fails from here on, its end is still noticed.
        let worker = self.life.worker.insert(worker);
        let dead: Vec<_> = self.life.dead.iter().map(DeadWorker::pidfd).collect();
        let (message, fds) = self.disk.start_message(worker.lifeline().shared(), &dead)?;
        worker.send(message, fds)?;
        if let Some(ring) = ring {
            worker.send(ToWorker::Trace { on: true }, vec![ring])?;
        }
        for client in self.clients.values() {
            let Client::Vmm(session) = client else { continue };
            for (message, fds) in session.start_messages().map_err(super::session::cannot_pass)? {
                worker.send(message, fds)?;
            }
        }
        Ok(())
    }

    /// Sends a message to the worker. Without a worker nothing is lost: the next one is sent the whole state.
    pub(super) fn tell(&mut self, message: ToWorker, fds: Vec<OwnedFd>) {
        let Some(worker) = &mut self.life.worker else { return };
        if let Err(e) = worker.send(message, fds) {
            self.give_up_worker(&e);
        }
    }

    /// Kills a worker with which communication has failed.
    fn give_up_worker(&mut self, error: &SupervisorError) {
        if self.life.may_log() {
            (self.log)(&error.to_string());
        }
        self.end_worker("it was not understood and was ended");
    }

    /// Gives the worker the connection for chunks of the streamed image, which has been opened.
    pub(super) fn on_chunks_opened(&mut self) {
        let Some(opened) = self.chunks.as_mut().and_then(Chunks::take) else { return };
        let OpenedStream { image, residency, chunk_bytes, connection } = opened;
        let is_same = self.disk.is_same_image(&image, chunk_bytes);
        if !is_same && let Err(e) = set_cache(&image, self.disk.settings().base_cache()) {
            // What is there is still read from the old file.
            if self.life.may_log() {
                self.announce("notice", &format!("the image has another file in the cache now: {e}"));
            }
            self.chunks.iter_mut().for_each(Chunks::try_after_mending);
            return;
        }
        let again = residency.try_clone();
        self.disk.set_residency(residency);
        match (is_same, again) {
            (true, Ok(memory)) => self.tell(ToWorker::Chunks, vec![connection, memory]),
            (true, Err(_)) => self.chunks.iter_mut().for_each(Chunks::try_later),
            (false, _) => {
                // The files of the cache were lost, and are being made anew. What the worker reads is still whole, but nothing
                // is added to it.
                self.disk.set_image(image.file);
                self.announce(
                    "notice",
                    "the image has another file in the cache now: another worker reads that",
                );
                self.end_worker("its image has another file now");
            }
        }
    }

    /// Processes messages of the worker. Their number is limited, so that other events do not wait.
    pub(super) fn on_channel(&mut self, flags: PollFlags) -> Result<(), SupervisorError> {
        self.receive_messages(flags, MESSAGES_PER_ROUND)
    }

    fn receive_messages(&mut self, flags: PollFlags, most: usize) -> Result<(), SupervisorError> {
        if flags.contains(PollFlags::OUT)
            && let Some(worker) = &mut self.life.worker
            && let Err(e) = worker.send_waiting()
        {
            self.give_up_worker(&e);
        }
        for _ in 0..most {
            let Some(worker) = &mut self.life.worker else { break };
            match worker.receive() {
                Ok(Received::Message(message, fds)) => self.on_message(message, fds)?,
                Ok(Received::Nothing) => break,
                Ok(Received::Closed) => {
                    self.life.end_by.get_or_insert(Instant::now() + END_DEADLINE);
                    break;
                }
                // Later messages may be valid.
                Err(e) => self.give_up_worker(&e),
            }
        }
        Ok(())
    }

    /// Handles the worker's report that it serves. A second report is ignored.
    pub(super) fn on_ready(&mut self, engine: String, landlock: u32) {
        if self.life.serving || self.life.ending.is_some() {
            return;
        }
        (self.life.engine, self.life.landlock) = (engine, landlock);
        if self.life.has_served && self.upgrade.is_none() {
            let ms = self.life.since.elapsed().as_millis();
            self.announce("worker-serves", &format!("another worker serves, {ms} ms after it was started"));
        }
        (self.life.serving, self.life.has_served) = (true, true);
        self.life.since = Instant::now();
        self.report_states();
        // An answer lets its peer send the next request, which must not be taken for an unfinished one of before. So drop
        // the unfinished curves first, and answer changes and resets later.
        self.forget_questions();
        self.resume_change();
        self.resume_reset();
        self.finish_upgrade();
    }

    /// Handles a worker's report that it cannot serve. The first worker's error is returned; after a worker has served,
    /// another one is started.
    pub(super) fn on_failed(&mut self, error: SupervisorError) -> Result<(), SupervisorError> {
        if self.life.has_served {
            if self.life.may_log() {
                (self.log)(&error.to_string());
            }
            return Ok(());
        }
        Err(error)
    }

    /// Handles the death of the worker's main thread. It executes no further instruction that could change the disk, so the
    /// next worker starts. I/O of the dead worker may still complete; the next worker waits for it where that matters.
    pub(super) fn on_worker_death(&mut self) -> Result<(), SupervisorError> {
        if !self.life.may_die_early() {
            return Ok(());
        }
        // Kill it in any case: other threads may still run, or a broken worker may have reported its death itself.
        self.life.worker.iter().for_each(Worker::end);
        self.receive_messages(PollFlags::IN, MAX_LAST_MESSAGES)?;
        if let Some(worker) = self.life.worker.take() {
            self.life.dead.push(DeadWorker { worker, late: Some(Instant::now() + END_DEADLINE) });
        }
        self.lose_worker("its process is ending")
    }

    /// Reaps dead workers whose processes have ended.
    pub(super) fn reap(&mut self) {
        let mut events = Vec::new();
        self.life.dead.retain_mut(|dead| match dead.worker.ended() {
            None => true,
            Some(status) => {
                events
                    .push(format!("process {} of an earlier worker has ended: {status}", dead.worker.pid()));
                false
            }
        });
        events.iter().for_each(|text| self.announce("worker-ended", text));
    }

    /// Reports dead workers whose processes do not end. The usual cause is a system call to the store that does not return.
    fn report_stuck_workers(&mut self, now: Instant) {
        let mut events = Vec::new();
        for dead in &mut self.life.dead {
            if dead.late.take_if(|late| *late <= now).is_some() {
                events.push(format!(
                    "process {} of an earlier worker does not end: overflow segments that it may still write to are not used until \
                     then, and a disk whose blocks are written in place waits; check whether its storage hangs",
                    dead.worker.pid()
                ));
            }
        }
        events.iter().for_each(|text| self.announce("notice", text));
    }

    /// Handles the end of the worker's process, if it has ended.
    pub(super) fn on_worker_end(&mut self) -> Result<(), SupervisorError> {
        let Some(status) = self.life.worker.as_mut().and_then(Worker::ended) else { return Ok(()) };
        self.receive_messages(PollFlags::IN, MAX_LAST_MESSAGES)?;
        match self.life.ending {
            Some((how, _)) => self.lose_worker(how),
            None => self.lose_worker(&status.to_string()),
        }
    }

    /// Kills the worker. Its lifeline signals its death, its pidfd the end of its process. No other worker is started before
    /// that: a system call of the killed one could still free memory of the map or the slots.
    pub(super) fn end_worker(&mut self, how: &'static str) {
        self.life.worker.iter().for_each(Worker::end);
        self.life.ending.get_or_insert((how, Some(Instant::now() + END_DEADLINE)));
    }

    /// Handles deadlines: kills a worker that does not begin to serve or does not end, and starts the next one when it is due.
    pub(super) fn keep_worker(&mut self) -> Result<(), SupervisorError> {
        let now = Instant::now();
        self.report_stuck_workers(now);
        let late = self.life.has_served && !self.life.serving && now >= self.life.since + START_DEADLINE;
        let stuck = self.life.ending.as_mut().and_then(|(_, late)| late.take_if(|late| now >= *late));
        if stuck.is_some() {
            let pid = self.life.worker_pid();
            let text = format!(
                "process {pid}, the worker, was killed and does not end: the disk waits for it; check whether its storage hangs"
            );
            self.announce("notice", &text);
        }
        if self.life.end_by.is_some_and(|by| now >= by) {
            self.end_worker("it had closed its channel and was ended");
        } else if late && self.life.worker.is_some() {
            self.end_worker("it did not begin to serve and was ended");
        }
        if self.life.start_at.is_some_and(|at| now >= at)
            && let Err(e) = self.begin_worker()
        {
            (self.log)(&e.to_string());
            if self.life.worker.is_some() {
                // The worker was sent a part of the state: replace it as if it had died.
                self.end_worker("it could not be told all of the disk and was ended");
            } else {
                self.life.start_at = Some(now + MAX_BACKOFF);
            }
        }
        Ok(())
    }

    /// Handles the loss of the worker: removes its clients and schedules the next worker.
    fn lose_worker(&mut self, how: &str) -> Result<(), SupervisorError> {
        self.life.worker = None;
        if !self.life.has_served {
            return Err(SupervisorError::new(
                ErrorKind::Internal,
                format!("the worker ended before it served ({how}): please report this"),
            ));
        }
        let nbd = match self.drop_lost_clients() {
            0 => String::new(),
            n => format!("; {n} NBD client(s) lost the connection"),
        };
        if self.adopt_candidate()? {
            self.announce("upgrade", &format!("the worker makes way for another program{nbd}"));
            return Ok(());
        }
        self.roll_back_upgrade(how);
        let short = !self.life.serving || self.life.since.elapsed() < SHORT_LIFE;
        self.life.short_lives = if short { self.life.short_lives.saturating_add(1) } else { 0 };
        let backoff = self.life.backoff();
        self.life.serving = false;
        (self.life.end_by, self.life.ending) = (None, None);
        self.life.start_at = Some(Instant::now() + backoff);
        self.announce(
            "worker-died",
            &format!("the worker has died ({how}): another one continues with the disk{nbd}"),
        );
        self.keep_worker()
    }

    /// Stops the worker, which completes the requests that it has accepted. Kills it after [`STOP_DEADLINE`], or when one of
    /// `hurry` becomes readable. Returns whether it stopped by itself.
    pub(super) fn stop_worker(&mut self, hurry: &[BorrowedFd<'_>]) -> Result<bool, SupervisorError> {
        (self.life.start_at, self.life.stopping) = (None, true);
        let Some(worker) = &mut self.life.worker else { return Ok(false) };
        if worker.ended().is_some() {
            // It died before it was told to stop: its unfinished requests are lost.
            return Ok(false);
        }
        self.tell(ToWorker::Stop { disk_goes_on: false }, Vec::new());
        let deadline = Instant::now() + STOP_DEADLINE;
        loop {
            let hurried = self.relay_once(hurry, deadline)?;
            let Some(worker) = &mut self.life.worker else { return Ok(false) };
            if let Some(status) = worker.ended() {
                return judge_end(status).map(|()| true);
            }
            let by = self.life.end_by.map_or(deadline, |by| by.min(deadline));
            if hurried || Instant::now() >= by {
                (self.log)("the worker has not stopped yet: ending it");
                if !worker.kill() {
                    (self.log)(
                        "the worker does not end, and its memory and files stay until it does: check whether its storage hangs",
                    );
                }
                return Ok(false);
            }
        }
    }

    pub(super) fn on_message(
        &mut self,
        message: FromWorker,
        fds: Vec<OwnedFd>,
    ) -> Result<(), SupervisorError> {
        match message {
            FromWorker::Hello { protocol: PROTOCOL_VERSION, layout: LAYOUT_VERSION, .. } => {}
            FromWorker::Hello { version, .. } => {
                let message =
                    format!("the worker is of another version, {version}: install the whole package again");
                self.on_failed(SupervisorError::new(ErrorKind::Internal, message))?;
            }
            FromWorker::Ready { engine, landlock } => self.on_ready(engine, landlock),
            FromWorker::Failed { error } => {
                self.on_failed(SupervisorError::of(ErrorKind::Internal, error))?;
            }
            FromWorker::Answered { id, accepted, answer, writeback } => {
                self.on_answered(id, accepted, answer, fds, writeback);
            }
            FromWorker::ClientGone { id, error } => self.on_client_gone(id, error),
            FromWorker::ChunksLost => self.chunks.iter_mut().for_each(Chunks::try_later),
            FromWorker::ResetDone { result } => self.on_reset_done(result),
            FromWorker::SetDone { result } => self.on_change_done(result),
            FromWorker::Curve { curve } => self.on_worker_answer(curve),
            FromWorker::Touched { chunks } => {
                let touched = Touched { chunks };
                self.on_worker_answer(serde_json::to_value(touched).expect("plain numbers"));
            }
            FromWorker::Event { kind, text } => {
                // A worker limits its own rate of events: ignore what a broken one sends.
                if self.life.events.admit() && self.reported.update(&kind) {
                    self.announce(&kind, &text);
                }
            }
        }
        Ok(())
    }
}

fn judge_end(status: ExitStatus) -> Result<(), SupervisorError> {
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
