//! The finished book: each link between its pages leads to a page and an anchor that are there.
//!
//! Invariant: what mdBook made is looked at, not what it was made of.

use anyhow::{Context, Result};
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

/// Pages that are made of all others, or for every place.
const MADE_OF_OTHERS: [&str; 3] = ["print.html", "404.html", "toc.html"];

/// Links of the pages below this folder that lead nowhere.
pub fn breaches(folder: &Path) -> Result<Vec<String>> {
    let mut pages = BTreeMap::new();
    let mut folders = vec![folder.to_owned()];
    while let Some(next) = folders.pop() {
        for entry in std::fs::read_dir(&next).with_context(|| format!("{}: cannot read", next.display()))? {
            let path = entry?.path();
            if path.is_dir() {
                folders.push(path);
            } else if path.extension().is_some_and(|e| e == "html") {
                let text = std::fs::read_to_string(&path)
                    .with_context(|| format!("{}: cannot read", path.display()))?;
                pages.insert(path, text);
            }
        }
    }
    let ids: BTreeMap<&PathBuf, BTreeSet<&str>> =
        pages.iter().map(|(path, text)| (path, values(text, " id=\"").collect())).collect();
    let mut found = Vec::new();
    for (path, text) in &pages {
        let name = path.strip_prefix(folder).unwrap_or(path).display().to_string();
        // Reports of studies are whole pages of their own.
        if MADE_OF_OTHERS.contains(&name.as_str())
            || name.starts_with("studies/") && name.ends_with("report.html")
        {
            continue;
        }
        for link in values(text, " href=\"").filter(|link| !link.contains(':')) {
            let (file, anchor) = link.split_once('#').unwrap_or((link, ""));
            let target =
                if file.is_empty() { path.clone() } else { plain(&path.with_file_name("").join(file)) };
            let is_there = match ids.get(&target) {
                Some(ids) => anchor.is_empty() || ids.contains(anchor),
                None => target.is_file(),
            };
            if !is_there {
                found.push(format!("{name}: {link} leads nowhere"));
            }
        }
    }
    Ok(found)
}

fn values<'a>(text: &'a str, attribute: &'a str) -> impl Iterator<Item = &'a str> {
    text.split(attribute).skip(1).filter_map(|rest| rest.split('"').next())
}

fn plain(path: &Path) -> PathBuf {
    let mut parts = PathBuf::new();
    for part in path.components() {
        match part {
            std::path::Component::ParentDir => {
                parts.pop();
            }
            std::path::Component::CurDir => {}
            other => parts.push(other),
        }
    }
    parts
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn links_that_lead_nowhere_are_found() {
        let dir = std::env::temp_dir().join(format!("book-{}", std::process::id()));
        std::fs::create_dir_all(dir.join("sub")).expect("a folder");
        let page = r##"<h1 id="x"></h1><a href="sub/b.html#y">b</a><a href="#x">x</a><a href="#z">z</a><a href="https://e.org/">e</a>"##;
        std::fs::write(dir.join("a.html"), page).expect("a page");
        std::fs::write(dir.join("sub/b.html"), r#"<a href="../a.html">a</a><a href="c.html">c</a>"#)
            .expect("a page");
        let found = breaches(&dir).expect("what was just written");
        std::fs::remove_dir_all(&dir).expect("what was just written");
        assert_eq!(found.len(), 3, "{found:#?}");
    }
}
