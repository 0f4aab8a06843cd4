//! The fleet of the host, if it is in one ([060](../../../../docs/design/060-fleets.md)). Owns what the daemon does for that; the decisions
//! are in the crate `fleet`.
//!
//! Invariant: without etcd everything on the host goes on as before.

mod details;
pub mod door;
pub mod etcd;
mod shares;
