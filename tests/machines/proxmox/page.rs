//! `docs/how-to/proxmox.md`, followed in as far as it concerns the storage.

use super::{MACHINE, MIB, Node, io};
use crate::world::World;
use serde_json::json;
use std::collections::BTreeMap;
use std::path::Path;
use std::process::Command;

/// What `qm` and `pvesm` do of a line of the page that concerns the storage.
struct Follower<'a> {
    world: &'a World,
    node: Node,
    /// The disk of each VM.
    disks: BTreeMap<String, String>,
}

impl Follower<'_> {
    fn add_storage(&mut self, options: &[&str]) {
        let about = self.node.ok("about", json!({}));
        for option in options.chunks(2) {
            let name = option[0].strip_prefix("--").unwrap();
            assert!(!about["properties"][name].is_null(), "{option:?}");
            self.node.config[name] = option[1].into();
        }
        self.node.ok("add", json!({}));
        self.node.ok("activate_storage", json!({}));
    }

    /// A file's content in a new disk.
    fn fill_new_disk(&mut self, vm: &str, file: &str, format: &str) -> String {
        let made = self.node.ok("alloc", json!({ "vmid": vm, "kib": 16 << 10 }));
        let disk = made.as_str().unwrap().to_owned();
        let path = self.node.of("path", &disk)[0].as_str().unwrap().to_owned();
        let convert = ["convert", "-n", "-f", format, "-O", "raw", file, &path];
        assert!(Command::new("qemu-img").args(convert).status().unwrap().success());
        disk
    }

    fn follow(&mut self, line: &str) {
        let words: Vec<&str> = line.split_whitespace().collect();
        let disk = |vm: &str| self.disks.get(vm).cloned().unwrap_or_default();
        match words[..] {
            // What the package has is seen elsewhere (tests/deploy.rs); the VM's other settings are Proxmox's own.
            ["make", "deb"] | ["apt", ..] | ["qm", "create", ..] => {}
            ["pvesm", "add", "spillway", "desks", ref options @ ..] => self.add_storage(options),
            ["qm", "disk", "import", vm, file, "desks"] => {
                let file = self.world.path(file);
                let disk = self.fill_new_disk(vm, file.to_str().unwrap(), "qcow2");
                self.disks.insert(vm.into(), disk);
            }
            ["qm", "set", vm, "--scsi0", drive, ..] => {
                let volume = drive.split(',').next().unwrap();
                assert_eq!(volume.strip_prefix("desks:"), Some(&*disk(vm)));
            }
            ["qm", "template", vm] => {
                let base = self.node.of("create_base", &disk(vm));
                self.disks.insert(vm.into(), base.as_str().unwrap().into());
            }
            ["qm", "clone", from, to, "--full", ..] => {
                let path = self.node.of("path", &disk(from))[0].as_str().unwrap().to_owned();
                let copy = self.fill_new_disk(to, &path, "raw");
                self.disks.insert(to.into(), copy);
            }
            ["qm", "clone", from, to, ..] => {
                let made = self.node.ok("clone", json!({ "volume": disk(from), "vmid": to }));
                self.disks.insert(to.into(), made.as_str().unwrap().into());
            }
            ["qm", "start", vm] => {
                let disk = disk(vm);
                self.node.ok("start", json!({ "vmid": vm, "volumes": [disk] }));
                self.node.of("blockdev", &disk);
                assert!(io(&mut self.node, &disk, "read -P 0 1M 64k"), "it is clean");
                assert!(io(&mut self.node, &disk, "write -P 7 1M 64k"));
            }
            ["qm", "stop", vm] => _ = self.node.ok("stop", json!({ "vmid": vm, "volumes": [disk(vm)] })),
            ["qm", "resize", vm, "scsi0", more] => {
                let more: u64 = more.trim_matches(['+', 'G']).parse().unwrap();
                let disk = disk(vm);
                let bytes = self.node.of("size", &disk)[0].as_u64().unwrap() + (more << 30);
                self.node.ok("resize", json!({ "volume": disk, "bytes": bytes }));
                assert_eq!(self.node.of("size", &disk)[0], bytes);
            }
            _ => panic!("the test does not know what this does: {line}"),
        }
    }
}

#[test]
fn the_page_can_be_followed() {
    let Some(world) = World::new("none") else { return };
    let Some(node) = Node::new(&world) else { return };
    let page = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/how-to/proxmox.md");
    let page = std::fs::read_to_string(page).unwrap();
    let (page, _) = page.split_once("## Without the plugin").expect("the hook script has a test of its own");
    std::fs::write(world.path("golden.raw"), b"v").unwrap();
    std::fs::File::options().write(true).open(world.path("golden.raw")).unwrap().set_len(16 * MIB).unwrap();
    let [raw, qcow2] =
        ["golden.raw", "debian-12.qcow2"].map(|name| world.path(name).to_str().unwrap().to_owned());
    let convert = ["convert", "-f", "raw", "-O", "qcow2", &raw, &qcow2];
    assert!(Command::new("qemu-img").args(convert).status().unwrap().success());

    let mut follower = Follower { world: &world, node, disks: Default::default() };
    let lines: Vec<&str> = page.lines().filter(|line| line.starts_with("    ")).collect();
    assert!(lines.len() > 10, "{lines:?}");
    lines.iter().for_each(|line| follower.follow(line));
    // It is started once more.
    follower.follow("qm start 101");
    let (_, other) = follower.disks.iter().find(|(vm, _)| *vm == "9001").expect("the second template");
    assert_eq!(other, "base-9001-disk-0");
    for (kind, name) in [("machine", MACHINE), ("catalog", "desks-base-9000-disk-0")] {
        assert!(page.contains(&format!("`{name}`")));
        world.ok(&[kind, "show", name]);
    }
    let spec = world.json(&["catalog", "show", "desks-base-9000-disk-0"])["spec"].clone();
    assert_eq!((&spec["ram_bytes"], &spec["overflow_bytes"]), (&json!(512 * MIB), &json!(8u64 << 30)));
    let about = follower.node.ok("about", json!({}));
    for setting in about["properties"].as_object().unwrap().keys() {
        assert!(page.contains(&format!("`{setting}`")), "{setting} is not in the page");
    }
    assert!(page.contains("not run on a Proxmox VE host by us"));
}
