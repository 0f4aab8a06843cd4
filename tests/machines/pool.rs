//! Machines that are kept warm, claimed, drained, and brought to another version while they run.

use crate::world::{BOOT, World, is_alive, reads, write};
use serde_json::Value;
use spillway_testkit::process::wait_until;
use std::time::{Duration, Instant};

/// How many machines of a catalog are so.
fn count(world: &World, catalog: &str, is: impl Fn(&Value) -> bool) -> usize {
    world.list(Some(catalog)).iter().filter(|machine| is(machine)).count()
}

fn is_ready(machine: &Value) -> bool {
    machine["status"]["ready"] == true && machine["claim"].is_null()
}

fn until(what: &str, is: impl FnMut() -> bool) {
    let mut is = is;
    wait_until(BOOT, || is().then_some(())).unwrap_or_else(|| panic!("never: {what}"));
}

#[test]
fn a_warm_pool_is_claimed_from_and_refilled() {
    let Some(mut world) = World::new("qemu") else { return };
    world.import("golden", "version-1");
    let ready =
        ["--image", "golden", "--warm", "2", "--ready", "serial:^GUEST-UP", "--reset", "guest-reboot"];
    world.catalog("runner", 3, &ready);
    until("two are ready", || count(&world, "runner", is_ready) == 2);
    assert_eq!(count(&world, "runner", |m| m["power"] == "on"), 2);

    let first = world.json(&["machine", "claim", "runner"]);
    let name = first["name"].as_str().unwrap().to_owned();
    assert_eq!(
        (&first["status"]["ready"], &first["claim"]["ttl_seconds"]),
        (&Value::Bool(true), &Value::from(86_400))
    );
    world.tell(&name, "markmine", "MARKED");
    // The third takes its place in the pool, and there is no fourth.
    until("two are ready again", || count(&world, "runner", is_ready) == 2);
    let second = world.json(&["machine", "claim", "runner", "--ttl", "15s"]);
    world.json(&["machine", "claim", "runner"]);
    let (code, _, err) = world.spillway(&["machine", "claim", "runner"]);
    assert!(code == 73 && err.contains("3 are claimed"), "{code} {err}");

    // A daemon that comes and goes changes no claim.
    world.kill_daemon();
    world.start_daemon();
    let claimed = |m: &Value| !m["claim"].is_null();
    assert!(count(&world, "runner", claimed) >= 2);
    let expired = second["name"].as_str().unwrap();
    world.until(expired, "free again", |m| m["claim"].is_null() && m["status"]["ready"] == true);

    let (_, before) = (world.tell(&name, "state", "STATE"), world.pid(&name, "vmm_pid"));
    assert!(world.ok(&["machine", "release", &name]).contains("is released"));
    world.until(&name, "ready and new", |m| {
        m["status"]["ready"] == true && m["claim"].is_null() && m["status"]["run"]["vmm_pid"] != before
    });
    assert!(world.tell(&name, "state", "STATE").contains("mark= "), "what was written is gone");
    let (code, _, err) = world.spillway(&["machine", "release", &name]);
    assert!(code == 75 && err.contains("nobody has claimed"), "{code} {err}");

    // Drained: those that are free go, the one that is claimed goes when it is released.
    let kept = world.json(&["machine", "claim", "runner"])["name"].as_str().unwrap().to_owned();
    world.ok(&["machine", "drain", "--all"]);
    until("only the claimed ones are on", || {
        count(&world, "runner", |m| m["power"] == "on") == count(&world, "runner", claimed)
    });
    let (code, _, err) = world.spillway(&["machine", "claim", "runner", "--wait"]);
    assert!(code == 73 && err.contains("no machine of 'runner'"), "{code} {err}");
    world.ok(&["machine", "release", &kept]);
    world.until(&kept, "off", |m| m["status"]["phase"] == "stopped");
    let (code, _, err) = world.spillway(&["machine", "start", &kept]);
    assert!(code == 75 && err.contains("drained"), "{code} {err}");
    world.ok(&["machine", "undrain", "--all"]);
    until("two are ready after all", || count(&world, "runner", is_ready) == 2);
}

