//! Versions of a catalog: update, rollback, and following the published version. Owns the history and the rollout's
//! record; the overseer restarts machines.
//!
//! Invariant: the last entry of the history is the version that machines take at their next start, and that a rollout
//! brings.

use super::Catalogs;
use super::change::{CatalogChangeTerms, check};
use super::streamed::check_mode;
use crate::error::HostError;
use crate::store::{Changes, Revision};
use jiff::Timestamp;
use spillway_api::{
    Catalog, CatalogRollback, CatalogUpdate, DEADLINE_SECONDS_DEFAULT, ErrorCode, HistoryEntry, ImageRef,
    ImageVersion, Name, Rollout, RolloutAction, RolloutStrategy,
};
use std::num::NonZeroU32;

/// Longest history.
const MOST_ENTRIES: usize = 32;

impl Catalogs {
    /// Changes the version or the strategy. Replaces a rollout in progress, with a note. Returns the catalog, and the one
    /// before.
    pub fn update(
        &self,
        name: &Name,
        update: &CatalogUpdate,
        terms: CatalogChangeTerms,
    ) -> Result<(Catalog, Catalog), HostError> {
        self.move_to(name, update, terms, |_| Ok(update.image.clone()))
    }

    /// Returns to a version of the catalog's history. Returns the catalog, and the one before.
    pub fn rollback(
        &self,
        name: &Name,
        rollback: &CatalogRollback,
        terms: CatalogChangeTerms,
    ) -> Result<(Catalog, Catalog), HostError> {
        // The image is chosen within the transaction.
        let update = CatalogUpdate {
            image: ImageRef { name: name.clone(), version: None },
            rollout: rollback.rollout,
            claim_grace_seconds: rollback.claim_grace_seconds,
            deadline_seconds: rollback.deadline_seconds,
            max_failed: rollback.max_failed,
            discard_data: rollback.discard_data,
        };
        self.move_to(name, &update, terms, |catalog| earlier(catalog, rollback.to))
    }

    /// Pauses, resumes or aborts a rollout. Returns the catalog, and whether it was changed. Only the revision and who asks are used of the
    /// conditions.
    pub fn change_rollout(
        &self,
        name: &Name,
        action: RolloutAction,
        terms: CatalogChangeTerms,
    ) -> Result<(Catalog, bool), HostError> {
        let ((mut catalog, is_changed), written) = self.objects.change_at(|changes| {
            let mut catalog = self.found(changes, name, terms.expected, terms.by)?;
            let Some(rollout) = &mut catalog.rollout else {
                let message = format!("catalog {name}: no rollout is in progress");
                return Err(HostError::new(ErrorCode::Conflict, message));
            };
            let was_paused = std::mem::replace(&mut rollout.paused, action == RolloutAction::Pause);
            let is_changed = rollout.paused != was_paused || action == RolloutAction::Abort;
            if action == RolloutAction::Abort {
                catalog.rollout = None;
            }
            if is_changed {
                changes.put(name.as_str(), &catalog);
            }
            Ok::<_, HostError>((catalog, is_changed))
        })?;
        catalog.revision = written.map_or(catalog.revision, |revision| revision.0);
        Ok((catalog, is_changed))
    }

    /// Ends a rollout, unless the catalog has changed since it was read.
    pub fn end_rollout(&self, name: &Name, seen: Revision) -> Result<(), HostError> {
        self.objects.change(|changes| {
            if let Some(found) = changes.get::<Catalog>(name.as_str())?.filter(|found| found.revision == seen)
            {
                changes.put(name.as_str(), &Catalog { rollout: None, ..found.value });
            }
            Ok(())
        })
    }

