//! What is asked of machines: to start, stop, restart, forget; to be no more. Owns the rules of what may be asked; it is
//! recorded here, and done by the machines' tasks.
//!
//! Invariant: what is refused of one machine is refused of all that are named with it, before anything is recorded.

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

/// Records written in one transaction.
pub(super) const BATCH: usize = 256;

/// Carries out what is asked of machines.
#[derive(Clone)]
pub struct MachineActions {
    reader: MachineReader,
    catalogs: Catalogs,
    objects: Objects,
}

impl MachineActions {
    /// On these machines.
    pub(super) fn new(reader: MachineReader, catalogs: Catalogs, objects: Objects) -> MachineActions {
        MachineActions { reader, catalogs, objects }
    }

    /// Records what is wanted of machines; their tasks do it. The first of them, as they are now: all that are named. Each
    /// whose change was recorded is told to `note`.
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
                // An error if it cannot be read: then nobody knows what the machine keeps.
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
        // What is refused of one is refused of all, before anything is recorded.
        // Nor does one whose catalog cannot be read keep anything from all others.
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
                    // Written even if it is as it was: one that has failed is tried again at once.
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

    /// A machine that is off and nobody's is no more, and its catalog has one less. Its data disk and its kept one stay in
    /// their store unless it is said that they go.
    pub fn delete(&self, name: &Name, with_data: bool, expected: Option<Revision>) -> Result<(), HostError> {
        let view = self.reader.view(name)?;
        // Before what the other change may have made of it.
        self.objects.change(|changes| if_match(changes, name, expected))?;
        view.check_off()?;
        if view.wanted.claim.is_some() {
            let message = format!("{name} is claimed: release it first ('spillway machine release {name}')");
            return Err(HostError::new(ErrorCode::Conflict, message));
        }
        self.catalogs.delete_machine(&view.machine, with_data, |changes| {
            if_match(changes, name, expected)?;
            if_match(changes, name, expected)?;
            view.check_unchanged(changes)?;
            check_none_committed(changes, [name])
        })
    }
}

/// What is wanted of a machine once it was asked this.
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
            // What still shuts down is to end at once too, and not to be gone on with.
            wanted.grace_seconds = 0;
        }
        Action::Drain => wanted.drained = true,
        Action::Undrain => wanted.drained = false,
    }
    Ok(wanted)
}
