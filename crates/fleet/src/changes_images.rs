//! Changes of the fleet's registries and images that people ask for. Owns the rules of what may change.
//!
//! Invariant: what an image or a catalog of the fleet needs is not removed, as far as the records tell that a change was decided on. A catalog that
//! is made at the same moment may lose its image: its status says so, and adding the image again brings it back.

use crate::changes::{ChangeError, put, refuse};
use crate::keys::{ImageDigest, Key};
use crate::records::{ImageRecord, RegistryRecord, VersionName};
use crate::transaction::{Comparison, MOST_OPERATIONS, Transaction, Write};
use crate::view::{FleetView, Versioned};
use spillway_api::{ErrorCode, Name};
use std::collections::BTreeSet;

fn in_fleet(view: &FleetView) -> Result<(), ChangeError> {
    match view.meta {
        Some(_) => Ok(()),
        None => {
            refuse(ErrorCode::NotFound, "there is no fleet yet: make it with 'spillway fleet init'".into())
        }
    }
}

fn check_readable(view: &FleetView, key: &Key) -> Result<(), ChangeError> {
    match view.unreadable.get(&key.to_string()) {
        Some(why) => refuse(ErrorCode::Damaged, format!("the record {key} cannot be read: {why}")),
        None => Ok(()),
    }
}

/// The registry with this name.
///
/// # Errors
/// There is none, or its record cannot be read.
pub fn registry<'a>(view: &'a FleetView, name: &Name) -> Result<&'a Versioned<RegistryRecord>, ChangeError> {
    check_readable(view, &Key::Registry(name.clone()))?;
    let missing = || {
        let message = format!(
            "the fleet has no registry '{name}': add it first ('spillway fleet registry add {name} URL')"
        );
        ChangeError { code: ErrorCode::NotFound, message }
    };
    view.registries.get(name).ok_or_else(missing)
}

/// Adds a registry. Returns nothing to do if the fleet has the same one.
///
/// # Errors
/// There is another one of this name.
pub fn add_registry(view: &FleetView, record: &RegistryRecord) -> Result<Option<Transaction>, ChangeError> {
    in_fleet(view)?;
    let name = &record.name;
    let key = Key::Registry(name.clone());
    check_readable(view, &key)?;
    match view.registries.get(name) {
        None => Ok(Some(put(key, 0, record))),
        Some(there) if there.value == *record => Ok(None),
        Some(there) => {
            let message = format!(
                "the fleet has a registry '{name}' already, with other settings (at {}): give this one another name, or remove the other",
                there.value.url
            );
            refuse(ErrorCode::Exists, message)
        }
    }
}

/// Removes a registry from which the fleet has no image. Hosts that know it keep it.
///
/// # Errors
/// There is none, or an image is from it.
pub fn remove_registry(view: &FleetView, name: &Name) -> Result<Transaction, ChangeError> {
    let found = registry(view, name)?;
    let user = view.images.iter().find(|(_, image)| image.value.registry == *name);
    if let Some(((image, version), _)) = user {
        let message = format!(
            "the fleet has {image}:{version} from the registry {name}: remove that first ('spillway fleet image remove {image}:{version}')"
        );
        return refuse(ErrorCode::InUse, message);
    }
    let key = Key::Registry(name.clone());
    let comparisons = vec![Comparison::Modified(key.clone(), found.modified)];
    Ok(Transaction { comparisons, writes: vec![Write::Delete(key)] })
}

