//! Hardware of machines, as their guests find it: UEFI with Secure Boot and a trusted platform module, whose contents a reset brings
//! back; and the settings of a catalog, one by one.
//!
//! Owns the image that starts by UEFI: Debian's shim, GRUB and signed kernel, and its root file system.

use crate::world::{BOOT, World};
use spillway_testkit::cpio::{Entry, archive};
use spillway_testkit::guest::Kit;
use spillway_testkit::skip;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Size of the EFI system partition, and where it begins.
const MIB: u64 = 1 << 20;
const EFI_MIB: u64 = 128;

/// What the guest does, as a service of its own systemd: it obeys on its serial port.
const SERVICE: &str =
    "[Unit]\nDefaultDependencies=no\nAfter=local-fs.target\n[Service]\nExecStart=/run/payload/guest\n";
const GUEST: &str = r#"#!/bin/sh
stty -F /dev/ttyS0 -echo
exec </dev/ttyS0 >/dev/ttyS0 2>&1
answer() { echo "$* #$tag"; }
efi=/sys/firmware/efi/efivars
mountpoint -q $efi || mount -t efivarfs efivarfs $efi
ours=$efi/Spillway-5b0d1e55-0000-4000-8000-000000000003
echo WORKS
while read -r word tag; do
    case "$word" in
    facts)
        secure=$(od -An -tu1 -j4 -N1 $efi/SecureBoot-8be4df61-93ca-11d2-aa0d-00e098032b8c | tr -d ' ')
        pcr=$(tpm2_pcrread sha256:7 | sed -n 's/.*0x//p')
        variable=$(dd if=$ours bs=64 2>/dev/null | tail -c 4)
        index=$(tpm2_nvread 0x1500016 -C o -s 4 2>/dev/null)
        mark=$(cat /mark 2>/dev/null)
        answer "FACTS secure=$secure pcr7=$pcr variable=$variable index=$index mark=$mark ." ;;
    keep)
        # Attributes and value, in one write.
        printf '\007\000\000\000kept' >/run/variable
        dd if=/run/variable of=$ours bs=64 2>/dev/null
        tpm2_nvdefine 0x1500016 -C o -s 4 -a 'ownerread|ownerwrite' >/dev/null &&
            printf kept | tpm2_nvwrite 0x1500016 -C o -i - >/dev/null
        echo kept >/mark; sync
        answer KEPT ;;
    reboot | poweroff) answer BYE; sleep 1; systemctl $word -ff ;;
    esac
done
"#;
/// GRUB's own script. It verifies the kernel, and starts it as the BIOS guests of these tests are.
const MENU: &str = "\
                    linux /vmlinuz console=ttyS0 quiet loglevel=4 panic=1 cryptomgr.notests nokaslr no_timer_check \
                    spillway.root=/dev/vda2 systemd.show_status=0\n\
                    initrd /initrd\nboot\n";

fn succeeds(command: &mut Command) {
    let done = command.output().unwrap_or_else(|e| panic!("{command:?}: {e}"));
    assert!(done.status.success(), "{command:?}: {}", String::from_utf8_lossy(&done.stderr));
}

