//! Versions of catalogs through the daemon's socket: following, updating, rolling back, what stays and what may go.
#![allow(clippy::unwrap_used)]

mod common;

use common::{World, create, import, machines, refused};
use rustix::process::Signal;
use spillway_api::client::{Client, ClientError};
use spillway_api::{
    Catalog, Empty, ErrorCode, Image, ImageDetails, List, MachineDetails, Problem, RolloutStrategy,
    VersionChoice,
};

fn get(client: &Client, name: &str) -> Catalog {
    client.get(&format!("/v1/catalogs/{name}")).unwrap()
}

fn publish(client: &Client, version: u32) {
    client.put::<_, Image>("/v1/images/debian/published", &VersionChoice { version }).unwrap();
}

fn ask(client: &Client, what: &str, request: &str) -> Result<Catalog, ClientError> {
    let request: serde_json::Value = serde_json::from_str(request).unwrap();
    client.post(&format!("/v1/catalogs/{what}"), &request)
}

fn history(catalog: &Catalog) -> Vec<u32> {
    catalog.history.iter().map(|entry| entry.version).collect()
}

fn delete_version(client: &Client, version: u32) -> Result<(), Problem> {
    match client.delete::<Empty>(&format!("/v1/images/debian/versions/{version}")) {
        Ok(_) => Ok(()),
        Err(ClientError::Refused(error)) => Err(error),
        Err(other) => panic!("{other}"),
    }
}

