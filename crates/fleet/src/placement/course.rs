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
    /// Wave of the rollout.
    wave: u32,
    /// Whether nothing can be known of the rollout: hosts that have no machines get none.
    is_unknown: bool,
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
    /// Decides the next step of the catalog's rollout, and notes it in the plan. `unplaced` is the number of its machines that no host has.
    pub(super) fn of(
        situation: &Situation<'_>,
        table: &Table<'a>,
        number: usize,
        targets: &[Target<'a>],
        unplaced: u64,
        plan: &mut Plan,
    ) -> Course<'a> {
        let (name, record) = (table.catalogs[number].name, table.catalogs[number].record);
        let fresh = version_of_new(situation.view, name, record);
        let rollout = current(situation.view, name, record);
        let is_unknown = situation.view.unreadable.contains_key(&Key::Rollout(name.clone()).to_string());
        let wave = rollout.map_or(0, |rollout| rollout.value.wave);
        let mut course = Course { name, record, fresh, wave, is_unknown, moving: BTreeMap::new() };
        if is_unknown || situation.rolling.contains(name) || situation.held.contains(name) {
            return course;
        }
        let to = VersionName::of_catalog(record);
        let is_at_once = rollout.is_some_and(|rollout| rollout.value.at_once);
        let counts = |of: &Member<'_>| {
            let refuses = of.status.is_some_and(|status| status.refuses_version(&to, of.share));
            !of.is_leaving || (to.is_in(of.share, record) && of.is_alive && !refuses && !is_at_once)
        };
        let members = members(table, targets).filter(|(_, member)| counts(member));
        let (numbers, members): (Vec<usize>, Vec<Member<'_>>) = members.unzip();
        let share = |target: &Target<'a>| Some((table.hosts[target.cell.host].name, target.cell.share?));
        let lost = targets.iter().filter(|target| is_lost(table, target)).filter_map(share);
        let is_apart = |target: &&Target<'a>| {
            let Target { cell, role, .. } = target;
            let stays = role.counts() && !is_lost(table, target) && !cell.is_unreadable;
            // What cannot be read of a host that is declared dead is not waited for.
            let is_rest = cell.is_unreadable && *role == Role::Gone;
            !stays && !is_rest && (cell.count > 0 || cell.is_open) && !numbers.contains(&cell.host)
        };
        let apart = targets.iter().filter(is_apart);
        let apart = apart.map(|target| (table.hosts[target.cell.host].name, target.cell.share)).collect();
        let is_raised =
            |target: &&Target<'_>| target.to > 0 && target.cell.share.is_none() && !target.cell.is_unreadable;
        let raised = targets.iter().find(is_raised);
        let raised = raised.map(|target| table.hosts[target.cell.host].name);
        let refuses = |target: &Target<'_>| target.cell.status.is_some_and(|status| status.refused.is_some());
        let is_refused = targets.iter().any(refuses) || situation.refused.keys().any(|(_, of)| of == name);
        let Steps { shares, record: next, waits, next_in_ms } = decide(&Scene {
            catalog: record,
            record: rollout.map(|rollout| &rollout.value),
            tracker: situation.trackers.get(name),
            members,
            lost: lost.collect(),
            apart,
            raised,
            unplaced: if is_refused { 0 } else { unplaced },
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

    /// Whether the version of a host's machines can be told.
    pub(super) fn knows(&self, cell: &Cell<'_>) -> bool {
        !self.is_unknown || cell.share.is_some()
    }

    /// Whether the rollout changes the share of a host.
    pub(super) fn moves(&self, host: usize) -> bool {
        self.moving.contains_key(&host)
    }

    /// The share of a host, with such a count.
    pub(super) fn share(&self, cell: &Cell<'_>, count: u32) -> ShareRecord {
        let generation = self.record.generation;
        let of = |version: VersionName, batch, wave| {
            let VersionName { image, version } = version;
            ShareRecord { count, version, generation, image: Some(image), batch, wave }
        };
        let to = VersionName::of_catalog(self.record);
        match (self.moving.get(&cell.host), cell.share) {
            (Some(batch), Some(share)) if to.is_in(share, self.record) => of(to, *batch, share.wave),
            (Some(batch), _) => of(to, *batch, self.wave),
            (None, Some(share)) => of(share.version_name(self.record), share.batch, share.wave),
            (None, None) => of(self.fresh.clone(), None, 0),
        }
    }
}

/// Whether a host is lost, dead or removed. Machines that keep data have the role of kept ones there.
fn is_lost(table: &Table<'_>, target: &Target<'_>) -> bool {
    let standing = table.hosts[target.cell.host].standing;
    matches!(target.role, Role::Lost | Role::Gone)
        || matches!(standing, Standing::DeclaredDead { .. } | Standing::Removed { .. })
}

/// Hosts that have machines of a catalog and keep them, or give them up, with their numbers.
fn members<'a>(table: &Table<'a>, targets: &[Target<'a>]) -> impl Iterator<Item = (usize, Member<'a>)> {
    let is_member = |target: &&Target<'a>| match target.role {
        Role::Kept | Role::Refused => target.to > 0 && !is_lost(table, target),
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
