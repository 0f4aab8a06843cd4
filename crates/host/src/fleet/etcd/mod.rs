//! The client of etcd: transactions on the records of a fleet, following them, the lease of this host, and how etcd fares. One member
//! of etcd is asked at a time; one that does not answer within its time is left for the next.
//!
//! Owns connections, deadlines and repetitions; decides nothing about the records. Invariants: a transaction is sent at most once, and
//! no request waits for a member longer than its deadline.

mod address;
mod created;
mod error;
mod follow;
mod health;
mod lease;
mod link;
mod member;
mod request;
mod store;
mod tls;
mod transaction;

pub use address::{EtcdAddress, EtcdAddressError};
pub use error::{FleetStoreError, MemberFailure};
pub use health::{EtcdAlarm, EtcdHealth, EtcdReach};
pub use lease::{LEASE_SECONDS, LeaseState};
pub use store::{FleetStore, FleetStoreSettings};
pub use tls::{EtcdTls, EtcdUser};

use rustix::time::{ClockId, clock_gettime};
use spillway_fleet::Moment;
use std::hash::{BuildHasher, RandomState};

/// A number below this one, so that hosts that see the same do not act at the same time.
pub fn random_below(most: u64) -> u64 {
    RandomState::new().hash_one(0) % most.max(1)
}

/// The moment now, on the clock that goes on during a suspension.
pub fn now() -> Moment {
    let time = clock_gettime(ClockId::Boottime);
    Moment(time.tv_sec.unsigned_abs() * 1000 + time.tv_nsec.unsigned_abs() / 1_000_000)
}
