//! Whether etcd has older records than this host has acted on: then it was restored from a backup, and would have shares of the past
//! carried out. Owns what the host has seen, and the mark that it holds still; both are in its records.
//!
//! Invariant: what the host acts on is recorded before it does so. Once older records were found the host holds still until somebody has
//! accepted them, however far the revision has come since.

use super::record::{FleetMembership, RestoredRecords};
use crate::error::HostError;
use crate::store::Objects;
use crate::work::blocking;
use spillway_api::ErrorCode;
use spillway_fleet::transaction::Revision;
use spillway_fleet::view::FleetView;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// What the host has seen of the records.
pub(super) struct SeenRecords {
    objects: Objects,
    state: Mutex<SeenState>,
}

struct SeenState {
    /// Highest revision that was acted on, as recorded.
    highest: Revision,
    /// Highest revision at which this daemon has seen records of the host's fleet.
    seen: Revision,
    /// Older records that were found.
    restored: Option<RestoredRecords>,
    /// Whether that is recorded.
    is_recorded: bool,
}

impl SeenRecords {
    /// What an earlier daemon has left.
    pub fn new(objects: Objects, record: &FleetMembership) -> SeenRecords {
        let FleetMembership { highest_revision: highest, restored, .. } = *record;
        let state = SeenState { highest, seen: highest, restored, is_recorded: restored.is_some() };
        SeenRecords { objects, state: Mutex::new(state) }
    }

    /// Looks at a list of all records, before anything acts on it. `joined` is the identity of the host's fleet.
    pub fn look(&self, whole: &FleetView, joined: Option<&str>) {
        let mut state = self.state();
        let seen = state.highest.max(state.seen);
        if is_own(whole, joined) && whole.revision < seen && state.restored.is_none() {
            state.restored = Some(RestoredRecords { found_revision: whole.revision, seen_revision: seen });
        }
        drop(state);
        self.follow(whole, joined);
    }

    /// Notes how far the records have come.
    pub fn follow(&self, view: &FleetView, joined: Option<&str>) {
        if is_own(view, joined) {
            let mut state = self.state();
            state.seen = state.seen.max(view.revision);
        }
    }

    /// Older records that were found, because of which the host holds still.
    pub fn restored(&self) -> Option<RestoredRecords> {
        self.state().restored
    }

    /// Records that the host holds still, if it does and that is not recorded yet. What fails is tried again with the next call.
    pub async fn record_hold(&self) {
        let restored = {
            let state = self.state();
            state.restored.filter(|_| !state.is_recorded)
        };
        let Some(restored) = restored else { return };
        let objects = self.objects.clone();
        if let Ok(Ok(())) = blocking(move || FleetMembership::hold(&objects, restored)).await {
            self.state().is_recorded = true;
        }
    }

    /// Records that the host is about to act on records of this revision.
    ///
    /// # Errors
    /// It cannot be recorded, or the host holds still: it must not act.
    pub async fn act_on(&self, revision: Revision) -> Result<(), HostError> {
        if let Some(restored) = self.restored() {
            return Err(HostError::new(ErrorCode::Conflict, restored.to_string()));
        }
        if revision > self.state().highest {
            let objects = self.objects.clone();
            let broken = |e| HostError::new(ErrorCode::Internal, format!("a fault of the daemon ({e})"));
            blocking(move || FleetMembership::act_on(&objects, revision)).await.map_err(broken)??;
            let mut state = self.state();
            state.highest = state.highest.max(revision);
        }
        Ok(())
    }

    fn state(&self) -> MutexGuard<'_, SeenState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Whether records are of the host's fleet. Those of another one, or none, are refused in any case. They say nothing about this one, and
/// their revisions may be those of another etcd.
fn is_own(view: &FleetView, joined: Option<&str>) -> bool {
    view.meta.as_ref().is_some_and(|meta| Some(&*meta.value.fleet_id) == joined)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::machines::testing::TestHost;
    use crate::resources::budget::NO_LIMITS;
    use serde_json::json;
    use spillway_fleet::view::{Entry, Update};

    fn whole(revision: Revision, fleet_id: &str) -> FleetView {
        let meta =
            json!({ "format": 1, "fleet_id": fleet_id, "created": "2026-01-01T00:00:00Z", "placer": true });
        let entry = Entry { value: meta.to_string().into_bytes(), created: 1, modified: 1 };
        let mut view = FleetView::default();
        view.apply(Update::Whole(revision, vec![("meta".into(), entry)]));
        view
    }

    #[tokio::test]
    async fn older_records_are_noticed_by_this_daemon_and_by_the_next_one() {
        let host = TestHost::new(NO_LIMITS);
        let open = || {
            FleetMembership::open(&host.objects, &"site".parse().unwrap(), &"a".parse().unwrap(), "boot")
                .unwrap()
        };
        let seen = SeenRecords::new(host.objects.clone(), &open());
        seen.look(&whole(3, "f"), Some("f"));
        seen.act_on(10).await.unwrap();
        seen.act_on(8).await.unwrap();
        assert_eq!(open().highest_revision, 10);
        seen.look(&whole(10, "f"), Some("f"));
        seen.look(&whole(2, "another"), Some("f"));
        seen.look(&FleetView { revision: 1, ..FleetView::default() }, Some("f"));
        // Another etcd, which has gone further, and then this one again.
        seen.look(&whole(500, "another"), Some("f"));
        seen.follow(&whole(501, "another"), Some("f"));
        seen.look(&FleetView { revision: 600, ..FleetView::default() }, Some("f"));
        seen.look(&whole(11, "f"), Some("f"));
        assert_eq!(seen.restored(), None, "what is no record of the fleet says nothing");
        // The next daemon finds it, and the one after that does, too, when the revision has grown.
        let next = SeenRecords::new(host.objects.clone(), &open());
        next.look(&whole(9, "f"), Some("f"));
        let restored = RestoredRecords { found_revision: 9, seen_revision: 10 };
        assert_eq!(next.restored(), Some(restored));
        assert!(next.act_on(11).await.unwrap_err().message.contains("restored from a backup"));
        next.record_hold().await;
        let third = SeenRecords::new(host.objects.clone(), &open());
        third.look(&whole(50, "f"), Some("f"));
        assert_eq!(third.restored(), Some(restored));
        // One that follows the records has seen more than it has acted on.
        seen.follow(&whole(13, "f"), Some("f"));
        seen.look(&whole(12, "f"), Some("f"));
        assert_eq!(seen.restored().map(|found| found.seen_revision), Some(13));
    }
}
