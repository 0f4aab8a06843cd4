//! A fleet as one of its hosts sees it: its state, its hosts and its catalogs, and requests about them.

use super::{FleetCatalogSpec, FleetRollout};
use crate::{HistoryEntry, Hypervisor, Name, RolloutStrategy};
use jiff::Timestamp;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use utoipa::ToSchema;

/// A fleet, as the host that answers sees it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct FleetDetails {
    /// Name of the fleet, as in the address that daemons were given.
    pub name: Name,
    /// Identity of the fleet; none before it was created.
    #[serde(default)]
    pub fleet_id: Option<String>,
    /// Name of the host that answers.
    pub host: Name,
    /// How this host takes part in the fleet.
    pub membership: Membership,
    /// Why it does not take part, or what it waits for, for people.
    #[serde(default)]
    pub reason: Option<String>,
    /// Epoch of the host: it changes when its lease has ended, and not when its daemon is restarted. None: it has no lease.
    #[serde(default)]
    pub epoch: Option<i64>,
    /// Host whose daemon places machines.
    #[serde(default)]
    pub placer: Option<Name>,
    /// Whether Spillway places machines. If not, another program does.
    pub places: bool,
    /// What keeps lost hosts from being replaced, for people.
    #[serde(default)]
    pub brake: Option<String>,
    /// State of etcd, as the host that answers sees it.
    pub etcd: EtcdStatus,
    /// Number of hosts, by their state.
    pub hosts: BTreeMap<HostState, u32>,
    /// Keys of records that cannot be read, with the reasons. Nothing acts on them.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub unreadable: BTreeMap<String, String>,
}

/// How a host takes part in a fleet.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Membership {
    /// It has not reached etcd yet.
    Connecting,
    /// There is no fleet of this name yet.
    NoFleet,
    /// It is about to get a lease.
    Joining,
    /// It is a member, and has a lease.
    Member,
    /// It has no connection to etcd, or lost its lease. What is on the host goes on.
    Isolated,
    /// It may not take part.
    Refused,
}

/// State of etcd, as this host sees it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct EtcdStatus {
    /// Members that the host knows.
    pub members: Vec<String>,
    /// Member of etcd that the host asks now; none if no member answers.
    #[serde(default)]
    pub connected: Option<String>,
    /// Version of etcd that this member reports.
    #[serde(default)]
    pub version: Option<String>,
    /// Why no member answers, or what is wrong with etcd, for people.
    #[serde(default)]
    pub trouble: Option<String>,
    /// Revision of the records that the host has seen.
    pub revision: i64,
}

/// State of a host of a fleet.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum HostState {
    /// It renews its lease.
    Alive,
    /// Its lease has ended. It is not lost yet.
    Silent,
    /// Its lease has ended, but it answers other hosts: its machines are not replaced.
    Isolated,
    /// It counts as lost: its machines are replaced elsewhere.
    Lost,
    /// It was recorded, and has never had a lease.
    Absent,
}

/// A host of a fleet.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct FleetHost {
    /// Name of the host, unique in its fleet.
    pub name: Name,
    /// Zone of the host: hosts of a zone may fail together.
    pub zone: Name,
    /// Labels of the host, which catalogs may require.
    pub labels: BTreeMap<Name, String>,
    /// State of the host, as far as the fleet knows.
    pub state: HostState,
    /// Why a silent host is not replaced, for people.
    #[serde(default)]
    pub reason: Option<String>,
    /// Whether the host gets no further machines.
    pub cordoned: bool,
    /// Whether its machines are replaced elsewhere.
    pub draining: bool,
    /// Address at which other hosts reach its daemon; none while it has no lease.
    #[serde(default)]
    pub address: Option<String>,
    /// Version of its daemon; none while it has no lease.
    #[serde(default)]
    pub version: Option<String>,
    /// What runs its machines; none while it has no lease.
    #[serde(default)]
    pub hypervisor: Option<Hypervisor>,
    /// Epoch of the host; none while it has no lease.
    #[serde(default)]
    pub epoch: Option<i64>,
    /// What it is to have of each catalog, and what it has reported.
    pub shares: Vec<FleetShare>,
    /// Whether the last report of the host leaves out catalogs or images, because it would be too long. The fleet takes catalogs that are left out for empty
    /// on this host.
    #[serde(default)]
    pub report_cut: bool,
    /// Memory that machines of the fleet may use on the host, in bytes; none before it has reported.
    #[serde(default)]
    pub memory_bytes: Option<u64>,
    /// Of that, memory of the machines that it is to have, in bytes.
    pub used_bytes: u64,
}

