//! The transmission phase: commands in, requests of at most 256 KiB of data to the disk. Owns the tables of
//! unfinished commands and requests; touches no socket.
//!
//! Invariant: a command is answered once, when all of it was issued and nothing of it is outstanding. `held` is
//! the memory that unfinished requests stand for. While a read streams, nothing is queued between its parts.

mod completion;
mod long_read;

use super::buffer::{Buffer, Pool, size_for};
use super::connection::Disconnect;
use super::input::Input;
use super::output::Output;
use super::protocol::*;
use super::reply;
use super::request::{Agreed, Header, Kind, Verdict, check};
use super::slab::Slab;
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

/// What a connection wants done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Work {
    /// To be submitted to the disk, which completes it by its token.
    Request(Request),
    /// To be answered with [`answer_block_status`](super::Connection::answer_block_status).
    BlockStatus {
        /// Its name.
        id: BlockStatusId,
        /// First byte of interest; a multiple of 512, inside the disk.
        offset: u64,
        /// Number of bytes; a multiple of 512, not 0, inside the disk.
        len: u64,
        /// The first extent is enough.
        one: bool,
    },
}

/// What block status says of a range.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ExtentKind {
    /// To be read to be known.
    Data,
    /// Reads as zeroes and takes no room.
    Zero,
}

/// One NBD command.
struct Command {
    cookie: u64,
    kind: Kind,
    offset: u64,
    len: u32,
    /// Bytes handed out, or skipped.
    issued: u32,
    /// Requests handed out and not completed.
    outstanding: u32,
    /// The first error, as the protocol has it.
    error: Option<u32>,
    /// A flush is to follow: the second half of a trim with FUA.
    flush_follows: bool,
    /// Withdrawn: no answer.
    dropped: bool,
    /// Data of a long read for a client without structured replies, by piece: all buffers are taken when the
    /// command is, one is away while the disk fills it. Its one header says whether it failed, and data cannot be taken
    /// back: only when the last piece has come is that known.
    gathered: Vec<Option<Buffer>>,
    /// The same where there is no room for all of it: see [`Transmission::streaming`].
    streams: bool,
}

impl Command {
    /// All of it was handed out and has come back.
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
    /// What it counts for in `held`.
    charge: usize,
}

fn charge(len: u32) -> usize {
    size_for(len as usize).max(REQUEST_CHARGE_BYTES)
}

/// What the next input bytes are.
enum Phase {
    Header,
    /// A read or write is being cut: hand out or receive its next piece. There is one.
    Cutting(u32),
    /// A write's piece is being received.
    Payload {
        command: u32,
        buffer: Buffer,
        filled: usize,
        len: usize,
    },
    /// Payload of a write that has failed already.
    Skipping {
        command: u32,
        remaining: u32,
    },
}

/// What a step of the input's state machine came to.
enum Step {
    Work(Work),
    /// For input, or for room.
    Waits,
    Goes,
}

/// State of the transmission phase.
pub struct Transmission {
    agreed: Agreed,
    token_base: u64,
    commands: Slab<Command>,
    pieces: Slab<Piece>,
    phase: Phase,
    /// Commands whose second half is due.
    flushes_due: VecDeque<u32>,
    /// A long read for a client without structured replies that was not gathered, from its first piece on: its
    /// header is queued, so its pieces are read and sent one after the other, and nothing else is queued or taken in
    /// between. An error can only end the connection now: the protocol has no other way to take back the header.
    streaming: Option<u32>,
    /// What the disk completed of other commands while one streams. Still in `pieces`. Should the connection end before
    /// the stream does, nobody can be told of it.
    later: Vec<(Token, Result<(), Errno>)>,
    held: usize,
    disk_full: bool,
    disconnecting: bool,
    /// What `next` stopped for: room for so many bytes.
    room_awaited: Option<usize>,
}

