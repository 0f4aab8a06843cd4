//! Words that the glossary leaves out, and names that meant something to their author alone: in code, comments, texts and pages.
//!
//! Owns the two lists. Invariant: an exception that is not needed any more is a breach.

use anyhow::{Context, Result};
use std::collections::BTreeSet;
use std::path::Path;

/// A word, in any case and as a part of any name, and what to write instead.
const NOT_USED: &[(&str, &str)] = &[
    ("spill", "evict, or overflow"),
    ("spills", "evicts, or overflows"),
    ("spilled", "evicted"),
    ("manager", "what it is: a reconciler, a store, a pool"),
    ("managers", "what they are"),
    ("handler", "what it does"),
    ("handlers", "what they do"),
    ("helper", "what it does"),
    ("helpers", "what they do"),
    ("util", "what it does"),
    ("utils", "what they do"),
    ("living", "live"),
    ("doer", "executor"),
    ("earnest", "a dry run, or not"),
    ("lookers", "watchers"),
    ("believed", "observed"),
    ("bury", "reap"),
    ("wish", "settings, or desired"),
];

/// Names of other programs and of the system, in which such a word stands.
const NAMES_OF_OTHERS: &[&str] = &[
    "service manager",
    "session manager",
    "subscription manager",
    "subscription-manager",
    "virt-manager",
    "signal handlers",
    "signal handler",
    "progress handler",
    "set handler",
    "stdio handler",
    "network manager",
    "networkmanager",
    "bridge helpers",
    "http body util",
    "exception handler",
    "bridge-helper",
    "bridge helper",
    "hyper util",
    "futures util",
    "util-linux",
    "qemu-utils",
    "xz-utils",
];

/// Files in which such a word is the system's own term.
const EXCEPTIONS: &[(&str, &str)] = &[];

/// Every line with a word that is not used, of files that are named from the root on.
pub fn breaches<'a>(root: &Path, files: impl Iterator<Item = &'a str>) -> Result<Vec<String>> {
    let mut found = Vec::new();
    let mut needed = BTreeSet::new();
    for file in files.filter(|file| is_read(file)) {
        let path = root.join(file);
        if path.exists() {
            let text = std::fs::read_to_string(&path).with_context(|| format!("{file}: cannot read"))?;
            for (number, word, instead) in in_text(&text) {
                if EXCEPTIONS.contains(&(file, word)) {
                    needed.insert((file, word));
                } else {
                    found.push(format!("{file}:{number}: '{word}' is not used: {instead}"));
                }
            }
        }
    }
    let unneeded = EXCEPTIONS.iter().filter(|exception| !needed.contains(*exception));
    found.extend(unneeded.map(|(file, word)| format!("{file}: the exception for '{word}' is not needed")));
    Ok(found)
}

/// What we write: not what a study kept, and not this list.
fn is_read(file: &str) -> bool {
    let written = [".rs", ".md", ".json", ".toml"].iter().any(|end| file.ends_with(end));
    let kept =
        ["docs/studies/", "docs/benchmarks/", "fuzz/corpus/"].iter().any(|start| file.starts_with(start));
    written && !kept && file != "xtask/src/words.rs" && !file.ends_with("Cargo.toml")
}

/// Line, word and what to write instead, of each word that is not used.
fn in_text(text: &str) -> Vec<(usize, &'static str, &'static str)> {
    let mut found = Vec::new();
    for (number, line) in text.lines().enumerate() {
        let plain = NAMES_OF_OTHERS.iter().fold(split(line), |line, name| line.replace(name, " "));
        let words = plain.split(|c: char| !c.is_ascii_alphabetic());
        let hits: BTreeSet<_> =
            words.filter_map(|word| NOT_USED.iter().find(|(not, _)| *not == word)).collect();
        found.extend(hits.into_iter().map(|&(word, instead)| (number + 1, word, instead)));
    }
    found
}

/// In small letters, and the parts of a name apart.
fn split(line: &str) -> String {
    let mut out = String::with_capacity(line.len() + 16);
    let mut before = ' ';
    for c in line.chars() {
        if before.is_ascii_lowercase() && c.is_ascii_uppercase() {
            out.push(' ');
        }
        out.push(if c == '_' { ' ' } else { c.to_ascii_lowercase() });
        before = c;
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn such_a_word_is_found_in_names_and_sentences_and_not_in_names_of_others() {
        let text = "struct DiskManager;\nfn the_helper() {}\n// qemu-bridge-helper\n// It is living.\n// Spillway evicts";
        let found: Vec<_> = in_text(text).into_iter().map(|(line, word, _)| (line, word)).collect();
        assert_eq!(found, [(1, "manager"), (2, "helper"), (4, "living")]);
    }
}
