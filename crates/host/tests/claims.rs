//! Claims: who has a machine and how long, what is claimed once, and what is given up when nobody waits for it any more.
#![allow(clippy::unwrap_used)]

mod common;

use common::{World, create, import, refused};
use rustix::process::Signal;
use serde_json::json;
use spillway_api::client::Client;
use spillway_api::{
    Catalog, ClaimRenewal, Empty, ErrorCode, Event, EventKind, ImageDetails, ImageImport, List,
    MachineDetails, NewClaim, Operation, OperationState, SourceFormat,
};
use spillway_testkit::process::wait_until;
use std::io::Write;
use std::os::unix::net::UnixStream;
use std::time::Duration;

/// A daemon with a catalog of so many machines, none of which ever runs: those that start stay on their way.
fn world(count: u32, options: &[&str]) -> World {
    let mut world = World::unstarted();
    let more = options.iter().map(|option| option.to_string());
    world.start_with(["--worker".to_owned(), world.sleeper()].into_iter().chain(more).collect());
    import(&world, "debian", 1);
    create(&world.client(), "desk", &format!(r#"{{"image": "debian", "count": {count}}}"#)).unwrap();
    world
}

fn any() -> NewClaim {
    NewClaim { any: true, ..NewClaim::default() }
}

fn claim(client: &Client, claim: &NewClaim) -> MachineDetails {
    client.post("/v1/catalogs/desk/claims", claim).unwrap()
}

fn claimed(client: &Client) -> Vec<String> {
    let all: List<MachineDetails> = client.get("/v1/machines").unwrap();
    all.items.into_iter().filter(|m| m.claim.is_some()).map(|m| m.machine.name.to_string()).collect()
}

fn uid() -> String {
    format!("uid {}", rustix::process::getuid().as_raw())
}

/// An event says so, soon after what it tells of.
fn wait_for_event(client: &Client, kind: EventKind, text: &str) {
    let all = || client.get::<List<Event>>("/v1/events").unwrap().items;
    let found = || all().iter().any(|event| event.kind == kind && event.text == text).then_some(());
    wait_until(Duration::from_secs(10), found).unwrap_or_else(|| panic!("no '{text}': {:?}", all()));
}

#[test]
fn a_claim_has_an_owner_labels_and_an_end_and_is_renewed() {
    let mut world = world(5, &["--claim-ttl", "2h"]);
    let client = world.client();
    let first = claim(&client, &any());
    let (name, held) = (first.machine.name.clone(), first.claim.unwrap());
    assert_eq!((held.owner.as_str(), held.ttl_seconds), (uid().as_str(), Some(7200)));
    assert!(held.left_seconds.is_some_and(|left| (7100..=7200).contains(&left)), "{held:?}");
    let labels = [("job".parse().unwrap(), "7".to_owned())].into();
    let endless = NewClaim { ttl_seconds: Some(0), owner: Some("ci".into()), labels, ..any() };
    let second = claim(&client, &endless);
    let held_by_ci = second.claim.clone().unwrap();
    assert_eq!(
        (held_by_ci.owner.as_str(), held_by_ci.ttl_seconds, held_by_ci.left_seconds),
        ("ci", None, None)
    );
    assert_eq!(held_by_ci.labels, endless.labels);

    for text in [format!("it is claimed by {}", uid()), format!("it is claimed for ci by {}", uid())] {
        wait_for_event(&client, EventKind::Claimed, &text);
    }

    // The catalog's own goes before the host's.
    let mut spec = client.get::<Catalog>("/v1/catalogs/desk").unwrap().spec;
    spec.claim_ttl_seconds = Some(90);
    client.put::<_, Catalog>("/v1/catalogs/desk", &spec).unwrap();
    assert_eq!(claim(&client, &any()).claim.unwrap().ttl_seconds, Some(90));
    spec.claim_ttl_seconds = Some(0);
    client.put::<_, Catalog>("/v1/catalogs/desk", &spec).unwrap();
    assert_eq!(claim(&client, &any()).claim.unwrap().ttl_seconds, None);

    // By owner.
    let of = |owner: &str| -> Vec<MachineDetails> {
        client.get::<List<MachineDetails>>(&format!("/v1/machines?catalog=desk&owner={owner}")).unwrap().items
    };
    assert_eq!(of("ci").iter().map(|m| &m.machine.name).collect::<Vec<_>>(), [&second.machine.name]);
    assert_eq!((of(&uid().replace(' ', "%20")).len(), of("nobody").len()), (3, 0));

    // Renewed: by whoever has it, for as long as before, or another time; over restarts of the daemon.
    let renew = |client: &Client, id: &str, ttl_seconds| -> Result<MachineDetails, _> {
        client.put(&format!("/v1/machines/{name}/claim?claim={id}"), &ClaimRenewal { ttl_seconds })
    };
    let left = |machine: MachineDetails| machine.claim.unwrap().left_seconds;
    assert!(left(renew(&client, &held.id, Some(100_000)).unwrap()).is_some_and(|left| left > 99_000));
    world.end(Signal::KILL);
    world.start();
    let client = world.client();
    let again = renew(&client, &held.id, None).unwrap();
    assert_eq!(again.claim.as_ref().unwrap().ttl_seconds, Some(100_000));
    assert_eq!(left(renew(&client, &held.id, Some(0)).unwrap()), None);
    assert_eq!(refused(renew(&client, &held_by_ci.id, None)).code, ErrorCode::Conflict);
    assert_eq!(refused(renew(&client, &held.id, Some(u32::MAX))).code, ErrorCode::Invalid);
    // What is renewed does not end; what is not does.
    renew(&client, &held.id, Some(1)).unwrap();
    wait_until(Duration::from_secs(20), || {
        client.get::<MachineDetails>(&format!("/v1/machines/{name}")).unwrap().claim.is_none().then_some(())
    })
    .expect("its time is over");
    assert_eq!(refused(renew(&client, &held.id, None)).code, ErrorCode::Conflict);

    // Events say who, and so does the log.
    wait_for_event(&client, EventKind::Released, "its claim is over");
    client.delete::<MachineDetails>(&format!("/v1/machines/{}/claim", second.machine.name)).unwrap();
    wait_for_event(&client, EventKind::Released, &format!("it is released by {}", uid()));
    let lines = world.audit();
    let line = lines.iter().find(|line| line["verb"] == "claim" && line["asked"]["owner"] == "ci").unwrap();
    assert_eq!((&line["machines"], &line["object"]["name"]), (&json!([second.machine.name]), &json!("desk")));
}

#[test]
fn words_of_a_claim_are_bounded() {
    let world = world(1, &[]);
    let client = world.client();
    let labels = |n: u32| (0..n).map(|n| (format!("l{n}").parse().unwrap(), String::new())).collect();
    for (bad, word) in [
        (NewClaim { owner: Some(String::new()), ..any() }, "owner"),
        (NewClaim { owner: Some("x".repeat(129)), ..any() }, "owner"),
        (NewClaim { owner: Some("a\nb".into()), ..any() }, "owner"),
        (NewClaim { labels: labels(17), ..any() }, "labels"),
        (NewClaim { labels: [("a".parse().unwrap(), "\u{1b}[2J".into())].into(), ..any() }, "labels"),
        (NewClaim { ttl_seconds: Some(u32::MAX), ..any() }, "ttl_seconds"),
    ] {
        let error = refused(client.post::<_, MachineDetails>("/v1/catalogs/desk/claims", &bad));
        assert!(error.code == ErrorCode::Invalid && error.detail.contains(word), "{bad:?}: {error}");
    }
    assert_eq!(claimed(&client), [""; 0]);
    let edge = NewClaim { owner: Some("é".repeat(128)), labels: labels(16), ..any() };
    assert!(claim(&client, &edge).claim.is_some());
}

#[test]
fn the_same_key_gives_the_same_machine() {
    let mut world = world(8, &[]);
    let client = world.client();
    let claims = "/v1/catalogs/desk/claims";
    let ask = |client: &Client, key: &str| client.post_once::<_, MachineDetails>(claims, Some(key), &any());
    let first = ask(&client, "job-1").unwrap();
    let id = |machine: &MachineDetails| machine.claim.as_ref().unwrap().id.clone();
    assert_eq!(id(&ask(&client, "job-1").unwrap()), id(&first));
    assert_ne!(ask(&client, "job-2").unwrap().machine.name, first.machine.name);
    let other = NewClaim { ttl_seconds: Some(5), ..any() };
    let error = refused(client.post_once::<_, MachineDetails>(claims, Some("job-1"), &other));
    assert!(error.code == ErrorCode::KeyReused && error.detail.contains("another request"), "{error}");
    for bad in ["", "two words", "\"", "é", &"x".repeat(129)] {
        let Err(error) = ask(&client, bad) else { panic!("{bad:?}") };
        assert!(
            error.to_string().contains("Idempotency-Key") || error.to_string().contains("header"),
            "{bad:?}: {error}"
        );
    }
    // Of many at once one takes a machine.
    let socket = world.socket();
    let ids: std::collections::BTreeSet<String> = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..6)
            .map(|_| scope.spawn(|| id(&ask(&Client::new(&socket).unwrap(), "job-3").unwrap())))
            .collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    assert_eq!((ids.len(), claimed(&client).len()), (1, 3));

    // Another daemon knows it too; and once it is over the key makes no other one.
    world.end(Signal::KILL);
    world.start();
    let client = world.client();
    assert_eq!(id(&ask(&client, "job-1").unwrap()), id(&first));
    client.delete::<MachineDetails>(&format!("/v1/machines/{}/claim", first.machine.name)).unwrap();
    let error = refused(ask(&client, "job-1"));
    assert!(error.code == ErrorCode::Conflict && error.detail.contains("is over"), "{error}");
    assert_eq!(claimed(&client).len(), 2);
    assert!(world.audit().iter().any(|line| line["repeated"] == true));
}

#[test]
fn the_same_key_imports_once() {
    let mut world = world(0, &[]);
    let client = world.client();
    let path = world.path("disk").display().to_string();
    let import = ImageImport { path, format: SourceFormat::Raw, store: None };
    let ask = |client: &Client, key| {
        client.post_once::<_, Operation>("/v1/images/debian/versions", Some(key), &import)
    };
    let (first, again, other) =
        (ask(&client, "a").unwrap(), ask(&client, "a").unwrap(), ask(&client, "b").unwrap());
    assert_eq!(first.id, again.id);
    assert_ne!(first.id, other.id);
    for operation in [first, other] {
        common::ends(&client, &operation).unwrap();
    }
    assert_eq!(ask(&client, "a").unwrap().state, OperationState::Done, "as it is now");
    assert_eq!(client.get::<ImageDetails>("/v1/images/debian").unwrap().image.newest, 3);
    let new = common::new("more", r#"{"image": "debian"}"#);
    let make = |key| client.post_once::<_, Catalog>("/v1/catalogs", key, &new);
    assert_eq!(make(Some("c")).unwrap(), make(Some("c")).unwrap());
    assert_eq!(refused(make(None)).code, ErrorCode::Exists);
    // Another daemon knows of no operation, but of what has come of it.
    world.end(Signal::KILL);
    world.start();
    let client = world.client();
    let made = ask(&client, "a").unwrap();
    assert_eq!(
        (made.state, made.image.map(|image| image.to_string()).as_deref()),
        (OperationState::Done, Some("debian:2"))
    );
    client.delete::<Empty>("/v1/images/debian/versions/2").unwrap();
    let gone = refused(ask(&client, "a"));
    assert!(gone.code == ErrorCode::Conflict && gone.detail.contains("debian:2 is not there"), "{gone}");
    assert_eq!(client.get::<ImageDetails>("/v1/images/debian").unwrap().image.newest, 3);
}

/// A request whose connection is left open.
fn asked(world: &World, query: &str, lines: &str) -> UnixStream {
    let mut stream = UnixStream::connect(world.socket()).unwrap();
    let body = json!({ "any": true }).to_string();
    let head = format!(
        "POST /v1/catalogs/desk/claims{query} HTTP/1.1\r\nhost: x\r\n{lines}content-length: {}\r\n\r\n",
        body.len()
    );
    stream.write_all(format!("{head}{body}").as_bytes()).unwrap();
    stream
}

#[test]
fn a_claim_that_nobody_waits_for_any_more_is_given_up() {
    let world = world(3, &[]);
    let client = world.client();
    let until = |what: &str, is: &dyn Fn(&[String]) -> bool| {
        let found = || is(&claimed(&client)).then_some(());
        wait_until(Duration::from_secs(20), found)
            .unwrap_or_else(|| panic!("never {what}: {:?}", claimed(&client)));
    };
    let waiting = asked(&world, "?wait=30", "");
    until("claimed", &|claimed| claimed.len() == 1);
    drop(waiting);
    until("given up", &|claimed| claimed.is_empty());
    let all: List<MachineDetails> = client.get("/v1/machines").unwrap();
    assert!(
        all.items.iter().all(|machine| machine.power == spillway_api::Power::Off),
        "what was started for it is stopped"
    );
    wait_for_event(&client, EventKind::Released, "it is released: the client that claimed it got no answer");

    // With a key it stays: who asked asks again.
    let waiting = asked(&world, "?wait=30", "idempotency-key: mine\r\n");
    until("claimed", &|claimed| claimed.len() == 1);
    drop(waiting);
    let kept: MachineDetails = client.post_once("/v1/catalogs/desk/claims", Some("mine"), &any()).unwrap();
    assert_eq!(claimed(&client), [kept.machine.name.to_string()]);
}
