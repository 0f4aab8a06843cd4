//! Members that are killed, stopped, cut off or unreachable are left; nothing hangs without a leader; a full database and etcd that is
//! away are said.

use crate::scene::{
    PREFIX, Scene, Told, apply, apply_at_last, cluster, put, refusal, settings, until, version, with_both,
    writing,
};
use spillway_host::fleet::etcd::{EtcdAlarm, EtcdReach, FleetStore, FleetStoreError, MemberFailure, now};
use spillway_testkit::etcd::{EtcdOptions, EtcdProgram, ProxyMode};
use std::net::TcpListener;
use std::time::{Duration, Instant};

with_both!(a_member_that_fails_is_left nothing_hangs_without_a_leader etcd_may_come_later a_full_database_is_said);

/// Within what a member is left: two seconds, and a connection to the next one.
const LEFT: Duration = Duration::from_millis(3_500);
const SOON: Duration = Duration::from_secs(10);

async fn a_member_that_fails_is_left(program: EtcdProgram) {
    let Some(mut scene) = Scene::new(3, program) else { return };
    for way in ["killed", "stopped", "cut", "stalled", "swallowed"] {
        let store = FleetStore::open(scene.settings());
        let told = Told::by(store.follow());
        until("the first list", SOON, || told.lock().unwrap().wholes == 1).await;
        let member = scene.member_of(&store).await;
        // An election would count, too.
        if scene.cluster.leader().unwrap() == member {
            let id = scene.cluster.member_id((member + 1) % 3).unwrap();
            scene.cluster.ctl_at(member, &["move-leader", &format!("{id:x}")]).unwrap();
        }
        match way {
            "killed" => scene.cluster.kill(member),
            "stopped" => scene.cluster.freeze(member).unwrap(),
            "cut" => scene.proxies[member].cut(),
            "stalled" => scene.proxies[member].set_mode(ProxyMode::Stalls),
            _ => scene.proxies[member].set_mode(ProxyMode::Swallows),
        }
        let begun = Instant::now();
        let health = store.health();
        let other = scene.proxies[member].address().to_string();
        let is_left =
            || matches!(&health.borrow().reach, EtcdReach::Reached { member, .. } if *member != other);
        let left = until(&format!("the {way} member is left"), LEFT, is_left).await;
        until("a list from the next one", SOON, || told.lock().unwrap().wholes == 2).await;
        println!(
            "{program:?}: a {way} member is left within {left:?}, and all records came after {:?}",
            begun.elapsed()
        );
        let revision = apply_at_last(&store, vec![put("a", way)]).await;
        until("an update from the next one", SOON, || told.lock().unwrap().revision >= revision).await;
        match way {
            "killed" => {
                scene.cluster.restart(member).unwrap();
                scene.cluster.wait_ready(member).unwrap();
            }
            "stopped" => scene.cluster.thaw(member).unwrap(),
            _ => scene.proxies[member].set_mode(ProxyMode::Passes),
        }
    }
}

async fn nothing_hangs_without_a_leader(program: EtcdProgram) {
    let Some(mut scene) = Scene::new(3, program) else { return };
    let store = FleetStore::open(scene.settings());
    let told = Told::by(store.follow());
    apply(&store, vec![put("a", "before")]).await;
    until("the first list", SOON, || told.lock().unwrap().wholes > 0).await;
    // The leader and another one stand still; the third has no majority.
    let leader = scene.cluster.leader().unwrap();
    let other = (leader + 1) % 3;
    let begun = now();
    scene.cluster.freeze(leader).unwrap();
    scene.cluster.freeze(other).unwrap();
    let mut errors = Vec::new();
    while now().since_ms(begun) < 12_000 {
        let asked = Instant::now();
        let error = store.commit(&writing(vec![put("a", "during")])).await.unwrap_err();
        assert!(asked.elapsed() < Duration::from_secs(6), "{:?}: {error}", asked.elapsed());
        errors.push(error);
    }
    let is_known = |error: &FleetStoreError| {
        let FleetStoreError::NoMember(members) = error else { return false };
        members.len() == 3
            && members.iter().any(|(_, why)| *why == MemberFailure::NoLeader)
            && members.iter().filter(|(_, why)| matches!(why, MemberFailure::Silent(_))).count() == 2
    };
    assert!(errors.iter().any(is_known), "{errors:?}");
    let health = store.health().borrow().clone();
    assert!(matches!(health.reach, EtcdReach::Away { .. }), "{health:?}");
    assert!(health.trouble.is_some_and(|at| at > begun), "{health:?}");
    assert!(health.follow_failure.is_some(), "{health:?}");
    scene.cluster.thaw(leader).unwrap();
    scene.cluster.thaw(other).unwrap();
    let revision = apply_at_last(&store, vec![put("a", "after")]).await;
    until("the update", SOON, || told.lock().unwrap().revision >= revision).await;
    assert_eq!(store.health().borrow().follow_failure, None);
}

