//! Windows images made with mkntfs, ntfs-3g's library and hivex, without root: each finding appears and disappears.

use crate::images::BootChoice;
use crate::images::check::tests::checked;
use crate::images::check::{CheckedVersion, boot_choice, fat};
use spillway_api::{
    Finding, FindingKind, Firmware, GuestSystem, PartitionTable, Severity, VolumeContent, VolumeRole,
    WindowsVersion,
};
use spillway_testkit::windows::{FileLayout, hive, ntfs_volume};
use std::collections::BTreeMap;
use std::fs::File;
use std::io::Write;
use std::os::unix::fs::FileExt;
use std::process::{Command, Stdio};

const MIB: u64 = 1 << 20;
const TASK: &str = "Windows/System32/Tasks/Microsoft/Windows/Defrag/ScheduledDefrag";
const CONF: &str = "Program Files/Cloudbase Solutions/Cloudbase-Init/conf/cloudbase-init.conf";
const SCRIPT: &str = "Windows/Setup/Scripts/SetupComplete.cmd";
const STATE: &str = r"SOFTWARE\Microsoft\Windows\CurrentVersion\Setup\State";
const CURRENT: &str = r"SYSTEM\ControlSet001";

/// Windows, as files and registry: the hive is the first name in the path of a key.
#[derive(Clone)]
pub struct WindowsTree {
    files: BTreeMap<&'static str, Vec<u8>>,
    values: BTreeMap<(String, &'static str), String>,
}

fn utf16(text: &str) -> Vec<u8> {
    [0xfeff].into_iter().chain(text.encode_utf16()).flat_map(u16::to_le_bytes).collect()
}

/// A `REG_MULTI_SZ` in the text form of a hive.
fn texts(texts: &[&str]) -> String {
    let ended: String = texts.iter().map(|text| format!("{text}\0")).collect::<String>() + "\0";
    let bytes: Vec<String> =
        ended.encode_utf16().flat_map(u16::to_le_bytes).map(|byte| format!("{byte:02x}")).collect();
    format!("hex(7):{}", bytes.join(","))
}

fn task(enabled: bool) -> Vec<u8> {
    let settings = format!("<Settings><Enabled>{enabled}</Enabled></Settings>");
    utf16(&format!("<?xml version=\"1.0\" encoding=\"UTF-16\"?>\r\n<Task>{settings}</Task>\r\n"))
}

impl WindowsTree {
    /// A system that clones well.
    pub fn sound() -> WindowsTree {
        let mut tree = WindowsTree { files: BTreeMap::new(), values: BTreeMap::new() };
        tree.put("Windows/System32/drivers/viostor.sys", "MZ");
        tree.put("Windows/System32/drivers/netkvm.sys", "MZ");
        tree.put(TASK, task(false));
        tree.put(CONF, "[DEFAULT]\r\nmetadata_services=cloudbaseinit.metadata.services.nocloudservice.NoCloudConfigDriveService\r\n");
        for (key, name, value) in [
            (r"SYSTEM\Select", "Current", "dword:00000001"),
            (r"SYSTEM\Select", "Default", "dword:00000001"),
            (r"SYSTEM\Setup", "SystemSetupInProgress", "dword:00000001"),
            (r"SYSTEM\Setup", "CmdLine", "\"oobe\\\\windeploy.exe\""),
            (r"SYSTEM\Setup\Status\SysprepStatus", "GeneralizationState", "dword:00000003"),
            (r"SYSTEM\Setup\Status\SysprepStatus", "CleanupState", "dword:00000002"),
            (r"SYSTEM\ControlSet001\Services\viostor", "Start", "dword:00000000"),
            (r"SYSTEM\ControlSet001\Services\viostor", "ImagePath", "\"System32\\\\drivers\\\\viostor.sys\""),
            (r"SYSTEM\ControlSet001\Services\netkvm", "Start", "dword:00000003"),
            (r"SYSTEM\ControlSet001\Services\QEMU-GA", "Start", "dword:00000002"),
            (r"SYSTEM\ControlSet001\Services\cloudbase-init", "Start", "dword:00000002"),
            (r"SYSTEM\ControlSet001\Services\Netlogon", "Start", "dword:00000003"),
            (r"SYSTEM\ControlSet001\Services\Tcpip\Parameters", "Domain", "\"\""),
            (r"SYSTEM\ControlSet001\Control\FileSystem", "NtfsDisableLastAccessUpdate", "dword:80000003"),
            (r"SYSTEM\ControlSet001\Control\FileSystem", "DisableDeleteNotification", "dword:00000000"),
            (r"SYSTEM\ControlSet001\Control\Power", "HibernateEnabled", "dword:00000000"),
            (r"SECURITY\Policy\Secrets\L$_x", "x", "\"\""),
            (STATE, "ImageState", "\"IMAGE_STATE_GENERALIZE_RESEAL_TO_OOBE\""),
            (r"SOFTWARE\Microsoft\Windows NT\CurrentVersion", "ProductName", "\"Windows 10 Pro\""),
            (r"SOFTWARE\Microsoft\Windows NT\CurrentVersion", "EditionID", "\"Professional\""),
            (r"SOFTWARE\Microsoft\Windows NT\CurrentVersion", "CurrentBuild", "\"26100\""),
            (r"SOFTWARE\Microsoft\Windows NT\CurrentVersion", "UBR", "dword:00000fdd"),
        ] {
            tree.set(key, name, value);
        }
        let files = texts(&[r"D:\pagefile.sys 0 0"]);
        tree.set(r"SYSTEM\ControlSet001\Control\Session Manager\Memory Management", "PagingFiles", &files);
        tree
    }

