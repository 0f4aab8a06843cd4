//! Rollouts in simulated fleets: people update, roll back, pause and resume; versions are bad, or missing on a host; placers change, and
//! hosts are lost. The rules are written here a second time, and looked at with each transaction and each turn.
//!
//! They have failed while a host went on with a version that another one was about to replace; while what a host was told before, and had
//! not reported, was not counted; while a report of the same version from before counted; and while a resumed rollout went on with the
//! batches of before.

use super::sample::name;
use super::world::{Seen, World};
use super::{BAD, MISSING, rng, run_seeds};
use serde_json::Value;
use spillway_api::{FleetCatalogUpdate, FleetHostAction, FleetRolloutState, Name, RolloutAction};
use spillway_fleet::changes::{ChangeError, replace_catalog, roll_back_catalog, update_catalog};
use spillway_fleet::keys::Key;
use spillway_fleet::liveness::Standing;
use spillway_fleet::placer::Placer;
use spillway_fleet::records::{RolloutRecord, ShareRecord};
use spillway_fleet::rollout::change_rollout;
use spillway_fleet::transaction::{Outcome, Transaction, Write};
use spillway_fleet::view::{FleetView, Update};
use std::collections::{BTreeMap, BTreeSet};

/// What the records say of versions: rollouts, and versions of shares by host and catalog.
pub struct Versions {
    rollouts: BTreeMap<Name, RolloutRecord>,
    shares: BTreeMap<(Name, Name), u32>,
}

/// Within that a placer has seen what others have written, or is no placer any more.
const SEEN_MS: u64 = 20_000;

/// A rollout is done when its hosts are, by what the placer sees: another version is only on hosts that are to give their machines up, or are
/// lost. If no host has the new version, the catalog has no machines, or a host refuses them.
pub fn check_done(view: &FleetView, placer: &Placer, transaction: &Transaction) {
    for write in &transaction.writes {
        let Write::Put(Key::Rollout(catalog), record) = write else { continue };
        let rollout: RolloutRecord = serde_json::from_slice(record).unwrap();
        if rollout.state != FleetRolloutState::Done || rollout.at_once {
            continue;
        }
        let standings = placer.status(view).unwrap().hosts;
        let is_lost = |host: &Name| {
            let status = standings.iter().find(|status| status.host == *host).unwrap();
            status.is_lost
                || matches!(status.standing, Standing::DeclaredDead { .. } | Standing::Removed { .. })
        };
        let is_kept =
            |host: &Name| !is_lost(host) && !view.hosts.get(host).is_some_and(|host| host.value.is_draining);
        let report = |host: &Name| view.statuses.get(host)?.value.catalogs.get(catalog);
        let shares =
            view.shares.iter().filter_map(|(host, shares)| Some((host, &shares.get(catalog)?.value)));
        let kept: Vec<(&Name, &ShareRecord)> = shares.filter(|(host, _)| is_kept(host)).collect();
        let count = u64::from(view.catalogs[catalog].value.spec.catalog.count);
        let all: u64 = kept.iter().map(|(_, share)| u64::from(share.count)).sum();
        for (host, share) in kept.iter().filter(|(_, share)| share.version != rollout.to.version) {
            // What there is too much of goes next, and what a host refuses.
            let is_surplus = all - u64::from(share.count) >= count;
            let has_none = report(host).is_some_and(|report| report.refused.is_some() && report.count == 0);
            assert!(is_surplus || has_none, "{catalog} is done, and {host} has {share:?}: {rollout:?}");
        }
        let mut reports = view.hosts.keys().filter_map(report);
        let is_refused = reports.any(|report| report.refused.is_some());
        // A host that drains has it until it is empty.
        let with = view.shares.iter().filter(|(host, _)| !is_lost(host));
        let with = with.filter_map(|(_, shares)| shares.get(catalog));
        let with = with.filter(|share| share.value.version == rollout.to.version).count();
        assert!(with > 0 || count == 0 || is_refused, "{catalog} is done, and no host has it: {rollout:?}");
    }
}

