//! Versions that reach the hosts of a fleet in waves.

use crate::world::{World, hosts};
use serde_json::{Value, json};
use std::time::Instant;

/// Machines that the hosts have, by host: the versions that they run, and whether they are ready.
fn machines(world: &World) -> Vec<(String, u64, bool)> {
    let of = |host: &crate::world::Host| {
        let machines = host.object("/v1/machines");
        let of = |machine: &Value| {
            let status = &machine["status"];
            let is_ready = status["phase"] == "running" && status["ready"] == true;
            (host.name.clone(), status["run"]["version"].as_u64().unwrap_or(0), is_ready)
        };
        machines["items"].as_array().unwrap().iter().map(of).collect::<Vec<_>>()
    };
    world.hosts.iter().flat_map(of).collect()
}

fn rollout(world: &World) -> Value {
    world.first().object("/v1/fleet/catalogs/desk")["rollout"].clone()
}

/// Hosts whose shares have a version.
fn hosts_with(world: &World, version: u64) -> Vec<String> {
    let catalog = world.first().object("/v1/fleet/catalogs/desk");
    let shares = catalog["shares"].as_array().unwrap().iter();
    let with = shares.filter(|share| share["version"] == version && share["wanted"] != 0);
    with.map(|share| share["host"].as_str().unwrap().to_owned()).collect()
}

/// F6: a version whose guests end at once.
#[test]
fn a_bad_version_reaches_the_first_wave_and_goes_back_with_one_command() {
    let hosts = hosts();
    let Some(world) = World::new(hosts) else { return };
    world.import("tiny", "v1");
    let (count, least) = (2 * hosts, 2 * hosts - 2);
    let settings = json!({ "min_ready": least, "waves": ["1", "50%", "100%"] });
    world.create("desk", &world.spec("tiny:1", count as u32, settings));
    world.until("all machines are ready", |world| world.ready_count("desk") == count);
    // The hosts have a good version as well, and a bad one.
    world.import("tiny", "ends");
    world.import("tiny", "v3");
    let ask = |world: &World, arguments: &[&str]| {
        let all = [&["fleet", "catalog"], arguments].concat();
        println!("spillway {}\n{}", all.join(" "), world.first().ask(&all));
    };
    let begun = Instant::now();
    ask(&world, &["update", "desk", "--image", "tiny:2", "--rollout", "batch=1"]);
    world.until("the rollout halts", |world| {
        assert!(hosts_with(world, 2).len() <= 1, "a host of a later wave has the version");
        let ready = world.ready_count("desk");
        assert!(ready >= least, "{ready} machines are ready, and min_ready is {least}");
        rollout(world)["state"] == "halted"
    });
    println!("halted after {:.1} s: {}", begun.elapsed().as_secs_f64(), rollout(&world)["reason"]);
    let hit = hosts_with(&world, 2);
    let elsewhere = machines(&world).into_iter().filter(|(host, ..)| !hit.contains(host));
    let elsewhere: Vec<_> = elsewhere.collect();
    let on_hit = world.ready("desk").into_iter().find(|(host, _)| *host == hit[0]).unwrap().1;
    assert_eq!((hit.len(), elsewhere.len() + on_hit), (1, count - 1), "one machine was restarted");
    assert!(elsewhere.iter().all(|(_, version, is_ready)| *version == 1 && *is_ready), "{elsewhere:?}");
    let page = world.first().ask(&["fleet", "catalog", "show", "desk"]);
    assert!(page.contains(&format!("halted, wave 1 of 3, 1 of {hosts} hosts have it")), "{page}");
    // Another placer does not go on either.
    let placer = world.first().fleet()["placer"].as_str().unwrap().to_owned();
    let number = world.hosts.iter().position(|host| host.name == placer).unwrap();
    let other = world.hosts[(number + 1) % hosts].name.clone();
    world.hosts[number].network.cut(true);
    world.until("another host places", |world| {
        let now = &world.host(&other).fleet()["placer"];
        now.is_string() && *now != placer
    });
    world.hosts[number].network.cut(false);
    world.until("all are members again", |world| {
        world.hosts.iter().all(|host| host.fleet()["membership"] == "member")
    });
    assert_eq!((rollout(&world)["state"].as_str(), hosts_with(&world, 2)), (Some("halted"), hit.clone()));
    let begun = Instant::now();
    ask(&world, &["rollback", "desk"]);
    world.until("all machines are ready with the version before", |world| {
        let all = machines(world);
        all.len() == count && all.iter().all(|(_, version, is_ready)| *version == 1 && *is_ready)
    });
    println!("back after {:.1} s", begun.elapsed().as_secs_f64());
    world.until("the rollback is done", |world| rollout(world)["state"] == "done");
    let begun = Instant::now();
    ask(&world, &["update", "desk", "--image", "tiny:3"]);
    world.until("the good version is everywhere", |world| {
        let ready = world.ready_count("desk");
        assert!(ready >= least, "{ready} machines are ready, and min_ready is {least}");
        rollout(world)["state"] == "done"
    });
    println!("tiny:3 is on {hosts} hosts after {:.1} s", begun.elapsed().as_secs_f64());
    assert!(machines(&world).iter().all(|(_, version, is_ready)| *version == 3 && *is_ready));
}
