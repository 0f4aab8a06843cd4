//! A fleet whose hosts carry out their shares in real records, as daemons do: placing, rollouts and elections of the fleet, and on each host
//! what makes catalogs of shares, its batches, its orders for names and its report are the daemon's own. Imagined are etcd, which is late and
//! loses answers, time, and what VMMs do. What a daemon's tasks do at the same time is done one after the other here, reports are
//! written at once, and no daemon begins anew while its machines go on.
//!
//! `SPILLWAY_WHOLE_FLEETS=N` sets the number of fleets, `SPILLWAY_SEED=N` the first seed. One that fails says both.

#[path = "../../../../fleet/tests/common/rng.rs"]
mod rng;
#[path = "../../../../fleet/tests/common/sample.rs"]
mod sample;

mod checks;
mod host;
mod people;

use crate::machines::imagined::Boot;
use host::{SimulatedHost, State};
use rng::Rng;
use sample::{Fleet, identity, name};
use serde_json::json;
use spillway_api::{FleetHostAction, Name};
use spillway_fleet::Moment;
use spillway_fleet::agent::wanted;
use spillway_fleet::changes::change_host;
use spillway_fleet::election::candidacy;
use spillway_fleet::keys::Key;
use spillway_fleet::liveness::StoreHealth;
use spillway_fleet::named::VALID_MS;
use spillway_fleet::placer::PlacerAction;
use spillway_fleet::records::{ShareRecord, StatusRecord};
use spillway_fleet::transaction::{Comparison, Outcome, Transaction, Write};
use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

const HOSTS: usize = 4;
/// Catalogs of the fleet. Machines of the first one start by themselves, and of the second some are kept ready. Those of the third keep their
/// disks, and those of the last have names of the fleet.
const CATALOGS: [&str; 4] = ["desk", "pool", "kept", "seat"];
const KEPT: usize = 2;
const NAMED: usize = 3;
/// Catalog of a host alone.
const OWN: &str = "local";
/// A version whose machines often do not boot, and one that two hosts do not have.
const BAD: u32 = 3;
const MISSING: u32 = 4;
const GOOD: [u32; 3] = [1, 2, 5];
/// Time of a turn of all hosts.
const TURN_MS: u64 = 1_000;
/// Turns with faults, and within how many further ones all is as it should be.
const TROUBLED: u64 = 240;
const MENDED: u64 = 2_000;
/// Within how many turns a host that is back is no more missed.
const MISSED: u64 = 40;
/// Nothing may change for so many turns then: longer than anybody waits to look at everything again.
const QUIET: u64 = 70;
const LEASE_TURNS: u64 = 15;
const REPORT_TURNS: u64 = 10;

/// A transaction that is under way: whose, its number, and turns until it comes.
struct Flight {
    from: usize,
    number: u64,
    transaction: Transaction,
    instance: u64,
    comes_in: u64,
}

/// How often something happened.
#[derive(Debug, Default)]
struct Seen {
    replaced: u64,
    /// Names that run on another host than before.
    moved: u64,
    halted: u64,
    conflicts: u64,
    lost_answers: u64,
    claims: u64,
    claimed_meanwhile: u64,
    waited_for_claims: u64,
    failed: u64,
    refused: u64,
    terms: u64,
    slowest: u64,
}

struct World {
    random: Rng,
    fleet: Fleet,
    hosts: Vec<SimulatedHost>,
    flights: Vec<Flight>,
    /// Starts of each host's daemon: answers for an earlier one are lost.
    starts: [u64; HOSTS],
    turn: u64,
    begin: Instant,
    has_faults: bool,
    /// Whether the last updates have begun, and are not at their end.
    is_rolling: bool,
    /// Versions that a host was ever told to give machines of a catalog.
    told: BTreeMap<(Name, Name), BTreeSet<u32>>,
    /// Claimed machines, with what they were when they were claimed.
    claimed: BTreeMap<(usize, Name), (String, u64, u64)>,
    /// Where each name has run last.
    ran_on: BTreeMap<Name, usize>,
    /// Catalogs that have had so many ready machines as are to stay ready since the last updates have begun.
    were_ready: BTreeSet<Name>,
}

