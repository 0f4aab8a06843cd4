//! What a host may do with machines that have names of the fleet: from its records, its lease and what runs there.
//!
//! Owns the orders for each machine, the deadline at which all of them are ended by the guard, and the highest epoch that the host has
//! had. Invariant: the deadline moves on only while the lease is valid, and all machines that the guard would end are those that the
//! records give to the host in its present epoch.

use super::ISOLATION_MS;
use crate::Moment;
use crate::keys::Key;
use crate::transaction::{Comparison, Revision, Transaction, Write};
use crate::view::FleetView;
use spillway_api::{IsolationAction, Name};
use std::collections::{BTreeMap, BTreeSet};

/// Time before the deadline at which the host ends machines of an earlier epoch that the placer has not confirmed, so that the guard does
/// not end all of them.
const EARLIER_MS: u64 = 5_000;
/// Most machines that are told to be given up in one step.
const MOST_RELEASES: usize = 40;

/// The lease of a host, and the epoch that goes with it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Belief {
    /// Revision that created the host's record `alive/HOST`, which goes with this lease.
    pub epoch: Revision,
    /// Moment until which the lease certainly lasts.
    pub until: Moment,
}

/// What a host is to do with a machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum NameOrder {
    /// It may be started, and runs.
    Run,
    /// If it runs it goes on. It is not started.
    GoOn,
    /// If it runs its guest is paused. It is not started.
    Pause,
    /// It is ended at once, and not started.
    End,
}

/// A machine whose VMM runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RunningName {
    /// What it was started with.
    pub on_isolation: IsolationAction,
}

/// What a host is to do.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct NamedOrders {
    /// Orders for the machines that the records give to the host.
    pub machines: BTreeMap<Name, NameOrder>,
    /// What is done with each of these when the host is isolated.
    pub on_isolation: BTreeMap<Name, IsolationAction>,
    /// Moment at which the guard ends the host's machines, if it moves on.
    pub deadline: Option<Moment>,
    /// Epoch that is to be recorded on the host before anything is started in it.
    pub record_epoch: Option<Revision>,
    /// Confirms that nothing of a machine runs any more that the host was to give up.
    pub releases: Vec<Transaction>,
    /// Whether the lease is valid, so that machines which are not in `machines` are ended.
    pub has_lease: bool,
    /// Why nothing is started although there is a lease, for people.
    pub refusal: Option<String>,
}

impl NamedOrders {
    /// What is to be done with a machine that was started with this setting.
    pub fn order(&self, machine: &Name, on_isolation: IsolationAction) -> NameOrder {
        match self.machines.get(machine) {
            Some(order) => *order,
            None if self.has_lease => NameOrder::End,
            None => isolated(on_isolation),
        }
    }
}

/// What is done with a machine while the host has no lease.
pub fn isolated(on_isolation: IsolationAction) -> NameOrder {
    match on_isolation {
        IsolationAction::Keep => NameOrder::GoOn,
        IsolationAction::Pause => NameOrder::Pause,
        IsolationAction::Stop => NameOrder::End,
    }
}

/// The names of a host.
#[derive(Debug)]
pub struct HostNames {
    host: Name,
    /// Highest epoch that the host has recorded.
    highest: Revision,
    deadline: Moment,
}

impl HostNames {
    /// The names of a host that has recorded this highest epoch, and whose guard has this deadline.
    pub fn new(host: Name, highest: Revision, deadline: Moment) -> HostNames {
        HostNames { host, highest, deadline }
    }

    /// Takes the epoch that the host has recorded.
    pub fn recorded(&mut self, epoch: Revision) {
        self.highest = self.highest.max(epoch);
    }

