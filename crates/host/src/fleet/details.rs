//! A fleet for people and programs: what the records say of its hosts and catalogs, in the types of the API. Decides nothing.

use super::rollout_details::rollout;
use spillway_api::{FleetCatalog, FleetHost, FleetShare, HostState, Name, Need, PlacerReport};
use spillway_fleet::agent::share_of;
use spillway_fleet::records::{CatalogRecord, HostRecord, ShareRecord};
use spillway_fleet::view::{FleetView, Versioned};
use std::collections::{BTreeMap, BTreeSet};

/// The share of a host of a catalog.
fn share(view: &FleetView, host: &Name, catalog: &Name, wanted: Option<&ShareRecord>) -> FleetShare {
    let is = view.statuses.get(host).and_then(|status| status.value.catalogs.get(catalog));
    let is = is.cloned().unwrap_or_default();
    // What a host has reported that has no lease may be over.
    let ready = if view.alive.contains_key(host) { is.ready } else { 0 };
    FleetShare {
        host: host.clone(),
        catalog: catalog.clone(),
        wanted: wanted.map_or(0, |share| share.count),
        version: wanted.map_or(is.version, |share| share.version),
        count: is.count,
        ready,
        off: is.off,
        updated: is.updated,
        claimed: is.claimed,
        failed: is.failed,
        refused: is.refused.or(is.waiting),
    }
}

/// Catalogs that a host is to have something of.
fn wanted_catalogs<'a>(view: &'a FleetView, host: &Name) -> impl Iterator<Item = &'a Name> {
    let shares = view.shares.get(host).into_iter().flat_map(|shares| shares.keys());
    shares.chain(view.places.get(host).into_iter().flat_map(|places| places.keys().map(|(of, _)| of)))
}

/// State of a host, as far as the records tell.
pub fn host_state(view: &FleetView, name: &Name) -> HostState {
    let dead = view.hosts.get(name).and_then(|host| host.value.dead_epoch);
    match (view.alive.get(name), dead) {
        (Some(alive), dead) if dead.is_none_or(|dead| alive.created > dead) => HostState::Alive,
        (_, Some(_)) => HostState::Lost,
        _ if view.statuses.contains_key(name) => HostState::Silent,
        _ => HostState::Absent,
    }
}

/// Describes a host.
pub fn host(
    view: &FleetView,
    name: &Name,
    record: &Versioned<HostRecord>,
    known: &PlacerReport,
) -> FleetHost {
    let alive = view.alive.get(name);
    let status = view.statuses.get(name).map(|status| &status.value);
    let wanted: BTreeSet<&Name> = wanted_catalogs(view, name).collect();
    let reported = status.iter().flat_map(|status| status.catalogs.keys());
    let catalogs: BTreeSet<&Name> = wanted.iter().copied().chain(reported).collect();
    let shares = catalogs.into_iter().map(|catalog| {
        let wanted = share_of(view, name, catalog);
        share(view, name, catalog, wanted.as_ref())
    });
    let hypervisor = alive.map(|alive| alive.value.hypervisor);
    let used = wanted.into_iter().filter_map(|catalog| {
        let count = share_of(view, name, catalog)?.count;
        let spec = &view.catalogs.get(catalog)?.value.spec.catalog;
        Some(Need::of(spec, hypervisor.unwrap_or_default()).times(count).memory_bytes())
    });
    let by_records = host_state(view, name);
    let (state, reason) = match known.hosts.get(name) {
        Some(known) if by_records != HostState::Alive => (known.state, known.reason.clone()),
        _ => (by_records, None),
    };
    FleetHost {
        name: name.clone(),
        zone: record.value.zone.clone(),
        labels: record.value.labels.clone(),
        state,
        reason,
        cordoned: record.value.is_cordoned,
        draining: record.value.is_draining,
        address: alive.map(|alive| alive.value.address.clone()),
        version: alive.map(|alive| alive.value.version.clone()),
        hypervisor,
        epoch: alive.map(|alive| alive.created),
        shares: shares.collect(),
        report_cut: status.is_some_and(|status| status.is_cut),
        memory_bytes: status.map(|status| status.budget.memory_bytes),
        used_bytes: used.fold(0, u64::saturating_add),
    }
}

