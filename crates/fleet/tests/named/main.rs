//! Names of the fleet on a simulated etcd, with faults: clocks of different rates, daemons and hosts that stand still, lose their power or
//! their connections, leases that etcd ends early, transactions whose answers are lost, placers that change. Hosts run the true
//! membership, election, placer and decisions about names. At no moment of true time do two hosts run the same name, and once there are
//! no faults any more all names run.
//!
//! `SPILLWAY_NAMED_SCHEDULES=N` sets the number of schedules, `SPILLWAY_SEED=N` the first. One that fails says both. What the design
//! relies on is removed one by one in further tests, which must find two hosts with one name: the check of the lease, that of the epoch,
//! the guard, the margin between the deadline and the placer's wait, and the wait of a host that has booted.
#![allow(clippy::unwrap_used)]

mod node;
#[path = "../common/rng.rs"]
mod rng;
#[path = "../common/sample.rs"]
mod sample;
mod store;
mod world;

use rng::Rng;
use spillway_api::FleetHostAction;
use world::World;

/// What is taken away from the design.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Removed {
    /// Nothing is.
    Nothing,
    /// A host believes its lease for ever.
    Lease,
    /// A host takes what it was given in an earlier epoch.
    Epoch,
    /// Nobody ends machines but the daemon.
    Guard,
    /// The guard ends machines 40 s later.
    Margin,
    /// A host whose records are of another boot starts names at once.
    Boot,
}

/// What has happened, to see that there was something to fail.
#[derive(Clone, Copy, Debug, Default)]
pub struct Seen {
    /// VMMs that were started.
    pub started: usize,
    /// VMMs that the guard has ended.
    pub killed: usize,
    /// Transactions that took names from hosts without a lease.
    pub replaced: usize,
    /// Names that hosts have given up.
    pub released: usize,
    /// Hosts that were removed.
    pub removed: usize,
    /// Machines that began under the name of another one.
    pub joined: usize,
    /// Schedules after which all names ran once there were no faults any more.
    pub recovered: usize,
    /// The longest time until then.
    pub slowest_ms: u64,
    /// Moments at which a host that had stood still as a whole ran a name of another one, and its guard had not run yet.
    pub awakened: usize,
}

/// Length of a schedule, in milliseconds.
const LENGTH_MS: u64 = 180_000;
/// Time after the end of all faults in which each name must begin to run, in milliseconds.
const RECOVERY_MS: u64 = 150_000;

/// Time for which they must go on, in milliseconds: longer than a guard leaves what its daemon does not look after.
const STAYS_MS: u64 = 60_000;
/// Each so-manieth schedule goes on without faults: all of them would take twice as long.
const RECOVERS: u64 = 5;

fn number(name: &str) -> Option<u64> {
    std::env::var(name).ok().map(|text| text.parse().unwrap())
}

fn fault(world: &mut World) -> Result<(), String> {
    let now = world.now;
    let long = |world: &mut World| match world.rng.below(3) {
        0 => world.rng.below(10_000),
        1 => 10_000 + world.rng.below(40_000),
        _ => 40_000 + world.rng.below(80_000),
    };
    let able: Vec<usize> = (0..world.nodes.len()).filter(|number| !world.nodes[*number].is_retired).collect();
    let number = *world.rng.pick(&able);
    let until = now + long(world);
    let key = format!("alive/{}", world.nodes[number].host);
    match world.rng.below(15) {
        0 | 1 => world.nodes[number].stopped_until = until,
        2 if !world.nodes[number].is_off => world.nodes[number].paused_until = until,
        3..=5 => world.nodes[number].cut_until = until,
        // Its watch is late, or its member of etcd stands still, until all comes at once.
        6 => {
            let late = world.rng.below(2_000);
            world.nodes[number].lag_ms = *world.rng.pick(&[late, 100, 20_000, 120_000]);
        }
        7 => {
            if let Some(lease) = world.store.lease_of(&key) {
                world.store.end_lease(lease, now);
            }
        }
        8 => {
            let begins_at = now + 500 + world.rng.below(5_000);
            let node = &mut world.nodes[number];
            (node.daemon, node.begins_at) = (None, begins_at);
        }
        9 if !world.nodes[number].is_off => world.nodes[number].crash(),
        9 => reboot(world, number),
        11 => give_up(world, number)?,
        // Its daemon hangs, or it is off, and somebody has copied its disk.
        12 if world.is_mortal(number) => world.join(number, true),
        10 => {
            let of = [FleetHostAction::Drain, FleetHostAction::Uncordon, FleetHostAction::Cordon];
            let action = *world.rng.pick(&of);
            world.act(number, action);
        }
        _ => {
            let (count, action) = (world.rng.below(5) as u32, *world.rng.pick(&["pause", "stop", "keep"]));
            world.catalog(count, action);
        }
    }
    // Whoever declares a host dead has seen that it is off.
    if world.nodes[number].is_off && world.rng.chance(2) {
        declare_dead(world, number);
    }
    Ok(())
}

