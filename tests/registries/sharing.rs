//! Images that go through a registry are the same on each host, and other programs can read them.

use crate::far::assert_goes_through_a_proxy;
use crate::scene::{DATA, S3, SIZE, digest, disk_of, files, folder, host, import, s3, web};
use crate::streamed::{content, serve};
use std::fs::{self, File};
use std::os::unix::fs::MetadataExt;
use std::process::Command;

#[test]
fn an_image_that_was_pushed_is_the_same_on_another_host() {
    let (golden, other) = (host(), host());
    let file = import(&golden, "debian", 1);
    let shared = folder(&golden, "hub");
    let pushed = golden.json(&["image", "push", "debian", "hub"]);
    // The zeroes are one chunk more.
    assert_eq!(pushed["sent_chunks"], DATA.len() as u64 + 1, "{pushed}");
    import(&golden, "debian", 2);
    let pushed = golden.json(&["image", "push", "debian:2", "hub"]);
    let counts = ["chunks", "shared_chunks", "found_chunks", "sent_chunks"]
        .map(|field| pushed[field].as_u64().unwrap());
    assert_eq!(counts, [8, 7, 0, 1], "{pushed}");
    let again = golden.json(&["image", "push", "debian:1", "hub"]);
    assert!(again["was_there"] == true && again["sent_chunks"] == 0, "{again}");

    other.ok(&["registry", "add", "hub", &format!("file://{}", shared.display())]);
    let listed = other.json(&["registry", "check", "hub"]);
    assert_eq!(listed["images"], serde_json::json!(["debian:1", "debian:2"]));
    other.ok(&["image", "import", "debian", "--from", "hub/debian:1"]);
    assert_eq!(fs::read(disk_of(&other, "debian", 1)).unwrap(), fs::read(&file).unwrap());
    // Holes of a chunk are holes again.
    let stored = |host| File::open(disk_of(host, "debian", 1)).unwrap().metadata().unwrap().blocks();
    assert!(stored(&other) <= stored(&golden) + 64, "{} {}", stored(&other), stored(&golden));
    // The highest, with its number.
    other.ok(&["image", "pull", "hub/debian"]);
    assert_eq!(digest(&other, "debian", 2), digest(&golden, "debian", 2));
    other.ok(&["image", "verify", "debian:2"]);
    // What is there is not made again.
    let before = disk_of(&other, "debian", 2).metadata().unwrap().ino();
    other.ok(&["image", "pull", "hub/debian:2"]);
    assert_eq!(disk_of(&other, "debian", 2).metadata().unwrap().ino(), before);
    // The next import has the next number, and a deleted version comes back under its own.
    import(&other, "debian", 3);
    assert_ne!(digest(&other, "debian", 3), digest(&golden, "debian", 2));
    other.ok(&["image", "delete", "debian:2"]);
    other.ok(&["image", "pull", "hub/debian:2"]);
    assert_eq!(digest(&other, "debian", 2), digest(&golden, "debian", 2));
}

#[test]
fn an_image_goes_through_s3_and_is_read_from_a_web_server() {
    let (golden, other) = (host(), host());
    let file = import(&golden, "debian", 1);
    let s3: S3 = s3(&golden);
    s3.add(&golden, "hub");
    golden.ok(&["image", "push", "debian", "hub"]);
    let check = golden.json(&["registry", "check", "hub"]);
    assert_eq!(
        (&check["can_list"], &check["can_write"], &check["can_create"]),
        (&true.into(), &true.into(), &true.into())
    );
    s3.add(&other, "hub");
    other.ok(&["image", "pull", "hub/debian"]);
    assert_eq!(fs::read(disk_of(&other, "debian", 1)).unwrap(), fs::read(&file).unwrap());
    // A disk reads it with the same credentials.
    other.ok(&["image", "import", "streamed", "--from", "hub/debian:1", "--residency", "lazy"]);
    let nbd = serve(&other, "desk", "streamed");
    assert!(content(&other, &nbd) == fs::read(&file).unwrap());
    // An interrupted push sends only the rest: here all was sent and the name is missing.
    golden.ok(&["registry", "delete", "hub/debian:1"]);
    let pushed = golden.json(&["image", "push", "debian", "hub"]);
    assert_eq!((&pushed["found_chunks"], &pushed["sent_chunks"]), (&8.into(), &0.into()), "{pushed}");
    assert_goes_through_a_proxy(&golden, &s3);

    let shared = folder(&golden, "folder");
    golden.ok(&["image", "push", "debian", "folder"]);
    let server = web(&shared);
    other.ok(&["registry", "add", "mirror", &server.url]);
    let check = other.json(&["registry", "check", "mirror"]);
    assert_eq!(
        (&check["is_registry"], &check["can_list"], &check["can_write"]),
        (&true.into(), &false.into(), &false.into())
    );
    other.ok(&["image", "import", "mirrored", "--from", "mirror/debian:1"]);
    assert_eq!(digest(&other, "mirrored", 1), digest(&golden, "debian", 1));
    let (code, _, err) = other.spillway(&["image", "pull", "mirror/debian"]);
    assert!(code != 0 && err.contains("name a version, such as debian:1"), "{err}");
    import(&other, "own", 1);
    let (code, _, err) = other.spillway(&["image", "push", "own", "mirror"]);
    assert!(code != 0 && err.contains("a web server is only read"), "{err}");
}

