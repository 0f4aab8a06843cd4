//! The simulated fleet: true time, messages that are late or lost, faults, and the check of each moment.

use crate::node::{Fork, Node, Phase, Vmm};
use crate::rng::Rng;
use crate::sample::{GIB, name};
use crate::store::Store;
use crate::{Removed, Seen};
use serde_json::{Value, json};
use spillway_api::{FleetHostAction, IsolationAction, Name};
use spillway_fleet::Moment;
use spillway_fleet::changes::{change_host, remove_host};
use spillway_fleet::election::candidacy;
use spillway_fleet::keys::Key;
use spillway_fleet::liveness::StoreHealth;
use spillway_fleet::membership::KnownLease;
use spillway_fleet::named::{NamedOrders, VALID_MS};
use spillway_fleet::placer::PlacerAction;
use spillway_fleet::records::NamedRecord;
use spillway_fleet::transaction::{Outcome, Transaction, Write};
use spillway_fleet::view::FleetView;
use std::collections::{BTreeMap, BTreeSet};

/// Interval of the guard, and of the check.
pub const STEP_MS: u64 = 50;
/// Longest time until a killed process has ended.
const DEATH_MS: u64 = 200;
/// Time after the standstill of a whole host for which its guard may not have acted yet.
const AWAKE_MS: u64 = 2 * STEP_MS + DEATH_MS;
/// Time after which an answer is not waited for any more.
const ANSWER_MS: u64 = 2_000;

enum Kind {
    Membership,
    Candidacy,
    Release,
    Placer(u64),
}

enum Event {
    /// A request to renew (0: to grant) a lease is at etcd.
    Renew(i64, Moment),
    /// Its answer is at the daemon; none: there is no such lease.
    Renewed(Option<i64>, Moment),
    Commit(Kind, Transaction, i64),
    Ended(Kind, Option<Outcome>),
    /// A host is to say whether it reaches another.
    Ask(Name, usize),
    Answer(Name, Name, bool),
    /// A forked process executes QEMU.
    Execute(u64, Fork),
}

pub struct World {
    pub now: u64,
    pub rng: Rng,
    pub store: Store,
    pub nodes: Vec<Node>,
    /// Time, order, host, its daemon's process.
    events: BTreeMap<(u64, u64), (usize, u64, Event)>,
    order: u64,
    processes: u64,
    boots: u64,
    removed: Removed,
    quiet: bool,
    pub seen: Seen,
}

/// How fast a clock goes.
fn rate(rng: &mut Rng) -> f64 {
    0.97 + rng.below(61) as f64 / 1000.0
}

impl World {
    pub fn new(seed: u64, hosts: usize, action: &str, removed: Removed) -> World {
        let mut rng = Rng(seed);
        let store = Store::new(rate(&mut rng));
        let names = ["a", "b", "c", "d", "e"].iter().take(hosts).zip(1..);
        let nodes: Vec<Node> = names.map(|(host, boot)| Node::new(host, boot, rate(&mut rng))).collect();
        let (events, seen) = (BTreeMap::new(), Seen::default());
        let (now, order, processes, boots, quiet) = (0, 0, 0, hosts as u64, false);
        let mut world =
            World { now, rng, store, nodes, events, order, processes, boots, removed, quiet, seen };
        let meta = json!({"format": 1, "fleet_id": "x", "created": "2026-01-01T00:00:00Z", "placer": true});
        world.put(Key::Meta, &meta);
        world.catalog(3, action);
        world
    }

    pub fn put(&mut self, key: Key, record: &Value) {
        let writes = vec![Write::Put(key, record.to_string().into_bytes())];
        self.store.commit(&Transaction { comparisons: vec![], writes }, 0, self.now);
    }

    pub fn catalog(&mut self, count: u32, action: &str) {
        let spec = json!({"image": "debian", "count": count, "ram_bytes": GIB / 2, "memory_bytes": GIB / 2,
            "identity": "named", "on_isolation": action});
        let record = json!({"spec": spec, "version": 1, "generation": 1, "history": [], "created": "2026-01-01T00:00:00Z"});
        self.put(Key::Catalog(name("n")), &record);
    }

    /// The records, as they are now.
    pub fn view(&self) -> FleetView {
        let mut view = FleetView::default();
        let mut number = 0;
        while let Some(update) = self.store.change(number, self.now) {
            view.apply(update.clone());
            number += 1;
        }
        view
    }

