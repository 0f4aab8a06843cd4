//! What a clone's disk holds from one start of its VM to the next, by the calls that versions of Proxmox make in each case.

use super::contract::lose_power;
use super::{CLONE, MACHINE, MIB, Node, TEMPLATE, io, worker};
use crate::world::{World, kill};
use serde_json::{Value, json};
use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Command, Stdio};

/// The versions that `node.pl` knows.
const VERSIONS: [f64; 3] = [8.0, 9.0, 9.1];

/// VM 101, of one version of Proxmox. What is written to its disk is one byte.
struct Vm<'a> {
    node: &'a mut Node,
    pve: f64,
    volumes: Vec<&'a str>,
}

impl Vm<'_> {
    fn asked(&self, arguments: Value) -> Value {
        let mut asked = json!({ "vmid": 101, "volumes": self.volumes, "pve": self.pve });
        asked.as_object_mut().unwrap().extend(arguments.as_object().unwrap().clone());
        asked
    }

    fn ok(&mut self, call: &str, arguments: Value) {
        let asked = self.asked(arguments);
        self.node.ok(call, asked);
    }

    fn does(&mut self, call: &str) {
        self.ok(call, json!({}));
    }

    fn refused(&mut self, call: &str) -> String {
        let asked = self.asked(json!({}));
        self.node.refused(call, asked)
    }

    fn is_refused_as_hibernated(&mut self, call: &str) {
        let refused = self.refused(call);
        assert!(refused.contains("hibernated") && refused.contains("--delete vmstate"), "{refused}");
    }

    fn write(&mut self, byte: u8) {
        assert!(io(self.node, CLONE, &format!("write -P {byte} 1M 64k")));
    }

    fn holds(&mut self, byte: u8) {
        let is_so = io(self.node, CLONE, &format!("read -P {byte} 1M 64k"));
        assert!(is_so, "PVE {}: the disk does not hold {byte}", self.pve);
    }

    fn configuration(&mut self) -> Value {
        self.node.ok("configuration", json!({ "vmid": 101 }))
    }

    fn configure(&mut self, properties: Value) {
        self.node.ok("configure", json!({ "vmid": 101, "properties": properties }));
    }

    /// `qm set 101 --delete vmstate`, which deletes the lock, too.
    fn delete_saved_memory(&mut self) {
        self.configure(json!({}));
    }

    /// `qm unlock 101`
    fn unlock(&mut self) {
        let vmstate = self.configuration()["vmstate"].clone();
        self.configure(json!({ "vmstate": vmstate }));
    }
}

/// The daemon starts the disk again when it comes up.
fn restart_node(world: &mut World) {
    lose_power(world);
    world.until(MACHINE, "running", |machine| machine["status"]["phase"] == "running");
}

/// The same steps on each version, on a disk that is clean.
fn on_each_version(steps: impl Fn(&mut World, &mut Vm)) {
    let Some(mut world) = World::new("none") else { return };
    let Some(mut node) = Node::new(&world) else { return };
    node.template_and_clone();
    for pve in VERSIONS {
        let mut vm = Vm { node: &mut node, pve, volumes: vec![CLONE] };
        steps(&mut world, &mut vm);
        vm.configure(json!({}));
        node.of("deactivate", CLONE);
        assert_eq!(std::fs::read_dir(world.path("pve")).unwrap().count(), 0, "nothing is left of a run");
    }
}

#[test]
fn each_start_of_a_vm_that_was_off_begins_with_the_template() {
    on_each_version(|_, vm| {
        let ends = [
            ("stop", json!({})),
            ("stop", json!({ "is_shutdown": true })),
            // SIGTERM, 'quit' in the monitor, 'systemctl stop 101.scope'; SIGKILL.
            ("end_from_host", json!({})),
            ("end_from_host", json!({ "is_killed": true })),
        ];
        for (end, how) in ends {
            vm.does("start");
            vm.holds(0);
            vm.write(7);
            vm.ok(end, how);
        }
        vm.does("start");
        vm.holds(0);
        // A backup in mode stop, of disks that do not have this one with them: turns the VM off, and starts it.
        vm.write(7);
        vm.does("backup_stop_mode");
        vm.holds(0);
        vm.does("stop");
    });
}