impl World {
    pub fn rollouts(&self) -> Versions {
        let below = |folder: &'static str| {
            let all = self.store.entries.range(folder.to_owned()..);
            all.take_while(move |(key, _)| key.starts_with(folder))
        };
        let rollouts = below("rollouts/").map(|(key, entry)| {
            let Ok(Key::Rollout(catalog)) = key.parse() else { panic!("{key}") };
            (catalog, serde_json::from_slice(&entry.value).unwrap())
        });
        let shares = below("share/").map(|(key, entry)| {
            let Ok(Key::Share(host, catalog)) = key.parse() else { panic!("{key}") };
            let share: ShareRecord = serde_json::from_slice(&entry.value).unwrap();
            ((host, catalog), share.version)
        });
        Versions { rollouts: rollouts.collect(), shares: shares.collect() }
    }

    /// What a placer has written keeps to the waves, and goes on only where people have not stopped it.
    pub fn check_rollouts(&self, before: &Versions, transaction: &Transaction, seen: &mut Seen) {
        use FleetRolloutState::{Aborted, Done, Halted, Paused, Running};
        let after = self.rollouts();
        for write in &transaction.writes {
            match write {
                Write::Put(Key::Rollout(catalog), _) => {
                    let now = &after.rollouts[catalog];
                    if let Some(was) = before.rollouts.get(catalog) {
                        assert!(!matches!(was.state, Halted | Paused | Aborted), "a placer goes on: {was:?}");
                        let is_wave = now.state == Running && now.wave > was.wave;
                        if was.state == Running && (is_wave || now.state == Done) {
                            self.check_wave(catalog, &after, seen);
                        }
                        if now.state == Done && !now.at_once {
                            let mut versions = after.shares.iter().filter(|((_, of), _)| of == catalog);
                            seen.reached += u64::from(versions.any(|(_, has)| *has == now.to.version));
                        }
                        assert_eq!(
                            (&was.to, was.generation, was.resumes),
                            (&now.to, now.generation, now.resumes)
                        );
                    }
                    seen.halted += u64::from(now.state == Halted);
                    seen.done += u64::from(now.state == Done);
                    super::trace(self.now, &format!("{catalog}: {:?} {} {:?}", now.state, now.wave, now.why));
                }
                Write::Put(Key::Share(host, catalog), share) => {
                    let text = || String::from_utf8_lossy(share);
                    super::trace(self.now, &format!("{host}/{catalog}: {}", text()));
                    let Some(rollout) = after.rollouts.get(catalog) else { continue };
                    let place = (host.clone(), catalog.clone());
                    let (was, now) = (before.shares.get(&place), after.shares[&place]);
                    match was {
                        Some(was) if *was != now => {
                            assert_eq!((now, rollout.state), (rollout.to.version, Running), "{host}: {was}");
                            seen.started += 1;
                        }
                        None if rollout.state != Done && !rollout.at_once => {
                            assert_eq!(now, rollout.from.version, "new machines on {host}");
                        }
                        _ => continue,
                    }
                    let with = after.shares.iter();
                    let with = with.filter(|((_, of), has)| of == catalog && **has == rollout.to.version);
                    let with = with
                        .map(|((host, _), _)| host)
                        .filter(|host| !self.is_left_alone(host, catalog, rollout.to.version));
                    let with: Vec<&Name> = with.collect();
                    let most = [1, (self.hosts.len() * 3).div_ceil(10), usize::MAX];
                    let most =
                        if rollout.at_once { usize::MAX } else { most[(rollout.wave as usize).min(2)] };
                    let why = || format!("{with:?} in wave {} of {rollout:?}: {transaction:?}", rollout.wave);
                    assert!(was.is_none() || with.len() <= most, "{}", why());
                }
                _ => {}
            }
        }
    }

    /// Nobody waits for a host that is drained, and has no lease, because nobody can tell when it is empty, or refuses the version.
    fn is_left_alone(&self, host: &Name, catalog: &Name, version: u32) -> bool {
        let record = &self.store.entries[&format!("hosts/{host}")].value;
        let record = serde_json::from_slice::<Value>(record).unwrap_or_default();
        let is_silent = !self.store.entries.contains_key(&format!("alive/{host}"));
        let mut hosts = self.hosts.iter().filter(|of| of.name == *host);
        record["is_draining"] == true && (is_silent || hosts.any(|of| of.refuses(catalog, version, self.now)))
    }

    /// Another wave begins, or the rollout is done, when all machines of the hosts before have been seen ready, unless somebody drains such a host,
    /// or there are enough machines without it, so that it gives up its own.
    fn check_wave(&self, catalog: &Name, versions: &Versions, seen: &mut Seen) {
        let Some(done) = self.done.as_ref().filter(|_| *catalog == name("desk")) else { return };
        let to = versions.rollouts[catalog].to.version;
        let record = |key: String| {
            serde_json::from_slice::<Value>(&self.store.entries[&key].value).unwrap_or_default()
        };
        let count = |host: &Name| record(format!("share/{host}/{catalog}"))["count"].as_u64().unwrap_or(0);
        let is_draining = |host: &Name| record(format!("hosts/{host}"))["is_draining"] == true;
        let is_alive = |host: &Name| self.store.entries.contains_key(&format!("alive/{host}"));
        // Of one that is silent the machines count until it is lost: others are surplus because of them.
        let is_kept = |host: &Name| !is_draining(host) && (is_alive(host) || count(host) > 0);
        let having = versions.shares.keys().filter(|(_, of)| of == catalog).map(|(host, _)| host);
        let kept: BTreeMap<&Name, u64> =
            having.filter(|host| is_kept(host)).map(|host| (host, count(host))).collect();
        let all: u64 = kept.values().sum();
        let wanted = record(format!("catalogs/{catalog}"))["spec"]["count"].as_u64().unwrap_or(0);
        for ((host, _), _) in versions.shares.iter().filter(|((_, of), has)| of == catalog && **has == to) {
            // The placer may not have seen yet that it is to keep its machines after all.
            let is_back = self.uncordoned.get(host).is_some_and(|at| self.now - at < SEEN_MS);
            let others = all - kept.get(host).unwrap_or(&0);
            // No rollback waits for a host that is lost.
            let is_lost = versions.rollouts[catalog].at_once && !is_alive(host);
            // One that refuses the version and has no machines has nothing to wait for.
            let of = self.hosts.iter().find(|of| of.name == *host).unwrap();
            let has_none = of.refuses(catalog, to, self.now) && of.rolled(catalog, to).0 == 0;
            let is_left = is_draining(host) || is_back || is_lost || has_none || others >= wanted;
            assert!(
                is_left || done.contains(&(host.clone(), to)),
                "{host} was not done when a wave, or the rollout, ended: {kept:?} of {wanted} machines, {}",
                self.hosts
                    .iter()
                    .find(|of| of.name == *host)
                    .map_or_else(String::new, |of| of.describe(catalog))
            );
            seen.waited += u64::from(!is_left);
        }
    }

    /// People drain all hosts that have machines of the catalog, or no host any more.
    fn evacuate(&mut self) {
        let having = self.rollouts().shares.into_keys().filter(|(_, of)| *of == name("desk"));
        let having: BTreeSet<Name> = having.map(|(host, _)| host).collect();
        let is_over = self.random.chance(2);
        for n in 0..self.hosts.len() {
            if is_over {
                self.act(n, FleetHostAction::Uncordon);
            } else if having.contains(&self.hosts[n].name) {
                self.act(n, FleetHostAction::Drain);
            }
        }
    }

    /// After an update all hosts that have machines of the catalog end, people declare them dead, and no other one may have them.
    fn strand(&mut self, version: &mut u32, seen: &mut Seen) {
        let having = self.rollouts().shares.into_keys().filter(|(_, of)| *of == name("desk"));
        let having: BTreeSet<Name> = having.map(|(host, _)| host).collect();
        if having.len() * 2 > self.hosts.len() {
            return;
        }
        *version += 1;
        self.update(*version);
        let is_begun =
            self.rollouts().rollouts.get(&name("desk")).is_some_and(|of| of.to.version == *version);
        let has = |world: &World, n: usize| having.contains(&world.hosts[n].name);
        for n in 0..self.hosts.len() {
            if has(self, n) {
                self.hosts[n].restart(self.now, 60_000);
            } else {
                self.act(n, FleetHostAction::Cordon);
            }
        }
        self.run_for(20_000, seen);
        for n in 0..self.hosts.len() {
            if has(self, n) {
                self.act(n, FleetHostAction::DeclareDead);
            }
        }
        self.run_for(20_000, seen);
        let now = self.rollouts();
        let is_nowhere = !now.shares.keys().any(|(_, of)| *of == name("desk"));
        let is_open =
            now.rollouts.get(&name("desk")).is_some_and(|of| of.to.version == *version && of.is_open());
        seen.stranded += u64::from(is_begun && is_nowhere && is_open);
    }

    pub(super) fn note_done(&mut self) {
        let (desk, hosts) = (name("desk"), &self.hosts);
        let Some(done) = &mut self.done else { return };
        for host in hosts {
            let version = host.version(&desk);
            if version > 0 && !done.contains(&(host.name.clone(), version)) && host.is_done(&desk, version) {
                done.insert((host.name.clone(), version));
            }
        }
    }

    /// People ask for a change. Whether it was made.
    pub(super) fn ask(
        &mut self,
        decide: impl Fn(&FleetView) -> Result<Option<Transaction>, ChangeError>,
    ) -> Result<bool, ChangeError> {
        let mut view = FleetView::default();
        let all = self.store.entries.iter().map(|(key, entry)| (key.clone(), entry.clone()));
        view.apply(Update::Whole(self.store.revision, all.collect()));
        let Some(change) = decide(&view)? else { return Ok(false) };
        let outcome = self.store.commit(&change, None, self.now);
        Ok(matches!(outcome, Some(Outcome::Applied(_))))
    }

    fn update(&mut self, version: u32) {
        let update =
            FleetCatalogUpdate { version, strategy: None, max_failed: 0, deadline_seconds: Some(300) };
        let now = jiff::Timestamp::UNIX_EPOCH;
        let asked = self.ask(|view| update_catalog(view, &name("desk"), &update, None, now).map(Some));
        super::trace(self.now, &format!("people: update to {version}: {asked:?}"));
    }

    fn change(&mut self, action: RolloutAction) {
        let asked = self.ask(|view| change_rollout(view, &name("desk"), action, jiff::Timestamp::UNIX_EPOCH));
        super::trace(self.now, &format!("people: {action:?}: {asked:?}"));
    }

    fn roll_back(&mut self) {
        let now = jiff::Timestamp::UNIX_EPOCH;
        let asked = self.ask(|view| roll_back_catalog(view, &name("desk"), None, now).map(Some));
        super::trace(self.now, &format!("people: rollback: {asked:?}"));
    }

    fn scale(&mut self, count: u32) {
        let desk = name("desk");
        let asked = self.ask(|view| {
            let mut spec = view.catalogs[&desk].value.spec.clone();
            spec.catalog.count = count;
            replace_catalog(view, &desk, &spec, None, jiff::Timestamp::UNIX_EPOCH)
        });
        super::trace(self.now, &format!("people: {count} machines: {asked:?}"));
        assert_eq!(asked.map(|_| ()), Ok(()));
    }

    fn state(&self) -> Option<FleetRolloutState> {
        Some(self.rollouts().rollouts.get(&name("desk"))?.state)
    }

    /// Machines of the catalog that are ready, or would be if nobody had released them.
    fn ready(&self) -> u32 {
        self.hosts.iter().map(|host| host.ready_or_released(&name("desk"))).sum()
    }

    /// People do something now and then.
    fn meddle(&mut self, version: &mut u32) {
        match self.random.below(8) {
            0 | 1 => {
                *version += 1;
                BAD.with(|bad| bad.set(if self.random.chance(2) { *version } else { 0 }));
                let host = self.random.below(self.hosts.len() as u64);
                MISSING.with(|missing| missing.set((if self.random.chance(6) { *version } else { 0 }, host)));
                self.update(*version);
            }
            2 => self.change(RolloutAction::Pause),
            3 | 4 => self.change(RolloutAction::Resume),
            5 if self.random.chance(2) => self.change(RolloutAction::Abort),
            6 => self.roll_back(),
            _ => {}
        }
    }

    /// A good version reaches all machines.
    fn finish(&mut self, version: u32, seen: &mut Seen) {
        BAD.with(|bad| bad.set(0));
        MISSING.with(|missing| missing.set((0, 0)));
        self.update(version);
        let desk = name("desk");
        let took = self.run_until(1_800_000, seen, |world| {
            let machines = world.hosts.iter().map(|host| host.rolled(&desk, version));
            let all_new = machines.into_iter().all(|(all, _, new)| all == new);
            all_new && world.state() == Some(FleetRolloutState::Done) && world.is_whole(&["desk"])
        });
        let why = || format!("{:?} {}", self.rollouts().rollouts, self.why(&["desk"]));
        assert!(took.is_some(), "version {version} has not reached all: {}", why());
    }
}

