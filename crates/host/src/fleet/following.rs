//! The records of the fleet as they come: the view that the daemon has of them, and the list of members that its door knows.
//!
//! Owns the order in which both change. Invariant: a list of records is looked at before anything acts on it, and hosts of another fleet are
//! never members.

use super::service::{FleetService, locked};
use spillway_fleet::records::FORMAT;
use spillway_fleet::view::{FleetView, Update};

impl FleetService {
    /// Takes the records as they come.
    pub(super) async fn follow(self) {
        let mut updates = self.store().follow();
        while let Some(update) = updates.recv().await {
            self.take(update);
        }
    }

    fn take(&self, update: Update) {
        let is_of_members =
            |key: &str| key.starts_with("alive/") || key.starts_with("hosts/") || key == "meta";
        let has_members = match &update {
            Update::Whole(..) => true,
            Update::Changes(_, changes) => changes.iter().any(|(key, _)| is_of_members(key)),
        };
        let joined = locked(&self.0.fleet_id).clone();
        match update {
            Update::Whole(..) => {
                let mut whole = FleetView::default();
                whole.apply(update);
                self.0.seen.look(&whole, joined.as_deref());
                self.0.view.send_replace(whole);
            }
            Update::Changes(..) => self.0.view.send_modify(|view| {
                view.apply(update);
                self.0.seen.follow(view, joined.as_deref());
            }),
        }
        let view = self.view();
        if has_members && is_of_fleet(&view, joined.as_deref()) {
            self.0.door.members.follow(&view);
        }
    }
}

/// Whether the hosts of these records may be members: they are of the fleet that the host has joined, or that it is about to join. Others
/// change nothing, and neither do records that are gone.
fn is_of_fleet(view: &FleetView, joined: Option<&str>) -> bool {
    let is_own = |id: &str| joined.is_none_or(|joined| joined == id);
    view.meta.as_ref().is_some_and(|meta| meta.value.format == FORMAT && is_own(&meta.value.fleet_id))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;
    use spillway_fleet::view::Entry;

    #[test]
    fn hosts_of_another_fleet_are_no_members() {
        let of = |format: u32| {
            let meta = json!({ "format": format, "fleet_id": "f", "created": "2026-01-01T00:00:00Z", "placer": true });
            let entry = Entry { value: meta.to_string().into_bytes(), created: 1, modified: 1 };
            let mut view = FleetView::default();
            view.apply(Update::Whole(1, vec![("meta".into(), entry)]));
            view
        };
        assert!(is_of_fleet(&of(FORMAT), Some("f")) && is_of_fleet(&of(FORMAT), None));
        assert!(!is_of_fleet(&of(FORMAT), Some("another")) && !is_of_fleet(&of(FORMAT + 1), Some("f")));
        assert!(!is_of_fleet(&FleetView::default(), Some("f")) && !is_of_fleet(&FleetView::default(), None));
    }
}