    fn put(&mut self, path: &'static str, content: impl Into<Vec<u8>>) {
        self.files.insert(path, content.into());
    }

    fn take(&mut self, path: &str) {
        self.files.remove(path).unwrap();
    }

    fn set(&mut self, key: &str, name: &'static str, value: &str) {
        self.values.insert((key.to_owned(), name), value.to_owned());
    }

    /// Removes a value, or all values of a key, and so the key.
    fn unset(&mut self, key: &str, name: &str) {
        let before = self.values.len();
        self.values.retain(|(at, other), _| at != key || (!name.is_empty() && *other != name));
        assert!(self.values.len() < before, "{key} {name}");
    }

    /// The hive of this name.
    fn hive(&self, name: &str) -> Vec<u8> {
        let mut text = String::new();
        for ((key, value), content) in &self.values {
            if let Some(key) = key.strip_prefix(name) {
                text += &format!("\n[{key}]\n\"{value}\"={content}\n");
            }
        }
        hive(&text).unwrap()
    }

    /// A file that is the system volume.
    fn volume(&self, layout: FileLayout) -> tempfile::NamedTempFile {
        let tree = tempfile::tempdir().unwrap();
        let mut files = self.files.clone();
        for (path, name) in [
            ("Windows/System32/config/SYSTEM", "SYSTEM"),
            ("Windows/System32/config/SOFTWARE", "SOFTWARE"),
            ("Windows/System32/config/SECURITY", "SECURITY"),
        ] {
            files.entry(path).or_insert_with(|| self.hive(name));
        }
        for (path, content) in &files {
            let path = tree.path().join(path);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, content).unwrap();
        }
        let to = tempfile::NamedTempFile::new().unwrap();
        ntfs_volume(to.path(), 8 * MIB, tree.path(), layout, &[]).unwrap();
        to
    }

    /// Findings of its volume, without that about the missing boot loader.
    fn findings(&self) -> Vec<Finding> {
        let mut found = checked(self.volume(FileLayout::Whole).as_file());
        assert_eq!(found.guest, Some(GuestSystem::Windows));
        found.findings.retain(|finding| finding.kind != FindingKind::NoBootLoader);
        found.findings
    }

    /// The one finding that it has.
    fn finding(&self) -> Finding {
        let mut found = self.findings();
        assert_eq!(found.len(), 1, "{found:?}");
        found.remove(0)
    }
}

