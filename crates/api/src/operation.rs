//! What takes long.

use crate::ErrorBody;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// Something that goes on in the daemon, whether its client waits for it or not.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Operation {
    /// Its name, until the daemon ends.
    pub id: u64,
    /// For people.
    pub what: String,
    /// Whether it goes on.
    pub state: OperationState,
    /// How far it is.
    pub done_bytes: u64,
    /// How far it has to go; 0 while that is not known.
    pub total_bytes: u64,
}

/// Whether an operation goes on.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case", tag = "phase")]
pub enum OperationState {
    /// Yes.
    Running,
    /// It has done what was asked.
    Done,
    /// It has not.
    Failed {
        /// Why.
        error: ErrorBody,
    },
}

impl OperationState {
    /// Whether it goes on no more.
    pub fn has_ended(&self) -> bool {
        !matches!(self, OperationState::Running)
    }
}
