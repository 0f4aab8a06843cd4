//! The world of a simulated fleet: true time, messages that take some, and faults.

use super::host::{Host, Message, is_of_placer, shares_written};
use super::rng::Rng;
use super::sample::name;
use super::store::Store;
use serde_json::{Value, json};
use spillway_api::{FleetHostAction, Name};
use spillway_fleet::changes::change_host;
use spillway_fleet::keys::Key;
use spillway_fleet::transaction::{Comparison, Outcome, Revision, Transaction};
use std::collections::{BTreeMap, BTreeSet};

const TICK_MS: u64 = 250;
/// A daemon that has answered others for so long is not replaced.
const REACHED_MS: u64 = 40_000;

/// How often something happened, over all fleets.
#[derive(Debug, Default)]
pub struct Seen {
    pub terms: u64,
    pub applied: u64,
    pub conflicts: u64,
    pub lost_answers: u64,
    pub replaced: u64,
    pub leaders: u64,
    pub compactions: u64,
    /// Claims of machines, and what people did to hosts: they drained them, or declared them dead.
    pub claims: u64,
    pub acts: u64,
    pub slowest_ms: u64,
    /// Hosts that got another version by a rollout; rollouts that have halted, and that were done.
    pub started: u64,
    pub halted: u64,
    pub done: u64,
    /// Hosts that were looked at when another wave began.
    pub waited: u64,
    /// Rollouts that were done and had reached a host.
    pub reached: u64,
    /// Rollouts that waited while the catalog's machines were on no host.
    pub stranded: u64,
    /// How often hosts have refused a version.
    pub refused: u64,
}

enum Event {
    /// A transaction of a host reaches the store.
    Commit { from: usize, number: Option<u64>, transaction: Transaction, instance: String },
    /// Its answer reaches the host.
    End { to: usize, number: u64, outcome: Option<Outcome>, instance: String },
    /// A question reaches a host.
    Ask { from: usize, about: usize, of: usize, instance: String },
    /// Its answer reaches the placer.
    Answer { to: usize, about: Name, by: Name, reaches: bool, instance: String },
}

pub struct World {
    pub now: u64,
    pub store: Store,
    pub hosts: Vec<Host>,
    pub(super) random: Rng,
    events: BTreeMap<(u64, u64), Event>,
    last_event: u64,
    /// Who has written in each term.
    terms: BTreeMap<Revision, (usize, String)>,
    has_faults: bool,
    /// Whether connections between hosts break, too.
    breaks_peers: bool,
    pub shares_written: u64,
    pub compactions: u64,
    pub acts: u64,
    /// Machines of each catalog that rollouts leave ready.
    pub min_ready: u32,
    /// Hosts on which all machines of `desk` were ready with a version once; none: nobody looks.
    pub done: Option<BTreeSet<(Name, u32)>>,
    /// When people ended the drain of a host.
    pub(super) uncordoned: BTreeMap<Name, u64>,
}

impl World {
    /// Hosts, of which the first may place.
    pub fn new(seed: u64, hosts: usize, may_place: usize) -> World {
        let mut random = Rng(seed ^ 0x5EED);
        let mut store = Store::default();
        let meta = json!({"format": 1, "fleet_id": "x", "created": "2026-01-01T00:00:00Z", "placer": true});
        store.put("meta", &meta.to_string());
        let hosts: Vec<Host> = (0..hosts).map(|n| Host::new(n, n < may_place, &mut random)).collect();
        hosts.iter().for_each(|host| store.put(&format!("hosts/{}", host.name), &host.record()));
        let breaks_peers = random.chance(2);
        World {
            now: 0,
            store,
            hosts,
            random,
            events: BTreeMap::new(),
            last_event: 0,
            terms: BTreeMap::new(),
            has_faults: false,
            breaks_peers,
            shares_written: 0,
            compactions: 0,
            acts: 0,
            min_ready: 0,
            done: None,
            uncordoned: BTreeMap::new(),
        }
    }