/// The share of a host of a catalog: what it is to have, and what it has reported at most ten seconds ago.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct FleetShare {
    /// Host that has the share.
    pub host: Name,
    /// Catalog that the share is of.
    pub catalog: Name,
    /// Machines that the host is to have.
    pub wanted: u32,
    /// Version of the image that they are to get.
    pub version: u32,
    /// Machines that the host has.
    pub count: u32,
    /// Number of machines that run and whose guests are ready.
    pub ready: u32,
    /// Number of machines that are off because nobody has asked for them.
    pub off: u32,
    /// Of those that are ready or off, those of the version.
    pub updated: u32,
    /// Number of machines that somebody has claimed.
    pub claimed: u32,
    /// Machines that cannot be started.
    pub failed: u32,
    /// Why the host does not do what its share says, for people.
    #[serde(default)]
    pub refused: Option<String>,
}

/// A catalog of a fleet.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct FleetCatalog {
    /// Name of the catalog, unique in its fleet.
    pub name: Name,
    /// Revision of the catalog, which changes with each change. A request may give the one that it was decided on (`If-Match`).
    pub revision: i64,
    /// Settings of the catalog, as they were given for the whole fleet.
    pub spec: FleetCatalogSpec,
    /// Version of the image that machines are to get.
    pub version: u32,
    /// How running machines get another version.
    #[schema(value_type = RolloutStrategy)]
    pub strategy: RolloutStrategy,
    /// Number of the change of settings or version, counted from 1.
    pub generation: u64,
    /// Versions that the catalog has had, oldest first, with the current one last.
    pub history: Vec<HistoryEntry>,
    /// Time at which the catalog was created.
    #[schema(value_type = String, format = DateTime)]
    pub created: Timestamp,
    /// The last rollout of a version over the hosts; none: the catalog has the version that it was created with.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rollout: Option<FleetRollout>,
    /// Shares of the hosts, in the order of their names.
    pub shares: Vec<FleetShare>,
    /// Machines that no host is to have, because none has space for them.
    pub unplaced: u32,
    /// Why, by host, for people. Of many hosts the first ones, by their names.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub unplaced_because: BTreeMap<Name, String>,
    /// Number of hosts that are not in `unplaced_because`, and have no space either.
    #[serde(default)]
    pub unplaced_more_hosts: u32,
}

/// Body of the request that creates a catalog of a fleet.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct NewFleetCatalog {
    /// Name of the new catalog, unique in its fleet.
    pub name: Name,
    /// Settings of the new catalog; whatever is left out takes its default.
    pub spec: FleetCatalogSpec,
}

/// Asks for another version of the image of a catalog of a fleet.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct FleetCatalogUpdate {
    /// Version that machines are to get.
    pub version: u32,
    /// How running machines get it; none: as before.
    #[serde(default)]
    #[schema(value_type = Option<RolloutStrategy>)]
    pub strategy: Option<RolloutStrategy>,
    /// Machines that may fail before the rollout halts.
    #[serde(default)]
    pub max_failed: u32,
    /// Seconds without progress after which the rollout halts. By default 600.
    #[serde(default)]
    pub deadline_seconds: Option<u32>,
}

/// Asks for an action on a host of a fleet.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct FleetHostChange {
    /// Action that is applied to the host.
    pub action: FleetHostAction,
}

/// An action on a host of a fleet.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum FleetHostAction {
    /// Give the host no further machines.
    Cordon,
    /// Give it machines again, after it was cordoned or drained.
    Uncordon,
    /// Replace its machines elsewhere, and give it no further ones.
    Drain,
    /// Replace its machines elsewhere at once: whoever asks for it knows that they do not run any more.
    DeclareDead,
}

/// What the host that places knows, beyond the records of the fleet.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct PlacerReport {
    /// States of the hosts, by name.
    pub hosts: BTreeMap<Name, PlacerHostReport>,
    /// What keeps lost hosts from being replaced, for people.
    #[serde(default)]
    pub brake: Option<String>,
    /// For catalogs that do not fit: why, by host, for people.
    pub unplaced: BTreeMap<Name, BTreeMap<Name, String>>,
    /// For those of which not all hosts are in `unplaced`: the number of the others.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub unplaced_more: BTreeMap<Name, u32>,
    /// What rollouts wait for, by catalog, for people.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub waits: BTreeMap<Name, String>,
}

/// What the host that places knows of a host.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct PlacerHostReport {
    /// State of the host, as the placer sees it.
    pub state: HostState,
    /// Why it is not replaced, or not all of it, for people.
    #[serde(default)]
    pub reason: Option<String>,
}
