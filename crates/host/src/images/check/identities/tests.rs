//! Each row of the table is found in a file system that has its file, and not in one where that says nothing.

use super::*;
use crate::images::check::tests::{Tree, checked};
use std::collections::BTreeSet;
use std::fmt::Write;

const PAGE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/image-check.md");
const BEGINNING: &str = "<!-- the table of identities begins here; it is written by a test -->\n";

fn rows() -> impl Iterator<Item = &'static IdentityRule> {
    GROUPS.iter().flat_map(|(_, rows)| *rows)
}

/// A name that fits each of a row's patterns.
fn names(identity: &IdentityRule) -> Vec<String> {
    identity.name.split('|').map(|pattern| pattern.replace('*', "x1")).collect()
}

/// A content that tells, and one that does not.
fn contents(when: IdentityCondition) -> (String, String) {
    match when {
        IdentityCondition::NotEmpty => ("x\n".into(), String::new()),
        IdentityCondition::Initialized => {
            ("8e5b3c1a0d3b4c5e9f603a1d8c2b7e4f\n".into(), "uninitialized\n".into())
        }
        IdentityCondition::Line(beginning) => {
            (format!("# x\n{beginning}x = 1\n"), format!("# {beginning}\nother\n"))
        }
        IdentityCondition::Set(name) => {
            (format!("# x\n  {name} = \"one\"\n"), format!("# {name} = one\n{name} = \"\"\n{name}x = one\n"))
        }
    }
}

#[test]
fn every_row_is_found_by_each_of_its_names() {
    let (with, without) = (Tree::sound(), Tree::sound());
    for identity in rows() {
        for name in names(identity) {
            let path = format!("{}/{name}", &identity.folder[1..]);
            // Several rows may look into one file.
            let append = |tree: &Tree, text: &str| {
                let before = std::fs::read_to_string(tree.path(&path)).unwrap_or_default();
                tree.put(&path, before + text);
            };
            let (tells, says_nothing) = contents(identity.when);
            append(&with, &tells);
            append(&without, &says_nothing);
        }
    }
    assert_eq!(without.faults(), [], "nothing in them tells");
    let found = checked(with.disk().as_file()).findings;
    let found: BTreeSet<(String, String)> =
        found.into_iter().map(|finding| (finding.path, finding.what)).collect();
    for identity in rows() {
        let is_it = |(path, what): &(String, String)| {
            let many = names(identity).len() > 1 || identity.name.contains('*');
            what == identity.what
                && path.starts_with(identity.folder)
                && (many || *path == format!("{}/{}", identity.folder, identity.name))
        };
        assert!(found.iter().any(is_it), "{}/{} is not found", identity.folder, identity.name);
    }
}

#[test]
fn rows_are_whole_and_of_no_file_twice() {
    let mut seen = BTreeSet::new();
    for identity in rows() {
        let place = format!("{}/{}", identity.folder, identity.name);
        let setting = if let IdentityCondition::Set(name) = identity.when { name } else { "" };
        assert!(seen.insert((place.clone(), setting)), "{place} is there twice");
        assert!(identity.folder.starts_with('/') && !identity.folder.ends_with('/'), "{place}");
        let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"._-/".contains(&byte);
        assert!(identity.folder.bytes().all(plain), "{place}: debugfs would not take it");
        assert!(![identity.what, identity.why, identity.remedy].contains(&""), "{place}");
    }
    assert!(seen.len() > 150, "{}", seen.len());
}

#[test]
fn names_and_settings_are_told_apart() {
    for (pattern, name, expected) in [
        ("a", "a", true),
        ("a", "ab", false),
        ("*", "anything", true),
        ("*.pem", "x.pem", true),
        ("*.pem", "pem", false),
        ("ssh_host_*_key", "ssh_host_rsa_key", true),
        ("ssh_host_*_key", "ssh_host_rsa_key.pub", false),
        ("ssh_host_*_key", "ssh_host_key", false),
        ("*lease*", "dhclient.leases", true),
        ("a*b*c", "abc", true),
        ("a*b*c", "acb", false),
    ] {
        assert_eq!(fits(pattern, name), expected, "{pattern} {name}");
    }
    for line in [
        "Hostname=x",
        "Hostname = x",
        "  Hostname: \"x\"",
        "\"Hostname\": \"x\",",
        "Hostname x",
        "Hostname = $x",
    ] {
        assert!(is_set(line, "Hostname"), "{line}");
    }
    for line in [
        "",
        "Hostname",
        "Hostname=",
        "Hostname = \"\"",
        "Hostname: ''",
        "#Hostname=x",
        "HostnameItem=x",
        "xHostname=y",
    ] {
        assert!(!is_set(line, "Hostname"), "{line}");
    }
}

/// The table of `docs/image-check.md` is this one. With `SPILLWAY_WRITE=1` it is written.
#[test]
fn the_page_has_the_table() {
    let mut table = String::new();
    for (group, rows) in GROUPS {
        write!(
            table,
            "\n### {group}\n\n| file | what it is | severity | what to do |\n| --- | --- | --- | --- |\n"
        )
        .unwrap();
        for row in *rows {
            let names: Vec<_> = row.name.split('|').map(|name| format!("`{}/{name}`", row.folder)).collect();
            let when = match row.when {
                IdentityCondition::NotEmpty | IdentityCondition::Initialized => String::new(),
                IdentityCondition::Line(line) => format!(", with a line `{line}...`"),
                IdentityCondition::Set(name) => format!(", with `{name}` set"),
            };
            let (names, severity) = (names.join(", "), row.severity.as_str());
            writeln!(table, "| {names}{when} | {} | {severity} | {} |", row.what, row.remedy).unwrap();
        }
    }
    let page = std::fs::read_to_string(PAGE).unwrap();
    let (head, kept) = page.split_once(BEGINNING).expect("the page has a mark where the table begins");
    if std::env::var_os("SPILLWAY_WRITE").is_some() {
        std::fs::write(PAGE, format!("{head}{BEGINNING}{table}")).unwrap();
        return;
    }
    assert!(kept == table, "docs/image-check.md has another table: run this test with SPILLWAY_WRITE=1");
}
