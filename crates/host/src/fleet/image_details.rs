//! Describes images of the fleet for people, from the records. Decides nothing.

use spillway_api::{FleetImage, Name};
use spillway_fleet::changes_images::users;
use spillway_fleet::view::FleetView;
use std::collections::BTreeSet;

/// Describes all versions of images, in the order of their names.
pub fn images(view: &FleetView) -> Vec<FleetImage> {
    view.images.keys().filter_map(|(name, version)| image(view, name, *version)).collect()
}

/// Describes a version of an image, if the fleet has it.
pub fn image(view: &FleetView, name: &Name, version: u32) -> Option<FleetImage> {
    let record = &view.images.get(&(name.clone(), version))?.value;
    let reference = format!("{name}:{version}");
    // What a host has is of no use while it is not there.
    let statuses = || view.statuses.iter().filter(|(host, _)| view.alive.contains_key(*host));
    let whole = statuses().filter(|(_, status)| status.value.whole.contains(&reference));
    let parts = statuses().filter_map(|(host, status)| Some((host, status.value.images.get(&reference)?)));
    Some(FleetImage {
        image: name.clone(),
        version,
        digest: record.digest.clone(),
        size_bytes: record.size_bytes,
        registry: record.registry.clone(),
        source: record.name.clone(),
        full_copies: record.full_copies,
        whole: whole.map(|(host, _)| host.clone()).collect(),
        parts: parts.map(|(host, part)| (host.clone(), *part)).collect(),
        catalogs: users(view, name, version),
    })
}

/// The versions of which hosts report what they have: those of catalogs, and those with a minimum of full copies.
pub fn reported(view: &FleetView) -> BTreeSet<(Name, u32)> {
    let of_catalogs = view.catalogs.values().map(|catalog| {
        let catalog = &catalog.value;
        (catalog.spec.catalog.image.name.clone(), catalog.version)
    });
    let copied = view.images.iter().filter(|(_, image)| image.value.full_copies > 0);
    of_catalogs.chain(copied.map(|(key, _)| key.clone())).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};
    use spillway_fleet::view::{Entry, Update};

    #[test]
    fn an_image_is_described_by_what_hosts_have_of_it() {
        let image = json!({ "digest": "sha256:1", "registry": "hub", "name": "golden", "size_bytes": 7, "full_copies": 2 });
        let budget = json!({ "guarantee_bytes": 1, "limit_bytes": 1, "memory_bytes": 1, "vcpus": 1 });
        let status = |part: u32, whole: &[&str]| json!({ "budget": budget, "images": { "debian:3": part }, "whole": whole });
        let alive = json!({
            "instance": "i", "boot_id": "b", "address": "a:1", "certificate": "0", "version": "1", "hypervisor": "qemu",
        });
        let catalog = json!({
            "spec": { "image": "debian" }, "version": 3, "generation": 1, "history": [], "created": "2026-01-01T00:00:00Z",
        });
        let other = json!({ "digest": "sha256:2", "registry": "hub", "name": "golden", "size_bytes": 7 });
        let records: [(&str, Value); 8] = [
            ("images/debian/3", image),
            ("images/debian/4", other),
            ("catalogs/desk", catalog),
            ("alive/a", alive.clone()),
            ("alive/b", alive),
            ("status/a", status(1000, &["debian:3"])),
            ("status/b", status(400, &[])),
            ("status/gone", status(1000, &["debian:3"])),
        ];
        let entry = |value: Value| Entry { value: value.to_string().into_bytes(), created: 1, modified: 1 };
        let mut view = FleetView::default();
        view.apply(Update::Whole(1, records.map(|(key, value)| (key.to_owned(), entry(value))).into()));
        let found = images(&view);
        let [debian, unused] = &found[..] else { panic!("{found:?}") };
        let name = |text: &str| text.parse::<Name>().unwrap();
        assert_eq!((debian.full_copies, &debian.whole[..]), (2, &[name("a")][..]));
        assert_eq!(debian.parts.values().copied().collect::<Vec<_>>(), [1000, 400]);
        assert_eq!((debian.catalogs.len(), unused.catalogs.len(), unused.whole.len()), (1, 0, 0));
        assert_eq!(reported(&view), BTreeSet::from([(name("debian"), 3)]));
    }
}
