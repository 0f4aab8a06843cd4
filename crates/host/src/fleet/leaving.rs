//! What is done to the membership of a host in its fleet while its daemon does not run: its end, and the acceptance of records that were
//! restored from a backup. Decides nothing.
//!
//! Invariant: the records change only while no daemon uses them, and no VMM of a name of the fleet runs.

use super::record::{FleetMembership, LeftFleet, RestoredRecords, leave};
use crate::failure::Failure;
use crate::guard;
use crate::machines::vmm_process;
use crate::state_folder::{DATABASE, machine_folder, try_lock};
use crate::store::{Objects, SqliteStore};
use anyhow::{Context, Result, bail};
use spillway_api::{Catalog, Machine};
use std::collections::BTreeSet;
use std::fs::File;
use std::path::Path;
use std::sync::Arc;

/// Ends the membership that is recorded in a state folder. `None`: the host is in no fleet.
///
/// # Errors
/// There are no records in the folder, a daemon uses it, or a machine with a name of the fleet runs.
pub fn leave_fleet(state: &Path) -> Result<Option<LeftFleet>> {
    let (objects, _lock, running) = open(state)?;
    if !running.is_empty() {
        bail!(Failure::refused(format!(
            "machines with names of the fleet run on this host, and nobody would end them: {}. Drain the host while its spillwayd runs \
             ('spillway fleet host drain'), and leave the fleet when they have ended",
            running.join(", ")
        )));
    }
    let left = leave(&objects)?;
    // The guard ends with its page. That it goes on for nothing is no reason to say that the host has not left.
    let _ = std::fs::remove_file(guard::page_path(&machine_folder(state)));
    Ok(left)
}

/// Accepts records of the fleet that are older than those that the host has acted on. `None`: the host has found none.
///
/// # Errors
/// There are no records in the folder, a daemon uses it, or a machine with a name of the fleet runs: by the older records another host may
/// start it, too.
pub fn accept_restored_fleet(state: &Path) -> Result<Option<RestoredRecords>> {
    let (objects, _lock, running) = open(state)?;
    if !running.is_empty() {
        bail!(Failure::refused(format!(
            "machines with names of the fleet run on this host, and by the restored records other hosts may start them, too: {}. Shut them down \
             in the guests, or end their QEMU processes, first",
            running.join(", ")
        )));
    }
    Ok(FleetMembership::accept(&objects)?)
}

/// Opens the records of a host whose daemon does not run, and returns the lock of their folder, and the machines with names of the fleet that
/// run.
fn open(state: &Path) -> Result<(Objects, File, Vec<String>)> {
    let state = std::path::absolute(state).context("--state")?;
    let database = state.join(DATABASE);
    if !database.exists() {
        bail!(Failure::usage(format!("{}: there are no records of a spillwayd in it", state.display())));
    }
    let Some(lock) = try_lock(&state)? else {
        bail!(Failure::refused(format!("{}: a spillwayd uses this folder: stop it first", state.display())));
    };
    let objects = Objects::new(Arc::new(SqliteStore::open(&database)?));
    let running = running_names(&objects, &machine_folder(&state))?;
    Ok((objects, lock, running))
}

/// Machines with names of a fleet whose VMMs run, or may run.
fn running_names(objects: &Objects, folder: &Path) -> Result<Vec<String>> {
    let mut running = BTreeSet::new();
    for marked in guard::marked(folder).with_context(|| folder.display().to_string())? {
        let folder = marked.unwrap_or_else(|unknown| unknown.folder);
        if guard::may_run(&folder) {
            running.insert(folder.file_name().unwrap_or_default().to_string_lossy().into_owned());
        }
    }
    // Those that go on without a lease have no mark.
    let catalogs = objects.list_below::<Catalog>("")?.into_iter();
    let is_named = |catalog: &Catalog| catalog.fleet.as_ref().is_some_and(|owner| owner.named.is_some());
    let named: BTreeSet<String> =
        catalogs.filter(|catalog| is_named(&catalog.value)).map(|catalog| catalog.name).collect();
    for machine in objects.list_below::<Machine>("")? {
        let is_own = named.contains(machine.value.catalog.as_str());
        if is_own && vmm_process(&folder.join(&machine.name)).map_or(true, |found| found.is_some()) {
            running.insert(machine.name);
        }
    }
    Ok(running.into_iter().collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::machines::VMM_PROCESS;
    use crate::processes;
    use std::process::Command;
    use std::time::Duration;

    #[test]
    fn nobody_leaves_a_fleet_while_a_machine_with_one_of_its_names_runs() {
        let dir = tempfile::tempdir().unwrap();
        let objects = Objects::new(Arc::new(SqliteStore::open(&dir.path().join(DATABASE)).unwrap()));
        let [fleet, host] = ["site", "a"].map(|name| name.parse().unwrap());
        FleetMembership::open(&objects, &fleet, &host, "boot").unwrap();
        drop(objects);
        let folder = machine_folder(dir.path()).join("desk-001");
        std::fs::create_dir_all(&folder).unwrap();
        let on_isolation = spillway_api::IsolationAction::Stop;
        guard::GuardMark { uuid: "u".into(), on_isolation, pid_file: None }.write(&folder).unwrap();
        let mut sleep = Command::new("sleep");
        sleep.arg("1000");
        let vmm = processes::start(&folder, VMM_PROCESS, sleep).unwrap();
        let refused = leave_fleet(dir.path()).unwrap_err();
        assert!(refused.to_string().contains("nobody would end them: desk-001."), "{refused}");
        let refused = accept_restored_fleet(dir.path()).unwrap_err();
        assert!(refused.to_string().contains("may start them, too: desk-001."), "{refused}");
        vmm.end(Duration::ZERO).unwrap();
        assert_eq!(accept_restored_fleet(dir.path()).unwrap(), None);
        let page = guard::page_path(&machine_folder(dir.path()));
        std::fs::create_dir_all(page.parent().unwrap()).unwrap();
        std::fs::write(&page, "").unwrap();
        assert_eq!(leave_fleet(dir.path()).unwrap().unwrap().fleet, fleet);
        assert!(!page.exists(), "the guard ends");
    }
}
