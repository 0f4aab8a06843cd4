//! The placer in random fleets with random events: hosts and catalogs that come, change and go, reports, refusals, late views,
//! transactions that wait, conflict, or whose answers are lost. After each step what it has decided is compared with rules that are
//! written here a second time.
//!
//! `SPILLWAY_FLEETS=N` sets the number of fleets, `SPILLWAY_SEED=N` the first. One that fails says both.
#![allow(clippy::unwrap_used)]

#[path = "common/rng.rs"]
mod rng;
#[path = "common/sample.rs"]
mod sample;

use rng::Rng;
use sample::{Fleet, GIB, check, identity, name};
use serde_json::json;
use spillway_api::Name;
use spillway_fleet::Moment;
use spillway_fleet::keys::Key;
use spillway_fleet::liveness::{QUIET_MS, StoreHealth};
use spillway_fleet::placer::{Placer, PlacerAction};
use spillway_fleet::records::HostRecord;
use spillway_fleet::transaction::{Comparison, Outcome, Transaction, Write};
use spillway_fleet::view::{FleetView, Versioned};
use std::collections::{BTreeMap, BTreeSet};

const HOSTS: u64 = 9;
const CATALOGS: u64 = 4;

/// How often something happened, over all fleets: a test in which nothing happens shows nothing.
#[derive(Debug, Default)]
struct Seen {
    applied: u64,
    conflicts: u64,
    lost_answers: u64,
    replaced: u64,
    braked: u64,
    unplaced: u64,
    quiet: u64,
    /// How often refusals were over.
    forgotten: u64,
}

struct World {
    fleet: Fleet,
    /// What the placer sees: the records now, or as they were.
    shown: FleetView,
    placer: Placer,
    now: Moment,
    health: StoreHealth,
    /// Transactions that were not carried out yet.
    open: Vec<(u64, Transaction)>,
    /// Those of them whose answers were lost already.
    unanswered: Vec<Transaction>,
    /// Silent hosts that other hosts reach.
    reachable: BTreeSet<Name>,
    /// Hosts whose budgets have shrunk below what they have.
    shrunk: BTreeSet<Name>,
    /// A host may have refused something lately, which only this placer remembers.
    has_refused: bool,
}

fn host(random: &mut Rng) -> String {
    format!("h{}", random.below(HOSTS))
}

fn catalog(random: &mut Rng) -> String {
    format!("c{}", random.below(CATALOGS))
}

impl World {
    fn new(random: &mut Rng) -> World {
        let mut fleet = Fleet::new();
        fleet.host("p", "z0");
        fleet.budget("p", random.below(4) * GIB);
        fleet.placer("p");
        for n in 0..random.below(HOSTS) {
            fleet.host(&format!("h{n}"), &format!("z{}", random.below(3)));
        }
        World {
            shown: fleet.view().clone(),
            fleet,
            placer: Placer::new(identity("p")),
            now: Moment(1_000_000),
            health: StoreHealth::default(),
            open: Vec::new(),
            unanswered: Vec::new(),
            reachable: BTreeSet::new(),
            shrunk: BTreeSet::new(),
            has_refused: false,
        }
    }