/// Adds a version of an image, or changes from where hosts have it and how many have all of it. Returns nothing to do if the fleet has the
/// same one.
///
/// # Errors
/// The fleet does not have the registry, or has another image of this name and number.
pub fn add_image(
    view: &FleetView,
    name: &Name,
    version: u32,
    record: &ImageRecord,
) -> Result<Option<Transaction>, ChangeError> {
    in_fleet(view)?;
    let of_registry = Comparison::Modified(
        Key::Registry(record.registry.clone()),
        registry(view, &record.registry)?.modified,
    );
    let key = Key::Image(name.clone(), version);
    check_readable(view, &key)?;
    let there = view.images.get(&(name.clone(), version));
    match there {
        Some(there) if there.value == *record => return Ok(None),
        Some(there) if there.value.digest != record.digest => {
            let message = format!(
                "the fleet has another {name}:{version} already, with the digest {}: a version never changes. Push the new content under \
                 the next number",
                there.value.digest
            );
            return refuse(ErrorCode::Exists, message);
        }
        _ => {}
    }
    let mut change = put(key, there.map_or(0, |there| there.modified), record);
    change.comparisons.push(of_registry);
    Ok(Some(change))
}

/// Catalogs whose machines have a version, or are to have it: by their settings, by a share, or by a rollout that has not reached all hosts.
pub fn users(view: &FleetView, image: &Name, version: u32) -> Vec<Name> {
    let of = VersionName { image: image.clone(), version };
    let uses = view.catalogs.iter().filter(|(name, catalog)| {
        let catalog = &catalog.value;
        let mut shares = view.shares.values().filter_map(|shares| shares.get(*name));
        let rollout = view.rollouts.get(*name).map(|rollout| &rollout.value);
        of.is_of(catalog)
            || shares.any(|share| share.value.count > 0 && of.is_in(&share.value, catalog))
            || rollout.is_some_and(|rollout| rollout.is_open() && [&rollout.from, &rollout.to].contains(&&of))
    });
    uses.map(|(name, _)| name.clone()).collect()
}

/// Removes a version that no catalog uses, and what was recorded of its boots. Hosts that have it keep it.
///
/// # Errors
/// There is none, or a catalog uses it.
pub fn remove_image(view: &FleetView, name: &Name, version: u32) -> Result<Transaction, ChangeError> {
    let key = Key::Image(name.clone(), version);
    check_readable(view, &key)?;
    let Some(found) = view.images.get(&(name.clone(), version)) else {
        return refuse(ErrorCode::NotFound, format!("the fleet has no image {name}:{version}"));
    };
    if let Some(catalog) = users(view, name, version).first() {
        let message = format!(
            "the catalog {catalog} of the fleet uses {name}:{version}: move it to another version first ('spillway fleet catalog update \
             {catalog} --image {name}:VERSION')"
        );
        return refuse(ErrorCode::InUse, message);
    }
    let mut comparisons = vec![Comparison::Modified(key.clone(), found.modified)];
    // Each of these may begin to use it at this moment.
    let of_image = view.catalogs.iter().filter(|(_, catalog)| catalog.value.spec.catalog.image.name == *name);
    comparisons.extend(
        of_image.map(|(name, catalog)| Comparison::Modified(Key::Catalog(name.clone()), catalog.modified)),
    );
    // One is left for the record of the fleet.
    comparisons.truncate(MOST_OPERATIONS - 1);
    let mut writes = vec![Write::Delete(key)];
    let digest = &found.value.digest;
    let is_other = |other: &(&(Name, u32), &Versioned<ImageRecord>)| *other.0 != (name.clone(), version);
    if !view.images.iter().filter(is_other).any(|(_, image)| image.value.digest == *digest) {
        writes.extend(boots_of(view, digest));
        writes.truncate(MOST_OPERATIONS);
    }
    Ok(Transaction { comparisons, writes })
}

