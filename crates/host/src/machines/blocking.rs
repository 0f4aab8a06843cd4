//! Runs work that may block on a disk or a process on a thread for blocking work. Owns nothing.
//!
//! Invariant: no task of a machine blocks a thread of the async runtime.

use super::run::MachineFolder;
use crate::error::HostError;
use crate::processes::{self, ObservedProcess};
use crate::work;
use spillway_api::ErrorCode;

/// Runs this on a thread for blocking work.
pub async fn blocking<T: Send + 'static>(
    question: impl FnOnce() -> Result<T, HostError> + Send + 'static,
) -> Result<T, HostError> {
    let done = work::blocking(question).await;
    done.map_err(|e| HostError::new(ErrorCode::Internal, format!("a fault of the daemon: {e}")))?
}

/// Finds out whether a machine's process is alive. Waits until a process that has just begun has recorded its id.
pub async fn look(folder: &MachineFolder, name: &'static str) -> Result<ObservedProcess, HostError> {
    let folder = folder.clone();
    blocking(move || processes::look(folder.path(), name)).await
}

/// Returns the last output of a machine's process.
pub async fn last_words(folder: &MachineFolder, name: &'static str) -> Result<String, HostError> {
    let folder = folder.clone();
    blocking(move || Ok(processes::last_words(folder.path(), name))).await
}
