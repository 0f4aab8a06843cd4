//! Machines that are off, while things are asked of them that do not start them.

use crate::world::World;
use serde_json::{Value, json};

/// How often something is asked of them.
const ASKED: usize = 200;
const NAMES: [&str; 2] = ["desk-001", "desk-002"];

fn status(world: &World, path: &str) -> Value {
    let machine: Value = serde_json::from_str(&world.get(&format!("/v1/machines/{path}"))).unwrap();
    machine["status"].clone()
}

#[test]
fn what_is_off_is_nothing_else_for_a_moment_and_settled_once_that_was_said() {
    let Some(mut world) = World::new("none") else { return };
    world.import("golden", "version-1");
    world.ok(&["catalog", "create", "desk", "--image", "golden", "--count", "2"]);
    // One that has run, and one of which nothing was ever wanted.
    world.ok(&["machine", "start", NAMES[0], "--wait"]);
    world.ok(&["machine", "stop", NAMES[0], "--wait"]);
    is_off_whatever_is_asked(&world);
    // What was recorded before a daemon began is so when it has begun.
    world.kill_daemon();
    world.start_daemon();
    for name in NAMES {
        let found = status(&world, name);
        assert!(found["phase"] == "stopped" && found["settled"] == true, "{name}: {found}");
    }
    is_off_whatever_is_asked(&world);
}

fn is_off_whatever_is_asked(world: &World) {
    let ask = || {
        for action in ["reset", "drain", "undrain", "stop"].into_iter().cycle().take(ASKED) {
            let asked = json!({ "action": action, "select": { "names": NAMES } });
            world.ask("POST", "/v1/machine-actions", &asked.to_string());
            for name in NAMES {
                let waited = status(world, &format!("{name}?wait_seconds=10"));
                let then = status(world, name);
                let are_settled = waited["settled"] == true && then["settled"] == true;
                assert!(are_settled, "{name} after {action}: {waited} {then}");
            }
        }
    };
    std::thread::scope(|scope| {
        let asking = scope.spawn(ask);
        while !asking.is_finished() {
            for name in NAMES {
                let found = status(world, name);
                assert_eq!(found["phase"], "stopped", "{name}: {found}");
            }
        }
    });
}
