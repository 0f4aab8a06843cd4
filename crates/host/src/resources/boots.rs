//! Turns of machines to boot, so that few of them boot at the same time. Owns which machines boot, and the queue of those
//! that wait.
//!
//! Invariant: a machine that waits has its turn within a bounded time, whatever the others do. A boot counts for a bounded
//! time, a turn that is not taken is lost, and each fourth turn is that of the machine that waits longest.

use spillway_api::Name;
use std::collections::{HashMap, HashSet};
use std::mem;
use std::time::{Duration, Instant};

/// How long a machine counts as booting whose readiness nobody checks.
const UNCHECKED: Duration = Duration::from_secs(5);
/// How long a turn is kept for a machine that was told of it.
const OFFER: Duration = Duration::from_secs(10);
/// Number of turns by rank before one by time.
const BY_RANK: u32 = 3;

/// Who goes first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum BootRank {
    /// A client has claimed the machine or asked for its start.
    Requested,
    /// The machine ran a moment ago: it is reset or restarted.
    Returning,
    /// The daemon starts it by itself.
    Unrequested,
}

/// A machine that is about to boot.
#[derive(Clone, Copy, Debug)]
pub struct Boot<'a> {
    /// Name of the machine.
    pub name: &'a Name,
    /// Its catalog. Catalogs have their turns one after the other.
    pub catalog: &'a Name,
    /// Whether it is known when the machine is ready.
    pub is_checked: bool,
}

/// What a machine waits for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BootWait {
    /// Number of machines that boot.
    pub booting: usize,
    /// Number of machines that wait and are before this one.
    pub before: usize,
    /// When the first of those that boot counts no longer.
    pub until: Option<Instant>,
}

/// A machine that boots.
#[derive(Debug)]
struct Booting {
    catalog: Name,
    until: Instant,
}

/// A machine that waits.
#[derive(Debug)]
struct Waiter {
    catalog: Name,
    rank: BootRank,
    /// Position by time; earlier ones are lower.
    arrival: u64,
    /// When it was told of its turn.
    offered: Option<Instant>,
}

/// The turns of a host.
#[derive(Debug)]
pub struct BootTurns {
    /// Number of machines that boot at the same time; 0: no limit.
    most: usize,
    /// How long a boot counts at most.
    patience: Duration,
    booting: HashMap<Name, Booting>,
    waiting: HashMap<Name, Waiter>,
    arrivals: u64,
    /// When each waiting catalog last had a turn, in turns.
    served: HashMap<Name, u64>,
    turns: u64,
    /// Number of turns since the last one by time.
    by_rank: u32,
    /// Machines whose turn it is, and that were not told yet.
    told: Vec<Name>,
}

impl BootTurns {
    /// Creates turns of which this many are taken at a time. Each lasts until its machine is ready, `patience` at most.
    pub fn new(most: usize, patience: Duration) -> BootTurns {
        BootTurns {
            most,
            patience,
            booting: HashMap::new(),
            waiting: HashMap::new(),
            arrivals: 0,
            served: HashMap::new(),
            turns: 0,
            by_rank: 0,
            told: Vec::new(),
        }
    }

    /// Gives the machine a turn if it is next, or puts it in the queue.
    pub fn take(&mut self, boot: Boot<'_>, rank: BootRank, now: Instant) -> Result<(), BootWait> {
        if self.most == 0 || self.counts(boot.name, now) {
            self.note(boot, now);
            return Ok(());
        }
        self.join(boot, rank);
        self.offer(now);
        let Some(waiter) = self.waiting.get(boot.name).filter(|waiter| waiter.offered.is_some()) else {
            return Err(self.wait_of(boot.name, now));
        };
        let is_oldest = self.waiting.values().all(|other| other.arrival >= waiter.arrival);
        self.by_rank = if is_oldest { 0 } else { self.by_rank.saturating_add(1) };
        self.turns += 1;
        self.served.insert(boot.catalog.clone(), self.turns);
        self.booting.remove(boot.name);
        self.note(boot, now);
        // It knows.
        self.told.retain(|told| told != boot.name);
        Ok(())
    }

