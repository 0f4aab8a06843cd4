//! The control socket: whole messages in, replies out, never waiting. Owns the socket and the message that is
//! half there; never knows what a message means.
//!
//! Each read asks for the rest of one message only, so file descriptors always belong to the message they came
//! with. Invariant: a descriptor that was received is in `fds` or closed, whatever else goes wrong.

use super::Disconnect;
use super::message::{HEADER_BYTES, Header, MAX_FDS, MAX_PAYLOAD, reply_header};
use rustix::io::Errno;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, recvmsg, sendmsg,
};
use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

pub(super) struct Connection {
    socket: OwnedFd,
    buffer: [u8; HEADER_BYTES + MAX_PAYLOAD],
    filled: usize,
    fds: Vec<OwnedFd>,
}

impl Connection {
    pub(super) fn new(socket: OwnedFd) -> std::io::Result<Connection> {
        rustix::io::ioctl_fionbio(&socket, true)?;
        Ok(Connection { socket, buffer: [0; HEADER_BYTES + MAX_PAYLOAD], filled: 0, fds: Vec::new() })
    }

    pub(super) fn fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }

    /// Reads on until a message is whole, and returns it with its descriptors. `None`: there is no more now.
    pub(super) fn receive(&mut self) -> Result<Option<(Header, Vec<OwnedFd>)>, Disconnect> {
        loop {
            let header = self.buffer.first_chunk().filter(|_| self.filled >= HEADER_BYTES);
            let header = header.map(Header::parse).transpose().map_err(Disconnect::Fault)?;
            let wanted = HEADER_BYTES + header.map_or(0, |header| header.size);
            if let Some(header) = header
                && self.filled == wanted
            {
                self.filled = 0;
                return Ok(Some((header, std::mem::take(&mut self.fds))));
            }
            if !self.fill(wanted)? {
                return Ok(None);
            }
        }
    }

    /// The payload of the message that [`Connection::receive`] returned last.
    pub(super) fn payload(&self, header: &Header) -> &[u8] {
        &self.buffer[HEADER_BYTES..HEADER_BYTES + header.size]
    }

    /// Reads at most up to `wanted` bytes of the message. False if nothing is there.
    fn fill(&mut self, wanted: usize) -> Result<bool, Disconnect> {
        // One more than is allowed, so that too many can be told from just enough.
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_FDS + 1))];
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
        for message in control.drain() {
            if let RecvAncillaryMessage::ScmRights(fds) = message {
                self.fds.extend(fds);
            }
        }
        if received.flags.contains(ReturnFlags::CTRUNC) || self.fds.len() > MAX_FDS {
            return Err(Disconnect::Fault(format!("a message with more than {MAX_FDS} file descriptors")));
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

    /// Sends a reply. A front end that lets its replies pile up until the socket is full is let go.
    pub(super) fn reply(
        &self,
        request: u32,
        payload: &[u8],
        fd: Option<BorrowedFd<'_>>,
    ) -> Result<(), Disconnect> {
        let mut bytes = reply_header(request, payload.len());
        bytes.extend_from_slice(payload);
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        let fds: Vec<BorrowedFd<'_>> = fd.into_iter().collect();
        if !fds.is_empty() {
            control.push(SendAncillaryMessage::ScmRights(&fds));
        }
        let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
        match sendmsg(&self.socket, &[IoSlice::new(&bytes)], &mut control, flags) {
            Ok(sent) if sent == bytes.len() => Ok(()),
            Ok(_) | Err(Errno::AGAIN) => {
                Err(Disconnect::Fault("the front end does not read its replies".into()))
            }
            Err(Errno::PIPE | Errno::CONNRESET) => Err(Disconnect::Left),
            Err(e) => Err(Disconnect::Fault(format!("writing to the front end's socket: {e}"))),
        }
    }
}
