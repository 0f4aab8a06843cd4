//! Placing: how many machines of each catalog each host is to have. A pure function of the records, of what is known of the hosts, and
//! of what was just written.
//!
//! Owns the rules. It never writes, and remembers nothing: who calls it keeps what is to be remembered.
//!
//! Invariant: the shares of hosts that count have a sum of at most the catalog's count, and no host gets a machine that its budget has no
//! space for.

mod catalog;
mod course;
mod explanation;
mod fill;
mod name_fates;
mod name_shares;
mod names;
mod space;
mod table;

pub use course::version_of_new;
pub use explanation::{MOST_EXPLAINED, Obstacle, Unplaced, Why};
pub use names::NameChange;
pub use space::{Resource, Shortage};

use crate::Moment;
use crate::liveness::{Brake, Standing};
use crate::records::{CatalogRecord, RolloutRecord, ShareRecord};
use crate::rollout::Trackers;
use crate::transaction::Revision;
use crate::view::{FleetView, Versioned};
use spillway_api::{IdentityKind, Name};
use std::collections::{BTreeMap, BTreeSet};

/// A host and a catalog: whose share it is.
pub type Place = (Name, Name);

/// All that placing depends on.
pub struct Situation<'a> {
    /// The records.
    pub view: &'a FleetView,
    /// What is known of a host.
    pub standing: &'a dyn Fn(&Name) -> Standing,
    /// Time in milliseconds since the record of a host was made, at least.
    pub recorded_for_ms: &'a dyn Fn(&Name) -> u64,
    /// Time in milliseconds for which a host has been told to give a machine with a name of the fleet up, at least.
    pub leaving_for_ms: &'a dyn Fn(&Name, &Name) -> u64,
    /// Why no host counts as lost now.
    pub brake: Option<Brake>,
    /// Counts that were just written, by host and catalog, and that the records do not have yet. These shares are not changed again
    /// until then.
    pub written: &'a BTreeMap<Name, BTreeMap<Name, u32>>,
    /// Machines with names of the fleet that hosts have, or have just been given, by host and catalog.
    pub names: &'a BTreeMap<Name, BTreeMap<Name, u32>>,
    /// Shares that hosts have refused lately, with the time in milliseconds for which they are passed over.
    pub refused: &'a BTreeMap<Place, u64>,
    /// Catalogs as they last were, deleted ones too: their machines take space until they are gone.
    pub known: &'a BTreeMap<Name, Versioned<CatalogRecord>>,
    /// Catalogs that wait for the end of a transaction.
    pub held: &'a BTreeSet<Name>,
    /// What is remembered of rollouts.
    pub trackers: &'a Trackers,
    /// Catalogs whose rollouts are being written.
    pub rolling: &'a BTreeSet<Name>,
    /// The time.
    pub now: Moment,
}

/// What is to be written, and what cannot be placed.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Plan {
    /// Shares that change.
    pub changes: Vec<Change>,
    /// Machines with names of the fleet that change.
    pub names: Vec<NameChange>,
    /// Catalogs whose machines are not all placed.
    pub unplaced: Vec<Unplaced>,
    /// Silent hosts whose machines would be replaced if the hosts were lost, with the shortest time in milliseconds after which they are.
    pub stakes: BTreeMap<Name, u64>,
    /// The next of these times that is not over: in so many milliseconds.
    pub next_in_ms: Option<u64>,
    /// Hosts that count as lost for a catalog, and have machines of it.
    pub lost: BTreeSet<Name>,
    /// Rollouts that change.
    pub rollouts: Vec<RolloutStep>,
    /// What rollouts wait for, by catalog.
    pub waits: BTreeMap<Name, String>,
}

/// A rollout that changes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RolloutStep {
    /// Catalog of the rollout.
    pub catalog: Name,
    /// The record as it is to become. Its times are left to who writes it.
    pub record: RolloutRecord,
    /// Revision that last wrote it; 0 if it is not there.
    pub modified: Revision,
}

/// A share that changes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Change {
    /// Host of the share.
    pub host: Name,
    /// Catalog of the share.
    pub catalog: Name,
    /// Count that it has; 0 if it is not there.
    pub from: u32,
    /// Count that it gets. With 0 it is deleted.
    pub to: u32,
    /// The share as it is to become; none: it is deleted.
    pub share: Option<ShareRecord>,
    /// Revision that last wrote it; 0 if it is not there.
    pub modified: Revision,
    /// Why it changes.
    pub cause: Cause,
}

/// Why a share changes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Cause {
    /// The host counts as lost.
    Lost,
    /// Somebody has declared the host dead, or removed it.
    Gone,
    /// Machines are ready elsewhere: the host is draining, or is none of those that the catalog may use.
    Left,
    /// The host has refused it.
    Refused,
    /// There are too many machines.
    Surplus,
    /// There is no such catalog any more.
    Deleted,
    /// There are too few machines.
    Missing,
    /// Only version, batch or generation change.
    Updated,
    /// The host has another number of machines with names of the fleet.
    Named,
}

/// Whether a catalog's machines may be made again elsewhere: nothing that they have written is kept.
pub fn is_replaceable(catalog: &CatalogRecord) -> bool {
    let spec = &catalog.spec;
    !spec.catalog.keeps_writes()
        && spec.catalog.data_disk_bytes.is_none()
        && spec.fleet.identity == IdentityKind::Any
}

/// Decides which shares change.
pub fn plan(situation: &Situation<'_>) -> Plan {
    let unreadable = table::unreadable(situation.view);
    let mut table = table::Table::of(situation, &unreadable);
    let mut plan = Plan::default();
    names::place(situation, &mut table, &mut plan);
    for n in 0..table.catalogs.len() {
        match table.catalogs[n].record.spec.fleet.identity {
            IdentityKind::Any => catalog::place(situation, &mut table, n, &mut plan),
            IdentityKind::Named => name_shares::follow(situation, &table, n, &mut plan),
        }
    }
    catalog::delete_unknown(situation, &table, &mut plan);
    plan.changes.retain(|change| !situation.held.contains(&change.catalog));
    plan
}

#[cfg(test)]
mod tests;
