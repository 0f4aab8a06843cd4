//! The actions that clients ask of machines: start, stop, restart, reset, drain and delete. Owns the rules for each
//! action. An action is recorded here; the machine's task carries it out.
//!
//! Invariant: if one of the named machines cannot take the action, nothing is recorded for any of them. With an
//! idempotency key the action is recorded once for each machine.

use super::closing::require_open;
use super::desired_state::DesiredState;
use super::tag::check_tag;
use super::views::{MachineReader, View};
use crate::catalogs::{Catalogs, ChangedBy};
use crate::error::HostError;
use crate::idempotency::IdempotentRequest;
use crate::images::check_none_committed;
use crate::paging::PageRequest;
use crate::store::{Changes, Objects};
use crate::tags::Tag;
use serde::{Deserialize, Serialize};
use spillway_api::{
    Action, Catalog, ErrorCode, MOST_NAMES, Machine, MachineAction, MachineDetails, Name, NewMachine, Page,
    Power,
};
use std::collections::{HashMap, HashSet};

/// Number of records that one transaction writes at most.
pub(super) const BATCH: usize = 256;

/// How far an action with an idempotency key is recorded. A repeated request goes on from there.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
struct ActionProgress {
    /// Last machine, in the order of names, for which the action is recorded; empty: none.
    last: String,
    /// Whether it is recorded for all selected machines.
    is_complete: bool,
}

/// Conditions of a deletion.
#[derive(Clone, Copy, Debug, Default)]
pub struct MachineDeleteTerms {
    /// Tag of the machine on which it was decided: nothing is done if the machine has another one.
    pub expected: Option<Tag>,
    /// Whether the machine's data disk and kept disk are deleted too.
    pub with_data: bool,
    /// Whether everything is checked and nothing deleted.
    pub dry_run: bool,
    /// Who asks for the deletion.
    pub by: ChangedBy,
}

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
    /// machines as they are now, and all if they are named. Calls `note` with each machine whose change was recorded. The
    /// flag is `true` if an earlier request with the same key has recorded the action for all of them; of these the
    /// deleted ones are left out.
    pub fn act(
        &self,
        action: &MachineAction,
        key: &IdempotentRequest,
        note: impl Fn(&Name),
    ) -> Result<(Page<MachineDetails>, bool), HostError> {
        let select = &action.select;
        if select.names.is_empty() && select.catalog.is_none() && select.labels.is_empty() && !select.all {
            return Err(HostError::invalid(
                "which machines? Name them, their catalog or its labels, or say all",
            ));
        }
        let earlier = self.objects.change(|changes| key.made::<ActionProgress>(changes))?;
        let ActionProgress { last, is_complete } = earlier.unwrap_or_default();
        let first = PageRequest { after: String::new(), most: MOST_NAMES };
        if !is_complete {
            let has_recorded = self.record(action, &last, key, note)?;
            if has_recorded || !last.is_empty() {
                self.objects.change(|changes| {
                    key.record(changes, &ActionProgress { last: String::new(), is_complete: true });
                    Ok::<_, HostError>(())
                })?;
            }
            return Ok((self.reader.page(select, &[], &first)?, false));
        }
        let mut left = select.clone();
        left.names.retain(|name| self.catalogs.machine(name).is_ok());
        // Without names it would select all machines.
        let page = match left.names.is_empty() && !select.names.is_empty() {
            true => Page { items: Vec::new(), next: None },
            false => self.reader.page(&left, &[], &first)?,
        };
        Ok((page, true))
    }

    /// Records an action for the selected machines after this name. Returns whether there was one.
    fn record(
        &self,
        action: &MachineAction,
        after: &str,
        key: &IdempotentRequest,
        note: impl Fn(&Name),
    ) -> Result<bool, HostError> {
        let select = &action.select;
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
                    "{} keeps its data, and a reset would discard it: to allow this, set discard_data (--discard-data)",
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
        self.reader.look_at(select, after, |views| {
            let met: Vec<&View> = views.iter().filter(|view| is_met(view)).collect();
            met.iter().try_for_each(|view| asked(&view.machine, &view.wanted).map(drop))?;
            self.objects.change(|changes| check_startable(changes, action.action, &met))?;
            Ok(true)
        })?;
        let mut has_recorded = false;
        self.reader.look_at(select, after, |mut batch| {
            batch.retain(is_met);
            let recorded = self.objects.change(|changes| {
                // Another request with the key may be at it too.
                let progress = key.made::<ActionProgress>(changes)?.unwrap_or_default();
                let is_left =
                    |view: &&View| !progress.is_complete && *view.machine.name.as_str() > *progress.last;
                let batch: Vec<&View> = batch.iter().filter(is_left).collect();
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
                check_startable(changes, action.action, &batch)?;
                let names: Vec<Name> = batch.iter().map(|view| view.machine.name.clone()).collect();
                if let Some(last) = names.last() {
                    key.record(changes, &ActionProgress { last: last.to_string(), is_complete: false });
                }
                Ok::<_, HostError>(names)
            })?;
            recorded.iter().for_each(&note);
            has_recorded |= !recorded.is_empty();
            Ok(true)
        })?;
        Ok(has_recorded)
    }

    /// Adds a machine to a catalog of external machines. The flag is `true` if it is there already.
    pub fn add(&self, catalog: &Name, new: &NewMachine) -> Result<(MachineDetails, bool), HostError> {
        let (machine, is_repeated) = self.catalogs.add_machine(catalog, new)?;
        Ok((self.reader.get(&machine.name)?, is_repeated))
    }

    /// Gives the disk of a machine that is off another size.
    pub fn resize(&self, name: &Name, size_bytes: u64) -> Result<MachineDetails, HostError> {
        let view = self.reader.view(name)?;
        self.catalogs.resize_machine(name, size_bytes, |changes| {
            view.check_off()?;
            view.check_unchanged(changes)
        })?;
        self.reader.get(name)
    }

    /// Deletes a machine that is stopped and not claimed, and lowers its catalog's count by one. Its data disk and kept
    /// disk stay in their store unless the conditions say otherwise.
    pub fn delete(&self, name: &Name, terms: MachineDeleteTerms) -> Result<(), HostError> {
        let view = self.reader.view(name)?;
        // Check the tag before the second transaction changes the machine's records.
        self.objects.change(|changes| check_tag(changes, name, terms.expected))?;
        view.check_off()?;
        if view.wanted.claim.is_some() {
            let message = format!("{name} is claimed: release it first ('spillway machine release {name}')");
            return Err(HostError::new(ErrorCode::Conflict, message));
        }
        self.catalogs.delete_machine(&view.machine, terms, |changes| {
            check_tag(changes, name, terms.expected)?;
            view.check_unchanged(changes)?;
            check_none_committed(changes, [name])
        })
    }
}

