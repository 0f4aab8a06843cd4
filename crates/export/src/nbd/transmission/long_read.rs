//! Reads longer than one piece for a client without structured replies, which have one header before all of their data.
//! They are gathered where there is space, else sent piece by piece. Touches neither input nor output.
//!
//! Invariant: a command is gathered or streams, never both; gathered reads stay within the limits of the connection and
//! of the disk.

use super::{Command, Transmission, Work, charge};
use crate::nbd::buffer::Pool;
use crate::nbd::output::Output;
use crate::nbd::protocol::*;
use spillway_core::Operation;

impl Transmission {
    /// Takes all buffers of such a read if there is space for them; otherwise the read streams.
    pub(super) fn gather_or_stream(command: &mut Command, pool: &mut Pool) {
        match pool.gather(command.len) {
            Some(buffers) => command.gathered = buffers.into_iter().map(Some).collect(),
            None => command.streams = true,
        }
    }

    /// The next piece of the read that streams, when the one before it has come and there is space.
    pub(super) fn stream(&mut self, index: u32, output: &Output, pool: &mut Pool) -> Option<Work> {
        let command = self.commands.get(index).expect("a command that streams is unfinished");
        let (at, len) = (command.issued, (command.len - command.issued).min(PIECE_BYTES));
        if command.outstanding > 0 {
            return None;
        }
        if !self.has_space(output, pool, charge(len)) {
            self.awaited_bytes = Some(charge(len));
            return None;
        }
        let buffer = pool.take(len as usize);
        Some(self.request(index, Operation::Read, at, len, Some(buffer)))
    }
}
