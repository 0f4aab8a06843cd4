//! What a placer remembers of rollouts: hosts that were done once, machines that had failed before, the last progress.
//!
//! Owns its memory. Invariant: what is remembered is of one rollout; another one, or the same after it was resumed, begins anew.

use super::{current, is_done};
use crate::Moment;
use crate::keys::Key;
use crate::records::{CatalogRecord, RolloutRecord, ShareRecord, StatusRecord};
use crate::view::FleetView;
use spillway_api::{FleetRolloutState, Name};
use std::collections::{BTreeMap, BTreeSet};

/// Rollouts that a placer follows, by catalog.
pub type Trackers = BTreeMap<Name, Tracker>;

/// What a placer remembers of a rollout.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Tracker {
    /// Generation of the catalog that has asked for it, and how often it was resumed.
    of: (u64, u32),
    /// Its state and wave when it was last looked at.
    at: Option<(FleetRolloutState, u32)>,
    /// Hosts that were seen done with the version.
    pub(super) done: BTreeSet<Name>,
    /// Machines that had failed on a host before the version reached it, and have perhaps not been ready since. One that is started again has
    /// not failed for a while, so that only ready ones tell that there are fewer.
    pub(super) failed_before: BTreeMap<Name, u32>,
    /// The most that was seen of each host: 1 for the version, 1 for its share, and its updated machines.
    best: BTreeMap<Name, u32>,
    /// Last progress.
    pub(super) moved: Moment,
    /// Whether a host had machines of the catalog when somebody last looked.
    is_anywhere: bool,
    /// Since when it is followed.
    begun: Moment,
    /// Hosts that had nothing to restart when the version had not reached them yet.
    calm: BTreeSet<Name>,
    /// Hosts that had all machines ready with the version when somebody asked for it.
    pub(super) idle: BTreeSet<Name>,
    /// Hosts that may restart machines, and those that may not any more, with the time since when it is so.
    running: BTreeSet<Name>,
    stopped: BTreeMap<Name, Moment>,
}

/// Time after which a host has done, and reported, what it was told: it looks every 2 s, and reports every 10 s.
const SETTLED_MS: u64 = 30_000;

/// Where shares are, by host and catalog.
const SHARES: &str = "share/";

impl Tracker {
    fn of(record: &RolloutRecord, now: Moment) -> Tracker {
        Tracker { of: (record.generation, record.resumes), moved: now, begun: now, ..Tracker::default() }
    }

    /// Takes what hosts have reported.
    pub(super) fn observe(
        &mut self,
        view: &FleetView,
        name: &Name,
        catalog: &CatalogRecord,
        record: &RolloutRecord,
        now: Moment,
    ) {
        let at = Some((record.state, record.wave));
        if self.at != at || !record.brings() && record.state != FleetRolloutState::Running {
            (self.at, self.moved) = (at, now);
        }
        // Of a share that cannot be read nobody knows; that of a host that was removed, or is declared dead, may stay for ever.
        let is_there = |host: &Name| {
            let dead = view.hosts.get(host).and_then(|record| record.value.dead_epoch);
            let is_dead =
                dead.is_some_and(|dead| view.alive.get(host).is_none_or(|alive| alive.created <= dead));
            view.has_host(host) && !is_dead
        };
        let end = format!("/{name}");
        let unknown = view.unreadable.range(SHARES.to_owned()..);
        let mut unknown = unknown.map(|(key, _)| key).take_while(|key| key.starts_with(SHARES));
        let is_unknown = unknown.any(|key| {
            key.ends_with(&end) && matches!(key.parse(), Ok(Key::Share(host, _)) if is_there(&host))
        });
        let had = std::mem::replace(&mut self.is_anywhere, is_unknown);
        for (host, shares) in &view.shares {
            let Some(share) = shares.get(name) else { continue };
            self.is_anywhere = true;
            let status = view.statuses.get(host).map(|status| &status.value);
            self.observe_host(host, name, &share.value, status, catalog, record, now);
        }
        // As long as there are no machines, nobody can do anything.
        if !had || !self.is_anywhere {
            self.moved = now;
        }
    }

