//! A VMM's connection as it outlives the worker: its control socket, and what the next worker must be told to go on
//! with it. Owns the socket, the table of requests in flight and copies of the VMM's fds; never looks at what is in
//! them.
//!
//! Invariant: at most one message is with the worker, and it is kept here until the worker's answer is: whichever
//! worker answers it, it is carried out and answered once.

use crate::channel::{ClientKind, ToWorker};
use crate::worker::{ErrorKind, ReportedError};
use rustix::event::PollFlags;
use spillway_control::SupervisorError;
use spillway_export::vhost_user_blk::{
    Answer, Connection, Disconnect, Error, Packet, Record, inflight_table,
};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

/// Workers that may die with one message in hand.
const MOST_DEATHS: u32 = 50;

/// A message for the worker, with its fds.
pub(super) type Parcel = (ToWorker, Vec<OwnedFd>);

#[derive(Debug)]
pub(super) struct Session {
    id: u64,
    connection: Connection,
    /// For a VMM that lends none.
    table: OwnedFd,
    record: Record,
    /// With the worker.
    asked: Option<Packet>,
    /// Workers that died with it.
    deaths: u32,
    /// Its end of the connection is closed; what it said before may still be here.
    hung_up: bool,
    /// It is on its way out, and the worker, if there is one, knows.
    left: bool,
}

impl Session {
    /// Takes over an accepted connection.
    pub fn new(id: u64, socket: OwnedFd, queues: u16) -> io::Result<Session> {
        Ok(Session {
            id,
            connection: Connection::new(socket)?,
            table: inflight_table(queues)?,
            record: Record::default(),
            asked: None,
            deaths: 0,
            hung_up: false,
            left: false,
        })
    }

    /// What to poll the socket for; `None`: nothing more is expected of it.
    pub fn interest(&self) -> Option<PollFlags> {
        match (self.left, &self.asked) {
            (true, _) => None,
            // A hang-up shows in any case.
            (false, Some(_)) => Some(PollFlags::empty()),
            (false, None) => Some(PollFlags::IN),
        }
    }

    pub fn fd(&self) -> BorrowedFd<'_> {
        self.connection.fd()
    }

    /// Poll says that the VMM has closed its end.
    pub fn hung_up(&mut self) {
        self.hung_up = true;
    }

    /// Whether the VMM has left without the worker knowing: another one must not reach the worker before it does.
    pub fn is_leaving(&self) -> bool {
        self.hung_up && !self.left
    }

    /// Whether the VMM is on its way out, and the worker knows.
    pub fn has_left(&self) -> bool {
        self.left
    }

    /// Tells a worker all about the session.
    pub fn introduce(&self) -> io::Result<Vec<Parcel>> {
        let client = ToWorker::Client { id: self.id, kind: ClientKind::VhostUser };
        let fds = vec![self.connection.fd().try_clone_to_owned()?, self.table.try_clone()?];
        let mut parcels = vec![(client, fds)];
        for packet in self.record.packets() {
            let replay = ToWorker::Replay { id: self.id, bytes: packet.bytes.clone() };
            parcels.push((replay, clones(&packet.fds)?));
        }
        if let Some(packet) = &self.asked {
            parcels.push(self.question(packet)?);
        }
        Ok(parcels)
    }

    /// The next message of the VMM, to be given to the worker.
    pub fn next(&mut self) -> Option<Parcel> {
        if self.asked.is_some() || self.left {
            return None;
        }
        match self.connection.receive() {
            Ok(Some(packet)) => match self.question(&packet) {
                Ok(question) => {
                    self.asked = Some(packet);
                    self.deaths = 0;
                    Some(question)
                }
                Err(e) => {
                    let reason = "its message cannot be passed on to the worker";
                    Some(self.leave(&Error::from_io(reason, &e).into()))
                }
            },
            Ok(None) => None,
            Err(why) => Some(self.leave(&why)),
        }
    }

    /// Descriptors that may never be closed: the VMM that sent them is on its way out.
    pub fn take_suspects(&mut self) -> Vec<OwnedFd> {
        self.connection.take_suspects()
    }

    /// A worker has died. False: so many have with the same message in hand that it must be why, or the VMM is on its
    /// way out: it is let go.
    pub fn survives(&mut self) -> bool {
        self.deaths += u32::from(self.asked.is_some());
        !self.left && self.deaths < MOST_DEATHS
    }

    /// The VMM is gone, or is to be let go: what to tell the worker.
    pub fn leave(&mut self, why: &Disconnect) -> Parcel {
        self.left = true;
        let error = match why {
            Disconnect::Left => None,
            why => Some(ReportedError::new(ErrorKind::Client, why.to_string())),
        };
        (ToWorker::Left { id: self.id, error }, Vec::new())
    }

    /// The worker has answered the message that it had: so does the VMM get its answer.
    pub fn answered(&mut self, accepted: bool, answer: Option<Answer>) -> Option<Parcel> {
        let packet = self.asked.take()?;
        if accepted {
            self.record.note(packet, answer.as_ref().map(|answer| &answer.bytes[..]));
        }
        let sent = answer.map_or(Ok(()), |answer| self.connection.send(&answer));
        sent.err().map(|why| self.leave(&why))
    }

    fn question(&self, packet: &Packet) -> io::Result<Parcel> {
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
