//! The connections of a disk: at most one VMM, any number of NBD clients, and those that are on their way out.
//!
//! Implements the core's view of request buffers by handing each call to the connection that its token names.
//! Invariant: a connection is dropped only when none of its requests is unfinished.

use super::error::ConnectionEnd;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use spillway_core::{Errno, GuestBuffers, Token};
use spillway_export::{nbd, vhost_user_blk};
use std::os::fd::{BorrowedFd, RawFd};

/// A VMM.
pub struct Vmm {
    /// The supervisor's number for the connection.
    pub id: u64,
    /// The first 16 bits of its tokens.
    pub session: u64,
    pub frontend: vhost_user_blk::Frontend,
    /// Queues with completions to publish, one bit each.
    pub dirty: u64,
    /// Why it is on its way out, once it is.
    pub ended: Option<Box<ConnectionEnd>>,
    /// Watch on the control socket.
    pub watch: Option<u32>,
    /// Watches on the kick eventfds, and those, by queue. The frontend owns the fd until its `Unkick`.
    pub kicks: Vec<Option<(u32, RawFd)>>,
    /// Queues whose driver does not kick.
    pub polled: u64,
    /// When it must have spoken.
    pub deadline_ns: u64,
    /// When it has waited long enough for a read of the base image, while it waits for a stop.
    pub abandon_at_ns: Option<u64>,
}

impl Vmm {
    /// Neither on its way out nor closed on the other side without our having noticed yet.
    pub fn is_present(&self) -> bool {
        self.ended.is_none() && !has_hung_up(self.frontend.fd())
    }
}

/// An NBD client.
pub struct NbdClient {
    /// The supervisor's number for the connection.
    pub id: u64,
    pub connection: nbd::Connection,
    /// It has completions, input or room: look at it in this turn.
    pub active: bool,
    /// Something happened to it in this turn: it may have output, or be done.
    pub touched: bool,
    /// Why it is on its way out, once it is.
    pub ended: Option<Box<ConnectionEnd>>,
    /// The watch on its socket: for which flags, and whether it tells of changes only.
    pub watch: Option<(u32, (i16, bool))>,
    /// Its peer has closed one direction or both: polls say so at once.
    pub hung_up: bool,
    /// When its handshake must be done.
    pub deadline_ns: u64,
}

impl NbdClient {
    /// As [`Vmm::is_present`].
    pub fn is_present(&self) -> bool {
        self.ended.is_none() && !has_hung_up(self.connection.fd())
    }

    /// It is on its way out. The first reason counts.
    #[cold]
    pub fn end(&mut self, why: ConnectionEnd) {
        self.ended.get_or_insert_with(|| Box::new(why));
    }
}

/// All connections.
#[derive(Default)]
pub struct Clients {
    pub vmms: Vec<Vmm>,
    /// By the number in their tokens.
    pub nbd: Vec<Option<NbdClient>>,
}

impl Clients {
    pub fn count(&self) -> usize {
        self.vmms.len() + self.nbd.iter().flatten().count()
    }

    /// Those that are still there on the other side.
    pub fn present(&self) -> usize {
        let vmms = self.vmms.iter().filter(|v| v.is_present()).count();
        vmms + self.nbd.iter().flatten().filter(|c| c.is_present()).count()
    }

    /// Whether some may have answers that they were not told of.
    #[inline]
    pub fn have_answers(&self) -> bool {
        self.vmms.iter().any(|v| v.dirty != 0) || self.nbd.iter().flatten().any(|c| c.touched)
    }

    /// Calls `each` for every piece of memory that `len` bytes of a request's data from `at` on lie in: where it is, and
    /// its length. It stays there until the request is completed.
    pub fn pieces(
        &mut self,
        token: Token,
        at: u32,
        len: u32,
        each: &mut dyn FnMut(*mut u8, usize),
    ) -> Result<(), Errno> {
        if is_vhost(token) {
            return self.vmm(token).ok_or(Errno::FAULT)?.frontend.pieces(token, at, len, each);
        }
        let data = self.nbd_client(token).ok_or(Errno::FAULT)?.connection.data(token, at, len as usize)?;
        each(data.as_mut_ptr(), data.len());
        Ok(())
    }

