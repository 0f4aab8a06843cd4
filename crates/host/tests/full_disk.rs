//! A file system that is full: what frees room works all the same, also after a restart; what needs space is refused with its own
//! code. The file system is small, and filled by the test as a guest would fill it.
#![allow(clippy::unwrap_used)]

mod common;

use common::{Mounted, World, create, ends, import, machines, refused};
use rustix::process::Signal;
use spillway_api::client::Client;
use spillway_api::{
    Catalog, CatalogSpec, Empty, ErrorCode, Event, EventKind, HostAction, HostDetails, ImageDetails,
    ImageImport, List, MachineDetails, NewClaim, NewHostAction, Operation, SourceFormat, StoreDetails,
};
use spillway_testkit::process::wait_until;
use std::fs::File;
use std::io::Write;
use std::path::Path;
use std::time::Duration;

/// Takes all that is left, to the last byte.
fn fill(folder: &Path) {
    let mut file = File::options().create(true).append(true).open(folder.join("a-guest")).unwrap();
    for size in [1 << 20, 4096, 512, 1] {
        while file.write_all(&vec![0xaa; size]).is_ok() {}
    }
    let refused = std::fs::write(folder.join("more"), [1; 4096]).unwrap_err();
    assert_eq!(refused.kind(), std::io::ErrorKind::StorageFull);
    let _ = std::fs::remove_file(folder.join("more"));
    while file.write_all(&[0xaa; 512]).is_ok() {}
}

/// A daemon whose state is on a file system of its own.
fn world(mount: impl FnOnce(&Path) -> Option<Mounted>) -> Option<(World, Mounted)> {
    let mut world = World::unstarted();
    std::fs::create_dir(world.state()).unwrap();
    let mounted = mount(&world.state())?;
    world.start();
    Some((world, mounted))
}

fn act(client: &Client, action: &str, names: &[&str]) {
    let asked = serde_json::json!({ "action": action, "select": { "names": names }, "discard_data": true });
    client.post::<_, List<MachineDetails>>("/v1/machine-actions", &asked).unwrap();
}

fn host(client: &Client, action: HostAction) -> HostDetails {
    client.post("/v1/host", &NewHostAction { action }).unwrap()
}

