//! The worker's life: how it begins, how its death is noticed, how the next one goes on. Owns the worker's process;
//! what is served belongs to all workers and is elsewhere.
//!
//! Invariant: once a worker has served, there is one, or one is about to be started, until the supervisor stops, but
//! while the kernel keeps one that was killed; what a dead one has said is heard before the next one begins.

use super::clients::Client;
use super::event_loop::Supervisor;
use super::process::{Program, Received, Worker};
use crate::channel::{FromWorker, MOST_DEAD, PROTOCOL_VERSION, ToWorker};
use rustix::event::PollFlags;
use spillway_control::{ErrorKind, SupervisorError};
use spillway_core::LAYOUT_VERSION;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::process::ExitStatus;
use std::time::{Duration, Instant};

/// How long a worker may take to serve, to stop, and to end after it closed its channel.
pub(super) const START_DEADLINE: Duration = Duration::from_secs(60);
pub(super) const STOP_DEADLINE: Duration = Duration::from_secs(10);
const END_DEADLINE: Duration = Duration::from_secs(5);
/// A worker that dies sooner than this has not helped.
const SHORT_LIFE: Duration = Duration::from_secs(1);
/// Messages of a worker that are heard before others have their turn.
const MESSAGES_PER_ROUND: usize = 64;
/// Lines of a worker in the log in a second at most.
const LINES_PER_SECOND: u32 = 100;
/// Messages of a dead worker that are heard: more than its channel holds.
const LAST_WORDS: usize = 10_000;
/// How many short lives are followed by the next one at once.
const EAGER_STARTS: u32 = 3;
/// The longest rest after a short life.
const LONGEST_REST: Duration = Duration::from_secs(1);

/// The worker, or the wait for it.
#[derive(Debug)]
pub(super) struct Life {
    pub program: Program,
    pub worker: Option<Worker>,
    /// Those before it that have died and not ended: the kernel takes their memory apart.
    pub dead: Vec<Dead>,
    /// The supervisor stops: it waits for the end.
    stopping: bool,
    /// The worker has said that it serves.
    pub serving: bool,
    /// How the last one that did does I/O.
    pub engine: String,
    /// The version of the Landlock that it was confined by; 0 for none.
    pub landlock: u32,
    /// One has.
    pub has_served: bool,
    since: Instant,
    short_lives: u32,
    /// When the next one is started.
    start_at: Option<Instant>,
    /// Set when the worker has closed its channel: when it must have ended.
    end_by: Option<Instant>,
    /// It was killed, for this reason; when to say that it does not end, unless it was said.
    ending: Option<(&'static str, Option<Instant>)>,
    /// Events that workers told of, and other lines because of them: neither takes the other's place.
    events: Lines,
    lines: Lines,
}

/// Lines in the log since some time.
#[derive(Debug)]
struct Lines {
    count: u32,
    since: Instant,
}

impl Lines {
    fn none() -> Lines {
        Lines { count: 0, since: Instant::now() }
    }

    /// Whether one more goes into the log in this second.
    fn may_be_more(&mut self) -> bool {
        if self.since.elapsed() > Duration::from_secs(1) {
            *self = Lines::none();
        }
        self.count += 1;
        self.count <= LINES_PER_SECOND
    }
}

/// A worker that has died and not ended.
#[derive(Debug)]
pub(super) struct Dead {
    worker: Worker,
    /// When it is said that it takes long.
    late: Option<Instant>,
}

impl Dead {
    /// Readable when it has ended.
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
            events: Lines::none(),
            lines: Lines::none(),
        }
    }

    /// When something must be looked at even if nothing happens. While it stops, that is for [`Supervisor::stop_worker`].
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

    /// Whether another worker may begin while this one, which has died, has not ended.
    pub fn may_die_early(&self) -> bool {
        self.serving && !self.stopping && self.dead.len() < MOST_DEAD
    }

    /// Whether no process of a worker is left.
    pub fn all_have_ended(&mut self) -> bool {
        self.dead.is_empty() && self.worker.as_mut().is_none_or(|worker| worker.ended().is_some())
    }

    /// Whether the worker serves.
    pub fn serving(&self) -> bool {
        self.serving
    }

    /// Whether the worker was killed, and has not ended.
    pub fn is_ending(&self) -> bool {
        self.ending.is_some()
    }

    /// Whether the worker has more to say, and is asked.
    pub fn listens(&self) -> bool {
        self.end_by.is_none() && self.ending.is_none()
    }

    /// The process that serves, or is about to; 0 between two of them.
    pub fn worker_pid(&self) -> u32 {
        self.worker.as_ref().map_or(0, Worker::pid)
    }

    /// Whether another line because of the worker goes into the log in this second.
    pub fn may_say_more(&mut self) -> bool {
        self.lines.may_be_more()
    }

    fn rest(&self) -> Duration {
        match self.short_lives.checked_sub(EAGER_STARTS) {
            None => Duration::ZERO,
            Some(more) => Duration::from_millis(10 << more.min(7)).min(LONGEST_REST),
        }
    }
}

