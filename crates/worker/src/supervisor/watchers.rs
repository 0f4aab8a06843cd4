//! Observers of the disk: recorders, which read the ring buffer that the worker writes its requests to, and questions
//! that only the worker can answer. Owns the memory of the ring buffer and the queue of questions; reads neither.
//!
//! Invariant: the ring buffer exists exactly while a recorder is connected; each worker gets it before it serves. Of each connection at
//! most one question waits, and nothing is asked for one that has closed.

use super::event_loop::Supervisor;
use crate::channel::ToWorker;
use rustix::fs::{Mode, OFlags};
use spillway_control::trace_ring;
use spillway_control::{Response, SCHEMA};
use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};

/// State that is kept for observers.
#[derive(Debug, Default)]
pub(super) struct Watchers {
    ring: Option<OwnedFd>,
    questions: QuestionQueue,
}

/// Questions of control connections that wait for the worker. It gets one at a time, the first one, since a curve takes a while.
#[derive(Debug, Default)]
struct QuestionQueue(VecDeque<(u64, Question)>);

/// What a control connection wants to know of the worker.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Question {
    /// The curve, with its goal (a share of 0 to 1).
    Curve(Option<f64>),
    /// The chunks of the streamed image that were read.
    Touched,
}

impl Question {
    fn message(self) -> ToWorker {
        match self {
            Question::Curve(goal) => ToWorker::Curve { goal },
            Question::Touched => ToWorker::Touched,
        }
    }
}

impl QuestionQueue {
    /// Adds a question of a connection. Returns what the worker has to be asked now. `is_open`: whether a connection still is.
    fn add(&mut self, by: u64, question: Question, is_open: impl Fn(u64) -> bool) -> Option<Question> {
        let first = self.0.pop_front();
        self.0.retain(|(by, _)| is_open(*by));
        self.0.push_back((by, question));
        match first {
            // The worker will answer it, whoever hears that.
            Some(asked) => self.0.push_front(asked),
            None => return Some(question),
        }
        None
    }

    /// Takes the connection whose question was answered. Returns also what the worker has to be asked next.
    fn take_answered(&mut self, is_open: impl Fn(u64) -> bool) -> Option<(u64, Option<Question>)> {
        let (by, _) = self.0.pop_front()?;
        self.0.retain(|(by, _)| is_open(*by));
        Some((by, self.0.front().map(|(_, question)| *question)))
    }
}

impl Supervisor {
    /// Reports the state changes that the last worker did not report.
    pub(super) fn report_states(&mut self) {
        for (kind, text) in self.reported.outdated(&self.window.read()) {
            self.reported.update(kind);
            self.announce(kind, text);
        }
    }

    /// Passes the ring buffer to a control connection, read-only. The connection is then used for nothing else.
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
                peer.record(ring, &Response::Ok(answer));
            }
            Err(e) => {
                peer.answer(&Response::error("refused", format!("there is no memory to record into: {e}")))
            }
        }
    }

    /// Passes the memory of the counters to a control connection, read-only. Returns the error response if that is not possible.
    pub(super) fn pass_counters(&mut self, id: u64) -> Option<Response> {
        let peer = self.peers.get_mut(&id)?;
        // The same memory tells which blocks were written, and one of another user could open it again to write.
        if !peer.is_owner() {
            return Some(Response::error("refused", "only the disk's own user and root may read its memory"));
        }
        match read_only(&self.disk.meta) {
            Ok(memory) => {
                peer.answer_with(memory, &Response::Ok(serde_json::json!({ "schema": SCHEMA })));
                None
            }
            Err(e) => Some(Response::error("refused", format!("its counters cannot be passed: {e}"))),
        }
    }

    /// Returns the ring buffer. Creates it and passes it to the worker if there is none.
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

    /// Returns the ring buffer for a worker that starts. If that fails, recorders are disconnected and the disk is served.
    pub(super) fn recorders_ring(&mut self) -> Option<OwnedFd> {
        let ring = self.watchers.ring.as_ref()?.try_clone();
        if let Err(e) = &ring {
            (self.log)(&format!("recording ends, because its memory cannot be passed to the worker: {e}"));
            self.peers.retain(|_, peer| !peer.records());
            self.watchers.ring = None;
        }
        ring.ok()
    }

    /// Removes the ring buffer after the last recorder has disconnected.
    pub(super) fn keep_watchers(&mut self) {
        if self.watchers.ring.is_some() && !self.peers.values().any(super::control::Peer::records) {
            self.watchers.ring = None;
            self.tell(ToWorker::Trace { on: false }, Vec::new());
        }
    }

    /// Passes a question to the worker. Returns the error response if that is not possible.
    pub(super) fn ask_worker(&mut self, by: u64, question: Question) -> Option<Response> {
        if matches!(question, Question::Curve(Some(goal)) if !(0.0..=1.0).contains(&goal)) {
            return Some(Response::error("invalid", "the goal must be a share of 0 to 1"));
        }
        if !self.life.serving {
            return Some(Response::error("busy", "the worker is starting: try again"));
        }
        let is_open = |id| self.peers.contains_key(&id);
        if let Some(question) = self.watchers.questions.add(by, question, is_open) {
            self.tell(question.message(), Vec::new());
        }
        None
    }

    /// Handles the worker's answer.
    pub(super) fn on_worker_answer(&mut self, answer: serde_json::Value) {
        let is_open = |id| self.peers.contains_key(&id);
        // Nothing was asked: ignore what a broken worker sends.
        let Some((by, next)) = self.watchers.questions.take_answered(is_open) else { return };
        if let Some(question) = next {
            self.tell(question.message(), Vec::new());
        }
        self.answer(by, &Response::Ok(answer));
    }

    /// Refuses the waiting questions: the worker that collected the data has ended.
    pub(super) fn forget_questions(&mut self) {
        for (by, _) in std::mem::take(&mut self.watchers.questions).0 {
            self.answer(
                by,
                &Response::error("busy", "the worker was replaced, and the new one has only begun to collect data: try again later"),
            );
        }
    }
}

/// Opens the same memory read-only.
fn read_only(memory: &OwnedFd) -> io::Result<OwnedFd> {
    let path = format!("/proc/self/fd/{}", memory.as_raw_fd());
    Ok(rustix::fs::open(path, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())?)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Clients that ask and leave before the worker answers.
    #[test]
    fn questions_of_closed_connections_are_dropped() {
        let mut queue = QuestionQueue::default();
        let [curve, touched] = [Question::Curve(None), Question::Touched];
        assert_eq!(queue.add(0, curve, |_| true), Some(curve));
        for by in 1..1000 {
            // Of those before only the first two are there.
            assert_eq!(queue.add(by, touched, |by| by == 1), None);
            assert!(queue.0.len() <= 3, "{queue:?}");
        }
        // The first one is being answered, although it has left.
        assert_eq!(queue.take_answered(|by| by == 999), Some((0, Some(touched))));
        assert_eq!(queue.take_answered(|_| true), Some((999, None)));
        assert_eq!(queue.take_answered(|_| true), None);
        assert_eq!(queue.add(5, touched, |_| true), Some(touched));
    }
}
