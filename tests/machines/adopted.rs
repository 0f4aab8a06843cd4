//! Domains that somebody else has made, with disposable disks: `spillway libvirt`, and libvirt's hook.

use crate::world::{BOOT, World, kill};
use spillway_testkit::disk;
use spillway_testkit::process::wait_until;
use std::os::unix::fs::PermissionsExt;
use std::process::Command;

/// All of a domain's UUID but its number.
const UUID: &str = "0a1b2c3d-1111-4222-8333-4444555566";

/// A world with the daemon's hook in libvirt's folder, and a number of domains whose guests do nothing.
struct Adopting {
    world: World,
    names: Vec<String>,
}

impl Adopting {
    fn new(domains: usize) -> Option<Adopting> {
        if !rustix::process::geteuid().is_root() {
            spillway_testkit::skip("hooks are of the system's libvirt: run as root");
            return None;
        }
        let mut world = World::new("libvirt")?;
        world.import("golden", "version-1");
        // libvirt passes no variables on, so the hook is told here where this daemon is: by the script of `docs/how-to/libvirt.md`.
        let page = include_str!("../../docs/how-to/libvirt.md");
        let script = page.split("    #!/bin/bash\n").nth(1).and_then(|rest| rest.split("\n\n").next());
        let script: String =
            script.expect("the script").lines().map(|line| format!("{}\n", line.trim())).collect();
        let text = format!("#!/bin/bash\n{script}")
            .replace("/srv/spillway/sock", &world.path("sock").display().to_string())
            .replace("/usr/bin/spillway", &disk::program().unwrap().display().to_string());
        let hook = world.path("hook");
        std::fs::write(&hook, text).unwrap();
        std::fs::set_permissions(&hook, std::fs::Permissions::from_mode(0o755)).unwrap();
        let install = format!(
            "mkdir -p /etc/libvirt/hooks/qemu.d && cp {} /etc/libvirt/hooks/qemu.d/spillway",
            hook.display()
        );
        let libvirtd = world.libvirtd().unwrap();
        let done = libvirtd.command("/bin/sh".as_ref()).args(["-c", &install]).status().unwrap();
        assert!(done.success());
        // It looks for hooks when it starts.
        libvirtd.kill();
        libvirtd.start();
        let mut adopting = Adopting { world, names: Vec::new() };
        (0..domains).for_each(|number| adopting.define(number));
        Some(adopting)
    }

    /// Defines a domain as users do, with a disk of its own.
    fn define(&mut self, number: usize) {
        let (name, own) = (format!("web{number}"), self.world.path(&format!("own{number}.raw")));
        std::fs::File::create(&own).unwrap().set_len(16 << 20).unwrap();
        let text = format!(
            "<domain type='qemu'><name>{name}</name><uuid>{UUID}{number:02x}</uuid><memory unit='MiB'>64</memory><vcpu>1</vcpu>
             <os><type arch='x86_64' machine='q35'>hvm</type></os>
             <devices><disk type='file' device='disk'><driver name='qemu' type='raw'/><source file='{}'/>
             <target dev='vda' bus='virtio'/></disk></devices></domain>",
            own.display()
        );
        let file = self.world.path("domain.xml");
        std::fs::write(&file, text).unwrap();
        self.virsh(&["define", file.to_str().unwrap()]);
        self.names.push(name);
    }

    fn virsh(&mut self, arguments: &[&str]) -> String {
        self.world.libvirtd().unwrap().virsh(arguments)
    }

    /// Has virt-install make and start a domain. False: there is none.
    fn install(&mut self) -> bool {
        if !spillway_testkit::has_program("virt-install") {
            return false;
        }
        let own = self.world.path("own.raw");
        std::fs::File::create(&own).unwrap().set_len(16 << 20).unwrap();
        let disk = format!("path={},format=raw,bus=virtio", own.display());
        let uuid = format!("{UUID}00");
        let libvirtd = self.world.libvirtd().unwrap();
        let mut install = libvirtd.command("/usr/bin/virt-install".as_ref());
        let done = install
            .args([
                "--connect",
                libvirtd.uri(),
                "--name",
                "web0",
                "--uuid",
                &uuid,
                "--memory",
                "64",
                "--vcpus",
                "1",
            ])
            .args([
                "--virt-type",
                "qemu",
                "--import",
                "--disk",
                &disk,
                "--network",
                "none",
                "--graphics",
                "none",
            ])
            .args(["--osinfo", "detect=on,require=off", "--noautoconsole"])
            .output()
            .unwrap();
        assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
        self.names.push("web0".into());
        true
    }

    /// What virsh says of what it does not do.
    fn refused(&mut self, arguments: &[&str]) -> String {
        let libvirtd = self.world.libvirtd().unwrap();
        let mut virsh = libvirtd.command("/usr/bin/virsh".as_ref());
        let done = virsh.args(["--connect", libvirtd.uri()]).args(arguments).output().unwrap();
        assert!(!done.status.success(), "{arguments:?}");
        String::from_utf8_lossy(&done.stderr).into_owned()
    }

