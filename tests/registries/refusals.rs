//! What cannot be a registry, or is not one: each refusal says what, where, and what to do; nothing half-made stays, and no
//! secret is shown.

use crate::scene::{
    ACCESS_KEY, SECRET_KEY, assert_nothing_left, digest, folder, host, import, refused, s3, write_credentials,
};
use std::fs;
use std::os::unix::fs::PermissionsExt;

#[test]
fn an_address_that_is_none_is_refused() {
    let host = host();
    let add = |more: &[&str], code, words: &[&str]| {
        refused(&host, &[&["registry", "add", "hub"], more].concat(), code, words)
    };
    add(&["ftp://host/x"], 2, &["s3://BUCKET/PREFIX"]);
    add(&["/srv/images"], 2, &["file:///FOLDER"]);
    add(&["file:///nonexistent"], 2, &["no such folder"]);
    add(&["https://user:secret@host/x"], 2, &["--credentials"]);
    add(&["s3:///x"], 2, &["names no bucket"]);
    add(&["file:///tmp", "--credentials", "/etc/hostname"], 2, &["everybody can read"]);
    add(&["s3://images/x", "--endpoint", "ftp://host"], 2, &["https://HOST"]);
    add(&["s3://images/x", "--endpoint", "http://127.0.0.1:1"], 69, &["does not answer"]);
    add(&["http://127.0.0.1:1/x"], 69, &["does not answer"]);
    let empty = host.path("empty");
    fs::create_dir(&empty).unwrap();
    let server = crate::scene::web(&empty);
    add(&[&server.url], 2, &["there is no registry", "correct the address"]);
    // Somebody else's.
    let foreign = host.path("foreign");
    fs::create_dir_all(foreign.join("chunks/ab12")).unwrap();
    fs::write(foreign.join("chunks/ab12/x.cacnk"), "x").unwrap();
    add(&[&format!("file://{}", foreign.display())], 2, &["another program", "empty prefix"]);
    assert!(!foreign.join("spillway.json").exists() && !foreign.join("names").exists());
    import(&host, "debian", 1);
    // A newer format.
    let newer = folder(&host, "newer");
    fs::write(newer.join("spillway.json"), "{\"format\":2}").unwrap();
    refused(&host, &["image", "push", "debian", "newer"], 2, &["format 2", "newer Spillway"]);
    refused(&host, &["registry", "add", "newer", "file:///tmp"], 75, &["registry 'newer' already"]);
    refused(&host, &["image", "push", "debian", "newr"], 66, &["do you mean 'newer'"]);
    refused(&host, &["image", "pull", "newer/debian:1"], 2, &["format 2"]);
    assert_eq!(host.json(&["registry", "remove", "newer"]), serde_json::json!({}));
    refused(&host, &["registry", "check", "newer"], 66, &["no registry"]);
}

#[test]
fn a_folder_that_is_not_mounted_is_no_new_registry() {
    let host = host();
    import(&host, "debian", 1);
    let shared = folder(&host, "hub");
    assert!(shared.join("spillway.json").exists(), "it was made when it was added");
    host.ok(&["image", "push", "debian", "hub"]);
    // What is below a mount point.
    fs::rename(&shared, host.path("unmounted")).unwrap();
    fs::create_dir(&shared).unwrap();
    for command in
        [&["image", "push", "debian", "hub"][..], &["image", "import", "x", "--from", "hub/debian:1"]]
    {
        refused(&host, command, 66, &["no registry", "mount its folder"]);
    }
    refused(&host, &["registry", "delete", "hub/debian:1"], 66, &["no registry"]);
    assert_eq!(fs::read_dir(&shared).unwrap().count(), 0);
    assert_eq!(host.json(&["registry", "check", "hub"])["is_registry"], false);
    fs::remove_dir_all(&shared).unwrap();
    fs::rename(host.path("unmounted"), &shared).unwrap();
    host.ok(&["image", "push", "debian", "hub"]);
}

#[test]
fn a_name_names_one_image_for_ever() {
    let (golden, other) = (host(), host());
    import(&golden, "debian", 1);
    import(&other, "debian", 7);
    let shared = folder(&golden, "hub");
    golden.ok(&["image", "push", "debian", "hub"]);
    other.ok(&["registry", "add", "hub", &format!("file://{}", shared.display())]);
    refused(&other, &["image", "push", "debian", "hub"], 75, &["another digest", "another version or name"]);
    refused(&other, &["image", "pull", "hub/debian:1"], 75, &["another digest", "another name here"]);
    refused(&other, &["image", "pull", "hub/debian:2"], 66, &["no debian:2"]);
    refused(&other, &["image", "pull", "hub/fedora"], 66, &["no image 'fedora'"]);
    other.ok(&["image", "import", "theirs", "--from", "hub/debian"]);
    assert_eq!(digest(&other, "theirs", 1), digest(&golden, "debian", 1));
    assert_nothing_left(&other, "debian");
}

#[test]
fn secrets_are_shown_nowhere() {
    let host = host();
    import(&host, "debian", 1);
    let s3 = s3(&host);
    let wrong = write_credentials(&host, "wrong", "another-secret");
    let open = write_credentials(&host, "open", SECRET_KEY);
    fs::set_permissions(&open, fs::Permissions::from_mode(0o644)).unwrap();
    let nonsense = host.path("nonsense");
    fs::write(&nonsense, SECRET_KEY).unwrap();
    fs::set_permissions(&nonsense, fs::Permissions::from_mode(0o600)).unwrap();
    let add = |credentials: &std::path::Path, url: &str, code, words: &[&str]| {
        let file = credentials.display().to_string();
        let arguments = ["registry", "add", "hub", url, "--endpoint", &s3.server.url, "--credentials", &file];
        refused(&host, &arguments, code, words);
    };
    add(&open, "s3://images/golden", 2, &["chmod o-rwx"]);
    add(&host.path("missing"), "s3://images/golden", 2, &["No such file"]);
    add(&nonsense, "s3://images/golden", 69, &["section [default]"]);
    add(&s3.credentials, "s3://missing/golden", 66, &["bucket does not exist"]);
    if s3.checks {
        add(&wrong, "s3://images/golden", 69, &["refuses the credentials"]);
    }
    s3.add(&host, "hub");
    // While a push runs, and of all that it leaves.
    let mut push = host.command(&["image", "push", "debian", "hub"]).spawn().unwrap();
    let mut lines = String::new();
    for _ in 0..200 {
        for entry in fs::read_dir("/proc").unwrap().map_while(Result::ok) {
            lines += &String::from_utf8_lossy(&fs::read(entry.path().join("cmdline")).unwrap_or_default());
        }
    }
    assert!(push.wait().unwrap().success());
    let shown = [
        lines,
        host.ok(&["registry", "list", "--json"]),
        host.ok(&["operation", "list", "--json"]),
        host.ok(&["event", "--json"]),
        fs::read_to_string(host.path("state/audit.log")).unwrap(),
    ];
    for text in &shown {
        assert!(!text.contains(SECRET_KEY) && !text.contains(ACCESS_KEY), "{text}");
    }
    for file in crate::scene::files(&host.path("state")) {
        let bytes = fs::read(&file).unwrap();
        let has = |word: &str| bytes.windows(word.len()).any(|part| part == word.as_bytes());
        assert!(!has(SECRET_KEY) && !has(ACCESS_KEY), "{}", file.display());
    }
}
