//! `spillway fleet status`. Owns the page, and the exit code that says whether the host is a member.
//!
//! Invariant: the code is 0 only if the host has a lease.

use super::FLEET;
use super::catalog::rollout::short;
use super::share::ShareTotals;
use crate::error::{Exit, Failure};
use crate::host::{Daemon, table, word};
use serde::Serialize;
use spillway_api::client::{Client, ClientError};
use spillway_api::{
    EtcdStatus, FleetCatalog, FleetDetails, FleetRollout, FleetRolloutState, ImageRef, List, Membership, Name,
};
use std::process::ExitCode;

/// The fleet, and a line for each of its catalogs.
#[derive(Debug, Serialize)]
struct FleetStatus {
    #[serde(flatten)]
    fleet: FleetDetails,
    catalogs: Vec<CatalogLine>,
}

/// What there is of a catalog, on all hosts together.
#[derive(Debug, Serialize)]
struct CatalogLine {
    name: Name,
    image: ImageRef,
    version: u32,
    wanted: u32,
    ready: u64,
    claimed: u64,
    failed: u64,
    unplaced: u32,
    #[serde(skip_serializing_if = "Option::is_none")]
    rollout: Option<FleetRollout>,
}

/// Shows the fleet. The exit code says whether the host is a member.
pub fn status(daemon: &Daemon, client: &Client) -> Result<ExitCode, Failure> {
    let fleet: FleetDetails = client.get(FLEET)?;
    let catalogs = match client.list::<FleetCatalog>(&format!("{FLEET}/catalogs")) {
        Ok(catalogs) => catalogs,
        // The host has not read the records, and the page says why.
        Err(ClientError::Refused(_)) if fleet.membership != Membership::Member => List { items: Vec::new() },
        Err(e) => return Err(e.into()),
    };
    let is_member = fleet.membership == Membership::Member;
    let catalogs = catalogs.items.iter().map(CatalogLine::of).collect();
    daemon.show(&FleetStatus { fleet, catalogs }, page)?;
    Ok(if is_member { ExitCode::SUCCESS } else { ExitCode::from(Exit::Unavailable as u8) })
}

impl CatalogLine {
    fn of(catalog: &FleetCatalog) -> CatalogLine {
        let ShareTotals { ready, claimed, failed, .. } = ShareTotals::of(&catalog.shares);
        CatalogLine {
            name: catalog.name.clone(),
            image: catalog.spec.catalog.image.clone(),
            version: catalog.version,
            wanted: catalog.spec.catalog.count,
            ready,
            claimed,
            failed,
            unplaced: catalog.unplaced,
            rollout: catalog.rollout.clone(),
        }
    }
}

fn page(status: &FleetStatus) -> String {
    let FleetStatus { fleet, catalogs } = status;
    let placer = match (&fleet.placer, fleet.places) {
        _ if fleet.membership == Membership::NoFleet => "-".into(),
        (_, false) => "off: another program writes the shares ('spillway fleet placer on')".into(),
        (Some(host), true) => host.to_string(),
        (None, true) => "none: a host is elected within seconds while etcd has a leader".into(),
    };
    let mut hosts: Vec<String> =
        fleet.hosts.iter().map(|(state, hosts)| format!("{hosts} {}", word(state))).collect();
    if hosts.is_empty() {
        hosts.push("none".into());
    }
    let mut text = format!(
        "fleet   {}, seen by {}\nhost    {}\n{}placer  {placer}\n",
        fleet.name,
        fleet.host,
        membership(fleet),
        etcd(&fleet.etcd, fleet.reason.as_deref())
    );
    if let Some(brake) = &fleet.brake {
        text += &format!("brake   lost hosts are not replaced: {brake}\n");
    }
    let as_of = if fleet.membership == Membership::Member { "" } else { " (as this host has last read it)" };
    text += &format!("hosts   {}{as_of}\n", hosts.join(", "));
    for (key, why) in &fleet.unreadable {
        text += &format!("the record {key} cannot be read, and nothing acts on it: {why}\n");
    }
    if !catalogs.is_empty() {
        text.push('\n');
        let rows = catalogs.iter().map(|line| {
            let image = format!("{}:{}", line.image.name, line.version);
            let numbers =
                [u64::from(line.wanted), line.ready, line.claimed, line.failed, line.unplaced.into()];
            let [wanted, ready, claimed, failed, unplaced] = numbers.map(|number| number.to_string());
            let rollout = short(line.rollout.as_ref());
            [line.name.to_string(), image, wanted, ready, claimed, failed, unplaced, rollout]
        });
        let columns = ["CATALOG", "IMAGE", "WANTED", "READY", "CLAIMED", "FAILED", "UNPLACED", "ROLLOUT"];
        text += &table(columns, rows);
        for (name, why) in catalogs.iter().filter_map(halted) {
            text += &format!("\nthe rollout of {name} has halted: {why}\n");
        }
    }
    text
}

/// Why the rollout of a catalog has halted.
fn halted(line: &CatalogLine) -> Option<(&Name, &str)> {
    let rollout = line.rollout.as_ref().filter(|rollout| rollout.state == FleetRolloutState::Halted)?;
    Some((&line.name, rollout.reason.as_deref()?))
}

