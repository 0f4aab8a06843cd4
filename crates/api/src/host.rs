//! The host and its budget.

use crate::Hypervisor;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// The host as its daemon sees it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct HostDetails {
    /// Whether the host is closed: no machine is started or claimed until it is opened or starts again.
    pub closed: bool,
    /// Number of machines with a process that runs, starts or ends, including deleted machines.
    pub busy: u32,
    /// Hypervisor that runs the machines of this host.
    pub hypervisor: Hypervisor,
    /// Range of the users that machines' QEMUs run as, `FIRST-LAST`, one user for each machine; null: they run as the
    /// daemon, or the daemon starts none.
    pub guest_users: Option<String>,
    /// Version of the daemon that answers.
    pub version: String,
    /// Records that this daemon cannot read. Their objects are left alone, and their names stay in use.
    pub unreadable: Vec<UnreadableRecord>,
    /// Budget of the host for machines, and what they are promised of it.
    pub budget: HostBudget,
}

/// A record that a daemon cannot read: another version has written it, or it is damaged.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct UnreadableRecord {
    /// Key of the record: its kind and its name, such as `machines/desk-001`.
    pub key: String,
    /// Version of the records when it was written.
    pub version: u32,
    /// Reason why the record cannot be read.
    pub why: String,
    /// Advice for the administrator: how to repair or remove the record.
    pub advice: String,
}

/// Budget of the host for machines, and what running and starting ones are promised of it. A machine that does not fit
/// waits until others return their share.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct HostBudget {
    /// Memory of the host, in bytes.
    pub host_memory_bytes: u64,
    /// Memory that is reserved for the host itself, in bytes.
    pub reserve_bytes: u64,
    /// Largest promise to guests and RAM tiers together, in bytes.
    pub memory_limit_bytes: u64,
    /// Memory promised to guests, in bytes. With hypervisor `none` the daemon does not manage it, and this is 0.
    pub guest_bytes: u64,
    /// Memory promised to RAM tiers by their limits, in bytes.
    pub ram_bytes: u64,
    /// Largest promise to RAM tiers, in bytes.
    pub ram_limit_bytes: u64,
    /// Memory guaranteed to RAM tiers, in bytes.
    pub ram_guaranteed_bytes: u64,
    /// Largest guarantee to RAM tiers, in bytes.
    pub ram_guarantee_limit_bytes: u64,
    /// Processors of the host that are online.
    pub host_cpus: u32,
    /// Virtual processors that the guests of running machines have.
    pub vcpus: u64,
    /// Largest number of virtual processors that guests may have together.
    pub vcpu_limit: u64,
    /// Number of machines that wait because they do not fit.
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
    /// Stop all machines, each with the grace of its catalog, and start none until the host is opened or starts again.
    Close,
    /// Allow machines to start again: warm pools are filled; other machines start on request.
    Open,
}
