//! The transmission phase: commands in, requests of at most 256 KiB of data to the disk. Owns the tables of
//! unfinished commands and requests; touches no socket.
//!
//! Invariant: a command is answered once, when all of it was issued and nothing of it is outstanding. `held_bytes` is
//! the sum of the charges of unfinished requests. While a read streams, nothing is queued between its parts.

mod completion;
mod long_read;

use super::buffer::{Buffer, Pool, size_for};
use super::connection::Disconnect;
use super::error::Error;
use super::input::Input;
use super::output::Output;
use super::protocol::*;
use super::reply;
use super::request::{Header, Kind, Negotiated, Verdict, check};
use super::slab::Slab;
use crate::ErrorKind;
use spillway_core::{Errno, Operation, Request, SECTOR_BYTES, Token};
use std::collections::VecDeque;
use std::mem;

/// The tag in the top byte of this export's tokens.
pub const TOKEN_TAG: u8 = 2;

/// The connection that a token of this export belongs to.
#[inline]
pub fn token_connection(token: Token) -> u16 {
    (token.0 >> 32) as u16
}

/// Names an unanswered block status request of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlockStatusId(u32);

/// What is to be done for a client.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Work {
    /// To be submitted to the disk, which completes it by its token.
    Request(Request),
    /// To be answered with [`answer_block_status`](super::Connection::answer_block_status).
    BlockStatus {
        /// Names the request in its answer.
        id: BlockStatusId,
        /// First byte of interest; a multiple of 512, inside the disk.
        offset: u64,
        /// Number of bytes; a multiple of 512, not 0, inside the disk.
        len: u64,
        /// The first extent is enough.
        one: bool,
    },
}

/// How a range reads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ExtentKind {
    /// It may have any content.
    Data,
    /// It reads as zeroes and takes no space.
    Zero,
}

/// One NBD command.
struct Command {
    cookie: u64,
    kind: Kind,
    offset: u64,
    len: u32,
    /// Bytes handed out to the disk, or skipped.
    issued: u32,
    /// Requests handed out and not completed.
    outstanding: u32,
    /// The first error, as an NBD error value.
    error: Option<u32>,
    /// A flush is to follow: the second half of a trim with FUA.
    flush_follows: bool,
    /// It was canceled: no reply is sent.
    canceled: bool,
    /// Data of a long read for a client without structured replies, by piece. All buffers are taken with the command;
    /// an entry is `None` while the disk fills its buffer. The one header before the data says whether the read failed,
    /// so it can be sent only when the last piece has come.
    gathered: Vec<Option<Buffer>>,
    /// Such a read that has no space for all of its data: see [`Transmission::streaming`].
    streams: bool,
}

impl Command {
    /// Whether all of it was issued and nothing is outstanding.
    fn is_over(&self) -> bool {
        self.issued == self.len && self.outstanding == 0
    }
}

/// One request that the disk has.
struct Piece {
    command: u32,
    /// Bytes from the command's start.
    at: u32,
    len: u32,
    buffer: Option<Buffer>,
    /// Bytes that it counts for in `held_bytes`.
    charge: usize,
}

fn charge(len: u32) -> usize {
    size_for(len as usize).max(REQUEST_CHARGE_BYTES)
}

/// How the next input bytes are to be taken.
enum Phase {
    /// As the header of a request.
    Header,
    /// Not yet: a read or write is being split, and has a next piece to be handed out or received.
    Splitting(u32),
    /// As the payload of a write's piece.
    Payload { command: u32, buffer: Buffer, filled: usize, len: usize },
    /// As the payload of a write that has failed already: it is skipped.
    Skipping { command: u32, remaining: u32 },
}

/// The outcome of one step of the input's state machine.
enum Step {
    /// There is work for the disk.
    Work(Work),
    /// It needs input or space first.
    Blocked,
    /// The next step can follow at once.
    Continue,
}

