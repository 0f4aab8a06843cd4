//! The seed disk in a real guest: what cloud-init of Debian makes of it, each time that the disk is the image's again.
#![allow(clippy::unwrap_used)]

mod common;

use common::run;
use spillway_api::Identity;
use spillway_host::seed::{Seed, host_key};
use spillway_testkit::cpio::Entry;
use spillway_testkit::guest::{Accelerator, Guest, GuestDisk, GuestSpec, Kit};
use spillway_testkit::process::wait_until;
use spillway_testkit::{has_program, skip};
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

const UUID: &str = "8e5b3c1a-0d3b-4c5e-9f60-3a1d8c2b7e4f";
const MAC: &str = "52:54:00:12:34:56";

/// After the stage that names the machine, writes its keys and does the operator's `write_files`.
const UNIT: &str = "[Unit]
DefaultDependencies=no
After=cloud-init.service
[Service]
Type=oneshot
ExecStart=/bin/bash /run/payload/work
StandardOutput=file:/dev/ttyS1
StandardError=journal+console
";

/// Before that, what an image may have had baked in.
const BAKED: &str = "[Unit]
DefaultDependencies=no
Before=cloud-init-local.service
[Service]
Type=oneshot
ExecStart=/bin/sh -c 'mkdir -p /etc/ssh; echo baked | tee /etc/ssh/ssh_host_rsa_key /run/baked'
";

const WORK: &str = r#"
say() { echo "$1 $2"; }
say first "$(cat /run/baked)"
say name "$(cat /proc/sys/kernel/hostname) $(cat /etc/hostname)"
say instance "$(cat /var/lib/cloud/data/instance-id)"
say source "$(cat /var/lib/cloud/instance/datasource)"
say keys "$(cd /etc/ssh && echo ssh_host_*)"
say private "$(stat -c %a /etc/ssh/ssh_host_ed25519_key) $(base64 -w0 /etc/ssh/ssh_host_ed25519_key)"
say public "$(cat /etc/ssh/ssh_host_ed25519_key.pub)"
say machine-id "$(cat /etc/machine-id)"
say operator "$(cat /operator)"
say authorized "$(cat /home/debian/.ssh/authorized_keys)"
say card "$(cat /sys/class/net/eth0/address)"
/lib/systemd/systemd-networkd-wait-online --interface=eth0 --timeout=60
say address "$(ip -4 -o addr show dev eth0 | awk '{ print $4 }')"
# The last of cloud-init's stages does it, which nobody waits for here.
cloud-init single --name phone_home --frequency always >/dev/null 2>&1
say phoned $?
[ -e /left ] && say left "something of an earlier boot"
touch /left
say end .
systemctl poweroff --force
"#;

/// Boots the image as it was published, with a seed disk, and returns what the guest says of itself.
fn boot(kit: &Kit, image: &Path, seed: &Path) -> Vec<String> {
    let dir = tempfile::tempdir_in("/var/tmp").unwrap();
    let spec = GuestSpec {
        dir: dir.path().into(),
        disks: vec![GuestDisk::Raw(image.into()), GuestDisk::Raw(seed.into())],
        system: true,
        payload: vec![
            Entry::file("payload/work", 0o755, WORK),
            Entry::directory("payload/systemd"),
            Entry::file("payload/systemd/work.service", 0o644, UNIT),
            Entry::file("payload/systemd/baked.service", 0o644, BAKED),
            Entry::directory("payload/systemd/sysinit.target.wants"),
            Entry::link("payload/systemd/sysinit.target.wants/baked.service", "../baked.service"),
            Entry::directory("payload/systemd/multi-user.target.wants"),
            Entry::link("payload/systemd/multi-user.target.wants/work.service", "../work.service"),
        ],
        memory_mib: 768,
        vcpus: 1,
        accelerator: Accelerator::Tcg,
        reboots: false,
    };
    let card = format!("user,model=virtio-net-pci,mac={MAC},guestfwd=tcp:10.0.2.100:80-chardev:phone");
    let phone = dir.path().join("phone");
    let door = format!("socket,id=phone,path={},server=on,wait=off", phone.display());
    // What it writes goes nowhere.
    let further = ["-snapshot", "-uuid", UUID, "-chardev", &door, "-nic", &card];
    let mut guest = Guest::start_with(kit, &spec, &further).unwrap();
    let phone = std::thread::spawn(move || called(&phone));
    guest.wait(Duration::from_secs(900)).unwrap();
    let mut reports = guest.reports();
    assert!(reports.iter().any(|line| line == "end ."), "{reports:?}\n{}", guest.tail());
    reports.push(format!("call {}", phone.join().unwrap()));
    reports
}