/// Its guest does not hear that it is to shut down, and is still there when the machine is wanted again.
#[test]
fn what_is_released_is_never_met_again() {
    let Some(world) = World::new("qemu") else { return };
    world.import("golden", "version-1");
    let ready = ["--image", "golden", "--warm", "1", "--ready", "serial:^GUEST-UP", "--grace", "3600"];
    world.catalog("runner", 2, &ready);
    until("one is ready", || count(&world, "runner", is_ready) == 1);
    // A change of what is wanted has its grace so.
    world.ok(&["machine", "start", "runner-001", "--wait"]);
    let first = world.json(&["machine", "claim", "runner"])["name"].as_str().unwrap().to_owned();
    assert_eq!(first, "runner-001");
    world.tell(&first, "markmine", "MARKED");
    let before = world.pid(&first, "vmm_pid");
    until("the other has its place", || count(&world, "runner", is_ready) == 1);
    world.ok(&["machine", "release", &first]);
    let is_stopping = |m: &Value| m["status"]["phase"] == "stopping";
    let stopping = world.until(&first, "stopping", is_stopping);
    assert!(stopping["power"] == "off" && is_alive(before), "its guest is still there: {stopping:#}");
    // Now it is the other's turn to be missed.
    world.ok(&["machine", "claim", "runner"]);
    let begun = Instant::now();
    let is_new = |m: &Value| m["status"]["ready"] == true && m["status"]["run"]["vmm_pid"] != before;
    world.until(&first, "ready and new", is_new);
    assert!(begun.elapsed() < BOOT + Duration::from_secs(60), "nobody waits for its guest's time");
    assert!(world.tell(&first, "state", "STATE").contains("mark= "), "what was written is gone");
}

#[test]
fn machines_are_brought_to_another_version_and_back() {
    let Some(world) = World::new("qemu") else { return };
    let machines: u32 = std::env::var("SPILLWAY_ROLLOUT").ok().and_then(|n| n.parse().ok()).unwrap_or(4);
    world.import("golden", "version-1");
    world.catalog("desk", machines, &["--image", "golden:1", "--grace", "0"]);
    world.ok(&["machine", "start", "--catalog", "desk", "--wait", "--timeout", "600"]);
    let names: Vec<String> = world.json(&["machine", "list", "--catalog", "desk"])["items"]
        .as_array()
        .unwrap()
        .iter()
        .map(|m| m["name"].as_str().unwrap().to_owned())
        .collect();
    let all_run = |version: &str| {
        for name in &names {
            let begun = Instant::now();
            let word = format!("image={version} ");
            while !world.tell(name, "state", "STATE").contains(&word) {
                assert!(begun.elapsed() < BOOT, "{name} does not come to {version}");
                std::thread::sleep(Duration::from_millis(200));
            }
        }
    };
    all_run("version-1");
    world.import("golden", "version-2");
    // At the next start: nobody is disturbed.
    world.ok(&["catalog", "update", "desk", "--image", "golden:2", "--rollout", "next-start"]);
    world.until(&names[0], "outdated", |m| m["status"]["run"]["outdated"] == true);
    all_run("version-1");
    world.ok(&["machine", "restart", &names[0], "--force", "--wait"]);
    assert!(world.tell(&names[0], "state", "STATE").contains("image=version-2 "));

    // Now: all but the one that somebody has.
    let claimed = world.json(&["machine", "claim", "desk"])["name"].as_str().unwrap().to_owned();
    assert_eq!(claimed, names[0], "the one with the newest version comes first");
    let other = world.json(&["machine", "claim", "desk"])["name"].as_str().unwrap().to_owned();
    world.ok(&["catalog", "update", "desk", "--image", "golden:2", "--rollout", "now"]);
    until("all others have it", || {
        count(&world, "desk", |m| m["status"]["run"]["version"] == 2 && m["status"]["ready"] == true)
            == names.len() - 1
    });
    assert!(world.tell(&other, "state", "STATE").contains("image=version-1 "), "it is left alone");
    let catalog = |world: &World| world.object("/v1/catalogs/desk");
    assert_eq!(catalog(&world)["rollout"]["version"], 2);
    world.ok(&["machine", "release", &other]);
    all_run("version-2");
    until("the rollout has ended", || catalog(&world)["rollout"].is_null());

    // And back, one at a time.
    world.ok(&["catalog", "rollback", "desk", "--rollout", "batch=1", "--claim-grace", "0"]);
    let mut most_away = 0;
    until("it is rolled back", || {
        let away = count(&world, "desk", |m| m["status"]["ready"] == false);
        most_away = most_away.max(away);
        catalog(&world)["rollout"].is_null()
    });
    all_run("version-1");
    assert!(most_away <= 1, "{most_away} were away at once");
    let image = world.spillway(&["image", "delete", "golden:2"]);
    assert!(image.0 == 75 && image.2.contains("history"), "{image:?}");
}

