//! Packets of SEQPACKET sockets, with descriptors, in a runtime that must not block. Owns the sockets.

use rustix::io::Errno;
use rustix::net::sockopt::set_socket_send_buffer_size;
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, SocketAddrUnix, SocketFlags, SocketType, accept_with, bind, recv,
    recvmsg, sendmsg, socket_with,
};
use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::path::Path;
use tokio::io::unix::AsyncFd;

/// Most descriptors with one packet.
const MOST_FDS: usize = 2;
/// Connections that wait to be accepted.
const BACKLOG: i32 = 128;

#[expect(unsafe_code, reason = "the runtime watches the descriptor")]
fn register(socket: OwnedFd) -> io::Result<AsyncFd<OwnedFd>> {
    // SAFETY: the descriptor is the same as long as its owner lives, which the runtime has from now on.
    unsafe { AsyncFd::register(socket) }.map_err(io::Error::from)
}

/// A listener.
pub struct Listener(AsyncFd<OwnedFd>);

/// A connection.
pub struct Connection(AsyncFd<OwnedFd>);

/// Listens at a path, which must not exist.
pub fn listen(path: &Path) -> io::Result<OwnedFd> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)?;
    bind(&socket, &SocketAddrUnix::new(path)?)?;
    rustix::net::listen(&socket, BACKLOG)?;
    Ok(socket)
}

impl Listener {
    /// Accepts from a socket that listens, in this runtime.
    pub fn new(socket: OwnedFd) -> io::Result<Listener> {
        Ok(Listener(register(socket)?))
    }

    /// The next connection.
    pub async fn accept(&self) -> io::Result<Connection> {
        loop {
            let mut ready = self.0.readable().await?;
            match accept_with(self.0.get_ref(), SocketFlags::CLOEXEC | SocketFlags::NONBLOCK) {
                Ok(socket) => return Ok(Connection(register(socket)?)),
                Err(Errno::AGAIN) => ready.clear_ready(),
                Err(e) => return Err(e.into()),
            }
        }
    }
}

impl Connection {
    /// Bounds what was sent and the other side has not read, in bytes as the kernel counts them.
    pub fn bound_unread(&self, bytes: usize) -> io::Result<()> {
        // The kernel doubles it.
        Ok(set_socket_send_buffer_size(self.0.get_ref(), bytes / 2)?)
    }

    /// The next packet, cut off after the buffer. Empty: the other side has gone.
    pub async fn receive<'a>(&self, buffer: &'a mut [u8]) -> io::Result<&'a [u8]> {
        loop {
            let mut ready = self.0.readable().await?;
            match recv(self.0.get_ref(), &mut *buffer, RecvFlags::empty()) {
                Ok((len, _)) => return Ok(&buffer[..len]),
                Err(Errno::AGAIN) => ready.clear_ready(),
                Err(e) => return Err(e.into()),
            }
        }
    }

    /// The next packet with its descriptors. Empty: the other side has gone.
    ///
    /// # Errors
    /// A packet that is longer than the buffer, or has more descriptors than a packet may have.
    pub async fn receive_with_fds<'a>(&self, buffer: &'a mut [u8]) -> io::Result<(&'a [u8], Vec<OwnedFd>)> {
        loop {
            let mut ready = self.0.readable().await?;
            match self.try_receive(buffer) {
                Ok((len, fds)) => return Ok((&buffer[..len], fds)),
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => ready.clear_ready(),
                Err(e) => return Err(e),
            }
        }
    }

    fn try_receive(&self, buffer: &mut [u8]) -> io::Result<(usize, Vec<OwnedFd>)> {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MOST_FDS))];
        let mut ancillary = RecvAncillaryBuffer::new(&mut space);
        let mut whole = [IoSliceMut::new(buffer)];
        let received = recvmsg(self.0.get_ref(), &mut whole, &mut ancillary, RecvFlags::CMSG_CLOEXEC)?;
        let mut fds = Vec::new();
        for message in ancillary.drain() {
            if let RecvAncillaryMessage::ScmRights(rights) = message {
                fds.extend(rights);
            }
        }
        if received.flags.intersects(ReturnFlags::TRUNC | ReturnFlags::CTRUNC) {
            return Err(io::ErrorKind::InvalidData.into());
        }
        Ok((received.bytes, fds))
    }

    /// Sends a packet with descriptors.
    pub async fn send(&self, packet: &[u8], fds: &[BorrowedFd<'_>]) -> io::Result<()> {
        loop {
            let mut ready = self.0.writable().await?;
            match self.try_send(packet, fds) {
                Ok(()) => return Ok(()),
                Err(Errno::AGAIN) => ready.clear_ready(),
                Err(e) => return Err(e.into()),
            }
        }
    }

    fn try_send(&self, packet: &[u8], fds: &[BorrowedFd<'_>]) -> Result<(), Errno> {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MOST_FDS))];
        let mut ancillary = SendAncillaryBuffer::new(&mut space);
        if !fds.is_empty() && !ancillary.push(SendAncillaryMessage::ScmRights(fds)) {
            return Err(Errno::INVAL);
        }
        sendmsg(self.0.get_ref(), &[IoSlice::new(packet)], &mut ancillary, SendFlags::NOSIGNAL).map(drop)
    }
}
