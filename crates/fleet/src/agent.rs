//! What the fleet wants of one host: catalogs with counts and versions. Owns the rule by which settings of a fleet's catalog become
//! those of a host's.
//!
//! Invariant: nothing is wanted of a host unless the records are those of its fleet, and it is a member. Records that are gone, or cannot be read, are no
//! order to give machines up.

use crate::keys::{ImageDigest, Key};
use crate::membership::takes_part;
use crate::named::{PlacedMachine, placed};
use crate::placement::version_of_new;
use crate::records::{CatalogRecord, ImageRecord, RegistryRecord, RolloutRecord, ShareRecord, VersionName};
use crate::rollout::current;
use crate::view::FleetView;
use spillway_api::{CatalogSpec, IdentityKind, ImageRef, Name, Residency, RolloutStrategy};
use std::collections::{BTreeMap, BTreeSet};
use std::num::NonZeroU32;

/// A catalog that a host is to have.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WantedCatalog {
    /// Settings on this host, with its count and the version of the image.
    pub spec: CatalogSpec,
    /// Generation of the fleet's catalog.
    pub generation: u64,
    /// How running machines get another version.
    pub strategy: RolloutStrategy,
    /// Machines that may fail without holding a place of a batch.
    pub max_failed: u32,
    /// Whether no further machine is restarted to get another version.
    pub is_held: bool,
    /// Where the host has the image from, if the fleet knows.
    pub source: Option<ImageSource>,
    /// Its machines, if they have names of the fleet; none: any that the host makes.
    pub machines: Option<Vec<PlacedMachine>>,
}

/// A version that a host is to have before its machines get it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WantedVersion {
    /// The version.
    pub of: VersionName,
    /// Where the host has it from, if the fleet knows.
    pub source: Option<ImageSource>,
    /// Part of the version that the host must keep.
    pub residency: Option<Residency>,
}

/// Where a host has a version of an image from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ImageSource {
    /// The version.
    pub image: ImageRecord,
    /// Its registry, if the fleet has that.
    pub registry: Option<RegistryRecord>,
}

impl ImageSource {
    /// Where a version is that has this record.
    pub fn of(view: &FleetView, image: &ImageRecord) -> ImageSource {
        let registry = view.registries.get(&image.registry).map(|registry| registry.value.clone());
        ImageSource { image: image.clone(), registry }
    }
}

/// What is wanted of a host.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct WantedShares {
    /// Catalogs that the host is to have. Of others that belong to the fleet it gives up all machines.
    pub catalogs: BTreeMap<Name, WantedCatalog>,
    /// Machines with names of the fleet that are placed here, and whose catalogs have no such machines any more.
    pub leaving: BTreeMap<Name, Vec<PlacedMachine>>,
    /// Versions that are about to be rolled out, by catalog.
    pub versions: BTreeMap<Name, WantedVersion>,
    /// Catalogs about which nothing is known, with the reasons: they stay as they are.
    pub unknown: BTreeMap<Name, String>,
}

impl WantedShares {
    /// The images whose boot sets the host is to have: those of its catalogs, and those of versions that are about to be rolled out, so
    /// that what the machines of earlier waves have read is on its way before those of this host start.
    pub fn images(&self) -> BTreeSet<ImageDigest> {
        let of_catalogs = self.catalogs.values().map(|catalog| catalog.source.as_ref());
        let coming = self.versions.values().map(|version| version.source.as_ref());
        let sources = of_catalogs.chain(coming).flatten();
        sources.filter_map(|source| ImageDigest::of(&source.image.digest)).collect()
    }
}