    #[expect(clippy::too_many_arguments, reason = "a host, its records, and the rollout's")]
    fn observe_host(
        &mut self,
        host: &Name,
        name: &Name,
        share: &ShareRecord,
        status: Option<&StatusRecord>,
        catalog: &CatalogRecord,
        record: &RolloutRecord,
        now: Moment,
    ) {
        let status = status.and_then(|status| status.catalogs.get(name));
        let has_taken = status.is_some_and(|status| record.to.is_taken(status));
        let next = status.and_then(|status| status.next.as_ref());
        let has_version = next.is_some_and(|next| next.is_here && next.of == record.to);
        let is_started = record.to.is_in(share, catalog);
        if is_started && share.generation < record.generation && is_done(catalog, record, share, status) {
            self.idle.insert(host.clone());
        }
        if !is_started {
            self.done.remove(host);
            self.idle.remove(host);
            if is_done(catalog, record, share, status) {
                self.calm.insert(host.clone());
            }
        } else if is_done(catalog, record, share, status) {
            self.done.insert(host.clone());
        }
        if is_started && share.batch != Some(0) {
            self.running.insert(host.clone());
            self.stopped.remove(host);
        } else if self.running.remove(host) {
            self.stopped.insert(host.clone(), now);
        }
        if let Some(status) = status {
            let away = status.count.saturating_sub(status.ready).saturating_sub(status.off);
            match self.failed_before.get_mut(host).filter(|_| has_taken) {
                Some(before) => *before = away.min(*before),
                None if has_taken => {}
                None => _ = self.failed_before.insert(host.clone(), status.failed),
            }
        }
        let updated = status.filter(|_| has_taken).map_or(0, |status| status.updated);
        let through = updated + u32::from(has_taken) + u32::from(is_started) + u32::from(has_version);
        let best = self.best.entry(host.clone()).or_default();
        if through > *best {
            (*best, self.moved) = (through, now);
        }
    }
}

impl Tracker {
    /// Whether a host was seen to lose the permission to restart machines.
    pub(super) fn has_stopped(&self, host: &Name) -> bool {
        self.stopped.contains_key(host)
    }

    /// For how long reports may be older than the rollout, or its last `resume`, in milliseconds.
    pub(super) fn young_ms(&self, now: Moment) -> Option<u64> {
        SETTLED_MS.checked_sub(now.since_ms(self.begun)).filter(|left| *left > 0)
    }

    /// How long machines of a host that may restart none now may be unavailable without having been reported, in milliseconds.
    pub(super) fn unsettled_ms(&self, host: &Name, now: Moment) -> Option<u64> {
        let since = match self.stopped.get(host) {
            Some(stopped) => *stopped,
            None if self.calm.contains(host) => return None,
            None => self.begun,
        };
        SETTLED_MS.checked_sub(now.since_ms(since)).filter(|left| *left > 0)
    }
}

/// Hosts of the waves before the present one: a wave begins when all of them are done, and whoever is done stays so, even if nobody has
/// seen it who decides now.
fn done_before(
    view: &FleetView,
    name: &Name,
    catalog: &CatalogRecord,
    record: &RolloutRecord,
) -> BTreeSet<Name> {
    let shares = view.shares.iter().filter_map(|(host, shares)| Some((host, &shares.get(name)?.value)));
    let is_before = |share: &ShareRecord| record.to.is_in(share, catalog) && share.wave < record.wave;
    shares.filter(|(_, share)| is_before(share) && !record.at_once).map(|(host, _)| host.clone()).collect()
}

/// Takes what hosts have reported about rollouts.
pub(crate) fn observe(trackers: &mut Trackers, view: &FleetView, now: Moment) {
    trackers.retain(|name, _| view.rollouts.contains_key(name) && view.catalogs.contains_key(name));
    for (name, catalog) in &view.catalogs {
        let Some(rollout) = current(view, name, &catalog.value).map(|rollout| &rollout.value) else {
            trackers.remove(name);
            continue;
        };
        if !rollout.is_open() {
            trackers.remove(name);
            continue;
        }
        let is_same = |tracker: &&mut Tracker| tracker.of == (rollout.generation, rollout.resumes);
        if trackers.get_mut(name).filter(is_same).is_none() {
            let done = done_before(view, name, &catalog.value, rollout);
            trackers.insert(name.clone(), Tracker { done, ..Tracker::of(rollout, now) });
        }
        let tracker = trackers.get_mut(name).expect("it is there");
        tracker.observe(view, name, &catalog.value, rollout, now);
    }
}