    /// Something that happens in the fleet.
    fn event(&mut self, random: &mut Rng) {
        let (host, catalog) = (host(random), catalog(random));
        let is_known = self.fleet.entries.contains_key(&format!("hosts/{host}"));
        let is_alive = self.fleet.entries.contains_key(&format!("alive/{host}"));
        let key = format!("hosts/{host}");
        match random.below(16) {
            0 if !is_known => self.fleet.host(&host, &format!("z{}", random.below(3))),
            1 if is_alive => {
                self.fleet.end_lease(&host);
                self.reachable.remove(&name(&host));
                // Answers about a silence that the placer has not seen the end of count for some seconds.
                if random.chance(3) && self.shown.alive.contains_key(&name(&host)) {
                    self.reachable.insert(name(&host));
                }
            }
            2..=4 if is_known && !is_alive => _ = self.fleet.begin_lease(&host),
            5 if is_known => {
                self.fleet.budget(&host, random.below(40) * GIB);
                self.shrunk.insert(name(&host));
            }
            6 if is_known => {
                let label = if random.chance(2) { json!({"gpu": "yes"}) } else { json!({}) };
                self.fleet.set(
                    &key,
                    json!({"is_cordoned": random.chance(4), "is_draining": random.chance(4), "labels": label}),
                );
            }
            7 if is_known && random.chance(3) => {
                let epoch = self.fleet.view().alive.get(&name(&host)).map(|alive| alive.created);
                let epoch = epoch.unwrap_or(self.fleet.revision());
                self.fleet.set(&key, json!({ "dead_epoch": epoch }));
            }
            8 if is_known && random.chance(4) => {
                ["hosts", "alive", "status"].iter().for_each(|of| self.fleet.delete(&format!("{of}/{host}")));
            }
            9 | 10 => {
                let mut settings = json!({"lost_after_seconds": 20 + random.below(60)});
                settings["spread"] = if random.chance(3) { json!("pack") } else { json!("even") };
                if random.chance(4) {
                    settings["zones"] = json!(["z0", format!("z{}", random.below(3))]);
                }
                if random.chance(6) {
                    settings["host_labels"] = json!({"gpu": "yes"});
                }
                // A catalog keeps its kind: the last of them keeps data.
                if catalog == format!("c{}", CATALOGS - 1) {
                    settings["type"] = json!("dedicated");
                    settings["ram_bytes"] = json!(null);
                    settings["memory_bytes"] = json!(GIB);
                }
                self.fleet.catalog(&catalog, random.below(80) as u32, settings);
            }
            11 if random.chance(4) => self.fleet.delete(&format!("catalogs/{catalog}")),
            12..=14 => self.report(&host, true, random),
            15 if random.chance(4) => self.health.trouble = Some(self.now),
            _ => {}
        }
    }

    /// A host reports what it has of each of its shares.
    fn report(&mut self, host: &str, may_refuse: bool, random: &mut Rng) {
        if !self.fleet.entries.contains_key(&format!("status/{host}")) {
            return;
        }
        for catalog in (0..CATALOGS).map(|n| format!("c{n}")) {
            let Some(share) = self.fleet.view().share(&name(host), &name(&catalog)).cloned() else {
                self.fleet.report(host, &catalog, json!({"count": 0}));
                continue;
            };
            let share = share.value;
            let refuses = may_refuse && random.chance(12);
            let count = if refuses { random.below(u64::from(share.count) + 1) as u32 } else { share.count };
            let ready = random.below(u64::from(count) + 1);
            let (claimed, generation) = (random.below(u64::from(count) + 1), share.generation);
            let mut report =
                json!({"count": count, "ready": ready, "claimed": claimed, "generation": generation});
            if refuses {
                report["refused"] = json!("no");
                report["refused_generation"] = json!(generation);
                self.has_refused = true;
            }
            self.fleet.report(host, &catalog, report);
        }
    }

    fn step(&mut self, random: &mut Rng, seen: &mut Seen) {
        let actions = self.placer.step(&self.shown, &self.health, self.now);
        let braked = self.is_braked(&self.shown);
        seen.braked += u64::from(braked);
        for action in actions {
            match action {
                PlacerAction::Commit { number, transaction } => {
                    check(&transaction);
                    self.check_replaced(&transaction, braked, seen);
                    self.open.push((number, transaction));
                }
                PlacerAction::Ask(ask) => {
                    assert!(!braked && ask.of.len() <= 2 && !ask.of.contains(&ask.about));
                    let reaches = self.reachable.contains(&ask.about);
                    for by in ask.of {
                        // Only one that reaches nobody may leave it at that.
                        if reaches || random.chance(2) {
                            self.placer.answered(&ask.about, &by, reaches);
                        }
                    }
                }
                PlacerAction::Event(_) => {}
            }
        }
    }