/// State of the transmission phase.
pub struct Transmission {
    negotiated: Negotiated,
    token_base: u64,
    commands: Slab<Command>,
    pieces: Slab<Piece>,
    phase: Phase,
    /// Commands whose flush is due: the second half of a trim with FUA.
    flushes_due: VecDeque<u32>,
    /// A long read for a client without structured replies that was not gathered, from its first piece on. Its header is
    /// queued, so its pieces are read and sent one after the other, and nothing else is queued or taken in between. An
    /// error can only end the connection now: the protocol has no way to take the header back.
    streaming: Option<u32>,
    /// Requests of other commands that the disk has completed while a read streams. They are still in `pieces`. If the
    /// connection ends first, they are never answered.
    deferred: Vec<(Token, Result<(), Errno>)>,
    /// Charges of all unfinished requests.
    held_bytes: usize,
    disk_full: bool,
    disconnecting: bool,
    /// Set while `next` is blocked because there is no space for so many bytes.
    awaited_bytes: Option<usize>,
}

impl Transmission {
    pub fn new(negotiated: Negotiated, id: u16, disk_full: bool) -> Self {
        Transmission {
            negotiated,
            token_base: (u64::from(TOKEN_TAG) << 56) | (u64::from(id) << 32),
            commands: Slab::new(),
            pieces: Slab::new(),
            phase: Phase::Header,
            flushes_due: VecDeque::new(),
            streaming: None,
            deferred: Vec::new(),
            held_bytes: 0,
            disk_full,
            disconnecting: false,
            awaited_bytes: None,
        }
    }

    pub fn unfinished(&self) -> usize {
        self.pieces.len() - self.deferred.len()
    }

    pub fn set_disk_full(&mut self, full: bool) {
        self.disk_full = full;
    }

    /// Whether the client has sent NBD_CMD_DISC: nothing more is read.
    pub fn is_disconnecting(&self) -> bool {
        self.disconnecting
    }

    /// Whether every command was answered.
    pub fn is_done(&self) -> bool {
        self.commands.is_empty()
    }

    /// Whether only more input gets this further. False while it waits for space.
    pub fn wants_input(&self, input: &Input) -> bool {
        !self.disconnecting
            && self.streaming.is_none()
            && match &self.phase {
                Phase::Header => input.len() < REQUEST_BYTES,
                Phase::Payload { filled, len, .. } => filled + input.len() < *len,
                Phase::Skipping { remaining, .. } => input.len() < *remaining as usize,
                Phase::Splitting(_) => false,
            }
    }

    /// The rest of the payload that is expected, after the buffered input was moved into it. More is received there
    /// directly.
    pub fn payload_space(&mut self, input: &mut Input) -> Option<&mut [u8]> {
        let Phase::Payload { buffer, filled, len, .. } = &mut self.phase else { return None };
        let rest = &mut buffer.bytes_mut(*len)[*filled..];
        let moved = input.move_to(rest);
        *filled += moved;
        Some(&mut rest[moved..])
    }

    /// `n` bytes were received into [`Transmission::payload_space`].
    pub fn payload_received(&mut self, n: usize) {
        if let Phase::Payload { filled, len, .. } = &mut self.phase {
            *filled += n;
            assert!(*filled <= *len);
        }
    }

    /// Whether there is space by now for what [`Transmission::next`] is blocked on.
    pub fn can_go_on(&self, output: &Output, pool: &Pool) -> bool {
        self.awaited_bytes.is_some_and(|bytes| self.has_space(output, pool, bytes))
    }

    fn has_space(&self, output: &Output, pool: &Pool, bytes: usize) -> bool {
        // A read that streams does not wait for writes that may wait for ever: one piece of it is always admitted.
        (self.streaming.is_some() && output.is_empty())
            || (output.bytes() < UNSENT_BYTES
                && output.small_bytes() < UNSENT_SMALL_BYTES
                && pool.has_space(bytes, self.disk_full)
                && if self.disk_full {
                    self.held_bytes + bytes <= HELD_BYTES_DISK_FULL
                } else {
                    self.held_bytes + pool.gathered_bytes() < HELD_BYTES
                })
    }

