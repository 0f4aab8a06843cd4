//! Checks of images through the daemon's socket: it answers, and goes on answering, whatever the image is.
#![allow(clippy::unwrap_used)]

mod common;

use common::{World, ends, refused, run};
use spillway_api::{
    ErrorCode, FindingKind, GuestSystem, ImageCheck, ImageImport, Operation, SourceFormat, VolumeContent,
};
use spillway_testkit::windows::{FileLayout, hive, ntfs_volume};
use std::os::unix::fs::FileExt;

#[test]
fn a_version_is_checked_and_stays_as_it_was() {
    let world = World::new();
    let client = world.client();
    let tree = world.path("tree");
    for folder in ["etc/ssh", "usr"] {
        std::fs::create_dir_all(tree.join(folder)).unwrap();
    }
    std::fs::write(tree.join("etc/ssh/ssh_host_ed25519_key"), "secret").unwrap();
    let path = world.path("disk").display().to_string();
    run("/usr/sbin/mke2fs", &["-q", "-t", "ext4", "-d", tree.to_str().unwrap(), &path, "16M"]);
    let import = ImageImport { path, format: SourceFormat::Raw, store: None };
    let begun: Operation = client.post("/v1/images/debian/versions", &import).unwrap();
    ends(&client, &begun).unwrap();
    let check = || client.get::<ImageCheck>("/v1/images/debian/versions/1/check");
    let found = check().unwrap();
    assert!(found.has_system() && found.volumes[0].content == VolumeContent::Ext, "{found:?}");
    let keys = found.findings.iter().find(|finding| finding.kind == FindingKind::SshHostKeys).unwrap();
    assert_eq!(keys.path, "/etc/ssh/ssh_host_ed25519_key");
    let verify: Operation = client.post("/v1/images/debian/versions/1/verify", &()).unwrap();
    ends(&client, &verify).unwrap();
    assert_eq!(
        refused(client.get::<ImageCheck>("/v1/images/debian/versions/2/check")).code,
        ErrorCode::NotFound
    );

    // All who ask at the same time are answered, and what was found is kept: it does not change, nor does the version.
    let stored = world.state().join("store/images/debian/1/disk.raw");
    std::fs::rename(&stored, world.path("away")).unwrap();
    std::thread::scope(|scope| {
        let asked = [(); 8]
            .map(|()| scope.spawn(|| world.client().get::<ImageCheck>("/v1/images/debian/versions/1/check")));
        asked.into_iter().for_each(|thread| assert_eq!(thread.join().unwrap().unwrap(), found));
    });
    std::fs::rename(world.path("away"), &stored).unwrap();
}

/// A file system of which nothing is right that it keeps for itself.
#[test]
fn a_damaged_file_system_is_said_to_be_unread() {
    let world = World::new();
    let client = world.client();
    let path = world.path("disk").display().to_string();
    run("/usr/sbin/mke2fs", &["-q", "-t", "ext4", &path, "16M"]);
    std::fs::File::options().write(true).open(&path).unwrap().write_all_at(&[0xff; 60_000], 2048).unwrap();
    let import = ImageImport { path, format: SourceFormat::Raw, store: None };
    ends(&client, &client.post::<_, Operation>("/v1/images/debian/versions", &import).unwrap()).unwrap();
    let found: ImageCheck = client.get("/v1/images/debian/versions/1/check").unwrap();
    let unread = found.volumes[0].unread.as_ref().unwrap();
    assert!(!found.has_system() && unread.contains("debugfs cannot read it"), "{found:?}");
    assert!(!found.boot.bios_code && found.boot.efi_programs.is_empty(), "{found:?}");
}

/// An image of Windows, by its volume and its registry, as the daemon's clients see it.
#[test]
fn windows_is_checked_as_well() {
    let world = World::new();
    let client = world.client();
    let config = world.path("tree/Windows/System32/config");
    std::fs::create_dir_all(&config).unwrap();
    let system = "[\\ControlSet001\\Services\\netkvm]\n\"Start\"=dword:00000003\n";
    let software = "[\\Microsoft\\Windows NT\\CurrentVersion]\n\"ProductName\"=\"Windows Server 2025\"\n";
    for (name, content) in [("SYSTEM", system), ("SOFTWARE", software)] {
        std::fs::write(config.join(name), hive(content).unwrap()).unwrap();
    }
    let path = world.path("disk");
    ntfs_volume(&path, 8 << 20, &world.path("tree"), FileLayout::Whole, &[]).unwrap();
    let import = ImageImport { path: path.display().to_string(), format: SourceFormat::Raw, store: None };
    ends(&client, &client.post::<_, Operation>("/v1/images/desk/versions", &import).unwrap()).unwrap();
    let found: ImageCheck = client.get("/v1/images/desk/versions/1/check").unwrap();
    assert!(found.has_system() && found.guest == Some(GuestSystem::Windows), "{found:?}");
    assert_eq!(found.windows.unwrap().product.as_deref(), Some("Windows Server 2025"));
    let viostor = found.findings.iter().find(|finding| finding.kind == FindingKind::NoVirtioDriver);
    assert!(viostor.unwrap().why.contains("INACCESSIBLE_BOOT_DEVICE"));
}
