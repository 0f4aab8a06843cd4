//! The placer: makes transactions of what placing decides, as long as this daemon is elected. Owns what must be remembered between two
//! steps: what it has seen of hosts, what it has written and not seen yet, which hosts have refused.
//!
//! It never waits and never asks anybody: who calls it carries out its actions, and tells how they ended.
//!
//! Invariant: each transaction compares the term of the placer, and all that it was decided on and that may be otherwise by now.

mod bundle;
mod flights;
mod leaves;
mod names;
mod refusals;
mod report;

pub use report::{HostStatus, PlacerStatus};

use crate::Moment;
use crate::election::{Identity, term};
use crate::keys::Key;
use crate::liveness::{Ask, Liveness, StoreHealth};
use crate::placement::{Plan, Situation, plan};
use crate::records::{CatalogRecord, HostRecord};
use crate::rollout::{self, Trackers};
use crate::transaction::{Comparison, Outcome, Revision, Transaction, Write};
use crate::view::{FleetView, Versioned};
use bundle::{Bundle, bundles, in_office, rollout_bundle};
use flights::{Ended, Flights};
use jiff::Timestamp;
use leaves::Leaves;
use refusals::Refusals;
use report::Reports;
use spillway_api::Name;
use std::collections::{BTreeMap, BTreeSet};

/// Most transactions that are under way at the same time.
const MOST_FLIGHTS: usize = 64;
/// Time after which a conflict is decided again, if nothing new was heard meanwhile.
const CONFLICT_MS: u64 = 1_000;
/// Time for which the changes of a catalog are written one by one after it has conflicted again: one of them may conflict each time.
const APART_MS: u64 = 10_000;
/// Time within which another conflict of a catalog is none of a change that somebody has just made.
const AGAIN_MS: u64 = 5_000;
/// Least time between two looks of a daemon that does not place.
const WATCH_MS: u64 = 1_000;
/// Longest time until everything is looked at again, whether or not it has changed.
const REVIEW_MS: u64 = 60_000;

/// What the caller is to do.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PlacerAction {
    /// Carry out a transaction, and tell by [`Placer::ended`] how it ended.
    Commit {
        /// Number of the transaction.
        number: u64,
        /// The transaction.
        transaction: Transaction,
    },
    /// Ask hosts whether they reach another one, and tell by [`Placer::answered`] what they say.
    Ask(Ask),
    /// Tell people.
    Event(PlacerEvent),
}

/// Something that people want to know.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PlacerEvent {
    /// Host that it is about, if it is about one.
    pub host: Option<Name>,
    /// Catalog that it is about, if it is about one.
    pub catalog: Option<Name>,
    /// A sentence.
    pub text: String,
}

/// The placer of a daemon. It does something only while the daemon is elected.
#[derive(Debug)]
pub struct Placer {
    own: Identity,
    last_number: u64,
    now: Moment,
    /// Time of day, for people who read the records.
    wall: Timestamp,
    watch: Watch,
    office: Option<Office>,
}

/// What a daemon that does not place has seen of the hosts, so that it knows since when they are silent if it is elected.
#[derive(Debug, Default)]
struct Watch {
    liveness: Liveness,
    /// Revision of the records that it has last looked at, and when that was.
    seen: Option<(Revision, Moment)>,
}

impl Watch {
    /// Takes the records. Reports of all hosts change them all the time, so that it does not look at all of them.
    fn look(&mut self, view: &FleetView, now: Moment) {
        let is_due = |(revision, at)| revision != view.revision && now.since_ms(at) >= WATCH_MS;
        if self.seen.is_none_or(is_due) {
            self.seen = Some((view.revision, now));
            self.liveness.observe(view, now);
        }
    }
}

/// What a placer remembers in one term.
#[derive(Debug)]
struct Office {
    term: Revision,
    liveness: Liveness,
    flights: Flights,
    refusals: Refusals,
    leaves: Leaves,
    trackers: Trackers,
    reports: Reports,
    /// Catalogs as they last were, deleted ones as long as a host has machines of them.
    known: BTreeMap<Name, Versioned<CatalogRecord>>,
    plan: Plan,
    /// What the last plan was made from: revision of the records, and number of the changes of what is known of hosts.
    planned: Option<(Revision, u64)>,
    /// Whether the last plan had more transactions than may be under way.
    is_truncated: bool,
    /// Revision of the records that hosts and refusals were last compared with.
    seen: Option<Revision>,
    /// A plan is made at this time, even if nothing has changed.
    wake: Moment,
    /// No plan is made of records up to this revision, until that time: they have led to a conflict.
    hold: Option<(Revision, Moment)>,
    /// Catalogs that have had a conflict: the last transaction that was decided on by then, and when it was.
    conflicts: BTreeMap<Name, (u64, Moment)>,
    /// Catalogs whose changes are written one by one, and until when.
    apart: BTreeMap<Name, Moment>,
}

