//! Transactions that are under way, or that the records do not show yet. Owns what they have probably written.
//!
//! Invariant: no share is in two of them, and none is remembered for ever: etcd may have been restored, and an answer may never come.

use crate::Moment;
use crate::keys::Key;
use crate::placement::Place;
use crate::records::{NameState, NamedRecord};
use crate::transaction::{Outcome, Revision};
use crate::view::FleetView;
use spillway_api::Name;
use std::collections::{BTreeMap, BTreeSet};

/// Time for which a transaction without an answer counts as applied, if anything is seen that is newer than what it was decided on. If
/// nothing is, the view may stand still, and does not show it either; where nobody writes anything, it counts for longer without need.
/// etcd gives up a request after 7 s, so that later ones are rare. One that is applied later still makes too many machines at worst,
/// until they are taken away again.
const UNKNOWN_MS: u64 = 10_000;
/// Time for which one counts that etcd has applied, or whose end nobody has told.
const MOST_MS: u64 = 30_000;

/// What a transaction changes.
#[derive(Clone, Debug, Default)]
pub(super) struct Effects {
    pub(super) shares: Vec<Effect>,
    /// Catalogs of which it lowers shares, so that others are raised.
    pub(super) lowered: BTreeSet<Name>,
    /// Host whose record it writes, and no shares.
    host: Option<Name>,
    /// Catalog whose rollout it writes, and no shares, with the revision that it was compared with.
    rollout: Option<(Name, Revision)>,
    /// Machines with names of the fleet that it changes.
    pub(super) names: Vec<NameEffect>,
}

/// A machine with a name of the fleet that a transaction changes.
#[derive(Clone, Debug)]
pub(super) struct NameEffect {
    pub(super) catalog: Name,
    pub(super) machine: Name,
    /// Host that has it then.
    pub(super) host: Option<Name>,
    /// Revision of its record that it was compared with.
    pub(super) compared: Revision,
}

impl NameEffect {
    fn is_seen(&self, view: &FleetView) -> bool {
        view.name(&self.catalog, &self.machine).map_or(0, |record| record.modified) != self.compared
    }
}

impl Effects {
    /// Catalogs whose shares, or names, change.
    pub(super) fn catalogs(&self) -> impl Iterator<Item = &Name> {
        let names = self.names.iter().map(|name| &name.catalog);
        self.shares.iter().map(|effect| &effect.place.1).chain(names)
    }

    pub(super) fn of_names(names: Vec<NameEffect>) -> Effects {
        Effects { names, ..Effects::default() }
    }

    pub(super) fn of_host(host: Name) -> Effects {
        Effects { host: Some(host), ..Effects::default() }
    }

    pub(super) fn of_rollout(catalog: Name, compared: Revision) -> Effects {
        Effects { rollout: Some((catalog, compared)), ..Effects::default() }
    }
}

/// A share that a transaction changes.
#[derive(Clone, Debug)]
pub(super) struct Effect {
    pub(super) place: Place,
    pub(super) to: u32,
    /// Revision of the share that it was compared with.
    pub(super) compared: Revision,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Sent,
    Unknown,
    Applied(Revision),
}

#[derive(Debug)]
struct Flight {
    effects: Effects,
    /// Revision of the records that it was decided on.
    decided: Revision,
    state: State,
    since: Moment,
}

/// A transaction whose end was told.
pub(super) struct Ended {
    /// Revision of the records that it was decided on.
    pub(super) decided: Revision,
    /// Whether others may have waited for it.
    pub(super) has_waiting: bool,
    /// Catalogs whose shares, or names, it changes.
    pub(super) catalogs: BTreeSet<Name>,
}

#[derive(Debug, Default)]
pub(super) struct Flights {
    all: BTreeMap<u64, Flight>,
    written: BTreeMap<Name, BTreeMap<Name, u32>>,
}

impl Flights {
    pub(super) fn len(&self) -> usize {
        self.all.len()
    }

    /// Catalogs that wait for the end of a transaction: until then it is open whether others may be raised.
    pub(super) fn held(&self) -> BTreeSet<Name> {
        let open = self.all.values().filter(|flight| !matches!(flight.state, State::Applied(_)));
        let lowered = open.flat_map(|flight| flight.effects.lowered.iter());
        // Names are decided on again when all that was decided is seen.
        let names = self.all.values().flat_map(|flight| &flight.effects.names).map(|name| &name.catalog);
        lowered.chain(names).cloned().collect()
    }

    /// Counts of shares that were just written, by host and catalog.
    pub(super) fn written(&self) -> &BTreeMap<Name, BTreeMap<Name, u32>> {
        &self.written
    }

