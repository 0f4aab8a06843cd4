//! Tags of objects: they change with what clients can change, and with nothing else. And the tags of an image's versions,
//! which are bounded.
#![allow(clippy::unwrap_used)]

mod common;

use common::{World, ask_with, create, ends, head_and_body, import};
use rustix::process::Signal;
use serde_json::{Value, json};
use spillway_api::{ErrorCode, ImageDetails, ImageImport, Operation, Problem, SourceFormat};
use spillway_host::store::{SqliteStore, Store, Transaction};

/// The states of an object that were seen: what clients can change of it, and its tag.
struct Seen<'a> {
    path: &'a str,
    members: &'a [&'a str],
    states: Vec<(Value, String)>,
}

impl<'a> Seen<'a> {
    /// Of an object at this path, of which clients can change these members; none: all.
    fn of(path: &'a str, members: &'a [&'a str]) -> Seen<'a> {
        Seen { path, members, states: Vec::new() }
    }

    /// Looks at the object. Whether its tag is another one than before.
    fn look(&mut self, world: &World) -> bool {
        let (head, body) = head_and_body(world, "GET", self.path, "", b"");
        let tag = head.lines().find_map(|line| line.strip_prefix("etag: ")).unwrap().to_owned();
        let mut state: Value = serde_json::from_slice(&body).unwrap();
        if !self.members.is_empty() {
            state.as_object_mut().unwrap().retain(|member, _| self.members.contains(&member.as_str()));
        }
        for (other, other_tag) in &self.states {
            assert_eq!(*other == state, *other_tag == tag, "{tag} {state}\n{other_tag} {other}");
        }
        let is_other = self.states.last().is_none_or(|(_, last)| *last != tag);
        self.states.push((state, tag));
        is_other
    }
}

fn ask(world: &World, method: &str, path: &str, body: &Value) {
    let (status, answer) = ask_with(world, method, path, "", body.to_string().as_bytes());
    assert_eq!(status, 200, "{method} {path} {body}: {}", String::from_utf8_lossy(&answer));
}

#[test]
fn the_tag_of_an_image_is_that_of_what_it_says() {
    let world = World::new();
    let mut seen = Seen::of("/v1/images/debian", &[]);
    import(&world, "debian", 1);
    seen.look(&world);
    create(&world.client(), "desk", r#"{"image": "debian", "count": 1}"#).unwrap();
    assert!(!seen.look(&world), "what uses it does not change it");
    let one = json!({ "version": 1 });
    ask(&world, "PUT", "/v1/images/debian/published", &one);
    assert!(!seen.look(&world), "it was published already");
    ask(&world, "PUT", "/v1/images/debian/tags/gold", &one);
    assert!(seen.look(&world));
    ask(&world, "PUT", "/v1/images/debian/tags/gold", &one);
    assert!(!seen.look(&world));
    ask(&world, "DELETE", "/v1/images/debian/tags/gold?dry_run=true", &json!({}));
    assert!(!seen.look(&world));
    // A version more is another image, and so is one that can be used.
    let path = world.path("disk").display().to_string();
    let more = ImageImport { path, format: SourceFormat::Raw, store: None };
    let begun: Operation = world.client().post("/v1/images/debian/versions", &more).unwrap();
    assert!(seen.look(&world));
    ends(&world.client(), &begun).unwrap();
    seen.look(&world);
    let last = &seen.states.last().unwrap().0["versions"][1];
    assert_eq!(last["state"], "ready");
    ask(&world, "DELETE", "/v1/images/debian/versions/2?dry_run=true", &json!({}));
    assert!(!seen.look(&world));
    ask(&world, "DELETE", "/v1/images/debian/versions/2", &json!({}));
    assert!(seen.look(&world));
}

#[test]
fn the_tag_of_the_host_is_that_of_its_gate() {
    let mut world = World::unstarted();
    world.start_with(vec!["--worker".into(), world.sleeper()]);
    import(&world, "debian", 1);
    create(&world.client(), "desk", r#"{"image": "debian", "count": 1}"#).unwrap();
    let mut seen = Seen::of("/v1/host", &["closed"]);
    seen.look(&world);
    ask(&world, "POST", "/v1/machine-actions", &json!({ "action": "start", "select": { "all": true } }));
    assert!(!seen.look(&world), "what runs is none of it");
    for (action, is_other) in [("close", true), ("close", false), ("open", true), ("open", false)] {
        ask(&world, "POST", "/v1/host", &json!({ "action": action }));
        assert_eq!(seen.look(&world), is_other, "{action}");
    }
    // It was closed before the last start of the host; by whom and when is unknown.
    for (record, closed) in [(json!({ "boot": "another" }), false), (json!([]), true)] {
        world.end(Signal::KILL);
        let store = SqliteStore::open(&world.state().join("state.db")).unwrap();
        let changes = vec![("host/closed".to_owned(), Some(record.to_string().into_bytes()))];
        store.commit(&Transaction { expects: vec![], changes }).unwrap();
        drop(store);
        world.start();
        seen.look(&world);
        assert_eq!(seen.states.last().unwrap().0, json!({ "closed": closed }), "{record}");
    }
}

#[test]
fn the_tag_of_a_machine_or_catalog_stays_while_nothing_is_changed() {
    let mut world = World::unstarted();
    world.start_with(vec!["--worker".into(), world.sleeper()]);
    import(&world, "debian", 2);
    create(&world.client(), "desk", r#"{"image": "debian:1", "count": 1}"#).unwrap();
    let mut machine = Seen::of("/v1/machines/desk-001", &["name", "identity", "power", "claim", "drained"]);
    machine.look(&world);
    for (grace, action) in ["start", "stop", "drain", "undrain"].iter().enumerate() {
        // Asked a second time it changes nothing but how long a guest may take.
        for is_other in [true, false] {
            let grace_seconds = if is_other { grace } else { grace + 10 };
            let select = json!({ "names": ["desk-001"] });
            let asked = json!({ "action": action, "select": select, "grace_seconds": grace_seconds });
            ask(&world, "POST", "/v1/machine-actions", &asked);
            assert_eq!(machine.look(&world), is_other, "{action}");
        }
    }
    let mut catalog = Seen::of("/v1/catalogs/desk", &["spec", "version", "history", "rollout", "warnings"]);
    catalog.look(&world);
    for (image, is_other) in [("debian:1", false), ("debian:2", true), ("debian:2", false)] {
        ask(&world, "POST", "/v1/catalogs/desk/update", &json!({ "image": image }));
        assert_eq!(catalog.look(&world), is_other, "{image}");
    }
}

#[test]
fn an_image_has_a_bounded_number_of_tags() {
    let world = World::new();
    import(&world, "debian", 2);
    let put = |n: u32, version: u32| {
        let body = json!({ "version": version }).to_string();
        ask_with(&world, "PUT", &format!("/v1/images/debian/tags/t{n}"), "", body.as_bytes())
    };
    for n in 0..256 {
        assert_eq!(put(n, 1).0, 200, "{n}");
    }
    let (status, body) = put(256, 1);
    let problem: Problem = serde_json::from_slice(&body).unwrap();
    assert_eq!((status, problem.code), (409, ErrorCode::Conflict));
    assert!(
        problem.detail.contains("debian has 256 tags") && problem.detail.contains("first"),
        "{problem:?}"
    );
    assert_eq!(put(255, 2).0, 200, "one of them can be set again");
    ask(&world, "DELETE", "/v1/images/debian/tags/t0", &json!({}));
    assert_eq!(put(256, 1).0, 200);
    let tags = world.client().get::<ImageDetails>("/v1/images/debian").unwrap().image.tags;
    assert_eq!((tags.len(), tags.values().filter(|version| **version == 2).count()), (256, 1));
}
