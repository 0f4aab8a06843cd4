//! The walls between crates: which of ours each may import, and what must never reach it.
//!
//! Invariant: a crate that the table does not name is a breach, so that a new one has to say what it may see.

use serde::Deserialize;
use std::collections::{BTreeMap, BTreeSet};

/// One crate's walls.
struct Wall {
    name: &'static str,
    /// Ours that it may depend on. Its tests may use the lab as well.
    ours: &'static [&'static str],
    /// Others' that it may depend on directly; `None` for any.
    others: Option<&'static [&'static str]>,
    /// What must not even come with a dependency of a dependency. `x*` stands for every name that begins so.
    never: &'static [&'static str],
}

const DATA_PATH: &[&str] = &[
    "tokio",
    "async-std",
    "hyper",
    "axum",
    "reqwest",
    "object_store",
    "clap",
    "clap_builder",
    "minijinja",
    "plotters*",
];

/// What tests may import of ours beside that: of any crate the test kit, of the advisor the disk that its model is held against, of
/// the command line the digests of an image.
fn is_for_tests(name: &str, to: &str) -> bool {
    let others = [("spillway-advisor", "spillway-core"), ("spillway", "spillway-image")];
    to == "spillway-testkit" || others.contains(&(name, to))
}

/// What serves a disk: whoever only starts disks, or asks them, has none of it.
const SERVES: &[&str] = &["spillway-core", "spillway-export", "spillway-worker", "io-uring"];

const WALLS: &[Wall] = &[
    Wall { name: "spillway-policy", ours: &[], others: Some(&[]), never: &[] },
    Wall { name: "spillway-ntfs", ours: &[], others: Some(&[]), never: &[] },
    Wall { name: "spillway-layout", ours: &[], others: Some(&["crc32c", "serde"]), never: &["serde_json"] },
    Wall {
        name: "spillway-core",
        ours: &["spillway-layout", "spillway-policy"],
        others: Some(&["crc32c"]),
        never: &[
            "tokio",
            "async-std",
            "hyper",
            "axum",
            "reqwest",
            "clap",
            "clap_builder",
            "minijinja",
            "plotters*",
            "vhost*",
            "virtio*",
            "io-uring",
            "serde_json",
        ],
    },
    Wall { name: "spillway-export", ours: &["spillway-core"], others: None, never: DATA_PATH },
    Wall { name: "spillway-image", ours: &["spillway-layout"], others: None, never: DATA_PATH },
    Wall {
        name: "spillway-control",
        ours: &["spillway-advisor", "spillway-layout"],
        others: Some(&["libc", "rustix", "serde", "serde_json", "sha2", "thiserror", "utoipa"]),
        never: SERVES,
    },
    Wall {
        name: "spillway-worker",
        ours: &[
            "spillway-advisor",
            "spillway-control",
            "spillway-core",
            "spillway-export",
            "spillway-image",
            "spillway-layout",
        ],
        others: None,
        never: DATA_PATH,
    },
    Wall { name: "spillway-testkit", ours: &[], others: None, never: SERVES },
    Wall { name: "spillway-tests", ours: &[], others: Some(&[]), never: &[] },
    Wall {
        name: "spillway-advisor",
        ours: &["spillway-policy"],
        others: Some(&["crc32c", "miniz_oxide", "serde", "serde_json", "thiserror"]),
        never: DATA_PATH,
    },
    Wall {
        name: "spillway-registry",
        ours: &["spillway-image"],
        others: None,
        never: &["tokio", "hyper", "reqwest", "object_store", "clap"],
    },
    Wall {
        name: "spillway-streamd",
        ours: &["spillway-image", "spillway-registry"],
        others: None,
        never: &["spillway-core", "spillway-export", "spillway-host", "spillway-worker", "io-uring", "axum"],
    },
    Wall { name: "spillway-api", ours: &["spillway-control"], others: None, never: SERVES },
    Wall {
        name: "spillway-fleet",
        ours: &["spillway-api"],
        others: Some(&["jiff", "serde", "serde_json", "thiserror"]),
        never: &["axum", "etcd-client", "reqwest", "clap", "io-uring"],
    },
    Wall {
        name: "spillway-host",
        ours: &[
            "spillway-api",
            "spillway-control",
            "spillway-fleet",
            "spillway-image",
            "spillway-ntfs",
            "spillway-registry",
        ],
        others: None,
        never: &[
            "spillway",
            "spillway-lab",
            "spillway-testkit",
            "spillway-core",
            "spillway-export",
            "spillway-streamd",
            "spillway-worker",
            "io-uring",
            "object_store",
            "reqwest",
        ],
    },
    Wall {
        name: "spillway",
        ours: &["spillway-advisor", "spillway-api", "spillway-control"],
        others: None,
        never: SERVES,
    },
    Wall {
        name: "spillway-lab",
        ours: &["spillway-advisor", "spillway-control", "spillway-testkit"],
        others: None,
        never: SERVES,
    },
    Wall { name: "xtask", ours: &[], others: None, never: &["spillway*"] },
];

/// What is used of `cargo metadata`.
#[derive(Deserialize)]
pub struct Metadata {
    packages: Vec<Package>,
    workspace_members: Vec<String>,
}

#[derive(Deserialize)]
struct Package {
    id: String,
    name: String,
    dependencies: Vec<Dependency>,
}

#[derive(Deserialize)]
struct Dependency {
    name: String,
    kind: Option<String>,
    #[serde(default)]
    optional: bool,
}

