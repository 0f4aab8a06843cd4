//! Signatures: only what a required key has signed, for that name and version, is taken.

use crate::daemon_world::World;
use crate::scene::{assert_nothing_left, digest, files, folder, host, import};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// A pair of keys without a password.
fn key(world: &World, name: &str) -> (PathBuf, PathBuf) {
    let (public, secret) = (world.path(&format!("{name}.pub")), world.path(&format!("{name}.key")));
    let done = Command::new("minisign")
        .args(["-G", "-W", "-p"])
        .arg(&public)
        .arg("-s")
        .arg(&secret)
        .output()
        .unwrap();
    assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
    (public, secret)
}

fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

#[test]
fn only_what_a_required_key_has_signed_is_taken() {
    let (golden, other) = (host(), host());
    import(&golden, "debian", 1);
    import(&golden, "debian", 2);
    let shared = folder(&golden, "hub");
    let (public, secret) = key(&golden, "ours");
    let (_, strange) = key(&golden, "strange");
    let url = format!("file://{}", shared.display());
    other.ok(&["registry", "add", "hub", &url, "--require-signature", text(&public)]);
    let shown = other.json(&["registry", "list"]);
    assert!(shown["items"][0]["require_signature"][0].as_str().unwrap().starts_with("RW"), "{shown}");

    let refused = |image: &str, why: &str| {
        let (code, _, err) = other.spillway(&["image", "pull", image]);
        assert!(code == 75 && err.contains(why) && err.contains("--sign"), "{code} {err}");
        assert_nothing_left(&other, "debian");
        assert_eq!(other.json(&["image", "list"])["items"], serde_json::json!([]));
    };
    golden.ok(&["image", "push", "debian:1", "hub"]);
    refused("hub/debian:1", "it has no signature");
    golden.ok(&["image", "push", "debian:1", "hub", "--sign", text(&strange)]);
    refused("hub/debian:1", "not one of a required key");
    golden.ok(&["image", "push", "debian:1", "hub", "--sign", text(&secret)]);

    // minisign itself agrees.
    let file = |end: &str| files(&shared).into_iter().find(|path| text(path).ends_with(end)).unwrap();
    let (manifest, signature) = (file("image.json"), file("debian@1.minisig"));
    let verified = Command::new("minisign")
        .args(["-V", "-p", text(&public), "-m", text(&manifest), "-x", text(&signature)])
        .output()
        .unwrap();
    assert!(verified.status.success());
    let said = String::from_utf8(verified.stdout).unwrap();
    assert!(said.contains(&format!("spillway debian:1 {}", digest(&golden, "debian", 1))), "{said}");

    // The old image under a new number, with the signature that it has: no rollback by rename.
    fs::copy(shared.join("names/debian/1"), shared.join("names/debian/3")).unwrap();
    fs::copy(&signature, signature.with_file_name("debian@3.minisig")).unwrap();
    refused("hub/debian:3", "of another name, version or image");
    // Another manifest under the signature.
    let good = fs::read(&manifest).unwrap();
    fs::write(&manifest, [&good[..], b" "].concat()).unwrap();
    refused("hub/debian:1", "not one of a required key");
    fs::write(&manifest, good).unwrap();
    other.ok(&["image", "pull", "hub/debian:1"]);
    assert_eq!(digest(&other, "debian", 1), digest(&golden, "debian", 1));
}

#[test]
fn a_key_that_is_none_is_refused() {
    let golden = host();
    import(&golden, "debian", 1);
    folder(&golden, "hub");
    let (code, _, err) =
        golden.spillway(&["registry", "add", "x", "file:///tmp", "--require-signature", "RWnonsense"]);
    assert!(code == 2 && err.contains("no public key of minisign"), "{code} {err}");
    let missing = golden.path("missing.key");
    let (code, _, err) = golden.spillway(&["image", "push", "debian", "hub", "--sign", text(&missing)]);
    assert!(code == 2 && err.contains("nothing was pushed"), "{code} {err}");
}
