//! The part of a VMM's connection that outlives the worker: the control socket, and the messages that the next worker
//! needs to continue the session. Owns the socket, the table of requests in flight and copies of the VMM's fds; never
//! accesses the fds' content.
//!
//! Invariant: the worker has at most one message at a time. This side keeps the message until a worker has answered it, so
//! that the message is carried out and answered once even if workers die meanwhile.

use crate::channel::{ClientKind, ToWorker};
use crate::worker::{ErrorKind, ReportedError};
use rustix::event::PollFlags;
use spillway_control::SupervisorError;
use spillway_export::vhost_user_blk::{Connection, Disconnect, Error, Packet, Record, Reply, inflight_table};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

/// Number of workers that may die while they have the same message. The session is ended then.
pub(super) const MOST_DEATHS: u32 = 50;

/// A message for the worker, with its fds.
pub(super) type MessageWithFds = (ToWorker, Vec<OwnedFd>);

#[derive(Debug)]
pub(super) struct Session {
    id: u64,
    connection: Connection,
    /// Table of requests in flight, for a VMM that passes none.
    table: OwnedFd,
    record: Record,
    /// Message that the worker has and has not answered.
    in_flight: Option<Packet>,
    /// Number of workers that died while they had that message.
    deaths: u32,
    /// Set when the VMM has closed its end of the connection. Messages that it sent before may still be unread.
    hung_up: bool,
    /// Set when the session is being ended and the worker, if there is one, has been told.
    ended: bool,
}

impl Session {
    /// Takes over an accepted connection.
    pub fn new(id: u64, socket: OwnedFd, queues: u16) -> io::Result<Session> {
        Ok(Session {
            id,
            connection: Connection::new(socket)?,
            table: inflight_table(queues)?,
            record: Record::default(),
            in_flight: None,
            deaths: 0,
            hung_up: false,
            ended: false,
        })
    }

    /// Events to poll the socket for; `None` if nothing more will be read from it.
    pub fn interest(&self) -> Option<PollFlags> {
        match (self.ended, &self.in_flight) {
            (true, _) => None,
            // A hang-up shows in any case.
            (false, Some(_)) => Some(PollFlags::empty()),
            (false, None) => Some(PollFlags::IN),
        }
    }

    pub fn fd(&self) -> BorrowedFd<'_> {
        self.connection.fd()
    }

    /// Records that the VMM has closed its end of the connection.
    pub fn hung_up(&mut self) {
        self.hung_up = true;
    }

    /// Whether the VMM has closed the connection and the worker has not been told. No other VMM may be passed to the worker
    /// before that.
    pub fn has_unreported_hangup(&self) -> bool {
        self.hung_up && !self.ended
    }

    /// Whether the session is being ended and the worker has been told.
    pub fn has_ended(&self) -> bool {
        self.ended
    }

    /// Returns the messages that a new worker needs to continue the session.
    pub fn start_messages(&self) -> io::Result<Vec<MessageWithFds>> {
        let client = ToWorker::Client { id: self.id, kind: ClientKind::VhostUser };
        let fds = vec![self.connection.fd().try_clone_to_owned()?, self.table.try_clone()?];
        let mut messages = vec![(client, fds)];
        for packet in self.record.packets() {
            let replay = ToWorker::Replay { id: self.id, bytes: packet.bytes.clone() };
            messages.push((replay, clones(&packet.fds)?));
        }
        if let Some(packet) = &self.in_flight {
            messages.push(self.message_for_worker(packet)?);
        }
        Ok(messages)
    }

    /// Reads the next message of the VMM. Returns what to send to the worker.
    pub fn next(&mut self) -> Option<MessageWithFds> {
        if self.in_flight.is_some() || self.ended {
            return None;
        }
        match self.connection.receive() {
            Ok(Some(packet)) => match self.message_for_worker(&packet) {
                Ok(message) => {
                    self.in_flight = Some(packet);
                    self.deaths = 0;
                    Some(message)
                }
                Err(e) => {
                    let reason = "its message cannot be passed on to the worker";
                    Some(self.end(&Error::from_io(reason, &e).into()))
                }
            },
            Ok(None) => None,
            Err(why) => Some(self.end(&why)),
        }
    }

    /// Takes the file descriptors whose close(2) may never return. The session of the VMM that sent them ends.
    pub fn take_unclosable(&mut self) -> Vec<OwnedFd> {
        self.connection.take_unclosable()
    }

    /// Counts the death of a worker. Returns false if the session ends: too many workers died with the same message, or the
    /// session was being ended.
    pub fn count_worker_death(&mut self) -> bool {
        self.deaths += u32::from(self.in_flight.is_some());
        !self.ended && self.deaths < MOST_DEATHS
    }

    /// Ends the session. Returns the message that tells the worker.
    pub fn end(&mut self, why: &Disconnect) -> MessageWithFds {
        self.ended = true;
        let error = match why {
            Disconnect::Left => None,
            why => Some(ReportedError::new(ErrorKind::Client, why.to_string())),
        };
        (ToWorker::Left { id: self.id, error }, Vec::new())
    }

    /// Passes the worker's answer to the VMM. Returns what to send to the worker if that fails.
    pub fn answered(&mut self, accepted: bool, answer: Option<Reply>) -> Option<MessageWithFds> {
        let packet = self.in_flight.take()?;
        if accepted {
            self.record.update(packet, answer.as_ref().map(|answer| &answer.bytes[..]));
        }
        let sent = answer.map_or(Ok(()), |answer| self.connection.send(&answer));
        sent.err().map(|why| self.end(&why))
    }

    fn message_for_worker(&self, packet: &Packet) -> io::Result<MessageWithFds> {
        let message = ToWorker::Message { id: self.id, bytes: packet.bytes.clone() };
        Ok((message, clones(&packet.fds)?))
    }
}

fn clones(fds: &[OwnedFd]) -> io::Result<Vec<OwnedFd>> {
    fds.iter().map(|fd| fd.as_fd().try_clone_to_owned()).collect()
}

pub(super) fn cannot_pass(error: io::Error) -> SupervisorError {
    SupervisorError::internal("cannot pass a client to the worker", error)
}
