//! Checks of images through the daemon's socket: it answers, and goes on answering, whatever the image is.
#![allow(clippy::unwrap_used)]

mod common;

use common::{World, ends, refused, run};
use spillway_api::{ErrorCode, FindingKind, ImageCheck, ImageImport, Operation, SourceFormat, VolumeContent};
use std::os::unix::fs::{FileExt, PermissionsExt};

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

    // One at a time: who comes meanwhile is told so. All are done or told, and some round has both.
    let refusals = (0..20).map(|_| {
        let answers = std::thread::scope(|scope| {
            let asked = [(); 4].map(|()| {
                scope.spawn(|| world.client().get::<ImageCheck>("/v1/images/debian/versions/1/check"))
            });
            asked.map(|thread| thread.join().unwrap())
        });
        assert!(answers.iter().any(Result::is_ok));
        let refused: Vec<_> = answers.into_iter().filter(Result::is_err).map(refused).collect();
        for error in &refused {
            assert!(
                error.code == ErrorCode::Conflict && error.message.contains("being checked"),
                "{error:?}"
            );
        }
        refused.len()
    });
    assert!({ refusals }.any(|refusals| refusals > 0));

    // Of what the file system keeps for itself nothing is right any more.
    let stored = world.state().join("store/images/debian/1/disk.raw");
    std::fs::set_permissions(&stored, PermissionsExt::from_mode(0o644)).unwrap();
    let file = std::fs::File::options().write(true).open(&stored).unwrap();
    file.write_all_at(&[0xff; 60_000], 2048).unwrap();
    let found = check().unwrap();
    let unread = found.volumes[0].unread.as_ref().unwrap();
    assert!(!found.has_system() && unread.contains("debugfs cannot read it"), "{found:?}");
}
