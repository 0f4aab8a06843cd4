//! Placing of one catalog: which hosts keep its machines, which lose them, which get some.
//!
//! Owns the order of these decisions. Invariant: a host that is well keeps what it has, unless there are too many machines.

use super::course::{Course, version_of_new};
use super::explanation::{MOST_EXPLAINED, Obstacle, Unplaced, Why};
use super::fill::{Candidate, Giver, lower, raise};
use super::table::{Catalog, Cell, Host, Table, Unknown};
use super::{Cause, Change, Plan, Situation, is_replaceable};
use crate::liveness::{Reach, Standing};
use crate::named::NamePattern;
use crate::view::FleetView;
use spillway_api::{IdentityKind, Name};
use std::collections::BTreeMap;

/// Least time since the last sign of life of a host after which it counts as lost.
const LEAST_LOST_AFTER_MS: u64 = 20_000;

/// What becomes of a host's share.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Role {
    /// It counts.
    Kept,
    /// It counts as far as the host has its machines.
    Refused,
    /// It does not count, and falls as machines are ready elsewhere.
    Leaving,
    /// It does not count, and falls as machines are placed elsewhere.
    Lost,
    /// It does not count, and is deleted.
    Gone,
}

impl Role {
    pub(super) fn counts(self) -> bool {
        matches!(self, Role::Kept | Role::Refused)
    }
}

/// A share, and what it becomes.
pub(super) struct Target<'a> {
    pub(super) cell: Cell<'a>,
    pub(super) role: Role,
    pub(super) to: u32,
}

/// Decides about the shares of a catalog, and takes from the hosts what it gives.
pub(super) fn place(situation: &Situation<'_>, table: &mut Table<'_>, number: usize, plan: &mut Plan) {
    let (name, record) = (table.catalogs[number].name, table.catalogs[number].record);
    let count = u64::from(record.spec.catalog.count);
    note_stakes(table, number, plan);
    let refused: BTreeMap<&Name, u64> = (situation.refused.iter())
        .filter(|((_, of), _)| of == name)
        .map(|((host, _), wait_ms)| (host, *wait_ms))
        .collect();
    let mut targets: Vec<Target<'_>> = (table.catalogs[number].cells.iter())
        .map(|cell| {
            let host = &table.hosts[cell.host];
            // One that was passed over, and says nothing against its share any more, keeps that.
            let refuses = cell.status.is_some_and(|status| status.refused.is_some());
            let refuses = refuses && refused.contains_key(host.name);
            let role = role_of(situation, &table.catalogs[number], host, refuses);
            let to = match role {
                Role::Kept => cell.count,
                Role::Refused => cell.count.min(cell.reported),
                Role::Leaving | Role::Lost | Role::Gone => 0,
            };
            Target { cell: *cell, role, to }
        })
        .collect();
    // What was just written may not be applied, and what cannot be read may be anything: no others are lowered or raised because of it.
    let sum = |of: fn(&Target<'_>) -> u32| {
        let counted = targets.iter().filter(|target| target.role.counts());
        counted.map(|target| u64::from(of(target))).sum::<u64>()
    };
    let least = sum(|target| if target.cell.is_fixed() { target.cell.least } else { target.to });
    let most = sum(|target| if target.cell.is_fixed() { target.cell.most } else { target.to });
    let is_open = targets.iter().any(|target| target.role.counts() && target.cell.is_open);
    let mut unplaced = 0;
    if least > count {
        take_surplus(table, &mut targets, least - count);
    } else if most < count && !is_open {
        unplaced = place_missing(table, number, (&refused, situation.view), &mut targets, count - most);
    }
    let perhaps = if is_open { count.saturating_sub(least) } else { unplaced };
    settle_others(table, &mut targets, count, perhaps);
    if unplaced > 0 {
        let why = explain(table, number, &refused, &targets);
        plan.unplaced.push(Unplaced { catalog: name.clone(), machines: unplaced, why });
    }
    let has_machines = |target: &&Target<'_>| target.cell.count > 0 || target.cell.is_open;
    let lost = targets.iter().filter(|target| target.role == Role::Lost).filter(has_machines);
    plan.lost.extend(lost.map(|target| table.hosts[target.cell.host].name.clone()));
    let course = Course::of(situation, table, number, &targets, unplaced, plan);
    if course.is_written(situation, plan) {
        return;
    }
    let changes = targets.iter().filter_map(|target| change(table, name, &course, target, cause_of));
    let mut changes: Vec<Change> = changes.collect();
    // What a lost host had is deleted in the same transaction that raises others.
    changes.sort_by_key(|change| change.to > change.from);
    plan.changes.extend(changes);
}

/// Notes the hosts whose machines of this catalog would be replaced if they were lost.
fn note_stakes(table: &Table<'_>, number: usize, plan: &mut Plan) {
    let catalog = &table.catalogs[number];
    if !is_replaceable(catalog.record) {
        return;
    }
    let lost_after_ms = lost_after_ms(catalog);
    for cell in catalog.cells.iter().filter(|cell| cell.count > 0 || cell.is_open) {
        let host = &table.hosts[cell.host];
        let Standing::Silent { for_ms, .. } = host.standing else { continue };
        let stake = plan.stakes.entry(host.name.clone()).or_insert(lost_after_ms);
        *stake = lost_after_ms.min(*stake);
        if for_ms < lost_after_ms {
            let left = lost_after_ms - for_ms;
            plan.next_in_ms = Some(plan.next_in_ms.map_or(left, |next| next.min(left)));
        }
    }
}

