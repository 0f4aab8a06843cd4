//! Shares of catalogs whose machines have names of the fleet: the version that a host's machines get, so that another one comes in waves
//! ([063](../../../../docs/design/063-rollouts-over-hosts.md)).
//!
//! Owns the counts of these shares. Invariant: a share follows the names that the records give to the host. No name follows from a share.

use super::catalog::{Role, Target, change};
use super::course::Course;
use super::table::Table;
use super::{Cause, Change, Plan, Situation};
use crate::liveness::Standing;
use crate::records::NameState;
use spillway_api::Name;
use std::collections::BTreeMap;

/// Decides about the shares of a catalog with names.
pub(super) fn follow(situation: &Situation<'_>, table: &Table<'_>, number: usize, plan: &mut Plan) {
    let (name, cells) = (table.catalogs[number].name, &table.catalogs[number].cells);
    // What cannot be read may be anywhere: no share is lowered. Their versions change, and the rollout halts if it must.
    let is_unknown = table.unreadable.named.contains(name);
    // Names that hosts have, and those that they are to give up.
    let mut counts: BTreeMap<&Name, [u32; 2]> = BTreeMap::new();
    for named in situation.view.named.get(name).into_iter().flat_map(|names| names.values()) {
        let is_leaving = match named.value.state {
            NameState::Placed => false,
            NameState::Leaving => true,
            NameState::Free => continue,
        };
        if let Some(host) = &named.value.host {
            counts.entry(host).or_default()[usize::from(is_leaving)] += 1;
        }
    }
    let targets = cells.iter().map(|cell| {
        let host = &table.hosts[cell.host];
        let (role, to) = match counts.get(host.name).copied().unwrap_or_default() {
            [placed, _] if is_unknown => (Role::Kept, placed.max(cell.count)),
            [0, 0] if host.standing != Standing::Alive => (Role::Lost, 0),
            // Until they are gone, it has the share's version.
            [0, leaving] => (Role::Leaving, leaving.min(cell.count)),
            [placed, _] => (Role::Kept, placed),
        };
        Target { cell: *cell, role, to }
    });
    let targets: Vec<Target<'_>> = targets.collect();
    // A host that was removed may run names for a while, and has no share any more.
    let is_removed = |host: &Name| table.hosts.binary_search_by(|other| other.name.cmp(host)).is_err();
    let removed = counts.iter().filter(|(host, _)| is_removed(host)).map(|(_, of)| of.iter().sum::<u32>());
    let removed = removed.map(u64::from).sum::<u64>();
    let unplaced = plan.unplaced.iter().filter(|unplaced| unplaced.catalog == *name);
    let unplaced = unplaced.map(|unplaced| unplaced.machines).sum::<u64>().max(removed);
    let course = Course::of(situation, table, number, &targets, unplaced, plan);
    if course.is_written(situation, plan) {
        return;
    }
    let changes = targets.iter().filter_map(|target| change(table, name, &course, target, |_| Cause::Named));
    plan.changes.extend(changes.collect::<Vec<Change>>());
}
