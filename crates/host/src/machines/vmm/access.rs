//! Who may reach a machine's sockets: the group of a VMM that does not run as the daemon. Owns the rights of the machine's folder and of
//! the folders above it.
//!
//! Invariant: a group can pass through these folders, and reads none of them.

use crate::error::HostError;
use crate::machines::disk;
use crate::machines::run::{MachineFolder, RunRecord};
use spillway_api::{ErrorCode, Hypervisor};
use spillway_control::output_within;
use std::fs::{self, Permissions};
use std::io;
use std::os::unix::fs::{MetadataExt, PermissionsExt, chown};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

/// Number of folders from a machine's to the root of the daemon's state.
const WAY: usize = 4;
/// Number of folders from a file in a store to the store's root.
const STORE: usize = 2;
/// How long the host may take to look a group up, in a directory for example.
const LOOKUP: Duration = Duration::from_secs(10);

/// Grants a path's group rights to a VMM that runs with this group.
pub fn grant_group(path: &Path, group: u32, rights: u32) -> Result<(), HostError> {
    chown(path, None, Some(group))
        .and_then(|()| fs::set_permissions(path, Permissions::from_mode(rights)))
        .map_err(|e| {
            let message =
                format!("{} cannot be given to group {group}, which its QEMU has: {e}", path.display());
            HostError::new(ErrorCode::Internal, message)
        })
}

/// Grants a group the way to a machine's folder, these sockets there, and these files.
pub fn grant(group: u32, folder: &Path, sockets: &[&str], files: &[PathBuf]) -> Result<(), HostError> {
    let ways = files
        .iter()
        .filter(|file| !file.starts_with(folder))
        .flat_map(|file| file.ancestors().skip(1).take(STORE));
    for folder in folder.ancestors().take(WAY).chain(ways) {
        open_way(folder, group)?;
    }
    for name in sockets {
        grant_group(&folder.join(name), group, 0o660)?;
    }
    files.iter().try_for_each(|file| grant_group(file, group, 0o660))
}

/// Lets a group pass through a folder. If another group may already, everybody may then: nothing is listed, and what is in the folder
/// has rights of its own.
fn open_way(folder: &Path, group: u32) -> Result<(), HostError> {
    let failed = |what: &str, e: io::Error| {
        HostError::new(ErrorCode::Internal, format!("{} {what}: {e}", folder.display()))
    };
    let found = fs::metadata(folder).map_err(|e| failed("cannot be looked at", e))?;
    let (rights, is_theirs) = (found.mode() & 0o7777, found.gid() == group);
    if rights & 0o001 != 0 || is_theirs && rights & 0o010 != 0 {
        return Ok(());
    }
    // The daemon's own group needs no way: it has the user's.
    if rights & 0o010 != 0 && found.gid() != rustix::process::getegid().as_raw() {
        return fs::set_permissions(folder, Permissions::from_mode(rights | 0o001))
            .map_err(|e| failed("cannot be opened to another group", e));
    }
    grant_group(folder, group, rights & 0o700 | 0o010)
}

/// Grants the group that a catalog of external machines names access to a disk that is served.
pub fn admit_group(folder: &MachineFolder, run: &RunRecord) -> Result<(), HostError> {
    let name = run.spec.hardware.socket_group.as_ref().filter(|_| run.hypervisor == Hypervisor::None);
    let Some(name) = name else { return Ok(()) };
    grant(group_id(name)?, folder.path(), &[disk::SOCKET, disk::NBD], &[])
}

/// Returns the number of a group, given by name or number.
fn group_id(name: &str) -> Result<u32, HostError> {
    if let Ok(number) = name.parse() {
        return Ok(number);
    }
    let asked = output_within(Command::new("getent").args(["group", "--", name]), LOOKUP);
    let line = asked.map(|done| String::from_utf8_lossy(&done.stdout).into_owned()).unwrap_or_default();
    // NAME:PASSWORD:NUMBER:MEMBERS
    line.split(':').nth(2).and_then(|number| number.parse().ok()).ok_or_else(|| {
        let message = format!("socket_group: there is no group '{name}' on this host: see 'getent group'");
        HostError::new(ErrorCode::Unavailable, message)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn groups_have_names_and_numbers() {
        assert_eq!((group_id("0").unwrap(), group_id("root").unwrap()), (0, 0));
        assert!(group_id("nobody-has-this").unwrap_err().message.contains("nobody-has-this"));
    }

    #[test]
    fn two_groups_pass_and_nobody_reads() {
        if !rustix::process::geteuid().is_root() {
            return spillway_testkit::skip("only root can give a folder to another group");
        }
        let dir = tempfile::tempdir().unwrap();
        fs::set_permissions(dir.path(), Permissions::from_mode(0o700)).unwrap();
        let rights = || {
            let found = fs::metadata(dir.path()).unwrap();
            (found.gid(), found.mode() & 0o777)
        };
        fs::set_permissions(dir.path(), Permissions::from_mode(0o750)).unwrap();
        open_way(dir.path(), 4242).unwrap();
        assert_eq!(rights(), (4242, 0o710), "the daemon's own group gives way");
        open_way(dir.path(), 4242).unwrap();
        assert_eq!(rights(), (4242, 0o710));
        open_way(dir.path(), 4343).unwrap();
        assert_eq!(rights(), (4242, 0o711), "the first keeps its own");
    }
}
