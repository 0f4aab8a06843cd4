//! How a host takes part in a fleet: what it writes about itself, and when it may not.
//!
//! Owns the rules for its records `hosts/HOST` and `alive/HOST`. Invariant: a host never takes a name that another one has, and a daemon
//! whose name another daemon has taken steps aside until it is started again.

use crate::Moment;
use crate::keys::Key;
use crate::records::{AliveRecord, FORMAT, HostRecord, MetaRecord};
use crate::transaction::{Comparison, Revision, Transaction, Write};
use crate::view::{FleetView, Versioned};
use serde::Serialize;
use spillway_api::Name;
use std::collections::BTreeMap;

/// What a host says about itself.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OwnHost {
    /// Name of the host.
    pub name: Name,
    /// Identity of the host, which it keeps.
    pub host_id: String,
    /// Zone of the host.
    pub zone: Name,
    /// Labels of the host.
    pub labels: BTreeMap<Name, String>,
    /// What it writes while it has a lease.
    pub alive: AliveRecord,
}

/// The lease of a host, as far as it knows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KnownLease {
    /// Its identity in etcd.
    pub id: i64,
    /// Moment until which the lease certainly lasts.
    pub until: Moment,
}

/// State of the membership.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Standing {
    /// The records were not read yet.
    Connecting,
    /// There is no fleet of this name.
    NoFleet,
    /// The host has no lease, or has not written its records yet.
    Joining,
    /// It is a member, with this epoch.
    Member {
        /// Revision that created its record `alive/HOST`.
        epoch: Revision,
    },
    /// It had a lease, and cannot renew it.
    Isolated,
    /// It may not take part, for this reason.
    Refused(String),
}

/// The membership of a host in a fleet.
#[derive(Debug)]
pub struct HostMembership {
    own: OwnHost,
    /// Identity of the fleet that the host has joined; none before.
    fleet_id: Option<String>,
    /// Whether this process has written its record `alive/HOST`, and seen that.
    was_alive: bool,
    /// Whether the record `hosts/HOST` was there since this process began.
    was_recorded: bool,
}

impl HostMembership {
    /// Creates the membership of a host that has joined the fleet with this identity, or none.
    pub fn new(own: OwnHost, fleet_id: Option<String>) -> HostMembership {
        HostMembership { own, fleet_id, was_alive: false, was_recorded: false }
    }

    /// What the host says about itself.
    pub fn own(&self) -> &OwnHost {
        &self.own
    }

    /// Identity of the fleet that the host has joined.
    pub fn fleet_id(&self) -> Option<&str> {
        self.fleet_id.as_deref()
    }

    /// Returns the standing of the host, and what it has to write for that.
    pub fn step(
        &mut self,
        view: &FleetView,
        lease: Option<KnownLease>,
        now: Moment,
    ) -> (Standing, Option<Transaction>) {
        let refused = |why: String| (Standing::Refused(why), None);
        if view.revision == 0 {
            return (Standing::Connecting, None);
        }
        let Some(meta) = &view.meta else {
            return match (view.unreadable.get(&Key::Meta.to_string()), &self.fleet_id) {
                (Some(why), _) => {
                    refused(format!("the record of the fleet cannot be read ({why}): a later version may have written it"))
                }
                (None, Some(_)) => refused(
                    "the records of the fleet are gone from etcd: restore a backup of etcd; the machines stay as they are".into(),
                ),
                (None, None) => (Standing::NoFleet, None),
            };
        };
        if let Err(why) = self.check_fleet(&meta.value) {
            return refused(why);
        }
        self.fleet_id = Some(meta.value.fleet_id.clone());
        let missing = if self.was_alive { Standing::Isolated } else { Standing::Joining };
        let Some(lease) = lease.filter(|lease| now < lease.until) else { return (missing, None) };
        match self.record(view) {
            Err(why) => return refused(why),
            Ok(Some(change)) => return (missing, Some(change)),
            Ok(None) => {}
        }
        let alive = Key::Alive(self.own.name.clone());
        let record = AliveRecord { lease: lease.id, ..self.own.alive.clone() };
        let put = || vec![Write::PutWithLease(alive.clone(), json(&record))];
        match view.alive.get(&self.own.name) {
            None if view.unreadable.contains_key(&alive.to_string()) => {
                refused(format!("the record {alive} cannot be read: a later version may have written it"))
            }
            None => {
                let comparisons = vec![Comparison::Created(alive.clone(), 0)];
                (missing, Some(Transaction { comparisons, writes: put() }))
            }
            Some(Versioned { value, created, modified }) if value.instance == record.instance => {
                self.was_alive = true;
                if value.lease == lease.id {
                    return (Standing::Member { epoch: *created }, None);
                }
                // It goes when an earlier lease ends, whatever becomes of this one.
                let comparisons = vec![Comparison::Modified(alive.clone(), *modified)];
                (missing, Some(Transaction { comparisons, writes: put() }))
            }
            Some(Versioned { value, .. }) if self.was_alive => refused(format!(
                "another daemon has taken the name {} of this host (at {}, version {}): one of them must go. Start this one again to take the name back",
                self.own.name, value.address, value.version
            )),
            // The daemon was started again. The key keeps its epoch, and gets the lease of this process.
            Some(Versioned { modified, .. }) => {
                let comparisons = vec![Comparison::Modified(alive.clone(), *modified)];
                (missing, Some(Transaction { comparisons, writes: put() }))
            }
        }
    }

