//! A registry whose objects are not what they should be: nothing of them becomes an image.

use crate::scene::{MIB, assert_nothing_left, files, folder, host, import};
use spillway_testkit::Rng;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// How an object is damaged.
fn damages(path: &Path) -> Vec<(&'static str, Option<Vec<u8>>)> {
    let good = fs::read(path).unwrap();
    let mut flipped = good.clone();
    flipped[good.len() / 2] ^= 1;
    vec![
        ("flipped", Some(flipped)),
        ("cut", Some(good[..good.len() - 1].to_vec())),
        ("empty", Some(Vec::new())),
        ("longer", Some([&good[..], b"more"].concat())),
        ("huge", Some(vec![b'{'; 8 << 20])),
        ("missing", None),
    ]
}

#[test]
fn a_damaged_object_is_named_and_nothing_of_it_is_kept() {
    let (golden, other) = (host(), host());
    import(&golden, "debian", 1);
    let shared = folder(&golden, "hub");
    golden.ok(&["image", "push", "debian", "hub"]);
    other.ok(&["registry", "add", "hub", &format!("file://{}", shared.display())]);
    let all = files(&shared);
    let chunk = |path: &&PathBuf| {
        path.extension().is_some_and(|end| end == "cacnk") && !path.to_str().unwrap().contains("30e1")
    };
    let named = |end: &str| all.iter().find(|path| path.to_str().unwrap().ends_with(end)).unwrap();
    let victims = [
        named("names/debian/1"),
        named("image.json"),
        named("image.caibx"),
        all.iter().find(chunk).unwrap(),
        all.iter().rfind(chunk).unwrap(),
    ];
    for victim in victims {
        let good = fs::read(victim).unwrap();
        for (what, damaged) in damages(victim) {
            match damaged {
                Some(bytes) => fs::write(victim, bytes).unwrap(),
                None => fs::remove_file(victim).unwrap(),
            }
            let (code, out, err) = other.spillway(&["image", "pull", "hub/debian:1"]);
            let of = victim.strip_prefix(&shared).unwrap().display();
            assert!(code != 0 && err.contains("registry hub"), "{what} {of}: {code} {out}{err}");
            // A name may name another image, which is not there.
            let is_name = victim.ends_with("names/debian/1");
            let has_no_image =
                is_name && (what == "missing" || err.contains("image.json is damaged: it is missing"));
            assert!(has_no_image || err.contains(&of.to_string()), "{what} {of}: {err}");
            assert_nothing_left(&other, "debian");
            assert_eq!(other.json(&["image", "list"])["items"], serde_json::json!([]), "{what} {of}");
        }
        fs::write(victim, good).unwrap();
    }
    other.ok(&["image", "pull", "hub/debian:1"]);
    other.ok(&["image", "verify", "debian:1"]);
}

#[test]
fn a_frame_that_grows_without_end_is_cut() {
    let (golden, other) = (host(), host());
    import(&golden, "debian", 1);
    let shared = folder(&golden, "hub");
    golden.ok(&["image", "push", "debian", "hub"]);
    other.ok(&["registry", "add", "hub", &format!("file://{}", shared.display())]);
    let chunk = files(&shared.join("chunks")).pop().unwrap();
    // 4 GiB of zeroes in some hundred kilobytes.
    let bomb = golden.path("bomb");
    let zstd = format!("head -c 4G /dev/zero | zstd -q -3 -o {}", bomb.display());
    assert!(Command::new("sh").args(["-c", &zstd]).status().unwrap().success());
    assert!(fs::metadata(&bomb).unwrap().len() < MIB);
    fs::copy(&bomb, &chunk).unwrap();
    let (code, _, err) = other.spillway(&["image", "pull", "hub/debian:1"]);
    assert!(code != 0 && err.contains("no zstd frame of this length"), "{code} {err}");
    assert_nothing_left(&other, "debian");
}

/// Whatever bytes of a registry change, a pull gives the image or an error.
#[test]
fn random_damage_never_becomes_an_image() {
    let (golden, other) = (host(), host());
    let file = import(&golden, "debian", 1);
    let shared = folder(&golden, "hub");
    golden.ok(&["image", "push", "debian", "hub"]);
    other.ok(&["registry", "add", "hub", &format!("file://{}", shared.display())]);
    let all: Vec<_> = files(&shared).into_iter().filter(|path| !path.ends_with("spillway.json")).collect();
    let seed = std::env::var("SPILLWAY_SEED").ok().map_or(7, |seed| seed.parse().unwrap());
    println!("SPILLWAY_SEED={seed}");
    let mut random = Rng::new(seed);
    let mut pulled = 0;
    for round in 0..60 {
        let victim = &all[random.below(all.len() as u64) as usize];
        let good = fs::read(victim).unwrap();
        let mut bytes = good.clone();
        for _ in 0..1 + random.below(3) {
            let at = random.below(bytes.len() as u64) as usize;
            bytes[at] ^= 1 << random.below(8);
        }
        fs::write(victim, &bytes).unwrap();
        let name = format!("x{round}");
        let (code, _, _) = other.spillway(&["image", "import", &name, "--from", "hub/debian:1"]);
        if code == 0 {
            // A byte of a frame that means nothing.
            pulled += 1;
            let disk = other.path(&format!("state/store/images/{name}/1/disk.raw"));
            assert!(
                fs::read(disk).unwrap() == fs::read(&file).unwrap(),
                "round {round}: {}",
                victim.display()
            );
        }
        fs::write(victim, good).unwrap();
    }
    println!("{pulled} of 60 were the image");
    assert!(pulled < 30);
}