    pub fn act(&mut self, number: usize, action: FleetHostAction) {
        let view = self.view();
        if let Ok(transaction) = change_host(&view, &self.nodes[number].host, action) {
            self.store.commit(&transaction, 0, self.now);
        }
    }

    /// Whether all that machines with the name of a host run ends by itself, so that people may be wrong about it.
    pub fn is_mortal(&self, number: usize) -> bool {
        let view = self.view();
        let host = &self.nodes[number].host;
        let mut places = view.places.get(host).into_iter().flat_map(BTreeMap::values);
        let keeps = places.any(|place| place.value.on_isolation == IsolationAction::Keep);
        let nodes = self.nodes.iter().filter(|node| node.host == *host && !node.is_off);
        nodes.into_iter().all(|node| node.is_guarded() && !keeps)
    }

    /// Removes a host that is declared dead, and all that it has. Whether it is.
    pub fn remove(&mut self, number: usize) -> bool {
        let view = self.view();
        let change = remove_host(&view, &self.nodes[number].host);
        let done = change.map(|transaction| self.store.commit(&transaction, 0, self.now));
        let is_removed = matches!(done, Ok(Some(Outcome::Applied(_))));
        self.seen.removed += usize::from(is_removed);
        is_removed
    }

    /// Number of the next boot.
    pub fn boot(&mut self) -> u64 {
        self.boots += 1;
        self.boots
    }

    /// Another machine begins under the name of a host: with its records, which were copied, or with none.
    pub fn join(&mut self, number: usize, is_copy: bool) {
        let (boot, rate) = (self.boot(), rate(&mut self.rng));
        let begins_at = self.now + self.rng.below(20_000);
        let before = &mut self.nodes[number];
        let node =
            if is_copy { before.copy(boot, rate) } else { Node::new(before.host.as_str(), boot, rate) };
        // Otherwise both would run in turns.
        before.is_retired |= is_copy;
        self.seen.joined += 1;
        self.nodes.push(Node { begins_at, ..node });
    }

    /// A host joins that nobody has known before.
    pub fn arrive(&mut self, host: &str) {
        let (boot, rate) = (self.boot(), rate(&mut self.rng));
        self.nodes.push(Node { begins_at: self.now, ..Node::new(host, boot, rate) });
    }

    /// Whether the names of the catalog run, each on one host that was given it as the member that it is, no others do, and all with this
    /// setting. What still runs of an earlier membership is about to end, and so is what a daemon that hangs has started.
    pub fn all_run(&self, count: u32, action: &str) -> bool {
        let action: IsolationAction = serde_json::from_value(json!(action)).unwrap();
        let view = self.view();
        let is_given = |machine: &Name, host: &Name| {
            let record = view.named.get(&name("n")).and_then(|names| names.get(machine));
            let alive = view.alive.get(host);
            record.zip(alive).is_some_and(|(record, alive)| {
                record.value.host.as_ref() == Some(host) && record.value.epoch == alive.created
            })
        };
        let vmms: Vec<_> =
            self.nodes.iter().flat_map(|node| node.vmms.iter().map(move |vmm| (node, vmm))).collect();
        let runs =
            |vmm: &Vmm| vmm.phase == Phase::Running && vmm.ends.is_none() && vmm.on_isolation == action;
        let names: BTreeSet<&Name> = vmms.iter().map(|(_, (machine, _))| *machine).collect();
        // A name too many, whose host is away, would run once more when that comes back.
        let recorded = view.named.values().map(|names| names.len()).sum::<usize>();
        vmms.len() == count as usize
            && recorded == vmms.len()
            && names.len() == vmms.len()
            && vmms
                .iter()
                .all(|(node, (machine, vmm))| runs(vmm) && !node.is_retired && is_given(machine, &node.host))
    }

    /// What hosts run, and what the records say, for people.
    pub fn why(&self) -> String {
        let view = self.view();
        let names = view.named.values().flatten().map(|(machine, record)| {
            let NamedRecord { host, epoch, state, on_isolation, .. } = &record.value;
            let place = host.as_ref().and_then(|host| view.place(host, &name("n"), machine));
            let place = place.map(|place| (place.value.epoch, place.value.is_leaving));
            format!("{machine}: {state:?} on {host:?} in {epoch} {on_isolation:?}, place {place:?}")
        });
        let nodes = self.nodes.iter().map(|node| {
            let vmms = node.vmms.iter();
            let vmms = vmms.map(|(machine, vmm)| format!("{machine} {:?} {:?}", vmm.phase, vmm.on_isolation));
            let (host, vmms) = (&node.host, vmms.collect::<Vec<_>>());
            let alive = view.alive.get(host).map(|alive| (alive.created, &alive.value.boot_id));
            let record = view.hosts.get(host).map(|host| (&host.value.host_id, host.value.dead_epoch));
            let (boot, retired) = (node.boot, node.is_retired);
            format!("{host} of boot {boot}, retired {retired}, alive {alive:?}, {record:?}: {vmms:?}")
        });
        names.chain(nodes).collect::<Vec<_>>().join("\n")
    }

