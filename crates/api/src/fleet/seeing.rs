//! What happens on all hosts of a fleet: events, figures, and where Prometheus finds them.

use crate::{Event, EventId, Figures, HostState, Name};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use utoipa::ToSchema;

/// An event of a host of a fleet, or that a host cannot be asked.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct FleetEvent {
    /// Host that the event is of.
    pub host: Name,
    /// The event; none if the host cannot be asked now: its events follow when it can.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub event: Option<Event>,
    /// Why the host cannot be asked, for people.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub unreachable: Option<String>,
}

/// Asks for the events of all hosts.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct FleetEventRequest {
    /// For each host the id of the last event that is known: later ones follow, and none is left out.
    #[serde(default)]
    #[schema(value_type = BTreeMap<String, String>)]
    pub after: BTreeMap<Name, EventId>,
    /// For hosts that are not in `after`: number of past events to begin with.
    #[serde(default)]
    pub limit: u32,
}

/// Figures of all hosts of a fleet.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct FleetFigures {
    /// Hosts, in the order of their names.
    pub hosts: Vec<HostFigures>,
}

/// Figures of a host of a fleet.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct HostFigures {
    /// Name of the host, unique in its fleet.
    pub host: Name,
    /// Zone of the host, as its daemon was told.
    pub zone: Name,
    /// State of the host, as far as the fleet knows.
    pub state: HostState,
    /// Its figures by catalog, without those of single machines; none if it cannot be asked.
    #[serde(default)]
    pub figures: Option<Figures>,
    /// Why it cannot be asked, for people.
    #[serde(default)]
    pub unreachable: Option<String>,
}

/// Hosts whose figures Prometheus can read, in the form of its HTTP service discovery.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct PrometheusTargets {
    /// Addresses to read the figures from, `HOST:PORT`.
    pub targets: Vec<String>,
    /// Labels of what is read; `__metrics_path__` is the path to read from.
    pub labels: BTreeMap<String, String>,
}
