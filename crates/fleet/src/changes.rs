//! Changes that people ask for: of the fleet, of its catalogs and of its hosts. Owns the rules of what may change.
//!
//! Invariant: a change is carried out only if the record that it was decided on is unchanged.

use crate::keys::Key;
use crate::named::NamePattern;
use crate::records::{CatalogRecord, FORMAT, HostRecord, MetaRecord, VersionName, default_strategy};
use crate::rollout::{RolloutTerms, begun, current, deleted};
use crate::transaction::{Comparison, MOST_OPERATIONS, Revision, Transaction, Write};
use crate::view::{FleetView, Versioned};
use jiff::Timestamp;
use serde::Serialize;
use spillway_api::{
    ErrorCode, FleetCatalogSpec, FleetCatalogUpdate, FleetHostAction, FleetRolloutState, HistoryEntry,
    IdentityKind, ImageRef, Name, VmmKind, fleet_differences,
};
use std::num::NonZeroU32;

/// Longest history of a catalog.
const MOST_ENTRIES: usize = 32;

/// Why a change was refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub struct ChangeError {
    /// Kind of the error.
    pub code: ErrorCode,
    /// What failed, and what to do.
    pub message: String,
}

pub(crate) fn refuse<T>(code: ErrorCode, message: String) -> Result<T, ChangeError> {
    Err(ChangeError { code, message })
}

fn json(record: &impl Serialize) -> Vec<u8> {
    serde_json::to_vec(record).expect("a record is plain data")
}

pub(crate) fn put(key: Key, before: Revision, record: &impl Serialize) -> Transaction {
    let value = json(record);
    Transaction {
        comparisons: vec![Comparison::Modified(key.clone(), before)],
        writes: vec![Write::Put(key, value)],
    }
}

/// Makes a change only if the record of the fleet is still the one that it was based on: another fleet may have the name by then. A change has one
/// comparison less than a transaction may have, for this.
pub fn in_this_fleet(view: &FleetView, mut change: Transaction) -> Transaction {
    let meta = view.meta.as_ref().map_or(0, |meta| meta.modified);
    change.comparisons.push(Comparison::Modified(Key::Meta, meta));
    change
}

/// Creates the fleet of this name, with this identity.
///
/// # Errors
/// There is a fleet already, or any record of one.
pub fn init(
    view: &FleetView,
    fleet: &Name,
    fleet_id: &str,
    now: Timestamp,
) -> Result<Transaction, ChangeError> {
    if view.meta.is_some() || view.unreadable.contains_key(&Key::Meta.to_string()) {
        return refuse(ErrorCode::Exists, "there is a fleet of this name in etcd already".into());
    }
    let (revision, listed, ended) = (view.revision, view.listed, view.ended.clone());
    if *view != (FleetView { revision, listed, ended, ..FleetView::default() }) {
        let message = format!(
            "etcd has records of a fleet of this name, and the record of the fleet itself is gone: restore a backup of etcd. Or let the hosts \
             of that fleet leave it ('spillwayd leave-fleet'), and then remove what is left of it ('etcdctl del --prefix /spillway/{fleet}/')"
        );
        return refuse(ErrorCode::Conflict, message);
    }
    let meta = MetaRecord { format: FORMAT, fleet_id: fleet_id.to_owned(), created: now, placer: true };
    Ok(put(Key::Meta, 0, &meta))
}

/// Switches the placer on or off: if it is off, another program writes the shares.
///
/// # Errors
/// There is no fleet.
pub fn set_placer(view: &FleetView, placer: bool) -> Result<Transaction, ChangeError> {
    let Some(meta) = &view.meta else { return refuse(ErrorCode::NotFound, "there is no fleet yet".into()) };
    Ok(put(Key::Meta, meta.modified, &MetaRecord { placer, ..meta.value.clone() }))
}

