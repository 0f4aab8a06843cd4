//! The vhost-user-blk export as a VMM and its guest see it.

#![allow(clippy::unwrap_used, reason = "a test may end at what it did not expect")]

mod bounds;
mod chains;
mod conformance;
mod eventfds;
mod limits;
mod messages;
mod recovery;
mod resuming;
mod rewriting;
mod sessions;
mod shrinking;
mod stopping;
mod viostor;
mod vmm;
mod wakeups;
