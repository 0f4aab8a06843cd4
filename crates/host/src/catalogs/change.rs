//! Changes of a catalog's settings. Owns the rules of what may change, and their messages.
//!
//! Invariant: data that machines keep is discarded only on explicit request.

use super::records::Removal;
use super::{Catalogs, spec, update};
use crate::error::HostError;
use crate::tags::Tag;
use spillway_api::{Catalog, CatalogSpec, ErrorCode, Name, RefusedChange, VmmKind};

/// Who asks for a change.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ChangedBy {
    /// A client of this host. It cannot change what belongs to the fleet.
    #[default]
    People,
    /// The fleet of the host, which changes only what belongs to it.
    Fleet {
        /// Generation of the fleet's catalog that the change carries out.
        generation: u64,
    },
}

impl ChangedBy {
    /// Notes in the catalog what the change carries out.
    pub(super) fn note(self, catalog: &mut Catalog) {
        if let (ChangedBy::Fleet { generation }, Some(owner)) = (self, &mut catalog.fleet) {
            owner.generation = generation;
        }
    }
}

/// Conditions of a change.
#[derive(Clone, Copy, Debug, Default)]
pub struct CatalogChangeTerms {
    /// Tag of the catalog on which it was decided: nothing is done if the catalog has another one.
    pub expected: Option<Tag>,
    /// Whether data that machines keep may be discarded.
    pub discard_data: bool,
    /// Whether the kept files of removed machines are deleted too.
    pub with_data: bool,
    /// Whether machines may be removed even if they are claimed.
    pub force: bool,
    /// Whether everything is checked and nothing changed.
    pub dry_run: bool,
    /// Who asks for the change.
    pub by: ChangedBy,
    /// Whether the rollout that begins with it is paused.
    pub paused: bool,
}

impl Catalogs {
    /// Replaces the settings. Machines are recorded and removed to match the count. Writes nothing if nothing changes.
    /// Returns the catalog, and the one before.
    pub fn change(
        &self,
        name: &Name,
        spec: &CatalogSpec,
        terms: CatalogChangeTerms,
    ) -> Result<(Catalog, Catalog), HostError> {
        spec::check_not_redacted(name, spec)?;
        let counting = self.counting();
        let warnings = self.check(name, spec)?;
        self.check_names_free(name, spec)?;
        let changed = self.objects.change(|changes| {
            let before = self.found(changes, name, terms.expected, terms.by)?;
            check(&before, spec, terms.discard_data)?;
            // A claim ends with a reset, so machines that start to keep their data must not be claimed.
            let count = if !before.spec.keeps_writes() && spec.keeps_writes() { 0 } else { spec.count };
            self.check_none_claimed(changes, &self.surplus(name, count)?, terms.force)?;
            let mut warnings = warnings.clone();
            warnings.extend(self.check_capacity(name, spec, Some(&before.spec))?);
            let mut catalog = Catalog { spec: spec.clone(), warnings, ..before.clone() };
            terms.by.note(&mut catalog);
            let mut notes = Vec::new();
            if before.spec.image != spec.image {
                let version = self.version(changes, &spec.image)?;
                notes.extend(update::take(&mut catalog, version));
            }
            self.check_streamed(changes, &catalog, terms.dry_run)?;
            let is_new = catalog != before && !terms.dry_run;
            // An earlier change may have been interrupted.
            let is_unfinished = changes.get::<Removal>(name.as_str())?.is_some() && !terms.dry_run;
            match is_new {
                true => {
                    changes.put(name.as_str(), &catalog);
                    if spec.count < before.spec.count {
                        changes.put(name.as_str(), &Removal { with_data: terms.with_data });
                    }
                }
                false => changes.forget(),
            }
            Ok::<_, HostError>((catalog, before, notes, is_new || is_unfinished))
        });
        let (mut catalog, before, notes, is_new) = self.keep_or_undo(changed, terms.dry_run)?;
        if is_new {
            self.count(&counting, &catalog)?;
            catalog = self.get(name)?;
        }
        catalog.warnings.extend(notes);
        Ok((catalog, before))
    }
}