/// The version that an image refers to: its own, or the highest that the fleet has.
///
/// # Errors
/// It has none, and the fleet has none of that image.
fn version(view: &FleetView, image: &ImageRef) -> Result<u32, ChangeError> {
    if let Some(version) = image.version {
        return Ok(version.get());
    }
    let versions = view.images.range((image.name.clone(), 0)..=(image.name.clone(), u32::MAX));
    match versions.last() {
        Some(((_, version), _)) => Ok(*version),
        None => refuse(
            ErrorCode::NotFound,
            format!(
                "the fleet has no image {}: give a version that all hosts have, such as {}:1, or add one ('spillway fleet image add')",
                image.name, image.name
            ),
        ),
    }
}

pub(crate) fn catalog<'a>(
    view: &'a FleetView,
    name: &Name,
) -> Result<&'a Versioned<CatalogRecord>, ChangeError> {
    let key = Key::Catalog(name.clone()).to_string();
    match (view.catalogs.get(name), view.unreadable.get(&key)) {
        (Some(found), _) => Ok(found),
        (None, Some(why)) => refuse(ErrorCode::Damaged, format!("the record {key} cannot be read: {why}")),
        (None, None) => refuse(ErrorCode::NotFound, format!("the fleet has no catalog '{name}'")),
    }
}

/// Creates a catalog.
///
/// # Errors
/// There is one of this name, or its image has no version.
pub fn create_catalog(
    view: &FleetView,
    name: &Name,
    spec: &FleetCatalogSpec,
    now: Timestamp,
) -> Result<Transaction, ChangeError> {
    check(view, name, spec)?;
    match catalog(view, name) {
        Ok(_) => return refuse(ErrorCode::Exists, format!("the fleet has a catalog '{name}' already")),
        Err(e) if e.code != ErrorCode::NotFound => return Err(e),
        Err(_) => {}
    }
    let image = &spec.catalog.image;
    let version = version(view, image)?;
    let record = CatalogRecord {
        spec: spec.clone(),
        version,
        strategy: default_strategy(),
        generation: 1,
        history: vec![HistoryEntry { image: image.name.clone(), version, since: now }],
        created: now,
    };
    Ok(put(Key::Catalog(name.clone()), 0, &record))
}

/// Refuses settings that no fleet can have.
fn check(view: &FleetView, name: &Name, spec: &FleetCatalogSpec) -> Result<(), ChangeError> {
    let refuse = |why: &str| refuse(ErrorCode::Invalid, format!("catalog {name}: {why}"));
    let FleetCatalogSpec { catalog, fleet } = spec;
    if fleet.min_ready > catalog.count {
        return refuse("min_ready is more than count");
    }
    if fleet.waves.is_empty() {
        return refuse("waves: a rollout needs one wave at least, such as 100%");
    }
    if fleet.identity == IdentityKind::Named && (catalog.keeps_writes() || catalog.data_disk_bytes.is_some())
    {
        return refuse(
            "identity named is for machines that can begin anew on another host, and these keep their data on one: take identity any",
        );
    }
    if fleet.identity == IdentityKind::Named && catalog.hardware.vmm == VmmKind::External {
        return refuse("identity named needs machines that Spillway can end, and not vmm external");
    }
    if fleet.identity == IdentityKind::Named {
        let naming = catalog.naming(name);
        if let Some(other) = same_names(view, name, &naming) {
            return refuse(&format!(
                "naming '{naming}' gives machines the names of those of catalog {other}"
            ));
        }
        match NamePattern::parse(&naming) {
            None => {
                return refuse(&format!(
                    "naming '{naming}' needs one run of # for the number, such as {name}-###"
                ));
            }
            Some(pattern) if pattern.most() < catalog.count => {
                return refuse(&format!(
                    "naming '{naming}' has names for {} machines: give it more #",
                    pattern.most()
                ));
            }
            Some(_) => {}
        }
    }
    Ok(())
}

