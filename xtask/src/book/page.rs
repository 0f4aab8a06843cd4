//! A page of Markdown: its links, and the places in it that others may link to.
//!
//! Invariant: an anchor is here what GitHub and mdBook make of the same heading.

use pulldown_cmark::{Event, Options, Parser, Tag, TagEnd};
use std::collections::HashMap;
use std::ops::Range;
use std::path::{Component, Path, PathBuf};

/// A page.
#[derive(Debug, Default)]
pub struct Page {
    /// Names of its headings, as they stand behind the # of a link.
    pub anchors: Vec<String>,
    /// What it links to, pictures too.
    pub links: Vec<Link>,
}

/// A link as it is written.
#[derive(Debug)]
pub struct Link {
    /// Where it leads.
    pub to: String,
    /// Where it stands in the page: all of it, with its text.
    pub range: Range<usize>,
}

impl Page {
    /// Reads one.
    pub fn new(text: &str) -> Page {
        let mut page = Page::default();
        let mut heading: Option<String> = None;
        let mut seen: HashMap<String, u32> = HashMap::new();
        for (event, range) in Parser::new_ext(text, Options::ENABLE_TABLES).into_offset_iter() {
            match event {
                Event::Start(Tag::Heading { .. }) => heading = Some(String::new()),
                Event::End(TagEnd::Heading(_)) => {
                    let name = anchor(&heading.take().unwrap_or_default());
                    let times = seen.entry(name.clone()).or_default();
                    page.anchors.push(if *times == 0 { name } else { format!("{name}-{times}") });
                    *times += 1;
                }
                Event::Text(part) | Event::Code(part) => {
                    if let Some(heading) = &mut heading {
                        heading.push_str(&part);
                    }
                }
                Event::Start(Tag::Link { dest_url, .. }) => {
                    page.links.push(Link { to: dest_url.into_string(), range });
                }
                Event::Start(Tag::Image { dest_url, .. }) => {
                    page.links.push(Link { to: dest_url.into_string(), range });
                }
                _ => {}
            }
        }
        page
    }
}

impl Link {
    /// The file that it leads to, by its path in the repository, and the anchor there. None: it leads to another site.
    pub fn target(&self, from: &str) -> Option<(String, Option<&str>)> {
        if self.to.contains("://") || self.to.starts_with("mailto:") {
            return None;
        }
        let (path, anchor) = match self.to.split_once('#') {
            Some((path, anchor)) => (path, Some(anchor)),
            None => (self.to.as_str(), None),
        };
        if path.is_empty() {
            return Some((from.to_owned(), anchor));
        }
        let folder = Path::new(from).parent().unwrap_or(Path::new(""));
        Some((plain(&folder.join(path)), anchor))
    }
}

/// Without `.` and `..`, as far as they can be resolved.
fn plain(path: &Path) -> String {
    let mut parts = PathBuf::new();
    for part in path.components() {
        match part {
            Component::CurDir => {}
            Component::ParentDir if parts.file_name().is_some() => {
                parts.pop();
            }
            other => parts.push(other),
        }
    }
    parts.to_string_lossy().into_owned()
}

fn anchor(heading: &str) -> String {
    let kept = |c: char| match c {
        c if c.is_alphanumeric() || c == '_' || c == '-' => c.to_lowercase().next(),
        c if c.is_whitespace() => Some('-'),
        _ => None,
    };
    heading.trim().chars().filter_map(kept).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn anchors_are_as_github_and_mdbook_make_them() {
        let page = Page::new("# What `--x` does, and why not\n\n## A\n\n## A\n\n| [b](c.md#d) |\n| --- |\n");
        assert_eq!(page.anchors, ["what---x-does-and-why-not", "a", "a-1"]);
        assert_eq!(page.links.len(), 1);
    }

    #[test]
    fn links_are_resolved_from_their_page() {
        let to = |to: &str| Link { to: to.into(), range: 0..0 };
        let target = |link: &str| to(link).target("docs/how-to/a.md").map(|(p, a)| (p, a.map(str::to_owned)));
        assert_eq!(target("../b.md#c"), Some(("docs/b.md".into(), Some("c".into()))));
        assert_eq!(target("../../README.md"), Some(("README.md".into(), None)));
        assert_eq!(target("#x"), Some(("docs/how-to/a.md".into(), Some("x".into()))));
        assert_eq!(target("https://example.org/a.md"), None);
        // Out of the repository: no file is called so.
        assert_eq!(target("../../../x.md"), Some(("../x.md".into(), None)));
    }
}
