//! Pages about catalogs of a fleet, from responses of the daemon.

use super::*;
use serde_json::{Value, json};

fn share(host: &str, ready: u32) -> Value {
    json!({ "host": host, "catalog": "desk", "wanted": 10, "version": 3, "count": 10, "ready": ready, "off": 1,
        "updated": 4, "claimed": 2, "failed": 0 })
}

fn catalog(settings: &Value, more: &Value) -> FleetCatalog {
    let mut spec = json!({ "image": "debian", "count": 30 });
    spec.as_object_mut().unwrap().extend(settings.as_object().unwrap().clone());
    let mut catalog = json!({
        "name": "desk", "revision": 7, "spec": spec, "version": 3, "strategy": { "batch": 2 }, "generation": 1,
        "history": [{ "image": "debian", "version": 3, "since": "2026-01-01T00:00:00Z" }],
        "created": "2026-01-01T00:00:00Z", "shares": [], "unplaced": 0,
    });
    catalog.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    serde_json::from_value(catalog).unwrap()
}

fn host(name: &str, zone: &str) -> FleetHost {
    serde_json::from_value(json!({
        "name": name, "zone": zone, "labels": {}, "state": "alive", "cordoned": false, "draining": false, "shares": [],
        "used_bytes": 0,
    }))
    .unwrap()
}

#[test]
fn the_page_shows_machines_by_host_and_what_finds_none() {
    let mut refusing = share("host-b", 7);
    refusing["refused"] = json!("no bridge br0");
    let shares = json!([share("host-a", 9), refusing]);
    let because = json!({ "host-a": "memory: 1 GiB is needed, 300 MiB is left" });
    let more =
        json!({ "shares": shares, "unplaced": 10, "unplaced_because": because, "unplaced_more_hosts": 3 });
    let text = page(&catalog(&json!({ "zones": ["east"] }), &more), &[host("host-a", "east")]);
    for part in [
        "desk, machines take debian:3, on each host with rollout batch=2\n",
        "16 of 30 machines are ready, 4 are claimed, 0 have failed, 10 find no host\n",
        "\nnaming                 desk-HOST-###\n",
        "\nzones                  [\"east\"]\n",
        "\nlost_after_seconds     45\n",
        "\nHOST    ZONE  WANTED  VERSION  MACHINES  READY  OFF  UPDATED  CLAIMED  FAILED\n",
        "\nhost-a  east  10      3        10        9      1    4        2        0\n",
        "\nhost-b  -     10      3        10        7      1    4        2        0\n",
        "\nhost-b refuses desk: no bridge br0\n",
        "\nNO SPACE ON  WHY\nhost-a       memory: 1 GiB is needed, 300 MiB is left\nand on 3 further hosts\n",
    ] {
        assert!(text.contains(part), "{part}: {text}");
    }
    assert!(!text.contains("they keep data"));
}

#[test]
fn the_page_says_that_data_stays_on_its_host() {
    for settings in [json!({ "type": "dedicated" }), json!({ "data_disk_bytes": 1_048_576 })] {
        let text = page(&catalog(&settings, &json!({})), &[]);
        assert!(text.contains("they keep data, each on its host: they stay there"), "{text}");
    }
}

#[test]
fn where_nobody_has_looked_the_page_says_so() {
    let text = page(&catalog(&json!({}), &json!({ "unplaced": 3 })), &[]);
    assert!(text.contains("why is not known: the host that places has not looked yet"), "{text}");
    let text = page(&catalog(&json!({}), &json!({})), &[]);
    assert!(!text.contains("why is not known"), "{text}");
}