/// A host does not come through any more, and people believe that it is off.
fn give_up(world: &mut World, number: usize) -> Result<(), String> {
    let now = world.now;
    let (node, until) = (&mut world.nodes[number], now + 60_000 + world.rng.below(60_000));
    node.cut_until = until;
    if world.rng.chance(2) {
        node.stopped_until = until;
    }
    let key = format!("alive/{}", node.host);
    match world.store.lease_of(&key) {
        Some(lease) if world.rng.chance(2) => world.store.end_lease(lease, now),
        _ => world.run_until(now + 16_000)?,
    }
    declare_dead(world, number);
    Ok(())
}

/// Declares a host dead, and removes it in half of the cases. After a removal another machine joins under its name, or the same one starts
/// its daemon again later, or neither.
fn declare_dead(world: &mut World, number: usize) {
    if !world.is_mortal(number) {
        return;
    }
    world.act(number, FleetHostAction::DeclareDead);
    if world.rng.chance(2) || !world.remove(number) {
        return;
    }
    match world.rng.below(3) {
        0 => world.join(number, false),
        1 => {
            let begins_at = world.now + world.rng.below(40_000);
            let node = &mut world.nodes[number];
            (node.daemon, node.begins_at) = (None, begins_at);
            (node.cut_until, node.stopped_until) = (begins_at, begins_at);
        }
        _ => {}
    }
}

fn reboot(world: &mut World, number: usize) {
    let begins_at = world.now + world.rng.below(5_000);
    let boot = world.boot();
    let node = &mut world.nodes[number];
    (node.is_off, node.begins_at, node.boot) = (false, begins_at, boot);
    // Its clock begins anew.
    node.offset = -node.rate * world.now as f64 + 1_000.0;
}

fn run(seed: u64, removed: Removed) -> Result<Seen, String> {
    let mut rng = Rng(seed ^ 0x006e_616d_6564);
    let action = *rng.pick(&["pause", "stop", "keep", "pause", "stop"]);
    let hosts = 3 + rng.below(3) as usize;
    let mut world = World::new(seed, hosts, action, removed);
    world.run_until(6_000)?;
    while world.now < LENGTH_MS {
        let pause = 1_000 + world.rng.below(30_000);
        world.run_until(world.now + pause)?;
        fault(&mut world)?;
        if world.rng.chance(3) {
            fault(&mut world)?;
        }
    }
    // Without a part of the design the names may wait for what never comes.
    if removed == Removed::Nothing && seed.is_multiple_of(RECOVERS) {
        recover(&mut world)?;
    }
    Ok(world.seen)
}

/// All faults end, people want one thing, and a host joins, because all others may have been removed: each name must run.
fn recover(world: &mut World) -> Result<(), String> {
    let begin = world.now;
    world.be_quiet();
    for number in 0..world.nodes.len() {
        let node = &mut world.nodes[number];
        (node.paused_until, node.stopped_until, node.cut_until, node.lag_ms) = (0, 0, 0, 100);
        if node.is_off {
            reboot(world, number);
        }
        world.act(number, FleetHostAction::Uncordon);
    }
    world.arrive("f");
    let (count, action) = (1 + world.rng.below(3) as u32, *world.rng.pick(&["pause", "stop", "keep"]));
    world.catalog(count, action);
    while !world.all_run(count, action) {
        world.run_until(world.now + 1_000)?;
        if world.now > begin + RECOVERY_MS {
            return Err(format!("not all of {count} names run with '{action}': {}", world.why()));
        }
    }
    let slowest_ms = world.now - begin;
    // And go on.
    world.run_until(world.now + STAYS_MS)?;
    if !world.all_run(count, action) {
        return Err(format!("{count} names have run with '{action}', and do not any more: {}", world.why()));
    }
    world.seen.recovered += 1;
    world.seen.slowest_ms = slowest_ms;
    Ok(())
}

