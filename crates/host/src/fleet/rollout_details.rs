//! The rollout of a fleet's catalog for people and programs, from the records and from what the placer waits for. Decides nothing.
//!
//! Invariant: what is said of hosts is what their shares and reports say, so that each daemon says the same.

use spillway_api::{FleetRollout, FleetRolloutState, Name, PlacerReport};
use spillway_fleet::records::CatalogRecord;
use spillway_fleet::rollout::{current, is_done};
use spillway_fleet::view::FleetView;

/// Describes the last rollout of a catalog.
pub(super) fn rollout(
    view: &FleetView,
    name: &Name,
    catalog: &CatalogRecord,
    known: &PlacerReport,
) -> Option<FleetRollout> {
    let record = &current(view, name, catalog)?.value;
    let (mut hosts, mut hosts_started, mut hosts_done, mut failed) = (0, 0, 0, 0u32);
    for (host, shares) in &view.shares {
        let Some(share) = shares.get(name).map(|share| &share.value) else { continue };
        hosts += 1;
        if !record.to.is_in(share, catalog) {
            continue;
        }
        hosts_started += 1;
        let status = view.statuses.get(host).and_then(|status| status.value.catalogs.get(name));
        hosts_done += u32::from(is_done(catalog, record, share, status));
        let taken = status.filter(|status| record.to.is_taken(status));
        failed = failed.saturating_add(taken.map_or(0, |status| status.failed));
    }
    let places = view.meta.as_ref().is_some_and(|meta| meta.value.placer);
    let waits = || match record.state {
        FleetRolloutState::Prefetch | FleetRolloutState::Running if !places => Some(
            "the placer is off: no host gets the version from Spillway ('spillway fleet placer on')".into(),
        ),
        FleetRolloutState::Prefetch | FleetRolloutState::Running => known.waits.get(name).cloned(),
        _ => None,
    };
    let waves = record.waves(&catalog.spec.fleet.waves);
    Some(FleetRollout {
        state: record.state,
        reason: record.why.clone().or_else(waits),
        from_image: record.from.image.clone(),
        from_version: record.from.version,
        to_image: record.to.image.clone(),
        to_version: record.to.version,
        wave: record.wave.saturating_add(1).min(waves),
        waves,
        hosts_started,
        hosts_done,
        hosts,
        failed,
        max_failed: record.most_failed(),
        deadline_seconds: record.deadline_seconds,
        since: record.since,
        changed: record.changed,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};
    use spillway_fleet::view::{Entry, Update};

    fn told(places: bool, state: &str, waits: &str) -> FleetRollout {
        let share =
            |version: u32| json!({ "count": 2, "version": version, "generation": 4, "image": "debian" });
        let status = |version: u32, updated: u32, failed: u32| {
            let desk = json!({ "generation": 4, "version": version, "count": 2, "ready": 2, "updated": updated,
                "failed": failed });
            let budget = json!({ "guarantee_bytes": 1, "limit_bytes": 1, "memory_bytes": 1, "vcpus": 1 });
            json!({ "budget": budget, "catalogs": { "desk": desk } })
        };
        let version = |version: u32| json!({ "image": "debian", "version": version });
        let (begun, spec) =
            ("2026-01-01T00:00:00Z", json!({ "image": "debian", "count": 6, "waves": ["1", "2"] }));
        let records: [(&str, Value); 9] = [
            ("meta", json!({ "format": 1, "fleet_id": "f", "created": begun, "placer": places })),
            (
                "catalogs/desk",
                json!({ "spec": spec, "version": 3, "generation": 4, "history": [], "created": begun }),
            ),
            (
                "rollouts/desk",
                json!({ "from": version(2), "to": version(3), "generation": 4, "state": state, "wave": 1,
                "deadline_seconds": 600, "since": begun, "changed": begun }),
            ),
            ("share/a/desk", share(3)),
            ("share/b/desk", share(3)),
            ("share/c/desk", share(2)),
            ("status/a", status(3, 2, 0)),
            ("status/b", status(3, 0, 1)),
            ("status/c", status(2, 2, 2)),
        ];
        let entry = |value: Value| Entry { value: value.to_string().into_bytes(), created: 1, modified: 1 };
        let entries = records.map(|(key, value)| (key.to_owned(), entry(value)));
        let mut view = FleetView::default();
        view.apply(Update::Whole(1, entries.into()));
        assert!(view.unreadable.is_empty(), "{:?}", view.unreadable);
        let desk: Name = "desk".parse().unwrap();
        let waits = [(desk.clone(), waits.to_owned())];
        let known = PlacerReport { waits: waits.into(), ..PlacerReport::default() };
        rollout(&view, &desk, &view.catalogs[&desk].value, &known).unwrap()
    }

    #[test]
    fn a_rollout_is_described_by_shares_and_reports() {
        let told = told(true, "running", "host 'b' is slow");
        assert_eq!((told.hosts_done, told.hosts_started, told.hosts, told.failed), (1, 2, 3, 1));
        assert_eq!((told.wave, told.waves, told.from_version, told.to_version), (2, 3, 2, 3));
        assert_eq!(told.reason.as_deref(), Some("host 'b' is slow"));
    }

    #[test]
    fn only_what_runs_waits() {
        assert_eq!(told(true, "paused", "host 'b' is slow").reason, None);
        assert!(told(false, "prefetch", "-").reason.unwrap().contains("the placer is off"));
    }
}