    pub fn catalog(&mut self, catalog: &str, count: u32, lost_after_seconds: u32) {
        let key = format!("catalogs/{catalog}");
        let known = self.store.entries.get(&key);
        let known: Option<Value> = known.map(|entry| serde_json::from_slice(&entry.value).unwrap());
        let generation = known.as_ref().map_or(1, |known| known["generation"].as_u64().unwrap() + 1);
        let version = known.as_ref().map_or_else(|| json!(1), |known| known["version"].clone());
        let history = known.as_ref().map_or_else(
            || json!([{"image": "debian", "version": 1, "since": "2026-01-01T00:00:00Z"}]),
            |known| known["history"].clone(),
        );
        let spec = json!({"image": "debian", "count": count, "ram_bytes": 1u64 << 29, "memory_bytes": 1u64 << 29,
            "lost_after_seconds": lost_after_seconds, "min_ready": self.min_ready, "waves": ["1", "30%", "100%"]});
        let record = json!({"spec": spec, "version": version, "generation": generation, "history": history,
            "created": "2026-01-01T00:00:00Z"});
        self.store.put(&key, &record.to_string());
    }

    pub fn run_for(&mut self, ms: u64, seen: &mut Seen) {
        self.run_until(ms, seen, |_| false);
    }

    /// Runs until something holds. The time that it took; none: it did not come in time.
    pub fn run_until(&mut self, ms: u64, seen: &mut Seen, holds: impl Fn(&World) -> bool) -> Option<u64> {
        let begin = self.now;
        while self.now < begin + ms {
            self.tick(seen);
            // Looking at everything takes longer than a turn.
            if self.now.is_multiple_of(1000) && holds(self) {
                return Some(self.now - begin);
            }
        }
        None
    }

    fn tick(&mut self, seen: &mut Seen) {
        self.now += TICK_MS;
        self.store.tick(self.now);
        while let Some(entry) = self.events.first_entry().filter(|entry| entry.key().0 <= self.now) {
            let event = entry.remove();
            self.happen(event, seen);
        }
        for n in 0..self.hosts.len() {
            if !self.hosts[n].has_peers(self.now) {
                self.hosts[n].reached_since = self.now;
            }
            let messages = self.hosts[n].tick(&mut self.store, self.now, &mut self.random);
            messages.into_iter().for_each(|message| self.send(n, message));
        }
        self.note_done();
    }

    fn later(&mut self, event: Event) {
        let slow = self.has_faults && self.random.chance(8);
        let delay = self.random.below(if slow { 8_000 } else { 100 });
        self.last_event += 1;
        self.events.insert((self.now + delay, self.last_event), event);
    }

    fn send(&mut self, from: usize, message: Message) {
        let instance = self.hosts[from].identity.instance.clone();
        match message {
            Message::Commit { number, transaction } => {
                self.later(Event::Commit { from, number, transaction, instance });
            }
            Message::Ask { about, of } => {
                if let (Some(about), Some(of)) = (self.index(&about), self.index(&of)) {
                    self.later(Event::Ask { from, about, of, instance });
                }
            }
        }
    }

    fn index(&self, host: &Name) -> Option<usize> {
        host.as_str()[1..].parse().ok().filter(|n| *n < self.hosts.len())
    }

    fn happen(&mut self, event: Event, seen: &mut Seen) {
        match event {
            Event::Commit { from, number, transaction, instance } => {
                let is_lost = self.has_faults && self.random.chance(25);
                let reaches = self.hosts[from].has_store(self.now) && !(is_lost && self.random.chance(2));
                let outcome = if reaches { self.commit(from, &transaction, &instance, seen) } else { None };
                seen.lost_answers += u64::from(is_lost);
                if let Some(number) = number {
                    let outcome = outcome.filter(|_| !is_lost);
                    self.later(Event::End { to: from, number, outcome, instance });
                }
            }
            Event::End { to, number, outcome, instance } => {
                let host = &mut self.hosts[to];
                if host.identity.instance == instance {
                    host.placer.ended(number, outcome);
                }
            }
            Event::Ask { from, about, of, instance } => {
                let is_own = from == of;
                let asked = self.hosts[from].has_peers(self.now) || is_own;
                if asked && self.hosts[of].runs(self.now) && (is_own || self.hosts[of].has_peers(self.now)) {
                    let reaches = self.hosts[of].has_peers(self.now) && self.hosts[about].has_peers(self.now);
                    let (about, by) = (self.hosts[about].name.clone(), self.hosts[of].name.clone());
                    self.later(Event::Answer { to: from, about, by, reaches, instance });
                }
            }
            Event::Answer { to, about, by, reaches, instance } => {
                let now = self.now;
                let host = &mut self.hosts[to];
                if host.identity.instance == instance && host.has_peers(now) {
                    host.placer.answered(&about, &by, reaches);
                }
            }
        }
    }

