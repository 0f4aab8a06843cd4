//! Images made with mke2fs and sfdisk, without root: what is found in them, and that hostile ones end in time.

use super::*;
use spillway_api::{FindingKind, PartitionTable, Severity};
use spillway_testkit::cpio::{Entry, archive};
use spillway_testkit::guest::Kit;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

const KERNEL: &str = "6.1.0-9-amd64";

/// Files of a folder that becomes a file system.
pub struct Tree(tempfile::TempDir);

impl Tree {
    /// A system that clones well.
    pub fn sound() -> Tree {
        let tree = Tree(tempfile::tempdir().unwrap());
        tree.put("etc/machine-id", "");
        tree.put("etc/fstab", "# a comment\nUUID=1 / ext4 rw,discard 0 1\n/dev/sr0 /media auto noauto 0 0\n");
        tree.put("usr/bin/cloud-init", "#!/usr/bin/python3\n");
        tree.put(&format!("boot/vmlinuz-{KERNEL}"), "kernel");
        tree.put("boot/vmlinuz-6.1.0-10-amd64.old", "older");
        let builtin = "kernel/drivers/net/x.ko\nkernel/drivers/block/virtio_blk.ko\n";
        tree.put(&format!("usr/lib/modules/{KERNEL}/modules.builtin"), builtin);
        std::os::unix::fs::symlink("usr/lib", tree.0.path().join("lib")).unwrap();
        tree
    }

    pub fn path(&self, path: &str) -> PathBuf {
        self.0.path().join(path)
    }

    pub fn put(&self, path: &str, content: impl AsRef<[u8]>) {
        let path = self.path(path);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, content).unwrap();
    }

    fn take(&self, path: &str) {
        std::fs::remove_file(self.0.path().join(path)).unwrap();
    }

    /// With virtio_blk as a module.
    fn modular(&self) {
        self.put(&format!("usr/lib/modules/{KERNEL}/modules.builtin"), "kernel/drivers/net/x.ko\n");
        self.put(&format!("usr/lib/modules/{KERNEL}/kernel/drivers/block/virtio_blk.ko.xz"), "module");
    }

    /// A disk that is all one file system.
    pub fn disk(&self) -> tempfile::NamedTempFile {
        let file = tempfile::NamedTempFile::new().unwrap();
        mke2fs(self.0.path(), file.path(), &["16M"]);
        file
    }

    /// Findings of its disk.
    pub fn faults(&self) -> Vec<Finding> {
        faults(checked(self.disk().as_file()))
    }

    fn kinds(&self) -> Vec<FindingKind> {
        self.faults().into_iter().map(|finding| finding.kind).collect()
    }
}

fn mke2fs(tree: &Path, to: &Path, further: &[&str]) {
    let mut command = Command::new("/usr/sbin/mke2fs");
    let done =
        command.args(["-q", "-F", "-t", "ext4", "-d"]).arg(tree).arg(to).args(further).output().unwrap();
    assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
}

pub fn checked(disk: &File) -> CheckedVersion {
    check(disk, Instant::now() + Duration::from_secs(300)).unwrap()
}

/// Findings that are more than notes, except the missing boot loader of a bare file system.
fn faults(mut checked: CheckedVersion) -> Vec<Finding> {
    let is_bare = |finding: &Finding| {
        (finding.kind, finding.severity) == (FindingKind::NoBootLoader, Severity::Warning)
    };
    checked.findings.retain(|finding| finding.severity != Severity::Note && !is_bare(finding));
    checked.findings
}

#[test]
fn a_sound_image_has_no_findings() {
    let disk = Tree::sound().disk();
    let CheckedVersion { volumes, boot, findings, .. } = checked(disk.as_file());
    let kinds: Vec<_> = findings.iter().map(|finding| (finding.kind, finding.severity)).collect();
    assert_eq!(kinds, [(FindingKind::NoBootLoader, Severity::Warning)], "for a kernel from outside");
    assert_eq!(boot, BootFacts::default());
    assert_eq!((volumes[0].role, volumes[0].partition), (Some(VolumeRole::Root), None));
}