    /// The next work, if the input has it and there is space for it.
    pub fn next(
        &mut self,
        input: &mut Input,
        output: &mut Output,
        pool: &mut Pool,
    ) -> Result<Option<Work>, Disconnect> {
        self.awaited_bytes = None;
        loop {
            if let Some(index) = self.streaming {
                return Ok(self.stream(index, output, pool));
            }
            for (token, result) in mem::take(&mut self.deferred) {
                self.complete(token, result, output, pool)?;
            }
            if self.streaming.is_some() {
                continue;
            }
            if let Some(command) = self.flushes_due.pop_front() {
                return Ok(Some(self.request(command, Operation::Flush, 0, 0, None)));
            }
            let step = match &mut self.phase {
                Phase::Header => self.take_command(input, output, pool)?,
                Phase::Splitting(command) => {
                    let command = *command;
                    self.split(command, output, pool)
                }
                Phase::Payload { .. } => match self.payload_space(input) {
                    Some([]) => self.payload_complete(),
                    _ => Step::Blocked,
                },
                Phase::Skipping { command, remaining } => {
                    let n = input.len().min(*remaining as usize);
                    input.consume(n);
                    *remaining -= n as u32;
                    if *remaining > 0 {
                        Step::Blocked
                    } else {
                        let command = *command;
                        self.phase = Phase::Header;
                        self.skip_rest(command, output, pool);
                        Step::Continue
                    }
                }
            };
            match step {
                Step::Work(work) => return Ok(Some(work)),
                Step::Blocked => return Ok(None),
                Step::Continue => {}
            }
        }
    }

    fn take_command(
        &mut self,
        input: &mut Input,
        output: &mut Output,
        pool: &mut Pool,
    ) -> Result<Step, Disconnect> {
        if self.disconnecting {
            return Ok(Step::Blocked);
        }
        let Some(bytes) = input.peek() else { return Ok(Step::Blocked) };
        let Some(header) = Header::parse(bytes) else {
            return Err(Error::protocol("a request does not start with its magic number").into());
        };
        let verdict = check(&header, &self.negotiated);
        if !self.has_space(output, pool, REQUEST_CHARGE_BYTES) {
            self.awaited_bytes = Some(REQUEST_CHARGE_BYTES);
            return Ok(Step::Blocked);
        }
        input.consume(REQUEST_BYTES);
        let Header { cookie, offset, len, .. } = header;
        let mut command = Command {
            cookie,
            kind: Kind::Write { fua: false },
            offset,
            len,
            issued: 0,
            outstanding: 0,
            error: None,
            flush_follows: false,
            canceled: false,
            gathered: Vec::new(),
            streams: false,
        };
        match verdict {
            Verdict::TooLong => {
                let error =
                    Error::new(ErrorKind::Limit, "the write is too long").above(len, MAX_PAYLOAD_BYTES);
                return Err(error.in_command(CMD_WRITE, cookie, offset, len).into());
            }
            Verdict::Disconnect => self.disconnecting = true,
            Verdict::Refuse(error) if header.command == CMD_WRITE => {
                command.error = Some(error);
                let command = self.commands.insert(command);
                self.phase = Phase::Skipping { command, remaining: len };
            }
            Verdict::Refuse(error) => self.reply_error(output, cookie, error),
            Verdict::Nothing if header.command == CMD_READ && self.negotiated.structured => {
                reply::none(output, cookie)
            }
            Verdict::Nothing => reply::simple(output, cookie, 0),
            Verdict::Accept(kind) => {
                command.kind = kind;
                let operation = match kind {
                    Kind::Read | Kind::Write { .. } => {
                        if kind == Kind::Read && len > PIECE_BYTES && !self.negotiated.structured {
                            Self::gather_or_stream(&mut command, pool);
                        }
                        self.phase = Phase::Splitting(self.commands.insert(command));
                        return Ok(Step::Continue);
                    }
                    Kind::BlockStatus { one } => {
                        let command = self.commands.insert(command);
                        let id = BlockStatusId(self.hand_out(command, 0, len, None));
                        return Ok(Step::Work(Work::BlockStatus { id, offset, len: u64::from(len), one }));
                    }
                    Kind::Flush => Operation::Flush,
                    Kind::Trim { fua } => {
                        command.flush_follows = fua;
                        Operation::Discard
                    }
                    Kind::WriteZeroes { fua, .. } => Operation::WriteZeroes { fua },
                };
                let command = self.commands.insert(command);
                return Ok(Step::Work(self.request(command, operation, 0, len, None)));
            }
        }
        Ok(Step::Continue)
    }

