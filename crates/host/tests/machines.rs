//! Machines that are deleted one by one, and machines whose disks cannot become versions. None is started here: the lab has
//! tests of those that are.
#![allow(clippy::unwrap_used)]

mod common;

use common::{World, create, import, machines, refused};
use rustix::process::Signal;
use spillway_api::client::Client;
use spillway_api::{
    Catalog, CatalogSpec, Empty, ErrorCode, Event, EventKind, Hardware, HostAction, HostDetails, Image,
    ImageCommit, ImageDetails, List, Machine, MachineDetails, MachineStatus, NewClaim, NewHostAction,
    Operation, Phase, Power, VersionChoice,
};
use spillway_testkit::process::wait_until;
use std::collections::HashSet;
use std::os::unix::fs::PermissionsExt;
use std::time::Duration;

/// Asks machines to do something.
fn act(client: &Client, action: &str, name: &str) {
    let asked = serde_json::json!({ "action": action, "select": { "names": [name] } });
    client.post::<_, List<MachineDetails>>("/v1/machine-actions", &asked).unwrap();
}

/// Waits until a machine is off, as it is wanted.
fn is_off(client: &Client, name: &str) {
    let is_off = || {
        let machine: MachineDetails = client.get(&format!("/v1/machines/{name}?wait=1")).unwrap();
        (machine.power == Power::Off && machine.status.settled).then_some(())
    };
    wait_until(Duration::from_secs(30), is_off).unwrap_or_else(|| panic!("{name} is not off"));
}

fn scale(client: &Client, catalog: &str, count: u32) {
    let path = format!("/v1/catalogs/{catalog}");
    let spec = CatalogSpec { count, ..client.get::<Catalog>(&path).unwrap().spec };
    client.put::<_, Catalog>(&path, &spec).unwrap();
}

fn numbers(client: &Client, catalog: &str) -> Vec<u32> {
    machines(client, catalog).iter().map(|machine| machine.number).collect()
}

