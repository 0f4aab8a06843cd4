//! Another version for machines: what is asked, and what is being carried out.

use crate::{ImageRef, Name, bounds};
use jiff::Timestamp;
use serde::{Deserialize, Serialize};
use std::fmt;
use std::str::FromStr;
use utoipa::ToSchema;

/// How long a rollout may make no progress if nothing is said.
pub const DEADLINE_SECONDS_DEFAULT: u32 = 600;

/// When machines that run take another version.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum RolloutStrategy {
    /// When they are started next, by whomever.
    #[default]
    NextStart,
    /// Immediately: all machines are restarted at once.
    Now,
    /// Now: so many at a time are restarted.
    Batch(u32),
}

impl fmt::Display for RolloutStrategy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            RolloutStrategy::NextStart => f.write_str("next-start"),
            RolloutStrategy::Now => f.write_str("now"),
            RolloutStrategy::Batch(machines) => write!(f, "batch={machines}"),
        }
    }
}

impl FromStr for RolloutStrategy {
    type Err = String;

    /// As people write it: `next-start`, `now`, `batch=5`.
    fn from_str(text: &str) -> Result<RolloutStrategy, String> {
        let machines = text.strip_prefix("batch=").and_then(|k| k.parse::<u32>().ok());
        let machines = machines.filter(|k| bounds::BATCH.check("batch", (*k).into()).is_ok());
        match (text, machines) {
            ("next-start", _) => Ok(RolloutStrategy::NextStart),
            ("now", _) => Ok(RolloutStrategy::Now),
            (_, Some(machines)) => Ok(RolloutStrategy::Batch(machines)),
            _ => Err("a rollout is next-start, now or batch=K, such as batch=5".into()),
        }
    }
}

/// An update that is being carried out: until it has ended, machines that run with another version are restarted.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Rollout {
    /// How machines that run now get the new version.
    pub strategy: RolloutStrategy,
    /// How long machines that somebody has claimed are left alone; until they are released if nothing is said.
    pub grace_seconds: Option<u32>,
    /// How many seconds may pass without progress before the rollout counts as stalled. It goes on when it can.
    pub deadline_seconds: u32,
    /// So many machines that fail are passed over; each one more holds a place of the batch until it is ready.
    pub max_failed: u32,
    /// No further machine is restarted until the rollout is resumed.
    pub paused: bool,
    /// Time at which the rollout was requested.
    #[schema(value_type = String, format = DateTime)]
    pub since: Timestamp,
    /// Name of the image whose version the machines get.
    pub image: Name,
    /// Version of the image that the rollout brings, counted from 1.
    pub version: u32,
    /// How far it is. Absent until the daemon has looked at the machines for the first time, which takes a moment, and while
    /// the host is closed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub progress: Option<RolloutProgress>,
}

/// How far a rollout is. `done`, `failed`, `waiting` and `restarting` count different machines; the rest of `of` are still to
/// be restarted.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct RolloutProgress {
    /// Whether the rollout makes progress, and if not why.
    pub state: RolloutState,
    /// Why it does not move, for people.
    pub reason: Option<String>,
    /// Machines that run with the version, or keep the one that their disk stays on, and are ready.
    pub done: u32,
    /// Machines that are to run.
    pub of: u32,
    /// Machines that were restarted, or start for another reason, and are not ready yet.
    pub restarting: u32,
    /// Machines that cannot be started.
    pub failed: u32,
    /// Machines that run with another version and are left alone, since somebody has claimed them.
    pub waiting: u32,
    /// When a machine was last done or restarted.
    #[schema(value_type = String, format = DateTime)]
    pub progressed: Timestamp,
    /// Machines that the rollout waits for, at most 16: those first that have failed.
    pub in_the_way: Vec<InTheWay>,
}

/// State of a rollout of an image version to the machines of a catalog.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum RolloutState {
    /// It restarts machines, and its deadline has not passed.
    Running,
    /// Nothing is left but machines that somebody has claimed.
    Waiting,
    /// It has made no progress within its deadline.
    Stalled,
    /// A user has paused the rollout; `resume` continues it.
    Paused,
}

/// A machine that a rollout waits for.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct InTheWay {
    /// Name of the machine that keeps the rollout from finishing.
    pub machine: Name,
    /// Why it is not done, for people.
    pub why: String,
}

/// Asks a rollout to do something.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct RolloutChange {
    /// Action that the rollout takes.
    pub action: RolloutAction,
}

/// An action that a rollout can be asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum RolloutAction {
    /// To restart no further machine. Those that it has restarted come up.
    Pause,
    /// To go on after a pause. Its deadline begins anew.
    Resume,
    /// To end. Machines that have the version keep it; the others take it at their next start.
    Abort,
}

/// Asks for another version, or for another way that machines come to it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct CatalogUpdate {
    /// The image, and the version if it is to stay the same: without one, each start takes the published one.
    pub image: ImageRef,
    /// When machines that run take it.
    #[serde(default)]
    pub rollout: RolloutStrategy,
    /// How long machines that somebody has claimed are left alone; until they are released if nothing is said.
    #[serde(default)]
    pub grace_seconds: Option<u32>,
    /// How many seconds may pass without progress before the rollout counts as stalled. By default 600.
    #[serde(default)]
    pub deadline_seconds: Option<u32>,
    /// So many machines that fail are passed over; each one more holds a place of the batch until it is ready.
    #[serde(default)]
    pub max_failed: u32,
    /// What machines keep may be thrown away.
    #[serde(default)]
    pub discard_data: bool,
}

/// Asks for a version that the catalog has had. It stays with it: the image's next published one does not follow.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct CatalogRollback {
    /// The version; if none is named, the one before the present one.
    #[serde(default)]
    pub to: Option<u32>,
    /// When machines that run take it.
    #[serde(default)]
    pub rollout: RolloutStrategy,
    /// How long machines that somebody has claimed are left alone; until they are released if nothing is said.
    #[serde(default)]
    pub grace_seconds: Option<u32>,
    /// How many seconds may pass without progress before the rollout counts as stalled. By default 600.
    #[serde(default)]
    pub deadline_seconds: Option<u32>,
    /// So many machines that fail are passed over; each one more holds a place of the batch until it is ready.
    #[serde(default)]
    pub max_failed: u32,
    /// What machines keep may be thrown away.
    #[serde(default)]
    pub discard_data: bool,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_strategy_is_a_word() {
        for (word, json) in
            [("next-start", r#""next-start""#), ("now", r#""now""#), ("batch=7", r#"{"batch":7}"#)]
        {
            let strategy: RolloutStrategy = word.parse().unwrap();
            assert_eq!(
                (strategy.to_string().as_str(), serde_json::to_string(&strategy).unwrap().as_str()),
                (word, json)
            );
        }
        for word in ["", "batch", "batch=0", "batch=-1", "batch=4294967296", "Now", "batch=1 "] {
            assert!(word.parse::<RolloutStrategy>().is_err(), "{word}");
        }
    }
}
