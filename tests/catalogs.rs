//! `spillway catalog` as people and scripts use it: files, differences, versions, words and exit codes.
// The object of all settings is long.
#![recursion_limit = "256"]
#![allow(clippy::unwrap_used)]

mod daemon_world;

use daemon_world::World;
use serde_json::{Value, json};
use std::process::{Command, Stdio};

/// A daemon with two versions of `debian`, the first of them published.
fn world() -> World {
    let world = World::new();
    let file = world.path("a.raw").display().to_string();
    std::fs::write(&file, vec![7; 1 << 20]).unwrap();
    for _ in 0..2 {
        world.ok(&["image", "import", "debian", &file, "--format", "raw"]);
    }
    world
}

fn write(world: &World, name: &str, text: &str) -> String {
    std::fs::write(world.path(name), text).unwrap();
    world.path(name).display().to_string()
}

const CATALOGS: &str = r#"
[catalogs.desk]
image = "debian"
count = 3
ram_bytes = "512M"
labels = { team = "sales" }

[catalogs.lab]
image = "debian:2"
"#;

#[test]
fn a_file_is_applied_and_what_is_exported_changes_nothing() {
    let world = world();
    let file = write(&world, "catalogs.toml", CATALOGS);
    let (code, out, err) = world.spillway(&["catalog", "diff", "-f", &file]);
    assert_eq!((code, out.as_str(), err.as_str()), (1, "desk is new\nlab is new\n", ""));
    assert_eq!(world.ok(&["catalog", "apply", "-f", &file, "--dry-run"]), "desk is new\nlab is new\n");
    assert_eq!(world.json(&["catalog", "list"])["items"], json!([]));
    assert_eq!(world.ok(&["catalog", "apply", "-f", &file]), "desk is made\nlab is made\n");
    let same = "desk is unchanged\nlab is unchanged\n";
    assert_eq!(world.ok(&["catalog", "diff", "-f", &file]), same);
    let revision = || world.json(&["catalog", "show", "desk"])["revision"].clone();
    let before = revision();
    for format in ["toml", "json"] {
        let exported = write(&world, "exported", &world.ok(&["catalog", "export", "--format", format]));
        assert_eq!(world.ok(&["catalog", "diff", "-f", &exported]), same, "{format}");
        assert_eq!(world.ok(&["catalog", "apply", "-f", &exported]), same, "{format}");
    }
    assert_eq!(revision(), before, "nothing was written");
    assert!(!world.ok(&["catalog", "export", "lab"]).contains("desk"));

    let changed = CATALOGS.replace("count = 3", "count = 5").replace("512M", "1G").replace("sales", "hr");
    let changed = write(&world, "changed.toml", &changed);
    let rows = |out: &str| -> Vec<Vec<String>> {
        let words = |line: &str| {
            line.split("  ").map(str::trim).filter(|w| !w.is_empty()).map(str::to_owned).collect()
        };
        out.lines().map(words).collect()
    };
    let (code, out, _) = world.spillway(&["catalog", "diff", "-f", &changed]);
    assert_eq!(code, 1);
    let expected = [
        vec!["desk differs"],
        vec!["count", "3 -> 5", "at once"],
        vec!["labels.team", "sales -> hr", "at once"],
        vec!["ram_bytes", "512M -> 1G", "at once"],
        vec!["lab is unchanged"],
    ];
    assert_eq!(rows(&out), expected, "{out}");
    assert_eq!(world.ok(&["machine", "list", "--label", "team=sales"]).lines().count(), 1 + 3);
    let applied = world.json(&["catalog", "apply", "-f", &changed]);
    assert_eq!(applied["items"][0]["outcome"], "changed");
    assert_eq!(
        applied["items"][0]["differences"][0],
        json!({"setting": "count", "now": 3, "then": 5, "live": true})
    );
    assert_eq!(applied["items"][1]["outcome"], "unchanged");
    assert_eq!(world.ok(&["machine", "list", "--label", "team=hr"]).lines().count(), 1 + 5);
    assert_eq!(world.ok(&["catalog", "list", "--label", "team=sales"]).lines().count(), 1);
}