    /// Decides what the host does. `running` has all machines with names of the fleet whose VMM runs, and `present` those of which
    /// anything is left. The records are those of the host's own fleet.
    pub fn step(
        &mut self,
        view: &FleetView,
        belief: Option<Belief>,
        running: &BTreeMap<Name, RunningName>,
        present: &BTreeSet<Name>,
        now: Moment,
    ) -> NamedOrders {
        let mut orders = NamedOrders::default();
        // Records that are older than the epoch do not say who had the names before it.
        let belief = belief.filter(|belief| now < belief.until && view.revision >= belief.epoch);
        let belief = match belief {
            Some(belief) if belief.epoch < self.highest => {
                orders.refusal = Some(format!(
                    "etcd has older records than this host has seen (epoch {}, and the host had {}): if it was restored from a backup, restore \
                     it with --bump-revision",
                    belief.epoch, self.highest
                ));
                None
            }
            Some(belief) if belief.epoch > self.highest => {
                orders.record_epoch = Some(belief.epoch);
                None
            }
            belief => belief,
        };
        orders.has_lease = belief.is_some();
        let mut confirmed = BTreeSet::new();
        for ((catalog, machine), place) in view.places.get(&self.host).into_iter().flatten() {
            let record = view.name(catalog, machine).map(|record| &record.value);
            let place = &place.value;
            let agrees = record.is_some_and(|record| {
                record.host.as_ref() == Some(&self.host) && record.epoch == place.epoch
            });
            let order = match belief {
                Some(belief) if agrees && place.epoch == belief.epoch => {
                    confirmed.insert(machine);
                    if place.is_leaving { NameOrder::GoOn } else { NameOrder::Run }
                }
                _ => isolated(place.on_isolation),
            };
            orders.machines.insert(machine.clone(), order);
            orders.on_isolation.insert(machine.clone(), place.on_isolation);
        }
        if let Some(belief) = belief {
            self.move_deadline(&mut orders, belief, &confirmed, running, now);
            orders.releases = self.releases(view, present);
        }
        orders
    }

    fn move_deadline(
        &mut self,
        orders: &mut NamedOrders,
        belief: Belief,
        confirmed: &BTreeSet<&Name>,
        running: &BTreeMap<Name, RunningName>,
        now: Moment,
    ) {
        let is_open = |machine: &Name, running: &RunningName| {
            running.on_isolation != IsolationAction::Keep && !confirmed.contains(machine)
        };
        let open: Vec<&Name> =
            running.iter().filter(|(machine, of)| is_open(machine, of)).map(|(machine, _)| machine).collect();
        if open.is_empty() {
            let deadline = belief.until.after_ms(ISOLATION_MS);
            // What this host was promised is not taken back by a later lease that is valid for a shorter time.
            self.deadline = self.deadline.max(deadline);
            orders.deadline = Some(self.deadline);
        } else if now.after_ms(EARLIER_MS) >= self.deadline {
            for machine in open {
                orders.machines.insert(machine.clone(), NameOrder::End);
            }
        }
    }

