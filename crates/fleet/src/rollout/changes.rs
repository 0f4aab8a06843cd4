//! Changes of rollouts that people ask for. Owns the rules of what may follow what.
//!
//! Invariant: a rollout that has halted goes on only if somebody asks for it.

use super::current;
use crate::changes::{ChangeError, catalog, put, refuse};
use crate::keys::Key;
use crate::records::{CatalogRecord, RolloutRecord, VersionName};
use crate::transaction::{Comparison, Transaction, Write};
use crate::view::FleetView;
use jiff::Timestamp;
use spillway_api::{DEADLINE_SECONDS_DEFAULT, ErrorCode, FleetRolloutState, Name, RolloutAction};

/// How a version is rolled out.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RolloutTerms {
    /// Whether all hosts get it at once.
    pub at_once: bool,
    /// Machines that may fail.
    pub max_failed: u32,
    /// Seconds without progress after which it halts; none: the default.
    pub deadline_seconds: Option<u32>,
}

/// Adds to a change of a catalog's version the rollout that follows from it.
///
/// # Errors
/// The record of the rollout before cannot be read.
pub fn begun(
    view: &FleetView,
    name: &Name,
    (before, after): (&CatalogRecord, &CatalogRecord),
    terms: RolloutTerms,
    now: Timestamp,
    mut change: Transaction,
) -> Result<Transaction, ChangeError> {
    let key = Key::Rollout(name.clone());
    check_readable(view, &key)?;
    let known = view.rollouts.get(name);
    let from = match current(view, name, before).map(|rollout| &rollout.value) {
        Some(rollout) if !terms.at_once => rollout.fresh().clone(),
        // The same way back once more.
        Some(rollout) if rollout.at_once && rollout.to.is_of(after) => rollout.from.clone(),
        _ => VersionName::of_catalog(before),
    };
    let record = RolloutRecord {
        from,
        to: VersionName::of_catalog(after),
        generation: after.generation,
        state: if terms.at_once { FleetRolloutState::Running } else { FleetRolloutState::Prefetch },
        why: None,
        wave: 0,
        hosts: 0,
        at_once: terms.at_once,
        max_failed: terms.max_failed,
        tolerated: 0,
        deadline_seconds: terms.deadline_seconds.unwrap_or(DEADLINE_SECONDS_DEFAULT),
        resumes: 0,
        since: now,
        changed: now,
    };
    let rollout = put(key, known.map_or(0, |known| known.modified), &record);
    change.comparisons.extend(rollout.comparisons);
    change.writes.extend(rollout.writes);
    Ok(change)
}

/// Refuses a record of a rollout that cannot be read.
fn check_readable(view: &FleetView, key: &Key) -> Result<(), ChangeError> {
    match view.unreadable.get(&key.to_string()) {
        Some(why) => refuse(ErrorCode::Damaged, format!("the record {key} cannot be read: {why}")),
        None => Ok(()),
    }
}

/// Pauses, resumes or aborts the rollout of a catalog. Returns nothing to do if it is so already.
///
/// # Errors
/// There is no such catalog, or no rollout that this can be done with.
pub fn change_rollout(
    view: &FleetView,
    name: &Name,
    action: RolloutAction,
    now: Timestamp,
) -> Result<Option<Transaction>, ChangeError> {
    use FleetRolloutState::{Aborted, Done, Halted, Paused, Prefetch, Running};
    let found = catalog(view, name)?;
    let key = Key::Rollout(name.clone());
    check_readable(view, &key)?;
    let conflict = |why: &str| refuse(ErrorCode::Conflict, format!("catalog {name}: {why}"));
    let Some(known) = current(view, name, &found.value) else {
        return conflict("no rollout is in progress");
    };
    let before = &known.value;
    let mut record = RolloutRecord { changed: now, why: None, ..before.clone() };
    record.state = match (action, before.state) {
        (_, Done) => return conflict("no rollout is in progress: the last one has reached all hosts"),
        (RolloutAction::Pause, Paused) | (RolloutAction::Abort, Aborted) => return Ok(None),
        (RolloutAction::Resume, Prefetch | Running) => return Ok(None),
        (RolloutAction::Pause, Prefetch | Running) => Paused,
        (RolloutAction::Pause, Halted) => return conflict("its rollout has halted already"),
        (RolloutAction::Pause | RolloutAction::Resume, Aborted) => {
            return conflict("its rollout was aborted: update it again, or roll back");
        }
        (RolloutAction::Abort, _) => Aborted,
        (RolloutAction::Resume, Paused | Halted) if before.at_once => Running,
        (RolloutAction::Resume, Paused | Halted) => Prefetch,
    };
    if action == RolloutAction::Resume {
        record.resumes += 1;
        // On the way back nothing halts it.
        let failed = if before.at_once { 0 } else { failed(view, name, &found.value, before) };
        record.tolerated = record.tolerated.max(failed);
    }
    let mut change = put(key, known.modified, &record);
    change.comparisons.push(Comparison::Modified(Key::Catalog(name.clone()), found.modified));
    Ok(Some(change))
}

/// Machines that have failed on hosts with the version.
fn failed(view: &FleetView, name: &Name, catalog: &CatalogRecord, record: &RolloutRecord) -> u32 {
    let of = view.shares.iter().filter_map(|(host, shares)| {
        let share = &shares.get(name)?.value;
        let status = view.statuses.get(host)?.value.catalogs.get(name)?;
        (record.to.is_in(share, catalog) && record.to.is_taken(status)).then_some(status.failed)
    });
    of.fold(0, u32::saturating_add)
}

/// Deletes the rollout of a catalog, if there is one.
pub(crate) fn deleted(view: &FleetView, name: &Name) -> Option<Write> {
    let key = Key::Rollout(name.clone());
    let is_there = view.rollouts.contains_key(name) || view.unreadable.contains_key(&key.to_string());
    is_there.then_some(Write::Delete(key))
}