/// Refuses an action that starts machines while the host is closed, or one of them is being committed.
fn check_startable(changes: &mut Changes, action: Action, views: &[&View]) -> Result<(), HostError> {
    match action {
        Action::Start | Action::Restart => {
            require_open(changes)?;
            check_none_committed(changes, views.iter().map(|view| &view.machine.name))
        }
        Action::Stop | Action::Reset | Action::Drain | Action::Undrain => Ok(()),
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
        Action::Restart if is.power == Power::On => {
            (wanted.restarts, wanted.requested) = (is.restarts + 1, true)
        }
        Action::Start | Action::Restart => (wanted.power, wanted.requested) = (Power::On, true),
        Action::Stop => (wanted.power, wanted.requested) = (Power::Off, false),
        Action::Reset => {
            (wanted.resets, wanted.requested) = (is.resets + 1, true);
            // A shutdown that is still going on ends at once too, and is not resumed.
            wanted.grace_seconds = 0;
        }
        Action::Drain => wanted.drained = true,
        Action::Undrain => wanted.drained = false,
    }
    Ok(wanted)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::machines::testing::TestHost;
    use crate::resources::budget::NO_LIMITS;
    use crate::store::failing::FailingStore;
    use serde_json::json;
    use std::cell::Cell;
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering};

    /// The daemon ends after the first of two transactions.
    #[test]
    fn a_repeated_action_goes_on_where_the_first_one_ended() {
        const COUNT: usize = BATCH + 44;
        let left = Arc::new(AtomicUsize::new(usize::MAX));
        let of = Arc::clone(&left);
        let host = TestHost::with_store(NO_LIMITS, |store| Arc::new(FailingStore::counted(store, of)));
        host.catalog("desk", json!({ "count": COUNT, "naming": "desk-####" }));
        let actions = MachineActions::new(host.reader.clone(), host.catalogs.clone(), host.objects.clone());
        let key = |action: &MachineAction| IdempotentRequest::new("ci", "machine-actions", "1", action);
        let reset = json!({ "action": "reset", "select": { "catalog": "desk" } });
        let reset: MachineAction = serde_json::from_value(reset).unwrap();
        let noted = Cell::new(0);
        let act = || {
            noted.set(0);
            let acted = actions.act(&reset, &key(&reset), |_| noted.set(noted.get() + 1));
            acted.map(|(page, is_repeated)| (page.items.len(), is_repeated)).map_err(|e| e.code)
        };
        left.store(1, Ordering::Relaxed);
        assert_eq!((act(), noted.get()), (Err(ErrorCode::Exhausted), BATCH));
        left.store(usize::MAX, Ordering::Relaxed);
        assert_eq!((act(), noted.get()), (Ok((COUNT, false)), COUNT - BATCH));
        assert_eq!((act(), noted.get()), (Ok((COUNT, true)), 0));
        let wanted = host.objects.list::<DesiredState>().unwrap();
        assert_eq!(wanted.len(), COUNT);
        assert!(wanted.iter().all(|wanted| wanted.value.resets == 1), "each is reset once");
        let other = MachineAction { action: Action::Stop, ..reset.clone() };
        let other = actions.act(&other, &key(&other), |_| ()).unwrap_err();
        assert_eq!(other.code, ErrorCode::KeyReused);
    }

    #[test]
    fn who_asks_for_a_machine_is_before_what_the_daemon_starts() {
        let asks = |is: &DesiredState, action| ask(&"desk-001".parse().unwrap(), is, action, 5).unwrap();
        let off = DesiredState::default();
        let on = DesiredState { power: Power::On, ..DesiredState::default() };
        for (is, action, is_awaited) in [
            (&off, Action::Start, true),
            (&on, Action::Restart, true),
            (&on, Action::Reset, true),
            (&on, Action::Drain, false),
            (&asks(&off, Action::Start), Action::Drain, true),
            (&asks(&off, Action::Start), Action::Stop, false),
        ] {
            assert_eq!(asks(is, action).is_awaited(), is_awaited, "{action:?}");
        }
        let spec = crate::machines::testing::spec(json!({}));
        let mut started = asks(&off, Action::Start);
        started.release(&spec, 0);
        assert!(!started.is_awaited(), "its claim is over");
        let mut fresh = asks(&asks(&off, Action::Start), Action::Stop);
        fresh.start_fresh(&spec);
        assert!(!fresh.is_awaited(), "the pool is filled");
    }

    fn actions(host: &TestHost) -> MachineActions {
        MachineActions::new(host.reader.clone(), host.catalogs.clone(), host.objects.clone())
    }

    fn parse(action: serde_json::Value) -> MachineAction {
        serde_json::from_value(action).unwrap()
    }

    /// The machine that cannot be restarted is in the second of two transactions.
    #[test]
    fn an_action_that_one_machine_cannot_take_is_recorded_for_none() {
        let host = TestHost::with_store(NO_LIMITS, |store| store);
        host.catalog("desk", json!({ "count": BATCH + 44, "naming": "desk-####" }));
        let restart = parse(json!({ "action": "restart", "select": { "all": true } }));
        let none = IdempotentRequest::default();
        let noted = Cell::new(0);
        let act = || actions(&host).act(&restart, &none, |_| noted.set(noted.get() + 1)).map_err(|e| e.code);
        let commit = json!({
            "image": "other", "version": 1, "state": "importing", "store": "default", "size_bytes": 4096,
            "stored_bytes": 0, "digest": null, "notes": [], "created": jiff::Timestamp::now(),
            "origin": { "kind": "commit", "machine": "desk-0290", "from": "debian:1" },
        });
        let commit: spillway_api::ImageVersion = serde_json::from_value(commit).unwrap();
        let put = |changes: &mut Changes| {
            changes.put("other:1", &commit);
            Ok::<_, HostError>(())
        };
        host.objects.change(put).unwrap();
        assert_eq!((act().unwrap_err(), noted.get()), (ErrorCode::Conflict, 0));
        let wanted = host.objects.list::<DesiredState>().unwrap();
        assert!(wanted.iter().all(|wanted| wanted.value.power == Power::Off), "none is started");
    }

    #[test]
    fn a_repeated_action_succeeds_though_a_machine_was_deleted_since() {
        let host = TestHost::with_store(NO_LIMITS, |store| store);
        host.catalog("desk", json!({ "count": 2 }));
        let stop = parse(json!({ "action": "stop", "select": { "names": ["desk-002"] } }));
        let key = IdempotentRequest::new("ci", "machine-actions", "1", &stop);
        assert!(!actions(&host).act(&stop, &key, |_| ()).unwrap().1);
        let delete = |changes: &mut Changes| {
            changes.delete::<Machine>("desk-002");
            Ok::<_, HostError>(())
        };
        host.objects.change(delete).unwrap();
        let (page, is_repeated) = actions(&host).act(&stop, &key, |_| ()).unwrap();
        assert!(is_repeated && page.items.is_empty(), "{:?}", page.items);
    }

    /// Else a caller could fill the table of keys, from which the oldest are removed.
    #[test]
    fn an_action_for_no_machine_has_no_key() {
        let host = TestHost::with_store(NO_LIMITS, |store| store);
        host.catalog("desk", json!({ "count": 1 }));
        let stop = parse(json!({ "action": "stop", "select": { "labels": { "team": "none" } } }));
        let key = IdempotentRequest::new("ci", "machine-actions", "1", &stop);
        actions(&host).act(&stop, &key, |_| ()).unwrap();
        let made = host.objects.change(|changes| key.made::<ActionProgress>(changes)).unwrap();
        assert!(made.is_none());
    }
}
