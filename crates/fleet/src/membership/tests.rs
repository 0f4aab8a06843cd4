//! Tests of the membership: who joins, waits, or is refused, with records as a store keeps them.

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
        Standing::Refused(why) => {
            assert!(!why.contains("  "), "{why}");
            why
        }
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
fn a_host_that_was_joining_a_fleet_that_is_gone_joins_the_next_one() {
    let mut store = Store::default();
    store.put("meta", &meta(FORMAT, "f"));
    let mut host = HostMembership::new(own("one", "h"), None);
    let lease = Some(KnownLease { id: 7, until: Moment(100_000) });
    store.apply(host.step(&store.view(), lease, Moment(0)).1.unwrap());
    let (standing, alive) = host.step(&store.view(), lease, Moment(0));
    assert!(standing == Standing::Joining && alive.is_some(), "it is recorded");
    store.0.remove("meta");
    store.0.remove("hosts/a");
    assert_eq!(host.step(&store.view(), lease, Moment(0)).0, Standing::NoFleet);
    store.put("meta", &meta(FORMAT, "g"));
    assert!(matches!(store.settle(&mut host), Standing::Member { .. }));
    assert_eq!(host.fleet_id(), Some("g"));
}

#[test]
fn another_boot_is_waited_for_and_one_that_stays_is_another_host() {
    let mut store = Store::default();
    store.put("meta", &meta(FORMAT, "f"));
    let mut first = HostMembership::new(own("one", "h"), None);
    let Standing::Member { epoch } = store.settle(&mut first) else { panic!() };
    let mut rebooted = own("two", "h");
    rebooted.alive.boot_id = "c".into();
    // One that was cloned has another zone, too, and may not write even that.
    rebooted.zone = "y".parse().unwrap();
    let mut membership = HostMembership::new(rebooted, Some("f".into()));
    let lease = Some(KnownLease { id: 8, until: Moment(100_000) });
    let mut step = |store: &Store, at| membership.step(&store.view(), lease, Moment(at));
    assert_eq!(step(&store, 1_000), (Standing::Joining, None), "the earlier lease may still end");
    let (standing, change) = step(&store, 1_000 + OTHER_BOOT_MS);
    assert!(refusal(&standing).contains("(boot and file b; those of this host are c)"), "{standing:?}");
    assert_eq!(change, None);
    assert_eq!(store.settle(&mut first), Standing::Member { epoch }, "it goes on");
    store.0.remove("alive/a");
    for _ in 0..2 {
        let change = step(&store, 30_000).1.unwrap();
        store.apply(change);
    }
    let Standing::Member { epoch: later } = step(&store, 30_000).0 else { panic!() };
    assert!(later > epoch, "another boot is another epoch");
    assert_eq!(step(&store, 50_000).0, Standing::Member { epoch: later });
}

#[test]
fn a_host_that_is_removed_meanwhile_does_not_announce_itself() {
    let mut store = Store::default();
    store.put("meta", &meta(FORMAT, "f"));
    let mut membership = HostMembership::new(own("one", "h"), None);
    let lease = Some(KnownLease { id: 7, until: Moment(10) });
    let change = membership.step(&store.view(), lease, Moment(0)).1.unwrap();
    store.apply(change);
    let change = membership.step(&store.view(), lease, Moment(0)).1.unwrap();
    let recorded = store.0["hosts/a"].modified;
    let is_compared = Comparison::Modified(Key::Host("a".parse().unwrap()), recorded);
    assert!(change.comparisons.contains(&is_compared), "{change:?}");
}

#[test]
fn others_are_told_how_to_reach_a_host_that_is_silent() {
    let mut store = Store::default();
    store.put("meta", &meta(FORMAT, "f"));
    store.settle(&mut HostMembership::new(own("one", "h"), None));
    let mut moved = own("two", "h");
    moved.alive.address = "192.0.2.9:9445".into();
    store.settle(&mut HostMembership::new(moved, Some("f".into())));
    store.0.remove("alive/a");
    let door = store.view().hosts[&"a".parse::<Name>().unwrap()].value.door.clone().unwrap();
    assert_eq!((door.address.as_str(), door.certificate.as_str()), ("192.0.2.9:9445", "00"));
}

#[test]
fn a_host_that_is_held_writes_nothing() {
    let mut store = Store::default();
    store.put("meta", &meta(FORMAT, "f"));
    let mut membership = HostMembership::new(own("one", "h"), None);
    store.settle(&mut membership);
    membership.hold("older records".into());
    let lease = Some(KnownLease { id: 9, until: Moment(10) });
    let held = Standing::Refused("older records".into());
    assert_eq!(membership.step(&store.view(), lease, Moment(0)), (held, None));
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
        assert!(of(&mut store, own("one", "h"), None).contains(&format!("the record {key} cannot be read")));
    }
}
