//! Records that this daemon cannot read, state that a later one has written, and backups.
#![allow(clippy::unwrap_used)]

mod common;

use common::{Mounted, World, create, import, machines, refused};
use rustix::process::Signal;
use serde_json::{Value, json};
use spillway_api::client::Client;
use spillway_api::{
    Catalog, CatalogSpec, Empty, ErrorCode, Event, HostAction, HostDetails, Image, ImageDetails, List,
    MachineDetails, NewClaim, NewHostAction, StoreDetails,
};
use spillway_host::store::{
    RECORDS_VERSION, SqliteStore, Store, StoreError, THIS_WRITER, Transaction, Writer,
};
use std::path::Path;
use std::process::{Command, Output};

/// A daemon whose state is on a file system that is not nearly full, whatever the host's is: then machines can be claimed.
fn world() -> Option<(World, Mounted)> {
    let mut world = World::unstarted();
    std::fs::create_dir(world.state()).unwrap();
    let mounted = Mounted::tmpfs(&world.state(), "512m")?;
    world.start();
    Some((world, mounted))
}

/// Changes stored records behind the back of a daemon that does not run.
fn change(state: &Path, writer: Writer, change: impl Fn(&str, &mut Value) -> bool) -> Vec<String> {
    let store = SqliteStore::open_as(&state.join("state.db"), writer).unwrap();
    let mut changes = Vec::new();
    for entry in store.list("").unwrap().0 {
        let mut value: Value = serde_json::from_slice(&entry.value).unwrap();
        if change(&entry.key, &mut value) {
            changes.push((entry.key, Some(value.to_string().into_bytes())));
        }
    }
    let keys = changes.iter().map(|(key, _)| key.clone()).collect();
    store.commit(&Transaction { expects: vec![], changes }).unwrap();
    keys
}

