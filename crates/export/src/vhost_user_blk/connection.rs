//! The control socket: whole messages in, answers out, never waiting. Owns the socket and the message that is
//! half there; never knows what a message means.
//!
//! It is served by the supervisor, which outlives the process that handles the messages, or by that process itself
//! when there is no supervisor.
//!
//! Each read asks for the rest of one message only, so file descriptors always belong to the message they came
//! with. Invariant: a descriptor that was received is known for a harmless one and in `fds` or closed, or it is among the
//! suspects, whatever else goes wrong.

use super::Disconnect;
use super::descriptor::is_harmless;
use super::message::{self, HEADER_BYTES, Header, MAX_FDS, MAX_PAYLOAD};
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
pub struct Answer {
    /// Header and payload.
    pub bytes: Vec<u8>,
    /// Goes with it.
    pub fd: Option<OwnedFd>,
}

/// A front end's control socket.
#[derive(Debug)]
pub struct Connection {
    socket: OwnedFd,
    buffer: [u8; HEADER_BYTES + MAX_PAYLOAD],
    filled: usize,
    fds: Vec<OwnedFd>,
    suspects: Vec<ManuallyDrop<OwnedFd>>,
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
            suspects: Vec::new(),
        })
    }

    /// The socket.
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }

    /// The descriptors for which the front end was let go: they may be of files whose every operation waits for the front
    /// end for ever, their closing too. What is not taken here stays open until the process ends.
    pub fn take_suspects(&mut self) -> Vec<OwnedFd> {
        self.suspects.drain(..).map(ManuallyDrop::into_inner).collect()
    }

    /// Reads on until a message is whole. `None`: there is no more now.
    ///
    /// # Errors
    /// The front end has left, or what it sends cannot be followed.
    pub fn receive(&mut self) -> Result<Option<Packet>, Disconnect> {
        loop {
            let header = self.buffer.first_chunk().filter(|_| self.filled >= HEADER_BYTES);
            let header = header.map(Header::parse).transpose().map_err(Disconnect::Fault)?;
            let wanted = HEADER_BYTES + header.as_ref().map_or(0, |header| header.size);
            if header.is_some() && self.filled == wanted {
                self.filled = 0;
                let bytes = self.buffer[..wanted].to_vec();
                let mut fds = std::mem::take(&mut self.fds);
                if !message::takes_fds(&bytes) {
                    // Surplus ones: nobody is to keep them.
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
        // As many as can be sent: what there is no room for the kernel closes, here and now.
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(SCM_MAX_FD))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let mut slices = [IoSliceMut::new(&mut self.buffer[self.filled..wanted])];
        let flags = RecvFlags::DONTWAIT | RecvFlags::CMSG_CLOEXEC;
        let received = match recvmsg(&self.socket, &mut slices, &mut control, flags) {
            Ok(received) => received,
            Err(Errno::AGAIN) => return Ok(false),
            Err(Errno::INTR) => return Ok(true),
            Err(Errno::CONNRESET) => return Err(Disconnect::Left),
            Err(e) => return Err(Disconnect::Fault(format!("reading from the front end's socket: {e}"))),
        };
        let mut refused = None;
        for message in control.drain() {
            if let RecvAncillaryMessage::ScmRights(fds) = message {
                for fd in fds {
                    // After the first one the others are not asked for.
                    let why = if refused.is_some() { None } else { is_harmless(fd.as_fd()).err() };
                    refused = refused.or(why);
                    match refused {
                        None => self.fds.push(fd),
                        Some(_) => self.suspects.push(ManuallyDrop::new(fd)),
                    }
                }
            }
        }
        if let Some(why) = refused {
            return Err(Disconnect::Fault(why));
        }
        if received.flags.contains(ReturnFlags::CTRUNC) || self.fds.len() > MAX_FDS {
            return Err(Disconnect::Fault(format!(
                "a message with more than {MAX_FDS} file descriptors, or more than this process may have"
            )));
        }
        match received.bytes {
            0 if self.filled == 0 => Err(Disconnect::Left),
            0 => Err(Disconnect::Fault(
                "the front end closed the connection in the middle of a message".into(),
            )),
            bytes => {
                self.filled += bytes;
                Ok(true)
            }
        }
    }

    /// Sends an answer. A front end that lets its answers pile up until the socket is full is let go.
    ///
    /// # Errors
    /// The connection has ended.
    pub fn send(&self, answer: &Answer) -> Result<(), Disconnect> {
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
                Err(Disconnect::Fault("the front end does not read its replies".into()))
            }
            Err(Errno::PIPE | Errno::CONNRESET) => Err(Disconnect::Left),
            Err(e) => Err(Disconnect::Fault(format!("writing to the front end's socket: {e}"))),
        }
    }
}
