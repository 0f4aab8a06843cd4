//! One client: its socket, its input and output, and which phase it is in. The only file here that reads from a
//! socket; it never waits for one.
//!
//! Invariant: a connection that has ended reads nothing, hands out nothing, and returns the same reason at every call.

use super::buffer::{Budget, Pool};
use super::error::Error;
use super::handshake::{Handshake, Progress};
use super::input::Input;
use super::output::Output;
use super::protocol::{MAX_STRING_BYTES, MIN_BLOCK_BYTES};
use super::reply;
use super::transmission::{BlockStatusId, ExtentKind, Transmission, Work};
use crate::ErrorKind;
use rustix::fd::{AsFd, BorrowedFd, OwnedFd};
use rustix::fs::{OFlags, fcntl_getfl, fcntl_setfl};
use rustix::io::Errno as SystemErrno;
use rustix::net::{RecvFlags, recv, sockopt};
use spillway_core::{Errno, GuestBuffers, Token, copy_past_caches, is_zero};
use std::io::IoSliceMut;
use std::time::Duration;

/// How long a client may take to choose its export.
pub const HANDSHAKE_DEADLINE: Duration = Duration::from_secs(10);

/// The send buffer that the socket is asked for, so that large reads need few turns.
const SEND_BUFFER_BYTES: usize = 2 << 20;
/// The most that one turn reads from one client, so that the others get theirs.
const TURN_BYTES: usize = 1 << 20;
/// The bytes of a turn that each request counts for.
const TURN_REQUEST_BYTES: usize = 1 << 10;

/// The disk as it shows itself to NBD clients. Flush, FUA, trim, write-zeroes, fast zero and multi-conn are always
/// on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ExportInfo {
    /// Size of the disk; a multiple of 512.
    pub size_bytes: u64,
    /// Name of the export, at most 4096 bytes, no NUL. The default export, `""`, is served under any name.
    pub name: String,
    /// A description for people, at most 4096 bytes, no NUL; may be empty.
    pub description: String,
}

impl ExportInfo {
    /// Whether `name`, as a client sends it, means this export.
    pub(super) fn has_name(&self, name: &[u8]) -> bool {
        name.is_empty() || name == self.name.as_bytes()
    }
}

/// Why a connection has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Disconnect {
    /// The client sent NBD_CMD_DISC or NBD_OPT_ABORT, and has all its replies.
    #[error("the NBD client disconnected")]
    Finished,
    /// The client closed the socket without that.
    #[error("the NBD client closed its connection")]
    Closed,
    /// This side ends it because of an error.
    #[error(transparent)]
    Fault(#[from] Error),
}

impl Disconnect {
    /// Whether this is how clients usually leave, and not worth a line in a log.
    pub fn is_ordinary(&self) -> bool {
        matches!(self, Disconnect::Finished | Disconnect::Closed)
    }
}

enum Phase {
    Handshake(Handshake),
    /// The client has sent NBD_OPT_ABORT: only its reply is still to be sent.
    Aborting,
    Transmission(Box<Transmission>),
}

/// One NBD client.
pub struct Connection {
    socket: OwnedFd,
    info: ExportInfo,
    /// The connection's number in its tokens.
    id: u16,
    phase: Phase,
    input: Input,
    output: Output,
    pool: Pool,
    disk_full: bool,
    /// The last receive filled the buffers that it had: there may be more.
    more_expected: bool,
    /// Bytes that may still be read in this turn.
    turn_bytes: usize,
    /// The client has closed its side. Input that is buffered is still carried out.
    end_of_input: bool,
    ended: Option<Disconnect>,
}

