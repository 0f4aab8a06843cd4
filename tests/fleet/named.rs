//! Machines with names of the fleet: what becomes of them when etcd, the daemon or the guard stands still.

use crate::world::World;
use rustix::process::{Pid, Signal};
use serde_json::{Value, json};
use spillway_testkit::etcd::EtcdProgram;
use spillway_testkit::process::{send_signal, wait_until};
use std::time::{Duration, Instant};

/// Time from the moment at which nothing is renewed any more until the guard has ended all machines: 32 s, and what a kill takes.
const DEADLINE: Duration = Duration::from_secs(33);
/// The same, at least: the last renewal was at most five seconds before.
const LEAST: Duration = Duration::from_secs(25);

/// The machine `desk-001`, its host's number and its VMM's process id.
struct Desk {
    host: usize,
    vmm: u64,
    identity: Value,
}

fn desk(world: &World) -> Option<Desk> {
    world.hosts.iter().enumerate().find_map(|(number, host)| {
        host.daemon.as_ref()?;
        let (status, machine) = host.try_send("GET", "/v1/machines/desk-001", "");
        let vmm = machine["status"]["run"]["vmm_pid"].as_u64();
        let is_ready = status == 200 && machine["status"]["ready"] == true;
        is_ready.then(|| Desk { host: number, vmm: vmm.unwrap(), identity: machine["identity"].clone() })
    })
}

/// A process that nobody has waited for yet has ended all the same.
fn is_alive(pid: u64) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    stat.rsplit_once(") ").is_some_and(|(_, rest)| !rest.starts_with(['Z', 'X']))
}

/// The time until a process has ended.
fn ends(pid: u64, within: Duration) -> Option<Duration> {
    let begun = Instant::now();
    wait_until(within, || (!is_alive(pid)).then_some(()))?;
    Some(begun.elapsed())
}

/// Waits until it is ready, with another VMM than this one.
fn wait_for_desk(world: &World, before: u64) -> Desk {
    let another = |world: &World| desk(world).filter(|desk| desk.vmm != before && is_alive(desk.vmm));
    world.until("desk-001 is ready", |world| another(world).is_some());
    another(world).expect("it stays so")
}

fn signal(pid: u32, signal: Signal) {
    send_signal(Pid::from_raw(pid.cast_signed()).unwrap(), signal).unwrap();
}

#[test]
fn a_name_ends_with_its_hosts_lease_and_comes_back_as_the_same_machine() {
    let Some(mut world) = World::new(2) else { return };
    world.import("tiny", "v1");
    let settings = json!({ "identity": "named", "on_isolation": "pause" });
    world.create("desk", &world.spec("tiny:1", 1, settings));
    let first = wait_for_desk(&world, 0);

    // The daemon stands still: nobody but the guard can end the machine.
    let daemon = world.hosts[first.host].daemon.as_ref().unwrap().pid();
    signal(daemon, Signal::STOP);
    let took = ends(first.vmm, DEADLINE).expect("the guard ends it");
    println!("the VMM of a daemon that stands still has ended after {:.1} s", took.as_secs_f64());
    assert!(took >= LEAST, "not before the deadline");
    signal(daemon, Signal::CONT);
    let second = wait_for_desk(&world, first.vmm);
    assert_eq!(second.identity, first.identity);

    // All members of etcd stand still: the guest is paused first.
    for member in 0..world.etcd.len() {
        world.etcd.freeze(member).unwrap();
    }
    let begun = Instant::now();
    let is_paused = |world: &World| {
        let machine = world.hosts[second.host].object("/v1/machines/desk-001");
        machine.to_string().contains("its guest is paused")
    };
    world.until_within(Duration::from_secs(16), "its guest is paused", is_paused);
    println!("the guest is paused after {:.1} s without etcd", begun.elapsed().as_secs_f64());
    assert!(is_alive(second.vmm), "it may go on");
    let took = ends(second.vmm, DEADLINE).map(|_| begun.elapsed()).expect("it ends");
    println!("the VMM has ended {:.1} s after etcd stood still", took.as_secs_f64());
    assert!((LEAST..=DEADLINE).contains(&took), "{took:?}");
    let is_off = |world: &World| desk(world).is_none_or(|desk| !is_alive(desk.vmm));
    world.until("nobody has it without etcd", is_off);
    for member in 0..world.etcd.len() {
        world.etcd.thaw(member).unwrap();
    }
    let third = wait_for_desk(&world, second.vmm);
    assert_eq!(third.identity, first.identity);
}