/// Describes all hosts, in the order of their names.
pub fn hosts(view: &FleetView, known: &PlacerReport) -> Vec<FleetHost> {
    view.hosts.iter().map(|(name, record)| host(view, name, record, known)).collect()
}

/// Describes a catalog.
pub fn catalog(
    view: &FleetView,
    name: &Name,
    record: &Versioned<CatalogRecord>,
    known: &PlacerReport,
) -> FleetCatalog {
    let is_of = |host: &&Name| {
        let reported =
            view.statuses.get(*host).is_some_and(|status| status.value.catalogs.contains_key(name));
        reported || share_of(view, host, name).is_some()
    };
    let holders = view.shares.keys().chain(view.places.keys());
    let hosts: BTreeSet<&Name> = holders.chain(view.statuses.keys()).collect();
    let shares: Vec<FleetShare> = hosts
        .into_iter()
        .filter(is_of)
        .map(|host| {
            let wanted = share_of(view, host, name);
            share(view, host, name, wanted.as_ref())
        })
        .collect();
    let placed = shares.iter().map(|share| share.wanted).fold(0, u32::saturating_add);
    let rollout = rollout(view, name, &record.value, known);
    let CatalogRecord { spec, version, strategy, generation, history, created } = record.value.clone();
    FleetCatalog {
        name: name.clone(),
        revision: record.modified,
        unplaced: spec.catalog.count.saturating_sub(placed),
        unplaced_because: known.unplaced.get(name).cloned().unwrap_or_default(),
        unplaced_more_hosts: known.unplaced_more.get(name).copied().unwrap_or_default(),
        spec,
        version,
        strategy,
        generation,
        history,
        created,
        rollout,
        shares,
    }
}

/// Describes all catalogs, in the order of their names.
pub fn catalogs(view: &FleetView, known: &PlacerReport) -> Vec<FleetCatalog> {
    view.catalogs.iter().map(|(name, record)| catalog(view, name, record, known)).collect()
}

