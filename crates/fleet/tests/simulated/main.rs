//! Fleets on a simulated etcd, with faults: hosts that end, pause, lose their connections to etcd or to each other; clocks that run
//! apart and jump; watches that are late or compacted; transactions whose answers are lost; an etcd without a leader, which then ends
//! all leases together or none. Hosts run the true election and the true placer.
//!
//! `SPILLWAY_SIMULATIONS=N` sets the number of fleets (`SPILLWAY_ROLLOUTS=N` of those with rollouts), `SPILLWAY_SEED=N` the first, and `SPILLWAY_SIMULATED_HOSTS=N` the hosts of the
//! fleet whose figures are printed. One that fails says its seed. `SPILLWAY_TRACE=1` prints what placers tell.
#![allow(clippy::unwrap_used)]

mod host;
#[path = "../common/rng.rs"]
mod rng;
mod rollouts;
#[path = "../common/sample.rs"]
mod sample;
mod store;
mod world;

use sample::name;
use spillway_fleet::Moment;
use spillway_fleet::keys::Key;
use spillway_fleet::liveness::{QUIET_MS, StoreHealth};
use spillway_fleet::transaction::{Comparison, Transaction};
use spillway_fleet::view::FleetView;
use std::cell::Cell;
use std::time::Instant;
use world::{Seen, World};

/// Machines that a host has space for.
const SPACE: u64 = 64;

thread_local! {
    /// Whether hosts refuse shares now and then.
    static REFUSES: Cell<bool> = const { Cell::new(true) };
}

thread_local! {
    /// Whether machines are claimed. If not, those that are claimed are released.
    static CLAIMS: Cell<bool> = const { Cell::new(false) };
}

thread_local! {
    /// Versions with which machines fail now and then.
    static BAD: Cell<u32> = const { Cell::new(0) };
    /// A version that one host cannot get.
    static MISSING: Cell<(u32, u64)> = const { Cell::new((0, 0)) };
}

fn is_bad(version: u32) -> bool {
    BAD.with(Cell::get) == version
}

fn is_missing(version: u32, host: &spillway_api::Name) -> bool {
    let (missing, number) = MISSING.with(Cell::get);
    version == missing && host.as_str()[1..].parse() == Ok(number)
}

fn trace(now: u64, text: &str) {
    if std::env::var_os("SPILLWAY_TRACE").is_some() {
        println!("{:>9.3} s: {text}", now as f64 / 1000.0);
    }
}

/// Nothing is replaced while the brake holds: the rule once more, on what the placer sees.
fn check_brake(view: &FleetView, health: &StoreHealth, clock: Moment, transaction: &Transaction) {
    let replaces = (transaction.comparisons.iter())
        .any(|comparison| matches!(comparison, Comparison::Created(Key::Alive(_), 0)));
    if replaces {
        // Hosts that are declared dead are left to the tests of that rule.
        let is_left = view.hosts.values().any(|host| host.value.dead_epoch.is_some());
        let silent = view.hosts.keys().filter(|host| !view.alive.contains_key(*host)).count();
        let is_troubled = health.trouble.is_some_and(|at| clock.since_ms(at) < QUIET_MS);
        assert!(!is_troubled, "a host is replaced soon after trouble of the store");
        assert!(
            is_left || silent < 2 || 3 * silent <= view.hosts.len(),
            "a host is replaced though {silent} are silent"
        );
    }
}

fn number(name: &str) -> Option<u64> {
    std::env::var(name).ok().map(|text| text.parse().unwrap())
}

/// Runs fleets with the seeds that the environment names, or so many from 0 on. The number of runs.
fn run_seeds(variable: &str, runs: u64, run: impl Fn(u64, &mut Seen)) -> (u64, Seen) {
    let mut seen = Seen::default();
    let (first, runs) = (number("SPILLWAY_SEED").unwrap_or(0), number(variable).unwrap_or(runs));
    println!("SPILLWAY_SEED={first} {variable}={runs}");
    for seed in first..first + runs {
        let run = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| run(seed, &mut seen)));
        if let Err(panic) = run {
            eprintln!("again: SPILLWAY_SEED={seed} {variable}=1");
            std::panic::resume_unwind(panic);
        }
    }
    println!("{runs} fleets: {seen:?}");
    (runs, seen)
}

#[test]
fn fleets_with_faults_come_back_to_what_is_wanted() {
    let (runs, seen) = run_seeds("SPILLWAY_SIMULATIONS", 30, run);
    if runs >= 20 {
        let Seen { terms, conflicts, lost_answers, replaced, leaders, compactions, claims, acts, .. } = seen;
        let all = [terms, conflicts, lost_answers, replaced, leaders, compactions, claims, acts];
        assert!(all.into_iter().all(|count| count >= runs / 10), "{seen:?}");
    }
}

