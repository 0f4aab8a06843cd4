//! Guests whose image is streamed: they are paused while chunks do not come, and go on when they do.

use crate::world::World;
use serde_json::{Value, json};
use std::fs;
use std::time::{Duration, Instant};

mod qemu {
    #[test]
    fn a_guest_is_stopped_while_chunks_do_not_come() {
        super::a_guest_is_stopped_while_chunks_do_not_come("qemu");
    }
}

mod libvirt {
    #[test]
    fn a_guest_is_stopped_while_chunks_do_not_come() {
        super::a_guest_is_stopped_while_chunks_do_not_come("libvirt");
    }
}

const MIB: usize = 1 << 20;

fn a_guest_is_stopped_while_chunks_do_not_come(hypervisor: &'static str) {
    let Some(mut world) = World::new(hypervisor) else { return };
    // The first chunk has the line that the guest looks for, each of the others its number.
    let mut content: Vec<u8> = (0..16 * MIB).map(|at| (at / MIB) as u8 + 1).collect();
    let line = b"image-1\n";
    content[..line.len()].copy_from_slice(line);
    fs::write(world.path("image.raw"), content).unwrap();
    world.ok(&["image", "import", "golden", world.path("image.raw").to_str().unwrap(), "--format", "raw"]);
    let (hub, away) = (world.path("hub"), world.path("away"));
    fs::create_dir(&hub).unwrap();
    world.ok(&["registry", "add", "hub", &format!("file://{}", hub.display())]);
    world.ok(&["image", "push", "golden", "hub"]);
    world.ok(&["image", "import", "gold", "--from", "hub/golden:1", "--residency", "boot"]);
    world.catalog("desk", 1, &["--image", "gold", "--ready", "serial:^WORKS"]);
    world.ok(&["machine", "start", "desk-001"]);
    world.until("desk-001", "ready", |machine| machine["status"]["ready"] == true);
    assert!(world.tell("desk-001", "state", "STATE").contains("image=image-1"));

    fs::rename(&hub, &away).unwrap();
    let begun = Instant::now();
    let waiting = std::thread::scope(|scope| {
        let reader = scope.spawn(|| world.tell_slow("desk-001", "all", "READ", Duration::from_secs(300)));
        world.until("desk-001", "stopped", is_held);
        assert!(begun.elapsed() > Duration::from_secs(9), "{:?}", begun.elapsed());
        assert_eq!(world.events("the guest is paused until chunks"), 1);
        fs::rename(&away, &hub).unwrap();
        reader.join().unwrap()
    });
    assert!(waiting.contains(&format!("READ {}", 16 * MIB)), "{waiting}");
    world.until("desk-001", "running", |machine| machine["status"]["message"].is_null());
    assert_eq!(world.events("the guest goes on"), 1);

    // What the boot read is known, also to other hosts of the registry.
    let shown = world.object("/v1/images/gold");
    let cached = &shown["cached"][0];
    let chunks = cached["boot_chunks"].as_u64().filter(|chunks| *chunks > 0);
    let chunks = chunks.unwrap_or_else(|| panic!("{shown:#}"));
    assert_eq!(cached["boot_bytes"], chunks * MIB as u64, "{shown:#}");
    let set = json!([{ "catalog": "desk", "chunks": chunks, "bytes": chunks * MIB as u64, "boots": 1 }]);
    assert_eq!(cached["boot_sets"], set, "{shown:#}");
    if hypervisor == "qemu" {
        the_next_daemon_lets_a_guest_go_on(&mut world);
    }
}

/// The daemon dies while a guest is paused.
fn the_next_daemon_lets_a_guest_go_on(world: &mut World) {
    take_version(world, 2);
    wait_for_chunks(world);
    world.kill_daemon();
    world.start_daemon();
    world.until("desk-001", "stopped still", is_held);
    fs::rename(world.path("away"), world.path("hub")).unwrap();
    world.until("desk-001", "running", |machine| {
        machine["status"]["message"].is_null() && machine["status"]["phase"] == "running"
    });
    assert!(world.tell("desk-001", "state", "STATE").contains("image=image-2"));

    // A guest that cannot answer gets no time to shut down, since nothing of what it has written stays.
    take_version(world, 3);
    wait_for_chunks(world);
    let begun = Instant::now();
    world.ok(&["machine", "stop", "desk-001", "--grace", "600", "--wait"]);
    assert!(begun.elapsed() < Duration::from_secs(60), "{:?}", begun.elapsed());
    assert_eq!(world.events("its guest cannot shut down"), 1);
    fs::rename(world.path("away"), world.path("hub")).unwrap();
}

/// Brings the machine to a new version of its image, of which little is on the host.
fn take_version(world: &World, number: u8) {
    let mut content: Vec<u8> = (0..16 * MIB).map(|at| (at / MIB) as u8 + 50 * number).collect();
    let line = format!("image-{number}\n");
    content[..line.len()].copy_from_slice(line.as_bytes());
    fs::write(world.path("image.raw"), content).unwrap();
    world.ok(&["image", "import", "golden", world.path("image.raw").to_str().unwrap(), "--format", "raw"]);
    world.ok(&["image", "push", &format!("golden:{number}"), "hub"]);
    let from = format!("hub/golden:{number}");
    world.ok(&["image", "import", "gold", "--from", &from, "--residency", "lazy"]);
    world.ok(&["image", "publish", &format!("gold:{number}")]);
    world.ok(&["machine", "reset", "desk-001"]);
    world.until("desk-001", "on the new version", |machine| {
        machine["status"]["run"]["version"] == number && machine["status"]["ready"] == true
    });
    let state = world.tell("desk-001", "state", "STATE");
    assert!(state.contains(&format!("image=image-{number}")), "{state}");
}

/// Takes the registry away, and lets the guest read all of its disk.
fn wait_for_chunks(world: &World) {
    fs::rename(world.path("hub"), world.path("away")).unwrap();
    let console = world.console("desk-001").unwrap();
    console.take().and_then(|()| console.keys(b"all 1\n")).unwrap();
    world.until("desk-001", "stopped", is_held);
}

fn is_held(machine: &Value) -> bool {
    machine["status"]["message"].as_str().is_some_and(|message| message.contains("guest is paused"))
}
