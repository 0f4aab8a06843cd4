//! The way back: completions of requests become replies to commands. Queues output; touches no input.
//!
//! Invariant: a command's last reply is queued when its last request has come back, and its buffers then belong
//! to the output or the pool.

use super::{BlockStatusId, ExtentKind, Transmission};
use crate::nbd::buffer::Pool;
use crate::nbd::connection::Disconnect;
use crate::nbd::output::Output;
use crate::nbd::protocol::*;
use crate::nbd::reply;
use crate::nbd::request::Kind;
use spillway_core::{Errno, Token};
use std::mem;

impl Transmission {
    /// The disk has finished a request. `Err`: there is no way to tell the client of its error but to leave it.
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
                self.held -= mem::take(&mut piece.charge);
            }
            self.later.push((token, result));
            return Ok(());
        }
        let Some(piece) = self.pieces.remove(token.0 as u32) else { return Ok(()) };
        pool.uncharge_request();
        self.held -= piece.charge;
        let index = piece.command;
        let command = self.commands.get_mut(index).expect("a request's command is unfinished");
        command.outstanding -= 1;
        let mut left = piece.buffer;
        let mut outcome = Ok(());
        let gathers = !command.gathered.is_empty();
        if gathers {
            command.gathered[(piece.at / PIECE_BYTES) as usize] = left.take();
        }
        match result {
            Ok(()) if command.kind == Kind::Read => {
                let (cookie, len) = (command.cookie, piece.len as usize);
                if self.agreed.structured {
                    let last = command.is_over() && command.error.is_none();
                    let offset = command.offset + u64::from(piece.at);
                    reply::offset_data(output, cookie, last, offset, piece.len);
                } else if piece.at == 0 && !gathers {
                    reply::simple(output, cookie, 0);
                    self.streaming = command.streams.then_some(index);
                }
                if let Some(buffer) = left.take() {
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
                command.dropped = true;
                outcome = Err(Disconnect::LateError);
            }
            Err(Errno::CANCELED) => command.dropped = true,
            Err(errno) => {
                let error = wire_error(errno, command.kind);
                command.error.get_or_insert(error);
            }
        }
        if let Some(buffer) = left {
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

    /// Answers a command of which nothing is outstanding any more.
    pub(super) fn finish(&mut self, index: u32, output: &mut Output, pool: &mut Pool) {
        let Some(command) = self.commands.remove(index) else { return };
        self.streaming.take_if(|streaming| *streaming == index);
        if !command.gathered.is_empty() {
            let answer = !command.dropped && command.error.is_none();
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
            _ if command.dropped => {}
            Some(error) => self.reply_error(output, command.cookie, error),
            // Its last chunk or its data said so.
            None if command.kind == Kind::Read => {}
            None => reply::simple(output, command.cookie, 0),
        }
    }

    /// Answers a block status request. Extents follow one another from the request's offset on and may reach
    /// past its end; none at all means that nothing is known.
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
        self.held -= piece.charge;
        let command = self.commands.remove(piece.command).expect("a request's command is unfinished");
        let one = command.kind == Kind::BlockStatus { one: true };
        let mut found: Vec<(u32, u32)> = Vec::new();
        let mut rest = command.len;
        for (len, kind) in extents {
            let state = match kind {
                ExtentKind::Data => 0,
                ExtentKind::Zero => STATE_HOLE | STATE_ZERO,
            };
            let len = u64::from(rest).min(len) as u32;
            let full = found.len() == if one { 1 } else { MAX_EXTENTS };
            match found.last_mut() {
                Some((last, same)) if *same == state => *last += len,
                _ if full => break,
                _ if len > 0 => found.push((len, state)),
                _ => {}
            }
            rest -= len;
            if rest == 0 {
                break;
            }
        }
        if found.is_empty() {
            found.push((command.len, 0));
        }
        reply::block_status(output, command.cookie, &found);
    }

    pub(super) fn reply_error(&self, output: &mut Output, cookie: u64, error: u32) {
        debug_assert!(error != 0);
        // A structured error says more; a read must have one where structured replies are agreed on.
        if self.agreed.structured {
            reply::error(output, cookie, error);
        } else {
            reply::simple(output, cookie, error);
        }
    }
}

/// The protocol allows few error values, and ENOTSUP only where a fast zero was asked for.
fn wire_error(errno: Errno, kind: Kind) -> u32 {
    match errno {
        Errno::NO_SPACE => ENOSPC,
        Errno::INVALID => EINVAL,
        Errno::NOT_SUPPORTED if matches!(kind, Kind::WriteZeroes { fast: true, .. }) => ENOTSUP,
        Errno::NOT_SUPPORTED => EINVAL,
        _ => EIO,
    }
}
