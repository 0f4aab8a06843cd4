//! etcd is restored from a backup: a host that has acted on later records holds still until somebody has accepted the older ones.

use crate::alone::{Host, PATIENCE, PREFIX, etcd, is_member, is_refused, until};
use serde_json::{Value, json};
use spillway_testkit::etcd::EtcdProgram;
use spillway_testkit::process::wait_until;

fn is_held(fleet: &Value) -> bool {
    is_refused(fleet, "restored from a backup")
}

#[test]
fn a_host_holds_still_when_etcd_was_restored_until_that_is_accepted() {
    let Some(mut etcd) = etcd(EtcdProgram::Debian34, &[]) else { return };
    let dir = tempfile::tempdir_in("/var/tmp").unwrap();
    let host = Host::new(dir.path(), "a", &etcd);
    let daemon = host.start();
    let init = wait_until(PATIENCE, || daemon.ask(&["fleet", "init"]).ok());
    assert!(init.is_some(), "{}", daemon.tail());
    until(&daemon, "it is a member", is_member);
    daemon.ask(&["fleet", "placer", "off"]).unwrap();
    let (first, second) = (dir.path().join("first"), dir.path().join("second"));
    etcd.save(&first).unwrap();

    // The host has no such image. What it reports shows that it has seen the share.
    let catalog = json!({ "spec": { "image": "debian", "count": 1 }, "version": 1, "generation": 1, "history": [],
        "created": "2026-01-01T00:00:00Z" });
    etcd.put(&format!("{PREFIX}catalogs/desk"), &catalog.to_string()).unwrap();
    let share = json!({ "count": 1, "version": 1, "generation": 1 });
    etcd.put(&format!("{PREFIX}share/a/desk"), &share.to_string()).unwrap();
    let has_reported = || {
        let records = etcd.records(PREFIX).unwrap().1;
        records.get("status/a").is_some_and(|status| status.value.contains("desk"))
    };
    assert!(wait_until(PATIENCE, || has_reported().then_some(())).is_some(), "{}", daemon.tail());
    etcd.save(&second).unwrap();
    drop(daemon);

    // The next daemon finds what is older than the earlier one has acted on.
    etcd.restore(&first).unwrap();
    let daemon = host.start();
    until(&daemon, "it holds still", is_held);
    assert!(!host.accept().status.success(), "a daemon runs");
    // The revision grows past what was seen.
    for number in 0..60 {
        etcd.put(&format!("{PREFIX}registries/r{number}"), "{}").unwrap();
    }
    let revision = etcd.records(PREFIX).unwrap().0;
    until(&daemon, "it has seen them", |fleet| fleet["etcd"]["revision"].as_i64() >= Some(revision));
    assert!(is_held(&daemon.get("/v1/fleet").unwrap()));
    // The record that came with the backup goes with its lease, and no other one comes.
    let is_gone = || !etcd.records(PREFIX).unwrap().1.contains_key("alive/a");
    assert!(wait_until(PATIENCE, || is_gone().then_some(())).is_some(), "it does not take part");
    assert!(is_held(&daemon.get("/v1/fleet").unwrap()));
    drop(daemon);
    let daemon = host.start();
    until(&daemon, "the next one knows", is_held);
    // What people want is changed while hosts hold still.
    daemon.ask(&["fleet", "placer", "on"]).unwrap();
    daemon.ask(&["fleet", "placer", "off"]).unwrap();
    drop(daemon);
    let accepted = host.accept();
    assert!(accepted.status.success(), "{accepted:?}");
    let daemon = host.start();
    until(&daemon, "it takes part again", is_member);

    // A daemon that runs finds it as well.
    etcd.restore(&second).unwrap();
    until(&daemon, "it holds still, too", is_held);
    drop(daemon);
    assert!(host.accept().status.success());
    let daemon = host.start();
    until(&daemon, "it takes part again", is_member);
    drop(daemon);
    let nothing = host.accept();
    assert!(String::from_utf8(nothing.stdout).unwrap().contains("nothing to accept"));
}
