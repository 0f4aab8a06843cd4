//! The actions that clients ask of machines: start, stop, restart, reset, drain and delete. Owns the rules for each
//! action. An action is recorded here; the machine's task carries it out.
//!
//! Invariant: if one of the named machines cannot take the action, nothing is recorded for any of them.

use super::closing::require_open;
use super::desired_state::DesiredState;
use super::tag::if_match;
use super::views::{MachineReader, View};
use crate::catalogs::Catalogs;
use crate::error::HostError;
use crate::images::check_none_committed;
use crate::paging::PageRequest;
use crate::store::{Objects, Revision};
use spillway_api::{
    Action, Catalog, ErrorCode, MOST_NAMES, Machine, MachineAction, MachineDetails, Name, Page, Power,
};
use std::collections::{HashMap, HashSet};

/// Number of records that one transaction writes at most.
pub(super) const BATCH: usize = 256;

/// Records actions of clients on machines.
#[derive(Clone)]
pub struct MachineActions {
    reader: MachineReader,
    catalogs: Catalogs,
    objects: Objects,
}

impl MachineActions {
    /// Creates the actions on the machines that `reader` sees.
    pub(super) fn new(reader: MachineReader, catalogs: Catalogs, objects: Objects) -> MachineActions {
        MachineActions { reader, catalogs, objects }
    }

    /// Records the desired state of the selected machines; their tasks bring them to it. Returns the first of the
    /// machines as they are now, and all if they are named. Calls `note` with each machine whose change was recorded.
    pub fn act(
        &self,
        action: &MachineAction,
        note: impl Fn(&Name),
    ) -> Result<Page<MachineDetails>, HostError> {
        let select = &action.select;
        if select.names.is_empty() && select.catalog.is_none() && select.labels.is_empty() && !select.all {
            return Err(HostError::invalid(
                "which machines? Name them, their catalog or its labels, or say all",
            ));
        }
        let catalogs: HashMap<Name, Catalog> =
            self.catalogs.list()?.into_iter().map(|catalog| (catalog.name.clone(), catalog)).collect();
        let grace = |machine: &Machine| match (action.force, action.grace_seconds) {
            (true, _) => 0,
            (false, Some(seconds)) => seconds,
            (false, None) => catalogs.get(&machine.catalog).map_or(0, |catalog| catalog.spec.grace_seconds),
        };
        let asked = |machine: &Machine, is: &DesiredState| {
            if !catalogs.contains_key(&machine.catalog) {
                // Returns an error if the catalog cannot be read: whether the machine keeps data is unknown then.
                self.objects.get::<Catalog>(machine.catalog.as_str())?;
            }
            let keeps = catalogs.get(&machine.catalog).is_some_and(|c| c.spec.keeps_writes());
            if action.action == Action::Reset && keeps && !action.discard_data {
                let message = format!(
                    "{} keeps what is written: a reset throws that away: that needs discard_data",
                    machine.name
                );
                return Err(HostError::new(ErrorCode::Conflict, message));
            }
            ask(&machine.name, is, action.action, grace(machine))
        };
        // Refuse the action for all machines before anything is recorded. A catalog that cannot be read affects its own
        // machines only.
        let unreadable = self.objects.unreadable_names::<Catalog>();
        let unreadable: HashSet<String> =
            if select.names.is_empty() { unreadable.into_iter().collect() } else { HashSet::new() };
        let is_met = |view: &View| !unreadable.contains(view.machine.catalog.as_str());
        self.reader.look_at(select, "", |views| {
            let mut met = views.iter().filter(|view| is_met(view));
            met.try_for_each(|view| asked(&view.machine, &view.wanted).map(drop))?;
            Ok(true)
        })?;
        self.reader.look_at(select, "", |mut batch| {
            batch.retain(is_met);
            self.objects.change(|changes| {
                for View { machine, .. } in &batch {
                    let name = machine.name.as_str();
                    if changes.get::<Machine>(name)?.is_none() {
                        return Err(HostError::not_found("machine", name, []));
                    }
                    let is =
                        changes.get::<DesiredState>(name)?.map(|wanted| wanted.value).unwrap_or_default();
                    // Write the record even if it is unchanged: a machine that has failed is retried at once.
                    changes.put(name, &asked(machine, &is)?);
                }
                match action.action {
                    Action::Start | Action::Restart => {
                        require_open(changes)?;
                        check_none_committed(changes, batch.iter().map(|view| &view.machine.name))
                    }
                    Action::Stop | Action::Reset | Action::Drain | Action::Undrain => Ok(()),
                }
            })?;
            batch.iter().for_each(|view| note(&view.machine.name));
            Ok(true)
        })?;
        self.reader.page(select, &[], &PageRequest { after: String::new(), most: MOST_NAMES })
    }

    /// Deletes a machine that is stopped and not claimed, and lowers its catalog's count by one. Its data disk and kept
    /// disk stay in their store unless `with_data` is set.
    pub fn delete(&self, name: &Name, with_data: bool, expected: Option<Revision>) -> Result<(), HostError> {
        let view = self.reader.view(name)?;
        // Check the tag before the second transaction changes the machine's records.
        self.objects.change(|changes| if_match(changes, name, expected))?;
        view.check_off()?;
        if view.wanted.claim.is_some() {
            let message = format!("{name} is claimed: release it first ('spillway machine release {name}')");
            return Err(HostError::new(ErrorCode::Conflict, message));
        }
        self.catalogs.delete_machine(&view.machine, with_data, |changes| {
            if_match(changes, name, expected)?;
            view.check_unchanged(changes)?;
            check_none_committed(changes, [name])
        })
    }
}

/// Returns the desired state of a machine after an action.
fn ask(
    name: &Name,
    is: &DesiredState,
    action: Action,
    grace_seconds: u32,
) -> Result<DesiredState, HostError> {
    let mut wanted = DesiredState { grace_seconds, ..is.clone() };
    match action {
        Action::Start | Action::Restart if is.drained && is.power == Power::Off => {
            let message = format!("{name} is drained: 'machine undrain {name}' first");
            return Err(HostError::new(ErrorCode::Conflict, message));
        }
        Action::Restart if is.power == Power::On => wanted.restarts += 1,
        Action::Start | Action::Restart => wanted.power = Power::On,
        Action::Stop => wanted.power = Power::Off,
        Action::Reset => {
            wanted.resets += 1;
            // A shutdown that is still going on ends at once too, and is not resumed.
            wanted.grace_seconds = 0;
        }
        Action::Drain => wanted.drained = true,
        Action::Undrain => wanted.drained = false,
    }
    Ok(wanted)
}
