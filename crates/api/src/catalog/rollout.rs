//! Another version for machines: what is asked, and what is being carried out.

use crate::{ImageRef, Name};
use jiff::Timestamp;
use serde::{Deserialize, Serialize};
use std::fmt;
use std::str::FromStr;
use utoipa::ToSchema;

/// When machines that run take another version.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum RolloutStrategy {
    /// When they are started next, by whomever.
    #[default]
    NextStart,
    /// Now: all of them are restarted.
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
        let machines = text.strip_prefix("batch=").and_then(|k| k.parse().ok()).filter(|k| *k > 0);
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
    /// How.
    pub strategy: RolloutStrategy,
    /// How long machines that somebody has claimed are left alone; until they are released if nothing is said.
    pub grace_seconds: Option<u32>,
    /// When it was asked for.
    #[schema(value_type = String, format = DateTime)]
    pub since: Timestamp,
    /// The image that they are to have.
    pub image: Name,
    /// Its version.
    pub version: u32,
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
