//! What is asked of machines: to start, stop, restart, forget; to be somebody's for a while; to be no more. Owns the rules
//! of what may be asked; it is recorded here, and done by the machines' tasks.
//!
//! Invariant: a machine is claimed once, whoever asks at the same time.

use super::Machines;
use super::closing::is_open;
use super::views::{Part, View};
use super::wanted::{Claimed, Wanted};
use crate::catalogs::whole;
use crate::error::HostError;
use crate::images::none_is_committed;
use spillway_api::{
    Action, Catalog, CatalogSpec, ErrorCode, EventKind, MOST_NAMES, Machine, MachineAction, MachineDetails,
    Name, NewClaim, Page, Phase, Power, Selector,
};
use std::collections::HashMap;

/// Records written in one transaction.
pub(super) const BATCH: usize = 256;

impl Machines {
    /// Records what is wanted of machines; their tasks do it. The first of them, as they are now: all that are named.
    pub fn act(&self, action: &MachineAction) -> Result<Page<MachineDetails>, HostError> {
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
        let asked = |machine: &Machine, is: &Wanted| {
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
        self.look_at(select, "", |views| {
            views.iter().try_for_each(|view| asked(&view.machine, &view.wanted).map(drop))?;
            Ok(true)
        })?;
        self.look_at(select, "", |batch| {
            self.shared.objects.change(|changes| {
                for View { machine, .. } in &batch {
                    let name = machine.name.as_str();
                    if changes.get::<Machine>(name)?.is_none() {
                        return Err(HostError::not_found("machine", name, []));
                    }
                    let is = changes.get::<Wanted>(name)?.map(|wanted| wanted.value).unwrap_or_default();
                    // Written even if it is as it was: one that has failed is tried again at once.
                    changes.put(name, &asked(machine, &is)?);
                }
                match action.action {
                    Action::Start | Action::Restart => {
                        is_open(changes)?;
                        none_is_committed(changes, batch.iter().map(|view| &view.machine.name))
                    }
                    Action::Stop | Action::Reset | Action::Drain | Action::Undrain => Ok(()),
                }
            })?;
            Ok(true)
        })?;
        self.page(select, &Part { after: String::new(), most: MOST_NAMES })
    }

    /// A machine of a catalog becomes somebody's.
    pub fn claim(&self, catalog: &Name, claim: &NewClaim) -> Result<MachineDetails, HostError> {
        let spec = self.catalogs.get(catalog)?.spec;
        can_be_claimed(catalog, &spec)?;
        if self.shared.has_no_room(&spec)? {
            let message =
                format!("the store of the overflow of '{catalog}' is nearly full: make room there first");
            return Err(HostError::new(ErrorCode::Exhausted, message));
        }
        let of = Selector { catalog: Some(catalog.clone()), ..Selector::default() };
        let mut views = self.views(&of)?;
        let free = |view: &View| view.wanted.claim.is_none() && !view.wanted.drained;
        let claimed = views.iter().filter(|view| view.wanted.claim.is_some()).count();
        let starting =
            views.iter().filter(|view| free(view) && view.wanted.power == Power::On && !is_ready(view));
        let starting = starting.count();
        // One that was started before its catalog lost its data disks has its own still.
        let has_data = |view: &View| {
            let mut pending = view.status.run.iter().flat_map(|run| &run.pending);
            is_ready(view) && pending.any(|next| next.setting == "data_disk_bytes")
        };
        views.retain(|view| free(view) && (claim.any || is_ready(view)) && !has_data(view));
        // Those first that are ready, and of these those that have the newest version; then those that start, and last those
        // that have failed to.
        views.sort_by_key(|view| {
            let outdated = view.status.run.as_ref().is_none_or(|run| run.outdated);
            let failed = view.status.phase == Phase::Failed;
            (!is_ready(view), failed, view.wanted.power == Power::Off, outdated, view.machine.number)
        });
        for view in views {
            if self.is_claimed_now(&view, claim)? {
                let object = format!("machine/{}", view.machine.name);
                self.shared.events.raise(EventKind::Claimed, &object, "it is claimed");
                return self.get(&view.machine.name);
            }
        }
        let message = format!(
            "no machine of '{catalog}' is free and ready: {claimed} are claimed, {starting} start: wait, or raise its warm"
        );
        Err(HostError::new(ErrorCode::Exhausted, message))
    }

    /// Claims a machine, if it is still as it was seen.
    fn is_claimed_now(&self, seen: &View, claim: &NewClaim) -> Result<bool, HostError> {
        let name = seen.machine.name.as_str();
        self.shared.objects.change(|changes| {
            let is = changes.get::<Wanted>(name)?;
            let there = changes.get::<Machine>(name)?.is_some();
            let revision = is.as_ref().map(|wanted| wanted.revision).unwrap_or_default();
            if !there || revision != seen.revision {
                return Ok(false);
            }
            let mut is = is.map(|wanted| wanted.value).unwrap_or_default();
            is_open(changes)?;
            let spec = whole(changes, &seen.machine.catalog)?.spec;
            can_be_claimed(&seen.machine.catalog, &spec)?;
            match none_is_committed(changes, [&seen.machine.name]) {
                Err(committed) if committed.code == ErrorCode::Conflict => return Ok(false),
                looked => looked?,
            }
            is.claim = Some(Claimed::new(claim.ttl_seconds, is.power == Power::Off));
            is.start_anew(&spec);
            changes.put(name, &is);
            Ok(true)
        })
    }

    /// A machine that is off and nobody's is no more, and its catalog has one less. Its data disk and its kept one stay in
    /// their store unless it is said that they go.
    pub fn delete(&self, name: &Name, with_data: bool) -> Result<(), HostError> {
        let view = self.view(name)?;
        view.is_off()?;
        if view.wanted.claim.is_some() {
            let message = format!("{name} is claimed: release it first ('spillway machine release {name}')");
            return Err(HostError::new(ErrorCode::Conflict, message));
        }
        self.catalogs.delete_machine(&view.machine, with_data, |changes| {
            view.is_as_seen(changes)?;
            none_is_committed(changes, [name])
        })
    }

    /// A machine is nobody's any more: it forgets, and is ready for the next one. With a claim's id only if it still has
    /// that one.
    pub fn release(&self, name: &Name, id: Option<&str>) -> Result<MachineDetails, HostError> {
        let catalog = self.catalogs.get(&self.catalogs.machine(name)?.catalog)?;
        let views = self.views(&Selector { catalog: Some(catalog.name.clone()), ..Selector::default() })?;
        let free = free(&views, Some(name));
        self.shared.objects.change(|changes| {
            let Some(mut wanted) = changes.get::<Wanted>(name.as_str())?.filter(|w| w.value.claim.is_some())
            else {
                let message = format!("nobody has claimed {name}");
                return Err(HostError::new(ErrorCode::Conflict, message));
            };
            if id.is_some_and(|id| wanted.value.claim.as_ref().is_some_and(|claim| claim.id != id)) {
                let message = format!("that claim of {name} is over: it is somebody else's now");
                return Err(HostError::new(ErrorCode::Conflict, message));
            }
            wanted.value.release(&catalog.spec, free);
            changes.put(name.as_str(), &wanted.value);
            Ok(())
        })?;
        self.shared.events.raise(EventKind::Released, &format!("machine/{name}"), "it is released");
        self.get(name)
    }
}

/// How many run, or are to, and are nobody's; but for this one.
pub(super) fn free<'a>(views: impl IntoIterator<Item = &'a View>, but: Option<&Name>) -> usize {
    let is_free = |view: &&View| {
        let wanted = &view.wanted;
        wanted.power == Power::On
            && wanted.claim.is_none()
            && !wanted.drained
            && Some(&view.machine.name) != but
    };
    views.into_iter().filter(is_free).count()
}

fn is_ready(view: &View) -> bool {
    view.wanted.power == Power::On && view.status.settled && view.status.ready
}

/// What is wanted of a machine once it was asked this.
fn ask(name: &Name, is: &Wanted, action: Action, grace_seconds: u32) -> Result<Wanted, HostError> {
    let mut wanted = Wanted { grace_seconds, ..is.clone() };
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

/// Refuses to give away what the next one would find as the last one has left it.
fn can_be_claimed(catalog: &Name, spec: &CatalogSpec) -> Result<(), HostError> {
    let refuse = |why: &str| {
        let message = format!("the machines of '{catalog}' {why}: start one by its name");
        Err(HostError::new(ErrorCode::Conflict, message))
    };
    if spec.keeps_writes() {
        return refuse("keep what is written, and a claim ends with a machine that forgets");
    }
    if spec.data_disk_bytes.is_some() {
        return refuse("have data disks, which keep what is written over every reset");
    }
    Ok(())
}
