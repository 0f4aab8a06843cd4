//! `spillway` and `spillwayd` as people and scripts use them: words, JSON, exit codes.
#![allow(clippy::unwrap_used)]

mod daemon_world;

use daemon_world::World;
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use spillway_testkit::process::wait_until;
use std::io::{Read, Write};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::process::{Command, Stdio};
use std::time::Duration;

#[test]
fn images_and_catalogs_from_the_command_line() {
    let world = World::new();
    let file = world.path("a.qcow2").display().to_string();
    let made = Command::new("qemu-img").args(["create", "-q", "-f", "qcow2", &file, "64M"]).status();
    assert!(made.unwrap().success());
    let imported = world.ok(&["image", "import", "debian", &file, "--format", "qcow2"]);
    assert!(imported.contains("published") && imported.contains("64.0 MiB"), "{imported}");
    let second = world.json(&["image", "import", "debian", &file, "--format", "qcow2"]);
    assert_eq!(second["versions"][1]["version"], 2);
    world.ok(&["image", "publish", "debian:2"]);
    world.ok(&["image", "tag", "debian:1", "old"]);
    let images = world.json(&["image", "list"]);
    assert_eq!(images["items"][0]["published"], 2);
    assert_eq!(images["items"][0]["tags"]["old"], 1);
    assert!(world.ok(&["image", "verify", "debian"]).contains("debian:2 is as it was imported"));

    let checked = world.ok(&["image", "check", "debian"]);
    assert!(
        checked.contains("debian:2: no system was found") && checked.contains("the disk (unknown, 64.0 MiB)")
    );
    let check = world.json(&["image", "check", "debian:1"]);
    assert_eq!(
        (&check["version"], &check["volumes"][0]["content"]),
        (&Value::from(1), &Value::from("unknown"))
    );

    world.ok(&[
        "catalog", "create", "desk", "--image", "debian", "--count", "12", "--ram", "512M", "--label",
        "team=x",
    ]);
    let catalog = world.json(&["catalog", "show", "desk"]);
    assert_eq!(
        (&catalog["spec"]["ram_bytes"], &catalog["version"]),
        (&Value::from(512 << 20), &Value::from(2))
    );
    assert_eq!(world.json(&["machine", "list", "--catalog", "desk"])["items"].as_array().unwrap().len(), 12);
    // As much of a list as is wanted, and JSON as if it had come at once.
    let two = world.ok(&["machine", "list", "--limit", "2", "--json"]);
    let parsed: Value = serde_json::from_str(&two).unwrap();
    assert_eq!(
        (parsed["items"][1]["name"].as_str(), parsed["items"].as_array().unwrap().len()),
        (Some("desk-002"), 2)
    );
    let lines = |text: &str| -> Vec<String> {
        let mut lines: Vec<_> = text.lines().map(|line| line.trim_end_matches(',').to_owned()).collect();
        lines.sort();
        lines
    };
    assert_eq!(
        lines(&two),
        lines(&serde_json::to_string_pretty(&parsed).unwrap()),
        "but for the order of members"
    );
    assert_eq!(world.ok(&["leftover", "list", "--json"]), "{\n  \"items\": []\n}\n");
    assert_eq!(world.spillway(&["machine", "list", "--limit", "0"]).0, 2);
    // A dry run says what can be, and changes nothing.
    assert_eq!(world.ok(&["catalog", "scale", "desk", "3", "--dry-run"]), "desk can have 3 machines\n");
    let update = world.ok(&["catalog", "update", "desk", "--image", "debian:1", "--dry-run"]);
    assert!(update.contains("nothing is changed") && update.contains("debian:1"), "{update}");
    assert_eq!(world.json(&["catalog", "show", "desk"]), catalog);
    world.ok(&["catalog", "scale", "desk", "3"]);
    assert_eq!(world.ok(&["machine", "list"]).lines().count(), 4, "and a line of titles");
    let (code, _, err) = world.spillway(&["catalog", "create", "x", "--image", "debian", "--reset", "never"]);
    assert!(code == 0 && err.contains("warning") && err.contains("lost when the host restarts"), "{err}");

    for (arguments, code, word) in [
        (vec!["image", "delete", "debian:1"], 75, "tagged 'old'"),
        (vec!["image", "delete", "debian:2"], 75, "published"),
        (vec!["image", "delete", "debian"], 75, "'desk'"),
        (vec!["image", "delete", "debain"], 66, "do you mean 'debian'?"),
        (vec!["image", "publish", "debian"], 2, "which version?"),
        (vec!["image", "check", "debian:9"], 66, "no version 9"),
        (vec!["image", "import", "x", "/nonexistent", "--format", "raw"], 2, "/nonexistent"),
        (vec!["image", "import", "X", &file, "--format", "raw"], 2, "is no name"),
        (vec!["image", "import", "x", &file, "--format", "iso"], 2, "iso"),
        (vec!["catalog", "create", "desk", "--image", "debian"], 75, "already"),
        (vec!["catalog", "create", "y", "--image", "debian", "--mode", "persistent"], 2, "type dedicated"),
        (
            vec!["catalog", "create", "y", "--image", "debian", "--network", "bridge"],
            2,
            "user, none or bridge=NAME",
        ),
        (vec!["machine", "show", "desk-01"], 66, "desk-001"),
        (vec!["image", "list", "--socket", "/nonexistent"], 69, "is spillwayd running?"),
        (vec!["image"], 2, "import"),
    ] {
        let (found, out, err) = world.spillway(&arguments);
        assert!(found == code && out.is_empty() && err.contains(word), "{arguments:?}: {found} {out}{err}");
        assert_eq!(err.lines().count(), 1, "{arguments:?}: {err}");
    }
    let begun = world.json(&["image", "import", "debian", &file, "--format", "qcow2", "--no-wait"]);
    let id = begun["id"].to_string();
    assert!(world.ok(&["operation", "wait", &id]).contains("is done"));
    world.ok(&["operation", "cancel", &id]);
    assert!(
        world.ok(&["operation", "list"]).lines().any(|line| line.starts_with(&id) && line.ends_with("done"))
    );
    assert_eq!(world.spillway(&["operation", "cancel", "1"]).0, 66);
    world.ok(&["catalog", "delete", "desk"]);
    world.ok(&["catalog", "delete", "x"]);
    world.ok(&["image", "delete", "debian"]);
    assert_eq!(world.json(&["image", "list"])["items"], serde_json::json!([]));
}