/// Everything that breaks a wall.
pub fn breaches(metadata: &Metadata) -> Vec<String> {
    let members: BTreeSet<&str> = metadata.workspace_members.iter().map(String::as_str).collect();
    let ours: BTreeMap<&str, &Package> = metadata
        .packages
        .iter()
        .filter(|p| members.contains(p.id.as_str()))
        .map(|p| (p.name.as_str(), p))
        .collect();
    let all: BTreeMap<&str, Vec<&Package>> = metadata.packages.iter().fold(BTreeMap::new(), |mut map, p| {
        map.entry(p.name.as_str()).or_insert_with(Vec::new).push(p);
        map
    });
    let mut found = Vec::new();
    for (name, package) in &ours {
        let Some(wall) = WALLS.iter().find(|w| w.name == *name) else {
            found.push(format!(
                "{name}: not in the table of walls (xtask/src/walls.rs): say there what it may import"
            ));
            continue;
        };
        for dependency in &package.dependencies {
            let to = dependency.name.as_str();
            let test_only = dependency.kind.as_deref() == Some("dev");
            if ours.contains_key(to) {
                if !(wall.ours.contains(&to) || test_only && is_for_tests(name, to)) {
                    found.push(format!("{name}: may not import {to} of ours"));
                }
            } else if !test_only && wall.others.is_some_and(|others| !others.contains(&to)) {
                found.push(format!("{name}: may not depend on {to}"));
            }
        }
        for (never, by) in reached(package, &all) {
            if wall.never.iter().any(|w| matches(w, never)) {
                found.push(format!("{name}: {never} must never reach it, and comes with {by}"));
            }
        }
    }
    found
}

/// Every package that a crate's own code is built with, and the direct dependency that brings it.
fn reached<'a>(
    package: &'a Package,
    all: &BTreeMap<&'a str, Vec<&'a Package>>,
) -> BTreeMap<&'a str, &'a str> {
    let mut found = BTreeMap::new();
    let mut pending: Vec<(&str, &str)> = normal(package).map(|d| (d, d)).collect();
    while let Some((name, by)) = pending.pop() {
        if found.contains_key(name) {
            continue;
        }
        found.insert(name, by);
        for package in all.get(name).into_iter().flatten() {
            pending.extend(normal(package).map(|d| (d, by)));
        }
    }
    found
}

/// Dependencies that are built always: neither for tests, nor for build scripts, nor on request only.
fn normal(package: &Package) -> impl Iterator<Item = &str> {
    package.dependencies.iter().filter(|d| d.kind.is_none() && !d.optional).map(|d| d.name.as_str())
}

fn matches(pattern: &str, name: &str) -> bool {
    pattern.strip_suffix('*').map_or(pattern == name, |start| name.starts_with(start))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// `name: dependency dependency:dev ...` a line; ours begin with "spillway" or are "xtask".
    fn metadata(text: &str) -> Metadata {
        let packages: Vec<Package> = text
            .lines()
            .map(|line| {
                let (name, rest) = line.trim().split_once(':').expect("a colon");
                let dependencies = rest
                    .split_whitespace()
                    .map(|d| match d.split_once(':') {
                        Some((d, kind)) => Dependency {
                            name: d.into(),
                            kind: (kind == "dev").then(|| "dev".into()),
                            optional: kind == "optional",
                        },
                        None => Dependency { name: d.into(), kind: None, optional: false },
                    })
                    .collect();
                Package { id: name.into(), name: name.into(), dependencies }
            })
            .collect();
        let workspace_members =
            packages.iter().map(|p| p.name.clone()).filter(|n| n.starts_with("spillway")).collect();
        Metadata { packages, workspace_members }
    }

    #[test]
    fn what_the_table_allows_passes() {
        let m = metadata(
            "spillway-core: crc32c proptest:dev\nspillway-export: spillway-core libc\n\
             spillway: spillway-control clap spillway-testkit:dev\nspillway-worker: spillway-core spillway-export\n\
             spillway-control: spillway-layout\nspillway-layout: crc32c\n\
             spillway-lab: clap\nclap: clap_builder\ncrc32c:",
        );
        assert_eq!(breaches(&m), Vec::<String>::new());
    }

    #[test]
    fn each_kind_of_breach_is_found() {
        for (text, want) in [
            (
                "spillway-core: spillway-export\nspillway-export:",
                "spillway-core: may not import spillway-export",
            ),
            ("spillway-core: rand", "spillway-core: may not depend on rand"),
            ("spillway-export: x\nx: y\ny: tokio\ntokio:", "tokio must never reach it, and comes with x"),
            (
                "spillway-core: crc32c\ncrc32c: virtio-queue\nvirtio-queue:",
                "virtio-queue must never reach it",
            ),
            ("spillway: spillway-core\nspillway-core:", "spillway: may not import spillway-core"),
            (
                "spillway: x\nx: io-uring\nio-uring:",
                "spillway: io-uring must never reach it, and comes with x",
            ),
            ("spillway-lab: z\nz: spillway-core\nspillway-core:", "spillway-core must never reach it"),
            ("spillway-new:", "spillway-new: not in the table"),
        ] {
            let found = breaches(&metadata(text));
            assert!(found.iter().any(|b| b.contains(want)), "{text}: {found:?}");
        }
    }

    #[test]
    fn tests_and_features_that_are_off_do_not_count() {
        let m = metadata("spillway-core: crc32c serde_json:dev\ncrc32c: tokio:optional\ntokio:");
        assert_eq!(breaches(&m), Vec::<String>::new());
    }
}