    fn check_fleet(&self, meta: &MetaRecord) -> Result<(), String> {
        if meta.format != FORMAT {
            return Err(format!(
                "the records of the fleet have format {}, and this spillwayd knows {FORMAT}: use the same version on all hosts",
                meta.format
            ));
        }
        match &self.fleet_id {
            Some(joined) if *joined != meta.fleet_id => Err(format!(
                "this host is in the fleet with the identity {joined}, and etcd has another one of the same name ({}): give the right \
                 --fleet, or end the earlier membership with 'spillwayd leave-fleet'",
                meta.fleet_id
            )),
            _ => Ok(()),
        }
    }

    /// Returns the change of the record `hosts/HOST` that is missing.
    fn record(&mut self, view: &FleetView) -> Result<Option<Transaction>, String> {
        let OwnHost { name, host_id, zone, labels, .. } = &self.own;
        let key = Key::Host(name.clone());
        let found = view.hosts.get(name);
        if found.is_none() && view.unreadable.contains_key(&key.to_string()) {
            return Err(format!("the record {key} cannot be read: a later version may have written it"));
        }
        let put = |record: &HostRecord, modified| Transaction {
            comparisons: vec![Comparison::Modified(key.clone(), modified)],
            writes: vec![Write::Put(key.clone(), json(record))],
        };
        let Some(Versioned { value, modified, .. }) = found else {
            if self.was_recorded {
                return Err(format!(
                    "the host {name} was removed from the fleet. To join again, start spillwayd again"
                ));
            }
            let record = HostRecord {
                host_id: host_id.clone(),
                zone: zone.clone(),
                labels: labels.clone(),
                is_cordoned: false,
                is_draining: false,
                dead_epoch: None,
            };
            return Ok(Some(put(&record, 0)));
        };
        if value.host_id != *host_id {
            return Err(format!(
                "the fleet has another host with the name {name}: give this one another ('--host-name'), or remove the other \
                 ('spillway fleet host remove {name}')"
            ));
        }
        self.was_recorded = true;
        if value.zone == *zone && value.labels == *labels {
            return Ok(None);
        }
        let record = HostRecord { zone: zone.clone(), labels: labels.clone(), ..value.clone() };
        Ok(Some(put(&record, *modified)))
    }
}

