//! What firmware and the trusted platform module of a machine keep: the variables of UEFI, and the module's state. Owns the names of
//! these files and their content before a machine's first start.
//!
//! Invariant: they last as long as what is written to the disk. A reset removes them with it; a disk in a file that is kept has them
//! beside it, under its name.

use crate::error::HostError;
use crate::machines::run::{MachineFolder, RunRecord};
use spillway_api::ErrorCode;
use std::fs::{self, DirBuilder, File};
use std::io;
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

/// In a machine's folder, the name before the extension.
const NAME: &str = "firmware";
/// Extension of the variables.
const VARIABLES: &str = "variables";
/// Extension of the folder of the module's state.
const TPM: &str = "tpm";
/// The module's state, in that folder.
const STATE: &str = "state";

/// Files of a machine's firmware and trusted platform module.
#[derive(Clone, Debug)]
pub struct FirmwareState {
    /// The variables of UEFI firmware.
    pub variables: PathBuf,
    /// Folder of the module's state, which only the daemon may enter.
    tpm: PathBuf,
}

impl FirmwareState {
    /// Returns the files of a run.
    pub fn of(folder: &MachineFolder, run: &RunRecord) -> FirmwareState {
        match &run.kept {
            Some(disk) => FirmwareState::beside(disk),
            None => FirmwareState::beside(&folder.path().join(NAME)),
        }
    }

    /// Returns the files beside a kept disk.
    pub fn beside(disk: &Path) -> FirmwareState {
        FirmwareState { variables: disk.with_extension(VARIABLES), tpm: disk.with_extension(TPM) }
    }

    /// Creates the variables from their template, unless the machine has some.
    pub fn prepare_variables(&self, template: &Path) -> Result<(), HostError> {
        if self.variables.exists() {
            return Ok(());
        }
        // Whoever finds the file finds it whole.
        let partial = self.variables.with_extension("variables.new");
        let make = || {
            let mut file =
                File::options().create(true).truncate(true).write(true).mode(0o600).open(&partial)?;
            io::copy(&mut File::open(template)?, &mut file)?;
            file.sync_all()?;
            fs::rename(&partial, &self.variables)
        };
        make().map_err(|e| failed(&self.variables, &format!("cannot be made from {}", template.display()), e))
    }

    /// Opens the module's state, and creates it if the machine has none. Its program opens it again through the descriptor, so
    /// the file belongs to that program's user, who cannot enter the folder.
    pub fn open_tpm(&self, user: Option<(u32, u32)>) -> Result<File, HostError> {
        let open = || {
            DirBuilder::new().recursive(true).mode(0o700).create(&self.tpm)?;
            let file = self.tpm.join(STATE);
            let file =
                File::options().create(true).truncate(false).read(true).write(true).mode(0o600).open(file)?;
            if let Some((user, group)) = user {
                std::os::unix::fs::fchown(&file, Some(user), Some(group))?;
            }
            Ok(file)
        };
        open().map_err(|e| failed(&self.tpm, "cannot be used", e))
    }

    /// Removes the files, of which no process may run any more.
    pub fn remove(&self) -> Result<(), HostError> {
        let absent = |e: io::Error| if e.kind() == io::ErrorKind::NotFound { Ok(()) } else { Err(e) };
        fs::remove_file(&self.variables)
            .or_else(absent)
            .map_err(|e| failed(&self.variables, "cannot be removed", e))?;
        fs::remove_dir_all(&self.tpm).or_else(absent).map_err(|e| failed(&self.tpm, "cannot be removed", e))
    }
}

fn failed(path: &Path, what: &str, error: io::Error) -> HostError {
    let code = match error.kind() {
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => ErrorCode::Exhausted,
        _ => ErrorCode::Internal,
    };
    HostError::new(code, format!("{} {what}: {error}", path.display()))
}