impl Connection {
    /// Takes over a connected stream socket, makes it non-blocking and queues the greeting. `id` is the
    /// connection's number in its tokens; all connections of the disk share `budget`.
    ///
    /// # Errors
    /// The size of the export is no multiple of 512, its name or its description is too long or has a NUL, or a system
    /// call failed.
    pub fn new(socket: OwnedFd, info: ExportInfo, id: u16, budget: &Budget) -> Result<Connection, Error> {
        if !info.size_bytes.is_multiple_of(u64::from(MIN_BLOCK_BYTES)) {
            let reason = "the size of the NBD export is not a multiple of 512 bytes";
            return Err(Error::new(ErrorKind::InvalidExport, reason).found(info.size_bytes));
        }
        let is_invalid = |text: &String| text.len() > MAX_STRING_BYTES || text.contains('\0');
        if [&info.name, &info.description].into_iter().any(is_invalid) {
            let reason = "the name or the description of the NBD export has a NUL, or more than 4096 bytes";
            return Err(Error::new(ErrorKind::InvalidExport, reason));
        }
        fcntl_getfl(&socket)
            .and_then(|flags| fcntl_setfl(&socket, flags | OFlags::NONBLOCK))
            .map_err(|errno| Error::io("the client's socket cannot be made non-blocking", errno))?;
        // Best effort: past net.core.wmem_max only with privileges; Nagle's algorithm only with TCP.
        if sockopt::set_socket_send_buffer_size_force(&socket, SEND_BUFFER_BYTES).is_err() {
            let _ = sockopt::set_socket_send_buffer_size(&socket, SEND_BUFFER_BYTES);
        }
        let _ = sockopt::set_tcp_nodelay(&socket, true);
        let mut output = Output::new();
        reply::greeting(&mut output);
        Ok(Connection {
            socket,
            info,
            id,
            phase: Phase::Handshake(Handshake::new()),
            input: Input::new(),
            output,
            pool: Pool::new(budget),
            disk_full: false,
            more_expected: false,
            turn_bytes: 0,
            end_of_input: false,
            ended: None,
        })
    }

