//! Those who look on: recorders, who are given the ring that the worker writes its requests to, and who asks for the
//! curve. Owns the ring's memory and the order of the questions; reads neither.
//!
//! Invariant: there is a ring exactly while a recorder's connection is open; each worker is told of it before it serves.

use super::control::Answer;
use super::event_loop::Supervisor;
use crate::channel::ToWorker;
use crate::trace_ring;
use rustix::fs::{Mode, OFlags};
use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};

/// What is kept for them.
#[derive(Debug, Default)]
pub(super) struct Lookers {
    ring: Option<OwnedFd>,
    /// Peers that wait for the curve, in the order in which the worker was asked.
    asking: VecDeque<u64>,
}

impl Supervisor {
    /// Gives a peer the ring, to read only; it is told nothing else from here on.
    pub(super) fn begin_trace(&mut self, id: u64) {
        let ring = self.ring().and_then(|ring| read_only(&ring));
        let Some(peer) = self.peers.get_mut(&id) else { return };
        match ring {
            Ok(ring) => {
                let answer = serde_json::json!({
                    "size_bytes": self.disk.spec.size_bytes, "serial": self.disk.serial(),
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
        if self.lookers.ring.is_none() {
            self.lookers.ring = Some(trace_ring::create()?);
            self.tell_of_recorders()?;
        }
        self.lookers.ring.as_ref().expect("made above").try_clone()
    }

    /// A worker begins, or there is a ring now: where it writes its requests to.
    pub(super) fn tell_of_recorders(&mut self) -> io::Result<()> {
        if let Some(ring) = &self.lookers.ring {
            let ring = ring.try_clone()?;
            self.tell(ToWorker::Trace { on: true }, vec![ring]);
        }
        Ok(())
    }

    /// A peer has gone. After the last recorder nobody writes any more.
    pub(super) fn keep_lookers(&mut self) {
        if self.lookers.ring.is_some() && !self.peers.values().any(super::control::Peer::records) {
            self.lookers.ring = None;
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
        self.lookers.asking.push_back(by);
        self.tell(ToWorker::Curve { goal }, Vec::new());
        None
    }

    pub(super) fn on_curve(&mut self, curve: serde_json::Value) {
        // Nobody has asked: a worker that says so is none of ours any more.
        let Some(by) = self.lookers.asking.pop_front() else { return };
        self.answer(by, &Answer::Ok(curve));
    }

    /// The worker that was asked is gone, and its curve with it.
    pub(super) fn forget_curves(&mut self) {
        for by in std::mem::take(&mut self.lookers.asking) {
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
