//! Catalogs: machines of one kind.

mod difference;
mod ready;
mod rollout;
mod spec;

pub use difference::{Difference, differences, settings};
pub use ready::Ready;
pub use rollout::{
    CatalogRollback, CatalogUpdate, DEADLINE_SECONDS_DEFAULT, InTheWay, Rollout, RolloutAction,
    RolloutChange, RolloutProgress, RolloutState, RolloutStrategy,
};
pub use spec::{CatalogKind, CatalogSpec, Network, ResetEvent};

use crate::Name;
use jiff::Timestamp;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// A stored catalog: its settings, and the progress of its rollout.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Catalog {
    /// Name of the catalog, unique on its host.
    pub name: Name,
    /// Another one after each change. A request may carry the one that it was decided on (`If-Match`).
    #[serde(default)]
    pub revision: u64,
    /// Settings of the catalog: the desired state of its machines.
    pub spec: CatalogSpec,
    /// What its machines take at their next start.
    pub version: u32,
    /// The versions that it has had, oldest first, the present one last. Of the older ones 31 are remembered; where disks
    /// keep what is written, each version once at least.
    pub history: Vec<HistoryEntry>,
    /// The update that is being carried out: machines that run are restarted. None: they take the version when they are.
    #[serde(default)]
    pub rollout: Option<Rollout>,
    /// Time at which the catalog was created.
    #[schema(value_type = String, format = DateTime)]
    pub created: Timestamp,
    /// Settings that are allowed and may be a mistake, a sentence each.
    pub warnings: Vec<String>,
}

/// Body of the request that creates a catalog.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct NewCatalog {
    /// Name of the new catalog, unique on its host.
    pub name: Name,
    /// Settings of the new catalog; whatever is left out takes its default.
    pub spec: CatalogSpec,
}

/// A version that a catalog has had.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct HistoryEntry {
    /// Name of the image that the catalog used.
    pub image: Name,
    /// Version of that image, counted from 1.
    pub version: u32,
    /// Time from which on new machines got this version.
    #[schema(value_type = String, format = DateTime)]
    pub since: Timestamp,
}