    /// Runs `spillway libvirt` where this libvirtd is.
    fn spillway(&mut self, arguments: &[&str]) -> (bool, String) {
        let (program, socket) = (disk::program().unwrap(), self.world.path("sock"));
        let mut command = self.world.libvirtd().unwrap().command(&program);
        let done = command.arg("libvirt").args(arguments).env("SPILLWAY_SOCKET", socket).output().unwrap();
        let said = [&done.stdout[..], &done.stderr[..]].concat();
        (done.status.success(), String::from_utf8_lossy(&said).into_owned())
    }

    fn adopt(&mut self, name: &str) {
        let options = ["--ram", "8M", "--overflow", "64M", "--socket-group", "libvirt-qemu"];
        let (is_done, said) = self.spillway(&[&["adopt", name, "--image", "golden"], &options[..]].concat());
        assert!(is_done, "{said}");
    }

    /// Writes a mark to the disk of a domain that is paused, over NBD, or reads it. The guest has nothing to do with it.
    fn io(&self, number: usize, command: &str) -> bool {
        let machine = self.world.machine(&machine(number));
        let socket =
            machine["status"]["run"]["nbd_socket"].as_str().expect("a disk that is served").to_owned();
        let mut qemu_io = Command::new("qemu-io");
        qemu_io.args(["-f", "raw", &format!("nbd+unix:///?socket={socket}"), "-c", command]);
        let done = qemu_io.output().unwrap();
        !String::from_utf8_lossy(&done.stdout).contains("ailed") && done.status.success()
    }

    fn phase(&self, number: usize) -> String {
        self.world.machine(&machine(number))["status"]["phase"].as_str().unwrap().to_owned()
    }
}

fn machine(number: usize) -> String {
    format!("lv-{UUID}{number:02x}")
}

