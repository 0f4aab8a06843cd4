//! One client: its socket, its input and output, and which phase it is in. The only file here that reads from a
//! socket; it never waits for one.
//!
//! Invariant: once a connection has ended it reads nothing, hands out nothing and says why at every turn.

use super::buffer::{Budget, Pool};
use super::handshake::{Handshake, Progress};
use super::input::Input;
use super::output::Output;
use super::protocol::MIN_BLOCK_BYTES;
use super::reply;
use super::transmission::{BlockStatusId, ExtentKind, Transmission, Work};
use rustix::fd::{AsFd, BorrowedFd, OwnedFd};
use rustix::fs::{OFlags, fcntl_getfl, fcntl_setfl};
use rustix::io::Errno as SystemErrno;
use rustix::net::{RecvFlags, recv, sockopt};
use spillway_core::{Errno, GuestBuffers, Token, copy_past_caches, is_zero};
use std::fmt;
use std::io::{self, IoSliceMut};
use std::time::Duration;

/// How long a client may take to choose its export.
pub const HANDSHAKE_DEADLINE: Duration = Duration::from_secs(10);

/// What the socket is asked to hold of unsent replies, so that large reads need few turns.
const SEND_BUFFER_BYTES: usize = 2 << 20;
/// What one turn reads from one client at most, so that others have their turn.
const TURN_BYTES: usize = 1 << 20;
/// What a request without data counts for in that.
const TURN_REQUEST_BYTES: usize = 1 << 10;

/// The disk as it shows itself to NBD clients. Flush, FUA, trim, write-zeroes, fast zero and multi-conn are always
/// on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ExportInfo {
    /// Size of the disk; a multiple of 512.
    pub size_bytes: u64,
    /// Name of the export, at most 4096 bytes, no NUL. The default export, `""`, is served under any name.
    pub name: String,
    /// For people, at most 4096 bytes, no NUL; may be empty.
    pub description: String,
}

impl ExportInfo {
    /// Whether a client means this export by `name`.
    pub(super) fn is_called(&self, name: &[u8]) -> bool {
        name.is_empty() || name == self.name.as_bytes()
    }
}

/// Why a connection has ended.
#[derive(Debug)]
pub enum Disconnect {
    /// The client took its leave, and has all its answers.
    Finished,
    /// The client closed the socket without a word.
    Closed,
    /// The client broke the protocol: how.
    Protocol(&'static str),
    /// The socket failed.
    Socket(io::Error),
    /// A read failed when its reply had begun, which only the end of the connection can tell.
    LateError,
}

impl Disconnect {
    /// Whether this is how clients leave, and not worth a line in a log.
    pub fn is_ordinary(&self) -> bool {
        matches!(self, Disconnect::Finished | Disconnect::Closed)
    }

    fn again(&self) -> Disconnect {
        match self {
            Disconnect::Finished => Disconnect::Finished,
            Disconnect::Closed => Disconnect::Closed,
            Disconnect::Protocol(what) => Disconnect::Protocol(what),
            Disconnect::LateError => Disconnect::LateError,
            Disconnect::Socket(error) => Disconnect::Socket(match error.raw_os_error() {
                Some(code) => io::Error::from_raw_os_error(code),
                None => error.kind().into(),
            }),
        }
    }
}

impl fmt::Display for Disconnect {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Disconnect::Finished => f.write_str("the NBD client disconnected"),
            Disconnect::Closed => f.write_str("the NBD client closed its connection"),
            Disconnect::Protocol(what) => write!(f, "the NBD client broke the protocol: {what}"),
            Disconnect::Socket(error) => write!(f, "the NBD client's socket failed: {error}"),
            Disconnect::LateError => f.write_str(
                "a read failed when the first part of it was sent, and the NBD client did not agree on \
                 structured replies, which could have said so",
            ),
        }
    }
}

impl std::error::Error for Disconnect {}

enum Phase {
    Handshake(Handshake),
    /// The client gave up: only its answer is still to be sent.
    Aborting,
    Transmission(Box<Transmission>),
}

/// One NBD client.
pub struct Connection {
    socket: OwnedFd,
    info: ExportInfo,
    /// Its number in its tokens.
    id: u16,
    phase: Phase,
    input: Input,
    output: Output,
    pool: Pool,
    disk_full: bool,
    /// The last receive filled all the room it had: there may be more.
    more_expected: bool,
    /// What may still be read in this turn.
    turn_bytes: usize,
    /// The client has closed its side; what is buffered still counts.
    end_of_input: bool,
    ended: Option<Disconnect>,
}

