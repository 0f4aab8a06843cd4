//! The supervisor against a worker that only pretends.

#![allow(clippy::unwrap_used, reason = "a test that fails here has failed")]

mod restarts;
mod serving;
mod world;