/// Imports an image that starts by UEFI alone.
fn import(world: &World) {
    let kit = Kit::find().unwrap();
    let mut initrd = std::fs::read(kit.initrd()).unwrap();
    initrd.resize(initrd.len().next_multiple_of(4), 0);
    let payload = [
        Entry::directory("payload"),
        Entry::file("payload/guest", 0o755, GUEST),
        Entry::directory("payload/systemd"),
        Entry::file("payload/systemd/guest.service", 0o644, SERVICE),
        // Nobody else has the serial port.
        Entry::link("payload/systemd/serial-getty@ttyS0.service", "/dev/null"),
        Entry::directory("payload/systemd/basic.target.wants"),
        Entry::link("payload/systemd/basic.target.wants/guest.service", "../guest.service"),
    ];
    initrd.extend(archive(&payload).unwrap());
    let [disk, menu, new_initrd] = ["uefi.raw", "grub.cfg", "uefi.initrd"].map(|name| world.path(name));
    std::fs::write(&menu, MENU).unwrap();
    std::fs::write(&new_initrd, initrd).unwrap();
    let golden_mib = std::fs::metadata(kit.golden()).unwrap().len() / MIB;
    std::fs::File::create(&disk).unwrap().set_len((1 + EFI_MIB + golden_mib + 1) * MIB).unwrap();
    let table = format!(
        "label: gpt\nstart=1MiB, size={EFI_MIB}MiB, type=C12A7328-F81F-11D2-BA4B-00A0C93EC93B\nstart={}MiB, size={golden_mib}MiB, type=L\n",
        1 + EFI_MIB
    );
    let script = format!("printf '{}' | sfdisk -q {}", table.replace('\n', "\\n"), disk.display());
    succeeds(Command::new("sh").args(["-c", &script]));
    let blocks = (EFI_MIB * 1024).to_string();
    succeeds(
        Command::new("mkfs.vfat").args(["-F", "32", "-s", "1", "--offset", "2048"]).arg(&disk).arg(blocks),
    );
    let partition = format!("{}@@1M", disk.display());
    let folders = ["::/EFI", "::/EFI/BOOT", "::/EFI/debian"];
    succeeds(Command::new("mmd").args(["-i", &partition]).args(folders));
    let copy = |file: &Path, place: &str| {
        succeeds(Command::new("mcopy").args(["-i", &partition]).arg(file).arg(format!("::{place}")));
    };
    copy(&kit.uefi("shimx64.efi"), "/EFI/BOOT/BOOTX64.EFI");
    copy(&kit.uefi("grubx64.efi"), "/EFI/BOOT/grubx64.efi");
    copy(&menu, "/EFI/debian/grub.cfg");
    copy(&kit.uefi("vmlinuz"), "/vmlinuz");
    copy(&new_initrd, "/initrd");
    let place = format!("of={}", disk.display());
    let from = format!("if={}", kit.golden().display());
    let seek = format!("seek={}", 1 + EFI_MIB);
    succeeds(Command::new("dd").args([&*from, &place, &seek, "bs=1M", "conv=sparse,notrunc", "status=none"]));
    world.ok(&["image", "import", "uefi", disk.to_str().unwrap(), "--format", "raw"]);
    std::fs::remove_file(&disk).unwrap();
}

/// A catalog of machines that start from this image.
fn catalog(world: &World, name: &str, options: &[&str]) {
    let common = [
        "catalog",
        "create",
        name,
        "--image",
        "uefi",
        "--count",
        "1",
        "--memory",
        "512M",
        "--network",
        "none",
    ];
    world.ok(&[&common[..], options].concat());
}

/// What a guest says of itself: word and value.
fn facts(world: &World, machine: &str) -> impl Fn(&str) -> String + use<> {
    let line = world.tell(machine, "facts", "FACTS");
    move |name: &str| {
        let found =
            line.split_whitespace().filter_map(|word| word.split_once('=')).find(|(word, _)| *word == name);
        found.unwrap_or_else(|| panic!("no {name} in {line}")).1.to_owned()
    }
}

/// With both hypervisors: Secure Boot is on, the module works, and a reset brings everything back.
fn what_firmware_keeps_is_forgotten(hypervisor: &'static str) {
    for program in ["swtpm", "sfdisk", "mkfs.vfat", "mcopy"] {
        if !spillway_testkit::has_program(program) {
            return skip(&format!("{program} is not installed: run 'make install-deps'"));
        }
    }
    let Some(world) = World::new(hypervisor) else { return };
    import(&world);
    catalog(&world, "desk", &["--firmware", "uefi-secure", "--tpm", "2.0"]);
    world.ok(&["machine", "start", "desk-001", "--wait"]);
    let before = facts(&world, "desk-001");
    assert_eq!(before("secure"), "1");
    let pcr = before("pcr7");
    assert!(pcr.len() == 64 && pcr.bytes().any(|byte| byte != b'0'), "it is measured: {pcr}");
    assert_eq!(["variable", "index", "mark"].map(&before), ["", "", ""]);
    world.tell("desk-001", "keep", "KEPT");
    assert_eq!(["variable", "index", "mark"].map(facts(&world, "desk-001")), ["kept", "kept", "kept"]);
    // The machine is turned off and on: its variables, its module and its disk are those of a new one.
    world.ok(&["machine", "restart", "desk-001", "--force", "--wait"]);
    let after = facts(&world, "desk-001");
    assert_eq!(["variable", "index", "mark"].map(&after), ["", "", ""]);
    assert_eq!((after("secure"), after("pcr7")), ("1".into(), pcr), "the same start is measured the same");
    world.ok(&["machine", "stop", "desk-001", "--force", "--wait"]);
    assert!(!world.machines().join("desk-001").exists(), "nothing is left");
}

