//! What is told of machines that are off: while things are asked of them, and while another one of their name still ends.

use crate::world::{World, kill, signal};
use rustix::process::Signal;
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
                let waited = status(world, &format!("{name}?wait_seconds=30"));
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

/// What runs of the machines.
fn pids(world: &World) -> Vec<u32> {
    let pid = |process: &String| process.split(' ').next().unwrap().parse().unwrap();
    world.processes().iter().map(pid).collect()
}

/// One that is deleted takes half a minute to end, since its disk does not listen; another one has its name by now.
fn another_one_ends(world: &World) {
    world.ok(&["machine", "start", "own-001", "--wait"]);
    pids(world).into_iter().for_each(|pid| signal(pid, Signal::STOP));
    world.ok(&["catalog", "delete", "own"]);
    world.ok(&["catalog", "create", "own", "--image", "golden", "--count", "1", "--type", "dedicated"]);
}

#[test]
fn while_another_one_of_its_name_ends_it_is_not_what_is_wanted() {
    let Some(mut world) = World::new("none") else { return };
    world.import("golden", "version-1");
    world.ok(&["catalog", "create", "own", "--image", "golden", "--count", "1", "--type", "dedicated"]);
    let busy = |world: &World| world.json(&["host", "show"])["busy"].clone();
    another_one_ends(&world);
    let found = status(&world, "own-001");
    assert!(found["settled"] == false && busy(&world) == 1, "{found}");
    // The next daemon finds it, whether what is written of it can be read or not.
    for is_damaged in [false, true] {
        world.kill_daemon();
        if is_damaged {
            std::fs::write(world.machines().join("own-001/run.json"), "{").unwrap();
        }
        world.start_daemon();
        let found = status(&world, "own-001");
        assert!(found["settled"] == false && busy(&world) == 1, "{is_damaged}: {found}");
        let (code, _, err) = world.spillway(&["machine", "delete", "own-001"]);
        assert_eq!(code, 75, "{is_damaged}: {err}");
    }
    // It starts when the other one has ended, and that is waited for.
    std::thread::scope(|scope| {
        let starting = scope.spawn(|| world.ok(&["machine", "start", "own-001", "--wait"]));
        world.until("own-001", "wanted", |machine| machine["power"] == "on");
        assert!(!starting.is_finished(), "the other one has not ended");
        pids(&world).into_iter().for_each(kill);
    });
    let found = status(&world, "own-001");
    assert!(found["phase"] == "running" && found["ready"] == true, "{found}");
}