/// What must have happened, so that the runs show something.
fn check_seen((runs, seen): (u64, Seen)) {
    // Rollouts that were done are rollbacks, too.
    let Seen { started, halted, done, waited, reached, .. } = seen;
    assert!(
        runs < 20 || [started, halted, done, waited, 2 * reached].into_iter().all(|count| count > runs / 2),
        "{seen:?}"
    );
}

/// Hosts are well, and placers come and go: then `min_ready` machines are ready at any time.
#[test]
fn rollouts_leave_min_ready_machines_ready() {
    check_seen(run_seeds("SPILLWAY_ROLLOUTS", 30, |seed, seen| {
        let mut random = rng::Rng(seed);
        let hosts = 2 + random.below(10) as usize;
        let mut world = World::new(seed, hosts, hosts);
        super::REFUSES.with(|refuses| refuses.set(false));
        super::CLAIMS.with(|claims| claims.set(true));
        world.done = Some(BTreeSet::new());
        BAD.with(|bad| bad.set(0));
        let mut count = hosts as u32 * (2 + random.below(9) as u32);
        world.min_ready = count - 1 - random.below(u64::from(count / 2)) as u32;
        world.run_for(20_000, seen);
        world.catalog("desk", count, 45);
        world.run_until(300_000, seen, |world| world.is_whole(&["desk"])).unwrap();
        world.run_for(30_000, seen);
        let (mut version, mut next) = (1, 0);
        for _ in 0..600 {
            if world.now >= next {
                world.meddle(&mut version);
                if random.chance(3) {
                    world.replace_placer();
                }
                // Fewer would take ready machines, which are others than those that the rollout leaves.
                if random.chance(4) && count < hosts as u32 * 30 {
                    count += random.below(hosts as u64 * 2) as u32;
                    world.scale(count);
                }
                next = world.now + 1_000 + random.below(90_000);
            }
            let had = world.ready();
            world.run_for(1_000, seen);
            let (has, least) = (world.ready(), world.min_ready);
            let why = || {
                let hosts =
                    world.hosts.iter().map(|host| format!("{}: {}", host.name, host.describe(&name("desk"))));
                hosts.collect::<Vec<_>>().join("\n")
            };
            assert!(
                has >= least || has >= had,
                "{has} of {count} machines are ready, and {least} must be\n{}",
                why()
            );
        }
    }));
}

