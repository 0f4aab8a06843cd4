//! Checks of images through the daemon's socket: it answers, and goes on answering, whatever the image is.
#![allow(clippy::unwrap_used)]

mod common;

use common::{World, ends, refused, run};
use spillway_api::{
    Catalog, CatalogSpec, ErrorCode, FindingKind, GuestSystem, ImageCheck, ImageImport, NewCatalog,
    Operation, SourceFormat, VolumeContent,
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

/// Makes a volume of Windows with these hives, and imports it.
fn import_windows(world: &World, hives: &[(&str, &str)]) {
    let config = world.path("tree/Windows/System32/config");
    std::fs::create_dir_all(&config).unwrap();
    for (name, content) in hives {
        std::fs::write(config.join(name), hive(content).unwrap()).unwrap();
    }
    let path = world.path("disk");
    ntfs_volume(&path, 8 << 20, &world.path("tree"), FileLayout::Whole, &[]).unwrap();
    let import = ImageImport { path: path.display().to_string(), format: SourceFormat::Raw, store: None };
    let client = world.client();
    ends(&client, &client.post::<_, Operation>("/v1/images/desk/versions", &import).unwrap()).unwrap();
}

/// An image of Windows, by its volume and its registry, as the daemon's clients see it.
#[test]
fn windows_is_checked_as_well() {
    let world = World::new();
    let client = world.client();
    let system = "[\\ControlSet001\\Services\\netkvm]\n\"Start\"=dword:00000003\n";
    let software = "[\\Microsoft\\Windows NT\\CurrentVersion]\n\"ProductName\"=\"Windows Server 2025\"\n";
    import_windows(&world, &[("SYSTEM", system), ("SOFTWARE", software)]);
    let found: ImageCheck = client.get("/v1/images/desk/versions/1/check").unwrap();
    assert!(found.has_system() && found.guest == Some(GuestSystem::Windows), "{found:?}");
    assert_eq!(found.windows.unwrap().product.as_deref(), Some("Windows Server 2025"));
    let viostor = found.findings.iter().find(|finding| finding.kind == FindingKind::NoVirtioDriver);
    assert!(viostor.unwrap().why.contains("INACCESSIBLE_BOOT_DEVICE"));
}

/// What resets bring back is the password of one machine account, which all clones share.
#[test]
fn a_pool_of_members_of_a_domain_is_warned_of_once_a_check_has_found_that() {
    let world = World::new();
    let client = world.client();
    let system = "[\\ControlSet001\\Services\\netkvm]\n\"Start\"=dword:00000003\n\n\
                  [\\ControlSet001\\Services\\Tcpip\\Parameters]\n\"Domain\"=\"corp.example.org\"\n";
    let security = "[\\Policy\\Secrets\\$MACHINE.ACC\\CurrVal]\n@=\"x\"\n";
    import_windows(&world, &[("SYSTEM", system), ("SECURITY", security)]);
    let warnings = |name: &str, settings: &str| {
        let spec = serde_json::from_str(&format!(r#"{{"image": "desk", {settings}}}"#)).unwrap();
        let new = NewCatalog { name: name.parse().unwrap(), spec };
        let created: Catalog = client.post("/v1/catalogs", &new).unwrap();
        created.warnings.into_iter().filter(|warning| warning.contains("domain")).collect::<Vec<_>>()
    };
    assert_eq!(warnings("before", r#""count": 0"#), [""; 0], "nothing is checked for that");
    let found: ImageCheck = client.get("/v1/images/desk/versions/1/check").unwrap();
    assert!(found.findings.iter().any(|finding| finding.kind == FindingKind::DomainMember), "{found:?}");
    let [pool] = warnings("pool", r#""count": 0"#).try_into().unwrap();
    for words in
        ["pools of members of a domain are not supported", "'corp.example.org'", "take type = dedicated"]
    {
        assert!(pool.contains(words), "{words}: {pool}");
    }
    assert_eq!(warnings("own", r#""type": "dedicated""#), [""; 0]);
    // So does each change of the earlier one.
    let spec: CatalogSpec = serde_json::from_str(r#"{"image": "desk", "vcpus": 2}"#).unwrap();
    let changed: Catalog = client.put("/v1/catalogs/before", &spec).unwrap();
    assert!(changed.warnings.iter().any(|warning| warning.contains("members of a domain")), "{changed:?}");
}