#[test]
fn each_thing_that_breaks_clones_is_found() {
    use FindingKind::*;
    let id = "8e5b3c1a0d3b4c5e9f603a1d8c2b7e4f\n";
    let cases: &[(&str, &str, FindingKind)] = &[
        ("etc/machine-id", id, MachineId),
        ("var/lib/dbus/machine-id", id, MachineId),
        ("etc/ssh/ssh_host_rsa_key", "secret", SshHostKeys),
        ("etc/cloud/cloud-init.disabled", "", NoCloudInit),
        ("etc/cloud/cloud.cfg.d/99-installer.cfg", "datasource_list: [ None ]\n", CloudInitSource),
        ("etc/cloud/cloud.cfg", "datasource_list: [ Azure ]\n", CloudInitSource),
        ("etc/cloud/cloud.cfg.d/99-off.cfg", "network: {config: disabled}\n", CloudInitSource),
        ("etc/cloud/cloud.cfg.d/99-off.cfg", "vendor_data:\n  enabled: False\n", CloudInitSource),
        ("var/lib/systemd/random-seed", "random", SharedSecret),
        ("var/lib/systemd/credential.secret", "secret", SharedSecret),
        ("var/lib/NetworkManager/secret_key", "secret", SharedSecret),
        ("var/lib/dhcp/dhclient.eth0.leases", "lease {}", DhcpIdentity),
        ("var/lib/NetworkManager/internal-1-eth0.lease", "lease", DhcpIdentity),
        ("var/lib/dhcpcd/duid", "00:01", DhcpIdentity),
        ("etc/udev/rules.d/70-persistent-net.rules", "SUBSYSTEM", NetworkCard),
        ("etc/netplan/00-installer.yaml", "network:\n  e:\n    match:\n      macaddress: 1\n", NetworkCard),
        ("etc/sysconfig/network-scripts/ifcfg-eth0", "HWADDR=52:54\n", NetworkCard),
        ("etc/fstab", "/dev/sda1 / ext4 discard 0 1\n", MountedDevice),
        (
            "etc/fstab",
            "/dev/disk/by-id/ata-X /srv xfs defaults 0 1\nUUID=1 / ext4 discard 0 1\n",
            MountedDevice,
        ),
        ("etc/fstab", "UUID=1 / ext4 defaults 0 1\n", NoDiscard),
        ("etc/iscsi/initiatorname.iscsi", "## x\nInitiatorName=iqn.1993\n", AgentIdentity),
        ("etc/salt/pki/minion/minion.pem", "key", AgentIdentity),
        ("var/lib/cloud/seed/nocloud-net/meta-data", "instance-id: golden-1\n", CloudInitSeed),
        ("var/lib/cloud/seed/nocloud/user-data", "#cloud-config\n", CloudInitSeed),
        ("etc/cloud/cloud.cfg.d/99-seed.cfg", SEED, CloudInitSeed),
        ("etc/default/grub", "GRUB_CMDLINE_LINUX=\"ds=nocloud;i=golden\"\n", CloudInitSeed),
        ("etc/cloud/ds-identify.cfg", "datasource: Ec2\n", CloudInitSource),
        ("etc/cloud/ds-identify.cfg", "policy: disabled\n", NoCloudInit),
        ("boot/grub/grub.cfg", "linux /vmlinuz root=UUID=1 cloud-init=disabled\n", NoCloudInit),
        ("etc/cloud/cloud.cfg.d/99-name.cfg", "preserve_hostname: true\n", HostName),
    ];
    for (path, content, kind) in cases {
        let tree = Tree::sound();
        tree.put(path, content);
        let findings = tree.faults();
        let found: Vec<_> = findings.iter().map(|finding| (finding.kind, finding.path.as_str())).collect();
        // The absence of discard is told at the place where it would be.
        let place = match kind {
            NoDiscard => found[0].1.to_owned(),
            // A seed is told by its folder.
            CloudInitSeed if path.starts_with("var/") => format!("/{}", path.rsplit_once('/').unwrap().0),
            _ => format!("/{path}"),
        };
        assert_eq!(found, [(*kind, place.as_str())], "{path}: {content}");
    }
    // What looks alike and does no harm.
    for (path, content) in [
        ("etc/machine-id", "uninitialized\n"),
        ("etc/ssh/ssh_host_rsa_key.pub", "public"),
        ("etc/hostname", "golden\n"),
        ("var/lib/dhcp/dhclient.leases", ""),
        ("etc/cloud/cloud.cfg.d/90_dpkg.cfg", "datasource_list: [ ConfigDrive, NoCloud ]\n"),
        ("etc/cloud/cloud.cfg.d/91.cfg", "#network: {config: disabled}\nnetwork: {version: 2}\n"),
        ("etc/netplan/50-cloud-init.yaml", "macaddress: 1\n"),
        ("etc/iscsi/initiatorname.iscsi", "GenerateName=yes\n"),
        ("var/lib/cloud/seed/nocloud/meta-data", ""),
        ("var/lib/cloud/instances/iid-1/user-data.txt", "#cloud-config\n"),
        ("etc/cloud/cloud.cfg.d/99-x.cfg", "manual_cache_clean: true\n"),
        ("etc/cloud/cloud.cfg.d/99-x.cfg", "preserve_hostname: false\n"),
        ("etc/default/grub", "GRUB_CMDLINE_LINUX=\"ds=nocloud\"\n"),
    ] {
        let tree = Tree::sound();
        tree.put(path, content);
        assert_eq!(tree.faults(), [], "{path}");
    }
}

