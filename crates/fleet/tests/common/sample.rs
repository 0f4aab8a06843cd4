//! Records of a fleet for tests: a store that answers at once, and the view of it.
#![allow(dead_code, clippy::unwrap_used)]

use serde_json::{Value, json};
use spillway_api::Name;
use spillway_fleet::election::Identity;
use spillway_fleet::keys::Key;
use spillway_fleet::transaction::{Comparison, MOST_OPERATIONS, Outcome, Revision, Transaction, Write};
use spillway_fleet::view::{Entry, FleetView, Update};
use std::collections::{BTreeMap, BTreeSet};

pub const GIB: u64 = 1 << 30;

pub fn name(text: &str) -> Name {
    text.parse().unwrap()
}

/// The daemon that [`Fleet::host`] lets live on a host.
pub fn identity(host: &str) -> Identity {
    Identity { host: name(host), instance: format!("process of {host}") }
}

/// The records of a fleet, all of them as a store has them.
pub struct Fleet {
    pub entries: BTreeMap<String, Entry>,
    view: FleetView,
    revision: Revision,
}

impl Fleet {
    /// A fleet whose machines Spillway places, without hosts.
    pub fn new() -> Fleet {
        let mut fleet = Fleet { entries: BTreeMap::new(), view: FleetView::default(), revision: 0 };
        let meta = json!({"format": 1, "fleet_id": "x", "created": "2026-01-01T00:00:00Z", "placer": true});
        fleet.put("meta", &meta.to_string());
        fleet
    }

    pub fn view(&self) -> &FleetView {
        &self.view
    }

    pub fn revision(&self) -> Revision {
        self.revision
    }

    fn write(&mut self, key: &str, value: Option<Vec<u8>>) {
        let entry = value.map(|value| {
            let created = self.entries.get(key).map_or(self.revision, |entry| entry.created);
            Entry { value, created, modified: self.revision }
        });
        match &entry {
            Some(entry) => drop(self.entries.insert(key.to_owned(), entry.clone())),
            None => drop(self.entries.remove(key)),
        }
        self.view.apply(Update::Changes(self.revision, vec![(key.to_owned(), entry)]));
    }

    pub fn put(&mut self, key: &str, value: &str) -> Revision {
        self.revision += 1;
        self.write(key, Some(value.as_bytes().to_vec()));
        self.revision
    }

    pub fn delete(&mut self, key: &str) {
        self.revision += 1;
        self.write(key, None);
    }

    /// The record of a key, as JSON.
    pub fn json(&self, key: &str) -> Value {
        serde_json::from_slice(&self.entries[key].value).unwrap()
    }

    /// Changes fields of a record, which it makes if it is not there.
    pub fn set(&mut self, key: &str, fields: Value) -> Revision {
        let mut record = self.entries.get(key).map_or_else(|| json!({}), |_| self.json(key));
        for (field, value) in fields.as_object().unwrap() {
            record[field] = value.clone();
        }
        self.put(key, &record.to_string())
    }

    /// A host with a lease, and space for 64 machines of [`Fleet::catalog`].
    pub fn host(&mut self, host: &str, zone: &str) {
        self.set(&format!("hosts/{host}"), json!({"host_id": format!("id of {host}"), "zone": zone}));
        self.begin_lease(host);
        self.budget(host, 64 * GIB);
    }

    pub fn begin_lease(&mut self, host: &str) -> Revision {
        let alive = json!({"instance": identity(host).instance, "boot_id": "b", "address": "h:1",
            "certificate": "00", "version": "1", "hypervisor": "qemu"});
        self.put(&format!("alive/{host}"), &alive.to_string())
    }

    pub fn end_lease(&mut self, host: &str) {
        self.delete(&format!("alive/{host}"));
    }

    /// A budget of so much memory, and of as much of all else as never ends.
    pub fn budget(&mut self, host: &str, memory_bytes: u64) {
        let most = 1u64 << 50;
        let budget = json!({"guarantee_bytes": most, "limit_bytes": most, "memory_bytes": memory_bytes, "vcpus": most});
        self.set(&format!("status/{host}"), json!({ "budget": budget }));
    }

    /// What a host reports of a catalog.
    pub fn report(&mut self, host: &str, catalog: &str, fields: Value) {
        let key = format!("status/{host}");
        let mut catalogs = self.json(&key).get("catalogs").cloned().unwrap_or_else(|| json!({}));
        let mut report = json!({"generation": 1, "version": 1, "count": 0, "ready": 0, "updated": 0, "claimed": 0, "failed": 0});
        for (field, value) in fields.as_object().unwrap() {
            report[field] = value.clone();
        }
        catalogs[catalog] = report;
        self.set(&key, json!({ "catalogs": catalogs }));
    }