#[test]
fn a_file_comes_from_standard_input_too() {
    let world = world();
    let mut apply = Command::new(spillway_testkit::disk::program().unwrap());
    apply.args(["catalog", "apply", "-f", "-"]).env("SPILLWAY_SOCKET", world.path("sock"));
    let mut apply = apply.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    let text = r#"{"catalogs": {"desk": {"image": "debian", "count": 2}}}"#;
    std::io::Write::write_all(&mut apply.stdin.take().unwrap(), text.as_bytes()).unwrap();
    let done = apply.wait_with_output().unwrap();
    assert_eq!((done.status.code(), done.stdout.as_slice()), (Some(0), &b"desk is made\n"[..]));
}

#[test]
fn a_file_that_is_wrong_changes_nothing_and_one_catalog_does_not_stop_another() {
    let world = world();
    for (text, word) in [
        (
            "[catalogs.desk]\nimage = \"debian\"\nram = \"1G\"\n",
            "catalog desk: there is no setting 'ram': do you mean 'ram_bytes'?",
        ),
        ("[catalogs.a]\nimage = \"debian\"\n[catalogs.b]\ncount = 1\n", "catalog b: it has no image"),
        ("[catalogs.desk]\nimage = \"debian\"\ncount = \n", "line 3: "),
        ("", "names no catalogs"),
    ] {
        let file = write(&world, "wrong.toml", text);
        for command in ["apply", "diff", "create"] {
            let (code, out, err) = world.spillway(&["catalog", command, "-f", &file]);
            assert_eq!((code, out.as_str()), (2, ""), "{err}");
            assert!(err.contains(word) && err.contains("wrong.toml") && err.lines().count() == 1, "{err}");
        }
    }
    assert_eq!(world.spillway(&["catalog", "apply", "-f", "/nonexistent"]).0, 2);
    assert_eq!(world.json(&["catalog", "list"])["items"], json!([]));
    let mixed = CATALOGS.to_owned()
        + "[catalogs.bad]\nimage = \"debian\"\nmode = \"ephemeral\"\nram_bytes = \"1M\"\n";
    let mixed = write(&world, "mixed.toml", &mixed);
    for (command, made) in [("diff", 0), ("apply", 2)] {
        let (code, out, err) = world.spillway(&["catalog", command, "-f", &mixed, "--json"]);
        assert_eq!(code, 2, "{out}{err}");
        assert!(err.contains("excludes a write cache"), "{err}");
        let report: Value = serde_json::from_str(&out).unwrap();
        let outcomes: Vec<&Value> =
            report["items"].as_array().unwrap().iter().map(|item| &item["outcome"]).collect();
        assert_eq!(outcomes, ["failed", "created", "created"]);
        assert_eq!(report["items"][0]["error"]["code"], "invalid");
        assert_eq!(world.json(&["catalog", "list"])["items"].as_array().unwrap().len(), made);
    }
}

