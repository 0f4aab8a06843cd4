//! The control socket: whole messages in, answers out, never waiting. Owns the socket and the message of which only
//! a part has arrived; never knows what a message means.
//!
//! It is served by the supervisor, which outlives the process that handles the messages, or by that process itself
//! when there is no supervisor.
//!
//! Each read asks for the rest of one message only, so file descriptors always belong to the message they came
//! with. Invariant: whatever goes wrong, each received descriptor was found harmless and is in `fds` or closed, or it is
//! among the suspects.

use super::Disconnect;
use super::descriptor::check_harmless;
use super::error::Error;
use super::message::{self, HEADER_BYTES, Header, MAX_FDS, MAX_PAYLOAD};
use crate::ErrorKind;
use rustix::io::Errno;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, recvmsg, sendmsg,
};
use std::io::{IoSlice, IoSliceMut};
use std::mem::{ManuallyDrop, MaybeUninit};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

/// A whole message of a front end, header included.
#[derive(Debug, Default)]
pub struct Packet {
    /// At most 524.
    pub bytes: Vec<u8>,
    /// At most 8.
    pub fds: Vec<OwnedFd>,
}

/// Descriptors that one message can bring, by the kernel's rule.
const SCM_MAX_FD: usize = 253;

/// A whole reply.
#[derive(Debug, Default)]
pub struct Reply {
    /// Header and payload.
    pub bytes: Vec<u8>,
    /// Fd that is sent with it.
    pub fd: Option<OwnedFd>,
}

/// A front end's control socket.
#[derive(Debug)]
pub struct Connection {
    socket: OwnedFd,
    buffer: [u8; HEADER_BYTES + MAX_PAYLOAD],
    /// Bytes of `buffer` that have arrived.
    filled: usize,
    /// Fds that came with the message in `buffer`.
    fds: Vec<OwnedFd>,
    /// Received fds that are neither eventfds nor shared memory, and those that came after one of them: close(2) may never
    /// return for them.
    unclosable: Vec<ManuallyDrop<OwnedFd>>,
}

impl Connection {
    /// Takes over a connected socket and makes it non-blocking.
    ///
    /// # Errors
    /// The system's.
    pub fn new(socket: OwnedFd) -> std::io::Result<Connection> {
        rustix::io::ioctl_fionbio(&socket, true)?;
        Ok(Connection {
            socket,
            buffer: [0; HEADER_BYTES + MAX_PAYLOAD],
            filled: 0,
            fds: Vec::new(),
            unclosable: Vec::new(),
        })
    }

    /// The socket.
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }

    /// The descriptors for which the connection was ended. They may belong to files whose every operation, close
    /// included, waits for the front end for ever. Those that are not taken here stay open until the process ends.
    pub fn take_unclosable(&mut self) -> Vec<OwnedFd> {
        self.unclosable.drain(..).map(ManuallyDrop::into_inner).collect()
    }

    /// Reads on until a message is whole. `None`: there is no more now.
    ///
    /// # Errors
    /// The front end has left, or what it sends cannot be followed.
    pub fn receive(&mut self) -> Result<Option<Packet>, Disconnect> {
        loop {
            let header = self.buffer.first_chunk().filter(|_| self.filled >= HEADER_BYTES);
            let header = header.map(Header::parse).transpose()?;
            let wanted = HEADER_BYTES + header.as_ref().map_or(0, |header| header.size);
            if header.is_some() && self.filled == wanted {
                self.filled = 0;
                let bytes = self.buffer[..wanted].to_vec();
                let mut fds = std::mem::take(&mut self.fds);
                if !message::takes_fds(&bytes) {
                    // Surplus ones are closed.
                    fds.clear();
                }
                return Ok(Some(Packet { bytes, fds }));
            }
            if !self.fill(wanted)? {
                return Ok(None);
            }
        }
    }

    /// Reads at most up to `wanted` bytes of the message. False if nothing is there.
    fn fill(&mut self, wanted: usize) -> Result<bool, Disconnect> {
        // Space for as many as can be sent: the kernel closes those for which there is no space.
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(SCM_MAX_FD))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let mut slices = [IoSliceMut::new(&mut self.buffer[self.filled..wanted])];
        let flags = RecvFlags::DONTWAIT | RecvFlags::CMSG_CLOEXEC;
        let received = match recvmsg(&self.socket, &mut slices, &mut control, flags) {
            Ok(received) => received,
            Err(Errno::AGAIN) => return Ok(false),
            Err(Errno::INTR) => return Ok(true),
            Err(Errno::CONNRESET) => return Err(Disconnect::Left),
            Err(errno) => return Err(Error::io("reading from the front end's socket failed", errno).into()),
        };
        let mut refused = None;
        for message in control.drain() {
            if let RecvAncillaryMessage::ScmRights(fds) = message {
                for fd in fds {
                    // After the first one that is refused the others are not examined.
                    refused = refused.or_else(|| check_harmless(fd.as_fd()).err());
                    match refused {
                        None => self.fds.push(fd),
                        Some(_) => self.unclosable.push(ManuallyDrop::new(fd)),
                    }
                }
            }
        }
        if let Some(error) = refused {
            return Err(error.into());
        }
        if received.flags.contains(ReturnFlags::CTRUNC) || self.fds.len() > MAX_FDS {
            let reason =
                "a message has more than 8 file descriptors, or more than this process may have open";
            return Err(Error::new(ErrorKind::Limit, reason).into());
        }
        match received.bytes {
            0 if self.filled == 0 => Err(Disconnect::Left),
            0 => {
                Err(Error::protocol("the front end closed the connection in the middle of a message").into())
            }
            bytes => {
                self.filled += bytes;
                Ok(true)
            }
        }
    }

    /// Sends an answer. A front end that does not read its answers until the socket is full is disconnected.
    ///
    /// # Errors
    /// The connection has ended.
    pub fn send(&self, answer: &Reply) -> Result<(), Disconnect> {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        let fds: Vec<BorrowedFd<'_>> = answer.fd.iter().map(AsFd::as_fd).collect();
        if !fds.is_empty() {
            control.push(SendAncillaryMessage::ScmRights(&fds));
        }
        let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
        match sendmsg(&self.socket, &[IoSlice::new(&answer.bytes)], &mut control, flags) {
            Ok(sent) if sent == answer.bytes.len() => Ok(()),
            Ok(_) | Err(Errno::AGAIN) => {
                Err(Error::new(ErrorKind::Limit, "the front end does not read its replies").into())
            }
            Err(Errno::PIPE | Errno::CONNRESET) => Err(Disconnect::Left),
            Err(errno) => Err(Error::io("writing to the front end's socket failed", errno).into()),
        }
    }
}