/// Returns what the records want of a host; `None` if they say nothing: they are not those of the fleet with this identity, not there, or do
/// not have the host with this identity as a member.
pub fn wanted(view: &FleetView, fleet_id: &str, host: &Name, host_id: &str) -> Option<WantedShares> {
    if !takes_part(view, fleet_id, host, host_id) {
        return None;
    }
    let mut wanted = WantedShares::default();
    for key in view.unreadable.keys() {
        match key.parse() {
            Ok(Key::Share(of, catalog)) if of == *host => {
                wanted.unknown.insert(catalog, format!("the record {key} cannot be read"));
            }
            Ok(Key::Place(of, catalog, _)) if of == *host => {
                wanted.unknown.insert(catalog, format!("the record {key} cannot be read"));
            }
            Ok(Key::Catalog(catalog)) => {
                wanted.unknown.insert(catalog, format!("the record {key} cannot be read"));
            }
            _ => {}
        }
    }
    let mut named = placed(view, host);
    let shares = view.shares.get(host).into_iter().flat_map(|shares| shares.keys());
    let names: BTreeSet<Name> = shares.chain(named.keys()).cloned().collect();
    for name in names.into_iter().filter(|name| !wanted.unknown.contains_key(name)).collect::<Vec<_>>() {
        // Its catalog was deleted, and its share is about to be: it is given up.
        let Some(catalog) = view.catalogs.get(&name).map(|catalog| &catalog.value) else { continue };
        let Some(share) = share_of(view, host, &name) else { continue };
        let is_named = catalog.spec.fleet.identity == IdentityKind::Named;
        let machines = is_named.then(|| named.remove(&name).unwrap_or_default());
        want(view, host, &name, catalog, share, machines, &mut wanted);
    }
    named.values_mut().flatten().for_each(|machine| machine.is_leaving = true);
    wanted.leaving = named;
    Some(wanted)
}

/// What a host is to have of a catalog; none: nothing. Of machines with names of the fleet it has those that were placed there: the share,
/// which may come later than they, says only the version.
pub fn share_of(view: &FleetView, host: &Name, name: &Name) -> Option<ShareRecord> {
    let share = view.share(host, name).map(|share| &share.value);
    let Some(catalog) = view.catalogs.get(name).map(|catalog| &catalog.value) else { return share.cloned() };
    if catalog.spec.fleet.identity != IdentityKind::Named {
        return share.cloned();
    }
    let mut places = view.places.get(host)?.iter().filter(|((of, _), _)| of == name).peekable();
    places.peek()?;
    let stays = places.filter(|(_, place)| !place.value.is_leaving).count();
    let count = u32::try_from(stays).unwrap_or(u32::MAX);
    Some(match share {
        Some(share) => ShareRecord { count, ..share.clone() },
        None => {
            let VersionName { image, version } = version_of_new(view, name, catalog);
            let generation = catalog.generation;
            ShareRecord { count, version, generation, image: Some(image), batch: None, wave: 0 }
        }
    })
}

/// Adds a catalog that a host has this share of, and its next version.
fn want(
    view: &FleetView,
    host: &Name,
    name: &Name,
    catalog: &CatalogRecord,
    share: ShareRecord,
    machines: Option<Vec<PlacedMachine>>,
    wanted: &mut WantedShares,
) {
    let mut spec = catalog.spec.catalog.clone();
    if machines.is_some() {
        spec.naming = Some(spec.naming(name));
    }
    let spec = on_host(&spec, name, host, &share);
    let rollout = current(view, name, catalog).map(|rollout| &rollout.value);
    let is_reached = |rollout: &&RolloutRecord| rollout.to.is_in(&share, catalog);
    let reached = rollout.filter(is_reached);
    let coming = rollout.filter(|rollout| rollout.brings() && !is_reached(rollout));
    if let Some(to) = coming.map(|rollout| &rollout.to) {
        let (of, residency) = (to.clone(), spec.residency);
        let source = source(view, &of);
        wanted.versions.insert(name.clone(), WantedVersion { of, source, residency });
    }
    let catalog = WantedCatalog {
        generation: share.generation,
        strategy: within(catalog.strategy, share.batch),
        max_failed: reached.map_or(0, RolloutRecord::most_failed),
        // The rollout of a version that another one has replaced does not go on, whatever it was that has stopped it, and what cannot
        // be read may have stopped it.
        is_held: rollout.is_some_and(|rollout| rollout.is_held() || reached.is_none())
            || view.unreadable.contains_key(&Key::Rollout(name.clone()).to_string())
            || share.batch == Some(0),
        source: source(view, &share.version_name(catalog)),
        spec,
        machines,
    };
    wanted.catalogs.insert(name.clone(), catalog);
}