fn run(seed: u64, seen: &mut Seen) {
    REFUSES.with(|refuses| refuses.set(true));
    CLAIMS.with(|claims| claims.set(true));
    BAD.with(|bad| bad.set(0));
    let mut random = rng::Rng(seed);
    let hosts = 2 + random.below(14) as usize;
    let mut world = World::new(seed, hosts, hosts);
    // A quarter of the space stays free, so that a lost host can be replaced.
    let machines = hosts as u64 * SPACE * 3 / 4;
    let (first, second) = (machines / 3, machines / 4);
    world.catalog("desk", first as u32, 45);
    world.catalog("build", second as u32, 30);
    world.run_for(60_000, seen);
    for _ in 0..120 {
        world.fault();
        if random.chance(6) {
            world.catalog("desk", (first / 2 + random.below(first)) as u32, 45);
        }
        let ms = 1_000 + random.below(14_000);
        world.run_for(ms, seen);
    }
    world.end_faults();
    seen.leaders += world.store.leaders;
    seen.compactions += world.compactions;
    seen.acts += world.acts;
    seen.claims += world.hosts.iter().map(host::Host::claims).sum::<u64>();
    REFUSES.with(|refuses| refuses.set(false));
    let took = world.run_until(1_200_000, seen, |world| world.is_whole(&["desk", "build"]));
    assert!(took.is_some(), "the fleet is not whole again: {}", world.why(&["desk", "build"]));
    seen.slowest_ms = seen.slowest_ms.max(took.unwrap());
    // At rest nothing is written.
    world.run_for(60_000, seen);
    let writes = world.store.writes;
    world.run_for(120_000, seen);
    assert_eq!(world.store.writes, writes, "a fleet at rest writes nothing");
}

#[test]
fn figures_of_a_large_fleet() {
    let hosts = number("SPILLWAY_SIMULATED_HOSTS").unwrap_or(200) as usize;
    println!("SPILLWAY_SIMULATED_HOSTS={hosts}");
    REFUSES.with(|refuses| refuses.set(false));
    CLAIMS.with(|claims| claims.set(false));
    let mut seen = Seen::default();
    let mut world = World::new(1, hosts, 3);
    world.run_for(20_000, &mut seen);
    let catalogs: Vec<String> = (0..10).map(|n| format!("c{n}")).collect();
    let names: Vec<&str> = catalogs.iter().map(String::as_str).collect();
    let machines = 5 * hosts as u32;
    let (begin, writes) = (Instant::now(), world.store.writes);
    names.iter().for_each(|catalog| world.catalog(catalog, machines, 45));
    let placed = world.run_until(600_000, &mut seen, |world| world.are_placed(&names)).unwrap();
    let ready = world.run_until(600_000, &mut seen, |world| world.is_whole(&names)).unwrap();
    println!(
        "{} machines on {hosts} hosts: placed after {:.1} s, ready after {:.1} s, with {} writes ({:?} of this machine)",
        10 * machines,
        placed as f64 / 1000.0,
        (placed + ready) as f64 / 1000.0,
        world.store.writes - writes,
        begin.elapsed()
    );
    world.run_for(30_000, &mut seen);
    let writes = world.store.writes;
    world.run_for(120_000, &mut seen);
    println!("at rest: {:.2} writes a second", (world.store.writes - writes) as f64 / 120.0);
    assert_eq!(world.store.writes, writes);
    // A host that places nothing is lost.
    let writes = world.store.writes;
    let shares = world.shares_written;
    let moved = world.machines_of(hosts - 1);
    world.hosts[hosts - 1].down_until = u64::MAX;
    let replaced = world.run_until(600_000, &mut seen, |world| world.machines_of(hosts - 1) == 0).unwrap();
    let placed = world.run_until(600_000, &mut seen, |world| world.are_placed(&names)).unwrap();
    let shares = world.shares_written - shares;
    let ready = world.run_until(600_000, &mut seen, |world| world.is_whole(&names)).unwrap();
    println!(
        "a lost host with {moved} machines: replaced after {:.1} s, ready after {:.1} s, with {shares} writes of shares ({:.2} for each machine), {} writes in all",
        (replaced + placed) as f64 / 1000.0,
        (replaced + placed + ready) as f64 / 1000.0,
        shares as f64 / moved as f64,
        world.store.writes - writes
    );
    assert!(
        replaced + placed < 70_000,
        "45 s since its last sign of life, which may be 15 s before, and 5 s for questions"
    );
    assert!(shares <= 2 * moved as u64);
    assert!(world.store.entries.contains_key(&format!("hosts/{}", name("h0"))));
}
