//! This host in a fleet (docs/design/060-fleets.md). Owns nothing but the list of its parts.
//!
//! Invariant: decisions are those of the crate `fleet`; here is what they need of the world.

pub mod etcd;