    /// The rule of the brake, once more.
    fn is_braked(&self, view: &FleetView) -> bool {
        let troubled = self.health.trouble.is_some_and(|at| self.now.since_ms(at) < QUIET_MS);
        let counts = |host: &&Name| {
            let is_alive = view.alive.contains_key(*host);
            is_alive || view.statuses.contains_key(*host) || view.shares.contains_key(*host)
        };
        // Hosts that are declared dead are left to the tests of that rule: with one of them, nothing is said here.
        if view.hosts.values().any(|host| host.value.dead_epoch.is_some()) {
            return troubled;
        }
        let all = view.hosts.keys().filter(counts).count();
        let silent = view.hosts.keys().filter(counts).filter(|host| !view.alive.contains_key(*host)).count();
        troubled || (silent >= 2 && 3 * silent > all)
    }

    fn check_replaced(&self, transaction: &Transaction, braked: bool, seen: &mut Seen) {
        for comparison in &transaction.comparisons {
            if let Comparison::Created(Key::Alive(host), 0) = comparison {
                assert!(!braked, "{host} is replaced although the brake holds");
                assert!(!self.reachable.contains(host), "{host} is replaced although others reach it");
                seen.replaced += 1;
            }
        }
    }

    /// Some of the open transactions end, in any order.
    fn end_some(&mut self, random: &mut Rng, seen: &mut Seen) {
        while !self.open.is_empty() && !random.chance(3) {
            let (number, transaction) = self.open.swap_remove(random.below(self.open.len() as u64) as usize);
            if random.chance(12) {
                seen.lost_answers += 1;
                self.placer.ended(number, None);
                match random.below(3) {
                    0 => _ = self.commit(&transaction, seen),
                    1 => self.unanswered.push(transaction),
                    _ => {}
                }
            } else {
                let outcome = self.commit(&transaction, seen);
                self.placer.ended(number, Some(outcome));
            }
        }
        if random.chance(4) && !self.unanswered.is_empty() {
            let transaction = self.unanswered.swap_remove(0);
            // Nobody expected it any more.
            let hosts = transaction.writes.iter().filter_map(|write| match sample::key_of(write) {
                Key::Share(host, _) => Some(host.clone()),
                _ => None,
            });
            self.shrunk.extend(hosts);
            self.commit(&transaction, seen);
        }
    }

    fn commit(&mut self, transaction: &Transaction, seen: &mut Seen) -> Outcome {
        let before = self.fleet.view().clone();
        let outcome = self.fleet.commit(transaction);
        match outcome {
            Outcome::Conflict => seen.conflicts += 1,
            Outcome::Applied(_) => {
                seen.applied += 1;
                self.check_written(&before, transaction);
            }
        }
        outcome
    }

    fn check_written(&self, before: &FleetView, transaction: &Transaction) {
        let after = self.fleet.view();
        for write in &transaction.writes {
            let Key::Share(host, catalog) = sample::key_of(write) else { continue };
            let count = |view: &FleetView| view.share(host, catalog).map_or(0, |share| share.value.count);
            let (was, is) = (count(before), count(after));
            let same = matches!(write, Write::Put(..))
                && before.share(host, catalog).map(|share| &share.value)
                    == after.share(host, catalog).map(|share| &share.value);
            assert!(!same, "share/{host}/{catalog} was written as it was");
            let keeps_data = catalog.as_str() == format!("c{}", CATALOGS - 1);
            if keeps_data
                && is < was
                && let Some(record) = before.catalogs.get(catalog)
            {
                let is_surplus = total(before, catalog, |_| true) > record.value.spec.catalog.count.into();
                let is_refused = self.has_refused;
                assert!(is_surplus || is_refused, "machines that keep data were taken from {host}");
            }
        }
    }

