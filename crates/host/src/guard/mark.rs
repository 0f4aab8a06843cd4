//! The mark of a machine whose VMM the guard ends: a file in the machine's folder.
//!
//! Owns its content. Invariant: the file is there before the VMM is started, and goes with the folder. One that cannot be read is a mark
//! all the same.

use crate::error::HostError;
use serde::{Deserialize, Serialize};
use spillway_api::{ErrorCode, IsolationAction};
use std::fs;
use std::io;
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

    /// Reads the mark of a machine's folder; none: there is none, or its content is damaged.
    ///
    /// # Errors
    /// The file cannot be read.
    pub fn read(folder: &Path) -> io::Result<Option<GuardMark>> {
        Ok(read_if_there(&folder.join(MARK))?.and_then(|text| serde_json::from_slice(&text).ok()))
    }

    /// Removes the mark of a machine that has none any more. Its VMM has ended.
    ///
    /// # Errors
    /// The file cannot be removed.
    pub fn remove(folder: &Path) -> Result<(), HostError> {
        match fs::remove_file(folder.join(MARK)) {
            Err(e) if e.kind() != io::ErrorKind::NotFound => {
                let message = format!("{}: the mark of the guard cannot be removed: {e}", folder.display());
                Err(HostError::new(ErrorCode::Internal, message))
            }
            _ => Ok(()),
        }
    }
}

/// A folder of which nobody can tell whether it is marked.
#[derive(Debug)]
pub struct UnknownMark {
    /// Folder of a machine.
    pub folder: PathBuf,
    /// Why nobody can tell.
    pub error: io::Error,
}

/// Folders of the machines that are marked. Nothing is guarded where there is no folder of machines.
///
/// # Errors
/// The folder of all machines cannot be read.
pub fn marked(machines: &Path) -> io::Result<Vec<Result<PathBuf, UnknownMark>>> {
    let entries = match fs::read_dir(machines) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        entries => entries?,
    };
    let mut found = Vec::new();
    for entry in entries {
        let folder = entry?.path();
        match is_marked(&folder) {
            Ok(true) => found.push(Ok(folder)),
            Ok(false) => {}
            Err(error) => found.push(Err(UnknownMark { folder, error })),
        }
    }
    Ok(found)
}

/// Whether a folder has a mark.
///
/// # Errors
/// Nobody can tell.
pub fn is_marked(folder: &Path) -> io::Result<bool> {
    match fs::symlink_metadata(folder.join(MARK)) {
        Err(e) if is_absence(&e) => Ok(false),
        found => found.map(|_| true),
    }
}

/// Reads a file; none: there is no such file.
///
/// # Errors
/// The file cannot be read.
pub fn read_if_there(file: &Path) -> io::Result<Option<Vec<u8>>> {
    match fs::read(file) {
        Err(e) if is_absence(&e) => Ok(None),
        read => read.map(Some),
    }
}

fn is_absence(e: &io::Error) -> bool {
    matches!(e.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory)
}
