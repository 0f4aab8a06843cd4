//! What is done to the membership of a host in its fleet while its daemon does not run: its end, and the acceptance of records that were
//! restored from a backup. Decides nothing.
//!
//! Invariant: the records change only while no daemon uses them.

use super::record::{FleetMembership, LeftFleet, RestoredRecords, leave};
use crate::failure::Failure;
use crate::guard;
use crate::state_folder::{DATABASE, machine_folder, try_lock};
use crate::store::{Objects, SqliteStore};
use anyhow::{Context, Result, bail};
use std::fs::File;
use std::path::Path;
use std::sync::Arc;

/// Ends the membership that is recorded in a state folder. `None`: the host is in no fleet.
///
/// # Errors
/// There are no records in the folder, or a daemon uses it.
pub fn leave_fleet(state: &Path) -> Result<Option<LeftFleet>> {
    let (objects, _lock) = open(state)?;
    Ok(leave(&objects)?)
}

/// Accepts records of the fleet that are older than those that the host has acted on. `None`: the host has found none.
///
/// # Errors
/// There are no records in the folder, a daemon uses it, or machines with names of the fleet run: they may run elsewhere, too, by the
/// older records.
pub fn accept_restored_fleet(state: &Path) -> Result<Option<RestoredRecords>> {
    let (objects, _lock) = open(state)?;
    let machines = machine_folder(&std::path::absolute(state).context("--state")?);
    let running = guard::marked(&machines).into_iter().filter(|folder| guard::find(folder).is_some());
    let names: Vec<_> =
        running.filter_map(|folder| Some(folder.file_name()?.to_string_lossy().into_owned())).collect();
    if !names.is_empty() {
        bail!(Failure::refused(format!(
            "machines with names of the fleet run on this host, and by the restored records other hosts may start them, too: end their QEMU \
             processes first ({})",
            names.join(", ")
        )));
    }
    Ok(FleetMembership::accept(&objects)?)
}

fn open(state: &Path) -> Result<(Objects, File)> {
    let state = std::path::absolute(state).context("--state")?;
    let database = state.join(DATABASE);
    if !database.exists() {
        bail!(Failure::usage(format!("{}: there are no records of a spillwayd in it", state.display())));
    }
    let Some(lock) = try_lock(&state)? else {
        bail!(Failure::refused(format!("{}: a spillwayd uses this folder: stop it first", state.display())));
    };
    let store = SqliteStore::open(&database)?;
    Ok((Objects::new(Arc::new(store)), lock))
}
