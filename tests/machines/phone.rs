//! Guests that say themselves that they are ready, by an HTTP POST.

use crate::world::{BOOT, World};
use serde_json::Value;
use spillway_testkit::console::Console;
use spillway_testkit::cpio::{Entry, archive};
use spillway_testkit::guest::Kit;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

/// Kernel modules of a network card, in the order in which they are loaded.
const MODULES: [&str; 3] = ["net/core/failover", "drivers/net/net_failover", "drivers/net/virtio_net"];

/// What a guest does: it finds the URL in its seed disk, tries what is wrong, and then phones home each time it is told to.
const GUEST: &str = r#"#!/bin/busybox sh
stty -F /dev/ttyS0 -echo
exec </dev/ttyS0 >/dev/ttyS0 2>&1
for module in failover net_failover virtio_net; do insmod /payload/$module.ko; done
ifconfig eth0 10.0.2.15 netmask 255.255.255.0 up
url=$(grep -ao 'http://10.0.2.100/phone-home/[0-9a-f]*' /dev/vdb | head -n 1)
for wrong in "${url%?}" http://10.0.2.100/v1/machines; do
    wget -T 1 -q -O - --post-data x "$wrong" && echo ANSWERED
done
wget -T 1 -q -O - "$url" && echo ANSWERED
echo "TRIED ${url##*/}"
while read -r word; do
    echo "CALLS $word"
    until wget -q -O - --post-data "instance_id=x&hostname=x" "$url"; do echo "AGAIN $word"; sleep 1; done
    echo "PHONED $word"
done
"#;

/// An initrd of such guests.
fn initrd(kit: &Kit, world: &World) -> String {
    let release = std::fs::read_to_string(kit.dir().join("kernel-release")).unwrap();
    let mut payload = vec![Entry::directory("payload"), Entry::file("payload/run", 0o755, GUEST)];
    for module in MODULES {
        let (from, to) = (
            format!("/usr/lib/modules/{}/kernel/{module}.ko", release.trim()),
            world.path(Path::new(module).file_name().unwrap().to_str().unwrap()),
        );
        let dump = format!("dump {from} {}", to.display());
        assert!(
            Command::new("debugfs").args(["-R", &dump]).arg(kit.golden()).output().unwrap().status.success()
        );
        let name = to.file_name().unwrap().to_str().unwrap();
        payload.push(Entry::file(&format!("payload/{name}.ko"), 0o644, std::fs::read(&to).unwrap()));
    }
    let mut initrd = std::fs::read(kit.initrd()).unwrap();
    initrd.resize(initrd.len().next_multiple_of(4), 0);
    initrd.extend(archive(&payload).unwrap());
    let path = world.path("phone-initrd");
    std::fs::write(&path, initrd).unwrap();
    path.to_str().unwrap().to_owned()
}

/// Waits until the guest has written a line with this word; what follows the word there.
fn heard(console: &mut Console, word: &str) -> String {
    let line = |console: &Console| {
        let text = console.text();
        let whole = &text[..text.rfind('\n').map_or(0, |end| end + 1)];
        whole.lines().find_map(|line| Some(line.split_once(word)?.1.trim().to_owned()))
    };
    assert!(console.until(BOOT, |console| line(console).is_some()), "no {word}: {}", console.text());
    line(console).unwrap()
}

#[test]
fn a_guest_phones_home_through_a_door_of_its_own() {
    let Some(mut world) = World::new("qemu") else { return };
    let kit = Kit::find().unwrap();
    world.import("golden", "version-1");
    let (kernel, initrd) = (kit.kernel(), initrd(&kit, &world));
    world.ok(&[
        "catalog",
        "create",
        "desk",
        "--image",
        "golden",
        "--count",
        "1",
        "--memory",
        "256M",
        "--ready",
        "phone-home",
        "--kernel",
        kernel.to_str().unwrap(),
        "--initrd",
        &initrd,
        "--append",
        "console=ttyS0 quiet loglevel=4 panic=1 cryptomgr.notests nokaslr",
    ]);
    world.ok(&["machine", "start", "desk-001"]);
    world.until("desk-001", "running", |machine| machine["status"]["phase"] == "running");
    let mut console = world.console("desk-001").unwrap();
    let secret = heard(&mut console, "TRIED ");
    assert_eq!((secret.len(), console.text().contains("ANSWERED")), (64, false), "{secret}");
    let is_ready = |machine: &Value| machine["status"]["ready"] == true;
    assert!(!is_ready(&world.machine("desk-001")));
    // It calls while no daemon listens, and is told to call again by the next one.
    world.kill_daemon();
    console.take().unwrap();
    console.keys(b"first\n").unwrap();
    heard(&mut console, "CALLS first");
    world.start_daemon();
    world.until("desk-001", "ready", is_ready);
    heard(&mut console, "AGAIN first");
    heard(&mut console, "PHONED first");
    // One that boots again within its VMM, or has not received the answer, repeats its call.
    console.keys(b"second\n").unwrap();
    heard(&mut console, "PHONED second");

    // The next boot has another secret, and the old one is worth nothing.
    world.ok(&["machine", "reset", "desk-001"]);
    let begun = Instant::now();
    let mut console = loop {
        let reset = world.machine("desk-001");
        if reset["status"]["phase"] == "running" && !is_ready(&reset) {
            break world.console("desk-001").unwrap();
        }
        assert!(begun.elapsed() < BOOT, "{reset:#}");
        std::thread::sleep(Duration::from_millis(50));
    };
    let has_another = |console: &Console| console.text().matches("TRIED ").count() == 2;
    assert!(console.until(BOOT, has_another), "{}", console.text());
    assert_eq!(console.text().matches(&format!("TRIED {secret}")).count(), 1);
    // It calls a while after a daemon has adopted it, and is not told to call again.
    world.kill_daemon();
    world.start_daemon();
    world.until("desk-001", "running", |machine| machine["status"]["phase"] == "running");
    std::thread::sleep(Duration::from_secs(3));
    console.take().unwrap();
    console.keys(b"third\n").unwrap();
    heard(&mut console, "PHONED third");
    assert!(!console.text().contains("AGAIN third"), "{}", console.text());
    world.until("desk-001", "ready", is_ready);
}

#[test]
fn catalogs_that_could_never_phone_home_are_refused() {
    let Some(mut world) = World::new("none") else { return };
    world.import("golden", "version-1");
    let create = |world: &World, network: &str| {
        world.spillway(&[
            "catalog",
            "create",
            "desk",
            "--image",
            "golden",
            "--ready",
            "phone-home",
            "--network",
            network,
        ])
    };
    let (code, _, err) = create(&world, "none");
    assert!(code == 2 && err.contains("without a network cannot phone home"), "{code} {err}");
    let (code, _, err) = create(&world, "bridge=br0");
    assert!(code == 2 && err.contains("--phone-home ADDRESS:PORT"), "{code} {err}");
    world.kill_daemon();
    world.options.extend(["--phone-home", "127.0.0.1:9"].map(String::from));
    world.start_daemon();
    assert_eq!(create(&world, "bridge=br0").0, 0);
}