#[test]
fn a_deleted_machine_leaves_a_gap_which_another_one_fills() {
    let mut world = World::new();
    import(&world, "debian", 1);
    let client = world.client();
    create(&client, "desk", r#"{"image": "debian", "count": 5}"#).unwrap();
    let five = machines(&client, "desk");
    for name in ["desk-002", "desk-004"] {
        client.delete::<Empty>(&format!("/v1/machines/{name}")).unwrap();
        assert_eq!(refused(client.get::<Machine>(&format!("/v1/machines/{name}"))).code, ErrorCode::NotFound);
    }
    let three = [&five[0], &five[2], &five[4]].map(Clone::clone);
    assert_eq!(machines(&client, "desk"), three);
    assert_eq!(client.get::<Catalog>("/v1/catalogs/desk").unwrap().spec.count, 3);
    // Neither the next daemon nor another change takes a gap for a machine that is missing.
    world.end(Signal::KILL);
    world.start();
    let client = world.client();
    assert_eq!(machines(&client, "desk"), three);
    scale(&client, "desk", 3);
    assert_eq!(machines(&client, "desk"), three);
    // Gaps are filled first, by others; those with the highest numbers go.
    scale(&client, "desk", 4);
    assert_eq!(numbers(&client, "desk"), [1, 2, 3, 5]);
    scale(&client, "desk", 6);
    let six = machines(&client, "desk");
    assert_eq!(six.iter().map(|machine| machine.number).collect::<Vec<_>>(), [1, 2, 3, 4, 5, 6]);
    let uuids: HashSet<_> = five.iter().chain(&six).map(|machine| &machine.identity.uuid).collect();
    assert_eq!(uuids.len(), 5 + 3, "an identity is given once");
    client.delete::<Empty>("/v1/machines/desk-001").unwrap();
    scale(&client, "desk", 2);
    assert_eq!(numbers(&client, "desk"), [2, 3]);
    // A name that is free is anybody's, and whose it is then keeps nobody else from going on.
    let taken = r#"{"image": "debian", "count": 1, "naming": "desk-00#"}"#;
    create(&client, "other", taken).unwrap();
    scale(&client, "desk", 1);
    let spec = CatalogSpec { count: 2, ..client.get::<Catalog>("/v1/catalogs/desk").unwrap().spec };
    let error = refused(client.put::<_, Catalog>("/v1/catalogs/desk", &spec));
    assert!(error.code == ErrorCode::Exists && error.detail.contains("'desk-001'"), "{error:?}");
    world.end(Signal::KILL);
    world.start();
    assert_eq!(numbers(&world.client(), "desk"), [2]);
}

#[test]
fn machines_that_somebody_needs_are_not_deleted() {
    let world = World::new();
    import(&world, "debian", 1);
    let client = world.client();
    create(&client, "desk", r#"{"image": "debian", "count": 3}"#).unwrap();
    create(&client, "pool", r#"{"image": "debian", "count": 1, "warm": 1}"#).unwrap();
    let refuses = |name: &str, code: ErrorCode, word: &str| {
        let error = refused(client.delete::<Empty>(&format!("/v1/machines/{name}")));
        assert!(error.code == code && error.detail.contains(word), "{name}: {error:?}");
    };
    act(&client, "start", "desk-001");
    refuses("desk-001", ErrorCode::Conflict, "stop it first ('spillway machine stop desk-001 --wait')");
    let any = NewClaim { any: true, ..NewClaim::default() };
    let claimed: MachineDetails = client.post("/v1/catalogs/desk/claims", &any).unwrap();
    let claimed = claimed.machine.name.as_str();
    act(&client, "stop", claimed);
    is_off(&client, claimed);
    refuses(claimed, ErrorCode::Conflict, "is claimed: release it first");
    refuses("desk-007", ErrorCode::NotFound, "no machine 'desk-007'");
    act(&client, "drain", "pool-001");
    is_off(&client, "pool-001");
    refuses("pool-001", ErrorCode::Invalid, "1 of its machines are kept warm, and count would be 0");
    let error = refused(client.delete::<Empty>("/v1/machines/desk-003?with_daat=true"));
    assert_eq!(error.code, ErrorCode::Invalid, "{error:?}");
    assert_eq!(client.get::<Catalog>("/v1/catalogs/desk").unwrap().spec.count, 3);
    assert_eq!(numbers(&client, "desk"), [1, 2, 3]);
    // Nor with their catalog, unless that is said.
    let path = "/v1/catalogs/desk";
    let spec = client.get::<Catalog>(path).unwrap().spec;
    let none = CatalogSpec { count: 0, ..spec.clone() };
    let errors = [refused(client.put::<_, Catalog>(path, &none)), refused(client.delete::<Empty>(path))];
    for error in errors {
        let explained =
            error.detail.contains("is claimed: release it first") && error.detail.contains("--force");
        assert!(error.code == ErrorCode::InUse && explained, "{error:?}");
    }
    assert_eq!(client.get::<Catalog>(path).unwrap().spec.count, 3);
    client.put::<_, Catalog>(&format!("{path}?force=true"), &CatalogSpec { count: 1, ..spec }).unwrap();
    client.delete::<Empty>(&format!("{path}?force=true")).unwrap();
    let left = client.get::<List<Machine>>("/v1/machines").unwrap().items;
    assert!(left.iter().all(|machine| machine.catalog.as_str() == "pool"), "{left:?}");
}

#[test]
fn what_keeps_writes_is_given_to_nobody() {
    let world = World::new();
    import(&world, "debian", 1);
    let client = world.client();
    let any = NewClaim { any: true, ..NewClaim::default() };
    for (name, more, why) in [
        ("own", r#""type": "dedicated""#, "keep their data"),
        ("never", r#""reset": "never""#, "keep their data"),
        ("data", r#""data_disk_bytes": 1048576"#, "have data disks"),
    ] {
        create(&client, name, &format!(r#"{{"image": "debian", "count": 1, {more}}}"#)).unwrap();
        let claims = format!("/v1/catalogs/{name}/claims");
        let error = refused(client.post::<_, MachineDetails>(&claims, &any));
        assert!(error.code == ErrorCode::Conflict && error.detail.contains(why), "{error:?}");
    }
}

#[test]
fn a_host_that_is_closed_starts_nothing_until_it_is_opened() {
    let mut world = World::new();
    import(&world, "debian", 1);
    let client = world.client();
    create(&client, "desk", r#"{"image": "debian", "count": 2}"#).unwrap();
    create(&client, "pool", r#"{"image": "debian", "count": 2, "warm": 1, "autostart": true}"#).unwrap();
    act(&client, "start", "desk-001");
    let on = |client: &Client| {
        let all: List<MachineDetails> = client.get("/v1/machines").unwrap();
        let on = all.items.into_iter().filter(|machine| machine.power == Power::On);
        on.map(|machine| machine.machine.name.to_string()).collect::<Vec<_>>()
    };
    let is_on = |client: &Client, names: &[&str]| {
        wait_until(Duration::from_secs(20), || (on(client) == names).then_some(()))
            .unwrap_or_else(|| panic!("{names:?} are not on, but {:?}", on(client)));
    };
    is_on(&client, &["desk-001", "pool-001", "pool-002"]);
    let ask = |client: &Client, action: HostAction| -> HostDetails {
        client.post("/v1/host", &NewHostAction { action }).unwrap()
    };
    assert!(!client.get::<HostDetails>("/v1/host").unwrap().closed);
    assert!(ask(&client, HostAction::Close).closed);
    let stays_off = |client: &Client| {
        std::thread::sleep(Duration::from_millis(700));
        assert_eq!(on(client), [""; 0]);
    };
    stays_off(&client);
    let any = NewClaim { any: true, ..NewClaim::default() };
    let start = serde_json::json!({ "action": "start", "select": { "all": true } });
    for error in [
        refused(client.post::<_, MachineDetails>("/v1/catalogs/pool/claims", &any)),
        refused(client.post::<_, List<MachineDetails>>("/v1/machine-actions", &start)),
    ] {
        assert!(error.code == ErrorCode::Conflict && error.detail.contains("host open"), "{error:?}");
    }
    world.end(Signal::KILL);
    world.start();
    let client = world.client();
    stays_off(&client);
    assert!(client.get::<HostDetails>("/v1/host").unwrap().closed);
    assert!(!ask(&client, HostAction::Open).closed);
    is_on(&client, &["pool-001"]);
    act(&client, "start", "desk-002");
    is_on(&client, &["desk-002", "pool-001"]);
}

/// Of many that delete and scale at once each is whole: the count is that of the machines.
#[test]
fn deletions_at_once_are_counted_once() {
    let world = World::new();
    import(&world, "debian", 1);
    create(&world.client(), "desk", r#"{"image": "debian", "count": 40}"#).unwrap();
    let socket = world.socket();
    let deleted: u32 = std::thread::scope(|scope| {
        let threads = [0, 1, 2, 3].map(|first| {
            let socket = &socket;
            scope.spawn(move || {
                let client = Client::new(socket).unwrap();
                // Each machine is two threads'.
                let each = (1 + first / 2..=40).step_by(2);
                let delete = |n: u32| client.delete::<Empty>(&format!("/v1/machines/desk-{n:03}")).is_ok();
                each.map(|n| u32::from(delete(n))).sum::<u32>()
            })
        });
        threads.into_iter().map(|thread| thread.join().unwrap()).sum()
    });
    let client = world.client();
    assert_eq!((deleted, numbers(&client, "desk").len()), (40, 0));
    assert_eq!(client.get::<Catalog>("/v1/catalogs/desk").unwrap().spec.count, 0);
}

#[test]
fn a_disk_that_is_not_kept_or_not_there_becomes_no_version() {
    let world = World::new();
    import(&world, "debian", 1);
    let client = world.client();
    create(&client, "desk", r#"{"image": "debian", "count": 1}"#).unwrap();
    create(&client, "still", r#"{"image": "debian", "count": 1, "reset": "never"}"#).unwrap();
    create(&client, "own", r#"{"image": "debian", "count": 2, "type": "dedicated"}"#).unwrap();
    act(&client, "start", "own-002");
    for (machine, code, words) in [
        (
            "desk-001",
            ErrorCode::Conflict,
            ["mode ram+overflow is gone when its machine stops", "--type dedicated"],
        ),
        ("still-001", ErrorCode::Conflict, ["mode ram+overflow is gone", "--type dedicated"]),
        ("own-001", ErrorCode::Conflict, ["never started", "its disk is its image"]),
        ("own-002", ErrorCode::Conflict, ["own-002 is to run", "machine stop own-002 --wait"]),
        ("own-003", ErrorCode::NotFound, ["no machine 'own-003'", "do you mean"]),
    ] {
        let commit = ImageCommit { machine: machine.parse().unwrap(), publish: true };
        let error = refused(client.post::<_, Operation>("/v1/images/debian/commits", &commit));
        let explained = words.iter().all(|word| error.detail.contains(word));
        assert!(error.code == code && explained, "{machine}: {error:?}");
    }
    let unknown = serde_json::json!({ "machine": "own-001", "force": true });
    let error = refused(client.post::<_, Operation>("/v1/images/debian/commits", &unknown));
    assert!(error.code == ErrorCode::Invalid && error.detail.contains("unknown field `force`"), "{error:?}");
    let image: ImageDetails = client.get("/v1/images/debian").unwrap();
    assert_eq!((image.versions.len(), image.image.newest), (1, 1), "nothing was begun");
}

fn damage(world: &World, version: u32, bytes: u64) {
    let stored = world.state().join(format!("store/images/debian/{version}/disk.raw"));
    std::fs::set_permissions(&stored, PermissionsExt::from_mode(0o644)).unwrap();
    std::fs::File::options().write(true).open(&stored).unwrap().set_len(bytes).unwrap();
}

/// A machine of which nothing is to be done, as it is after this change.
fn settled(client: &Client, name: &str) -> MachineStatus {
    let status = || {
        let machine: MachineDetails = client.get(&format!("/v1/machines/{name}?wait=5")).unwrap();
        machine.status.settled.then_some(machine.status)
    };
    wait_until(Duration::from_secs(30), status).unwrap_or_else(|| panic!("{name} is not settled"))
}

/// How often it was told that a machine has failed.
fn failures(client: &Client, name: &str) -> usize {
    let events: List<Event> = client.get("/v1/events").unwrap();
    let failed =
        |event: &&Event| event.kind == EventKind::Failed && event.object == format!("machine/{name}");
    events.items.iter().filter(failed).count()
}

/// A disk of such an image fails each time. What passes is told by another reason: there is no program that could serve one.
#[test]
fn a_failure_that_no_retry_mends_is_final_until_something_changes() {
    const WHOLE: u64 = 1 << 20;
    let world = World::new();
    import(&world, "debian", 1);
    let client = world.client();
    create(&client, "desk", r#"{"image": "debian", "count": 1}"#).unwrap();
    create(&client, "other", r#"{"image": "debian", "count": 1}"#).unwrap();
    let is_final = |what: &str| {
        let status = settled(&client, "desk-001");
        let why = status.message.clone().unwrap_or_default();
        assert!(status.phase == Phase::Failed && status.permanent, "{what}: {status:?}");
        assert!(why.contains("not a multiple of 512") && why.contains("machine start"), "{what}: {why}");
    };
    let may_pass = |what: &str| {
        let status = settled(&client, "desk-001");
        let why = status.message.clone().unwrap_or_default();
        assert!(status.phase == Phase::Failed && !status.permanent, "{what}: {status:?}");
        assert!(why.contains("/nonexistent/spillway"), "{what}: {why}");
    };
    let with = |spec: CatalogSpec, vcpus: u32| {
        let hardware = Hardware { vcpus, ..spec.hardware };
        CatalogSpec { hardware, ..spec }
    };
    let change = |vcpus: u32| {
        let spec = client.get::<Catalog>("/v1/catalogs/desk").unwrap().spec;
        client.put::<_, Catalog>("/v1/catalogs/desk", &with(spec, vcpus)).unwrap();
    };
    damage(&world, 1, 1000);
    act(&client, "start", "desk-001");
    is_final("the first start");
    assert_eq!(failures(&client, "desk-001"), 1);
    // It would not fail so any more; and what wakes its task, or is of another catalog, is no reason to try.
    damage(&world, 1, WHOLE);
    for vcpus in [2, 3, 4] {
        let spec = client.get::<Catalog>("/v1/catalogs/other").unwrap().spec;
        client.put::<_, Catalog>("/v1/catalogs/other", &with(spec, vcpus)).unwrap();
        act(&client, "start", "other-001");
        assert_eq!(settled(&client, "other-001").phase, Phase::Failed);
        is_final("another catalog has changed");
    }
    assert_eq!(failures(&client, "desk-001"), 1, "it was not tried again");
    act(&client, "start", "desk-001");
    may_pass("was started since");

    damage(&world, 1, 1000);
    act(&client, "start", "desk-001");
    is_final("damaged again");
    damage(&world, 1, WHOLE);
    change(2);
    let tried =
        wait_until(Duration::from_secs(30), || (!settled(&client, "desk-001").permanent).then_some(()));
    tried.expect("its catalog has other settings, and it is not tried");
    may_pass("its catalog has other settings");

    damage(&world, 1, 1000);
    act(&client, "start", "desk-001");
    is_final("damaged a third time");
    import(&world, "debian", 1);
    is_final("a version that nobody takes");
    client.put::<_, Image>("/v1/images/debian/published", &VersionChoice { version: 2 }).unwrap();
    let tried =
        wait_until(Duration::from_secs(30), || (!settled(&client, "desk-001").permanent).then_some(()));
    tried.expect("its catalog has another image, and it is not tried");
    may_pass("its catalog has another version");
    act(&client, "stop", "desk-001");
    is_off(&client, "desk-001");
}
