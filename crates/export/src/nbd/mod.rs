//! The NBD export: one [`Connection`] per client, a state machine over a non-blocking socket.
//!
//! This folder speaks the protocol of `doc/proto.md` (NetworkBlockDevice/nbd): fixed newstyle handshake, simple
//! and structured replies, `base:allocation`. It never blocks, never polls, reads no clock and holds no thread;
//! whoever owns the thread (the reactor) drives it and carries requests between it and the disk.
//!
//! Invariant: each request that [`Connection::next`] hands out is answered to the client exactly once, after its
//! [`complete`](spillway_core::GuestBuffers::complete) or
//! [`answer_block_status`](Connection::answer_block_status), or is dropped with the connection.
//!
//! # Driving a connection
//!
//! ```text
//! each turn:  POLLIN  -> on_readable()      POLLOUT -> on_writable()      POLLHUP -> on_hangup()
//!             completions of earlier requests: complete(), answer_block_status()
//!             while let Some(work) = next() { submit to the disk: it may complete at once }
//!             flush_output()                // an Err from any of these ends the connection
//!             ask for POLLIN if wants_read(), POLLOUT if wants_write(); POLLHUP always
//! ```
//!
//! Call `next()` after every one of the others: completions and sent output free space for input that is buffered
//! already. When `flush_output` frees space at the end of the turn, `wants_write()` is true and the poll returns at
//! once.
//!
//! A connection ends when a method returns [`Disconnect`]: the reactor withdraws what is
//! [unfinished](Connection::unfinished) (the disk completes it with `Errno::CANCELED`) and drops the connection
//! when `unfinished()` is 0. While [`handshake_deadline`](Connection::handshake_deadline) says so, the reactor
//! ends it when it has not finished its handshake in that time.
//!
//! # Memory and back-pressure
//!
//! A command of up to 32 MiB becomes requests of at most 256 KiB, each with its own pooled buffer of its size. In
//! ordinary flow a connection takes in no further data while its unfinished requests or its unsent replies hold
//! more than 1 MiB. When the disk is full and writes wait for it ([`Event::Full`](spillway_core::Event)), this rule would
//! keep a discard from being read that would free space. So the reactor calls
//! [`set_disk_full`](Connection::set_disk_full), and up to 4 MiB of unfinished requests are taken in.
//!
//! A read of more than 256 KiB for a client without structured replies is gathered before its header is sent. A
//! connection gathers up to 5 MiB of such reads, including those that are being sent. A read that does not fit is read
//! and sent piece by piece. Other replies wait meanwhile, and so does everything that the client has sent after it, even
//! if a later piece waits for a write that waits for space, and a discard behind the read would free some. An error
//! after the first piece ends the connection ([`ErrorKind::LateReadError`](crate::ErrorKind::LateReadError)).
//!
//! All connections of a disk share a [`Budget`]: together they hold 4 MiB, 8 MiB of gathered reads, and beyond that two
//! pieces of 256 KiB each, the second only in the middle of a read that is sent piece by piece. So a client that does
//! not read its replies may slow others down, but never stops them. Beside the budget each connection has 64 KiB of
//! input and up to 64 KiB of headers. Free buffers of 1 MiB in all are kept until
//! [`release_idle_memory`](Connection::release_idle_memory).
//!
//! # Tokens
//!
//! Bits 63..56 are [`TOKEN_TAG`], 55..32 the connection number, 31..0 the request's index in the connection.

mod buffer;
mod connection;
mod error;
mod handshake;
mod input;
mod output;
mod protocol;
mod reply;
mod request;
mod slab;
mod transmission;

pub use buffer::Budget;
pub use connection::{Connection, Disconnect, ExportInfo, HANDSHAKE_DEADLINE};
pub use error::{Context, Error};
pub use protocol::MAX_EXTENTS;
pub use transmission::{BlockStatusId, ExtentKind, TOKEN_TAG, Work, token_connection};