/// An administrator may change what a catalog's machines keep. What they keep until their next start is nobody else's.
#[test]
fn a_machine_that_still_keeps_data_is_claimed_by_nobody() {
    let Some(world) = World::new("none") else { return };
    world.import("golden", "version-1");
    for (name, keeps) in [("alice", ["--type", "dedicated"]), ("stays", ["--reset", "never"])] {
        let create = ["catalog", "create", name, "--image", "golden", "--count", "1"];
        world.ok(&[&create[..], &keeps].concat());
        let machine = format!("{name}-001");
        world.ok(&["machine", "start", &machine, "--wait"]);
        write(&world, &machine, 7);
        let file = world.ok(&["catalog", "export", name]);
        let file = file.replace("\"dedicated\"", "\"pooled\"").replace("\"persistent\"", "\"ram+overflow\"");
        let file = file.replace("\"never\"", "\"power-cycle\"");
        std::fs::write(world.path("changed.toml"), file).unwrap();
        world.ok(&["catalog", "apply", "-f", world.path("changed.toml").to_str().unwrap(), "--discard-data"]);
        assert!(reads(&world, &machine, 7), "it runs on");
        for any in [&["--wait"][..], &[]] {
            let (code, _, err) = world.spillway(&[&["machine", "claim", name], any].concat());
            assert!(code == 73 && err.contains("1 keep their data"), "{name} {any:?}: {code} {err}");
        }
        world.ok(&["machine", "restart", &machine, "--wait"]);
        world.ok(&["machine", "claim", name]);
        assert!(reads(&world, &machine, 0), "{name}: what was kept is gone");
    }
}

#[test]
fn a_version_whose_guest_shuts_down_does_not_reach_all_machines() {
    let Some(world) = World::new("qemu") else { return };
    world.import("golden", "version-1");
    world.catalog("desk", 2, &["--image", "golden", "--ready", "serial:^WORKS"]);
    world.ok(&["machine", "start", "--catalog", "desk", "--wait", "--timeout", "400"]);
    world.import("golden", "ends at once");
    world.ok(&["catalog", "update", "desk", "--image", "golden:2", "--rollout", "batch=1"]);
    until("its guest has shut down twice", || world.events("has shut down before it was ready") >= 2);
    let of = |version: u64| count(&world, "desk", |m| m["status"]["run"]["version"] == version);
    assert_eq!((of(1), count(&world, "desk", is_ready)), (1, 1), "the other one works on");
    assert_eq!(world.events("has reached all machines"), 0);
    // The catalog goes back, and with it the machine.
    world.ok(&["catalog", "rollback", "desk", "--rollout", "now"]);
    until("both work again", || of(1) == 2 && count(&world, "desk", is_ready) == 2);
}

#[test]
fn a_claim_that_waits_gives_nobody_a_machine_that_was_stopped() {
    let Some(world) = World::new("qemu") else { return };
    world.import("golden", "version-1");
    world.catalog("desk", 1, &["--image", "golden", "--ready", "serial:^NEVER"]);
    let claim = |timeout: &str| world.spillway(&["machine", "claim", "desk", "--wait", "--timeout", timeout]);
    std::thread::scope(|scope| {
        let waits = scope.spawn(|| claim("300"));
        world.until("desk-001", "claimed and running", |m| {
            !m["claim"].is_null() && m["status"]["phase"] == "running"
        });
        world.ok(&["machine", "stop", "desk-001", "--force", "--wait"]);
        let (code, out, err) = waits.join().unwrap();
        assert!(code == 75 && out.is_empty() && err.contains("it was stopped"), "{code} {out} {err}");
    });
    world.until("desk-001", "free", |m| m["claim"].is_null());
    let (code, out, err) = claim("1");
    assert!(code == 75 && out.is_empty() && err.contains("--timeout"), "{code} {out} {err}");
    world.until("desk-001", "free", |m| m["claim"].is_null());
}
