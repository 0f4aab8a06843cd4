//! The lease of a host: valid no longer than etcd has it, kept while a member dies, and replaced when it has ended.

use crate::scene::{PREFIX, Scene, apply_at_last, until, with_both, writing};
use spillway_fleet::Moment;
use spillway_fleet::keys::Key;
use spillway_fleet::transaction::{Outcome, Write};
use spillway_host::fleet::etcd::{FleetStore, FleetStoreError, LeaseState, now};
use spillway_testkit::etcd::{EtcdCluster, EtcdProgram, ProxyMode};
use std::time::Duration;

with_both!(a_lease_outlives_a_member a_lease_ends_with_the_way_to_etcd a_lease_that_was_ended_is_replaced);

const SOON: Duration = Duration::from_secs(10);

/// The lease, once there is one.
async fn lease_of(store: &FleetStore) -> LeaseState {
    let mut lease = store.lease();
    let lease = tokio::time::timeout(SOON, lease.wait_for(Option::is_some)).await;
    lease.unwrap().unwrap().unwrap()
}

/// Until when etcd has a lease at least and at most, as it says. None: it does not have it.
fn end_at_etcd(cluster: &EtcdCluster, id: i64) -> Option<(Moment, Moment)> {
    let asked = now();
    let text = cluster.ctl(&["lease", "timetolive", &format!("{id:x}"), "-w", "json"]).unwrap();
    let answered = now();
    let answer: serde_json::Value = serde_json::from_str(&text).unwrap();
    let left = u64::try_from(answer["ttl"].as_i64().unwrap()).ok().filter(|left| *left > 0)?;
    // It says whole seconds, rounded down.
    Some((asked.after_ms(left * 1000), answered.after_ms(left * 1000 + 1000)))
}

async fn a_lease_outlives_a_member(program: EtcdProgram) {
    let Some(mut scene) = Scene::new(3, program) else { return };
    let store = FleetStore::open(scene.settings());
    let first = lease_of(&store).await;
    apply_at_last(&store, vec![Write::PutWithLease(Key::Placer, "{}".into())]).await;
    let begun = now();
    let (mut killed, mut renewals, mut last) = (false, 0, first);
    while now().since_ms(begun) < 21_000 {
        if !killed && now().since_ms(begun) > 3_000 {
            let member = scene.member_of(&store).await;
            scene.cluster.kill(member);
            killed = true;
        }
        let lease = store.lease().borrow().unwrap();
        assert_eq!(lease.id, first.id, "it is the same lease");
        assert!(lease.is_valid(now()), "it was renewed in time: {lease:?} at {:?}", now());
        if lease != last {
            // etcd has renewed it after the moment from which it counts here: and so it has it for longer.
            let (least, _) = end_at_etcd(&scene.cluster, lease.id).unwrap();
            assert!(lease.valid_until < least, "{lease:?}, and etcd has it until {least:?}");
            (renewals, last) = (renewals + 1, lease);
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    assert!(renewals >= 3, "{renewals}");
    assert!(scene.cluster.records(PREFIX).unwrap().1.contains_key("leader/placer"));
}

async fn a_lease_ends_with_the_way_to_etcd(program: EtcdProgram) {
    let Some(scene) = Scene::new(3, program) else { return };
    let store = FleetStore::open(scene.settings());
    let first = lease_of(&store).await;
    apply_at_last(&store, vec![Write::PutWithLease(Key::Placer, "{}".into())]).await;
    scene.proxies.iter().for_each(|proxy| proxy.set_mode(ProxyMode::Swallows));
    let begun = now();
    let is_there = || scene.cluster.records(PREFIX).unwrap().1.contains_key("leader/placer");
    let mut last_valid = Moment(0);
    while is_there() {
        let lease = store.lease().borrow().unwrap();
        assert_eq!(lease.id, first.id);
        if lease.is_valid(now()) {
            last_valid = now();
        }
        assert!(now().since_ms(begun) < 40_000, "etcd has ended the lease");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    let ended = now();
    let lease = store.lease().borrow().unwrap();
    assert!(!lease.is_valid(ended), "etcd has ended it: {lease:?} at {ended:?}");
    assert!(last_valid > begun, "it was valid for some time after the last answer");
    assert!(ended.since_ms(last_valid) >= 1_000, "it ends here before it does there");
    println!(
        "{program:?}: a lease ended here {} ms before it ended at etcd",
        ended.since_ms(lease.valid_until)
    );
    scene.proxies.iter().for_each(|proxy| proxy.set_mode(ProxyMode::Passes));
    let mut leases = store.lease();
    let other =
        leases.wait_for(|lease| lease.is_some_and(|lease| lease.id != first.id && lease.is_valid(now())));
    let other = tokio::time::timeout(SOON, other).await.unwrap().unwrap().unwrap();
    apply_at_last(&store, vec![Write::PutWithLease(Key::Placer, "{}".into())]).await;
    assert!(end_at_etcd(&scene.cluster, other.id).is_some() && is_there());
}

async fn a_lease_that_was_ended_is_replaced(program: EtcdProgram) {
    let Some(scene) = Scene::new(1, program) else { return };
    let store = FleetStore::open(scene.settings());
    let first = lease_of(&store).await;
    let with_lease = writing(vec![Write::PutWithLease(Key::Placer, "{}".into())]);
    assert!(matches!(store.commit(&with_lease).await, Ok(Outcome::Applied(_))));
    scene.cluster.ctl(&["lease", "revoke", &format!("{:x}", first.id)]).unwrap();
    let error = store.commit(&with_lease).await.unwrap_err();
    assert!(matches!(error, FleetStoreError::LeaseEnded(_)), "{error}");
    let is_replaced = || store.lease().borrow().is_some_and(|lease| lease.id != first.id);
    until("another lease", SOON, is_replaced).await;
    assert!(matches!(store.commit(&with_lease).await, Ok(Outcome::Applied(_))));
}