/// Another catalog whose machines may have the same names of the fleet.
fn same_names<'a>(view: &'a FleetView, name: &Name, naming: &str) -> Option<&'a Name> {
    let others = view.catalogs.iter().filter(|(other, _)| *other != name);
    let same = others.filter(|(other, record)| {
        let spec = &record.value.spec;
        let theirs = NamePattern::parse(&spec.catalog.naming(other));
        let both = theirs.zip(NamePattern::parse(naming));
        spec.fleet.identity == IdentityKind::Named && both.is_some_and(|(theirs, own)| theirs.overlaps(&own))
    });
    same.map(|(other, _)| other).next()
}

/// Replaces the settings of a catalog. Returns nothing to do if they are the same.
///
/// # Errors
/// There is none, it has another revision than `expected`, or a setting may not change.
pub fn replace_catalog(
    view: &FleetView,
    name: &Name,
    spec: &FleetCatalogSpec,
    expected: Option<Revision>,
    now: Timestamp,
) -> Result<Option<Transaction>, ChangeError> {
    check(view, name, spec)?;
    let found = catalog(view, name)?;
    check_revision(name, found, expected)?;
    let before = &found.value;
    if fleet_differences(name, &before.spec, spec).is_empty() {
        return Ok(None);
    }
    if before.spec.fleet.identity != spec.fleet.identity {
        return refuse(
            ErrorCode::Conflict,
            format!("catalog {name}: its identity cannot be changed: make another"),
        );
    }
    // What each host would refuse.
    let naming = |spec: &FleetCatalogSpec| match spec.fleet.identity {
        IdentityKind::Named => spec.catalog.naming(name),
        IdentityKind::Any => spec.naming(name, "HOST"),
    };
    let refused = match naming(spec) == naming(&before.spec) {
        true => before.spec.catalog.refused_change(&spec.catalog, false).map(|refused| refused.why),
        false => Some("its naming cannot be changed: make another".into()),
    };
    if let Some(why) = refused {
        return refuse(ErrorCode::Conflict, format!("catalog {name}: {why}"));
    }
    let image = &spec.catalog.image;
    let stays = before.spec.catalog.image == *image;
    let version = if stays { before.version } else { version(view, image)? };
    let record = CatalogRecord { spec: spec.clone(), ..moved(before, &image.name, version, now) };
    let change = put(Key::Catalog(name.clone()), found.modified, &record);
    if VersionName::of_catalog(before).is_of(&record) {
        return Ok(Some(change));
    }
    begun(view, name, (before, &record), RolloutTerms::default(), now, change).map(Some)
}

fn check_revision(
    name: &Name,
    found: &Versioned<CatalogRecord>,
    expected: Option<Revision>,
) -> Result<(), ChangeError> {
    match expected {
        Some(expected) if expected != found.modified => refuse(
            ErrorCode::Conflict,
            format!("catalog {name} has changed: it has revision {} and not {expected}", found.modified),
        ),
        _ => Ok(()),
    }
}

/// The record of a catalog after a change, with another version in its settings and its history.
fn moved(before: &CatalogRecord, image: &Name, version: u32, now: Timestamp) -> CatalogRecord {
    let mut record = CatalogRecord { version, generation: before.generation + 1, ..before.clone() };
    let is_current =
        record.history.last().is_some_and(|last| last.image == *image && last.version == version);
    if !is_current {
        record.history.push(HistoryEntry { image: image.clone(), version, since: now });
        let surplus = record.history.len().saturating_sub(MOST_ENTRIES);
        record.history.drain(..surplus);
    }
    let named = &mut record.spec.catalog.image;
    // Settings without a version leave it to updates.
    if named.name != *image || named.version.is_some() {
        *named = ImageRef { name: image.clone(), version: NonZeroU32::new(version) };
    }
    record
}

