//! Catalogs and the records of machines, through the daemon's socket.
#![allow(clippy::unwrap_used)]

mod common;

use common::{World, create, import, machines, new, refused};
use rustix::process::Signal;
use spillway_api::client::Client;
use spillway_api::{Catalog, CatalogSpec, Empty, ErrorCode, List, Machine, StoreClass, StoreFolder};
use spillway_testkit::process::wait_closely;
use std::collections::HashSet;
use std::time::Duration;

#[test]
fn a_thousand_machines_are_recorded_and_listed() {
    let mut world = World::new();
    import(&world, "debian", 1);
    let client = world.client();
    let spec = r#"{"image": "debian", "count": 1000, "naming": "desk-####"}"#;
    client.post::<_, Catalog>("/v1/catalogs", &new("desk", spec)).unwrap();
    let all = machines(&client, "desk");
    assert_eq!((all[0].name.as_str(), all[999].name.as_str()), ("desk-0001", "desk-1000"));
    let uuids: HashSet<_> = all.iter().map(|m| &m.identity.uuid).collect();
    let macs: HashSet<_> = all.iter().map(|m| &m.identity.mac).collect();
    assert_eq!((uuids.len(), macs.len()), (1000, 1000));
    // Identities outlive the daemon.
    world.end(Signal::KILL);
    world.start();
    assert_eq!(machines(&world.client(), "desk"), all);
}

