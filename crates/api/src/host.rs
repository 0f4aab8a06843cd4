//! The host itself.

use crate::Hypervisor;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// The host as its daemon sees it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct HostDetails {
    /// No machine is started or given away until it is opened, or started again.
    pub closed: bool,
    /// Machines of which something runs, or is being started or ended; those too that are deleted.
    pub busy: u32,
    /// Hypervisor that runs the machines of this host.
    pub hypervisor: Hypervisor,
    /// The numbers of the users that machines' QEMUs run as, `FIRST-LAST`, one user for each machine; null: they run as the
    /// daemon does, or the daemon starts none.
    pub guest_users: Option<String>,
    /// Version of the daemon that answers.
    pub version: String,
    /// Records that this daemon cannot read. Nothing is done about what they are of, and their names stay taken.
    pub unreadable: Vec<UnreadableRecord>,
    /// What machines may take of the host, and what they were promised of it.
    pub budget: HostBudget,
}

/// A record that a daemon cannot read: another version has written it, or it is damaged.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct UnreadableRecord {
    /// Where it is among the records: its kind and its name, such as `machines/desk-001`.
    pub key: String,
    /// The version of the records that wrote it.
    pub version: u32,
    /// Why it cannot be read.
    pub why: String,
    /// Advice for the administrator: how to repair or remove the record.
    pub advice: String,
}

/// What machines may take of the host, and what those that run or start were promised of it. A machine that does not fit
/// waits until others give something back.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct HostBudget {
    /// Memory of the host, in bytes.
    pub host_memory_bytes: u64,
    /// What of that is kept for the host itself.
    pub reserve_bytes: u64,
    /// Guests' memory and RAM tiers together may be promised so much.
    pub memory_limit_bytes: u64,
    /// Promised to guests. With hypervisor `none` their memory is not the daemon's to promise, and this is 0.
    pub guest_bytes: u64,
    /// Promised to RAM tiers: their limits.
    pub ram_bytes: u64,
    /// RAM tiers may be promised so much.
    pub ram_limit_bytes: u64,
    /// What of RAM tiers is guaranteed.
    pub ram_guaranteed_bytes: u64,
    /// RAM tiers may be guaranteed so much.
    pub ram_guarantee_limit_bytes: u64,
    /// Processors of the host that are online.
    pub host_cpus: u32,
    /// Virtual processors that the guests of running machines have.
    pub vcpus: u64,
    /// Guests may be promised so many processors.
    pub vcpu_limit: u64,
    /// Machines that wait since they do not fit.
    pub waiting: u32,
}

/// Asks the host to do something.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct NewHostAction {
    /// Action that the host takes.
    pub action: HostAction,
}

/// An action that a host can be asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum HostAction {
    /// To stop all machines, each with the grace of its catalog, and to start none until it is opened or starts again.
    Close,
    /// To start machines again: pools are filled; others are started by whoever wants them.
    Open,
}
