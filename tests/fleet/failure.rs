//! What happens when hosts, networks and etcd fail.

use crate::world::{World, hosts};
use serde_json::json;
use spillway_testkit::etcd::EtcdProgram;
use std::cell::Cell;
use std::time::{Duration, Instant};

/// F1: a host loses its power, and then the one that places. With etcd 3.6; most other tests have 3.4.
#[test]
fn machines_of_a_lost_host_are_made_elsewhere_and_given_up_when_it_returns() {
    let Some(mut world) = World::with(8, EtcdProgram::Go36) else { return };
    world.import("tiny", "v1");
    world.create("desk", &world.spec("tiny:1", 8, json!({})));
    let begun = Instant::now();
    world.until("all machines are ready", |world| world.ready_count("desk") == 8);
    let boots = begun.elapsed();
    println!("8 machines on 8 hosts are ready after {:.1} s", boots.as_secs_f64());
    assert_eq!(world.shares("desk").len(), 8, "one for each host: {:?}", world.shares("desk"));
    let places = |world: &World| {
        let placer = world.first().fleet()["placer"].as_str().map(str::to_owned);
        world.hosts.iter().position(|host| Some(&host.name) == placer.as_ref()).unwrap()
    };
    let other = usize::from(places(&world) == 1) + 1;
    let name = lose(&mut world, other, boots);
    // It comes back, and its records say that it has a machine.
    world.hosts[other].network.cut(false);
    world.hosts[other].start();
    world.until("it gives up its machine", |world| {
        world.host(&name).object("/v1/machines")["items"].as_array().unwrap().is_empty()
            && world.host(&name).fleet()["membership"] == "member"
    });
    assert_eq!(world.shares("desk").iter().map(|(_, count)| count).sum::<u64>(), 8);
    // Another daemon is elected meanwhile, and has seen since when the host is silent. A placer that has just started replaces nothing for
    // 30 s, and the host that came back may be elected.
    std::thread::sleep(Duration::from_secs(30));
    let placer = places(&world);
    lose(&mut world, placer, boots);
}

/// A host loses its power: its share must move to another host, and the machine be ready there, in time. `boots` is how long eight machines
/// took to boot at once. Returns the name of the host.
fn lose(world: &mut World, victim: usize, boots: Duration) -> String {
    let name = world.hosts[victim].name.clone();
    let braked = Cell::new(false);
    let moved = Cell::new(None);
    let begun = Instant::now();
    world.hosts[victim].lose_power();
    world.until("its machine is ready elsewhere", |world| {
        braked.set(braked.get() || world.first().fleet()["brake"].is_string());
        let shares = world.shares("desk");
        if moved.get().is_none() && !shares.iter().any(|(host, _)| *host == name) {
            moved.set(Some(begun.elapsed()));
        }
        moved.get().is_some() && world.ready_count("desk") == 8
    });
    let (moved, took) = (moved.get().unwrap(), begun.elapsed());
    println!(
        "{name} lost its power: its share is elsewhere after {:.1} s (lost_after: 20 s), and its machine is ready after {:.1} s",
        moved.as_secs_f64(),
        took.as_secs_f64()
    );
    assert!(moved > Duration::from_secs(15), "not before it counts as lost");
    // Nothing is replaced while etcd is in trouble, as it may be on a busy host, and for 30 s after that.
    let quiet = if braked.get() { 30 } else { 0 };
    assert!(moved < Duration::from_secs(20 + 10 + quiet), "{moved:?}, braked for {quiet} s");
    // On a host that is as busy, eight boots take longer than one.
    assert!(took < Duration::from_secs(20 + 3 + quiet) + boots, "{took:?}, braked for {quiet} s");
    name
}

/// The share of the host has been carried out by then as far as it could be. Nothing but the release of the claim changes.
#[test]
fn a_claimed_machine_leaves_a_drained_host_after_its_release() {
    let Some(world) = World::new(2) else { return };
    world.import("tiny", "v1");
    world.create("desk", &world.spec("tiny:1", 2, json!({})));
    world.until("both machines are ready", |world| world.ready_count("desk") == 2);
    let of = |world: &World| world.host("h1").object("/v1/machines")["items"].as_array().unwrap().clone();
    let claim = world.host("h1").send("POST", "/v1/catalogs/desk/claims", "{}");
    world.hosts[0].ask(&["fleet", "host", "drain", "h1"]);
    let reason = |world: &World| {
        let shares = world.hosts[0].object("/v1/fleet/hosts/h1")["shares"].to_string();
        shares.contains("1 machine is to leave this host and cannot yet")
    };
    world.until("the host says what it waits for", reason);
    world.until("it is placed elsewhere", |world| world.ready("desk")[0].1 == 2);
    assert_eq!(of(&world).len(), 1, "it is claimed");
    let name = claim["name"].as_str().unwrap().to_owned();
    world.host("h1").send("DELETE", &format!("/v1/machines/{name}/claim"), "");
    world.until_within(Duration::from_secs(20), "it leaves", |world| of(world).is_empty());
}