fn json(record: &impl Serialize) -> Vec<u8> {
    serde_json::to_vec(record).expect("a record is plain data")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::view::{Entry, Update};
    use serde_json::{Value, json};
    use spillway_api::Hypervisor;

    fn own(instance: &str, host_id: &str) -> OwnHost {
        let alive = AliveRecord {
            instance: instance.into(),
            boot_id: "b".into(),
            address: "192.0.2.1:9445".into(),
            certificate: "00".into(),
            version: "0.1.0".into(),
            hypervisor: Hypervisor::Qemu,
            peers: None,
            lease: 0,
        };
        let name = |text: &str| text.parse().unwrap();
        OwnHost { name: name("a"), host_id: host_id.into(), zone: name("z"), labels: BTreeMap::new(), alive }
    }

    /// Records as a store keeps them.
    #[derive(Default)]
    struct Store(BTreeMap<String, Entry>, Revision);

    impl Store {
        fn put(&mut self, key: &str, value: &Value) {
            self.1 += 1;
            let created = self.0.get(key).map_or(self.1, |entry| entry.created);
            let entry = Entry { value: value.to_string().into_bytes(), created, modified: self.1 };
            self.0.insert(key.into(), entry);
        }

        fn apply(&mut self, transaction: Transaction) {
            for comparison in &transaction.comparisons {
                let holds = match comparison {
                    Comparison::Created(key, at) => {
                        self.0.get(&key.to_string()).map_or(0, |entry| entry.created) == *at
                    }
                    Comparison::Modified(key, at) => {
                        self.0.get(&key.to_string()).map_or(0, |entry| entry.modified) == *at
                    }
                };
                assert!(holds, "{comparison:?}");
            }
            for write in transaction.writes {
                match write {
                    Write::Put(key, value) | Write::PutWithLease(key, value) => {
                        self.put(&key.to_string(), &serde_json::from_slice(&value).unwrap());
                    }
                    Write::Delete(key) => drop(self.0.remove(&key.to_string())),
                }
            }
        }

        fn view(&self) -> FleetView {
            let mut view = FleetView::default();
            let entries = self.0.iter().map(|(key, entry)| (key.clone(), entry.clone()));
            view.apply(Update::Whole(self.1.max(1), entries.collect()));
            view
        }

        /// Steps the membership until it has nothing more to write.
        fn settle(&mut self, membership: &mut HostMembership) -> Standing {
            loop {
                let lease = Some(KnownLease { id: 7, until: Moment(10) });
                match membership.step(&self.view(), lease, Moment(0)) {
                    (_, Some(transaction)) => self.apply(transaction),
                    (standing, None) => return standing,
                }
            }
        }
    }

    fn meta(format: u32, fleet_id: &str) -> Value {
        json!({ "format": format, "fleet_id": fleet_id, "created": "2026-01-01T00:00:00Z", "placer": true })
    }

    fn refusal(standing: &Standing) -> &str {
        match standing {
            Standing::Refused(why) => why,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn a_host_joins_and_a_restart_of_its_daemon_keeps_its_epoch() {
        let mut store = Store::default();
        let mut first = HostMembership::new(own("one", "h"), None);
        assert_eq!(first.step(&FleetView::default(), None, Moment(0)).0, Standing::Connecting);
        assert_eq!(store.settle(&mut first), Standing::NoFleet);
        store.put("meta", &meta(FORMAT, "f"));
        assert_eq!(first.step(&store.view(), None, Moment(0)), (Standing::Joining, None));
        let Standing::Member { epoch } = store.settle(&mut first) else { panic!() };
        assert_eq!(first.fleet_id(), Some("f"));
        let mut again = HostMembership::new(own("two", "h"), Some("f".into()));
        assert_eq!(store.settle(&mut again), Standing::Member { epoch }, "the epoch stays");
        let standing = store.settle(&mut first);
        assert!(refusal(&standing).contains("another daemon has taken the name a"), "{standing:?}");
        // The lease has ended.
        let ended = KnownLease { id: 7, until: Moment(10) };
        assert_eq!(again.step(&store.view(), Some(ended), Moment(10)), (Standing::Isolated, None));
        store.0.remove("alive/a");
        let Standing::Member { epoch: later } = store.settle(&mut again) else { panic!() };
        assert!(later > epoch, "another lease is another epoch");
        // A lease of which the store says that it has ended, although the record is still there.
        let other = KnownLease { id: 8, until: Moment(10) };
        let (standing, change) = again.step(&store.view(), Some(other), Moment(0));
        assert_eq!(standing, Standing::Isolated, "the record goes with the earlier lease");
        store.apply(change.unwrap());
        let standing = again.step(&store.view(), Some(other), Moment(0)).0;
        assert_eq!(standing, Standing::Member { epoch: later });
    }

    #[test]
    fn what_people_want_of_a_host_outlives_its_restart() {
        let mut store = Store::default();
        store.put("meta", &meta(FORMAT, "f"));
        store.settle(&mut HostMembership::new(own("one", "h"), None));
        let mut record: HostRecord = serde_json::from_slice(&store.0["hosts/a"].value).unwrap();
        record.is_cordoned = true;
        store.put("hosts/a", &serde_json::to_value(record).unwrap());
        let zone = "y".parse().unwrap();
        let mut moved = HostMembership::new(OwnHost { zone, ..own("two", "h") }, Some("f".into()));
        assert!(matches!(store.settle(&mut moved), Standing::Member { .. }));
        let record = &store.view().hosts[&"a".parse::<Name>().unwrap()].value;
        assert!(record.is_cordoned && record.zone.as_str() == "y", "{record:?}");
    }

    #[test]
    fn who_may_not_take_part_is_told_why() {
        let of = |store: &mut Store, own: OwnHost, fleet_id: Option<&str>| {
            let standing = store.settle(&mut HostMembership::new(own, fleet_id.map(str::to_owned)));
            refusal(&standing).to_owned()
        };
        let mut store = Store::default();
        assert!(of(&mut store, own("one", "h"), Some("f")).contains("are gone from etcd"));
        store.put("meta", &meta(FORMAT + 1, "f"));
        assert!(of(&mut store, own("one", "h"), None).contains("use the same version on all hosts"));
        store.put("meta", &json!({ "format": "new" }));
        assert!(of(&mut store, own("one", "h"), None).contains("cannot be read"));
        store.put("meta", &meta(FORMAT, "f"));
        assert!(of(&mut store, own("one", "h"), Some("g")).contains("has another one of the same name"));
        let mut first = HostMembership::new(own("one", "h"), None);
        store.settle(&mut first);
        assert!(of(&mut store, own("two", "other"), None).contains("another host with the name a"));
        store.0.remove("hosts/a");
        assert!(refusal(&store.settle(&mut first)).contains("was removed from the fleet"));
        for key in ["hosts/a", "alive/a"] {
            let mut store = Store::default();
            store.put("meta", &meta(FORMAT, "f"));
            store.put(key, &json!([]));
            assert!(
                of(&mut store, own("one", "h"), None).contains(&format!("the record {key} cannot be read"))
            );
        }
    }
}