async fn etcd_may_come_later(program: EtcdProgram) {
    let Some(mut scene) = Scene::new(1, program) else { return };
    scene.cluster.kill(0);
    let opened = Instant::now();
    let store = FleetStore::open(scene.settings());
    assert!(opened.elapsed() < Duration::from_millis(100));
    let told = Told::by(store.follow());
    let error = refusal(&store).await;
    let address = scene.proxies[0].address().to_string();
    assert!(!error.is_permanent() && error.to_string().contains(&address), "{error}");
    // One that refuses connections, and one that accepts them alone.
    let refuses = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let silent = TcpListener::bind("127.0.0.1:0").unwrap();
    let others = FleetStore::open(settings(&format!("{refuses},{}", silent.local_addr().unwrap())));
    let error = refusal(&others).await;
    let FleetStoreError::NoMember(members) = &error else { panic!("{error}") };
    let why: Vec<&MemberFailure> = members.iter().map(|(_, why)| why).collect();
    assert!(matches!(why[..], [MemberFailure::Unreachable(_), MemberFailure::Silent(_)]), "{error}");
    assert!(error.to_string().contains("refused"), "{error}");
    scene.cluster.restart(0).unwrap();
    scene.cluster.wait_ready(0).unwrap();
    until("the list", SOON, || told.lock().unwrap().wholes > 0).await;
    let found = version(&store).await;
    let expected = if program == EtcdProgram::Debian34 { "3.4." } else { "3.6." };
    assert!(found.starts_with(expected), "{found}");
    apply_at_last(&store, vec![put("a", "later")]).await;
}

async fn a_full_database_is_said(program: EtcdProgram) {
    const QUOTA: u64 = 2 << 20;
    let more = vec![format!("--quota-backend-bytes={QUOTA}")];
    let Some(cluster) = cluster(1, program, &EtcdOptions { more, ..EtcdOptions::default() }) else { return };
    let store = FleetStore::open(settings(&cluster.addresses()));
    let value = "x".repeat(100_000);
    // etcd knows the size of its files a little later.
    let begun = Instant::now();
    let error = loop {
        match store.commit(&writing(vec![put("a", &value)])).await {
            Ok(_) => assert!(begun.elapsed() < SOON, "the database fills"),
            Err(error) => break error,
        }
    };
    assert!(matches!(error, FleetStoreError::QuotaExceeded(_)), "{error}");
    assert!(error.to_string().contains("etcdctl alarm disarm"), "{error}");
    let mut health = store.health();
    let is_full = health
        .wait_for(|health| health.last.as_ref().is_some_and(|last| last.alarms == [EtcdAlarm::NoSpace]));
    let health = tokio::time::timeout(SOON, is_full).await.unwrap().unwrap().clone();
    let last = health.last.unwrap();
    let quota = (program == EtcdProgram::Go36).then_some(QUOTA);
    assert!(last.database_bytes > QUOTA / 2 && last.quota_bytes == quota, "{last:?}");
    assert!(matches!(health.reach, EtcdReach::Reached { .. }));
    // What the error says helps.
    cluster.compact().unwrap();
    cluster.defragment(0).unwrap();
    cluster.ctl(&["alarm", "disarm"]).unwrap();
    apply_at_last(&store, vec![put("a", "small")]).await;
    assert_eq!(cluster.records(PREFIX).unwrap().1["status/a"].value, "small");
}