impl World {
    fn new(seed: u64) -> World {
        let mut world = World {
            random: Rng(seed ^ 0xF1EE7),
            fleet: Fleet::new(),
            hosts: (0..HOSTS).map(SimulatedHost::new).collect(),
            flights: Vec::new(),
            starts: [0; HOSTS],
            turn: 0,
            begin: Instant::now(),
            has_faults: true,
            is_rolling: false,
            told: BTreeMap::new(),
            claimed: BTreeMap::new(),
            ran_on: BTreeMap::new(),
            were_ready: BTreeSet::new(),
        };
        for n in 0..HOSTS {
            let (host, zone) = (world.hosts[n].name.to_string(), world.hosts[n].zone.clone());
            world.fleet.set(&format!("hosts/{host}"), json!({"host_id": host, "zone": zone}));
            world.fleet.begin_lease(&host);
        }
        (0..CATALOGS.len()).for_each(|n| world.create(n));
        world
    }

    fn now(&self) -> Moment {
        Moment(1_000_000 + self.turn * TURN_MS)
    }

    fn commit(&mut self, transaction: &Transaction) -> Outcome {
        let outcome = self.fleet.commit(transaction);
        if let Outcome::Applied(_) = outcome {
            trace(self.turn, &written(transaction));
            for write in &transaction.writes {
                if let Write::Put(Key::Share(host, catalog), bytes) = write {
                    let share: ShareRecord = serde_json::from_slice(bytes).unwrap();
                    self.told.entry((host.clone(), catalog.clone())).or_default().insert(share.version);
                }
            }
            self.note_what_new_ones_get();
        }
        outcome
    }

    /// A machine that has a name of the fleet may be on a host before its share is: it begins with what new ones get.
    fn note_what_new_ones_get(&mut self) {
        let (view, seat) = (self.fleet.view(), name(CATALOGS[NAMED]));
        let Some(catalog) = view.catalogs.get(&seat) else { return };
        let rollout = view.rollouts.get(&seat).map(|rollout| &rollout.value);
        let version = rollout.filter(|of| of.is_open()).map_or(catalog.value.version, |of| of.from.version);
        for host in &self.hosts {
            self.told.entry((host.name.clone(), seat.clone())).or_default().insert(version);
        }
    }

    fn turn(&mut self, seen: &mut Seen) {
        self.turn += 1;
        if self.has_faults {
            self.meddle(seen);
        }
        self.land(seen);
        for n in 0..HOSTS {
            self.lease(n);
            if self.hosts[n].state != State::Off {
                self.work(n, seen);
                self.place(n, seen);
            }
        }
        self.check_always();
        self.check_names(seen);
        if self.is_rolling {
            self.check_ready();
        }
    }

    /// Transactions that have arrived are carried out, and some answers are lost.
    fn land(&mut self, seen: &mut Seen) {
        let (due, open): (Vec<Flight>, Vec<Flight>) =
            std::mem::take(&mut self.flights).into_iter().partition(|flight| flight.comes_in == 0);
        self.flights = open;
        self.flights.iter_mut().for_each(|flight| flight.comes_in -= 1);
        for Flight { from, number, transaction, instance, .. } in due {
            let reaches = self.hosts[from].state == State::Up;
            let is_lost = self.has_faults && self.random.chance(20);
            let outcome = if reaches { Some(self.commit(&transaction)) } else { None };
            seen.conflicts += u64::from(outcome == Some(Outcome::Conflict));
            seen.lost_answers += u64::from(is_lost && reaches);
            if instance == self.starts[from] {
                self.hosts[from].placer.ended(number, outcome.filter(|_| !is_lost));
            }
        }
    }

    /// The lease of a host that does not renew it ends, and with it its office.
    fn lease(&mut self, n: usize) {
        let now = self.now();
        let host = &mut self.hosts[n];
        let name = host.name.to_string();
        if host.state == State::Up {
            // A daemon that begins anew does not go on with the lease of the one before.
            let is_new = host.valid_until == Moment(0);
            if is_new && host.silent_for > 0 && self.fleet.view().alive.contains_key(&host.name) {
                self.fleet.end_lease(&name);
            }
            if !self.fleet.view().alive.contains_key(&host.name) {
                self.fleet.begin_lease(&name);
            }
            (host.silent_for, host.valid_until) = (0, now.after_ms(VALID_MS));
            return;
        }
        host.silent_for += 1;
        host.back_in -= 1;
        if host.back_in == 0 {
            host.state = State::Up;
        }
        if host.silent_for == LEASE_TURNS {
            self.fleet.end_lease(&name);
            let leader = self.fleet.view().placer.as_ref().map(|leader| leader.value.host.clone());
            if leader.as_ref() == Some(&self.hosts[n].name) {
                self.fleet.delete("leader/placer");
            }
        }
    }