    fn commit(
        &mut self,
        from: usize,
        transaction: &Transaction,
        instance: &str,
        seen: &mut Seen,
    ) -> Option<Outcome> {
        let lease = self.hosts[from].lease.filter(|_| self.hosts[from].identity.instance == instance);
        let before = is_of_placer(transaction).then(|| self.rollouts());
        let outcome = self.store.commit(transaction, lease, self.now)?;
        if let (Some(before), Outcome::Applied(_)) = (before, outcome) {
            self.check_rollouts(&before, transaction, seen);
        }
        if !is_of_placer(transaction) {
            return Some(outcome);
        }
        if outcome == Outcome::Conflict {
            seen.conflicts += 1;
            return Some(outcome);
        }
        seen.applied += 1;
        self.shares_written += shares_written(transaction) as u64;
        let Some(Comparison::Created(Key::Placer, term)) = transaction.comparisons.first() else { panic!() };
        let known = self.terms.len();
        let writer = self.terms.entry(*term).or_insert_with(|| (from, instance.to_owned()));
        assert_eq!((writer.0, writer.1.as_str()), (from, instance), "two placers write in term {term}");
        seen.terms += (self.terms.len() - known) as u64;
        for comparison in &transaction.comparisons {
            if let Comparison::Created(Key::Alive(host), 0) = comparison {
                let record = self.store.entries.get(&format!("hosts/{host}")).map(|entry| &entry.value);
                let record: Option<Value> = record.and_then(|value| serde_json::from_slice(value).ok());
                let is_dead = record.is_none_or(|record| !record["dead_epoch"].is_null());
                let host = &self.hosts[self.index(host).unwrap()];
                seen.replaced += 1;
                // Whoever was asked has answered within some seconds, which counts for ten.
                let is_reached = self.now - host.reached_since > REACHED_MS;
                assert!(
                    is_dead || self.breaks_peers || !is_reached,
                    "{} is replaced, and its daemon has answered since {}",
                    host.name,
                    host.reached_since
                );
            }
        }
        Some(outcome)
    }

    /// One of the faults.
    pub fn fault(&mut self) {
        self.has_faults = true;
        let (n, now) = (self.random.below(self.hosts.len() as u64) as usize, self.now);
        let ms = 1_000 + self.random.below(if self.random.clone().chance(3) { 150_000 } else { 20_000 });
        match self.random.below(15) {
            0 | 1 => self.hosts[n].restart(now, ms),
            2 => self.hosts[n].paused_until = now + ms,
            3 | 4 => self.hosts[n].cut_until = now + ms,
            5 if self.breaks_peers => self.hosts[n].alone_until = now + ms,
            6 => {
                let ends = self.random.chance(2);
                self.store.lose_leader(now, self.random.below(20_000), ends);
            }
            7 => {
                self.store.compact();
                self.compactions += 1;
            }
            // A clock jumps ahead, as during a suspension.
            8 => self.hosts[n].offset += self.random.below(100_000),
            // A zone has no connection to etcd.
            9 => {
                let zone = self.hosts[n].zone.clone();
                let of_zone = self.hosts.iter_mut().filter(|host| host.zone == zone);
                of_zone.for_each(|host| host.cut_until = now + ms);
            }
            10 => self.pause_placer_for(ms),
            // People change their minds about a host, and about how soon a catalog's machines are replaced.
            11 => {
                let action = match self.random.chance(2) {
                    true => FleetHostAction::Cordon,
                    false => FleetHostAction::Uncordon,
                };
                self.act(n, action);
            }
            13 => self.act(n, FleetHostAction::Drain),
            // It is refused while a host has a lease: people see one that is off for longer.
            14 if !self.hosts[n].runs(now) => self.act(n, FleetHostAction::DeclareDead),
            12 => {
                let (count, lost_after_seconds) = (self.count("build"), 20 + self.random.below(40));
                self.catalog("build", count as u32, lost_after_seconds as u32);
            }
            _ => {}
        }
    }

