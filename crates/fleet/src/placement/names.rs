//! Machines with names of the fleet: which host gets which name.
//!
//! Owns the order of these decisions, and what is written. When a name is taken from its host is decided in `name_fates`. Invariant: a name
//! that another host gets is taken from the one that had it in the same transaction, which compares all that this was decided on.

use super::catalog::{Role, Target, explain, obstacle, place_missing};
use super::explanation::{Obstacle, Unplaced};
use super::name_fates::{Fate, Named, fate, note_stake, wake_in};
use super::table::{Cell, Table};
use super::{Plan, Situation};
use crate::keys::Key;
use crate::named::{Identities, NamePattern};
use crate::records::{CatalogRecord, NameState, NamedRecord, PlaceRecord};
use crate::transaction::{Comparison, Revision, Write};
use crate::view::{FleetView, Versioned};
use serde::Serialize;
use spillway_api::{IdentityKind, Name, RolloutStrategy};
use std::collections::{BTreeMap, BTreeSet};

/// Time for which a host that has refused a catalog gets no names of it, in milliseconds: until it reports otherwise.
const REFUSED_MS: u64 = 10_000;

/// Time after which a name that its host has not given up is one of its claimed ones, if it has so many, in milliseconds.
const CLAIMED_MS: u64 = 60_000;

/// A change of a machine with a name of the fleet.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NameChange {
    /// Catalog of the machine.
    pub catalog: Name,
    /// Name of the machine.
    pub machine: Name,
    /// Revision of its record that this was decided on; 0 if it had none.
    pub compared: Revision,
    /// Host that has it then, or is to give it up.
    pub host: Option<Name>,
    /// What must be as it was, beside the term of the placer.
    pub comparisons: Vec<Comparison>,
    /// What is written.
    pub writes: Vec<Write>,
}

/// Decides about all names.
pub(super) fn place(situation: &Situation<'_>, table: &mut Table<'_>, plan: &mut Plan) {
    let view = situation.view;
    let mut given = Given::default();
    for number in 0..table.catalogs.len() {
        let record = table.catalogs[number].record;
        if record.spec.fleet.identity == IdentityKind::Named {
            let first = plan.names.len();
            place_catalog(situation, table, number, &mut given, plan);
            given.machines.extend(plan.names[first..].iter().map(|change| change.machine.clone()));
        }
    }
    let is_named =
        |record: &Versioned<CatalogRecord>| record.value.spec.fleet.identity == IdentityKind::Named;
    for (catalog, names) in &view.named {
        let is_gone = match view.catalogs.get(catalog) {
            Some(record) => !is_named(record),
            None => !view.unreadable.contains_key(&Key::Catalog(catalog.clone()).to_string()),
        };
        if !is_gone || situation.held.contains(catalog) {
            continue;
        }
        for (machine, record) in names {
            let named = Named { machine, record };
            note_stake(situation, catalog, &named, plan);
            free(situation, catalog, &named, fate(situation, None, catalog, &named), plan);
        }
    }
}

/// What catalogs have been given in this plan.
#[derive(Default)]
struct Given {
    /// Names of the catalogs before.
    machines: BTreeSet<Name>,
    identities: Option<Identities>,
}

/// Names of a catalog that need another host, or may need one, by the reason.
#[derive(Default)]
struct Sorted<'a> {
    /// They are on no host.
    missing: Vec<Missing<'a>>,
    /// They are on hosts that should have them no more.
    unwelcome: Vec<Named<'a>>,
    /// Another 'on_isolation' ends them.
    changed: Vec<Named<'a>>,
    /// Their hosts are about to give them up.
    leaving: Vec<Named<'a>>,
}

/// A name that is on no host: its number, its record, and why it is on none.
type Missing<'a> = (Name, u32, Option<&'a Versioned<NamedRecord>>, Vec<Comparison>);

