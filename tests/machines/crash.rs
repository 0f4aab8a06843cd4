//! The daemon is killed at any instant while a script asks it for things: afterwards what is recorded and what runs
//! agree, what was answered is so, and machines that nobody asked anything of have noticed nothing.

use crate::world::{World, kill};
use serde_json::Value;
use spillway_testkit::load::Rng;
use spillway_testkit::process::wait_until;
use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, SystemTime};

/// Kills, unless `SPILLWAY_DAEMON_KILLS` says another number.
const KILLS: u32 = 20;
/// In every so-manieth round machines write something down, to forget it when they are told to.
const MARKED: u32 = 7;
/// How long everything may take to be as it is wanted after a restart.
const SETTLED: Duration = Duration::from_secs(300);

/// Machines that things are asked of: each keeps something else.
const ASKED: [&str; 4] = ["work-001", "work-002", "own-001", "copy-001"];

/// What is known of what was asked: by machine, what was answered last; none: the last answer did not come.
#[derive(Default)]
struct Answered {
    power: BTreeMap<String, Option<&'static str>>,
    claimed: BTreeMap<String, Option<bool>>,
    /// Those that were told to forget, and it was answered.
    forgets: BTreeSet<String>,
}

/// Asks for things until it is told to stop.
fn script(world: &World, random: &mut Rng, stop: &AtomicBool, answered: &mut Answered) {
    while !stop.load(Ordering::Relaxed) {
        let name = ASKED[random.below(ASKED.len() as u64) as usize].to_owned();
        let (arguments, power, claim): (Vec<&str>, Option<&'static str>, Option<bool>) =
            match random.below(9) {
                0 | 1 => (vec!["machine", "start", &name], Some("on"), None),
                2 => (vec!["machine", "stop", &name, "--force"], Some("off"), None),
                3 => (vec!["machine", "reset", &name], None, None),
                4 => (vec!["machine", "restart", &name, "--force"], Some("on"), None),
                5 => {
                    let version = format!("golden:{}", 1 + random.below(2));
                    // Claimed ones are not waited for: nobody here is certain to release them.
                    let update = [
                        "catalog",
                        "update",
                        "work",
                        "--image",
                        &version,
                        "--rollout",
                        "now",
                        "--claim-grace",
                        "0",
                    ];
                    let (code, _, err) = world.spillway(&update);
                    assert!([0, 69, 75].contains(&code), "{code} {err}");
                    continue;
                }
                6 => {
                    let (code, out, err) = world.spillway(&["machine", "claim", "work", "--json"]);
                    assert!([0, 69, 73].contains(&code), "{code} {err}");
                    match serde_json::from_str::<Value>(&out) {
                        Ok(machine) => {
                            let name = machine["name"].as_str().unwrap().to_owned();
                            answered.power.insert(name.clone(), Some("on"));
                            answered.claimed.insert(name, Some(true));
                        }
                        // Whose it may have become is not known.
                        Err(_) if code == 69 => {
                            answered.power.clear();
                            answered.claimed.retain(|_, claimed| *claimed == Some(true));
                        }
                        Err(_) => {}
                    }
                    continue;
                }
                7 => (vec!["machine", "release", &name], None, Some(false)),
                _ => {
                    let (code, _, err) = match random.below(2) {
                        0 => world.spillway(&["catalog", "delete", "passing"]),
                        _ => world
                            .spillway(&["catalog", "create", "passing", "--image", "golden", "--count", "3"]),
                    };
                    assert!([0, 66, 69, 75].contains(&code), "{code} {err}");
                    continue;
                }
            };
        let (code, _, err) = world.spillway(&arguments);
        // Done, not reachable, or not now: a claim that is not there.
        assert!([0, 69, 75].contains(&code), "{arguments:?}: {code} {err}");
        let succeeded = code == 0;
        if succeeded && ["stop", "reset", "restart", "release"].contains(&arguments[1]) {
            answered.forgets.insert(name.clone());
        }
        if let Some(power) = power
            && code != 75
        {
            answered.power.insert(name.clone(), succeeded.then_some(power));
        }
        if let Some(claim) = claim
            && code != 75
        {
            answered.claimed.insert(name.clone(), succeeded.then_some(claim));
        }
    }
}

/// The machines, once each is what is wanted of it.
fn settled(world: &World) -> Vec<Value> {
    let all = || world.list(None);
    let is_settled = |machine: &Value| {
        let phase = if machine["power"] == "on" { "running" } else { "stopped" };
        machine["status"]["settled"] == true && machine["status"]["phase"] == phase
    };
    let rolled_out = || world.object("/v1/catalogs/work")["rollout"].is_null();
    let found = wait_until(SETTLED, || Some(all()).filter(|all| all.iter().all(is_settled) && rolled_out()));
    found.unwrap_or_else(|| panic!("not what is wanted: {:#?}", all()))
}

/// The files that machines leave in stores, and those that they are to have there now.
fn files(world: &World, machines: &[Value]) -> [BTreeSet<PathBuf>; 2] {
    let store = |store: &str, folder: &str| world.path(store).join(folder);
    let (data, disks) = (store("state/store", "data"), store("state/store", "disks"));
    let (overflow, copies) = (store("state/store", "overflow"), store("cache", "copies"));
    let scratch = store("temp", "scratch");
    let entries = |folder: &PathBuf| std::fs::read_dir(folder).into_iter().flatten();
    let found = [&data, &disks, &overflow, &copies, &scratch]
        .into_iter()
        .flat_map(entries)
        .map(|entry| entry.unwrap().path())
        .collect();
    let mut recorded = BTreeSet::new();
    for machine in machines {
        let name = format!(
            "{}-{}",
            machine["name"].as_str().unwrap(),
            machine["identity"]["uuid"].as_str().unwrap()
        );
        match machine["catalog"].as_str().unwrap() {
            "own" => recorded.extend([data.join(format!("{name}.raw")), disks.join(format!("{name}.disk"))]),
            "work" if machine["power"] == "on" => _ = recorded.insert(scratch.join(format!("{name}.raw"))),
            _ => {}
        }
    }
    [found, recorded]
}

/// What runs is what is recorded, no more and no less.
fn agrees(world: &World, machines: &[Value]) {
    let on: BTreeSet<&str> =
        machines.iter().filter(|m| m["power"] == "on").map(|m| m["name"].as_str().unwrap()).collect();
    let is_so = || {
        let folders: BTreeSet<String> = std::fs::read_dir(world.machines())
            .unwrap()
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .collect();
        let processes = world.processes();
        let of = |word: &str| processes.iter().filter(|process| process.contains(word)).count();
        // Of each disk its supervisor and its worker.
        let right = folders.iter().map(String::as_str).eq(on.iter().copied())
            && of("qemu-system") == on.len()
            && of("spillway-worker serve") == on.len()
            && of("__worker") == on.len()
            && processes.len() == 3 * on.len();
        let [found, recorded] = files(world, machines);
        let right = right && found == recorded;
        right.then_some(())
    };
    // What was removed from the records just now may still be ending.
    wait_until(Duration::from_secs(20), is_so)
        .unwrap_or_else(|| panic!("{on:?} run: {:#?} {:#?}", world.processes(), files(world, machines)));
    for machine in machines.iter().filter(|m| m["power"] == "on") {
        let version = machine["status"]["run"]["version"].as_u64();
        let catalog = world.json(&["catalog", "show", machine["catalog"].as_str().unwrap()]);
        assert_eq!(version, catalog["version"].as_u64(), "{machine:#}");
    }
}

#[test]
fn a_daemon_that_is_killed_at_any_instant_goes_on() {
    let Some(mut world) = World::new("qemu") else { return };
    let number = |name: &str| std::env::var(name).ok().and_then(|text| text.parse::<u64>().ok());
    let kills = number("SPILLWAY_DAEMON_KILLS").map_or(KILLS, |kills| kills as u32);
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap().as_nanos() as u64;
    let seed = number("SPILLWAY_SEED").unwrap_or(now);
    println!("SPILLWAY_SEED={seed}");
    let mut random = Rng::new(seed);
    for version in ["version-1", "version-2"] {
        world.import("golden", version);
    }
    world.catalog("stay", 1, &["--image", "golden:1", "--grace", "0"]);
    for class in ["cache", "temp"] {
        world.ok(&["store", "add", class, world.path(class).to_str().unwrap(), "--class", class]);
    }
    let options = ["--image", "golden:1", "--grace", "0"];
    world.catalog("work", 2, &[&options[..], &["--scratch-disk", "1M"]].concat());
    world.catalog("own", 1, &[&options[..], &["--type", "dedicated", "--data-disk", "1M"]].concat());
    world.catalog("copy", 1, &[&options[..], &["--mode", "ephemeral"]].concat());
    world.ok(&["machine", "start", "stay-001", "own-001", "--wait"]);
    for name in ["stay-001", "own-001"] {
        world.tell(name, "markmine", "MARKED");
    }
    world.tell("own-001", "putvdb", "PUT");
    let stays = (world.pid("stay-001", "disk_pid"), world.pid("stay-001", "vmm_pid"));
    let mut answered = Answered::default();
    let mut on: Vec<String> = Vec::new();
    let (mut marked, mut forgotten) = (Vec::new(), 0);
    let mut round = 0;
    // On a slow host little is answered within a daemon's life: then more of them.
    while round < kills || (kills >= KILLS && forgotten == 0 && round < 4 * kills) {
        if round % MARKED == 0 {
            marked = std::mem::take(&mut on);
            for name in &marked {
                world.tell(name, &format!("markof-{round}"), "MARKED");
            }
            answered.forgets.clear();
        }
        let delay = Duration::from_millis(random.below(1500));
        let stop = AtomicBool::new(false);
        std::thread::scope(|scope| {
            let (stop, world, random, answered) = (&stop, &world, &mut random, &mut answered);
            let asking = scope.spawn(move || script(world, random, stop, answered));
            std::thread::sleep(delay);
            kill(world.daemon_pid());
            stop.store(true, Ordering::Relaxed);
            asking.join().unwrap();
        });
        world.kill_daemon();
        world.start_daemon();
        let machines = settled(&world);
        agrees(&world, &machines);
        for machine in &machines {
            let name = machine["name"].as_str().unwrap();
            if let Some(Some(power)) = answered.power.get(name) {
                assert_eq!(machine["power"], *power, "round {round}: {machine:#}");
            }
            if let Some(Some(claimed)) = answered.claimed.get(name) {
                assert_eq!(!machine["claim"].is_null(), *claimed, "round {round}: {machine:#}");
            }
        }
        assert_eq!((world.pid("stay-001", "disk_pid"), world.pid("stay-001", "vmm_pid")), stays);
        // Of those that keep nothing.
        let is_on = |m: &&Value| m["power"] == "on" && m["catalog"] == "work";
        on = machines.iter().filter(is_on).map(|m| m["name"].as_str().unwrap().to_owned()).collect();
        for name in marked.extract_if(.., |name| answered.forgets.contains(name) && on.contains(name)) {
            let state = world.tell(&name, "state", "STATE");
            assert!(!state.contains("mark=of-"), "round {round}: {name} was told to forget: {state}");
            forgotten += 1;
        }
        round += 1;
    }
    println!("{forgotten} machines had been told to forget, and had");
    assert!(forgotten > 0 || kills < KILLS, "none that was marked was told to forget");
    assert!(world.tell("stay-001", "state", "STATE").contains("mark=mine "));
    // What its guest had flushed is there after all its ends.
    world.ok(&["machine", "start", "own-001", "--wait"]);
    assert!(world.tell("own-001", "state", "STATE").contains("mark=mine "));
    assert_eq!(world.tell("own-001", "getvdb", "GOT"), "GOT kept");
    for catalog in ["stay", "work", "own", "copy"] {
        world.ok(&["catalog", "delete", catalog, "--with-data", "--force"]);
    }
    let _ = world.spillway(&["catalog", "delete", "passing"]);
    agrees(&world, &[]);
}
