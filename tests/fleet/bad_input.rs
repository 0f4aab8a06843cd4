//! What a fleet cannot work with: each has a state of its own, says what is wrong, and goes when its cause goes.

use crate::alone::{Host, PATIENCE, PREFIX, etcd, is_member, is_refused, until};
use serde_json::{Value, json};
use spillway_testkit::daemon::Daemon;
use spillway_testkit::process::wait_until;

fn has_trouble(fleet: &Value, said: &str) -> bool {
    fleet["etcd"]["trouble"].as_str().unwrap_or_default().contains(said)
}

/// Why a command is refused, once it is for this reason.
fn until_refused(daemon: &Daemon, command: &[&str], reason: &str) -> String {
    let refused = || daemon.ask(command).err().map(|e| format!("{e:#}")).filter(|why| why.contains(reason));
    let why = wait_until(PATIENCE, refused);
    why.unwrap_or_else(|| panic!("{command:?} is not refused because of '{reason}'\n{}", daemon.tail()))
}

fn until_done(daemon: &Daemon, command: &[&str]) {
    let done = wait_until(PATIENCE, || daemon.ask(command).ok());
    assert!(done.is_some(), "{command:?}: {:?}", daemon.ask(command));
}

#[test]
fn records_of_others_are_not_acted_on() {
    let Some(etcd) = etcd(&[]) else { return };
    let dir = tempfile::tempdir_in("/var/tmp").unwrap();
    let host = Host::new(&dir.path().join("first"), "a", &etcd).start();
    host.ask(&["fleet", "init"]).unwrap();
    until(&host, "it is a member", is_member);

    // Another host with its name.
    let other = Host::new(&dir.path().join("second"), "a", &etcd).start();
    until(&other, "its name is taken", |fleet| {
        is_refused(fleet, "another host with the name a") && is_refused(fleet, "--host-name")
    });
    assert!(is_member(&host.get("/v1/fleet").unwrap()));

    // Records of a later version, and those of another fleet.
    let meta = etcd.records(PREFIX).unwrap().1["meta"].value.clone();
    let changed = |key: &str, value: Value| {
        let mut meta: Value = serde_json::from_str(&meta).unwrap();
        meta[key] = value;
        etcd.put(&format!("{PREFIX}meta"), &meta.to_string()).unwrap();
    };
    for (key, value, said) in [
        ("format", json!(99), "have format 99"),
        ("fleet_id", json!("stranger"), "etcd has another one of the same name (stranger)"),
        ("format", json!("none"), "cannot be read"),
    ] {
        changed(key, value);
        until(&host, said, |fleet| is_refused(fleet, said));
        // Nobody changes them through this host.
        let changes = [
            &["fleet", "placer", "off"][..],
            &["fleet", "init"],
            &["fleet", "host", "cordon", "a"],
            &["fleet", "catalog", "create", "desk", "--image", "debian:1", "--dry-run"],
        ];
        let before = etcd.records(PREFIX).unwrap().1["meta"].clone();
        for change in changes {
            until_refused(&host, change, said);
        }
        assert_eq!(etcd.records(PREFIX).unwrap().1["meta"], before);
        etcd.put(&format!("{PREFIX}meta"), &meta).unwrap();
        until(&host, "it takes part again", is_member);
    }
    etcd.delete(&format!("{PREFIX}meta")).unwrap();
    until(&host, "the records are gone", |fleet| is_refused(fleet, "gone from etcd"));
    etcd.put(&format!("{PREFIX}meta"), &meta).unwrap();
    until(&host, "it takes part again", is_member);

    // The other one goes its own way.
    drop(other);
    let other = Host::new(&dir.path().join("second"), "b", &etcd).start();
    until(&other, "it is a member, too", is_member);

    // Machines that no host can hold: which host has what.
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

#[test]
fn an_etcd_that_is_full_or_wants_a_user_is_said() {
    let Some(etcd) = etcd(&["--quota-backend-bytes=2097152".into()]) else { return };
    let dir = tempfile::tempdir_in("/var/tmp").unwrap();
    let host = Host::new(dir.path(), "a", &etcd).start();
    host.ask(&["fleet", "init"]).unwrap();
    until(&host, "it is a member", is_member);

    let full = wait_until(PATIENCE, || etcd.put("/others", &"x".repeat(100_000)).err());
    assert!(full.is_some(), "its database fills");
    until(&host, "etcd is full", |fleet| has_trouble(fleet, "reached its quota"));
    assert!(is_member(&host.get("/v1/fleet").unwrap()), "leases are renewed all the same");
    let why = until_refused(&host, &["fleet", "placer", "off"], "reached its quota");
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
    // What the host follows already goes on.
    until_refused(&host, &["fleet", "placer", "on"], "--fleet-user");
    until(&host, "it is said that etcd wants a user", |fleet| has_trouble(fleet, "--fleet-user"));
    assert!(is_member(&host.get("/v1/fleet").unwrap()));
    etcd.ctl(&["--user=root:secret", "auth", "disable"]).unwrap();
    until(&host, "etcd is well again", |fleet| fleet["etcd"]["trouble"].is_null());
    until_done(&host, &["fleet", "placer", "on"]);
}
