//! Test programs: each file that looks like one is built, and scripts/test runs what is built. Owns no list of them.
//!
//! Invariant: a program that only a feature builds must be named in scripts/test, because cargo leaves it out in silence.

use serde::Deserialize;
use std::path::Path;

/// The part of `cargo metadata` that says what is built.
#[derive(Deserialize)]
pub struct Metadata {
    packages: Vec<Package>,
}

#[derive(Deserialize)]
struct Package {
    name: String,
    targets: Vec<Target>,
}

#[derive(Deserialize)]
struct Target {
    name: String,
    kind: Vec<String>,
    src_path: String,
    test: bool,
    #[serde(default, rename = "required-features")]
    features: Vec<String>,
}

/// Every test program that `script`, the text of scripts/test, does not run.
pub fn breaches<'a>(
    root: &Path,
    files: impl Iterator<Item = &'a str>,
    metadata: &Metadata,
    script: &str,
) -> Vec<String> {
    let targets = || {
        let tests = |target: &&Target| target.kind.iter().any(|kind| kind == "test");
        metadata
            .packages
            .iter()
            .flat_map(move |of| of.targets.iter().filter(tests).map(move |target| (of, target)))
    };
    let mut found = Vec::new();
    for file in files.filter(|file| is_program(file)) {
        let is_file = |target: &Target| Path::new(&target.src_path) == root.join(file);
        match targets().find(|(_, target)| is_file(target)) {
            None => {
                found.push(format!("{file}: no [[test]] of its Cargo.toml names it, so that nobody runs it"))
            }
            Some((_, target)) if !target.test => found.push(format!("{file}: its [[test]] has test = false")),
            Some((of, Target { name, features, .. })) => {
                let features = features.iter().map(|feature| format!("{}/{feature}", of.name));
                let features = features.collect::<Vec<_>>().join(",");
                if !features.is_empty() && !script.contains(&format!("--features {features} --test {name} "))
                {
                    found.push(format!(
                        "{file}: only {features} builds it, and scripts/test has no '--features {features} --test {name}'"
                    ));
                }
            }
        }
    }
    found
}

/// Whether a file is where cargo, or the package of the system tests, has test programs.
fn is_program(file: &str) -> bool {
    match file.split('/').collect::<Vec<_>>()[..] {
        ["crates", _, "tests", name] | ["tests", name] => name.ends_with(".rs") && name != "lib.rs",
        ["crates", _, "tests", _, "main.rs"] | ["tests", _, "main.rs"] => true,
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn a_program_that_nobody_builds_or_runs_is_a_breach() {
        let target = |file: &str, test: bool, features: &[&str]| {
            let name = file.split('/').next_back().unwrap().trim_end_matches(".rs");
            json!({ "name": name, "kind": ["test"], "src_path": format!("/r/{file}"), "test": test, "required-features": features })
        };
        let metadata = json!({ "packages": [{ "name": "spillway-core", "targets": [
            target("crates/core/tests/a.rs", true, &[]),
            target("crates/core/tests/off.rs", false, &[]),
            target("crates/core/tests/crash.rs", true, &["points"]),
            target("tests/machines/main.rs", true, &[]),
        ] }] });
        let metadata: Metadata = serde_json::from_value(metadata).unwrap();
        let of = |file: &str, script: &str| breaches("/r".as_ref(), [file].into_iter(), &metadata, script);
        for file in
            ["crates/core/tests/a.rs", "tests/machines/main.rs", "tests/machines/life.rs", "tests/lib.rs"]
        {
            assert_eq!(of(file, ""), [""; 0], "{file}");
        }
        for file in
            ["tests/x.rs", "tests/x/main.rs", "crates/core/tests/off.rs", "crates/core/tests/crash.rs"]
        {
            assert_eq!(of(file, "").len(), 1, "{file}");
        }
        let script = "run --workspace --features spillway-core/points --test crash || status=$?";
        assert_eq!(of("crates/core/tests/crash.rs", script), [""; 0]);
    }
}
