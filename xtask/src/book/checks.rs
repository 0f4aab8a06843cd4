//! What pages promise: each link inside of the project leads somewhere, each page of `docs/` is in the book.
//!
//! Invariant: nothing is fetched: what leads to other sites is not looked at.

use super::page::Page;
use super::{OTHER_PAGES, SUMMARY};
use anyhow::{Context, Result};
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

/// Documents of other projects that our sources name, which begin as ours do.
const OF_OTHERS: &str = "docs/interop/";

/// Tests there name pages that are not.
const OWN_SOURCES: &str = "xtask/";

/// Everything that is wrong in the pages, and in what other files say of them. `files` are all of the project's.
pub fn breaches(root: &Path, files: &[&str]) -> Result<Vec<String>> {
    let mut pages = BTreeMap::new();
    let mut found = Vec::new();
    for file in files.iter().copied().filter(|file| root.join(file).is_file()) {
        let read =
            || std::fs::read_to_string(root.join(file)).with_context(|| format!("{file}: cannot read"));
        match Path::new(file).extension().and_then(|e| e.to_str()) {
            Some("md") => {
                pages.insert(file, Page::new(&read()?));
            }
            // Comments and messages of programs, units and scripts.
            Some("rs" | "toml" | "service" | "yml" | "sh" | "pl") | None
                if is_text(root, file) && !file.starts_with(OWN_SOURCES) =>
            {
                let named = names(&read()?);
                let gone = named.into_iter().filter(|page| !root.join(page).is_file());
                found.extend(gone.map(|page| format!("{file}: names {page}, which is not there")));
            }
            _ => {}
        }
    }
    found.extend(links(&pages, |path| root.join(path).exists()));
    let summary = pages.get(SUMMARY).with_context(|| format!("{SUMMARY} is not there"))?;
    found.extend(summary_breaches(summary, pages.keys().copied()));
    Ok(found)
}

fn is_text(root: &Path, file: &str) -> bool {
    std::fs::read(root.join(file)).is_ok_and(|bytes| std::str::from_utf8(&bytes).is_ok())
}

/// Links that lead nowhere.
fn links(pages: &BTreeMap<&str, Page>, exists: impl Fn(&str) -> bool) -> Vec<String> {
    let mut found = Vec::new();
    for (name, page) in pages {
        for link in &page.links {
            let Some((path, anchor)) = link.target(name) else { continue };
            let to = &link.to;
            match (pages.get(path.as_str()), anchor) {
                (None, _) if !exists(&path) => found.push(format!("{name}: {to}: there is no {path}")),
                (None, Some(_)) => found.push(format!("{name}: {to}: only pages have anchors")),
                (Some(page), Some(anchor)) if !page.anchors.iter().any(|a| a == anchor) => {
                    found.push(format!("{name}: {to}: {path} has no heading of that name"));
                }
                _ => {}
            }
        }
    }
    found
}

/// Pages of `docs/` that the summary lacks, or has twice.
fn summary_breaches<'a>(summary: &Page, pages: impl Iterator<Item = &'a str>) -> Vec<String> {
    let mut listed = BTreeSet::new();
    let mut found = Vec::new();
    for (path, _) in summary.links.iter().filter_map(|link| link.target(SUMMARY)) {
        if !listed.insert(path.clone()) {
            found.push(format!("{SUMMARY}: {path} is there twice"));
        }
    }
    let others: Vec<&str> = OTHER_PAGES.iter().map(|(page, _)| *page).collect();
    let expected = |page: &&str| page.starts_with("docs/") && *page != SUMMARY || others.contains(page);
    let missing = pages.filter(expected).filter(|page| !listed.contains(*page));
    found.extend(missing.map(|page| format!("{SUMMARY}: {page} is not there")));
    found
}

/// Pages that a text names: of the sources, or of the folder that the package puts them in.
fn names(text: &str) -> BTreeSet<String> {
    let is_path = |c: char| c.is_ascii_alphanumeric() || "-_./".contains(c);
    let words = text.split(|c| !is_path(c)).map(|word| word.trim_end_matches('.'));
    // The package has the project's own folders below its own.
    let ours = words.filter_map(|word| match word.split_once("doc/spillway/") {
        Some((_, page)) => Some(page.to_owned()),
        None => word.find("docs/").map(|at| word[at..].to_owned()),
    });
    ours.filter(|page| page.ends_with(".md") && !page.starts_with(OF_OTHERS)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn links_that_lead_nowhere_are_found() {
        let pages = BTreeMap::from([
            (
                "docs/a.md",
                Page::new("# A\n\n[b](b.md#here) [c](b.md#there) [d](gone.md) ![e](x.svg) [f](x.svg#y)"),
            ),
            ("docs/b.md", Page::new("# B\n\n## Here\n\n[up](../README.md) [web](https://example.org/)")),
        ]);
        let found = links(&pages, |path| path == "docs/x.svg");
        assert_eq!(found.len(), 4, "{found:#?}");
    }

    #[test]
    fn each_page_is_in_the_summary_once() {
        let summary = Page::new("[a](a.md) [a](a.md) [arch](../ARCHITECTURE.md)");
        let pages = ["docs/a.md", "docs/b.md", "README.md", "ARCHITECTURE.md", "CHANGELOG.md", SUMMARY];
        let found = summary_breaches(&summary, pages.into_iter());
        assert_eq!(found.len(), 3, "{found:#?}");
    }

    #[test]
    fn pages_that_sources_name_are_known() {
        let text = "See docs/a.md, [b](../docs/how-to/b.md#x) and /usr/share/doc/spillway/docs/c.md. Not docs/interop/q.md.";
        let found = names(text);
        assert_eq!(found.into_iter().collect::<Vec<_>>(), ["docs/a.md", "docs/c.md", "docs/how-to/b.md"]);
    }
}