/// Takes the guest's call, as the daemon does; what the guest has sent until it ended.
fn called(phone: &Path) -> String {
    let connected = wait_until(Duration::from_secs(60), || UnixStream::connect(phone).ok());
    let mut stream = connected.expect("QEMU listens");
    let mut request = Vec::new();
    let mut piece = [0; 4096];
    while let Ok(length @ 1..) = stream.read(&mut piece) {
        let is_first = request.is_empty();
        request.extend_from_slice(&piece[..length]);
        if is_first {
            stream.write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\nConnection: close\r\n\r\n").unwrap();
        }
    }
    let request = String::from_utf8(request).unwrap();
    let (line, body) =
        (request.lines().next().unwrap_or_default(), request.lines().last().unwrap_or_default());
    format!("{line} {body}")
}

#[test]
fn a_guest_is_the_same_machine_after_every_reset() {
    let image = Kit::find().and_then(|kit| Some((kit.cloud()?, kit)));
    let Some((image, kit)) = image else { return skip("guest with cloud-init: not built, run 'make image'") };
    if !has_program("qemu-system-x86_64") {
        return skip("guest: qemu-system-x86_64 is not installed");
    }
    let key = host_key().unwrap();
    let who = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIOMqqnkVzrm0SdG6UOoqKLsabgH5C9okWi0dh2l9GKJl me@here";
    let seed = Seed {
        name: &"desk-001".parse().unwrap(),
        identity: &Identity { uuid: UUID.into(), mac: MAC.into() },
        host_key: &key,
        cards: &[MAC.into()],
        authorized_keys: &[who.to_owned()],
        user_data: Some("#cloud-config\nwrite_files:\n- path: /operator\n  content: was here\n"),
        phone_home: Some("http://10.0.2.100/phone-home/0123"),
    };
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("seed");
    std::fs::write(&path, seed.disk().unwrap()).unwrap();
    // Both at the same time, neither sees what the other writes.
    let (first, second) = std::thread::scope(|scope| {
        let second = scope.spawn(|| boot(&kit, &image, &path));
        (boot(&kit, &image, &path), second.join().unwrap())
    });
    let private = first.iter().find_map(|line| line.strip_prefix("private 600 "));
    std::fs::write(dir.path().join("private"), private.unwrap_or_default()).unwrap();
    let private = run("base64", &["-d", dir.path().join("private").to_str().unwrap()]);
    assert_eq!(private, key.private);
    for line in [
        "first baked",
        "name desk-001 desk-001",
        &format!("instance iid-{UUID}"),
        // The one that was baked in is gone, and no others were made.
        "keys ssh_host_ed25519_key ssh_host_ed25519_key.pub",
        &format!("public {}", key.public),
        // systemd's: made of the UUID that the virtual machine shows.
        &format!("machine-id {}", UUID.replace('-', "")),
        "operator was here",
        &format!("authorized {who}"),
        &format!("card {MAC}"),
        "address 10.0.2.15/24",
        "phoned 0",
        &format!("call POST /phone-home/0123 HTTP/1.1 instance_id=iid-{UUID}&hostname=desk-001"),
    ] {
        assert!(first.iter().any(|found| found == line), "no '{line}': {first:#?}");
    }
    let source = first.iter().find(|line| line.starts_with("source "));
    assert!(
        source.is_some_and(|line| line.contains("NoCloud") && line.contains("seed=/dev/vdb")),
        "{first:#?}"
    );
    assert_eq!(second, first, "after a reset it is another");
}
