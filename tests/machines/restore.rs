//! Records that are restored from a backup while machines run: the runs are newer than the records.

use crate::world::{World, reads, write};
use spillway_testkit::disk;
use std::process::Command;

fn spillwayd(arguments: &[&str]) {
    let done = Command::new(disk::daemon_program().unwrap()).args(arguments).output().unwrap();
    assert!(done.status.success(), "{arguments:?}: {}", String::from_utf8_lossy(&done.stderr));
}

#[test]
fn after_a_restore_nobody_reads_what_another_has_written() {
    let Some(mut world) = World::new("none") else { return };
    world.import("golden", "version-1");
    let common = ["--image", "golden", "--count", "1"];
    world.ok(&[&["catalog", "create", "desk"], &common[..]].concat());
    world.ok(&[&["catalog", "create", "own", "--type", "dedicated"], &common[..]].concat());
    let is_free = |machine: &serde_json::Value| {
        let status = &machine["status"];
        machine["claim"].is_null() && status["settled"] == true && status["ready"] == true
    };
    for name in ["desk-001", "own-001"] {
        world.ok(&["machine", "start", name, "--wait"]);
    }
    write(&world, "own-001", 1);
    let (state, socket) =
        (world.path("state").display().to_string(), world.path("sock").display().to_string());
    let backup = world.path("backup.db").display().to_string();
    spillwayd(&["backup", &backup, "--state", &state, "--socket", &socket]);
    // Resets that the backup knows nothing of, of both, and a claim.
    world.ok(&["machine", "reset", "own-001", "--discard-data"]);
    world.until("own-001", "reset", |_| reads(&world, "own-001", 0));
    write(&world, "own-001", 2);
    for _ in 0..3 {
        world.ok(&["machine", "claim", "desk", "--owner", "alice"]);
        world.ok(&["machine", "release", "desk-001"]);
        world.until("desk-001", "free", is_free);
    }
    world.ok(&["machine", "claim", "desk", "--owner", "alice"]);
    write(&world, "desk-001", 3);

    world.kill_daemon();
    for file in ["state.db", "state.db-wal"] {
        std::fs::rename(world.path("state").join(file), world.path(file)).unwrap();
    }
    spillwayd(&["restore", &backup, "--state", &state]);
    world.start_daemon();
    world.until("desk-001", "free", is_free);
    world.ok(&["machine", "claim", "desk", "--owner", "bob"]);
    assert!(reads(&world, "desk-001", 0), "what alice has written is gone");
    write(&world, "desk-001", 4);
    world.ok(&["machine", "release", "desk-001"]);
    world.until("desk-001", "free", is_free);
    assert!(reads(&world, "desk-001", 0), "what bob has written is gone");
    // What is kept is kept, and a reset that is asked for is one.
    assert!(reads(&world, "own-001", 2), "it keeps what it has");
    world.ok(&["machine", "reset", "own-001", "--discard-data"]);
    world.until("own-001", "reset", |_| reads(&world, "own-001", 0));
    // It is processed once.
    world.ok(&["machine", "claim", "desk", "--owner", "carol"]);
    write(&world, "desk-001", 5);
    world.kill_daemon();
    world.start_daemon();
    world.until("desk-001", "ready", |machine| machine["status"]["ready"] == true);
    assert_eq!(world.machine("desk-001")["claim"]["owner"], "carol");
    assert!(reads(&world, "desk-001", 5), "her machine goes on");
}