#[test]
fn who_follows_an_image_goes_along_and_who_does_not_stays() {
    let mut world = World::new();
    import(&world, "debian", 3);
    let client = world.client();
    let follows = create(&client, "follows", r#"{"image": "debian", "count": 1}"#).unwrap();
    let stays = create(&client, "stays", r#"{"image": "debian:1"}"#).unwrap();
    publish(&client, 2);
    let moved = get(&client, "follows");
    assert_eq!((moved.version, history(&moved)), (2, vec![1, 2]));
    assert!(moved.revision > follows.revision && moved.spec == follows.spec);
    assert_eq!(get(&client, "stays"), stays);
    publish(&client, 2);
    assert_eq!(get(&client, "follows"), moved, "published again, it is the same");
    publish(&client, 1);
    publish(&client, 3);
    world.end(Signal::KILL);
    world.start();
    let client = world.client();
    let moved = get(&client, "follows");
    assert_eq!((moved.version, history(&moved)), (3, vec![1, 2, 1, 3]));
    // It may be rolled back to any of them.
    let error = delete_version(&client, 2).unwrap_err();
    assert!(error.code == ErrorCode::InUse && error.detail.contains("'follows'"), "{error:?}");
    client.delete::<Empty>("/v1/catalogs/follows").unwrap();
    delete_version(&client, 2).unwrap();
    assert_eq!(delete_version(&client, 1).unwrap_err().code, ErrorCode::InUse);
}

#[test]
fn a_claim_ends_by_its_own_id_and_never_with_what_is_kept() {
    let world = World::new();
    import(&world, "debian", 1);
    let client = world.client();
    create(&client, "desk", r#"{"image": "debian", "count": 1}"#).unwrap();
    create(&client, "own", r#"{"image": "debian", "type": "dedicated"}"#).unwrap();
    create(&client, "stays", r#"{"image": "debian", "reset": "never"}"#).unwrap();
    let claim = |catalog: &str| {
        let asked = serde_json::json!({ "any": true });
        client.post::<_, MachineDetails>(&format!("/v1/catalogs/{catalog}/claims"), &asked)
    };
    for catalog in ["own", "stays"] {
        let Err(ClientError::Refused(error)) = claim(catalog) else { panic!("{catalog} is claimed") };
        assert!(error.code == ErrorCode::Conflict && error.detail.contains("keep their data"));
    }
    let release = |id: &str| client.delete::<MachineDetails>(&format!("/v1/machines/desk-001/claim{id}"));
    let first = claim("desk").unwrap().claim.unwrap().id;
    release(&format!("?claim={first}")).unwrap();
    // It is somebody else's now: whoever comes late takes nothing from them.
    let second = claim("desk").unwrap().claim.unwrap().id;
    assert_ne!(first, second);
    let Err(ClientError::Refused(late)) = release(&format!("?claim={first}")) else { panic!("released") };
    assert!(late.code == ErrorCode::Conflict && late.detail.contains("has another claim now"), "{late:?}");
    let machine: MachineDetails = client.get("/v1/machines/desk-001").unwrap();
    assert_eq!(machine.claim.map(|claim| claim.id), Some(second));
    release("").unwrap();
}

#[test]
fn an_update_is_recorded_and_another_one_replaces_it() {
    let world = World::new();
    import(&world, "debian", 3);
    let client = world.client();
    create(&client, "desk", r#"{"image": "debian", "count": 4, "grace_seconds": 7}"#).unwrap();
    // One that cannot be started keeps a rollout from its end.
    let start = serde_json::json!({"action": "start", "select": {"names": ["desk-001"]}});
    client.post::<_, serde_json::Value>("/v1/machine-actions", &start).unwrap();
    let updated = ask(&client, "desk/update", r#"{"image": "debian:2", "rollout": "now"}"#).unwrap();
    let rollout = updated.rollout.clone().unwrap();
    assert_eq!(
        (rollout.strategy, rollout.version, rollout.claim_grace_seconds),
        (RolloutStrategy::Now, 2, None)
    );
    assert_eq!((updated.version, history(&updated)), (2, vec![1, 2]));
    assert_eq!(updated.spec.image.to_string(), "debian:2");
    assert_eq!(updated.warnings, [""; 0]);
    assert_eq!(machines(&client, "desk").len(), 4);
    // The same version by another strategy is another rollout and no other version.
    let again = r#"{"image": "debian:2", "rollout": {"batch": 2}, "claim_grace_seconds": 90}"#;
    let again = ask(&client, "desk/update", again).unwrap();
    let rollout = again.rollout.clone().unwrap();
    assert_eq!((rollout.strategy, rollout.claim_grace_seconds), (RolloutStrategy::Batch(2), Some(90)));
    assert_eq!(history(&again), [1, 2]);
    assert!(again.warnings[0].contains("replaces the rollout of debian:2 (now)"), "{:?}", again.warnings);
    // It is said once, and the catalog's own patience is as it was.
    let found = get(&client, "desk");
    assert_eq!((found.warnings, found.spec.grace_seconds), (vec![], 7));
    // What is published while a rollout goes on, it brings.
    ask(&client, "desk/update", r#"{"image": "debian", "rollout": "now"}"#).unwrap();
    assert_eq!(get(&client, "desk").version, 1);
    publish(&client, 3);
    let found = get(&client, "desk");
    assert_eq!((found.version, found.rollout.unwrap().version), (3, 3));
    let ended = ask(&client, "desk/update", r#"{"image": "debian"}"#).unwrap();
    assert!(ended.rollout.is_none() && ended.warnings[0].contains("replaces"), "{ended:?}");
    for (request, code, word) in [
        (r#"{"image": "debian:9"}"#, ErrorCode::NotFound, "no version 9"),
        (r#"{"image": "debain"}"#, ErrorCode::NotFound, "'debian'"),
        (
            r#"{"image": "debian", "rollout": {"batch": 0}}"#,
            ErrorCode::Invalid,
            "rollout.batch: allowed is 1 to",
        ),
        (r#"{"image": "debian", "rollout": "soon"}"#, ErrorCode::Invalid, "soon"),
        (r#"{"rollout": "now"}"#, ErrorCode::Invalid, "image"),
        (r#"{"image": "debian", "strategy": "now"}"#, ErrorCode::Invalid, "strategy"),
    ] {
        let before = get(&client, "desk");
        let error = refused(ask(&client, "desk/update", request));
        assert!(error.code == code && error.detail.contains(word), "{request}: {error:?}");
        assert_eq!(get(&client, "desk"), before, "{request}");
    }
    assert_eq!(refused(ask(&client, "dest/update", r#"{"image": "debian"}"#)).code, ErrorCode::NotFound);
}

#[test]
fn a_catalog_is_rolled_back_along_its_history() {
    let world = World::new();
    import(&world, "debian", 4);
    import(&world, "windows", 1);
    let client = world.client();
    create(&client, "desk", r#"{"image": "debian"}"#).unwrap();
    let error = refused(ask(&client, "desk/rollback", "{}"));
    assert!(error.code == ErrorCode::NotFound && error.detail.contains("nothing before"), "{error:?}");
    publish(&client, 2);
    publish(&client, 3);
    for version in [2, 1] {
        let back = ask(&client, "desk/rollback", r#"{"rollout": {"batch": 1}}"#).unwrap();
        assert_eq!((back.version, back.rollout.unwrap().version), (version, version));
        assert_eq!(back.spec.image.to_string(), format!("debian:{version}"));
    }
    // It stays there, whatever is published.
    publish(&client, 4);
    assert_eq!(get(&client, "desk").version, 1);
    let to = ask(&client, "desk/rollback", r#"{"to": 3}"#).unwrap();
    assert_eq!((to.version, history(&to)), (3, vec![1, 2, 3, 2, 1, 3]));
    let error = refused(ask(&client, "desk/rollback", r#"{"to": 4}"#));
    assert!(error.detail.contains("no version 4 is in its history"), "{error:?}");
    // Until it is told to follow again.
    assert_eq!(ask(&client, "desk/update", r#"{"image": "debian"}"#).unwrap().version, 4);
    // Another image is a line of its own; the way back leads to the first.
    ask(&client, "desk/update", r#"{"image": "windows"}"#).unwrap();
    let back = ask(&client, "desk/rollback", "{}").unwrap();
    assert_eq!(back.spec.image.to_string(), "debian:4");
}

#[test]
fn a_version_that_falls_out_of_the_history_can_be_deleted() {
    let world = World::new();
    import(&world, "debian", 3);
    let client = world.client();
    create(&client, "desk", r#"{"image": "debian:3"}"#).unwrap();
    let update =
        |version: u32| ask(&client, "desk/update", &format!(r#"{{"image": "debian:{version}"}}"#)).unwrap();
    // 31 more, and the first one is the oldest of 32.
    (0..31).for_each(|n| _ = update(1 + n % 2));
    assert_eq!(get(&client, "desk").history.len(), 32);
    assert_eq!(delete_version(&client, 3).unwrap_err().code, ErrorCode::InUse);
    let changed = update(2);
    assert_eq!((changed.history.len(), changed.history[0].version), (32, 1));
    delete_version(&client, 3).unwrap();
}

#[test]
fn disks_that_keep_writes_stay_on_their_version() {
    let world = World::new();
    import(&world, "debian", 2);
    import(&world, "windows", 1);
    let client = world.client();
    create(&client, "own", r#"{"image": "debian:1", "type": "dedicated", "count": 2}"#).unwrap();
    for rollout in [r#""now""#, r#"{"batch": 1}"#] {
        let request = format!(r#"{{"image": "debian:2", "rollout": {rollout}}}"#);
        let error = refused(ask(&client, "own/update", &request));
        assert!(
            error.code == ErrorCode::Conflict && error.detail.contains("stay on their version"),
            "{error:?}"
        );
    }
    let updated = ask(&client, "own/update", r#"{"image": "debian:2"}"#).unwrap();
    assert!(updated.version == 2 && updated.warnings[0].contains("stay on their version"), "{updated:?}");
    let error = refused(ask(&client, "own/update", r#"{"image": "windows"}"#));
    assert!(error.code == ErrorCode::Conflict && error.detail.contains("discard_data"), "{error:?}");
    let spec = r#"{"image": "debian:2", "type": "pooled", "count": 2}"#;
    let spec: spillway_api::CatalogSpec = serde_json::from_str(spec).unwrap();
    let error = refused(client.put::<_, Catalog>("/v1/catalogs/own", &spec));
    assert!(error.detail.contains("another type would discard it"), "{error:?}");
    assert_eq!(get(&client, "own").spec.image.to_string(), "debian:2");
    let request = r#"{"image": "windows", "discard_data": true, "rollout": "now"}"#;
    let other = ask(&client, "own/update", request).unwrap();
    assert_eq!((other.rollout.unwrap().image.as_str(), other.version), ("windows", 1));
    client.put::<_, Catalog>("/v1/catalogs/own?discard_data=true", &spec).unwrap();
}

/// Whatever happens at once: who follows has what is published, and no version is gone that a catalog has.
#[test]
fn publishing_and_deleting_miss_no_catalog() {
    let world = World::new();
    import(&world, "debian", 5);
    let socket = world.socket();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let client = Client::new(&socket).unwrap();
            (0..100).for_each(|n| publish(&client, 1 + n % 3));
        });
        scope.spawn(|| {
            let client = Client::new(&socket).unwrap();
            for n in 0..300 {
                create(&client, &format!("c{n}"), r#"{"image": "debian"}"#).unwrap();
                let found = get(&client, &format!("c{n}"));
                assert_eq!(found.history.last().unwrap().version, found.version);
            }
        });
        scope.spawn(|| {
            // One of them succeeds, and the other not.
            let client = Client::new(&socket).unwrap();
            for version in [4, 5] {
                let other = Client::new(&socket).unwrap();
                let deleted = std::thread::scope(|scope| {
                    let deleting = scope.spawn(|| delete_version(&other, version).is_ok());
                    let spec = format!(r#"{{"image": "debian:{version}"}}"#);
                    let created = create(&client, &format!("p{version}"), &spec).is_ok();
                    let deleted = deleting.join().unwrap();
                    assert!(created != deleted, "version {version}: created {created}, deleted {deleted}");
                    deleted
                });
                println!("version {version} deleted: {deleted}");
            }
        });
    });
    let client = world.client();
    let details: ImageDetails = client.get("/v1/images/debian").unwrap();
    let catalogs: List<Catalog> = client.list("/v1/catalogs").unwrap();
    assert!(catalogs.items.len() >= 300);
    for catalog in catalogs.items {
        let follows = catalog.spec.image.version.is_none();
        assert!(!follows || Some(catalog.version) == details.image.published, "{catalog:?}");
        for entry in &catalog.history {
            assert!(details.versions.iter().any(|v| v.version == entry.version), "{catalog:?}");
        }
    }
}