#[test]
fn secure_boot_and_tpm_are_those_of_a_new_machine_after_each_reset() {
    what_firmware_keeps_is_forgotten("qemu");
}

#[test]
fn secure_boot_and_tpm_are_those_of_a_new_machine_after_each_reset_with_libvirt() {
    what_firmware_keeps_is_forgotten("libvirt");
}

#[test]
fn dedicated_machines_keep_variables_and_tpm_until_they_are_reset() {
    let Some(world) = World::new("qemu") else { return };
    if !spillway_testkit::has_program("swtpm") {
        return skip("swtpm is not installed: run 'make install-deps'");
    }
    import(&world);
    // The firmware is the one that the image needs.
    catalog(&world, "own", &["--type", "dedicated", "--tpm", "2.0"]);
    world.ok(&["machine", "start", "own-001", "--wait"]);
    world.tell("own-001", "keep", "KEPT");
    world.ok(&["machine", "stop", "own-001", "--force", "--wait"]);
    let kept = kept_files(&world);
    assert_eq!(kept.len(), 3, "the disk, the variables and the module's folder: {kept:?}");
    world.ok(&["machine", "start", "own-001", "--wait"]);
    assert_eq!(["variable", "index", "mark"].map(facts(&world, "own-001")), ["kept", "kept", "kept"]);
    world.ok(&["machine", "stop", "own-001", "--force", "--wait"]);
    world.ok(&["catalog", "delete", "own", "--with-data"]);
    spillway_testkit::process::wait_until(BOOT, || kept_files(&world).is_empty().then_some(()))
        .unwrap_or_else(|| panic!("still there: {:?}", kept_files(&world)));
}

/// With both hypervisors: what a catalog says is what a guest finds.
fn a_guest_finds_what_its_catalog_says(hypervisor: &'static str) {
    let Some(world) = World::new(hypervisor) else { return };
    world.import("golden", "version-1");
    let options = [
        "--image",
        "golden",
        "--vcpus",
        "2",
        "--sockets",
        "2",
        "--guest",
        "windows",
        "--display",
        "vnc",
        "--video",
        "virtio",
        "--watchdog",
        "reset",
        "--cpu",
        "max,-avx2",
        "--extra-arg=-device",
        "--extra-arg=pci-testdev,addr=0x1d",
    ];
    world.catalog("desk", 1, &options);
    world.set("desk", &["network = \"user\""]);
    world.ok(&["machine", "start", "desk-001", "--wait"]);
    let line = world.tell("desk-001", "hardware", "HARDWARE");
    let value = |name: &str| {
        let found =
            line.split_whitespace().filter_map(|word| word.split_once('=')).find(|(word, _)| *word == name);
        found.unwrap_or_else(|| panic!("no {name}: {line}")).1.to_owned()
    };
    assert_eq!(value("sockets"), "2");
    // The graphics card, the watchdog, the USB controller of the tablet, the network card, and what was given as an argument.
    // A network card in a slot of PCI Express has another number.
    for devices in [["0x1050"; 2], ["0x25ab"; 2], ["0x000d"; 2], ["0x1000", "0x1041"], ["0x0005"; 2]] {
        assert!(value("pci").split(',').any(|found| devices.contains(&found)), "{devices:?}: {line}");
    }
    assert_eq!(world.events("watchdog"), 0);
    let boot = |state: String| state.split_once("boot=").unwrap().1.to_owned();
    let before = boot(world.tell("desk-001", "state", "STATE"));
    world.say("desk-001", "hang");
    let is_another = || (boot(world.tell("desk-001", "state", "STATE")) != before).then_some(());
    spillway_testkit::process::wait_until(BOOT, is_another).expect("the watchdog has rebooted it");
    if hypervisor == "qemu" {
        let told =
            || (world.events("its guest does not answer its watchdog any more: reset") == 1).then_some(());
        spillway_testkit::process::wait_until(BOOT, told).expect("an event");
    }
}

#[test]
fn a_guest_finds_the_hardware_of_its_catalog() {
    a_guest_finds_what_its_catalog_says("qemu");
}

#[test]
fn a_guest_finds_the_hardware_of_its_catalog_with_libvirt() {
    a_guest_finds_what_its_catalog_says("libvirt");
}

/// What is in the store beside the machines' disks.
fn kept_files(world: &World) -> Vec<PathBuf> {
    let folder = world.path("state/store/disks");
    std::fs::read_dir(folder).into_iter().flatten().flatten().map(|entry| entry.path()).collect()
}
