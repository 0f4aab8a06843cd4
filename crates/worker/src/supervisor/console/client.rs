//! A client of the console hub: its connection, and how far it has read. Never blocks.
//!
//! Invariant: a client has no queue, only the buffer of its socket. Its position in the history says what is sent to it next;
//! a client that falls behind the oldest kept byte loses what is between, and is told how much. What follows *begin* is the beginning of a
//! line, also if the first output of the VMM is not kept any more.

use super::history::History;
use rustix::event::PollFlags;
use rustix::io::Errno;
use rustix::net::{RecvFlags, SendFlags, Shutdown};
use spillway_control::console::{FromHub, Keyboard, MAX_DATA_BYTES, MAX_PACKET_BYTES, ToHub};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

/// Most packets that a client is sent, and that are read from it, before others have their turn.
const MAX_PACKETS: usize = 16;

/// Where the output of the newest VMM begins.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Beginning {
    /// Position of its first byte.
    pub at: u64,
    /// Number of the VMM, counted from 1; 0: there was none.
    pub number: u64,
}

/// A client.
#[derive(Debug)]
pub(super) struct Client {
    socket: OwnedFd,
    /// Position of the next byte to send.
    at: u64,
    /// Number of the newest VMM whose beginning was sent.
    begun: u64,
    /// State of the keyboard that was sent last.
    keyboard: Option<Keyboard>,
    /// Whether the other end is closed.
    pub has_left: bool,
}

/// What was received from a client.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Received {
    Input(Vec<u8>),
    Take,
}

impl Client {
    /// A client that is sent all that is kept. The socket does not block.
    pub fn new(socket: OwnedFd, history: &History) -> Client {
        Client { socket, at: history.start(), begun: 0, keyboard: None, has_left: false }
    }

    pub fn fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }

    /// What to wait for.
    pub fn interest(
        &self,
        history: &History,
        beginning: Beginning,
        keyboard: Keyboard,
        reads: bool,
    ) -> PollFlags {
        let mut interest = if reads { PollFlags::IN } else { PollFlags::empty() };
        interest.set(PollFlags::OUT, self.next(history, beginning, keyboard).is_some());
        interest
    }

    /// The next message to send, if there is one.
    fn next<'a>(
        &self,
        history: &'a History,
        beginning: Beginning,
        keyboard: Keyboard,
    ) -> Option<FromHub<'a>> {
        let must_begin = self.begun != beginning.number;
        if self.has_left {
            None
        } else if self.keyboard != Some(keyboard) {
            Some(FromHub::Keyboard(keyboard))
        } else if self.at < history.start() {
            Some(FromHub::Lost(history.start() - self.at))
        } else if must_begin
            && (self.at == beginning.at || self.at > beginning.at && history.ends_line(self.at))
        {
            Some(FromHub::Begin)
        } else {
            let mut output = history.from(self.at, MAX_DATA_BYTES);
            if must_begin && self.at < beginning.at {
                output =
                    &output[..output.len().min((beginning.at - self.at).min(MAX_DATA_BYTES as u64) as usize)];
            } else if must_begin {
                // The rest of a line whose beginning is not kept.
                output = output.split_inclusive(|byte| *byte == b'\n').next().unwrap_or_default();
            }
            (!output.is_empty()).then_some(FromHub::Output(output))
        }
    }

    /// Sends what the socket has space for. A client to which nothing can be sent is closed: it gets no more, and what it
    /// has sent is still received.
    pub fn send(&mut self, history: &History, beginning: Beginning, keyboard: Keyboard) {
        for _ in 0..MAX_PACKETS {
            let Some(message) = self.next(history, beginning, keyboard) else { return };
            match rustix::net::send(&self.socket, &message.packet(), FLAGS) {
                Ok(_) => {}
                Err(Errno::AGAIN | Errno::INTR) => return,
                Err(_) => {
                    self.has_left = true;
                    let _ = rustix::net::shutdown(&self.socket, Shutdown::Both);
                }
            }
            match message {
                FromHub::Keyboard(keyboard) => self.keyboard = Some(keyboard),
                FromHub::Lost(count) => self.at += count,
                FromHub::Begin => self.begun = beginning.number,
                FromHub::Output(output) => self.at += output.len() as u64,
                FromHub::Full => {}
            }
        }
    }

    /// Receives the next message, if there is one. An error: the connection has ended, or has to.
    pub fn receive(&self) -> Result<Option<Received>, Closed> {
        let mut buffer = [0; MAX_PACKET_BYTES + 1];
        let length = match rustix::net::recv(&self.socket, &mut buffer, RecvFlags::DONTWAIT) {
            Ok((length, _)) => length,
            // One that has left and had not read everything: what it has sent can still be received.
            Err(Errno::AGAIN | Errno::INTR | Errno::CONNRESET) => return Ok(None),
            Err(_) => return Err(Closed),
        };
        // A longer packet is cut to the buffer's length, which no message has.
        match buffer.get(..length).and_then(ToHub::parse) {
            Some(ToHub::Input(keys)) => Ok(Some(Received::Input(keys.to_vec()))),
            Some(ToHub::Take) => Ok(Some(Received::Take)),
            None => Err(Closed),
        }
    }
}

/// The connection has ended.
#[derive(Debug)]
pub(super) struct Closed;

const FLAGS: SendFlags = SendFlags::NOSIGNAL.union(SendFlags::DONTWAIT);

/// Tells a client that there are too many, and closes its connection.
pub(super) fn refuse(socket: OwnedFd) {
    let _ = rustix::net::send(&socket, &FromHub::Full.packet(), FLAGS);
}