#[test]
fn a_catalog_is_made_with_every_option_or_from_a_file() {
    let world = world();
    for class in ["temp", "cache"] {
        world.ok(&["store", "add", class, &world.path(class).display().to_string(), "--class", class]);
    }
    let user_data = write(&world, "user-data", "#cloud-config\n");
    let keys = write(&world, "keys", "# mine\nssh-ed25519 AAAA me@here\n\nssh-rsa BBBB you\n");
    let options = [
        "--image",
        "debian:2",
        "--count",
        "4",
        "--mode",
        "ram+overflow",
        "--ram",
        "1G",
        "--ram-guarantee",
        "256M",
        "--overflow",
        "20G",
        "--overflow-store",
        "cache",
        "--full",
        "fail",
        "--warn-at",
        "70",
        "--critical-at",
        "85",
        "--iops",
        "500",
        "--iops-burst",
        "50",
        "--bandwidth",
        "100M",
        "--bandwidth-burst",
        "1M",
        "--verify-reads",
        "--base-cache",
        "none",
        "--data-disk",
        "5G",
        "--data-disk-store",
        "default",
        "--scratch-disk",
        "1G",
        "--scratch-format",
        "ntfs:Temporary Storage",
        "--vcpus",
        "2",
        "--memory",
        "2G",
        "--network",
        "bridge=br0",
        "--network",
        "user",
        "--sockets",
        "2",
        "--hugepages",
        "--cpu",
        "max,-avx",
        "--machine-type",
        "pc-q35-7.2",
        "--guest",
        "windows",
        "--firmware",
        "uefi-secure",
        "--tpm",
        "2.0",
        "--video",
        "virtio",
        "--watchdog",
        "reset",
        "--extra-arg=-device",
        "--extra-arg",
        "usb-audio",
        "--naming",
        "d-##",
        "--reset",
        "guest-reboot",
        "--ready",
        "tcp:22",
        "--grace",
        "30",
        "--warm",
        "1",
        "--claim-ttl",
        "none",
        "--autostart",
        "--start-order",
        "3",
        "--start-delay",
        "20",
        "--display",
        "vnc",
        "--residency",
        "boot",
        "--user-data",
        &user_data,
        "--authorized-keys",
        &keys,
        "--kernel",
        "/boot/k",
        "--initrd",
        "/boot/i",
        "--append",
        "quiet",
        "--label",
        "a=b",
    ];
    let created = world.json(&[&["catalog", "create", "desk"], &options[..]].concat());
    let spec = json!({
        "image": "debian:2", "residency": "boot", "count": 4, "type": "pooled", "mode": "ram+overflow", "ram_bytes": 1u64 << 30,
        "ram_guarantee_bytes": 256 << 20, "overflow_bytes": 20u64 << 30, "overflow_store": "cache", "full": "fail", "warn_at": 70, "critical_at": 85,
        "iops": 500, "iops_burst": 50, "bandwidth_bytes": 100 << 20, "bandwidth_burst_bytes": 1 << 20,
        "base_cache": "none", "verify_reads": true, "data_disk_bytes": 5u64 << 30, "data_disk_store": "default",
        "vmm": "host", "socket_group": null, "display": "vnc", "video": "virtio", "sockets": 2, "hugepages": true, "cpu_model": "max,-avx", "machine_type": "pc-q35-7.2",
        "guest": "windows", "firmware": "uefi-secure", "tpm": "2.0", "watchdog": "reset", "more_networks": ["user"],
        "extra_args": ["-device", "usb-audio"],
        "scratch_disk_bytes": 1 << 30, "scratch_format": "ntfs:Temporary Storage", "vcpus": 2, "memory_bytes": 2u64 << 30, "network": {"bridge": "br0"},
        "naming": "d-##", "reset": "guest-reboot", "ready": "tcp:22", "grace_seconds": 30, "warm": 1, "claim_ttl_seconds": 0,
        "autostart": true, "start_order": 3, "start_delay_seconds": 20, "user_data": "#cloud-config\n",
        "authorized_keys": ["ssh-ed25519 AAAA me@here", "ssh-rsa BBBB you"], "kernel": "/boot/k",
        "initrd": "/boot/i", "append": "quiet", "labels": {"a": "b"},
    });
    assert_eq!(created["spec"], spec);
    let shown = world.ok(&["catalog", "show", "desk"]);
    for words in [["overflow_bytes", "20G"], ["network.bridge", "br0"], ["user_data", r"#cloud-config\n"]] {
        let line = |line: &str| line.starts_with(words[0]) && line.ends_with(words[1]);
        assert!(shown.lines().any(line), "{words:?}: {shown}");
    }

    let file = write(&world, "catalogs.toml", CATALOGS);
    let (code, _, err) = world.spillway(&["catalog", "create", "-f", &file]);
    assert!(code == 2 && err.contains("which catalog? It has desk, lab"), "{err}");
    let (code, _, err) = world.spillway(&["catalog", "create", "x", "-f", &file]);
    assert!(code == 2 && err.contains("which catalog?"), "{err}");
    assert_eq!(world.ok(&["catalog", "create", "lab", "-f", &file, "--dry-run"]), "lab can be made\n");
    assert_eq!(world.json(&["catalog", "create", "lab", "-f", &file])["version"], 2);
    assert_eq!(world.spillway(&["catalog", "create", "lab", "-f", &file]).0, 75, "there is one already");
    for arguments in [
        vec!["catalog", "create", "y", "-f", &file, "--image", "debian"],
        vec!["catalog", "create", "y", "-f", &file, "--count", "1"],
        vec!["catalog", "create", "y"],
        vec!["catalog", "create", "--image", "debian"],
        vec!["catalog", "apply"],
        vec!["catalog", "update", "desk", "--image", "debian", "--rollout", "batch=0"],
        vec!["catalog", "create", "y", "--image", "debian", "--ready", "http:80"],
    ] {
        assert_eq!(world.spillway(&arguments).0, 2, "{arguments:?}");
    }
}

