//! The storage plugin for Proxmox VE (`deploy/proxmox`), called as Proxmox calls it, with tainted input; and the nodes that it gives to
//! QEMU, in Debian's QEMU with a Debian on them.
//!
//! What Proxmox is here is `proxmox/node.pl`, of our own: a contract test. Nothing here is Proxmox.

mod contract;
mod guests;
mod page;
mod runs;

use crate::world::World;
use serde_json::{Value, json};
use spillway_testkit::{disk, has_program, skip};
use std::io::{BufRead, BufReader, Write};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

const MIB: u64 = 1 << 20;
const TEMPLATE: &str = "base-9000-disk-0";
const CLONE: &str = "base-9000-disk-0/vm-101-disk-0";
/// The machine that the daemon has for it.
const MACHINE: &str = "desks-vm-101-disk-0";

/// A node of Proxmox, with a storage that is called `desks`.
struct Node {
    perl: Child,
    input: ChildStdin,
    output: BufReader<ChildStdout>,
    config: Value,
}

impl Node {
    /// `None`: Perl, or its module that Proxmox has, is not here, which is said.
    fn new(world: &World) -> Option<Node> {
        let has_json = has_program("perl")
            && Command::new("perl").args(["-MJSON", "-e", "1"]).output().unwrap().status.success();
        if !has_json {
            skip("Perl's JSON is not installed: run 'make install-deps'");
            return None;
        }
        let tests = Path::new(env!("CARGO_MANIFEST_DIR"));
        std::fs::create_dir_all(world.path("pids")).unwrap();
        let mut perl = Command::new("perl")
            .args(["-T", tests.join("machines/proxmox/node.pl").to_str().unwrap()])
            .arg(tests.join("../deploy/proxmox/SpillwayPlugin.pm").canonicalize().unwrap())
            .arg(disk::program().unwrap())
            .arg(world.path("pids"))
            // Whatever comes from the environment is not to be trusted, and makes what it is added to so.
            .env("TAINT", "tainted")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let (input, output) = (perl.stdin.take().unwrap(), BufReader::new(perl.stdout.take().unwrap()));
        let config = json!({
            "type": "spillway",
            "spillway-dir": world.path("pve"),
            "spillway-state": world.path("state"),
            "spillway-socket": world.path("sock"),
            "spillway-ram": "8M",
            "spillway-overflow": "64M",
            "spillway-full": "fail",
        });
        let mut node = Node { perl, input, output, config };
        node.ok("activate_storage", json!({}));
        Some(node)
    }

    fn call(&mut self, call: &str, arguments: Value) -> Value {
        let mut asked = json!({ "call": call, "storage": "desks", "config": self.config });
        asked.as_object_mut().unwrap().extend(arguments.as_object().unwrap().clone());
        writeln!(self.input, "{asked}").unwrap();
        let mut line = String::new();
        self.output.read_line(&mut line).unwrap();
        serde_json::from_str(&line).unwrap_or_else(|e| panic!("{call}: {e}: {line}"))
    }

    fn ok(&mut self, call: &str, arguments: Value) -> Value {
        let answer = self.call(call, arguments.clone());
        assert!(answer["error"].is_null(), "{call} {arguments}: {answer}");
        assert!(answer["warned"].as_array().unwrap().is_empty(), "{call} {arguments}: {answer}");
        answer["result"].clone()
    }

    /// What is said instead.
    fn refused(&mut self, call: &str, arguments: Value) -> String {
        let answer = self.call(call, arguments.clone());
        let error = answer["error"].as_str();
        let error = error.unwrap_or_else(|| panic!("{call} {arguments} is not refused: {answer}"));
        // Words of the plugin's, not Perl's of a line of it.
        assert!(error.ends_with('\n') && !error.contains(" line "), "{call} {arguments}: {error}");
        error.to_owned()
    }

    fn of(&mut self, call: &str, volume: &str) -> Value {
        self.ok(call, json!({ "volume": volume }))
    }

    /// The volumes of the storage, and their sizes.
    fn volumes(&mut self) -> Vec<(String, u64)> {
        let listed = self.ok("list", json!({}));
        let of =
            |volume: &Value| (volume["volid"].as_str().unwrap().to_owned(), volume["size"].as_u64().unwrap());
        let mut volumes: Vec<_> = listed.as_array().unwrap().iter().map(of).collect();
        volumes.sort();
        volumes
    }

    /// A disk of VM 9000 with this first byte becomes a template, and VM 101 a clone of it.
    fn template_and_clone(&mut self) {
        let made = self.ok("alloc", json!({ "vmid": 9000, "kib": 16 << 10 }));
        assert_eq!(made, "vm-9000-disk-0");
        let path = self.of("path", "vm-9000-disk-0")[0].as_str().unwrap().to_owned();
        let file = std::fs::File::options().write(true).open(&path).unwrap();
        file.write_all_at(b"v", 0).unwrap();
        assert_eq!(self.of("create_base", "vm-9000-disk-0"), TEMPLATE);
        assert!(!Path::new(&path).exists(), "it is in the image");
        assert_eq!(self.ok("clone", json!({ "volume": TEMPLATE, "vmid": 101 })), CLONE);
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        let _ = self.perl.kill();
        let _ = self.perl.wait();
    }
}

/// Whether a command of qemu-io goes well on a volume, opened by its path as Proxmox does.
fn io(node: &mut Node, volume: &str, command: &str) -> bool {
    let path = node.of("path", volume)[0].as_str().unwrap().to_owned();
    let done = Command::new("qemu-io").args(["-f", "raw", "-c", command, &path]).output().unwrap();
    // A comparison that fails is said on standard output.
    done.status.success() && !String::from_utf8_lossy(&done.stdout).contains("ailed")
}

/// The worker that serves a machine's disk.
fn worker(world: &World, machine: &str) -> u32 {
    let keeper = world.pid(machine, "disk_pid");
    let children = std::fs::read_to_string(format!("/proc/{keeper}/task/{keeper}/children")).unwrap();
    children.trim().parse().expect("one worker")
}
