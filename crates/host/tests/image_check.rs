//! Checks of images through the daemon's socket: it answers, and goes on answering, whatever the image is.
#![allow(clippy::unwrap_used)]

mod common;

use common::{World, ends, refused, run};
use spillway_api::{
    Catalog, CatalogSpec, CatalogUpdate, ErrorCode, FindingKind, GuestSystem, Image, ImageCheck, ImageImport,
    NewCatalog, Operation, SourceFormat, VersionChoice, VolumeContent,
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
    import_disk(world);
}

/// Imports the disk as the next version.
fn import_disk(world: &World) {
    let path = world.path("disk");
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

/// What resets bring back is the password of one machine account, which all clones share. Who has not checked the image is refused too.
#[test]
fn a_pool_of_members_of_a_domain_is_refused() {
    let world = World::new();
    let client = world.client();
    let system = "[\\ControlSet001\\Services\\netkvm]\n\"Start\"=dword:00000003\n\n\
                  [\\ControlSet001\\Services\\Tcpip\\Parameters]\n\"Domain\"=\"corp.example.org\"\n";
    let security = "[\\Policy\\Secrets\\$MACHINE.ACC\\CurrVal]\n@=\"x\"\n";
    import_windows(&world, &[("SYSTEM", system)]);
    import_windows(&world, &[("SYSTEM", system), ("SECURITY", security)]);
    let spec = |settings: &str| serde_json::from_str::<CatalogSpec>(&format!("{{{settings}}}")).unwrap();
    let create = |name: &str, settings: &str| {
        let new = NewCatalog { name: name.parse().unwrap(), spec: spec(settings) };
        client.post::<_, Catalog>("/v1/catalogs", &new).map_err(|e| e.to_string())
    };
    let member = r#""image": "desk:2""#;
    let refused = create("pool", member).unwrap_err();
    let words =
        ["desk:2", "pools of members are not supported", "'corp.example.org'", "take type = dedicated"];
    for words in words {
        assert!(refused.contains(words), "{words}: {refused}");
    }
    assert!(client.get::<Catalog>("/v1/catalogs/pool").is_err());
    create("own", &format!(r#"{member}, "type": "dedicated""#)).unwrap();

    // Nor does a catalog that there is become one.
    create("pool", r#""image": "desk:1""#).unwrap();
    let change = |name: &str, settings: &str| {
        client.put::<_, Catalog>(&format!("/v1/catalogs/{name}"), &spec(settings)).map_err(|e| e.to_string())
    };
    for (name, settings) in [("pool", member), ("own", member)] {
        let refused = change(name, settings).unwrap_err();
        assert!(refused.contains("pools of members"), "{name}: {refused}");
    }
    let update: CatalogUpdate = serde_json::from_str(&format!("{{{member}}}")).unwrap();
    let refused = client.post::<_, Catalog>("/v1/catalogs/pool/update", &update).unwrap_err().to_string();
    assert!(refused.contains("pools of members"), "{refused}");
    assert_eq!(client.get::<Catalog>("/v1/catalogs/pool").unwrap().version, 1);

    // Whatever else is on the disk: swap beside Windows here, on a disk that nobody has checked.
    let whole = std::fs::read(world.path("disk")).unwrap();
    let mut disk = vec![0; 16 << 20];
    disk[510..512].copy_from_slice(&[0x55, 0xaa]);
    for (n, kind, first, sectors) in [(0, 7, 2048_u32, 16384_u32), (1, 0x82, 20480, 8192)] {
        let entry = &mut disk[446 + n * 16..][..16];
        entry[4] = kind;
        entry[8..12].copy_from_slice(&first.to_le_bytes());
        entry[12..].copy_from_slice(&sectors.to_le_bytes());
    }
    disk[1 << 20..][..whole.len()].copy_from_slice(&whole);
    disk[20480 * 512 + 4086..][..10].copy_from_slice(b"SWAPSPACE2");
    std::fs::write(world.path("disk"), disk).unwrap();
    import_disk(&world);
    for settings in [r#""image": "desk:3""#, r#""image": "desk:3", "guest": "windows""#] {
        let refused = create("mixed", settings).unwrap_err();
        assert!(refused.contains("desk:3") && refused.contains("pools of members"), "{refused}");
    }
    create("mixed", r#""image": "desk:3", "guest": "linux""#).unwrap();
    assert!(change("mixed", r#""image": "desk:3""#).unwrap_err().contains("pools of members"));

    // A pool that follows what is published takes it, and says so; it can be changed, to have no machines.
    create("following", r#""image": "desk""#).unwrap();
    client.put::<_, Image>("/v1/images/desk/published", &VersionChoice { version: 2 }).unwrap();
    let changed = change("following", r#""image": "desk", "count": 0"#).unwrap();
    assert_eq!(changed.version, 2);
    assert!(changed.warnings.iter().any(|warning| warning.contains("pools of members")), "{changed:?}");
}