fn spillwayd(arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_spillwayd")).args(arguments).output().unwrap()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

fn act(
    client: &Client,
    action: &str,
    select: Value,
) -> Result<List<MachineDetails>, spillway_api::client::ClientError> {
    client.post("/v1/machine-actions", &json!({ "action": action, "select": select }))
}

/// One bad record of each kind: what it is of is left alone, its name stays taken, and all else goes on.
#[test]
fn a_record_that_cannot_be_read_is_set_aside() {
    let Some((mut world, _mounted)) = world() else { return };
    let client = world.client();
    import(&world, "debian", 2);
    import(&world, "other", 1);
    import(&world, "third", 1);
    for (name, spec) in [
        ("bad", r#"{"image": "debian", "count": 2}"#),
        ("good", r#"{"image": "debian", "count": 3}"#),
        ("pool", r#"{"image": "debian", "count": 2}"#),
    ] {
        create(&client, name, spec).unwrap();
    }
    for machine in machines(&client, "pool").iter().chain(&machines(&client, "bad")) {
        act(&client, "stop", json!({ "names": [machine.name] })).unwrap();
    }
    world.end(Signal::TERM);
    let changed = change(&world.state(), THIS_WRITER, |key, value| match key {
        // A setting that this version does not know.
        "catalogs/bad" => {
            value["spec"]["colour"] = "red".into();
            true
        }
        // One that it has and cannot be.
        "machines/good-002" => {
            value["number"] = "two".into();
            true
        }
        "wanted/pool-001" => {
            *value = json!([]);
            true
        }
        "images/other" | "host/boot" => {
            *value = json!({});
            true
        }
        _ => false,
    });
    assert_eq!(changed.len(), 5, "{changed:?}");
    for restart in 0..2 {
        world.start();
        let client = world.client();
        let host: HostDetails = client.get("/v1/host").unwrap();
        let mut aside: Vec<&str> = host.unreadable.iter().map(|record| record.key.as_str()).collect();
        aside.retain(|key| *key != "host/boot");
        assert_eq!(aside, ["catalogs/bad", "images/other", "machines/good-002", "wanted/pool-001"]);
        let bad = &host.unreadable[0];
        assert!(bad.why.contains("colour") && bad.advice.contains("restore"), "{bad:?}");
        let events: List<Event> = client.get("/v1/events").unwrap();
        let count = events.items.iter().filter(|e| e.text.contains("catalogs/bad is set aside")).count();
        assert_eq!(count, restart + 1);
        // It is named, and not there for those who ask for all.
        let names: Vec<_> = client.get::<List<Catalog>>("/v1/catalogs").unwrap().items;
        assert_eq!(names.iter().map(|c| c.name.as_str()).collect::<Vec<_>>(), ["good", "pool"]);
        let error = refused(client.get::<Catalog>("/v1/catalogs/bad"));
        assert!(error.code == ErrorCode::Damaged && error.detail.contains("catalogs/bad"), "{error:?}");
        // Names stay taken.
        assert_eq!(refused(create(&client, "bad", r#"{"image": "debian"}"#)).code, ErrorCode::Damaged);
        assert_eq!(refused(client.get::<ImageDetails>("/v1/images/other")).code, ErrorCode::Damaged);
        let taken =
            refused(create(&client, "same", r#"{"image": "debian", "count": 3, "naming": "good-00#"}"#));
        assert!(taken.detail.contains("good-00"), "{taken:?}");
        let _ = client.delete::<Empty>("/v1/catalogs/same");
        // What it may need is not deleted.
        let error = refused(client.delete::<Empty>("/v1/images/debian/versions/2"));
        assert_eq!(error.code, ErrorCode::Damaged, "{error:?}");
        // A catalog with a machine that cannot be read has that one still, and others are added and removed beside it.
        let count = |count: u32| {
            let spec = client.get::<Catalog>("/v1/catalogs/good").unwrap().spec;
            client.put::<_, Catalog>("/v1/catalogs/good", &CatalogSpec { count, ..spec }).unwrap();
            machines(&client, "good").iter().map(|machine| machine.number).collect::<Vec<_>>()
        };
        assert_eq!(count(4), [1, 3, 4]);
        assert_eq!(count(3), [1, 3]);
        // What is wanted of all is done of all others; who names it is told.
        act(&client, "stop", json!({ "all": true })).unwrap();
        for name in ["good-002", "pool-001", "bad-001"] {
            let error = refused(act(&client, "reset", json!({ "names": [name] })));
            assert_eq!(error.code, ErrorCode::Damaged, "{name}: {error:?}");
        }
        let any = NewClaim { any: true, ..NewClaim::default() };
        let claimed: MachineDetails = client.post("/v1/catalogs/pool/claims", &any).unwrap();
        assert_eq!(claimed.machine.name.as_str(), "pool-002");
        client.delete::<MachineDetails>("/v1/machines/pool-002/claim").unwrap();
        // Publishing, closing and opening go on.
        client.put::<_, Image>("/v1/images/debian/published", &json!({ "version": 1 })).unwrap();
        for action in [HostAction::Close, HostAction::Open] {
            client.post::<_, HostDetails>("/v1/host", &NewHostAction { action }).unwrap();
        }
        client
            .delete::<Empty>(if restart == 0 { "/v1/images/third/versions/9" } else { "/v1/operations/9" })
            .unwrap_err();
        world.end(if restart == 0 { Signal::KILL } else { Signal::TERM });
    }
    // All of it is as it was written.
    let store = SqliteStore::open(&world.state().join("state.db")).unwrap();
    let kept = store.get("machines/good-002").unwrap().unwrap();
    assert!(text(&kept.value).contains(r#""number":"two""#));
    assert_eq!(store.get("wanted/pool-001").unwrap().unwrap().value, b"[]");
}

/// State that a later version has written is not touched, and it is said what to do.
#[test]
fn a_downgrade_is_refused_in_words() {
    let mut world = World::new();
    import(&world, "debian", 1);
    world.end(Signal::TERM);
    let later = Writer { records: RECORDS_VERSION + 3, program: "9.8.7" };
    change(&world.state(), later, |_, _| false);
    let database = world.state().join("state.db");
    let before = std::fs::read(&database).unwrap();
    let state = world.state().display().to_string();
    let socket = world.socket().display().to_string();
    let backup = world.path("backup").display().to_string();
    for arguments in [
        vec!["--state", &state, "--socket", &socket, "--hypervisor", "none"],
        vec!["backup", &backup, "--state", &state, "--socket", &socket],
    ] {
        let refused = spillwayd(&arguments);
        let stderr = text(&refused.stderr);
        let (own, later) = (env!("CARGO_PKG_VERSION"), format!("version {}", RECORDS_VERSION + 3));
        for word in ["9.8.7", own, &later, "spillwayd restore", "state.db"] {
            assert!(!refused.status.success() && stderr.contains(word), "{arguments:?}: {word}: {stderr}");
        }
    }
    assert!(!Path::new(&backup).exists() && std::fs::read(&database).unwrap() == before);
    // An upgrade takes it, and then it is the newer one's.
    let newer = Writer { records: RECORDS_VERSION + 4, program: "9.9.0" };
    drop(SqliteStore::open_as(&database, newer).unwrap());
    let refused = SqliteStore::open_as(&database, later).err().unwrap();
    assert!(
        matches!(refused, StoreError::Newer { .. }) && refused.to_string().contains("9.9.0"),
        "{refused}"
    );
}

/// Everything that is in a daemon's records: what a client sees of it.
fn seen(client: &Client) -> Value {
    let all: Vec<Value> = ["catalogs", "machines", "images", "images/debian", "stores", "leftovers"]
        .iter()
        .map(|path| client.get::<Value>(&format!("/v1/{path}")).unwrap())
        .collect();
    let mut all = Value::from(all);
    // How full a store is, and how machines are, are no records.
    all[1]["items"].as_array_mut().unwrap().iter_mut().for_each(|machine| machine["status"] = Value::Null);
    all[4]["items"].as_array_mut().unwrap().iter_mut().for_each(|store| store["space"] = Value::Null);
    all
}

#[test]
fn a_backup_is_restored_into_a_new_folder() {
    let Some((mut world, _mounted)) = world() else { return };
    let client = world.client();
    import(&world, "debian", 2);
    create(&client, "desk", r#"{"image": "debian", "count": 300, "user_data": "secret"}"#).unwrap();
    create(&client, "own", r#"{"image": "debian", "count": 2, "type": "dedicated"}"#).unwrap();
    let any = NewClaim { ttl_seconds: Some(0), any: true, ..NewClaim::default() };
    client.post::<_, MachineDetails>("/v1/catalogs/desk/claims", &any).unwrap();
    let (state, socket) = (world.state().display().to_string(), world.socket().display().to_string());
    let folder = world.path("");
    let path = |name: &str| folder.join(name).display().to_string();
    let running = path("running.db");
    // While it runs, and while it changes.
    let stop = std::sync::atomic::AtomicBool::new(false);
    let before = std::thread::scope(|scope| {
        let changes = scope.spawn(|| {
            let client = world.client();
            let mut n = 0;
            while !stop.load(std::sync::atomic::Ordering::Relaxed) {
                n += 1;
                let version = json!({ "version": 1 + n % 2 });
                client.put::<_, Image>("/v1/images/debian/tags/flip", &version).unwrap();
            }
            client.delete::<Image>("/v1/images/debian/tags/flip").unwrap();
            n
        });
        for _ in 0..5 {
            let done = spillwayd(&["backup", &running, "--state", &state, "--socket", &socket]);
            assert!(done.status.success(), "{}", text(&done.stderr));
            assert!(text(&done.stdout).contains("records"), "{}", text(&done.stdout));
        }
        stop.store(true, std::sync::atomic::Ordering::Relaxed);
        assert!(changes.join().unwrap() > 1);
        seen(&client)
    });
    // Claims alone end with a restore: who has claimed a machine since the backup is not known.
    let mut before = before;
    let claimed =
        before[1]["items"].as_array_mut().unwrap().iter_mut().filter(|machine| !machine["claim"].is_null());
    assert_eq!(claimed.map(|machine| machine["claim"] = Value::Null).count(), 1);
    let mode = std::os::unix::fs::MetadataExt::mode(&std::fs::metadata(&running).unwrap());
    assert_eq!(mode & 0o777, 0o600, "there are secrets in it");
    // The daemon of another folder is not asked.
    let other = path("other");
    let asked = spillwayd(&["backup", &path("wrong"), "--state", &other, "--socket", &socket]);
    assert!(!asked.status.success() && text(&asked.stderr).contains("--state"), "{}", text(&asked.stderr));
    // Nothing is written over, and nothing is put where a daemon runs.
    let refused = spillwayd(&["restore", &running, "--state", &state]);
    assert!(text(&refused.stderr).contains("a spillwayd uses this folder"), "{}", text(&refused.stderr));
    // As the command line does: one line, and a code for scripts.
    assert!(text(&refused.stderr).starts_with("spillwayd: error: "), "{}", text(&refused.stderr));
    assert_eq!(refused.status.code(), Some(75));
    let missing = spillwayd(&["backup", &path("x"), "--state", &path("nothing")]);
    assert_eq!(missing.status.code(), Some(66), "{}", text(&missing.stderr));
    let wrong = spillwayd(&["--no-such-option"]);
    assert_eq!(
        (wrong.status.code(), text(&wrong.stderr).lines().count()),
        (Some(2), 1),
        "{}",
        text(&wrong.stderr)
    );
    world.end(Signal::TERM);
    let refused = spillwayd(&["restore", &running, "--state", &state]);
    assert!(text(&refused.stderr).contains("overwrites nothing"), "{}", text(&refused.stderr));
    // While none runs.
    let resting = path("resting.db");
    let done = spillwayd(&["backup", &resting, "--state", &state, "--socket", "/nonexistent"]);
    assert!(done.status.success(), "{}", text(&done.stderr));
    for (n, backup) in [running, resting].iter().enumerate() {
        let restored = path(&format!("restored-{n}"));
        let done = spillwayd(&["restore", backup, "--state", &restored]);
        assert!(done.status.success(), "{}", text(&done.stderr));
        let mut world = World::unstarted();
        std::fs::rename(&restored, world.state()).unwrap();
        world.start();
        let client = world.client();
        client.delete::<Image>("/v1/images/debian/tags/flip").ok();
        assert_eq!(seen(&client), before, "{n}");
        assert_eq!(machines(&client, "desk").len(), 300);
        assert_eq!(client.get::<List<StoreDetails>>("/v1/stores").unwrap().items.len(), 1);
        // What was imported since is not written over: the first one's folder is there for the second.
        import(&world, "debian", 1);
        let image: ImageDetails = client.get("/v1/images/debian").unwrap();
        assert_eq!(image.versions.last().unwrap().version, 3 + n as u32);
    }
    // What is no backup, or half of one, is not restored.
    let whole = std::fs::read(path("resting.db")).unwrap();
    for (name, bytes) in
        [("half", &whole[..whole.len() / 2]), ("text", b"no database".as_slice()), ("empty", b"")]
    {
        std::fs::write(path(name), bytes).unwrap();
        let refused = spillwayd(&["restore", &path(name), "--state", &path("nothing")]);
        let stderr = text(&refused.stderr);
        assert!(!refused.status.success() && stderr.contains("not a whole backup"), "{name}: {stderr}");
        assert!(!Path::new(&path("nothing/state.db")).exists());
    }
}