fn place_catalog(
    situation: &Situation<'_>,
    table: &mut Table<'_>,
    number: usize,
    given: &mut Given,
    plan: &mut Plan,
) {
    let view = situation.view;
    let (catalog, record) = (table.catalogs[number].name, table.catalogs[number].record);
    if situation.held.contains(catalog) {
        return;
    }
    // Names of other patterns are freed; without a pattern none is given.
    let pattern = NamePattern::parse(&record.spec.catalog.naming(catalog));
    let mut sorted = sort(situation, catalog, record, pattern.as_ref(), plan);
    let refused = refusing(situation, table, number);
    leave_in_batches(situation, table, number, &refused, &mut sorted, plan);
    let Sorted { mut missing, unwelcome, leaving, .. } = sorted;
    let there = view.named.get(catalog).map_or(0, BTreeMap::len);
    if let Some(pattern) =
        pattern.filter(|_| there < record.spec.catalog.count as usize || !missing.is_empty())
    {
        missing.extend(new_names(situation, table, number, &pattern, &given.machines));
    }
    // The others get the space again that they have.
    let leaving = leaving.iter().filter(|named| !takes_back(table, number, &refused, named)).count();
    let wanted = missing.len() + unwelcome.len() + leaving;
    if wanted == 0 {
        return;
    }
    let (gains, why) = gains(view, table, number, &refused, wanted);
    let spare = gains.len().saturating_sub(missing.len() + leaving);
    let unplaced = missing.len().saturating_sub(gains.len());
    if let (Some(why), true) = (why, unplaced > 0) {
        plan.unplaced.push(Unplaced { catalog: catalog.clone(), machines: unplaced as u64, why });
    }
    let identities = given.identities.get_or_insert_with(|| Identities::of(view));
    for ((machine, number, before, why), host) in missing.into_iter().zip(&gains) {
        if let Some(Versioned { value: NamedRecord { host: Some(from), .. }, .. }) = before
            && why.iter().any(|comparison| matches!(comparison, Comparison::Created(Key::Alive(_), 0)))
        {
            plan.lost.insert(from.clone());
        }
        let identity = match before {
            Some(before) => before.value.identity.clone(),
            None => identities.make(catalog, &machine),
        };
        let on_isolation = record.spec.fleet.on_isolation;
        let made =
            NamedRecord { number, identity, host: None, epoch: 0, state: NameState::Free, on_isolation };
        plan.names.extend(give(view, catalog, machine, before, made, host, why));
    }
    for named in unwelcome.iter().take(spare) {
        keep(view, catalog, named, &Fate::Leaves, plan);
    }
}

/// Sorts the names that there are. Those that stay, or that should not be, are done with.
fn sort<'a>(
    situation: &Situation<'a>,
    catalog: &Name,
    record: &CatalogRecord,
    pattern: Option<&NamePattern>,
    plan: &mut Plan,
) -> Sorted<'a> {
    let view = situation.view;
    let mut sorted = Sorted::default();
    for (machine, name) in view.named.get(catalog).into_iter().flatten() {
        let named = Named { machine, record: name };
        let number = name.value.number;
        let is_wanted = number <= record.spec.catalog.count
            && pattern.and_then(|pattern| pattern.name(number)).as_ref() == Some(machine);
        note_stake(situation, catalog, &named, plan);
        let fate = fate(situation, is_wanted.then_some(record), catalog, &named);
        match fate {
            fate if !is_wanted => free(situation, catalog, &named, fate, plan),
            Fate::Free(why) => sorted.missing.push((machine.clone(), number, Some(name), why)),
            Fate::Unwelcome => sorted.unwelcome.push(named),
            Fate::IsLeaving => sorted.leaving.push(named),
            Fate::Leaves => sorted.changed.push(named),
            fate => keep(view, catalog, &named, &fate, plan),
        }
    }
    sorted
}