/// Something to free: machines that are to run, more versions of an image, a catalog.
fn stock(world: &World) {
    let client = world.client();
    import(world, "debian", 4);
    let path = "/v1/images/debian";
    client
        .put::<_, spillway_api::Image>(&format!("{path}/published"), &serde_json::json!({ "version": 4 }))
        .unwrap();
    create(&client, "desk", r#"{"image": "debian", "count": 12}"#).unwrap();
    create(&client, "pool", r#"{"image": "debian", "count": 4}"#).unwrap();
    for machine in machines(&client, "desk") {
        act(&client, "start", &[machine.name.as_str()]);
    }
    let any = NewClaim { any: true, ..NewClaim::default() };
    for _ in 0..2 {
        client.post::<_, MachineDetails>("/v1/catalogs/pool/claims", &any).unwrap();
    }
}

/// Each of what frees something, of things that are there still: the machines and versions of these numbers.
fn free_all(world: &World, n: usize) {
    let client = world.client();
    let names: Vec<String> =
        machines(&client, "desk").iter().map(|machine| machine.name.to_string()).collect();
    act(&client, "stop", &[&names[0]]);
    act(&client, "reset", &[&names[1]]);
    act(&client, "drain", &[&names[2]]);
    let stopped: MachineDetails = client.get(&format!("/v1/machines/{}?wait=20", names[0])).unwrap();
    assert!(stopped.status.settled, "{stopped:?}");
    client.delete::<Empty>(&format!("/v1/machines/{}", names[0])).unwrap();
    let claimed = machines(&client, "pool");
    client.delete::<MachineDetails>(&format!("/v1/machines/{}/claim", claimed[n].name)).unwrap();
    client.delete::<Empty>(&format!("/v1/images/debian/versions/{}", n + 1)).unwrap();
    // Fewer machines: those that are to run go too.
    let path = "/v1/catalogs/desk";
    let spec = client.get::<Catalog>(path).unwrap().spec;
    let count = spec.count - 2;
    client.put::<_, Catalog>(path, &CatalogSpec { count, ..spec }).unwrap();
    assert_eq!(machines(&client, "desk").len(), count as usize);
    assert!(host(&client, HostAction::Close).closed);
    assert!(!host(&client, HostAction::Open).closed);
    assert!(host(&client, HostAction::Close).closed);
}

fn frees(mount: impl FnOnce(&Path) -> Option<Mounted>) {
    let Some((mut world, _mounted)) = world(mount) else { return };
    stock(&world);
    let state = world.state();
    fill(&state);
    for n in 0..2 {
        free_all(&world, n);
        // What was freed is taken again at once.
        fill(&state);
        for signal in [Signal::KILL, Signal::TERM] {
            world.end(signal);
            fill(&state);
            world.start();
        }
    }
    let client = world.client();
    // What really needs space says so, and with its code.
    let error =
        refused(create(&client, "many", r#"{"image": "debian", "count": 20000, "naming": "many-#####"}"#));
    assert!(error.code == ErrorCode::Exhausted && error.detail.contains("make space"), "{error:?}");
    assert!(!error.detail.contains("database"), "{error:?}");
    // An event tells of it, and events go on.
    let reported = || {
        let events: List<Event> = client.get("/v1/events").unwrap();
        events.items.iter().any(|e| e.kind == EventKind::Space && e.text.contains("full")).then_some(())
    };
    wait_until(Duration::from_secs(30), reported).unwrap();
    client.delete::<Empty>("/v1/catalogs/many").unwrap();
    client.delete::<Empty>("/v1/catalogs/desk?force=true").unwrap();
    client.delete::<Empty>("/v1/catalogs/pool?force=true").unwrap();
    client.delete::<Empty>("/v1/images/debian").unwrap();
    assert_eq!(refused(client.get::<ImageDetails>("/v1/images/debian")).code, ErrorCode::NotFound);
    // With room again all is as before.
    std::fs::remove_file(state.join("a-guest")).unwrap();
    import(&world, "debian", 1);
    create(&client, "more", r#"{"image": "debian", "count": 50}"#).unwrap();
    assert_eq!(client.get::<List<StoreDetails>>("/v1/stores").unwrap().items.len(), 1);
}

#[test]
fn what_frees_room_works_on_a_tmpfs_that_is_full() {
    frees(|at| Mounted::tmpfs(at, "96m"));
}

#[test]
fn what_frees_room_works_on_an_ext4_that_is_full() {
    frees(|at| Mounted::image(at, "96M", &["mkfs.ext4", "-q", "-m", "0", "-F"]));
}

#[test]
fn what_frees_room_works_on_an_xfs_that_is_full() {
    frees(|at| Mounted::image(at, "400M", &["mkfs.xfs", "-q", "-f"]));
}

/// An import that fills the rest is told to stop: what it has made goes, and its record.
#[test]
fn an_import_is_cancelled_on_a_file_system_that_is_full() {
    let Some((world, _mounted)) = world(|at| Mounted::tmpfs(at, "96m")) else { return };
    let client = world.client();
    // The largest disk there can be, without anything in it: it takes no space, and long enough.
    let path = world.path("large").display().to_string();
    File::create(&path).unwrap().set_len(4 << 40).unwrap();
    let asked = ImageImport { path, format: SourceFormat::Raw, store: None };
    let begun: Operation = client.post("/v1/images/large/versions", &asked).unwrap();
    fill(&world.state());
    client.delete::<Empty>(&format!("/v1/operations/{}", begun.id)).unwrap();
    // Cancelled, or at the end of the room before that.
    let error = ends(&client, &begun).unwrap_err();
    assert!(matches!(error.code, ErrorCode::Cancelled | ErrorCode::Exhausted), "{error:?}");
    assert!(!error.detail.contains("until the next start"), "{error:?}");
    assert_eq!(refused(client.get::<ImageDetails>("/v1/images/large")).code, ErrorCode::NotFound);
}
