//! What a fleet cannot work with: each has a state of its own, says what is wrong, and goes when its cause goes.

use crate::alone::{Host, PATIENCE, PREFIX, etcd, is_member, is_refused, until};
use serde_json::{Value, json};
use spillway_testkit::daemon::Daemon;
use spillway_testkit::etcd::{EtcdCluster, EtcdProgram, EtcdRecord};
use spillway_testkit::process::wait_until;
use std::collections::BTreeMap;
use std::process::Command;
use std::time::Duration;

/// Longer than the lease of a host.
const LEASE: Duration = Duration::from_secs(18);

/// What people and the placer want of hosts.
fn wanted(etcd: &EtcdCluster) -> BTreeMap<String, EtcdRecord> {
    let mut records = etcd.records(PREFIX).unwrap().1;
    records.retain(|key, _| !["alive/", "status/", "leader/"].iter().any(|of| key.starts_with(of)));
    records
}

/// Machines of the catalog `lab` that host `a` is to have.
fn share(etcd: &EtcdCluster) -> Option<u64> {
    let share = etcd.records(PREFIX).unwrap().1.get("share/a/lab")?.value.clone();
    serde_json::from_str::<Value>(&share).unwrap()["count"].as_u64()
}

fn has_trouble(fleet: &Value, said: &str) -> bool {
    fleet["etcd"]["trouble"].as_str().unwrap_or_default().contains(said)
}

/// Why a command is refused, which must be this reason.
fn refused(daemon: &Daemon, command: &[&str], reason: &str) -> String {
    let why = daemon.ask(command).expect_err(&format!("{command:?} is done"));
    let why = format!("{why:#}");
    assert!(why.contains(reason), "{command:?} is refused, but not because of '{reason}': {why}");
    why
}

fn until_done(daemon: &Daemon, command: &[&str]) {
    let done = wait_until(PATIENCE, || daemon.ask(command).ok());
    assert!(done.is_some(), "{command:?}: {:?}", daemon.ask(command));
}