/// Counts hosts by their state.
pub fn count_hosts(hosts: &[FleetHost]) -> BTreeMap<HostState, u32> {
    let mut counts = BTreeMap::new();
    for host in hosts {
        *counts.entry(host.state).or_default() += 1;
    }
    counts
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};
    use spillway_api::PlacerHostReport;
    use spillway_fleet::view::{Entry, Update};

    fn view(records: &[(&str, Value)]) -> FleetView {
        let entry = |value: &Value| Entry { value: value.to_string().into_bytes(), created: 5, modified: 6 };
        let entries = records.iter().map(|(key, value)| ((*key).to_owned(), entry(value)));
        let mut view = FleetView::default();
        view.apply(Update::Whole(9, entries.collect()));
        assert!(view.unreadable.is_empty(), "{:?}", view.unreadable);
        view
    }

    fn records() -> Vec<(&'static str, Value)> {
        let host = json!({ "host_id": "h", "zone": "z" });
        let alive = json!({
            "instance": "i", "boot_id": "b", "address": "a:1", "certificate": "0", "version": "1", "hypervisor": "qemu",
        });
        let budget = json!({ "guarantee_bytes": 1, "limit_bytes": 1, "memory_bytes": 4096, "vcpus": 1 });
        let desk = json!({ "generation": 1, "version": 2, "count": 3, "ready": 2, "claimed": 1 });
        let status = json!({ "budget": budget, "catalogs": { "desk": desk } });
        let spec =
            json!({ "image": "debian", "count": 5, "ram_bytes": 67_108_864, "memory_bytes": 67_108_864 });
        let catalog = json!({
            "spec": spec, "version": 3, "generation": 4, "history": [], "created": "2026-01-01T00:00:00Z",
        });
        let share = |count: u32| json!({ "count": count, "version": 3, "generation": 4 });
        vec![
            ("hosts/a", host.clone()),
            ("hosts/b", host.clone()),
            ("hosts/c", host),
            ("alive/a", alive),
            ("status/a", status.clone()),
            ("status/b", status),
            ("catalogs/desk", catalog),
            ("share/a/desk", share(3)),
            ("share/c/desk", share(1)),
        ]
    }

    #[test]
    fn a_host_is_described_by_what_it_is_to_have_and_what_it_has() {
        let view = view(&records());
        let found = hosts(&view, &PlacerReport::default());
        let states: Vec<_> = found.iter().map(|host| (host.name.as_str(), host.state)).collect();
        assert_eq!(states, [("a", HostState::Alive), ("b", HostState::Silent), ("c", HostState::Absent)]);
        let [a, b, c] = &found[..] else { panic!() };
        assert_eq!(
            (a.shares[0].wanted, a.shares[0].count, a.shares[0].ready, a.shares[0].version),
            (3, 3, 2, 3)
        );
        assert_eq!((b.shares[0].wanted, b.shares[0].count, b.shares[0].version), (0, 3, 2));
        assert_eq!(b.shares[0].ready, 0, "it has no lease: what it has reported may be over");
        assert_eq!((c.shares[0].wanted, c.shares[0].count), (1, 0));
        assert_eq!((a.used_bytes, a.memory_bytes, a.epoch), (3 * (128 << 20), Some(4096), Some(5)));
        assert_eq!(count_hosts(&found).len(), 3);
    }

    #[test]
    fn a_placer_knows_more_of_hosts_that_are_not_alive() {
        let view = view(&records());
        let known = PlacerHostReport { state: HostState::Isolated, reason: Some("it answers host a".into()) };
        let hosts_known = ["a", "b"].map(|host| (host.parse::<Name>().unwrap(), known.clone()));
        let known = PlacerReport { hosts: hosts_known.into(), ..PlacerReport::default() };
        let found = hosts(&view, &known);
        assert_eq!((found[0].state, found[1].state), (HostState::Alive, HostState::Isolated));
        assert_eq!(found[1].reason.as_deref(), Some("it answers host a"));
    }

    #[test]
    fn names_of_the_fleet_count_as_shares() {
        let identity = json!({ "uuid": "u", "mac": "02:00:00:00:00:01" });
        let place = json!({ "epoch": 5, "number": 1, "identity": identity });
        let mut records = records();
        records.retain(|(key, _)| !key.starts_with("share/"));
        let desk = records.iter_mut().find(|(key, _)| *key == "catalogs/desk").unwrap();
        desk.1["spec"]["identity"] = "named".into();
        records.extend([("place/a/desk/desk-001", place.clone()), ("place/a/desk/desk-002", place)]);
        let (_, desk) = records.iter_mut().find(|(key, _)| *key == "catalogs/desk").unwrap();
        desk["spec"]["identity"] = "named".into();
        let view = view(&records);
        let [desk] = &catalogs(&view, &PlacerReport::default())[..] else { panic!() };
        assert_eq!((desk.shares[0].wanted, desk.shares[0].version, desk.unplaced), (2, 3, 3));
        let a = &hosts(&view, &PlacerReport::default())[0];
        assert_eq!((a.shares[0].wanted, a.used_bytes), (2, 2 * (128 << 20)));
    }

    #[test]
    fn a_catalog_is_described_by_its_shares() {
        let view = view(&records());
        let [desk] = &catalogs(&view, &PlacerReport::default())[..] else { panic!() };
        let shares: Vec<_> = desk.shares.iter().map(|share| (share.host.as_str(), share.wanted)).collect();
        assert_eq!(shares, [("a", 3), ("b", 0), ("c", 1)]);
        assert_eq!((desk.unplaced, desk.revision, desk.version), (1, 6, 3));
    }
}
