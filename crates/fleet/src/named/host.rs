//! What a host may do with machines that have names of the fleet: from its records, its lease and what runs there.
//!
//! Owns the orders for each machine, the deadline at which all of them are ended by the guard, and the highest epoch that the host has
//! had. Invariant: the deadline moves on only while the lease is valid, and all machines that the guard would end are those that the
//! records give to the host in its present epoch.

use super::{ISOLATION_MS, VALID_MS};
use crate::Moment;
use crate::keys::Key;
use crate::records::PlaceRecord;
use crate::transaction::{Comparison, Revision, Transaction, Write};
use crate::view::FleetView;
use spillway_api::{IsolationAction, Name};
use std::collections::{BTreeMap, BTreeSet};

/// Time before the deadline at which the host ends machines of an earlier epoch that the placer has not confirmed, so that the guard does
/// not end all of them.
const EARLIER_MS: u64 = 5_000;
/// Most machines that are told to be given up in one step.
const MOST_RELEASES: usize = 40;
/// Time after which a host with the same records has ended its machines, once this one has a lease: another one may have been renewed just
/// before.
const OTHER_BOOT_MS: u64 = VALID_MS + ISOLATION_MS + 5_000;

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
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RunningName {
    /// What it was started with.
    pub on_isolation: IsolationAction,
    /// UUID of the machine; none: nobody knows it, and it counts as the one that the records mean.
    pub uuid: Option<String>,
}

/// What a host is to do.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct NamedOrders {
    /// Orders for the machines that the records give to the host.
    pub machines: BTreeMap<Name, NameOrder>,
    /// UUIDs of these machines. An order counts for a machine of its name with this one alone, or with any where there is none.
    pub uuids: BTreeMap<Name, String>,
    /// What is done with each of these when the host is isolated.
    pub on_isolation: BTreeMap<Name, IsolationAction>,
    /// Moment at which the guard ends the host's machines, if it moves on.
    pub deadline: Option<Moment>,
    /// Epoch that is to be recorded on the host before anything is started in it.
    pub record_epoch: Option<Revision>,
    /// Whether the host records its present boot now, because no earlier one can still run its machines.
    pub record_boot: bool,
    /// Whether the lease is valid, so that machines which are not in `machines` are ended.
    pub has_lease: bool,
    /// Why nothing is started although there is a lease, for people.
    pub refusal: Option<String>,
}

impl NamedOrders {
    /// The order for the machine with this UUID, which was started with this setting.
    pub fn order(&self, machine: &Name, uuid: Option<&str>, on_isolation: IsolationAction) -> NameOrder {
        match self.machines.get(machine).filter(|_| self.is_meant(machine, uuid)) {
            Some(order) => *order,
            None if self.has_lease => NameOrder::End,
            None => isolated(on_isolation),
        }
    }

