//! Guests whose image is streamed: they are stopped while chunks do not come, and go on when they do.

use crate::world::{World, kill};
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
        let held = |machine: &serde_json::Value| {
            machine["status"]["message"].as_str().is_some_and(|message| message.contains("guest is stopped"))
        };
        world.until("desk-001", "stopped", held);
        assert!(begun.elapsed() > Duration::from_secs(9), "{:?}", begun.elapsed());
        assert_eq!(world.events("the guest is stopped until chunks"), 1);
        fs::rename(&away, &hub).unwrap();
        reader.join().unwrap()
    });
    assert!(waiting.contains(&format!("READ {}", 16 * MIB)), "{waiting}");
    world.until("desk-001", "running", |machine| machine["status"]["message"].is_null());
    assert_eq!(world.events("the guest goes on"), 1);

    // The daemon dies while a guest is stopped: the next one lets it go on.
    world.ok(&["image", "import", "more", "--from", "hub/golden:1", "--residency", "lazy"]);
    let boot_set = world.object("/v1/images/gold");
    assert!(boot_set["cached"][0]["boot_chunks"].as_u64().is_some_and(|chunks| chunks > 0), "{boot_set:#}");
    world.ok(&["machine", "reset", "desk-001"]);
    world.until("desk-001", "ready", |machine| machine["status"]["ready"] == true);
    kill(world.pid("desk-001", "disk_pid"));
    world.until("desk-001", "ready", |machine| machine["status"]["ready"] == true);
    assert!(world.tell("desk-001", "state", "STATE").contains("image=image-1"));
    world.kill_daemon();
    world.start_daemon();
    assert!(world.tell("desk-001", "state", "STATE").contains("image=image-1"));
}
