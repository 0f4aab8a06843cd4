//! Hosts that have refused what their shares say. Owns for how long each is passed over.
//!
//! Invariant: a report counts once, and only if the host made it after the share was written.

use crate::Moment;
use crate::placement::Place;
use crate::transaction::Revision;
use crate::view::FleetView;
use std::collections::BTreeMap;

/// Time for which a host is passed over after its first refusal. Each further one makes it twice as long.
const FIRST_MS: u64 = 10_000;
/// Longest time for which a host is passed over.
const MOST_MS: u64 = 600_000;

#[derive(Debug)]
struct Refusal {
    /// Revision of the report.
    reported: Revision,
    /// Machines that it was to have. It is over when the host has as many: it has taken nothing if only its share was lowered.
    count: u32,
    wait_ms: u64,
    until: Moment,
}

#[derive(Debug, Default)]
pub(super) struct Refusals {
    all: BTreeMap<Place, Refusal>,
}

impl Refusals {
    /// Takes what hosts have reported.
    pub(super) fn observe(&mut self, view: &FleetView, now: Moment) {
        self.all.retain(|(host, catalog), refusal| {
            let is_known = view.hosts.contains_key(host) && view.catalogs.contains_key(catalog);
            is_known && now.since_ms(refusal.until) < MOST_MS
        });
        for (host, status) in &view.statuses {
            for (catalog, report) in &status.value.catalogs {
                let share = view.share(host, catalog);
                let Some(share) = share.filter(|share| status.modified > share.modified) else { continue };
                let (share, place) = (&share.value, || (host.clone(), catalog.clone()));
                if report.refuses(share.generation) && share.count > report.count {
                    self.refuse(place(), share.count, status.modified, now);
                }
                let has_taken = report.refused.is_none() && share.generation == report.generation;
                let is_over = |refusal: &Refusal| has_taken && report.count >= refusal.count.max(share.count);
                if !self.all.is_empty() && self.all.get(&place()).is_some_and(is_over) {
                    self.all.remove(&place());
                }
            }
        }
    }

    fn refuse(&mut self, place: Place, count: u32, reported: Revision, now: Moment) {
        let known = self.all.get(&place);
        // Until the share has been lowered, the host repeats what it has said.
        if known.is_some_and(|known| known.reported >= reported || known.until > now) {
            return;
        }
        let wait_ms = known.map_or(FIRST_MS, |known| known.wait_ms.saturating_mul(2).min(MOST_MS));
        self.all.insert(place, Refusal { reported, count, wait_ms, until: now.after_ms(wait_ms) });
    }

    /// Shares whose hosts are passed over now, and for how many milliseconds yet.
    pub(super) fn passed_over(&self, now: Moment) -> BTreeMap<Place, u64> {
        let open = self.all.iter().filter(|(_, refusal)| refusal.until > now);
        open.map(|(place, refusal)| (place.clone(), refusal.until.since_ms(now))).collect()
    }

    /// The next moment at which a host is not passed over any more.
    pub(super) fn next(&self, now: Moment) -> Option<Moment> {
        self.all.values().map(|refusal| refusal.until).filter(|until| *until > now).min()
    }
}