    /// The daemon carries out its shares, looks after its machines, and reports.
    fn work(&mut self, n: usize, seen: &mut Seen) {
        let is_late = self.has_faults && self.random.chance(4);
        let moment = self.now();
        let (view, random) = (self.fleet.view(), &mut self.random);
        let host = &mut self.hosts[n];
        if host.state == State::Up && !is_late {
            host.shown = view.clone();
        }
        let now = self.begin + Duration::from_millis(self.turn * TURN_MS);
        if let Some(shares) = wanted(&host.shown, "x", &host.name, host.name.as_str())
            && host.pace.is_due(&shares, now)
        {
            host.unfinished = host.reconciler.reconcile(&shares).unwrap();
            host.pace.note(shares, !host.unfinished.is_empty(), now);
            seen.refused += u64::from(!host.unfinished.refused.is_empty());
            let waits = |why: &String| why.contains("claimed");
            seen.waited_for_claims += u64::from(host.unfinished.waiting.values().any(waits));
        }
        let (orders, release) = host.obey(moment);
        host.machines.step(&host.records, &orders, |version, has_failed| match random.below(4) {
            0 if has_failed => Boot::GoesOn,
            0 if version == BAD => {
                seen.failed += 1;
                Boot::Fails
            }
            0 | 1 if !has_failed => Boot::GoesOn,
            _ => Boot::Later,
        });
        let is_due = self.turn >= host.reported + REPORT_TURNS;
        if host.state == State::Up && is_due && host.shown.alive.contains_key(&host.name) {
            let status = host.reconciler.status(&host.unfinished).unwrap();
            let known = host.shown.statuses.get(&host.name).map(|known| &known.value);
            if known != Some(&status) {
                host.reported = self.turn;
                let transaction = report(&host.name, &status);
                self.commit(&transaction);
            }
        }
        if let Some(release) = release.filter(|_| self.hosts[n].state == State::Up) {
            self.commit(&release);
        }
    }

    /// The daemon's part in placing.
    fn place(&mut self, n: usize, seen: &mut Seen) {
        let now = self.now();
        let host = &mut self.hosts[n];
        let is_up = host.state == State::Up;
        if is_up && let Some(transaction) = candidacy(&host.shown, &identity(host.name.as_str()), true) {
            seen.terms += u64::from(matches!(self.fleet.commit(&transaction), Outcome::Applied(_)));
        }
        for action in host.placer.step(&host.shown, &StoreHealth::default(), now) {
            match action {
                PlacerAction::Commit { number, transaction } => {
                    let replaces = |of: &Comparison| matches!(of, Comparison::Created(Key::Alive(_), 0));
                    seen.replaced += u64::from(transaction.comparisons.iter().any(replaces));
                    let comes_in = self.random.below(if self.has_faults { 4 } else { 2 });
                    let instance = self.starts[n];
                    self.flights.push(Flight { from: n, number, transaction, instance, comes_in });
                }
                PlacerAction::Ask(ask) => {
                    for by in ask.of {
                        let state = |of: &Name| {
                            let number: usize = of.as_str()[1..].parse().unwrap();
                            self.hosts[number].state
                        };
                        if state(&by) != State::Off {
                            let reaches = state(&ask.about) != State::Off;
                            self.hosts[n].placer.answered(&ask.about, &by, reaches);
                        }
                    }
                }
                PlacerAction::Event(event) => {
                    seen.halted += u64::from(event.text.contains("halted"));
                    trace(self.turn, &event.text);
                }
            }
        }
    }

