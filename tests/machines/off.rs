//! What is told of machines that are off: while things are asked of them, and while another one of their name still ends.

use crate::world::{self, World};
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
                let waited = status(world, &format!("{name}?wait=30"));
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

/// The processes of the only machine's disk.
fn signal_disk(world: &World, signal: Signal) {
    let of = |process: String| process.split(' ').next().unwrap().parse().unwrap();
    // The worker is killed with its supervisor.
    let stays = |process: &String| signal == Signal::STOP || process.contains(" serve ");
    world.processes().into_iter().filter(stays).map(of).for_each(|pid| world::signal(pid, signal));
}

#[test]
fn while_another_one_of_its_name_ends_it_is_not_what_is_wanted() {
    let Some(mut world) = World::new("none") else { return };
    world.import("golden", "version-1");
    let create = ["catalog", "create", "own", "--image", "golden", "--count", "1", "--type", "dedicated"];
    world.ok(&create);
    world.ok(&["machine", "start", "own-001", "--wait"]);
    // It takes half a minute to end from here on, and after each start of a daemon, since its disk does not listen.
    signal_disk(&world, Signal::STOP);
    world.ok(&["catalog", "delete", "own"]);
    world.ok(&create);
    let ends = |world: &World, what: &str| {
        let found = status(world, "own-001");
        let busy = world.json(&["host", "show"])["busy"].clone();
        assert!(found["settled"] == false && busy == 1, "{what}: {busy} {found}");
    };
    world.until("own-001", "stopping", |machine| machine["status"]["phase"] == "stopping");
    ends(&world, "the daemon that has deleted it");
    // The next daemon finds it, whether what is written of it can be read or not.
    let run = world.machines().join("own-001/run.json");
    let written = std::fs::read(&run).unwrap();
    for (what, content) in [("damaged", &b"{"[..]), ("whole", &written)] {
        world.kill_daemon();
        std::fs::write(&run, content).unwrap();
        world.start_daemon();
        ends(&world, what);
        let (code, _, err) = world.spillway(&["machine", "delete", "own-001"]);
        assert_eq!(code, 75, "{what}: {err}");
    }
    // What is wanted of the new one is known before the end of the other one begins: that end does not settle it.
    world.ok(&["machine", "start", "own-001"]);
    world.kill_daemon();
    world.start_daemon();
    world.until("own-001", "stopping", |machine| machine["status"]["phase"] == "stopping");
    let found = std::thread::scope(|scope| {
        let waiting = scope.spawn(|| status(&world, "own-001?wait=30"));
        signal_disk(&world, Signal::KILL);
        waiting.join().unwrap()
    });
    assert!(found["phase"] == "running" && found["ready"] == true, "{found}");
}