/// F2: etcd stands still, its leader stops, it is away and comes back. Nothing is restarted, and nothing is made elsewhere.
#[test]
fn without_etcd_everything_on_the_hosts_goes_on() {
    let hosts = hosts();
    let Some(mut world) = World::new(hosts) else { return };
    // The long form takes ten minutes, as an administrator may.
    let away = std::env::var("SPILLWAY_ETCD_AWAY").map_or(40, |seconds| seconds.parse().unwrap());
    let away = Duration::from_secs(away);
    world.import("tiny", "v1");
    world.create("desk", &world.spec("tiny:1", hosts as u32, json!({})));
    world.until("all machines are ready", |world| world.ready_count("desk") == hosts);
    let before = runs(&world);
    let leader = world.etcd.leader().unwrap();
    world.etcd.freeze(leader).unwrap();
    std::thread::sleep(away.min(Duration::from_secs(60)));
    world.etcd.thaw(leader).unwrap();
    world.until("all are members again", |world| members(world) == hosts);
    assert_eq!(runs(&world), before, "after the leader stood still");
    for member in 0..3 {
        world.etcd.kill(member);
    }
    world.until("the hosts notice", |world| {
        world.hosts.iter().all(|host| host.fleet()["membership"] == "isolated")
    });
    // What is on a host goes on: a machine is claimed, reset and started anew there.
    let host = &world.hosts[0];
    let claimed = host.send("POST", "/v1/catalogs/desk/claims", "{}");
    let name = claimed["name"].as_str().unwrap().to_owned();
    let run = claimed["status"]["run"]["vmm_pid"].clone();
    host.send("DELETE", &format!("/v1/machines/{name}/claim"), "");
    world.until("a released machine is started anew", |world| {
        let machine = world.hosts[0].object(&format!("/v1/machines/{name}"));
        let is_new =
            machine["status"]["run"]["vmm_pid"].is_u64() && machine["status"]["run"]["vmm_pid"] != run;
        is_new && world.ready_count("desk") == hosts
    });
    let before = runs(&world);
    std::thread::sleep(away);
    assert_eq!(runs(&world), before, "while etcd is away");
    for member in 0..3 {
        world.etcd.restart(member).unwrap();
    }
    world.until("all are members again", |world| members(world) == hosts);
    // Longer than a host that is silent is waited for.
    std::thread::sleep(Duration::from_secs(25));
    assert_eq!(runs(&world), before, "after etcd is back");
    assert_eq!(world.shares("desk").iter().map(|(_, count)| count).sum::<u64>(), hosts as u64);
}

/// A rollout that has begun on a host goes on there, and machines with names of the fleet that their catalog keeps run on.
#[test]
fn without_etcd_a_rollout_on_a_host_goes_on_and_kept_names_run_on() {
    let Some(mut world) = World::new(1) else { return };
    world.import("tiny", "v1");
    world.import("tiny", "v2");
    world.create("desk", &world.spec("tiny:1", 4, json!({})));
    world.create("pc", &world.spec("tiny:1", 1, json!({ "identity": "named", "on_isolation": "keep" })));
    world.until("all machines are ready", |world| {
        (world.ready_count("desk"), world.ready_count("pc")) == (4, 1)
    });
    let name = |world: &World| runs(world).into_iter().find(|(_, name, _)| name.contains("pc-")).unwrap();
    let named = name(&world);
    world.hosts[0].ask(&["fleet", "catalog", "update", "desk", "--image", "tiny:2", "--rollout", "batch=1"]);
    world.until("its rollout has begun", |world| new_ones(world) > 0);
    for member in 0..3 {
        world.etcd.kill(member);
    }
    let away = Instant::now();
    assert!(new_ones(&world) < 4, "it was over before");
    world.until("the host notices", |world| world.hosts[0].fleet()["membership"] == "isolated");
    world.until("all machines have the version", |world| {
        (new_ones(world), world.ready_count("desk")) == (4, 4)
    });
    assert_eq!(world.hosts[0].fleet()["membership"], "isolated");
    // The guard would have ended one that is not kept, 32 s after the last renewal of the lease.
    std::thread::sleep(Duration::from_secs(40).saturating_sub(away.elapsed()));
    assert_eq!(name(&world), named);
}

/// Machines of the first host that run the second version.
fn new_ones(world: &World) -> usize {
    let machines = world.hosts[0].object("/v1/machines");
    let is_new = |machine: &&serde_json::Value| machine["status"]["run"]["version"] == 2;
    machines["items"].as_array().unwrap().iter().filter(is_new).count()
}

fn members(world: &World) -> usize {
    world.hosts.iter().filter(|host| host.fleet()["membership"] == "member").count()
}

/// Host, name and start of each machine.
fn runs(world: &World) -> Vec<(String, String, String)> {
    let of = |host: &crate::world::Host| {
        let machines = host.object("/v1/machines");
        let machines = machines["items"].as_array().unwrap().clone();
        let name = host.name.clone();
        machines.into_iter().map(move |machine| {
            let text = |value: &serde_json::Value| value.to_string();
            (name.clone(), text(&machine["name"]), text(&machine["status"]["run"]["vmm_pid"]))
        })
    };
    world.hosts.iter().flat_map(of).collect()
}
