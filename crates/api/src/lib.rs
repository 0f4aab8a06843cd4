//! What `spillwayd` and its clients say to each other: the objects, what can be asked, and a client.
//!
//! Sizes are whole bytes in JSON and end in `_bytes`; times are RFC 3339 in UTC.

#![expect(unused_qualifications, reason = "what derives `ToSchema` writes paths in full")]

pub mod bounds;
mod catalog;
mod check;
pub mod client;
mod curve;
mod event;
pub mod exposition;
mod figures;
mod host;
mod image;
mod leftover;
mod machine;
mod name;
mod nearest;
mod operation;
mod problem;
mod size;
mod stores;
mod ttl;

pub use catalog::{
    Catalog, CatalogKind, CatalogRollback, CatalogSpec, CatalogUpdate, DEADLINE_SECONDS_DEFAULT, Difference,
    HistoryEntry, InTheWay, Network, NewCatalog, Ready, ResetEvent, Rollout, RolloutAction, RolloutChange,
    RolloutProgress, RolloutState, RolloutStrategy, differences, settings,
};
pub use check::{
    BootFacts, Finding, FindingKind, ImageCheck, PartitionTable, Severity, Volume, VolumeContent, VolumeRole,
};
pub use curve::{CURVE_LIMITS, CurveFigures, CurvePoint, CurveTotals, DiskCurve, Fill};
pub use event::{Event, EventId, EventKind};
pub use figures::{
    CatalogFigures, DiskCounters, DiskLevels, Figure, Figures, MachineCounts, MachineFigures, PlaneCounters,
    StoreFigures,
};
pub use host::{HostAction, HostBudget, HostDetails, NewHostAction, UnreadableRecord};
pub use image::{
    Image, ImageCommit, ImageDetails, ImageImport, ImageRef, ImageVersion, Origin, SourceFormat,
    VersionChoice, VersionState,
};
pub use leftover::{LeftDisk, Leftover};
pub use machine::{
    Action, Claim, ClaimRenewal, Hypervisor, Identity, Machine, MachineAction, MachineDetails, MachineRun,
    MachineStatus, NewClaim, Phase, Power, Selector,
};
pub use name::{Name, NameError};
pub use nearest::nearest;
pub use operation::{Operation, OperationState};
pub use problem::{ErrorCode, PROBLEM_JSON, PROBLEM_TYPES, Problem, ProblemType};
pub use size::{SizeError, parse_size, size_text};
pub use spillway_control::{BaseCache, DiskSettings, FullPolicy, Mode as DiskMode, Rate};
pub use stores::{Space, SpaceLevel, StoreClass, StoreDetails, StoreFolder};
pub use ttl::{parse_seconds, parse_ttl};

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// Objects that a page of a list can have.
pub const MOST_ON_A_PAGE: usize = 1000;
/// Names of machines that a request can carry: as many as come back on one page.
pub const MOST_NAMES: usize = MOST_ON_A_PAGE;
/// Where the daemon listens if nothing else is said.
pub const DEFAULT_SOCKET: &str = "/run/spillway/spillwayd.sock";
/// The variable that says where it listens.
pub const SOCKET_VARIABLE: &str = "SPILLWAY_SOCKET";
/// The variable that holds the token of who asks over TCP.
pub const TOKEN_VARIABLE: &str = "SPILLWAY_TOKEN";
/// The variable that says which certificates are trusted.
pub const CA_VARIABLE: &str = "SPILLWAY_CA";

/// A list of objects, in the order of their names.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct List<T> {
    /// Objects of the list, in the order of their names or ages.
    pub items: Vec<T>,
}

/// A part of a list that may be long, in the order of the objects' names.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Page<T> {
    /// The objects on this page, at most as many as `limit` says.
    pub items: Vec<T>,
    /// Token of the next page: the value of the parameter `continue` of the same request. Absent on the last page. Objects
    /// that are made or removed meanwhile may be left out; no other object is, and none comes twice.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub next: Option<String>,
}

/// Nothing, where there is nothing to say but that it is done.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct Empty {}