    /// The next piece of a read, or a buffer for the next piece of a write.
    fn split(&mut self, index: u32, output: &mut Output, pool: &mut Pool) -> Step {
        let command = self.commands.get_mut(index).expect("a command being split is unfinished");
        let (kind, at, rest) = (command.kind, command.issued, command.len - command.issued);
        let len = rest.min(PIECE_BYTES);
        let failed = command.error.is_some() || command.canceled;
        let streams = command.streams;
        let gathered = match command.gathered.get_mut((at / PIECE_BYTES) as usize) {
            Some(slot) if !failed => slot.take(),
            _ => None,
        };
        if !failed && gathered.is_none() && !self.has_space(output, pool, charge(len)) {
            self.awaited_bytes = Some(charge(len));
            return Step::Blocked;
        }
        match kind {
            Kind::Write { .. } if failed => self.phase = Phase::Skipping { command: index, remaining: rest },
            _ if failed => {
                self.phase = Phase::Header;
                self.skip_rest(index, output, pool);
            }
            Kind::Write { .. } => {
                self.held_bytes += charge(len);
                let (buffer, len) = (pool.take(len as usize), len as usize);
                self.phase = Phase::Payload { command: index, buffer, filled: 0, len };
            }
            _ => {
                if len == rest || streams {
                    // It is the last piece; or the next one follows when this one has been sent.
                    self.phase = Phase::Header;
                }
                let buffer = gathered.unwrap_or_else(|| pool.take(len as usize));
                return Step::Work(self.request(index, Operation::Read, at, len, Some(buffer)));
            }
        }
        Step::Continue
    }

    fn payload_complete(&mut self) -> Step {
        let Phase::Payload { command, buffer, len, .. } = mem::replace(&mut self.phase, Phase::Header) else {
            return Step::Continue;
        };
        let len = len as u32;
        // `hand_out` counts it from here on.
        self.held_bytes -= charge(len);
        let entry = self.commands.get(command).expect("a command being received is unfinished");
        let at = entry.issued;
        let fua = matches!(entry.kind, Kind::Write { fua: true });
        if at + len < entry.len {
            self.phase = Phase::Splitting(command);
        }
        Step::Work(self.request(command, Operation::Write { fua }, at, len, Some(buffer)))
    }

    fn request(
        &mut self,
        command: u32,
        operation: Operation,
        at: u32,
        len: u32,
        buffer: Option<Buffer>,
    ) -> Work {
        let index = self.hand_out(command, at, len, buffer);
        let offset = self.commands.get(command).map_or(0, |command| command.offset);
        let (sector, sectors) = match operation {
            Operation::Flush => (0, 0),
            _ => ((offset + u64::from(at)) / SECTOR_BYTES, len / SECTOR_BYTES as u32),
        };
        Work::Request(Request {
            token: Token(self.token_base | u64::from(index)),
            operation,
            sector,
            sectors,
        })
    }

    fn hand_out(&mut self, command: u32, at: u32, len: u32, buffer: Option<Buffer>) -> u32 {
        let entry = self.commands.get_mut(command).expect("requests come from unfinished commands");
        let charge = match &buffer {
            // Charged with the command.
            Some(_) if !entry.gathered.is_empty() => 0,
            Some(_) => charge(len),
            None => charge(0),
        };
        let piece = Piece { command, at, len, buffer, charge };
        self.held_bytes += charge;
        entry.issued += len;
        entry.outstanding += 1;
        self.pieces.insert(piece)
    }

    /// Hands out nothing more of a command that has failed.
    fn skip_rest(&mut self, index: u32, output: &mut Output, pool: &mut Pool) {
        let command = self.commands.get_mut(index).expect("a failed command is unfinished");
        command.issued = command.len;
        if command.outstanding == 0 {
            self.finish(index, output, pool);
        }
    }

    /// The memory of a request with a buffer; `None` when `at..at + len` is not inside it.
    #[inline]
    pub fn data(&mut self, token: Token, at: u32, len: usize) -> Option<&mut [u8]> {
        let piece = self.pieces.get_mut(token.0 as u32)?;
        let bytes = piece.buffer.as_mut()?.bytes_mut(piece.len as usize);
        bytes.get_mut(at as usize..(at as usize).checked_add(len)?)
    }
}
