//! Upgrade of the worker to another program while the disk is served. The new worker is started beside the old one and
//! reports its version; only if it is compatible is the old worker stopped. Owns the process of the new worker until it
//! takes over the disk.
//!
//! Invariant: until the new worker serves, the old program can continue with the disk, and does if the new worker fails.

use super::event_loop::Supervisor;
use super::life::STOP_DEADLINE;
use super::process::{Program, Received, Worker};
use crate::channel::{FromWorker, PROTOCOL_VERSION, ToWorker};
use rustix::event::PollFlags;
use spillway_control::{Response, SupervisorError};
use spillway_core::LAYOUT_VERSION;
use std::os::fd::BorrowedFd;
use std::path::Path;
use std::time::{Duration, Instant};

/// How long the new worker may take to serve.
const SERVE_DEADLINE: Duration = Duration::from_secs(10);
/// How long a new worker may take to report its version.
const HELLO_DEADLINE: Duration = Duration::from_secs(5);

#[derive(Debug)]
enum Stage {
    /// The new worker has been started and has not reported its version.
    Asked(Worker),
    /// The new worker is compatible, and the old one was told to stop at this time: the guest's requests wait from then on.
    Stopping(Worker, Instant),
    /// The old worker, which was told to stop at this time, has ended; the new one is about to serve.
    Adopted(Instant),
}

/// An upgrade under way.
#[derive(Debug)]
pub(super) struct Upgrade {
    /// Control connection that waits for the result.
    by: u64,
    /// The program that does not serve: first the new one; once the new one is adopted, the old one, for a rollback.
    other: Program,
    version: String,
    stage: Stage,
    deadline: Instant,
}

impl Upgrade {
    /// Whether the old worker accepts no more requests and the new one does not serve yet.
    pub fn is_between(&self) -> bool {
        !matches!(self.stage, Stage::Asked(_))
    }

    /// When the present stage must have ended.
    pub fn deadline(&self) -> Instant {
        self.deadline
    }

    /// Channel of a new worker that has not reported its version. It also shows the worker's end.
    pub fn channel(&self) -> Option<BorrowedFd<'_>> {
        match &self.stage {
            Stage::Asked(worker) => Some(worker.channel()),
            Stage::Stopping(..) | Stage::Adopted(_) => None,
        }
    }
}

impl Supervisor {
    /// Begins an upgrade. Returns the error response if it is refused.
    pub(super) fn begin_upgrade(&mut self, by: u64, binary: &Path) -> Option<Response> {
        if self.upgrade.is_some() || self.reset.is_some() || self.change.is_some() || !self.life.serving {
            return Some(Response::error("busy", "a reset, an upgrade or a restart is under way: try again"));
        }
        if !self.peers.get(&by).is_some_and(|peer| peer.is_owner()) {
            return Some(Response::error(
                "refused",
                "an upgrade needs the user that serves the disk, or root",
            ));
        }
        let cannot = |why: &dyn std::fmt::Display| {
            Some(Response::error("refused", format!("{}: cannot be started: {why}", binary.display())))
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

    /// Handles the new worker's version report, or its end.
    pub(super) fn on_candidate(&mut self) -> Result<(), SupervisorError> {
        let Some(Upgrade { stage: Stage::Asked(worker), .. }) = &self.upgrade else { return Ok(()) };
        match worker.receive() {
            Ok(Received::Message(FromWorker::Hello { protocol, layout, version }, _)) => {
                let ours = (PROTOCOL_VERSION, LAYOUT_VERSION);
                if (protocol, layout) == ours {
                    return self.stop_for_upgrade(version);
                }
                self.end_upgrade(format!(
                    "version {version} has protocol {protocol} and layout {layout}, this disk has {} and {}: \
                     the disk is served as before; stop it, and serve it with the new version",
                    ours.0, ours.1
                ));
            }
            Ok(Received::Nothing) => {}
            Ok(Received::Message(..) | Received::Closed) | Err(_) => {
                self.end_upgrade("it is not a spillway-worker of a version that can take over: the disk is served as before".into());
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
            // The old worker has died meanwhile.
            return self.adopt_candidate().map(drop);
        }
        self.tell(ToWorker::Stop { disk_goes_on: true }, Vec::new());
        Ok(())
    }

    /// Passes the disk to the new worker after the old one has ended. Returns false if no upgrade is at that stage.
    pub(super) fn adopt_candidate(&mut self) -> Result<bool, SupervisorError> {
        match self.upgrade.take() {
            Some(Upgrade { by, other, version, stage: Stage::Stopping(worker, since), .. }) => {
                let other = std::mem::replace(&mut self.life.program, other);
                let (stage, deadline) = (Stage::Adopted(since), Instant::now() + SERVE_DEADLINE);
                self.upgrade = Some(Upgrade { by, other, version, stage, deadline });
                if let Err(e) = self.send_state(worker) {
                    // The worker was sent a part of the state: replace it as if it had died.
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

    /// Completes the upgrade if the worker that has begun to serve is the new one.
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
        self.answer(by, &Response::Ok(done));
    }

    /// Goes back to the old program if the worker that has died is the new one and never served. The death of the old worker
    /// is for [`Supervisor::adopt_candidate`].
    pub(super) fn roll_back_upgrade(&mut self, how: &str) {
        let Some(upgrade) = &mut self.upgrade else { return };
        if let Stage::Adopted(_) = upgrade.stage {
            std::mem::swap(&mut self.life.program, &mut upgrade.other);
            self.end_upgrade(format!(
                "the new worker could not serve ({how}): the old program serves the disk again"
            ));
        }
    }

    /// Handles the deadline of the present stage.
    pub(super) fn keep_upgrade(&mut self) {
        let late = self.upgrade.as_ref().is_some_and(|u| Instant::now() >= u.deadline());
        if !late {
            return;
        }
        match self.upgrade.as_ref().map(|u| &u.stage) {
            Some(Stage::Stopping(..) | Stage::Adopted(_)) if self.life.is_ending() => {
                let what = "a worker was killed and does not end";
                self.roll_back_upgrade(what);
                self.end_upgrade(format!("{what}: the old program serves the disk again when it has ended"));
            }
            Some(Stage::Stopping(..) | Stage::Adopted(_)) => {
                // The next worker repeats the requests that an old worker did not complete; a new worker that did
                // not begin to serve is rolled back. Both follow when the pidfd shows the end.
                self.end_worker("it took too long in an upgrade and was ended");
                if let Some(upgrade) = &mut self.upgrade {
                    upgrade.deadline += SERVE_DEADLINE;
                }
            }
            _ => self.end_upgrade(format!(
                "it did not report its version within {} s: the disk is served as before",
                HELLO_DEADLINE.as_secs()
            )),
        }
    }

    /// Ends an upgrade that has failed, with this reason.
    fn end_upgrade(&mut self, why: String) {
        if let Some(Upgrade { by, .. }) = self.upgrade.take() {
            self.announce("no-upgrade", &format!("no upgrade: {why}"));
            self.answer(by, &Response::error("refused", why));
        }
    }

    /// The channel to poll while a new worker has not reported its version.
    pub(super) fn candidate(&self) -> Option<(BorrowedFd<'_>, PollFlags)> {
        Some((self.upgrade.as_ref()?.channel()?, PollFlags::IN))
    }
}
