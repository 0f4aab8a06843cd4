//! Which residency a streamed version has on this host: the most of what was asked for with the version, of what catalogs ask for whose
//! machines use it, and of what the fleet asks for. Owns that rule; what follows from it is done elsewhere.
//!
//! Invariant: versions with the same digest are one image in the cache, and have one residency.

use crate::catalogs::{follows, take};
use crate::error::HostError;
use crate::store::{Objects, StoredRecord};
use serde::{Deserialize, Serialize};
use spillway_api::{Catalog, HistoryEntry, ImageVersion, Residency, VersionState};
use std::collections::BTreeSet;
use utoipa::ToSchema;

/// The images of which this host is to have all for its fleet, by their digests.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct WholeImages {
    /// Digests.
    pub digests: BTreeSet<String>,
}

impl StoredRecord for WholeImages {
    const PREFIX: &'static str = "whole-images/";
    const WORD: &'static str = "list of full copies";
}

impl WholeImages {
    const KEY: &'static str = "fleet";

    /// Reads the list; it is empty if there is none.
    pub fn read(objects: &Objects) -> Result<WholeImages, HostError> {
        Ok(objects.get::<WholeImages>(WholeImages::KEY)?.map(|found| found.value).unwrap_or_default())
    }

    /// Records the list, if it is another one.
    pub fn record(&self, objects: &Objects) -> Result<(), HostError> {
        if WholeImages::read(objects)? == *self {
            return Ok(());
        }
        objects.change(|changes| {
            changes.put(WholeImages::KEY, self);
            Ok(())
        })
    }
}

/// The records from which residencies follow.
pub struct Residencies {
    /// What the fleet asks for.
    whole: WholeImages,
    /// Versions that are streamed and can be used.
    versions: Vec<ImageVersion>,
    catalogs: Vec<Catalog>,
}

impl Residencies {
    /// Reads the records.
    pub fn read(objects: &Objects) -> Result<Residencies, HostError> {
        let all = objects.list::<ImageVersion>()?.into_iter().map(|version| version.value);
        let is_used =
            |version: &ImageVersion| version.residency.is_some() && version.state == VersionState::Ready;
        let versions = all.filter(is_used).collect();
        let catalogs = objects.list::<Catalog>()?.into_iter().map(|catalog| catalog.value).collect();
        Ok(Residencies { whole: WholeImages::read(objects)?, versions, catalogs })
    }

    /// The same with an image of which the host has all.
    pub fn with_whole(mut self, digest: &str) -> Residencies {
        self.whole.digests.insert(digest.to_owned());
        self
    }

    /// The same with a catalog as it would be.
    pub fn with_catalog(mut self, catalog: &Catalog) -> Residencies {
        self.catalogs.retain(|other| other.name != catalog.name);
        self.catalogs.push(catalog.clone());
        self
    }

    /// The same with a version published: catalogs that follow its image have it.
    pub fn with_published(mut self, version: &ImageVersion) -> Residencies {
        let followers = self.catalogs.iter_mut().filter(|catalog| follows(catalog, &version.image));
        followers.for_each(|catalog| drop(take(catalog, version.version)));
        self
    }

    /// The same with a streamed version as it would be, or before it can be used.
    pub fn with_version(mut self, version: &ImageVersion) -> Residencies {
        let is_other =
            |other: &ImageVersion| (&other.image, other.version) != (&version.image, version.version);
        self.versions.retain(is_other);
        self.versions.push(version.clone());
        self
    }

    /// The versions that are streamed and can be used.
    pub fn versions(&self) -> &[ImageVersion] {
        &self.versions
    }

    /// The residency of the image with this digest. None: no version with this digest is streamed.
    pub fn of(&self, digest: &str) -> Option<Residency> {
        let versions = self.versions.iter().filter(|version| version.digest.as_deref() == Some(digest));
        let by_fleet = self.whole.digests.contains(digest).then_some(Residency::Full);
        versions.filter_map(|version| self.asked_of(version).max(version.residency).max(by_fleet)).max()
    }

    /// What catalogs ask for of a version.
    fn asked_of(&self, version: &ImageVersion) -> Option<Residency> {
        let users = self.catalogs.iter().filter(|catalog| uses(catalog, version));
        users.filter_map(|catalog| catalog.spec.residency).max()
    }
}

