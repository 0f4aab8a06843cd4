//! What firmware and the trusted platform module of a machine keep: the variables of UEFI, and the module's state. Owns the names of
//! these files and their content before a machine's first start.
//!
//! Invariant: they last as long as what is written to the disk. A reset removes them with it. A disk that is kept
//! is a file; they are files next to it, and their names begin with its name.

use crate::error::HostError;
use crate::hypervisor::uefi::Uefi;
use crate::machines::run::{MachineFolder, RunRecord};
use spillway_api::ErrorCode;
use std::fs::{self, DirBuilder, File};
use std::io;
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

/// In a machine's folder, the name before the extension.
const NAME: &str = "firmware";
/// Extensions of the variables: of firmware that verifies what it starts, and of other firmware. The former never uses variables in
/// which the latter, or its guest, could have put what is trusted.
const SECURE: &str = "secure-variables";
const VARIABLES: &str = "variables";
/// Extension of the folder of the module's state.
const TPM: &str = "tpm";
/// The module's state, in that folder.
const STATE: &str = "state";

/// Files of a machine's firmware and trusted platform module.
#[derive(Clone, Debug)]
pub struct FirmwareState {
    /// Path without an extension.
    base: PathBuf,
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
        FirmwareState { base: disk.to_owned(), tpm: disk.with_extension(TPM) }
    }

    /// Creates the variables for this firmware from its template, unless the machine has some, and returns their path.
    pub fn prepare_variables(&self, uefi: &Uefi) -> Result<PathBuf, HostError> {
        let variables = self.base.with_extension(if uefi.is_secure { SECURE } else { VARIABLES });
        let template = &uefi.template;
        let size = |path: &Path| fs::metadata(path).map(|found| found.len()).ok();
        if let Some(bytes) = size(&variables) {
            if size(template) != Some(bytes) {
                let message = format!(
                    "{} has {bytes} bytes, and the variables of this host's UEFI firmware have another size: install the earlier \
                     firmware, or reset the machine",
                    variables.display()
                );
                return Err(HostError::new(ErrorCode::Unavailable, message));
            }
            return Ok(variables);
        }
        // Whoever finds the file finds it whole.
        let partial = variables.with_extension("variables.new");
        let make = || {
            let mut file =
                File::options().create(true).truncate(true).write(true).mode(0o600).open(&partial)?;
            io::copy(&mut File::open(template)?, &mut file)?;
            file.sync_all()?;
            fs::rename(&partial, &variables)
        };
        make().map_err(|e| failed(&variables, &format!("cannot be made from {}", template.display()), e))?;
        Ok(variables)
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
        for extension in [VARIABLES, SECURE] {
            let file = self.base.with_extension(extension);
            fs::remove_file(&file).or_else(absent).map_err(|e| failed(&file, "cannot be removed", e))?;
        }
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn firmware_that_verifies_has_variables_of_its_own() {
        let dir = tempfile::tempdir().unwrap();
        let uefi = |template: &str, is_secure| Uefi {
            code: "/c".into(),
            template: dir.path().join(template),
            is_secure,
        };
        fs::write(dir.path().join("plain"), "plain").unwrap();
        fs::write(dir.path().join("keys"), "keys!").unwrap();
        fs::write(dir.path().join("large"), "larger").unwrap();
        let state = FirmwareState::beside(&dir.path().join("a.disk"));
        let plain = state.prepare_variables(&uefi("plain", false)).unwrap();
        fs::write(&plain, "guest").unwrap();
        assert_eq!(state.prepare_variables(&uefi("plain", false)).unwrap(), plain);
        assert_eq!(fs::read(&plain).unwrap(), b"guest", "they are the guest's");
        let secure = state.prepare_variables(&uefi("keys", true)).unwrap();
        assert_eq!((fs::read(&secure).unwrap(), secure != plain), (b"keys!".to_vec(), true));
        let other = state.prepare_variables(&uefi("large", false)).unwrap_err();
        assert!(other.message.contains("another size"), "{other}");
        state.open_tpm(None).unwrap();
        state.remove().unwrap();
        state.remove().unwrap();
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 3, "only the templates are left");
    }
}
