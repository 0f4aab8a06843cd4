//! Desired states after a start of the host, when nothing runs and all claims have ended, and after a restore of the records,
//! which are older than what runs. Owns the record of the last boot that was processed, and the mark of a restore.
//!
//! Invariant: each boot and each restore is processed once, in one transaction with its changes.

use super::desired_state::{DesiredState, boot_id};
use super::run::{MachineFolders, RunRecord};
use crate::backup::{RESTORED, RestoreMark};
use crate::error::HostError;
use crate::store::{Objects, StoreError, StoredRecord};
use serde::{Deserialize, Serialize};
use spillway_api::{Catalog, Machine, Name, Power};
use std::collections::BTreeMap;
use utoipa::ToSchema;

/// Id of one boot of the host.
#[derive(Serialize, Deserialize, ToSchema)]
pub(super) struct HostStart {
    pub boot: String,
}

impl HostStart {
    /// Returns the current boot.
    pub fn this() -> HostStart {
        HostStart { boot: boot_id() }
    }
}

impl StoredRecord for HostStart {
    const PREFIX: &'static str = "host/";
    const WORD: &'static str = "host";
    const IS_A_MARK: bool = true;
}

/// Name of the record of the last boot that was processed.
const NAME: &str = "boot";

/// After a restore of the records, ends all claims and resets what runs, unless it keeps its data. After a boot of the host,
/// turns on the machines whose catalog starts them by itself, and turns off all others.
pub fn look(objects: &Objects, folders: &MachineFolders) -> Result<(), HostError> {
    after_restore(objects, folders)?;
    look_at(objects, &boot_id())
}

/// The machines' counters are older than those of the runs, and so are the claims: whoever has claimed a machine since is not
/// in the records.
fn after_restore(objects: &Objects, folders: &MachineFolders) -> Result<(), HostError> {
    match objects.get::<RestoreMark>(RESTORED) {
        Ok(None) => return Ok(()),
        Ok(Some(_)) | Err(StoreError::Unreadable { .. }) => {}
        Err(e) => return Err(e.into()),
    }
    let runs: BTreeMap<Name, RunRecord> = folders.runs()?.into_iter().collect();
    // From now on each run satisfies the counters that are in the records.
    for (name, run) in &runs {
        if let Ok(Some(wanted)) = objects.get::<DesiredState>(name.as_str()) {
            let (restarts, resets) = (wanted.value.restarts, wanted.value.resets);
            folders.of(name).save(&RunRecord { restarts, resets, ..run.clone() })?;
        }
    }
    objects.change(|changes| {
        changes.delete::<RestoreMark>(RESTORED);
        for machine in changes.list_readable_below::<Machine>("")? {
            let wanted = match changes.get::<DesiredState>(&machine.name) {
                Ok(Some(wanted)) => wanted.value,
                Ok(None) | Err(StoreError::Unreadable { .. }) => continue,
                Err(e) => return Err(e.into()),
            };
            let run = runs.get(&machine.value.name);
            let run = run.filter(|run| run.uuid == machine.value.identity.uuid);
            let resets = wanted.resets + u64::from(run.is_some_and(|run| !run.spec.keeps_writes()));
            changes.put(&machine.name, &DesiredState { claim: None, resets, ..wanted });
        }
        Ok(())
    })
}

fn look_at(objects: &Objects, boot: &str) -> Result<(), HostError> {
    objects.change(|changes| {
        let seen = match changes.get::<HostStart>(NAME) {
            // The last boot is unknown: process this one.
            Err(StoreError::Unreadable { .. }) => Some(None),
            seen => seen?.map(|seen| Some(seen.value.boot)),
        };
        if seen.as_ref().is_some_and(|seen| seen.as_deref() == Some(boot)) {
            return Ok(());
        }
        changes.put(NAME, &HostStart { boot: boot.into() });
        if seen.is_none() {
            return Ok(());
        }
        for machine in changes.list_readable_below::<Machine>("")? {
            let catalog = changes.get::<Catalog>(machine.value.catalog.as_str());
            let wanted = changes.get::<DesiredState>(&machine.name);
            // Leave a machine alone if one of its records cannot be read.
            let (catalog, wanted) = match (catalog, wanted) {
                (Err(StoreError::Unreadable { .. }), _) | (_, Err(StoreError::Unreadable { .. })) => continue,
                (catalog, wanted) => (catalog?, wanted?),
            };
            let starts = catalog.is_some_and(|catalog| catalog.value.spec.autostart);
            // A machine without a desired state is treated like a new one.
            if let Some(wanted) = wanted {
                let power = if starts && !wanted.value.drained { Power::On } else { Power::Off };
                changes.put(
                    &machine.name,
                    &DesiredState { power, claim: None, requested: false, ..wanted.value },
                );
            }
        }
        Ok(())
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::SqliteStore;
    use serde_json::json;
    use std::sync::Arc;

    #[test]
    fn only_what_starts_by_itself_runs_after_a_start_of_the_host() {
        let dir = tempfile::tempdir().unwrap();
        let objects = Objects::new(Arc::new(SqliteStore::open(&dir.path().join("db")).unwrap()));
        let now = jiff::Timestamp::now();
        let catalog = |name: &str, autostart: bool| -> Catalog {
            let spec = json!({ "image": "debian", "autostart": autostart });
            let catalog = json!({
                "name": name, "spec": spec, "version": 1, "history": [], "created": now, "warnings": [],
            });
            serde_json::from_value(catalog).unwrap()
        };
        let machine = |name: &str, catalog: &str| -> Machine {
            let identity = json!({ "uuid": name, "mac": "02:00:00:00:00:01" });
            let machine = json!({
                "name": name, "catalog": catalog, "number": 1, "identity": identity, "created": now,
            });
            serde_json::from_value(machine).unwrap()
        };
        let on = DesiredState { power: Power::On, ..DesiredState::default() };
        objects
            .change(|changes| {
                changes.put("kept", &catalog("kept", true));
                changes.put("other", &catalog("other", false));
                for (name, of) in [("a", "kept"), ("b", "kept"), ("c", "kept"), ("d", "other"), ("e", "kept")]
                {
                    changes.put(name, &machine(name, of));
                }
                changes.put("a", &DesiredState { power: Power::Off, ..on.clone() });
                changes.put("b", &on);
                changes.put("c", &DesiredState { drained: true, ..on.clone() });
                changes.put("d", &on);
                Ok::<_, HostError>(())
            })
            .unwrap();
        let power = || {
            ["a", "b", "c", "d", "e"]
                .map(|name| objects.get::<DesiredState>(name).unwrap().map(|w| w.value.power))
        };
        let (off, on) = (Some(Power::Off), Some(Power::On));
        // The first daemon of all changes nothing, nor does another one of the same start.
        for _ in 0..2 {
            look_at(&objects, "first").unwrap();
            assert_eq!(power(), [off, on, on, on, None]);
        }
        look_at(&objects, "second").unwrap();
        assert_eq!(power(), [on, on, off, off, None]);
    }
}