fn lost_after_ms(catalog: &Catalog<'_>) -> u64 {
    (u64::from(catalog.record.spec.fleet.lost_after_seconds) * 1000).max(LEAST_LOST_AFTER_MS)
}

fn role_of(situation: &Situation<'_>, catalog: &Catalog<'_>, host: &Host<'_>, refuses: bool) -> Role {
    if is_replaceable(catalog.record) {
        match host.standing {
            Standing::Removed { .. } | Standing::DeclaredDead { .. } => return Role::Gone,
            Standing::Silent { for_ms, reach: Reach::Unreachable }
                if situation.brake.is_none() && for_ms >= lost_after_ms(catalog) =>
            {
                return Role::Lost;
            }
            _ => {}
        }
        let may_not = host.record.is_some_and(|record| {
            record.is_draining || Obstacle::of_settings(record, &catalog.record.spec.fleet).is_some()
        });
        if may_not {
            return Role::Leaving;
        }
    }
    if refuses { Role::Refused } else { Role::Kept }
}

/// Lowers shares that count until so many machines are gone.
fn take_surplus(table: &Table<'_>, targets: &mut [Target<'_>], surplus: u64) {
    let zones = zones(table, targets);
    let mut able: Vec<&mut Target<'_>> =
        targets.iter_mut().filter(|target| target.role.counts() && !target.cell.is_fixed()).collect();
    let mut givers: Vec<Giver> = (able.iter())
        .map(|target| Giver {
            zone: table.hosts[target.cell.host].zone,
            count: target.to,
            claimed: target.cell.claimed,
        })
        .collect();
    lower(&mut givers, zones, surplus);
    able.iter_mut().zip(givers).for_each(|(target, giver)| target.to = giver.count);
}

/// Raises shares by so many machines. The number that fits nowhere is returned.
pub(super) fn place_missing(
    table: &mut Table<'_>,
    number: usize,
    (refused, view): (&BTreeMap<&Name, u64>, &FleetView),
    targets: &mut Vec<Target<'_>>,
    missing: u64,
) -> u64 {
    let catalog = &table.catalogs[number];
    let places = places(table, targets);
    let image = version_of_new(view, catalog.name, catalog.record).to_string();
    let mut candidates: Vec<Candidate> = Vec::new();
    for (n, host) in table.hosts.iter().enumerate() {
        let target = places[n].map(|place| &targets[place]);
        if obstacle(catalog, host, target, refused).is_none() {
            candidates.push(Candidate {
                host: n,
                zone: host.zone,
                need: catalog.need(host.hypervisor),
                budget: host.budget,
                left: host.left,
                boot_set: host.status.and_then(|status| status.images.get(&image)).map_or(0, |part| *part),
                count: target.map_or(0, |target| target.to),
                most: most_names(catalog, host.name),
            });
        }
    }
    let spread = catalog.record.spec.fleet.spread;
    let unplaced = raise(&mut candidates, zones(table, targets), missing, spread);
    for candidate in candidates {
        let host = candidate.host;
        table.hosts[host].left = candidate.left;
        match places[host] {
            Some(place) => targets[place].to = candidate.count,
            None if candidate.count > 0 => {
                let cell = Cell::empty(host);
                targets.push(Target { cell, role: Role::Kept, to: candidate.count });
            }
            None => {}
        }
    }
    unplaced
}

/// Decides what hosts keep that are draining, lost or gone. So many machines are perhaps placed nowhere else.
fn settle_others(table: &Table<'_>, targets: &mut [Target<'_>], count: u64, unplaced: u64) {
    let is_alive = |target: &&Target<'_>| table.hosts[target.cell.host].standing == Standing::Alive;
    let counted = targets.iter().filter(|target| target.role.counts()).filter(is_alive);
    let ready: u64 = counted.map(|target| u64::from(target.cell.ready.min(target.to))).sum();
    let mut allowed = count.saturating_sub(ready);
    let mut kept = 0;
    for role in [Role::Leaving, Role::Lost] {
        for target in targets.iter_mut().filter(|target| target.role == role) {
            let to = if target.cell.is_fixed() { target.cell.count.into() } else { allowed };
            target.to = u64::from(target.cell.count).min(to) as u32;
            allowed = allowed.saturating_sub(target.to.into());
            kept += u64::from(target.to);
        }
        // A machine that is placed nowhere else may still run there, if the host is lost for the fleet alone.
        allowed = unplaced.saturating_sub(kept);
    }
}

/// Machines of the catalog in each zone, of shares that count.
fn zones(table: &Table<'_>, targets: &[Target<'_>]) -> Vec<u64> {
    let mut zones = vec![0u64; table.zones];
    for target in targets.iter().filter(|target| target.role.counts()) {
        zones[table.hosts[target.cell.host].zone] += u64::from(target.to);
    }
    zones
}