/// Where hosts have a version from.
fn source(view: &FleetView, of: &VersionName) -> Option<ImageSource> {
    view.images.get(&(of.image.clone(), of.version)).map(|image| ImageSource::of(view, &image.value))
}

/// The strategy of a host whose share allows such a batch. With 0 nothing is restarted, whatever the strategy says.
fn within(strategy: RolloutStrategy, most: Option<u32>) -> RolloutStrategy {
    match (strategy, most.filter(|most| *most > 0)) {
        (RolloutStrategy::Batch(machines), Some(most)) => RolloutStrategy::Batch(machines.min(most)),
        (RolloutStrategy::Now, Some(most)) => RolloutStrategy::Batch(most),
        (strategy, _) => strategy,
    }
}

/// The settings of a catalog on a host that has this share of it.
fn on_host(spec: &CatalogSpec, name: &Name, host: &Name, share: &ShareRecord) -> CatalogSpec {
    let (count, version) = (share.count, share.version);
    let image = share.image.as_ref().unwrap_or(&spec.image.name);
    let part = |all: u32| {
        let part = (u64::from(all) * u64::from(count)).div_ceil(u64::from(spec.count.max(1)));
        u32::try_from(part).unwrap_or(u32::MAX).min(count)
    };
    CatalogSpec {
        image: ImageRef { name: image.clone(), version: NonZeroU32::new(version) },
        count,
        warm: part(spec.warm),
        naming: Some(spec.naming.clone().unwrap_or_else(|| format!("{name}-{host}-###"))),
        ..spec.clone()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::view::{Entry, Update};
    use serde_json::{Value, json};

    fn view(records: &[(&str, Value)]) -> FleetView {
        let entry = |value: &Value| Entry { value: value.to_string().into_bytes(), created: 1, modified: 1 };
        let entries = records.iter().map(|(key, value)| ((*key).to_owned(), entry(value)));
        let mut view = FleetView::default();
        view.apply(Update::Whole(1, entries.collect()));
        view
    }

    fn meta() -> (&'static str, Value) {
        let meta = json!({ "format": 1, "fleet_id": "f", "created": "2026-01-01T00:00:00Z", "placer": true });
        ("meta", meta)
    }

    fn member() -> (&'static str, Value) {
        ("hosts/a", json!({ "host_id": "h", "zone": "z" }))
    }

    fn catalog(settings: Value) -> Value {
        json!({
            "spec": settings, "version": 3, "generation": 4, "history": [], "created": "2026-01-01T00:00:00Z",
        })
    }

    fn share(count: u32) -> Value {
        json!({ "count": count, "version": 3, "generation": 4 })
    }

    #[test]
    fn a_host_gets_its_part_of_a_catalog() {
        let desk = catalog(json!({ "image": "debian", "count": 100, "warm": 10, "ram_bytes": 67_108_864 }));
        let lab = catalog(json!({ "image": "debian", "count": 2, "naming": "x-##" }));
        let records = [
            meta(),
            member(),
            ("catalogs/desk", desk),
            ("catalogs/lab", lab),
            ("share/a/desk", share(25)),
            ("share/a/lab", share(1)),
            ("share/a/gone", share(1)),
            ("share/b/desk", share(75)),
        ];
        let host: Name = "a".parse().unwrap();
        let wanted = wanted(&view(&records), "f", &host, "h").unwrap();
        let names: Vec<_> = wanted.catalogs.keys().map(Name::as_str).collect();
        assert_eq!(names, ["desk", "lab"], "{wanted:?}");
        let desk = &wanted.catalogs[&"desk".parse::<Name>().unwrap()];
        assert_eq!((desk.spec.count, desk.spec.warm, desk.generation), (25, 3, 4));
        assert_eq!(desk.spec.image.to_string(), "debian:3");
        assert_eq!(desk.spec.naming.as_deref(), Some("desk-a-###"));
        let lab = &wanted.catalogs[&"lab".parse::<Name>().unwrap()];
        assert_eq!(lab.spec.naming.as_deref(), Some("x-##"));
    }

    #[test]
    fn boot_sets_are_those_of_what_is_here_and_of_what_comes() {
        let digest = |digit: char| format!("sha256:{}", digit.to_string().repeat(64));
        let image =
            |digit| json!({ "digest": digest(digit), "registry": "hub", "name": "debian", "size_bytes": 1 });
        let images = |state: &str| {
            let mut desk = catalog(json!({ "image": "debian", "count": 4 }));
            desk["version"] = 4.into();
            let version = |version: u32| json!({ "image": "debian", "version": version });
            let rollout = json!({
                "from": version(3), "to": version(4), "generation": 4, "state": state, "deadline_seconds": 600,
                "since": "2026-01-01T00:00:00Z", "changed": "2026-01-01T00:00:00Z",
            });
            let records = [
                meta(),
                member(),
                ("images/debian/2", image('2')),
                ("images/debian/3", image('3')),
                ("images/debian/4", image('4')),
                ("catalogs/desk", desk),
                ("rollouts/desk", rollout),
                ("share/a/desk", share(2)),
            ];
            let wanted = wanted(&view(&records), "f", &"a".parse().unwrap(), "h").unwrap();
            wanted.images().iter().map(ImageDigest::with_kind).collect::<Vec<_>>()
        };
        assert_eq!(images("prefetch"), [digest('3'), digest('4')]);
        assert_eq!(images("running"), [digest('3'), digest('4')], "earlier waves have it already");
        assert_eq!(images("aborted"), [digest('3')]);
    }

    #[test]
    fn machines_with_names_leave_when_their_catalog_has_none_any_more() {
        let host: Name = "a".parse().unwrap();
        let place =
            json!({ "epoch": 1, "number": 1, "identity": { "uuid": "u", "mac": "02:00:00:00:00:01" } });
        let records = |settings: Option<Value>| {
            let catalog = settings.map(|settings| ("catalogs/desk", catalog(settings)));
            let all = [meta(), member(), ("place/a/desk/desk-001", place.clone())].into_iter().chain(catalog);
            all.collect::<Vec<_>>()
        };
        let leaving = |settings: Option<Value>| {
            let wanted = wanted(&view(&records(settings)), "f", &host, "h").unwrap();
            wanted.leaving.values().flatten().map(|machine| machine.is_leaving).collect::<Vec<_>>()
        };
        assert_eq!(leaving(Some(json!({ "image": "x", "identity": "named" }))), [] as [bool; 0]);
        assert_eq!(leaving(Some(json!({ "image": "x" }))), [true]);
        assert_eq!(leaving(None), [true]);
    }

    #[test]
    fn what_is_not_known_is_no_order() {
        let host: Name = "a".parse().unwrap();
        let records = [("catalogs/desk", catalog(json!({ "image": "x" }))), ("share/a/desk", share(1))];
        assert_eq!(wanted(&view(&records), "f", &host, "h"), None, "there is no fleet");
        assert_eq!(wanted(&view(&[meta()]), "f", &host, "h"), None, "the host is no member");
        let records = [meta(), member()];
        assert_eq!(wanted(&view(&records), "g", &host, "h"), None, "it is another fleet");
        assert_eq!(wanted(&view(&records), "f", &host, "i"), None, "another host has the name");
        assert_eq!(wanted(&view(&records), "f", &host, "h"), Some(WantedShares::default()));
        let mut later = meta();
        later.1["format"] = json!(2);
        assert_eq!(wanted(&view(&[later, member()]), "f", &host, "h"), None, "the format is not known");
        for records in [
            [meta(), member(), ("catalogs/desk", json!(1)), ("share/a/desk", share(1))],
            [
                meta(),
                member(),
                ("catalogs/desk", catalog(json!({ "image": "x" }))),
                ("share/a/desk", json!({})),
            ],
        ] {
            let wanted = wanted(&view(&records), "f", &host, "h").unwrap();
            assert!(wanted.catalogs.is_empty() && wanted.unknown.len() == 1, "{wanted:?}");
        }
    }
}
