//! Rollouts of a version over the hosts of a fleet, as a host describes them. Owns their fields and states.
//!
//! Invariant: figures are what hosts have reported, at most some 12 seconds ago.

use crate::Name;
use jiff::Timestamp;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// A rollout of a version over the hosts of a catalog, in waves.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct FleetRollout {
    /// What the rollout does now, or why it does nothing.
    pub state: FleetRolloutState,
    /// Why it has halted, or what it waits for, for people.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
    /// Image of the version before.
    pub from_image: Name,
    /// Version before, which hosts keep that no wave has reached.
    pub from_version: u32,
    /// Image of the version that is rolled out.
    pub to_image: Name,
    /// Version that is rolled out.
    pub to_version: u32,
    /// Number of the wave, counted from 1.
    pub wave: u32,
    /// Number of waves of hosts in all.
    pub waves: u32,
    /// Hosts that are to have the version by now.
    pub hosts_started: u32,
    /// Of these, hosts whose machines are ready or off with the version, except claimed and failed ones.
    pub hosts_done: u32,
    /// Hosts that have machines of the catalog.
    pub hosts: u32,
    /// Machines that have failed on hosts that have the version.
    pub failed: u32,
    /// Machines that may fail before the rollout halts.
    pub max_failed: u32,
    /// Seconds without progress after which the rollout halts.
    pub deadline_seconds: u32,
    /// Time at which the rollout was asked for.
    #[schema(value_type = String, format = DateTime)]
    pub since: Timestamp,
    /// Time at which its state or wave has changed.
    #[schema(value_type = String, format = DateTime)]
    pub changed: Timestamp,
}

/// State of a rollout over the hosts of a catalog.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum FleetRolloutState {
    /// Hosts bring the version. No machine gets it yet.
    Prefetch,
    /// Hosts get the version, wave after wave.
    Running,
    /// Somebody has paused it: no further machine is restarted until it is resumed.
    Paused,
    /// It has stopped by itself: no further machine is restarted until it is resumed, or the catalog gets another version.
    Halted,
    /// Somebody has ended it: hosts keep the version that they have, until the catalog gets another one.
    Aborted,
    /// All hosts have the version.
    Done,
}
