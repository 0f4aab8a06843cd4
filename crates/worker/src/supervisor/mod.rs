//! The supervisor: makes a disk, starts the worker that serves it, and holds everything that outlives one.
//!
//! It owns every fd, path and socket; the worker is given fds. Used by `spillway serve` and `spillway run`.

mod chunks;
mod clients;
mod closer;
mod console;
mod control;
mod digests;
mod dirty;
mod disk;
mod ephemeral;
mod event_loop;
mod huge_pages;
mod life;
mod limits;
mod memory;
mod model;
mod overflow;
mod past_cache;
mod persistent;
mod process;
mod session;
mod socket;
mod states;
mod upgrade;
mod watchers;

pub use console::ConsoleHub;
pub use event_loop::Supervisor;
pub use process::{Program, WORK, channel_from_supervisor};

/// Takes lines that people should see.
pub type Log = Box<dyn FnMut(&str)>;