/// Names that a catalog should have, and of which there are no records, not even such that cannot be read. Those that another catalog has, or
/// is about to, are left out: two catalogs with such names may have been made at the same time. `given` has names of other catalogs in this
/// plan.
fn new_names<'a>(
    situation: &Situation<'_>,
    table: &Table<'_>,
    number: usize,
    pattern: &NamePattern,
    given: &BTreeSet<Name>,
) -> Vec<Missing<'a>> {
    let view = situation.view;
    let (catalog, count) = (table.catalogs[number].name, table.catalogs[number].record.spec.catalog.count);
    let held = situation.held.iter().filter(|other| *other != catalog).filter_map(|other| {
        let spec = &view.catalogs.get(other)?.value.spec;
        let is_named = spec.fleet.identity == IdentityKind::Named;
        NamePattern::parse(&spec.catalog.naming(other)).filter(|_| is_named)
    });
    let held: Vec<NamePattern> = held.collect();
    let is_taken = |machine: &Name| {
        view.named.values().any(|names| names.contains_key(machine))
            || table.unreadable.machines.contains(machine)
            || given.contains(machine)
            || held.iter().any(|other| other.is_of(machine))
    };
    let all = (1..=count.min(pattern.most())).filter_map(|number| Some((pattern.name(number)?, number)));
    all.filter(|(machine, _)| !is_taken(machine))
        .map(|(machine, number)| (machine, number, None, Vec::new()))
        .collect()
}

/// Another 'on_isolation' ends machines, as many at the same time as another version would. Those that their hosts would not get again leave
/// as others that are unwelcome there: if another host has space.
fn leave_in_batches(
    situation: &Situation<'_>,
    table: &Table<'_>,
    number: usize,
    refused: &BTreeMap<&Name, u64>,
    sorted: &mut Sorted<'_>,
    plan: &mut Plan,
) {
    let (catalog, record) = (table.catalogs[number].name, table.catalogs[number].record);
    let batch = if let RolloutStrategy::Batch(machines) = record.strategy { machines as usize } else { 1 };
    let changed = std::mem::take(&mut sorted.changed);
    if changed.is_empty() {
        return;
    }
    // Those that have left and are on no host yet are down as well: they may find no space, or others may get it.
    let nowhere = sorted.missing.iter().filter(|(_, _, before, _)| before.is_some()).count();
    let ending = ending(situation, table, number, &sorted.leaving, plan);
    let mut left = batch.saturating_sub(ending).saturating_sub(nowhere);
    let (back, elsewhere): (Vec<_>, Vec<_>) =
        changed.into_iter().partition(|named| takes_back(table, number, refused, named));
    for named in back.iter().take(left) {
        keep(situation.view, catalog, named, &Fate::Leaves, plan);
    }
    left = left.saturating_sub(back.len());
    sorted.unwelcome.extend(elsewhere.into_iter().take(left));
}

