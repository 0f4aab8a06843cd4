//! Figures of the fleet for Prometheus. Owns their names.
//!
//! Invariant: no other host is asked: each says what it sees itself, and what only the one that places knows, that one alone says.

use crate::fleet::FleetService;
use spillway_api::exposition::Exposition;
use spillway_api::{FleetCatalog, FleetDetails, FleetRolloutState, HostState, Membership};

const HOST_STATES: [HostState; 5] =
    [HostState::Alive, HostState::Silent, HostState::Isolated, HostState::Lost, HostState::Absent];

/// Name of a figure of the fleet, its help text, and how to read it; none: this host does not know it.
type FleetColumn = (&'static str, &'static str, fn(&FleetDetails) -> Option<bool>);
/// Name of a figure of its catalogs, its help text, and how to read it.
type CatalogColumn = (&'static str, &'static str, fn(&FleetCatalog) -> u64);

const FLEET: [FleetColumn; 3] = [
    ("member", "1 if the host is a member of its fleet, 0 if it cannot act for it.", |fleet| {
        Some(fleet.membership == Membership::Member)
    }),
    ("placer", "1 on the host that places the machines of the fleet.", |fleet| Some(is_placer(fleet))),
    (
        "braked",
        "1 if no host counts as lost now, because too many are silent or etcd had trouble.",
        |fleet| is_placer(fleet).then_some(fleet.brake.is_some()),
    ),
];

const CATALOGS: [CatalogColumn; 4] = [
    ("machines_wanted", "Machines that a catalog should have on all hosts together.", |catalog| {
        catalog.spec.catalog.count.into()
    }),
    ("machines_ready", "Machines of a catalog that hosts have reported as ready.", |catalog| {
        catalog.shares.iter().map(|share| u64::from(share.ready)).sum()
    }),
    ("machines_unplaced", "Machines of a catalog that are on no host.", |catalog| catalog.unplaced.into()),
    (
        "rollout_halted",
        "1 if the last rollout of a catalog over the hosts has halted by itself.",
        |catalog| {
            let is_halted = |rollout: &spillway_api::FleetRollout| rollout.state == FleetRolloutState::Halted;
            catalog.rollout.as_ref().is_some_and(is_halted).into()
        },
    ),
];

fn is_placer(fleet: &FleetDetails) -> bool {
    fleet.membership == Membership::Member && fleet.placer.as_ref() == Some(&fleet.host)
}

/// Writes the families of the fleet. There are no samples if the host is in none.
pub(super) fn families(text: &mut Exposition, service: Option<&FleetService>) {
    let seen =
        service.map(|service| (service.described(&service.own_placer_report()), service.own_catalogs()));
    write(text, seen.as_ref().map(|(fleet, catalogs)| (fleet, catalogs.as_slice())));
}

fn write(text: &mut Exposition, seen: Option<(&FleetDetails, &[FleetCatalog])>) {
    for (name, help, value) in FLEET {
        let name = format!("fleet_{name}");
        text.family(&name, "gauge", help);
        if let Some((fleet, value)) = seen.and_then(|(fleet, _)| Some((fleet, value(fleet)?))) {
            text.sample(&name, [("fleet", fleet.name.as_str())], u64::from(value));
        }
    }
    text.family("fleet_hosts", "gauge", "Hosts of the fleet by state, as this host sees them.");
    for (fleet, state) in seen.iter().flat_map(|(fleet, _)| HOST_STATES.map(|state| (fleet, state))) {
        let word = crate::machines::word(state);
        let hosts = fleet.hosts.get(&state).copied().unwrap_or(0);
        let labels = [("fleet", fleet.name.as_str()), ("state", word.as_str())];
        text.sample("fleet_hosts", labels, u64::from(hosts));
    }
    for (name, help, value) in CATALOGS {
        let name = format!("fleet_{name}");
        text.family(&name, "gauge", help);
        for (fleet, catalog) in seen.iter().flat_map(|(fleet, all)| all.iter().map(move |of| (fleet, of))) {
            let labels = [("fleet", fleet.name.as_str()), ("catalog", catalog.name.as_str())];
            text.sample(&name, labels, value(catalog));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn each_host_says_what_it_sees_and_the_placer_says_more() {
        let fleet = |host: &str, membership: &str| -> FleetDetails {
            serde_json::from_value(json!({
                "name": "lab", "fleet_id": "x", "host": host, "membership": membership, "reason": null, "epoch": 3,
                "placer": "a", "places": true, "brake": "2 of 4", "etcd": { "members": [], "revision": 9 },
                "hosts": { "alive": 2, "silent": 2 }, "unreadable": {},
            }))
            .unwrap()
        };
        let catalog: FleetCatalog = serde_json::from_value(json!({
            "name": "desk", "revision": 1, "spec": { "image": "debian", "count": 7 }, "version": 1, "generation": 1,
            "history": [], "created": "2026-01-01T00:00:00Z", "strategy": { "batch": 2 }, "unplaced": 2, "unplaced_because": {},
            "rollout": { "state": "halted", "from_image": "debian", "from_version": 1, "to_image": "debian",
                "to_version": 2, "wave": 1, "waves": 2, "hosts_started": 1, "hosts_done": 0, "hosts": 4, "failed": 1,
                "max_failed": 0, "deadline_seconds": 600, "since": "2026-01-01T00:00:00Z", "changed": "2026-01-01T00:00:00Z" },
            "shares": [{ "host": "a", "catalog": "desk", "wanted": 5, "version": 1, "count": 5, "ready": 4, "off": 0,
                "updated": 4, "claimed": 0, "failed": 1 }],
        }))
        .unwrap();
        let said = |fleet: &FleetDetails| {
            let mut text = Exposition::default();
            write(&mut text, Some((fleet, std::slice::from_ref(&catalog))));
            text.text()
        };
        let placer = said(&fleet("a", "member"));
        for line in [
            r#"spillway_fleet_member{fleet="lab"} 1"#,
            r#"spillway_fleet_placer{fleet="lab"} 1"#,
            r#"spillway_fleet_braked{fleet="lab"} 1"#,
            r#"spillway_fleet_hosts{fleet="lab",state="silent"} 2"#,
            r#"spillway_fleet_hosts{fleet="lab",state="lost"} 0"#,
            r#"spillway_fleet_machines_wanted{fleet="lab",catalog="desk"} 7"#,
            r#"spillway_fleet_machines_ready{fleet="lab",catalog="desk"} 4"#,
            r#"spillway_fleet_machines_unplaced{fleet="lab",catalog="desk"} 2"#,
            r#"spillway_fleet_rollout_halted{fleet="lab",catalog="desk"} 1"#,
        ] {
            assert!(placer.contains(line), "{line}: {placer}");
        }
        let other = said(&fleet("b", "isolated"));
        assert!(other.contains(r#"spillway_fleet_member{fleet="lab"} 0"#), "{other}");
        assert!(
            other.contains(r#"spillway_fleet_placer{fleet="lab"} 0"#) && !other.contains("braked{"),
            "{other}"
        );
        let mut none = Exposition::default();
        write(&mut none, None);
        assert!(!none.text().contains("spillway_fleet_member{"));
    }
}