impl Supervisor {
    /// Starts a worker and tells it all that it must know.
    pub(super) fn begin_worker(&mut self) -> Result<(), SupervisorError> {
        self.life.start_at = None;
        let worker = Worker::start(&self.life.program)?;
        self.introduce(worker)
    }

    /// Tells a worker all that it must know: the disk is its to serve.
    pub(super) fn introduce(&mut self, worker: Worker) -> Result<(), SupervisorError> {
        (self.life.serving, self.life.start_at) = (false, None);
        (self.life.end_by, self.life.ending) = (None, None);
        self.life.since = Instant::now();
        self.forget_asking();
        let ring = self.recorders_ring();
        // Whatever fails from here on, there is a process whose end is followed.
        let worker = self.life.worker.insert(worker);
        let dead: Vec<_> = self.life.dead.iter().map(Dead::pidfd).collect();
        let (message, fds) = self.disk.start_message(worker.lifeline().shared(), &dead)?;
        worker.send(message, fds)?;
        if let Some(ring) = ring {
            worker.send(ToWorker::Trace { on: true }, vec![ring])?;
        }
        for client in self.clients.values() {
            let Client::Vmm(session) = client else { continue };
            for (message, fds) in session.introduce().map_err(super::session::cannot_pass)? {
                worker.send(message, fds)?;
            }
        }
        Ok(())
    }

    /// Gives the worker a message. Without a worker nothing is lost: the next one is told all that holds then.
    pub(super) fn tell(&mut self, message: ToWorker, fds: Vec<OwnedFd>) {
        let Some(worker) = &mut self.life.worker else { return };
        if let Err(e) = worker.send(message, fds) {
            self.give_up_worker(&e);
        }
    }

    /// There is no speaking with it: it is ended.
    fn give_up_worker(&mut self, error: &SupervisorError) {
        if self.life.may_say_more() {
            (self.log)(&error.to_string());
        }
        self.end_worker("it was not understood and was ended");
    }

    /// Hears what the worker says, some of it at a time: it must not keep others waiting.
    pub(super) fn on_channel(&mut self, flags: PollFlags) -> Result<(), SupervisorError> {
        self.hear(flags, MESSAGES_PER_ROUND)
    }

