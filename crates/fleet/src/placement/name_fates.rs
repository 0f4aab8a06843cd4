//! What becomes of a machine with a name of the fleet: whether it stays on its host, is to leave it, or is not there any more.
//!
//! Owns the times after which a host has certainly ended a machine. Invariant: a name is free only after its host has confirmed that nothing
//! of it runs any more, after the host has counted as lost, dead or removed for longer than it may run it, or because somebody has declared
//! dead a host whose machines run on.

use super::explanation::Obstacle;
use super::{Plan, Situation};
use crate::keys::Key;
use crate::liveness::{LEASE_MS, Reach, Standing};
use crate::named::{ISOLATION_MS, VALID_MS, replace_after_ms};
use crate::records::{CatalogRecord, NameState, NamedRecord};
use crate::transaction::{Comparison, Revision};
use crate::view::{FleetView, Versioned};
use spillway_api::{IsolationAction, Name};

/// Time after which a host whose lease has ended has ended its machines, in milliseconds: whoever says that it is off may be wrong. Its
/// last renewal was before the end of the lease, but etcd may have ended that right after it.
const ENDED_MS: u64 = VALID_MS + ISOLATION_MS + 3_000;

/// Why a name leaves its host, or stays.
pub(super) enum Fate {
    /// Nothing changes.
    Stays,
    /// It is on a host that should have it no more, if another one has space.
    Unwelcome,
    /// The host is to give it up.
    Leaves,
    /// The host may keep it after all.
    Remains,
    /// The records are to say so again, with the host's present epoch.
    Renewed(Revision),
    /// The host does not have it any more: it is free, and these comparisons say why.
    Free(Vec<Comparison>),
    /// The host is about to give it up.
    IsLeaving,
}

/// A name and its record.
pub(super) struct Named<'a> {
    pub(super) machine: &'a Name,
    pub(super) record: &'a Versioned<NamedRecord>,
}

/// What becomes of a name. `catalog` is none if there should be no such name.
pub(super) fn fate(
    situation: &Situation<'_>,
    record: Option<&CatalogRecord>,
    catalog: &Name,
    named: &Named<'_>,
) -> Fate {
    let view = situation.view;
    let name = &named.record.value;
    let Some(host) = name.host.as_ref().filter(|_| name.state != NameState::Free) else {
        return Fate::Free(Vec::new());
    };
    let key = Key::Place(host.clone(), catalog.clone(), named.machine.clone());
    let is_unreadable =
        |key: &Key| !view.unreadable.is_empty() && view.unreadable.contains_key(&key.to_string());
    if is_unreadable(&key)
        || is_unreadable(&Key::Alive(host.clone()))
        || is_unreadable(&Key::Host(host.clone()))
    {
        return Fate::Stays;
    }
    let place = view.place(host, catalog, named.machine);
    if name.state == NameState::Leaving && place.is_none() {
        return Fate::Free(vec![Comparison::Modified(key, 0)]);
    }
    let Some(alive) = view.alive.get(host) else { return fate_of_absent(situation, catalog, name, host) };
    let epoch = alive.created;
    let is_same = place.is_some_and(|place| {
        place.value.epoch == epoch && place.value.is_leaving == (name.state == NameState::Leaving)
    });
    if name.epoch != epoch || !is_same {
        return if ends_in_ms(situation, name, host) > 0 { Fate::Stays } else { Fate::Renewed(epoch) };
    }
    let Some(record) = record.filter(|record| record.spec.fleet.on_isolation == name.on_isolation) else {
        return if name.state == NameState::Leaving { Fate::IsLeaving } else { Fate::Leaves };
    };
    let may_have = view.hosts.get(host).is_some_and(|host| {
        !host.value.is_draining && Obstacle::of_settings(&host.value, &record.spec.fleet).is_none()
    });
    // With a machine there it may be another one that the host has refused.
    let report = view.statuses.get(host).and_then(|status| status.value.catalogs.get(catalog));
    let reports = report.is_some_and(|report| report.refuses(record.generation) && report.count == 0);
    // A name that leaves for that goes on leaving, also if the host reports something else before it has given the name up.
    let left =
        name.state == NameState::Leaving && situation.refused.contains_key(&(host.clone(), catalog.clone()));
    let has_refused = reports || left;
    let may_have = may_have && !has_refused;
    match (name.state, may_have) {
        (NameState::Leaving, true) => Fate::Remains,
        (NameState::Leaving, false) => Fate::IsLeaving,
        (_, true) => Fate::Stays,
        (_, false) => Fate::Unwelcome,
    }
}

