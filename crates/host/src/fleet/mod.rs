//! The daemon as one of a fleet of hosts ([060](../../../../docs/design/060-fleets.md)). Owns no state of its own: a list of the parts.
//!
//! Invariant: a host that is in no fleet does nothing of this.

pub mod door;