/// Who asks for JSON gets JSON, also where success is all there is to say.
#[test]
fn every_answer_is_json_for_who_asks_for_it() {
    let world = World::new();
    let file = world.path("a.raw").display().to_string();
    std::fs::File::create(&file).unwrap().set_len(16 << 20).unwrap();
    let import = world.json(&["image", "import", "debian", &file, "--format", "raw", "--no-wait"]);
    let id = import["id"].to_string();
    let nothing = serde_json::json!({});
    assert_eq!(world.json(&["operation", "wait", &id])["state"]["phase"], "done");
    assert_eq!(world.json(&["operation", "cancel", &id]), nothing);
    assert_eq!(world.json(&["image", "verify", "debian"])["state"]["phase"], "done");
    let create = ["catalog", "create", "desk", "--image", "debian"];
    assert_eq!(world.json(&[&create[..], &["--dry-run"]].concat())["name"], "desk");
    world.ok(&create);
    let exported = world.json(&["catalog", "export"]);
    assert_eq!(exported["catalogs"]["desk"]["image"], "debian");
    assert_eq!(world.json(&["catalog", "delete", "desk"]), nothing);
    assert_eq!(world.json(&["image", "delete", "debian"]), nothing);
}

/// Warnings are shown and are no failure, unless they were asked to be.
#[test]
fn an_image_is_checked_for_what_breaks_clones() {
    let world = World::new();
    let tree = world.path("tree");
    for (path, content) in
        [("etc/machine-id", "8e5b3c1a0d3b4c5e9f603a1d8c2b7e4f\n"), ("usr/bin/cloud-init", "x")]
    {
        let path = tree.join(path);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, content).unwrap();
    }
    let file = world.path("a.raw").display().to_string();
    let mut mke2fs = Command::new("/usr/sbin/mke2fs");
    let made = mke2fs.args(["-q", "-t", "ext4", "-d"]).arg(&tree).args([&file, "16M"]).output();
    assert!(made.unwrap().status.success());
    world.ok(&["image", "import", "debian", &file, "--format", "raw"]);
    let report = world.ok(&["image", "check", "debian"]);
    for word in [
        "debian:1: 4 things break clones",
        "error: /etc/machine-id: the machine-id of systemd",
        "firmware finds: no partition table, no code for a BIOS",
        "why: ",
        "do:  truncate",
    ] {
        assert!(report.contains(word), "{word}: {report}");
    }
    let (code, out, err) = world.spillway(&["image", "check", "debian:1", "--strict", "--json"]);
    let check: Value = serde_json::from_str(&out).unwrap();
    let kinds: Vec<&str> = check["findings"]
        .as_array()
        .unwrap()
        .iter()
        .map(|finding| finding["kind"].as_str().unwrap())
        .collect();
    assert_eq!(kinds, ["machine_id", "no_boot_loader", "no_discard", "not_checked"]);
    assert_eq!((code, err.as_str()), (1, "spillway: error: debian:1: 4 things break clones\n"));
    // What the check has found is known when a catalog is created.
    let create = ["catalog", "create", "desk", "--image", "debian"];
    let (code, _, err) = world.spillway(&create);
    assert!(code == 0 && err.contains("no boot loader") && err.contains("--kernel"), "{err}");
    let (code, _, err) =
        world.spillway(&["catalog", "create", "own", "--image", "debian", "--kernel", "/vmlinuz"]);
    assert_eq!((code, err.as_str()), (0, ""));
}

