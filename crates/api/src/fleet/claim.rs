//! Claims of machines of a fleet. Owns what the hosts say to each other about them, too.
//!
//! Invariant: a fence never changes while its claim lasts.

use crate::{ErrorCode, MachineDetails, Name};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// Claim of a machine on one of the hosts of a fleet.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct FleetClaim {
    /// Host that has the machine.
    pub host: Name,
    /// Machine that was claimed, with its state.
    pub machine: MachineDetails,
    /// Address of the guest, if its host knows it: an address, or an address and port of that host.
    pub address: Option<String>,
    /// Id of the claim, for its renewal and release.
    pub claim: String,
    /// Place of the claim in the order of all claims that the fleet makes on this host.
    pub fence: ClaimFence,
    /// Id of the request, which its `Idempotency-Key` names: with it the request can be repeated.
    pub request: String,
    /// Whether an earlier request with this id has made the claim.
    pub is_repeated: bool,
}

/// Place of a claim in the order of the claims that the fleet makes on a host. Of two claims on one host, the later one has the larger
/// fence: the larger `host_epoch`, and of equal ones the larger `revision`. Fences of different hosts cannot be compared.
/// After records of etcd or of the host were restored from a backup, fences may be smaller than before.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, ToSchema)]
pub struct ClaimFence {
    /// Epoch of the host in the fleet when it made the claim.
    pub host_epoch: i64,
    /// Number of the transaction of the host's records that made the claim.
    pub revision: u64,
}

/// A claim as its host describes it to the daemon that has asked for it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct HostClaim {
    /// Machine that was claimed, with its state.
    pub machine: MachineDetails,
    /// Id of the claim, for its renewal and release.
    pub claim: String,
    /// Fence of the claim: a later claim on the host has a larger one.
    pub fence: ClaimFence,
    /// Number of the attempt that made it.
    pub attempt: u64,
    /// Whether an earlier request with this id has made the claim.
    pub is_repeated: bool,
}

/// What a host has decided about a claim for its fleet.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(tag = "result", rename_all = "kebab-case")]
pub enum HostClaimDecision {
    /// The host has the claim.
    Claimed(Box<HostClaim>),
    /// The host has made a claim for this request, and it has ended.
    Ended {
        /// Machine that the host has claimed for the request.
        machine: Name,
        /// Number of the attempt that made the claim.
        attempt: u64,
    },
    /// The host has no claim for this request, and has made none.
    Refused {
        /// Code of the reason, a stable word for programs.
        code: ErrorCode,
        /// Reason why the host has not claimed a machine, for people.
        message: String,
    },
    /// The host has no valid lease, and takes no claims of its fleet.
    Isolated,
    /// The host has closed this attempt for a later one.
    Superseded {
        /// Number of the later attempt.
        attempt: u64,
    },
    /// The host has no claim for this request, and makes none for an attempt that is so old that the host may have forgotten that it was
    /// closed, or that was sent to it before it got its epoch. A later attempt has to close those before again.
    Stale,
    /// The host has no claim for this request, and earlier attempts can make none any more.
    Closed,
}