    /// Records that a machine boots, whether it has a turn or not. If it is recorded already, the first time counts.
    pub fn note(&mut self, boot: Boot<'_>, now: Instant) {
        self.waiting.remove(boot.name);
        let lasts = if boot.is_checked { self.patience } else { UNCHECKED.min(self.patience) };
        let booting = Booting { catalog: boot.catalog.clone(), until: now + lasts };
        self.booting.entry(boot.name.clone()).or_insert(booting);
    }

    /// Ends the turn of a machine, which is ready or does not boot any more, or its wait.
    pub fn end(&mut self, name: &Name, now: Instant) {
        if self.booting.remove(name).is_some() | self.waiting.remove(name).is_some() {
            self.offer(now);
        }
    }

    /// Returns the machines whose turn it is, each once: they should be woken.
    pub fn told(&mut self) -> Vec<Name> {
        mem::take(&mut self.told)
    }

    /// Until when a machine counts as booting, if it does.
    pub fn counts_until(&self, name: &Name, now: Instant) -> Option<Instant> {
        self.booting.get(name).map(|booting| booting.until).filter(|until| *until > now)
    }

    fn counts(&self, name: &Name, now: Instant) -> bool {
        self.counts_until(name, now).is_some()
    }

    fn join(&mut self, boot: Boot<'_>, rank: BootRank) {
        let arrival = self.arrivals;
        self.arrivals += 1;
        let catalog = boot.catalog.clone();
        let new = Waiter { catalog, rank, arrival, offered: None };
        let waiter = self.waiting.entry(boot.name.clone()).or_insert(new);
        (waiter.rank, waiter.offered) = (rank, None);
        if waiter.catalog != *boot.catalog {
            waiter.catalog = boot.catalog.clone();
        }
    }

    /// Offers the free turns to those that are next.
    fn offer(&mut self, now: Instant) {
        let mut of_catalog: HashMap<Name, usize> = HashMap::new();
        let mut booting = 0;
        for one in self.booting.values().filter(|one| one.until > now) {
            *of_catalog.entry(one.catalog.clone()).or_default() += 1;
            booting += 1;
        }
        let free = self.most.saturating_sub(booting);
        if free == 0 {
            self.waiting.values_mut().for_each(|waiter| waiter.offered = None);
            return;
        }
        // Who does not come asks again later, behind the others.
        self.waiting.retain(|_, waiter| waiter.offered.is_none_or(|at| now < at + OFFER));
        self.served.retain(|catalog, _| {
            of_catalog.contains_key(catalog) || self.waiting.values().any(|waiter| waiter.catalog == *catalog)
        });
        let mut next: HashSet<Name> = HashSet::new();
        let mut by_rank = self.by_rank;
        while next.len() < free {
            let left = self.waiting.iter().filter(|(name, _)| !next.contains(name));
            let chosen = if by_rank >= BY_RANK {
                by_rank = 0;
                left.min_by_key(|(_, waiter)| waiter.arrival)
            } else {
                by_rank += 1;
                left.min_by_key(|(_, waiter)| {
                    let boots = of_catalog.get(&waiter.catalog).copied().unwrap_or(0);
                    let served = self.served.get(&waiter.catalog).copied().unwrap_or(0);
                    (waiter.rank, boots, served, waiter.arrival)
                })
            };
            let Some((name, waiter)) = chosen else { break };
            *of_catalog.entry(waiter.catalog.clone()).or_default() += 1;
            next.insert(name.clone());
        }
        for (name, waiter) in &mut self.waiting {
            if !next.contains(name) {
                waiter.offered = None;
            } else if waiter.offered.is_none() {
                waiter.offered = Some(now);
                self.told.push(name.clone());
            }
        }
    }