    /// The newest machine with the name of a host.
    fn named(&self, host: &Name) -> Option<usize> {
        self.nodes.iter().rposition(|node| node.host == *host)
    }

    /// What a host says of itself when it begins.
    fn report(&mut self, number: usize) {
        let key = Key::Status(self.nodes[number].host.clone());
        if self.store.lease_of(&key.to_string()).is_none() {
            let most = 1u64 << 40;
            let budget =
                json!({"guarantee_bytes": most, "limit_bytes": most, "memory_bytes": 4 * GIB, "vcpus": 99});
            self.put(key, &json!({ "budget": budget }));
        }
    }

    fn later(&mut self, at: u64, node: usize, process: u64, event: Event) {
        self.order += 1;
        self.events.insert((at, self.order), (node, process, event));
    }

    fn delay(&mut self) -> u64 {
        if self.quiet || !self.rng.chance(20) { self.rng.below(200) } else { self.rng.below(8_000) }
    }

    fn is_lost(&mut self) -> bool {
        !self.quiet && self.rng.chance(25)
    }

    /// Without late messages, for directed schedules.
    pub fn be_quiet(&mut self) {
        self.quiet = true;
    }

    pub fn run_until(&mut self, until: u64) -> Result<(), String> {
        while self.now < until {
            self.now += STEP_MS;
            self.step();
            self.check()?;
        }
        Ok(())
    }

    fn step(&mut self) {
        self.store.tick(self.now);
        while let Some(entry) = self.events.first_entry().filter(|entry| entry.key().0 <= self.now) {
            let (node, process, event) = entry.remove();
            self.handle(node, process, event);
        }
        for number in 0..self.nodes.len() {
            let ends_in = self.rng.below(DEATH_MS);
            let node = &mut self.nodes[number];
            if !node.runs(self.now) {
                node.resumed = self.now;
                continue;
            }
            self.seen.killed += node.guard(self.now, ends_in, self.removed);
            if node.daemon.is_none() && self.now >= node.begins_at {
                self.processes += 1;
                node.begin_daemon(self.processes, self.removed);
                self.report(number);
            }
            let node = &mut self.nodes[number];
            if node.daemon_runs(self.now) && self.now >= node.ticks_at {
                node.ticks_at = self.now + 250 + self.rng.below(500);
                self.tick(number);
            }
        }
    }

    fn tick(&mut self, number: usize) {
        let now = self.now;
        let clock = self.nodes[number].clock(now);
        let decided = self.nodes[number].daemon.as_mut().and_then(|daemon| daemon.decided.take());
        if let Some((orders, releases)) = decided {
            self.carry_out(number, &orders, releases.as_ref());
        }
        self.renew(number, clock);
        self.nodes[number].follow(&self.store, now);
        let (orders, releases, change) = self.nodes[number].decide(now, self.removed);
        let node = &mut self.nodes[number];
        let daemon = node.daemon.as_mut().unwrap();
        let process = daemon.number;
        if let Some(transaction) = change.filter(|_| !std::mem::replace(&mut daemon.writes, true)) {
            self.commit(number, process, Kind::Membership, transaction);
        } else {
            self.nodes[number].daemon.as_mut().unwrap().writes &= self.has_open_write(number);
        }
        if !self.quiet && self.rng.chance(400) {
            // It is stopped between what it has decided and what it does.
            let node = &mut self.nodes[number];
            node.stopped_until = now + 1_000 + self.rng.below(100_000);
            node.daemon.as_mut().unwrap().decided = Some((orders, releases));
            return;
        }
        self.carry_out(number, &orders, releases.as_ref());
        self.place(number, clock);
    }