/// A disk as Windows Setup partitions it, with the programs of its EFI partition.
fn disk(tree: &WindowsTree) -> File {
    let disk = tempfile::NamedTempFile::new().unwrap();
    disk.as_file().set_len(32 * MIB).unwrap();
    let mut sfdisk = Command::new("/usr/sbin/sfdisk");
    let mut sfdisk = sfdisk.arg("-q").arg(disk.path()).stdin(Stdio::piped()).spawn().unwrap();
    let script = "label: gpt\nstart=2048, size=4096, type=U\nstart=6144, size=2048, type=E3C9E316-0B5C-4DB8-817D-F92DF00215AE\n\
                  start=8192, size=16384, type=EBD0A0A2-B9E5-4433-87C0-68B6B72699C7\nstart=24576, size=8192\n";
    sfdisk.stdin.take().unwrap().write_all(script.as_bytes()).unwrap();
    assert!(sfdisk.wait().unwrap().success());
    // The code that Windows Setup leaves in the first sector, which a BIOS can do nothing with.
    disk.as_file().write_all_at(&[0x33, 0xc0, 0x8e, 0xd0], 0).unwrap();
    let programs = ["/EFI/BOOT/BOOTX64.EFI", "/EFI/Microsoft/Boot/bootmgfw.efi"];
    fat::tests::format(disk.as_file(), MIB, 2 * MIB, fatfs::FatType::Fat12, &programs);
    let volume = std::fs::read(tree.volume(FileLayout::Whole).path()).unwrap();
    disk.as_file().write_all_at(&volume, 4 * MIB).unwrap();
    disk.into_file()
}

#[test]
fn a_sound_windows_has_no_findings() {
    let disk = disk(&WindowsTree::sound());
    let CheckedVersion { guest, windows, volumes, boot, findings } = checked(&disk);
    assert_eq!(guest, Some(GuestSystem::Windows));
    let version = WindowsVersion {
        product: Some("Windows 11 Pro".into()),
        edition: Some("Professional".into()),
        build: Some("26100.4061".into()),
    };
    assert_eq!(windows, Some(version));
    let system = &volumes[2];
    assert_eq!(
        (system.content, system.role, &system.unread),
        (VolumeContent::Ntfs, Some(VolumeRole::Root), &None)
    );
    assert!(volumes[3].unread.is_some());
    assert_eq!((boot.partition_table, boot.efi_partition), (PartitionTable::Gpt, Some(1)));
    assert!(
        boot.starts_with_uefi() && boot.efi_programs.len() == 1,
        "bootmgfw.efi is one folder deeper: {boot:?}"
    );
    assert_eq!(findings, []);
    assert_eq!(
        boot_choice(&disk),
        BootChoice { firmware: Firmware::Uefi, guest: GuestSystem::Windows },
        "what its machines get"
    );
    assert!(!boot.bios_code, "code that finds nothing to go on with");
}

/// On a disk with a GPT the code counts if there is something for it: a BIOS boot partition, its attribute, or an active partition.
#[test]
fn code_for_a_bios_counts_if_it_can_go_on() {
    const ENTRY: u64 = 1024 + 3 * 128;
    let bios_boot: &[u8] = b"Hah!IdontNeedEFI";
    let cases: [(u64, &[u8]); 3] = [(ENTRY, bios_boot), (ENTRY + 48, &[4]), (446, &[0x80])];
    for (at, bytes) in cases {
        let disk = disk(&WindowsTree::sound());
        disk.write_all_at(bytes, at).unwrap();
        assert!(checked(&disk).boot.bios_code, "{at}");
        assert_eq!(boot_choice(&disk).firmware, Firmware::Bios, "{at}");
    }
    // Without a program for UEFI nothing starts it.
    let disk = disk(&WindowsTree::sound());
    disk.write_all_at(&[0; 4096], MIB).unwrap();
    let found = checked(&disk).findings;
    assert_eq!(found.iter().map(|finding| finding.kind).collect::<Vec<_>>(), [FindingKind::NoBootLoader]);
}