    fn hear(&mut self, flags: PollFlags, most: usize) -> Result<(), SupervisorError> {
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
                // What it said after that may be plain.
                Err(e) => self.give_up_worker(&e),
            }
        }
        Ok(())
    }

    /// The worker serves. It says so once.
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
        self.tell_states();
        // An answer lets its peer ask for the next thing, which must not be taken for what was left: so the one that
        // answers nothing comes first.
        self.forget_curves();
        self.resume_change();
        self.resume_reset();
        self.finish_upgrade();
    }

    /// The worker cannot serve. The first one's reason is the supervisor's; after that another one is tried.
    pub(super) fn on_failed(&mut self, error: SupervisorError) -> Result<(), SupervisorError> {
        if self.life.has_served {
            if self.life.may_say_more() {
                (self.log)(&error.to_string());
            }
            return Ok(());
        }
        Err(error)
    }

    /// It has died. It runs no instruction any more that could touch the disk, so the next one begins; what I/O of it
    /// may still be begun or land, the next one waits for where it matters.
    pub(super) fn on_worker_death(&mut self) -> Result<(), SupervisorError> {
        if !self.life.may_die_early() {
            return Ok(());
        }
        // Should other threads of it not know yet, or it only say so.
        self.life.worker.iter().for_each(Worker::end);
        self.hear(PollFlags::IN, LAST_WORDS)?;
        if let Some(worker) = self.life.worker.take() {
            self.life.dead.push(Dead { worker, late: Some(Instant::now() + END_DEADLINE) });
        }
        self.lose_worker("its process is ending")
    }

    /// Those that have died and ended are gone.
    pub(super) fn reap(&mut self) {
        let mut said = Vec::new();
        self.life.dead.retain_mut(|dead| match dead.worker.ended() {
            None => true,
            Some(status) => {
                said.push(format!("process {} of an earlier worker has ended: {status}", dead.worker.pid()));
                false
            }
        });
        said.iter().for_each(|text| self.announce("worker-ended", text));
    }

    /// Something keeps a dead worker: a system call that does not return, most likely into its store.
    fn mention_undead(&mut self, now: Instant) {
        let mut said = Vec::new();
        for dead in &mut self.life.dead {
            if dead.late.take_if(|late| *late <= now).is_some() {
                said.push(format!(
                    "process {} of an earlier worker does not end: what it may still write to is not used \
                     before that, and where blocks are written in place everything waits; is the store stuck?",
                    dead.worker.pid()
                ));
            }
        }
        said.iter().for_each(|text| self.announce("notice", text));
    }

    /// Its process has ended, if it has.
    pub(super) fn on_worker_end(&mut self) -> Result<(), SupervisorError> {
        let Some(status) = self.life.worker.as_mut().and_then(Worker::ended) else { return Ok(()) };
        self.hear(PollFlags::IN, LAST_WORDS)?;
        match self.life.ending {
            Some((how, _)) => self.lose_worker(how),
            None => self.lose_worker(&status.to_string()),
        }
    }

    /// Kills it; its pidfd tells when it has ended, or its lifeline that it has died. Before that there is no other: a
    /// system call of its own could still take memory from the map or the slots.
    pub(super) fn end_worker(&mut self, how: &'static str) {
        self.life.worker.iter().for_each(Worker::end);
        self.life.ending.get_or_insert((how, Some(Instant::now() + END_DEADLINE)));
    }

    /// What time alone brings: a worker that does not begin or end is ended, one that is due is started.
    pub(super) fn keep_worker(&mut self) -> Result<(), SupervisorError> {
        let now = Instant::now();
        self.mention_undead(now);
        let late = self.life.has_served && !self.life.serving && now >= self.life.since + START_DEADLINE;
        let undead = self.life.ending.as_mut().and_then(|(_, late)| late.take_if(|late| now >= *late));
        if undead.is_some() {
            let pid = self.life.worker_pid();
            let text =
                format!("process {pid}, the worker, was killed and does not end: the disk waits for it");
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
                // It knows half of the disk: as if it had died.
                self.end_worker("it could not be told all of the disk and was ended");
            } else {
                self.life.start_at = Some(now + LONGEST_REST);
            }
        }
        Ok(())
    }

    /// The worker is dead: the next one goes on with all that outlives it.
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
        if self.adopt_newcomer()? {
            self.announce("upgrade", &format!("the worker makes way for another program{nbd}"));
            return Ok(());
        }
        self.back_out_of_upgrade(how);
        let short = !self.life.serving || self.life.since.elapsed() < SHORT_LIFE;
        self.life.short_lives = if short { self.life.short_lives.saturating_add(1) } else { 0 };
        let rest = self.life.rest();
        self.life.serving = false;
        (self.life.end_by, self.life.ending) = (None, None);
        self.life.start_at = Some(Instant::now() + rest);
        self.announce(
            "worker-died",
            &format!("the worker has died ({how}): another goes on with the disk{nbd}"),
        );
        self.keep_worker()
    }

    /// Stops the worker, which completes what it accepted. It is killed when it takes too long, or when one of
    /// `hurry` is readable. Whether it has done all that it should.
    pub(super) fn stop_worker(&mut self, hurry: &[BorrowedFd<'_>]) -> Result<bool, SupervisorError> {
        (self.life.start_at, self.life.stopping) = (None, true);
        let Some(worker) = &mut self.life.worker else { return Ok(false) };
        if worker.ended().is_some() {
            // It died before: what it would have completed goes with the disk.
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
                        "the worker does not end: its memory and files stay until it does; is the store stuck?",
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
            FromWorker::ResetDone { result } => self.on_reset_done(result),
            FromWorker::SetDone { result } => self.on_change_done(result),
            FromWorker::Curve { curve } => self.on_curve(curve),
            FromWorker::Event { kind, text } => {
                // It paces itself; one that does not is no worker of ours any more.
                if self.life.events.may_be_more() && self.reported.note(&kind) {
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
