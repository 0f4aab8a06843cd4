//! Those who look on: recorders, who are given the ring that the worker writes its requests to, and who asks for the
//! curve. Owns the ring's memory and the order of the questions; reads neither.
//!
//! Invariant: there is a ring exactly while a recorder's connection is open; each worker is told of it before it serves.

use super::event_loop::Supervisor;
use crate::channel::ToWorker;
use rustix::fs::{Mode, OFlags};
use spillway_control::Answer;
use spillway_control::trace_ring;
use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};

/// What is kept for them.
#[derive(Debug, Default)]
pub(super) struct Watchers {
    ring: Option<OwnedFd>,
    /// Peers that wait for the curve, and what they want of it. The worker is asked for the first one's, and for no other
    /// meanwhile: a curve takes it a moment.
    asking: VecDeque<(u64, Option<f64>)>,
}

impl Supervisor {
    /// Tells what the last worker could not.
    pub(super) fn tell_states(&mut self) {
        for (kind, text) in self.reported.wrong(&self.window.read()) {
            self.reported.note(kind);
            self.announce(kind, text);
        }
    }

    /// Gives a peer the ring, to read only; it is told nothing else from here on.
    pub(super) fn begin_trace(&mut self, id: u64) {
        let ring = self.ring().and_then(|ring| read_only(&ring));
        let Some(peer) = self.peers.get_mut(&id) else { return };
        match ring {
            Ok(ring) => {
                let before = self.window.read();
                let answer = serde_json::json!({
                    "size_bytes": self.disk.spec.size_bytes, "serial": self.disk.serial(),
                    "live_bytes": before.ram.used_bytes + before.overflow.used_bytes,
                });
                peer.record(ring, &Answer::Ok(answer));
            }
            Err(e) => {
                peer.answer(&Answer::error("refused", format!("there is no memory to record into: {e}")))
            }
        }
    }

    /// The ring; made, and the worker told, if this is the first who wants it.
    fn ring(&mut self) -> io::Result<OwnedFd> {
        if let Some(ring) = &self.watchers.ring {
            return ring.try_clone();
        }
        let ring = trace_ring::create()?;
        let (workers, answer) = (ring.try_clone()?, ring.try_clone()?);
        self.tell(ToWorker::Trace { on: true }, vec![workers]);
        self.watchers.ring = Some(ring);
        Ok(answer)
    }

    /// What a worker that begins is told of recorders. Who looks on never keeps a disk from being served.
    pub(super) fn recorders_ring(&mut self) -> Option<OwnedFd> {
        let ring = self.watchers.ring.as_ref()?.try_clone();
        if let Err(e) = &ring {
            (self.log)(&format!("what is recorded ends here: {e}"));
            self.peers.retain(|_, peer| !peer.records());
            self.watchers.ring = None;
        }
        ring.ok()
    }

    /// A peer has gone. After the last recorder nobody writes any more.
    pub(super) fn keep_watchers(&mut self) {
        if self.watchers.ring.is_some() && !self.peers.values().any(super::control::Peer::records) {
            self.watchers.ring = None;
            self.tell(ToWorker::Trace { on: false }, Vec::new());
        }
    }

    /// Asks the worker for the curve. `Some`: it cannot be asked.
    pub(super) fn ask_curve(&mut self, by: u64, goal: Option<f64>) -> Option<Answer> {
        if goal.is_some_and(|goal| !(0.0..=1.0).contains(&goal)) {
            return Some(Answer::error("invalid", "a goal is a share: 0 to 1"));
        }
        if !self.life.serving {
            return Some(Answer::error("busy", "the worker begins: try again"));
        }
        self.watchers.asking.push_back((by, goal));
        if self.watchers.asking.len() == 1 {
            self.tell(ToWorker::Curve { goal }, Vec::new());
        }
        None
    }

    pub(super) fn on_curve(&mut self, curve: serde_json::Value) {
        // Nobody has asked: a worker that says so is none of ours any more.
        let Some((by, _)) = self.watchers.asking.pop_front() else { return };
        if let Some(&(_, goal)) = self.watchers.asking.front() {
            self.tell(ToWorker::Curve { goal }, Vec::new());
        }
        self.answer(by, &Answer::Ok(curve));
    }

    /// The worker that was asked is gone, and its curve with it.
    pub(super) fn forget_curves(&mut self) {
        for (by, _) in std::mem::take(&mut self.watchers.asking) {
            self.answer(
                by,
                &Answer::error("busy", "the worker was replaced by another, whose curve begins: try again"),
            );
        }
    }
}

/// The same memory, which this fd cannot change.
fn read_only(memory: &OwnedFd) -> io::Result<OwnedFd> {
    let path = format!("/proc/self/fd/{}", memory.as_raw_fd());
    Ok(rustix::fs::open(path, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())?)
}