impl Connection {
    /// Takes over a connected stream socket, makes it non-blocking and queues the greeting. `id` is the
    /// connection's number in its tokens, `budget` what all connections of the disk share.
    pub fn new(socket: OwnedFd, info: ExportInfo, id: u16, budget: &Budget) -> io::Result<Connection> {
        if !info.size_bytes.is_multiple_of(u64::from(MIN_BLOCK_BYTES)) {
            return Err(io::Error::new(
                io::ErrorKind::InvalidInput,
                format!("an NBD export of {} bytes: the size has to be a multiple of 512", info.size_bytes),
            ));
        }
        let unsayable = |text: &String| text.len() > super::protocol::MAX_STRING_BYTES || text.contains('\0');
        if [&info.name, &info.description].into_iter().any(unsayable) {
            return Err(io::Error::new(
                io::ErrorKind::InvalidInput,
                "an NBD export's name and description can have at most 4096 bytes each, and no NUL",
            ));
        }
        fcntl_setfl(&socket, fcntl_getfl(&socket)? | OFlags::NONBLOCK)?;
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

    /// The socket has input (or the reactor supposes so): receives until there is no more or there is enough to
    /// work on. [`Connection::next`] has the outcome.
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

    /// The peer has closed both directions (POLLHUP): nobody waits for answers. To be called when that is
    /// reported while the connection does not want to read; ends it unless the client took its leave before,
    /// in which case what it asked for is still carried out. After an `Ok` it need not be polled for again.
    pub fn on_hangup(&mut self) -> Result<(), Disconnect> {
        if !self.is_leaving() && !self.wants_read() {
            self.end(Disconnect::Closed);
        }
        self.check()
    }

    /// The client took its leave: what it asked for is still carried out.
    pub fn is_leaving(&self) -> bool {
        match &self.phase {
            Phase::Transmission(transmission) => transmission.is_disconnecting(),
            Phase::Aborting => true,
            Phase::Handshake(_) => false,
        }
    }

    /// The next thing to be done for this client. `None`: it waits for input, for completions, or for room.
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
                        Ok(Progress::Waits) => Ok(None),
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

    /// Whether the reactor is to wait for output to be possible. Also true while [`Connection::next`] could go on
    /// because output has left meanwhile: the wait is over at once.
    pub fn wants_write(&self) -> bool {
        self.ended.is_none()
            && (!self.output.is_empty()
                || match &self.phase {
                    Phase::Handshake(handshake) => handshake.waits_for_output(),
                    Phase::Aborting => false,
                    Phase::Transmission(transmission) => transmission.can_go_on(&self.output, &self.pool),
                })
    }

    /// Whether replies wait to be sent: what is left of [`Connection::wants_write`] for a reactor that takes no more
    /// work.
    pub fn has_output(&self) -> bool {
        self.ended.is_none() && !self.output.is_empty()
    }

    /// Whether the reactor is to wait for input. False while it has more than it can take: completions, or
    /// output that leaves, change that.
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

    /// Sends what is queued as far as the socket takes it. Called once per turn, after the completions: replies
    /// of the turn leave together. Says when the connection has ended.
    pub fn flush_output(&mut self) -> Result<(), Disconnect> {
        self.check()?;
        if let Err(error) = self.output.send(self.socket.as_fd(), &mut self.pool) {
            match error {
                // What it asked for before it took its leave is carried out, though it does not wait for it.
                SystemErrno::PIPE | SystemErrno::CONNRESET if self.is_leaving() => {
                    self.output.clear(&mut self.pool);
                }
                SystemErrno::PIPE | SystemErrno::CONNRESET => self.end(Disconnect::Closed),
                error => self.end(Disconnect::Socket(error.into())),
            }
        }
        let done = match &self.phase {
            Phase::Transmission(transmission) => transmission.is_done(),
            Phase::Handshake(_) | Phase::Aborting => true,
        };
        if self.is_leaving() && done && self.output.is_empty() && self.ended.is_none() {
            self.end(Disconnect::Finished);
        }
        self.check()
    }

    /// How long after its creation the connection has to be ended if this still says so then.
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

    /// The disk has no room, writes wait for it (or has room again): see *Memory and back-pressure* in the
    /// module's documentation. [`Connection::next`] may have more after this.
    pub fn set_disk_full(&mut self, full: bool) {
        self.disk_full = full;
        if let Phase::Transmission(transmission) = &mut self.phase {
            transmission.set_disk_full(full);
        }
    }

    /// Gives back what is kept for the next request: for a connection that has been quiet for a while. The input
    /// buffer of 64 KiB stays.
    pub fn release_idle_memory(&mut self) {
        self.pool.clear();
    }

    /// Answers a block status request. Extents of (bytes, kind) follow one another from the request's offset on
    /// and may reach past its end; as many as are known, at best all up to the end.
    pub fn answer_block_status(
        &mut self,
        id: BlockStatusId,
        extents: impl Iterator<Item = (u64, ExtentKind)>,
    ) {
        if let Phase::Transmission(transmission) = &mut self.phase {
            transmission.answer_block_status(id, extents, &mut self.output, &mut self.pool);
        }
    }

    /// The memory of a read or write request, for who can use it in place: bytes `at..at + len` of its data.
    pub fn data(&mut self, token: Token, at: u32, len: usize) -> Result<&mut [u8], Errno> {
        match &mut self.phase {
            Phase::Transmission(transmission) => transmission.data(token, at, len).ok_or(Errno::FAULT),
            Phase::Handshake(_) | Phase::Aborting => Err(Errno::FAULT),
        }
    }

    fn check(&self) -> Result<(), Disconnect> {
        match &self.ended {
            Some(reason) => Err(reason.again()),
            None => Ok(()),
        }
    }

    fn end(&mut self, reason: Disconnect) {
        self.ended = Some(reason);
    }

    /// Receives once, into the payload that is awaited and the input buffer behind it.
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
                Err(error) => return self.end(Disconnect::Socket(error.into())),
            }
        }
    }
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