/// Number of names that leave, without those that stay until somebody releases them: a host has as many claimed machines, and has not given
/// up as many names for long.
fn ending(
    situation: &Situation<'_>,
    table: &Table<'_>,
    number: usize,
    leaving: &[Named<'_>],
    plan: &mut Plan,
) -> usize {
    let mut late: BTreeMap<&Name, u32> = BTreeMap::new();
    for named in leaving {
        let Some(host) = &named.record.value.host else { continue };
        let for_ms = (situation.leaving_for_ms)(host, named.machine);
        *late.entry(host).or_default() += u32::from(for_ms >= CLAIMED_MS);
        wake_in(CLAIMED_MS.saturating_sub(for_ms), plan);
    }
    let of =
        |cell: &Cell<'_>| late.get(table.hosts[cell.host].name).map_or(0, |late| cell.claimed.min(*late));
    let claimed: u32 = table.catalogs[number].cells.iter().map(of).sum();
    leaving.len().saturating_sub(claimed as usize)
}

/// Whether a host that gives a name up may get it again.
fn takes_back(table: &Table<'_>, number: usize, refused: &BTreeMap<&Name, u64>, named: &Named<'_>) -> bool {
    let Some(host) = &named.record.value.host else { return false };
    let catalog = &table.catalogs[number];
    let Ok(found) = table.hosts.binary_search_by(|other| other.name.cmp(host)) else { return false };
    let cell = catalog.cells.binary_search_by_key(&found, |cell| cell.host).map(|n| catalog.cells[n]);
    let cell = Cell { is_busy: false, ..cell.unwrap_or(Cell::empty(found)) };
    let target = Target { cell, role: Role::Kept, to: cell.names };
    // It has the space of the name, unless it has less than its machines take, or another catalog gets it first.
    let obstacle = obstacle(catalog, &table.hosts[found], Some(&target), refused);
    matches!(obstacle, None | Some(Obstacle::Lacks(_)))
}

/// Hosts that have refused a catalog, with the time in milliseconds for which they get no names of it.
fn refusing<'a>(situation: &Situation<'a>, table: &Table<'a>, number: usize) -> BTreeMap<&'a Name, u64> {
    let catalog = &table.catalogs[number];
    let lately = situation.refused.iter().filter(|((_, of), _)| of == catalog.name);
    let mut refused: BTreeMap<&Name, u64> = lately.map(|((host, _), ms)| (host, *ms)).collect();
    for host in &table.hosts {
        let report = host.status.and_then(|status| status.catalogs.get(catalog.name));
        if report.is_some_and(|report| report.refuses(catalog.record.generation)) {
            refused.entry(host.name).or_insert(REFUSED_MS);
        }
    }
    refused
}

/// Hosts that so many machines of a catalog go to, one for each, and why not more.
fn gains(
    view: &FleetView,
    table: &mut Table<'_>,
    number: usize,
    refused: &BTreeMap<&Name, u64>,
    machines: usize,
) -> (Vec<Name>, Option<super::Why>) {
    let targets = table.catalogs[number].cells.iter().map(|cell| {
        let cell = Cell { is_busy: false, count: cell.names, ..*cell };
        Target { cell, role: Role::Kept, to: cell.names }
    });
    let mut targets: Vec<Target<'_>> = targets.collect();
    let unplaced = place_missing(table, number, (refused, view), &mut targets, machines as u64);
    let why = (unplaced > 0).then(|| explain(table, number, refused, &targets));
    let mut hosts = Vec::new();
    for target in &targets {
        let given = target.to.saturating_sub(target.cell.count);
        hosts.extend((0..given).map(|_| table.hosts[target.cell.host].name.clone()));
    }
    (hosts, why)
}

/// Takes a name that should not be from its host, or deletes it.
fn free(situation: &Situation<'_>, catalog: &Name, named: &Named<'_>, fate: Fate, plan: &mut Plan) {
    let why = match fate {
        Fate::Free(why) => why,
        fate => return keep(situation.view, catalog, named, &fate, plan),
    };
    let (comparisons, mut writes) = taken(situation.view, catalog, named.machine, named.record, why);
    writes.push(Write::Delete(Key::Named(catalog.clone(), named.machine.clone())));
    plan.names.push(NameChange {
        catalog: catalog.clone(),
        machine: named.machine.clone(),
        compared: named.record.modified,
        host: None,
        comparisons,
        writes,
    });
}

/// Comparisons and writes by which a name is taken from the host that had it.
fn taken(
    view: &FleetView,
    catalog: &Name,
    machine: &Name,
    record: &Versioned<NamedRecord>,
    why: Vec<Comparison>,
) -> (Vec<Comparison>, Vec<Write>) {
    let mut comparisons = why;
    comparisons.extend(based_on(view, catalog, machine, record.modified));
    let from = record.value.host.as_ref().filter(|_| record.value.state != NameState::Free);
    let there = from.filter(|host| view.place(host, catalog, machine).is_some());
    let delete = |host: &Name| Write::Delete(Key::Place(host.clone(), catalog.clone(), machine.clone()));
    (comparisons, there.map(delete).into_iter().collect())
}

fn based_on(view: &FleetView, catalog: &Name, machine: &Name, compared: Revision) -> [Comparison; 2] {
    let modified = view.catalogs.get(catalog).map_or(0, |catalog| catalog.modified);
    [
        Comparison::Modified(Key::Named(catalog.clone(), machine.clone()), compared),
        Comparison::Modified(Key::Catalog(catalog.clone()), modified),
    ]
}

/// Writes what a host is told about a name that it has.
fn keep(view: &FleetView, catalog: &Name, named: &Named<'_>, fate: &Fate, plan: &mut Plan) {
    let before = &named.record.value;
    let (state, epoch) = match fate {
        Fate::Leaves => (NameState::Leaving, before.epoch),
        Fate::Remains => (NameState::Placed, before.epoch),
        Fate::Renewed(epoch) => (before.state, *epoch),
        Fate::Stays | Fate::Unwelcome | Fate::Free(_) | Fate::IsLeaving => return,
    };
    let Some(host) = &before.host else { return };
    let key = Key::Place(host.clone(), catalog.clone(), named.machine.clone());
    let place = view.place(host, catalog, named.machine).map_or(0, |place| place.modified);
    let mut comparisons = based_on(view, catalog, named.machine, named.record.modified).to_vec();
    comparisons.push(Comparison::Created(Key::Alive(host.clone()), epoch));
    comparisons.push(Comparison::Modified(key, place));
    let after = NamedRecord { state, epoch, ..before.clone() };
    plan.names.push(NameChange {
        catalog: catalog.clone(),
        machine: named.machine.clone(),
        compared: named.record.modified,
        host: Some(host.clone()),
        comparisons,
        writes: both(catalog, named.machine, &after),
    });
}

/// Gives a name to a host that has none of it.
fn give(
    view: &FleetView,
    catalog: &Name,
    machine: Name,
    before: Option<&Versioned<NamedRecord>>,
    made: NamedRecord,
    host: &Name,
    why: Vec<Comparison>,
) -> Option<NameChange> {
    let epoch = view.alive.get(host)?.created;
    let (mut comparisons, mut writes) = match before {
        Some(record) => taken(view, catalog, &machine, record, why),
        None => (based_on(view, catalog, &machine, 0).to_vec(), Vec::new()),
    };
    comparisons.push(Comparison::Created(Key::Alive(host.clone()), epoch));
    let modified = view.hosts.get(host).map_or(0, |host| host.modified);
    comparisons.push(Comparison::Modified(Key::Host(host.clone()), modified));
    let record = NamedRecord { host: Some(host.clone()), epoch, state: NameState::Placed, ..made };
    let compared = before.map_or(0, |record| record.modified);
    writes.extend(both(catalog, &machine, &record));
    let (catalog, host) = (catalog.clone(), Some(host.clone()));
    Some(NameChange { catalog, machine, compared, host, comparisons, writes })
}

/// Both records of a name that is on a host.
fn both(catalog: &Name, machine: &Name, record: &NamedRecord) -> Vec<Write> {
    let NamedRecord { number, identity, host, epoch, state, on_isolation } = record;
    let place = PlaceRecord {
        epoch: *epoch,
        number: *number,
        identity: identity.clone(),
        on_isolation: *on_isolation,
        is_leaving: *state == NameState::Leaving,
    };
    let place_of =
        |host: &Name| Write::Put(Key::Place(host.clone(), catalog.clone(), machine.clone()), json(&place));
    let named = Write::Put(Key::Named(catalog.clone(), machine.clone()), json(record));
    std::iter::once(named).chain(host.as_ref().map(place_of)).collect()
}

fn json(record: &impl Serialize) -> Vec<u8> {
    serde_json::to_vec(record).expect("a record is plain data")
}

#[cfg(test)]
#[path = "names_tests.rs"]
mod tests;