    /// Machines with names of the fleet that hosts have, or have just been given, by host and catalog.
    pub(super) fn names(&self, view: &FleetView) -> BTreeMap<Name, BTreeMap<Name, u32>> {
        let mut all: BTreeMap<Name, BTreeMap<Name, u32>> = BTreeMap::new();
        let mut add = |host: &Name, catalog: &Name| {
            *all.entry(host.clone()).or_default().entry(catalog.clone()).or_default() += 1;
        };
        for (catalog, names) in &view.named {
            let there =
                names.iter().filter(|(machine, record)| !is_given_up(view, catalog, machine, &record.value));
            there.filter_map(|(_, record)| record.value.host.as_ref()).for_each(|host| add(host, catalog));
        }
        for name in self.all.values().flat_map(|flight| &flight.effects.names) {
            if let Some(host) = name.host.as_ref().filter(|_| !name.is_seen(view)) {
                add(host, &name.catalog);
            }
        }
        all
    }

    /// Catalogs whose rollouts are being written.
    pub(super) fn rolling(&self) -> BTreeSet<Name> {
        let rollouts = self.all.values().filter_map(|flight| flight.effects.rollout.as_ref());
        rollouts.map(|(catalog, _)| catalog.clone()).collect()
    }

    pub(super) fn writes_host(&self, host: &Name) -> bool {
        self.all.values().any(|flight| flight.effects.host.as_ref() == Some(host))
    }

    pub(super) fn send(&mut self, number: u64, effects: Effects, decided: Revision, now: Moment) {
        for Effect { place: (host, catalog), to, .. } in &effects.shares {
            self.written.entry(host.clone()).or_default().insert(catalog.clone(), *to);
        }
        self.all.insert(number, Flight { effects, decided, state: State::Sent, since: now });
    }

    /// Takes the end of a transaction, if it is one of these.
    pub(super) fn end(&mut self, number: u64, outcome: Option<Outcome>, now: Moment) -> Option<Ended> {
        let flight = self.all.get_mut(&number)?;
        let ended = Ended {
            decided: flight.decided,
            has_waiting: !flight.effects.lowered.is_empty(),
            catalogs: flight.effects.catalogs().cloned().collect(),
        };
        flight.since = now;
        match outcome {
            Some(Outcome::Applied(revision)) => flight.state = State::Applied(revision),
            Some(Outcome::Conflict) => self.forget(number),
            None => flight.state = State::Unknown,
        }
        Some(ended)
    }

    /// Forgets what the records show by now, and what has been open for too long. Whether there was any.
    pub(super) fn settle(&mut self, view: &FleetView, now: Moment) -> bool {
        let over = self.all.iter().filter(|(_, flight)| flight.is_over(view, now));
        let over: Vec<u64> = over.map(|(number, _)| *number).collect();
        over.iter().for_each(|number| self.forget(*number));
        !over.is_empty()
    }

    fn forget(&mut self, number: u64) {
        let Some(flight) = self.all.remove(&number) else { return };
        for Effect { place: (host, catalog), .. } in &flight.effects.shares {
            if let Some(shares) = self.written.get_mut(host) {
                shares.remove(catalog);
                if shares.is_empty() {
                    self.written.remove(host);
                }
            }
        }
    }
}

/// Whether the host has confirmed that it has nothing of a name any more, so that it has its space again.
fn is_given_up(view: &FleetView, catalog: &Name, machine: &Name, record: &NamedRecord) -> bool {
    let Some(host) = record.host.as_ref().filter(|_| record.state == NameState::Leaving) else {
        return record.state == NameState::Free;
    };
    let key = || Key::Place(host.clone(), catalog.clone(), machine.clone()).to_string();
    view.place(host, catalog, machine).is_none()
        && (view.unreadable.is_empty() || !view.unreadable.contains_key(&key()))
}

impl Flight {
    fn is_over(&self, view: &FleetView, now: Moment) -> bool {
        let open_ms = now.since_ms(self.since);
        match self.state {
            State::Applied(revision) => view.revision >= revision || open_ms >= MOST_MS,
            State::Sent => open_ms >= MOST_MS,
            State::Unknown => {
                open_ms >= MOST_MS
                    || (open_ms >= UNKNOWN_MS && view.revision > self.decided)
                    || self.effects.rollout.as_ref().is_some_and(|(catalog, compared)| {
                        view.rollouts.get(catalog).map_or(0, |rollout| rollout.modified) != *compared
                    })
                    || self.effects.names.first().is_some_and(|name| name.is_seen(view))
                    || self.effects.shares.first().is_some_and(|effect| {
                        let (host, catalog) = &effect.place;
                        view.share(host, catalog).map_or(0, |share| share.modified) != effect.compared
                    })
            }
        }
    }
}
