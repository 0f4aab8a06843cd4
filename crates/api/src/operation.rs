//! Operations: long work that continues without its client.

use crate::{CollectionOutcome, ImageRef, Problem, PushOutcome};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// Long work in the daemon that continues whether its client waits for it or not.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Operation {
    /// Id of the operation, valid until the daemon ends.
    pub id: u64,
    /// What the operation does, in words for people.
    pub what: String,
    /// The image version that the operation makes or reads, such as `debian:3`; none if it is about no image.
    pub image: Option<ImageRef>,
    /// State of the operation: running, done or failed.
    pub state: OperationState,
    /// Bytes of the operation's work that are done.
    pub done_bytes: u64,
    /// Size of the whole work, in bytes; 0 while it is not known. An import or commit writes the disk and reads it back:
    /// twice the size of the image.
    pub total_bytes: u64,
    /// Result of an operation that has one and has succeeded.
    #[serde(default)]
    pub outcome: Option<OperationOutcome>,
}

/// Result of an operation that has one.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum OperationOutcome {
    /// An image was pushed to a registry.
    Pushed(PushOutcome),
    /// The garbage of a registry was counted or collected.
    Collected(CollectionOutcome),
}

/// State of an operation: whether it has ended, and how.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case", tag = "phase")]
pub enum OperationState {
    /// The operation is still running.
    Running,
    /// The operation has ended and succeeded.
    Done,
    /// The operation has failed, for the given reason.
    Failed {
        /// Reason why the operation failed.
        error: Problem,
    },
}

impl OperationState {
    /// Whether the operation has ended.
    pub fn has_ended(&self) -> bool {
        !matches!(self, OperationState::Running)
    }
}