impl Placer {
    /// The placer of a daemon.
    pub fn new(own: Identity) -> Placer {
        Placer {
            own,
            last_number: 0,
            now: Moment::default(),
            wall: Timestamp::UNIX_EPOCH,
            watch: Watch::default(),
            office: None,
        }
    }

    /// Takes the time of day. No decision depends on it.
    pub fn note_time_of_day(&mut self, wall: Timestamp) {
        self.wall = wall;
    }

    /// Decides what is to be done. It is to be called when the records, an answer or the end of a transaction have come, and at least
    /// once a second.
    pub fn step(&mut self, view: &FleetView, health: &StoreHealth, now: Moment) -> Vec<PlacerAction> {
        self.now = now;
        let Some(term) = term(view, &self.own) else {
            if let Some(office) = self.office.take() {
                self.watch = Watch { liveness: office.liveness, ..Watch::default() };
            }
            self.watch.look(view, now);
            return Vec::new();
        };
        if self.office.as_ref().is_none_or(|office| office.term != term) {
            let watched = std::mem::take(&mut self.watch).liveness;
            let liveness = self.office.take().map_or(watched, |office| office.liveness);
            self.office = Some(Office::of(term, liveness));
        }
        let office = self.office.as_mut().expect("it was just taken");
        office.look(view, health, now);
        let mut actions = Vec::new();
        if office.is_due(view, now) {
            let bundles = office.decide(view, now, self.wall);
            for Bundle { transaction, effects } in bundles {
                self.last_number += 1;
                office.flights.send(self.last_number, effects, view.revision, now);
                actions.push(PlacerAction::Commit { number: self.last_number, transaction });
            }
        }
        let asks = office.liveness.asks(&office.plan.stakes, view, &self.own.host, now);
        actions.extend(asks.into_iter().map(PlacerAction::Ask));
        let events = office.reports.news(&office.plan, &office.liveness, view, now);
        actions.extend(events.into_iter().map(PlacerAction::Event));
        actions
    }

    /// Takes the end of a transaction; none: no answer came, so that the records will tell.
    pub fn ended(&mut self, number: u64, outcome: Option<Outcome>) {
        let Some(office) = &mut self.office else { return };
        let Some(Ended { decided, has_waiting, catalogs }) = office.flights.end(number, outcome, self.now)
        else {
            return;
        };
        if outcome == Some(Outcome::Conflict) {
            let until = self.now.after_ms(CONFLICT_MS);
            let revision = office.hold.map_or(decided, |(revision, _)| revision.max(decided));
            office.hold = Some((revision, until));
            office.note_conflict(number, catalogs, self.last_number, self.now);
        }
        if has_waiting || office.is_truncated || outcome == Some(Outcome::Conflict) {
            office.planned = None;
        }
    }

    /// Takes the answer of a host that was asked whether it reaches another one.
    pub fn answered(&mut self, about: &Name, by: &Name, reaches: bool) {
        if let Some(office) = &mut self.office {
            office.liveness.answered(about, by, reaches, self.now);
        }
    }

    /// What the placer knows, for people and for the API; none if this daemon is not the placer.
    pub fn status(&self, view: &FleetView) -> Option<PlacerStatus> {
        let office = self.office.as_ref()?;
        Some(report::status(office, view, self.now))
    }
}

impl Office {
    fn of(term: Revision, liveness: Liveness) -> Office {
        Office {
            term,
            liveness,
            flights: Flights::default(),
            refusals: Refusals::default(),
            leaves: Leaves::default(),
            trackers: Trackers::default(),
            reports: Reports::default(),
            known: BTreeMap::new(),
            plan: Plan::default(),
            planned: None,
            is_truncated: false,
            seen: None,
            wake: Moment::default(),
            hold: None,
            conflicts: BTreeMap::new(),
            apart: BTreeMap::new(),
        }
    }

    /// Takes the conflict of a transaction that changes these catalogs. The first one may be of a change that somebody has made meanwhile,
    /// and others that were under way then conflict with it, too.
    fn note_conflict(&mut self, number: u64, catalogs: BTreeSet<Name>, last_number: u64, now: Moment) {
        self.conflicts.retain(|_, (_, at)| now.since_ms(*at) < AGAIN_MS);
        for catalog in catalogs {
            let (known, _) = *self.conflicts.entry(catalog.clone()).or_insert((last_number, now));
            if number > known {
                self.apart.insert(catalog, now.after_ms(APART_MS));
            }
        }
    }