    /// The budgets of hosts that have not shrunk are kept.
    fn check_budgets(&mut self) {
        let view = self.fleet.view();
        for (host, status) in &view.statuses {
            let shares = view.shares.get(host).into_iter().flatten();
            // Every machine needs 1 GiB.
            let taken: u64 = shares.map(|(_, share)| u64::from(share.value.count) * GIB).sum();
            let has_space = taken <= status.value.budget.memory_bytes;
            assert!(has_space || self.shrunk.contains(host), "{host} has no space for its shares");
            // What was decided before it shrank may still be under way.
            let is_shown = self.shown.revision == self.fleet.revision();
            if has_space && is_shown && self.open.is_empty() && self.unanswered.is_empty() {
                self.shrunk.remove(host);
            }
        }
    }

    /// So much time passes that no refusal counts any more, and hosts do what their shares say.
    fn forget_refusals(&mut self, random: &mut Rng, seen: &mut Seen) {
        // Nothing is under way for so long.
        self.rest(random, seen);
        self.now = self.now.after_ms(1_300_000);
        for _ in 0..5 {
            (0..HOSTS).for_each(|n| self.report(&format!("h{n}"), false, random));
            self.rest(random, seen);
        }
        self.has_refused = false;
        seen.forgotten += 1;
    }

    /// Everything that is under way ends, and what follows from that.
    fn rest(&mut self, random: &mut Rng, seen: &mut Seen) {
        for _ in 0..200 {
            self.shown = self.fleet.view().clone();
            self.step(random, seen);
            if self.open.is_empty() {
                break;
            }
            for (number, transaction) in std::mem::take(&mut self.open) {
                let outcome = self.commit(&transaction, seen);
                self.placer.ended(number, Some(outcome));
            }
        }
        assert!(self.open.is_empty(), "the placer does not come to rest");
    }

    /// Everything ends, and nothing happens meanwhile: what must hold then.
    fn check_at_rest(&mut self, random: &mut Rng, seen: &mut Seen) {
        self.unanswered.clear();
        if self.has_refused && random.chance(2) {
            self.forget_refusals(random, seen);
        }
        self.rest(random, seen);
        if self.placer.status(&self.shown).unwrap().transactions > 0 {
            // A lost answer: it is decided later.
            return;
        }
        seen.quiet += 1;
        self.check_totals(seen);
        let mut reported = self.shown.statuses.values().flat_map(|status| &status.value.catalogs);
        let is_all_known =
            reported.all(|(catalog, of)| of.count == 0 || self.shown.catalogs.contains_key(catalog));
        // This one may have seen that such a host was back in between.
        let is_dead = |(host, of): (&Name, &Versioned<HostRecord>)| {
            of.value.dead_epoch.is_some() && !self.shown.alive.contains_key(host)
        };
        if !self.has_refused && is_all_known && !self.shown.hosts.iter().any(is_dead) {
            let mut other = Placer::new(identity("p"));
            let actions = other.step(&self.shown, &self.health, self.now);
            let commits = actions.iter().filter(|action| matches!(action, PlacerAction::Commit { .. }));
            assert_eq!(commits.count(), 0, "a placer that knows nothing more decides the same: {actions:?}");
        }
    }

