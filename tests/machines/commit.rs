//! Disks of machines that become versions of images, whatever happens meanwhile; and machines that are deleted, with what
//! they keep or without.

use crate::world::World;
use serde_json::{Value, json};
use spillway_testkit::process::wait_until;
use std::os::unix::fs::{FileExt, MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

const MIB: u64 = 1 << 20;
/// What is written where a commit is to take a while.
const MUCH_MIB: u64 = 256;

fn run(program: &str, arguments: &[&str]) {
    let done = Command::new(program).args(arguments).output().unwrap();
    assert!(done.status.success(), "{program} {arguments:?}: {done:?}");
}

/// The disk of a machine that runs.
fn nbd(world: &World, machine: &str) -> String {
    let socket = world.machine(machine)["status"]["run"]["nbd_socket"].as_str().unwrap().to_owned();
    format!("nbd+unix:///?socket={socket}")
}

fn write(world: &World, machine: &str, commands: &[&str]) {
    let nbd = nbd(world, machine);
    let commands = commands.iter().flat_map(|command| ["-c", command]);
    run("qemu-io", &["-f", "raw"].into_iter().chain(commands).chain([nbd.as_str()]).collect::<Vec<_>>());
}

fn versions(world: &World, image: &str) -> Vec<Value> {
    world.json(&["image", "show", image])["versions"].as_array().unwrap().clone()
}

fn published(world: &World, image: &str) -> Value {
    world.json(&["image", "show", image])["image"]["published"].clone()
}

/// What is in the folder of an image.
fn stored(world: &World, image: &str) -> Vec<String> {
    let entries = std::fs::read_dir(world.path("state/store/images").join(image)).unwrap();
    let mut names: Vec<String> = entries.map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

fn refuses(world: &World, arguments: &[&str], exit: i32, words: &[&str]) {
    let (code, out, err) = world.spillway(arguments);
    let explained = words.iter().all(|word| err.contains(word));
    assert!(code == exit && explained, "{arguments:?}: {code} {out}{err}");
}

#[test]
fn a_version_is_the_image_with_what_a_machine_has_written_over_it() {
    let Some(world) = World::new("none") else { return };
    // No two of its sectors are the same, and it ends in the middle of a block.
    let image: Vec<u8> =
        (0..32_769u64).flat_map(|sector| (sector * 0x9e37_79b9).to_le_bytes().repeat(64)).collect();
    std::fs::write(world.path("image.raw"), &image).unwrap();
    world.ok(&["image", "import", "golden", world.path("image.raw").to_str().unwrap(), "--format", "raw"]);
    world.ok(&["catalog", "create", "own", "--image", "golden", "--count", "1", "--type", "dedicated"]);
    world.ok(&["catalog", "create", "desk", "--image", "golden", "--count", "1"]);
    world.ok(&["machine", "start", "own-001", "--wait"]);
    let attach = world.json(&["machine", "attach", "own-001", "--for", "qemu"]);
    assert!(attach["instructions"].as_str().unwrap().contains("vhost-user-blk-pci"), "{attach}");
    write(
        &world,
        "own-001",
        &[
            "write -P 7 1M 3M",
            "write -P 8 6000k 512",
            "write -z 8M 64k",
            "discard 9M 1M",
            "write -P 9 16M 512",
        ],
    );
    refuses(&world, &["image", "commit", "own-001"], 75, &["is to run", "machine stop own-001"]);
    // As its guest sees it.
    let merged = world.path("merged.raw").to_str().unwrap().to_owned();
    run("qemu-img", &["convert", "-f", "raw", "-O", "raw", &nbd(&world, "own-001"), &merged]);
    let merged_bytes = std::fs::read(&merged).unwrap();
    assert!(merged_bytes.len() == image.len() && merged_bytes != image);
    world.ok(&["machine", "stop", "own-001", "--wait"]);

    let made = world.json(&["image", "commit", "own-001"]);
    let version = &made["versions"][1];
    assert_eq!((&version["version"], &version["state"]), (&2.into(), &"ready".into()), "{made:#}");
    let origin = serde_json::json!({ "kind": "commit", "machine": "own-001", "from": "golden:1" });
    assert_eq!((&version["origin"], &made["image"]["published"]), (&origin, &1.into()));
    let disk =
        |image: &str, version: u32| world.path(&format!("state/store/images/{image}/{version}/disk.raw"));
    assert!(std::fs::read(disk("golden", 2)).unwrap() == merged_bytes);
    assert!(std::fs::read(disk("golden", 1)).unwrap() == image, "the image stays as it was");
    let taken = std::fs::metadata(disk("golden", 2)).unwrap().blocks() * 512;
    assert!(taken < image.len() as u64, "zeroes take no space: {taken}");
    world.ok(&["image", "verify", "golden:2"]);

    // The machine goes on with its own disk, over what it was.
    world.ok(&["machine", "start", "own-001", "--wait"]);
    assert_eq!(world.machine("own-001")["status"]["run"]["version"], 1);
    run("qemu-img", &["compare", "-f", "raw", "-F", "raw", &merged, &nbd(&world, "own-001")]);
    world.ok(&["machine", "stop", "own-001", "--wait"]);
    // A first version is published by itself, another one if that is said; who follows the image has it then.
    world.ok(&["image", "commit", "own-001", "--name", "silver"]);
    assert_eq!(published(&world, "silver"), 1);
    assert_eq!(world.json(&["catalog", "show", "desk"])["version"], 1);
    world.ok(&["image", "commit", "own-001", "--publish"]);
    assert_eq!(
        (published(&world, "golden"), &world.json(&["catalog", "show", "desk"])["version"]),
        (3.into(), &3.into())
    );
    let digests: Vec<Value> = versions(&world, "golden").iter().map(|v| v["digest"].clone()).collect();
    assert!(digests[1] == digests[2] && digests[1] == versions(&world, "silver")[0]["digest"]);
    world.ok(&["machine", "start", "desk-001", "--wait"]);
    run("qemu-img", &["compare", "-f", "raw", "-F", "raw", &merged, &nbd(&world, "desk-001")]);
    // What is to be thrown away, and what has another image, is no version.
    world.ok(&["machine", "reset", "own-001", "--discard-data", "--wait"]);
    refuses(&world, &["image", "commit", "own-001"], 75, &["its next start discards its disk"]);
}

/// A dedicated machine on an image of half a GiB, with much written, that is off.
fn machine_with_much(world: &World) {
    let file = world.path("image.raw");
    let image = std::fs::File::create(&file).unwrap();
    image.set_len(512 * MIB).unwrap();
    image.write_all_at(b"version-1\n", 0).unwrap();
    world.ok(&["image", "import", "golden", file.to_str().unwrap(), "--format", "raw"]);
    world.ok(&["catalog", "create", "own", "--image", "golden", "--count", "1", "--type", "dedicated"]);
    world.ok(&["machine", "start", "own-001", "--wait"]);
    write(world, "own-001", &[&format!("write -P 7 64M {MUCH_MIB}M")]);
    world.ok(&["machine", "stop", "own-001", "--wait"]);
}

/// Begins to commit it. The operation's number.
fn begin(world: &World, name: &str) -> String {
    let begun = world.json(&["image", "commit", "own-001", "--name", name, "--no-wait"]);
    begun["id"].as_u64().unwrap().to_string()
}

#[test]
fn while_a_disk_becomes_a_version_nobody_starts_or_deletes_what_it_is_made_of() {
    let Some(world) = World::new("none") else { return };
    machine_with_much(&world);
    let meanwhile = |arguments: &[&str], words: &[&str]| {
        let id = begin(&world, "silver");
        refuses(&world, arguments, 75, words);
        world.ok(&["operation", "cancel", &id]);
        refuses(&world, &["operation", "wait", &id], 75, &["it was cancelled"]);
    };
    let committed = ["own-001 is being committed as silver:", "wait for that, or cancel it"];
    for action in ["start", "restart", "delete"] {
        meanwhile(&["machine", action, "own-001"], &committed);
    }
    meanwhile(&["image", "commit", "own-001"], &committed);
    refuses(&world, &["image", "show", "silver"], 66, &["no image 'silver'"]);
    assert_eq!(stored(&world, "silver"), [""; 0], "what was told to stop leaves nothing");
    // Of a start and a commit at once one is refused.
    for _ in 0..6 {
        let commit = ["image", "commit", "own-001", "--name", "silver", "--no-wait", "--json"];
        let (started, begun) = std::thread::scope(|scope| {
            let starting = scope.spawn(|| world.spillway(&["machine", "start", "own-001"]));
            let begun = world.spillway(&commit);
            (starting.join().unwrap(), begun)
        });
        assert!(matches!((started.0, begun.0), (0, 75) | (75, 0)), "{started:?} {begun:?}");
        if begun.0 == 0 {
            let begun: Value = serde_json::from_str(&begun.1).unwrap();
            let id = begun["id"].to_string();
            world.ok(&["operation", "cancel", &id]);
            world.spillway(&["operation", "wait", &id]);
        } else {
            world.ok(&["machine", "stop", "own-001", "--wait"]);
        }
    }
    world.ok(&["machine", "start", "own-001", "--wait"]);
    world.ok(&["machine", "stop", "own-001", "--wait"]);
    // Its catalog goes, with all that it kept, and its version is not any catalog's any more: but it is read.
    let id = begin(&world, "silver");
    world.ok(&["catalog", "delete", "own", "--with-data"]);
    let is_gone = || {
        let (.., why) = world.spillway(&["image", "delete", "golden:1"]);
        (!why.contains("'own-001' had of golden:1 is being removed")).then_some(())
    };
    wait_until(Duration::from_secs(30), is_gone).expect("its disk stays");
    for doomed in ["golden:1", "golden"] {
        refuses(
            &world,
            &["image", "delete", doomed],
            75,
            &["golden:1", "the commit of the machine 'own-001' reads it"],
        );
    }
    world.ok(&["operation", "wait", &id]);
    world.ok(&["image", "verify", "silver"]);
    world.ok(&["image", "delete", "golden:1"]);
    let disk = std::fs::File::open(
        world.path("state/store/images/silver").join(&stored(&world, "silver")[0]).join("disk.raw"),
    );
    let (mut first, mut last) = ([0; 512], [0; 512]);
    let disk = disk.unwrap();
    disk.read_exact_at(&mut first, 0).unwrap();
    disk.read_exact_at(&mut last, (64 + MUCH_MIB) * MIB - 512).unwrap();
    assert!(first.starts_with(b"version-1\n") && last == [7; 512]);
}

#[test]
fn a_daemon_that_is_killed_in_the_middle_of_a_commit_leaves_nothing() {
    let Some(mut world) = World::new("none") else { return };
    machine_with_much(&world);
    let partial = |number: u32| world.path(&format!("state/store/images/golden/{number}.partial"));
    let paths: Vec<PathBuf> = (2..5).map(partial).collect();
    // At once, in the middle of the copying, and of the reading for the digests.
    let is_there: [fn(&PathBuf) -> bool; 3] = [
        |partial| partial.exists(),
        |partial| partial.join("disk.raw").metadata().is_ok_and(|disk| disk.blocks() * 512 > 100 * MIB),
        |partial| partial.join("digests").exists(),
    ];
    for (partial, is_there) in paths.iter().zip(is_there) {
        begin(&world, "golden");
        wait_until(Duration::from_secs(30), || is_there(partial).then_some(())).expect("it is not made");
        world.kill_daemon();
        assert!(partial.exists(), "it was not in the middle");
        assert_eq!(world.processes(), [""; 0]);
        world.start_daemon();
        assert_eq!(stored(&world, "golden"), ["1"]);
        assert_eq!(versions(&world, "golden").len(), 1);
        world.ok(&["machine", "start", "own-001", "--wait"]);
        write(&world, "own-001", &["read -P 7 64M 1M"]);
        world.ok(&["machine", "stop", "own-001", "--wait"]);
    }
    world.ok(&["image", "commit", "own-001"]);
    assert_eq!(stored(&world, "golden"), ["1", "5"], "a number is given once");
}

#[test]
fn what_is_read_is_compared_with_its_digests_if_that_is_asked_for() {
    let Some(world) = World::new("none") else { return };
    let image: Vec<u8> = (0..4 * MIB + 512).map(|at| (at >> 12) as u8 | 1).collect();
    std::fs::write(world.path("image.raw"), &image).unwrap();
    world.ok(&["image", "import", "golden", world.path("image.raw").to_str().unwrap(), "--format", "raw"]);
    world.ok(&["catalog", "create", "sure", "--image", "golden", "--count", "1", "--verify-reads"]);
    world.ok(&["catalog", "create", "desk", "--image", "golden", "--count", "1"]);
    // Its store loses a bit.
    let disk = world.path("state/store/images/golden/1/disk.raw");
    std::fs::set_permissions(&disk, std::fs::Permissions::from_mode(0o644)).unwrap();
    let file = std::fs::File::options().write(true).open(&disk).unwrap();
    file.write_all_at(&[image[2 * MIB as usize] ^ 4], 2 * MIB).unwrap();
    world.ok(&["machine", "start", "--all", "--wait"]);
    write(&world, "desk-001", &["read 2M 4k"]);
    let read = |what: &str| {
        let nbd = nbd(&world, "sure-001");
        let done = Command::new("qemu-io").args(["-f", "raw", "-c", what, &nbd]).output().unwrap();
        String::from_utf8_lossy(&done.stdout).into_owned()
    };
    for (at, len) in [(0, 4096), (4 * MIB, 512), (MIB, MIB), (3 * MIB + 8192, 65536), (0, MIB)] {
        assert!(read(&format!("read {at} {len}")).contains(&format!("read {len}/{len} bytes")), "{at} {len}");
    }
    for (at, len) in [(2 * MIB, 4096), (3 * MIB - 512, 512), (2 * MIB - 4096, 8192)] {
        assert!(read(&format!("read {at} {len}")).contains("Input/output error"), "{at} {len}");
    }
    let event_raised = || (world.events("in the 1048576 bytes from 2097152 on") == 1).then_some(());
    wait_until(Duration::from_secs(20), event_raised).expect("it is not told of");
    // What was written over it is the guest's.
    write(&world, "sure-001", &["write -P 7 2M 4k", "read -P 7 2M 4k"]);
}

#[test]
fn machines_are_deleted_with_what_they_keep_or_without() {
    let Some(world) = World::new("none") else { return };
    world.import("golden", "version-1");
    world.ok(&["store", "add", "big", world.path("big").to_str().unwrap(), "--class", "local"]);
    let own = ["--type", "dedicated", "--data-disk", "1M", "--label", "team=a"];
    let stores = ["--data-disk-store", "big", "--overflow-store", "big"];
    world.ok(&[&["catalog", "create", "own", "--image", "golden", "--count", "4"][..], &own, &stores].concat());
    world.ok(&["machine", "start", "--catalog", "own", "--wait"]);
    world.ok(&["machine", "stop", "own-001", "own-002", "own-004", "--wait"]);
    let kept = || kept(&world);
    assert_eq!(kept().len(), 8);
    // One that is refused does not stop the others, and is what the exit code tells of.
    let (code, out, err) = world.spillway(&["machine", "delete", "own-003", "own-002", "own-009"]);
    assert_eq!(code, 75, "{err}");
    assert!(out.starts_with("own-003 stays: own-003 is to run: stop it first"), "{out}");
    assert!(out.contains("\nown-002 is deleted\nown-009 stays: there is no machine 'own-009'"), "{out}");
    assert!(err.contains("; and 1 more of 3 machines stay"), "{err}");
    assert_eq!(kept().len(), 8, "what they keep stays");
    let deleted = world.json(&["machine", "delete", "own-001", "--label", "team=a", "--with-data"]);
    assert_eq!(deleted, serde_json::json!({ "items": [{ "name": "own-001", "error": null }] }));
    let is_gone = || (!kept().contains(&"own-001".to_owned())).then_some(());
    wait_until(Duration::from_secs(20), is_gone).expect("what it kept is left");
    assert_eq!(kept(), ["own-002", "own-002", "own-003", "own-003", "own-004", "own-004"]);
    assert_eq!(world.json(&["catalog", "show", "own"])["spec"]["count"], 2);
    world.ok(&["machine", "stop", "own-003", "--wait"]);
    world.ok(&["machine", "delete", "--catalog", "own"]);
    assert_eq!(world.json(&["machine", "list"])["items"], Value::Array(Vec::new()));
    refuses(&world, &["machine", "delete", "own-010", "--catalog", "own"], 66, &["no machine 'own-010'"]);
    // Another one of that name is another machine.
    world.ok(&["catalog", "scale", "own", "1"]);
    world.ok(&["machine", "start", "own-001", "--wait"]);
    assert_eq!(kept().len(), 8);
    what_is_left(world);
}

/// Of the files that machines keep, whose they are.
fn kept(world: &World) -> Vec<String> {
    let of = |folder: &str| std::fs::read_dir(world.path("big").join(folder)).unwrap();
    let names = of("data").chain(of("disks")).map(|file| file.unwrap().file_name().into_string().unwrap());
    let mut names: Vec<String> = names.map(|name| name[..7].to_owned()).collect();
    names.sort();
    names
}

/// What deleted machines have left is listed, keeps the version that it needs, and goes when somebody says so.
fn what_is_left(mut world: World) {
    let left = |world: &World| world.json(&["leftover", "list"])["items"].as_array().unwrap().clone();
    let of =
        |left: &[Value]| left.iter().map(|l| l["machine"].as_str().unwrap().to_owned()).collect::<Vec<_>>();
    assert_eq!(of(&left(&world)), ["own-002", "own-003", "own-004"]);
    let (code, _, err) = world.spillway(&["catalog", "delete", "own"]);
    assert!(code == 0 && err.contains("note: what 4 deleted machines kept is still there"), "{code}: {err}");
    world.kill_daemon();
    world.start_daemon();
    let all = left(&world);
    assert_eq!(of(&all), ["own-001", "own-002", "own-003", "own-004"]);
    for entry in &all {
        assert!(entry["disk"]["image"] == "golden" && entry["disk"]["version"] == 1, "{entry}");
        assert!(Path::new(entry["disk"]["path"].as_str().unwrap()).exists(), "{entry}");
        assert!(Path::new(entry["data_disk"].as_str().unwrap()).exists(), "{entry}");
        assert!(entry["allocated_bytes"].as_u64().unwrap() > 0, "{entry}");
    }
    let table = world.ok(&["leftover", "list"]);
    assert_eq!(table.lines().count(), 1 + 8, "a line for each file: {table}");
    refuses(
        &world,
        &["image", "delete", "golden"],
        75,
        &["that the deleted machine 'own-001' has left is of golden:1"],
    );
    refuses(&world, &["leftover", "delete", "own-001"], 66, &["no leftover 'own-001'"]);
    // Their file system is not there for a while.
    std::fs::rename(world.path("big"), world.path("away")).unwrap();
    let uuids: Vec<&str> = all.iter().map(|entry| entry["uuid"].as_str().unwrap()).collect();
    let deleted = world.json(&[&["leftover", "delete"][..], &uuids].concat());
    assert_eq!(deleted["items"], uuids.iter().map(|uuid| json!({ "uuid": uuid })).collect::<Value>());
    assert_eq!(left(&world), [Value::Null; 0]);
    let event_raised = || (world.events("is its file system mounted?") >= 4).then_some(());
    wait_until(Duration::from_secs(20), event_raised).expect("nobody misses it");
    refuses(&world, &["image", "delete", "golden"], 75, &["had of golden:1 is being removed: try again"]);
    std::fs::rename(world.path("away"), world.path("big")).unwrap();
    wait_until(Duration::from_secs(60), || kept(&world).is_empty().then_some(()))
        .expect("their files are left");
    let is_unused = || (world.spillway(&["image", "delete", "golden"]).0 == 0).then_some(());
    wait_until(Duration::from_secs(20), is_unused).expect("nothing needs it any more");
}
