//! Catalogs on versions that are streamed. Owns what such a version refuses.
//!
//! Invariant: what can never work is refused when it is asked for, not when a machine starts.

use super::Catalogs;
use crate::error::HostError;
use crate::store::Changes;
use spillway_api::{Catalog, DiskMode, ErrorCode, ImageVersion, Origin};

impl Catalogs {
    /// Refuses a catalog, as it would be, whose version is streamed and has to be whole, or for whose residency the cache has no
    /// space. Begins to bring what the residency asks for, unless `dry_run`.
    pub(super) fn check_streamed(
        &self,
        changes: &mut Changes,
        catalog: &Catalog,
        dry_run: bool,
    ) -> Result<(), HostError> {
        let key = crate::images::key(&catalog.spec.image.name, catalog.version);
        let Some(version) = changes.get::<ImageVersion>(&key)?.map(|version| version.value) else {
            return Ok(());
        };
        check_mode(catalog, &version)?;
        match version.residency.and(catalog.spec.residency) {
            Some(_) => self.images.stream_for(catalog, &version, dry_run),
            None => Ok(()),
        }
    }
}

/// Refuses a version that is streamed for machines that need a copy of it.
pub(super) fn check_mode(catalog: &Catalog, version: &ImageVersion) -> Result<(), HostError> {
    let (Some(_), DiskMode::Ephemeral) = (version.residency, catalog.spec.mode()) else { return Ok(()) };
    let from = match &version.origin {
        Origin::Registry { registry, image } => format!("{registry}/{image}"),
        Origin::Import { .. } | Origin::Commit { .. } => "REGISTRY/IMAGE".into(),
    };
    let message = format!(
        "catalog {}: mode ephemeral copies the whole image, and {}:{} is streamed: copy it under another name ('spillway image \
         import NAME --from {from}') and use that, or choose another mode",
        catalog.name, version.image, version.version
    );
    Err(HostError::new(ErrorCode::Conflict, message))
}

#[cfg(test)]
mod tests {
    use crate::catalogs::CatalogChangeTerms;
    use crate::idempotency::IdempotentRequest;
    use crate::images::key;
    use crate::machines::testing::{TestHost, spec};
    use crate::resources::budget::NO_LIMITS;
    use serde_json::json;
    use spillway_api::{ImageVersion, Name};

    #[test]
    fn a_streamed_version_is_no_copy_for_mode_ephemeral() {
        let host = TestHost::new(NO_LIMITS);
        let streamed: ImageVersion = serde_json::from_value(json!({
            "image": "debian", "version": 2, "state": "ready", "store": "default", "size_bytes": 1 << 20,
            "origin": { "kind": "registry", "registry": "hub", "image": "golden:2" }, "stored_bytes": 0,
            "digest": "sha256:0", "residency": "lazy", "created": "2026-01-01T00:00:00Z",
        }))
        .unwrap();
        host.put(&key(&streamed.image, 2), &streamed);
        let (copies, reads): (Name, Name) = ("copies".parse().unwrap(), "reads".parse().unwrap());
        let create = |name: &Name, settings| {
            host.catalogs.create(name, &spec(settings), false, &IdempotentRequest::default())
        };
        let refused = |message: String| {
            assert!(message.contains("'spillway image import NAME --from hub/golden:2'"), "{message}");
        };
        refused(create(&copies, json!({ "image": "debian:2", "mode": "ephemeral" })).unwrap_err().message);
        create(&copies, json!({ "mode": "ephemeral" })).unwrap();
        create(&reads, json!({ "image": "debian:2", "residency": "lazy" })).unwrap();
        let terms = CatalogChangeTerms::default();
        let update = serde_json::from_value(json!({ "image": "debian:2" })).unwrap();
        refused(host.catalogs.update(&copies, &update, terms).unwrap_err().message);
        let other = spec(json!({ "image": "debian:2", "mode": "ephemeral" }));
        refused(host.catalogs.change(&copies, &other, terms).unwrap_err().message);
        refused(host.catalogs.change(&reads, &other, terms).unwrap_err().message);
        // A catalog that follows the image would take it when it is published.
        let image = streamed.image;
        let followed = host.objects.change(|changes| crate::catalogs::follow(changes, &image, 2));
        refused(followed.unwrap_err().message);
        assert_eq!(host.catalogs.get(&copies).unwrap().version, 1);
    }
}