    /// Confirms what the host has given up.
    fn releases(&self, view: &FleetView, present: &BTreeSet<Name>) -> Vec<Transaction> {
        let places = view.places.get(&self.host).into_iter().flatten();
        let gone = places
            .filter(|((_, machine), place)| place.value.is_leaving && !present.contains(machine))
            .map(|((catalog, machine), place)| {
                let key = Key::Place(self.host.clone(), catalog.clone(), machine.clone());
                Transaction {
                    comparisons: vec![Comparison::Modified(key.clone(), place.modified)],
                    writes: vec![Write::Delete(key)],
                }
            });
        gone.take(MOST_RELEASES).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sample::{Fleet, name};
    use serde_json::json;

    const NOW: Moment = Moment(100_000);
    const UNTIL: Moment = Moment(110_000);

    struct Case {
        fleet: Fleet,
        epoch: Revision,
        names: HostNames,
    }

    impl Case {
        /// Host `a` has the machine `desk-001`, which is stopped when the host is isolated.
        fn new() -> Case {
            let mut fleet = Fleet::new();
            fleet.host("a", "z");
            let epoch = fleet.view().alive[&name("a")].created;
            let names = HostNames::new(name("a"), epoch, Moment(0));
            let mut case = Case { fleet, epoch, names };
            case.place(epoch, json!({}));
            case
        }

        fn place(&mut self, epoch: Revision, fields: serde_json::Value) {
            let identity = json!({"uuid": "u", "mac": "02:00:00:00:00:01"});
            let both = json!({"epoch": epoch, "number": 1, "identity": identity, "on_isolation": "stop"});
            self.fleet.set("place/a/desk/desk-001", both.clone());
            self.fleet.set("place/a/desk/desk-001", fields);
            self.fleet.set("named/desk/desk-001", both);
            self.fleet.set("named/desk/desk-001", json!({"host": "a", "state": "placed"}));
        }

        fn step(&mut self, belief: Option<Belief>, running: bool, now: Moment) -> NamedOrders {
            let of = RunningName { on_isolation: IsolationAction::Stop };
            let running = running.then(|| (name("desk-001"), of)).into_iter().collect::<BTreeMap<_, _>>();
            let present = running.keys().cloned().collect();
            self.names.step(self.fleet.view(), belief, &running, &present, now)
        }

        fn order(&mut self, belief: Option<Belief>) -> NameOrder {
            self.step(belief, true, NOW).order(&name("desk-001"), IsolationAction::Stop)
        }
    }

    #[test]
    fn a_machine_runs_only_with_a_lease_and_records_of_its_epoch() {
        let mut case = Case::new();
        let epoch = case.epoch;
        let belief = Belief { epoch, until: UNTIL };
        let orders = case.step(Some(belief), true, NOW);
        assert_eq!(orders.order(&name("desk-001"), IsolationAction::Stop), NameOrder::Run);
        assert_eq!(orders.deadline, Some(UNTIL.after_ms(ISOLATION_MS)));
        assert_eq!(orders.order(&name("desk-002"), IsolationAction::Keep), NameOrder::End, "it is not ours");
        let late = case.step(Some(belief), true, UNTIL);
        assert_eq!(
            (late.order(&name("desk-001"), IsolationAction::Stop), late.deadline),
            (NameOrder::End, None)
        );
        assert_eq!(late.order(&name("desk-002"), IsolationAction::Keep), NameOrder::GoOn);
        for (action, order) in
            [("keep", NameOrder::GoOn), ("pause", NameOrder::Pause), ("stop", NameOrder::End)]
        {
            case.place(epoch, json!({"on_isolation": action}));
            assert_eq!(case.order(None), order, "{action}");
            assert_eq!(case.order(Some(belief)), NameOrder::Run);
        }
        case.place(epoch - 1, json!({}));
        assert_eq!(case.order(Some(belief)), NameOrder::End, "the place is of an earlier epoch");
        case.place(epoch, json!({}));
        case.fleet.set("named/desk/desk-001", json!({"host": "b"}));
        assert_eq!(case.order(Some(belief)), NameOrder::End, "another host has the name");
    }

    #[test]
    fn an_epoch_counts_once_it_is_recorded_and_an_older_one_never() {
        let mut case = Case::new();
        let epoch = case.epoch;
        case.names = HostNames::new(name("a"), epoch - 1, Moment(0));
        let belief = Belief { epoch, until: UNTIL };
        let orders = case.step(Some(belief), false, NOW);
        assert_eq!((orders.record_epoch, orders.has_lease, orders.deadline), (Some(epoch), false, None));
        case.names.recorded(epoch);
        assert_eq!(case.order(Some(belief)), NameOrder::Run);
        case.names.recorded(epoch + 1);
        let orders = case.step(Some(belief), false, NOW);
        assert!(orders.refusal.unwrap().contains("--bump-revision"));
        assert!(!orders.has_lease && orders.deadline.is_none());
    }

    #[test]
    fn the_deadline_waits_for_what_runs_from_an_earlier_epoch() {
        let mut case = Case::new();
        let epoch = case.epoch;
        case.step(Some(Belief { epoch, until: UNTIL }), true, NOW);
        case.fleet.end_lease("a");
        let later = case.fleet.begin_lease("a");
        case.names.recorded(later);
        let belief = Belief { epoch: later, until: Moment(140_000) };
        let orders = case.step(Some(belief), true, Moment(115_000));
        assert_eq!((orders.deadline, orders.machines[&name("desk-001")]), (None, NameOrder::End));
        case.place(epoch, json!({"on_isolation": "pause"}));
        let waits = case.step(Some(belief), true, Moment(115_000));
        assert_eq!(waits.machines[&name("desk-001")], NameOrder::Pause, "the placer may confirm it");
        let ends = case.step(Some(belief), true, Moment(125_000));
        assert_eq!(ends.machines[&name("desk-001")], NameOrder::End, "it would end all of them");
        case.place(later, json!({"on_isolation": "pause"}));
        let orders = case.step(Some(belief), true, Moment(125_000));
        assert_eq!(orders.deadline, Some(Moment(160_000)));
        assert_eq!(orders.machines[&name("desk-001")], NameOrder::Run);
    }

    #[test]
    fn what_is_given_up_is_confirmed_when_nothing_is_left() {
        let mut case = Case::new();
        let belief = Some(Belief { epoch: case.epoch, until: UNTIL });
        assert_eq!(case.step(belief, false, NOW).releases, [], "it is to run here");
        case.place(case.epoch, json!({"is_leaving": true}));
        let orders = case.step(belief, true, NOW);
        assert_eq!((orders.machines[&name("desk-001")], orders.releases.len()), (NameOrder::GoOn, 0));
        let release = case.step(belief, false, NOW).releases.remove(0);
        assert_eq!(case.step(None, false, NOW).releases, [], "without a lease nothing is confirmed");
        case.place(case.epoch, json!({"is_leaving": false}));
        assert_eq!(case.fleet.commit(&release), crate::transaction::Outcome::Conflict);
    }
}
