//! Fleets: catalogs whose machines many hosts share.

mod claim;
mod image;
mod reach;
mod request;
mod rollout;
mod seeing;
mod spec;
mod status;
mod wave;

pub use claim::{ClaimFence, FleetClaim, HostClaim, HostClaimDecision};
pub use image::{FleetImage, NewFleetImage};
pub use reach::{FleetReach, FleetSelf};
pub use request::{FleetCatalogRollback, JoinToken, NewFleet, PlacerChange};
pub use rollout::{FleetRollout, FleetRolloutState};
pub use seeing::{FleetEvent, FleetEventRequest, FleetFigures, HostFigures, PrometheusTargets};
pub use spec::{
    FleetCatalogSpec, FleetSettings, IdentityKind, IsolationAction, LOST_AFTER_SECONDS_DEFAULT, Spread,
};
pub use status::{
    EtcdStatus, FleetCatalog, FleetCatalogUpdate, FleetDetails, FleetHost, FleetHostAction, FleetHostChange,
    FleetShare, HostState, Membership, NewFleetCatalog, PlacerHostReport, PlacerReport,
};
pub use wave::{Wave, WaveError};
