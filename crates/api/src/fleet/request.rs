//! Requests about a fleet itself: to make it, to switch its placer, to let hosts join, to take a catalog back.
//!
//! Owns their fields, decides nothing. Invariant: a request with a field that there is not is refused.

use serde::{Deserialize, Serialize};
use std::fmt;
use utoipa::ToSchema;

/// Body of the request that makes the fleet whose name the daemon was started with.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct NewFleet {}

/// Switches the placer of a fleet on or off.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct PlacerChange {
    /// Whether Spillway decides which host has how many machines. If not, another program writes the shares.
    pub enabled: bool,
}

/// What a host needs to join a fleet, for `--fleet-token` of its daemon.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct JoinToken {
    /// Secret text of one line.
    pub token: String,
}

impl fmt::Debug for JoinToken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("JoinToken").finish_non_exhaustive()
    }
}

/// Asks for an earlier version of the image of a catalog of a fleet.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct FleetCatalogRollback {
    /// Version of the catalog's history; none: the one before the current one.
    #[serde(default)]
    pub to: Option<u32>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_field_that_there_is_not_is_refused() {
        assert!(serde_json::from_str::<NewFleet>("{}").is_ok());
        assert!(serde_json::from_str::<NewFleet>(r#"{"name": "lab"}"#).is_err());
        assert!(serde_json::from_str::<PlacerChange>(r#"{"enabled": true, "force": true}"#).is_err());
        assert!(serde_json::from_str::<FleetCatalogRollback>(r#"{"version": 1}"#).is_err());
        assert_eq!(
            serde_json::from_str::<FleetCatalogRollback>("{}").unwrap(),
            FleetCatalogRollback { to: None }
        );
    }

    #[test]
    fn a_token_is_not_in_logs() {
        let token = JoinToken { token: "secret".into() };
        assert!(!format!("{token:?}").contains("secret"));
    }
}