#[test]
fn an_adopted_domain_forgets_and_is_given_back_as_it_was() {
    let Some(mut adopting) = Adopting::new(0) else { return };
    if !adopting.install() {
        return spillway_testkit::skip("virt-install is not installed: run 'make install-deps'");
    }
    let before = adopting.virsh(&["dumpxml", "--inactive", "--security-info", "web0"]);
    let (is_done, said) = adopting.spillway(&["adopt", "web0", "--image", "golden"]);
    assert!(!is_done && said.contains("turn it off first"), "{said}");
    adopting.virsh(&["destroy", "web0"]);
    let (is_done, said) = adopting.spillway(&["adopt", "web0", "--image", "nothing"]);
    assert!(!is_done && said.contains("nothing"), "{said}");
    adopting.adopt("web0");
    let (is_done, said) = adopting.spillway(&["adopt", "web0", "--image", "golden"]);
    assert!(!is_done && said.contains("already"), "{said}");
    assert_eq!(adopting.phase(0), "stopped");

    // The image, written to, and at the next start the image again.
    for _ in 0..2 {
        adopting.virsh(&["start", "web0"]);
        assert_eq!(adopting.phase(0), "running");
        assert!(adopting.io(0, "read -P 118 0 1"), "it is the image's");
        assert!(adopting.io(0, "write -P 7 0 64k"));
        // A reset of the machine is no end of it.
        adopting.virsh(&["reset", "web0"]);
        assert!(adopting.io(0, "read -P 7 0 64k"));
        adopting.virsh(&["destroy", "web0"]);
        assert_eq!(adopting.phase(0), "stopped");
    }

    // An end that the hook misses: the daemon is away. What was written is gone all the same.
    adopting.virsh(&["start", "web0"]);
    assert!(adopting.io(0, "write -P 7 0 64k"));
    adopting.world.kill_daemon();
    adopting.virsh(&["destroy", "web0"]);
    let refused = adopting.refused(&["start", "web0"]);
    assert!(refused.contains("spillwayd"), "{refused}");
    adopting.world.start_daemon();
    adopting.virsh(&["start", "web0"]);
    assert!(adopting.io(0, "read -P 118 0 1"), "it is the image's");

    // A worker that dies is replaced: the domain does not notice.
    assert!(adopting.io(0, "write -P 6 0 64k"));
    let keeper = adopting.world.pid(&machine(0), "disk_pid");
    let children = std::fs::read_to_string(format!("/proc/{keeper}/task/{keeper}/children")).unwrap();
    kill(children.trim().parse().expect("one worker"));
    wait_until(BOOT, || adopting.io(0, "read -P 6 0 64k").then_some(())).expect("another worker");
    assert_eq!(adopting.virsh(&["domstate", "web0"]).trim(), "running");

    // Its memory cannot be saved: it would belong to a disk that is forgotten.
    let saved = adopting.world.path("saved");
    let refused = adopting.refused(&["save", "web0", saved.to_str().unwrap()]);
    assert!(refused.contains("Migration disabled"), "{refused}");
    assert_eq!(adopting.virsh(&["domstate", "web0"]).trim(), "running");
    assert!(adopting.io(0, "read -P 6 0 64k"));

    // A libvirtd that dies and comes back leaves the guest and its disk alone.
    assert!(adopting.io(0, "write -P 7 0 64k"));
    let libvirtd = adopting.world.libvirtd().unwrap();
    libvirtd.kill();
    libvirtd.start();
    assert_eq!(adopting.virsh(&["domstate", "web0"]).trim(), "running");
    assert!(adopting.io(0, "read -P 7 0 64k"));

    // An edit by others keeps the disk.
    adopting.virsh(&["destroy", "web0"]);
    if spillway_testkit::has_program("virt-xml") {
        let libvirtd = adopting.world.libvirtd().unwrap();
        let mut virt_xml = libvirtd.command("/usr/bin/virt-xml".as_ref());
        let done =
            virt_xml.args(["--connect", libvirtd.uri(), "web0", "--edit", "--vcpus", "2"]).output().unwrap();
        assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
        let edited = adopting.virsh(&["dumpxml", "--inactive", "web0"]);
        assert!(edited.contains("<vcpu placement='static'>2</vcpu>"), "{edited}");
        adopting.virsh(&["start", "web0"]);
        assert!(adopting.io(0, "read -P 118 0 1"));
        adopting.virsh(&["destroy", "web0"]);
    } else {
        spillway_testkit::skip("virt-xml is not installed: run 'make install-deps'");
    }

    // A copy has the other's disk, and its earlier description.
    let copy = adopting.virsh(&["dumpxml", "--inactive", "web0"]);
    let copy = copy.replacen("<name>web0</name>", "<name>copy</name>", 1);
    let copy = copy.replacen(&format!("<uuid>{UUID}00</uuid>"), &format!("<uuid>{UUID}ff</uuid>"), 1);
    let file = adopting.world.path("copy.xml");
    std::fs::write(&file, copy).unwrap();
    adopting.virsh(&["define", file.to_str().unwrap()]);
    let refused = adopting.refused(&["start", "copy"]);
    assert!(refused.contains("it is a copy"), "{refused}");
    let (is_done, said) = adopting.spillway(&["release", "copy"]);
    assert!(!is_done && said.contains("it is a copy"), "{said}");
    adopting.virsh(&["undefine", "copy"]);

    // Without the daemon nothing is given back: what was made would stay.
    adopting.world.kill_daemon();
    let (is_done, said) = adopting.spillway(&["release", "web0"]);
    assert!(!is_done && said.contains("spillwayd"), "{said}");
    adopting.world.start_daemon();
    let (is_done, said) = adopting.spillway(&["release", "web0"]);
    assert!(is_done, "{said}");
    assert_eq!(adopting.virsh(&["dumpxml", "--inactive", "--security-info", "web0"]), before);
    assert_eq!(adopting.world.status(&format!("/v1/machines/{}", machine(0))), 404);
    assert_eq!(adopting.world.status(&format!("/v1/catalogs/{}", machine(0))), 404);
    let (is_done, said) = adopting.spillway(&["release", "web0"]);
    assert!(!is_done && said.contains("is not one of spillway's"), "{said}");
    adopting.virsh(&["start", "web0"]);
    adopting.virsh(&["destroy", "web0"]);
}

#[test]
fn many_domains_start_at_once_each_on_its_own_disk() {
    const DOMAINS: usize = 20;
    let Some(mut adopting) = Adopting::new(DOMAINS) else { return };
    let names = adopting.names.clone();
    names.iter().for_each(|name| adopting.adopt(name));
    let libvirtd = adopting.world.libvirtd().unwrap();
    let starts: Vec<_> = names
        .iter()
        .map(|name| {
            let mut virsh = libvirtd.command("/usr/bin/virsh".as_ref());
            virsh.args(["--connect", libvirtd.uri(), "start", name]).spawn().unwrap()
        })
        .collect();
    for mut start in starts {
        assert!(start.wait().unwrap().success());
    }
    for number in 0..DOMAINS {
        assert!(adopting.io(number, "read -P 118 0 1"), "{number}");
        assert!(adopting.io(number, &format!("write -P {} 0 64k", number + 1)));
    }
    for number in 0..DOMAINS {
        assert!(adopting.io(number, &format!("read -P {} 0 64k", number + 1)), "{number}");
    }
    for name in &names {
        adopting.virsh(&["destroy", name]);
    }
    let stopped: Vec<String> = (0..DOMAINS).map(|number| adopting.phase(number)).collect();
    assert!(stopped.iter().all(|phase| phase == "stopped"), "{stopped:?}");
}
