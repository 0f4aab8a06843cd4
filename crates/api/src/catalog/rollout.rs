//! Rollouts of a version to the machines of a catalog: requests and progress.

use crate::{ImageRef, Name, bounds};
use jiff::Timestamp;
use serde::{Deserialize, Serialize};
use std::fmt;
use std::str::FromStr;
use utoipa::ToSchema;

/// Default time without progress after which a rollout is stalled, in seconds.
pub const DEADLINE_SECONDS_DEFAULT: u32 = 600;

/// When running machines take another version.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum RolloutStrategy {
    /// Machines take the version at their next start, whoever starts them.
    #[default]
    NextStart,
    /// Immediately: all machines are restarted at once.
    Now,
    /// Running machines are restarted now, this many at the same time.
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

    /// Parses `next-start`, `now` or `batch=5`.
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

/// An update in progress: running machines with another version are restarted until it has ended.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Rollout {
    /// How machines that run now get the new version.
    pub strategy: RolloutStrategy,
    /// Seconds after which claimed machines are restarted too; by default when they are released.
    pub claim_grace_seconds: Option<u32>,
    /// Seconds without progress after which the rollout counts as stalled. It continues when it can.
    pub deadline_seconds: u32,
    /// Number of failed machines that are ignored. Each further one occupies a place of the batch until it is ready.
    pub max_failed: u32,
    /// Whether the rollout is paused: no further machine is restarted until it is resumed.
    pub paused: bool,
    /// Time at which the rollout was requested.
    #[schema(value_type = String, format = DateTime)]
    pub since: Timestamp,
    /// Name of the image whose version the machines get.
    pub image: Name,
    /// Version of the image that the rollout brings, counted from 1.
    pub version: u32,
    /// Progress of the rollout. Absent for a moment until the daemon has counted the machines, and while the host is
    /// closed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub progress: Option<RolloutProgress>,
}

/// Progress of a rollout. `done`, `failed`, `waiting` and `restarting` count different machines; the others of `of` still
/// have to be restarted.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct RolloutProgress {
    /// Whether the rollout makes progress, and if not why.
    pub state: RolloutState,
    /// Reason why the rollout makes no progress, for people.
    pub reason: Option<String>,
    /// Number of machines that run the version, or keep the one that their disk stays on, and are ready.
    pub done: u32,
    /// Number of machines that should run.
    pub of: u32,
    /// Number of machines that are starting, because of the rollout or for another reason.
    pub restarting: u32,
    /// Number of machines that cannot be started.
    pub failed: u32,
    /// Number of claimed machines that run another version and are spared.
    pub waiting: u32,
    /// Time at which a machine was last done or restarted.
    #[schema(value_type = String, format = DateTime)]
    pub progressed: Timestamp,
    /// Machines that the rollout waits for, at most 16, failed ones first.
    pub in_the_way: Vec<BlockingMachine>,
}

/// State of a rollout of an image version to the machines of a catalog.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum RolloutState {
    /// The rollout restarts machines, and its deadline has not passed.
    Running,
    /// Only claimed machines are left.
    Waiting,
    /// The rollout has made no progress within its deadline.
    Stalled,
    /// A user has paused the rollout; `resume` continues it.
    Paused,
}

/// A machine that a rollout waits for.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct BlockingMachine {
    /// Name of the machine that keeps the rollout from finishing.
    pub machine: Name,
    /// Reason why the machine is not done, for people.
    pub why: String,
}

/// Asks for an action on a rollout.
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
    /// Restart no further machine. Those that were restarted already continue to start.
    Pause,
    /// Continue after a pause. The deadline begins anew.
    Resume,
    /// End the rollout. Machines that have the version keep it; the others take it at their next start.
    Abort,
}

/// Asks for another version of a catalog, or another strategy of its rollout.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct CatalogUpdate {
    /// Image of the catalog. With a version it stays at that one; without, each start takes the published one.
    pub image: ImageRef,
    /// When running machines take the version.
    #[serde(default)]
    pub rollout: RolloutStrategy,
    /// Seconds after which claimed machines are restarted too; by default when they are released.
    #[serde(default)]
    pub claim_grace_seconds: Option<u32>,
    /// Seconds without progress after which the rollout counts as stalled. By default 600.
    #[serde(default)]
    pub deadline_seconds: Option<u32>,
    /// Number of failed machines that are ignored. Each further one occupies a place of the batch until it is ready.
    #[serde(default)]
    pub max_failed: u32,
    /// Whether data that machines keep may be discarded.
    #[serde(default)]
    pub discard_data: bool,
}

/// Asks for an earlier version of a catalog. The catalog stays at it: it does not follow the image's next published
/// version.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct CatalogRollback {
    /// Version to return to; by default the one before the current one.
    #[serde(default)]
    pub to: Option<u32>,
    /// When running machines take the version.
    #[serde(default)]
    pub rollout: RolloutStrategy,
    /// Seconds after which claimed machines are restarted too; by default when they are released.
    #[serde(default)]
    pub claim_grace_seconds: Option<u32>,
    /// Seconds without progress after which the rollout counts as stalled. By default 600.
    #[serde(default)]
    pub deadline_seconds: Option<u32>,
    /// Number of failed machines that are ignored. Each further one occupies a place of the batch until it is ready.
    #[serde(default)]
    pub max_failed: u32,
    /// Whether data that machines keep may be discarded.
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
