//! The state folder of a daemon: the names in it, its lock and its permissions. Owns these; knows nothing of what the files
//! contain.
//!
//! Invariant: one daemon at a time uses a folder, and no folder with other contents is changed.

use crate::failure::Failure;
use anyhow::{Context, Result, bail};
use rustix::fs::{FlockOperation, Mode, flock};
use rustix::io::Errno;
use spillway_api::Hypervisor;
use std::fs::{self, File};
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// File that marks a folder as a daemon's.
pub const LOCK_FILE: &str = "lock";
/// File of the records.
pub const DATABASE: &str = "state.db";
/// Folder for files of running machines.
const RUN: &str = "run";
/// How long the lock and the socket of a daemon that has just ended may stay.
pub const TAKEOVER_DEADLINE: Duration = Duration::from_secs(2);

/// The state folder. No other daemon uses it while this value exists.
pub struct StateFolder {
    path: PathBuf,
    _lock: File,
}

impl StateFolder {
    /// Creates the folder if necessary, and removes the rights of all others.
    pub fn take(state: &Path, hypervisor: Hypervisor) -> Result<StateFolder> {
        let path = std::path::absolute(state).context("--state")?;
        fs::create_dir_all(&path).with_context(|| {
            format!("{}: cannot create the state folder: give another --state", path.display())
        })?;
        is_ours(&path)?;
        // New files are accessible to the daemon alone, unless they are meant for others.
        rustix::process::umask(Mode::from_raw_mode(0o077));
        let lock = lock(&path.join(LOCK_FILE))?;
        close(&path, hypervisor).with_context(|| format!("{}: cannot set the permissions of the state folder: run spillwayd as its owner, or give another --state", path.display()))?;
        Ok(StateFolder { path, _lock: lock })
    }

    /// Path of the folder.
    pub fn path(&self) -> &Path {
        &self.path
    }
}

/// Locks a state folder as a daemon does; `None` if a daemon has it.
pub fn try_lock(state: &Path) -> Result<Option<File>> {
    let path = state.join(LOCK_FILE);
    let at = || path.display().to_string();
    let file =
        File::options().create(true).truncate(false).write(true).mode(0o600).open(&path).with_context(at)?;
    match flock(&file, FlockOperation::NonBlockingLockExclusive) {
        Ok(()) => Ok(Some(file)),
        Err(Errno::WOULDBLOCK) => Ok(None),
        Err(e) => Err(e).with_context(at),
    }
}

/// Folder in which machines run.
pub fn machine_folder(state: &Path) -> PathBuf {
    state.join(RUN).join("machines")
}

/// Refuses a folder with other contents, since its permissions are about to be changed.
pub fn is_ours(state: &Path) -> Result<()> {
    if state.join(LOCK_FILE).exists() {
        return Ok(());
    }
    let entries = fs::read_dir(state).with_context(|| {
        format!(
            "{}: cannot read the state folder: run spillwayd as its owner, or give another --state",
            state.display()
        )
    })?;
    for entry in entries {
        let name = entry?.file_name();
        // This folder exists in every new file system.
        if name != "lost+found" {
            bail!(Failure::usage(format!(
                "{} is not a state folder of spillwayd, and has '{}' in it: give an empty or a new folder as --state",
                state.display(),
                name.display()
            )));
        }
    }
    Ok(())
}

/// Removes all rights of others; only the group of libvirt's QEMU may pass through to `run`.
fn close(state: &Path, hypervisor: Hypervisor) -> std::io::Result<()> {
    for entry in fs::read_dir(state)? {
        let entry = entry?;
        let found = entry.metadata()?;
        let rights = found.permissions().mode();
        if entry.file_name() != RUN && !found.is_symlink() && rights & 0o077 != 0 {
            fs::set_permissions(entry.path(), fs::Permissions::from_mode(rights & 0o7700))?;
        }
    }
    let mode = if hypervisor == Hypervisor::Libvirt { 0o710 } else { 0o700 };
    fs::set_permissions(state, fs::Permissions::from_mode(mode))
}

/// Locks the folder for as long as the daemon runs.
fn lock(path: &Path) -> Result<File> {
    let file = File::options().create(true).truncate(false).write(true).open(path);
    let file = file.with_context(|| format!("{}: cannot create the lock: run spillwayd as the owner of the state folder, or give another --state", path.display()))?;
    let until = Instant::now() + TAKEOVER_DEADLINE;
    loop {
        match flock(&file, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => return Ok(file),
            // A process that the last daemon was starting holds it until it executes its program.
            Err(Errno::WOULDBLOCK) if Instant::now() < until => std::thread::sleep(Duration::from_millis(5)),
            Err(Errno::WOULDBLOCK) => {
                bail!(Failure::refused(format!(
                    "{}: another spillwayd has this folder: stop it, or give another --state",
                    path.display()
                )))
            }
            Err(e) => return Err(e).with_context(|| path.display().to_string()),
        }
    }
}
