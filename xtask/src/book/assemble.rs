//! The folder that mdBook builds the book from: the pages of `docs/`, those above it, and what is generated.
//!
//! Invariant: a link of a page leads to the same file as in the project, or is plain text where the book has none.

use super::page::Page;
use super::{OTHER_PAGES, commands, interface};
use anyhow::{Context, Result};
use std::path::Path;

/// Writes `OUT/book.toml` and `OUT/src`, which is made anew.
pub fn assemble(root: &Path, files: &[&str], programs: &Path, out: &Path) -> Result<()> {
    let src = out.join("src");
    if src.exists() {
        std::fs::remove_dir_all(&src).with_context(|| format!("{}: cannot remove", src.display()))?;
    }
    for file in files.iter().copied().filter(|file| root.join(file).is_file()) {
        let from = root.join(file);
        match (place(file), file) {
            (_, "docs/book.toml") => put(&out.join("book.toml"), &std::fs::read(&from)?)?,
            (Some(place), _) if file.ends_with(".md") => {
                let text = std::fs::read_to_string(&from).with_context(|| format!("{file}: cannot read"))?;
                let text = generated(root, programs, &with_links(file, &place, &text))?;
                put(&src.join(place), text.as_bytes())?;
            }
            (Some(place), _) => put(&src.join(place), &std::fs::read(&from)?)?,
            (None, _) => {}
        }
    }
    Ok(())
}

fn put(path: &Path, content: &[u8]) -> Result<()> {
    if let Some(folder) = path.parent() {
        std::fs::create_dir_all(folder).with_context(|| format!("{}: cannot make", folder.display()))?;
    }
    std::fs::write(path, content).with_context(|| format!("{}: cannot write", path.display()))
}

/// Where the book has a file of the project.
fn place(file: &str) -> Option<String> {
    let other = OTHER_PAGES.iter().find(|(page, _)| *page == file).map(|(_, place)| (*place).to_owned());
    other.or_else(|| file.strip_prefix("docs/").map(str::to_owned))
}

/// A page of the project with its links as they are in the book.
fn with_links(file: &str, place_of_page: &str, text: &str) -> String {
    let mut text = text.to_owned();
    let depth = place_of_page.matches('/').count();
    for link in Page::new(&text.clone()).links.iter().rev() {
        let Some((path, anchor)) = link.target(file) else { continue };
        let written = &text[link.range.clone()];
        let new = match place(&path) {
            Some(place) => {
                let place = if Path::new(&place).extension().is_none() {
                    format!("{place}/README.md")
                } else {
                    place
                };
                let anchor = anchor.map(|anchor| format!("#{anchor}")).unwrap_or_default();
                written.replacen(
                    &format!("]({})", link.to),
                    &format!("]({}{place}{anchor})", "../".repeat(depth)),
                    1,
                )
            }
            // Its words alone.
            None => match written.strip_prefix('[').and_then(|rest| rest.rfind("](").map(|end| &rest[..end]))
            {
                Some(words) => words.to_owned(),
                None => written.to_owned(),
            },
        };
        text.replace_range(link.range.clone(), &new);
    }
    text
}

/// Puts what is generated where a page asks for it.
fn generated(root: &Path, programs: &Path, text: &str) -> Result<String> {
    let mut text = text.to_owned();
    let document = || -> Result<serde_json::Value> {
        let path = root.join("docs/api/openapi.json");
        serde_json::from_slice(&std::fs::read(path)?).context("docs/api/openapi.json")
    };
    const COMMANDS: &str = "<!-- here the book has all commands -->";
    const INTERFACE: &str = "<!-- here the book has all routes and types -->";
    const SETTINGS: &str = "<!-- here the book has all settings -->";
    if text.contains(COMMANDS) {
        text = text.replace(COMMANDS, &commands::page(programs)?);
    }
    if text.contains(INTERFACE) {
        text = text.replace(INTERFACE, &interface::page(&document()?));
    }
    if text.contains(SETTINGS) {
        // Types stand on another page.
        let settings = interface::settings(&document()?, "CatalogSpec").replace("](#", "](api.md#");
        text = text.replace(SETTINGS, &settings);
    }
    Ok(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn links_lead_to_the_same_from_another_place() {
        let text =
            "[a](../counters.md#x) [b](../../ARCHITECTURE.md) [c](../../crates/core) ![d](004.svg) [e](#f)";
        let there = with_links("docs/design/001.md", "design/001.md", text);
        assert_eq!(
            there,
            "[a](../counters.md#x) [b](../architecture.md) c ![d](../design/004.svg) [e](../design/001.md#f)"
        );
        let architecture =
            with_links("ARCHITECTURE.md", "architecture.md", "[x](docs/design/) [y](docs/lab.md)");
        assert_eq!(architecture, "[x](design/README.md) [y](lab.md)");
    }
}