    /// The placer, whoever it is, stands still, with all of its host.
    fn pause_placer_for(&mut self, ms: u64) {
        let until = self.now + ms;
        if let Some(host) = self.placer() {
            host.paused_until = until;
        }
    }

    fn placer(&mut self) -> Option<&mut Host> {
        self.hosts.iter_mut().find(|host| {
            let view = host.view.as_ref();
            view.is_some_and(|view| host.placer.status(view).is_some())
        })
    }

    /// Another host places from now on. Nothing else happens to the one before.
    pub fn replace_placer(&mut self) {
        self.store.revoke(&Key::Placer);
    }

    /// Somebody does something to a host.
    pub(super) fn act(&mut self, host: usize, action: FleetHostAction) {
        let of = self.hosts[host].name.clone();
        let record = &self.store.entries[&format!("hosts/{of}")].value;
        let record = serde_json::from_slice::<Value>(record).unwrap_or_default();
        let was_draining = record["is_draining"] == true;
        let is_done = self.ask(|view| change_host(view, &of, action).map(Some)) == Ok(true);
        let counts = matches!(action, FleetHostAction::Drain | FleetHostAction::DeclareDead);
        self.acts += u64::from(is_done && counts);
        if is_done && was_draining && action == FleetHostAction::Uncordon {
            self.uncordoned.insert(of, self.now);
        }
    }

    pub fn end_faults(&mut self) {
        self.has_faults = false;
        super::CLAIMS.with(|claims| claims.set(false));
        let now = self.now;
        self.store.leaderless_until = self.store.leaderless_until.min(now);
        (0..self.hosts.len()).for_each(|n| self.act(n, FleetHostAction::Uncordon));
        for host in &mut self.hosts {
            let untils =
                [&mut host.down_until, &mut host.paused_until, &mut host.cut_until, &mut host.alone_until];
            untils.into_iter().for_each(|until| *until = now.min(*until));
        }
    }

    fn shares(&self) -> BTreeMap<(Name, Name), u32> {
        let all =
            self.store.entries.range("share/".to_owned()..).take_while(|(key, _)| key.starts_with("share/"));
        all.map(|(key, entry)| {
            let Ok(Key::Share(host, catalog)) = key.parse() else { panic!("{key}") };
            let record: Value = serde_json::from_slice(&entry.value).unwrap();
            ((host, catalog), record["count"].as_u64().unwrap() as u32)
        })
        .collect()
    }

    fn count(&self, catalog: &str) -> u64 {
        let record: Value =
            serde_json::from_slice(&self.store.entries[&format!("catalogs/{catalog}")].value).unwrap();
        record["spec"]["count"].as_u64().unwrap()
    }

    /// Whether the shares of hosts that are there have the counts that are wanted.
    pub fn are_placed(&self, catalogs: &[&str]) -> bool {
        let shares = self.shares();
        catalogs.iter().all(|catalog| {
            let of = name(catalog);
            let all = shares.iter().filter(|((_, share), _)| *share == of);
            all.map(|(_, count)| u64::from(*count)).sum::<u64>() == self.count(catalog)
        })
    }

    /// Whether the machines are ready, too.
    pub fn is_whole(&self, catalogs: &[&str]) -> bool {
        let is_ready = |catalog: &&str| {
            let of = name(catalog);
            let there = self.hosts.iter().filter(|host| host.runs(self.now));
            there.map(|host| u64::from(host.ready(&of))).sum::<u64>() == self.count(catalog)
        };
        self.are_placed(catalogs) && catalogs.iter().all(is_ready)
    }

    pub fn why(&self, catalogs: &[&str]) -> String {
        let counts: Vec<_> = catalogs.iter().map(|catalog| (catalog, self.count(catalog))).collect();
        let of = |host: &Host| host.view.as_ref().and_then(|view| host.placer.status(view));
        let status = self.hosts.iter().find_map(of);
        format!("{counts:?}, {:?}, {status:?}", self.shares())
    }

    /// Machines that the shares of a host have.
    pub fn machines_of(&self, host: usize) -> u32 {
        let of = &self.hosts[host].name;
        self.shares().iter().filter(|((host, _), _)| host == of).map(|(_, count)| *count).sum()
    }
}