    /// All hosts have the machines that they are to have, and those are ready.
    pub fn report_all_ready(&mut self) {
        for (host, catalog, count) in self.shares() {
            if self.view.statuses.contains_key(&name(&host)) {
                self.report(&host, &catalog, json!({"count": count, "ready": count}));
            }
        }
    }

    /// A catalog of machines of 1 GiB, with further settings.
    pub fn catalog(&mut self, catalog: &str, count: u32, settings: Value) {
        let key = format!("catalogs/{catalog}");
        let mut spec =
            json!({"image": "debian", "count": count, "ram_bytes": GIB / 2, "memory_bytes": GIB / 2});
        for (setting, value) in settings.as_object().unwrap() {
            spec[setting] = value.clone();
        }
        let known = self.entries.contains_key(&key).then(|| self.json(&key));
        let generation = known.as_ref().map_or(1, |known| known["generation"].as_u64().unwrap() + 1);
        let version = known.as_ref().map_or_else(|| json!(1), |known| known["version"].clone());
        self.set(
            &key,
            json!({"spec": spec, "version": version, "generation": generation, "history": [],
                "created": "2026-01-01T00:00:00Z"}),
        );
    }

    pub fn share(&mut self, host: &str, catalog: &str, count: u32) {
        let of = &self.json(&format!("catalogs/{catalog}"));
        let share = json!({"count": count, "version": of["version"], "generation": of["generation"],
            "image": of["spec"]["image"]});
        self.put(&format!("share/{host}/{catalog}"), &share.to_string());
    }

    /// Makes the daemon of a host the placer. Its term is returned.
    pub fn placer(&mut self, host: &str) -> Revision {
        let own = identity(host);
        let record = json!({"host": own.host, "instance": own.instance});
        self.delete("leader/placer");
        self.put("leader/placer", &record.to_string())
    }

    /// Host, catalog and count of all shares.
    pub fn shares(&self) -> Vec<(String, String, u32)> {
        let shares = self.view.shares.iter().flat_map(|(host, shares)| {
            shares.iter().map(|(catalog, share)| (host.to_string(), catalog.to_string(), share.value.count))
        });
        shares.collect()
    }

    /// Count of a catalog's share of a host.
    pub fn count(&self, host: &str, catalog: &str) -> u32 {
        self.view.share(&name(host), &name(catalog)).map_or(0, |share| share.value.count)
    }

    /// Counts of a catalog's shares, by host.
    pub fn counts(&self, catalog: &str) -> Vec<(String, u32)> {
        let all = self.shares().into_iter().filter(|(_, of, _)| of == catalog);
        all.map(|(host, _, count)| (host, count)).collect()
    }

    pub fn total(&self, catalog: &str) -> u64 {
        self.counts(catalog).iter().map(|(_, count)| u64::from(*count)).sum()
    }

    /// Whether a comparison holds.
    pub fn holds(&self, comparison: &Comparison) -> bool {
        let (key, of, revision) = match comparison {
            Comparison::Created(key, revision) => {
                (key, (|entry: &Entry| entry.created) as fn(&Entry) -> i64, *revision)
            }
            Comparison::Modified(key, revision) => (key, (|entry: &Entry| entry.modified) as _, *revision),
        };
        self.entries.get(&key.to_string()).map_or(0, of) == revision
    }

    /// Carries out a transaction as etcd does. It panics on one that etcd refuses.
    pub fn commit(&mut self, transaction: &Transaction) -> Outcome {
        check(transaction);
        if !transaction.comparisons.iter().all(|comparison| self.holds(comparison)) {
            return Outcome::Conflict;
        }
        self.revision += 1;
        for write in &transaction.writes {
            match write {
                Write::Put(key, value) | Write::PutWithLease(key, value) => {
                    self.write(&key.to_string(), Some(value.clone()));
                }
                Write::Delete(key) => self.write(&key.to_string(), None),
            }
        }
        Outcome::Applied(self.revision)
    }
}

/// What etcd demands of each transaction.
pub fn check(transaction: &Transaction) {
    assert!(transaction.comparisons.len() <= MOST_OPERATIONS, "{}", transaction.comparisons.len());
    assert!((1..=MOST_OPERATIONS).contains(&transaction.writes.len()));
    let keys: Vec<&Key> = transaction.writes.iter().map(key_of).collect();
    let once: BTreeSet<&&Key> = keys.iter().collect();
    assert_eq!(keys.len(), once.len(), "each key is written once");
}

pub fn key_of(write: &Write) -> &Key {
    match write {
        Write::Put(key, _) | Write::PutWithLease(key, _) | Write::Delete(key) => key,
    }
}
