//! Rollouts that cannot go on: they say so, and why, and can be paused, resumed and aborted.
#![allow(clippy::unwrap_used)]

mod common;

use common::{World, create, import, refused, until};
use spillway_api::client::Client;
use spillway_api::{
    Catalog, ErrorCode, Event, EventKind, List, MachineDetails, Page, Phase, RolloutProgress, RolloutState,
};

/// Three machines that are to run, and cannot.
fn failing(world: &World) -> Client {
    let client = world.client();
    import(world, "debian", 2);
    create(&client, "desk", r#"{"image": "debian:1", "count": 3}"#).unwrap();
    let start = serde_json::json!({ "action": "start", "select": { "catalog": "desk" } });
    client.post::<_, Page<MachineDetails>>("/v1/machine-actions", &start).unwrap();
    until("all have failed", || {
        let all = client.list::<MachineDetails>("/v1/machines").unwrap().items;
        all.iter().all(|machine| machine.status.phase == Phase::Failed).then_some(())
    });
    client
}

fn roll_out(client: &Client, more: &str) {
    let update = format!(r#"{{"image": "debian:2", "rollout": {{"batch": 1}}{more}}}"#);
    let update: serde_json::Value = serde_json::from_str(&update).unwrap();
    client.post::<_, Catalog>("/v1/catalogs/desk/update", &update).unwrap();
}

fn desk(client: &Client) -> Catalog {
    client.get("/v1/catalogs/desk").unwrap()
}

fn progress(client: &Client, state: RolloutState) -> RolloutProgress {
    until(&format!("it is {state:?}"), || {
        let progress = desk(client).rollout.and_then(|rollout| rollout.progress);
        progress.filter(|progress| progress.state == state)
    })
}

fn events_of(client: &Client, kind: EventKind) -> Vec<String> {
    let events: List<Event> = client.get("/v1/events").unwrap();
    events.items.into_iter().filter(|event| event.kind == kind).map(|event| event.text).collect()
}

fn change(client: &Client, action: &str) -> Catalog {
    client.post("/v1/catalogs/desk/rollout", &serde_json::json!({ "action": action })).unwrap()
}

#[test]
fn a_rollout_behind_failed_machines_stalls_aloud() {
    let world = World::new();
    let client = failing(&world);
    roll_out(&client, r#", "deadline_seconds": 1"#);
    // A second has passed; what could not be started is tried with what is rolled out, which may take longer.
    until("all have failed anew", || {
        let machines = client.list::<MachineDetails>("/v1/machines").unwrap().items;
        let tried = |m: &MachineDetails| {
            m.status.phase == Phase::Failed && m.status.run.as_ref().is_some_and(|run| run.version == 2)
        };
        machines.iter().all(tried).then_some(())
    });
    let stalled = until("it has stalled behind three", || {
        let progress = desk(&client).rollout?.progress?;
        (progress.state == RolloutState::Stalled && progress.failed == 3).then_some(progress)
    });
    assert_eq!((stalled.done, stalled.of, stalled.waiting), (0, 3, 0));
    let names: Vec<&str> = stalled.in_the_way.iter().map(|one| one.machine.as_str()).collect();
    assert_eq!(names, ["desk-001", "desk-002", "desk-003"]);
    assert!(stalled.in_the_way[0].why.contains("/nonexistent/spillway"), "{stalled:?}");
    let reason = stalled.reason.unwrap();
    assert!(reason.starts_with("no progress in 1 s: 3 machines have failed"), "{reason}");
    let events = events_of(&client, EventKind::Rollout);
    assert!(events.len() == 1 && events[0].contains("debian:2 is stalled, 0 of 3"), "{events:?}");
    // Lists have it too.
    let listed = client.list::<Catalog>("/v1/catalogs").unwrap().items.remove(0);
    assert_eq!(listed.rollout.unwrap().progress.unwrap().state, RolloutState::Stalled);
    // Somebody wants them no more: nothing is in its way.
    let stop = serde_json::json!({ "action": "stop", "select": { "catalog": "desk" }, "force": true });
    client.post::<_, Page<MachineDetails>>("/v1/machine-actions", &stop).unwrap();
    until("it has ended", || desk(&client).rollout.is_none().then_some(()));
    assert_eq!(events_of(&client, EventKind::RolledOut).len(), 1);
}

#[test]
fn a_rollout_is_paused_resumed_and_aborted() {
    let world = World::new();
    let client = failing(&world);
    roll_out(&client, r#", "deadline_seconds": 600"#);
    progress(&client, RolloutState::Running);
    assert!(change(&client, "pause").rollout.unwrap().paused);
    let revision = change(&client, "pause").revision;
    assert_eq!(desk(&client).revision, revision, "it is so already");
    let paused = progress(&client, RolloutState::Paused);
    assert_eq!(paused.failed, 3);
    assert!(!change(&client, "resume").rollout.unwrap().paused);
    progress(&client, RolloutState::Running);
    let aborted = change(&client, "abort");
    assert_eq!((aborted.rollout, aborted.version), (None, 2), "what starts next takes it");
    let nothing =
        client.post::<_, Catalog>("/v1/catalogs/desk/rollout", &serde_json::json!({ "action": "pause" }));
    let error = refused(nothing);
    assert!(error.code == ErrorCode::Conflict && error.detail.contains("no rollout"), "{error:?}");
    let events = events_of(&client, EventKind::Rollout);
    let has_reason: Vec<bool> = events
        .iter()
        .zip(["is paused", "is resumed", "is aborted"])
        .map(|(e, word)| e.contains(word))
        .collect();
    assert!(events.len() == 3 && has_reason == [true; 3] && events[0].contains("uid "), "{events:?}");
    let verbs: Vec<_> = world.audit().iter().map(|line| line["verb"].as_str().unwrap().to_owned()).collect();
    assert!(verbs.contains(&"pause rollout".into()) && verbs.contains(&"abort rollout".into()), "{verbs:?}");
    assert!(events_of(&client, EventKind::RolledOut).is_empty());
}

/// So many as may fail do not keep a rollout from its end.
#[test]
fn machines_that_may_fail_are_passed_over() {
    let world = World::new();
    let client = failing(&world);
    roll_out(&client, r#", "deadline_seconds": 1, "max_failed": 2"#);
    progress(&client, RolloutState::Stalled);
    roll_out(&client, r#", "deadline_seconds": 600, "max_failed": 3"#);
    until("it has ended", || desk(&client).rollout.is_none().then_some(()));
    let text = events_of(&client, EventKind::RolledOut).remove(0);
    assert_eq!(text, "debian:2 has reached all machines; 3 have failed, which max_failed allows");
}