    /// Takes what is new.
    fn look(&mut self, view: &FleetView, health: &StoreHealth, now: Moment) {
        self.liveness.tick(health, now);
        if self.seen != Some(view.revision) {
            self.seen = Some(view.revision);
            self.liveness.observe(view, now);
            self.refusals.observe(view, now);
            self.leaves.observe(view, now);
            rollout::observe(&mut self.trackers, view, now);
            self.remember(view);
        }
        if self.flights.settle(view, now) {
            self.planned = None;
        }
    }

    fn remember(&mut self, view: &FleetView) {
        for (name, record) in &view.catalogs {
            if self.known.get(name).is_none_or(|known| known.modified != record.modified) {
                self.known.insert(name.clone(), record.clone());
            }
        }
        if self.known.len() > view.catalogs.len() {
            let of_hosts = |name: &Name| {
                let mut reports = view.statuses.values().map(|status| &status.value.catalogs);
                reports.any(|catalogs| catalogs.get(name).is_some_and(|report| report.count > 0))
                    || view.shares.values().any(|shares| shares.contains_key(name))
            };
            self.known.retain(|name, _| view.catalogs.contains_key(name) || of_hosts(name));
        }
    }

    fn is_due(&mut self, view: &FleetView, now: Moment) -> bool {
        if self.hold.is_some_and(|(revision, until)| view.revision <= revision && now < until) {
            return false;
        }
        self.hold = None;
        self.planned != Some((view.revision, self.liveness.changes())) || now >= self.wake
    }

    fn decide(&mut self, view: &FleetView, now: Moment, wall: Timestamp) -> Vec<Bundle> {
        self.planned = Some((view.revision, self.liveness.changes()));
        let (liveness, leaves) = (&self.liveness, &self.leaves);
        let refused = self.refusals.passed_over(now);
        let held = self.flights.held();
        let rolling = self.flights.rolling();
        let names = self.flights.names(view);
        self.plan = plan(&Situation {
            view,
            standing: &|host| liveness.standing(host, now),
            recorded_for_ms: &|host| liveness.recorded_for_ms(host, now),
            leaving_for_ms: &|host, machine| leaves.for_ms(host, machine, now),
            brake: liveness.brake(now),
            written: self.flights.written(),
            names: &names,
            refused: &refused,
            known: &self.known,
            held: &held,
            trackers: &self.trackers,
            rolling: &rolling,
            now,
        });
        let next = self.plan.next_in_ms.map(|ms| now.after_ms(ms));
        let moments = [next, self.refusals.next(now), self.liveness.next(now)];
        self.wake =
            moments.into_iter().flatten().chain([now.after_ms(REVIEW_MS)]).min().expect("one at least");
        self.apart.retain(|_, until| now < *until);
        let apart: BTreeSet<&Name> = self.apart.keys().collect();
        let most = MOST_FLIGHTS.saturating_sub(self.flights.len());
        let mut bundles = bundles(view, self.term, &self.plan.changes, &apart, most);
        let steps = self.plan.rollouts.iter();
        bundles.extend(steps.map(|step| rollout_bundle(view, self.term, step, wall)));
        bundles.extend(names::bundles(view, self.term, &self.plan.names, &apart));
        bundles.extend(self.revived(view));
        // Those that may conflict once more are last: there may be more than can be under way.
        bundles.sort_by_key(|bundle| bundle.effects.catalogs().any(|catalog| apart.contains(catalog)));
        self.is_truncated = bundles.len() > most;
        bundles.truncate(most);
        bundles
    }

    /// Ends the declarations of hosts that have come back: a later placer could not tell that they had.
    fn revived(&self, view: &FleetView) -> Vec<Bundle> {
        let back = view.hosts.iter().filter_map(|(name, host)| {
            let epoch = view.alive.get(name)?.created;
            host.value.dead_epoch.filter(|dead| epoch > *dead && !self.flights.writes_host(name))?;
            let record = HostRecord { dead_epoch: None, ..host.value.clone() };
            let bytes = serde_json::to_vec(&record).expect("a record of texts and numbers is JSON");
            let mut comparisons = in_office(view, self.term);
            comparisons.push(Comparison::Modified(Key::Host(name.clone()), host.modified));
            comparisons.push(Comparison::Created(Key::Alive(name.clone()), epoch));
            let transaction =
                Transaction { comparisons, writes: vec![Write::Put(Key::Host(name.clone()), bytes)] };
            Some(Bundle { transaction, effects: flights::Effects::of_host(name.clone()) })
        });
        back.take(16).collect()
    }
}

#[cfg(test)]
mod tests;
