//! Turns completions of requests into replies to commands. Queues output; touches no input.
//!
//! Invariant: a command's last reply is queued when its last request has come back, and its buffers then belong
//! to the output or the pool.

use super::{BlockStatusId, Command, ExtentKind, Transmission};
use crate::ErrorKind;
use crate::nbd::buffer::Pool;
use crate::nbd::connection::Disconnect;
use crate::nbd::error::Error;
use crate::nbd::output::Output;
use crate::nbd::protocol::*;
use crate::nbd::reply;
use crate::nbd::request::Kind;
use rustix::io::Errno as SystemErrno;
use spillway_core::{Errno, Token};
use std::mem;

impl Transmission {
    /// The disk has finished a request. `Err`: only the end of the connection can report its error to the client.
    pub fn complete(
        &mut self,
        token: Token,
        result: Result<(), Errno>,
        output: &mut Output,
        pool: &mut Pool,
    ) -> Result<(), Disconnect> {
        let Some(piece) = self.pieces.get_mut(token.0 as u32) else {
            debug_assert!(false, "completed twice: {token:?}");
            return Ok(());
        };
        if self.streaming.is_some_and(|streaming| streaming != piece.command) {
            let command = self.commands.get(piece.command).expect("a request's command is unfinished");
            if command.kind != Kind::Read {
                piece.buffer.take().into_iter().for_each(|buffer| pool.give(buffer));
                self.held_bytes -= mem::take(&mut piece.charge);
            }
            self.deferred.push((token, result));
            return Ok(());
        }
        let Some(piece) = self.pieces.remove(token.0 as u32) else { return Ok(()) };
        pool.uncharge_request();
        self.held_bytes -= piece.charge;
        let index = piece.command;
        let command = self.commands.get_mut(index).expect("a request's command is unfinished");
        command.outstanding -= 1;
        let mut buffer = piece.buffer;
        let mut outcome = Ok(());
        let gathers = !command.gathered.is_empty();
        if gathers {
            command.gathered[(piece.at / PIECE_BYTES) as usize] = buffer.take();
        }
        match result {
            Ok(()) if command.kind == Kind::Read => {
                let (cookie, len) = (command.cookie, piece.len as usize);
                if self.negotiated.structured {
                    let last = command.is_over() && command.error.is_none();
                    let offset = command.offset + u64::from(piece.at);
                    reply::offset_data(output, cookie, last, offset, piece.len);
                } else if piece.at == 0 && !gathers {
                    reply::simple(output, cookie, 0);
                    self.streaming = command.streams.then_some(index);
                }
                if let Some(buffer) = buffer.take() {
                    output.data(buffer, len);
                }
            }
            Ok(()) if command.flush_follows => {
                command.flush_follows = false;
                self.flushes_due.push_back(index);
                return Ok(());
            }
            Ok(()) => {}
            Err(_) if command.streams && piece.at > 0 => {
                command.canceled = true;
                outcome = Err(late_error(command, result));
            }
            Err(Errno::CANCELED) => command.canceled = true,
            Err(errno) => {
                let error = wire_error(errno, command.kind);
                command.error.get_or_insert(error);
            }
        }
        if let Some(buffer) = buffer {
            pool.give(buffer);
        }
        if command.streams && result.is_err() {
            command.issued = command.len;
        }
        if command.is_over() {
            self.finish(index, output, pool);
        }
        outcome
    }

    /// Replies to a command of which nothing is outstanding.
    pub(super) fn finish(&mut self, index: u32, output: &mut Output, pool: &mut Pool) {
        let Some(command) = self.commands.remove(index) else { return };
        self.streaming.take_if(|streaming| *streaming == index);
        if !command.gathered.is_empty() {
            let answer = !command.canceled && command.error.is_none();
            if answer {
                reply::simple(output, command.cookie, 0);
            }
            let mut rest = command.len;
            for buffer in command.gathered.into_iter().flatten() {
                let len = rest.min(PIECE_BYTES);
                rest -= len;
                if answer {
                    output.data(buffer, len as usize);
                } else {
                    pool.give(buffer);
                }
            }
        }
        match command.error {
            _ if command.canceled => {}
            Some(error) => self.reply_error(output, command.cookie, error),
            // Its last chunk, or its data behind the header, was the reply.
            None if command.kind == Kind::Read => {}
            None => reply::simple(output, command.cookie, 0),
        }
    }

    /// Answers a block status request. Extents follow one another from the request's offset on and may reach
    /// past its end. Without any, the range counts as data.
    pub fn answer_block_status(
        &mut self,
        id: BlockStatusId,
        extents: impl Iterator<Item = (u64, ExtentKind)>,
        output: &mut Output,
        pool: &mut Pool,
    ) {
        let Some(piece) = self.pieces.remove(id.0) else {
            debug_assert!(false, "answered twice: {id:?}");
            return;
        };
        pool.uncharge_request();
        self.held_bytes -= piece.charge;
        let command = self.commands.remove(piece.command).expect("a request's command is unfinished");
        let one = command.kind == Kind::BlockStatus { one: true };
        let mut merged: Vec<(u32, u32)> = Vec::new();
        let mut rest = command.len;
        for (len, kind) in extents {
            let state = match kind {
                ExtentKind::Data => 0,
                ExtentKind::Zero => STATE_HOLE | STATE_ZERO,
            };
            let len = u64::from(rest).min(len) as u32;
            let full = merged.len() == if one { 1 } else { MAX_EXTENTS };
            match merged.last_mut() {
                Some((last, same)) if *same == state => *last += len,
                _ if full => break,
                _ if len > 0 => merged.push((len, state)),
                _ => {}
            }
            rest -= len;
            if rest == 0 {
                break;
            }
        }
        if merged.is_empty() {
            merged.push((command.len, 0));
        }
        reply::block_status(output, command.cookie, &merged);
    }

    pub(super) fn reply_error(&self, output: &mut Output, cookie: u64, error: u32) {
        debug_assert!(error != 0);
        // A structured error has a text too; a read must have one where structured replies were negotiated.
        if self.negotiated.structured {
            reply::error(output, cookie, error);
        } else {
            reply::simple(output, cookie, error);
        }
    }
}

/// The error that the end of the connection reports, of a read whose first part was sent.
#[cold]
fn late_error(command: &Command, result: Result<(), Errno>) -> Disconnect {
    let reason = "a read failed after the first part of it was sent, and the NBD client did not negotiate \
                  structured replies, which could have reported it";
    let source = result.err().map(|errno| SystemErrno::from_raw_os_error(errno.0));
    let error = Error { source, ..Error::new(ErrorKind::LateReadError, reason) };
    error.in_command(CMD_READ, command.cookie, command.offset, command.len).into()
}

/// The NBD error value of an errno. The protocol has few, and ENOTSUP only where a fast zero was asked for.
fn wire_error(errno: Errno, kind: Kind) -> u32 {
    match errno {
        Errno::NO_SPACE => ENOSPC,
        Errno::INVALID => EINVAL,
        Errno::NOT_SUPPORTED if matches!(kind, Kind::WriteZeroes { fast: true, .. }) => ENOTSUP,
        Errno::NOT_SUPPORTED => EINVAL,
        _ => EIO,
    }
}