fn boots_of(view: &FleetView, digest: &str) -> impl Iterator<Item = Write> {
    let digest = ImageDigest::of(digest);
    let of_digest = view.boots.keys().filter(move |(of, _)| Some(of) == digest.as_ref());
    let keys: BTreeSet<Key> = of_digest.map(|(of, catalog)| Key::Boot(of.clone(), catalog.clone())).collect();
    keys.into_iter().map(Write::Delete)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sample::{Fleet, name};
    use crate::transaction::Outcome;
    use serde_json::json;

    fn fleet() -> Fleet {
        let mut fleet = Fleet::new();
        let added = add_registry(fleet.view(), &hub("file:///srv/hub")).unwrap().unwrap();
        assert!(matches!(fleet.commit(&added), Outcome::Applied(_)));
        fleet
    }

    fn hub(url: &str) -> RegistryRecord {
        serde_json::from_value(json!({ "name": "hub", "url": url })).unwrap()
    }

    fn image(digest: char, full_copies: u32) -> ImageRecord {
        ImageRecord {
            digest: format!("sha256:{}", digest.to_string().repeat(64)),
            registry: name("hub"),
            name: name("golden"),
            size_bytes: 1 << 30,
            full_copies,
        }
    }

    fn add(fleet: &mut Fleet, version: u32, record: &ImageRecord) {
        let added = add_image(fleet.view(), &name("debian"), version, record).unwrap().unwrap();
        assert!(matches!(fleet.commit(&added), Outcome::Applied(_)));
    }

    #[test]
    fn an_image_of_very_many_catalogs_is_removed_in_one_transaction() {
        let mut fleet = fleet();
        add(&mut fleet, 1, &image('a', 0));
        for n in 0..MOST_OPERATIONS {
            fleet.catalog(&format!("desk-{n}"), 1, json!({ "image": "debian:7" }));
            fleet.set(&format!("catalogs/desk-{n}"), json!({ "version": 7 }));
        }
        let removed = remove_image(fleet.view(), &name("debian"), 1).unwrap();
        let removed = crate::changes::in_this_fleet(fleet.view(), removed);
        assert_eq!(removed.comparisons.len(), MOST_OPERATIONS);
        assert!(matches!(fleet.commit(&removed), Outcome::Applied(_)));
    }

    #[test]
    fn a_registry_is_added_once_and_stays_while_an_image_is_from_it() {
        let none = add_registry(&FleetView::default(), &hub("file:///srv/hub")).unwrap_err();
        assert!(none.message.contains("spillway fleet init"));
        let mut fleet = fleet();
        assert_eq!(add_registry(fleet.view(), &hub("file:///srv/hub")), Ok(None));
        let other = add_registry(fleet.view(), &hub("file:///srv/other")).unwrap_err();
        assert_eq!(other.code, ErrorCode::Exists);
        let missing = remove_registry(fleet.view(), &name("s3")).unwrap_err();
        assert!(missing.message.contains("spillway fleet registry add s3"), "{missing}");
        add(&mut fleet, 3, &image('a', 0));
        let used = remove_registry(fleet.view(), &name("hub")).unwrap_err();
        assert!(used.code == ErrorCode::InUse && used.message.contains("debian:3"), "{used}");
        let removed = remove_image(fleet.view(), &name("debian"), 3).unwrap();
        fleet.commit(&removed);
        let removed = remove_registry(fleet.view(), &name("hub")).unwrap();
        fleet.commit(&removed);
        assert!(fleet.view().registries.is_empty() && fleet.view().images.is_empty());
        fleet.put("registries/hub", "{}");
        for refused in [
            add_registry(fleet.view(), &hub("file:///srv/hub")).unwrap_err(),
            remove_registry(fleet.view(), &name("hub")).unwrap_err(),
        ] {
            assert_eq!(refused.code, ErrorCode::Damaged);
        }
    }

    #[test]
    fn a_version_never_changes_and_its_copies_may() {
        let mut fleet = fleet();
        let strange = ImageRecord { registry: name("s3"), ..image('a', 0) };
        assert!(add_image(fleet.view(), &name("debian"), 3, &strange).is_err());
        add(&mut fleet, 3, &image('a', 0));
        assert_eq!(add_image(fleet.view(), &name("debian"), 3, &image('a', 0)), Ok(None));
        let other = add_image(fleet.view(), &name("debian"), 3, &image('b', 0)).unwrap_err();
        assert_eq!(other.code, ErrorCode::Exists);
        add(&mut fleet, 3, &image('a', 2));
        assert_eq!(fleet.view().images[&(name("debian"), 3)].value.full_copies, 2);
        // The registry goes while the change is on its way.
        let late = add_image(fleet.view(), &name("debian"), 4, &image('b', 0)).unwrap().unwrap();
        fleet.delete("registries/hub");
        assert_eq!(fleet.commit(&late), Outcome::Conflict);
    }

    #[test]
    fn what_a_catalog_uses_is_not_removed() {
        let mut fleet = fleet();
        [(1, 'a'), (2, 'b'), (3, 'c')]
            .iter()
            .for_each(|(version, digest)| add(&mut fleet, *version, &image(*digest, 0)));
        fleet.catalog("desk", 4, json!({}));
        fleet.host("a", "z");
        let refused =
            |fleet: &Fleet, version| remove_image(fleet.view(), &name("debian"), version).unwrap_err();
        let used = refused(&fleet, 1);
        assert!(used.code == ErrorCode::InUse && used.message.contains("the catalog desk"), "{used}");
        fleet.share("a", "desk", 2);
        fleet.set("catalogs/desk", json!({ "version": 2 }));
        // A rollout goes on: machines still have the version before.
        assert!(refused(&fleet, 1).message.contains("the catalog desk"));
        assert_eq!(users(fleet.view(), &name("debian"), 2), [name("desk")]);
        fleet.share("a", "desk", 2);
        let removed = remove_image(fleet.view(), &name("debian"), 3).unwrap();
        fleet.set("catalogs/desk", json!({ "version": 3 }));
        assert_eq!(fleet.commit(&removed), Outcome::Conflict, "the catalog has just taken it");
        let removed = remove_image(fleet.view(), &name("debian"), 1).unwrap();
        assert!(matches!(fleet.commit(&removed), Outcome::Applied(_)));
        assert_eq!(refused(&fleet, 1).code, ErrorCode::NotFound);
    }

    #[test]
    fn what_a_rollout_may_go_back_to_is_not_removed() {
        let mut fleet = fleet();
        [(1, 'a'), (2, 'b')]
            .iter()
            .for_each(|(version, digest)| add(&mut fleet, *version, &image(*digest, 0)));
        fleet.catalog("desk", 4, json!({}));
        fleet.host("a", "z");
        fleet.share("a", "desk", 2);
        // The catalog moves to another image.
        fleet.catalog("desk", 4, json!({ "image": "ubuntu" }));
        assert_eq!(users(fleet.view(), &name("debian"), 1), [name("desk")], "the share has it");
        fleet.delete("share/a/desk");
        assert_eq!(users(fleet.view(), &name("debian"), 1), [] as [Name; 0]);
        let record = |state: &str| {
            json!({ "from": { "image": "debian", "version": 1 }, "to": { "image": "ubuntu", "version": 1 },
                "generation": 2, "state": state, "deadline_seconds": 600, "since": "2026-01-01T00:00:00Z",
                "changed": "2026-01-01T00:00:00Z" })
        };
        fleet.put("rollouts/desk", &record("halted").to_string());
        assert_eq!(users(fleet.view(), &name("debian"), 1), [name("desk")]);
        fleet.put("rollouts/desk", &record("done").to_string());
        assert!(remove_image(fleet.view(), &name("debian"), 1).is_ok());
    }

    #[test]
    fn boot_sets_go_with_the_last_version_of_their_digest() {
        let mut fleet = fleet();
        [1, 2].iter().for_each(|version| add(&mut fleet, *version, &image('a', 0)));
        let boot = format!("boot/{}/desk", "a".repeat(64));
        fleet.put(&boot, &json!({ "boots": 2, "chunks": "" }).to_string());
        fleet.put(&boot.replace('a', "b"), &json!({ "boots": 2, "chunks": "" }).to_string());
        for (version, left) in [(1, 2), (2, 1)] {
            let removed = remove_image(fleet.view(), &name("debian"), version).unwrap();
            assert!(matches!(fleet.commit(&removed), Outcome::Applied(_)));
            assert_eq!(fleet.view().boots.len(), left);
        }
    }
}