/// What becomes of a name whose host has no lease.
fn fate_of_absent(situation: &Situation<'_>, catalog: &Name, name: &NamedRecord, host: &Name) -> Fate {
    let absent = Comparison::Created(Key::Alive(host.clone()), 0);
    let recorded = situation.view.hosts.get(host);
    let is_dead = recorded.is_some_and(|host| host.value.dead_epoch.is_some_and(|dead| dead >= name.epoch));
    match (situation.standing)(host) {
        // A host that was back since then is not dead any more, although its record may still say so.
        Standing::DeclaredDead { .. } | Standing::Removed { .. } if is_dead || recorded.is_none() => {
            if ends_in_ms(situation, name, host) > 0 {
                return Fate::Stays;
            }
            let modified = recorded.map_or(0, |host| host.modified);
            Fate::Free(vec![absent, Comparison::Modified(Key::Host(host.clone()), modified)])
        }
        Standing::Silent { for_ms, reach: Reach::Unreachable }
            if situation.brake.is_none()
                && for_ms >= lost_after_ms(situation.view, catalog)
                && name.on_isolation != IsolationAction::Keep =>
        {
            Fate::Free(vec![absent])
        }
        _ => Fate::Stays,
    }
}

/// Time until a host that was declared dead or removed has certainly ended a machine, in milliseconds. The same holds for one that was
/// removed, and whose name another one has by now. 0 if there is nothing to wait for, or if its machines run on.
fn ends_in_ms(situation: &Situation<'_>, name: &NamedRecord, host: &Name) -> u64 {
    let view = situation.view;
    match (situation.standing)(host) {
        _ if name.on_isolation == IsolationAction::Keep => 0,
        // Silence counts from a lease's time before the end that was seen.
        Standing::DeclaredDead { for_ms } | Standing::Removed { for_ms }
            if !view.alive.contains_key(host) =>
        {
            (ENDED_MS + LEASE_MS).saturating_sub(for_ms)
        }
        _ if view.hosts.get(host).is_none_or(|host| host.created > name.epoch) => {
            ENDED_MS.saturating_sub((situation.recorded_for_ms)(host))
        }
        _ => 0,
    }
}

/// Time for which a host must be silent until others get its names of a catalog, which may be gone.
fn lost_after_ms(view: &FleetView, catalog: &Name) -> u64 {
    let catalog = view.catalogs.get(catalog).map(|catalog| &catalog.value.spec.fleet);
    replace_after_ms(catalog.map_or(0, |fleet| fleet.lost_after_seconds))
}

/// Notes a silent host whose names others would get if it were lost, and when it has ended them.
pub(super) fn note_stake(situation: &Situation<'_>, catalog: &Name, named: &Named<'_>, plan: &mut Plan) {
    let name = &named.record.value;
    let Some(host) = &name.host else { return };
    if name.on_isolation == IsolationAction::Keep {
        return;
    }
    let Standing::Silent { for_ms, .. } = (situation.standing)(host) else {
        return wake_in(ends_in_ms(situation, name, host), plan);
    };
    let lost_after_ms = lost_after_ms(situation.view, catalog);
    let stake = plan.stakes.entry(host.clone()).or_insert(lost_after_ms);
    *stake = lost_after_ms.min(*stake);
    wake_in(lost_after_ms.saturating_sub(for_ms), plan);
}

/// Has the placer look again after so many milliseconds.
pub(super) fn wake_in(left_ms: u64, plan: &mut Plan) {
    if left_ms > 0 {
        plan.next_in_ms = Some(plan.next_in_ms.map_or(left_ms, |next| next.min(left_ms)));
    }
}
