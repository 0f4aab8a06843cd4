//! What may wait for a disk or a process, on a thread that may. Owns nothing.
//!
//! Invariant: no task of a machine waits for its folder on a thread that others need.

use super::run::MachineFolder;
use crate::error::HostError;
use crate::processes::{self, ObservedProcess};
use spillway_api::ErrorCode;

/// Does it there.
pub async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, HostError> + Send + 'static,
) -> Result<T, HostError> {
    let done = tokio::task::spawn_blocking(work).await;
    done.map_err(|e| HostError::new(ErrorCode::Internal, format!("a fault of the daemon: {e}")))?
}

/// What became of a machine's process. It may have to be waited for until it says who it is.
pub async fn look(folder: &MachineFolder, name: &'static str) -> Result<ObservedProcess, HostError> {
    let folder = folder.clone();
    blocking(move || processes::look(folder.path(), name)).await
}

/// The last that a machine's process has said.
pub async fn last_words(folder: &MachineFolder, name: &'static str) -> Result<String, HostError> {
    let folder = folder.clone();
    blocking(move || Ok(processes::last_words(folder.path(), name))).await
}
