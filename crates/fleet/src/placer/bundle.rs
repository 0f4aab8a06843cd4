//! Transactions of changes. Owns what each change is compared with, and how changes are divided.
//!
//! Invariant: machines of a catalog are raised no sooner than what they replace is lowered: in the same transaction, or once that has
//! ended.

use super::flights::{Effect, Effects};
use crate::keys::Key;
use crate::placement::{Cause, Change, RolloutStep};
use crate::records::RolloutRecord;
use crate::transaction::{Comparison, MOST_OPERATIONS, Revision, Transaction, Write};
use crate::view::FleetView;
use jiff::Timestamp;
use spillway_api::Name;
use std::collections::BTreeSet;

/// A transaction, and what it changes.
#[derive(Debug)]
pub(super) struct Bundle {
    pub(super) transaction: Transaction,
    pub(super) effects: Effects,
}

/// What each transaction of the placer is compared with: its term, and that nobody has switched the placer off.
pub(super) fn in_office(view: &FleetView, term: Revision) -> Vec<Comparison> {
    let meta = view.meta.as_ref().map_or(0, |meta| meta.modified);
    vec![Comparison::Created(Key::Placer, term), Comparison::Modified(Key::Meta, meta)]
}

/// Divides changes into transactions. Those that must wait for others are left out. Each change of a catalog that is apart has a transaction of
/// its own, so that one that conflicts keeps no others from being written. With none apart, at most one more transaction than `most` is made:
/// which of them are sent depends on nothing else.
pub(super) fn bundles(
    view: &FleetView,
    term: Revision,
    changes: &[Change],
    apart: &BTreeSet<&Name>,
    most: usize,
) -> Vec<Bundle> {
    let mut done = Vec::new();
    let mut open = Open::of(in_office(view, term));
    // Catalogs that were lowered in a transaction before.
    let mut lowered: BTreeSet<Name> = BTreeSet::new();
    for change in changes {
        if done.len() > most && apart.is_empty() {
            return done;
        }
        if change.to > change.from && lowered.contains(&change.catalog) {
            continue;
        }
        let comparisons = comparisons(view, change);
        if !open.has_space(&comparisons) || open.is_apart(apart) || apart.contains(&change.catalog) {
            lowered.extend(open.effects.lowered.iter().cloned());
            done.extend(std::mem::replace(&mut open, Open::of(in_office(view, term))).close());
            if change.to > change.from && lowered.contains(&change.catalog) {
                continue;
            }
        }
        open.take(change, comparisons);
    }
    done.extend(open.close());
    done
}

/// Whether others are raised because this share falls.
fn is_replaced(change: &Change) -> bool {
    change.to < change.from && matches!(change.cause, Cause::Lost | Cause::Gone | Cause::Refused)
}

struct Open {
    transaction: Transaction,
    has: BTreeSet<Key>,
    effects: Effects,
}

impl Open {
    fn of(comparisons: Vec<Comparison>) -> Open {
        let transaction = Transaction { comparisons, writes: Vec::new() };
        Open { transaction, has: BTreeSet::new(), effects: Effects::default() }
    }

    fn has_space(&self, comparisons: &[Comparison]) -> bool {
        let new = comparisons.iter().filter(|comparison| !self.has.contains(key_of(comparison))).count();
        self.transaction.comparisons.len() + new <= MOST_OPERATIONS
            && self.transaction.writes.len() < MOST_OPERATIONS
    }

    fn is_apart(&self, apart: &BTreeSet<&Name>) -> bool {
        self.effects.shares.last().is_some_and(|effect| apart.contains(&effect.place.1))
    }

    fn take(&mut self, change: &Change, comparisons: Vec<Comparison>) {
        for comparison in comparisons {
            if self.has.insert(key_of(&comparison).clone()) {
                self.transaction.comparisons.push(comparison);
            }
        }
        self.transaction.writes.push(write(change));
        if is_replaced(change) {
            self.effects.lowered.insert(change.catalog.clone());
        }
        let place = (change.host.clone(), change.catalog.clone());
        self.effects.shares.push(Effect { place, to: change.to, compared: change.modified });
    }

    fn close(self) -> Option<Bundle> {
        let Open { transaction, effects, .. } = self;
        (!transaction.writes.is_empty()).then_some(Bundle { transaction, effects })
    }
}

fn key_of(comparison: &Comparison) -> &Key {
    match comparison {
        Comparison::Created(key, _) | Comparison::Modified(key, _) => key,
    }
}

/// What must be as it was for a change to be right: the share, the catalog and its rollout always, and the host where it depends on that.
fn comparisons(view: &FleetView, change: &Change) -> Vec<Comparison> {
    let share = Key::Share(change.host.clone(), change.catalog.clone());
    let catalog = view.catalogs.get(&change.catalog).map_or(0, |catalog| catalog.modified);
    let mut all = vec![
        Comparison::Modified(share, change.modified),
        Comparison::Modified(Key::Catalog(change.catalog.clone()), catalog),
    ];
    let rollout = Key::Rollout(change.catalog.clone());
    if !view.unreadable.contains_key(&rollout.to_string()) {
        let modified = view.rollouts.get(&change.catalog).map_or(0, |rollout| rollout.modified);
        all.push(Comparison::Modified(rollout, modified));
    }
    let host = view.hosts.get(&change.host).map_or(0, |host| host.modified);
    match change.cause {
        Cause::Lost => all.push(Comparison::Created(Key::Alive(change.host.clone()), 0)),
        Cause::Missing | Cause::Left | Cause::Gone => {
            all.push(Comparison::Modified(Key::Host(change.host.clone()), host));
        }
        Cause::Refused | Cause::Surplus | Cause::Deleted | Cause::Updated | Cause::Named => {}
    }
    all
}

fn write(change: &Change) -> Write {
    let key = Key::Share(change.host.clone(), change.catalog.clone());
    match &change.share {
        Some(record) => {
            Write::Put(key, serde_json::to_vec(record).expect("a record of texts and numbers is JSON"))
        }
        None => Write::Delete(key),
    }
}

/// The transaction of a step of a rollout.
pub(super) fn rollout_bundle(
    view: &FleetView,
    term: Revision,
    step: &RolloutStep,
    wall: Timestamp,
) -> Bundle {
    let key = Key::Rollout(step.catalog.clone());
    let before = view.rollouts.get(&step.catalog).map(|rollout| rollout.value.generation);
    let is_new = before != Some(step.record.generation);
    let since = if is_new { wall } else { step.record.since };
    let record = RolloutRecord { since, changed: wall, ..step.record.clone() };
    let catalog = view.catalogs.get(&step.catalog).map_or(0, |catalog| catalog.modified);
    let mut comparisons = in_office(view, term);
    comparisons.push(Comparison::Modified(key.clone(), step.modified));
    comparisons.push(Comparison::Modified(Key::Catalog(step.catalog.clone()), catalog));
    let transaction = Transaction {
        comparisons,
        writes: vec![Write::Put(
            key,
            serde_json::to_vec(&record).expect("a record of texts and numbers is JSON"),
        )],
    };
    Bundle { transaction, effects: Effects::of_rollout(step.catalog.clone(), step.modified) }
}