/// The guard whose record this is, if it runs.
fn guard(world: &World, host: usize, record: &str) -> Option<u32> {
    let folder = world.hosts[host].socket().with_file_name("state").join("run/guard");
    let text = std::fs::read_to_string(folder.join(record)).ok()?;
    // The boot of the host, and what `/proc/PID/stat` said.
    let pid: u32 = text.lines().nth(1)?.split(' ').next()?.parse().ok()?;
    is_alive(pid.into()).then_some(pid)
}

#[test]
fn a_restart_of_the_daemon_ends_no_name_and_a_guard_that_stands_still_is_replaced() {
    let Some(mut world) = World::new(2) else { return };
    world.import("tiny", "v1");
    let settings = json!({ "identity": "named", "on_isolation": "stop" });
    world.create("desk", &world.spec("tiny:1", 1, settings));
    let first = wait_for_desk(&world, 0);
    let stays = |world: &World| {
        world.until("the host is a member, and has the machine", |world| {
            let has = desk(world).is_some_and(|desk| desk.host == first.host);
            has && world.hosts[first.host].fleet()["membership"] == "member"
        });
        assert_eq!(desk(world).map(|desk| desk.vmm), Some(first.vmm), "it is the same VMM");
    };
    for _ in 0..3 {
        world.hosts[first.host].daemon.as_mut().unwrap().restart().unwrap();
        stays(&world);
    }

    let one = guard(&world, first.host, "guard.process").expect("it has a guard");
    signal(one, Signal::STOP);
    let begun = Instant::now();
    world.until("another guard takes its place", |world| {
        let events = world.hosts[first.host].object("/v1/events");
        let is_said = events.to_string().contains("another one takes its place");
        is_said && guard(world, first.host, "guard-2.process").is_some() && !is_alive(one.into())
    });
    println!(
        "another guard has taken the place of one that stood still after {:.1} s",
        begun.elapsed().as_secs_f64()
    );
    let two = guard(&world, first.host, "guard-2.process").unwrap();
    let page = world.hosts[first.host].socket().with_file_name("state").join("run/guard/page");
    std::fs::remove_file(&page).unwrap();
    world.until("the page was made again, and has a guard", |world| {
        page.exists() && guard(world, first.host, "guard.process").is_some() && !is_alive(two.into())
    });
    stays(&world);

    let daemon = world.hosts[first.host].daemon.as_ref().unwrap().pid();
    signal(daemon, Signal::STOP);
    let took = ends(first.vmm, DEADLINE).expect("the guard that is there now ends it");
    assert!(took >= LEAST, "not before the deadline");
    signal(daemon, Signal::CONT);
}

#[test]
fn a_name_of_a_lost_host_goes_to_another_one_and_stays_there() {
    let Some(world) = World::with(3, EtcdProgram::Go36) else { return };
    world.import("tiny", "v1");
    let settings = json!({ "identity": "named", "on_isolation": "stop" });
    world.create("desk", &world.spec("tiny:1", 1, settings));
    let first = wait_for_desk(&world, 0);
    // Its connection alone is cut: its VMM must have ended before another one begins.
    let begun = Instant::now();
    world.hosts[first.host].network.cut(true);
    let ended = ends(first.vmm, DEADLINE).expect("the host ends it");
    println!("the host that was cut off has ended it after {:.1} s", ended.as_secs_f64());
    let second = wait_for_desk(&world, first.vmm);
    println!("another host runs it after {:.1} s", begun.elapsed().as_secs_f64());
    assert!(begun.elapsed() > Duration::from_secs(45), "the placer waits for the whole time");
    assert_ne!(second.host, first.host);
    assert_eq!(second.identity, first.identity);
    world.hosts[first.host].network.cut(false);
    let back = world.hosts[first.host].name.clone();
    world.until("the host is a member again and has no such machine", |world| {
        let (status, _) = world.host(&back).try_send("GET", "/v1/machines/desk-001", "");
        world.host(&back).fleet()["membership"] == "member" && status == 404
    });
    assert!(is_alive(second.vmm));
}