    /// The socket, to be polled.
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }

    /// To be called when the socket has input, or may have: receives until there is no more, or enough to work on.
    /// [`Connection::next`] returns the work.
    pub fn on_readable(&mut self) -> Result<(), Disconnect> {
        self.check()?;
        self.turn_bytes = TURN_BYTES;
        if self.wants_read() {
            self.receive();
        }
        self.check()
    }

    /// The socket takes output again.
    pub fn on_writable(&mut self) -> Result<(), Disconnect> {
        self.flush_output()
    }

    /// To be called when the peer has closed both directions (POLLHUP) while the connection does not want to read: nobody
    /// waits for replies. Ends the connection, unless the client had disconnected before: then its commands are still
    /// carried out. After an `Ok` it need not be polled for again.
    pub fn on_hangup(&mut self) -> Result<(), Disconnect> {
        if !self.is_disconnecting() && !self.wants_read() {
            self.end(Disconnect::Closed);
        }
        self.check()
    }

    /// Whether the client has sent NBD_CMD_DISC or NBD_OPT_ABORT: its commands are still carried out.
    pub fn is_disconnecting(&self) -> bool {
        match &self.phase {
            Phase::Transmission(transmission) => transmission.is_disconnecting(),
            Phase::Aborting => true,
            Phase::Handshake(_) => false,
        }
    }

    /// The next thing to be done for this client. `None`: it waits for input, for completions, or for space.
    #[allow(clippy::should_implement_trait, reason = "an iterator that goes on after None would mislead")]
    pub fn next(&mut self) -> Option<Work> {
        while self.ended.is_none() {
            let outcome = match &mut self.phase {
                Phase::Handshake(handshake) => {
                    match handshake.advance(&mut self.input, &mut self.output, &self.info) {
                        Ok(Progress::Transmission(agreed)) => {
                            let transmission = Transmission::new(agreed, self.id, self.disk_full);
                            self.phase = Phase::Transmission(Box::new(transmission));
                            continue;
                        }
                        Ok(Progress::Aborted) => {
                            self.phase = Phase::Aborting;
                            return None;
                        }
                        Ok(Progress::NeedsInput) => Ok(None),
                        Err(reason) => Err(reason),
                    }
                }
                Phase::Aborting => return None,
                Phase::Transmission(transmission) => {
                    transmission.next(&mut self.input, &mut self.output, &mut self.pool)
                }
            };
            match outcome {
                Ok(Some(work)) => {
                    self.pool.charge_request();
                    self.turn_bytes = self.turn_bytes.saturating_sub(TURN_REQUEST_BYTES);
                    return Some(work);
                }
                Ok(None) => {
                    if !self.wants_input() {
                        return None;
                    }
                    if self.end_of_input {
                        self.end(Disconnect::Closed);
                    } else if self.more_expected && self.turn_bytes > 0 {
                        self.receive();
                    } else {
                        return None;
                    }
                }
                Err(reason) => self.end(reason),
            }
        }
        None
    }

    /// Whether the reactor is to wait until output is possible. Also true when output that was sent has made further work
    /// possible for [`Connection::next`]: then that wait ends at once.
    pub fn wants_write(&self) -> bool {
        self.ended.is_none()
            && (!self.output.is_empty()
                || match &self.phase {
                    Phase::Handshake(handshake) => handshake.waits_for_output(),
                    Phase::Aborting => false,
                    Phase::Transmission(transmission) => transmission.can_go_on(&self.output, &self.pool),
                })
    }

    /// Whether replies wait to be sent. For a reactor that takes no more work, this takes the place of
    /// [`Connection::wants_write`].
    pub fn has_output(&self) -> bool {
        self.ended.is_none() && !self.output.is_empty()
    }

    /// Whether the reactor is to wait for input. False while the connection has as much as it may hold: completions and
    /// sent output change that.
    pub fn wants_read(&self) -> bool {
        self.ended.is_none() && !self.end_of_input && self.wants_input()
    }

    fn wants_input(&self) -> bool {
        match &self.phase {
            Phase::Handshake(handshake) => !handshake.waits_for_output(),
            Phase::Aborting => false,
            Phase::Transmission(transmission) => transmission.wants_input(&self.input),
        }
    }

    /// Sends queued output until the socket takes no more. Called once per turn, after the completions, so that the
    /// replies of a turn are sent together.
    pub fn flush_output(&mut self) -> Result<(), Disconnect> {
        self.check()?;
        if let Err(error) = self.output.send(self.socket.as_fd(), &mut self.pool) {
            match error {
                // Its commands are carried out, though it does not wait for the replies.
                SystemErrno::PIPE | SystemErrno::CONNRESET if self.is_disconnecting() => {
                    self.output.clear(&mut self.pool);
                }
                SystemErrno::PIPE | SystemErrno::CONNRESET => self.end(Disconnect::Closed),
                errno => self.end(socket_failed(errno)),
            }
        }
        let done = match &self.phase {
            Phase::Transmission(transmission) => transmission.is_done(),
            Phase::Handshake(_) | Phase::Aborting => true,
        };
        if self.is_disconnecting() && done && self.output.is_empty() && self.ended.is_none() {
            self.end(Disconnect::Finished);
        }
        self.check()
    }

    /// How long after its creation the connection has to be ended if its handshake is not done by then. `None`: it is
    /// done.
    pub fn handshake_deadline(&self) -> Option<Duration> {
        match self.phase {
            Phase::Handshake(_) | Phase::Aborting => Some(HANDSHAKE_DEADLINE),
            Phase::Transmission(_) => None,
        }
    }

    /// Requests handed out by [`Connection::next`] and not completed.
    pub fn unfinished(&self) -> usize {
        match &self.phase {
            Phase::Transmission(transmission) => transmission.unfinished(),
            Phase::Handshake(_) | Phase::Aborting => 0,
        }
    }

    /// To be called when the disk becomes full, so that writes wait, and when it no longer is: see *Memory and
    /// back-pressure* in the module's documentation. [`Connection::next`] may have more after this.
    pub fn set_disk_full(&mut self, full: bool) {
        self.disk_full = full;
        if let Phase::Transmission(transmission) = &mut self.phase {
            transmission.set_disk_full(full);
        }
    }

    /// Frees the buffers that are kept for later requests: for a connection that has been idle for a while. The input
    /// buffer of 64 KiB stays.
    pub fn release_idle_memory(&mut self) {
        self.pool.clear();
    }

    /// Answers a block status request. Extents of (bytes, kind) follow one another from the request's offset on and may
    /// reach past its end; they need not reach it.
    pub fn answer_block_status(
        &mut self,
        id: BlockStatusId,
        extents: impl Iterator<Item = (u64, ExtentKind)>,
    ) {
        if let Phase::Transmission(transmission) = &mut self.phase {
            transmission.answer_block_status(id, extents, &mut self.output, &mut self.pool);
        }
    }

    /// The memory of a read or write request, to be used in place: bytes `at..at + len` of its data.
    pub fn data(&mut self, token: Token, at: u32, len: usize) -> Result<&mut [u8], Errno> {
        match &mut self.phase {
            Phase::Transmission(transmission) => transmission.data(token, at, len).ok_or(Errno::FAULT),
            Phase::Handshake(_) | Phase::Aborting => Err(Errno::FAULT),
        }
    }

    fn check(&self) -> Result<(), Disconnect> {
        match &self.ended {
            Some(reason) => Err(*reason),
            None => Ok(()),
        }
    }

    fn end(&mut self, reason: Disconnect) {
        self.ended = Some(reason);
    }

    /// Receives once, into the payload that is expected and the input buffer behind it.
    fn receive(&mut self) {
        loop {
            let payload = match &mut self.phase {
                Phase::Transmission(transmission) => transmission.payload_space(&mut self.input),
                Phase::Handshake(_) | Phase::Aborting => None,
            };
            let payload_len = payload.as_ref().map_or(0, |space| space.len());
            let space = self.input.space();
            let asked = payload_len + space.len();
            if asked == 0 {
                return;
            }
            let result = match payload {
                Some(payload) if payload_len > 0 => {
                    let mut slices = [IoSliceMut::new(payload), IoSliceMut::new(space)];
                    rustix::io::readv(&self.socket, &mut slices)
                }
                _ => recv(&self.socket, space, RecvFlags::DONTWAIT).map(|(_, n)| n),
            };
            match result {
                Ok(0) => {
                    self.end_of_input = true;
                    self.more_expected = false;
                    return;
                }
                Ok(n) => {
                    self.more_expected = n == asked;
                    self.turn_bytes = self.turn_bytes.saturating_sub(n);
                    let direct = n.min(payload_len);
                    if let Phase::Transmission(transmission) = &mut self.phase {
                        transmission.payload_received(direct);
                    }
                    self.input.received(n - direct);
                    return;
                }
                Err(SystemErrno::INTR) => {}
                Err(SystemErrno::AGAIN) => {
                    self.more_expected = false;
                    return;
                }
                Err(SystemErrno::CONNRESET) => return self.end(Disconnect::Closed),
                Err(errno) => return self.end(socket_failed(errno)),
            }
        }
    }
}