/// A daemon with a catalog whose machines are on their way for ever: their disks are never served.
fn slow_pool() -> World {
    let world = World::with(|folder| {
        let sleeper = folder.join("sleeper");
        std::fs::write(&sleeper, "#!/bin/sh\nexec sleep 1000\n").unwrap();
        std::fs::set_permissions(&sleeper, PermissionsExt::from_mode(0o755)).unwrap();
        vec!["--worker".into(), sleeper.display().to_string()]
    });
    let file = world.path("a.raw").display().to_string();
    std::fs::File::create(&file).unwrap().set_len(1 << 20).unwrap();
    world.ok(&["image", "import", "debian", &file, "--format", "raw"]);
    world.ok(&["catalog", "create", "runner", "--image", "debian", "--count", "3", "--claim-ttl", "30m"]);
    world
}

fn claimed(world: &World) -> usize {
    let machines = world.json(&["machine", "list"]);
    machines["items"].as_array().unwrap().iter().filter(|machine| !machine["claim"].is_null()).count()
}

fn until(what: &str, is: impl Fn() -> bool) {
    wait_until(Duration::from_secs(20), || is().then_some(())).unwrap_or_else(|| panic!("never: {what}"));
}

#[test]
fn a_claim_that_is_interrupted_or_not_read_is_given_up() {
    let world = slow_pool();
    for signal in [Signal::INT, Signal::TERM, Signal::KILL] {
        let mut command = world.command(&["machine", "claim", "runner", "--wait"]);
        let claim = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        until("claimed", || claimed(&world) == 1);
        kill_process(Pid::from_child(&claim), signal).unwrap();
        let done = claim.wait_with_output().unwrap();
        let err = String::from_utf8(done.stderr).unwrap();
        if signal != Signal::KILL {
            assert!(done.status.code() == Some(130) && err.contains("interrupted"), "{signal:?}: {err}");
        }
        assert!(done.stdout.is_empty());
        until("given up", || claimed(&world) == 0);
    }
    // In vain, and not read by anybody.
    let (code, _, err) = world.spillway(&["machine", "claim", "runner", "--wait", "--timeout", "2"]);
    assert!(code == 75 && err.contains("still"), "{code} {err}");
    assert_eq!(
        err.matches("no machine of runner is ready: waiting for one, at most 2 s").count(),
        1,
        "{err}"
    );
    assert_eq!(claimed(&world), 0);
    world.ok(&["machine", "start", "runner-001"]);
    let (reader, writer) = std::io::pipe().unwrap();
    drop(reader);
    let mut command = world.command(&["machine", "claim", "runner", "--wait", "--timeout", "1"]);
    let done = command.stdout(writer).output().unwrap();
    assert!(!done.status.success() && claimed(&world) == 0);
}

#[test]
fn claims_have_owners_and_ends_which_are_shown() {
    let world = slow_pool();
    // Not waited for until it is ready, which it never is.
    let claim = |owner: &str| -> Value {
        let body =
            serde_json::json!({ "any": true, "owner": owner, "ttl_seconds": 3600, "labels": { "job": "7" } });
        let (body, mut answer) = (body.to_string(), String::new());
        let mut stream = UnixStream::connect(world.path("sock")).unwrap();
        let head = "POST /v1/catalogs/runner/claims HTTP/1.1\r\nhost: x\r\nconnection: close";
        let length = body.len();
        stream.write_all(format!("{head}\r\ncontent-length: {length}\r\n\r\n{body}").as_bytes()).unwrap();
        stream.read_to_string(&mut answer).unwrap();
        serde_json::from_str(answer.split_once("\r\n\r\n").unwrap().1).unwrap()
    };
    let (ci, me) = (claim("ci"), claim("me"));
    let name = ci["name"].as_str().unwrap();
    let rows = world.ok(&["machine", "list", "--owner", "ci"]);
    assert!(rows.contains(name) && rows.contains("claimed by ci") && rows.lines().count() == 2, "{rows}");
    assert!(!rows.contains(me["name"].as_str().unwrap()));
    let page = world.ok(&["machine", "show", name]);
    assert!(page.contains("by ci since") && page.contains("s still, job=7"), "{page}");
    let id = ci["claim"]["id"].as_str().unwrap();
    let renewed = world.ok(&["machine", "renew", name, "--ttl", "7d", "--claim", id]);
    assert!(renewed.starts_with(&format!("{name} is claimed for 60")), "{renewed}");
    assert_eq!(
        world.ok(&["machine", "renew", name, "--ttl", "none"]),
        format!("{name} is claimed until it is released\n")
    );
    let (code, _, err) = world.spillway(&["machine", "renew", name, "--claim", "another"]);
    assert!(code == 75 && err.contains("has another claim now"), "{code} {err}");
    let (code, _, err) = world.spillway(&["machine", "renew", name, "--ttl", "soon"]);
    assert!(code == 2 && err.contains("or none"), "{code} {err}");
    assert_eq!(world.json(&["catalog", "show", "runner"])["spec"]["claim_ttl_seconds"], 1800);
}
