//! Another program takes the place of the worker: it is started beside the old one and asked what it is; only if it
//! fits is the old one stopped. Owns the process that waits; what is served belongs to neither.
//!
//! Invariant: until the new worker serves, the old program can take the disk back, and does if the new one fails.

use super::event_loop::Supervisor;
use super::life::STOP_DEADLINE;
use super::process::{Program, Received, Worker};
use crate::channel::{FromWorker, PROTOCOL_VERSION, ToWorker};
use rustix::event::PollFlags;
use spillway_control::{Answer, SupervisorError};
use spillway_core::LAYOUT_VERSION;
use std::os::fd::BorrowedFd;
use std::path::Path;
use std::time::{Duration, Instant};

/// How long the new one may take to serve.
const SERVE_DEADLINE: Duration = Duration::from_secs(10);
/// How long a program may take to say what it is.
const HELLO_DEADLINE: Duration = Duration::from_secs(5);

#[derive(Debug)]
enum Stage {
    /// The new one has been asked what it is.
    Asked(Worker),
    /// It fits; the old one was told to stop at this time: the guest waits from here on.
    Stopping(Worker, Instant),
    /// The old one, told to stop at this time, has gone; the new one is about to serve.
    Adopted(Instant),
}

/// An upgrade under way.
#[derive(Debug)]
pub(super) struct Upgrade {
    /// The peer that waits for it.
    by: u64,
    /// The other program: first the new one, then, for the case that it fails, the old one.
    other: Program,
    version: String,
    stage: Stage,
    deadline: Instant,
}

impl Upgrade {
    /// The old worker takes no more, and the new one does not serve yet.
    pub fn is_between(&self) -> bool {
        !matches!(self.stage, Stage::Asked(_))
    }

    /// When the stage must have ended.
    pub fn deadline(&self) -> Instant {
        self.deadline
    }

    /// The channel of a program that has not said yet what it is. It also tells of its end.
    pub fn channel(&self) -> Option<BorrowedFd<'_>> {
        match &self.stage {
            Stage::Asked(worker) => Some(worker.channel()),
            Stage::Stopping(..) | Stage::Adopted(_) => None,
        }
    }
}

impl Supervisor {
    /// Begins. `Some`: it cannot be, for this reason.
    pub(super) fn begin_upgrade(&mut self, by: u64, binary: &Path) -> Option<Answer> {
        if self.upgrade.is_some() || self.reset.is_some() || self.change.is_some() || !self.life.serving {
            return Some(Answer::error("busy", "a reset, an upgrade or a restart is under way: try again"));
        }
        if !self.peers.get(&by).is_some_and(|peer| peer.is_owner()) {
            return Some(Answer::error(
                "refused",
                "only the user that serves, and root, may choose what runs: ask one of them",
            ));
        }
        let cannot = |why: &dyn std::fmt::Display| {
            Some(Answer::error("refused", format!("{}: cannot be started: {why}", binary.display())))
        };
        let program = match Program::elsewhere(binary) {
            Ok(program) => program,
            Err(e) => return cannot(&e),
        };
        match Worker::start(&program) {
            Ok(worker) => {
                let deadline = Instant::now() + HELLO_DEADLINE;
                let (stage, version) = (Stage::Asked(worker), String::new());
                self.upgrade = Some(Upgrade { by, other: program, version, stage, deadline });
                None
            }
            Err(e) => cannot(&e),
        }
    }

    /// The new program has said something, or ended.
    pub(super) fn on_newcomer(&mut self) -> Result<(), SupervisorError> {
        let Some(Upgrade { stage: Stage::Asked(worker), .. }) = &self.upgrade else { return Ok(()) };
        match worker.receive() {
            Ok(Received::Message(FromWorker::Hello { protocol, layout, version }, _)) => {
                let known = (PROTOCOL_VERSION, LAYOUT_VERSION);
                if (protocol, layout) == known {
                    return self.stop_for_upgrade(version);
                }
                self.end_upgrade(format!(
                    "version {version} speaks protocol {protocol} and layout {layout}, this disk {} and {}: \
                     it goes on as it is; serve the disk anew with the new version",
                    known.0, known.1
                ));
            }
            Ok(Received::Nothing) => {}
            Ok(Received::Message(..) | Received::Closed) | Err(_) => {
                self.end_upgrade("it is no spillway that can take over: the disk goes on as it is".into());
            }
        }
        Ok(())
    }