/// Moves a catalog to another version of its image.
///
/// # Errors
/// There is no such catalog, it has another revision than `expected`, or the fleet has other versions of the image, and not this one.
pub fn update_catalog(
    view: &FleetView,
    name: &Name,
    update: &FleetCatalogUpdate,
    expected: Option<Revision>,
    now: Timestamp,
) -> Result<Transaction, ChangeError> {
    let found = catalog(view, name)?;
    check_revision(name, found, expected)?;
    let before = &found.value;
    let image = &before.spec.catalog.image.name;
    let has_others = view.images.keys().any(|(name, _)| name == image);
    if has_others && !view.images.contains_key(&(image.clone(), update.version)) {
        let message = format!("the fleet has no version {} of {image}", update.version);
        return refuse(ErrorCode::NotFound, message);
    }
    let mut record = moved(before, image, update.version, now);
    if let Some(strategy) = update.strategy {
        record.strategy = strategy;
    }
    let change = put(Key::Catalog(name.clone()), found.modified, &record);
    let terms = RolloutTerms {
        at_once: false,
        max_failed: update.max_failed,
        deadline_seconds: update.deadline_seconds,
    };
    begun(view, name, (before, &record), terms, now, change)
}

/// Moves a catalog back to this version of its history, or to the one that it had before the current one; before a rollout that has not
/// reached all hosts, if there is one. Hosts that have another version get it at once. A way back that somebody has stopped goes on.
///
/// # Errors
/// There is no such catalog or version.
pub fn roll_back_catalog(
    view: &FleetView,
    name: &Name,
    to: Option<u32>,
    now: Timestamp,
) -> Result<Transaction, ChangeError> {
    let found = catalog(view, name)?;
    let before = &found.value;
    let is = VersionName::of_catalog(before);
    let open = current(view, name, before).map(|rollout| &rollout.value).filter(|rollout| rollout.is_open());
    let chosen = match (to, open) {
        // The same request may come twice. One that was stopped is gone again: before it came the version that people wanted to leave.
        (to, Some(rollout)) if rollout.at_once && to.is_none_or(|to| to == is.version) => {
            if rollout.state == FleetRolloutState::Running {
                return refuse(
                    ErrorCode::Conflict,
                    format!("catalog {name} is on its way back to {is} already"),
                );
            }
            Some(is)
        }
        (Some(to), _) if to == is.version => {
            return refuse(ErrorCode::Conflict, format!("catalog {name} has {is} already"));
        }
        (None, Some(rollout)) if rollout.from != is => Some(rollout.from.clone()),
        _ => earlier(before, to),
    };
    let Some(VersionName { image, version }) = chosen else {
        let image = &before.spec.catalog.image.name;
        return refuse(
            ErrorCode::NotFound,
            format!("catalog {name} has had no such earlier version of {image}"),
        );
    };
    let record = moved(before, &image, version, now);
    let change = put(Key::Catalog(name.clone()), found.modified, &record);
    let terms = RolloutTerms { at_once: true, ..RolloutTerms::default() };
    begun(view, name, (before, &record), terms, now, change)
}

/// This version of a catalog's history, or the one before the current one first appeared, so that a repeated rollback goes further back.
fn earlier(catalog: &CatalogRecord, to: Option<u32>) -> Option<VersionName> {
    let image = &catalog.spec.catalog.image.name;
    let history = &catalog.history;
    let is_current = |entry: &HistoryEntry| entry.version == catalog.version && entry.image == *image;
    let entry = match to {
        Some(to) => history.iter().rev().find(|entry| entry.version == to && entry.image == *image)?,
        None => &history[history.iter().position(is_current)?.checked_sub(1)?],
    };
    Some(VersionName { image: entry.image.clone(), version: entry.version })
}

/// Deletes a catalog. Its shares follow.
///
/// # Errors
/// There is none.
pub fn delete_catalog(view: &FleetView, name: &Name) -> Result<Transaction, ChangeError> {
    let found = catalog(view, name)?;
    let key = Key::Catalog(name.clone());
    let comparisons = vec![Comparison::Modified(key.clone(), found.modified)];
    let boots = view.boots.keys().filter(|(_, of)| of == name);
    let boots = boots.map(|(digest, of)| Write::Delete(Key::Boot(digest.clone(), of.clone())));
    let writes = std::iter::once(Write::Delete(key)).chain(deleted(view, name)).chain(boots);
    Ok(Transaction { comparisons, writes: writes.take(MOST_OPERATIONS).collect() })
}