impl Transmission {
    pub fn new(agreed: Agreed, id: u16, disk_full: bool) -> Self {
        Transmission {
            agreed,
            token_base: (u64::from(TOKEN_TAG) << 56) | (u64::from(id) << 32),
            commands: Slab::new(),
            pieces: Slab::new(),
            phase: Phase::Header,
            flushes_due: VecDeque::new(),
            streaming: None,
            later: Vec::new(),
            held: 0,
            disk_full,
            disconnecting: false,
            room_awaited: None,
        }
    }

    pub fn unfinished(&self) -> usize {
        self.pieces.len() - self.later.len()
    }

    pub fn set_disk_full(&mut self, full: bool) {
        self.disk_full = full;
    }

    /// The client has said goodbye: nothing more is read.
    pub fn is_disconnecting(&self) -> bool {
        self.disconnecting
    }

    /// Nothing is left to be answered.
    pub fn is_done(&self) -> bool {
        self.commands.is_empty()
    }

    /// Whether only more input gets this further. Not while it waits for room.
    pub fn wants_input(&self, input: &Input) -> bool {
        !self.disconnecting
            && self.streaming.is_none()
            && match &self.phase {
                Phase::Header => input.len() < REQUEST_BYTES,
                Phase::Payload { filled, len, .. } => filled + input.len() < *len,
                Phase::Skipping { remaining, .. } => input.len() < *remaining as usize,
                Phase::Cutting(_) => false,
            }
    }

    /// The rest of the payload being received, after what is buffered has gone into it. Received bytes go there
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

    /// Whether the room that [`Transmission::next`] stopped for is there by now.
    pub fn can_go_on(&self, output: &Output, pool: &Pool) -> bool {
        self.room_awaited.is_some_and(|bytes| self.has_room(output, pool, bytes))
    }

    fn has_room(&self, output: &Output, pool: &Pool, bytes: usize) -> bool {
        // What streams does not wait for writes that may wait for ever: one piece is always let in.
        (self.streaming.is_some() && output.is_empty())
            || (output.bytes() < UNSENT_BYTES
                && output.small_bytes() < UNSENT_SMALL_BYTES
                && pool.has_room(bytes, self.disk_full)
                && if self.disk_full {
                    self.held + bytes <= HELD_BYTES_DISK_FULL
                } else {
                    self.held + pool.gathered_bytes() < HELD_BYTES
                })
    }