    fn wait_of(&self, name: &Name, now: Instant) -> BootWait {
        let place = |waiter: &Waiter| (waiter.rank, waiter.arrival);
        let own = self.waiting.get(name).map(place);
        let before = self.waiting.values().filter(|waiter| Some(place(waiter)) < own).count();
        let counting = || self.booting.values().map(|one| one.until).filter(|until| *until > now);
        BootWait { booting: counting().count(), before, until: counting().min() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeMap;

    const PATIENCE: Duration = Duration::from_secs(180);

    fn name(text: &str) -> Name {
        text.parse().unwrap()
    }

    /// Turns in imagined time, of machines that are named after their catalogs.
    struct World {
        turns: BootTurns,
        now: Instant,
    }

    impl World {
        fn new(most: usize) -> World {
            World { turns: BootTurns::new(most, PATIENCE), now: Instant::now() }
        }

        fn take(&mut self, machine: &str, rank: BootRank) -> Result<(), BootWait> {
            let (machine, catalog) = (name(machine), name(machine.split('-').next().unwrap()));
            let boot = Boot { name: &machine, catalog: &catalog, is_checked: true };
            self.turns.take(boot, rank, self.now)
        }

        fn asks(&mut self, machine: &str, rank: BootRank) -> bool {
            self.take(machine, rank).is_ok()
        }

        fn end(&mut self, machine: &str) -> Vec<Name> {
            self.turns.told();
            self.turns.end(&name(machine), self.now);
            let mut told = self.turns.told();
            told.sort();
            told
        }

        fn passes(&mut self, seconds: u64) {
            self.now += Duration::from_secs(seconds);
        }
    }

    use BootRank::{Requested, Returning, Unrequested};

    #[test]
    fn no_more_boot_at_a_time_than_there_are_turns() {
        let mut world = World::new(2);
        let all: Vec<String> = (0..20).map(|n| format!("desk-{n}")).collect();
        let mut booting: Vec<String> = Vec::new();
        let mut booted = 0;
        while booted < all.len() {
            for machine in &all[booted..] {
                if !booting.contains(machine) && world.asks(machine, Unrequested) {
                    booting.push(machine.clone());
                }
            }
            assert!(booting.len() == 2 || booted + booting.len() == all.len(), "{booted}: {booting:?}");
            assert_eq!(booting[0], all[booted], "in the order of coming");
            world.end(&booting.remove(0));
            booted += 1;
        }
        let mut unlimited = World::new(0);
        assert!(all.iter().all(|machine| unlimited.asks(machine, Unrequested)));
    }

    #[test]
    fn who_waits_is_told_of_its_turn_and_how_many_are_before_it() {
        let mut world = World::new(1);
        assert!(world.asks("a-1", Unrequested));
        assert!(world.asks("a-1", Unrequested), "it has a turn already");
        let until = Some(world.now + PATIENCE);
        assert_eq!(world.take("a-2", Unrequested), Err(BootWait { booting: 1, before: 0, until }));
        assert_eq!(world.take("a-3", Unrequested), Err(BootWait { booting: 1, before: 1, until }));
        assert_eq!(world.end("nobody"), []);
        assert_eq!(world.end("a-1"), [name("a-2")]);
        assert_eq!(world.take("a-3", Unrequested), Err(BootWait { booting: 0, before: 1, until: None }));
        assert_eq!(world.end("a-2"), [name("a-3")], "it is not wanted any more");
        assert!(world.asks("a-3", Unrequested));
    }

    #[test]
    fn who_asks_in_time_is_not_told_of_the_turn_it_takes() {
        let mut world = World::new(1);
        assert!(world.asks("a-1", Unrequested));
        assert_eq!(world.turns.told(), []);
        // The last boot counts no longer: another one has the turn, and one that waits is told.
        world.passes(180);
        assert!(world.asks("a-2", Unrequested));
        assert_eq!(world.turns.told(), []);
        assert!(!world.asks("a-3", Unrequested));
        assert_eq!(world.end("a-2"), [name("a-3")]);
    }

    #[test]
    fn a_machine_that_is_never_ready_counts_for_a_bounded_time() {
        let mut world = World::new(1);
        assert!(world.asks("stuck-1", Unrequested));
        world.passes(179);
        assert!(!world.asks("desk-1", Unrequested));
        // Its task says again and again that it boots still.
        let (stuck, catalog) = (name("stuck-1"), name("stuck"));
        world.turns.note(Boot { name: &stuck, catalog: &catalog, is_checked: true }, world.now);
        world.passes(1);
        assert!(world.asks("desk-1", Unrequested));
        assert!(!world.asks("stuck-1", Unrequested), "started again, it waits like all others");
        world.end("desk-1");
        assert!(world.asks("stuck-1", Unrequested));
        world.passes(179);
        assert!(!world.asks("desk-1", Unrequested), "its new boot counts from its start");
        let silent = Boot { name: &name("silent-1"), catalog: &name("silent"), is_checked: false };
        let mut world = World::new(1);
        world.turns.take(silent, Unrequested, world.now).unwrap();
        assert!(!world.asks("desk-1", Unrequested));
        assert_eq!(world.turns.counts_until(silent.name, world.now), Some(world.now + UNCHECKED));
        world.passes(5);
        assert!(world.asks("desk-1", Unrequested));
    }

    #[test]
    fn a_turn_that_nobody_takes_is_lost() {
        let mut world = World::new(1);
        assert!(world.asks("a-1", Unrequested));
        assert!(!world.asks("b-1", Unrequested) && !world.asks("c-1", Unrequested));
        assert_eq!(world.end("a-1"), [name("b-1")]);
        world.passes(9);
        assert!(!world.asks("c-1", Unrequested), "it is kept for a while");
        world.passes(1);
        assert!(world.asks("c-1", Unrequested));
    }

    #[test]
    fn who_was_asked_for_goes_before_what_the_daemon_starts() {
        let mut world = World::new(1);
        assert!(world.asks("pool-1", Unrequested));
        for (machine, rank) in [("pool-2", Unrequested), ("pool-3", Returning), ("pool-4", Requested)] {
            assert!(!world.asks(machine, rank));
        }
        assert_eq!(world.end("pool-1"), [name("pool-4")]);
        assert!(world.asks("pool-4", Requested));
        // One that waits already is asked for.
        assert!(!world.asks("pool-2", Requested));
        assert_eq!(world.end("pool-4"), [name("pool-2")]);
        assert!(world.asks("pool-2", Requested));
        assert_eq!(world.end("pool-2"), [name("pool-3")]);
    }

    #[test]
    fn one_that_nobody_asks_for_has_its_turn_though_others_are_always_asked_for() {
        let mut world = World::new(1);
        assert!(world.asks("ci-0", Requested) && !world.asks("auto-1", Unrequested));
        let mut others = 0;
        let has_its_turn = (1..20).any(|n| {
            let (last, next) = (format!("ci-{}", n - 1), format!("ci-{n}"));
            assert!(!world.asks(&next, Requested));
            world.end(&last);
            others += u32::from(world.asks(&next, Requested));
            world.asks("auto-1", Unrequested)
        });
        assert!(has_its_turn);
        assert_eq!(others, BY_RANK, "and each fourth turn is one by time");
    }

    #[test]
    fn catalogs_have_their_turns_one_after_the_other() {
        let mut world = World::new(2);
        let mut waiting: Vec<String> = (0..8).map(|n| format!("many-{n}")).collect();
        waiting.extend((0..2).map(|n| format!("few-{n}")));
        let mut order: Vec<String> = Vec::new();
        waiting.iter().for_each(|machine| _ = world.asks(machine, Unrequested));
        let mut booting = vec!["many-0".to_owned(), "many-1".to_owned()];
        while !booting.is_empty() {
            let told = world.end(&booting.remove(0));
            for machine in told {
                assert!(world.asks(machine.as_str(), Unrequested));
                order.push(machine.to_string());
                booting.push(machine.to_string());
            }
        }
        let places: BTreeMap<&str, usize> = order.iter().enumerate().map(|(n, m)| (m.as_str(), n)).collect();
        assert_eq!(order.len(), 8);
        assert!(places["few-0"] == 0 && places["few-1"] <= 3, "{order:?}");
    }
}
