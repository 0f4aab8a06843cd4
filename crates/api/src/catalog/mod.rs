//! Catalogs: sets of machines of one kind.

mod change;
mod difference;
mod hardware;
mod ready;
mod rollout;
mod scratch_format;
mod spec;

pub use change::RefusedChange;
pub use difference::{Difference, differences, fleet_differences, settings};
pub use hardware::{DisplayKind, Firmware, Hardware, Network, Tpm, Video, VmmKind, WatchdogAction};
pub use ready::Ready;
pub use rollout::{
    BlockingMachine, CatalogRollback, CatalogUpdate, DEADLINE_SECONDS_DEFAULT, Rollout, RolloutAction,
    RolloutChange, RolloutProgress, RolloutState, RolloutStrategy,
};
pub use scratch_format::{FileSystem, ScratchFormat};
pub use spec::{CatalogKind, CatalogSpec, ResetEvent};

use crate::{IsolationAction, Name};
use jiff::Timestamp;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// A stored catalog: its settings, and the progress of its rollout.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Catalog {
    /// Name of the catalog, unique on its host.
    pub name: Name,
    /// Revision of the catalog, which changes with each change. A request may give the one that it was decided on
    /// (`If-Match`).
    #[serde(default)]
    pub revision: u64,
    /// Settings of the catalog: the desired state of its machines.
    pub spec: CatalogSpec,
    /// Version that machines take at their next start.
    pub version: u32,
    /// Versions that the catalog has had, oldest first, with the current one last. 31 older entries are kept, and if
    /// disks keep their data, at least one of each version.
    pub history: Vec<HistoryEntry>,
    /// Update in progress, which restarts running machines. None: machines take the version at their next start.
    #[serde(default)]
    pub rollout: Option<Rollout>,
    /// Fleet that the catalog belongs to: it is changed by the fleet alone. None: it belongs to its host.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fleet: Option<FleetOwner>,
    /// Time at which the catalog was created.
    #[schema(value_type = String, format = DateTime)]
    pub created: Timestamp,
    /// Warnings about settings that are allowed but may be a mistake, one sentence each.
    pub warnings: Vec<String>,
    /// Settings with all defaults, as machines would have them. Only responses to a creation or a change with `dry_run` have it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<CatalogSpec>)]
    pub effective: Option<Box<CatalogSpec>>,
}

impl Catalog {
    /// The catalog as the response to a `dry_run` has it: with its settings as machines would have them.
    pub fn with_effective(self) -> Catalog {
        let effective = Some(Box::new(self.spec.with_defaults(&self.name)));
        Catalog { effective, ..self }
    }
}

/// The fleet that a catalog of a host belongs to.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct FleetOwner {
    /// Name of the fleet that decides about the catalog.
    pub fleet: Name,
    /// Generation of the fleet's catalog whose settings the host has carried out.
    pub generation: u64,
    /// What the host does with the machines when it is isolated, if they have names of the fleet. Such machines start only while the
    /// fleet says that this host has them. Absent for machines that are interchangeable.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub named: Option<IsolationAction>,
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