#[test]
fn a_name_is_alive_on_one_host_at_a_time() {
    let first = number("SPILLWAY_SEED").unwrap_or(0);
    let schedules = number("SPILLWAY_NAMED_SCHEDULES").unwrap_or(3_000);
    println!("SPILLWAY_SEED={first} SPILLWAY_NAMED_SCHEDULES={schedules}");
    let mut all = Seen::default();
    for seed in first..first + schedules {
        match std::panic::catch_unwind(|| run(seed, Removed::Nothing)) {
            Ok(Ok(seen)) => {
                all.started += seen.started;
                all.killed += seen.killed;
                all.replaced += seen.replaced;
                all.released += seen.released;
                all.awakened += seen.awakened;
                all.removed += seen.removed;
                all.joined += seen.joined;
                all.recovered += seen.recovered;
                all.slowest_ms = all.slowest_ms.max(seen.slowest_ms);
            }
            Ok(Err(why)) => panic!("SPILLWAY_SEED={seed} SPILLWAY_NAMED_SCHEDULES=1: {why}"),
            Err(panic) => {
                eprintln!("again: SPILLWAY_SEED={seed} SPILLWAY_NAMED_SCHEDULES=1");
                std::panic::resume_unwind(panic);
            }
        }
    }
    println!("{schedules} schedules: {all:?}");
    if schedules >= 1_000 {
        let least = schedules as usize / 20;
        let counts =
            [all.started, all.killed, all.replaced, all.released, all.removed, all.joined, all.recovered];
        assert!(counts.iter().all(|count| *count >= least), "too little happened: {all:?}");
    }
}

/// Some of these schedules must find two hosts with one name.
fn finds_two(removed: Removed) {
    let found = (0..2_000).find_map(|seed| run(seed, removed).err().map(|why| (seed, why)));
    println!("without {removed:?}: {found:?}");
    assert!(found.is_some(), "nothing fails without it: {removed:?}");
}

#[test]
fn without_the_check_of_the_lease_a_name_is_alive_twice() {
    finds_two(Removed::Lease);
}

#[test]
fn without_the_guard_a_name_is_alive_twice() {
    finds_two(Removed::Guard);
}

#[test]
fn without_the_margin_a_name_is_alive_twice() {
    finds_two(Removed::Margin);
}

#[test]
fn without_the_wait_of_another_boot_a_name_is_alive_twice() {
    finds_two(Removed::Boot);
}

/// A host comes back after it was declared dead, while there is no placer, and its lease ends again before there is one: by the records
/// it is still the one that was dead.
fn return_unseen(seed: u64, removed: Removed) -> Result<Seen, String> {
    let mut world = World::new(seed, 4, "keep", removed);
    world.be_quiet();
    world.run_until(10_000)?;
    let view = world.view();
    let placer = view.placer.as_ref().unwrap().value.host.clone();
    let places = |host: &spillway_api::Name| view.places.contains_key(host);
    let number = world.nodes.iter().position(|node| node.host != placer && places(&node.host)).unwrap();
    let placer = world.nodes.iter().position(|node| node.host == placer).unwrap();
    world.nodes[number].crash();
    world.run_until(27_000)?;
    // The placer stands still, and its lease goes on for a while.
    world.nodes[placer].stopped_until = 200_000;
    for other in (0..4).filter(|other| ![number, placer].contains(other)) {
        world.nodes[other].cut_until = 50_000;
    }
    world.act(number, FleetHostAction::DeclareDead);
    reboot(&mut world, number);
    let node = &mut world.nodes[number];
    // Nobody has copied its records, so that it need not wait.
    (node.begins_at, node.recorded_boot) = (world.now, node.boot);
    world.run_until(33_000)?;
    // Its daemon stands still. What runs there goes on.
    (world.nodes[number].cut_until, world.nodes[number].stopped_until) = (200_000, 200_000);
    world.run_until(120_000)?;
    Ok(world.seen)
}

#[test]
fn without_the_check_of_the_epoch_a_name_is_alive_twice() {
    let with: Vec<_> = (0..50).map(|seed| return_unseen(seed, Removed::Nothing)).collect();
    assert!(with.iter().all(Result::is_ok), "{with:?}");
    assert!(with.iter().flatten().any(|seen| seen.replaced > 0), "{with:?}");
    let without: Vec<_> = (0..50).map(|seed| return_unseen(seed, Removed::Epoch)).collect();
    assert!(without.iter().any(Result::is_err), "nothing fails without it: {without:?}");
}