#[test]
fn casync_rebuilds_an_image_from_a_registry() {
    let golden = host();
    let file = import(&golden, "debian", 1);
    let shared = folder(&golden, "hub");
    golden.ok(&["image", "push", "debian", "hub"]);
    let index = files(&shared).into_iter().find(|path| path.ends_with("image.caibx")).unwrap();
    let out = golden.path("casync.raw");
    let store = format!("--store={}", shared.join("chunks").display());
    let done = Command::new("casync").arg(store).arg("extract").arg(&index).arg(&out).output().unwrap();
    assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
    assert_eq!(fs::metadata(&out).unwrap().len(), SIZE);
    assert!(fs::read(&out).unwrap() == fs::read(&file).unwrap());
    // The folder of an image is named by the digest that it has here.
    let root = index.parent().unwrap().file_name().unwrap().to_str().unwrap().to_owned();
    assert_eq!(digest(&golden, "debian", 1), format!("sha256:{root}"));
}

#[test]
fn a_push_repairs_what_a_registry_has_lost() {
    let golden = host();
    import(&golden, "debian", 1);
    import(&golden, "debian", 2);
    let shared = folder(&golden, "hub");
    golden.ok(&["image", "push", "debian:1", "hub"]);
    let of_first = files(&shared);
    let index = of_first.iter().find(|path| path.ends_with("image.caibx")).unwrap();
    let chunk = of_first.iter().find(|path| path.extension().is_some_and(|end| end == "cacnk")).unwrap();
    fs::write(index, "rubbish").unwrap();
    fs::remove_file(chunk).unwrap();
    // Another version does not need the damaged one.
    golden.ok(&["image", "push", "debian:2", "hub"]);
    golden.ok(&["image", "push", "debian:1", "hub"]);
    // A chunk that both have is looked for as well.
    fs::remove_file(chunk).unwrap();
    assert_eq!(golden.json(&["image", "push", "debian:1", "hub"])["sent_chunks"], 1);
    let other = host();
    other.ok(&["registry", "add", "hub", &format!("file://{}", shared.display())]);
    for version in [1, 2] {
        other.ok(&["image", "pull", &format!("hub/debian:{version}")]);
        assert_eq!(digest(&other, "debian", version), digest(&golden, "debian", version));
    }
}

#[test]
fn a_push_that_was_killed_goes_on() {
    let golden = host();
    import(&golden, "debian", 1);
    let shared = folder(&golden, "hub");
    // A file where a folder of chunks should be ends the push in its middle.
    let chunks = shared.join("chunks");
    fs::create_dir(&chunks).unwrap();
    let zeroes = chunks.join("30e1");
    fs::write(&zeroes, "in the way").unwrap();
    fs::write(shared.join("spillway.json"), "{\"format\":1}").unwrap();
    let (code, _, err) = golden.spillway(&["image", "push", "debian", "hub"]);
    assert!(code != 0, "{err}");
    assert!(!shared.join("names/debian/1").exists(), "a name comes last");
    let sent = files(&chunks).len() as u64 - 1;
    fs::remove_file(&zeroes).unwrap();
    let pushed = golden.json(&["image", "push", "debian", "hub"]);
    assert_eq!((&pushed["found_chunks"], &pushed["chunks"]), (&sent.into(), &8.into()), "{pushed}");
    assert!(files(&shared.join("uploads")).is_empty(), "no intent is left");
}
