//! Machines with names of the fleet: each is alive on one host at a time ([061](../../../../docs/design/061-named-machines.md)).
//!
//! Owns the times after which a host has ended its machines and others may have them, the names of a catalog, and what a host may do.
//! Which host gets a machine is in `placement`. Invariant: a host has a machine that another one may run only until the deadline that
//! follows from its last lease, and no other host gets it before that.

mod host;
mod identity;
mod pattern;

pub use host::{Belief, HostNames, NameOrder, NamedOrders, RunningName, isolated};
pub(crate) use identity::Identities;
pub use pattern::NamePattern;

use crate::liveness::LEASE_MS;
use crate::view::FleetView;
use spillway_api::{Identity, IsolationAction, Name};
use std::collections::BTreeMap;

/// Longest time for which a host runs machines with names of the fleet after the sending of a request that has renewed its lease.
pub const VALID_MS: u64 = 12_000;
/// Time from the moment at which a lease is not valid any more until the machines of the host have been ended.
pub const ISOLATION_MS: u64 = 20_000;
/// Least time from the moment at which the placer has seen the end of a host's lease until it gives the names to others.
pub const REPLACE_MS: u64 = 45_000;

/// A machine with a name of the fleet that a host is to have.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PlacedMachine {
    /// Name of the machine.
    pub machine: Name,
    /// Number in its name.
    pub number: u32,
    /// Identity of the machine.
    pub identity: Identity,
    /// What the host does with it when it is isolated.
    pub on_isolation: IsolationAction,
    /// Whether the host is to give it up.
    pub is_leaving: bool,
}

/// Machines with names of the fleet that the records give to a host, whatever its epoch, by catalog.
pub fn placed(view: &FleetView, host: &Name) -> BTreeMap<Name, Vec<PlacedMachine>> {
    let mut catalogs: BTreeMap<Name, Vec<PlacedMachine>> = BTreeMap::new();
    for ((catalog, machine), place) in view.places.get(host).into_iter().flatten() {
        let place = &place.value;
        catalogs.entry(catalog.clone()).or_default().push(PlacedMachine {
            machine: machine.clone(),
            number: place.number,
            identity: place.identity.clone(),
            on_isolation: place.on_isolation,
            is_leaving: place.is_leaving,
        });
    }
    catalogs
}

/// Time for which a host must have been silent before others get its names, where its catalog says `lost_after_seconds`.
pub fn replace_after_ms(lost_after_seconds: u32) -> u64 {
    // Silence counts from a lease's time before the end that was seen.
    (u64::from(lost_after_seconds) * 1000).max(REPLACE_MS + LEASE_MS)
}