/// People update the catalog, drain the host, and declare the next one dead: each time the name is somewhere else, or another version, and
/// the same machine.
#[test]
fn a_name_follows_updates_drains_and_what_is_said_of_dead_hosts() {
    let Some(mut world) = World::new(3) else { return };
    world.import("tiny", "v1");
    world.import("tiny", "v2");
    let settings = json!({ "identity": "named", "on_isolation": "stop" });
    world.create("desk", &world.spec("tiny:1", 1, settings));
    let first = wait_for_desk(&world, 0);
    let version = |world: &World, host: usize| {
        world.hosts[host].object("/v1/machines/desk-001")["status"]["run"]["version"].clone()
    };
    assert_eq!(version(&world, first.host), 1);
    world.hosts[0].ask(&["fleet", "catalog", "update", "desk", "--image", "tiny:2"]);
    world.until("the rollout is done", |world| {
        world.hosts[0].object("/v1/fleet/catalogs/desk")["rollout"]["state"] == "done"
    });
    let updated = wait_for_desk(&world, first.vmm);
    assert_eq!((updated.host, version(&world, first.host)), (first.host, json!(2)));

    let begun = Instant::now();
    let drained = world.hosts[first.host].name.clone();
    println!("{}", world.hosts[0].ask(&["fleet", "host", "drain", &drained]));
    let second = wait_for_desk(&world, updated.vmm);
    println!("the drained host's name runs elsewhere after {:.1} s", begun.elapsed().as_secs_f64());
    assert!(second.host != first.host && !is_alive(updated.vmm));
    assert_eq!((second.identity, version(&world, second.host)), (first.identity.clone(), json!(2)));
    world.hosts[0].ask(&["fleet", "host", "uncordon", &drained]);

    let dead = world.hosts[second.host].name.clone();
    // The placer waits 35 s from the end of the lease. Another one, which may be elected meanwhile, knows only since it looks that the host is
    // silent, and waits 50 s from then on.
    let most = 90;
    let begun = Instant::now();
    world.hosts[second.host].lose_power();
    let path = format!("/v1/fleet/hosts/{dead}");
    world.until("nobody renews the lease any more", |world| {
        let (status, answer) = world.first().try_send("POST", &path, r#"{"action": "declare-dead"}"#);
        assert!([200, 409].contains(&status), "{answer}");
        status == 200
    });
    let said = begun.elapsed();
    let third = wait_for_desk(&world, second.vmm);
    println!(
        "{dead} could be declared dead {:.1} s after it lost its power, and its name runs elsewhere {:.1} s later",
        said.as_secs_f64(),
        (begun.elapsed() - said).as_secs_f64()
    );
    assert!(begun.elapsed() < Duration::from_secs(most), "nobody waits for a host that is dead");
    assert_eq!(third.identity, first.identity);
    // It is back, and was not dead after all: it has no such machine any more.
    world.hosts[second.host].network.cut(false);
    world.hosts[second.host].start();
    world.until("the host is a member again, and no name is its own", |world| {
        let (status, _) = world.host(&dead).try_send("GET", "/v1/machines/desk-001", "");
        world.host(&dead).fleet()["membership"] == "member" && status == 404
    });
    assert!(is_alive(third.vmm));
}
