//! Shares of catalogs whose machines have names of the fleet: the version that a host's machines get, so that another one comes in waves
//! ([063](../../../../docs/design/063-rollouts-over-hosts.md)).
//!
//! Owns the counts of these shares. Invariant: a share follows the names that the records give to the host. No name follows from a share.

use super::catalog::{Role, Target, change};
use super::course::Course;
use super::table::Table;
use super::{Cause, Change, Plan, Situation};
use crate::keys::Key;
use crate::liveness::Standing;
use crate::records::NameState;
use spillway_api::Name;
use std::collections::BTreeMap;

/// Decides about the shares of a catalog with names.
pub(super) fn follow(situation: &Situation<'_>, table: &Table<'_>, number: usize, plan: &mut Plan) {
    let (name, cells) = (table.catalogs[number].name, &table.catalogs[number].cells);
    // What cannot be read may be anywhere.
    let is_of = |key: &String| matches!(key.parse(), Ok(Key::Named(of, _)) if of == *name);
    if situation.view.unreadable.keys().any(is_of) {
        return;
    }
    let mut counts: BTreeMap<&Name, u32> = BTreeMap::new();
    let named = situation.view.named.get(name).into_iter().flat_map(|names| names.values());
    for host in named.filter(|of| of.value.state == NameState::Placed).filter_map(|of| of.value.host.as_ref())
    {
        *counts.entry(host).or_default() += 1;
    }
    let targets = cells.iter().map(|cell| {
        let host = &table.hosts[cell.host];
        let to = counts.get(host.name).copied().unwrap_or(0);
        let is_lost = to == 0 && host.standing != Standing::Alive;
        Target { cell: *cell, role: if is_lost { Role::Lost } else { Role::Kept }, to }
    });
    let targets: Vec<Target<'_>> = targets.collect();
    let course = Course::of(situation, table, number, &targets, plan);
    if course.is_written(situation, plan) {
        return;
    }
    let changes = targets.iter().filter_map(|target| change(table, name, &course, target, |_| Cause::Named));
    plan.changes.extend(changes.collect::<Vec<Change>>());
}
