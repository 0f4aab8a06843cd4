//! Names that hosts are to give up. Owns since when: one that is claimed may stay for hours, and others go within seconds.
//!
//! Invariant: whoever has not seen a name leave counts it as one that has just begun to.

use crate::Moment;
use crate::placement::Place;
use crate::records::NameState;
use crate::transaction::Revision;
use crate::view::FleetView;
use spillway_api::Name;
use std::collections::BTreeMap;

#[derive(Debug, Default)]
pub(super) struct Leaves {
    /// By host and machine: the revision that wrote the name, and when that was first seen.
    since: BTreeMap<Place, (Revision, Moment)>,
}

impl Leaves {
    /// Takes the records as they are now.
    pub(super) fn observe(&mut self, view: &FleetView, now: Moment) {
        let before = std::mem::take(&mut self.since);
        for (machine, record) in view.named.values().flatten() {
            let Some(host) = record.value.host.as_ref().filter(|_| record.value.state == NameState::Leaving)
            else {
                continue;
            };
            let place = (host.clone(), machine.clone());
            let known = before.get(&place).filter(|(written, _)| *written == record.modified);
            self.since.insert(place, known.copied().unwrap_or((record.modified, now)));
        }
    }

    /// Time in milliseconds for which a host has been told to give a name up, at least.
    pub(super) fn for_ms(&self, host: &Name, machine: &Name, now: Moment) -> u64 {
        let since = self.since.get(&(host.clone(), machine.clone()));
        since.map_or(0, |(_, since)| now.since_ms(*since))
    }
}