    /// Updates a catalog to the image that `choose` returns, instead of the one in `update`. The revision, the
    /// dry run and the pause of the conditions are used.
    fn move_to(
        &self,
        name: &Name,
        update: &CatalogUpdate,
        terms: CatalogChangeTerms,
        choose: impl Fn(&Catalog) -> Result<ImageRef, HostError>,
    ) -> Result<(Catalog, Catalog), HostError> {
        let moved = self.objects.change_at(|changes| {
            let mut catalog = self.found(changes, name, terms.expected, terms.by)?;
            let before = catalog.clone();
            terms.by.note(&mut catalog);
            let mut spec = catalog.spec.clone();
            spec.image = choose(&catalog)?;
            self.check(name, &spec)?;
            check(&catalog, &spec, update.discard_data)?;
            let stays = spec.keeps_writes() && spec.image.name == catalog.spec.image.name;
            let claim_grace_seconds = update.claim_grace_seconds;
            catalog.spec.image = spec.image;
            let replaced = catalog.rollout.take();
            let version = self.version(changes, &catalog.spec.image)?;
            let mut notes = take(&mut catalog, version);
            catalog.rollout = match update.rollout {
                RolloutStrategy::NextStart => None,
                _ if stays => {
                    let why = "its disks keep what is written and stay on their version, so that no machine is to be restarted: roll out at the next start";
                    return Err(HostError::new(ErrorCode::Conflict, format!("catalog {name}: {why}")));
                }
                strategy => {
                    let image = catalog.spec.image.name.clone();
                    Some(Rollout {
                        strategy,
                        claim_grace_seconds,
                        deadline_seconds: update.deadline_seconds.unwrap_or(DEADLINE_SECONDS_DEFAULT),
                        max_failed: update.max_failed,
                        paused: terms.paused,
                        since: Timestamp::now(),
                        image,
                        version,
                        progress: None,
                    })
                }
            };
            notes.extend(replaced.map(|old| {
                let since = old.since.strftime("%Y-%m-%d %H:%M:%S");
                let (image, version, strategy) = (old.image, old.version, old.strategy);
                format!("this replaces the rollout of {image}:{version} ({strategy}) of {since}, which had not ended")
            }));
            self.check_streamed(changes, &catalog, terms.dry_run)?;
            match terms.dry_run || catalog == before {
                true => changes.forget(),
                false => changes.put(name.as_str(), &catalog),
            }
            Ok::<_, HostError>((catalog, before, notes))
        });
        let ((mut catalog, before, notes), written) = self.keep_or_undo(moved, terms.dry_run)?;
        // The revision is the one that was written: a rollout with nothing to do has ended already.
        catalog.revision = written.map_or(catalog.revision, |revision| revision.0);
        catalog.warnings.extend(notes);
        Ok((catalog, before))
    }
}

/// Moves the catalogs that follow an image to the version that is being published.
pub(crate) fn follow(changes: &mut Changes, image: &Name, version: u32) -> Result<(), HostError> {
    let published = changes.get::<ImageVersion>(&crate::images::key(image, version))?;
    for catalog in changes.list_readable_below::<Catalog>("")? {
        let mut catalog = catalog.value;
        if follows(&catalog, image) && catalog.version != version {
            published.iter().try_for_each(|published| check_mode(&catalog, &published.value))?;
            take(&mut catalog, version);
            changes.put(catalog.name.as_str(), &catalog);
        }
    }
    Ok(())
}

/// Whether a catalog takes each version of the image that is published.
pub(crate) fn follows(catalog: &Catalog, image: &Name) -> bool {
    catalog.spec.image.name == *image && catalog.spec.image.version.is_none()
}

/// Sets the version that machines take at their next start, and adds it to the history. A rollout in progress brings it
/// from then on. Returns notes.
pub(crate) fn take(catalog: &mut Catalog, version: u32) -> Vec<String> {
    let image = catalog.spec.image.name.clone();
    let mut notes = Vec::new();
    let is_last = |entry: &HistoryEntry| (&entry.image, entry.version) == (&image, version);
    if !catalog.history.last().is_some_and(is_last) {
        if catalog.spec.keeps_writes() {
            notes.push("disks that keep what is written stay on their version until they are reset".into());
        }
        catalog.history.push(HistoryEntry { image: image.clone(), version, since: Timestamp::now() });
        shorten(&mut catalog.history, catalog.spec.keeps_writes());
    }
    catalog.version = version;
    if let Some(rollout) = &mut catalog.rollout
        && (&rollout.image, rollout.version) != (&image, version)
    {
        notes.push(format!("the rollout in progress continues with {image}:{version}"));
        (rollout.image, rollout.version) = (image, version);
    }
    notes
}

/// Removes the oldest entries; a version that no entry names can be deleted. If disks stay on their version, only entries
/// that a later one repeats are removed, since a disk may use any other.
fn shorten(history: &mut Vec<HistoryEntry>, disks_stay: bool) {
    while history.len() > MOST_ENTRIES {
        let repeated = |entry: &HistoryEntry, later: &[HistoryEntry]| {
            later.iter().any(|other| (&other.image, other.version) == (&entry.image, entry.version))
        };
        let may_go = (0..history.len()).find(|&n| !disks_stay || repeated(&history[n], &history[n + 1..]));
        let Some(oldest) = may_go else { return };
        history.remove(oldest);
    }
}