    /// All faults end, people take a good version, and the fleet comes to rest.
    fn mend(&mut self, seen: &mut Seen) {
        self.has_faults = false;
        for n in 0..HOSTS {
            self.hosts[n].back_in = self.hosts[n].back_in.min(1);
            self.change_own(n);
            let host = self.hosts[n].name.clone();
            self.ask(|view| change_host(view, &host, FleetHostAction::Uncordon).map(Some));
        }
        // A host that was lost when an update has begun halts it.
        (0..MISSED).for_each(|_| self.turn(seen));
        for n in 0..CATALOGS.len() {
            self.create(n);
            self.move_to_zones(n);
            self.give_good_version(n);
        }
        let begin = self.turn;
        self.is_rolling = true;
        // Whatever they set and claim meanwhile, the version reaches all other machines.
        for _ in 0..self.random.below(4) {
            (0..self.random.below(15)).for_each(|_| self.turn(seen));
            let catalog = name(CATALOGS[self.random.below(CATALOGS.len() as u64) as usize]);
            self.set(&catalog);
            let host = self.random.below(HOSTS as u64) as usize;
            self.claim(host, seen);
        }
        self.go_on_until(World::why_not_rolled, seen);
        seen.claimed_meanwhile += self.claimed.len() as u64;
        for (n, machine) in self.claimed.keys().cloned().collect::<Vec<_>>() {
            self.release(n, &machine);
        }
        self.is_rolling = false;
        self.go_on_until(World::why_not_whole, seen);
        seen.slowest = seen.slowest.max(self.turn - begin);
        let (revision, records) = (self.fleet.revision(), self.revisions());
        (0..QUIET).for_each(|_| self.turn(seen));
        assert_eq!(self.why_not_whole(), None, "it does not stay so");
        assert_eq!(self.fleet.revision(), revision, "something is written at rest");
        assert_eq!(self.revisions(), records, "a host changes its catalogs at rest");
    }

    /// Turns without faults, until nothing is missing any more.
    fn go_on_until(&mut self, why_not: impl Fn(&World) -> Option<String>, seen: &mut Seen) {
        let begin = self.turn;
        while let Some(why) = why_not(self) {
            let took = self.turn - begin;
            let hosts: Vec<String> = self.hosts.iter().map(SimulatedHost::describe).collect();
            assert!(took < MENDED, "after {took} turns without faults {why}\n{}", hosts.join("\n"));
            self.turn(seen);
        }
    }
}

/// The report of a host.
fn report(host: &Name, status: &StatusRecord) -> Transaction {
    let writes = vec![Write::Put(Key::Status(host.clone()), serde_json::to_vec(status).unwrap())];
    Transaction { comparisons: Vec::new(), writes }
}

/// What a transaction writes.
fn written(transaction: &Transaction) -> String {
    let writes = transaction.writes.iter().map(|write| match write {
        Write::Put(key, value) | Write::PutWithLease(key, value) => {
            format!("{key} = {}", String::from_utf8_lossy(value))
        }
        Write::Delete(key) => format!("no {key}"),
    });
    writes.collect::<Vec<_>>().join(", ")
}

fn trace(turn: u64, text: &str) {
    if std::env::var_os("SPILLWAY_TRACE").is_some() {
        println!("{turn}: {text}");
    }
}

fn number(variable: &str) -> Option<u64> {
    std::env::var(variable).ok().map(|number| number.parse().unwrap())
}

/// Whatever has happened before, each machine that the fleet wants is in the records of one host, with the version that it is to have, and then
/// nobody changes anything.
#[test]
fn hosts_with_real_records_come_to_what_the_fleet_wants_and_rest() {
    let (first, fleets) =
        (number("SPILLWAY_SEED").unwrap_or(0), number("SPILLWAY_WHOLE_FLEETS").unwrap_or(3));
    let mut seen = Seen::default();
    for seed in first..first + fleets {
        println!("SPILLWAY_SEED={seed} SPILLWAY_WHOLE_FLEETS=1");
        let mut world = World::new(seed);
        (0..TROUBLED).for_each(|_| world.turn(&mut seen));
        world.mend(&mut seen);
    }
    println!("{fleets} fleets: {seen:?}");
    if fleets >= 100 {
        let Seen { replaced, moved, halted, conflicts, lost_answers, claims, .. } = seen;
        let Seen { claimed_meanwhile, waited_for_claims, failed, refused, terms, .. } = seen;
        let of_fleet = [replaced, moved, halted, conflicts, lost_answers, terms];
        let of_hosts = [claims, claimed_meanwhile, waited_for_claims, failed, refused];
        let counts = of_fleet.into_iter().chain(of_hosts).collect::<Vec<_>>();
        assert!(counts.iter().all(|count| *count > 0), "too little happened: {seen:?}");
    }
}
