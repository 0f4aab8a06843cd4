//! Catalogs and the records of machines, through the daemon's socket.
#![allow(clippy::unwrap_used)]

mod common;

use common::{World, ends, refused, run};
use rustix::process::Signal;
use spillway_api::client::Client;
use spillway_api::{
    Catalog, Empty, ErrorCode, ImageImport, List, Machine, NewCatalog, Operation, SourceFormat,
};
use std::collections::HashSet;
use std::time::{Duration, Instant};

/// Versions of an image `debian`, all of them ready.
fn images(world: &World, versions: u32) {
    let path = world.path("disk").display().to_string();
    run("qemu-img", &["create", "-q", "-f", "raw", &path, "8M"]);
    for _ in 0..versions {
        let import = ImageImport { path: path.clone(), format: SourceFormat::Raw, store: None };
        let begun: Operation = world.client().post("/v1/images/debian/versions", &import).unwrap();
        ends(&world.client(), &begun).unwrap();
    }
}

fn new(name: &str, spec: &str) -> NewCatalog {
    NewCatalog { name: name.parse().unwrap(), spec: serde_json::from_str(spec).unwrap() }
}

fn machines(client: &Client, catalog: &str) -> Vec<Machine> {
    client.get::<List<Machine>>(&format!("/v1/machines?catalog={catalog}")).unwrap().items
}

#[test]
fn a_thousand_machines_are_recorded_and_listed() {
    let mut world = World::new();
    images(&world, 1);
    let client = world.client();
    let begun = Instant::now();
    let spec = r#"{"image": "debian", "count": 1000, "naming": "desk-####"}"#;
    client.post::<_, Catalog>("/v1/catalogs", &new("desk", spec)).unwrap();
    let recorded = begun.elapsed();
    let mut listed: Vec<Duration> = (0..5)
        .map(|_| {
            let begun = Instant::now();
            assert_eq!(machines(&client, "desk").len(), 1000);
            begun.elapsed()
        })
        .collect();
    listed.sort();
    println!("1,000 machines recorded in {recorded:?}, listed in {:?}", listed[2]);
    assert!(recorded < Duration::from_secs(10) && listed[2] < Duration::from_millis(100));
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
    images(&world, 1);
    let client = world.client();
    let change = |spec: &str| {
        let spec = serde_json::from_str::<spillway_api::CatalogSpec>(spec).unwrap();
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
    assert!(error.message.contains("naming cannot be changed"), "{error:?}");
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
    images(&world, 3);
    let client = world.client();
    let created: Catalog =
        client.post("/v1/catalogs", &new("desk", r#"{"image": "debian:2", "count": 1}"#)).unwrap();
    assert_eq!(created.version, 2);
    let spec = serde_json::from_str::<spillway_api::CatalogSpec>(r#"{"image": "debian:3"}"#).unwrap();
    let changed: Catalog = client.put("/v1/catalogs/desk", &spec).unwrap();
    let history: Vec<u32> = changed.history.iter().map(|entry| entry.version).collect();
    assert_eq!((changed.version, history), (3, vec![2, 3]));
    for version in [2, 3] {
        let error = refused(client.delete::<Empty>(&format!("/v1/images/debian/versions/{version}")));
        assert!(error.code == ErrorCode::InUse && error.message.contains("'desk'"), "{error:?}");
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
    let mut world = World::new();
    images(&world, 1);
    let create = r#"{"image": "debian", "count": 3000, "naming": "m-####"}"#;
    for delay_ms in [0, 10, 40, 80, 160] {
        let socket = world.socket();
        let asked = std::thread::spawn(move || {
            let client = Client::new(&socket).unwrap();
            client.post::<_, Catalog>("/v1/catalogs", &new("m", create)).is_ok()
        });
        std::thread::sleep(Duration::from_millis(delay_ms));
        world.end(Signal::KILL);
        let was_answered = asked.join().unwrap();
        world.start();
        let client = world.client();
        let catalogs: List<Catalog> = client.get("/v1/catalogs").unwrap();
        let expected = if catalogs.items.is_empty() { 0 } else { 3000 };
        assert!(!was_answered || expected == 3000);
        assert_eq!(machines(&client, "m").len(), expected, "after {delay_ms} ms");
        if expected > 0 {
            client.delete::<Empty>("/v1/catalogs/m").unwrap();
        }
        assert_eq!(client.get::<List<Machine>>("/v1/machines").unwrap().items, []);
    }
}