/// For each host, where its target is.
fn places(table: &Table<'_>, targets: &[Target<'_>]) -> Vec<Option<usize>> {
    let mut places = vec![None; table.hosts.len()];
    targets.iter().enumerate().for_each(|(n, target)| places[target.cell.host] = Some(n));
    places
}

/// Why a host gets no further machine of a catalog.
pub(super) fn obstacle(
    catalog: &Catalog<'_>,
    host: &Host<'_>,
    target: Option<&Target<'_>>,
    refused: &BTreeMap<&Name, u64>,
) -> Option<Obstacle> {
    let Some(record) = host.record.filter(|_| host.standing == Standing::Alive) else {
        return Some(Obstacle::NotAlive);
    };
    if record.is_draining {
        return Some(Obstacle::Draining);
    }
    if record.is_cordoned {
        return Some(Obstacle::Cordoned);
    }
    if let Some(obstacle) = Obstacle::of_settings(record, &catalog.record.spec.fleet) {
        return Some(obstacle);
    }
    if host.status.is_none() {
        return Some(Obstacle::NoStatus);
    }
    if target.is_some_and(|target| target.cell.is_unreadable) {
        return Some(Obstacle::Unreadable);
    }
    if let Some(wait_ms) = refused.get(host.name) {
        return Some(Obstacle::Refused { wait_ms: *wait_ms });
    }
    if target.is_some_and(|target| target.cell.is_busy) {
        return Some(Obstacle::JustWritten);
    }
    let names = most_names(catalog, host.name);
    if target.is_some_and(|target| target.to >= names) || names == 0 {
        return Some(Obstacle::Names(names));
    }
    host.left.shortage(catalog.need(host.hypervisor)).map(Obstacle::Lacks)
}

/// Number of machines of a catalog that a host has names for.
fn most_names(catalog: &Catalog<'_>, host: &Name) -> u32 {
    let spec = &catalog.record.spec;
    // Names of the fleet are given one by one.
    if spec.fleet.identity == IdentityKind::Named {
        return u32::MAX;
    }
    // What is no such pattern, the host refuses with its reason.
    NamePattern::parse(&spec.naming(catalog.name, host.as_str()))
        .map_or(u32::MAX, |pattern| pattern.name(1).map_or(0, |_| pattern.most()))
}

pub(super) fn explain(
    table: &Table<'_>,
    number: usize,
    refused: &BTreeMap<&Name, u64>,
    targets: &[Target<'_>],
) -> Why {
    let places = places(table, targets);
    let catalog = &table.catalogs[number];
    let mut hosts = Vec::new();
    let mut more = 0;
    for (n, host) in table.hosts.iter().enumerate() {
        let target = places[n].map(|place| &targets[place]);
        let Some(obstacle) = obstacle(catalog, host, target, refused) else { continue };
        if hosts.len() < MOST_EXPLAINED {
            hosts.push((host.name.clone(), obstacle));
        } else {
            more += 1;
        }
    }
    Why::Hosts { hosts, more }
}

/// Why the share of a target changes, which is not only its version.
fn cause_of(target: &Target<'_>) -> Cause {
    match target.role {
        _ if target.to > target.cell.count => Cause::Missing,
        Role::Lost => Cause::Lost,
        Role::Gone => Cause::Gone,
        Role::Leaving => Cause::Left,
        Role::Refused => Cause::Refused,
        Role::Kept => Cause::Surplus,
    }
}

/// The change of a share, if it must change.
pub(super) fn change(
    table: &Table<'_>,
    catalog: &Name,
    course: &Course<'_>,
    target: &Target<'_>,
    cause: fn(&Target<'_>) -> Cause,
) -> Option<Change> {
    let Target { cell, to, .. } = target;
    let is_stale = *to > 0 && (!cell.is_current || course.moves(cell.host));
    let is_due = *to != cell.count || is_stale;
    if !is_due || cell.is_fixed() || !course.knows(cell) {
        return None;
    }
    let cause = if *to == cell.count { Cause::Updated } else { cause(target) };
    Some(Change {
        host: table.hosts[cell.host].name.clone(),
        catalog: catalog.clone(),
        from: cell.count,
        to: *to,
        share: (*to > 0).then(|| course.share(cell, *to)),
        modified: cell.modified,
        cause,
    })
}

/// Deletes the shares of catalogs that there are not.
pub(super) fn delete_unknown(situation: &Situation<'_>, table: &Table<'_>, plan: &mut Plan) {
    let is_busy = |host: &Name, catalog: &Name| {
        situation.written.get(host).is_some_and(|shares| shares.contains_key(catalog))
    };
    let unreadable = &situation.view.unreadable;
    for Unknown { host, catalog, share } in &table.unknown {
        if is_busy(host, catalog) || unreadable.contains_key(&format!("catalogs/{catalog}")) {
            continue;
        }
        plan.changes.push(Change {
            host: (*host).clone(),
            catalog: (*catalog).clone(),
            from: share.value.count,
            to: 0,
            share: None,
            modified: share.modified,
            cause: Cause::Deleted,
        });
    }
}