#[test]
fn nothing_resets_the_disk_of_a_vm_that_runs() {
    on_each_version(|world, vm| {
        vm.does("start");
        vm.write(7);
        // Moves, clones and hotplug activate without hints; a start that comes too late, with one.
        vm.ok("activate", json!({ "volume": CLONE }));
        vm.holds(7);
        let hints = json!({ "plugin-may-deactivate-volume": 1 });
        vm.ok("activate", json!({ "volume": CLONE, "hints": hints }));
        vm.holds(7);
        vm.does("showcmd");
        vm.holds(7);
        assert!(vm.refused("start").contains("already running"));
        // It cannot be told who is the process of a pid file that is empty, as it is while QEMU begins.
        let pid_file = world.path("pids/101.pid");
        let pid = std::fs::read(&pid_file).unwrap();
        std::fs::write(&pid_file, "").unwrap();
        vm.ok("activate", json!({ "volume": CLONE, "hints": hints }));
        vm.holds(7);
        std::fs::write(&pid_file, pid).unwrap();
        vm.does("stop");
        // A pid file that was left, and whose process is another by now.
        vm.does("start");
        vm.write(7);
        vm.ok("end_from_host", json!({ "is_killed": true }));
        std::fs::write(&pid_file, format!("{}\n", std::process::id())).unwrap();
        vm.does("start");
        vm.holds(0);
        vm.does("stop");
    });
}

#[test]
fn a_resumed_vm_finds_what_its_disk_held() {
    on_each_version(|_, vm| {
        for is_unlocked in [false, true] {
            vm.does("start");
            vm.write(9);
            vm.does("suspend");
            vm.does("showcmd");
            if is_unlocked {
                vm.unlock();
            }
            vm.does("start");
            vm.holds(9);
            assert_eq!(vm.configuration(), json!({}), "it is resumed");
            // And once more, of the same run.
            vm.does("suspend");
            vm.does("start");
            vm.holds(9);
            vm.does("stop");
        }
        // The saved memory is deleted instead.
        vm.does("start");
        vm.holds(0);
        vm.write(9);
        vm.does("suspend");
        vm.delete_saved_memory();
        vm.does("start");
        vm.holds(0);
        vm.does("stop");
    });
}

#[test]
fn a_saved_memory_does_not_go_on_with_another_disk() {
    on_each_version(|world, vm| {
        for is_off in [true, false] {
            for is_unlocked in [true, false] {
                vm.does("start");
                vm.write(9);
                vm.does("suspend");
                if is_off {
                    world.ok(&["machine", "stop", MACHINE, "--wait"]);
                } else {
                    restart_node(world);
                }
                if is_unlocked {
                    vm.unlock();
                }
                // As often as it is tried.
                for call in ["start", "start"] {
                    vm.is_refused_as_hibernated(call);
                }
                if vm.pve >= 9.0 {
                    vm.is_refused_as_hibernated("showcmd");
                }
                vm.is_refused_as_hibernated("start");
                vm.delete_saved_memory();
                vm.does("start");
                vm.holds(0);
                vm.does("stop");
            }
        }
        // Both processes have died while the VM ran, and an activation has found the disk of after.
        vm.does("start");
        vm.write(9);
        restart_node(world);
        vm.ok("activate", json!({ "volume": CLONE }));
        vm.does("suspend");
        vm.is_refused_as_hibernated("start");
        vm.delete_saved_memory();
        vm.does("start");
        vm.does("stop");
    });
}

#[test]
fn a_vm_of_several_disks_is_resumed_with_all_or_not() {
    let Some(world) = World::new("none") else { return };
    let Some(mut node) = Node::new(&world) else { return };
    node.template_and_clone();
    let second = node.ok("clone", json!({ "volume": TEMPLATE, "vmid": 101 }));
    let second = second.as_str().unwrap();
    for pve in VERSIONS {
        let mut vm = Vm { node: &mut node, pve, volumes: vec![CLONE, second] };
        vm.does("start");
        vm.write(9);
        vm.does("suspend");
        kill(world.pid("desks-vm-101-disk-1", "disk_pid"));
        world.ok(&["machine", "stop", "desks-vm-101-disk-1", "--wait"]);
        world.ok(&["machine", "start", "desks-vm-101-disk-1", "--wait"]);
        for _ in 0..2 {
            vm.is_refused_as_hibernated("start");
            vm.holds(9);
        }
        vm.delete_saved_memory();
        vm.does("start");
        vm.holds(0);
        vm.does("stop");
    }
}

#[test]
fn what_could_not_be_forgotten_at_once_is_forgotten_before_the_disk_is_used() {
    on_each_version(|world, vm| {
        vm.does("start");
        vm.write(8);
        world.kill_daemon();
        // Proxmox warns, and the VM is off.
        let asked = vm.asked(json!({}));
        let stopped = vm.node.call("stop", asked);
        assert!(
            stopped["error"].is_null() && stopped["warned"].to_string().contains("machine stop"),
            "{stopped}"
        );
        assert!(vm.refused("start").contains("spillway"), "not without the daemon");
        world.start_daemon();
        vm.holds(8);
        vm.does("start");
        vm.holds(0);
        vm.does("stop");
        // QEMU itself fails, and the start after it goes well.
        let asked = vm.asked(json!({ "qemu_fails": true }));
        assert!(vm.node.refused("start", asked).contains("start failed"));
        vm.does("start");
        vm.does("stop");
    });
}

