//! The Debian package in a Debian with systemd: installed, run, killed, restarted, watched, upgraded and removed.
//!
//! Owns the guest; what is done in it is `inside.sh`. The guest has no QEMU, so machines there have disks only.
#![allow(clippy::unwrap_used)]

use spillway_testkit::cpio::Entry;
use spillway_testkit::guest::{self, Accelerator, Guest, GuestDisk, GuestSpec, Kit};
use spillway_testkit::{disk, has_program, skip};
use std::path::Path;
use std::process::Command;
use std::time::Duration;

const INSIDE: &str = include_str!("inside.sh");
const SERVICE: &str = "[Service]
Type=oneshot
Environment=PATH=/usr/sbin:/usr/bin:/sbin:/bin HOME=/root
ExecStart=/bin/sh -c '/run/payload/inside; echo ended with $? >/dev/ttyS1; systemctl poweroff --force'
";
/// What it reports, in this order.
const PARTS: [&str; 12] = [
    "installed",
    "a machine has a scope",
    "killed",
    "restarted",
    "watched",
    "activated",
    "ended in order",
    "upgraded",
    "a hook serves a disk",
    "without systemd-run",
    "removed",
    "with 0",
];
/// On a busy host that has no KVM.
const PATIENCE: Duration = Duration::from_secs(2000);

/// The package of the programs under test.
fn package(dir: &Path) -> Vec<u8> {
    let programs = disk::program().unwrap();
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../scripts/deb");
    let mut deb = Command::new(script);
    deb.arg("--programs").arg(programs.parent().unwrap()).arg("--out").arg(dir).args(["--compress", "none"]);
    let made = deb.output().unwrap();
    assert!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
    std::fs::read(String::from_utf8(made.stdout).unwrap().trim()).unwrap()
}

#[test]
fn the_package_runs_under_systemd_and_machines_outlive_the_daemon() {
    let Some(kit) = Kit::find() else { return skip("guest: not built, run 'make image'") };
    for program in ["qemu-system-x86_64", "dpkg-deb", "strip"] {
        if !has_program(program) {
            return skip(&format!("package: {program} is not installed"));
        }
    }
    let dir = tempfile::tempdir_in("/var/tmp").unwrap();
    let package = package(dir.path());
    let spec = GuestSpec {
        dir: dir.path().into(),
        disks: vec![GuestDisk::Raw(kit.golden())],
        system: true,
        payload: [
            vec![
                Entry::file("payload/spillway.deb", 0o644, package),
                Entry::file("payload/inside", 0o755, INSIDE),
            ],
            guest::service("work", SERVICE),
        ]
        .concat(),
        memory_mib: 1024,
        vcpus: 1,
        accelerator: Accelerator::Tcg,
        reboots: false,
    };
    // What it writes goes to a file of QEMU's that is gone with it.
    let mut guest = Guest::start_with(&kit, &spec, &["-snapshot"]).unwrap();
    guest.wait(PATIENCE).unwrap_or_else(|e| panic!("{e:#}\n{:#?}", guest.reports()));
    let reports = guest.reports();
    println!("{}", reports.join("\n"));
    let parts: Vec<&str> = reports.iter().filter_map(|line| Some(line.split_once(' ')?.1)).collect();
    assert!(parts == PARTS, "{}", guest.tail());
}
