//! The mark of a machine whose VMM the guard ends: a file in the machine's folder.
//!
//! Owns its content. Invariant: the file is there before the VMM is started, and goes with the folder. One that cannot be read is a mark
//! all the same.

use crate::error::HostError;
use serde::{Deserialize, Serialize};
use spillway_api::{ErrorCode, IsolationAction};
use std::fs;
use std::path::{Path, PathBuf};

/// Name of the file.
pub const MARK: &str = "guarded";

/// What the mark says.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct GuardMark {
    /// UUID of the machine, which is in the command line of its VMM.
    pub uuid: String,
    /// What is done with the machine when its host is isolated.
    pub on_isolation: IsolationAction,
    /// File in which libvirt writes the process id of the VMM.
    pub pid_file: Option<PathBuf>,
}

impl GuardMark {
    /// Marks a machine's folder.
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn write(&self, folder: &Path) -> Result<(), HostError> {
        let text = serde_json::to_vec(self).expect("a mark is plain data");
        let (file, new) = (folder.join(MARK), folder.join("guarded.new"));
        fs::write(&new, text).and_then(|()| fs::rename(&new, &file)).map_err(|e| {
            HostError::new(ErrorCode::Internal, format!("{} cannot be written: {e}", file.display()))
        })
    }

    /// Reads the mark of a machine's folder.
    pub fn read(folder: &Path) -> Option<GuardMark> {
        serde_json::from_slice(&fs::read(folder.join(MARK)).ok()?).ok()
    }

    /// Removes the mark of a machine that has none any more. Its VMM has ended.
    ///
    /// # Errors
    /// The file cannot be removed.
    pub fn remove(folder: &Path) -> Result<(), HostError> {
        match fs::remove_file(folder.join(MARK)) {
            Err(e) if e.kind() != std::io::ErrorKind::NotFound => {
                let message = format!("{}: the mark of the guard cannot be removed: {e}", folder.display());
                Err(HostError::new(ErrorCode::Internal, message))
            }
            _ => Ok(()),
        }
    }
}

/// Folders of the machines that are marked.
pub fn marked(machines: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(machines).into_iter().flatten().flatten();
    entries.map(|entry| entry.path()).filter(|folder| folder.join(MARK).exists()).collect()
}
