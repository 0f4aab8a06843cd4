//! A machine whose disk has nothing that firmware starts: it runs, and says why it is not ready.

use crate::world::World;

#[test]
fn a_machine_that_stays_at_its_firmware_says_so() {
    let Some(world) = World::new("qemu") else { return };
    // A line of text and zeroes.
    world.import("blank", "version-1");
    let create = ["catalog", "create", "blank", "--image", "blank", "--count", "1", "--network", "none"];
    world.ok(&[&create[..], &["--memory", "128M", "--ready", "agent"]].concat());
    let check = world.json(&["image", "check", "blank"]);
    assert!(
        check["boot"]["bios_code"] == false && check["findings"][0]["kind"] == "no_boot_loader",
        "{check}"
    );
    world.ok(&["machine", "start", "blank-001"]);
    let found = world.until("blank-001", "known to stay at its firmware", |machine| {
        machine["status"]["message"].as_str().is_some_and(|why| why.contains("no boot loader"))
    });
    assert!(found["status"]["phase"] == "running" && found["status"]["ready"] == false, "{found}");
    let (_, shown, _) = world.spillway(&["machine", "show", "blank-001"]);
    assert!(shown.contains("image check"), "{shown}");
}