    fn has_open_write(&self, number: usize) -> bool {
        let process = self.nodes[number].daemon.as_ref().map(|daemon| daemon.number);
        self.events.values().any(|(node, of, event)| {
            *node == number
                && Some(*of) == process
                && matches!(event, Event::Commit(Kind::Membership, ..) | Event::Ended(Kind::Membership, _))
        })
    }

    fn renew(&mut self, number: usize, clock: Moment) {
        let daemon = self.nodes[number].daemon.as_mut().unwrap();
        if daemon.renewing.is_some_and(|sent| clock.since_ms(sent) >= ANSWER_MS) {
            (daemon.renewing, daemon.renews_next) = (None, clock);
        }
        if daemon.renewing.is_none() && clock >= daemon.renews_next {
            daemon.renewing = Some(clock);
            let (id, process) = (daemon.lease.map_or(0, |lease| lease.id), daemon.number);
            let at = self.now + self.delay();
            if self.now >= self.nodes[number].cut_until {
                self.later(at, number, process, Event::Renew(id, clock));
            }
        }
    }

    fn carry_out(&mut self, number: usize, orders: &NamedOrders, releases: Option<&Transaction>) {
        let ends_in = self.rng.below(DEATH_MS);
        let starts = self.nodes[number].carry_out(orders, self.now, ends_in);
        let (boot, process) = (self.nodes[number].boot, self.processes);
        for fork in starts {
            let machine = &fork.machine;
            if !self.quiet && self.rng.chance(3) {
                let until = self.now + self.rng.below(20_000);
                self.nodes[number].claimed.insert(machine.clone(), until);
            }
            self.nodes[number].forked.insert(machine.clone(), fork.on_isolation);
            let at = self.now + self.rng.below(400);
            self.later(at, number, process, Event::Execute(boot, fork));
        }
        let Some(daemon) = &mut self.nodes[number].daemon else { return };
        let process = daemon.number;
        if let Some(release) = releases.filter(|_| !std::mem::replace(&mut daemon.releases, true)) {
            self.seen.released += 1;
            self.commit(number, process, Kind::Release, release.clone());
        }
        if releases.is_none()
            && let Some(daemon) = &mut self.nodes[number].daemon
        {
            daemon.releases = false;
        }
    }

    fn place(&mut self, number: usize, clock: Moment) {
        let node = &mut self.nodes[number];
        let daemon = node.daemon.as_mut().unwrap();
        let process = daemon.number;
        let holds = daemon.lease.is_some_and(|lease| clock < lease.until);
        let own =
            spillway_fleet::election::Identity { host: node.host.clone(), instance: process.to_string() };
        let tries = candidacy(&daemon.view, &own, holds).filter(|_| !daemon.tries);
        let actions = daemon.placer.step(&daemon.view, &StoreHealth::default(), clock);
        daemon.tries |= tries.is_some();
        if let Some(transaction) = tries {
            self.commit(number, process, Kind::Candidacy, transaction);
        }
        for action in actions {
            match action {
                PlacerAction::Commit { number: of, transaction } => {
                    self.commit(number, process, Kind::Placer(of), transaction);
                }
                PlacerAction::Ask(ask) => {
                    for by in ask.of {
                        let at = self.now + self.delay();
                        let by = self.named(&by).unwrap();
                        self.later(at, number, process, Event::Ask(ask.about.clone(), by));
                    }
                }
                PlacerAction::Event(_) => {}
            }
        }
    }

    fn commit(&mut self, number: usize, process: u64, kind: Kind, transaction: Transaction) {
        let at = self.now + self.delay();
        let node = &self.nodes[number];
        let lease = node.daemon.as_ref().and_then(|daemon| daemon.lease).map_or(0, |lease| lease.id);
        if self.now < node.cut_until {
            let at = self.now + ANSWER_MS;
            self.later(at, number, process, Event::Ended(kind, None));
        } else {
            self.later(at, number, process, Event::Commit(kind, transaction, lease));
        }
    }

