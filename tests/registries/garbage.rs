//! Garbage of a registry: it is found, recorded, and deleted a pass later; what a version needs never is.

use crate::daemon_world::World;
use crate::scene::{digest, files, folder, host, import};
use std::fs::{self, File};
use std::path::Path;
use std::time::{Duration, SystemTime};

const DAY: Duration = Duration::from_secs(86_400);

/// Makes all objects of a registry that much older, with the lists of candidates.
fn age(shared: &Path, by: Duration) {
    for path in files(shared) {
        let file = File::open(&path).unwrap();
        file.set_modified(file.metadata().unwrap().modified().unwrap() - by).unwrap();
        let name = path.file_name().unwrap().to_str().unwrap().to_owned();
        if path.starts_with(shared.join("gc")) && name.ends_with(".json") {
            let (seconds, rest) = name.split_once('-').unwrap();
            let older = seconds.parse::<u64>().unwrap() - by.as_secs();
            fs::rename(&path, path.with_file_name(format!("{older}-{rest}"))).unwrap();
        }
    }
}

fn collect(host: &World, more: &[&str]) -> serde_json::Value {
    host.json(&[&["registry", "gc", "hub"], more].concat())
}

#[test]
fn garbage_is_deleted_by_the_second_pass() {
    let golden = host();
    import(&golden, "debian", 1);
    import(&golden, "debian", 2);
    let shared = folder(&golden, "hub");
    golden.ok(&["image", "push", "debian:1", "hub"]);
    golden.ok(&["image", "push", "debian:2", "hub"]);
    assert_eq!(golden.json(&["registry", "delete", "hub/debian:1"]), serde_json::json!({}));
    let (code, _, err) = golden.spillway(&["registry", "delete", "hub/debian:1"]);
    assert!(code == 66 && err.contains("no debian:1"), "{err}");
    let whole = files(&shared);
    // Too young.
    assert_eq!(collect(&golden, &[])["garbage_images"], 0);
    age(&shared, DAY * 8);
    let found = collect(&golden, &[]);
    assert_eq!(
        (&found["versions"], &found["garbage_images"], &found["deletable"]),
        (&1.into(), &1.into(), &0.into())
    );
    assert_eq!(files(&shared), whole, "a dry run changes nothing");
    // Recorded; a second pass at once deletes nothing.
    assert_eq!(collect(&golden, &["--delete"])["has_deleted"], false);
    assert_eq!(collect(&golden, &["--delete"])["has_deleted"], false);
    age(&shared, DAY * 2);
    let done = collect(&golden, &["--delete"]);
    assert_eq!((&done["has_deleted"], &done["deletable"]), (&true.into(), &1.into()), "{done}");
    // With the image gone its chunk is garbage: recorded by the next pass, deleted by the one after.
    assert_eq!(collect(&golden, &["--delete"])["garbage_chunks"], 1);
    age(&shared, DAY * 2);
    assert_eq!(collect(&golden, &["--delete"])["has_deleted"], true);
    let left = collect(&golden, &[]);
    assert_eq!((&left["garbage_chunks"], &left["chunks"]), (&0.into(), &8.into()), "{left}");
    // What is left is whole.
    let other = host();
    other.ok(&["registry", "add", "hub", &format!("file://{}", shared.display())]);
    other.ok(&["image", "pull", "hub/debian:2"]);
    assert_eq!(digest(&other, "debian", 2), digest(&golden, "debian", 2));
    assert!(files(&shared.join("gc")).is_empty(), "{:?}", files(&shared.join("gc")));
}

#[test]
fn what_cannot_be_read_ends_the_pass() {
    let golden = host();
    import(&golden, "debian", 1);
    import(&golden, "debian", 2);
    let shared = folder(&golden, "hub");
    golden.ok(&["image", "push", "debian:1", "hub"]);
    golden.ok(&["image", "push", "debian:2", "hub"]);
    golden.ok(&["registry", "delete", "hub/debian:1"]);
    age(&shared, DAY * 8);
    collect(&golden, &["--delete"]);
    age(&shared, DAY * 2);
    let indexes = files(&shared.join("images"));
    let index = indexes.iter().find(|path| path.ends_with("image.caibx")).unwrap();
    let strange = [
        (index.clone(), b"rubbish".to_vec()),
        (shared.join("uploads/x.caibx"), b"rubbish".to_vec()),
        (shared.join("names/debian/x"), b"rubbish".to_vec()),
        (shared.join("chunks/note.txt"), b"mine".to_vec()),
    ];
    for (path, bytes) in strange {
        let good = fs::read(&path).ok();
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(&path, bytes).unwrap();
        File::open(&path).unwrap().set_modified(SystemTime::now() - DAY * 30).unwrap();
        let before = files(&shared);
        let (code, _, err) = golden.spillway(&["registry", "gc", "hub", "--delete"]);
        let of = path.strip_prefix(&shared).unwrap().display().to_string();
        assert!(code != 0 && err.contains(&of), "{of}: {code} {err}");
        assert_eq!(files(&shared), before, "{of}");
        match good {
            Some(good) => fs::write(&path, good).unwrap(),
            None => fs::remove_file(&path).unwrap(),
        }
    }
    assert_eq!(collect(&golden, &["--delete"])["has_deleted"], true);
}