    /// The next work, if the input holds it and there is room for it.
    pub fn next(
        &mut self,
        input: &mut Input,
        output: &mut Output,
        pool: &mut Pool,
    ) -> Result<Option<Work>, Disconnect> {
        self.room_awaited = None;
        loop {
            if let Some(index) = self.streaming {
                return Ok(self.stream(index, output, pool));
            }
            for (token, result) in mem::take(&mut self.later) {
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
                Phase::Cutting(command) => {
                    let command = *command;
                    self.cut(command, output, pool)
                }
                Phase::Payload { .. } => match self.payload_space(input) {
                    Some([]) => self.payload_complete(),
                    _ => Step::Waits,
                },
                Phase::Skipping { command, remaining } => {
                    let n = input.len().min(*remaining as usize);
                    input.consume(n);
                    *remaining -= n as u32;
                    if *remaining > 0 {
                        Step::Waits
                    } else {
                        let command = *command;
                        self.phase = Phase::Header;
                        self.give_up_rest(command, output, pool);
                        Step::Goes
                    }
                }
            };
            match step {
                Step::Work(work) => return Ok(Some(work)),
                Step::Waits => return Ok(None),
                Step::Goes => {}
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
            return Ok(Step::Waits);
        }
        let Some(bytes) = input.peek() else { return Ok(Step::Waits) };
        let Some(header) = Header::parse(bytes) else {
            return Err(Disconnect::Protocol("a request did not start with its magic number"));
        };
        let verdict = check(&header, &self.agreed);
        if !self.has_room(output, pool, REQUEST_CHARGE_BYTES) {
            self.room_awaited = Some(REQUEST_CHARGE_BYTES);
            return Ok(Step::Waits);
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
            dropped: false,
            gathered: Vec::new(),
            streams: false,
        };
        match verdict {
            Verdict::TooLong => return Err(Disconnect::Protocol("a write of more than 32 MiB")),
            Verdict::Disconnect => self.disconnecting = true,
            Verdict::Refuse(error) if header.command == CMD_WRITE => {
                command.error = Some(error);
                let command = self.commands.insert(command);
                self.phase = Phase::Skipping { command, remaining: len };
            }
            Verdict::Refuse(error) => self.reply_error(output, cookie, error),
            Verdict::Nothing if header.command == CMD_READ && self.agreed.structured => {
                reply::none(output, cookie)
            }
            Verdict::Nothing => reply::simple(output, cookie, 0),
            Verdict::Accept(kind) => {
                command.kind = kind;
                let operation = match kind {
                    Kind::Read | Kind::Write { .. } => {
                        if kind == Kind::Read && len > PIECE_BYTES && !self.agreed.structured {
                            Self::gather_or_stream(&mut command, pool);
                        }
                        self.phase = Phase::Cutting(self.commands.insert(command));
                        return Ok(Step::Goes);
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
        Ok(Step::Goes)
    }

    /// The next piece of a read, or room for the next piece of a write.
    fn cut(&mut self, index: u32, output: &mut Output, pool: &mut Pool) -> Step {
        let command = self.commands.get_mut(index).expect("a command being cut is unfinished");
        let (kind, at, rest) = (command.kind, command.issued, command.len - command.issued);
        let len = rest.min(PIECE_BYTES);
        let failed = command.error.is_some() || command.dropped;
        let streams = command.streams;
        let gathered = match command.gathered.get_mut((at / PIECE_BYTES) as usize) {
            Some(slot) if !failed => slot.take(),
            _ => None,
        };
        if !failed && gathered.is_none() && !self.has_room(output, pool, charge(len)) {
            self.room_awaited = Some(charge(len));
            return Step::Waits;
        }
        match kind {
            Kind::Write { .. } if failed => self.phase = Phase::Skipping { command: index, remaining: rest },
            _ if failed => {
                self.phase = Phase::Header;
                self.give_up_rest(index, output, pool);
            }
            Kind::Write { .. } => {
                self.held += charge(len);
                let (buffer, len) = (pool.take(len as usize), len as usize);
                self.phase = Phase::Payload { command: index, buffer, filled: 0, len };
            }
            _ => {
                if len == rest || streams {
                    // This may complete it; or the rest follows when this one's data is there.
                    self.phase = Phase::Header;
                }
                let buffer = gathered.unwrap_or_else(|| pool.take(len as usize));
                return Step::Work(self.request(index, Operation::Read, at, len, Some(buffer)));
            }
        }
        Step::Goes
    }

    fn payload_complete(&mut self) -> Step {
        let Phase::Payload { command, buffer, len, .. } = mem::replace(&mut self.phase, Phase::Header) else {
            return Step::Goes;
        };
        let len = len as u32;
        // `hand_out` counts it from here on.
        self.held -= charge(len);
        let entry = self.commands.get(command).expect("a command being received is unfinished");
        let at = entry.issued;
        let fua = matches!(entry.kind, Kind::Write { fua: true });
        if at + len < entry.len {
            self.phase = Phase::Cutting(command);
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
            // Counted with the command.
            Some(_) if !entry.gathered.is_empty() => 0,
            Some(_) => charge(len),
            None => charge(0),
        };
        let piece = Piece { command, at, len, buffer, charge };
        self.held += charge;
        entry.issued += len;
        entry.outstanding += 1;
        self.pieces.insert(piece)
    }

    /// The command has failed, nothing more of it is handed out.
    fn give_up_rest(&mut self, index: u32, output: &mut Output, pool: &mut Pool) {
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