    fn handle(&mut self, number: usize, process: u64, event: Event) {
        let now = self.now;
        match event {
            Event::Renew(id, sent) => {
                let answer = match id {
                    0 => Some(self.store.grant(now)),
                    id => self.store.renew(id, now).then_some(id),
                };
                if !self.is_lost() && now >= self.nodes[number].cut_until {
                    let at = now + self.delay();
                    self.later(at, number, process, Event::Renewed(answer, sent));
                }
            }
            Event::Commit(kind, transaction, lease) => {
                let outcome = self.store.commit(&transaction, lease, now);
                let takes = matches!(kind, Kind::Placer(_)) && matches!(outcome, Some(Outcome::Applied(_)));
                let is_from_lost = transaction.comparisons.iter().any(|comparison| {
                    matches!(comparison, spillway_fleet::transaction::Comparison::Created(Key::Alive(_), 0))
                });
                self.seen.replaced += usize::from(takes && is_from_lost);
                let heard = !self.is_lost() && now >= self.nodes[number].cut_until;
                let (at, outcome) = match heard {
                    true => (now + self.delay(), outcome),
                    false => (now + ANSWER_MS + self.rng.below(5_000), None),
                };
                self.later(at, number, process, Event::Ended(kind, outcome));
            }
            Event::Ask(about, by) => {
                let about_number = self.named(&about);
                let is_up = about_number.is_some_and(|about| self.nodes[about].daemon_runs(now));
                let by_host = self.nodes[by].host.clone();
                if self.nodes[by].daemon_runs(now) {
                    let at = now + self.delay();
                    // Half of all hosts that are cut off from etcd are cut off from all.
                    let is_near = about_number
                        .is_some_and(|about| now >= self.nodes[about].cut_until || about.is_multiple_of(2));
                    self.later(
                        at,
                        number,
                        process,
                        Event::Answer(about, by_host, is_up && is_near && by != number),
                    );
                }
            }
            Event::Execute(boot, fork) => self.execute(number, process, boot, fork),
            _ if self.nodes[number].is_retired => {}
            // What comes to a daemon that is stopped waits for it.
            event if !self.nodes[number].daemon_runs(now) && !self.nodes[number].is_off => {
                self.later(now + STEP_MS, number, process, event);
            }
            event => self.hear(number, process, event),
        }
    }

    fn execute(&mut self, number: usize, process: u64, boot: u64, fork: Fork) {
        let now = self.now;
        let node = &mut self.nodes[number];
        if node.boot != boot || node.is_off {
            return;
        }
        if now < node.paused_until {
            let at = node.paused_until;
            self.later(at, number, process, Event::Execute(boot, fork));
            return;
        }
        let Fork { machine, on_isolation, uuid } = fork;
        node.forked.remove(&machine);
        let is_over = node.clock(now) >= node.deadline && on_isolation != IsolationAction::Keep;
        if !is_over || self.removed == Removed::Guard {
            let vmm = Vmm { on_isolation, uuid, phase: Phase::Waiting, ends: None };
            node.vmms.insert(machine, vmm);
            self.seen.started += 1;
        }
    }

    /// The daemon takes an answer.
    fn hear(&mut self, number: usize, process: u64, event: Event) {
        let Some(daemon) = self.nodes[number].daemon.as_mut().filter(|daemon| daemon.number == process)
        else {
            return;
        };
        match event {
            Event::Renewed(id, sent) if daemon.renewing == Some(sent) => {
                daemon.renewing = None;
                match id {
                    Some(id) => {
                        daemon.lease = Some(KnownLease { id, until: sent.after_ms(VALID_MS) });
                        daemon.renews_next = sent.after_ms(5_000);
                    }
                    None => daemon.lease = None,
                }
            }
            Event::Ended(Kind::Membership, _) => daemon.writes = false,
            Event::Ended(Kind::Candidacy, _) => daemon.tries = false,
            Event::Ended(Kind::Release, _) => daemon.releases = false,
            Event::Ended(Kind::Placer(of), outcome) => daemon.placer.ended(of, outcome),
            Event::Answer(about, by, reaches) => daemon.placer.answered(&about, &by, reaches),
            _ => {}
        }
    }

    /// Nobody runs a name that another host runs.
    fn check(&mut self) -> Result<(), String> {
        let mut runs: BTreeMap<&Name, &Node> = BTreeMap::new();
        for node in self.nodes.iter().filter(|node| node.runs(self.now)) {
            for (machine, _) in node.vmms.iter().filter(|(_, vmm)| vmm.phase == Phase::Running) {
                let Some(other) = runs.insert(machine, node) else { continue };
                // The guard of a host that has stood still as a whole cannot have acted.
                let is_awake = |node: &Node| self.now >= node.resumed + AWAKE_MS;
                if !is_awake(node) || !is_awake(other) {
                    self.seen.awakened += 1;
                    continue;
                }
                let (a, b) = (&other.host, &node.host);
                return Err(format!("{machine} runs on {a} and on {b} at {} ms", self.now));
            }
        }
        Ok(())
    }
}