fn host<'a>(view: &'a FleetView, name: &Name) -> Result<&'a Versioned<HostRecord>, ChangeError> {
    let missing =
        || ChangeError { code: ErrorCode::NotFound, message: format!("the fleet has no host '{name}'") };
    view.hosts.get(name).ok_or_else(missing)
}

/// Carries out an action on a host.
///
/// # Errors
/// There is no such host, or the action does not fit its state.
pub fn change_host(
    view: &FleetView,
    name: &Name,
    action: FleetHostAction,
) -> Result<Transaction, ChangeError> {
    let found = host(view, name)?;
    let mut record = found.value.clone();
    match action {
        FleetHostAction::Cordon => record.is_cordoned = true,
        FleetHostAction::Uncordon => (record.is_cordoned, record.is_draining) = (false, false),
        FleetHostAction::Drain => record.is_draining = true,
        FleetHostAction::DeclareDead if view.alive.contains_key(name) => {
            let message = format!(
                "the host {name} renews its lease, so it is not dead: stop its daemon and its machines first, or drain it \
                 ('spillway fleet host drain {name}')"
            );
            return refuse(ErrorCode::Conflict, message);
        }
        // Whatever epoch it had, it is over; a later one is alive.
        FleetHostAction::DeclareDead => record.dead_epoch = Some(view.revision),
    }
    Ok(put(Key::Host(name.clone()), found.modified, &record))
}