const SEED: &str =
    "datasource:\n  NoCloud:\n    meta-data: {instance-id: golden}\n    user-data: \"#cloud-config\"\n";

/// cloud-init keeps an instance that it has seen before, by a setting or by the mark that the setting leaves.
#[test]
fn an_instance_that_is_kept_is_found() {
    let tree = Tree::sound();
    tree.put("etc/cloud/cloud.cfg.d/99-x.cfg", "manual_cache_clean: true\n");
    assert_eq!(tree.faults(), [], "there is none");
    tree.put("var/lib/cloud/instances/iid-golden/user-data.txt", "x");
    let link = tree.path("var/lib/cloud/instance");
    std::os::unix::fs::symlink("/var/lib/cloud/instances/iid-golden", link).unwrap();
    let found = tree.faults();
    assert_eq!((found.len(), found[0].kind), (1, FindingKind::CloudInitSeed), "{found:?}");
    assert_eq!(found[0].path, "/etc/cloud/cloud.cfg.d/99-x.cfg");
    tree.put("etc/cloud/cloud.cfg.d/99-y.cfg", "manual_cache_clean: false\n");
    assert_eq!(tree.faults(), [], "the last setting counts");
    tree.put("var/lib/cloud/instances/iid-golden/manual-clean", "");
    assert_eq!(tree.faults()[0].path, "/var/lib/cloud/instance/manual-clean");
}

/// What firmware finds is told of every disk, whether its system can be looked into or not.
#[test]
fn what_firmware_finds_is_told() {
    let file = tempfile::tempfile().unwrap();
    let (disk, _path) = partitioned();
    let mut bytes = std::fs::read(disk.path()).unwrap();
    let severity = |bytes: &[u8]| {
        file.set_len(0).unwrap();
        file.write_all_at(bytes, 0).unwrap();
        let found = checked(&file);
        let is_boot = |finding: &&Finding| finding.kind == FindingKind::NoBootLoader;
        let finding = found.findings.iter().find(is_boot).map(|finding| finding.severity);
        (finding, found.boot.efi_programs)
    };
    assert_eq!(severity(&bytes), (Some(Severity::Error), vec![]));
    // The first partition becomes FAT, with a loader that only a firmware finds which was told of it.
    let part = tempfile::tempfile().unwrap();
    part.set_len(2 << 20).unwrap();
    for (files, expected) in [
        (&["/EFI/debian/shimx64.efi"][..], Some(Severity::Error)),
        (&["/EFI/BOOT/BOOTX64.EFI", "/EFI/debian/shimx64.efi"][..], None),
    ] {
        fat::tests::format(&part, 0, 2 << 20, fatfs::FatType::Fat12, files);
        part.read_exact_at(&mut bytes[1 << 20..3 << 20], 0).unwrap();
        let (found, programs) = severity(&bytes);
        assert_eq!((found, programs.len()), (expected, files.len()), "{programs:?}");
    }
    let needs = |bytes: &[u8]| {
        file.write_all_at(bytes, 0).unwrap();
        boot_choice(&file)
    };
    let (firmware, guest) = (Firmware::Uefi, GuestSystem::Linux);
    assert_eq!(needs(&bytes), BootChoice { firmware, guest });
    // NTFS alone, and no system of Linux beside it.
    let mut windows = bytes.clone();
    windows[90112 * 512..][..4].fill(0);
    for (sector, magic) in [(6144, *b"NTFS    "), (22528, *b"NTFS    ")] {
        windows[sector * 512..][..8192].fill(0);
        windows[sector * 512 + 3..][..8].copy_from_slice(&magic);
    }
    assert_eq!(needs(&windows), BootChoice { firmware, guest: GuestSystem::Windows });
    bytes[0] = 0xeb;
    assert_eq!(severity(&bytes).0, None, "code for a BIOS");
    assert_eq!(needs(&bytes).firmware, Firmware::Bios, "both");
    // A disk with nothing on it.
    assert_eq!(severity(&vec![0; 1 << 20]).0, Some(Severity::Error));
}

