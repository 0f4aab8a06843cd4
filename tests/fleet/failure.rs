//! What happens when hosts, networks and etcd fail.

use crate::world::World;
use serde_json::json;
use std::time::{Duration, Instant};

/// F1: a host loses its power.
#[test]
fn machines_of_a_lost_host_are_made_elsewhere_and_given_up_when_it_returns() {
    let Some(mut world) = World::new(8) else { return };
    world.import("tiny", "v1");
    world.create("desk", &world.spec("tiny:1", 8, json!({})));
    let begun = Instant::now();
    world.until("all machines are ready", |world| world.ready_count("desk") == 8);
    println!("8 machines on 8 hosts are ready after {:.1} s", begun.elapsed().as_secs_f64());
    assert_eq!(world.shares("desk").len(), 8, "one for each host: {:?}", world.shares("desk"));
    // Not the one that places: then its election is part of the time.
    let placer = world.hosts[0].fleet()["placer"].as_str().unwrap().to_owned();
    for victim in [world.hosts.iter().position(|host| host.name != placer).unwrap()] {
        let name = world.hosts[victim].name.clone();
        let begun = Instant::now();
        world.hosts[victim].lose_power();
        world.until("its machine is ready elsewhere", |world| world.ready_count("desk") == 8);
        let took = begun.elapsed();
        println!(
            "{name} lost its power: its machine is ready elsewhere after {:.1} s (lost_after: 20 s)",
            took.as_secs_f64()
        );
        assert!(took > Duration::from_secs(15), "not before it counts as lost");
        assert!(!world.shares("desk").iter().any(|(host, _)| *host == name));
        // It comes back, and its records say that it has a machine.
        world.hosts[victim].network.cut(false);
        world.hosts[victim].start();
        world.until("it gives up its machine", |world| {
            world.host(&name).object("/v1/machines")["items"].as_array().unwrap().is_empty()
                && world.host(&name).fleet()["membership"] == "member"
        });
        assert_eq!(world.shares("desk").iter().map(|(_, count)| count).sum::<u64>(), 8);
    }
}