#[cold]
fn socket_failed(errno: SystemErrno) -> Disconnect {
    Error::io("the client's socket failed", errno).into()
}

impl GuestBuffers for Connection {
    #[inline]
    fn copy_from_guest(&mut self, token: Token, at: u32, to: &mut [u8]) -> Result<(), Errno> {
        to.copy_from_slice(self.data(token, at, to.len())?);
        Ok(())
    }

    #[inline]
    fn store_from_guest(&mut self, token: Token, at: u32, to: &mut [u8]) -> Result<bool, Errno> {
        let from = self.data(token, at, to.len())?;
        // SAFETY: `from` is a slice of our own, as long as `to`.
        Ok(unsafe { copy_past_caches(from.as_ptr(), to) })
    }

    #[inline]
    fn guest_is_zero(&mut self, token: Token, at: u32, len: u32) -> Result<bool, Errno> {
        Ok(is_zero(self.data(token, at, len as usize)?))
    }

    #[inline]
    fn copy_to_guest(&mut self, token: Token, at: u32, from: &[u8]) -> Result<(), Errno> {
        self.data(token, at, from.len())?.copy_from_slice(from);
        Ok(())
    }

    #[inline]
    fn zero_guest(&mut self, token: Token, at: u32, len: u32) -> Result<(), Errno> {
        self.data(token, at, len as usize)?.fill(0);
        Ok(())
    }

    #[inline]
    fn complete(&mut self, token: Token, result: Result<(), Errno>) {
        if let Phase::Transmission(transmission) = &mut self.phase {
            let outcome = transmission.complete(token, result, &mut self.output, &mut self.pool);
            if let Err(reason) = outcome {
                self.end(reason);
            }
        }
    }
}
