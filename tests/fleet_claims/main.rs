//! A fleet of real daemons with disks and a real etcd: claims under disturbance (daemons are killed and stopped, answers are cut), and what any
//! daemon shows of all hosts.
#![allow(clippy::unwrap_used)]

mod clients;
mod seeing;
mod world;

use clients::{Outcomes, Registry, one_claim};
use spillway_testkit::Rng;
use spillway_testkit::disk;
use spillway_testkit::etcd::{EtcdRecord, ProxyMode};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};
use world::World;

/// Clients that claim at the same time.
const CLIENTS: u64 = 8;
/// Claims on a quiet fleet whose time is measured.
const MEASURED: usize = 200;
/// How long nothing is written at rest.
const REST: Duration = Duration::from_secs(10);
/// Keys of the fleet in etcd.
const PREFIX: &str = "/spillway/site/";

fn number(name: &str) -> Option<u64> {
    std::env::var(name).ok().and_then(|text| text.parse().ok())
}

/// F5: no machine is claimed twice, and each request has one claim.
#[test]
fn no_machine_is_claimed_twice_whatever_fails() {
    let claims = number("SPILLWAY_FLEET_CLAIMS").unwrap_or(1_000);
    let now = std::time::UNIX_EPOCH.elapsed().unwrap().as_nanos() as u64;
    let seed = number("SPILLWAY_SEED").unwrap_or(now);
    println!("SPILLWAY_SEED={seed}");
    let mut world = World::new(number("SPILLWAY_FLEET_HOSTS").unwrap_or(3) as usize, 8);
    rest(&world);
    measure(&world);
    let registry = Arc::new(Registry::default());
    let left = Arc::new(AtomicU64::new(claims));
    let begun = Instant::now();
    let clients: Vec<_> = (0..CLIENTS)
        .map(|client| {
            let (registry, left, sockets) = (Arc::clone(&registry), Arc::clone(&left), world.sockets());
            std::thread::spawn(move || {
                let mut rng = Rng::new(seed.wrapping_add(client + 1));
                let take = |left: u64| left.checked_sub(1);
                while left.fetch_update(Ordering::SeqCst, Ordering::SeqCst, take).is_ok() {
                    one_claim(&sockets, &registry, &mut rng);
                }
            })
        })
        .collect();
    // Daemons end with the thread that has started them.
    let mut rng = Rng::new(seed);
    let mut disturbances = 0;
    while clients.iter().any(|client| !client.is_finished()) {
        disturb(&mut world, &mut rng);
        disturbances += 1;
    }
    for client in clients {
        client.join().expect("a client has found something wrong");
    }
    let Outcomes { claimed, refused, repeated, ended } = registry.outcomes();
    println!(
        "{claimed} claims and {refused} refusals in {:.0} s, with {disturbances} disturbances; {repeated} answers were lost and asked for \
         again, {ended} ended claims were not made anew",
        begun.elapsed().as_secs_f64()
    );
    assert!(claimed * 10 >= claims * 9, "nearly all requests get a machine: {claimed} of {claims}");
    assert!(disturbances < 10 || repeated > 0, "disturbances are of no use");
    // A second claim of a request would have no end: nobody knows of it.
    world.until("no machine is claimed", |world| world.claimed() == Some(0));
}

/// Does one thing to one host, and waits until the next one is due.
fn disturb(world: &mut World, rng: &mut Rng) {
    let wait = |rng: &mut Rng, most: u64| std::thread::sleep(Duration::from_millis(rng.below(most)));
    let host = rng.below(world.hosts.len() as u64) as usize;
    match rng.below(8) {
        0 => {
            world.hosts[host].kill();
            wait(rng, 1_500);
            world.hosts[host].start();
        }
        1 => {
            world.hosts[host].pause(true);
            wait(rng, 3_000);
            world.hosts[host].pause(false);
        }
        2 | 3 => {
            world.hosts[host].door.set_mode(ProxyMode::Swallows);
            wait(rng, 1_000);
            world.hosts[host].door.set_mode(ProxyMode::Passes);
        }
        4 => {
            world.hosts[host].door.set_mode(ProxyMode::Stalls);
            wait(rng, 7_000);
            world.hosts[host].door.set_mode(ProxyMode::Passes);
        }
        _ => world.hosts[host].door.cut(),
    }
    wait(rng, 1_500);
}

/// What is in etcd, but for what hosts report at their pace.
fn records(world: &World) -> BTreeMap<String, EtcdRecord> {
    let (_, mut all) = world.etcd.records(PREFIX).unwrap();
    all.retain(|key, _| !key.starts_with("status/"));
    all
}

/// Nothing is written at rest: with 1,000 hosts, each of them may write once in five seconds.
fn rest(world: &World) {
    let revision = || world.etcd.records(PREFIX).unwrap().0;
    world.until("nothing is written", |_| {
        let before = revision();
        std::thread::sleep(REST);
        revision() == before
    });
    // Nor is that by chance.
    let before = world.etcd.records(PREFIX).unwrap();
    std::thread::sleep(2 * REST);
    assert_eq!(world.etcd.records(PREFIX).unwrap(), before);
}

/// Prints how long claims through one host of machines of others take. They write nothing to etcd, and use connections that there are.
fn measure(world: &World) {
    let connections = || world.hosts.iter().map(|host| host.door.connections()).sum::<u64>();
    let before = (records(world), connections());
    let mut times: Vec<Duration> = Vec::new();
    let sockets = world.sockets();
    for request in 0..MEASURED {
        let begun = Instant::now();
        let claim = clients::claim(&sockets[0], &format!("quiet-{request}"), true).unwrap();
        let took = begun.elapsed();
        assert_eq!(claim.status, 200, "{:#}", claim.body);
        if claim.body["host"] != "h0" {
            times.push(took);
        }
        clients::release(&sockets[0], &claim.body);
        // Others are ready meanwhile, so that the fleet stays quiet.
        world.until("the machine is ready again", |world| world.is_ready(&claim.body));
    }
    times.sort_unstable();
    let at = |part: usize| times[(times.len() - 1) * part / 100].as_secs_f64() * 1000.0;
    println!("{} claims through another host: p50 {:.1} ms, p99 {:.1} ms", times.len(), at(50), at(99));
    assert_eq!(records(world), before.0);
    let opened = connections() - before.1;
    assert!(opened < times.len() as u64 / 10, "{opened} connections for {} claims", times.len());
    // As users have the programs. Others are tested beside other tests.
    if disk::program().unwrap().parent().is_some_and(|dir| dir.ends_with("release")) {
        assert!(at(50) <= 5.0 && at(99) <= 25.0);
    }
}