/// Formats how the host takes part, and what that means.
fn membership(fleet: &FleetDetails) -> String {
    let means = match fleet.membership {
        Membership::Member => match fleet.epoch {
            Some(epoch) => format!("epoch {epoch}"),
            None => "it has a lease".into(),
        },
        Membership::Connecting => "it has not read the records of the fleet yet".into(),
        Membership::NoFleet if fleet.reason.is_none() => {
            "etcd has no fleet of this name: make it with 'spillway fleet init'".into()
        }
        Membership::NoFleet => "if it has another name, correct --fleet".into(),
        Membership::Joining => "it is about to get a lease".into(),
        Membership::Isolated => {
            "it has no lease: other hosts decide whether its machines are replaced".into()
        }
        Membership::Refused => {
            "it takes no part: its machines go on, except named ones with on_isolation pause or stop".into()
        }
    };
    let reason = fleet.reason.as_ref().map_or(String::new(), |reason| format!("\n        {reason}"));
    format!("{}: {means}{reason}", word(&fleet.membership))
}

/// Formats the state of etcd, without a trouble that is the reason of the host already.
fn etcd(etcd: &EtcdStatus, reason: Option<&str>) -> String {
    let members = etcd.members.join(", ");
    let connected = match (&etcd.connected, &etcd.version) {
        (Some(member), Some(version)) => format!("{member} (etcd {version})"),
        (Some(member), None) => member.clone(),
        (None, _) => "no member answers".into(),
    };
    let trouble = etcd.trouble.as_deref().filter(|trouble| Some(*trouble) != reason);
    let trouble = trouble.map_or(String::new(), |trouble| format!("        {trouble}\n"));
    format!("etcd    {connected}, revision {}; members: {members}\n{trouble}", etcd.revision)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    fn details(more: Value) -> FleetDetails {
        let mut details = json!({
            "name": "lab", "host": "host-a", "membership": "member", "epoch": 42, "places": true, "placer": "host-b",
            "etcd": { "members": ["https://e1:2379", "https://e2:2379"], "connected": "https://e1:2379",
                "version": "3.4.23", "revision": 981 },
            "hosts": { "alive": 3, "silent": 1 },
        });
        details.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        serde_json::from_value(details).unwrap()
    }

    fn catalog() -> FleetCatalog {
        let share = |host: &str, ready: u32| {
            json!({ "host": host, "catalog": "desk", "wanted": 10, "version": 3, "count": 10, "ready": ready, "off": 0,
                "updated": 9, "claimed": 2, "failed": 1 })
        };
        serde_json::from_value(json!({
            "name": "desk", "revision": 7, "spec": { "image": "debian", "count": 30 }, "version": 3,
            "strategy": { "batch": 2 }, "generation": 1, "history": [], "created": "2026-01-01T00:00:00Z",
            "shares": [share("host-a", 9), share("host-b", 8)], "unplaced": 10,
        }))
        .unwrap()
    }

    #[test]
    fn the_page_of_a_member_says_who_places_and_what_there_is() {
        let catalogs = vec![CatalogLine::of(&catalog())];
        let text = page(&FleetStatus { fleet: details(json!({})), catalogs });
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(
            lines,
            [
                "fleet   lab, seen by host-a",
                "host    member: epoch 42",
                "etcd    https://e1:2379 (etcd 3.4.23), revision 981; members: https://e1:2379, https://e2:2379",
                "placer  host-b",
                "hosts   3 alive, 1 silent",
                "",
                "CATALOG  IMAGE     WANTED  READY  CLAIMED  FAILED  UNPLACED  ROLLOUT",
                "desk     debian:3  30      17     4        2       10        -",
            ]
        );
    }

    #[test]
    fn the_page_says_what_is_wrong() {
        let fleet = details(json!({
            "membership": "isolated", "epoch": null, "reason": "no member of etcd answers", "placer": null,
            "brake": "2 of 4 hosts are silent", "unreadable": { "catalogs/x": "no number" },
            "etcd": { "members": ["https://e1:2379"], "trouble": "https://e1:2379: refused", "revision": 981 },
        }));
        let text = page(&FleetStatus { fleet, catalogs: Vec::new() });
        for part in [
            "isolated: it has no lease: other hosts decide whether its machines are replaced",
            "\n        no member of etcd answers\n",
            "etcd    no member answers",
            "\n        https://e1:2379: refused\n",
            "brake   lost hosts are not replaced: 2 of 4 hosts are silent",
            "the record catalogs/x cannot be read, and nothing acts on it: no number",
            "placer  none",
            "hosts   3 alive, 1 silent (as this host has last read it)",
        ] {
            assert!(text.contains(part), "{part}: {text}");
        }
        let mut same = details(json!({ "membership": "isolated", "reason": "no member of etcd answers" }));
        same.etcd.trouble.clone_from(&same.reason);
        let text = page(&FleetStatus { fleet: same, catalogs: Vec::new() });
        assert_eq!(text.matches("no member of etcd answers").count(), 1, "{text}");
        let fleet = details(json!({ "membership": "no-fleet", "places": false, "hosts": {} }));
        let text = page(&FleetStatus { fleet, catalogs: Vec::new() });
        assert!(
            text.contains("fleet init") && text.contains("placer  -") && text.contains("hosts   none"),
            "{text}"
        );
        let fleet = details(json!({ "places": false }));
        let text = page(&FleetStatus { fleet, catalogs: Vec::new() });
        assert!(text.contains("placer  off: another program writes the shares"), "{text}");
    }

    #[test]
    fn json_has_the_fleet_and_its_catalogs_on_one_level() {
        let status = FleetStatus { fleet: details(json!({})), catalogs: vec![CatalogLine::of(&catalog())] };
        let json = serde_json::to_value(status).unwrap();
        assert_eq!((&json["membership"], &json["catalogs"][0]["ready"]), (&json!("member"), &json!(17)));
    }
}