/// If Proxmox does not say whether a VM is hibernated, its disk stays.
#[test]
fn what_is_not_known_to_be_over_is_not_forgotten() {
    on_each_version(|_, vm| {
        vm.does("start");
        vm.write(9);
        vm.does("suspend");
        let saved = vm.configuration();
        vm.configure(json!({ "unreadable": true }));
        for call in ["activate", "deactivate"] {
            let asked = vm.asked(json!({ "volume": CLONE }));
            assert!(vm.node.refused(call, asked).contains("refused"));
        }
        vm.configure(saved);
        vm.does("start");
        vm.holds(9);
        vm.does("stop");
    });
}

/// Nor does a backup that is refused start them: the disks of VMs that are off take no memory for a job of the night.
#[test]
fn a_backup_that_is_refused_starts_no_disk() {
    let Some(world) = World::new("none") else { return };
    let Some(mut node) = Node::new(&world) else { return };
    node.template_and_clone();
    let phase = || world.machine(MACHINE)["status"]["phase"].clone();
    assert_eq!(phase(), "stopped");
    assert!(node.refused("backup", json!({ "volume": CLONE })).contains("backup=0"));
    assert_eq!(phase(), "stopped");
    assert!(!Path::new(&world.path("pve/.run-vm-101-disk-0")).exists());
    // A version that asks for the size first is refused as well.
    assert!(node.refused("backup_size", json!({ "volume": CLONE })).contains("backup=0"));
    assert_eq!(node.of("size", CLONE)[0], 16 * MIB);
}

/// QEMU's block layer on a node of the plugin's, for as long as this is there.
struct Qemu {
    program: std::process::Child,
    lines: std::io::Lines<BufReader<std::process::ChildStdout>>,
}

impl Qemu {
    fn new(node: &Value) -> Qemu {
        let mut program = Command::new("qemu-io")
            .arg(format!("json:{}", json!({ "driver": "raw", "file": node })))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let lines = BufReader::new(program.stdout.take().unwrap()).lines();
        Qemu { program, lines }
    }

    /// Whether a command goes well, or what is said instead.
    fn does(&mut self, command: &str) -> Result<(), String> {
        writeln!(self.program.stdin.as_ref().unwrap(), "{command}").unwrap();
        loop {
            let line = self.lines.next().expect("it answers").unwrap();
            if line.contains("failed") || line.contains("rror") {
                return Err(line);
            }
            if line.contains("ops/sec") {
                return Ok(());
            }
        }
    }
}

impl Drop for Qemu {
    fn drop(&mut self) {
        let _ = self.program.kill();
        let _ = self.program.wait();
    }
}

/// A guest has pages of its disk in its memory: below them, the template's content would be taken for its own.
#[test]
fn a_vm_that_runs_does_not_go_on_with_a_disk_that_was_lost() {
    let Some(world) = World::new("none") else { return };
    let Some(mut node) = Node::new(&world) else { return };
    node.template_and_clone();
    let mut vm = Vm { node: &mut node, pve: 9.1, volumes: vec![CLONE] };
    vm.does("start");
    let given = vm.node.of("blockdev", CLONE)["file"]["file"].clone();
    let mut wanted = json!({ "driver": "nbd", "server": given["server"], "export": given["export"] });
    wanted["reconnect-delay"] = 2.into();
    let mut qemu = Qemu::new(&wanted);
    qemu.does("write -P 7 1M 64k").unwrap();

    // A worker alone: the next one is of the same run.
    kill(worker(&world, MACHINE));
    qemu.does("read -P 7 1M 64k").unwrap();

    // Both processes. The daemon serves the disk again.
    let (disk, serves) = (world.pid(MACHINE, "disk_pid"), worker(&world, MACHINE));
    kill(disk);
    kill(serves);
    let is_again = |machine: &Value| {
        let pid = machine["status"]["run"]["disk_pid"].as_u64();
        machine["status"]["phase"] == "running" && pid.is_some_and(|pid| pid != u64::from(disk))
    };
    world.until(MACHINE, "running again", is_again);
    vm.holds(0);
    let refused = qemu.does("read -P 0 1M 64k").unwrap_err();
    assert!(refused.contains("Input/output error"), "{refused}");
    // Nor later, as often as it is tried.
    assert!(qemu.does("write -P 7 1M 64k").is_err());
    vm.holds(0);
    drop(qemu);

    // The next start has the name of its own run.
    vm.does("stop");
    vm.does("start");
    let next = vm.node.of("blockdev", CLONE)["file"]["file"].clone();
    assert_ne!(next["export"], given["export"]);
    wanted["export"] = next["export"].clone();
    Qemu::new(&wanted).does("read -P 0 1M 64k").unwrap();
    vm.does("stop");
}
