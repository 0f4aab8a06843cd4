//! The folder of a machine's screen, in which its VMM makes a socket: QEMU takes no descriptor for it on its command line.
//! Owns the folder's rights.
//!
//! Invariant: once the guest runs, the VMM cannot write in this folder. So a VMM that a guest has taken over can neither
//! fill the file system there, nor put another socket in place of its own.

use super::grant_group;
use crate::error::HostError;
use crate::hypervisor::qemu::SCREEN_FOLDER;
use spillway_api::ErrorCode;
use std::fs::{self, DirBuilder, Permissions};
use std::io;
use std::os::unix::fs::{DirBuilderExt, PermissionsExt};
use std::path::Path;

/// Creates the folder, in place of that of the last VMM, for a VMM with this group; `None`: one of the daemon's own user.
pub fn prepare(machine: &Path, group: Option<u32>) -> Result<(), HostError> {
    let folder = machine.join(SCREEN_FOLDER);
    let failed = |e: io::Error| {
        HostError::new(ErrorCode::Internal, format!("{} cannot be made: {e}", folder.display()))
    };
    match fs::remove_dir_all(&folder) {
        Err(e) if e.kind() != io::ErrorKind::NotFound => return Err(failed(e)),
        _ => {}
    }
    DirBuilder::new().mode(0o700).create(&folder).map_err(failed)?;
    group.map_or(Ok(()), |group| grant_group(&folder, group, 0o770))
}

/// Takes the right to write from the VMM, which has made its socket. Does nothing if there is no such folder.
pub fn seal(machine: &Path) -> Result<(), HostError> {
    let folder = machine.join(SCREEN_FOLDER);
    match fs::set_permissions(&folder, Permissions::from_mode(0o710)) {
        Err(e) if e.kind() != io::ErrorKind::NotFound => {
            let message = format!("the rights of {} cannot be changed: {e}", folder.display());
            Err(HostError::new(ErrorCode::Internal, message))
        }
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::MetadataExt;

    #[test]
    fn a_vmm_may_write_there_until_it_is_sealed() {
        let dir = tempfile::tempdir().unwrap();
        seal(dir.path()).unwrap();
        let folder = dir.path().join(SCREEN_FOLDER);
        let is_root = rustix::process::geteuid().is_root();
        for round in 0..2 {
            prepare(dir.path(), is_root.then_some(12345)).unwrap();
            let found = fs::metadata(&folder).unwrap();
            let expected = if is_root { 0o770 } else { 0o700 };
            assert_eq!(found.mode() & 0o777, expected, "{round}");
            assert!(!is_root || found.gid() == 12345);
            assert_eq!(fs::read_dir(&folder).unwrap().count(), 0, "nothing of the last one is left");
            fs::create_dir(folder.join("something")).unwrap();
            seal(dir.path()).unwrap();
            assert_eq!(fs::metadata(&folder).unwrap().mode() & 0o777, 0o710);
        }
    }
}