#[test]
fn records_of_others_are_not_acted_on() {
    let Some(etcd) = etcd(EtcdProgram::Debian34, &[]) else { return };
    let dir = tempfile::tempdir_in("/var/tmp").unwrap();
    let host = Host::new(&dir.path().join("first"), "a", &etcd).start();
    until_done(&host, &["fleet", "init"]);
    until(&host, "it is a member", is_member);

    // A second host has the same name.
    let other = Host::new(&dir.path().join("second"), "a", &etcd).start();
    until(&other, "its name is taken", |fleet| {
        is_refused(fleet, "another host with the name a") && is_refused(fleet, "--host-name")
    });
    assert!(is_member(&host.get("/v1/fleet").unwrap()));

    // Records of a later version, and those of another fleet.
    let image = dir.path().join("image.raw");
    std::fs::write(&image, vec![7; 4 << 20]).unwrap();
    host.ask(&["image", "import", "tiny", image.to_str().unwrap(), "--format", "raw"]).unwrap();
    host.ask(&["fleet", "catalog", "create", "lab", "--image", "tiny:1", "--count", "1"]).unwrap();
    let is_placed = |count: u64| {
        let placed = || share(&etcd) == Some(count);
        assert!(
            wait_until(PATIENCE, || placed().then_some(())).is_some(),
            "{:?}\n{}",
            share(&etcd),
            host.tail()
        );
    };
    is_placed(1);
    let changes = [
        &["fleet", "init"][..],
        &["fleet", "placer", "off"],
        &["fleet", "host", "cordon", "a"],
        &["fleet", "catalog", "create", "desk", "--image", "debian:1"],
        &["fleet", "catalog", "delete", "lab"],
        &["fleet", "catalog", "scale", "lab", "3", "--dry-run"],
    ];
    let meta = etcd.records(PREFIX).unwrap().1["meta"].value.clone();
    let changed = |key: &str, value: Value| {
        let mut meta: Value = serde_json::from_str(&meta).unwrap();
        meta[key] = value;
        etcd.put(&format!("{PREFIX}meta"), &meta.to_string()).unwrap();
    };
    for (count, key, value, said) in [
        (2, "format", json!(99), "have format 99"),
        (3, "fleet_id", json!("stranger"), "etcd has another one of the same name (stranger)"),
        (4, "format", json!("none"), "cannot be read"),
    ] {
        changed(key, value);
        until(&host, said, |fleet| is_refused(fleet, said));
        // What was being written has an end.
        std::thread::sleep(Duration::from_secs(1));
        // Nobody changes them through this host.
        let before = wanted(&etcd);
        for change in changes {
            refused(&host, change, said);
        }
        assert_eq!(wanted(&etcd), before);
        // Nor does it place what they want, which it would do in their own fleet.
        let mut lab: Value = serde_json::from_str(&before["catalogs/lab"].value).unwrap();
        (lab["spec"]["count"], lab["generation"]) = (count.into(), count.into());
        etcd.put(&format!("{PREFIX}catalogs/lab"), &lab.to_string()).unwrap();
        std::thread::sleep(Duration::from_secs(3));
        assert_eq!(share(&etcd), Some(count - 1));
        etcd.put(&format!("{PREFIX}meta"), &meta).unwrap();
        until(&host, "it takes part again", is_member);
        is_placed(count);
    }
    etcd.delete(&format!("{PREFIX}meta")).unwrap();
    until(&host, "the records are gone", |fleet| is_refused(fleet, "gone from etcd"));
    until(&other, "there is no fleet any more", |fleet| fleet["membership"] == "no-fleet");
    std::thread::sleep(Duration::from_secs(1));
    let before = wanted(&etcd);
    for change in changes {
        refused(&host, change, "gone from etcd");
        // A host that has never joined knows of no fleet, and makes none beside what is left of one.
        let why = if change == ["fleet", "init"] {
            "record of the fleet itself is gone"
        } else {
            "there is no fleet"
        };
        refused(&other, change, why);
    }
    assert_eq!(wanted(&etcd), before);
    etcd.put(&format!("{PREFIX}meta"), &meta).unwrap();
    until(&host, "it takes part again", is_member);

    // The other one takes a name of its own.
    drop(other);
    let other = Host::new(&dir.path().join("second"), "b", &etcd).start();
    until(&other, "it is a member, too", is_member);

    // No host has space for these machines: it is said of each what it has.
    let create = [
        "fleet",
        "catalog",
        "create",
        "huge",
        "--image",
        "debian:1",
        "--count",
        "2",
        "--ram",
        "1T",
        "--ram-guarantee",
        "1T",
    ];
    host.ask(&create).unwrap();
    let shown = || {
        let shown = host.ask(&["fleet", "catalog", "show", "huge"]).unwrap();
        let (catalog, hosts) = shown.split_once("NO SPACE ON")?;
        let lines: Vec<Vec<&str>> = hosts.lines().map(|line| line.split_whitespace().collect()).collect();
        let says =
            |host: &str| lines.iter().any(|line| line.first() == Some(&host) && line.contains(&"needs"));
        (catalog.contains("2 find no host") && says("a") && says("b")).then_some(())
    };
    let found = wait_until(PATIENCE, shown);
    assert!(found.is_some(), "{}", host.ask(&["fleet", "catalog", "show", "huge"]).unwrap());
}