/// What is changed, and the finding: its kind, its severity and a part of what it says.
type Case = (fn(&mut WindowsTree), FindingKind, Severity, &'static str);

#[test]
fn each_thing_that_breaks_clones_of_windows_is_found() {
    use FindingKind::*;
    use Severity::{Error, Note, Warning};
    let cases: &[Case] = &[
        (
            |tree| tree.unset(r"SYSTEM\ControlSet001\Services\viostor", ""),
            NoVirtioDriver,
            Error,
            "no driver viostor",
        ),
        (
            |tree| tree.take("Windows/System32/drivers/viostor.sys"),
            NoVirtioDriver,
            Error,
            "file of the driver",
        ),
        (
            |tree| tree.set(r"SYSTEM\ControlSet001\Services\viostor", "Start", "dword:00000003"),
            NoVirtioDriver,
            Error,
            "Start is 3, not 0",
        ),
        (
            |tree| tree.set(r"SYSTEM\ControlSet001\Services\viostor\StartOverride", "0", "dword:00000003"),
            NoVirtioDriver,
            Error,
            "StartOverride says 3",
        ),
        (
            |tree| {
                let path = r#""\\SystemRoot\\System32\\DriverStore\\FileRepository\\viostor.inf_amd64_1\\viostor.sys""#;
                tree.set(r"SYSTEM\ControlSet001\Services\viostor", "ImagePath", path);
            },
            NoVirtioDriver,
            Error,
            "DriverStore",
        ),
        (
            |tree| tree.unset(r"SYSTEM\ControlSet001\Services\netkvm", ""),
            NoNetworkDriver,
            Warning,
            "no driver netkvm",
        ),
        (
            |tree| tree.take("Windows/System32/drivers/netkvm.sys"),
            NoNetworkDriver,
            Warning,
            "file of the driver",
        ),
        (
            |tree| tree.set(r"SYSTEM\ControlSet001\Services\netkvm", "Start", "dword:00000004"),
            NoNetworkDriver,
            Warning,
            "disabled",
        ),
        (
            |tree| {
                let files = texts(&[r"?:\pagefile.sys"]);
                tree.set(
                    r"SYSTEM\ControlSet001\Control\Session Manager\Memory Management",
                    "PagingFiles",
                    &files,
                );
            },
            PageFile,
            Note,
            "?:",
        ),
        (
            |tree| {
                tree.set(
                    r"SYSTEM\ControlSet001\Control\FileSystem",
                    "DisableDeleteNotification",
                    "dword:00000001",
                )
            },
            NoDiscard,
            Warning,
            "nothing discards",
        ),
        (
            |tree| {
                tree.set(
                    r"SYSTEM\ControlSet001\Control\FileSystem",
                    "NtfsDisableLastAccessUpdate",
                    "dword:80000002",
                )
            },
            LastAccess,
            Note,
            "0x80000002",
        ),
        (
            |tree| {
                tree.set(
                    r"SYSTEM\ControlSet001\Control\FileSystem",
                    "NtfsDisableLastAccessUpdate",
                    "dword:00000000",
                )
            },
            LastAccess,
            Note,
            "is 0x0",
        ),
        (|tree| tree.put(TASK, task(true)), Defragmentation, Warning, "enabled"),
        (|tree| tree.put("hiberfil.sys", "hibr and more"), Hibernation, Error, "is hibernated"),
        (
            |tree| tree.set(r"SYSTEM\ControlSet001\Control\Power", "HibernateEnabled", "dword:00000001"),
            Hibernation,
            Warning,
            "hibernation is enabled",
        ),
        (
            |tree| {
                tree.unset(r"SYSTEM\ControlSet001\Control\Power", "");
                tree.set(
                    r"SYSTEM\ControlSet001\Control\Session Manager\Power",
                    "HiberbootEnabled",
                    "dword:00000001",
                );
                tree.put("hiberfil.sys", "wake");
            },
            Hibernation,
            Warning,
            "fast startup",
        ),
        (|tree| tree.take(CONF), NoCloudInit, Warning, "not installed"),
        (
            |tree| tree.set(r"SYSTEM\ControlSet001\Services\cloudbase-init", "Start", "dword:00000004"),
            NoCloudInit,
            Warning,
            "disabled",
        ),
        (
            |tree| tree.unset(r"SYSTEM\ControlSet001\Services\cloudbase-init", ""),
            NoCloudInit,
            Warning,
            "has no service",
        ),
        (
            |tree| {
                tree.set(r"SYSTEM\ControlSet001\Services\cloudbase-init", "Start", "dword:00000003");
                tree.put(SCRIPT, "net start cloudbase-init\r\n");
            },
            NoCloudInit,
            Warning,
            "does not start by itself",
        ),
        (
            |tree| {
                tree.put(
                    CONF,
                    "[DEFAULT]\nmetadata_services=cloudbaseinit.metadata.services.ec2service.EC2Service\n",
                )
            },
            CloudInitSource,
            Warning,
            "has no nocloudservice",
        ),
        (|tree| tree.put(CONF, "[DEFAULT]\n"), CloudInitSource, Warning, "unless metadata_services names it"),
        (
            |tree| tree.unset(r"SYSTEM\ControlSet001\Services\QEMU-GA", ""),
            NoGuestAgent,
            Note,
            "not installed",
        ),
    ];
    for (change, kind, severity, what) in cases {
        let mut tree = WindowsTree::sound();
        change(&mut tree);
        let found = tree.finding();
        assert_eq!((found.kind, found.severity), (*kind, *severity), "{what}: {found:?}");
        assert!(found.what.contains(what), "{what}: {found:?}");
    }
}

#[test]
fn the_state_of_setup_is_told() {
    use Severity::{Error, Warning};
    let state = |state: &str| {
        let mut tree = WindowsTree::sound();
        tree.set(STATE, "ImageState", &format!("\"{state}\""));
        tree
    };
    for (word, severity, what) in [
        ("IMAGE_STATE_GENERALIZE_RESEAL_TO_AUDIT", Warning, "audit mode"),
        ("IMAGE_STATE_SPECIALIZE_RESEAL_TO_OOBE", Warning, "specialised"),
        ("IMAGE_STATE_UNDEPLOYABLE", Error, "interrupted"),
    ] {
        let found = state(word).finding();
        assert_eq!((found.kind, found.severity), (FindingKind::NotGeneralized, severity), "{word}");
        assert!(found.what.contains(what), "{found:?}");
    }
    let mut tree = state("IMAGE_STATE_COMPLETE");
    tree.set(r"SYSTEM\Setup\Status\SysprepStatus", "GeneralizationState", "dword:00000007");
    let found = tree.findings();
    assert_eq!(found.len(), 2, "{found:?}");
    assert!(found[0].why.contains("SID") && found[1].what.contains("'oobe\\\\windeploy.exe'"), "{found:?}");
    tree.unset(r"SYSTEM\Setup", "SystemSetupInProgress");
    assert_eq!(tree.finding().what, "Windows is not generalised");
    let complete = tree.clone();
    for name in ["OOBEInProgress", "SetupType"] {
        let mut tree = tree.clone();
        tree.set(r"SYSTEM\Setup", name, "dword:00000001");
        assert_eq!(tree.findings().len(), 2, "{name}");
    }
    // Setup has run its script already.
    let mut tree = complete.clone();
    tree.set(&format!(r"{CURRENT}\Services\cloudbase-init"), "Start", "dword:00000003");
    tree.put(SCRIPT, "sc config cloudbase-init start= auto\r\n");
    assert!(tree.findings().iter().any(|finding| finding.kind == FindingKind::NoCloudInit));
    for (name, value) in [("GeneralizationState", "dword:00000003"), ("CleanupState", "dword:00000001")] {
        let mut tree = complete.clone();
        tree.set(r"SYSTEM\Setup\Status\SysprepStatus", name, value);
        let found = tree.findings();
        assert_eq!(found.len(), 2, "{found:?}");
        assert!(found[1].kind == FindingKind::NotGeneralized && found[1].what.contains(name), "{found:?}");
    }
    let mut tree = WindowsTree::sound();
    tree.unset(STATE, "");
    assert_eq!(tree.finding().kind, FindingKind::NotChecked);
}

#[test]
fn members_of_a_domain_are_told() {
    let parameters = format!(r"{CURRENT}\Services\Tcpip\Parameters");
    let mut tree = WindowsTree::sound();
    tree.set(&parameters, "Domain", "\"corp.example.org\"");
    assert_eq!(tree.findings(), [], "a suffix for DNS");
    tree.set(&format!(r"{CURRENT}\Services\Netlogon"), "Start", "dword:00000002");
    let found = tree.finding();
    assert_eq!((found.kind, found.severity), (FindingKind::DomainMember, Severity::Error));
    assert!(found.what.contains("corp.example.org"), "{found:?}");
    let mut tree = WindowsTree::sound();
    tree.set(r"SECURITY\Policy\Secrets\$MACHINE.ACC\CurrVal", "x", "\"\"");
    assert_eq!(tree.finding().kind, FindingKind::DomainMember);
}

/// What looks alike and does no harm.
#[test]
fn what_does_no_harm_is_no_finding() {
    let cases: &[fn(&mut WindowsTree)] = &[
        |tree| tree.take(TASK),
        |tree| tree.put("hiberfil.sys", vec![0; 5000]),
        |tree| tree.unset(r"SYSTEM\ControlSet001\Control\FileSystem", ""),
        |tree| tree.unset(r"SYSTEM\ControlSet001\Services\viostor", "ImagePath"),
        |tree| tree.set(r"SYSTEM\ControlSet001\Services\viostor\StartOverride", "0", "dword:00000000"),
        |tree| {
            tree.unset(r"SYSTEM\ControlSet001\Services\QEMU-GA", "");
            tree.set(r"SYSTEM\ControlSet001\Services\QEMU Guest Agent", "Start", "dword:00000002");
        },
        |tree| {
            tree.set(r"SYSTEM\ControlSet001\Services\cloudbase-init", "Start", "dword:00000004");
            tree.put(SCRIPT, "sc config Cloudbase-Init start= auto\r\n");
        },
        |tree| {
            tree.set(r"SYSTEM\ControlSet001\Services\cloudbase-init", "Start", "dword:00000003");
            tree.put(
                SCRIPT,
                "@echo off\r\nsc config cloudbase-init start= auto\r\nnet start cloudbase-init\r\n",
            );
        },
        // The settings of another set do not count.
        |tree| {
            tree.set(r"SYSTEM\ControlSet002\Services\viostor", "Start", "dword:00000003");
            tree.set(
                r"SYSTEM\ControlSet002\Control\FileSystem",
                "DisableDeleteNotification",
                "dword:00000001",
            );
        },
    ];
    for (n, change) in cases.iter().enumerate() {
        let mut tree = WindowsTree::sound();
        change(&mut tree);
        assert_eq!(tree.findings(), [], "{n}");
    }
}

#[test]
fn the_set_of_settings_is_the_one_that_starts_next() {
    let mut tree = WindowsTree::sound();
    tree.set(r"SYSTEM\Select", "Current", "dword:00000002");
    assert_eq!(tree.findings(), [], "the set of the start before");
    let kinds = |tree: &WindowsTree| tree.findings().iter().map(|finding| finding.kind).collect::<Vec<_>>();
    use FindingKind::{NoCloudInit, NoGuestAgent, NoNetworkDriver, NoVirtioDriver};
    let empty = [NoVirtioDriver, NoCloudInit, NoNetworkDriver, NoGuestAgent];
    for default in ["dword:00000002", "dword:00000000"] {
        tree.set(r"SYSTEM\Select", "Default", default);
        assert_eq!(kinds(&tree), empty, "{default}: a set without drivers and services");
    }
    tree.unset(r"SYSTEM\Select", "Default");
    assert_eq!(kinds(&tree), empty);
}

#[test]
fn what_cannot_be_read_is_told() {
    let mut tree = WindowsTree::sound();
    tree.put("Windows/System32/config/SYSTEM", "garbage");
    assert_eq!(tree.finding().kind, FindingKind::NotChecked);
    let mut tree = WindowsTree::sound();
    let mut dirty = tree.hive("SOFTWARE");
    dirty[4] ^= 1;
    tree.put("Windows/System32/config/SOFTWARE", dirty);
    let found = tree.finding();
    assert!(found.kind == FindingKind::NotChecked && found.what.contains("not shut down"), "{found:?}");
    // The dirty flag of the volume is in the record of $Volume, the fourth of the table.
    let volume = WindowsTree::sound().volume(FileLayout::Whole);
    let mut bytes = std::fs::read(volume.path()).unwrap();
    let table = u64::from_le_bytes(bytes[48..56].try_into().unwrap()) as usize * 4096;
    let record = table + 3 * 1024;
    let information =
        (record..record + 1024).step_by(8).find(|at| bytes[*at..*at + 4] == [0x70, 0, 0, 0]).unwrap();
    bytes[information + 24 + 10] |= 1;
    volume.as_file().write_all_at(&bytes, 0).unwrap();
    let found = checked(volume.as_file()).findings;
    let is_marked = |finding: &&Finding| finding.kind == FindingKind::Hibernation;
    assert!(found.iter().find(is_marked).unwrap().what.contains("marked for chkdsk"), "{found:?}");
    // BitLocker has the same place for its mark.
    bytes[3..11].copy_from_slice(b"-FVE-FS-");
    volume.as_file().write_all_at(&bytes, 0).unwrap();
    let found = checked(volume.as_file());
    assert_eq!((found.guest, found.volumes[0].content), (None, VolumeContent::Bitlocker));
    assert_eq!(found.volumes[0].unread.as_deref(), Some("it is encrypted with BitLocker"));
    // A volume without Windows, and one without a file table.
    let tree = tempfile::tempdir().unwrap();
    let other = tempfile::NamedTempFile::new().unwrap();
    ntfs_volume(other.path(), 8 * MIB, tree.path(), FileLayout::Whole, &[]).unwrap();
    assert_eq!(checked(other.as_file()).volumes[0].unread.as_deref(), Some("it has no system"));
    other.as_file().write_all_at(&[0xff; 8], 48).unwrap();
    let found = checked(other.as_file());
    assert!(found.volumes[0].unread.as_ref().unwrap().contains("cannot be read"), "{found:?}");
}

/// Bytes of a volume and of the hives on it are changed, a few at a time: each check has an end, and a list.
#[test]
fn whatever_the_bytes_are_a_check_of_windows_has_an_end() {
    let seed = std::env::var("SPILLWAY_SEED").ok().and_then(|seed| seed.parse().ok());
    let seed: u64 = seed.unwrap_or_else(|| u64::from(std::process::id()) << 20 | 1);
    println!("SPILLWAY_SEED={seed}");
    let mut random = spillway_testkit::Rng::new(seed);
    let volume = WindowsTree::sound().volume(FileLayout::Whole);
    let sound = std::fs::read(volume.path()).unwrap();
    let used: Vec<usize> = (0..sound.len()).filter(|at| sound[*at] != 0).collect();
    let is_structure = |at: &&usize| {
        let sector = |size: usize| &sound[*at / size * size..];
        sector(1024).starts_with(b"FILE") || sector(4096).starts_with(b"INDX")
    };
    let (structures, contents): (Vec<usize>, Vec<usize>) = used.iter().partition(|at| is_structure(at));
    let mut windows = 0;
    for _ in 0..500 {
        let mut changed = Vec::new();
        for _ in 0..=random.below(60) {
            let from = if random.below(3) == 0 { &structures } else { &contents };
            let at = from[random.below(from.len() as u64) as usize];
            let byte = [0, 1, 0x7f, 0x80, 0xff, random.below(256) as u8][random.below(6) as usize];
            volume.as_file().write_all_at(&[byte], at as u64).unwrap();
            changed.push(at);
        }
        let found = checked(volume.as_file());
        windows += usize::from(found.guest == Some(GuestSystem::Windows));
        assert!(found.findings.len() < 40 && found.volumes.len() < 130);
        for at in changed {
            volume.as_file().write_all_at(&sound[at..=at], at as u64).unwrap();
        }
    }
    assert!((50..500).contains(&windows), "some damage hides Windows, and some does not: {windows}");
}