    #[inline]
    fn vmm(&mut self, token: Token) -> Option<&mut Vmm> {
        self.vmms.iter_mut().find(|v| v.session == token.0 >> 48)
    }

    #[inline]
    fn nbd_client(&mut self, token: Token) -> Option<&mut NbdClient> {
        self.nbd.get_mut(usize::from(nbd::token_connection(token)))?.as_mut()
    }
}

fn has_hung_up(socket: BorrowedFd<'_>) -> bool {
    let mut fds = [PollFd::new(&socket, PollFlags::RDHUP)];
    let now = Timespec { tv_sec: 0, tv_nsec: 0 };
    poll(&mut fds, Some(&now)).is_ok()
        && fds[0].revents().intersects(PollFlags::RDHUP | PollFlags::HUP | PollFlags::ERR)
}

#[inline]
fn is_vhost(token: Token) -> bool {
    (token.0 >> 56) as u8 == vhost_user_blk::TOKEN_TAG
}

impl GuestBuffers for Clients {
    #[inline]
    fn copy_from_guest(&mut self, token: Token, at: u32, to: &mut [u8]) -> Result<(), Errno> {
        if is_vhost(token) {
            self.vmm(token).ok_or(Errno::FAULT)?.frontend.copy_from_guest(token, at, to)
        } else {
            self.nbd_client(token).ok_or(Errno::FAULT)?.connection.copy_from_guest(token, at, to)
        }
    }

    #[inline]
    fn store_from_guest(&mut self, token: Token, at: u32, to: &mut [u8]) -> Result<bool, Errno> {
        if is_vhost(token) {
            self.vmm(token).ok_or(Errno::FAULT)?.frontend.store_from_guest(token, at, to)
        } else {
            self.nbd_client(token).ok_or(Errno::FAULT)?.connection.store_from_guest(token, at, to)
        }
    }

    #[inline]
    fn guest_is_zero(&mut self, token: Token, at: u32, len: u32) -> Result<bool, Errno> {
        if is_vhost(token) {
            self.vmm(token).ok_or(Errno::FAULT)?.frontend.guest_is_zero(token, at, len)
        } else {
            self.nbd_client(token).ok_or(Errno::FAULT)?.connection.guest_is_zero(token, at, len)
        }
    }

    #[inline]
    fn copy_to_guest(&mut self, token: Token, at: u32, from: &[u8]) -> Result<(), Errno> {
        if is_vhost(token) {
            self.vmm(token).ok_or(Errno::FAULT)?.frontend.copy_to_guest(token, at, from)
        } else {
            self.nbd_client(token).ok_or(Errno::FAULT)?.connection.copy_to_guest(token, at, from)
        }
    }

    #[inline]
    fn zero_guest(&mut self, token: Token, at: u32, len: u32) -> Result<(), Errno> {
        if is_vhost(token) {
            self.vmm(token).ok_or(Errno::FAULT)?.frontend.zero_guest(token, at, len)
        } else {
            self.nbd_client(token).ok_or(Errno::FAULT)?.connection.zero_guest(token, at, len)
        }
    }

    #[inline]
    fn complete(&mut self, token: Token, result: Result<(), Errno>) {
        if is_vhost(token) {
            let vmm = self.vmm(token).expect("a VMM stays while its requests are unfinished");
            vmm.frontend.complete(token, result);
            vmm.dirty |= 1 << vhost_user_blk::Frontend::queue_of(token);
        } else {
            let client = self.nbd_client(token).expect("a client stays while its requests are unfinished");
            client.connection.complete(token, result);
            client.active = true;
            client.touched = true;
        }
    }
}
