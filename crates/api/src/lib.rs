//! The API of `spillwayd`: its objects and requests, and a client.
//!
//! Sizes are whole bytes in JSON and end in `_bytes`; times are RFC 3339 in UTC.

#![expect(unused_qualifications, reason = "what derives `ToSchema` writes paths in full")]

pub mod bounds;
mod catalog;
mod check;
pub mod choice;
pub mod client;
mod curve;
mod dirty;
mod event;
pub mod exposition;
mod figures;
mod fleet;
mod guest;
mod history;
mod host;
mod image;
mod leftover;
mod machine;
mod name;
mod nearest;
mod need;
mod operation;
mod problem;
mod registry;
mod report;
mod session;
mod size;
mod stores;
mod ttl;

pub use catalog::{
    BlockingMachine, Catalog, CatalogKind, CatalogRollback, CatalogSpec, CatalogUpdate,
    DEADLINE_SECONDS_DEFAULT, Difference, DisplayKind, FileSystem, Firmware, FleetOwner, Hardware,
    HistoryEntry, Network, NewCatalog, Ready, RefusedChange, ResetEvent, Rollout, RolloutAction,
    RolloutChange, RolloutProgress, RolloutState, RolloutStrategy, ScratchFormat, Tpm, Video, VmmKind,
    WatchdogAction, differences, fleet_differences, settings,
};
pub use check::{
    BootFacts, Finding, FindingKind, GuestSystem, ImageCheck, PartitionTable, Severity, Volume,
    VolumeContent, VolumeRole, WindowsVersion,
};
pub use curve::{CURVE_LIMITS, CatalogCurve, CurveFigures, CurvePoint, CurveTotals, DiskCurve, Fill};
pub use dirty::{DirtyRange, DirtyRanges};
pub use event::{Event, EventId, EventKind};
pub use figures::{
    CatalogFigures, DiskCounters, DiskLevels, Figure, Figures, Greatest, MachineCounts, MachineFigures,
    MachineFill, MachineForecast, PlaneCounters, StoreFigures, StreamCounters, StreamFigures,
};
pub use fleet::{
    ClaimFence, EtcdStatus, FleetCatalog, FleetCatalogRollback, FleetCatalogSpec, FleetCatalogUpdate,
    FleetClaim, FleetDetails, FleetEvent, FleetEventRequest, FleetFigures, FleetHost, FleetHostAction,
    FleetHostChange, FleetImage, FleetReach, FleetRollout, FleetRolloutState, FleetSelf, FleetSettings,
    FleetShare, HostClaim, HostClaimDecision, HostFigures, HostState, IdentityKind, IsolationAction,
    JoinToken, LOST_AFTER_SECONDS_DEFAULT, Membership, NewFleet, NewFleetCatalog, NewFleetImage,
    PlacerChange, PlacerHostReport, PlacerReport, PrometheusTargets, Spread, Wave, WaveError,
};
pub use guest::{
    Base64Bytes, GUEST_TIME_LIMIT_SECONDS_DEFAULT, GuestFile, GuestProgram, GuestProgramResult,
    MOST_GUEST_COMMAND_BYTES, MOST_GUEST_FILE_BYTES, MOST_GUEST_INPUT_BYTES, MOST_GUEST_OUTPUT_BYTES,
    MOST_GUEST_PATH_BYTES, MOST_GUEST_WORDS,
};
pub use history::{HISTORY_SERIES, History, HistorySeries};
pub use host::{HostAction, HostBudget, HostDetails, NewHostAction, UnreadableRecord};
pub use image::{
    CachedBootSet, CachedVersion, Image, ImageCommit, ImageDetails, ImageDownload, ImageImport, ImageRef,
    ImageVersion, Origin, Residency, SourceFormat, VersionChoice, VersionState,
};
pub use leftover::{Leftover, LeftoverDisk};
pub use machine::{
    Action, Claim, ClaimRenewal, Hypervisor, Identity, Machine, MachineAction, MachineDetails, MachineRun,
    MachineSize, MachineStatus, NewClaim, NewMachine, Phase, Power, Selector,
};
pub use name::{Name, NameError};
pub use nearest::nearest;
pub use need::Need;
pub use operation::{Operation, OperationOutcome, OperationState};
pub use problem::{ErrorCode, PROBLEM_JSON, PROBLEM_TYPES, Problem, ProblemType};
pub use registry::{
    CollectionOutcome, ImageManifest, ImagePull, ImagePush, PushOutcome, Registry, RegistryCheck,
    RegistryCollection,
};
pub use report::Report;
pub use session::{NewSession, Session, SessionProof, SessionRole};
pub use size::{SizeError, parse_size, size_text};
pub use spillway_control::{
    BaseCache, DiskLatency, DiskSettings, FullPolicy, LatencyHistogram, Mode as DiskMode, Rate,
};
pub use stores::{Space, SpaceLevel, StoreClass, StoreDetails, StoreFolder};
pub use ttl::{parse_seconds, parse_ttl};

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// Largest number of objects on a page of a list.
pub const MOST_ON_A_PAGE: usize = 1000;
/// Largest number of machine names in a request: as many as fit on one page.
pub const MOST_NAMES: usize = MOST_ON_A_PAGE;
/// Default path of the daemon's socket.
pub const DEFAULT_SOCKET: &str = "/run/spillway/spillwayd.sock";
/// Environment variable with the address of the daemon.
pub const SOCKET_VARIABLE: &str = "SPILLWAY_SOCKET";
/// Environment variable with the host of a fleet that requests are for.
pub const HOST_VARIABLE: &str = "SPILLWAY_HOST";
/// Environment variable with the token for requests over TCP.
pub const TOKEN_VARIABLE: &str = "SPILLWAY_TOKEN";
/// Environment variable with the file of trusted certificates.
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
    /// Token of the next page: the value of the parameter `continue` of the same request. Absent on the last page.
    /// Objects that are created or deleted meanwhile may be missing; no other object is, and none occurs twice.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub next: Option<String>,
}

/// Empty body of a response, where success is all there is to say.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct Empty {}
