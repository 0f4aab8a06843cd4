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
pub use spec::{
    BaseCache, CatalogKind, CatalogSpec, DiskMode, FullPolicy, Network, OVERFLOW_BYTES_DEFAULT,
    RAM_BYTES_DEFAULT, Rate, ResetEvent,
};

use crate::Name;
use jiff::Timestamp;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// A catalog as it is.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Catalog {
    /// Its name.
    pub name: Name,
    /// Another one after each change. A request may carry the one that it was decided on (`If-Match`).
    #[serde(default)]
    pub revision: u64,
    /// What is wanted.
    pub spec: CatalogSpec,
    /// What its machines take at their next start.
    pub version: u32,
    /// The versions that it has had, oldest first, the present one last. Of the older ones 31 are remembered; where disks
    /// keep what is written, each version once at least.
    pub history: Vec<HistoryEntry>,
    /// The update that is being carried out: machines that run are restarted. None: they take the version when they are.
    #[serde(default)]
    pub rollout: Option<Rollout>,
    /// When it was made.
    #[schema(value_type = String, format = DateTime)]
    pub created: Timestamp,
    /// What may not be meant so.
    pub warnings: Vec<String>,
}

/// Asks for a catalog.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct NewCatalog {
    /// Its name.
    pub name: Name,
    /// What is wanted.
    pub spec: CatalogSpec,
}

/// A version that a catalog has had.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct HistoryEntry {
    /// The image.
    pub image: Name,
    /// Its version.
    pub version: u32,
    /// Since when.
    #[schema(value_type = String, format = DateTime)]
    pub since: Timestamp,
}