/// The copy runs on the same kernel, as one in a container does.
#[test]
fn a_host_whose_records_were_copied_keeps_its_name() {
    let Some(etcd) = etcd(EtcdProgram::Debian34, &[]) else { return };
    let dir = tempfile::tempdir_in("/var/tmp").unwrap();
    let [first, copy] = ["first", "copy"].map(|folder| dir.path().join(folder));
    let host = Host::new(&first, "a", &etcd);
    let daemon = host.start();
    until_done(&daemon, &["fleet", "init"]);
    until(&daemon, "it is a member", is_member);
    drop(daemon);
    let copied = Command::new("cp").arg("-a").args([&first, &copy]).status().unwrap();
    assert!(copied.success());
    let daemon = host.start();
    until(&daemon, "it is a member again", is_member);
    let epoch = daemon.get("/v1/fleet").unwrap()["epoch"].clone();
    let other = Host::new(&copy, "a", &etcd).start();
    until(&other, "the copy is refused", |fleet| {
        is_refused(fleet, "another host runs with the identity of this one")
    });
    let fleet = daemon.get("/v1/fleet").unwrap();
    assert!(is_member(&fleet) && fleet["epoch"] == epoch, "{fleet:#}");
}

#[test]
fn an_etcd_3_4_that_is_full_or_wants_a_user_is_said() {
    is_said(EtcdProgram::Debian34);
}

#[test]
fn an_etcd_3_6_that_is_full_or_wants_a_user_is_said() {
    is_said(EtcdProgram::Go36);
}

fn is_said(program: EtcdProgram) {
    let Some(etcd) = etcd(program, &["--quota-backend-bytes=2097152".into()]) else { return };
    let dir = tempfile::tempdir_in("/var/tmp").unwrap();
    let host = Host::new(dir.path(), "a", &etcd).start();
    until_done(&host, &["fleet", "init"]);
    until(&host, "it is a member", is_member);

    let full = wait_until(PATIENCE, || {
        let error = format!("{:#}", etcd.put("/others", &"x".repeat(100_000)).err()?);
        error.contains("database space exceeded").then_some(())
    });
    assert!(full.is_some(), "its database fills");
    until(&host, "etcd is full", |fleet| has_trouble(fleet, "reached its quota"));
    // Longer than a lease that nobody renews.
    let epoch = host.get("/v1/fleet").unwrap()["epoch"].clone();
    std::thread::sleep(LEASE);
    let fleet = host.get("/v1/fleet").unwrap();
    assert!(is_member(&fleet) && fleet["epoch"] == epoch, "leases are renewed all the same: {fleet:#}");
    let why = refused(&host, &["fleet", "placer", "off"], "reached its quota");
    assert!(why.contains("etcdctl alarm disarm"), "{why}");
    etcd.compact().unwrap();
    etcd.defragment(0).unwrap();
    etcd.ctl(&["alarm", "disarm"]).unwrap();
    until_done(&host, &["fleet", "placer", "off"]);
    until(&host, "etcd is well again", |fleet| fleet["etcd"]["trouble"].is_null());

    let root = ["user add root:secret", "user grant-role root root", "auth enable"];
    for command in root {
        etcd.ctl(&command.split(' ').collect::<Vec<_>>()).unwrap();
    }
    // etcd 3.4 compares users for lists and changes alone, 3.6 for leases, too.
    let refused_or_isolated = wait_until(PATIENCE, || host.ask(&["fleet", "placer", "on"]).err());
    let why = format!("{:#}", refused_or_isolated.unwrap());
    assert!(why.contains("--fleet-user"), "{why}");
    until(&host, "it is said that etcd wants a user", |fleet| has_trouble(fleet, "--fleet-user"));
    std::thread::sleep(LEASE);
    let fleet = host.get("/v1/fleet").unwrap();
    assert!(has_trouble(&fleet, "--fleet-user"), "{fleet:#}");
    match program {
        EtcdProgram::Debian34 => assert!(is_member(&fleet), "{fleet:#}"),
        EtcdProgram::Go36 => {
            let reason = fleet["reason"].as_str().unwrap_or_default();
            assert!(fleet["membership"] == "isolated" && reason.contains("--fleet-user"), "{fleet:#}");
        }
    }
    etcd.ctl(&["--user=root:secret", "auth", "disable"]).unwrap();
    until_done(&host, &["fleet", "placer", "on"]);
    until(&host, "etcd is well again", |fleet| fleet["etcd"]["trouble"].is_null());
}