    fn stop_for_upgrade(&mut self, version: String) -> Result<(), SupervisorError> {
        let Some(mut upgrade) = self.upgrade.take() else { return Ok(()) };
        if let Stage::Asked(worker) = upgrade.stage {
            upgrade.stage = Stage::Stopping(worker, Instant::now());
        }
        upgrade.version = version;
        upgrade.deadline = Instant::now() + STOP_DEADLINE;
        self.upgrade = Some(upgrade);
        if self.life.worker.is_none() {
            // The old one has died meanwhile.
            return self.adopt_newcomer().map(drop);
        }
        self.tell(ToWorker::Stop { disk_goes_on: true }, Vec::new());
        Ok(())
    }

    /// The old worker has gone: the new one takes the disk. False: there is none.
    pub(super) fn adopt_newcomer(&mut self) -> Result<bool, SupervisorError> {
        match self.upgrade.take() {
            Some(Upgrade { by, other, version, stage: Stage::Stopping(worker, since), .. }) => {
                let other = std::mem::replace(&mut self.life.program, other);
                let (stage, deadline) = (Stage::Adopted(since), Instant::now() + SERVE_DEADLINE);
                self.upgrade = Some(Upgrade { by, other, version, stage, deadline });
                if let Err(e) = self.introduce(worker) {
                    // It knows half of it: as if it had died.
                    (self.log)(&e.to_string());
                    self.end_worker("it could not be told all of the disk and was ended");
                }
                Ok(true)
            }
            other => {
                self.upgrade = other;
                Ok(false)
            }
        }
    }

    /// The worker serves: if it is the new one, that was it.
    pub(super) fn finish_upgrade(&mut self) {
        let adopted = |upgrade: &mut Upgrade| matches!(upgrade.stage, Stage::Adopted(_));
        let Some(Upgrade { by, version, stage: Stage::Adopted(since), .. }) = self.upgrade.take_if(adopted)
        else {
            return;
        };
        let pause_ms = since.elapsed().as_millis() as u64;
        let text = format!("version {version} serves from here on, after a pause of {pause_ms} ms");
        self.announce("upgraded", &text);
        let worker_pid = self.life.worker_pid();
        let done = serde_json::json!({ "version": version, "worker_pid": worker_pid, "pause_ms": pause_ms });
        self.answer(by, &Answer::Ok(done));
    }

    /// The worker has died: if it was the new one and never served, the old program takes the disk back. If it was
    /// the old one, whose place is to be taken anyway, that is for [`Supervisor::adopt_newcomer`].
    pub(super) fn back_out_of_upgrade(&mut self, how: &str) {
        let Some(upgrade) = &mut self.upgrade else { return };
        if let Stage::Adopted(_) = upgrade.stage {
            std::mem::swap(&mut self.life.program, &mut upgrade.other);
            self.end_upgrade(format!("it could not serve ({how}): the old program goes on"));
        }
    }

    /// What time alone brings.
    pub(super) fn keep_upgrade(&mut self) {
        let late = self.upgrade.as_ref().is_some_and(|u| Instant::now() >= u.deadline());
        if !late {
            return;
        }
        match self.upgrade.as_ref().map(|u| &u.stage) {
            Some(Stage::Stopping(..) | Stage::Adopted(_)) if self.life.is_ending() => {
                let what = "a worker was killed and does not end";
                self.back_out_of_upgrade(what);
                self.end_upgrade(format!("{what}: the old program goes on when it does"));
            }
            Some(Stage::Stopping(..) | Stage::Adopted(_)) => {
                // What the old one has not completed is done again by the new one; what the new one never began to
                // serve is the old program's again. Its end comes by its pidfd.
                self.end_worker("it took too long in an upgrade and was ended");
                if let Some(upgrade) = &mut self.upgrade {
                    upgrade.deadline += SERVE_DEADLINE;
                }
            }
            _ => self.end_upgrade(format!(
                "it did not say what it is in {} s: the disk goes on as it is",
                HELLO_DEADLINE.as_secs()
            )),
        }
    }

    /// It is not to be.
    fn end_upgrade(&mut self, why: String) {
        if let Some(Upgrade { by, .. }) = self.upgrade.take() {
            self.announce("no-upgrade", &format!("no upgrade: {why}"));
            self.answer(by, &Answer::error("refused", why));
        }
    }

    /// What to watch while an upgrade is under way.
    pub(super) fn newcomer(&self) -> Option<(BorrowedFd<'_>, PollFlags)> {
        Some((self.upgrade.as_ref()?.channel()?, PollFlags::IN))
    }
}