    /// Whether the records mean the machine with this UUID.
    fn is_meant(&self, machine: &Name, uuid: Option<&str>) -> bool {
        match (self.uuids.get(machine), uuid) {
            (Some(meant), Some(uuid)) => meant == uuid,
            _ => true,
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
    /// Whether the records of the host are of another boot: another machine with the same records may run the names still.
    is_other_boot: bool,
    /// Moment of the first step with a lease.
    first_lease: Option<Moment>,
}

impl HostNames {
    /// The names of a host that has recorded this highest epoch, and whose guard has this deadline.
    pub fn new(host: Name, highest: Revision, deadline: Moment) -> HostNames {
        HostNames { host, highest, deadline, is_other_boot: false, first_lease: None }
    }

    /// The same for a host whose records are of another boot. It starts nothing until a host with the same records has certainly ended its
    /// machines.
    pub fn of_other_boot(self) -> HostNames {
        HostNames { is_other_boot: true, ..self }
    }

    /// Takes the epoch that the host has recorded.
    pub fn recorded(&mut self, epoch: Revision) {
        self.highest = self.highest.max(epoch);
    }

    /// Notes that the host has recorded its present boot.
    pub fn recorded_boot(&mut self) {
        self.is_other_boot = false;
    }

    /// Decides what the host does. `running` has all machines with names of the fleet whose VMM runs. The records are those of the host's own
    /// fleet.
    pub fn step(
        &mut self,
        view: &FleetView,
        belief: Option<Belief>,
        running: &BTreeMap<Name, RunningName>,
        now: Moment,
    ) -> NamedOrders {
        let mut orders = NamedOrders::default();
        let belief = match current(view, belief, now) {
            Some(belief) if belief.epoch < self.highest => {
                orders.refusal = Some(format!(
                    "etcd has older records than this host has seen (epoch {}, and the host had {}): if it was restored from a backup, \
                     stop spillwayd for 20 seconds, so that the host gets a new epoch",
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
        let may_start = belief.is_some() && self.may_start(view, &mut orders, now);
        let mut confirmed = BTreeSet::new();
        for ((catalog, machine), place) in view.places.get(&self.host).into_iter().flatten() {
            let place = &place.value;
            let order = match belief {
                Some(belief) => match self.agrees(view, catalog, machine, place, belief.epoch) {
                    Some(true) if may_start && !place.is_leaving => NameOrder::Run,
                    Some(true) | None => NameOrder::GoOn,
                    Some(false) => isolated(place.on_isolation),
                },
                None => isolated(place.on_isolation),
            };
            if matches!(order, NameOrder::Run | NameOrder::GoOn) && belief.is_some() {
                confirmed.insert(machine.clone());
            }
            orders.machines.insert(machine.clone(), order);
            orders.uuids.insert(machine.clone(), place.identity.uuid.clone());
            orders.on_isolation.insert(machine.clone(), place.on_isolation);
        }
        if let Some(belief) = belief {
            for machine in self.unreadable(view) {
                orders.machines.entry(machine.clone()).or_insert(NameOrder::GoOn);
                confirmed.insert(machine);
            }
            self.move_deadline(&mut orders, belief, &confirmed, running, now);
        }
        orders
    }

    /// Whether machines may be started, as far as the boot of the host is concerned.
    fn may_start(&mut self, view: &FleetView, orders: &mut NamedOrders, now: Moment) -> bool {
        let first = *self.first_lease.get_or_insert(now);
        let waits = self.is_other_boot && now < first.after_ms(OTHER_BOOT_MS);
        if waits && view.places.contains_key(&self.host) {
            orders.refusal = Some(format!(
                "the host has booted since its records were written, or they were copied: machines with names of the fleet start {} s after \
                 it has its lease, when those of another host with these records have certainly ended",
                OTHER_BOOT_MS / 1000
            ));
        }
        orders.record_boot = self.is_other_boot && !waits;
        !waits
    }

    /// Whether both records give a machine to the host in this epoch; none: the one with its name cannot be read. Who gives it to another host
    /// removes the place in the same transaction.
    fn agrees(
        &self,
        view: &FleetView,
        catalog: &Name,
        machine: &Name,
        place: &PlaceRecord,
        epoch: Revision,
    ) -> Option<bool> {
        let Some(record) = view.name(catalog, machine).map(|record| &record.value) else {
            let key = Key::Named(catalog.clone(), machine.clone());
            return (!view.unreadable.contains_key(&key.to_string())).then_some(false);
        };
        let is_own = record.host.as_ref() == Some(&self.host) && record.epoch == place.epoch;
        Some(is_own && place.epoch == epoch)
    }

    /// Machines that the host is told about in records that cannot be read.
    fn unreadable(&self, view: &FleetView) -> BTreeSet<Name> {
        let prefix = format!("place/{}/", self.host);
        let keys = view.unreadable.range(prefix.clone()..).map(|(key, _)| key);
        let own = keys.take_while(|key| key.starts_with(&prefix));
        own.filter_map(|key| match key.parse() {
            Ok(Key::Place(_, _, machine)) => Some(machine),
            _ => None,
        })
        .collect()
    }

    fn move_deadline(
        &mut self,
        orders: &mut NamedOrders,
        belief: Belief,
        confirmed: &BTreeSet<Name>,
        running: &BTreeMap<Name, RunningName>,
        now: Moment,
    ) {
        let is_open = |machine: &Name, running: &RunningName| {
            let is_confirmed =
                confirmed.contains(machine) && orders.is_meant(machine, running.uuid.as_deref());
            running.on_isolation != IsolationAction::Keep && !is_confirmed
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

    /// Machines that the host is to give up, with the revisions of their places.
    pub fn leaving(&self, view: &FleetView) -> BTreeMap<Name, Revision> {
        let places = view.places.get(&self.host).into_iter().flatten();
        let leaving = places.filter(|(_, place)| place.value.is_leaving);
        leaving.map(|((_, machine), place)| (machine.clone(), place.modified)).collect()
    }

    /// Confirms what the host has given up. `gone` has those of `leaving` of which nothing was left when somebody looked for them: whoever
    /// was not looked for, or was given to the host again since, is not confirmed. Nor is a place of another epoch: it may be that of a host
    /// that had this name before.
    pub fn confirm(
        &self,
        view: &FleetView,
        belief: Option<Belief>,
        gone: &BTreeMap<Name, Revision>,
        now: Moment,
    ) -> Option<Transaction> {
        // While another host may have these records, it may run what this one has nothing of.
        let belief = current(view, belief, now)
            .filter(|belief| belief.epoch == self.highest && !self.is_other_boot)?;
        let places = view.places.get(&self.host).into_iter().flatten();
        let gone = places.filter(|((_, machine), place)| {
            let is_own = place.value.epoch == belief.epoch;
            place.value.is_leaving && is_own && gone.get(machine) == Some(&place.modified)
        });
        let mut release = Transaction::default();
        for ((catalog, machine), place) in gone.take(MOST_RELEASES) {
            let key = Key::Place(self.host.clone(), catalog.clone(), machine.clone());
            release.comparisons.push(Comparison::Modified(key.clone(), place.modified));
            release.writes.push(Write::Delete(key));
        }
        (!release.writes.is_empty()).then_some(release)
    }
}

/// What counts of a belief now. Records that are older than the epoch do not say who had the names before it.
fn current(view: &FleetView, belief: Option<Belief>, now: Moment) -> Option<Belief> {
    belief.filter(|belief| now < belief.until && view.revision >= belief.epoch)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sample::{Fleet, name};
    use serde_json::json;

    const NOW: Moment = Moment(100_000);
    const UNTIL: Moment = Moment(110_000);

    /// The machine `desk-001` runs with this UUID.
    fn running_as(uuid: &str) -> BTreeMap<Name, RunningName> {
        let of = RunningName { on_isolation: IsolationAction::Stop, uuid: Some(uuid.into()) };
        BTreeMap::from([(name("desk-001"), of)])
    }

    /// The order for the machine `desk-001`.
    fn order(orders: &NamedOrders) -> NameOrder {
        orders.order(&name("desk-001"), Some("u"), IsolationAction::Stop)
    }

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
            let running = if running { running_as("u") } else { BTreeMap::new() };
            self.names.step(self.fleet.view(), belief, &running, now)
        }

        fn order(&mut self, belief: Option<Belief>) -> NameOrder {
            order(&self.step(belief, true, NOW))
        }

        fn gone(&self) -> BTreeMap<Name, Revision> {
            self.names.leaving(self.fleet.view())
        }

        fn confirm(&self, belief: Option<Belief>, gone: &BTreeMap<Name, Revision>) -> Option<Transaction> {
            self.names.confirm(self.fleet.view(), belief, gone, NOW)
        }
    }

    #[test]
    fn a_machine_runs_only_with_a_lease_and_records_of_its_epoch() {
        let mut case = Case::new();
        let epoch = case.epoch;
        let belief = Belief { epoch, until: UNTIL };
        let orders = case.step(Some(belief), true, NOW);
        assert_eq!(order(&orders), NameOrder::Run);
        assert_eq!(orders.deadline, Some(UNTIL.after_ms(ISOLATION_MS)));
        assert_eq!(
            orders.order(&name("desk-002"), None, IsolationAction::Keep),
            NameOrder::End,
            "it is not ours"
        );
        let late = case.step(Some(belief), true, UNTIL);
        assert_eq!((order(&late), late.deadline), (NameOrder::End, None));
        assert_eq!(late.order(&name("desk-002"), None, IsolationAction::Keep), NameOrder::GoOn);
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
        assert!(orders.refusal.unwrap().contains("gets a new epoch"));
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
        let placed = case.fleet.view().place(&name("a"), &name("desk"), &name("desk-001")).unwrap().modified;
        let own = BTreeMap::from([(name("desk-001"), placed)]);
        assert_eq!((case.gone(), case.confirm(belief, &own)), (BTreeMap::new(), None), "it is to run here");
        // It was looked for before it was to be given up.
        let before = case.gone();
        case.place(case.epoch, json!({"is_leaving": true}));
        assert_eq!(case.step(belief, true, NOW).machines[&name("desk-001")], NameOrder::GoOn);
        assert_eq!(case.confirm(belief, &before), None, "nobody has looked for it");
        let gone = case.gone();
        let release = case.confirm(belief, &gone).unwrap();
        assert_eq!(case.confirm(None, &gone), None, "without a lease nothing is confirmed");
        case.place(case.epoch, json!({"is_leaving": false}));
        assert_eq!(case.fleet.commit(&release), crate::transaction::Outcome::Conflict);
        case.place(case.epoch, json!({"is_leaving": true}));
        assert_eq!(case.confirm(belief, &gone), None, "it may have run in between");
        case.place(case.epoch - 1, json!({"is_leaving": true}));
        assert_eq!(
            case.confirm(belief, &case.gone()),
            None,
            "it may be that of a host that had this name before"
        );
    }

    #[test]
    fn records_that_cannot_be_read_end_nothing_and_start_nothing() {
        let broken = json!({"epoch": "x"});
        for key in ["place/a/desk/desk-001", "named/desk/desk-001"] {
            let mut case = Case::new();
            let belief = Some(Belief { epoch: case.epoch, until: UNTIL });
            case.fleet.set(key, broken.clone());
            let orders = case.step(belief, true, NOW);
            assert_eq!(order(&orders), NameOrder::GoOn, "{key}");
            assert!(orders.deadline.is_some(), "it ends no other one: {key}");
            assert_eq!(case.order(None), NameOrder::End, "without a lease nothing counts: {key}");
        }
        let mut case = Case::new();
        let belief = Some(Belief { epoch: case.epoch, until: UNTIL });
        case.fleet.set("named/desk/desk-001", json!({"host": "b"}));
        case.fleet.set("place/b/desk/desk-001", broken);
        assert_eq!(case.order(belief), NameOrder::End, "it is another host's");
    }

    #[test]
    fn a_machine_of_another_identity_is_not_the_one_that_was_placed() {
        let mut case = Case::new();
        let belief = Some(Belief { epoch: case.epoch, until: UNTIL });
        let before = case.step(belief, true, NOW).deadline;
        assert!(before.is_some());
        let orders = case.names.step(case.fleet.view(), belief, &running_as("v"), NOW);
        let of = |uuid| orders.order(&name("desk-001"), uuid, IsolationAction::Stop);
        assert_eq!([Some("v"), Some("u"), None].map(of), [NameOrder::End, NameOrder::Run, NameOrder::Run]);
        assert_eq!(orders.deadline, None, "it must end before");
    }

    #[test]
    fn a_host_with_records_of_another_boot_waits_for_the_one_that_may_have_them_too() {
        let mut case = Case::new();
        case.names = HostNames::new(name("a"), case.epoch, Moment(0)).of_other_boot();
        let belief = |now: Moment| Some(Belief { epoch: case.epoch, until: now.after_ms(10_000) });
        let late = NOW.after_ms(OTHER_BOOT_MS);
        let (first, last) = (belief(NOW), belief(late));
        let orders = case.step(first, false, NOW);
        assert_eq!((order(&orders), orders.record_boot), (NameOrder::GoOn, false));
        assert!(orders.refusal.unwrap().contains("has booted"));
        assert_eq!(order(&case.step(last, false, Moment(late.0 - 1))), NameOrder::GoOn);
        let orders = case.step(last, false, late);
        assert_eq!((order(&orders), orders.record_boot, orders.refusal), (NameOrder::Run, true, None));
        case.place(case.epoch, json!({"is_leaving": true}));
        let confirm = |case: &Case| case.names.confirm(case.fleet.view(), last, &case.gone(), late);
        assert_eq!(confirm(&case), None, "the other one may have it");
        case.names.recorded_boot();
        assert!(!case.step(last, false, late).record_boot);
        assert!(confirm(&case).is_some());
    }
}