#[test]
fn discards_come_from_a_timer_the_option_or_the_file_system() {
    let tree = Tree::sound();
    tree.put("etc/fstab", "UUID=1 / ext4 defaults 0 1\n");
    tree.put("usr/lib/systemd/system/timers.target.wants/fstrim.timer", "[Timer]");
    assert_eq!(tree.faults(), []);
    tree.put("etc/systemd/system/fstrim.timer", "masked");
    assert_eq!(tree.kinds(), [FindingKind::NoDiscard]);
    let disk = tree.disk();
    let done = Command::new("/usr/sbin/tune2fs").args(["-o", "discard"]).arg(disk.path()).output();
    assert!(done.unwrap().status.success());
    assert_eq!(faults(checked(disk.as_file())), []);
}

#[test]
fn without_cloud_init_the_host_name_is_everyones() {
    let tree = Tree::sound();
    tree.take("usr/bin/cloud-init");
    assert_eq!(tree.kinds(), [FindingKind::NoCloudInit]);
    tree.put("etc/hostname", "golden\n");
    assert_eq!(tree.kinds(), [FindingKind::NoCloudInit, FindingKind::HostName]);
}

#[test]
fn the_driver_is_built_in_or_in_the_initrd() {
    let tree = Tree::sound();
    tree.put(&format!("usr/lib/modules/{KERNEL}/modules.builtin"), "kernel/drivers/net/x.ko\n");
    let found = tree.faults();
    assert_eq!((found[0].kind, found.len()), (FindingKind::NoVirtioDriver, 1));
    assert!(found[0].what.contains("neither built in nor as a module"), "{found:?}");
    tree.modular();
    assert!(tree.faults()[0].what.contains("no initrd"), "{:?}", tree.faults());

    let early =
        archive(&[Entry::file("kernel/x86/microcode/GenuineIntel.bin", 0o644, vec![7; 5000])]).unwrap();
    let filler: Vec<u8> = (0..200_000u32).flat_map(|n| n.wrapping_mul(2_654_435_761).to_le_bytes()).collect();
    let with = |name: &str| {
        archive(&[Entry::file("filler", 0o644, filler.clone()), Entry::file(name, 0o644, "module")]).unwrap()
    };
    let initrd = format!("boot/initrd.img-{KERNEL}");
    let driver = "usr/lib/modules/x/kernel/drivers/block/virtio_blk.ko";
    for program in ["", "gzip", "zstd", "xz", "lz4"] {
        for (name, expected) in [(driver, vec![]), ("virtio_net.ko", vec![FindingKind::NoVirtioDriver])] {
            let content = [&early[..], &compressed(program, &with(name))].concat();
            tree.put(&initrd, content);
            assert_eq!(tree.kinds(), expected, "{program} {name}");
        }
    }
    let cut_off = compressed("zstd", &with("virtio_net.ko"));
    let cut_off = &cut_off[..cut_off.len() / 2];
    for garbage in [&b"BOGUS compression"[..], b"\x1f\x8bgarbage", b"", b"070701garbage", cut_off] {
        tree.put(&initrd, garbage);
        assert_eq!(tree.kinds(), [FindingKind::NotChecked], "{} bytes", garbage.len());
    }
    tree.take(&initrd);
    tree.put(&format!("boot/initramfs-{KERNEL}.img"), with(driver));
    assert_eq!(tree.faults(), []);
    tree.take(&format!("boot/vmlinuz-{KERNEL}"));
    assert_eq!(tree.kinds(), [FindingKind::NotChecked]);
    // Named by its kind, as Arch and Alpine do.
    tree.put("boot/vmlinuz-virt", "kernel");
    assert_eq!(tree.kinds(), [FindingKind::NoVirtioDriver]);
    tree.put("boot/initramfs-virt", with(driver));
    assert_eq!(tree.faults(), []);
}