/// Chooses the target of a rollback: this version, or the one before the current one first appeared, so that a repeated
/// rollback goes further back.
fn earlier(catalog: &Catalog, to: Option<u32>) -> Result<ImageRef, HostError> {
    let refuse = |code, why: String| Err(HostError::new(code, format!("catalog {}: {why}", catalog.name)));
    let (image, version) = (&catalog.spec.image.name, catalog.version);
    let chosen = match to {
        Some(to) if to == version => {
            return refuse(ErrorCode::Conflict, format!("it has {image}:{version} already"));
        }
        Some(to) => {
            let line = || catalog.history.iter().rev().filter(|entry| entry.image == *image);
            let any = || catalog.history.iter().rev().find(|entry| entry.version == to);
            line().find(|entry| entry.version == to).or_else(any)
        }
        None => {
            let is_present = |entry: &HistoryEntry| (&entry.image, entry.version) == (image, version);
            let first = catalog.history.iter().position(is_present).unwrap_or(0);
            first.checked_sub(1).map(|before| &catalog.history[before])
        }
    };
    let Some((entry, number)) = chosen.and_then(|entry| Some((entry, NonZeroU32::new(entry.version)?)))
    else {
        let had: Vec<String> =
            catalog.history.iter().map(|entry| format!("{}:{}", entry.image, entry.version)).collect();
        let what = to.map_or("nothing before the present version".into(), |to| format!("no version {to}"));
        return refuse(ErrorCode::NotFound, format!("{what} is in its history: {}", had.join(", ")));
    };
    Ok(ImageRef { name: entry.image.clone(), version: Some(number) })
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn catalog(settings: &str, versions: &[u32]) -> Catalog {
        let mut catalog: Catalog = serde_json::from_value(json!({
            "name": "desk", "version": versions[0], "history": [], "warnings": [], "created": "2026-01-01T00:00:00Z",
            "spec": serde_json::from_str::<serde_json::Value>(&format!(r#"{{"image": "debian"{settings}}}"#)).unwrap(),
        }))
        .unwrap();
        versions.iter().for_each(|version| _ = take(&mut catalog, *version));
        catalog
    }

    fn versions(catalog: &Catalog) -> Vec<u32> {
        catalog.history.iter().map(|entry| entry.version).collect()
    }

    #[test]
    fn rolling_back_again_goes_further_back() {
        let mut catalog = catalog("", &[1, 2, 3]);
        for expected in [2, 1] {
            let to = earlier(&catalog, None).unwrap();
            assert_eq!(to.to_string(), format!("debian:{expected}"));
            catalog.spec.image = to;
            take(&mut catalog, expected);
        }
        assert_eq!(versions(&catalog), [1, 2, 3, 2, 1]);
        let error = earlier(&catalog, None).unwrap_err();
        assert!(error.message.contains("nothing before") && error.message.contains("debian:3"), "{error}");
        assert_eq!(earlier(&catalog, Some(3)).unwrap().to_string(), "debian:3");
        assert_eq!(earlier(&catalog, Some(1)).unwrap_err().code, ErrorCode::Conflict);
        assert!(earlier(&catalog, Some(9)).unwrap_err().message.contains("no version 9"));
    }

    #[test]
    fn a_history_is_bounded() {
        let many: Vec<u32> = (1..=100).collect();
        assert_eq!(versions(&catalog("", &many)), (69..=100).collect::<Vec<_>>());
        // A disk may have stayed on any of them.
        let keeps = r#", "type": "dedicated""#;
        assert_eq!(versions(&catalog(keeps, &many)), many);
        let to_and_fro: Vec<u32> = (0..100).map(|n| [1, 2, 3, 2][n % 4]).collect();
        let kept = versions(&catalog(keeps, &to_and_fro));
        assert_eq!((kept.len(), kept.last()), (MOST_ENTRIES, to_and_fro.last()));
        assert!([1, 2, 3].iter().all(|version| kept.contains(version)), "{kept:?}");
    }

    #[test]
    fn the_same_version_is_entered_once() {
        let mut catalog = catalog("", &[1, 1, 2, 2]);
        assert_eq!(versions(&catalog), [1, 2]);
        let image = catalog.spec.image.name.clone();
        catalog.rollout = Some(Rollout {
            strategy: RolloutStrategy::Now,
            claim_grace_seconds: None,
            deadline_seconds: 600,
            max_failed: 0,
            paused: false,
            since: Timestamp::now(),
            image,
            version: 2,
            progress: None,
        });
        assert_eq!(take(&mut catalog, 2), [""; 0]);
        assert!(take(&mut catalog, 3)[0].contains("continues with debian:3"));
        assert_eq!(catalog.rollout.unwrap().version, 3);
    }
}