#[test]
fn versions_are_updated_and_rolled_back() {
    let world = world();
    world.ok(&["catalog", "create", "desk", "--image", "debian", "--count", "2"]);
    world.ok(&["image", "publish", "debian:2"]);
    // One that is to run and cannot be started keeps a rollout from its end.
    world.ok(&["machine", "start", "desk-001"]);
    let line = world.ok(&["catalog", "rollback", "desk", "--rollout", "batch=5", "--claim-grace", "9"]);
    assert_eq!(line, "desk: machines take debian:1 5 at a time, claimed ones after 9 s\n");
    // Once the overseer has seen the rollout its progress follows.
    let listed = world.ok(&["catalog", "list"]);
    let rollout = listed.lines().nth(1).unwrap().split("  ").last().unwrap();
    assert!(["batch=5", "batch=5, 0 of 1, running"].contains(&rollout.trim()), "{listed}");
    let (code, out, err) =
        world.spillway(&["catalog", "update", "desk", "--image", "debian", "--rollout", "now"]);
    assert_eq!(
        (code, out.as_str()),
        (0, "desk: machines take debian:2 now, claimed ones when they are released\n")
    );
    assert!(err.contains("warning: this replaces the rollout of debian:1 (batch=5)"), "{err}");
    let (code, _, err) = world.spillway(&["catalog", "rollback", "desk", "--to", "7"]);
    assert!(code == 66 && err.contains("debian:1, debian:2, debian:1"), "{code} {err}");
    let file = write(&world, "own.toml", "[catalogs.own]\nimage = \"debian\"\ntype = \"dedicated\"\n");
    world.ok(&["catalog", "apply", "-f", &file]);
    write(&world, "own.toml", "[catalogs.own]\nimage = \"debian\"\n");
    let (code, _, err) = world.spillway(&["catalog", "apply", "-f", &file]);
    assert!(code == 75 && err.contains("discard_data (--discard-data)"), "{err}");
    let out = world.ok(&["catalog", "apply", "-f", &file, "--discard-data"]);
    assert!(out.starts_with("own is changed\n"), "{out}");
}

/// Who reads, decides and writes does so again when somebody else was faster: nothing is lost.
#[test]
fn changes_at_once_are_decided_again() {
    let world = world();
    world.ok(&["catalog", "create", "desk", "--image", "debian"]);
    std::thread::scope(|scope| {
        scope.spawn(|| (1..=15).for_each(|n| _ = world.ok(&["catalog", "scale", "desk", &n.to_string()])));
        scope.spawn(|| {
            for n in 1..=15 {
                let image = format!("debian:{}", 1 + n % 2);
                world.ok(&["catalog", "update", "desk", "--image", &image]);
            }
        });
    });
    let desk = world.json(&["catalog", "show", "desk"]);
    assert_eq!((&desk["spec"]["count"], &desk["spec"]["image"]), (&json!(15), &json!("debian:2")));
    let versions: Vec<u64> =
        desk["history"].as_array().unwrap().iter().map(|entry| entry["version"].as_u64().unwrap()).collect();
    let expected: Vec<u64> = std::iter::once(1).chain((1..=15).map(|n| 1 + n % 2)).collect();
    assert_eq!(versions, expected, "each update is there once: a scale has not undone any");
}
