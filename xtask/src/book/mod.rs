//! The book: what `docs/` and the pages above it say of each other, and how mdBook gets its pages.
//!
//! Owns the checks of links, anchors and the summary, and the folder that a book is built from. Invariant: `docs/` itself is
//! never changed: what is generated exists in that folder only.

mod assemble;
mod checks;
mod commands;
mod html;
mod interface;
mod page;

pub use assemble::assemble;
pub use checks::breaches;
pub use html::breaches as html_breaches;

/// Pages outside of `docs/` that the book has, and their names there.
const OTHER_PAGES: [(&str, &str); 2] =
    [("ARCHITECTURE.md", "architecture.md"), ("CHANGELOG.md", "changelog.md")];
/// What a book's parts are listed in.
const SUMMARY: &str = "docs/SUMMARY.md";
