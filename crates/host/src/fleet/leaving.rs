//! Ends the membership of a host in its fleet while its daemon does not run. Decides nothing.

use super::record::{LeftFleet, leave};
use crate::failure::Failure;
use crate::state_folder::{DATABASE, try_lock};
use crate::store::{Objects, SqliteStore};
use anyhow::{Context, Result, bail};
use std::path::Path;
use std::sync::Arc;

/// Ends the membership that is recorded in a state folder. `None`: the host is in no fleet.
///
/// # Errors
/// There are no records in the folder, or a daemon uses it.
pub fn leave_fleet(state: &Path) -> Result<Option<LeftFleet>> {
    let state = std::path::absolute(state).context("--state")?;
    let database = state.join(DATABASE);
    if !database.exists() {
        bail!(Failure::usage(format!("{}: there are no records of a spillwayd in it", state.display())));
    }
    let Some(_lock) = try_lock(&state)? else {
        bail!(Failure::refused(format!("{}: a spillwayd uses this folder: stop it first", state.display())));
    };
    let store = SqliteStore::open(&database)?;
    Ok(leave(&Objects::new(Arc::new(store)))?)
}
