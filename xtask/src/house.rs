//! The habits of the project's files: each says at its top what it owns, and none grows without end.
//!
//! Invariant: only what git knows is looked at, so that nobody's unfinished file is a breach.

use anyhow::{Context, Result};
use std::path::Path;

/// Lines that a file may have without its tests. About 500 is what to aim at; this is the end.
const MOST_LINES: usize = 600;

/// Everything that breaks a habit.
pub fn breaches<'a>(root: &Path, files: impl Iterator<Item = &'a str>) -> Result<Vec<String>> {
    let mut found = Vec::new();
    for file in files {
        let path = root.join(file);
        // A file that is gone from the work tree and not yet from the index.
        if !path.exists() {
            continue;
        }
        let text =
            std::fs::read_to_string(&path).with_context(|| format!("{}: cannot read", path.display()))?;
        found.extend(of_file(file, &text));
    }
    Ok(found)
}

fn of_file(file: &str, text: &str) -> Vec<String> {
    let mut found = Vec::new();
    let first = text.lines().find(|l| !l.starts_with("#!"));
    if !first.is_some_and(|l| l.starts_with("//!")) {
        found.push(format!("{file}: does not begin by saying what it owns (//! ...)"));
    }
    let is_test = file.split('/').any(|part| part == "tests" || part == "tests.rs" || part == "benches");
    let lines = text.lines().take_while(|l| !l.starts_with("#[cfg(test)]")).count();
    if !is_test && lines > MOST_LINES {
        found.push(format!("{file}: {lines} lines without its tests, {MOST_LINES} are the most"));
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_says_what_it_owns() {
        assert!(of_file("a.rs", "//! Owns a.\n").is_empty());
        assert!(of_file("fuzz.rs", "#![no_main]\n//! Owns a.\n").is_empty());
        assert_eq!(of_file("a.rs", "use b;\n").len(), 1);
        assert_eq!(of_file("a.rs", "").len(), 1);
    }

    #[test]
    fn a_long_file_is_a_breach_unless_its_tests_make_it_long() {
        let long = format!("//! Owns a.\n{}", "fn f() {}\n".repeat(MOST_LINES));
        assert_eq!(of_file("src/a.rs", &long).len(), 1);
        assert!(of_file("crates/x/tests/a.rs", &long).is_empty());
        let tested = format!("//! Owns a.\n#[cfg(test)]\n{}", "fn f() {}\n".repeat(MOST_LINES));
        assert!(of_file("src/a.rs", &tested).is_empty());
    }
}