fn compressed(program: &str, bytes: &[u8]) -> Vec<u8> {
    if program.is_empty() {
        return bytes.to_vec();
    }
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(file.path(), bytes).unwrap();
    let done = Command::new(program).arg("-c").stdin(File::open(file.path()).unwrap()).output().unwrap();
    assert!(done.status.success(), "{program}: {}", String::from_utf8_lossy(&done.stderr));
    done.stdout
}

/// A disk with a boot partition, a root partition and swap.
fn partitioned() -> (tempfile::NamedTempFile, PathBuf) {
    let tree = Tree::sound();
    tree.modular();
    let boot = Tree(tempfile::tempdir().unwrap());
    boot.put(&format!("vmlinuz-{KERNEL}"), "kernel");
    boot.put(
        &format!("initrd.img-{KERNEL}"),
        archive(&[Entry::file("a/virtio_blk.ko", 0o644, "m")]).unwrap(),
    );
    tree.take(&format!("boot/vmlinuz-{KERNEL}"));
    let disk = tempfile::NamedTempFile::new().unwrap();
    disk.as_file().set_len(64 << 20).unwrap();
    let mut sfdisk = Command::new("/usr/sbin/sfdisk");
    let mut sfdisk = sfdisk.arg("-q").arg(disk.path()).stdin(Stdio::piped()).spawn().unwrap();
    let script = "label: gpt\nstart=2048, size=4096\nstart=6144, size=16384\nstart=22528, size=65536\nstart=90112, size=8192\n";
    std::io::Write::write_all(&mut sfdisk.stdin.take().unwrap(), script.as_bytes()).unwrap();
    assert!(sfdisk.wait().unwrap().success());
    mke2fs(boot.0.path(), disk.path(), &["-E", "offset=3145728", "8M"]);
    mke2fs(tree.0.path(), disk.path(), &["-E", "offset=11534336", "32M"]);
    disk.as_file().write_all_at(b"XFSB", 90112 * 512).unwrap();
    let path = disk.path().to_owned();
    (disk, path)
}

#[test]
fn root_and_boot_are_found_in_partitions() {
    let (disk, path) = partitioned();
    let CheckedVersion { volumes, boot, findings, .. } = checked(disk.as_file());
    let roles: Vec<_> =
        volumes.iter().map(|volume| (volume.partition, volume.content, volume.role)).collect();
    assert_eq!(
        roles,
        [
            (Some(1), VolumeContent::Unknown, None),
            (Some(2), VolumeContent::Ext, Some(VolumeRole::Boot)),
            (Some(3), VolumeContent::Ext, Some(VolumeRole::Root)),
            (Some(4), VolumeContent::Xfs, None),
        ]
    );
    let kinds: Vec<_> = findings.iter().map(|finding| (finding.kind, finding.severity)).collect();
    assert_eq!(kinds, [(FindingKind::NoBootLoader, Severity::Error)]);
    assert_eq!(boot.partition_table, PartitionTable::Gpt);
    assert!(volumes[3].unread.as_ref().is_some_and(|why| why.contains("XFS cannot be looked into")));
    drop(path);
}