#[test]
fn machines_follow_the_count() {
    let world = World::new();
    import(&world, "debian", 1);
    let client = world.client();
    let change = |spec: &str| {
        let spec = serde_json::from_str::<CatalogSpec>(spec).unwrap();
        client.put::<_, Catalog>("/v1/catalogs/desk", &spec)
    };
    client.post::<_, Catalog>("/v1/catalogs", &new("desk", r#"{"image": "debian", "count": 5}"#)).unwrap();
    let five = machines(&client, "desk");
    change(r#"{"image": "debian", "count": 3}"#).unwrap();
    assert_eq!(machines(&client, "desk"), five[..3]);
    change(r#"{"image": "debian", "count": 4}"#).unwrap();
    let four = machines(&client, "desk");
    assert_eq!(four[..3], five[..3]);
    assert_ne!(four[3].identity, five[3].identity, "another machine of that name");
    let error = refused(change(r#"{"image": "debian", "count": 4, "naming": "other-##"}"#));
    assert!(error.detail.contains("naming cannot be changed"), "{error:?}");
    // Names are the host's.
    let clash = new("other", r#"{"image": "debian", "count": 2, "naming": "desk-00#"}"#);
    let error = refused(client.post::<_, Catalog>("/v1/catalogs", &clash));
    assert_eq!(error.code, ErrorCode::Exists, "{error:?}");
    assert_eq!(refused(client.get::<Catalog>("/v1/catalogs/other")).code, ErrorCode::NotFound);
    client.delete::<Empty>("/v1/catalogs/desk").unwrap();
    assert_eq!(client.get::<List<Machine>>("/v1/machines").unwrap().items, []);
    assert_eq!(refused(client.get::<Machine>("/v1/machines/desk-001")).code, ErrorCode::NotFound);
}

#[test]
fn versions_of_a_catalogs_history_stay() {
    let world = World::new();
    import(&world, "debian", 3);
    let client = world.client();
    let created: Catalog =
        client.post("/v1/catalogs", &new("desk", r#"{"image": "debian:2", "count": 1}"#)).unwrap();
    assert_eq!(created.version, 2);
    let spec = serde_json::from_str::<CatalogSpec>(r#"{"image": "debian:3"}"#).unwrap();
    let changed: Catalog = client.put("/v1/catalogs/desk", &spec).unwrap();
    let history: Vec<u32> = changed.history.iter().map(|entry| entry.version).collect();
    assert_eq!((changed.version, history), (3, vec![2, 3]));
    for version in [2, 3] {
        let error = refused(client.delete::<Empty>(&format!("/v1/images/debian/versions/{version}")));
        assert!(error.code == ErrorCode::InUse && error.detail.contains("'desk'"), "{error:?}");
    }
    assert_eq!(refused(client.delete::<Empty>("/v1/images/debian")).code, ErrorCode::InUse);
    for (spec, code) in [
        (r#"{"image": "debain"}"#, ErrorCode::NotFound),
        (r#"{"image": "debian:9"}"#, ErrorCode::NotFound),
        (r#"{"image": "debian", "mode": "persistent"}"#, ErrorCode::Invalid),
        (r#"{"image": "debian", "overflow_store": "fast"}"#, ErrorCode::NotFound),
    ] {
        assert_eq!(refused(client.post::<_, Catalog>("/v1/catalogs", &new("x", spec))).code, code, "{spec}");
    }
    client.delete::<Empty>("/v1/catalogs/desk").unwrap();
    client.delete::<Empty>("/v1/images/debian/versions/3").unwrap();
}

#[test]
fn a_daemon_that_dies_while_it_records_goes_on() {
    const COUNT: usize = 3000;
    let mut world = World::new();
    import(&world, "debian", 1);
    let spec = r#"{"image": "debian", "count": 3000, "naming": "m-####"}"#;
    // As many rounds as it takes to meet it in the middle three times: it may be done before it is killed.
    let (mut middle, mut rounds) = (0, 0);
    while middle < 3 {
        rounds += 1;
        assert!(rounds <= 100, "it was in the middle {middle} times of 100");
        let (socket, client) = (world.socket(), world.client());
        let asked = std::thread::spawn(move || {
            let client = Client::new(&socket).unwrap();
            create(&client, "m", spec).is_ok()
        });
        let recorded = || client.list::<Machine>("/v1/machines").unwrap().items.len();
        let seen = wait_closely(Duration::from_secs(20), || Some(recorded()).filter(|seen| *seen > 0));
        world.end(Signal::KILL);
        let was_answered = asked.join().unwrap();
        middle += u32::from(seen.is_some_and(|seen| seen < COUNT) && !was_answered);
        world.start();
        let client = world.client();
        let all = client.list::<Machine>("/v1/machines").unwrap().items;
        assert_eq!(all.len(), COUNT, "{seen:?} were seen");
        client.delete::<Empty>("/v1/catalogs/m").unwrap();
        assert_eq!(client.get::<List<Machine>>("/v1/machines").unwrap().items, []);
    }
    println!("{rounds} rounds");
}

#[test]
fn a_change_that_was_decided_on_something_else_is_a_conflict() {
    let world = World::new();
    import(&world, "debian", 1);
    let client = world.client();
    let first = create(&client, "desk", r#"{"image": "debian", "count": 2}"#).unwrap();
    let spec = |count| CatalogSpec { count, ..first.spec.clone() };
    let path = "/v1/catalogs/desk";
    let second: Catalog = client.put_if(path, first.revision, &spec(3)).unwrap();
    assert!(second.revision > first.revision);
    assert_eq!(client.get::<Catalog>(path).unwrap(), second);
    assert_eq!(client.get::<List<Catalog>>("/v1/catalogs").unwrap().items, std::slice::from_ref(&second));
    let error = refused(client.put_if::<_, Catalog>(path, first.revision, &spec(4)));
    assert_eq!((error.code, error.status), (ErrorCode::PreconditionFailed, 412));
    let tags = format!("its ETag is \"{}\" now, not \"{}\"", second.revision, first.revision);
    assert!(error.detail.contains(&tags) && error.detail.contains("was changed meanwhile"), "{error:?}");
    assert_eq!(machines(&client, "desk").len(), 3);
    // What changes nothing is no change, and other objects' changes are not this one's.
    let same: Catalog = client.put_if(path, second.revision, &spec(3)).unwrap();
    create(&client, "other", r#"{"image": "debian", "count": 2}"#).unwrap();
    assert_eq!(same, second);
    client.put_if::<_, Catalog>(path, second.revision, &spec(5)).unwrap();
    // Who does not say what it was decided on takes what there is.
    client.put::<_, Catalog>(path, &spec(1)).unwrap();
    assert_eq!(machines(&client, "desk").len(), 1);
    assert_eq!(refused(client.get::<Catalog>("/v1/catalogs/dest")).code, ErrorCode::NotFound);
}

/// Of many that add one machine each, none is lost if each says what it was decided on, and none adds two.
#[test]
fn changes_at_once_are_not_lost() {
    let world = World::new();
    import(&world, "debian", 1);
    create(&world.client(), "desk", r#"{"image": "debian"}"#).unwrap();
    let (path, socket) = ("/v1/catalogs/desk", world.socket());
    let add = || {
        let client = Client::new(&socket).unwrap();
        for _ in 0..10 {
            loop {
                let found: Catalog = client.get(path).unwrap();
                let spec = CatalogSpec { count: found.spec.count + 1, ..found.spec };
                match client.put_if::<_, Catalog>(path, found.revision, &spec) {
                    Ok(_) => break,
                    changed => assert_eq!(refused(changed).code, ErrorCode::PreconditionFailed),
                }
            }
        }
    };
    std::thread::scope(|scope| (0..4).for_each(|_| _ = scope.spawn(add)));
    assert_eq!(machines(&world.client(), "desk").len(), 40);
}

#[test]
fn what_is_only_tried_changes_nothing() {
    let world = World::new();
    import(&world, "debian", 2);
    let client = world.client();
    let try_new = |spec: &str| client.post::<_, Catalog>("/v1/catalogs?dry_run=true", &new("desk", spec));
    let tried = try_new(r#"{"image": "debian:2", "count": 5}"#).unwrap();
    assert_eq!((tried.version, tried.spec.disk.ram_bytes), (2, None));
    let effective = tried.effective.expect("a dry run says what the defaults are");
    assert_eq!((effective.disk.ram_bytes, effective.count), (Some(256 << 20), 5));
    assert_eq!(refused(try_new(r#"{"image": "debian:3"}"#)).code, ErrorCode::NotFound);
    assert_eq!(client.get::<List<Catalog>>("/v1/catalogs").unwrap().items, []);
    let made = create(&client, "desk", r#"{"image": "debian:1", "count": 5}"#).unwrap();
    let other: CatalogSpec = serde_json::from_str(r#"{"image": "debian:2", "count": 2}"#).unwrap();
    let tried: Catalog = client.put("/v1/catalogs/desk?dry_run=true", &other).unwrap();
    assert_eq!((tried.version, tried.spec.count), (2, 2));
    assert_eq!(tried.effective.map(|spec| spec.naming), Some(Some("desk-###".into())));
    assert_eq!(client.get::<Catalog>("/v1/catalogs/desk").unwrap(), made);
    assert_eq!(machines(&client, "desk").len(), 5);
    assert_eq!(refused(try_new(r#"{"image": "debian"}"#)).code, ErrorCode::Exists);
}

#[test]
fn a_change_happens_whole_or_not_at_all() {
    let world = World::new();
    import(&world, "debian", 1);
    let client = world.client();
    create(&client, "other", r#"{"image": "debian", "count": 1, "naming": "desk-0#5"}"#).unwrap();
    let made = create(&client, "desk", r#"{"image": "debian", "count": 5}"#).unwrap();
    let more = CatalogSpec { count: 20, warm: 20, ..made.spec.clone() };
    let error = refused(client.put::<_, Catalog>("/v1/catalogs/desk", &more));
    assert!(error.code == ErrorCode::Exists && error.detail.contains("'desk-015'"), "{error:?}");
    assert_eq!(client.get::<Catalog>("/v1/catalogs/desk").unwrap(), made);
    assert_eq!(machines(&client, "desk").len(), 5);
}

#[test]
fn lists_are_chosen_by_label() {
    let world = World::new();
    import(&world, "debian", 1);
    let client = world.client();
    let label = |labels: &str| format!(r#"{{"image": "debian", "count": 2, "labels": {labels}}}"#);
    create(&client, "a", &label(r#"{"team": "x", "stage": "a=b&c d"}"#)).unwrap();
    create(&client, "b", &label(r#"{"team": "x"}"#)).unwrap();
    create(&client, "c", &label(r#"{"team": "y"}"#)).unwrap();
    for (question, catalogs, first, count) in [
        ("", vec!["a", "b", "c"], "a-001", 6),
        ("?label=team%3Dx", vec!["a", "b"], "a-001", 4),
        ("?label=team=x&label=stage=a=b%26c+d", vec!["a"], "a-001", 2),
        ("?label=team=y", vec!["c"], "c-001", 2),
        ("?label=team=x&label=stage=", vec![], "", 0),
    ] {
        let found: List<Catalog> = client.get(&format!("/v1/catalogs{question}")).unwrap();
        let names: Vec<&str> = found.items.iter().map(|catalog| catalog.name.as_str()).collect();
        assert_eq!(names, catalogs, "{question}");
        let found = client.get::<List<Machine>>(&format!("/v1/machines{question}")).unwrap().items;
        assert_eq!(
            (found.len(), found.first().map_or("", |m| m.name.as_str())),
            (count, first),
            "{question}"
        );
    }
    let of_b = client.get::<List<Machine>>("/v1/machines?catalog=b&label=team=x").unwrap().items;
    assert_eq!((of_b.len(), of_b[0].catalog.as_str()), (2, "b"));
    for (question, word) in [
        ("catalogs?label=team", "not KEY=VALUE"),
        ("catalogs?label=Team=x", "is no name"),
        ("catalogs?catalog=a", "'catalog' is not a known parameter: label"),
        ("machines?label=team=x&label=team=y", "cannot have two values"),
        ("machines?lable=team=x", "'lable' is not a known parameter: catalog, label"),
    ] {
        let error = refused(client.get::<List<Empty>>(&format!("/v1/{question}")));
        assert!(error.code == ErrorCode::Invalid && error.detail.contains(word), "{question}: {error:?}");
    }
}

#[test]
fn disks_go_to_stores_that_are_good_for_them() {
    let world = World::new();
    import(&world, "debian", 1);
    let client = world.client();
    let scratch = r#"{"image": "debian", "scratch_disk_bytes": 1048576}"#;
    let error = refused(create(&client, "a", scratch));
    assert!(error.detail.contains("a store of class temp"), "{error:?}");
    for (name, class) in [("fast", StoreClass::Temp), ("copies", StoreClass::Cache)] {
        let folder = StoreFolder { name: name.parse().unwrap(), path: world.path(name), class };
        client.post::<_, StoreFolder>("/v1/stores", &folder).unwrap();
    }
    create(&client, "a", scratch).unwrap();
    for (settings, word) in [
        (r#""data_disk_bytes": 1048576, "data_disk_store": "fast""#, "fast is for what can be made again"),
        (r#""type": "dedicated", "overflow_store": "copies""#, "copies is for what can be made again"),
        (r#""data_disk_bytes": 1048576, "data_disk_store": "fats""#, "do you mean 'fast'?"),
    ] {
        let error = refused(create(&client, "b", &format!(r#"{{"image": "debian", {settings}}}"#)));
        assert!(error.detail.contains(word), "{settings}: {error:?}");
    }
    create(&client, "b", r#"{"image": "debian", "overflow_store": "fast", "data_disk_bytes": 1048576}"#)
        .unwrap();
    // It can grow; that it goes must be said.
    let change = |spec: &str, terms: &str| {
        let spec = serde_json::from_str::<CatalogSpec>(spec).unwrap();
        client.put::<_, Catalog>(&format!("/v1/catalogs/b{terms}"), &spec)
    };
    let error = refused(change(r#"{"image": "debian"}"#, ""));
    assert!(error.code == ErrorCode::Conflict && error.detail.contains("lose their data disks"), "{error:?}");
    change(r#"{"image": "debian", "data_disk_bytes": 2097152}"#, "").unwrap();
    let error = refused(change(r#"{"image": "debian", "data_disk_bytes": 1048576}"#, "?discard_data=true"));
    assert!(error.detail.contains("grow, not shrink"), "{error:?}");
    change(r#"{"image": "debian"}"#, "?discard_data=true").unwrap();
}
