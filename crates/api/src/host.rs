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
    /// Who runs machines.
    pub hypervisor: Hypervisor,
    /// The numbers of the users that machines' QEMUs run as, `FIRST-LAST`, one user for each machine; null: they run as the
    /// daemon does, or the daemon starts none.
    pub guest_users: Option<String>,
    /// The daemon's version.
    pub version: String,
}

/// Asks the host to do something.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct NewHostAction {
    /// What.
    pub action: HostAction,
}

/// What a host can be asked.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum HostAction {
    /// To stop all machines, each with the grace of its catalog, and to start none until it is opened or starts again.
    Close,
    /// To start machines again: pools are filled; others are started by whoever wants them.
    Open,
}