#[test]
fn what_cannot_be_looked_into_is_said() {
    let disk = tempfile::tempfile().unwrap();
    disk.set_len(1 << 20).unwrap();
    disk.write_all_at(b"LUKS\xba\xbe", 0).unwrap();
    let CheckedVersion { volumes, findings, .. } = checked(&disk);
    assert_eq!((volumes.len(), volumes[0].content, findings.len()), (1, VolumeContent::Luks, 1));
    assert!(volumes[0].unread.as_ref().is_some_and(|why| why.contains("LUKS")));
    for size in [0, 1, 511, 1081, 1082] {
        disk.set_len(0).unwrap();
        disk.set_len(size).unwrap();
        if size == 1082 {
            disk.write_all_at(b"\x53\xef", 1080).unwrap();
        }
        let CheckedVersion { volumes, findings, .. } = checked(&disk);
        assert!(findings.len() == 1 && volumes[0].unread.is_some(), "{size}: {volumes:?}");
    }
}

/// Images that are cut off or of which bytes are changed, above all where the file system keeps its own books.
#[test]
fn hostile_file_systems_end_in_time() {
    let seed = std::env::var("SPILLWAY_SEED").ok().and_then(|seed| seed.parse().ok());
    let seed: u64 = seed.unwrap_or_else(|| u64::from(std::process::id()) << 20 | 1);
    println!("SPILLWAY_SEED={seed}");
    let mut state = seed;
    let mut random = move || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        state >> 33
    };
    let disk = Tree::sound().disk();
    let sound = std::fs::read(disk.path()).unwrap();
    // Blocks with anything in them: superblock, descriptors, inodes, folders come first.
    let used: Vec<usize> =
        (0..sound.len()).step_by(1024).filter(|&at| sound[at..at + 1024].iter().any(|&b| b != 0)).collect();
    let mut changed = 0;
    for round in 0..60 {
        let mut bytes = sound.clone();
        for _ in 0..[4, 64, 2000][round % 3] {
            let at = used[random() as usize % used.len()] + random() as usize % 1024;
            bytes[at] = [0, 0xff, 0x7f, random() as u8][random() as usize % 4];
        }
        // The magic number stays, or nobody would look.
        bytes[1080..1082].copy_from_slice(b"\x53\xef");
        if round % 10 == 9 {
            bytes.truncate(2048 + random() as usize % (bytes.len() - 2048));
        }
        std::fs::write(disk.path(), &bytes).unwrap();
        let begun = Instant::now();
        let until = begun + Duration::from_secs(3);
        changed += u32::from(
            check(&File::open(disk.path()).unwrap(), until).is_ok_and(|found| !faults(found).is_empty()),
        );
        assert!(begun.elapsed() < Duration::from_secs(6), "round {round} took {:?}", begun.elapsed());
    }
    println!("{changed} of 60 were taken for systems with faults");
}

/// A file of 8 TiB, all zeroes, where a short text is looked for.
#[test]
fn a_file_without_end_is_not_read_to_its_end() {
    let tree = Tree::sound();
    let large = tree.0.path().join("etc/machine-id");
    File::options().write(true).open(large).unwrap().set_len(8 << 40).unwrap();
    let begun = Instant::now();
    let found = tree.faults();
    assert_eq!(found.iter().map(|finding| finding.kind).collect::<Vec<_>>(), [FindingKind::MachineId]);
    assert!(begun.elapsed() < Duration::from_secs(20));
}

/// The images that the other tests boot.
#[test]
fn debian_with_cloud_init_is_sound_and_without_is_not() {
    let images = Kit::find().and_then(|kit| Some((kit.golden(), kit.cloud()?)));
    let Some((golden, cloud)) = images else {
        return spillway_testkit::skip("guest with cloud-init: not built, run 'make image'");
    };
    let kinds = |path| {
        let checked = checked(&File::open(path).unwrap());
        assert_eq!(checked.volumes[0].role, Some(VolumeRole::Root));
        faults(checked).into_iter().map(|finding| finding.kind).collect::<Vec<_>>()
    };
    assert_eq!(kinds(cloud), []);
    assert_eq!(kinds(golden), [FindingKind::NoCloudInit, FindingKind::HostName]);
}