/// The same, with all faults.
#[test]
fn rollouts_keep_to_their_waves_whatever_fails() {
    let (runs, seen) = run_seeds("SPILLWAY_ROLLOUTS", 30, |seed, seen| {
        let mut random = rng::Rng(seed ^ 0xF00D);
        let hosts = 3 + random.below(12) as usize;
        let mut world = World::new(seed, hosts, hosts);
        super::REFUSES.with(|refuses| refuses.set(true));
        super::CLAIMS.with(|claims| claims.set(true));
        world.done = Some(BTreeSet::new());
        BAD.with(|bad| bad.set(0));
        // Some are on a few hosts, which may all be drained.
        let machines = if random.chance(3) { 1 + random.below(4) } else { hosts as u64 * 8 };
        world.min_ready = random.below((machines / 2).max(1)) as u32;
        world.run_for(20_000, seen);
        world.catalog("desk", machines as u32, 45);
        world.catalog("build", hosts as u32, 30);
        world.run_for(60_000, seen);
        let mut version = 1;
        for _ in 0..100 {
            if random.chance(3) {
                world.fault();
            }
            if random.chance(3) {
                world.meddle(&mut version);
            }
            if random.chance(10) {
                world.scale((machines / 2 + 1 + random.below(machines * 3 / 2)) as u32);
            }
            if random.chance(12) {
                world.evacuate();
            }
            if random.chance(30) {
                world.strand(&mut version, seen);
            }
            world.run_for(1_000 + random.below(30_000), seen);
        }
        world.end_faults();
        seen.refused += world.hosts.iter().map(|host| host.refusals()).sum::<u64>();
        super::REFUSES.with(|refuses| refuses.set(false));
        world.run_until(1_200_000, seen, |world| world.are_placed(&["desk"])).unwrap();
        world.run_for(120_000, seen);
        world.finish(version + 1, seen);
    });
    assert!(runs < 20 || seen.stranded.min(seen.refused) > runs / 4, "{seen:?}");
    check_seen((runs, seen));
}