/// Removes a host that is not alive, with its shares.
///
/// # Errors
/// There is no such host, or it is alive.
pub fn remove_host(view: &FleetView, name: &Name) -> Result<Transaction, ChangeError> {
    let found = host(view, name)?;
    if view.alive.contains_key(name) {
        let message = format!(
            "the host {name} is alive: stop its daemon first, or start it without the options of the fleet"
        );
        return refuse(ErrorCode::Conflict, message);
    }
    let names = view.places.get(name).into_iter().flatten();
    let is_dead = |epoch: Revision| found.value.dead_epoch.is_some_and(|dead| dead >= epoch);
    if names.map(|(_, place)| place.value.epoch).any(|epoch| !is_dead(epoch)) {
        let message = format!(
            "the host {name} has machines with names of the fleet: declare it dead first, if nothing of it runs any more ('spillway fleet host \
             declare-dead {name}'); other hosts get the names then"
        );
        return refuse(ErrorCode::Conflict, message);
    }
    let key = Key::Host(name.clone());
    let comparisons = vec![
        Comparison::Modified(key.clone(), found.modified),
        Comparison::Created(Key::Alive(name.clone()), 0),
    ];
    let mut writes = vec![Write::Delete(key), Write::Delete(Key::Status(name.clone()))];
    // What does not fit into a transaction, the placer deletes, but for catalogs whose machines keep data: with these shares the host would
    // go on if it joined again.
    let shares = view.shares.get(name).into_iter().flatten();
    writes.extend(shares.map(|(catalog, _)| Write::Delete(Key::Share(name.clone(), catalog.clone()))));
    writes.truncate(MOST_OPERATIONS);
    Ok(Transaction { comparisons, writes })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::view::{Entry, Update};
    use serde_json::{Value, json};

    fn name(text: &str) -> Name {
        text.parse().unwrap()
    }

    fn now() -> Timestamp {
        "2026-01-02T00:00:00Z".parse().unwrap()
    }

    fn spec(settings: Value) -> FleetCatalogSpec {
        let mut spec = json!({ "image": "debian", "count": 10 });
        spec.as_object_mut().unwrap().extend(settings.as_object().unwrap().clone());
        serde_json::from_value(spec).unwrap()
    }

    /// Applies what is written, whatever is compared.
    fn apply(view: &mut FleetView, transaction: Transaction) {
        let revision = view.revision + 1;
        let entry = |value| Entry { value, created: revision, modified: revision };
        let writes = transaction.writes.into_iter().map(|write| match write {
            Write::Put(key, value) | Write::PutWithLease(key, value) => (key.to_string(), Some(entry(value))),
            Write::Delete(key) => (key.to_string(), None),
        });
        view.apply(Update::Changes(revision, writes.collect()));
    }

    fn put_json(view: &mut FleetView, key: &str, value: &Value) {
        let key: Key = key.parse().unwrap();
        apply(view, put(key, 0, value));
    }

    fn image(view: &mut FleetView, version: u32) {
        let record = json!({ "digest": "sha256:0", "registry": "s3", "name": "debian", "size_bytes": 1 });
        put_json(view, &format!("images/debian/{version}"), &record);
    }

    #[test]
    fn a_fleet_is_made_once() {
        let mut view = FleetView::default();
        let made = init(&view, &name("lab"), "f", now()).unwrap();
        apply(&mut view, made);
        assert_eq!(view.meta.as_ref().unwrap().value.fleet_id, "f");
        assert_eq!(init(&view, &name("lab"), "g", now()).unwrap_err().code, ErrorCode::Exists);
        let off = set_placer(&view, false).unwrap();
        apply(&mut view, off);
        assert!(!view.meta.unwrap().value.placer);
    }

    #[test]
    fn a_catalog_takes_the_highest_version_and_goes_back() {
        let mut view = FleetView::default();
        let desk = name("desk");
        let none = create_catalog(&view, &desk, &spec(json!({})), now()).unwrap_err();
        assert!(none.message.contains("the fleet has no image debian"), "{none}");
        [9, 10].into_iter().for_each(|version| image(&mut view, version));
        let created = create_catalog(&view, &desk, &spec(json!({})), now()).unwrap();
        apply(&mut view, created);
        let at = |view: &FleetView| {
            let record = &view.catalogs[&desk].value;
            (record.version, record.generation, record.history.len())
        };
        assert_eq!(at(&view), (10, 1, 1));
        let update =
            |version| FleetCatalogUpdate { version, strategy: None, max_failed: 0, deadline_seconds: None };
        assert!(update_catalog(&view, &desk, &update(11), None, now()).is_err());
        assert!(roll_back_catalog(&view, &desk, None, now()).is_err());
        let updated = update_catalog(&view, &desk, &update(9), Some(view.catalogs[&desk].modified), now());
        apply(&mut view, updated.unwrap());
        assert_eq!(at(&view), (9, 2, 2));
        let stale = update_catalog(&view, &desk, &update(10), Some(1), now()).unwrap_err();
        assert_eq!(stale.code, ErrorCode::Conflict);
        let back = roll_back_catalog(&view, &desk, None, now()).unwrap();
        apply(&mut view, back);
        assert_eq!(at(&view), (10, 3, 3));
        let same = replace_catalog(&view, &desk, &spec(json!({})), None, now()).unwrap();
        assert_eq!(same, None, "without a version, the settings leave it to updates");
        let more = replace_catalog(&view, &desk, &spec(json!({ "count": 11 })), None, now()).unwrap();
        apply(&mut view, more.unwrap());
        assert_eq!(at(&view), (10, 4, 3), "the version stays");
        let gone = delete_catalog(&view, &desk).unwrap();
        apply(&mut view, gone);
        assert!(view.catalogs.is_empty());
    }

    #[test]
    fn settings_with_a_version_follow_updates() {
        let mut view = FleetView::default();
        let desk = name("desk");
        [3, 4].into_iter().for_each(|version| image(&mut view, version));
        let of_file = |image: &str| spec(json!({ "image": image }));
        let created = create_catalog(&view, &desk, &of_file("debian:3"), now()).unwrap();
        apply(&mut view, created);
        let is = |view: &FleetView| {
            let record = &view.catalogs[&desk].value;
            (record.version, record.spec.catalog.image.to_string())
        };
        let update = FleetCatalogUpdate { version: 4, strategy: None, max_failed: 0, deadline_seconds: None };
        let updated = update_catalog(&view, &desk, &update, None, now()).unwrap();
        apply(&mut view, updated);
        assert_eq!(is(&view), (4, "debian:4".into()), "a catalog that is made again gets what this one had");
        assert_eq!(replace_catalog(&view, &desk, &of_file("debian:4"), None, now()), Ok(None));
        let back = replace_catalog(&view, &desk, &of_file("debian:3"), None, now()).unwrap();
        apply(&mut view, back.unwrap());
        assert_eq!(is(&view), (3, "debian:3".into()), "a file with another version brings that version");
        let updated = update_catalog(&view, &desk, &update, None, now()).unwrap();
        apply(&mut view, updated);
        let back = roll_back_catalog(&view, &desk, None, now()).unwrap();
        apply(&mut view, back);
        assert_eq!(is(&view), (3, "debian:3".into()));
    }

    #[test]
    fn settings_that_no_fleet_can_have_are_refused() {
        for (settings, why) in [
            (json!({ "min_ready": 11 }), "min_ready is more than count"),
            (json!({ "waves": [] }), "needs one wave"),
            (json!({ "identity": "named", "type": "dedicated" }), "take identity any"),
            (json!({ "identity": "named", "data_disk_bytes": 1_048_576 }), "take identity any"),
        ] {
            let refused = create_catalog(&FleetView::default(), &name("desk"), &spec(settings), now());
            assert!(refused.unwrap_err().message.contains(why), "{why}");
        }
        let mut view = FleetView::default();
        let spec = |identity: &str| spec(json!({ "image": "debian:1", "identity": identity }));
        let created = create_catalog(&view, &name("desk"), &spec("any"), now()).unwrap();
        apply(&mut view, created);
        let changed = replace_catalog(&view, &name("desk"), &spec("named"), None, now()).unwrap_err();
        assert!(changed.message.contains("identity cannot be changed"));
    }

    #[test]
    fn a_host_is_removed_or_declared_dead_only_if_it_is_not_alive() {
        let mut view = FleetView::default();
        let a = name("a");
        put_json(&mut view, "hosts/a", &json!({ "host_id": "h", "zone": "z" }));
        put_json(&mut view, "share/a/desk", &json!({ "count": 1, "version": 1, "generation": 1 }));
        let alive = json!({
            "instance": "i", "boot_id": "b", "address": "a:1", "certificate": "0", "version": "1", "hypervisor": "qemu",
        });
        put_json(&mut view, "alive/a", &alive);
        for refused in [change_host(&view, &a, FleetHostAction::DeclareDead), remove_host(&view, &a)] {
            assert_eq!(refused.unwrap_err().code, ErrorCode::Conflict);
        }
        let drained = change_host(&view, &a, FleetHostAction::Drain).unwrap();
        apply(&mut view, drained);
        let cordoned = change_host(&view, &a, FleetHostAction::Cordon).unwrap();
        apply(&mut view, cordoned);
        assert!(view.hosts[&a].value.is_cordoned && view.hosts[&a].value.is_draining);
        let back = change_host(&view, &a, FleetHostAction::Uncordon).unwrap();
        apply(&mut view, back);
        assert!(!view.hosts[&a].value.is_cordoned && !view.hosts[&a].value.is_draining);
        let revision = view.revision + 1;
        view.apply(Update::Changes(revision, vec![("alive/a".into(), None)]));
        let dead = change_host(&view, &a, FleetHostAction::DeclareDead).unwrap();
        apply(&mut view, dead);
        assert_eq!(view.hosts[&a].value.dead_epoch, Some(revision));
        let gone = remove_host(&view, &a).unwrap();
        apply(&mut view, gone);
        assert!(view.hosts.is_empty() && view.shares.is_empty());
        assert_eq!(remove_host(&view, &a).unwrap_err().code, ErrorCode::NotFound);
    }

    #[test]
    fn a_host_with_names_of_the_fleet_is_removed_once_it_is_declared_dead() {
        let mut view = FleetView::default();
        put_json(&mut view, "hosts/a", &json!({ "host_id": "h", "zone": "z" }));
        let identity = json!({ "uuid": "u", "mac": "02:00:00:00:00:01" });
        let place = json!({ "epoch": 3, "number": 1, "identity": identity });
        put_json(&mut view, "place/a/desk/desk-001", &place);
        let refused = remove_host(&view, &name("a")).unwrap_err();
        assert!(refused.message.contains("declare it dead first"), "{refused}");
        put_json(&mut view, "hosts/a", &json!({ "host_id": "h", "zone": "z", "dead_epoch": 2 }));
        assert!(remove_host(&view, &name("a")).is_err(), "it was dead in an earlier epoch");
        put_json(&mut view, "hosts/a", &json!({ "host_id": "h", "zone": "z", "dead_epoch": 3 }));
        assert!(remove_host(&view, &name("a")).is_ok());
    }

    #[test]
    fn names_of_the_fleet_have_a_pattern_that_is_enough_and_stays() {
        let mut view = FleetView::default();
        image(&mut view, 1);
        let create =
            |settings: Value| create_catalog(&FleetView::default(), &name("desk"), &spec(settings), now());
        for (settings, why) in [
            (json!({ "identity": "named", "image": "debian:1", "naming": "x" }), "one run of #"),
            (json!({ "identity": "named", "image": "debian:1", "naming": "x-#" }), "names for 9 machines"),
        ] {
            let refused = create(settings).unwrap_err();
            assert!(refused.message.contains(why), "{refused}");
        }
        let named =
            |naming: &str| spec(json!({ "identity": "named", "image": "debian:1", "naming": naming }));
        let made = create_catalog(&view, &name("desk"), &named("x-##"), now()).unwrap();
        apply(&mut view, made);
        let refused = replace_catalog(&view, &name("desk"), &named("y-##"), None, now()).unwrap_err();
        assert!(refused.message.contains("cannot be changed"), "{refused}");
    }

    #[test]
    fn what_each_host_would_refuse_the_fleet_refuses_once() {
        let desk = name("desk");
        let kept = json!({ "type": "dedicated", "data_disk_bytes": 2_097_152 });
        for (before, after, why) in [
            (json!({}), json!({ "naming": "pc-###" }), "its naming cannot be changed"),
            (json!({ "naming": "pc-###" }), json!({}), "its naming cannot be changed"),
            (json!({}), json!({ "vmm": "external" }), "its vmm cannot be changed"),
            (kept.clone(), json!({ "type": "dedicated" }), "lose their data disks"),
            (kept, json!({ "type": "dedicated", "data_disk_bytes": 1_048_576 }), "grow, not shrink"),
            (json!({ "type": "dedicated" }), json!({}), "another type would discard it"),
        ] {
            let settings = |more: &Value| {
                let mut all = json!({ "image": "debian:1" });
                all.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
                spec(all)
            };
            let mut view = FleetView::default();
            let created = create_catalog(&view, &desk, &settings(&before), now()).unwrap();
            apply(&mut view, created);
            let refused = replace_catalog(&view, &desk, &settings(&after), None, now()).unwrap_err();
            assert!(refused.code == ErrorCode::Conflict && refused.message.contains(why), "{refused:?}");
            assert!(!refused.message.contains("discard_data"), "the fleet has no such setting");
        }
        let mut view = FleetView::default();
        let named = |vmm: &str| {
            spec(json!({ "image": "debian:1", "identity": "named", "naming": "pc-##", "vmm": vmm }))
        };
        let external = create_catalog(&view, &desk, &named("external"), now()).unwrap_err();
        assert!(external.message.contains("machines that Spillway can end"), "{external}");
        let created = create_catalog(&view, &desk, &named("host"), now()).unwrap();
        apply(&mut view, created);
        let twice = create_catalog(&view, &name("other"), &named("host"), now()).unwrap_err();
        assert!(twice.message.contains("the names of those of catalog desk"), "{twice}");
        assert_eq!(replace_catalog(&view, &desk, &named("host"), None, now()), Ok(None));
    }
}
