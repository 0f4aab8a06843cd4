//! Guests whose image is streamed: they are stopped while chunks do not come, and go on when they do.

use crate::world::World;
use serde_json::Value;
use std::fs;
use std::io::Write;
use std::os::unix::net::UnixStream;
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
        assert_eq!(world.events("the guest is stopped until chunks"), 1);
        fs::rename(&away, &hub).unwrap();
        reader.join().unwrap()
    });
    assert!(waiting.contains(&format!("READ {}", 16 * MIB)), "{waiting}");
    world.until("desk-001", "running", |machine| machine["status"]["message"].is_null());
    assert_eq!(world.events("the guest goes on"), 1);

    // What the boot read is known, also to other hosts of the registry.
    let shown = world.object("/v1/images/gold");
    assert!(shown["cached"][0]["boot_chunks"].as_u64().is_some_and(|chunks| chunks > 0), "{shown:#}");
    if hypervisor == "qemu" {
        the_next_daemon_lets_a_guest_go_on(&mut world);
    }
}

/// The daemon dies while a guest is stopped.
fn the_next_daemon_lets_a_guest_go_on(world: &mut World) {
    let (hub, away) = (world.path("hub"), world.path("away"));
    let mut content: Vec<u8> = (0..16 * MIB).map(|at| (at / MIB) as u8 + 101).collect();
    let line = b"image-2\n";
    content[..line.len()].copy_from_slice(line);
    fs::write(world.path("image.raw"), content).unwrap();
    world.ok(&["image", "import", "golden", world.path("image.raw").to_str().unwrap(), "--format", "raw"]);
    world.ok(&["image", "push", "golden:2", "hub"]);
    world.ok(&["image", "import", "gold", "--from", "hub/golden:2", "--residency", "lazy"]);
    world.ok(&["image", "publish", "gold:2"]);
    world.ok(&["machine", "reset", "desk-001"]);
    world.until("desk-001", "on the new version", |machine| {
        machine["status"]["run"]["version"] == 2 && machine["status"]["ready"] == true
    });
    assert!(world.tell("desk-001", "state", "STATE").contains("image=image-2"));
    fs::rename(&hub, &away).unwrap();
    let console = world.machines().join("desk-001/console.sock");
    UnixStream::connect(console).unwrap().write_all(b"all 1\n").unwrap();
    world.until("desk-001", "stopped", is_held);
    world.kill_daemon();
    world.start_daemon();
    world.until("desk-001", "stopped still", is_held);
    fs::rename(&away, &hub).unwrap();
    world.until("desk-001", "running", |machine| {
        machine["status"]["message"].is_null() && machine["status"]["phase"] == "running"
    });
    assert!(world.tell("desk-001", "state", "STATE").contains("image=image-2"));
}

fn is_held(machine: &Value) -> bool {
    machine["status"]["message"].as_str().is_some_and(|message| message.contains("guest is stopped"))
}
