//! Many hosts: which host has how many machines of a catalog, and when a host counts as lost.
//!
//! Owns the records that a fleet keeps in etcd, and the decisions about them. Does no I/O, reads no clock and holds no thread: updates
//! of the records, answers and the time go in, transactions and questions come out. A simulator can run it with a thousand hosts.
//!
//! Invariant: a decision is carried out only if the records that it was based on are unchanged, by the comparisons of its
//! transaction.

pub mod agent;
pub mod boot;
pub mod changes;
pub mod changes_images;
pub mod claim;
pub mod copies;
pub mod election;
pub mod keys;
pub mod liveness;
pub mod membership;
pub mod named;
pub mod peers;
pub mod placement;
pub mod placer;
pub mod records;
mod rendezvous;
pub mod rollout;
pub mod transaction;
pub mod view;

#[cfg(test)]
extern crate self as spillway_fleet;
#[cfg(test)]
#[path = "../tests/common/driver.rs"]
mod driver;
#[cfg(test)]
#[path = "../tests/common/sample.rs"]
mod sample;

/// A moment on the clock of this host that goes on during a suspension (`CLOCK_BOOTTIME`), in milliseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Moment(pub u64);

impl Moment {
    /// The time since an earlier moment, in milliseconds; 0 if that is later.
    pub fn since_ms(self, earlier: Moment) -> u64 {
        self.0.saturating_sub(earlier.0)
    }

    /// The moment so many milliseconds later.
    pub fn after_ms(self, milliseconds: u64) -> Moment {
        Moment(self.0.saturating_add(milliseconds))
    }
}
