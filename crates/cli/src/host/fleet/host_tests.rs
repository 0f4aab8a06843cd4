//! Pages about hosts, and when a drain has ended, from responses of the daemon.

use super::*;
use serde_json::{Value, json};

fn share(catalog: &str, wanted: u32, count: u32, claimed: u32) -> Value {
    json!({ "host": "host-a", "catalog": catalog, "wanted": wanted, "version": 3, "count": count, "ready": count,
        "off": 0, "updated": count, "claimed": claimed, "failed": 0 })
}

fn host(state: &str, draining: bool, shares: &[Value]) -> FleetHost {
    serde_json::from_value(json!({
        "name": "host-a", "zone": "east", "labels": { "gpu": "yes" }, "state": state, "cordoned": false,
        "draining": draining, "address": "192.0.2.1:9445", "version": "0.1.0", "hypervisor": "qemu", "epoch": 42,
        "shares": shares, "memory_bytes": 64_u64 << 30, "used_bytes": 12_u64 << 30,
    }))
    .unwrap()
}

fn catalog(name: &str, settings: &Value, unplaced: u32) -> FleetCatalog {
    let mut spec = json!({ "image": "debian", "count": 30 });
    spec.as_object_mut().unwrap().extend(settings.as_object().unwrap().clone());
    serde_json::from_value(json!({
        "name": name, "revision": 7, "spec": spec, "version": 3, "strategy": "now", "generation": 1, "history": [],
        "created": "2026-01-01T00:00:00Z", "shares": [], "unplaced": unplaced,
    }))
    .unwrap()
}

#[test]
fn a_drain_ends_when_only_claimed_machines_and_data_are_left() {
    let all = [catalog("desk", &json!({}), 0), catalog("db", &json!({ "type": "dedicated" }), 0)];
    let is_done = |shares: &[Value]| progress(&host("alive", true, shares), &all).unwrap() == Progress::Done;
    assert!(is_done(&[]));
    assert!(is_done(&[share("desk", 0, 2, 2), share("db", 4, 4, 0)]));
    assert!(!is_done(&[share("desk", 0, 3, 2)]), "one is left that nobody has claimed");
    assert!(!is_done(&[share("desk", 1, 0, 0)]), "its share is not given up yet");
    assert!(!is_done(&[share("other", 1, 1, 0)]), "of a catalog that is not known nothing is taken for kept");
    let silent = progress(&host("silent", true, &[share("desk", 0, 0, 0)]), &all).unwrap();
    let Progress::Going(text) = silent else { panic!("a silent host has reported nothing") };
    assert!(text.contains("it is silent, and gives nothing up"), "{text}");
    for (host, why) in [
        (host("alive", false, &[]), "somebody has ended it"),
        (host("lost", true, &[]), "it is not alive"),
        (host("absent", true, &[]), "it is not alive"),
    ] {
        let failure = progress(&host, &all).unwrap_err();
        assert!(failure.exit == Exit::Refused && failure.message.contains(why), "{failure}");
    }
}

#[test]
fn a_drain_that_cannot_end_says_what_fits_nowhere() {
    let all = [catalog("desk", &json!({}), 5), catalog("lab", &json!({}), 9)];
    let going = progress(&host("alive", true, &[share("desk", 5, 5, 1)]), &all).unwrap();
    let text = "host-a has 5 machines that are to go, 1 of them claimed; 5 machines of desk fit on no other host \
                ('spillway fleet catalog show desk')";
    assert_eq!(going, Progress::Going(text.into()));
}

#[test]
fn a_report_that_leaves_something_out_is_marked() {
    let cut = FleetHost { report_cut: true, ..host("alive", true, &[]) };
    assert_eq!(state(&host("alive", true, &[])), "alive, draining");
    assert_eq!(state(&cut), "alive, draining, report cut");
    assert!(rows(&[cut]).contains("report cut"));
}

#[test]
fn machines_that_keep_data_are_named() {
    let all = [catalog("desk", &json!({}), 0), catalog("db", &json!({ "data_disk_bytes": 1_048_576 }), 0)];
    let of = host("alive", true, &[share("desk", 5, 5, 1), share("db", 4, 3, 0)]);
    let kept = kept(&of, &all);
    assert_eq!(kept, [("db".parse().unwrap(), 4)]);
    assert!(kept_words(&kept).contains("db: 4 machines keep data"));
    assert_eq!(kept_words(&[]), "");
}

#[test]
fn what_becomes_of_names_of_the_fleet_is_said() {
    let named = |action: &str| catalog("desk", &json!({ "identity": "named", "on_isolation": action }), 0);
    let of = host("alive", true, &[share("desk", 5, 5, 1), share("lab", 1, 1, 0)]);
    let text = name_words(&of, &[named("keep"), catalog("lab", &json!({}), 0)]);
    assert!(text.contains("desk: 5 machines") && text.contains("only if it is declared dead"), "{text}");
    assert_eq!(text.lines().count(), 1);
    assert!(name_words(&of, &[named("stop")]).contains("when it is lost"));
}

#[test]
fn hosts_stand_in_a_table_with_the_reasons_below() {
    let mut refusing = share("desk", 10, 8, 2);
    refusing["refused"] = json!("no bridge br0\non this host");
    let mut silent = host("silent", true, &[refusing, share("lab", 5, 5, 0)]);
    silent.reason = Some("host-b reaches it".into());
    let absent = FleetHost {
        name: "host-b".parse().unwrap(),
        cordoned: true,
        memory_bytes: None,
        used_bytes: 0,
        version: None,
        ..host("absent", false, &[])
    };
    let text = rows(&[silent, absent]);
    let lines: Vec<&str> = text.lines().collect();
    assert_eq!(
        lines,
        [
            "NAME    ZONE  STATE             MACHINES  READY  CLAIMED  MEMORY                VERSION",
            "host-a  east  silent, draining  13 of 15  13     2        12.0 GiB of 64.0 GiB  0.1.0",
            "host-b  east  absent, cordoned  0 of 0    0      0        0 B of ?              -",
            "",
            "host-a: host-b reaches it",
            "host-a refuses desk: no bridge br0 on this host",
        ]
    );
}

#[test]
fn the_page_of_a_host_has_its_shares() {
    let text = page(&host("alive", false, &[share("desk", 10, 8, 2)]));
    for part in [
        "host-a, alive\nzone     east\nlabels   gpu=yes\naddress  192.0.2.1:9445\n",
        "version  0.1.0, machines are run by qemu\nepoch    42\n",
        "CATALOG  WANTED  VERSION  MACHINES  READY",
        "desk     10      3        8         8",
    ] {
        assert!(text.contains(part), "{part}: {text}");
    }
}
