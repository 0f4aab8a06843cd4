//! vhost-user-blk: a VMM's guest reaches the disk through virtqueues in its own memory.
//!
//! Everything here is a non-blocking state machine that a reactor drives from the one thread that owns the
//! disk. One [`Frontend`] is one connection of a VMM. The reactor
//!
//! 1. watches [`Frontend::fd`] (while [`Frontend::wants_read`]), and when it is readable calls
//!    [`Frontend::on_readable`], which answers control messages and says by [`Change`]s what to do;
//! 2. in each turn, for each queue that [`Frontend::is_live`] and [`Frontend::has_work`], takes requests with
//!    [`Frontend::next`], hands them to the disk, and then calls [`Frontend::publish`] for the queue, **also
//!    when `next` returned nothing**: malformed requests are answered inside `next`, a bounded number of them
//!    between two publications. A queue has no work while its front end's unfinished requests hold as much memory
//!    as they may; when any of them ends, look again;
//! 3. passes the frontend to the disk as its [`spillway_core::GuestBuffers`]; completions that come later are
//!    published with [`Frontend::publish`] too, once per batch;
//! 4. before it sleeps, calls [`Frontend::enable_notifications`] for each live queue, and looks again at those
//!    that say so;
//! 5. after a round with completions calls [`Frontend::finish_stops`]; it is nearly free. While a front end waits for such a
//!    stop ([`Frontend::may_abandon`]), it may complete requests that take too long with `CANCELED`: they are not answered, and
//!    their buffers are not touched from then on;
//! 6. looks at [`Frontend::poisoned`] after a round, and treats it as a [`Disconnect`];
//! 7. ends a connection on which no message has come in time ([`Frontend::has_received`]), or that it has to end
//!    for other reasons, with [`Frontend::disconnect`].
//!
//! A session can outlive the process that serves it. Then a supervisor holds the control socket ([`Connection`]): it
//! relays each message to the process ([`Frontend::on_message`]), sends the answer that comes back, and keeps in a
//! [`Record`] what a later process must be told ([`Frontend::replay`]) to go on. A message counts as consumed only
//! when its answer is there. The process has the socket too, and serves it itself (as in 1) once the supervisor is
//! gone.
//!
//! After a [`Disconnect`] no queue is live and guest memory is no longer touched. The reactor cancels the requests that
//! wait, keeps the frontend until [`Frontend::unfinished`] is 0, and drops it: that unmaps guest memory and closes every
//! fd. A request that was unfinished stays marked in the in-flight table, for the next session.
//!
//! A request's token: bits 63..56 the tag of this export, 55..48 the session, 47..32 the queue, 15..0 the head
//! descriptor.

mod budget;
mod chain;
mod config;
mod connection;
mod control;
mod descriptor;
mod error;
mod fast_path;
mod frontend;
mod head;
mod inflight;
mod memory;
mod message;
mod not_shared;
mod queue;
mod record;
mod request;
mod ring;
mod setup;
mod sigbus;
mod signal;
mod vring;

pub use config::DeviceConfig;
pub use connection::{Connection, Packet, Reply};
pub use error::{Context, Error};
pub use frontend::{Frontend, Handled};
pub use inflight::inflight_table;
pub use record::Record;

use std::os::fd::RawFd;

/// Bits 63..56 of this export's tokens.
pub const TOKEN_TAG: u8 = 1;
/// Most queues: a reactor may keep a set of them in one word.
const MAX_QUEUES: u16 = 64;

/// What the reactor has to do after control messages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Change {
    /// Watch this eventfd: when it is raised, process the queue. It need not be read if the watch tells of each
    /// time that it is raised anew (edge-triggered, as io_uring's multishot poll is); its counter then only
    /// grows. It stays open until the `Unkick` of the same queue, which comes first when a new one replaces it
    /// (the number may be the same).
    Kick {
        /// The queue.
        queue: u16,
        /// Owned by the frontend.
        fd: RawFd,
    },
    /// The driver does not kick this queue: process it all the time, until `Unkick`.
    Poll {
        /// The queue.
        queue: u16,
    },
    /// Stop watching or polling this queue; its fd is closed by now.
    Unkick {
        /// The queue.
        queue: u16,
    },
    /// Cancel the waiting requests of this queue: the front end waits until none is unfinished. See also
    /// [`Frontend::may_abandon`].
    Stop {
        /// The queue.
        queue: u16,
    },
}

/// Why a connection has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Disconnect {
    /// The front end closed it, or the owner ended it with [`Frontend::disconnect`].
    #[error("the front end closed the connection")]
    Left,
    /// This side ends it because of an error.
    #[error(transparent)]
    Fault(#[from] Error),
    /// A message that an earlier process has carried out cannot be carried out in this one.
    #[error("this process cannot take over the session: {0}")]
    NotResumed(#[source] Error),
}