    fn check_totals(&self, seen: &mut Seen) {
        let view = self.fleet.view();
        let status = self.placer.status(view).unwrap();
        let unplaced: BTreeMap<&Name, u64> =
            status.unplaced.iter().map(|unplaced| (&unplaced.catalog, unplaced.machines)).collect();
        for (catalog, record) in &view.catalogs {
            let spec = &record.value.spec;
            let fits = |host: &Name| {
                let of = &view.hosts.get(host)?.value;
                let zones = &spec.fleet.zones;
                let in_zone = zones.is_empty() || zones.contains(&of.zone);
                let labelled =
                    spec.fleet.host_labels.iter().all(|(label, value)| of.labels.get(label) == Some(value));
                (in_zone && labelled && !of.is_draining).then_some(of)
            };
            let keeps_data = catalog.as_str() == format!("c{}", CATALOGS - 1);
            let is_dead = |host: &Name| view.hosts.get(host).is_none_or(|of| of.value.dead_epoch.is_some());
            let total = total(view, catalog, |host| keeps_data || (fits(host).is_some() && !is_dead(host)));
            let count = u64::from(spec.catalog.count);
            assert!(total <= count, "{catalog}: {total} of {count}");
            let missing = unplaced.get(catalog).copied().unwrap_or(0);
            seen.unplaced += u64::from(missing > 0);
            if missing == 0 {
                continue;
            }
            for (host, status) in view.statuses.iter().filter(|_| !self.has_refused) {
                let may = fits(host).is_some_and(|of| !of.is_cordoned && of.dead_epoch.is_none());
                let names = (0..CATALOGS).map(|n| name(&format!("c{n}")));
                let taken: u64 = names
                    .map(|of| {
                        let of = &of;
                        let share = view.share(host, of).map_or(0, |share| share.value.count);
                        let reported = status.value.catalogs.get(of).map_or(0, |report| report.count);
                        u64::from(share.max(reported)) * GIB
                    })
                    .sum();
                let has_space = taken + GIB <= status.value.budget.memory_bytes;
                let is_alive = view.alive.contains_key(host);
                assert!(
                    !(may && is_alive && has_space),
                    "{catalog}: {missing} are missing, and {host} has space"
                );
            }
        }
        for (host, catalog, _) in self.fleet.shares() {
            assert!(view.catalogs.contains_key(&name(&catalog)), "share/{host}/{catalog} has no catalog");
        }
    }
}

fn total(view: &FleetView, catalog: &Name, counts: impl Fn(&Name) -> bool) -> u64 {
    let shares = view.shares.iter().filter(|(host, _)| counts(host));
    shares.filter_map(|(_, shares)| shares.get(catalog)).map(|share| u64::from(share.value.count)).sum()
}

fn run(seed: u64, seen: &mut Seen) {
    let mut random = Rng(seed);
    let mut world = World::new(&mut random);
    for _ in 0..120 {
        for _ in 0..random.below(3) {
            world.event(&mut random);
        }
        if !random.chance(3) {
            world.shown = world.fleet.view().clone();
        }
        world.step(&mut random, seen);
        world.end_some(&mut random, seen);
        world.check_budgets();
        world.now = world.now.after_ms(random.below(4000));
        if random.chance(10) {
            world.check_at_rest(&mut random, seen);
            world.check_budgets();
        }
    }
}

#[test]
fn random_fleets_keep_to_the_rules() {
    let number = |name: &str| std::env::var(name).ok().map(|text| text.parse::<u64>().unwrap());
    let mut seen = Seen::default();
    let fleets = number("SPILLWAY_FLEETS").unwrap_or(1_000);
    let first = number("SPILLWAY_SEED").unwrap_or(0);
    println!("SPILLWAY_SEED={first} SPILLWAY_FLEETS={fleets}");
    for seed in first..first + fleets {
        let run = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| run(seed, &mut seen)));
        if let Err(panic) = run {
            eprintln!("again: SPILLWAY_SEED={seed} SPILLWAY_FLEETS=1");
            std::panic::resume_unwind(panic);
        }
    }
    println!("{fleets} fleets: {seen:?}");
    // Few fleets, as after a failure, need not have everything.
    if fleets >= 500 {
        let Seen { applied, conflicts, lost_answers, replaced, braked, unplaced, quiet, forgotten } = seen;
        let all = [applied, conflicts, lost_answers, replaced, braked, unplaced, quiet, forgotten];
        assert!(all.into_iter().all(|count| count > fleets / 20), "{seen:?}");
    }
}
