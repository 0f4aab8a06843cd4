//! What hosts of a fleet say of themselves, and of whether they reach each other.

use crate::Name;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// A host of a fleet, as its daemon describes itself.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct FleetSelf {
    /// Name of the host in the fleet.
    pub host: Name,
    /// Epoch of the host: the revision of etcd at which it has joined last. Absent if the daemon does not see itself in the fleet.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub epoch: Option<i64>,
    /// Identity of the daemon's process, another one at each start.
    pub instance: String,
}

/// Whether a host of a fleet reaches another one.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct FleetReach {
    /// Name of the other host.
    pub host: Name,
    /// Whether its daemon has answered within 2 s, or has refused this host.
    pub reaches: bool,
    /// What has kept the daemon from an answer, for people. Absent if it has answered the question.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub why: Option<String>,
}