/// Refuses settings that a catalog cannot change to.
pub(super) fn check(before: &Catalog, after: &CatalogSpec, discard_data: bool) -> Result<(), HostError> {
    let (name, spec) = (&before.name, &before.spec);
    let refuse = |why: &str| Err(HostError::new(ErrorCode::Conflict, format!("catalog {name}: {why}")));
    if spec.naming(name) != after.naming(name) {
        return refuse("its naming cannot be changed: make another");
    }
    if spec.hardware.vmm == VmmKind::External && after.count < spec.count {
        let message = format!(
            "its machines were added by name, and a lower count would remove any of them: remove them by name ('spillway machine delete'), and give count = {} or more",
            spec.count
        );
        return refuse(&message);
    }
    match spec.refused_change(after, discard_data) {
        Some(RefusedChange { why, discards_data: true }) => {
            refuse(&format!("{why}: to allow this, set discard_data (--discard-data)"))
        }
        Some(RefusedChange { why, .. }) => refuse(&why),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn catalog(settings: &str) -> Catalog {
        let spec: serde_json::Value =
            serde_json::from_str(&format!(r#"{{"image": "debian", {settings}}}"#)).unwrap();
        serde_json::from_value(json!({
            "name": "desk", "spec": spec, "version": 1, "history": [], "warnings": [],
            "created": "2026-01-01T00:00:00Z"
        }))
        .unwrap()
    }

    fn of(before: &str, after: &str, discard_data: bool) -> Result<(), String> {
        check(&catalog(before), &catalog(after).spec, discard_data).map_err(|e| e.message)
    }

    #[test]
    fn what_is_kept_is_thrown_away_only_on_demand() {
        for (before, after, why) in [
            (r#""type": "dedicated""#, r#""type": "pooled""#, "another type would discard it"),
            (r#""reset": "never""#, r#""reset": "never", "mode": "direct""#, "another mode would discard it"),
            (r#""reset": "never""#, r#""reset": "power-cycle""#, "another reset would discard it"),
            (r#""data_disk_bytes": 1048576"#, r#""count": 1"#, "lose their data disks"),
        ] {
            let error = of(before, after, false).unwrap_err();
            assert!(error.contains(why) && error.contains("discard_data"), "{before} {after}: {error}");
            assert_eq!(of(before, after, true), Ok(()), "{before} {after}");
        }
        let mut other = catalog(r#""type": "dedicated""#).spec;
        other.image = "windows:3".parse().unwrap();
        let dedicated = catalog(r#""type": "dedicated""#);
        assert!(
            check(&dedicated, &other, false).unwrap_err().message.contains("another image would discard")
        );
        assert!(check(&dedicated, &other, true).is_ok());
        other.image = "debian:3".parse().unwrap();
        assert!(check(&dedicated, &other, false).is_ok(), "another version is not another image");
    }

    #[test]
    fn what_is_forgotten_anyway_needs_no_leave() {
        for (before, after) in [
            (r#""count": 1"#, r#""mode": "direct""#),
            (r#""mode": "ram""#, r#""reset": "never""#),
            (r#""count": 1"#, r#""type": "dedicated""#),
            (r#""type": "dedicated""#, r#""type": "dedicated", "mode": "persistent", "reset": "never""#),
            (r#""data_disk_bytes": 1048576"#, r#""data_disk_bytes": 2097152"#),
            (r#""count": 1"#, r#""data_disk_bytes": 1048576"#),
            (r#""count": 1"#, r#""naming": "desk-###""#),
        ] {
            assert_eq!(of(before, after, false), Ok(()), "{before} {after}");
        }
    }

    #[test]
    fn some_things_stay() {
        for (before, after, why) in [
            (r#""count": 1"#, r#""naming": "d-###""#, "naming cannot be changed"),
            (r#""data_disk_bytes": 2097152"#, r#""data_disk_bytes": 1048576"#, "grow, not shrink"),
            (
                r#""data_disk_bytes": 1048576"#,
                r#""data_disk_bytes": 1048576, "data_disk_store": "x""#,
                "stay in their store",
            ),
        ] {
            assert!(of(before, after, true).unwrap_err().contains(why), "{before} {after}");
        }
    }
}