/// Whether machines of a catalog use a version: they take the last version of its history, and during a rollout some still have the
/// one before. Disks that keep what is written may be on any of them.
fn uses(catalog: &Catalog, version: &ImageVersion) -> bool {
    let entries = match catalog.spec.keeps_writes() {
        true => usize::MAX,
        false => 1 + usize::from(catalog.rollout.is_some()),
    };
    let is = |entry: &HistoryEntry| (&entry.image, entry.version) == (&version.image, version.version);
    catalog.history.iter().rev().take(entries).any(is)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    fn version(number: u32, digest: &str, residency: &str) -> ImageVersion {
        serde_json::from_value(json!({
            "image": "debian", "version": number, "state": "ready", "store": "default", "size_bytes": 1 << 20,
            "origin": { "kind": "registry", "registry": "hub", "image": "debian" }, "stored_bytes": 0,
            "digest": digest, "residency": residency, "created": "2026-01-01T00:00:00Z",
        }))
        .unwrap()
    }

    fn catalog(name: &str, versions: &[u32], settings: Value) -> Catalog {
        let since = "2026-01-01T00:00:00Z";
        let history: Vec<_> = versions
            .iter()
            .map(|version| json!({ "image": "debian", "version": version, "since": since }))
            .collect();
        let mut spec = settings;
        spec["image"] = "debian".into();
        serde_json::from_value(json!({
            "name": name, "spec": spec, "version": versions.last(), "history": history, "warnings": [],
            "created": since,
        }))
        .unwrap()
    }

    #[test]
    fn it_is_the_most_of_what_is_asked_for() {
        let versions = vec![version(1, "a", "lazy"), version(2, "b", "boot"), version(3, "b", "lazy")];
        let residencies = |catalogs: Vec<Catalog>| {
            let all = Residencies { whole: WholeImages::default(), versions: versions.clone(), catalogs };
            [all.of("a"), all.of("b"), all.of("c")]
        };
        let (lazy, boot, full) = (Some(Residency::Lazy), Some(Residency::Boot), Some(Residency::Full));
        assert_eq!(residencies(vec![]), [lazy, boot, None]);
        let desk = |versions: &[u32]| catalog("desk", versions, json!({ "residency": "full" }));
        assert_eq!(residencies(vec![desk(&[1])]), [full, boot, None]);
        // The other version with the digest is the same image.
        assert_eq!(residencies(vec![desk(&[1, 3])]), [lazy, full, None]);
        let lab = catalog("lab", &[2], json!({ "residency": "lazy" }));
        let plain = catalog("plain", &[1], json!({}));
        assert_eq!(residencies(vec![lab, plain]), [lazy, boot, None], "it is never lowered");
    }

    #[test]
    fn machines_that_are_not_on_the_last_version_count() {
        let asks = |settings: Value, rolls_out: bool| {
            let mut desk = catalog("desk", &[1, 2, 3], settings);
            desk.rollout = rolls_out.then(|| {
                serde_json::from_value(json!({
                    "strategy": "now", "paused": false, "since": "2026-01-01T00:00:00Z", "image": "debian",
                    "version": 3, "deadline_seconds": 60, "max_failed": 0,
                }))
                .unwrap()
            });
            let versions = [1, 2, 3].map(|number| version(number, "x", "lazy"));
            versions.map(|version| uses(&desk, &version))
        };
        assert_eq!(asks(json!({}), false), [false, false, true]);
        assert_eq!(asks(json!({}), true), [false, true, true]);
        assert_eq!(asks(json!({ "type": "dedicated" }), false), [true; 3]);
    }

    #[test]
    fn it_is_asked_with_what_would_be() {
        let all = Residencies {
            whole: WholeImages::default(),
            versions: vec![version(1, "a", "lazy")],
            catalogs: vec![],
        };
        let all = all.with_catalog(&catalog("desk", &[1], json!({ "residency": "full" })));
        assert_eq!(all.of("a"), Some(Residency::Full));
        let all = all.with_catalog(&catalog("desk", &[1], json!({})));
        let follower = catalog("desk", &[1], json!({ "residency": "full" }));
        let all = all.with_catalog(&follower).with_published(&version(4, "d", "lazy"));
        let all = all.with_version(&version(4, "d", "lazy"));
        assert_eq!((all.of("a"), all.of("d")), (Some(Residency::Lazy), Some(Residency::Full)));
        let all = all.with_catalog(&catalog("desk", &[1], json!({})));
        let all = all.with_version(&version(1, "a", "boot"));
        assert_eq!((all.of("a"), all.of("d")), (Some(Residency::Boot), Some(Residency::Lazy)));
        assert_eq!(all.versions().len(), 2);
        let all = all.with_whole("a").with_whole("z");
        let full = Some(Residency::Full);
        assert_eq!((all.of("a"), all.of("d"), all.of("z")), (full, Some(Residency::Lazy), None));
    }
}
