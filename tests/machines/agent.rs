//! A guest agent shuts its guest down. The guests here do not hear the power button, and have a stand-in for the agent.

use crate::world::World;
use std::time::{Duration, Instant};

/// Much longer than a guest needs to shut down.
const GRACE: Duration = Duration::from_secs(300);

fn an_agent_is_asked_to_shut_down(hypervisor: &'static str) {
    let Some(world) = World::new(hypervisor) else { return };
    world.import("golden", "version-1");
    let grace = GRACE.as_secs().to_string();
    world.catalog("desk", 1, &["--image", "golden", "--ready", "serial:^WORKS", "--grace", &grace]);
    world.ok(&["machine", "start", "desk-001", "--wait"]);
    world.tell("desk-001", "agent", "AGENT");
    let begun = Instant::now();
    world.ok(&["machine", "stop", "desk-001", "--wait"]);
    assert!(begun.elapsed() < GRACE / 3, "it was not asked: {:?}", begun.elapsed());
    assert_eq!(world.machine("desk-001")["status"]["phase"], "stopped");
}

#[test]
fn the_agent_of_a_qemu_is_asked_to_shut_down() {
    an_agent_is_asked_to_shut_down("qemu");
}

#[test]
fn the_agent_of_a_domain_is_asked_to_shut_down() {
    an_agent_is_asked_to_shut_down("libvirt");
}
