//! Versions of the shares of a catalog: which hosts get another one now, and which one hosts get that had no machines.
//!
//! Owns the way from targets of placing to a step of the rollout. Invariant: a share keeps its version, unless the rollout gives it
//! another one in this step.

use super::catalog::{Role, Target};
use super::table::{Cell, Table};
use super::{Plan, RolloutStep, Situation};
use crate::keys::Key;
use crate::liveness::Standing;
use crate::records::{CatalogRecord, ShareRecord, VersionName};
use crate::rollout::{Member, Scene, Steps, current, decide};
use crate::view::FleetView;
use spillway_api::Name;
use std::collections::BTreeMap;

/// Versions of a catalog's shares.
pub(super) struct Course<'a> {
    name: &'a Name,
    record: &'a CatalogRecord,
    /// Version of new machines on hosts that had none.
    fresh: VersionName,
    /// Hosts that get, or keep, the version of the catalog with such a batch.
    moving: BTreeMap<usize, Option<u32>>,
}

/// Version of machines on a host that had none.
pub fn version_of_new(view: &FleetView, name: &Name, catalog: &CatalogRecord) -> VersionName {
    match current(view, name, catalog) {
        Some(rollout) => rollout.value.fresh().clone(),
        None => VersionName::of_catalog(catalog),
    }
}

impl<'a> Course<'a> {
    /// Decides the next step of the catalog's rollout, and notes it in the plan.
    pub(super) fn of(
        situation: &Situation<'_>,
        table: &Table<'a>,
        number: usize,
        targets: &[Target<'a>],
        plan: &mut Plan,
    ) -> Course<'a> {
        let (name, record) = (table.catalogs[number].name, table.catalogs[number].record);
        let fresh = version_of_new(situation.view, name, record);
        let mut course = Course { name, record, fresh, moving: BTreeMap::new() };
        let rollout = current(situation.view, name, record);
        let is_unreadable =
            || situation.view.unreadable.contains_key(&Key::Rollout(name.clone()).to_string());
        let is_held = || situation.rolling.contains(name) || situation.held.contains(name);
        if is_unreadable() || is_held() {
            return course;
        }
        let to = VersionName::of_catalog(record);
        let members = members(table, targets).filter(|(_, of)| !of.is_leaving || to.is_in(of.share, record));
        let (numbers, members): (Vec<usize>, Vec<Member<'_>>) = members.unzip();
        let lost = targets.iter().filter(|target| matches!(target.role, Role::Lost | Role::Gone));
        let lost = lost.filter_map(|target| Some((table.hosts[target.cell.host].name, target.cell.share?)));
        let Steps { shares, record: next, waits, next_in_ms } = decide(&Scene {
            catalog: record,
            record: rollout.map(|rollout| &rollout.value),
            tracker: situation.trackers.get(name),
            members,
            lost: lost.collect(),
            is_busy: targets.iter().any(|target| target.cell.is_busy),
            now: situation.now,
        });
        course.moving = shares.into_iter().map(|(n, batch)| (numbers[n], batch)).collect();
        if let Some(waits) = waits {
            plan.waits.insert(name.clone(), waits);
        }
        let nexts = [plan.next_in_ms, next_in_ms];
        plan.next_in_ms = nexts.into_iter().flatten().min();
        if let Some(next) = next {
            if rollout.is_none() {
                course.fresh = next.from.clone();
            }
            let modified = situation.view.rollouts.get(name).map_or(0, |rollout| rollout.modified);
            plan.rollouts.push(RolloutStep { catalog: name.clone(), record: next, modified });
        }
        course
    }

    /// Whether the rollout's record is about to be written. What it says of hosts that are lost must be known before their shares are gone.
    pub(super) fn is_written(&self, situation: &Situation<'_>, plan: &Plan) -> bool {
        situation.rolling.contains(self.name) || plan.rollouts.iter().any(|step| step.catalog == *self.name)
    }

    /// Whether the rollout changes the share of a host.
    pub(super) fn moves(&self, host: usize) -> bool {
        self.moving.contains_key(&host)
    }

    /// The share of a host, with such a count.
    pub(super) fn share(&self, cell: &Cell<'_>, count: u32) -> ShareRecord {
        let generation = self.record.generation;
        let of = |version: VersionName, batch| {
            let VersionName { image, version } = version;
            ShareRecord { count, version, generation, image: Some(image), batch }
        };
        match (self.moving.get(&cell.host), cell.share) {
            (Some(batch), _) => of(VersionName::of_catalog(self.record), *batch),
            (None, Some(share)) => of(share.version_name(self.record), share.batch),
            (None, None) => of(self.fresh.clone(), None),
        }
    }
}

/// Hosts that have machines of a catalog and keep them, or give them up, with their numbers.
fn members<'a>(table: &Table<'a>, targets: &[Target<'a>]) -> impl Iterator<Item = (usize, Member<'a>)> {
    let is_member = |target: &&Target<'a>| match target.role {
        Role::Kept | Role::Refused => target.to > 0,
        Role::Leaving => target.cell.count > 0,
        Role::Lost | Role::Gone => false,
    };
    targets.iter().filter(is_member).filter_map(|target| {
        let host = &table.hosts[target.cell.host];
        let member = Member {
            name: host.name,
            is_alive: host.standing == Standing::Alive,
            is_leaving: target.role == Role::Leaving,
            share: target.cell.share?,
            count: target.to,
            status: target.cell.status,
        };
        Some((target.cell.host, member))
    })
}
